"""Open a diffusion model from a run, a saved pipeline or published weights, and make a pipeline of it."""

import contextlib
import json
import math
from pathlib import Path

import timm
import torch
from diffusers.utils import logging
from torch import Tensor, nn

from moh_vision.common.cli import refuse_missing
from moh_vision.common.errors import reason_of
from moh_vision.common.io import run_of
from moh_vision.data.imagenet import unnamed_classes
from moh_vision.diffusion import MoHDiTPipeline, make_scheduler
from moh_vision.diffusion.config import SampleConfig
from moh_vision.diffusion.latents.vae import LatentSpace, fit_vae, load_vae, vae_fingerprint
from moh_vision.diffusion.sampling import Guidance, weak_predict
from moh_vision.diffusion.schedulers import sampler_for
from moh_vision.engine.ranks import say
from moh_vision.models.class_names import saved_with
from moh_vision.models.dit import arguments_of
from moh_vision.models.head_budgets import set_head_budget
from moh_vision.models.weight_files import read_tensors, weights_file, weights_said
from moh_vision.models.weights import (
    FAMILIES,
    check_name,
    create,
    from_run,
    image_models,
    load_tensors,
)

# Sizes are read from files that anybody may have written; these limits bound the memory of the model.
LARGEST = dict(img_size=1024, in_chans=1024)
MOST_CLASSES = 100_000
TABLE = "embedding_table.weight"  # the name of a label table ends so
# The name of a patch kernel ends so: in the official DiT, in diffusers', and in JiT.
KERNELS = ("x_embedder.proj.weight", "pos_embed.proj.weight", "x_embedder.proj1.weight")


def find_checkpoint(config: SampleConfig) -> None:
    """Refuse a --checkpoint that is neither a path that exists nor the name of a model with published weights.

    If --checkpoint is such a name, set `config.model` to it, unless another model is given.
    """
    name = config.checkpoint
    is_model_name = (
        image_models().get(name.split(".")[0]) == "diffusion" and not Path(name).exists()
    )
    if is_model_name and config.model is None:
        config.model = name
    fetches_weights = is_model_name and config.model == name
    if not fetches_weights:
        refuse_missing("--checkpoint", name)
    elif not timm.is_model_pretrained(name):
        raise ValueError(
            f"--checkpoint {name}: no such file or folder, and no weights of this model are published; "
            f"for a file of it: --checkpoint FILE --model {name}"
        )


def open_pipeline(config: SampleConfig) -> tuple[MoHDiTPipeline, dict]:
    """Open the pipeline of --checkpoint; also return the metadata of `open_model`."""
    path = Path(config.checkpoint)
    names = ("model_index.json", "config.json", "config.yaml")
    found = {name for name in names if (path / name).is_file()}
    if not config.model and "model_index.json" in found and config.weights != "ema":
        raise ValueError(
            f"--weights {config.weights} has no effect: {path} is a saved pipeline, which holds one kind"
        )
    # A folder with only a config.json, or a file of these types, does not say which model it holds.
    is_unnamed = found == {"config.json"} or path.suffix in (".pt", ".pth", ".bin")
    if not config.model and is_unnamed:
        raise ValueError(
            f"{path} does not say of which model it is: give --model, such as moh_dit_xlarge_patch2_90"
        )
    model, metadata = open_model(config.checkpoint, config.model, config.weights)
    return make_pipeline(config, model, metadata), metadata


def make_pipeline(config: SampleConfig, model: nn.Module, metadata: dict) -> MoHDiTPipeline:
    """Make a pipeline of a model with the VAE and scheduler that sample.py's keys ask for.

    Also sets the model's budgets if `config` has any, and resolves `config.sampler` and `config.guide_channels`.
    """
    vae = open_vae(config, model.config.in_channels, metadata["vae"])
    if vae is not None:
        # Decode one image at a time, so that memory does not grow with the batch.
        vae.enable_slicing()
    if config.head_budget is not None or config.mlp_budget is not None:
        set_head_budget(model, config.head_budget, mlp=config.mlp_budget)
    prediction = model.prediction
    config.sampler = sampler_for(prediction, config.sampler, "--sampler", draws_noise=True)
    guidance = Guidance(channels=config.guide_channels)
    config.guide_channels = guidance.guided(model.config.in_channels)
    on_pixels = vae is None  # only pixels have a range to clip to
    scheduler = make_scheduler(
        config.sampler, config.steps, model.config.learn_sigma, on_pixels, prediction.shift
    )
    label_drop = metadata["label_drop"]
    if config.cfg_scale != 1 and not metadata["classes"]:
        raise ValueError(
            f"--cfg-scale {config.cfg_scale:g} needs a run trained with classes: 1 is no guidance"
        )
    if config.cfg_scale != 1 and label_drop == 0:
        raise ValueError(
            f"--cfg-scale {config.cfg_scale:g} needs a run trained with label_drop above 0"
        )
    return MoHDiTPipeline(model, scheduler, vae, dict(enumerate(metadata["classes"])), label_drop)


