"""Helpers that visit every attention layer of a model: budgets, routers, and the heads that tokens run."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from moh_vision.attention.budget import BudgetSpec, HeadBudget, change_budget, log, shaped
from moh_vision.attention.layer import HeadMixtureAttention
from moh_vision.attention.routing import Routing


def named_layers(model: nn.Module) -> dict[str, HeadMixtureAttention]:
    """Return every `HeadMixtureAttention` of a model by its name, in order."""
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, HeadMixtureAttention)
    }
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no HeadMixtureAttention layer; moh_vision.convert gives a dense model some"
        )
    return layers


def attention_layers(model: nn.Module) -> list[HeadMixtureAttention]:
    """Return every `HeadMixtureAttention` of a model, in order."""
    return list(named_layers(model).values())


def layer_budgets(model: nn.Module) -> list[HeadBudget]:
    """Return the budget of every `HeadMixtureAttention` in a model, in order."""
    return [layer.budget for layer in attention_layers(model)]


def head_groups(model: nn.Module) -> list[int]:
    """Return how many heads each layer of a model chooses together, see `QueryNormRouter`."""
    return [getattr(layer.router, "group", 1) for layer in attention_layers(model)]


def budgets_at(model: nn.Module, spec: BudgetSpec) -> tuple[HeadBudget, ...]:
    """Return the budgets that a model's layers would have with another head_budget; the model is not changed.

    Shared heads stay, see `change_budget`, and a share without a shape keeps the shape of the model's, see `shaped_as`.

    Raises:
        ValueError: see `change_budget`.
    """
    return change_budget(shaped_as(model, spec), layer_budgets(model), head_groups(model))


def shaped_as(model: nn.Module, spec: BudgetSpec) -> BudgetSpec:
    """Add the shape of a model's budget, "ramp" or "uniform", to a share without one; see `shaped`.

    The model keeps its shape in `head_budget_shape`. If that is None, because its budget came as a list without a shape,
    the shape is taken to be "ramp", with a warning.
    """
    shape = getattr(model, "head_budget_shape", None)
    several = len(attention_layers(model)) > 1
    if shape is None and several and shaped(spec, "ramp") != spec:
        _warn_once_of_shape()
    return shaped(spec, shape or "ramp")


@functools.cache
def _warn_once_of_shape() -> None:
    log.warning(
        "the model does not say how its head_budget is spread over the layers (a list, without head_budget_shape): a share "
        "is taken for a ramp; uniform:S is the same share in every layer"
    )


def set_budgets(layers: Sequence[HeadMixtureAttention], budgets: Sequence[HeadBudget]) -> None:
    """Give layers other budgets. A layer whose number of shared heads changes gets a new, untrained router."""
    for layer, budget in zip(layers, budgets, strict=True):
        if budget.shared != layer.budget.shared:
            layer.router = new_router(layer, budget)
        layer.router.budget = budget


def new_router(layer: HeadMixtureAttention, budget: HeadBudget) -> nn.Module:
    """Make an untrained router for a layer with another budget; class, options, device, dtype and mode stay the same."""
    weight = next(layer.parameters())
    router_class = type(layer.router)
    router = router_class(
        layer.dim, budget, **layer.router_kwargs, device=weight.device, dtype=weight.dtype
    )
    return router.train(layer.training)


def single_routed(model: nn.Module) -> str | None:
    """Return a warning about layers with one routed head, whose renormalised weight is constant; None if there are none.

    This concerns only MoH's released gates: the paper's gates are not renormalised, and MoA detaches the divisor.
    """
    single = [
        index
        for index, layer in enumerate(attention_layers(model))
        if layer.budget.routed == 1 and getattr(layer.router, "released", False)
    ]
    if not single:
        return None
    return f"one routed head in layers {single}: only the balance loss trains those routers"


@contextmanager
def running(model: nn.Module, budgets: Sequence[HeadBudget]) -> Iterator[None]:
    """Set these budgets inside a `with` block, see `set_budgets`; restore the model's own budgets afterwards."""
    layers = attention_layers(model)
    before = layer_budgets(model)
    set_budgets(layers, budgets)
    try:
        yield
    finally:
        set_budgets(layers, before)


