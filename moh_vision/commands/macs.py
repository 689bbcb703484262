"""Count parameters and multiply-accumulates (MACs) of a model, beside the papers' numbers.

python -m moh_vision macs mt_moa_8K8E128D
python -m moh_vision macs moh_vit_small_patch16_224

The papers count one forward of batch 1: linear layers with the active heads, no attention scores; 10 source
and 10 target tokens for translation with 32,000 words, 128 tokens for masked language models (Zhang 2022,
appendix E). MoA's rows for masked models (table 2) are linear layers plus twice the attention scores. Below,
the table of modules that `--dry-run` also prints.
"""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import timm
import torch
import yaml

from moh_vision.engine.commands import say
from moh_vision.models.counts import Macs, count_macs, count_parameters
from moh_vision.models.describe import aligned, module_table
from moh_vision.models.weights import image_models

TOKENS = {"mt": 10, "mlm": 128, "clm": 512}  # of each text
# Zhang's parameters count a dictionary of about 37,000 words, its MACs 32,000 words.
MACS_WORDS = {"mt": 32_000}
SIZED = ("WMT14 EN-DE", "WikiText-103")  # data whose words our presets use
# Peng 2020, table 2 (Zhang has it with more words); Jin 2024, appendix A.
OTHERS = {
    "mt_transformer_base": (61, 604),
    "clm_small": (186, None),
    "clm_moh_small_75": (186, None),
    "clm_moh_small_50": (186, None),
    "clm_base": (881, None),
    "clm_moh_base_75": (882, None),
    "clm_moh_base_50": (882, None),
}


def sizes_of_papers() -> dict[str, tuple]:
    """Read the papers' parameters and MACs of text presets, in millions."""
    found = {}
    for row in yaml.safe_load(Path(__file__).with_name("paper_rows.yaml").read_text(encoding="utf-8")):
        if row["data"] in SIZED and "parameters" in row:
            printed = [row.get(key, "").replace(",", "") for key in ("parameters", "macs")]
            found[row["model"]] = tuple(map(yaml.safe_load, printed))
    return found | OTHERS


PAPERS = sizes_of_papers()


class Count(NamedTuple):
    """What `count` found."""

    about: str  # one line
    parameters: int
    parameters_of: str  # their vocabulary, or nothing
    macs: Macs
    macs_of: str


def count(preset: str, tokens: int | None = None, vocab: int | None = None) -> Count:
    """Count a text preset or an image model; the default input is the papers'."""
    for option, value in (("tokens", tokens), ("vocab", vocab)):
        if value is not None and value < 1:
            raise ValueError(f"--{option} {value}: expected 1 or more")
    if preset not in image_models():
        return _count_text(preset, tokens, vocab)
    if tokens is not None or vocab is not None:
        raise ValueError(f"--tokens and --vocab are for text models, {preset} reads images")
    with torch.device("meta"):
        model = timm.create_model(preset)
        inputs = [torch.zeros(1, *model.pretrained_cfg["input_size"])]
        if preset in timm.list_models(module="dit"):
            inputs += [torch.zeros(1, dtype=torch.long)] * 2  # timestep and class
    about = f"{preset}, input {' x '.join(str(n) for n in inputs[0].shape[1:])}, batch 1"
    return Count(about, count_parameters(model), "", count_macs(model, *inputs), "")


def _count_text(preset: str, tokens: int | None, vocab: int | None) -> Count:
    from moh_vision.language.models.create import create_text_model  # with packages of an extra

    def model_of(**words: int):
        with torch.device("meta"):
            return create_text_model(preset, **words)

    kind, model = preset.partition("_")[0], model_of(**dict(vocab_size=vocab) if vocab else {})
    own = model.config.vocab_size
    words, length = vocab or MACS_WORDS.get(kind, own), tokens or TOKENS[kind]
    ids = torch.zeros(1, length, dtype=torch.long)
    about, named = f"{length} tokens", {}
    if kind == "mt":
        about, named = f"{length} source and {length} target tokens", dict(decoder_input_ids=ids)
    macs = count_macs(model if words == own else model_of(vocab_size=words), ids, **named)
    parameters = count_parameters(model)
    return Count(f"{preset}, {about}, batch 1", parameters, f", {own:,} words", macs, f", {words:,} words")


def report(preset: str, found: Count) -> str:
    """Return the tables that are printed."""
    macs = found.macs
    parameters, millions = PAPERS.get(preset, (None, None))
    twice = preset.startswith("mlm_moa")  # as table 2 counts
    rows = [
        ("", "counted", "paper", "difference"),
        (f"parameters{found.parameters_of}", *_beside(found.parameters, parameters)),
        (f"MACs of linear layers{found.macs_of}", *_beside(macs.linears, None if twice else millions)),
        ("MACs of attention scores", f"{macs.scores:,}", "", ""),
    ]
    notes = [
        "Equations 18 to 20 are those of Zhang 2022. They count one of the two products with the attention matrix, and leave",
        "out routers and biases.",
    ]
    if twice:
        both = _beside(macs.linears + 2 * macs.scores, millions)
        rows.append(("MACs of linear layers and twice the scores", *both))
        of_moa = "Its table 2 has linear layers and twice the scores for MoA, linear layers alone for the dense model."
        notes.append(of_moa)
    rows.append(("MACs with every head and routers", f"{macs.every_head:,}", "", ""))
    rows += [("", "", "", ""), *_attention_rows(macs)]
    return "\n".join([found.about, "", *aligned(rows), "", *notes, "", *module_table(macs)])


def _attention_rows(macs: Macs) -> list[tuple[str, ...]]:
    """Return a row per kind of attention layer, and of the papers' equations."""
    rows = [("one attention layer", "linears", "scores", "parameters")]
    groups = Counter(layer._replace(name="") for layer in macs.attention)

    def add(label: str, *numbers: int) -> None:
        rows.append((label, *(f"{n:,}" for n in numbers)))

    for layer, number in groups.items():
        b, N, M, d = layer.budget, layer.queries, layer.keys, layer.dim
        K, E, D = b.active, b.heads, b.head_dim
        label = f"{number} x {layer.router}, {K} of {E} heads of width {D}"
        add(label, layer.linears, layer.scores, layer.parameters)
        if layer.router == "moa":
            add("  MoA by eq. 18 and 20", 2 * K * N * D * d + 2 * M * D * d, K * N * M * D, (2 * E + 2) * D * d)
    for N, M, d in dict.fromkeys((layer.queries, layer.keys, layer.dim) for layer in groups):
        add(f"multi-head attention of {d} by eq. 19 and 20", 2 * (N + M) * d * d, N * M * d, 4 * d * d)
    return rows


def _beside(counted: int, paper: float | None) -> tuple[str, str, str]:
    """Return a count, the paper's number in millions, and their difference."""
    if paper is None:
        return f"{counted:,}", "-", ""
    difference = round(100 * (counted / (paper * 1e6) - 1), 2) + 0.0  # + 0.0: no -0.00
    return f"{counted:,}", f"{paper:,} M", f"{difference:+.2f} %"


def options(add) -> None:
    add("preset", metavar="PRESET", help="text preset, or one of our image models")
    add("--tokens", type=int, metavar="N", help="length of each text (10, 128 or 512, as in the papers)")
    add("--vocab", type=int, metavar="V", help="words (the preset's)")


def work(options) -> None:
    say(report(options.preset, count(options.preset, options.tokens, options.vocab)))
