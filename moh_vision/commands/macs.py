"""Parameters and multiply-accumulates (MACs) of a model, counted from its modules and beside the papers' figures.

python -m moh_vision macs mt_moa_8K8E128D
python -m moh_vision macs moh_vit_small_patch16_224

PRESET is a text preset or the name of one of our image models. The papers count a forward of batch 1: linear layers with
the active heads alone, no attention scores; 10 source and 10 target tokens for translation with 32,000 words to choose
from, 128 tokens for masked language models (Zhang 2022, appendix E). The rows of masked models with MoA (table 2) equal
linear layers plus twice the attention scores. Below that, the table of modules that `--dry-run` prints of a run: dense
and ideal.
"""

from __future__ import annotations

from collections import Counter
from typing import List, NamedTuple, Optional, Tuple

import timm
import torch
from torch import nn

from moh_vision.engine.commands import Parser, exit_code, say
from moh_vision.models.counts import Macs, count_macs, count_parameters
from moh_vision.models.describe import aligned, module_table
from moh_vision.models.weights import FAMILIES

# (parameters, MACs) in millions as the papers print them: Zhang 2022, tables 1 to 3; Peng 2020, tables 2 and 4; Jin 2024,
# appendix A.
PAPERS = {
    "mt_transformer_base": (61, 604),
    "mt_transformer_big": (210, 2090),
    "mt_mae_7": (63, None),
    "mt_mae_6": (63, None),
    "mt_uni_mae_7": (61, None),
    "mt_uni_mae_6": (61, None),
    "mt_nobcd": (63, None),
    "mt_moa_8K8E128D": (65, 628),
    "mt_moa_8K8E256D": (87, 841),
    "mt_moa_8K16E256D": (125, 841),
    "mt_moa_8K32E64D": (83, 524),
    "mt_moa_8K32E128D": (123, 631),
    "mt_moa_8K32E256D": (200, 841),
    "mt_moa_4K32E256D": (200, 654),
    "mt_moa_16K32E256D": (200, 1220),
    "mlm_base": (51.34, 6550),
    "mlm_moa_8K8E128D": (52.45, 7270),
    "mlm_moa_8K8E256D": (61.89, 8970),
    "mlm_moa_8K16E256D": (78.75, 8970),
    "mlm_moa_8K32E256D": (112.47, 8980),
    "mlm_moa_8K64E256D": (179.91, 8980),
    "clm_wt103_base": (247, None),
    "clm_wt103_mae_7": (249, None),
    "clm_wt103_uni_mae_7": (247, None),
    "clm_wt103_nobcd": (249, None),
    "clm_small": (186, None),
    "clm_moh_small_75": (186, None),
    "clm_moh_small_50": (186, None),
    "clm_base": (881, None),
    "clm_moh_base_75": (882, None),
    "clm_moh_base_50": (882, None),
}


class Count(NamedTuple):
    """What `count` found of a preset."""

    about: str  # one line
    parameters: int
    parameters_of: str  # which vocabulary they are of, or nothing
    macs: Macs
    macs_of: str


def count(preset: str, tokens: Optional[int] = None, vocab: Optional[int] = None) -> Count:
    """Parameters and MACs of a preset, of its papers' input unless said otherwise.

    Args:
        preset: text preset or image model.
        tokens: length of each text; None: the papers'.
        vocab: words; None: the preset's, and for the MACs of a translation model 32,000.

    Raises:
        ValueError: for an unknown preset, a number below 1, or tokens or vocab for a model of images.
    """
    for option, value in (("tokens", tokens), ("vocab", vocab)):
        if value is not None and value < 1:
            raise ValueError(f"--{option} {value}: expected 1 or more")
    if preset in _image_models():
        if tokens is not None or vocab is not None:
            raise ValueError(f"--tokens and --vocab are for text models, {preset} reads images")
        model, inputs = _image_model(preset)
        about = f"{preset}, input {' x '.join(str(n) for n in inputs[0].shape[1:])}, batch 1"
        return Count(about, count_parameters(model), "", count_macs(model, *inputs), "")

    return registered("counter", "text")(preset, tokens, vocab)


