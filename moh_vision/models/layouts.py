"""What folders of timm and diffusers, and the tensors of released DiTs, say of the model that their weights are of.

Nothing here reads a tensor. Anyone may have written a file, so every size in it has a limit.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from timm.layers import to_2tuple
from timm.models import is_model_pretrained, load_model_config_from_hf, parse_model_name
from timm.models._hub import load_model_config_from_path
from torch import Tensor

from moh_vision.common.errors import reason_of
from moh_vision.models.class_names import listed, saved_with, unnamed_classes
from moh_vision.models.creation import arguments_of, refuse_fetch
from moh_vision.models.dit_weights import is_jits, patch_of_jit, settings_of

# These limits bound the memory of a model whose sizes are read from a file.
LARGEST = dict(img_size=1024, in_chans=1024)
MOST_CLASSES = 100_000
TABLE = "embedding_table.weight"  # the name of a label table ends so
# The name of a patch kernel ends so: in the official DiT, in diffusers', and in JiT.
KERNELS = ("x_embedder.proj.weight", "pos_embed.proj.weight", "x_embedder.proj1.weight")

Shapes = Mapping[str, Sequence[int]]


class Described(NamedTuple):
    """A model that is described without its weights.

    Attributes:
        architecture: name with which `timm.create_model` makes it.
        arguments: its arguments.
        pretrained_cfg: timm's, with class names as a list; {} for a registered name or a model of diffusers.
    """

    architecture: str
    arguments: dict
    pretrained_cfg: dict


def of_timm(source: str) -> Described:
    """Describe a model of timm: NAME, hf-hub:OWNER/NAME or local-dir:FOLDER, see `timm.models.save_for_hf`."""
    scheme, name = parse_model_name(source)
    arguments: dict = {}
    cfg: dict = {}
    if scheme is not None:
        if scheme == "local-dir":
            cfg, name, arguments = load_model_config_from_path(name)
        else:
            cfg, name, arguments = load_model_config_from_hf(name)
        refuse_fetch(arguments, "its config.json")
        cfg = {**cfg, "label_names": listed(cfg.get("label_names"), "label_names")}
        side, *further_sides = to_2tuple(arguments.get("img_size"))
        if side not in further_sides:
            raise ValueError(f"its images are of {arguments['img_size']}, expected a square")
        arguments = {key: value for key, value in arguments.items() if key != "img_size"}
        if side:
            arguments["img_size"] = side
        arguments = {
            "num_classes": cfg["num_classes"],
            "in_chans": cfg["input_size"][0],
            **arguments,
        }
        # With its tag, the name tells timm the mean and standard deviation of the model's images.
        if is_model_pretrained(f"{name}.{cfg.get('tag')}"):
            name = f"{name}.{cfg['tag']}"
    if not timm.is_model(name):
        raise ValueError(
            "neither a model of timm, hf-hub:OWNER/NAME, nor a folder with a config.json of timm"
        )
    return Described(name, arguments, cfg)


def is_timms_own(architecture: str) -> bool:
    """Return whether a registered model is timm's own, which has no head routing."""
    entrypoint = timm.models.model_entrypoint(architecture.split(".")[0])
    return entrypoint.__module__.startswith("timm.")


def of_diffusers(config: Path) -> Described:
    """Describe a DiT by the config.json that diffusers wrote: of its own class, or of ours."""
    from diffusers import DiTTransformer2DModel

    settings = json.loads(config.read_text())
    class_name = settings.get("_class_name")
    if class_name == "DiTTransformer2DModel":
        with torch.device("meta"):
            settings = settings_of(DiTTransformer2DModel.from_config(settings))
    elif class_name != "MoHDiTTransformer2DModel":
        raise ValueError(
            f"{config.name} is of {class_name!r}, allowed are DiTTransformer2DModel and ours"
        )
    timm_names = dict(
        hidden_size="embed_dim",
        num_layers="depth",
        num_attention_heads="num_heads",
        attention_head_dim="head_dim",
        sample_size="img_size",
        in_channels="in_chans",
    )
    arguments = {}
    for key, value in settings.items():
        # The number of output channels follows from learn_sigma.
        if key[0] != "_" and key != "out_channels":
            arguments[timm_names.get(key, key)] = value
    refuse_fetch(arguments, "its config.json")
    # The arguments replace all those of this variant.
    names = {"sit": "sit_small_patch2", "jit": "jit_base_patch16"}
    return Described(names.get(arguments.get("compat"), "dit_small_patch2"), arguments, {})


