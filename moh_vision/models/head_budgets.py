"""Change a model's head budget, read it with weights, and record it for saving."""

from typing import Any

from torch import Tensor, nn

from moh_vision.attention import (
    BudgetSpec,
    HeadBudget,
    HeadMixtureAttention,
    attention_layers,
    set_budgets,
    set_routed_heads,
)
from moh_vision.attention.budget import change_routed, log, shape_of, warn_of_rounding
from moh_vision.attention.model_heads import shaped_as, single_routed
from moh_vision.attention.routers import MoHRouter


def set_head_budget(model: nn.Module, spec: BudgetSpec) -> nn.Module:
    """Set how many routed heads of a model run; shared heads and all weights stay.

    Args:
        model: any model with head routing.
        spec: the share of heads to be active, such as 0.5, "ramp:0.5" or "uniform:0.5", or a list of one
            (shared, routed) pair per layer. A number keeps the shape that the model's budget has: a ramp where it
            was made so, the same share in every layer where the model was converted or made so. A list that came
            without its head_budget_shape is taken for a ramp, which is logged.

    Returns:
        The model. Rounding to whole heads, and layers left with one routed head, are logged as WARNING of
        "moh_vision.attention".

    Raises:
        ValueError: naming a layer that has no routed heads or too few.
    """
    spec = shaped_as(model, spec)
    set_routed_heads(model, spec)
    layers = attention_layers(model)
    warn_of_rounding(
        spec, sum(a.budget.active for a in layers), sum(a.budget.heads for a in layers)
    )
    if remark := single_routed(layers):
        log.warning(remark)
    note_budget(model, spec)
    record_head_budget(model)
    return model


def note_budget(model: nn.Module, spec: BudgetSpec | None) -> None:
    """Note what a model's budget was made of, and its shape; with a list the model keeps the shape that it has.

    Language models keep the shape in their configuration.
    """
    shape = shape_of(spec) or getattr(model, "head_budget_shape", None)
    model.head_budget_spec = spec
    config = getattr(model, "config", None)
    if getattr(config, "moh", None) is not None:
        config.moh = dict(config.moh, head_budget_shape=shape)
    elif hasattr(config, "layer_budgets"):
        config.head_budget_shape = shape
    else:
        model.head_budget_shape = shape


def take_shared_heads(model: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """Give each layer as many shared heads as the MoH router in its weights has.

    The share of active heads stays, as if `set_head_budget` had set it after loading. Weights without
    routers change nothing. Call it before loading: the new routers are untrained.
    """
    layers, trained = [], []
    for name, layer in model.named_modules():
        if not isinstance(layer, HeadMixtureAttention) or not isinstance(layer.router, MoHRouter):
            continue
        b, routed = layer.budget, state_dict.get(f"{name}.router.routed.weight")
        shared = b.shared
        if routed is not None and len(routed) <= b.heads:  # otherwise loading reports the misfit
            shared = b.heads - len(routed)
        elif routed is None and f"{name}.router.shared.weight" in state_dict:
            shared = b.heads
        layers.append(layer)
        trained.append(HeadBudget(b.heads, b.head_dim, shared, b.heads - shared))
    if any(layer.budget.shared != b.shared for layer, b in zip(layers, trained)):
        spec = getattr(model, "head_budget_spec", None)
        if spec is None or isinstance(spec, (list, tuple)):  # TransNeXt's lists may be of stages
            spec = [(layer.budget.shared, layer.budget.routed) for layer in layers]
        set_budgets(layers, change_routed(spec, trained))
        record_head_budget(model)


class RecordedArguments:
    """Descriptor for timm's `_model_args`, the arguments saved with a model: adds the present head budget and its shape.

    `timm.create_model` writes the caller's arguments last. Their head_budget may be a share, without the
    shared heads that the model took from its weights.
    """

    def __get__(self, model: nn.Module | None, owner: type) -> Any:
        if model is None:
            return self
        return {**vars(model).get("_model_args", {}), **saved_budget(model)}

    def __set__(self, model: nn.Module, args: dict) -> None:
        vars(model)["_model_args"] = args


def budget_pairs(model: nn.Module) -> list[list[int]]:
    """[shared, routed] of every attention layer."""
    return [[layer.budget.shared, layer.budget.routed] for layer in attention_layers(model)]


def saved_budget(model: nn.Module) -> dict[str, Any]:
    """Arguments that make a model with the present budget: its pairs, and the shape that a share keeps."""
    shape = getattr(model, "head_budget_shape", None)
    return {
        "head_budget": budget_pairs(model),
        **({"head_budget_shape": shape} if shape else {}),
    }


def record_head_budget(model: nn.Module) -> None:
    """Write the budget into the arguments that diffusers or transformers save.

    timm saves those of `RecordedArguments`.
    """
    if hasattr(model, "register_to_config"):
        model.register_to_config(**saved_budget(model))
    elif getattr(getattr(model, "config", None), "moh", None) is not None:
        model.config.moh = dict(model.config.moh, head_budget=budget_pairs(model))
    elif hasattr(getattr(model, "config", None), "layer_budgets"):
        model.config.layer_budgets = budget_pairs(model)
