"""`choose` the executor of a call. "auto" skips heads where that is known to pay, and computes all of them elsewhere."""

import logging
from functools import lru_cache

import torch
from torch import nn

from moh_vision.attention import kernels
from moh_vision.attention.cache import ContextCache
from moh_vision.attention.executors.masked import Masked, Reference, Unfused
from moh_vision.attention.executors.measured import rows_of
from moh_vision.attention.executors.packed import OnGpu, Tokens, WholeSequences
from moh_vision.attention.executors.sequences import Sequences, why_not_looked_up
from moh_vision.attention.linear import is_traced, plain, product_dtype
from moh_vision.attention.routing import Call

log = logging.getLogger("moh_vision.attention")

# The rule of "auto" where a call was not measured: the operators in C++ skip heads where at most this share of them runs,
# in calls with at least so many numbers in the queries of all heads.
LARGEST_SHARE = 0.9
SMALLEST_QUERIES = 25_000
# It says nothing of the call: torch.compile cannot format sizes that are dynamic.
RULE = f"not measured; skipping pays for up to {LARGEST_SHARE:.0%} of the heads, from {SMALLEST_QUERIES:,} numbers on"


def choose(layer: nn.Module, call: Call) -> Masked:
    """The executor of a call of a HeadMixtureAttention, by the name that the layer has for it.

    Args:
        layer: its `executor` is a name in EXECUTORS, or a class that is made with (layer, call).
    """
    if not isinstance(layer.executor, str):
        return layer.executor(layer, call)
    if not layer.fused_attn:
        return Unfused(layer, call)
    if layer.executor == "reference":
        return Reference(layer, call)
    if layer.executor == "masked" or is_traced(call.x):
        return Masked(layer, call)
    way, reason = layer.way_to_skip(call)
    if layer.executor == "auto":
        way, reason = (way, reason) if way is Masked else pays(layer, call, way)
        announce(way.__name__, reason)
    return way(layer, call)


def way_to_skip(
    layer: nn.Module, call: Call, compiling: bool | None = None
) -> tuple[type[Masked], str]:
    """The first of `layer.ways` that can skip heads of a call, else the executor of all heads and why the last cannot."""
    reason = ""
    for way, reason in layer.ways(call, compiling):
        if not reason:
            return way, ""
    return layer.all_heads, reason


def ways(
    layer: nn.Module, call: Call, compiling: bool | None = None
) -> list[tuple[type[Masked], str]]:
    """Return every way to skip heads, in the order of trial, with the reason why a call cannot take it; "": it can.

    compiling: as under torch.compile; None: as it is.
    """
    routing, cache = call.routing, call.cache
    compiling = torch.compiler.is_compiling() if compiling is None else compiling
    never = ""
    if routing.active is None:
        never = "every head may run"
    elif call.x.numel() == 0 or (call.context is not None and call.context.numel() == 0):
        never = "there are no tokens"
    elif cache is not None and (
        call.x.shape[1] == 1 or trains(layer) or isinstance(cache, ContextCache)
    ):
        never = "the keys of all heads are cached"
    if never:
        return [(WholeSequences, never), (Sequences, never), (OnGpu, never), (Tokens, never)]
    hooked = (
        ""
        if all(map(plain, layer.projections))
        else "the projections carry hooks or are not plain linear layers"
    )
    path, none = path_of(layer, call), ""
    if path == "torch":
        why = "dropout" if call.dropout_p else kernels.about(call.x.device.type)
        none = f"no compiled operator runs the call ({why})"
    once, whole = hooked, none
    if routing.active.shape[1] != 1:
        once = "needs heads that are chosen per sequence"
    elif cache is not None or layer.grouped:
        once = "keys are cached, or shared by groups of heads"
    one_for_all = routing.active.shape[0] < call.x.shape[0]
    if path == "triton" and not one_for_all:
        once = once or why_not_looked_up(layer, call)
    if not none and (path != "cpp" or not kernels.native(call.x.device, product_dtype(call.x))):
        whole = "no C++ operator projects such numbers"
    elif not none and (call.q is not None or compiling):
        whole = "compiled, or the router has projected the queries"
    if one_for_all:
        whole = (
            "one choice serves all sequences, which plain products by a smaller weight do faster"
        )
    varies = (
        "compiled, and the number of heads varies" if compiling and routing.count is None else ""
    )
    listed = (
        "compiled, and the list of pairs has no fixed length"
        if compiling and routing.pairs is None
        else ""
    )
    on_gpu = "" if path == "triton" else "no Triton kernel runs the call"
    return [
        (WholeSequences, once or whole),
        (Sequences, once or varies),
        (OnGpu, on_gpu),
        (Tokens, none or hooked or listed),
    ]


