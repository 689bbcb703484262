"""Set a model's head budget, read it with weights, and record it where the model's library saves it."""

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
    change_budget,
    log,
    shape_of,
    shaped,
    warn_of_rounding,
)
from moh_vision.attention.model_heads import groups_at, heads_at, shaped_as, single_routed
from moh_vision.attention.routers import MoHRouter, shared_share


def set_head_budget(
    model: nn.Module, spec: BudgetSpec | None = None, mlp: BudgetSpec | None = None
) -> nn.Module:
    """Set how many routed heads of a model run, and how many groups of its MLPs; shared ones and all weights stay.

    Args:
        model: any model with head routing.
        spec: None: the heads stay as they are. Else the share of heads to be active, such as 0.5, "ramp:0.5" or "uniform:0.5", or a list of one
            (shared, routed) pair per layer. A number keeps the shape that the model's budget has: a ramp where it
            was made so, the same share in every layer where the model was converted or made so. A list that came
            without its head_budget_shape is taken for a ramp, which is logged.

        mlp: the same for groups of the MLPs, of a model that was made or converted with an mlp_budget; None: they stay.

    Returns:
        The model. Rounding to whole heads, and layers left with one routed head, are logged as WARNING of
        "moh_vision.attention".

    Raises:
        ValueError: naming a layer that has no routed heads or too few.
    """
    groups = None
    if mlp is not None:
        mlp, groups = groups_at(
            model, mlp
        )  # what is wrong with it is told before the heads are set
    if spec is not None:
        spec = shaped_as(model, spec)
        budgets = heads_at(model, spec)
        set_budgets(attention_layers(model), budgets)
        warn_of_rounding(spec, sum(b.active for b in budgets), sum(b.heads for b in budgets))
        if remark := single_routed(model):
            log.warning(remark)
        record_budget(model, spec)
    if groups is not None:
        set_budgets(mlp_layers(model), groups)
        active = sum(b.active for b in groups)
        warn_of_rounding(mlp, active, sum(b.heads for b in groups), "mlp_budget")
        model.mlp_budget_spec = mlp
        model.mlp_budget_shape = shape_of(mlp) or getattr(model, "mlp_budget_shape", None)
        _record(model, getattr(model, "head_budget_shape", None))
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
    """Resolve the head budget of a model that is being built, and note in the model what it was made of.

    Args:
        model: its attributes `head_budget_spec` and `head_budget_shape` are set.
        spec: the constructor's head_budget; None: `default_budget` of the router.
        shape: the constructor's head_budget_shape.
        router: name in `moh_vision.attention.ROUTERS`.
        heads: of every layer.
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
    spec = shaped(spec, shape)
    budgets = resolve_budget(spec, len(heads), heads, head_dim, shared_share=shared_share(router))
    model.head_budget_spec = spec
    model.head_budget_shape = shape_of(spec) or shape
    return budgets


def take_shared_heads(model: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """Give each layer as many shared heads as the MoH router in its weights has.

    The share of active heads stays, as if `set_head_budget` had set it after loading. Weights without
    routers change nothing. Call it before loading: the new routers are untrained.
    """
    _take_shared(model, state_dict, HeadMixtureAttention, "head_budget_spec")
    _take_shared(model, state_dict, GroupMixtureMlp, "mlp_budget_spec")


def _take_shared(
    model: nn.Module, state_dict: dict[str, Tensor], layer_class: type, attribute: str
) -> None:
    """`take_shared_heads` for the layers of one class, whose budget was made of a spec that the model has as `attribute`."""
    layers: list[RoutedLayer] = []
    trained: list[HeadBudget] = []
    for name, layer in model.named_modules():
        if not isinstance(layer, layer_class) or not isinstance(layer.router, MoHRouter):
            continue
        heads = layer.budget.heads
        shared = layer.budget.shared
        routed = state_dict.get(f"{name}.router.routed.weight")
        if routed is not None and len(routed) <= heads:  # otherwise loading reports the misfit
            shared = heads - len(routed)
        elif routed is None and f"{name}.router.shared.weight" in state_dict:
            shared = heads
        layers.append(layer)
        trained.append(HeadBudget(heads, layer.budget.head_dim, shared, heads - shared))
    if all(layer.budget.shared == b.shared for layer, b in zip(layers, trained)):
        return
    spec = getattr(model, attribute, None)
    if spec is None or isinstance(spec, (list, tuple)):
        spec = [(layer.budget.shared, layer.budget.routed) for layer in layers]
    set_budgets(layers, change_budget(spec, trained))
    _record(model, getattr(model, "head_budget_shape", None))


def run_all_heads(model: nn.Module) -> None:
    """Run all heads of a new model, as weights of a dense model were trained, and share a fifth of them.

    The shape of the model's budget stays.
    """
    layers = attention_layers(model)
    heads = [layer.num_heads for layer in layers]
    pairs = full_budget(heads, shares=layers[0].router.shared_share > 0)
    head_dim = [layer.head_dim for layer in layers]
    set_budgets(layers, resolve_budget(pairs, len(layers), heads, head_dim))
    record_budget(model, shaped(1.0, getattr(model, "head_budget_shape", None)))


def record_budget(model: nn.Module, spec: BudgetSpec, shape: str | None = None) -> None:
    """Record a model's present budget, for its library to save, and what it was made of.

    Args:
        model: its layers have the budget already.
        spec: what it was made of.
        shape: "ramp" or "uniform", which later shares keep, if spec is a list; None: the one that the model has.
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
    """Write pairs and shape into the configuration of a language model, from which the model reads its shape too."""
    if hasattr(config, "layer_budgets"):
        config.layer_budgets = pairs
        config.head_budget_shape = shape
    elif config.moh is not None:  # a dense LLaMA has no budget to be saved
        config.moh = dict(config.moh, head_budget=pairs, head_budget_shape=shape)


class RecordedArguments:
    """Descriptor of timm's `_model_args`, the arguments saved with a model, that adds the present head budget and its shape.

    `timm.create_model` writes the caller's arguments last. Their head_budget may be a share, without the
    shared heads that the model took from its weights.
    """

    def __get__(self, model: nn.Module | None, owner: type) -> Any:
        if model is None:
            return self
        return {**vars(model).get("_model_args", {}), **saved_budget(model)}

    def __set__(self, model: nn.Module, args: dict) -> None:
        vars(model)["_model_args"] = args


def saved_budget(model: nn.Module) -> dict[str, Any]:
    """Return arguments that make a model with the present budgets: their pairs, and the shapes that shares keep."""
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
    """Return what `saved_budget` wrote among the saved arguments of a model; empty without a head_budget."""
    if not isinstance(arguments, dict) or arguments.get("head_budget") is None:
        return {}
    names = ("head_budget", "head_budget_shape", "mlp_budget", "mlp_budget_shape")
    return {name: arguments[name] for name in names if name in arguments}


def budget_pairs(model: nn.Module) -> list[list[int]]:
    """Return [shared, routed] of every attention layer."""
    return [[layer.budget.shared, layer.budget.routed] for layer in attention_layers(model)]
