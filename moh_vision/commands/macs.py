"""Count parameters and multiply-accumulates (MACs) of a model, beside the papers' numbers.

python -m moh_vision macs mt_moa_8K8E128D
python -m moh_vision macs moh_vit_small_patch16_224

The papers count one forward of batch 1: linear layers with the active heads, no attention scores; 10 source
and 10 target tokens for translation with 32,000 words, 128 tokens for masked language models (Zhang 2022,
appendix E). MoA's rows for masked models (table 2) are linear layers plus twice the attention scores. Below,
the table of modules that `--dry-run` also prints.
"""

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


PAPER_ROWS = yaml.safe_load(Path(__file__).with_name("paper_rows.yaml").read_text(encoding="utf-8"))


def sizes_of_papers() -> dict[str, tuple]:
    """Return the papers' parameters and MACs of text presets, in millions."""
    sizes = {}
    for row in PAPER_ROWS:
        if row["data"] in SIZED and "parameters" in row:
            printed = [row.get(key, "").replace(",", "") for key in ("parameters", "macs")]
            sizes[row["model"]] = tuple(map(yaml.safe_load, printed))
    return sizes | OTHERS


PAPERS = sizes_of_papers()


class Count(NamedTuple):
    """The parameters and MACs of a model, with the vocabularies that they are of."""

    title: str
    parameters: int
    parameters_words: str
    macs: Macs
    macs_words: str


def count(preset: str) -> Count:
    """Count a text preset or an image model, with the papers' input."""
    if preset not in image_models():
        return _count_text(preset)
    with torch.device("meta"):
        model = timm.create_model(preset)
        inputs = [torch.zeros(1, *model.pretrained_cfg["input_size"])]
        if preset in timm.list_models(module="dit"):
            inputs += [torch.zeros(1, dtype=torch.long)] * 2  # timestep and class
    title = f"{preset}, input {' x '.join(str(n) for n in inputs[0].shape[1:])}, batch 1"
    return Count(title, count_parameters(model), "", count_macs(model, *inputs), "")


def _count_text(preset: str) -> Count:
    from moh_vision.language.models.create import create_text_model  # with packages of an extra

    def model_of(**words: int):
        with torch.device("meta"):
            return create_text_model(preset, **words)

    kind, model = preset.partition("_")[0], model_of()
    own = model.config.vocab_size
    words, length = MACS_WORDS.get(kind, own), TOKENS[kind]
    ids = torch.zeros(1, length, dtype=torch.long)
    tokens, named = f"{length} tokens", {}
    if kind == "mt":
        tokens, named = f"{length} source and {length} target tokens", dict(decoder_input_ids=ids)
    macs = count_macs(model if words == own else model_of(vocab_size=words), ids, **named)
    return Count(
        f"{preset}, {tokens}, batch 1", count_parameters(model), f", {own:,} words", macs, f", {words:,} words"
    )


def report(preset: str, counted: Count) -> str:
    """Return the tables that are printed."""
    macs = counted.macs
    parameters, millions = PAPERS.get(preset, (None, None))
    twice = preset.startswith("mlm_moa")  # as table 2 counts
    rows = [
        ("", "counted", "paper", "difference"),
        (f"parameters{counted.parameters_words}", *_beside(counted.parameters, parameters)),
        (f"MACs of linear layers{counted.macs_words}", *_beside(macs.linears, None if twice else millions)),
        ("MACs of attention scores", f"{macs.scores:,}", "", ""),
    ]
    if twice:
        both = _beside(macs.linears + 2 * macs.scores, millions)
        rows.append(("MACs of linear layers and twice the scores", *both))
    rows.append(("MACs with every head and routers", f"{macs.every_head:,}", "", ""))
    return "\n".join([counted.title, "", *aligned(rows), "", *module_table(macs)])


def _beside(counted: int, paper: float | None) -> tuple[str, str, str]:
    """Return a count, the paper's number in millions, and their difference."""
    if paper is None:
        return f"{counted:,}", "-", ""
    difference = round(100 * (counted / (paper * 1e6) - 1), 2) + 0.0  # + 0.0: no -0.00
    return f"{counted:,}", f"{paper:,} M", f"{difference:+.2f} %"


def options(add) -> None:
    add("preset", metavar="PRESET", help="text preset, or one of our image models")


def work(options) -> None:
    say(report(options.preset, count(options.preset)))
