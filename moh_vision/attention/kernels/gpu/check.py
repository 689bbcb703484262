"""Which of Triton's kernels work on the GPU at hand. Those that nobody measures are tried before they run.

A model calls the router, its node with the product, and the product of outputs and gates wherever there is a GPU. So each
of them is compared with PyTorch, forward and backward, when it is first asked for with numbers of its kind. What fails or
differs is left to PyTorch, and the others run. Attention itself is compared by `moh_vision.attention.measure`.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.kernels import eager
from moh_vision.attention.kernels.gpu.blocks import uses_tf32
from moh_vision.attention.kernels.gpu.library import OPS
from moh_vision.attention.kernels.gpu.route import KINDS
from moh_vision.attention.routing import Routing

log = logging.getLogger("moh_vision.attention")

DEVICES = ("cuda",)  # where kernels are tried; in the interpreter the tests compare them
B, N, C = 2, 45, 64
CANDIDATES, ROUTED = 6, 3

# What is compared: its name, what the kernel computed, and what it should be, in float64 on the CPU.
Compared = Iterator[tuple[str, Tensor, Tensor]]


class Difference(NamedTuple):
    """The largest difference of a kernel from PyTorch, over the largest number of its kind."""

    size: float
    of: str  # what differs so
    allowed: float

    def __str__(self) -> str:
        return f"{self.of}: {self.size:.0e} off, {self.allowed:.0e} is allowed"

    @property
    def is_rounding(self) -> bool:
        return self.size <= self.allowed  # not NaN


def problem(device: str = "cuda") -> str | None:
    """Whether Triton runs at all: None, or why not, in one line.

    Triton compiles at its first call, for which it needs a C compiler and a driver that fits.
    """
    index = torch.cuda.current_device() if device == "cuda" else None
    try:
        compare("pairs", torch.device(device, index))
    except Exception as error:  # whatever a compiler or a driver throws
        return None if _passes(error) else one_line(error)
    return None


def works(kernel: str, device: torch.device, *dtypes: torch.dtype) -> bool:
    """Whether a kernel gives on a device what PyTorch does. It is tried once; a WARNING says what is wrong.

    A GPU that has no memory left says nothing of the kernel: it is tried again at the next call.

    Args:
        kernel: a name in KERNELS.
        device: of the call.
        *dtypes: as the kernel takes them.
    """
    if device.type not in DEVICES:
        return True
    try:
        return _tried(kernel, device, dtypes, uses_tf32())
    except Passing as error:
        _warn(kernel, device, dtypes, f"{error}; it is tried again later")
        return False


class Passing(Exception):
    """The device could not try a kernel now."""


@functools.cache  # what is raised is not kept
def _tried(kernel: str, device: torch.device, dtypes: tuple[torch.dtype, ...], tf32: bool) -> bool:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Passing("a CUDA graph is captured, which a comparison would end")
    try:
        difference = compare(kernel, device, *dtypes)
    except Exception as error:
        if _passes(error):
            raise Passing(one_line(error)) from None
        why = one_line(error)
    else:
        if difference.is_rounding:
            return True
        why = str(difference)
    _warn(kernel, device, dtypes, why)
    return False


@functools.cache  # once
def _warn(kernel: str, device: torch.device, dtypes: tuple[torch.dtype, ...], why: str) -> None:
    numbers = ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
    where = f"on {device}" + (f" in {numbers}" if numbers else "")
    log.warning(f"PyTorch runs in place of Triton's kernel {kernel} {where} ({why})")


def _passes(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "out of memory" in str(error)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _apart(work: Callable):
    """Run something where autocast, inference mode, hooks of saved tensors and tracing of the caller do not reach."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


# ---- Comparisons


def compare(kernel: str, device: torch.device, *dtypes: torch.dtype) -> Difference:
    """The largest difference of a kernel from PyTorch. It raises what the kernel raises."""
    return _apart(lambda: largest(KERNELS[kernel](device, *dtypes), *dtypes))


def largest(compared: Compared, *dtypes: torch.dtype) -> Difference:
    """The difference that goes beyond the others, where products are of these dtypes; without dtypes none is allowed."""
    allowed = 2e-2
    if set(dtypes) <= {torch.float32} and not uses_tf32():
        allowed = 1e-4 if dtypes else 0.0
    worst = Difference(0.0, "nothing", allowed)
    for name, got, want in compared:
        if got.shape != want.shape:
            raise ValueError(f"{name} is {list(got.shape)}, not {list(want.shape)}")
        want = want.detach().double()
        difference = (got.detach().cpu().double() - want).abs().max().item()
        size = difference / max(want.abs().max().item(), 1e-30)
        if not size <= worst.size:  # NaN is the largest
            worst = Difference(size, name, allowed)
            if size != size:
                break
    return worst


