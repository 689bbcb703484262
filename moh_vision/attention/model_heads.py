"""Helpers that visit every attention layer of a model: budgets, routers, and the heads that tokens run."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moh_vision.attention.budget import (
    GROUPS,
    BudgetSpec,
    HeadBudget,
    change_budget,
    log,
    shaped,
)
from moh_vision.attention.layer import HeadMixtureAttention
from moh_vision.attention.mlp import GroupMixtureMlp
from moh_vision.attention.routed_layer import RoutedLayer, routed_layers
from moh_vision.attention.routers.base import Router
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


def mlp_layers(model: nn.Module) -> list[GroupMixtureMlp]:
    """Return every `GroupMixtureMlp` of a model, in order; none where the MLPs are dense."""
    return [module for module in model.modules() if isinstance(module, GroupMixtureMlp)]


def routers_of(model: nn.Module) -> list[Router]:
    """Return the router of every routed layer of a model, of attention and of MLPs, in the order of `model.modules()`."""
    return [layer.router for layer in routed_layers(model)]


class ModelBudgets(NamedTuple):
    """What the routed layers of a model run."""

    heads: tuple[HeadBudget, ...]  # of every attention layer, in order
    groups: tuple[HeadBudget, ...] = ()  # of every routed MLP, in order

    @property
    def chosen(self) -> tuple[HeadBudget, ...]:
        """The budgets of what is chosen: heads, or the groups of MLPs in a model that runs all its heads."""
        if self.groups and not any(budget.candidates for budget in self.heads):
            return self.groups
        return self.heads

    @property
    def share(self) -> float:
        """Active heads over all heads; of groups in a model that runs all its heads."""
        return active_share(self.chosen)

    @property
    def parts(self) -> str:
        """Say which parts another share changes."""
        if not self.groups:
            return "heads"
        if self.chosen is self.groups:
            return "groups of MLPs"
        return "heads and groups of MLPs"

    def __str__(self) -> str:
        texts = [f"{100 * active_share(self.heads):.1f} % of the heads"]
        if self.groups:
            texts.append(f"{100 * active_share(self.groups):.1f} % of the MLPs' groups")
        return " and ".join(texts)


def active_share(budgets: Sequence[HeadBudget]) -> float:
    """Return active heads over all heads of layers."""
    return sum(b.active for b in budgets) / sum(b.heads for b in budgets)


def model_budgets(model: nn.Module) -> ModelBudgets:
    """Return the budget of every routed layer of a model."""
    heads = tuple(layer.budget for layer in attention_layers(model))
    return ModelBudgets(heads, tuple(layer.budget for layer in mlp_layers(model)))


def head_groups(model: nn.Module) -> list[int]:
    """Return how many heads each layer of a model chooses together, see `QueryNormRouter`."""
    return [layer.router.group for layer in attention_layers(model)]


def budgets_at(model: nn.Module, spec: BudgetSpec) -> ModelBudgets:
    """Return the budgets that a model's layers would have at another share; the model is not changed.

    A share is that of the heads and, where MLPs are routed, of their groups. Shared ones stay, see `change_budget`, and a
    share without a shape keeps the shape of the model's, see `shaped_as`. A list of pairs is of the heads alone.

    Raises:
        ValueError: see `change_budget`.
    """
    heads, groups = model_budgets(model)
    if groups and not isinstance(spec, (list, tuple)):
        groups = groups_at(model, spec)[1]
        all_heads_run = not any(budget.candidates for budget in heads)
        if all_heads_run:
            return ModelBudgets(heads, groups)
    return ModelBudgets(heads_at(model, spec), groups)


def heads_at(model: nn.Module, spec: BudgetSpec) -> tuple[HeadBudget, ...]:
    """Return the budgets that a model's attention layers would have with another number of routed heads."""
    heads = model_budgets(model).heads
    return change_budget(shaped_as(model, spec), heads, head_groups(model))


def groups_at(model: nn.Module, spec: BudgetSpec) -> tuple[BudgetSpec, tuple[HeadBudget, ...]]:
    """Return a spec with the shape of a model's mlp_budget, and the budgets that its routed MLPs would have.

    Raises:
        ValueError: for dense MLPs, and as `change_budget`.
    """
    groups = model_budgets(model).groups
    if not groups:
        raise ValueError(
            f"mlp_budget {spec!r}: the MLPs of {type(model).__name__} are dense; make it with mlp_budget, or convert a dense model "
            "with moh_vision.convert(model, scope='sample', mlp_budget=...)"
        )
    spec = shaped(spec, getattr(model, "mlp_budget_shape", None) or "ramp", GROUPS)
    return spec, change_budget(spec, groups, parts=GROUPS)


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


