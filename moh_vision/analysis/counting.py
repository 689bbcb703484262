"""Parameters and multiply-accumulates (MACs) of a model, counted on shapes: nothing is computed."""

from __future__ import annotations

import copy
from typing import List, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from moh_vision.attention import ROUTERS, HeadBudget, HeadMixtureAttention, RoutingStats
from moh_vision.models.foveal_attention import CosineAttention


class AttentionMacs(NamedTuple):
    """One attention layer in one forward, with its active heads alone."""

    name: str  # in the model
    router: str  # a name in ROUTERS
    budget: HeadBudget
    dim: int  # C
    queries: int  # N, of one sequence
    keys: int  # M
    linears: int  # MACs of projections and router
    scores: int  # MACs of queries times keys, and of the attention matrix times values
    parameters: int


class Macs(NamedTuple):
    """One forward of batch 1."""

    attention: List[AttentionMacs]  # those that can leave heads out
    other: int  # everything else: linear layers, convolutions, other attention
    every_head: int  # all, with every head computed

    @property
    def linears(self) -> int:
        """With active heads alone, without attention scores."""
        return self.other + sum(layer.linears for layer in self.attention)

    @property
    def scores(self) -> int:
        return sum(layer.scores for layer in self.attention)


def count_parameters(model: nn.Module) -> int:
    """All parameters, frozen ones too; one that is used twice counts once."""
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, *inputs: Tensor, **named: Tensor) -> Macs:
    """Multiply-accumulates of one forward: linear layers, convolutions, both attention products; no biases, norms, softmax.

    An attention layer is counted by its budget: a token's queries and outputs for its active heads, keys and values for
    all (other tokens need them) unless the whole sequence runs the same heads, the router for every choice that it made.
    TransNeXt's attention is counted with every head, also where it skips some. Anything else is counted as computed. The
    words that a language model with an adaptive vocabulary reads are counted as frequent ones.

    Args:
        model: on any device; it is left as it is.
        inputs, named: arguments of its forward, batch 1; only their shapes matter.
    """
    shadow = copy.deepcopy(model).to("meta").eval()
    layers: List[AttentionMacs] = []
    measured = []  # with all heads, by the counter

    def note(name: str):
        def hook(layer: HeadMixtureAttention, args: tuple, kwargs: dict, output: tuple) -> None:
            x = args[0] if args else kwargs["hidden_states" if "hidden_states" in kwargs else "x"]
            context = args[1] if len(args) > 1 else kwargs.get("context")
            layers.append(
                _attention_macs(name, layer, x.shape[1], (x if context is None else context).shape[1], output)
            )
            measured.append(f"{type(shadow).__name__}.{name}")

        return hook

    for name, module in shadow.named_modules():
        if isinstance(module, HeadMixtureAttention) and not isinstance(module, CosineAttention):
            module.register_forward_hook(note(name), with_kwargs=True)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        shadow(*(i.to("meta") for i in inputs), **{key: i.to("meta") for key, i in named.items()})
    total = counter.get_total_flops() // 2
    by_module = counter.get_flop_counts()
    inside = sum(sum(by_module[name].values()) for name in set(measured)) // 2
    return Macs(layers, total - inside, total)


def _attention_macs(name: str, layer: HeadMixtureAttention, N: int, M: int, output: tuple) -> AttentionMacs:
    b, dim = layer.budget, layer.dim
    # N, or 1 for a whole sequence. A LLaMA-style layer hands its statistics elsewhere, and routes every token.
    choices = output[1].probs.shape[1] if isinstance(output[1], RoutingStats) else N
    noise = getattr(layer.router, "noise", None)  # of MoA, in training only
    gates = [m for m in layer.router.modules() if isinstance(m, nn.Linear) and m is not noise]
    routing = choices * sum(m.weight.numel() for m in gates)
    # A router that looks at queries needs those of all heads. One choice for all tokens spares keys and values too.
    query_heads = b.heads if layer.needs_query else b.active
    skips_keys = layer.scope == "sample" and not layer.grouped
    key_heads = b.active if skips_keys else layer.kv_heads
    per_head = dim * b.head_dim
    return AttentionMacs(
        name=name,
        router=next(name for name, kind in ROUTERS.items() if kind is type(layer.router)),
        budget=b,
        dim=dim,
        queries=N,
        keys=M,
        linears=routing + per_head * (N * query_heads + 2 * M * key_heads + N * b.active),
        scores=2 * N * M * b.active * b.head_dim,
        parameters=count_parameters(layer),
    )
