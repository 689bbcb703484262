"""Whether Triton's router works on the GPU at hand: every model there calls it."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from moh_vision.attention.kernels import eager
from moh_vision.attention.kernels.gpu.blocks import uses_tf32
from moh_vision.attention.kernels.gpu.library import OPS
from moh_vision.attention.kernels.gpu.route import KINDS

CANDIDATES, ROUTED = 6, 3
FLOAT, SHORT = torch.float32, torch.bfloat16
CASES = [(kind, dtype, dtype) for kind in KINDS for dtype in (FLOAT, SHORT)] + [
    ("released", SHORT, FLOAT)
]


def problem(device: str = "cuda") -> str | None:
    """Route a few tokens, forward and backward, and compare with PyTorch: None, or what is wrong, in one line.

    Triton compiles at its first call, for which it needs a C compiler and a driver that fits.
    """
    place = (
        torch.device(device, torch.cuda.current_device())
        if device == "cuda"
        else torch.device(device)
    )
    try:
        # Autocast, inference mode, hooks of saved tensors and tracing of the first call end at its thread.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_compare, place).result()
    except Exception as error:  # whatever a compiler or a driver throws
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _compare(device: torch.device) -> str | None:
    for kind, dtype, weight_dtype in CASES:
        shared = 0 if kind == "renormalised" else 2
        router = CANDIDATES, shared, ROUTED, kind
        x = numbers((2, 45, 64), device).to(dtype).requires_grad_()
        weight = (
            (numbers((CANDIDATES + 2 * shared, 64), device) / 8).to(weight_dtype).requires_grad_()
        )
        exact = [t.detach().double().requires_grad_() for t in (x, weight)]
        gates, active, logits, probs, _, *pairs = OPS.route(x, weight, *router, None)
        want = eager.choose(eager.gate_logits(*exact), *router, balanced=shared > 0)
        which = f"({kind}, tokens {dtype}, weight {weight_dtype})"
        if not all(map(torch.equal, (active, *pairs), (want.active, *eager.pairs(want.active)))):
            return f"the router chooses other heads than in PyTorch {which}"
        names = "gates", "probabilities", "gradients of tokens", "gradients of the weight"
        rounding = 1e-4 if dtype == FLOAT and not uses_tf32() else 1e-2
        computed = _with_gradients(gates, probs, logits, x, weight)
        wanted = _with_gradients(want.weights, want.stats.probs, want.stats.logits, *exact)
        for name, a, b in zip(names, computed, wanted):
            if not (a - b).abs().max() <= rounding * b.abs().max():
                return f"the router's {name} are not those of PyTorch {which}"
    return None


def _with_gradients(
    gates: Tensor, probs: Tensor, logits: Tensor, x: Tensor, weight: Tensor
) -> list[Tensor]:
    loss = gates.square().sum() + probs.square().sum() + logits[..., :CANDIDATES].square().mean()
    return [gates, probs, *torch.autograd.grad(loss, (x, weight))]


def numbers(shape: tuple, device: torch.device) -> Tensor:
    """Small multiples of 1/8, exact in 16 bits, so that logits are exact in any order of summation; no random numbers."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count, device=device) * 7919 + 13) % 31 - 15).view(shape).float() / 8
