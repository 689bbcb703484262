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
from moh_vision.common.progress import Progress
from moh_vision.engine.ranks import total
from moh_vision.language.data.vocabulary import Vocabulary


class GateStatistics:
    """Accumulates statistics of the gates of several layers that read the same tokens.

    A gate is a distribution over experts, for a token or (MAE, unless causal) for a sequence. The token or sequence is
    attributed to the k most probable experts, which the router runs; with MAE, which mixes all experts, to one.
    """

    def __init__(self, gates: Sequence[tuple[int, int]], vocab_size: int):
        """Start from zero. `gates`: (E, k) of each layer, see `Router.gate_size`; `vocab_size`: V, above all ids."""
        self.experts, self.attributed = zip(*gates)
        self.entropies = torch.zeros(len(gates), dtype=torch.float64)  # [layers], sums in nats
        self.gates = torch.zeros(len(gates), dtype=torch.float64)  # [layers], number of gates
        # Number of attributions to each expert, for each layer.
        self.loads = [torch.zeros(E, dtype=torch.float64) for E in self.experts]
        # Number of attributions of each token to the first layer's experts, as in the papers: [V, E].
        self.tokens = torch.zeros(vocab_size, self.experts[0], dtype=torch.float64)

    def update(
        self, stats: Sequence[RoutingStats], tokens: Tensor, padding_mask: Tensor | None = None
    ) -> None:
        """Add a batch: the layers' statistics, ids [B, N], and a mask [B, N], True at padding."""
        assert len(stats) == len(self.experts)
        tokens = tokens.cpu()
        real = torch.ones_like(tokens, dtype=torch.bool)  # [B, N]
        if padding_mask is not None:
            real = ~padding_mask.cpu()
        for layer, (layer_stats, k) in enumerate(zip(stats, self.attributed)):
            probs = layer_stats.probs.detach().cpu().double()  # [B, N or 1, E]
            counted = real  # which gates are of real tokens, [B, N or 1]
            if probs.shape[1] != real.shape[1]:
                counted = real.any(1, keepdim=True)
            gates = probs[counted]  # [gates, E]
            chosen = select_top_k(probs.permute(2, 0, 1), k).permute(1, 2, 0)  # [B, N or 1, E]
            self.entropies[layer] -= torch.xlogy(gates, gates).sum()
            self.gates[layer] += len(gates)
            self.loads[layer] += chosen[counted].sum(0)
            if layer == 0:
                rows = chosen.expand(*real.shape, -1)[real]  # [real tokens, E]
                self.tokens.index_add_(0, tokens[real], rows.double())

    def reduce(self, sum_over_processes: Callable[[Tensor], Tensor]) -> None:
        """Sum the statistics over all processes, in place."""
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

        -inf: the token never went to the expert; nan: one of the two never occurs. (Zhang 2022 prints no logarithm.)
        """
        joint = self.tokens
        return (joint * joint.sum() / (joint.sum(1, keepdim=True) * joint.sum(0))).log()

    def top_tokens(self, count: int = 5, min_count: int = 5) -> list[list[int]]:
        """Return, for each expert, the ids of the tokens with the largest PMI; on ties the more frequent ones.

        Tokens that occur less than `min_count` times are left out: a token that occurs once is perfectly indicative by
        chance.
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
    """Statistics of the gates of one stack that read the same text."""

    stack: str  # "encoder", "decoder", or "model" where there is no encoder
    text: str  # what the gates read: "source", "target", or "text" where nothing is translated
    layers: dict[int, str]  # index in the list of all layers' statistics -> name
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
    """Run the model on this process's share of a data set; return the content of RUN/gates.json but its split.

    Statistics are over all processes. Columns are by stack and text, tokens by layer, and mean_entropy by stack (Peng
    2020, section 5.1, gives the encoder's alone). All are empty for a model without gates. The model is left in eval
    mode.
    """
    readings = gated_layers(model, vocabularies)
    model.eval()
    if readings:
        for batch in Progress.over(batches, "gates", enabled=accelerator.is_main_process):
            batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            _count(readings, model, batch, accelerator)
    columns: dict[str, str] = {}
    entropies: dict[str, list[float]] = {}  # by stack
    layers: list[dict] = []
    tokens: dict[str, list[list[str]]] = {}  # by the name of a first layer
    for reading in readings:
        counted = reading.statistics
        counted.reduce(total)
        columns[f"{reading.stack}, {reading.text}"] = reading.columns
        entropies.setdefault(reading.stack, []).extend(counted.entropy())
        names = list(reading.layers.values())
        for name, experts, entropy, load in zip(
            names, counted.experts, counted.entropy(), counted.load()
        ):
            layers.append(
                dict(
                    name=name,
                    part=reading.stack,
                    reads=reading.text,
                    experts=experts,
                    entropy=entropy,
                    load=load.tolist(),
                )
            )
        tokens[names[0]] = [
            [readable(reading.vocabulary, token_id) for token_id in ids]
            for ids in counted.top_tokens()
        ]
    mean = {stack: statistics.mean(values) for stack, values in entropies.items()}
    return dict(columns=columns, mean_entropy=mean, layers=layers, tokens=tokens)