def _image_models() -> List[str]:
    return [name for modules in FAMILIES.values() for module in modules for name in timm.list_models(module=module)]


def _image_model(name: str) -> Tuple[nn.Module, List[torch.Tensor]]:
    """A model without memory, and its inputs."""
    with torch.device("meta"):
        model = timm.create_model(name)
        inputs = [torch.zeros(1, *model.pretrained_cfg["input_size"])]
        if name in timm.list_models(module="dit"):
            inputs += [torch.zeros(1, dtype=torch.long)] * 2  # timestep and class
    return model, inputs


def report(preset: str, found: Count) -> str:
    """The tables that the command prints."""
    macs = found.macs
    parameters, millions = PAPERS.get(preset, (None, None))
    rows = [
        ("", "counted", "paper", "difference"),
        (f"parameters{found.parameters_of}", f"{found.parameters:,}", *_beside(found.parameters, parameters)),
    ]
    if not macs.attention:
        rows.append(("MACs", f"{macs.every_head:,}", "-", ""))
        notes = ["Attention computes every head in this model."]
        return "\n".join([found.about, "", *aligned(rows), "", *notes, "", *module_table(macs)])
    twice = preset.startswith("mlm_moa")  # as table 2 counts
    rows += [
        (
            f"MACs of linear layers{found.macs_of}",
            f"{macs.linears:,}",
            *_beside(macs.linears, None if twice else millions),
        ),
        ("MACs of attention scores", f"{macs.scores:,}", "", ""),
    ]
    if twice:
        both = macs.linears + 2 * macs.scores
        rows.append(("MACs of linear layers and twice the scores", f"{both:,}", *_beside(both, millions)))
    rows += [
        ("MACs with every head computed", f"{macs.every_head:,}", "", ""),
        ("", "", "", ""),
        ("one attention layer", "linears", "scores", "parameters"),
    ]
    # Alike in what is shown.
    groups = Counter(layer._replace(name="") for layer in macs.attention)
    for layer, number in groups.items():
        b, N, M, d = layer.budget, layer.queries, layer.keys, layer.dim
        K, E, D = b.active, b.heads, b.head_dim
        about = f"{number} x {layer.router}, {K} of {E} heads of width {D}"
        rows.append((about, f"{layer.linears:,}", f"{layer.scores:,}", f"{layer.parameters:,}"))
        if layer.router == "moa":
            equations = (2 * K * N * D * d + 2 * M * D * d, K * N * M * D, (2 * E + 2) * D * d)
            rows.append(("  MoA by eq. 18 and 20", *(f"{n:,}" for n in equations)))
    for N, M, d in dict.fromkeys((layer.queries, layer.keys, layer.dim) for layer in groups):
        equations = (2 * (N + M) * d * d, N * M * d, 4 * d * d)
        rows.append((f"multi-head attention of {d} by eq. 19 and 20", *(f"{n:,}" for n in equations)))
    notes = [
        "Equations 18 to 20 are those of Zhang 2022. They count one of the two products with the attention matrix, and leave",
        "out routers and biases.",
    ]
    if twice:
        notes.append(
            "Its table 2 has linear layers and twice the scores for MoA, linear layers alone for the dense model."
        )
    return "\n".join([found.about, "", *aligned(rows), "", *notes, "", *module_table(macs)])


def _beside(counted: int, paper: Optional[float]) -> Tuple[str, str]:
    """A paper's millions, and how far the count is from them."""
    if paper is None:
        return "-", ""
    return f"{paper:,} M", f"{round(100 * (counted / (paper * 1e6) - 1), 2) + 0.0:+.2f} %"  # + 0.0: no -0.00


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, or 2 for a user's mistake."""
    parser = Parser("python -m moh_vision macs", __doc__)
    add = parser.add_argument
    add("preset", metavar="PRESET", help="text preset, or one of our image models")
    add("--tokens", type=int, metavar="N", help="length of each text (10, 128 or 512, as in the papers)")
    add("--vocab", type=int, metavar="V", help="words (the preset's)")

    def work() -> None:
        options = parser.parse(argv)
        say(report(options.preset, count(options.preset, options.tokens, options.vocab)))

    return exit_code("macs", work)


if __name__ == "__main__":
    raise SystemExit(main())
