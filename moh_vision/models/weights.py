"""Open the models of runs, and load weights into the models of new runs."""

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.models import adapt_input_conv
from torch import Tensor, nn

from moh_vision.attention import ROUTERS, attention_layers
from moh_vision.common.cli import near_folder, refuse_missing_source
from moh_vision.common.errors import closest, nearest, reason_of
from moh_vision.common.imports import trained_with
from moh_vision.common.io import tensor_files
from moh_vision.common.wings import WINGS
from moh_vision.models.class_names import assumed_order, indices_of, listed, saved_with
from moh_vision.models.head_budgets import take_shared_heads
from moh_vision.models.mlp_groups import refuse_other_groups, start_mlp_routers
from moh_vision.models.outline import without_values
from moh_vision.models.vit import MoHVisionTransformer, has_routers, zero_missing_routers
from moh_vision.models.weight_files import (
    read_safetensors,
    read_tensors,
    refuse_not_finite,
    refuse_unpacking,
    said_of_first_weights,
    weights_file,
    weights_said,
)

# Arguments of `timm.create_model` that say which weights it reads.
FETCHING = (
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
)
# Prefixes of tensors with one row per class.
OF_CLASSES = ("head.", "head_dist.", "y_embedder.")
# Prefixes of tensors shaped by class count, image size or objective; these start fresh if the shape differs.
REMADE = (*OF_CLASSES, "pos_embed", "final_layer.linear.")
# Wing -> modules that register its models; `timm.list_models` filters names by module.
FAMILIES = dict(classification=("vit", "transnext"), diffusion=("dit",))


class OtherModel(ValueError):
    """The weights do not fit the model: they are another model's."""


@contextlib.contextmanager
def advise_on_model_name(name: str) -> Iterator[None]:
    """Turn `OtherModel` into a ValueError that also says which model was tried, and how to name another."""
    try:
        yield
    except OtherModel as error:
        raise ValueError(
            f"{error}; they were taken for model.name {name}, --model.name names another"
        ) from None


def create(name: str, wing: str | None, **arguments: Any) -> nn.Module:
    """Create a model with head routing through timm, of wing "classification", "diffusion" or either (None)."""
    check_name(name, wing)
    try:
        model = timm.create_model(name, **arguments)
    except TypeError as error:
        if "unexpected keyword" in str(error):
            raise ValueError(f"{name}: {error}; look at model.kwargs") from None
        raise
    except (RuntimeError, MemoryError) as error:
        # Sizes that make no model, or one that torch has no memory for.
        raise ValueError(f"{name} cannot be made: {reason_of(error)}") from None
    # Models from other packages need no base class of ours: look for the method.
    if not hasattr(model, "forward_routed"):
        raise ValueError(f"model.name '{name}' has no head routing (no forward_routed)")
    if hasattr(model, "get_classifier"):
        actual = "classification"
    else:
        actual = "diffusion"
    if wing not in (None, actual):
        raise ValueError(f"model.name '{name}' {_of_another_wing(actual, wing)}")
    return model


def check_side(model: nn.Module, side: int | None) -> None:
    """Refuse an image side that is not a multiple of the model's patch side.

    side: data.img_size; None: the classifier's own, which needs no check.
    """
    embed = getattr(model, "patch_embed", None)
    patch = getattr(embed, "patch_size", (1,))[0]
    if not side or side % patch == 0 or embed.dynamic_img_pad:
        return
    # The side that the model was made for is accepted, too.
    if side != model.pretrained_cfg["input_size"][-1]:
        raise ValueError(
            f"data.img_size {side}: not a multiple of {patch}, the side of a patch of the model"
        )


def check_name(name: str, wing: str | None, key: str = "model.name") -> None:
    """Refuse the name of an unknown model, of one without head routing, or of one of another wing.

    Args:
        wing: "classification", "diffusion", or None: either.
        key: key or option that gave the name, for the message.
    """
    problem = name_problem(name, wing)
    if problem:
        raise ValueError(f"{key} '{name}' {problem}")


