"""Find out which Triton kernels work on this machine's GPU.

On a GPU a model calls operators without any measurement: `route`, `project_and_route`, `weigh`, and those that slice weights
for one choice of all sequences. So each of them is compared with PyTorch, forward and backward where it has one, before its
first call with given dtypes. PyTorch takes the place of an operator that fails or differs; the other operators run.
`moh_vision.attention.measure` compares attention itself.
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
from moh_vision.attention.kernels.gpu.library import OPS
from moh_vision.attention.kernels.gpu.route import GATE_FORMS
from moh_vision.attention.linear import uses_tf32
from moh_vision.attention.routing import Routing
from moh_vision.common.errors import class_and_message

log = logging.getLogger("moh_vision.attention")

# Device types on which kernels are tried. Elsewhere, in Triton's interpreter, the tests compare them.
DEVICES = ("cuda",)
# Sizes of the inputs of comparisons.
B = 2  # sequences
N = 45  # tokens
C = 64  # width of a token
CANDIDATES = 6
ROUTED = 3

# Yields (name of an output, what the kernel computed, what it should be: in float64 on the CPU).
Compared = Iterator[tuple[str, Tensor, Tensor]]


class Difference(NamedTuple):
    """The largest difference of a kernel from PyTorch."""

    size: float  # largest difference of an output, over the largest element of the same output
    of: str  # name of this output
    allowed: float  # largest size that rounding explains

    def __str__(self) -> str:
        return f"{self.of}: {self.size:.0e} off, {self.allowed:.0e} is allowed"

    @property
    def is_rounding(self) -> bool:
        """Whether the difference is small enough for rounding; False for NaN."""
        return self.size <= self.allowed


def problem(device: str = "cuda") -> str | None:
    """Return why Triton does not run on a device at all, in one line, or None if it runs.

    Triton compiles at its first call and needs a C compiler and a compatible driver for it.
    """
    index = None
    if device == "cuda":
        index = torch.cuda.current_device()
    try:
        compare("pairs", torch.device(device, index))
    except Exception as error:  # whatever a compiler or a driver raises
        if not _is_transient(error):
            return class_and_message(error)
    return None


def works(kernel: str, device: torch.device, *dtypes: torch.dtype) -> bool | None:
    """Return whether a kernel computes the same as PyTorch on a device.

    The kernel is tried once for a device and dtypes. A WARNING says what is wrong. An error that says nothing about the
    kernel, such as a GPU without free memory, returns None, and the kernel is tried again at the next call.

    Args:
        kernel: a name in KERNELS.
        device: device of the call.
        *dtypes: arguments of the comparison in KERNELS.
    """
    if device.type not in DEVICES:
        return True
    try:
        return _tried(kernel, device, dtypes, uses_tf32())
    except CannotTry as error:
        _warn(kernel, device, dtypes, f"{error}; it is tried again later")
        return None


class CannotTry(Exception):
    """Raised if a kernel cannot be tried on the device at the moment."""


@functools.cache  # an exception is not cached, so a kernel that raised CannotTry is tried again
def _tried(kernel: str, device: torch.device, dtypes: tuple[torch.dtype, ...], tf32: bool) -> bool:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CannotTry("a CUDA graph is captured, which a comparison would end")
    try:
        difference = compare(kernel, device, *dtypes)
    except Exception as error:
        if _is_transient(error):
            raise CannotTry(class_and_message(error)) from None
        why = class_and_message(error)
    else:
        if difference.is_rounding:
            return True
        why = str(difference)
    _warn(kernel, device, dtypes, why)
    return False


def tries() -> int:
    """Return how many kernels and dtypes have been tried in this process, or could not be tried yet."""
    return _tried.cache_info().misses


@functools.cache  # the same warning is logged once
def _warn(kernel: str, device: torch.device, dtypes: tuple[torch.dtype, ...], why: str) -> None:
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
    call = f"on {device}"
    if names:
        call += f" in {names}"
    log.warning(f"PyTorch runs in place of Triton's kernel {kernel} {call} ({why})")


def _is_transient(error: Exception) -> bool:
    """Return whether an error may pass, because it is of the device's memory and not of the kernel."""
    return isinstance(error, MemoryError) or "out of memory" in str(error)


