"""The head budget of a model that exists: changing it, reading it with weights, and recording it for saving."""

from typing import Any, Dict, List, Optional

from torch import Tensor, nn

from moh_vision.attention import (
    BudgetSpec,
    HeadBudget,
    HeadMixtureAttention,
    attention_layers,
    set_budgets,
    set_routed_heads,
)
from moh_vision.attention.budget import change_routed, log, warn_of_rounding
from moh_vision.attention.model_heads import single_routed
from moh_vision.attention.routers import MoHRouter


def set_head_budget(model: nn.Module, spec: BudgetSpec) -> nn.Module:
    """Change how many routed heads of a model run; its shared heads and all weights stay.

    Args:
        model: any model with head routing.
        spec: the share of all heads that is to be active, such as 0.5, "ramp:0.5" or "uniform:0.5", or a list with one
            (shared, routed) pair per layer.

    Returns:
        the model. What whole heads make of the share, and layers left with one routed head, are logged at level WARNING
        of "moh_vision.attention".

    Raises:
        ValueError: naming the layer, if it has no routed heads or too few.
    """
    set_routed_heads(model, spec)
    layers = attention_layers(model)
    warn_of_rounding(spec, sum(a.budget.active for a in layers), sum(a.budget.heads for a in layers))
    if remark := single_routed(layers):
        log.warning(remark)
    model.head_budget_spec = spec
    record_head_budget(model)
    return model


def take_shared_heads(model: nn.Module, state_dict: Dict[str, Tensor]) -> None:
    """Give the layers of a model as many shared heads as the MoH routers in its weights have.

    The share of active heads stays what the model was made with, as if `set_head_budget` had set it after loading.
    Weights without routers change nothing. Call it before loading: the new routers are untrained.

    Raises:
        ValueError: naming the layer, if the model's budget does not allow these shared heads.
    """
    layers, trained = [], []
    for name, layer in model.named_modules():
        if not isinstance(layer, HeadMixtureAttention) or not isinstance(layer.router, MoHRouter):
            continue
        b, routed = layer.budget, state_dict.get(f"{name}.router.routed.weight")
        shared = b.shared
        if routed is not None and len(routed) <= b.heads:  # else the weights do not fit, which loading reports
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
    """Descriptor for timm's `_model_args`, from which timm saves a model: the arguments, with the present head budget.

    `timm.create_model` writes the caller's arguments there last, whose head_budget may be a share. A share does not say
    which heads are shared in a model that took them from its weights.
    """

    def __get__(self, model: Optional[nn.Module], owner: type) -> Any:
        if model is None:
            return self
        return {**vars(model).get("_model_args", {}), "head_budget": budget_pairs(model)}

    def __set__(self, model: nn.Module, args: dict) -> None:
        vars(model)["_model_args"] = args


def budget_pairs(model: nn.Module) -> List[List[int]]:
    """[shared, routed] of every attention layer."""
    return [[layer.budget.shared, layer.budget.routed] for layer in attention_layers(model)]


def record_head_budget(model: nn.Module) -> None:
    """Write the budget into what diffusers' or transformers' saving takes the model's arguments from.

    timm's takes it from `RecordedArguments`.
    """
    if hasattr(model, "register_to_config"):
        model.register_to_config(head_budget=budget_pairs(model))
    elif getattr(getattr(model, "config", None), "moh", None) is not None:
        model.config.moh = dict(model.config.moh, head_budget=budget_pairs(model))
    elif hasattr(getattr(model, "config", None), "layer_budgets"):
        model.config.layer_budgets = budget_pairs(model)
