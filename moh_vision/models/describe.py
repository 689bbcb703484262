"""Summarise a model: sizes, every layer's budget, parameters and MACs of every module."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from torch import Tensor, nn

from moh_vision.attention import head_budget
from moh_vision.attention.model_heads import routers_of, single_routed
from moh_vision.models.counts import Macs, count_macs, count_parameters

LAYER = "{:5d}  {heads:5d}  {head_dim:5d}  {shared:6d}  {routed:6d}  {active:6d}  {name}"
GROUPS = LAYER.replace("{heads:5d}", "{heads:6d}")  # under a wider title
# Groups: the last number in a module's name, and the text before and after: "blocks.3.mlp" -> "blocks.", "3", ".mlp".
LAST_NUMBER = re.compile(r"^((?:.*\.)?)(\d+)((?:\..*)?)$")
# Arguments by which a model gets another size than its name says.
SIZES = (
    "patch_size",
    "embed_dim",
    "embed_dims",
    "depth",
    "depths",
    "num_heads",
    "mlp_ratio",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "encoder_layers",
    "decoder_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "class_tokens",
)
# Arguments by which a model gets other blocks than its name says.
BLOCK = ("norm_layer", "swiglu_mlp", "use_rot_pos_emb", "qk_norm")


def full_name(name: str, arguments: dict) -> str:
    """Return a model's name with the sizes and blocks that its arguments change: moh_dit_small_patch2_75 with patch_size 4.

    The name of a pre-trained source follows in brackets, because `name` then says little.
    """
    source = arguments.get("pretrained")
    if isinstance(source, str):
        name = f"{name} ({Path(source).name})"
    changed = [f"{key} {arguments[key]}" for key in SIZES if arguments.get(key) is not None]
    for key in BLOCK:
        value = arguments.get(key)
        if value is True:
            changed.append(key)
        elif isinstance(value, str):
            changed.append(f"{key} {value}")
    for key in ("head_budget", "mlp_budget"):
        budget = arguments.get(key)
        if isinstance(
            budget, (int, float, str)
        ):  # a list is left out: `describe` shows every layer
            changed.append(f"{key} {budget}")
    if not changed:
        return name
    return f"{name} with {', '.join(changed)}"


def describe(name: str, model: nn.Module, *inputs: Tensor, **named: Tensor) -> str:
    """Return the text that `--dry-run` prints.

    inputs, named: arguments of one forward of batch 1; only their shapes matter.
    """
    budget = head_budget(model)
    shapes = [str(list(i.shape)) for i in inputs]
    shapes += [f"{key} {list(i.shape)}" for key, i in named.items()]
    lines = [
        f"{name} ({type(model).__name__}), input {' '.join(shapes)}",
        "",
        "layer  heads  width  shared  routed  active  name",
        *(LAYER.format(number, **layer) for number, layer in enumerate(budget["layers"])),
        *notes(model),
        f"active heads: {budget['active']} of {budget['heads']} ({100 * budget['share']:.1f} %)",
        *group_table(budget.get("mlp")),
        *filter(None, [single_routed(model)]),
        f"parameters:   {count_parameters(model):,}",
        "",
        *module_table(count_macs(model, *inputs, **named)),
    ]
    return "\n".join(lines)


def group_table(budget: dict | None) -> list[str]:
    """Return lines with the groups of every routed MLP, `mlp` of a `head_budget`; none for None."""
    if budget is None:
        return []
    return [
        "",
        "layer  groups  width  shared  routed  active  name",
        *(GROUPS.format(number, **layer) for number, layer in enumerate(budget["layers"])),
        f"active groups: {budget['active']} of {budget['heads']} ({100 * budget['share']:.1f} %)",
    ]


def in_short(name: str, model: nn.Module) -> str:
    """Return one line: parameters, active heads and groups, layers with one routed head, and notes of the routers."""
    budget = head_budget(model)
    share = f"{budget['active']} of {budget['heads']} heads active ({100 * budget['share']:.1f} %)"
    mlp = budget.get("mlp")
    if mlp is not None:
        share += f", {mlp['active']} of {mlp['heads']} groups of MLPs ({100 * mlp['share']:.1f} %)"
    short = dict.fromkeys(note.partition(";")[0] for note in notes(model))
    single = filter(None, [single_routed(model)])
    sizes = f"{name}: {count_parameters(model):,} parameters, {share}"
    return "; ".join([sizes, *single, *short])


def notes(model: nn.Module) -> list[str]:
    """Return what a budget does not show of a model's routers, each note once."""
    return list(filter(None, dict.fromkeys(router.note() for router in routers_of(model))))