def name_problem(name: str, wing: str | None) -> str:
    """Return why a model's name is refused, and similar names, as the end of a sentence; "" if it is accepted."""
    wings = image_models()
    fitting = [known for known in wings if wing in (None, wings[known])]
    base = name.split(".")[0]
    if not timm.is_model(base):
        problem = "is not a registered model"
    elif base in wings and base not in fitting:
        problem = _of_another_wing(wings[base], wing)
    elif timm.models.model_entrypoint(base).__module__.startswith("timm."):
        problem = "has no head routing"
        if wing == "classification":
            problem += "; a dense ViT is moh_vit_* with model.router dense"
    else:
        return ""
    # DiT-S/2 is dit_small_patch2.
    sizes = dict(s="small", b="base", l="large", xl="xlarge", h="huge")
    asked = re.sub(r"-(s|b|l|xl|h)/", lambda size: f"_{sizes[size[1]]}_patch", name.lower())
    return f"{problem}, {closest(asked, fitting)}"


def _of_another_wing(actual: str, needed: str) -> str:
    return f"is a {WINGS[actual].title} model, a {WINGS[needed].title} model is needed"


def image_models() -> dict[str, str]:
    """Return the wing of each of our image models: "classification" or "diffusion"."""
    return {
        name: wing
        for wing, modules in FAMILIES.items()
        for module in modules
        for name in timm.list_models(module=module)
    }


def from_run(path: str, wing: str | None, weights: str | None = None) -> tuple[nn.Module, dict]:
    """Return a run's model in eval mode, and its metadata, with the weights file under "weights"; wing None: any."""
    file = weights_file(path, weights)
    state, metadata = read_described(file, wing)
    if "architecture" not in metadata:
        raise ValueError(f"{file} was not written by a run (no architecture in its metadata)")
    _warn_of_first_weights(file, metadata)
    model = create(metadata["architecture"], wing, **metadata["arguments"])
    take_shared_heads(model, state)
    model.load_state_dict(state)
    return model.eval(), dict(metadata, weights=str(file))


def _warn_of_first_weights(file: Path, metadata: dict) -> None:
    warning = said_of_first_weights(file, metadata)
    if warning:
        logging.getLogger(__name__).warning(warning)


def described_by(path: str, wing: str | None) -> dict:
    """Return the metadata of a run's file or folder; {} for files without metadata."""
    file = weights_file(path)
    if file.suffix != ".safetensors" or not tensor_files(file):
        return {}
    _, metadata = read_described(file, wing)
    return metadata


def read_described(file: Path, wing: str | None) -> tuple[dict[str, Tensor], dict]:
    """Read tensors and metadata of a .safetensors file; check that both fit the `architecture` in the metadata."""
    state, metadata = read_safetensors(file)
    if "architecture" not in metadata:
        return state, metadata
    name = metadata["architecture"]
    arguments = metadata.get("arguments")
    classes = metadata.get("classes", [])
    config = metadata.get("config", {})
    if not isinstance(name, str) or not isinstance(arguments, dict) or not isinstance(config, dict):
        raise ValueError(
            f"{file}: architecture, arguments and config in its metadata are not a name and two mappings"
        )
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise ValueError(f"{file}: classes in its metadata are not a list of names")
    if "vocabularies" in metadata:
        actual = "text"
    else:
        actual = image_models().get(name, wing)
    if wing not in (None, actual):
        theirs = WINGS[actual]
        raise ValueError(
            f"{file} is of a {theirs.title} model, {name}, of {theirs.script}; give a run of {WINGS[wing].script}"
        )
    refuse_fetch(arguments, f"the metadata of {file}")
    _refuse_sizes(file, state, arguments)
    try:
        with without_values():
            outline = create(name, wing, **arguments)
            take_shared_heads(outline, state)
    except ValueError as error:
        hint = ""
        if arguments.get("router") not in (None, *ROUTERS):
            hint = trained_with(config)
        raise ValueError(f"{file}: {reason_of(error)}{hint}") from None
    except Exception as error:  # arguments of wrong types fail anywhere
        reason = f"{name} cannot be made of the arguments in its metadata ({reason_of(error)})"
        raise ValueError(f"{file}: {reason}") from None
    try:
        refuse_other_shapes(file, state, outline)
    except OtherModel as error:
        # A plain ValueError, to which `advise_on_model_name` adds no advice.
        raise ValueError(str(error)) from None
    return state, metadata


