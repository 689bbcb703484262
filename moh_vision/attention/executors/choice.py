"""`select_executor` picks the executor of a call. "auto" skips heads only where that is known to be faster."""

import logging
from functools import lru_cache

import torch
from torch import nn

from moh_vision.attention.executors.executor import Executor
from moh_vision.attention.executors.known import SMALLEST_QUERIES, rule
from moh_vision.attention.executors.measurement_table import look_up
from moh_vision.attention.executors.reasons import one_choice_for_all, trains
from moh_vision.attention.linear import is_traced, product_dtype
from moh_vision.attention.routing import Call

log = logging.getLogger("moh_vision.attention")


def select_executor(layer: nn.Module, call: Call) -> type[Executor]:
    """Return the class of the executor that runs a call of a layer.

    `layer.executor` is a name in EXECUTORS, or the class itself.
    """
    wanted = layer.executor
    if not isinstance(wanted, str):
        return wanted
    if not layer.fused_attn:
        return layer.unfused_executor
    if wanted == "reference":
        return layer.reference_executor
    if wanted == "masked" or is_traced(call.x):
        return layer.all_heads_executor
    compiling = torch.compiler.is_compiling()
    executor, reason = first_that_skips(layer, call, compiling)
    if wanted == "auto":
        if executor is not layer.all_heads_executor:
            executor, reason = faster(layer, call, executor, compiling)
        announce(executor.__name__, reason)
    return executor


def first_that_skips(
    layer: nn.Module, call: Call, compiling: bool = False
) -> tuple[type[Executor], str]:
    """Return the first of the layer's executors that can skip heads of a call, and "" as the reason.

    If none can, return the executor of all heads, and the reason why the last one tried cannot.

    Args:
        layer: has `skipping_executors`.
        call: the call, after routing.
        compiling: answer for a compiled call.
    """
    reason = ""
    for executor in layer.skipping_executors:
        reason = executor.why_not(layer, call, compiling)
        if not reason:
            return executor, ""
    return layer.all_heads_executor, reason


def faster(
    layer: nn.Module, call: Call, executor: type[Executor], compiling: bool
) -> tuple[type[Executor], str]:
    """Return the faster of `executor`, which skips heads, and the layer's executor of all heads; and the reason.

    The measurement table decides, if it has a row for the call; else the rule of `known`.
    """
    B, N, M, K = sizes_of(layer, call)
    if call.cache is None:
        for tokens, keys, batch, active, picked, _ in look_up(key_of(layer, call, executor)):
            if N == tokens and M == keys and B <= batch and K <= active:
                if picked != executor.__name__:
                    executor = layer.all_heads_executor
                return executor, "measured on this machine"
    share = executor.pays_up_to(layer, call, compiling)
    if share == 0:
        return layer.all_heads_executor, "not measured on this machine, see moh_vision.measure"
    if B * N * layer.q_dim < SMALLEST_QUERIES or K / layer.num_heads > share:
        executor = layer.all_heads_executor
    return executor, rule(share)


def sizes_of(layer: nn.Module, call: Call) -> tuple[int, int, int, int]:
    """Return B, N, M and K of a call without a cache; if K varies by token, the largest K."""
    B, N, _ = call.x.shape
    M = N
    if call.context is not None:
        M = call.context.shape[1]
    K = call.routing.count
    if K is None:
        K = layer.budget.active
    return B, N, M, K


def key_of(
    layer: nn.Module, call: Call, executor: type[Executor], compiling: bool | None = None
) -> tuple[str, ...]:
    """Return all that decides the time of a call, except its sizes, in words: the key of the measurement table.

    Args:
        layer: the layer that is called.
        call: the call, after routing.
        executor: skips heads of the call.
        compiling: whether the key is of a compiled call; None: whether torch.compile is at work now.
    """
    if compiling is None:
        compiling = torch.compiler.is_compiling()
    device = call.x.device.type
    dtypes = f"{call.x.dtype} in {product_dtype(call.x)}"
    heads = (
        f"{layer.num_heads} heads of {layer.head_dim}, {layer.kv_heads} of keys, {layer.dim} wide,"
    )
    modules = f"{device} {type(layer).__name__} {type(layer.router).__name__} per {layer.scope}"
    mode = "training" if trains(layer) else "inference"
    return executor.__name__, mode, heads, dtypes, modules, *flags_of(layer, call, compiling)


def flags_of(layer: nn.Module, call: Call, compiling: bool) -> list[str]:
    """Return a word for each optional feature that a call uses, for `key_of`."""
    flags = []
    if compiling:
        flags.append("compiled")
    if call.is_causal:
        flags.append("causal")
    if call.rotary is not None:
        flags.append("rotary")
    if call.q is not None:
        flags.append("queries")
    if call.context is not None:
        flags.append("context")
    if call.dropout_p > 0:
        flags.append("dropout")
    if layer.variant:
        flags.append(layer.variant)
    if call.routing.active is not None and one_choice_for_all(call):
        flags.append("one choice")
    mask = call.attn_mask
    if mask is not None:
        flags.append(str(mask.dtype))
        for axis, size in zip("BHN", mask.shape):
            if size > 1:
                flags.append(axis)
        if mask.requires_grad:
            flags.append("learned")
    return flags


@torch.compiler.assume_constant_result  # torch.compile calls this while it traces, not when the compiled code runs
def announce(picked: str, reason: str) -> None:
    """Log a decision the first time that it is made, at level INFO under "moh_vision.attention"."""
    if log.isEnabledFor(logging.INFO):
        say(picked, reason)


@lru_cache(maxsize=256)
def say(picked: str, reason: str) -> None:
    log.info("auto picked %s: %s", picked, reason)