def open_vae(config: SampleConfig, channels: int, trained):
    """Open the VAE of --vae, or else the VAE of the training; return None for a model of pixels.

    `channels` are the model's input channels; `trained` is `vae` in the metadata of `open_model`.
    """
    if trained is None:
        if config.vae and not config.model:
            raise ValueError(f"--vae {config.vae}: {config.checkpoint} was trained on pixels")
        if config.model and not config.vae and channels not in (1, 3):
            needed = f"{config.model} works on latents of {channels} channels"
            raise ValueError(f"--vae is needed, such as stabilityai/sd-vae-ft-ema: {needed}")
        if not config.vae:
            return None
        return load_vae(config.vae)
    of_pipeline = isinstance(trained, nn.Module)
    if of_pipeline and not config.vae:
        return trained
    if of_pipeline:
        trained = vars(LatentSpace.of(trained, f"{config.checkpoint}/vae"))
    space = LatentSpace(**trained)
    vae = load_vae(config.vae or space.name)
    if not config.vae and vae_fingerprint(vae) != space.sha256:
        raise ValueError(
            f"the VAE {space.name} is not the one of the run (sha256 {space.sha256[:12]}); "
            "--vae takes another on purpose"
        )
    # Use the scaling factor of the training, even if this VAE's own configuration has another one.
    return fit_vae(vae, config.vae or space.name, space)


def open_model(path: str, name: str | None = None, weights: str = "ema") -> tuple[nn.Module, dict]:
    """Open a model in eval mode, without a VAE; also return its metadata.

    In the metadata, `run` is the run's folder or None, and `vae` is the dict of a `LatentSpace`, the VAE of a
    pipeline, or None.

    Args:
        path: a run or a saved pipeline; with `name`, a file or folder of published weights, or `name` again to
            fetch them.
        name: name of the model whose weights `path` holds.
        weights: "ema", "ema2" or "model".
    """
    metadata = dict(label_drop=None, run=None, vae=None)
    if name:
        model, more = published_model(path, name, weights)
        metadata.update(more, architecture=name)
        file = weights_file(path, weights)
    elif (Path(path) / "model_index.json").is_file():
        model, more = _saved_pipeline(path)
        metadata.update(more)
        file = weights_file(path)
    else:
        model, more = from_run(path, "diffusion", weights)
        file = Path(more["weights"])
        metadata.update(more)
        metadata["run"] = run_of(file)
        metadata["label_drop"] = more["config"].get("label_drop")
    return model, dict(metadata, file=file, weights=weights_said(file, weights))


def _saved_pipeline(path: str) -> tuple[nn.Module, dict]:
    """Open the transformer of a saved pipeline in eval mode; also return its metadata."""
    logging.disable_progress_bar()  # of little use: a pipeline has only three parts
    try:
        pipe = MoHDiTPipeline.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: not a pipeline that can be read ({reason_of(error)})") from None
    model = pipe.transformer.eval()
    names = pipe.config.id2label or {}
    classes = [str(names.get(str(i), i)) for i in range(model.config.num_classes)]
    return model, dict(
        architecture=Path(path).name,
        classes=classes,
        vae=pipe.vae,
        label_drop=pipe.config.label_drop,
    )


def open_guide(key: str, guide: str | None, model: nn.Module, vae) -> nn.Module | str | None:
    """Open the weak model that guides a sampler, as `weak_predict` takes it; refuse one that does not fit `model`.

    Args:
        key: the key or option that `guide` was given with, for messages.
        guide: a path; "heads:SHARE" and None are returned as they are.
        model: the model to guide.
        vae: the VAE of `model`, as in the metadata of `open_model`.
    """
    opened = guide
    must_agree = []
    if guide and not guide.startswith("heads:"):
        refuse_missing(key, guide)
        opened, metadata = open_model(guide)
        opened.to(next(model.parameters()).device)
        must_agree = [("VAE", _sha256(metadata["vae"]), _sha256(vae))]
    weak_predict(model, opened, f"{key} {guide}", must_agree)  # called for its checks alone
    return opened


def _sha256(vae) -> str | None:
    """Return the hash of a VAE that is given as a module, as the dict of a `LatentSpace`, or as None."""
    if vae is None:
        return None
    if isinstance(vae, nn.Module):
        return vae_fingerprint(vae)
    return vae["sha256"]


