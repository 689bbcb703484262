"""Which of Triton's kernels work on the GPU at hand. Those that nobody measures are tried before they run.

A model calls the router, its node with the product, and the product of outputs and gates wherever there is a GPU. So each
of them is compared with PyTorch, forward and backward, when it is first asked for with numbers of its kind. What fails or
differs is left to PyTorch, and the others run. Attention itself is compared by `moh_vision.attention.measure`.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.kernels import eager
from moh_vision.attention.kernels.gpu.blocks import uses_tf32
from moh_vision.attention.kernels.gpu.library import OPS
from moh_vision.attention.kernels.gpu.route import GATE_FORMS
from moh_vision.attention.routing import Routing

log = logging.getLogger("moh_vision.attention")

DEVICES = ("cuda",)  # where kernels are tried; in the interpreter the tests compare them
# Sequences, tokens, their width, and the candidates and routed heads of what is compared.
B = 2
N = 45
C = 64
CANDIDATES = 6
ROUTED = 3

# What is compared: its name, what the kernel computed, and what it should be, in float64 on the CPU.
Compared = Iterator[tuple[str, Tensor, Tensor]]


class Difference(NamedTuple):
    """The largest difference of a kernel from PyTorch, over the largest number of the same output."""

    size: float
    of: str  # what differs so
    allowed: float

    def __str__(self) -> str:
        return f"{self.of}: {self.size:.0e} off, {self.allowed:.0e} is allowed"

    @property
    def is_rounding(self) -> bool:
        """Whether so large a difference is allowed. NaN is not."""
        return self.size <= self.allowed


def problem(device: str = "cuda") -> str | None:
    """Return None if Triton runs at all, or why it does not, in one line.

    Triton compiles at its first call, for which it needs a C compiler and a driver that fits.
    """
    index = None
    if device == "cuda":
        index = torch.cuda.current_device()
    try:
        compare("pairs", torch.device(device, index))
    except Exception as error:  # whatever a compiler or a driver throws
        if not _passes(error):
            return one_line(error)
    return None


def works(kernel: str, device: torch.device, *dtypes: torch.dtype) -> bool:
    """Return whether a kernel gives on a device what PyTorch does. It is tried once; a WARNING says what is wrong.

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
    call = f"on {device}"
    if numbers:
        call += f" in {numbers}"
    log.warning(f"PyTorch runs in place of Triton's kernel {kernel} {call} ({why})")


def _passes(error: Exception) -> bool:
    """Return whether an error says nothing of the kernel."""
    return isinstance(error, MemoryError) or "out of memory" in str(error)


def one_line(error: Exception) -> str:
    """Return an error's class and message in one line of at most 200 characters of message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _apart(work: Callable):
    """Run something where autocast, inference mode, hooks of saved tensors and tracing of the caller do not reach."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


# ---- Comparisons


def compare(kernel: str, device: torch.device, *dtypes: torch.dtype) -> Difference:
    """Return the largest difference of a kernel from PyTorch. It raises what the kernel raises."""
    return _apart(lambda: largest(KERNELS[kernel](device, *dtypes), *dtypes))


def largest(compared: Compared, *dtypes: torch.dtype) -> Difference:
    """Return the largest difference. The dtypes are those of products and say what is allowed: nothing without any."""
    allowed = 2e-2
    if set(dtypes) <= {torch.float32} and not uses_tf32():
        allowed = 1e-4
        if not dtypes:
            allowed = 0.0
    worst = Difference(0.0, "nothing", allowed)
    for name, got, want in compared:
        if got.shape != want.shape:
            raise ValueError(f"{name} is {list(got.shape)}, not {list(want.shape)}")
        want = want.detach().double()
        difference = (got.detach().cpu().double() - want).abs().max().item()
        size = difference / max(want.abs().max().item(), 1e-30)
        if not size <= worst.size:  # NaN is the largest
            worst = Difference(size, name, allowed)
            if math.isnan(size):
                break
    return worst


