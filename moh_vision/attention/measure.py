"""Where does skipping heads pay on this machine? A model's own calls are measured, and `auto` follows what was found.

Each executor that skips heads is first compared with all heads in plain PyTorch on a small batch, then timed at full size,
as the model will call it. Whatever fails there means all heads for such calls, with a warning; it ends nothing.
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
from moh_vision.attention.executors.choice import first_that_skips, key_of, sizes_of
from moh_vision.attention.executors.measurement_table import (
    MeasurementTable,
    Rows,
    current_table,
    measuring_is_off,
)
from moh_vision.attention.layer import HeadMixtureAttention
from moh_vision.attention.linear import is_traced
from moh_vision.attention.model_heads import attention_layers
from moh_vision.attention.routers.gate_norm import GateNorm
from moh_vision.attention.routing import Call, Routing

log = logging.getLogger("moh_vision.attention")

PAYS = 0.95  # of the time of all heads: less is noise
SMALL = 2  # sequences, where results are compared
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
}  # of the largest number; of 16 bits and TF32:
ROUGH = 3e-2
LEAST, MOST = 5, 20  # rounds
STEPS, PASSES = (
    10,
    3,
)  # the time of so many training steps may be spent, each of so many forward passes
PATIENCE = 10.0  # seconds that a user who asks for it waits at least
WHOLE_ROUNDS = 3  # of the whole model, with and without skipping
# Executors that skip heads in the words of the table.
WORDS = dict(
    WholeSequences="per sequence, C++", Sequences="per sequence, PyTorch", OnGpu="Triton kernels",
    Tokens="per token, C++", AggregatedPairs="per token, C++", CosinePairs="per token, C++",
)  # fmt: skip
LONGEST = 60.0  # seconds that a run measures at most, however slow its steps are


class Recorded(NamedTuple):
    """One call of a layer that could skip heads."""

    executor: type[Executor]
    layer: nn.Module  # a copy
    inputs: tuple[tuple, dict]  # of its forward
    autocast: tuple
    compiled: bool


CallKey = tuple[str, tuple[int, int, int, int]]  # words of `key_of`, and (B, N, M, K)
Calls = dict[CallKey, Recorded]
Reasons = dict[CallKey, dict[str, str]]  # by call and executor, why it cannot skip heads


def measure(model: nn.Module, *inputs: Any, **named: Any) -> Rows:
    """Measure where skipping heads pays in calls like model(*inputs, **named), and print a table of it.

    Where it pays, the last line has the time of the whole model beside its time with all heads.

    From then on the executor "auto" follows what was found, in this process and, through the user's cache, in later ones.
    A smaller batch follows the row of a larger one, fewer active heads that of more. The table names every executor that
    skips heads, with its time or why it cannot, where all heads are computed.

    Args:
        model: in training mode, training steps are measured too; else inference alone, under torch.no_grad. It is left
            as it was.
        *inputs, **named: as the model will get them: sizes, dtypes, masks. Call it under the autocast of later calls.

    Returns:
        Rows by kind of call, see `measurement_table.Rows`; none with MOH_VISION_MEASURE=off.

    Raises:
        ValueError: the model has no HeadMixtureAttention layer.
    """
    attention_layers(model)
    compiled = getattr(model, "_compiled_call_impl", None) is not None or hasattr(
        model, "_orig_mod"
    )
    calls: Calls = {}
    reasons: Reasons = {}
    for training in (True, False) if model.training else (False,):
        forward = collect(
            calls, model, lambda: model(*inputs, **named), training, compiled, reasons=reasons
        )
    rows = rows_of_calls(calls, max(PATIENCE, STEPS * PASSES * forward))
    current_table().add(rows)
    for line in table_lines(rows, reasons):
        print(line)
    mode = "training" if model.training else "inference"
    of_mode = [row for key, kind in rows.items() if key.split()[1] == mode for row in kind]
    if any(row[4] != "Masked" for row in of_mode) and not compiled:
        for line in whole_times(model, lambda: model(*inputs, **named)):
            print(line)
    return rows


def whole_times(model: nn.Module, forward: Callable) -> Iterator[str]:
    """Yield lines with the time of the whole model beside its time with all heads; see `measure`."""
    layers = [m for m in model.modules() if isinstance(m, HeadMixtureAttention)]
    layers = [layer for layer in layers if layer.executor == "auto"]
    weights = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        with torch.enable_grad():
            leaves = [t for t in tree_leaves(forward()) if isinstance(t, Tensor) and t.grad_fn]
            loss = sum(t.float().square().mean() for t in leaves)
            torch.autograd.grad(loss, weights, allow_unused=True)

    def inference() -> None:
        with torch.no_grad():
            forward()

    # In training mode gradients are computed, or else it is inference.
    title, work = "forward", inference
    if model.training and weights:
        title, work = "forward and backward", step
    times: dict[str, list[float]] = dict(auto=[], all_heads=[])
    with as_it_was(model), own_random_numbers():
        for _ in range(1 + WHOLE_ROUNDS):  # the first warms up
            for name, taken in times.items():
                for layer in layers:
                    layer.executor = "auto" if name == "auto" else layer.all_heads_executor
                taken.append(seconds(work))
    skipped, every = (min(taken[1:]) for taken in times.values())
    yield (
        f"the whole model, {title}: {1000 * skipped:.3g} ms, with all heads {1000 * every:.3g} ms; "
        f"skipping takes {skipped / every:.2f} of the time"
    )


def table_lines(rows: Rows, reasons: Reasons) -> Iterator[str]:
    """Yield a line for each call, and below it those of the executors that skip heads: the time, or why one cannot."""
    for (key, (B, N, M, K)), by_executor in reasons.items():
        tried, mode, heads, _ = key.split(maxsplit=3)
        row = next((row for row in rows.get(key, ()) if row[:4] == [N, M, B, K]), None)
        taken, took = row is not None and row[4] == tried, "there was no time left to measure it"
        if row is not None:
            took = "failed" if row[5] is None else f"{row[5]:.2f} of the time of all heads"
        tokens = f"{N} tokens" if M == N else f"{N} tokens that look at {M}"
        verdict = "heads are skipped" if taken else "all heads are computed"
        yield f"{mode}, {B} sequences of {tokens}, {K} of {heads} heads run: {verdict}"
        for executor, reason in by_executor.items():
            if executor == tried or (reason and not taken):
                yield f"  {WORDS.get(executor, executor):<27} {reason or took}"


def measured_table(calls: Calls, forward: float) -> tuple[dict, str]:
    """The table of a run, and a line for the user; forward: seconds of the forward passes of one training step."""
    start = time.perf_counter()
    rows = rows_of_calls(calls, min(STEPS * PASSES * forward, LONGEST))
    every = [row for kind in rows.values() for row in kind]
    ratios = [row[5] for row in every if row[4] != "Masked"]
    line = f"attention measured in {time.perf_counter() - start:.1f} s: {len(ratios)} of {len(every)} kinds of calls skip heads"
    took = (
        f", in {min(ratios):.2f} to {max(ratios):.2f} of the layer's time with all heads"
        if ratios
        else ""
    )
    return MeasurementTable(rows).as_record(), line + took if every else ""


def collect(
    calls: Calls, model: nn.Module, forward: Callable, training: bool, compiled: bool = False, batch: float = 1.0,
    reasons: Reasons | None = None,
) -> float:  # fmt: skip
    """Add the distinct calls of forward() in which the layers of a model could skip heads; returns the seconds it took.

    Args:
        training: run it in this mode; no gradients are recorded.
        compiled: calls like these will be compiled.
        batch: they will have so many times as many sequences.
        reasons: takes, by call, why each executor cannot skip heads; "" where it can.
    """
    layers = [
        m
        for m in model.modules()
        if isinstance(m, HeadMixtureAttention) and m.executor == "auto" and m.fused_attn
    ]
    inputs: dict[nn.Module, tuple] = {}

    def record(layer: nn.Module, call: Call, *more: Any) -> Executor:
        executor, _ = first_that_skips(layer, call, compiled)
        B, N, M, K = sizes_of(layer, call)
        skips = (
            executor is not layer.all_heads_executor and K < layer.num_heads and call.cache is None
        )
        # Where the batch is as long as the sequences, which dimension it is cannot be told.
        want = B if B in (N, M) else round(B * batch) or 1
        call_key = " ".join(key_of(layer, call, executor, compiled)), (want, N, M, K)
        if reasons is not None:
            never = "" if skips else "all heads run, or keys are cached"
            reasons[call_key] = {
                tried.__name__: tried.why_not(layer, call, compiled) or never
                for tried in layer.skipping_executors
            }
        if skips and not is_traced(call.x) and call_key not in calls:
            device = call.x.device.type
            autocast = (
                device,
                torch.get_autocast_dtype(device),
                torch.is_autocast_enabled(device),
            )
            try:
                calls[call_key] = Recorded(
                    executor, copied(layer), resized(inputs[layer], B, want), autocast, compiled
                )
            except Exception as error:  # what cannot be copied
                refuse(executor, B, N, error)
        return layer.all_heads_executor(layer, call, *more)

    keep_inputs = lambda layer, args, named: inputs.update({layer: (args, named)})  # noqa: E731
    hooks = [layer.register_forward_pre_hook(keep_inputs, with_kwargs=True) for layer in layers]
    try:
        with as_it_was(model), torch.no_grad(), own_random_numbers():
            for layer in layers:
                layer.executor = "auto" if measuring_is_off() else record
            model.train(training)
            with torch.compiler.set_stance("force_eager"):
                return seconds(forward)
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore a model's modes, executors and buffers, such as the statistics of a batch norm, afterwards."""
    modes = [(m, m.training) for m in model.modules()]
    executors = [(m, m.executor) for m in model.modules() if isinstance(m, HeadMixtureAttention)]
    buffers = [(b, b.clone()) for b in model.buffers()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for layer, executor in executors:
            layer.executor = executor
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def rows_of_calls(calls: Calls, time_left: float) -> Rows:
    """The rows of calls, from the user's cache or measured; those that there is no time for are left out."""
    cached = MeasurementTable.from_cache() if calls else MeasurementTable()
    found = MeasurementTable()
    new = MeasurementTable()
    for number, ((key, (B, N, M, K)), call) in enumerate(calls.items()):
        known = [row for row in cached.rows.get(key, ()) if row[:4] == [N, M, B, K]]
        if not known and time_left > 0:
            start = time.perf_counter()
            picked, ratio, compiling = judge(call, (B, N, M), time_left / (len(calls) - number))
            time_left -= time.perf_counter() - start - compiling
            known = [[N, M, B, K, picked, ratio]]
            new.add({key: known})
        if known:
            found.add({key: known})
    if new.rows:
        new.save()
        torch.cuda.empty_cache()
    return found.rows


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
    return call.executor.__name__ if ratio <= PAYS else "Masked", round(ratio, 4), compiling


def refuse(executor: type[Executor], B: int, N: int, error: Exception) -> None:
    """Warn that an executor is not taken for calls of B x N tokens."""
    why = " ".join(str(error).split())[:200]
    log.warning(
        f"{executor.__name__} is not taken for {B} x {N} tokens: {type(error).__name__}: {why}"
    )


def timed(call: Recorded, time_left: float) -> tuple[float, float]:
    """The time of skipping heads over that of all heads, the best of alternate rounds each; and seconds of compiling."""
    layer, compiling, each = copied(call.layer), 0.0, 0.0
    layer = torch.compile(layer) if call.compiled else layer
    executors = (layer.all_heads_executor, call.executor)
    runs = [partial(run, layer, call, call.inputs, executor) for executor in executors]
    for one in runs:
        first, each = seconds(one), seconds(one)
        compiling += max(first - each, 0.0) if call.compiled else 0.0
    # A GPU works while calls are queued. On a CPU a short look is seldom disturbed, and the best one counts.
    look = 0.01 if call.autocast[0] == "cuda" else 0.001
    number, times = max(1, round(look / max(each, 1e-6))), ([], [])
    end = time.perf_counter() + time_left
    while len(times[0]) < LEAST or (len(times[0]) < MOST and time.perf_counter() < end):
        for one, taken in zip(runs, times):
            taken.append(seconds(one, number))
    if call.compiled:
        torch.compiler.reset()  # what was compiled here does not count against the limit of variants
    return min(times[1]) / min(times[0]), compiling


def compare(call: Recorded, batch: int, small: int) -> None:
    """Raise where skipping heads gives another result than all heads in plain PyTorch, in the output or a gradient.

    Nothing is hooked at first: kernels that run only then are among what is compared.
    """
    layer, mode = copied(call.layer), torch.get_deterministic_debug_mode()
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