def published_model(path: str, name: str, weights: str) -> tuple[nn.Module, dict]:
    """Open the model `name` in eval mode, with weights of a file or folder, or fetched if `path` is `name`.

    Also return metadata: the classes and, if the weights have no label "no class", label_drop 0.
    """
    if path == name and not Path(path).exists():
        if weights != "ema":
            raise ValueError(f"--weights {weights} has no effect: {name} fetches its EMA")
        try:
            model = create(name, "diffusion", pretrained=True).eval()
            return model, dict(classes=unnamed_classes(model.config.num_classes))
        except (ValueError, RuntimeError, OSError) as error:
            raise ValueError(
                f"--checkpoint {name}: its weights cannot be fetched ({reason_of(error)}); "
                f"for a file of them: --checkpoint FILE --model {name}"
            ) from None
    file = weights_file(path, weights)
    if weights == "model" and file.suffix == ".safetensors" and file.name != "model.safetensors":
        raise ValueError(f"--weights {weights} has no effect: {file} holds one kind")
    state = read_tensors(file, weights)
    sizes = _sizes(file, state)
    if arguments_of(name, {}).get("compat") == "sit":
        # SiT's files have the channels of a variance, which loading leaves out.
        sizes["learn_sigma"] = False
    state, metadata = _with_no_class(file, state)
    sizes["num_classes"] = len(metadata["classes"])
    try:
        check_name(name, "diffusion", "--model")
        model = load_tensors(create(name, "diffusion", **sizes).eval(), state, file)
    except ValueError as error:
        problem = str(error)
        fitting = _fitting(name, file, state, sizes)
        if fitting:
            problem += f"; --model {fitting[0]} fits"
        raise ValueError(problem) from None
    return model, metadata


def _with_no_class(file: Path, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict]:
    """Add the row for "no class" to label tables of official weights that lack it; also return metadata.

    The official DiT has that row only if labels were dropped in training (class_dropout_prob above 0). The file does
    not say whether they were; a classes.txt beside the file does, because it has one name for each class.
    """
    tables = {name: table for name, table in state.items() if name.endswith(TABLE)}
    rows = min((len(table) for table in tables.values() if table.ndim == 2), default=0)
    if not rows:
        return state, dict(classes=[])  # the file is damaged: `load_tensors` will refuse it
    if rows - 1 > MOST_CLASSES:
        raise ValueError(f"{file}: num_classes {rows - 1} is out of range: 1 to {MOST_CLASSES}")
    names = saved_with(file)
    if names is None and rows == 1:
        raise ValueError(
            f'{file}: the label table has one row, which may be a class or "no class"; a classes.txt beside it with the '
            "name of the class says that it is a class"
        )
    if names is None:
        classes = unnamed_classes(rows - 1)
        # Do not warn for ImageNet's 1,000 classes: they have names here, and all published models have "no class".
        if classes[0] == "0":
            say(
                f'{file}: the label table has {rows} rows, taken for {rows - 1} classes and "no class"; if it has no row '
                "of that, as after class_dropout_prob 0, a classes.txt beside it with all names says so"
            )
        return state, dict(classes=classes)
    if len(names) == rows - 1:
        return state, dict(classes=names)
    if len(names) != rows:
        raise ValueError(
            f"{file}: the label table has {rows} rows, but there are names of {len(names)} classes; expected {rows}, or "
            f'{rows - 1} and "no class"'
        )
    say(f'{file}: the label table has no row of "no class", so that there is no guidance')
    widened = {
        name: torch.cat([table, torch.zeros_like(table[:1])]) for name, table in tables.items()
    }
    return {**state, **widened}, dict(classes=names, label_drop=0.0)


def _fitting(name: str, file: Path, state: dict[str, Tensor], sizes: dict) -> list[str]:
    """Return the other registered models of the same size that the weights fit."""
    size = name.rpartition("_")[0]
    fitting = []
    for module in FAMILIES["diffusion"]:
        for candidate in timm.list_models(f"{size}_*", module=module):
            if candidate == name:
                continue
            with contextlib.suppress(ValueError):
                load_tensors(create(candidate, "diffusion", **sizes), state, file)
                fitting.append(candidate)
    return fitting


def _sizes(file: Path, state: dict[str, Tensor]) -> dict:
    """Read the sizes that `create` needs from the weights in `file`, in the official or diffusers' format."""
    sizes = {}

    def shape(ndim: int, *names: str) -> tuple | None:
        """Return the shape of the first tensor with `ndim` dimensions whose name ends with one of `names`."""
        for name, tensor in state.items():
            if name.endswith(names) and tensor.ndim == ndim:
                return tuple(tensor.shape)
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
    if "transformer_blocks.0.attn1.to_q.weight" in state and config.is_file():
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