def refuse_fetch(arguments: dict, where: str) -> None:
    """Refuse arguments, found in `where`, by which timm would read other weights."""
    for key in FETCHING:
        if key in arguments:
            raise ValueError(f"{key} in {where} would read other weights than its own")


def _refuse_sizes(file: Path, state: dict[str, Tensor], arguments: dict) -> None:
    """Refuse numbers in a file's arguments that are too large for the file's tensors.

    Anyone can write metadata, so metadata alone must not decide how much memory is allocated.
    """
    largest = max((tensor.numel() for tensor in state.values()), default=0)
    # Every layer has a tensor of its own; the position table bounds the patches of a side, here of up to 64 pixels.
    limits = {"depth": len(state), "depths": len(state), "img_size": 64 * math.isqrt(largest)}
    for key, number in _numbers(arguments):
        if not abs(number) <= limits.get(key, largest):  # also true for NaN
            size = f"the largest of its {len(state)} tensors has {largest} numbers"
            raise ValueError(f"{file}: {key} {number} in its metadata cannot be; {size}")


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield (argument, number) for all numbers in arguments, nested ones too."""
    if isinstance(value, dict):
        for k, v in value.items():
            yield from _numbers(v, k)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _numbers(v, key)
    elif isinstance(value, (int, float)):
        yield key, value


def refuse_other_shapes(
    file: str | Path,
    state: dict[str, Tensor],
    model: nn.Module,
    may_lack: Callable[[str], bool] = lambda name: False,
) -> None:
    """Raise `OtherModel` unless a state dict has the model's names, shapes and types (any floats for floats).

    Raise a plain ValueError for NaN and infinity.

    Args:
        file: where the state dict is from, for the message.
        may_lack: says of a tensor's name whether the state dict may lack it.
    """
    parameters = model.state_dict()
    for name in [name for name in state if name in parameters]:
        tensor = state[name]
        needed = parameters[name]
        if tensor.shape != needed.shape:
            raise OtherModel(
                f"{file}: {name} has shape {list(tensor.shape)}, the model needs {list(needed.shape)}"
            )
        # `load_state_dict` would cast integers to floats, and drop the imaginary part of complex numbers.
        if tensor.is_floating_point() != needed.is_floating_point() or tensor.is_complex():
            raise OtherModel(f"{file}: {name} is of {tensor.dtype}, the model needs {needed.dtype}")
    missing = [name for name in parameters if name not in state and not may_lack(name)]
    unexpected = []
    for name in state:
        if name not in parameters:
            if len(name) > 100:  # files may hold any name
                name = name[:100] + "..."
            unexpected.append(name)
    if missing or unexpected:
        raise OtherModel(
            f"{file} does not fit {type(model).__name__}: "
            f"{len(missing)} tensors are missing {missing[:3]}, {len(unexpected)} are unexpected {unexpected[:3]}"
        )
    refuse_not_finite(file, state)


def to_validate(
    path: str, name: str, arguments: dict, img_size: int | None = None
) -> tuple[nn.Module, dict]:
    """Open a classifier to validate it.

    Args:
        path: a run, or weights that `init_from` takes.
        name, arguments: for `create`; not used if the path is a run, which has recorded its own.
        img_size: another image side, to which position tables are resized; None: the model's own.

    Returns:
        The model in eval mode, and metadata with architecture, arguments, classes (or None), weights (see
        `weights_said`) and brings_model: whether the path says which model it is of, as a run does.
    """
    if Path(path).exists():
        path = str(weights_file(path))
    metadata = described_by(path, "classification")
    brings_model = "architecture" in metadata
    if brings_model:
        name = metadata["architecture"]
        arguments = metadata["arguments"]
        _warn_of_first_weights(Path(path), metadata)
    arguments = dict(arguments)
    if img_size:
        arguments["img_size"] = img_size
    model = create(name, "classification", **arguments)
    check_side(model, img_size)
    try:
        taken = take_weights(model, path, "--checkpoint")
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    if taken.changed:
        raise ValueError(f"{path} does not hold all of {name}: {'; '.join(taken.changed)}")
    names = metadata.get("classes")
    if not names and Path(path).is_file():
        names = saved_with(Path(path))
    metadata.update(
        architecture=name,
        arguments=arguments,
        classes=names,
        weights=weights_said(path),
    )
    return model.eval(), dict(metadata, brings_model=brings_model)


def _fit_classes(
    state: dict[str, Tensor], classes: Sequence[str], theirs: Sequence[str] | None, source: str
) -> tuple[dict[str, Tensor], str]:
    """Reorder the classifier or label table in `state` by `classes`, or leave it out; also return a line on it.

    Args:
        classes: class names of the data, in order.
        theirs: class names of the source, in order; None: the source does not name its classes.
    """
    of_classes = [name for name in state if name.startswith(OF_CLASSES)]
    is_table = of_classes[0].startswith("y_embedder.")
    tensors = "label table" if is_table else "head"
    if theirs is None:
        theirs, assumed = assumed_order(source, classes)
        said = f"the {tensors} is kept; {assumed}"
        if is_table:
            said += '; its last row is taken for "no class"'
    else:
        said = (
            f"the {tensors} is put into the order of the data: {source} has its classes in another"
        )
    order = indices_of(classes, within=theirs)
    if order is None:
        different = (name for name, other in zip(classes, theirs) if name != other)
        odd = next(different, classes[-1])
        remaining = {name: tensor for name, tensor in state.items() if name not in of_classes}
        said = f"the {tensors} is made anew: class {odd!r} is not in the same place in {source}"
        return remaining, said
    rows = torch.tensor(order)
    state = dict(state)
    for name in of_classes:
        no_class = state[name][len(order) :]  # a label table's last row stays the last
        state[name] = torch.cat([state[name][rows], no_class])
    return state, said


def init_from(
    model: nn.Module,
    source: str,
    say: Callable[[str], None] = print,
    key: str = "init_from",
    classes: Sequence[str] | None = None,
) -> bool:
    """Load weights into a new model as `take_weights` does; return whether they are dense.

    Args:
        say: called with a line for every tensor that differs from the source's.
        source, key, classes: see `take_weights`.
    """
    taken = take_weights(model, source, key, classes)
    for change in (*taken.resized, *taken.changed):
        say(f"{key}: {change}")
    return taken.dense


def say_other_heads(
    model: nn.Module, source: str, trained: nn.Module | None, say: Callable[[str], None]
) -> None:
    """Tell the user if `init_from` has loaded weights of layers with other numbers of heads than the model's.

    Projections have the same shapes where H * D is the same, so that they load, but every head is another function.

    Args:
        model: has the weights.
        source: where they are from, for the line.
        trained: the model that they were trained in; its own weights are not used. None: the source does not say which.
        say: called with the line.
    """
    if trained is None:
        return
    theirs = [layer.num_heads for layer in attention_layers(trained)]
    ours = [layer.num_heads for layer in attention_layers(model)]
    if theirs != ours:
        say(
            f"init_from: {source} was trained with {_in_each(theirs)} heads, this run has {_in_each(ours)}"
        )


def _in_each(numbers: Sequence[int]) -> str:
    """Return the layers' numbers as text: one number if it is the same in all layers."""
    if len(set(numbers)) == 1:
        numbers = numbers[:1]
    return " ".join(map(str, numbers))


