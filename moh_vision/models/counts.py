"""Count a model's parameters and multiply-accumulates (MACs) from shapes; nothing is computed."""

import copy
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from timm.layers import RmsNorm, RmsNormFp32
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from moh_vision.attention import (
    GroupMixtureMlp,
    HeadBudget,
    HeadMixtureAttention,
    Routing,
    attention_layers,
    mlp_layers,
)
from moh_vision.attention.routers import name_of
from moh_vision.models.foveal_attention import WINDOW, AggregatedAttention

# Modules whose backward needs their input.
KEEP_INPUT = (nn.Linear, nn.LayerNorm, RmsNorm, RmsNormFp32, nn.GELU, nn.SiLU)


class ModuleMacs(NamedTuple):
    """Counts of one module, or of one part of an attention layer, in one forward of batch 1."""

    name: str  # in the model; "rest": what is in no listed module, such as position tables
    # Of attention: "projections", "scores", "router", "other"; of a routed MLP: "groups", "router"; "table": embeddings;
    # else "".
    part: str
    parameters: int  # a shared parameter counts once, where it first appears
    dense: int  # MACs with every head and no router
    ideal: int  # MACs of the active heads and the router


class AttentionMacs(NamedTuple):
    """Counts of one attention layer in one forward, with its active heads alone."""

    name: str  # in the model
    router: str  # a name in ROUTERS
    budget: HeadBudget
    dim: int  # C
    queries: int  # N, of one sequence
    keys: int  # M
    linears: int  # MACs of projections and router
    scores: int  # MACs of q @ k and of the attention matrix @ v
    parameters: int


class Macs(NamedTuple):
    """Counts of a model in one forward of batch 1."""

    modules: list[ModuleMacs]  # in the model's order
    attention: list[AttentionMacs]
    every_head: int  # MACs of the whole forward, with all heads and the routers

    @property
    def parameters(self) -> int:
        return sum(module.parameters for module in self.modules)

    @property
    def dense(self) -> int:
        """MACs with every head and no router."""
        return sum(module.dense for module in self.modules)

    @property
    def ideal(self) -> int:
        """MACs with active heads alone."""
        return sum(module.ideal for module in self.modules)

    @property
    def scores(self) -> int:
        """MACs of attention scores, with active heads alone."""
        return sum(module.ideal for module in self.modules if module.part == "scores")

    @property
    def linears(self) -> int:
        """MACs of all but attention scores, with active heads alone."""
        return self.ideal - self.scores

    @property
    def other(self) -> int:
        """MACs of all but our attention and routed MLPs."""
        return sum(module.ideal for module in self.modules if not module.part)


class Watched(NamedTuple):
    """Sizes of one call of an attention layer."""

    layer: HeadMixtureAttention
    queries: int  # N
    keys: int  # M
    choices: int  # how many choices of heads the router made: N, or 1 for the whole sequence
    active: int  # heads that run for a token

    @property
    def routing(self) -> int:
        """MACs of the router's choices."""
        return self.choices * self.layer.router.macs()

    def projections(self, queries: int, keys: int, outputs: int) -> int:
        """MACs of the projections to and from these numbers of heads."""
        layer = self.layer
        N = self.queries
        M = self.keys
        if isinstance(layer, AggregatedAttention):
            M += N  # the neighbours' keys beside the pooled ones
        return layer.dim * layer.head_dim * (N * queries + 2 * M * keys + N * outputs)

    def scores(self, heads: int) -> int:
        """MACs of both products with the attention matrix."""
        products = 2 * self.queries * self.keys
        if isinstance(self.layer, AggregatedAttention):
            products += WINDOW * self.queries  # queries @ learnable tokens
        return products * heads * self.layer.head_dim

    def counted(self, name: str) -> AttentionMacs:
        """Count the layer, called `name` in the model, with its active heads alone."""
        layer = self.layer
        K = self.active
        queries = K
        if layer.needs_query:  # the router reads the queries of all heads
            queries = layer.num_heads
        keys = layer.kv_heads
        if layer.chooses_once and not layer.grouped:
            keys = K  # no token needs keys and values of the other heads
        return AttentionMacs(
            name=name,
            router=name_of(layer.router),
            budget=layer.budget,
            dim=layer.dim,
            queries=self.queries,
            keys=self.keys,
            linears=self.routing + self.projections(queries, keys, K),
            scores=self.scores(K),
            parameters=count_parameters(layer),
        )


