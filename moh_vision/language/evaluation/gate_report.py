"""Entropy, load and preferred tokens of a text model's gates on a data set (Peng 2020, Zhang 2022)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor, nn

from moh_vision.analysis.gate_figures import draw_gate_load
from moh_vision.analysis.gates import GateReading, GateStatistics, layer_entropies, part_entropies, reading_text
from moh_vision.attention import HeadMixtureAttention
from moh_vision.attention.routers import MAERouter
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.commands import Progress
from moh_vision.engine.io import write_whole
from moh_vision.engine.ranks import total_over_processes
from moh_vision.engine.run import index_dir, make_accelerator
from moh_vision.language.config import LanguageConfig
from moh_vision.language.data.inputs import INPUTS
from moh_vision.language.data.vocabulary import Vocabulary
from moh_vision.language.models.build import task_for
from moh_vision.models.weights import load_run


class Group(NamedTuple):
    """Layers of one part of a model whose gates read the same tokens."""

    part: str  # "encoder", "decoder", or "model" where there is no encoder
    reads: str  # "input_ids" or "decoder_input_ids"
    vocabulary: Vocabulary
    names: List[str]
    places: List[int]  # in the list of all layers' statistics
    statistics: GateStatistics
    columns: str  # what E1, E2, ... are


def open_gates(folder: Path, split: str) -> List[GateReading]:
    """Read the gates of a finished run on its split "val" or "test"; empty for a model without gates. The weights are
    those that were scored in results.json.
    """
    config = parse_config(LanguageConfig, ["--config", str(folder / "config.yaml")], "gates")
    model = load_run(folder / json.loads((folder / "results.json").read_text())["weights"])
    cache = str(Path(index_dir(str(folder)), "text"))
    text = INPUTS[task_for(config.model)](config.data, cache, config.seed, str(folder), training=False)
    accelerator = make_accelerator("no")
    batches = text.eval_batches(getattr(text, split), accelerator.process_index, accelerator.num_processes)
    return read_gates(model.to(accelerator.device), batches, text.vocabularies, accelerator)


def report_gates(
    model: nn.Module,
    batches: Iterable[Dict[str, Tensor]],
    vocabularies: Sequence[Vocabulary],
    run: Path,
    accelerator,
    split: str,
) -> Dict[str, Dict[str, float]]:
    """Write OUTPUT/gates.md (entropy and load of every layer, the tokens that point to each expert) and
    gate_load.png. Return gate_entropy by layer and mean_gate_entropy by part, in nats. A model without gates gets no
    files and an empty dict.
    """
    readings = read_gates(model, batches, vocabularies, accelerator)
    if not readings:
        return {}
    entropies = layer_entropies(readings)
    if accelerator.is_main_process:
        load = [shares for reading in readings for shares in reading.statistics.load()]
        read: Dict[str, List[str]] = {}
        for r in readings:
            read.setdefault(r.columns, []).append(f"{r.part}, {r.text}")
        note = "\n".join(f"{'; '.join(by)}: {columns}" if len(read) > 1 else columns for columns, by in read.items())
        draw_gate_load(load, list(entropies), str(run / "gate_load.png"), f"load of the experts, {split}", note)
        write_whole(run / "gates.md", reading_text(readings, f"# What the gates do with {split}"))
    found = dict(gate_entropy=entropies, mean_gate_entropy=part_entropies(readings))
    return {key: {name: round(value, 4) for name, value in values.items()} for key, values in found.items()}


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