class TakenWeights(NamedTuple):
    """What `take_weights` loaded.

    Attributes:
        dense: whether the source has no routers.
        resized: a line for each tensor of the source that was resized.
        changed: lines on tensors that start fresh or were reordered.
    """

    dense: bool
    resized: list[str]
    changed: list[str]


def take_weights(
    model: nn.Module, source: str, key: str, classes: Sequence[str] | None = None
) -> TakenWeights:
    """Load weights into a new model.

    Some tensors may differ from the source's. A classifier or label table is reordered if the source has the same
    classes in another order, and starts fresh if it has other classes. Position tables and patch kernels are resized.
    A DiT's last layer starts fresh if learn_sigma differs, routers if the source has none; those of MLPs then start at
    zero, as `convert` makes them. The model takes the source's shared heads and groups but keeps its number of active ones.

    Args:
        source: a run, a file that `load_checkpoint` reads, or the name of a pretrained timm model.
        key: configuration key, for messages.
        classes: class names of the model; None: if the source has as many classes, they are assumed to be the same.
    """
    state, theirs = _read_source(source, key, with_classes=bool(classes))
    needed = model.state_dict()
    before = {name: list(tensor.shape) for name, tensor in state.items()}
    state = _translated(f"{key} {source}", state, model)
    _fit_colours(state, model)
    resized = []
    for name, tensor in state.items():
        shape = list(tensor.shape)
        if before.get(name, shape) != shape:
            resized.append(f"{name} is resized, {before[name]} -> {shape}")
    changed = []
    for name, tensor in needed.items():
        if name.startswith(REMADE) and name in state and state[name].shape != tensor.shape:
            left_out = state.pop(name)
            shapes = f"{list(left_out.shape)} -> {list(tensor.shape)}"
            changed.append(f"{name} is made anew, {shapes}")
    has_classes = any(name in needed and name.startswith(OF_CLASSES) for name in state)
    if classes and has_classes and theirs != list(classes):
        state, said = _fit_classes(state, classes, theirs, source)
        changed.append(said)
    refuse_other_shapes(
        f"{key} {source}", state, model, lambda name: ".router." in name or name.startswith(REMADE)
    )
    dense = not has_routers(state)
    model.load_state_dict(state, strict=False)
    fresh = [name for name in needed if ".router." in name and name not in state]
    started = start_mlp_routers(model, fresh)
    if len(fresh) > len(started):
        changed.append(f"{len(fresh) - len(started)} router tensors start fresh")
    if started:
        changed.append(f"{len(started)} router tensors of MLPs start at zero")
    return TakenWeights(dense, resized, changed)


