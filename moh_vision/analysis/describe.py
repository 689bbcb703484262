"""A model in a few lines: sizes, budget of every layer, parameters, MACs."""

from torch import Tensor, nn

from moh_vision.analysis.counting import count_macs, count_parameters
from moh_vision.attention import head_budget


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
        "layer  heads  width  shared  routed  active",
    ]
    for number, layer in enumerate(budget["layers"]):
        lines.append(
            f"{number:5d}  {layer['heads']:5d}  {layer['head_dim']:5d}  {layer['shared']:6d}  {layer['routed']:6d}  {layer['active']:6d}"
        )
    single = [n for n, layer in enumerate(budget["layers"]) if layer["routed"] == 1]
    if single:
        lines.append(f"one routed head in layers {single}: only the balance loss trains those routers")
    lines += [
        f"active heads: {budget['active']} of {budget['heads']} ({100 * budget['share']:.1f} %)",
        f"parameters:   {count_parameters(model):,}",
        f"MACs:         {macs.every_head:,} (one forward, batch 1, every head computed)",
    ]
    if any(layer.budget.active < layer.budget.heads for layer in macs.attention):
        lines.append(f"              {macs.linears + macs.scores:,} (active heads only)")
    return "\n".join(lines)
