"""Set a model's head budget, take it from weights, and record it where timm, diffusers or transformers saves it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from moh_vision.attention import (
    BudgetSpec,
    GroupMixtureMlp,
    HeadBudget,
    HeadMixtureAttention,
    RoutedLayer,
    attention_layers,
    default_budget,
    full_budget,
    mlp_layers,
    model_budgets,
    resolve_budget,
    set_budgets,
)
from moh_vision.attention.budget import (
    GROUPS,
    HEADS,
    Parts,
    change_budget,
    log,
    shape_of,
    shaped,
    warn_of_rounding,
)
from moh_vision.attention.model_heads import groups_at, heads_at, shaped_as, single_routed
from moh_vision.attention.routers import shared_share


def set_head_budget(
    model: nn.Module, spec: BudgetSpec | None = None, mlp: BudgetSpec | None = None
) -> nn.Module:
    """Set how many routed heads of a model run, and how many groups of its MLPs; shared ones and all weights stay.

    Args:
        model: any model with head routing.
        spec: the share of heads to be active, such as 0.5, "ramp:0.5" or "uniform:0.5", or a list of one (shared, routed)
            pair per layer; None: the heads stay as they are. A number keeps the shape of the model's present budget, "ramp" or
            "uniform"; converted models have "uniform". If the model was built from a list of pairs without a
            head_budget_shape, a number gives a ramp, and a warning is logged.
        mlp: the same for groups of the MLPs, of a model that was made or converted with an mlp_budget; None: they stay.

    Returns:
        The model. Rounding to whole heads, and layers left with one routed head, are logged as WARNING of
        "moh_vision.attention".

    Raises:
        ValueError: naming a layer that has no routed heads or too few.
    """
    groups = None
    if mlp is not None:
        # Before the heads are set, so that a wrong budget changes nothing.
        mlp, groups = groups_at(model, mlp)
    if spec is not None:
        spec = shaped_as(model, spec)
        budgets = heads_at(model, spec)
        set_budgets(attention_layers(model), budgets)
        warn_of_rounding(spec, sum(b.active for b in budgets), sum(b.heads for b in budgets))
        record_budget(model, spec)
    if groups is not None:
        set_budgets(mlp_layers(model), groups)
        active = sum(b.active for b in groups)
        warn_of_rounding(mlp, active, sum(b.heads for b in groups), GROUPS)
        model.mlp_budget_spec = mlp
        model.mlp_budget_shape = shape_of(mlp) or getattr(model, "mlp_budget_shape", None)
        _record(model, getattr(model, "head_budget_shape", None))
    if remark := single_routed(model):
        log.warning(remark)
    return model


def set_share(model: nn.Module, spec: BudgetSpec) -> nn.Module:
    """Set the share of heads and, where MLPs are routed, of their groups, as `budgets_at` reads it."""
    budgets = model_budgets(model)
    of_heads = None if budgets.chosen is budgets.groups else spec
    of_groups = spec if budgets.groups else None
    return set_head_budget(model, of_heads, mlp=of_groups)


def new_budgets(
    model: nn.Module,
    spec: BudgetSpec | None,
    shape: str | None,
    router: str,
    heads: Sequence[int],
    head_dim: Sequence[int],
) -> tuple[HeadBudget, ...]:
    """Resolve the head budget of a model that is being built, and store its spec and shape in the model.

    Args:
        model: gets the attributes `head_budget_spec` and `head_budget_shape`.
        spec: the constructor's head_budget; None: `default_budget` of the router.
        shape: the constructor's head_budget_shape.
        router: name in `moh_vision.attention.ROUTERS`.
        heads: number of heads of every layer.
        head_dim: width of a head in every layer.

    Returns:
        The budget of every layer.

    Raises:
        ValueError: see `resolve_budget`.
    """
    if spec is None:
        spec = default_budget(router)
    if spec is None:  # the router runs all heads
        spec = [(count, 0) for count in heads]
    return resolve_and_note(model, spec, shape, heads, head_dim, shared_share(router), HEADS)


def resolve_and_note(
    model: nn.Module,
    spec: BudgetSpec,
    shape: str | None,
    counts: Sequence[int],
    widths: Sequence[int],
    shared_share: float,
    parts: Parts,
) -> tuple[HeadBudget, ...]:
    """Resolve a budget of heads or of groups, and note in the model what it was made of.

    Args:
        model: gets the attributes `head_budget_spec` and `head_budget_shape`, or those of `mlp_budget`.
        spec, shape: as the user gives them.
        counts: number of parts of every layer.
        widths: of a part in every layer.
        shared_share, parts: see `resolve_budget`.
    """
    spec = shaped(spec, shape, parts)
    budgets = resolve_budget(
        spec, len(counts), counts, widths, shared_share=shared_share, parts=parts
    )
    setattr(model, f"{parts.argument}_spec", spec)
    setattr(model, f"{parts.argument}_shape", shape_of(spec) or shape)
    return budgets


def take_shared_heads(model: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """Give each layer as many shared heads as its router has in the weights `state_dict`, if they say so.

    The share of active heads stays, as if `set_head_budget` had set it after loading. Weights without
    routers change nothing. Call this before loading: changed layers get new, untrained routers.
    """
    _take_shared(model, state_dict, HeadMixtureAttention, HEADS)
    _take_shared(model, state_dict, GroupMixtureMlp, GROUPS)


def _take_shared(
    model: nn.Module, state_dict: dict[str, Tensor], layer_class: type, parts: Parts
) -> None:
    """`take_shared_heads` for the layers of one class, whose budgets count `parts`."""
    layers: list[RoutedLayer] = []
    trained: list[HeadBudget] = []
    for name, layer in model.named_modules():
        if not isinstance(layer, layer_class):
            continue
        prefix = f"{name}.router."
        of_router = {
            key.removeprefix(prefix): tensor
            for key, tensor in state_dict.items()
            if key.startswith(prefix)
        }
        shared = layer.router.shared_in(of_router)
        if shared is None:
            continue
        heads = layer.budget.heads
        layers.append(layer)
        trained.append(HeadBudget(heads, layer.budget.head_dim, shared, heads - shared))
    if all(layer.budget.shared == b.shared for layer, b in zip(layers, trained)):
        return
    spec = getattr(model, f"{parts.argument}_spec", None)
    if spec is None or isinstance(spec, (list, tuple)):
        spec = [(layer.budget.shared, layer.budget.routed) for layer in layers]
    set_budgets(layers, change_budget(spec, trained, parts=parts))
    _record(model, getattr(model, "head_budget_shape", None))


def run_all_heads(model: nn.Module) -> None:
    """Run all heads of a new model with dense weights; a fifth of them is shared, if its routers share heads.

    The shape of the model's budget stays.
    """
    layers = attention_layers(model)
    heads = [layer.num_heads for layer in layers]
    pairs = full_budget(heads, shares=layers[0].router.shared_share > 0)
    head_dim = [layer.head_dim for layer in layers]
    set_budgets(layers, resolve_budget(pairs, len(layers), heads, head_dim))
    record_budget(model, shaped(1.0, getattr(model, "head_budget_shape", None)))


def record_budget(model: nn.Module, spec: BudgetSpec, shape: str | None = None) -> None:
    """Store a budget's spec in a model, and the budget where the model's library saves it.

    Args:
        model: its layers have the budget already.
        spec: head_budget from which the budget was resolved.
        shape: "ramp" or "uniform", for shares that are set later, if spec is a list; None: the model keeps its shape.
    """
    model.head_budget_spec = spec
    _record(model, shape_of(spec) or shape or getattr(model, "head_budget_shape", None))


def _record(model: nn.Module, shape: str | None) -> None:
    """Write pairs and shape of a budget to where the model's library saves them."""
    config = getattr(model, "config", None)
    if hasattr(model, "register_to_config"):
        model.head_budget_shape = shape
        model.register_to_config(**saved_budget(model))  # diffusers
    elif hasattr(config, "moh") or hasattr(config, "layer_budgets"):
        _record_in_transformers(config, budget_pairs(model), shape)
    else:  # timm saves what `RecordedArguments` returns
        model.head_budget_shape = shape


