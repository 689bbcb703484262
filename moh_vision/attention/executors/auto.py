"""`auto`: skip heads where that was measured to pay, and compute all of them where not."""

import logging
from functools import lru_cache
from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from moh_vision.attention.cache import ContextCache
from moh_vision.attention.executors.decode import decoding_pays
from moh_vision.attention.executors.limits import COMMAND, Row, measured, rows, table, use_table
from moh_vision.attention.executors.masked import is_short, product_dtype
from moh_vision.attention.executors.packed import alike, has_static_shapes
from moh_vision.attention.linear import plain
from moh_vision.attention.routing import Call

__all__ = ["announce", "choose", "table", "use_table"]

log = logging.getLogger("moh_vision.attention")

# A block of packed queries is one small attention call; what more threads make of it has not been measured.
CAUSAL_THREADS = 2
NOT_MEASURED = f"nothing has been measured on this GPU; `{COMMAND}` does it"


def choose(layer: nn.Module, call: Call) -> Tuple[str, str]:
    """The executor that `auto` takes for a call of a HeadMixtureAttention, and why.

    It is "packed", "decode" or "masked", and "varlen" where that pays on a GPU and Triton's kernels do not. While
    torch.compile traces, only shapes, the budget and the table decide, never a value; on a GPU neither, for that would wait.
    """
    picked = choose_operators(layer, call)
    if picked[0] == "masked" and call.x.device.type == "cuda" and measured("varlen"):
        return choose_varlen(layer, call) or picked
    return picked


def choose_varlen(layer: nn.Module, call: Call) -> Optional[Tuple[str, str]]:
    """ "varlen" and why, where it takes a call and that was measured to pay; else None."""
    masks = call.attn_mask is not None or call.is_causal or call.dropout_p > 0
    dtype = product_dtype(call.x)
    if call.routing.active is None or masks or call.cache is not None or not is_short(dtype):
        return None
    row = row_of(layer, call, "varlen", "token", dtype)
    share = layer.budget.active / layer.num_heads
    if row is None or share > row[2]:
        return None
    return "varlen", f"{share:.0%} of the heads run, varlen pays up to {row[2]:.0%}"


def row_of(layer: nn.Module, call: Call, path: str, kind: str, dtype: torch.dtype) -> Optional[Row]:
    """The row of the table for a call; None: it has too few keys or queries."""
    (B, N, _), keys = call.x.shape, (call.x if call.context is None else call.context).shape[1]
    return reached(rows(path, kind, is_short(dtype), trains(layer)), keys, B * N * layer.q_dim)


def trains(layer: nn.Module) -> bool:
    # Not is_grad_enabled alone: reentrant checkpointing runs forward without and again with gradients, and both times
    # the same executor must draw the dropout.
    return layer.training or torch.is_grad_enabled()


def choose_operators(layer: nn.Module, call: Call) -> Tuple[str, str]:
    """`choose` among "packed", "decode" and "masked"."""
    x, routing = call.x, call.routing
    active, compiling = routing.active, torch.compiler.is_compiling()
    if active is None:
        return "masked", "every head may run"
    dtype, path = product_dtype(x), layer.path_of(call)
    if x.device.type != "cpu" and path != "triton":
        return "masked", f"heads are skipped on a CPU, and by Triton's kernels: not in this call on {x.device.type}"
    if call.cache is not None and (trains(layer) or compiling or isinstance(call.cache, ContextCache)):
        return "masked", "a cache needs the keys of all heads"
    if call.cache is not None and x.shape[1] == 1:
        if path == "triton":
            return decoding_by_table(layer, call, is_short(dtype))
        if decoding_pays(active, layer.kv_heads, call.cache.length + 1, layer.head_dim):
            return "decode", "one token, and much of the cache need not be read"
        return "masked", "one token, but little of the cache could be left unread"
    if path != "triton" and not all(map(plain, layer.projections)):
        return "masked", "the projections carry hooks or are not plain linear layers"
    scope = "sample" if active.shape[1] == 1 else "token"
    if scope == "sample" and call.cache is not None:
        return "masked", "a cache needs the keys of all heads"
    if compiling and not has_static_shapes(routing, path):
        return "masked", "compiled, and neither C++ operators nor Triton's kernels run the call"
    if path == "triton":
        kind = "sample" if layer.skips_projections(call) else "token"
    else:
        kind = scope if path == "cpp" else padded_kind(layer.kv_heads, call, scope, dtype)
    if kind is None:
        return "masked", "packed would have to write out the mask of every query"
    row = row_of(layer, call, path, kind, dtype)
    if row is None:
        if path == "triton" and not measured(path):
            return "masked", NOT_MEASURED
        return "masked", f"too few keys, or numbers in the queries of all heads, for packing to pay ({kind}, {path})"
    keys, numbers, limit = row
    if scope == "sample" and path != "triton" and not compiling:  # on a GPU the value would have to be waited for
        share = active[0].sum().item() / layer.num_heads
    else:
        share = layer.budget.active / layer.num_heads
    size = f"from {keys:,} keys and {numbers:,} numbers in the queries"
    reason = f"{share:.0%} of the heads run, packed pays up to {limit:.0%} ({kind}, {path}, {size})"
    if share > limit:
        return "masked", reason
    if path == "torch" and kind in ("token", "one key-value head"):
        if padded_share(layer, routing.stats.counts, active.shape[1]) > limit:
            return "masked", reason + ", but they are spread too unevenly over the tokens"
    return "packed", reason