def init_routers(model: nn.Module) -> None:
    """Initialise routers as their papers prescribe (zero weights of MoA and "gated", MAE's experts). Call it after initialising the model."""
    for module in model.modules():
        if isinstance(module, HeadMixtureAttention):
            for name in ("init_weights", "init_non_persistent_buffers"):
                initialise = getattr(module.router, name, None)
                if initialise is not None:
                    initialise()


def head_budget(model: nn.Module) -> dict:
    """Return the number of heads, shared, routed and active, of every `HeadMixtureAttention` in a model, in order.

    Returns:
        dict(layers=[dict(name, heads, head_dim, shared, routed, active), ...], active, heads, share). The last three are
        for the whole model; share, active heads over all heads, is the figure that the papers quote.
    """
    budgets = {name: layer.budget for name, layer in named_layers(model).items()}
    layers = [
        dict(name=name, **asdict(budget), active=budget.active) for name, budget in budgets.items()
    ]
    active = sum(layer["active"] for layer in layers)
    heads = sum(layer["heads"] for layer in layers)
    return dict(layers=layers, active=active, heads=heads, share=active / heads)


@torch.no_grad()
def token_heads(model: nn.Module, *args: Any, **kwargs: Any) -> list[Routing]:
    """Return the heads and gates of each token in one call `model(*args, **kwargs)`.

    Hooks on the routers collect their answers during the call, and are removed after it. The model runs in its present
    mode: use eval mode to see what a trained model does, because in training mode dropout, noise and drawn experts also
    change the choice.

    Args:
        model: any model with `HeadMixtureAttention` layers.
        *args, **kwargs: its inputs, without a cache.

    Returns:
        The `Routing` of each layer, in the order of `attention_layers`. Unlike in a router's own answer, `active` (bool) and
        `weights` (the gates, 0 where a head does not run) are both [B, N, H] and never None: a choice for the whole
        sequence is repeated for each token, and a layer without routing runs all heads with gate 1. Shared heads come
        first among the H. Class and register tokens are among the N tokens, in the order of the model; a map [height,
        width] counts row by row.
    """
    names = {layer: name for name, layer in named_layers(model).items()}
    layer_of = {layer.router: layer for layer in names}
    routings: dict[nn.Module, list[Routing]] = {layer: [] for layer in names}
    sizes: dict[nn.Module, tuple[int, int]] = {}  # B and N of each layer's call

    def routed(router: nn.Module, _: Any, routing: Routing) -> None:
        routings[layer_of[router]].append(routing)

    def attended(layer: nn.Module, _: Any, output: tuple[Tensor, Any]) -> None:
        y = output[0]
        sizes[layer] = (len(y), y.shape[1:-1].numel())

    with ExitStack() as hooks:
        for layer in names:
            hooks.enter_context(layer.router.register_forward_hook(routed))
            hooks.enter_context(layer.register_forward_hook(attended))
        model(*args, **kwargs)
    for layer, answers in routings.items():
        if len(answers) != 1:
            raise ValueError(
                f"{names[layer]} routes {len(answers)} times in this call, expected once"
            )
    return [
        of_every_token(answers[0], (*sizes[layer], layer.num_heads))
        for layer, answers in routings.items()
    ]


def of_every_token(routing: Routing, shape: tuple[int, int, int]) -> Routing:
    """Expand the weights and active heads of a router's answer to `shape`, (B, N, H)."""
    weights = routing.weights
    active = routing.active
    if weights is None:
        weights = torch.ones(shape, device=routing.stats.counts.device)
    if active is None:  # all heads are computed; those of weight 0 do not change the output
        active = weights > 0
    return Routing(weights.expand(shape), active.expand(shape), routing.stats)