def _read_source(
    source: str, key: str, with_classes: bool
) -> tuple[dict[str, Tensor], list[str] | None]:
    """Read the state dict and the class names of a source of weights; the names are None if it has none.

    Args:
        source, key: see `take_weights`.
        with_classes: whether to look for class names beside a file.
    """
    local = source.removeprefix("local-dir:")
    if tensor_files(Path(local)):
        file = weights_file(local)
        state = read_tensors(file)
        if not with_classes:
            return state, None
        return state, saved_with(file)
    if source.startswith("hf-hub:") or timm.is_model(source.split(".")[0]):
        try:
            network = timm.create_model(source, pretrained=True)
            names = listed(network.pretrained_cfg.get("label_names"), "label_names")
            return network.state_dict(), names
        except (RuntimeError, OSError) as error:
            # The model has no pretrained weights, or they cannot be downloaded.
            raise ValueError(f"{key} {source}: {reason_of(error)}{near_model(source)}") from None
    refuse_missing_source(key, source)
    nothing = "neither a run, a file of weights, nor a registered model name"
    raise FileNotFoundError(f"{key} {source}: {nothing}{near_model(source)}")


def _fit_colours(state: dict[str, Tensor], model: nn.Module) -> None:
    """Sum or repeat the colours of the first kernel in `state`, if the model takes images without three channels."""
    name = f"{getattr(model, 'pretrained_cfg', {}).get('first_conv')}.weight"
    needed = model.state_dict().get(name)
    if needed is None or name not in state:
        return
    kernel = state[name]
    if kernel.ndim == 4 and kernel.shape[1] == 3:
        state[name] = adapt_input_conv(needed.shape[1], kernel)


