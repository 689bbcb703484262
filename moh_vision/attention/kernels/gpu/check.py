"""Whether Triton's kernels work on the GPU at hand."""

from typing import Optional

import torch
from torch import Tensor

from moh_vision.attention.kernels import eager
from moh_vision.attention.kernels.gpu.library import OPS

SHARED, CANDIDATES, ROUTED = 2, 6, 3


@torch.no_grad()
def problem(device: str = "cuda") -> Optional[str]:
    """Route a few tokens and compare with PyTorch: None, or what is wrong, in one line.

    Triton compiles at its first call, for which it needs a C compiler and a driver that fits. Every model on a GPU calls
    `route`; what else `auto` calls there `tune` has compared before.
    """
    try:
        with torch.autocast(torch.device(device).type, enabled=False):  # the first call may be under it
            return _compare(torch.device(device))
    except Exception as error:  # whatever a compiler or a driver throws
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _compare(device: torch.device) -> Optional[str]:
    x, weight = numbers((2, 45, 64), device), numbers((CANDIDATES + SHARED + 2, 64), device) / 8
    logits, shared, balance = (x @ weight.t()).split([CANDIDATES, SHARED, 2], -1)
    best = logits.sort(dim=-1, descending=True, stable=True).indices[..., :ROUTED]
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, best, True)
    probs = logits.softmax(-1) * chosen
    alpha = 2 * balance.softmax(-1)  # Jin 2024, eq. 6, as released
    gates = torch.cat(
        [SHARED * alpha[..., :1] * shared.softmax(-1), ROUTED * alpha[..., 1:] * probs / probs.sum(-1, keepdim=True)],
        -1,
    )
    active = torch.cat([torch.ones_like(shared, dtype=torch.bool), chosen], -1)
    for dtype in (torch.float32, torch.bfloat16):
        found = OPS.route(x.to(dtype), weight, CANDIDATES, SHARED, ROUTED, "released", None)
        lists = zip((found[1], *found[5:]), (active, *eager.pairs(active)))
        if not all(torch.equal(got, want) for got, want in lists):
            return f"the router chooses other heads than in PyTorch ({dtype})"
        if not torch.allclose(found[0], gates, rtol=1e-4, atol=1e-6):
            return f"the gates are not those of PyTorch ({dtype})"
    return None


def numbers(shape: tuple, device: torch.device) -> Tensor:
    """Small multiples of 1/8, exact in 16 bits, so that logits are exact in any order of summation; no random numbers."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count, device=device) * 7919 + 13) % 31 - 15).view(shape).float() / 8
