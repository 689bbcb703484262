"""Where does skipping heads pay on this machine? A model's own calls are measured, and `auto` follows what was found.

Each executor that skips heads is first compared with all heads in plain PyTorch on a small batch, then timed at full size,
as the model will call it. Whatever fails there means all heads for such calls, with a warning; it ends nothing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moh_vision.attention.executors import Executor
from moh_vision.attention.executors.choice import first_that_skips, key_of, sizes_of
from moh_vision.attention.executors.measurement_table import (
    MeasurementTable,
    Rows,
    current_table,
    measuring_is_off,
)
from moh_vision.attention.linear import is_traced
from moh_vision.attention.model_heads import attention_layers
from moh_vision.attention.routed_layer import RoutedLayer
from moh_vision.attention.routing import Call
from moh_vision.attention.trial import (
    Recorded,
    judge,
    own_random_numbers,
    recorded,
    refuse,
    resized,
    seconds,
)

# The time of so many training steps may be spent, each of so many forward passes.
STEPS = 10
PASSES = 3
PATIENCE = 10.0  # seconds that a user who asks for it waits at least
WHOLE_ROUNDS = 3  # of the whole model, with and without skipping
# Executors that skip heads in the words of the table.
WORDS = dict(
    WholeSequences="per sequence, C++", Sequences="per sequence, PyTorch", InPlace="attention alone",
    Tokens="per token, C++", AggregatedPairs="per token, C++", CosinePairs="per token, C++",
    GroupPairs="groups, C++", GroupsOfSequences="groups, PyTorch",
)  # fmt: skip
LONGEST = 60.0  # seconds that a run measures at most, however slow its steps are


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

    def forward() -> Any:
        return model(*inputs, **named)

    compiled_in_place = getattr(model, "_compiled_call_impl", None) is not None
    compiled = compiled_in_place or hasattr(model, "_orig_mod")
    calls: Calls = {}
    reasons: Reasons = {}
    if model.training:
        collect(calls, model, forward, True, compiled, reasons=reasons)
    elapsed = collect(calls, model, forward, False, compiled, reasons=reasons)
    rows = rows_of_calls(calls, max(PATIENCE, STEPS * PASSES * elapsed))
    current_table().add(rows)
    for line in table_lines(rows, reasons):
        print(line)
    mode = "training" if model.training else "inference"
    of_mode = [row for key in rows if key.split()[1] == mode for row in rows[key]]
    if any(row[4] != "Masked" for row in of_mode) and not compiled:
        for line in whole_times(model, forward):
            print(line)
    return rows


def whole_times(model: nn.Module, forward: Callable) -> Iterator[str]:
    """Yield lines with the time of the whole model beside its time with all heads; see `measure`."""
    layers = [m for m in model.modules() if isinstance(m, RoutedLayer)]
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

    if model.training and weights:
        title = "forward and backward"
        work = step
    else:
        title = "forward"
        work = inference
    times: dict[str, list[float]] = dict(auto=[], all_heads=[])
    with as_it_was(model), own_random_numbers():
        for _ in range(1 + WHOLE_ROUNDS):  # the first warms up
            for name, taken in times.items():
                for layer in layers:
                    if name == "auto":
                        layer.executor = "auto"
                    else:
                        layer.executor = layer.all_heads_executor
                taken.append(seconds(work))
    skipping = min(times["auto"][1:])
    all_heads = min(times["all_heads"][1:])
    yield (
        f"the whole model, {title}: {1000 * skipping:.3g} ms, with all heads {1000 * all_heads:.3g} ms; "
        f"skipping takes {skipping / all_heads:.2f} of the time"
    )


def table_lines(rows: Rows, reasons: Reasons) -> Iterator[str]:
    """Yield a line for each call, and below it those of the executors that skip heads: the time, or why one cannot."""
    for (key, (B, N, M, K)), by_executor in reasons.items():
        tried, mode, heads, _ = key.split(maxsplit=3)
        skips = False
        took = "there was no time left to measure it"
        for row in rows.get(key, ()):
            *sizes, picked, ratio = row
            if sizes == [N, M, B, K]:
                skips = picked == tried
                took = "failed" if ratio is None else f"{ratio:.2f} of the time of all heads"
        tokens = f"{N} tokens"
        if M != N:
            tokens += f" that look at {M}"
        verdict = "heads are skipped" if skips else "all heads are computed"
        yield f"{mode}, {B} sequences of {tokens}, {K} of {heads} heads run: {verdict}"
        for executor, reason in by_executor.items():
            if executor == tried or (reason and not skips):
                yield f"  {WORDS.get(executor, executor):<27} {reason or took}"


def measured_table(calls: Calls, forward: float) -> tuple[dict, str]:
    """Return the table of a run, and a line for the user, "" if there are no calls.

    Args:
        calls: see `collect`.
        forward: seconds of the forward passes of one training step.
    """
    start = time.perf_counter()
    rows = rows_of_calls(calls, min(STEPS * PASSES * forward, LONGEST))
    elapsed = time.perf_counter() - start
    all_rows = [row for of_calls in rows.values() for row in of_calls]
    ratios = [row[5] for row in all_rows if row[4] != "Masked"]
    line = ""
    if all_rows:
        line = f"attention measured in {elapsed:.1f} s: {len(ratios)} of {len(all_rows)} kinds of calls skip heads"
    if ratios:
        line += f", in {min(ratios):.2f} to {max(ratios):.2f} of the layer's time with all heads"
    return MeasurementTable(rows).as_record(), line


def collect(
    calls: Calls,
    model: nn.Module,
    forward: Callable,
    training: bool,
    compiled: bool = False,
    batch: float = 1.0,
    reasons: Reasons | None = None,
) -> float:
    """Add the distinct calls of forward() in which the layers of a model could skip heads.

    Args:
        calls: the calls are added to it.
        model: left as it was.
        forward: calls the model.
        training: run the model in this mode; no gradients are recorded.
        compiled: calls like these will be compiled.
        batch: calls like these will have so many times as many sequences.
        reasons: takes, by call, why each executor cannot skip heads; "" where it can.

    Returns:
        Seconds of forward().
    """
    layers = [
        m
        for m in model.modules()
        if isinstance(m, RoutedLayer) and m.executor == "auto" and m.fused_attn
    ]
    inputs: dict[nn.Module, tuple] = {}

    def record(layer: nn.Module, call: Call, *more: Any) -> Executor:
        executor, _ = first_that_skips(layer, call, compiled)
        B, N, M, K = sizes_of(layer, call)
        skips = (
            executor is not layer.all_heads_executor and K < layer.num_heads and call.cache is None
        )
        want = B
        # Where the batch is as long as the sequences, which dimension it is cannot be told.
        if B not in (N, M):
            want = max(round(B * batch), 1)
        words = " ".join(key_of(layer, call, executor, compiled))
        call_key = (words, (want, N, M, K))
        if reasons is not None:
            never = "" if skips else "all heads run, or keys are cached"
            reasons[call_key] = {
                tried.__name__: tried.why_not(layer, call, compiled) or never
                for tried in layer.skipping_executors
            }
        if skips and not is_traced(call.x) and call_key not in calls:
            try:
                arguments = resized(inputs[layer], B, want)
                calls[call_key] = recorded(executor, layer, arguments, call.x.device.type, compiled)
            except Exception as error:  # what cannot be copied
                refuse(executor, B, N, error)
        return layer.all_heads_executor(layer, call, *more)

    def keep_inputs(layer: nn.Module, args: tuple, named: dict) -> None:
        inputs[layer] = args, named

    hooks = [layer.register_forward_pre_hook(keep_inputs, with_kwargs=True) for layer in layers]
    try:
        with as_it_was(model), torch.no_grad(), own_random_numbers():
            if not measuring_is_off():
                for layer in layers:
                    layer.executor = record
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
    executors = [(m, m.executor) for m in model.modules() if isinstance(m, RoutedLayer)]
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
    """Return the rows of calls, from the user's cache or measured; calls that there is no time for are left out."""
    if not calls:
        return {}
    cached = MeasurementTable.from_cache()
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