def count_parameters(model: nn.Module) -> int:
    """Count all parameters, frozen ones too; a shared parameter counts once."""
    return sum(p.numel() for p in model.parameters())


def without_memory(model: nn.Module) -> nn.Module:
    """Copy a model to the meta device; tied parameters stay tied, unlike with `to("meta")`."""
    memo: dict[int, Tensor] = {id(b): b.to("meta") for b in model.buffers()}
    memo.update((id(p), nn.Parameter(p.to("meta"), p.requires_grad)) for p in model.parameters())
    return copy.deepcopy(model, memo)


def least_activations(model: nn.Module, *inputs: Tensor) -> int:
    """Return a lower bound of the number of elements that a forward keeps for backward.

    It counts the inputs of attention layers, the queries, keys, values and outputs of their active heads, the inputs of
    routed MLPs, the hidden channels of their active groups before and after the activation, and the inputs of norms,
    activations and linear layers elsewhere. What else routed layers keep depends on the executor.

    Args:
        model: on any device; unchanged.
        inputs: arguments of its forward, batch 1; only their shapes matter.
    """
    shadow = without_memory(model).eval()
    # For each token: an attention layer's input, and a query, key, value and output of every active head.
    width_of: dict[nn.Module, int] = {}
    for layer in attention_layers(shadow):
        width_of[layer] = layer.dim + 4 * layer.budget.active * layer.head_dim
    for mlp in mlp_layers(shadow):
        width_of[mlp] = mlp.dim + 2 * mlp.budget.active * mlp.head_dim
    in_routed = {module for layer in width_of for module in layer.modules()}
    kept: list[int] = []  # numbers of elements, in routed layers
    # By id, because two layers may read the same tensor, as in a SwiGLU.
    read: dict[int, Tensor] = {}
    for module in shadow.modules():
        if isinstance(module, KEEP_INPUT) and module not in in_routed:
            module.register_forward_pre_hook(lambda _, args: read.update({id(args[0]): args[0]}))
    for layer, width in width_of.items():
        layer.register_forward_hook(
            lambda _, args, output, width=width: kept.append(output[0][..., 0].numel() * width)
        )
    with torch.no_grad():
        shadow(*(i.to("meta") for i in inputs))
    return sum(kept) + sum(tensor.numel() for tensor in read.values())


def count_macs(model: nn.Module, *inputs: Tensor, **named: Tensor) -> Macs:
    """Count multiply-accumulates of one forward: linear layers, convolutions, attention products.

    A routed layer has two counts. Dense: every head, or group of an MLP, and no router. Ideal: the router, active groups,
    queries and outputs of active heads, and keys and values of all heads, because other tokens need them; or of the active heads
    alone, if all tokens of a sequence run the same heads. Other modules have one count, of what they compute.
    As in torch's counter, TransNeXt's products with 3 x 3 neighbours are sums, which do not count. An adaptive
    vocabulary counts as if all words were frequent.

    Args:
        model: on any device; unchanged.
        inputs, named: arguments of its forward, batch 1; only their shapes matter.
    """
    shadow = without_memory(model).eval()
    calls: dict[str, Watched] = {}
    routed: dict[str, tuple[int, int]] = {}  # name of a layer -> its `choices` and `active`

    def attach(name: str, layer: HeadMixtureAttention, copied: HeadMixtureAttention) -> None:
        def hook(_, args: tuple, kwargs: dict, output: tuple) -> None:
            if args:
                x = args[0]
            elif "hidden_states" in kwargs:
                x = kwargs["hidden_states"]
            else:
                x = kwargs["x"]
            N = M = x.shape[1:-1].numel()
            context = args[1] if len(args) > 1 else kwargs.get("context")
            if hasattr(layer, "position_bias"):  # TransNeXt's: its second argument is `Positions`
                M = context.index.shape[0] // N
            elif isinstance(context, Tensor):
                M = context.shape[1]
            calls[name] = Watched(layer, N, M, *routed.get(name, (N, layer.budget.active)))

        def note(_, args: tuple, routing: Routing) -> None:
            choices = routing.stats.probs.shape[1]
            routed[name] = (choices, routing.count or layer.budget.active)

        copied.register_forward_hook(hook, with_kwargs=True)
        copied.router.register_forward_hook(note)

    for name, module in model.named_modules():
        if isinstance(module, HeadMixtureAttention):
            attach(name, module, shadow.get_submodule(name))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        shadow(*(i.to("meta") for i in inputs), **{key: i.to("meta") for key, i in named.items()})
    total = counter.get_total_flops() // 2
    by_module = counter.get_flop_counts()

    def measured(name: str, module: nn.Module) -> int:
        """Return a module's MACs with all heads; those of its children, if it is not called itself."""
        macs = sum(by_module.get(f"{type(shadow).__name__}.{name}", {}).values()) // 2
        children = module.named_children()
        return max(macs, sum(measured(f"{name}.{key}", child) for key, child in children))

    return _assemble(model, calls, measured, total)