def _route(device: torch.device, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> Compared:
    for gate_form in GATE_FORMS:
        x, weight, settings, padding = _router(gate_form)
        x = x.to(device, x_dtype)
        weight = weight.to(device, weight_dtype)
        router = *settings, _on(device, padding)
        routed = OPS.route(x, weight, *router)
        leaves = [_exact(x), _exact(weight)]
        logits = eager.gate_logits(*leaves)
        want = _choose(logits, settings, padding)
        yield from _routing(gate_form, routed, want, logits)
        ends = [want.weights, want.stats.probs, logits]
        slopes = [numbers(t.shape) for t in ends]
        grads = OPS.route_backward(*(t.to(device) for t in slopes), routed[2], x, weight, *router)
        exact_grads = torch.autograd.grad(ends, leaves, [t.double() for t in slopes])
        for name, *both in zip(("tokens", "the router's weight"), grads, exact_grads):
            yield f"gradients of {name} ({gate_form})", *both


def _project_and_route(
    device: torch.device, exact_dtype: torch.dtype, dtype: torch.dtype, weight_dtype: torch.dtype
) -> Compared:
    """Compare the product and the router.

    Args:
        exact_dtype: dtype of tokens as they come.
        dtype: dtype of the product.
        weight_dtype: dtype of the router's weight.
    """
    outputs = 96
    for gate_form in GATE_FORMS:
        x, router_weight, settings, padding = _router(gate_form)
        given = x, numbers((outputs, C)) / 8, numbers((outputs,))
        given = [t.to(device, dtype) for t in given]
        given.append(router_weight.to(device, weight_dtype))
        router = *settings, _on(device, padding)
        product, *routed = OPS.project_and_route(x.to(device, exact_dtype), *given, *router)
        leaves = [_exact(t) for t in given]
        x, weight, bias, router_weight = leaves
        exact_product = F.linear(x, weight, bias)
        yield f"product ({gate_form})", product, exact_product
        logits = eager.gate_logits(x, router_weight)
        want = _choose(logits, settings, padding)
        yield from _routing(gate_form, routed, want, logits)
        ends = [exact_product, want.weights, want.stats.probs, logits]
        slopes = [numbers(t.shape) for t in ends]
        on_device = [slopes[0].to(device, dtype), *(t.to(device) for t in slopes[1:])]
        grads = OPS.project_and_route_backward(*on_device, routed[2], *given, *router)
        exact_grads = torch.autograd.grad(ends, leaves, [t.double() for t in slopes])
        names = "tokens", "the weight", "the bias", "the router's weight"
        for name, *both in zip(names, grads, exact_grads):
            yield f"gradients of {name} ({gate_form})", *both


def _weigh(device: torch.device, dtype: torch.dtype, weights_dtype: torch.dtype) -> Compared:
    heads = 3
    width = 72
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
    heads = 5
    count = 2
    # Token n of sequence b runs `count` heads from head n + b on.
    first = (torch.arange(N).view(1, N, 1) + torch.arange(B).view(B, 1, 1)) % heads
    active = (torch.arange(heads) - first) % heads < count
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


def _router(gate_form: str) -> tuple[Tensor, Tensor, tuple, Tensor | None]:
    """Return tokens, the weight of a router of this form, what else describes it, and a padding mask for some forms."""
    shared = 2
    if gate_form == "renormalised":
        shared = 0
    padding = None
    if gate_form != "released":
        padding = torch.arange(N) >= torch.tensor([[N], [N - 20]])
    weight = numbers((CANDIDATES + 2 * shared, C)) / 8
    return numbers((B, N, C)), weight, (CANDIDATES, shared, ROUTED, gate_form), padding


def _choose(logits: Tensor, settings: tuple, padding: Tensor | None) -> Routing:
    return eager.choose(logits, *settings, balanced=settings[1] > 0, padding_mask=padding)


def _routing(gate_form: str, routed: list[Tensor], want: Routing, logits: Tensor) -> Compared:
    gates, active, rows, probs, counts = routed
    yield f"choice of heads ({gate_form})", active, want.active
    yield f"gates ({gate_form})", gates, want.weights
    yield f"logits ({gate_form})", rows, logits
    yield f"probabilities ({gate_form})", probs, want.stats.probs
    yield f"counts ({gate_form})", counts, want.stats.counts


def _on(device: torch.device, x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    return x.to(device)


def _exact(x: Tensor) -> Tensor:
    """Return the same numbers as a leaf on the CPU, where autograd works in this thread and waits for no busy one."""
    return x.cpu().double().requires_grad_()


def numbers(shape: tuple) -> Tensor:
    """Return small multiples of 1/8, not at random: exact in 16 bits, and their logits in any order of summation."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7919 + 13) % 31 - 15).view(shape).float() / 8
