"""Statistics of a text model's gates: entropy, load and preferred tokens of experts.

Peng 2020 (MAE), section 5.1 and tables 6 and 8; Zhang 2022 (MoA), table 4.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moh_vision.attention import HeadMixtureAttention, RoutingStats
from moh_vision.attention.kernels.eager import select_top_k
from moh_vision.attention.routers import MAERouter
from moh_vision.engine.progress import Progress
from moh_vision.engine.ranks import total
from moh_vision.language.data.vocabulary import Vocabulary


class GateStatistics:
    """Add up the gates of some layers that read the same tokens.

    A gate is a distribution over experts, for a token, or for a sequence (MAE, unless causal). It
    attributes this to its k most probable experts, as the router does; MAE, which mixes all, to one.
    """

    def __init__(self, gates: Sequence[tuple[int, int]], vocab_size: int):
        """Start with (E, k) of each layer, see `gate_of`, and V, which is above all ids."""
        self.experts, self.attributed = zip(*gates)
        self.entropies = torch.zeros(len(gates), dtype=torch.float64)  # [layers], sums in nats
        self.gates = torch.zeros(len(gates), dtype=torch.float64)  # their counts
        self.loads = [
            torch.zeros(E, dtype=torch.float64) for E in self.experts
        ]  # attributions to each expert
        # Attributions of tokens to the first layer's experts, as in the papers: [V, E].
        self.tokens = torch.zeros(vocab_size, self.experts[0], dtype=torch.float64)

    def update(
        self, stats: Sequence[RoutingStats], tokens: Tensor, padding_mask: Tensor | None = None
    ) -> None:
        """Add a batch: statistics of those layers, ids [B, N], and a mask, True at padding."""
        assert len(stats) == len(self.experts)
        tokens = tokens.cpu()
        real = (
            torch.ones_like(tokens, dtype=torch.bool)
            if padding_mask is None
            else ~padding_mask.cpu()
        )  # [B, N]
        for layer, (s, k) in enumerate(zip(stats, self.attributed)):
            probs = s.probs.detach().cpu().double()  # [B, N or 1, E]
            there = (
                real if probs.shape[1] == real.shape[1] else real.any(1, keepdim=True)
            )  # [B, N or 1]
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
        self.entropies = sum_over_processes(self.entropies)
        self.gates = sum_over_processes(self.gates)
        self.loads = [sum_over_processes(load) for load in self.loads]
        self.tokens = sum_over_processes(self.tokens)

    def entropy(self) -> list[float]:
        """Return the mean entropy of each layer's gates in nats; a uniform gate has ln E."""
        return (self.entropies / self.gates.clamp_min(1)).tolist()

    def load(self) -> list[Tensor]:
        """Return the share of the attributions that each expert got: [E] per layer."""
        return [load / load.sum().clamp_min(1) for load in self.loads]

    def pmi(self) -> Tensor:
        """Return log p(token, expert) / (p(token) p(expert)) of the first layer: [V, E].

        -inf: the two never met; nan: one never came. (Zhang 2022 prints no logarithm.)
        """
        joint = self.tokens
        return (joint * joint.sum() / (joint.sum(1, keepdim=True) * joint.sum(0))).log()

    def top_tokens(self, count: int = 5, min_count: int = 5) -> list[list[int]]:
        """Return ids of tokens of largest PMI with each expert; of equals the more frequent.

        Rare ones are left out: what came once is perfectly indicative by chance.
        """
        frequency = self.tokens.sum(1) / self.attributed[0]  # [V]
        pmi = self.pmi().where((frequency >= max(min_count, 1))[:, None], -torch.inf)
        common = frequency.argsort(descending=True, stable=True)
        top = []
        for values in pmi[common].T:
            best = values.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)[:count]
            top.append(common[best[values[best] > -torch.inf]].tolist())
        return top


class GateReading(NamedTuple):
    """Statistics of a text for gates of one stack that read the same tokens."""

    stack: str  # "encoder", "decoder", or "model" where there is no encoder
    text: str  # what they read: "source", "target", or "text" where nothing is translated
    layers: dict[int, str]  # place in the list of all layers' statistics -> name
    statistics: GateStatistics
    vocabulary: Vocabulary
    columns: str  # a sentence: what E1, E2, ... of the table are


