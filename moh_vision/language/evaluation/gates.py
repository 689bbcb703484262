"""What the gates of a text model do with a text: entropy, load of the experts, and the tokens that they prefer.

Peng 2020 (MAE), section 5.1 and tables 6 and 8; Zhang 2022 (MoA), table 4.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from moh_vision.attention import HeadMixtureAttention, RoutingStats
from moh_vision.attention.kernels.eager import select_top_k
from moh_vision.attention.routers import MAERouter
from moh_vision.engine.commands import Progress
from moh_vision.engine.io import write_whole
from moh_vision.engine.logging import write_json
from moh_vision.engine.ranks import total_over_processes
from moh_vision.language.data.vocabulary import Vocabulary


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


class GateReading(NamedTuple):
    """What gates that read the same tokens did with a text.

    Attributes:
        part: of the model: "encoder", "decoder", or "model" where there is no encoder.
        text: what they read: "source", "target", or "text" where nothing is translated.
        layers: their names.
        statistics: of them.
        tokens: those that point to each expert of the first layer.
        columns: what E1, E2, ... of the table are.
    """

    part: str
    text: str
    layers: List[str]
    statistics: GateStatistics
    tokens: List[List[str]]
    columns: str


def layer_entropies(readings: Sequence[GateReading]) -> Dict[str, float]:
    """Name of each layer -> mean entropy of its gates in nats."""
    return {name: value for r in readings for name, value in zip(r.layers, r.statistics.entropy())}


def part_entropies(readings: Sequence[GateReading]) -> Dict[str, float]:
    """Mean entropy over the layers of each part of the model; Peng 2020, section 5.1, has that of the encoder alone."""
    parts: Dict[str, List[float]] = {}
    for reading in readings:
        parts.setdefault(reading.part, []).extend(reading.statistics.entropy())
    return {part: statistics.mean(values) for part, values in parts.items()}


def reading_text(readings: Sequence[GateReading], title: str) -> str:
    """Markdown: entropy, load and tokens of one model."""
    parts = [title]
    for r in readings:
        parts += [
            f"Gates of the {r.part} that read the {r.text}:",
            gate_table(r.statistics, r.layers),
            r.columns,
            f"Tokens that point to each expert of {r.layers[0]} (largest PMI, at least 5 times):",
            token_table([[f"`{token}`" for token in tokens] for tokens in r.tokens]),
        ]
    return "\n\n".join(parts) + "\n"


class Group(NamedTuple):
    """Layers of one part of a model whose gates read the same tokens."""

    part: str  # "encoder", "decoder", or "model" where there is no encoder
    reads: str  # "input_ids" or "decoder_input_ids"
    vocabulary: Vocabulary
    names: List[str]
    places: List[int]  # in the list of all layers' statistics
    statistics: GateStatistics
    columns: str  # what E1, E2, ... are


def report_gates(
    model: nn.Module,
    batches: Iterable[Dict[str, Tensor]],
    vocabularies: Sequence[Vocabulary],
    run: Path,
    accelerator,
    split: str,
) -> Dict[str, Dict[str, float]]:
    """Write OUTPUT/gates.md (entropy and load of every layer, the tokens that point to each expert) and gates.json, the
    numbers. Return gate_entropy by layer and mean_gate_entropy by part, in nats. A model without gates gets no files and
    an empty dict.
    """
    readings = read_gates(model, batches, vocabularies, accelerator)
    if not readings:
        return {}
    if accelerator.is_main_process:
        columns = {f"{r.part}, {r.text}": r.columns for r in readings}
        write_json(run / "gates.json", dict(split=split, columns=columns, **numbers_of(readings)))
        write_whole(run / "gates.md", reading_text(readings, f"# What the gates do with {split}"))
    found = dict(gate_entropy=layer_entropies(readings), mean_gate_entropy=part_entropies(readings))
    return {key: {name: round(value, 4) for name, value in values.items()} for key, values in found.items()}


def numbers_of(readings: Sequence[GateReading]) -> dict:
    """What was read of one model, as JSON has it."""
    layers = [
        dict(name=layer, part=r.part, reads=r.text, experts=E, entropy=entropy, load=load.tolist())
        for r in readings
        for layer, E, entropy, load in zip(r.layers, r.statistics.experts, r.statistics.entropy(), r.statistics.load())
    ]
    return dict(mean_entropy=part_entropies(readings), layers=layers, tokens={r.layers[0]: r.tokens for r in readings})


def read_gates(
    model: nn.Module, batches: Iterable[Dict[str, Tensor]], vocabularies: Sequence[Vocabulary], accelerator
) -> List[GateReading]:
    """Read what the gates of a text model do with a data set, over all processes; empty for a model without gates.
    `batches` are this process's share. The model is left in eval mode.
    """
    groups = gated_layers(model, vocabularies)
    if groups:
        add_up(model, groups, batches, accelerator)
    readings = []
    for g in groups:
        text = "target" if g.reads == "decoder_input_ids" else "source" if hasattr(model, "encoder") else "text"
        tokens = [[readable(g.vocabulary, number) for number in top] for top in g.statistics.top_tokens()]
        readings.append(GateReading(g.part, text, g.names, g.statistics, tokens, g.columns))
    return readings


def gated_layers(model: nn.Module, vocabularies: Sequence[Vocabulary]) -> List[Group]:
    """The layers that have a gate in use, by part of the model and by the tokens that the gate reads.

    The encoder is a group of its own: Peng 2020, section 5.1, looks at the encoders alone.
    """
    vocabulary_of = dict(zip(("input_ids", "decoder_input_ids"), vocabularies))
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, HeadMixtureAttention)]
    found: Dict[Tuple[str, str], List[int]] = {}
    for place, (name, layer) in enumerate(layers):
        mixes = getattr(layer.router, "mode", None) == "soft"  # MAE, but not UNI-MAE
        if mixes or layer.budget.routed and not layer.router.all_heads:
            part = part_of(name)
            reads = "decoder_input_ids" if part == "decoder" and not layer.by_context else "input_ids"
            found.setdefault((part, reads), []).append(place)
    groups, sequence = [], "sentence" if hasattr(model, "encoder") else "block"
    for (part, reads), places in found.items():
        vocabulary = vocabulary_of[reads]
        size = max(len(vocabulary), getattr(model.config, "vocab_size", 0))  # ids may go beyond the tokenizer's
        own = [layers[place][1] for place in places]
        about = " ".join(dict.fromkeys(columns_of(layer, own, sequence) for layer in own))
        counted = GateStatistics.of(own, size)
        groups.append(Group(part, reads, vocabulary, [layers[place][0] for place in places], places, counted, about))
    return groups


def columns_of(layer: HeadMixtureAttention, layers: List[HeadMixtureAttention], sequence: str) -> str:
    """Return a sentence on the columns E1, E2, ... of a layer's gate. `layers` are its group, for numbers that differ
    among them; `sequence` names a row of the model's input.
    """
    router = layer.router
    unit = sequence if layer.scope == "sample" or router.reads == "sequence" else "token"
    if not isinstance(router, MAERouter):
        alike = [other.budget for other in layers if type(other.router) is type(router)]
        routed, shared = (span([getattr(b, kind) for b in alike]) for kind in ("routed", "shared"))
        told = f"EN is the share of choices that fell on expert N; every {unit} chooses {routed}."
        return (
            told
            if shared == "0"
            else f"{told} The first {shared} heads are shared: they always run, and E1 is the next."
        )

    def left_out(expert: int) -> str:
        heads = (router.members[expert] == 0).nonzero().flatten().tolist()
        return f"head{'s' * (len(heads) > 1)} {' and '.join(str(head + 1) for head in heads)}"

    experts = f"expert 1 leaves out {left_out(0)}, expert 2 {left_out(1)}, and so on"
    return f"EN is the share of {unit}s whose most probable expert is N; {experts}."


def span(numbers: List[int]) -> str:
    """The smallest and the largest of some numbers, "2 to 5", or the one that all of them are."""
    return " to ".join(map(str, sorted({min(numbers), max(numbers)})))


@torch.no_grad()
def add_up(model: nn.Module, groups: List[Group], batches: Iterable[Dict[str, Tensor]], accelerator) -> None:
    """Fill the groups' statistics, over all processes."""
    model.eval()
    for batch in Progress.over(batches, "gates", enabled=accelerator.is_main_process):
        batch = {name: value.to(accelerator.device) for name, value in batch.items()}
        labels = batch["labels"]
        with accelerator.autocast():
            stats = model.routed_loss(**batch)[2]
        for group in groups:
            padding = labels == -100
            if group.reads == "input_ids":
                mask = batch.get("attention_mask")
                padding = None if mask is None else mask == 0
            group.statistics.update([stats[place] for place in group.places], batch[group.reads], padding)

    for group in groups:
        group.statistics.reduce(total_over_processes(accelerator))


def part_of(layer: str) -> str:
    """The part of a model that a layer of this name is in: "encoder" or "decoder", or "model" without these."""
    part = layer.partition(".")[0]
    return part if part in ("encoder", "decoder") else "model"


def readable(vocabulary: Vocabulary, number: int) -> str:
    """A token as text; a blank before it, G with a dot in byte-level BPE, is _."""
    if number >= len(vocabulary):
        return f"#{number}"
    token = vocabulary.token(number)
    text = vocabulary.decode([number])
    if not text or "\ufffd" in text:  # a special token, a blank, or bytes that are no character
        return token
    return ("_" if vocabulary.kind == "bpe" and token.startswith("\u0120") else "") + text