def _apart(work: Callable):
    """Call `work` in another thread and return its result.

    The caller's autocast, inference mode, saved-tensor hooks and tracing do not apply there.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


# ---- Comparisons


def compare(kernel: str, device: torch.device, *dtypes: torch.dtype) -> Difference:
    """Return the largest difference of a kernel from PyTorch; an exception of the kernel is not caught."""

    def differences() -> Difference:
        difference = largest(KERNELS[kernel](device, *dtypes), *dtypes)
        if device.type == "cuda" and difference.is_rounding:
            # Again: kernels are launched through Triton at first, and directly from then on, see `gpu.launch`.
            difference = largest(KERNELS[kernel](device, *dtypes), *dtypes)
        return difference

    return _apart(differences)


def largest(compared: Compared, *dtypes: torch.dtype) -> Difference:
    """Return the largest of the differences in `compared`.

    dtypes: dtypes of the kernel's products, which decide how large a difference is allowed. Without a dtype the kernel
    makes no products, and no difference is allowed.
    """
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
        if not size <= worst.size:  # True for NaN too, which counts as the largest
            worst = Difference(size, name, allowed)
            if math.isnan(size):
                break
    return worst


def _route(device: torch.device, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> Compared:
    """Compare `route` and its backward, with tokens and the router's weight in these dtypes."""
    for gate_form in GATE_FORMS:
        x, weight, settings, padding = _router(gate_form)
        x = x.to(device, x_dtype)
        weight = weight.to(device, weight_dtype)
        first, *further = _parts(weight, settings)
        router = *settings, _on(device, padding), *further
        routed = OPS.route(x, first, *router)
        rows = routed[2]
        leaves = [_exact_leaf(x), _exact_leaf(weight)]
        logits = eager.gate_logits(*leaves)
        want = _choose(logits, settings, padding)
        yield from _routing(gate_form, routed, want, logits)
        outputs = [want.weights, want.stats.probs, logits]
        output_grads = [eighths(t.shape) for t in outputs]
        on_device = [t.to(device) for t in output_grads]
        grads = OPS.route_backward(*on_device, rows, x, first, *router)
        exact_grads = torch.autograd.grad(outputs, leaves, [t.double() for t in output_grads])
        for name, *both in zip(("tokens", "the router's weight"), grads, exact_grads):
            yield f"gradients of {name} ({gate_form})", *both


def _project_and_route(
    device: torch.device, exact_dtype: torch.dtype, dtype: torch.dtype, weight_dtype: torch.dtype
) -> Compared:
    """Compare `project_and_route` and its backward.

    Args:
        device: device of the operator.
        exact_dtype: dtype of the tokens that the router reads.
        dtype: dtype of the product.
        weight_dtype: dtype of the router's weight.
    """
    width = 96  # of the product
    for gate_form in GATE_FORMS:
        x, router_weight, settings, padding = _router(gate_form)
        given = x, eighths((width, C)) / 8, eighths((width,))
        given = [t.to(device, dtype) for t in given]
        given.append(router_weight.to(device, weight_dtype))
        *projection, joint = given
        first, *further = _parts(joint, settings)
        inputs = *projection, first, *settings, _on(device, padding), *further
        product, *routed = OPS.project_and_route(x.to(device, exact_dtype), *inputs)
        rows = routed[2]
        leaves = [_exact_leaf(t) for t in given]
        x, weight, bias, router_weight = leaves
        exact_product = F.linear(x, weight, bias)
        yield f"product ({gate_form})", product, exact_product
        logits = eager.gate_logits(x, router_weight)
        want = _choose(logits, settings, padding)
        yield from _routing(gate_form, routed, want, logits)
        outputs = [exact_product, want.weights, want.stats.probs, logits]
        output_grads = [eighths(t.shape) for t in outputs]
        on_device = [output_grads[0].to(device, dtype), *(t.to(device) for t in output_grads[1:])]
        grads = OPS.project_and_route_backward(*on_device, rows, *inputs)
        exact_grads = torch.autograd.grad(outputs, leaves, [t.double() for t in output_grads])
        names = "tokens", "the weight", "the bias", "the router's weight"
        for name, *both in zip(names, grads, exact_grads):
            yield f"gradients of {name} ({gate_form})", *both


def _weigh(device: torch.device, dtype: torch.dtype, weights_dtype: torch.dtype) -> Compared:
    """Compare `weigh` and its backward, with outputs and gates in these dtypes."""
    heads = 3
    width = 72
    by_token = eighths((B, N, heads, width)).transpose(1, 2)
    # Outputs in both memory layouts, with gates per token and per sequence.
    for o, tokens in ((by_token, N), (by_token.contiguous(), 1)):
        o = o.to(device, dtype)
        weights = eighths((B, tokens, heads)).to(device, weights_dtype)
        dy = eighths((B, N, heads * width)).flip(1).to(device, dtype)
        leaves = [_exact_leaf(o), _exact_leaf(weights)]
        want = (leaves[0].transpose(1, 2) * leaves[1].unsqueeze(-1)).flatten(2)
        yield "outputs times gates", OPS.weigh(o, weights), want
        grads = OPS.weigh_backward(dy, o, weights)
        exact_grads = torch.autograd.grad(want, leaves, dy.cpu().double())
        yield from zip(("gradients of outputs", "gradients of gates"), grads, exact_grads)