def _route(device: torch.device, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> Compared:
    for kind in KINDS:
        x, weight, settings, padding = _router(kind)
        x, weight = x.to(device, x_dtype), weight.to(device, weight_dtype)
        router = *settings, _on(device, padding)
        routed = OPS.route(x, weight, *router)
        leaves = [_exact(x), _exact(weight)]
        logits = eager.gate_logits(*leaves)
        want = _choose(logits, settings, padding)
        yield from _routing(kind, routed, want, logits)
        ends = [want.weights, want.stats.probs, logits]
        slopes = [numbers(t.shape) for t in ends]
        grads = OPS.route_backward(*(t.to(device) for t in slopes), routed[2], x, weight, *router)
        exact_grads = torch.autograd.grad(ends, leaves, [t.double() for t in slopes])
        for name, *both in zip(("tokens", "the router's weight"), grads, exact_grads):
            yield f"gradients of {name} ({kind})", *both


def _project_and_route(
    device: torch.device, exact_dtype: torch.dtype, dtype: torch.dtype, weight_dtype: torch.dtype
) -> Compared:
    """exact_dtype: of tokens as they come; dtype: of the product; weight_dtype: of the router's weight."""
    outputs = 96
    for kind in KINDS:
        x, router_weight, settings, padding = _router(kind)
        given = x, numbers((outputs, C)) / 8, numbers((outputs,))
        given = [t.to(device, dtype) for t in given]
        given.append(router_weight.to(device, weight_dtype))
        router = *settings, _on(device, padding)
        product, *routed = OPS.project_and_route(x.to(device, exact_dtype), *given, *router)
        leaves = [_exact(t) for t in given]
        x, weight, bias, router_weight = leaves
        exact_product = F.linear(x, weight, bias)
        yield f"product ({kind})", product, exact_product
        logits = eager.gate_logits(x, router_weight)
        want = _choose(logits, settings, padding)
        yield from _routing(kind, routed, want, logits)
        ends = [exact_product, want.weights, want.stats.probs, logits]
        slopes = [numbers(t.shape) for t in ends]
        on_device = [slopes[0].to(device, dtype), *(t.to(device) for t in slopes[1:])]
        grads = OPS.project_and_route_backward(*on_device, routed[2], *given, *router)
        exact_grads = torch.autograd.grad(ends, leaves, [t.double() for t in slopes])
        names = "tokens", "the weight", "the bias", "the router's weight"
        for name, *both in zip(names, grads, exact_grads):
            yield f"gradients of {name} ({kind})", *both


def _weigh(device: torch.device, dtype: torch.dtype, weights_dtype: torch.dtype) -> Compared:
    heads, width = 3, 72
    by_token = numbers((B, N, heads, width)).transpose(1, 2)
    for o, tokens in ((by_token, N), (by_token.contiguous(), 1)):
        o = o.to(device, dtype)
        weights = numbers((B, tokens, heads)).to(device, weights_dtype)
        dy = numbers((B, N, heads * width)).flip(1).to(device, dtype)
        leaves = [_exact(o), _exact(weights)]
        want = (leaves[0].transpose(1, 2) * leaves[1].unsqueeze(-1)).flatten(2)
        yield "outputs times gates", OPS.weigh(o, weights), want
        grads = OPS.weigh_backward(dy, o, weights)
        exact_grads = torch.autograd.grad(want, leaves, dy.cpu().double())
        yield from zip(("gradients of outputs", "gradients of gates"), grads, exact_grads)


def _pairs(device: torch.device) -> Compared:
    heads, count = 5, 2
    place = (torch.arange(N).view(1, N, 1) + torch.arange(B).view(B, 1, 1)) % heads
    active = (torch.arange(heads) - place) % heads < count
    token, offsets = eager.pairs(active)
    for given in (count, None):
        got_token, got_offsets = OPS.pairs(active.to(device), given)
        yield "offsets", got_offsets, offsets
        yield "tokens", got_token[: len(token)], token


KERNELS: dict[str, Callable[..., Compared]] = {
    "pairs": _pairs,
    "route": _route,
    "project_and_route": _project_and_route,
    "weigh": _weigh,
}


def _router(kind: str) -> tuple[Tensor, Tensor, tuple, Tensor | None]:
    """Tokens, the weight of a router of this kind, what else describes it, and a padding mask for some kinds."""
    shared = 0 if kind == "renormalised" else 2
    padding = None if kind == "released" else torch.arange(N) >= torch.tensor([[N], [N - 20]])
    weight = numbers((CANDIDATES + 2 * shared, C)) / 8
    return numbers((B, N, C)), weight, (CANDIDATES, shared, ROUTED, kind), padding


def _choose(logits: Tensor, settings: tuple, padding: Tensor | None) -> Routing:
    return eager.choose(logits, *settings, balanced=settings[1] > 0, padding_mask=padding)


def _routing(kind: str, routed: list[Tensor], want: Routing, logits: Tensor) -> Compared:
    gates, active, rows, probs, counts = routed
    yield f"choice of heads ({kind})", active, want.active
    yield f"gates ({kind})", gates, want.weights
    yield f"logits ({kind})", rows, logits
    yield f"probabilities ({kind})", probs, want.stats.probs
    yield f"counts ({kind})", counts, want.stats.counts


def _on(device: torch.device, x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(device)


def _exact(x: Tensor) -> Tensor:
    """The same numbers as a leaf on the CPU: autograd works in this thread there, and waits for none that may be busy."""
    return x.cpu().double().requires_grad_()


def numbers(shape: tuple) -> Tensor:
    """Small multiples of 1/8, exact in 16 bits, so that logits are exact in any order of summation; no random numbers."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7919 + 13) % 31 - 15).view(shape).float() / 8
