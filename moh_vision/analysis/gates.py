"""What the gates of language models do with a text: entropy, load of the experts, and the tokens that they prefer.

python -m moh_vision.analysis.gates RUN RUN ... --output gates.png > gates.md

RUN is the folder of a finished run of train_text.py; all are of one kind. Each model reads its data.val (--split test: its
data.test) once more. Printed, as Markdown:

- mean entropy of the gates, of encoder and decoder apart, and for translation the BLEU with one expert in each attention of
  the encoder, from results.json (generate.gate_modes): Peng 2020 (MAE), section 5.1 and table 5. Runs that differ in nothing
  but the seed make one row: the mean and the standard deviation.
- of each run the load of the experts (Peng 2020, table 8) and the tokens of largest PMI with each expert (Peng 2020, table
  6; Zhang 2022, table 4). Experts of different seeds have no common numbers, so these are not averaged.

The figure has the entropy of every layer, gates.json all numbers.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from moh_vision.analysis.figures import check_figure, write_figure
from moh_vision.analysis.gate_figures import draw_gate_entropy
from moh_vision.analysis.table import TEXT, ScoredRun, Table, grouped, markdown, mean_and_spread, read_runs
from moh_vision.attention import HeadMixtureAttention, RoutingStats
from moh_vision.attention.kernels.eager import select_top_k
from moh_vision.engine.commands import Parser, exit_code, say
from moh_vision.models.registry import registered


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


Reading = Tuple[ScoredRun, List[GateReading]]


def entropy_table(groups: Sequence[Tuple[str, List[Reading]]]) -> Table:
    """Mean entropies, and BLEU with one expert in each attention of the encoder (Peng 2020, section 5.1 and table 5).

    Args:
        groups: runs that differ in nothing but the seed, by their name.
    """
    rows: List[Dict[str, str]] = []
    for name, group in groups:
        entropies = [part_entropies(readings) for _, readings in group]
        row = {"model": name, "runs": str(len(group))}
        for part in entropies[0]:
            row[f"entropy, {part}"] = mean_and_spread([found[part] for found in entropies], 2)
        experts = [E for _, readings in group for r in readings for E in r.statistics.experts]
        if experts:
            row["uniform"] = " to ".join(f"{math.log(E):.2f}" for E in sorted({min(experts), max(experts)}))
        scores = [run.scores for run, _ in group]
        row["BLEU"] = mean_and_spread([score.get("bleu") for score in scores], 2)
        for key, title in (("bleu_argmax", "most probable expert"), ("bleu_random", "random expert")):
            pairs = [(score["bleu"], score[key]) for score in scores if score.get(key) is not None]
            row[title] = mean_and_spread([one for _, one in pairs], 2)
            row[f"{title}, change"] = mean_and_spread([one - whole for whole, one in pairs], 2)
        row["random expert, std of draws"] = mean_and_spread([score.get("bleu_random_std") for score in scores], 2)
        rows.append(row)
    order = ["model", "runs", *(f"entropy, {part}" for part in ("encoder", "decoder", "model")), "uniform", "BLEU"]
    order += dict.fromkeys(title for row in rows for title in row if "expert" in title)
    titles = [title for title in order if any(row.get(title, "-") != "-" for row in rows)]
    notes = ["Entropy in nats. Mean ± standard deviation over runs that differ in nothing but the seed."]
    for name, group in groups:
        notes.append(f"{name}: {', '.join(str(run.folder) for run, _ in group)}; {group[0][0].how}.")
    return Table(titles, [[row.get(title, "-") for title in titles] for row in rows], notes)


def as_numbers(groups: Sequence[Tuple[str, List[Reading]]], split: str) -> dict:
    """All that the command finds, for its JSON file."""
    found = []
    for name, group in groups:
        for run, readings in group:
            about = dict(run=str(run.folder), name=name, seed=run.config.get("seed"))
            scores = {key: value for key, value in run.scores.items() if key.startswith("bleu") and value is not None}
            layers = [
                dict(name=layer, part=r.part, reads=r.text, experts=E, entropy=entropy, load=load.tolist())
                for r in readings
                for layer, E, entropy, load in zip(
                    r.layers, r.statistics.experts, r.statistics.entropy(), r.statistics.load()
                )
            ]
            tokens = {r.layers[0]: r.tokens for r in readings}
            found.append(dict(about, mean_entropy=part_entropies(readings), layers=layers, tokens=tokens, **scores))
    return dict(split=split, runs=found)


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, or 2 for a user's mistake."""
    parser = Parser("python -m moh_vision.analysis.gates", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished run of train_text.py")
    add("--output", required=True, type=Path, metavar="FILE", help=".png or .svg; FILE.json has the numbers")
    add("--split", default="val", choices=("val", "test"), help="of the run's data (%(default)s)")

    def work() -> None:
        options = parser.parse(argv)
        check_figure("--output", options.output)
        runs = read_runs(options.runs)
        if runs[0].kind not in TEXT.values():
            raise ValueError(f"{runs[0].folder} ({runs[0].kind}): expected runs of train_text.py")
        if options.split == "test":
            for run in runs:
                if run.config.get("data.test") is None:
                    raise ValueError(f"--split test: {run.folder} has no data.test")
        opener = registered("gates", "text")
        read = {run.folder: opener(run.folder, options.split) for run in runs}
        if not any(read.values()):
            raise ValueError(
                f"{', '.join(str(run.folder) for run in runs)}: none has a gate with a distribution over experts"
            )
        groups = [(name, [(run, read[run.folder]) for run in group]) for name, group in grouped(runs)]
        entropies: Dict[str, Dict[str, List[float]]] = {}
        experts = []
        for name, group in groups:
            for _, readings in group:
                experts += [E for r in readings for E in r.statistics.experts]
                for layer, value in layer_entropies(readings).items():
                    entropies.setdefault(name, {}).setdefault(layer, []).append(value)
        title = f"entropy of the gates, {options.split}"
        write_figure(draw_gate_entropy(entropies, experts, title), options.output, as_numbers(groups, options.split))
        say(markdown(entropy_table(groups)) + "\n")
        for name, group in groups:
            for run, readings in group:
                if readings:
                    say(reading_text(readings, f"## {name}, seed {run.config.get('seed')}"))

    return exit_code("gates", work)


if __name__ == "__main__":
    raise SystemExit(main())
