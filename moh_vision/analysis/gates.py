"""What gates do, as both language papers look at them: entropy, load of experts, and which tokens they prefer.

Peng 2020 (MAE), section 5.1 and tables 6 and 8; Zhang 2022 (MoA), section 5, figures 3 and 4 and table 4.
"""

from __future__ import annotations

import math
from typing import Callable, List, Optional, Sequence

import torch
from torch import Tensor

from moh_vision.attention import HeadMixtureAttention, RoutingStats
from moh_vision.attention.kernels.route import select_top_k


class GateStatistics:
    """Adds up what the gates of some layers did with the tokens that they all read, such as an encoder's.

    A gate is one distribution over experts, for a token (MoA, MoH, and MAE in a causal layer) or for a whole sequence
    (MAE elsewhere). It attributes what it was made for to its k most probable experts, as the router does; for MAE, which
    mixes all of them, to the one most probable. A sequence takes its tokens with it.

    Memory does not grow with the number of batches.

    Args:
        experts: E of each layer.
        attributed: k of each layer.
        vocab_size: V, above all token ids.

    Attributes:
        tokens: [V, E] how often each expert of the first layer, at which the papers look, was attributed each token.

    Raises:
        ValueError: for a layer without a gate.
    """

    def __init__(self, experts: Sequence[int], attributed: Sequence[int], vocab_size: int):
        self.experts, self.attributed = list(experts), list(attributed)
        for layer, (E, k) in enumerate(zip(self.experts, self.attributed)):
            if not 1 <= k <= E:
                raise ValueError(f"layer {layer} has no gate: it chooses {k} of {E} experts")
        self.entropies = torch.zeros(len(self.experts), dtype=torch.float64)  # [layers], sums in nats
        self.gates = torch.zeros(len(self.experts), dtype=torch.float64)  # how many those are sums of
        self.loads = [torch.zeros(E, dtype=torch.float64) for E in self.experts]  # attributions to each expert
        self.tokens = torch.zeros(vocab_size, self.experts[0], dtype=torch.float64)

    @classmethod
    def of(cls, layers: Sequence[HeadMixtureAttention], vocab_size: int) -> GateStatistics:
        """For these attention layers of a model, in the order of their statistics."""
        mixed = [layer.router.all_heads for layer in layers]
        experts = [
            len(getattr(layer.router, "members", ())) if m else layer.budget.candidates
            for m, layer in zip(mixed, layers)
        ]
        return cls(experts, [1 if m else layer.budget.routed for m, layer in zip(mixed, layers)], vocab_size)

    def update(self, stats: Sequence[RoutingStats], tokens: Tensor, padding_mask: Optional[Tensor] = None) -> None:
        """Add a batch.

        Args:
            stats: of those layers, from one forward.
            tokens: ids [B, N] of what the gates read.
            padding_mask: [B, N], True at padding, which does not count.
        """
        assert len(stats) == len(self.experts)
        tokens = tokens.cpu()
        real = torch.ones_like(tokens, dtype=torch.bool) if padding_mask is None else ~padding_mask.cpu()  # [B, N]
        for layer, (s, k) in enumerate(zip(stats, self.attributed)):
            probs = s.probs.detach().cpu().double()  # [B, N or 1, E]
            there = real if probs.shape[1] == real.shape[1] else real.any(1, keepdim=True)  # [B, N or 1]
            gates = probs[there]  # [gates, E]
            chosen = select_top_k(probs.permute(2, 0, 1), k).permute(1, 2, 0)  # [B, N or 1, E]
            self.entropies[layer] -= torch.xlogy(gates, gates).sum()
            self.gates[layer] += len(gates)
            self.loads[layer] += chosen[there].sum(0)
            if layer == 0:
                rows = chosen.expand(*real.shape, -1)[real]  # [real tokens, E]
                self.tokens.index_add_(0, tokens[real], rows.double())

    def reduce(self, sum_over_processes: Callable[[Tensor], Tensor]) -> None:
        """Replace own sums by those of all processes."""
        self.entropies, self.gates = sum_over_processes(self.entropies), sum_over_processes(self.gates)
        self.loads = [sum_over_processes(load) for load in self.loads]
        self.tokens = sum_over_processes(self.tokens)

    def entropy(self) -> List[float]:
        """Mean entropy of each layer's gates in nats; a uniform gate has ln E."""
        return (self.entropies / self.gates.clamp_min(1)).tolist()

    def load(self) -> List[Tensor]:
        """Share of the attributions that each expert got: [E] per layer, of sum 1.

        With k = 1 it is the share of sequences (or tokens); else k times it is the share of tokens that chose the expert.
        """
        return [load / load.sum().clamp_min(1) for load in self.loads]

    def pmi(self) -> Tensor:
        """Pointwise mutual information log p(token, expert) / (p(token) p(expert)) of the first layer: [V, E].

        -inf where the two never met, nan for tokens and experts that never came. (Zhang 2022 prints no logarithm, which
        leaves the order of tokens as it is.)
        """
        joint = self.tokens
        return (joint * joint.sum() / (joint.sum(1, keepdim=True) * joint.sum(0))).log()

    def top_tokens(self, count: int = 5, min_count: int = 5) -> List[List[int]]:
        """The tokens of largest PMI with each expert, ids of at most `count` per expert; of equals the more frequent.

        Args:
            count: how many.
            min_count: tokens that came fewer times are left out: what came once is perfectly indicative by chance.
        """
        frequency = self.tokens.sum(1) / self.attributed[0]  # [V]
        pmi = self.pmi().where((frequency >= max(min_count, 1))[:, None], -torch.inf)
        common = frequency.argsort(descending=True, stable=True)
        top = []
        for values in pmi[common].T:
            best = values.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)[:count]
            top.append(common[best[values[best] > -torch.inf]].tolist())
        return top


def gate_table(statistics: GateStatistics, names: Sequence[str]) -> str:
    """Markdown: entropy and load of every layer, and the mean entropy.

    Args:
        statistics: of at least one batch.
        names: of the layers.
    """
    most = max(statistics.experts)
    lines = [
        "| layer | entropy, nats | uniform | " + " | ".join(f"E{i + 1}, %" for i in range(most)) + " |",
        "|---|" + "---:|" * (most + 2),
    ]
    for name, entropy, load in zip(names, statistics.entropy(), statistics.load()):
        shares = [f"{100 * share:.1f}" for share in load.tolist()] + [""] * (most - len(load))
        lines.append(f"| {name} | {entropy:.2f} | {math.log(len(load)):.2f} | " + " | ".join(shares) + " |")
    mean = sum(statistics.entropy()) / len(statistics.experts)
    uniform = sum(math.log(E) for E in statistics.experts) / len(statistics.experts)
    lines.append(f"| mean | {mean:.2f} | {uniform:.2f} |" + " |" * most)
    return "\n".join(lines)


def token_table(top: Sequence[Sequence[str]]) -> str:
    """Markdown: the most indicative tokens, a column an expert (Peng 2020, table 6).

    Args:
        top: tokens of each expert, from `GateStatistics.top_tokens` through a tokenizer.
    """
    rows = max((len(tokens) for tokens in top), default=0)
    lines = [
        "| " + " | ".join(f"expert {i + 1}" for i in range(len(top))) + " |",
        "|" + "---|" * len(top),
    ]
    for row in range(rows):
        cells = [tokens[row].replace("|", "\\|") if row < len(tokens) else "" for tokens in top]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
