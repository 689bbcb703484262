"""A model in a few lines: sizes, budget of every layer, parameters, MACs."""

import copy

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from moh_vision.attention import head_budget


def describe(name: str, model: nn.Module, *inputs: Tensor) -> str:
    """Text for `--dry-run`.

    Args:
        name: what to call it.
        inputs: of one forward, batch 1; only their shapes matter.
    """
    budget = head_budget(model)
    lines = [
        f"{name} ({type(model).__name__}), input {' '.join(str(list(i.shape)) for i in inputs)}",
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
        f"MACs:         {count_macs(model, *inputs):,} (one forward, batch 1, every head computed)",
    ]
    return "\n".join(lines)


def count_parameters(model: nn.Module) -> int:
    """All parameters, frozen ones too."""
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, *inputs: Tensor) -> int:
    """Multiply-accumulates of one forward with every head computed: linears, convolutions, both attention products."""
    shadow = copy.deepcopy(model).to("meta").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        shadow(*(i.to("meta") for i in inputs))
    return counter.get_total_flops() // 2
