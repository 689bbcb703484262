"""A model in a few lines: sizes, budget of every layer, parameters and MACs of every module."""

from collections import Counter, defaultdict
from typing import Dict, List, Sequence, Tuple

from torch import Tensor, nn

from moh_vision.attention import attention_layers, head_budget
from moh_vision.attention.model_heads import single_routed
from moh_vision.attention.routers import MAERouter
from moh_vision.models.counts import Macs, count_macs, count_parameters
from moh_vision.models.mae import mae_routers


def describe(name: str, model: nn.Module, *inputs: Tensor, **named: Tensor) -> str:
    """Text for `--dry-run`.

    Args:
        name: what to call it.
        inputs, named: arguments of one forward, batch 1; only their shapes matter.
    """
    budget = head_budget(model)
    macs = count_macs(model, *inputs, **named)
    shapes = [str(list(i.shape)) for i in inputs] + [f"{key} {list(i.shape)}" for key, i in named.items()]
    lines = [
        f"{name} ({type(model).__name__}), input {' '.join(shapes)}",
        "",
        "layer  heads  width  shared  routed  active  name",
    ]
    for number, layer in enumerate(budget["layers"]):
        lines.append(
            f"{number:5d}  {layer['heads']:5d}  {layer['head_dim']:5d}  {layer['shared']:6d}  {layer['routed']:6d}  "
            f"{layer['active']:6d}  {layer['name']}"
        )
    lines += filter(None, [single_routed(attention_layers(model))])
    lines += dict.fromkeys(map(mae_mixture, mae_routers(model)))
    lines += [
        f"active heads: {budget['active']} of {budget['heads']} ({100 * budget['share']:.1f} %)",
        f"parameters:   {count_parameters(model):,}",
        "",
        *module_table(macs),
    ]
    return "\n".join(lines)


def in_short(name: str, model: nn.Module) -> str:
    """One line: parameters and active heads of a model, layers with one routed head, and MAE's experts, whose heads
    all count."""
    budget = head_budget(model)
    share = f"{budget['active']} of {budget['heads']} heads active ({100 * budget['share']:.1f} %)"
    mixtures = {mae_mixture(router).partition(";")[0]: None for router in mae_routers(model)}
    single = filter(None, [single_routed(attention_layers(model))])
    return "; ".join([f"{name}: {count_parameters(model):,} parameters, {share}", *single, *mixtures])


def mae_mixture(router: MAERouter) -> str:
    """What a gate of MAE does with its experts: the columns above it call all heads shared, as every head may run."""
    experts, heads = router.members.shape
    gate = "an even mixture takes" if router.out is None else "the soft gate mixes"
    return f"MAE: {experts} experts of {heads - router.leave_out} heads each; {gate} all of them, so every head runs"


def module_table(macs: Macs) -> List[str]:
    """Lines of a table of modules, those that are alike in one row, then the totals."""

    def shown(*numbers: int) -> List[str]:  # parameters, then MACs
        return [f"{n / 1e6:,.{1 if i and macs.dense >= 1e9 else 3}f}" for i, n in enumerate(numbers)]

    rows = [("millions, of one forward of batch 1", "", "parameters", "MACs: dense", "ideal")]
    for label, number, *values in _groups(macs):
        rows.append((label, f"{number} x" if number > 1 else "", *shown(*values)))
    rows.append(("total", "", *shown(macs.parameters, macs.dense, macs.ideal)))
    return [
        *aligned(rows),
        "",
        f"MACs:         {macs.dense:,} dense (every head, no router); {100 * macs.ideal / macs.dense:.1f} % of dense ideal",
        "ideal:        the active heads alone, and the routers",
    ]


def _groups(macs: Macs) -> List[Tuple]:
    """(label, number of modules, parameters, dense, ideal) of modules alike, and of all without MACs together."""
    size = Counter()  # of a module; layers of one name and different size are not alike
    for row in macs.modules:
        size[row.name] += row.dense
    groups: Dict[tuple, list] = defaultdict(list)
    for row in macs.modules:
        counts = row.part == "table" or row.dense or row.ideal
        groups[(_split(row.name)[0], size[row.name], row.part) if counts else None].append(row)
    small = groups.pop(None, [])
    found = [
        (f"{_label([row.name for row in rows])} {key[2]}".rstrip(), len(rows), *_sums(rows))
        for key, rows in groups.items()
    ]
    return found + ([("norms, positions, scales", 0, *_sums(small))] if small else [])


def _sums(rows: Sequence[tuple]) -> List[int]:
    return [sum(column) for column in list(zip(*rows))[2:]]


def _split(name: str) -> Tuple[str, int]:
    """A module's name with its last number as *, and this number: blocks.3.mlp -> blocks.*.mlp, 3; -1 without one."""
    parts = name.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=None)
    if last is None:
        return name, -1
    return ".".join([*parts[:last], "*", *parts[last + 1 :]]), int(parts[last])


def _label(names: Sequence[str]) -> str:
    """One name for modules alike: blocks.0.mlp, blocks.1.mlp, blocks.3.mlp -> blocks.0-1,3.mlp"""
    return _split(names[0])[0].replace("*", _ranges(sorted(_split(name)[1] for name in names)))


def _ranges(numbers: Sequence[int]) -> str:
    runs: List[List[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def aligned(rows: Sequence[Tuple[str, ...]]) -> List[str]:
    """Rows of equal length as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]