def _assemble(model: nn.Module, calls: dict[str, Watched], measured: Callable, total: int) -> Macs:
    """Make four rows for each attention layer, two for each routed MLP, and one for each of the largest modules without them.

    Args:
        calls: name of an attention layer -> sizes of its call.
        measured: called with a module's name and the module; returns its MACs with all heads.
        total: MACs of the model with all heads.
    """
    rows: list[ModuleMacs] = []
    attention: list[AttentionMacs] = []
    seen: set[nn.Parameter] = set()
    left = total  # MACs that no row has yet

    def add(name: str, part: str, modules: Iterable[nn.Module], dense: int, ideal: int) -> None:
        """Append a row; it counts those parameters of `modules` that no earlier row has counted."""
        new = {p for module in modules for p in module.parameters()} - seen
        seen.update(new)
        rows.append(ModuleMacs(name, part, sum(p.numel() for p in new), dense, ideal))

    def add_attention(name: str, layer: nn.Module) -> None:
        watched = calls[name]
        macs = watched.counted(name)
        attention.append(macs)
        H = layer.num_heads
        dense = watched.projections(H, layer.kv_heads, H)
        add(name, "projections", layer.projections, dense, macs.linears - watched.routing)
        add(name, "scores", (), watched.scores(H), macs.scores)
        add(name, "router", [layer.router], 0, watched.routing)
        counted = (layer.router, *layer.projections)
        remaining = [(key, child) for key, child in layer.named_children() if child not in counted]
        other = sum(measured(f"{name}.{key}", child) for key, child in remaining)
        add(name, "other", [layer], other, other)

    def add_groups(name: str, mlp: GroupMixtureMlp) -> None:
        dense = sum(measured(f"{name}.{key}", getattr(mlp, key)) for key in ("fc1", "fc2"))
        ideal = dense * mlp.budget.active // mlp.num_heads
        add(name, "groups", mlp.projections, dense, ideal)
        add(name, "router", [mlp.router], 0, mlp.router.macs())  # one choice for all tokens

    def visit(name: str, module: nn.Module) -> None:
        nonlocal left
        descendants = [m for m in module.modules() if m is not module]
        if name in calls:
            add_attention(name, module)
            left -= measured(name, module)
        elif isinstance(module, GroupMixtureMlp):
            add_groups(name, module)
            left -= measured(name, module)
        elif not name or any("Attention" in type(m).__name__ for m in descendants):
            for key, child in module.named_children():
                visit(f"{name}.{key}".lstrip("."), child)
        else:
            macs = measured(name, module)
            part = ""
            if not macs and any(isinstance(m, nn.Embedding) for m in module.modules()):
                part = "table"
            add(name, part, [module], macs, macs)
            left -= macs

    visit("", model)
    add("rest", "", [model], left, left)
    return Macs([row for row in rows if any(row[2:])], attention, total)