@torch.no_grad()
def read_gates(
    model: nn.Module,
    batches: Iterable[dict[str, Tensor]],
    vocabularies: Sequence[Vocabulary],
    accelerator,
) -> dict:
    """Read the gates on this process's share of a data set; return RUN/gates.json but its split, of all processes.

    Columns are by part and text, tokens by layer. mean_entropy is by part; Peng 2020, section 5.1, has that of the
    encoder alone. All are empty for a model without gates. Leaves the model in eval mode.
    """
    readings = gated_layers(model, vocabularies)
    model.eval()
    for batch in (
        Progress.over(batches, "gates", enabled=accelerator.is_main_process) if readings else ()
    ):
        batch = {name: value.to(accelerator.device) for name, value in batch.items()}
        with accelerator.autocast():
            stats = model.routed_loss(**batch)[2]
        mask = batch.get("attention_mask")
        for r in readings:
            if r.text == "target":
                ids, padding = batch["decoder_input_ids"], batch["labels"] == -100
            else:
                ids, padding = batch["input_ids"], None if mask is None else mask == 0
            r.statistics.update([stats[place] for place in r.layers], ids, padding)
    layers, parts = [], {}
    for r in readings:
        r.statistics.reduce(total)
        entropies = r.statistics.entropy()
        parts.setdefault(r.stack, []).extend(entropies)
        for name, E, entropy, load in zip(
            r.layers.values(), r.statistics.experts, entropies, r.statistics.load()
        ):
            layers.append(
                dict(
                    name=name,
                    part=r.stack,
                    reads=r.text,
                    experts=E,
                    entropy=entropy,
                    load=load.tolist(),
                )
            )
    tokens = {
        next(iter(r.layers.values())): [
            [readable(r.vocabulary, id) for id in top] for top in r.statistics.top_tokens()
        ]
        for r in readings
    }
    columns = {f"{r.stack}, {r.text}": r.columns for r in readings}
    mean = {stack: statistics.mean(values) for stack, values in parts.items()}
    return dict(columns=columns, mean_entropy=mean, layers=layers, tokens=tokens)


def gate_text(record: dict, title: str) -> str:
    """Return Markdown of a result of `read_gates`: entropy, load and tokens."""
    paragraphs = [title]
    for (stack, text), group in itertools.groupby(
        record["layers"], lambda layer: (layer["part"], layer["reads"])
    ):
        layers = list(group)
        first = layers[0]["name"]
        paragraphs += [
            f"Gates of the {stack} that read the {text}:",
            gate_table(layers),
            record["columns"][f"{stack}, {text}"],
            f"Tokens that point to each expert of {first} (largest PMI, at least 5 times):",
            token_table([[f"`{token}`" for token in tokens] for tokens in record["tokens"][first]]),
        ]
    return "\n\n".join(paragraphs) + "\n"


def gate_table(layers: Sequence[dict]) -> str:
    """Return Markdown: entropy and load of every layer, by its name, and the mean entropy."""
    most = max(layer["experts"] for layer in layers)
    lines = [
        "| layer | entropy, nats | uniform | "
        + " | ".join(f"E{i + 1}, %" for i in range(most))
        + " |",
        "|---|" + "---:|" * (most + 2),
    ]
    for layer in layers:
        shares = [f"{100 * share:.1f}" for share in layer["load"]] + [""] * (
            most - layer["experts"]
        )
        uniform = math.log(layer["experts"])
        lines.append(
            f"| {layer['name']} | {layer['entropy']:.2f} | {uniform:.2f} | "
            + " | ".join(shares)
            + " |"
        )
    mean = sum(layer["entropy"] for layer in layers) / len(layers)
    uniform = sum(math.log(layer["experts"]) for layer in layers) / len(layers)
    lines.append(f"| mean | {mean:.2f} | {uniform:.2f} |" + " |" * most)
    return "\n".join(lines)


