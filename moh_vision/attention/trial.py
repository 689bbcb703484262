"""One recorded call of a layer, with all heads and with some skipped: are the results the same, and which takes less time?

`measure` says which calls are tried, and keeps what was found.
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
from moh_vision.attention.routers.gate_norm import GateNorm
from moh_vision.attention.routing import Routing

log = logging.getLogger("moh_vision.attention")

PAYS = 0.95  # of the time of all heads: less is noise
SMALL = 2  # sequences, where results are compared
# Differences that are rounding, as a share of the largest number; ROUGH: of 16 bits and TF32.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
ROUGH = 3e-2
# Rounds of both that are timed.
LEAST = 5
MOST = 20


class Recorded(NamedTuple):
    """One call of a layer that could skip heads."""

    executor: type[Executor]
    layer: nn.Module  # a copy
    inputs: tuple[tuple, dict]  # of its forward
    autocast: tuple
    compiled: bool


def judge(
    call: Recorded, sizes: tuple[int, int, int], time_left: float
) -> tuple[str, float | None, float]:
    """The executor to take for a call, the time of skipping heads over that of all heads, and seconds of compiling."""
    B, N, M = sizes
    try:
        with own_random_numbers():
            # Where the batch is as long as the sequences, which dimension it is cannot be told.
            compare(call, B, B if B in (N, M) else min(B, SMALL))
            ratio, compiling = timed(call, time_left)
    except Exception as error:  # memory that is full, a compiler's error, a difference
        refuse(call.executor, B, N, error)
        return "Masked", None, 0.0
    picked = call.executor.__name__ if ratio <= PAYS else "Masked"
    return picked, round(ratio, 4), compiling


def refuse(executor: type[Executor], B: int, N: int, error: Exception) -> None:
    """Warn that an executor is not taken for calls of B x N tokens."""
    why = " ".join(str(error).split())[:200]
    log.warning(
        f"{executor.__name__} is not taken for {B} x {N} tokens: {type(error).__name__}: {why}"
    )


def timed(call: Recorded, time_left: float) -> tuple[float, float]:
    """The time of skipping heads over that of all heads, the best of alternate rounds each; and seconds of compiling."""
    layer = copied(call.layer)
    if call.compiled:
        layer = torch.compile(layer)
    all_heads = partial(run, layer, call, call.inputs, layer.all_heads_executor)
    skipping = partial(run, layer, call, call.inputs, call.executor)
    compiling = 0.0
    for one in (all_heads, skipping):
        first = seconds(one)
        each = seconds(one)
        if call.compiled:
            compiling += max(first - each, 0.0)
    # A GPU works while calls are queued. On a CPU a short look is seldom disturbed, and the best one counts.
    look = 0.01 if call.autocast[0] == "cuda" else 0.001
    number = max(1, round(look / max(each, 1e-6)))
    times_of_all: list[float] = []
    times_of_skipping: list[float] = []
    end = time.perf_counter() + time_left
    while len(times_of_all) < LEAST or (len(times_of_all) < MOST and time.perf_counter() < end):
        times_of_all.append(seconds(all_heads, number))
        times_of_skipping.append(seconds(skipping, number))
    if call.compiled:
        torch.compiler.reset()  # what was compiled here does not count against the limit of variants
    return min(times_of_skipping) / min(times_of_all), compiling


def compare(call: Recorded, batch: int, small: int) -> None:
    """Raise where skipping heads gives another result than all heads in plain PyTorch, in the output or a gradient.

    Nothing is hooked at first: kernels that run only then are among what is compared.
    """
    layer = copied(call.layer)
    mode = torch.get_deterministic_debug_mode()
    for module in layer.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(coarse(p, 256))
    inputs = tree_map(
        lambda t: coarse(t, 8) if is_tokens(t, layer) else t, resized(call.inputs, batch, small)
    )
    for change in (None, without_last_head):
        hook = None if change is None else layer.router.register_forward_hook(change)
        with kernels.using("torch"):
            want = run(layer, call, inputs, layer.all_heads_executor)
        with warnings.catch_warnings(action="ignore"):
            torch.set_deterministic_debug_mode(
                "warn"
            )  # memory that nobody has written to holds NaN
            try:
                got = run(layer, call, inputs, call.executor)
            finally:
                torch.set_deterministic_debug_mode(mode)
        if hook is not None:
            hook.remove()
        tf32 = want[0].is_cuda and torch.backends.cuda.matmul.allow_tf32
        check_same(want, got, ROUGH if tf32 else TOLERANCE.get(want[0].dtype, ROUGH))


def coarse(t: Tensor, parts: int) -> Tensor:
    """Numbers rounded to multiples of 1 / parts.

    The logits of such tokens and weights are exact in any order of summation. PyTorch and an operator would else choose
    other heads for some of many tokens, which is no fault of either.
    """
    return (t.detach() * parts).round() / parts


def is_tokens(t: Any, layer: nn.Module) -> bool:
    """Whether an input of a layer is tokens, [.., C]."""
    return isinstance(t, Tensor) and t.is_floating_point() and t.shape[-1:] == (layer.dim,)


def without_last_head(router: nn.Module, _: Any, routing: Routing) -> Routing:
    """Return a routing in which no token chose the last head."""
    others = (
        torch.arange(routing.active.shape[-1], device=routing.active.device)
        < routing.active.shape[-1] - 1
    )
    return routing._replace(
        weights=routing.weights * others, active=routing.active & others, count=None, pairs=None
    )


def check_same(want: list[Tensor], got: list[Tensor], tolerance: float) -> None:
    """Raise AssertionError where tensors are not nearly equal. The first is the output, others are gradients."""
    most = max([t.abs().max().item() for t in want[1:] if t.numel()], default=0.0)
    for number, (w, f) in enumerate(zip(want, got, strict=True)):
        # What is zero but for rounding, as the gradient of the keys' bias, is held to the others' size.
        size = max(w.abs().max().item() if w.numel() else 0.0, 0.1 * most if number else 0.0)
        torch.testing.assert_close(f, w, rtol=0, atol=tolerance * size)


def run(
    layer: nn.Module, call: Recorded, inputs: tuple[tuple, dict], executor: type[Executor]
) -> list[Tensor]:
    """The output of a call and, in training, the gradients of its tokens and of the layer's weights."""

    def leaf(t: Any) -> Any:
        return t.detach().requires_grad_(layer.training) if is_tokens(t, layer) else t

    layer.executor = executor
    args, named = inputs = tree_map(leaf, inputs)
    torch.manual_seed(0)  # for routers that draw
    with torch.autocast(*call.autocast), torch.set_grad_enabled(layer.training):
        y = layer(*args, **named)[0]
    if not layer.training:
        return [y]
    wanted = [
        t
        for t in (*tree_leaves(inputs), *layer.parameters())
        if isinstance(t, Tensor) and t.requires_grad
    ]
    return [
        y.detach(),
        *torch.autograd.grad(y, wanted, y.detach(), allow_unused=True, materialize_grads=True),
    ]


