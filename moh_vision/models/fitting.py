"""Make the tensors of weights fit a model: translate their layout, resize, reorder, and refuse what does not fit."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from timm.models import adapt_input_conv
from torch import Tensor, nn

from moh_vision.attention import Router, attention_layers
from moh_vision.common.errors import reason_of
from moh_vision.models.class_names import assumed_order, indices_of
from moh_vision.models.head_budgets import take_shared_heads
from moh_vision.models.mlp_groups import refuse_other_groups
from moh_vision.models.weight_files import read_safetensors, refuse_not_finite, refuse_unpacking

# Prefixes of tensors with one row per class.
OF_CLASSES = ("head.", "head_dist.", "y_embedder.")
# Prefixes of tensors shaped by class count, image size or objective; these start fresh if the shape differs.
REMADE = (*OF_CLASSES, "pos_embed", "final_layer.linear.")


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


def other_heads(model: nn.Module, trained: nn.Module, source: str) -> list[str]:
    """Return a line if weights are of layers with other numbers of heads than the model's that has them now.

    Projections have the same shapes where H * D is the same, so that they load, but every head is another function.

    Args:
        trained: the model that the weights were trained in; its own weights are not used.
        source: where the weights are from, for the line.
    """
    theirs = [layer.num_heads for layer in attention_layers(trained)]
    ours = [layer.num_heads for layer in attention_layers(model)]
    if theirs == ours:
        return []
    return [f"{source} was trained with {_in_each(theirs)} heads, this model has {_in_each(ours)}"]


def _in_each(numbers: Sequence[int]) -> str:
    """Return the layers' numbers as text: one number if it is the same in all layers."""
    if len(set(numbers)) == 1:
        numbers = numbers[:1]
    return " ".join(map(str, numbers))


class TakenWeights(NamedTuple):
    """What `start_from` loaded.

    Attributes:
        dense: whether the source has no routers.
        resized: a line for each tensor of the source that was resized.
        changed: lines on tensors that start fresh or were reordered.
    """

    dense: bool
    resized: list[str]
    changed: list[str]


def start_from(
    model: nn.Module,
    state: dict[str, Tensor],
    named: str,
    classes: Sequence[str] | None = None,
    source: str = "",
    theirs: Sequence[str] | None = None,
) -> TakenWeights:
    """Load weights into a new model, from which its training starts.

    Some tensors may differ from the model's. A classifier or label table is reordered if the source has the same
    classes in another order, and starts fresh if it has other classes. Position tables and patch kernels are resized.
    A DiT's last layer starts fresh if learn_sigma differs. Routers that the source lacks start as `convert` makes them, see
    `zero_missing_routers`. The model takes the source's shared heads and groups but keeps its number of active ones.

    Args:
        state: tensors by name, in a layout that the model's `checkpoint_filter` knows.
        named: the key and the source, for messages.
        classes: class names of the model; None: if the source has as many classes, they are assumed to be the same.
        source, theirs: where the weights are from and their class names, needed with `classes`; theirs None: the
            source does not name its classes.
    """
    needed = model.state_dict()
    before = {name: list(tensor.shape) for name, tensor in state.items()}
    state = translated(named, state, model)
    _fit_colours(state, model)
    resized = []
    for name, tensor in state.items():
        shape = list(tensor.shape)
        if before.get(name, shape) != shape:
            resized.append(f"{name} is resized, {before[name]} -> {shape}")
    changed = []
    for name, tensor in needed.items():
        if name.startswith(REMADE) and name not in state:
            changed.append(f"{name} is made anew, the source has none")
        elif name.startswith(REMADE) and state[name].shape != tensor.shape:
            left_out = state.pop(name)
            shapes = f"{list(left_out.shape)} -> {list(tensor.shape)}"
            changed.append(f"{name} is made anew, {shapes}")
    has_classes = any(name in needed and name.startswith(OF_CLASSES) for name in state)
    if classes and has_classes and theirs != list(classes):
        state, said = _fit_classes(state, classes, theirs, source)
        changed.append(said)
    refuse_other_shapes(
        named, state, model, lambda name: ".router." in name or name.startswith(REMADE)
    )
    dense = not has_routers(state)
    with_routers = zero_missing_routers(state, model)
    model.load_state_dict(with_routers, strict=False)
    missing = [name for name in needed if ".router." in name and name not in state]
    as_dense = [
        name
        for name in missing
        if name in with_routers and _router_of(model, name).can_become_dense()
    ]
    if as_dense:
        changed.append(f"{len(as_dense)} router tensors start as a dense model")
    if len(missing) > len(as_dense):
        changed.append(f"{len(missing) - len(as_dense)} router tensors start fresh")
    return TakenWeights(dense, resized, changed)


def _router_of(model: nn.Module, name: str) -> Router:
    """Return the router that has the tensor `name`."""
    layer, _, _ = name.rpartition(".router.")
    return model.get_submodule(f"{layer}.router")


def _fit_colours(state: dict[str, Tensor], model: nn.Module) -> None:
    """Sum or repeat the colours of the first kernel in `state`, if the model takes images without three channels."""
    name = f"{getattr(model, 'pretrained_cfg', {}).get('first_conv')}.weight"
    needed = model.state_dict().get(name)
    if needed is None or name not in state:
        return
    kernel = state[name]
    if kernel.ndim == 4 and kernel.shape[1] == 3:
        state[name] = adapt_input_conv(needed.shape[1], kernel)


def has_routers(state_dict: dict[str, Tensor]) -> bool:
    """Return whether a state dict has routers; a plain ViT's has none."""
    return any(".attn.router." in name for name in state_dict)


def zero_missing_routers(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Add the model's routers to a state dict that has none, see `Router.become_dense`.

    Attention is then plain attention while all heads run, and an MLP is a plain MLP. Routers that cannot start so are added
    with the model's present weights. A state dict that has routers of attention gets no others of attention, and likewise
    of MLPs.
    """
    missing = [
        part
        for part in (".attn.router.", ".mlp.router.")
        if not any(part in name for name in state_dict)
    ]
    routers = {}
    for name, module in model.named_modules():
        if isinstance(module, Router) and any(f"{name}.".endswith(part) for part in missing):
            router = copy.deepcopy(module)
            if router.can_become_dense():
                router.become_dense()
            routers.update(router.state_dict(prefix=f"{name}."))
    return {**state_dict, **routers}


def keep_shared_heads(model: nn.Module, checkpoint: Path) -> None:
    """Give the model of a resumed run the shared heads of its checkpoint, which may be from `init_from`."""
    file = checkpoint / "model.safetensors"
    take_shared_heads(model, read_safetensors(file, lambda name: ".router." in name)[0])


def load_tensors(model: nn.Module, state: dict[str, Tensor], file: Path) -> nn.Module:
    """Load a whole state dict that was read from `file`, as `load_checkpoint` does."""
    if hasattr(model, "checkpoint_filter"):
        state = zero_missing_routers(translated(str(file), state, model), model)
    refuse_other_shapes(file, state, model)
    model.load_state_dict(state)
    return model


def translated(file: str, state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
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


def load_npz(model: nn.Module, file: Path) -> nn.Module:
    """Load the file of an original ViT with timm's loader; if that fails, the model is left as it was."""
    refuse_unpacking(file)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        model.load_pretrained(str(file))
    except Exception as error:  # timm copies tensor by tensor, without checking the file first
        model.load_state_dict(before)
        raise ValueError(f"{file}: not the weights of such a ViT ({reason_of(error)})") from None
    return model
