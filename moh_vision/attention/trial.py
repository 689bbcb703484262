"""Try one recorded call of a layer with all heads and with heads skipped: compare the results, then the times.

`measure` records the calls, and keeps the results in a `MeasurementTable`.
"""

import copy
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from moh_vision.attention import kernels
from moh_vision.attention.executors import Executor
from moh_vision.attention.routing import Routing
from moh_vision.common.errors import class_and_message

log = logging.getLogger("moh_vision.attention")

PAYS = 0.95  # skipping must take at most this share of the time of all heads, since smaller gains may be noise
SMALL = 2  # number of sequences with which results are compared
# Differences up to these are taken for rounding, relative to the largest element. ROUGH is for 16 bits and TF32.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
ROUGH = 3e-2
# Least and largest number of timed rounds. A round runs the call with all heads and with heads skipped.
LEAST = 5
MOST = 20


class Recorded(NamedTuple):
    """One call of a layer that could skip heads."""

    executor: type[Executor]
    layer: nn.Module  # a copy of the layer
    inputs: tuple[tuple, dict]  # the arguments of its forward
    autocast: tuple  # the arguments of torch.autocast
    compiled: bool  # whether the call will be compiled later
    # Captures such calls as CUDA graphs, as they will run later, see `engine.cuda_graphs.CudaGraphs`; None: they run eagerly.
    graphs: Any = None


def recorded(
    executor: type[Executor],
    layer: nn.Module,
    inputs: tuple[tuple, dict],
    device: str,
    compiled: bool,
    graphs: Any = None,
) -> Recorded:
    """Return a record of a call of a layer, with the present autocast.

    Args:
        executor: skips heads of the call.
        layer: is copied.
        inputs: the arguments of its forward.
        device: device type of the tokens.
        compiled: whether such calls will be compiled later.
        graphs: see `Recorded`.
    """
    autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    return Recorded(executor, copied(layer), inputs, autocast, compiled, graphs)


def judge(
    call: Recorded, sizes: tuple[int, int, int], time_left: float
) -> tuple[str, float | None, float]:
    """Decide whether `auto` should skip the heads of a call: compare the results, then the times.

    Args:
        call: the call.
        sizes: B, N and M.
        time_left: seconds that may be spent.

    Returns:
        The name of the executor to take, the time of skipping heads over that of all heads (None: skipping failed), and
        the seconds that torch.compile took.
    """
    B, N, M = sizes
    small = B
    # If B equals N or M, `resized` cannot tell which dimension of an input is the batch: keep B.
    if B not in (N, M):
        small = min(B, SMALL)
    try:
        with own_random_numbers():
            compare(call, B, small)
            ratio, compiling = timed(call, time_left)
    except Exception as error:  # out of memory, an error of a compiler, or different results
        refuse(call.executor, B, N, error)
        return "Masked", None, 0.0
    picked = "Masked"
    if ratio <= PAYS:
        picked = call.executor.__name__
    return picked, round(ratio, 4), compiling


def refuse(executor: type[Executor], B: int, N: int, error: Exception) -> None:
    """Warn that an executor is not taken for calls of B x N tokens."""
    reason = class_and_message(error)
    log.warning(f"{executor.__name__} is not taken for {B} x {N} tokens: {reason}")


def timed(call: Recorded, time_left: float) -> tuple[float, float]:
    """Return the time of skipping heads over that of all heads, and the seconds that torch.compile took.

    Both are run in turn, and the shortest time of each counts.
    """
    layer = copied(call.layer)
    if call.compiled:
        layer = torch.compile(layer)
    all_heads = partial(run, layer, call, call.inputs, layer.all_heads_executor)
    skipping = partial(run, layer, call, call.inputs, call.executor)
    if call.graphs is not None:
        all_heads, _ = call.graphs.capture(
            partial(compute, layer, call, call.inputs, layer.all_heads_executor)
        )
        skipping, _ = call.graphs.capture(partial(compute, layer, call, call.inputs, call.executor))
    compiling = 0.0
    for work in (all_heads, skipping):
        first = seconds(work)
        each = seconds(work)
        if call.compiled:
            compiling += max(first - each, 0.0)
    # One timing repeats the call for about this many seconds. On a GPU it is longer, so that calls queue up and the device
    # is never idle. On a CPU it is short, because other processes seldom disturb every one of several short timings.
    timing = 0.001
    if call.autocast[0] == "cuda":
        timing = 0.01
    number = max(1, round(timing / max(each, 1e-6)))
    times_of_all: list[float] = []
    times_of_skipping: list[float] = []
    end = time.perf_counter() + time_left
    while len(times_of_all) < LEAST or (len(times_of_all) < MOST and time.perf_counter() < end):
        times_of_all.append(seconds(all_heads, number))
        times_of_skipping.append(seconds(skipping, number))
    if call.compiled:
        torch.compiler.reset()  # so that this code does not count against dynamo's recompile limit
    return min(times_of_skipping) / min(times_of_all), compiling


def compare(call: Recorded, batch: int, small: int) -> None:
    """Raise AssertionError if skipping heads gives another output or gradient than all heads in plain PyTorch.

    The first comparison is of the layer as it is, because some kernels run only without hooks. The second hooks the router,
    so that no token runs the last head: that also tests a head without tokens.
    """
    layer = copied(call.layer)
    mode = torch.get_deterministic_debug_mode()
    for module in layer.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(coarse(p, 256))

    def coarse_tokens(t: Any) -> Any:
        if not is_tokens(t, layer):
            return t
        return coarse(t, 8)

    inputs = tree_map(coarse_tokens, resized(call.inputs, batch, small))
    for change in (None, without_last_head):
        hook = None
        if change is not None:
            hook = layer.router.register_forward_hook(change)
        with kernels.using("torch"):
            want = run(layer, call, inputs, layer.all_heads_executor)
        with warnings.catch_warnings(action="ignore"):
            # In this mode torch fills new memory with NaN, which shows elements that a kernel failed to write.
            torch.set_deterministic_debug_mode("warn")
            try:
                got = run(layer, call, inputs, call.executor)
            finally:
                torch.set_deterministic_debug_mode(mode)
        if hook is not None:
            hook.remove()
        tolerance = TOLERANCE.get(want[0].dtype, ROUGH)
        if want[0].is_cuda and torch.backends.cuda.matmul.allow_tf32:
            tolerance = ROUGH
        check_same(want, got, tolerance)