class LabelTable(NamedTuple):
    """The label table in a file of a released DiT.

    Attributes:
        classes: names of the classes; [] if the file has no table, because it is damaged.
        has_no_class: whether the last row is that of "no class".
        remark: a line on what was assumed; "" if nothing was.
    """

    classes: list[str]
    has_no_class: bool
    remark: str


def label_table(file: Path, shapes: Shapes) -> LabelTable:
    """Describe the label table in a file of a released DiT.

    The official DiT has a row for "no class" only if labels were dropped in training (class_dropout_prob above 0). The
    file does not say whether they were; a classes.txt beside the file does, because it has one name for each class.
    """
    tables = [shape for name, shape in shapes.items() if name.endswith(TABLE)]
    rows = min((shape[0] for shape in tables if len(shape) == 2), default=0)
    if not rows:
        return LabelTable([], True, "")  # loading will refuse the file
    if rows - 1 > MOST_CLASSES:
        raise ValueError(f"{file}: num_classes {rows - 1} is out of range: 1 to {MOST_CLASSES}")
    names = saved_with(file)
    if names is None and rows == 1:
        raise ValueError(
            f'{file}: the label table has one row, which may be a class or "no class"; a classes.txt beside it with the '
            "name of the class says that it is a class"
        )
    if names is None:
        remark = ""
        classes = unnamed_classes(rows - 1)
        # Say nothing of ImageNet's 1,000 classes: they have names here, and all published models have "no class".
        if classes[0] == "0":
            remark = (
                f'{file}: the label table has {rows} rows, taken for {rows - 1} classes and "no class"; if it has no row '
                "of that, as after class_dropout_prob 0, a classes.txt beside it with all names says so"
            )
        return LabelTable(classes, True, remark)
    if len(names) == rows - 1:
        return LabelTable(names, True, "")
    if len(names) != rows:
        raise ValueError(
            f"{file}: the label table has {rows} rows, but there are names of {len(names)} classes; expected {rows}, or "
            f'{rows - 1} and "no class"'
        )
    remark = f'{file}: the label table has no row of "no class", so that there is no guidance'
    return LabelTable(names, False, remark)


def with_no_class(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add a row of zeros for "no class" to the label tables of a released DiT that lack it."""
    state = dict(state)
    for name, table in state.items():
        if name.endswith(TABLE):
            state[name] = torch.cat([table, torch.zeros_like(table[:1])])
    return state


def dit_sizes(file: Path, shapes: Shapes) -> dict:
    """Return the sizes that `create` needs from the tensors in `file`, in the official, diffusers' or JiT's layout."""
    sizes = {}

    def shape(ndim: int, *names: str) -> tuple | None:
        """Return the shape of the first tensor with `ndim` dimensions whose name ends with one of `names`."""
        for name, found in shapes.items():
            if name.endswith(names) and len(found) == ndim:
                return tuple(found)
        return None

    kernel = shape(4, *KERNELS)  # [C, in, p, p]
    last = shape(2, "final_layer.linear.weight", "proj_out_2.weight")  # [p * p * out, C]
    positions = shape(3, "pos_embed")  # [1, N, C]
    if kernel:
        sizes["in_chans"] = kernel[1]
    if kernel and last:
        sizes["learn_sigma"] = last[0] == 2 * math.prod(kernel[1:])
    if kernel and positions:
        sizes["img_size"] = math.isqrt(positions[1]) * kernel[-1]
    read_from = dict.fromkeys(LARGEST, file)
    # diffusers' DiT does not save the table of positions; its config.json has the size.
    config = file.with_name("config.json")
    if "transformer_blocks.0.attn1.to_q.weight" in shapes and config.is_file():
        read_from["img_size"] = config
        try:
            sizes["img_size"] = json.loads(config.read_text())["sample_size"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{config}: no sample_size can be read ({reason_of(error)})") from None
    for key, largest in LARGEST.items():
        size = sizes.get(key, 1)
        if not isinstance(size, int) or not 1 <= size <= largest:
            raise ValueError(f"{read_from[key]}: {key} {size!r} is out of range: 1 to {largest}")
    return sizes


def arguments_of_jit(shapes: Shapes) -> dict:
    """Return the arguments of the model whose weights have the layout of JiT's released code; {} for another layout."""
    if not is_jits(shapes):
        return {}
    arguments = arguments_of(f"jit_base_patch{patch_of_jit(shapes)}", {})
    if not arguments:  # none of JiT's own sizes
        arguments = arguments_of("jit_base_patch16", {})
    del arguments["class_tokens_start"]  # other sizes have another one, which no file says
    return arguments
