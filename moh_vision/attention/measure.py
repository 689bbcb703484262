"""Measure for which calls of a model skipping heads takes less time on this machine. The executor "auto" follows the result.

For each distinct call, the first executor that can skip its heads is compared with all heads in plain PyTorch on a small
batch, then timed at full size. If either fails, a warning is logged, and `auto` computes all heads of such calls.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moh_vision.attention.executors.measurement_table import (
    MeasurementTable,
    Row,
    current_table,
    measuring_is_off,
)
from moh_vision.attention.executors.plan import Plan, first_that_skips, plan_executor
from moh_vision.attention.executors.signature import sign, words
from moh_vision.attention.linear import is_traced
from moh_vision.attention.model_heads import attention_layers, mlp_layers
from moh_vision.attention.routed_layer import routed_layers
from moh_vision.attention.routing import Call, RoutingForm
from moh_vision.attention.trial import (
    Recorded,
    judge,
    own_random_numbers,
    recorded,
    refuse,
    resized,
    seconds,
)

# Measuring may take as long as STEPS training steps. A step is counted as PASSES forward passes.
STEPS = 10
PASSES = 3
PATIENCE = 10.0  # seconds that `measure` may take in any case, because the user has asked for it
LONGEST = 60.0  # seconds that measuring may take at the start of a run, however slow its steps are
WHOLE_ROUNDS = 3  # timed runs of the whole model, with and without skipping
IN_A_GRAPH = " in a CUDA graph"  # after the words of a call, in the user's cache
# Names of the executors that skip heads, in the printed table.
WORDS = dict(
    WholeSequences="per sequence, C++", Sequences="per sequence, PyTorch", InPlace="attention alone",
    Tokens="per token, C++", AggregatedPairs="per token, C++", CosinePairs="per token, C++",
    GroupPairs="groups, C++", GroupsOfSequences="groups, PyTorch",
)  # fmt: skip

CallKey = tuple[str, tuple[int, int, int, int]]  # the words of `signature.words`, and (B, N, M, K)
Calls = dict[CallKey, Recorded]
# For each call: name of executor -> why it cannot skip heads; "" where it can.
Reasons = dict[CallKey, dict[str, str]]


def measure(model: nn.Module, *inputs: Any, **named: Any) -> list[Row]:
    """Measure in which attention calls of model(*inputs, **named) skipping heads takes less time, and print a table.

    From then on the executor "auto" follows these measurements, in this process and, by the user's cache, in later ones. A
    row of the table also holds for smaller batches and for fewer active heads. For a call that computes all heads, the
    printed table names every executor that skips heads, with its time or the reason why it cannot run. If any call skips
    heads, the last line compares the time of the whole model with its time with all heads.

    Args:
        model: its mode decides. Training mode: calls of training and of inference are measured; eval mode: calls of
            inference alone, under torch.no_grad. The model is left as it was.
        *inputs, **named: inputs with the sizes, dtypes and masks of later calls; call `measure` under their autocast.

    Returns:
        The measured rows, see `measurement_table.Row`; empty with MOH_VISION_MEASURE=off.

    Raises:
        ValueError: the model has no HeadMixtureAttention layer and no GroupMixtureMlp.
    """
    if not mlp_layers(model):
        attention_layers(model)  # raises if there are none

    def forward() -> Any:
        return model(*inputs, **named)

    calls: Calls = {}
    reasons: Reasons = {}
    if model.training:
        collect(calls, model, forward, training=True, reasons=reasons)
    elapsed = collect(calls, model, forward, training=False, reasons=reasons)
    rows = rows_of_calls(calls, max(PATIENCE, STEPS * PASSES * elapsed))
    current_table().add(rows)
    for line in table_lines(rows, reasons):
        print(line)
    mode = "training" if model.training else "inference"
    taken = [row.taken for row in rows if row.call.split()[1] == mode]
    if any(name != "Masked" for name in taken) and not compiled_layers(model):
        for line in whole_times(model, forward):
            print(line)
    return rows


def whole_times(model: nn.Module, forward: Callable) -> Iterator[str]:
    """Yield a line that compares the time of the whole model with its time with all heads; see `measure`."""
    layers = [layer for layer in routed_layers(model) if layer.executor == "auto"]
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
        for _ in range(1 + WHOLE_ROUNDS):  # the first round warms up and is not counted
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


def table_lines(rows: list[Row], reasons: Reasons) -> Iterator[str]:
    """Yield a line for each call and, below it, lines for executors that skip heads: the time, or why one cannot run."""
    table = MeasurementTable(rows)
    for (call, sizes), by_executor in reasons.items():
        B, N, M, K = sizes
        # The words begin with executor, mode and number of heads, see `signature.words`.
        tried, mode, heads, _ = call.split(maxsplit=3)
        row = table.find(call, sizes)
        skips = row is not None and row.taken == tried
        if row is None:
            took = "there was no time left to measure it"
        elif row.ratio is None:
            took = "failed"
        else:
            took = f"{row.ratio:.2f} of the time of all heads"
        tokens = f"{N} tokens"
        if M != N:
            tokens += f" that look at {M}"
        verdict = "heads are skipped" if skips else "all heads are computed"
        yield f"{mode}, {B} sequences of {tokens}, {K} of {heads} heads run: {verdict}"
        for executor, reason in by_executor.items():
            if executor == tried or (reason and not skips):
                yield f"  {WORDS.get(executor, executor):<27} {reason or took}"


def measured_table(calls: Calls, forward: float) -> tuple[dict, str]:
    """Measure the calls of a run; return the record of the table, and a line for the user, "" if there are no calls.

    Args:
        calls: see `collect`.
        forward: seconds of the forward passes of one training step.
    """
    start = time.perf_counter()
    rows = rows_of_calls(calls, min(STEPS * PASSES * forward, LONGEST))
    elapsed = time.perf_counter() - start
    ratios = [row.ratio for row in rows if row.taken != "Masked"]
    line = ""
    if rows:
        line = f"attention measured in {elapsed:.1f} s: {len(ratios)} of {len(rows)} kinds of calls skip heads"
    if ratios:
        line += f", in {min(ratios):.2f} to {max(ratios):.2f} of the layer's time with all heads"
    return MeasurementTable(rows).as_record(), line


def collect(
    calls: Calls,
    model: nn.Module,
    forward: Callable,
    training: bool,
    uncompiled: bool = False,
    batch: float = 1.0,
    reasons: Reasons | None = None,
    graphs: Any = None,
) -> float:
    """Add the distinct calls of forward() in which the layers of a model could skip heads.

    Args:
        calls: the calls are added to it.
        model: left as it was.
        forward: calls the model; run without gradients.
        training: whether to run it in training mode.
        uncompiled: True: a copy that is not compiled will make such calls; False: they are compiled where a layer, or a
            module around it, is.
        batch: number of sequences in later calls over the number in this one.
        reasons: for each call, why each executor cannot skip heads is added to it; None: not wanted.
        graphs: captures the calls, if they will be in CUDA graphs later, see `trial.Recorded`.

    Returns:
        Seconds that forward() took.
    """
    layers = [
        layer for layer in routed_layers(model) if layer.executor == "auto" and layer.fused_attn
    ]
    inputs: dict[nn.Module, tuple] = {}
    in_compiled_code: set[nn.Module] = set()
    if not uncompiled:
        in_compiled_code = compiled_layers(model)

    def record(layer: nn.Module, call: Call, form: RoutingForm | None = None) -> Plan:
        """Record a call, and let the layer compute all heads. Stands in for the layer's `plan`."""
        compiled = layer in in_compiled_code
        mode = "compiled" if compiled else None
        # Gradients are off while calls are collected. In training they will be on.
        s = sign(layer, call, mode, form)._replace(gradients=training)
        executor, _ = first_that_skips(layer, s)
        all_heads = executor is layer.all_heads_executor or s.active == s.heads
        skips = not all_heads and not s.cache
        later_batch = s.batch
        # If the batch equals the number of tokens or keys, `resized` cannot tell which dimension of a mask is the batch.
        alone = sum(isinstance(t, Tensor) for t in tree_leaves(inputs[layer])) == 1
        if alone or s.batch not in (s.tokens, s.keys):
            later_batch = max(round(s.batch * batch), 1)
        call_key = (words(s, executor), (later_batch, s.tokens, s.keys, s.active))
        if reasons is not None:
            never = "" if skips else "all heads run, or keys are cached"
            reasons[call_key] = {
                tried.__name__: tried.why_not(s) or never for tried in layer.skipping_executors
            }
        if skips and not is_traced(call.x) and call_key not in calls:
            try:
                arguments = resized(inputs[layer], s.batch, later_batch)
                calls[call_key] = recorded(
                    executor, layer, arguments, s.device.type, compiled, graphs
                )
            except Exception as error:  # a layer that cannot be copied
                refuse(executor, s.batch, s.tokens, error)
        return plan_executor(layer.all_heads_executor, s)

    def keep_inputs(layer: nn.Module, args: tuple, named: dict) -> None:
        inputs[layer] = args, named

    hooks = [layer.register_forward_pre_hook(keep_inputs, with_kwargs=True) for layer in layers]
    try:
        with as_it_was(model), torch.no_grad(), own_random_numbers():
            if not measuring_is_off():
                for layer in layers:
                    layer.plan = partial(record, layer)
            model.train(training)
            with torch.compiler.set_stance("force_eager"):
                return seconds(forward)
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            layer.__dict__.pop("plan", None)