def module_table(macs: Macs) -> list[str]:
    """Return the lines of a table: one row for each group of like modules, then totals."""
    decimals = 1 if macs.dense >= 1e9 else 3  # of MACs

    def shown(parameters: int, *counts: int) -> list[str]:
        """Write parameters and MACs in millions."""
        return [f"{parameters / 1e6:,.3f}", *(f"{count / 1e6:,.{decimals}f}" for count in counts)]

    rows = [("millions, of one forward of batch 1", "", "parameters", "MACs: dense", "ideal")]
    for label, number, *values in _groups(macs):
        times = f"{number} x" if number > 1 else ""
        rows.append((label, times, *shown(*values)))
    rows.append(("total", "", *shown(macs.parameters, macs.dense, macs.ideal)))
    every = "head"
    active = "heads"
    if any(row.part == "groups" for row in macs.modules):
        every = "head and group"
        active = "heads and groups"
    percent = 100 * macs.ideal / macs.dense
    return [
        *aligned(rows),
        "",
        f"MACs:         {macs.dense:,} dense (every {every}, no router); {percent:.1f} % of dense ideal",
        f"ideal:        the active {active} alone, and the routers",
    ]


def _groups(macs: Macs) -> list[tuple]:
    """Return (label, number of modules, parameters, dense MACs, ideal MACs) of each group of like modules.

    Modules are alike if their names differ in the last number only, and their dense MACs are equal. All modules
    without MACs are one group.
    """
    size = Counter()  # dense MACs by module name
    for row in macs.modules:
        size[row.name] += row.dense
    groups: dict[tuple, list] = {}
    small: list[tuple] = []  # modules without MACs
    for row in macs.modules:
        # Embeddings compute nothing, but have a row of their own.
        if row.part == "table" or row.dense or row.ideal:
            stem = LAST_NUMBER.sub(r"\1*\3", row.name)
            groups.setdefault((stem, row.part, size[row.name]), []).append(row)
        else:
            small.append(row)
    groups_of_rows = []
    for (stem, part, _), rows in groups.items():
        groups_of_rows.append((_label(stem, part, rows), len(rows), *_sums(rows)))
    if small:
        groups_of_rows.append(("norms, positions, scales", 0, *_sums(small)))
    return groups_of_rows


def _sums(rows: Sequence[tuple]) -> list[int]:
    """Sum parameters, dense MACs and ideal MACs of rows."""
    return [sum(column) for column in list(zip(*rows))[2:]]


def _label(stem: str, part: str, rows: Sequence[tuple]) -> str:
    """Join names of like modules: blocks.0.mlp, blocks.1.mlp, blocks.3.mlp -> blocks.0-1,3.mlp"""
    if "*" not in stem:
        return f"{stem} {part}".rstrip()
    numbers = sorted(int(LAST_NUMBER.sub(r"\2", row.name)) for row in rows)
    ranges = []
    # In a run of consecutive numbers, the number minus its index is constant.
    for _, pairs in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        consecutive = [number for _, number in pairs]
        if len(consecutive) == 1:
            ranges.append(str(consecutive[0]))
        else:
            ranges.append(f"{consecutive[0]}-{consecutive[-1]}")
    return f"{stem.replace('*', ','.join(ranges))} {part}".rstrip()


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align rows of equal length: the first column left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths)]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join(cells).rstrip())
    return lines