def _record_in_transformers(config: Any, pairs: list[list[int]], shape: str | None) -> None:
    """Write pairs and shape into a language model's configuration, where the model also looks up its shape."""
    if hasattr(config, "layer_budgets"):
        config.layer_budgets = pairs
        config.head_budget_shape = shape
    elif config.moh is not None:  # a LLaMA with routed heads: a dense one has no budget
        config.moh = dict(config.moh, head_budget=pairs, head_budget_shape=shape)


class RecordedArguments:
    """Descriptor for `_model_args`, the arguments that timm saves with a model: adds the present head budget.

    `timm.create_model` sets the caller's arguments after the model is built. The caller's head_budget may be a
    share, which does not say how many shared heads the model took from its weights.
    """

    def __get__(self, model: nn.Module | None, owner: type) -> Any:
        if model is None:
            return self
        return {**vars(model).get("_model_args", {}), **saved_budget(model)}

    def __set__(self, model: nn.Module, args: dict) -> None:
        vars(model)["_model_args"] = args


def saved_budget(model: nn.Module) -> dict[str, Any]:
    """Return arguments that build a model with the present budgets: their pairs, and their shapes if they have any."""
    saved: dict[str, Any] = {"head_budget": budget_pairs(model)}
    mlps = mlp_layers(model)
    if mlps:
        saved["mlp_budget"] = [[layer.budget.shared, layer.budget.routed] for layer in mlps]
    for name in ("head_budget_shape", "mlp_budget_shape"):
        shape = getattr(model, name, None)
        if shape:
            saved[name] = shape
    return saved


def recorded_budget(arguments: Any) -> dict[str, Any]:
    """Return the entries of `saved_budget` from a model's saved arguments; {} if there is no head_budget."""
    if not isinstance(arguments, dict) or arguments.get("head_budget") is None:
        return {}
    names = ("head_budget", "head_budget_shape", "mlp_budget", "mlp_budget_shape")
    return {name: arguments[name] for name in names if name in arguments}


def budget_pairs(model: nn.Module) -> list[list[int]]:
    """Return [shared, routed] of every attention layer."""
    return [[layer.budget.shared, layer.budget.routed] for layer in attention_layers(model)]