def set_budgets(layers: Sequence[RoutedLayer], budgets: Sequence[HeadBudget]) -> None:
    """Give layers other budgets. A layer whose number of shared heads changes gets a new, untrained router, see `Router.fits`."""
    for layer, budget in zip(layers, budgets, strict=True):
        if not layer.router.fits(budget):
            layer.router = new_router(layer, budget)
        layer.router.budget = budget


def new_router(layer: RoutedLayer, budget: HeadBudget) -> Router:
    """Make an untrained router for a layer with another budget; class, options, device, dtype and mode stay the same."""
    weight = next(layer.parameters())
    router_class = type(layer.router)
    router = router_class(
        layer.dim, budget, **layer.router_kwargs, device=weight.device, dtype=weight.dtype
    )
    return router.train(layer.training)


def single_routed(model: nn.Module) -> str | None:
    """Return a warning about layers with one routed head, or MLPs with one routed group; None if there are none.

    The renormalised weight of a single choice is constant. This concerns only MoH's released gates: the paper's gates are
    not renormalised, and MoA detaches the divisor.
    """
    found = []
    for words, layers in (
        ("head in layers", attention_layers(model)),
        ("group in MLPs", mlp_layers(model)),
    ):
        single = [index for index, layer in enumerate(layers) if layer.router.only_balance_trains()]
        if single:
            found.append(f"one routed {words} {single}")
    if not found:
        return None
    return f"{' and '.join(found)}: only the balance loss trains those routers"


@contextmanager
def running(model: nn.Module, budgets: ModelBudgets) -> Iterator[None]:
    """Set these budgets inside a `with` block, see `set_budgets`; restore the model's own budgets afterwards."""
    layers = [*attention_layers(model), *mlp_layers(model)]
    before = [layer.budget for layer in layers]
    set_budgets(layers, [*budgets.heads, *budgets.groups])
    try:
        yield
    finally:
        set_budgets(layers, before)


def init_routers(model: nn.Module) -> None:
    """Initialise routers as their papers prescribe (zero weights of MoA and "gated", MAE's experts). Call it after initialising the model."""
    for router in routers_of(model):
        router.init_weights()
        router.init_non_persistent_buffers()


def head_budget(model: nn.Module) -> dict:
    """Return the number of heads, shared, routed and active, of every `HeadMixtureAttention` in a model, in order.

    Returns:
        dict(layers=[dict(name, heads, head_dim, shared, routed, active), ...], active, heads, share). The last three are
        for the whole model; share, active heads over all heads, is the figure that the papers quote. Where groups of MLPs
        are routed, the entry "mlp" is such a dict of them: its "heads" are groups, and "head_dim" is the width of one.
    """
    budget = _totals(named_layers(model))
    mlps = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, GroupMixtureMlp)
    }
    if mlps:
        budget["mlp"] = _totals(mlps)
    return budget


def _totals(layers: Mapping[str, RoutedLayer]) -> dict:
    """Return the budgets of layers by their names, and the totals of all: see `head_budget`."""
    rows = []
    for name, layer in layers.items():
        rows.append(dict(name=name, **asdict(layer.budget), active=layer.budget.active))
    active = sum(row["active"] for row in rows)
    heads = sum(row["heads"] for row in rows)
    return dict(layers=rows, active=active, heads=heads, share=active / heads)


def budget_rows(model: nn.Module) -> list[dict]:
    """Return the budget of every routed layer, attention and MLPs, in the order of their statistics.

    Returns:
        Rows as the layers of `head_budget`, with `parts`: "heads" or "groups".
    """
    budget = head_budget(model)
    by_name = {}
    for row in budget["layers"]:
        by_name[row["name"]] = dict(row, parts="heads")
    for row in budget.get("mlp", {}).get("layers", []):
        by_name[row["name"]] = dict(row, parts="groups")
    return [by_name[name] for name, _ in model.named_modules() if name in by_name]


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