def copied(layer: nn.Module) -> nn.Module:
    """The layer with random weights: trained or sharded ones are not needed, and new routers may not choose yet."""
    fresh = {}
    for p in layer.parameters():
        scale = p.shape[-1] ** -0.5 if p.dim() > 1 else 1.0
        numbers = scale * torch.randn(p.shape, device=p.device, dtype=p.dtype)
        fresh[id(p)] = nn.Parameter(numbers, p.requires_grad)
    other = copy.deepcopy(layer, fresh)
    other.executor = layer.all_heads_executor
    other._forward_pre_hooks.clear()  # of `collect`
    other._forward_pre_hooks_with_kwargs.clear()
    for norm in (module for module in other.modules() if isinstance(module, GateNorm)):
        norm.of_all = False  # the main process measures alone
    return other


def resized(inputs: tuple[tuple, dict], have: int, want: int) -> tuple[tuple, dict]:
    """Inputs of a layer with `want` sequences instead of `have`, detached."""

    def change(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if t.dim() and t.shape[0] == have != want:
            t = t.index_select(0, torch.arange(want, device=t.device) % have)
        return t.detach()

    return tree_map(change, inputs)


def seconds(one: Callable[[], object], number: int = 1) -> float:
    """Seconds of so many runs; on a GPU the device is waited for."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(number):
        one()
    wait()
    return time.perf_counter() - start


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """Restore the random number generators afterwards."""
    with torch.random.fork_rng(
        devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    ):
        yield