def _slice(device: torch.device, dtype: torch.dtype) -> Compared:
    """Compare `plan`, `slice_rows` and `slice_columns`, for tokens in `dtype` and weights in it and in float32."""
    # More rows and columns than one program of either kernel copies.
    channels = 160
    width = 56
    runs = torch.tensor([True, False, True, False, True])
    heads = len(runs)
    gates = (torch.arange(heads) + 1) / 8
    of_channels = runs.repeat_interleave(width)
    plan = OPS.plan(
        runs.view(1, 1, heads).to(device), (gates * runs).view(1, 1, heads).to(device), 3, width
    )
    x = torch.empty(0, device=device, dtype=dtype)
    for weight_dtype in {dtype, torch.float32}:
        weight = (eighths((3 * heads * width, channels)) / 8).to(device, weight_dtype)
        bias = eighths((3 * heads * width,)).to(device, weight_dtype)
        rows, of_bias = OPS.slice_rows(weight, bias, plan[2], 3, x)
        here = of_channels.repeat(3)
        yield "rows of a weight", rows, weight.to(dtype).cpu()[here]
        yield "rows of a bias", of_bias, bias.to(dtype).cpu()[here]
        output = weight[: heads * width].t()
        columns = OPS.slice_columns(output, plan[1], plan[2], x)
        want = output.cpu().double() * gates.repeat_interleave(width)
        yield "columns of a weight", columns, want[:, of_channels]


def _pairs(device: torch.device) -> Compared:
    """Compare `pairs`, with and without the number of heads per token."""
    heads = 5
    count = 2
    # Token n of sequence b runs heads n + b, ..., n + b + count - 1, modulo `heads`.
    first = (torch.arange(N).view(1, N, 1) + torch.arange(B).view(B, 1, 1)) % heads
    active = (torch.arange(heads) - first) % heads < count
    token, offsets = eager.pairs(active)
    for given in (count, None):
        got_token, got_offsets = OPS.pairs(active.to(device), given)
        yield "offsets", got_offsets, offsets
        yield "tokens", got_token[: len(token)], token


# Name of an operator -> its comparison, called with the device and the dtypes.
KERNELS: dict[str, Callable[..., Compared]] = {
    "pairs": _pairs,
    "route": _route,
    "project_and_route": _project_and_route,
    "weigh": _weigh,
    "slice": _slice,
}


def _router(gate_form: str) -> tuple[Tensor, Tensor, tuple, Tensor | None]:
    """Return the inputs of a comparison for a form of gates.

    Returns:
        tokens [B, N, C]; the router's weight; (candidates, shared, routed, gate_form); and a padding mask [B, N], None for
        the released form.
    """
    shared = 2
    if gate_form == "renormalised":
        shared = 0
    padding = None
    if gate_form != "released":
        padding = torch.arange(N) >= torch.tensor([[N], [N - 20]])
    # Rows of candidates, and with the 2 shared heads their rows and the 2 that balance both groups.
    weight = eighths((CANDIDATES + 2 * shared, C)) / 8
    return eighths((B, N, C)), weight, (CANDIDATES, shared, ROUTED, gate_form), padding


def _parts(weight: Tensor, settings: tuple) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the router's weight in the three tensors of the layers of a MoHRouter; `settings` are those of `_router`."""
    candidates, shared, *_ = settings
    if not shared:
        return weight, None, None
    return weight.split_with_sizes([candidates, shared, 2])


def _choose(logits: Tensor, settings: tuple, padding: Tensor | None) -> Routing:
    """Return the routing by PyTorch; `settings` and `padding` are those of `_router`."""
    return eager.choose(logits, *settings, balanced=settings[1] > 0, padding_mask=padding)


def _routing(gate_form: str, routed: list[Tensor], want: Routing, logits: Tensor) -> Compared:
    """Yield the outputs of the router of an operator, `routed`, beside those of PyTorch."""
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


def _exact_leaf(x: Tensor) -> Tensor:
    """Return x as a float64 leaf of autograd on the CPU.

    Autograd computes gradients of CPU tensors in the calling thread; a GPU's thread may be busy with the caller's backward.
    """
    return x.cpu().double().requires_grad_()


def eighths(shape: tuple) -> Tensor:
    """Return a fixed tensor of small multiples of 1/8.

    They are exact in 16 bits, and so are sums of their products in float32: logits do not depend on the order of summation.
    """
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7919 + 13) % 31 - 15).view(shape).float() / 8
