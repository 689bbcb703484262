"""Helpers that visit every attention layer of a model."""

from typing import List, Sequence

from torch import nn

from moh_vision.attention.budget import BudgetSpec, HeadBudget, change_routed
from moh_vision.attention.layer import HeadMixtureAttention


def attention_layers(model: nn.Module) -> List[HeadMixtureAttention]:
    """Every `HeadMixtureAttention` of a model, in order.

    Raises:
        ValueError: if there is none.
    """
    layers = [module for module in model.modules() if isinstance(module, HeadMixtureAttention)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no HeadMixtureAttention layer")
    return layers


def set_routed_heads(model: nn.Module, spec: BudgetSpec) -> None:
    """Change how many routed heads run, see `change_routed`. All layers or, if one refuses, none."""
    layers = attention_layers(model)
    groups = [getattr(layer.router, "group", 1) for layer in layers]
    set_budgets(layers, change_routed(spec, [layer.budget for layer in layers], groups))


def set_budgets(layers: Sequence[HeadMixtureAttention], budgets: Sequence[HeadBudget]) -> None:
    """Give layers other budgets. A layer with another number of shared heads gets a new, untrained router."""
    for layer, budget in zip(layers, budgets, strict=True):
        if budget.shared != layer.budget.shared:
            like = next(layer.parameters())
            router = type(layer.router)(layer.dim, budget, **layer.router_kwargs, device=like.device, dtype=like.dtype)
            layer.router = router.train(layer.training)
        layer.router.budget = budget


def init_routers(model: nn.Module) -> None:
    """Set what a router's paper prescribes: MoA's first weights, MAE's experts. Call it after initialising a model."""
    for module in model.modules():
        if isinstance(module, HeadMixtureAttention):
            for name in ("init_weights", "init_non_persistent_buffers"):
                getattr(module.router, name, lambda: None)()


def head_budget(model: nn.Module) -> dict:
    """The heads of every `HeadMixtureAttention` in a model, in order.

    Returns:
        dict(layers=[dict(name, heads, head_dim, shared, routed, active), ...], active, heads, share): the last three
        are head-weighted totals, the figure that the papers quote.

    Raises:
        ValueError: if the model has no such layer.
    """
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, HeadMixtureAttention):
            b = module.budget
            layers.append(
                dict(name=name, heads=b.heads, head_dim=b.head_dim, shared=b.shared, routed=b.routed, active=b.active)
            )
    if not layers:
        raise ValueError(f"{type(model).__name__} has no HeadMixtureAttention layer")
    active, heads = sum(layer["active"] for layer in layers), sum(layer["heads"] for layer in layers)
    return dict(layers=layers, active=active, heads=heads, share=active / heads)