def pays(layer: nn.Module, call: Call, way: type[Masked]) -> tuple[type[Masked], str]:
    """`way` where skipping heads by it takes less time than all heads, else the executor of all heads; and why."""
    B, N, M, K = sizes_of(layer, call)
    if call.cache is None:
        for tokens, keys, batch, active, picked, _ in rows_of(key_of(layer, call, way)):
            if N == tokens and M == keys and B <= batch and K <= active:
                return (
                    way if picked == way.__name__ else layer.all_heads,
                    "measured on this machine",
                )
    in_cpp = issubclass(way, (Tokens, WholeSequences))
    if way is Sequences and not torch.compiler.is_compiling():
        in_cpp = path_of(layer, call) == "cpp"
    if not in_cpp:
        return layer.all_heads, "not measured on this machine, see moh_vision.measure"
    if B * N * layer.q_dim < SMALLEST_QUERIES or K / layer.num_heads > LARGEST_SHARE:
        way = layer.all_heads
    return way, RULE


def path_of(layer: nn.Module, call: Call) -> str:
    """Return the path that runs the attention of a call: "cpp", "triton" or "torch"."""
    return kernels.attend_path(
        call.x.device, product_dtype(call.x), layer.head_dim, call.attn_mask, call.dropout_p
    )


def sizes_of(layer: nn.Module, call: Call) -> tuple[int, int, int, int]:
    """B, N, M and K of a call without a cache."""
    (B, N, _), count = call.x.shape, call.routing.count
    M = N if call.context is None else call.context.shape[1]
    return B, N, M, layer.budget.active if count is None else count


def key_of(
    layer: nn.Module, call: Call, way: type[Masked], compiled: bool | None = None
) -> tuple[str, ...]:
    """All that decides the time of a call beside its sizes; compiled: under torch.compile, None: as it is."""
    mask, flags = call.attn_mask, []
    compiled = torch.compiler.is_compiling() if compiled is None else compiled
    flags += (
        ["compiled"] * compiled
        + ["causal"] * call.is_causal
        + ["rotary"] * (call.rotary is not None)
    )
    flags += ["queries"] * (call.q is not None) + ["context"] * (call.context is not None)
    flags += ["dropout"] * (call.dropout_p > 0) + [layer.variant] * bool(layer.variant)
    if call.routing.active is not None and call.routing.active.shape[0] < call.x.shape[0]:
        flags.append("one choice")
    if mask is not None:
        flags += [str(mask.dtype), *[axis for axis, size in zip("BHN", mask.shape) if size > 1]]
        flags += ["learned"] * mask.requires_grad
    dtypes = f"{call.x.dtype} in {product_dtype(call.x)}"
    heads = (
        f"{layer.num_heads} heads of {layer.head_dim}, {layer.kv_heads} of keys, {layer.dim} wide,"
    )
    kind = f"{call.x.device.type} {type(layer).__name__} {type(layer.router).__name__} per {layer.scope}"
    return way.__name__, "training" if trains(layer) else "inference", heads, dtypes, kind, *flags


def trains(layer: nn.Module) -> bool:
    # Not is_grad_enabled alone: reentrant checkpointing runs forward without and again with gradients, and both times
    # the same executor must draw the dropout.
    return layer.training or torch.is_grad_enabled()


@torch.compiler.assume_constant_result  # under torch.compile: when it traces
def announce(picked: str, reason: str) -> None:
    """Log a decision the first time it is made, at level INFO under "moh_vision.attention"."""
    if log.isEnabledFor(logging.INFO):
        say(picked, reason)


@lru_cache(maxsize=256)
def say(picked: str, reason: str) -> None:
    log.info("auto picked %s: %s", picked, reason)