def near_model(source: str) -> str:
    """Return the end of a message that suggests a similar folder or model name; "" if there is none."""
    if ":" in source or "/" in source or Path(source).exists():
        return ""
    near = near_folder(source)
    if near is None:
        names = timm.list_models(pretrained="." in source)
        near = next(iter(nearest(source, names, 1)), source)
    if near == source:
        return ""
    return f", did you mean {near}?"


def keep_shared_heads(model: nn.Module, checkpoint: Path) -> None:
    """Give the model of a resumed run the shared heads of its checkpoint, which may be from `init_from`."""
    file = checkpoint / "model.safetensors"
    take_shared_heads(model, read_safetensors(file, lambda name: ".router." in name)[0])


def load_checkpoint(model: nn.Module, path: str | Path, weights: str = "ema") -> nn.Module:
    """Load weights of any known layout, published or ours, into a model; return the model.

    Reads .safetensors, PyTorch's .pt, .pth and .bin (no pickled objects but tensors and argparse.Namespace),
    the original ViTs' .npz, and folders of a run, diffusers model or pipeline. Layouts: ours, timm's ViTs,
    official TransNeXt, MoH-ViT, DiT and MoH-DiT, SiT (into a sit_*: the layout is the DiT's), JiT (into a jit_*), and
    diffusers' DiT (whose outputs are the same in a model with compat="diffusers"). With dense weights, routers that can start
    as plain attention do, see `Router.become_dense`. From weights with routers the model takes the shared heads, but keeps
    its number of active heads.

    Args:
        path: a file or folder as above.
        weights: "ema" (if there is one), "model", or "ema2", the second EMA in a file of JiT's training script.
    """
    file = weights_file(str(path), weights)
    if file.suffix == ".npz" and isinstance(model, MoHVisionTransformer) and file.is_file():
        return _load_npz(model, file)
    return load_tensors(model, read_tensors(file, weights), file)


def load_tensors(model: nn.Module, state: dict[str, Tensor], file: Path) -> nn.Module:
    """Load a state dict that was read from `file`, as `load_checkpoint` does."""
    if hasattr(model, "checkpoint_filter"):
        state = zero_missing_routers(_translated(str(file), state, model), model)
    refuse_other_shapes(file, state, model)
    model.load_state_dict(state)
    return model


def _translated(file: str, state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Translate weights of another layout to the model's names and shapes; the model takes their shared heads."""
    try:
        state = model.checkpoint_filter(state, model)
        take_shared_heads(model, state)
    except Exception as error:  # filters use shapes that are not checked yet
        raise OtherModel(f"{file}: {reason_of(error)}") from None
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        raise ValueError(f"{file}: {odd[0]} is no tensor")
    try:
        refuse_other_groups(model, state)
    except ValueError as error:
        raise OtherModel(f"{file}: {error}") from None
    return state


def _load_npz(model: MoHVisionTransformer, file: Path) -> nn.Module:
    """Load the file of an original ViT with timm's loader; if that fails, the model is left as it was."""
    refuse_unpacking(file)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        model.load_pretrained(str(file))
    except Exception as error:  # timm copies tensor by tensor, without checking the file first
        model.load_state_dict(before)
        raise ValueError(f"{file}: not the weights of such a ViT ({reason_of(error)})") from None
    return model