def _count(readings: list[GateReading], model: nn.Module, batch: dict, accelerator) -> None:
    """Add the gates of a batch to the statistics of each reading."""
    with accelerator.autocast():
        _, _, stats = model.routed_loss(**batch)
    mask = batch.get("attention_mask")
    for reading in readings:
        if reading.text == "target":
            ids = batch["decoder_input_ids"]
            padding = batch["labels"] == -100
        else:
            ids = batch["input_ids"]
            padding = None if mask is None else mask == 0
        reading.statistics.update([stats[index] for index in reading.layers], ids, padding)


def gate_text(record: dict, title: str) -> str:
    """Return the result of `read_gates` as Markdown: entropy, load and tokens."""
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
    """Return a Markdown table of every layer's entropy and load, and the mean entropy."""
    most = max(layer["experts"] for layer in layers)
    lines = [
        "| layer | entropy, nats | uniform | "
        + " | ".join(f"E{i + 1}, %" for i in range(most))
        + " |",
        "|---|" + "---:|" * (most + 2),
    ]
    for layer in layers:
        shares = [f"{100 * share:.1f}" for share in layer["load"]]
        shares += [""] * (most - layer["experts"])
        uniform = math.log(layer["experts"])
        cells = [layer["name"], f"{layer['entropy']:.2f}", f"{uniform:.2f}", *shares]
        lines.append("| " + " | ".join(cells) + " |")
    mean = sum(layer["entropy"] for layer in layers) / len(layers)
    uniform = sum(math.log(layer["experts"]) for layer in layers) / len(layers)
    lines.append(f"| mean | {mean:.2f} | {uniform:.2f} |" + " |" * most)
    return "\n".join(lines)


def token_table(top: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of indicative tokens, with a column for each expert (Peng 2020, table 6)."""
    lines = [
        "| " + " | ".join(f"expert {i + 1}" for i in range(len(top))) + " |",
        "|" + "---|" * len(top),
    ]
    for row in itertools.zip_longest(*top, fillvalue=""):
        lines.append("| " + " | ".join(token.replace("|", "\\|") for token in row) + " |")
    return "\n".join(lines)


def gated_layers(model: nn.Module, vocabularies: Sequence[Vocabulary]) -> list[GateReading]:
    """Return an empty `GateReading` for each stack and each text that gates of the stack read.

    Encoder and decoder are separate stacks, because Peng 2020, section 5.1, looks at encoders alone.
    """
    translates = hasattr(model, "encoder")
    named = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, HeadMixtureAttention)
    ]
    groups: dict[tuple[str, str], list[int]] = {}
    for index, (name, layer) in enumerate(named):
        if layer.router.gate_size() is None:
            continue
        stack = name.partition(".")[0]
        if stack not in ("encoder", "decoder"):
            stack = "model"
        if stack == "decoder" and not layer.by_context:
            text = "target"
        elif translates:
            text = "source"
        else:
            text = "text"
        groups.setdefault((stack, text), []).append(index)
    readings = []
    sequence = "sentence" if translates else "block"
    for (stack, text), indices in groups.items():
        names = {index: named[index][0] for index in indices}
        layers = [named[index][1] for index in indices]
        vocabulary = vocabularies[1 if text == "target" else 0]
        columns = " ".join(dict.fromkeys(columns_of(layer, layers, sequence) for layer in layers))
        counted = GateStatistics([layer.router.gate_size() for layer in layers], len(vocabulary))
        readings.append(GateReading(stack, text, names, counted, vocabulary, columns))
    return readings


def columns_of(
    layer: HeadMixtureAttention, layers: Sequence[HeadMixtureAttention], sequence: str
) -> str:
    """Return a sentence that explains the columns E1, E2, ... of a layer's gate.

    `layers` are all layers of the reading, and `sequence` is what a row of the model's input is called.
    """
    unit = "token"
    if layer.chooses_once:
        unit = sequence
    router_class = type(layer.router)
    alike = [other.budget for other in layers if type(other.router) is router_class]
    return layer.router.gate_columns(unit, alike)


def readable(vocabulary: Vocabulary, token_id: int) -> str:
    """Return a token as text, with _ for a leading blank (in BPE, G with a dot)."""
    token = vocabulary.token(token_id)
    text = vocabulary.decode([token_id])
    # A special token, a blank, or bytes that are no whole character.
    if not text or "\ufffd" in text:
        return token
    if vocabulary.scheme == "bpe" and token.startswith("\u0120"):
        return "_" + text
    return text