def token_table(top: Sequence[Sequence[str]]) -> str:
    """Return Markdown: indicative tokens, a column an expert (Peng 2020, table 6)."""
    lines = [
        "| " + " | ".join(f"expert {i + 1}" for i in range(len(top))) + " |",
        "|" + "---|" * len(top),
    ]
    for row in itertools.zip_longest(*top, fillvalue=""):
        lines.append("| " + " | ".join(token.replace("|", "\\|") for token in row) + " |")
    return "\n".join(lines)


def gated_layers(model: nn.Module, vocabularies: Sequence[Vocabulary]) -> list[GateReading]:
    """Return the layers that use a gate, by part and by the text that it reads, without counts.

    The encoder is its own part: Peng 2020, section 5.1, looks at encoders alone.
    """
    translates = hasattr(model, "encoder")
    named = [(name, m) for name, m in model.named_modules() if isinstance(m, HeadMixtureAttention)]
    groups: dict[tuple[str, str], list[int]] = {}
    for place, (name, layer) in enumerate(named):
        mixes = getattr(layer.router, "mode", None) == "soft"  # MAE, but not UNI-MAE
        if mixes or layer.budget.routed and not layer.router.all_heads:
            stack = name.partition(".")[0]
            stack = stack if stack in ("encoder", "decoder") else "model"
            own = stack == "decoder" and not layer.by_context
            text = "target" if own else "source" if translates else "text"
            groups.setdefault((stack, text), []).append(place)
    readings = []
    for (stack, text), places in groups.items():
        names, layers = zip(*(named[place] for place in places))
        vocabulary = vocabularies[1 if text == "target" else 0]
        sequence = "sentence" if translates else "block"
        columns = " ".join(dict.fromkeys(columns_of(layer, layers, sequence) for layer in layers))
        counted = GateStatistics([gate_of(layer) for layer in layers], len(vocabulary))
        readings.append(
            GateReading(stack, text, dict(zip(places, names)), counted, vocabulary, columns)
        )
    return readings


def gate_of(layer: HeadMixtureAttention) -> tuple[int, int]:
    """Return (E, k) of a layer for `GateStatistics`."""
    if layer.router.all_heads:
        return len(layer.router.members), 1
    return layer.budget.candidates, layer.budget.routed


def columns_of(
    layer: HeadMixtureAttention, layers: Sequence[HeadMixtureAttention], sequence: str
) -> str:
    """Return a sentence on the columns E1, E2, ... of a layer's gate.

    `layers` are those beside it, and `sequence` is what a row of the model's input is called.
    """
    router = layer.router
    unit = sequence if layer.scope == "sample" or router.reads == "sequence" else "token"
    if isinstance(router, MAERouter):
        left_out = []
        for members in router.members[:2]:
            heads = (members == 0).nonzero().flatten().tolist()
            numbers = " and ".join(str(head + 1) for head in heads)
            left_out.append(f"head{'s' * (len(heads) > 1)} {numbers}")
        experts = f"expert 1 leaves out {left_out[0]}, expert 2 {left_out[1]}, and so on"
        return f"EN is the share of {unit}s whose most probable expert is N; {experts}."
    alike = [other.budget for other in layers if type(other.router) is type(router)]
    routed = span([budget.routed for budget in alike])
    shared = span([budget.shared for budget in alike])
    columns = f"EN is the share of choices that fell on expert N; every {unit} chooses {routed}."
    if shared != "0":
        columns += f" The first {shared} heads are shared: they always run, and E1 is the next."
    return columns


def span(numbers: Sequence[int]) -> str:
    """Return the smallest and the largest of some numbers, "2 to 5", or the only one."""
    return " to ".join(map(str, sorted({min(numbers), max(numbers)})))


def readable(vocabulary: Vocabulary, number: int) -> str:
    """Return a token as text; a leading blank (BPE: G with a dot) is _."""
    token = vocabulary.token(number)
    text = vocabulary.decode([number])
    if not text or "\ufffd" in text:  # a special token, a blank, or bytes that are no character
        return token
    if vocabulary.scheme == "bpe" and token.startswith("\u0120"):
        return "_" + text
    return text