def coarse(t: Tensor, parts: int) -> Tensor:
    """Round elements to multiples of 1 / parts, without a gradient.

    The products of such tokens and weights have no rounding error, in whatever order they are summed. With other values
    PyTorch and an operator could choose different heads for a token whose logits are nearly equal; neither would be wrong.
    """
    return (t.detach() * parts).round() / parts


def is_tokens(t: Any, layer: nn.Module) -> bool:
    """Return whether an input of a layer is tokens, [.., C]."""
    return isinstance(t, Tensor) and t.is_floating_point() and t.shape[-1:] == (layer.dim,)


def without_last_head(router: nn.Module, _: Any, routing: Routing) -> Routing:
    """Return a routing in which no token chose the last head."""
    H = routing.active.shape[-1]
    remaining = torch.arange(H, device=routing.active.device) < H - 1
    return routing._replace(
        weights=routing.weights * remaining,
        active=routing.active & remaining,
        count=None,
        pairs=None,
    )


def check_same(want: list[Tensor], got: list[Tensor], tolerance: float) -> None:
    """Raise AssertionError if tensors are not nearly equal. The first is the output, the others are gradients."""
    largest = []  # the largest absolute value in each tensor
    for w in want:
        largest.append(w.abs().max().item() if w.numel() else 0.0)
    largest_gradient = max(largest[1:], default=0.0)
    for index, (w, g) in enumerate(zip(want, got, strict=True)):
        scale = largest[index]
        if index > 0:
            # Not its own scale alone: the gradient of the keys' bias, for one, is 0 apart from rounding.
            scale = max(scale, 0.1 * largest_gradient)
        torch.testing.assert_close(g, w, rtol=0, atol=tolerance * scale)


def run(
    layer: nn.Module, call: Recorded, inputs: tuple[tuple, dict], executor: type[Executor]
) -> list[Tensor]:
    """Run a call; return its output and, in training mode, the gradients of its tokens and of the layer's parameters."""
    torch.manual_seed(0)  # for routers that draw random numbers
    return compute(layer, call, inputs, executor)


def compute(
    layer: nn.Module, call: Recorded, inputs: tuple[tuple, dict], executor: type[Executor]
) -> list[Tensor]:
    """Do `run` with the random numbers as they are."""

    def leaf(t: Any) -> Any:
        if not is_tokens(t, layer):
            return t
        return t.detach().requires_grad_(layer.training)

    layer.executor = executor
    inputs = tree_map(leaf, inputs)
    args, named = inputs
    with torch.autocast(*call.autocast), torch.set_grad_enabled(layer.training):
        y = layer(*args, **named)[0]
    if not layer.training:
        return [y]
    wanted = [
        t
        for t in (*tree_leaves(inputs), *layer.parameters())
        if isinstance(t, Tensor) and t.requires_grad
    ]
    gradients = torch.autograd.grad(
        y, wanted, y.detach(), allow_unused=True, materialize_grads=True
    )
    return [y.detach(), *gradients]


def copied(layer: nn.Module) -> nn.Module:
    """Copy a layer, with random weights.

    The layer's own weights may be sharded, and a new router's may all be 0, which would leave the choice of heads to ties.
    """
    fresh = {}  # id of a parameter -> its replacement: deepcopy takes it for the copy
    for p in layer.parameters():
        scale = 1.0
        if p.dim() > 1:
            scale = p.shape[-1] ** -0.5
        values = scale * torch.randn(p.shape, device=p.device, dtype=p.dtype)
        fresh[id(p)] = nn.Parameter(values, p.requires_grad)
    duplicate = copy.deepcopy(layer, fresh)
    # Remove what `measure.collect` has set.
    duplicate.__dict__.pop("plan", None)
    duplicate._forward_pre_hooks.clear()
    duplicate._forward_pre_hooks_with_kwargs.clear()
    # Only the main process measures: an all-reduce would wait forever.
    duplicate.router.run_alone()
    return duplicate


def resized(inputs: tuple[tuple, dict], have: int, want: int) -> tuple[tuple, dict]:
    """Return the inputs of a layer with `want` sequences instead of `have`, detached; sequences are repeated or dropped."""

    def change(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if (
            t.dim() > 1 and t.shape[0] == have != want
        ):  # a vector is one condition for all sequences
            t = t.index_select(0, torch.arange(want, device=t.device) % have)
        return t.detach()

    return tree_map(change, inputs)


def seconds(function: Callable[[], object], number: int = 1) -> float:
    """Return the seconds that `number` calls of `function` take, work queued on a GPU included."""
    wait_for_gpu()
    start = time.perf_counter()
    for _ in range(number):
        function()
    wait_for_gpu()
    return time.perf_counter() - start


def wait_for_gpu() -> None:
    """Wait until the GPU has finished all queued work, if one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """Restore the random number generators when the `with` block ends."""
    devices = []
    if torch.cuda.is_initialized():
        devices = [torch.cuda.current_device()]
    with torch.random.fork_rng(devices=devices):
        yield