def compiled_layers(model: nn.Module) -> set[nn.Module]:
    """Return the routed layers of a model that run in compiled code: they, or a module around them, are compiled."""
    layers: set[nn.Module] = set()
    for module in model.modules():
        in_place = module._compiled_call_impl is not None
        wrapped = "_orig_mod" in module._modules
        if in_place or wrapped:
            layers.update(routed_layers(module))
    return layers


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore a model's modes, executors and buffers, such as the statistics of a batch norm, afterwards."""
    modes = [(m, m.training) for m in model.modules()]
    executors = [(layer, layer.executor) for layer in routed_layers(model)]
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


def rows_of_calls(calls: Calls, time_left: float) -> list[Row]:
    """Return the rows of calls, from the user's cache or else measured now, until the seconds `time_left` are spent.

    Calls that are then still unmeasured have no row.
    """
    if not calls:
        return []
    cached = MeasurementTable.from_cache()
    found: list[Row] = []
    new: list[Row] = []
    for index, ((words_of_call, sizes), call) in enumerate(calls.items()):
        # The cache also has eager calls of these words.
        words_in_cache = words_of_call
        if call.graphs is not None:
            words_in_cache += IN_A_GRAPH
        row = cached.find(words_in_cache, sizes)
        if row is None and time_left > 0:
            B, N, M, K = sizes
            start = time.perf_counter()
            # Each remaining call gets an equal part of the time that is left; compiling does not count.
            taken, ratio, compiling = judge(call, (B, N, M), time_left / (len(calls) - index))
            time_left -= time.perf_counter() - start - compiling
            row = Row(words_in_cache, N, M, B, K, taken, ratio)
            new.append(row)
        if row is not None:
            found.append(row._replace(call=words_of_call))
    if new:
        MeasurementTable(new).save()
        torch.cuda.empty_cache()
    return found
