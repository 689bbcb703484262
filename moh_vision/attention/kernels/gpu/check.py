"""Whether Triton's kernels work on the GPU at hand."""

from typing import Optional

import torch
from torch import Tensor

from moh_vision.attention.kernels import eager
from moh_vision.attention.kernels.gpu.library import OPS
from moh_vision.attention.kernels.route import choose, gate_logits

SHARED, CANDIDATES, ROUTED = 2, 6, 3


@torch.no_grad()
def problem(device: str = "cuda") -> Optional[str]:
    """Route a few tokens and compare with PyTorch: None, or what is wrong, in one line.

    Triton compiles at its first call, for which it needs a C compiler and a driver that fits. Every model on a GPU calls
    `route`; what else `auto` calls there `tune` has compared before.
    """
    try:
        return _compare(torch.device(device))
    except Exception as error:  # whatever a compiler or a driver throws
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _compare(device: torch.device) -> Optional[str]:
    x, weight = numbers((2, 45, 64), device), numbers((CANDIDATES + SHARED + 2, 64), device) / 8
    for dtype in (torch.float32, torch.bfloat16):
        want = choose(gate_logits(x.to(dtype), weight), CANDIDATES, SHARED, ROUTED, "released", True)
        gates, active, *_, token, offsets = OPS.route(x.to(dtype), weight, CANDIDATES, SHARED, ROUTED, "released", None)
        list_of = eager.pairs(want.active)
        if (
            not torch.equal(active, want.active)
            or not torch.equal(token, list_of[0])
            or not torch.equal(offsets, list_of[1])
        ):
            return f"the router chooses other heads than in PyTorch ({dtype})"
        if not torch.allclose(gates, want.weights, rtol=1e-4, atol=1e-6):
            return f"the gates are not those of PyTorch ({dtype})"
    return None


def numbers(shape: tuple, device: torch.device) -> Tensor:
    """Small multiples of 1/8, exact in 16 bits, so that logits are exact in any order of summation; no random numbers."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count, device=device) * 7919 + 13) % 31 - 15).view(shape) / 8