def decoding_by_table(layer: nn.Module, call: Call, short: bool) -> Tuple[str, str]:
    """As `choose`, for one token and a cache on a GPU."""
    if not measured("triton"):
        return "masked", NOT_MEASURED
    if getattr(layer.router, "group", 1) != layer.num_heads // layer.kv_heads:
        return "masked", "one token, and key-value heads are read for any of their query heads"
    keys = call.cache.length + 1
    row = reached(rows("triton", "decode", short, False), keys, len(call.x) * layer.kv_heads * keys * layer.head_dim)
    if row is None or layer.budget.active / layer.num_heads > row[2]:
        return "masked", "one token, but little of the cache could be left unread"
    return "decode", "one token, and much of the cache need not be read"


def padded_kind(kv_heads: int, call: Call, scope: str, dtype: torch.dtype) -> Optional[str]:
    """The kind of a call on PyTorch's path; None where its mask forbids `packed`."""
    if scope == "sample":
        return "sample, alike" if alike(call.routing.active) else "sample"
    if call.attn_mask is None and not call.is_causal:
        return "one key-value head" if kv_heads == 1 else "token"
    blocks = by_blocks(call) and kv_heads > 1 and not is_short(dtype)
    return "token, causal" if blocks and torch.get_num_threads() <= CAUSAL_THREADS else None


def reached(rows: Sequence[Row], keys: int, numbers: int) -> Optional[Row]:
    """The last row that a call with so many keys, and numbers in its queries, reaches; None: none."""
    return next((row for row in reversed(rows) if row[0] <= keys and row[1] <= numbers), None)


def by_blocks(call: Call) -> bool:
    """Whether `attend_causal` takes the packed queries: it has no gradient, no dropout and no other mask."""
    free = call.attn_mask is None and call.context is None and call.dropout_p == 0
    return call.is_causal and free and not torch.is_grad_enabled() and call.x.device.type == "cpu"


def padded_share(layer: nn.Module, counts: Tensor, tokens: int) -> float:
    """The share of all queries that packing computes, counts [B, H]: it pads every key-value head to the fullest one."""
    S, G = layer.budget.shared, layer.kv_heads
    size = layer.num_heads // G
    routed = counts.clone()
    routed[:, :S] = 0
    longest = routed.view(-1, G, size).sum(-1).max().item()
    groups = G - S // size
    return (S * tokens + longest * groups) / (layer.num_heads * tokens)


@torch.compiler.assume_constant_result  # under torch.compile: when it traces
def announce(picked: str, reason: str) -> None:
    """Log a decision the first time it is made, at level INFO under "moh_vision.attention"."""
    if log.isEnabledFor(logging.INFO):
        say(picked, reason)


@lru_cache(maxsize=256)
def say(picked: str, reason: str) -> None:
    log.info("auto picked %s: %s", picked, reason)
