"""`auto`: skip heads where that was measured to pay, and compute all of them where not."""

import logging
from functools import lru_cache
from typing import Tuple

import torch
from torch import Tensor, nn

from moh_vision.attention.cache import ContextCache
from moh_vision.attention.executors.decode import decode, decoding_pays
from moh_vision.attention.executors.masked import autocast, is_short, masked
from moh_vision.attention.executors.packed import packed
from moh_vision.attention.linear import plain
from moh_vision.attention.routing import Call

log = logging.getLogger("moh_vision.attention")

# The largest share of heads at which `packed` takes less time than `masked`, by the number of keys from which it holds.
# Measured by benchmarks/attention.py with torch 2.15 on 2 Xeon cores (AVX-512, AMX; 1 and 2 threads) and, in float32, on
# 2 EPYC cores (AVX2). `packed` is taken where it is 10 % faster on one and no more than noise slower on the other.
CROSSOVER = {
    # kind, 16 bits?, training or gradients? -> {at least so many keys: largest share}
    ("token", False, False): {1: 0.40, 192: 0.62, 512: 0.60, 2048: 0.80},
    ("token", False, True): {1: 0.60, 512: 0.60, 2048: 0.80},
    ("token", True, False): {1: 0.35, 512: 0.55, 2048: 0.80},
    ("token", True, True): {1: 0.35, 512: 0.60, 2048: 0.85},
    # A prompt of a language model, on up to CAUSAL_THREADS: whole models of 16 heads of 128 and 2048 tokens, speed over dense
    # by benchmarks/llm_speed.py. At half of the heads `packed` 1.07 to 1.23 and `masked` 0.95 to 1.00, at three quarters
    # 0.94 to 1.04 and 0.98 to 1.06.
    ("token, causal", False, False): {1: 0.0, 2048: 0.50},
    # All experts read one key-value head (MoA): nothing is padded, and heads are wide.
    ("one key-value head", False, False): {1: 0.60},
    ("one key-value head", False, True): {1: 0.60},
    ("one key-value head", True, False): {1: 0.60},
    ("one key-value head", True, True): {1: 0.60},
    ("sample", False, False): {1: 0.60, 192: 0.76, 512: 0.93},
    ("sample", False, True): {1: 0.60, 192: 0.84, 512: 0.95},
    ("sample", True, False): {1: 0.35, 512: 0.80},
    ("sample", True, True): {1: 0.55, 512: 0.93},
    # All samples chose the same heads: one dense slice of the weights. Measured on the EPYC, in 16 bits nowhere.
    ("sample, alike", False, False): {1: 0.60, 192: 0.93},
    ("sample, alike", False, True): {1: 0.60, 192: 0.93},
    ("sample, alike", True, False): {1: 0.35, 512: 0.80},
    ("sample, alike", True, True): {1: 0.55, 512: 0.93},
}
# Below so many numbers in the queries of all heads the fixed cost of packing, 1 to 2 ms, is more than what it saves.
SMALLEST = 600_000
SMALLEST_FORWARD = 700_000  # per token and without gradients, where packing saves least
# A block of packed queries is one small attention call; what more threads make of it has not been measured.
CAUSAL_THREADS = 2


def choose(call: Call) -> Tuple[str, str]:
    """The executor that `auto` takes for a call, "packed", "decode" or "masked", and why."""
    layer, x, routing = call.layer, call.x, call.routing
    active = routing.active
    if active is None:
        return "masked", "every head may run"
    if torch.compiler.is_compiling():
        return "masked", "compiled"
    if x.device.type != "cpu":
        return "masked", f"packed has not been measured on {x.device.type}"
    # Not is_grad_enabled alone: reentrant checkpointing runs forward without and again with gradients, and both times
    # the same executor must draw the dropout.
    train = layer.training or torch.is_grad_enabled()
    if call.cache is not None and (train or isinstance(call.cache, ContextCache)):
        return "masked", "a cache needs the keys of all heads"
    if call.cache is not None and x.shape[1] == 1:
        if decoding_pays(active, layer.kv_heads, call.cache.length + 1, layer.head_dim):
            return "decode", "one token, and much of the cache need not be read"
        return "masked", "one token, but little of the cache could be left unread"
    if not all(map(plain, layer.projections)):
        return "masked", "the projections carry hooks or are not plain linear layers"
    scope = "sample" if active.shape[1] == 1 else "token"
    smallest = SMALLEST_FORWARD if scope == "token" and not train else SMALLEST
    if x.shape[0] * x.shape[1] * layer.q_dim < smallest:
        return "masked", f"fewer than {smallest:,} numbers in the queries of all heads: packing would cost more"
    if scope == "sample" and call.cache is not None:
        return "masked", "a cache needs the keys of all heads"
    short = is_short(autocast(x[:1]).dtype)
    blocks = by_blocks(call) and layer.kv_heads > 1 and not short and torch.get_num_threads() <= CAUSAL_THREADS
    if scope == "token" and not blocks and (call.attn_mask is not None or call.is_causal):
        return "masked", "packed would have to write out the mask of every query"
    keys = (x if call.context is None else call.context).shape[1]
    kind = scope
    if scope == "token" and blocks:
        kind = "token, causal"
    elif scope == "token" and layer.kv_heads == 1:
        kind = "one key-value head"
    elif scope == "sample" and alike(active):
        kind = "sample, alike"
    limits = CROSSOVER[kind, short, train]
    limit = limits[max(least for least in limits if least <= keys)]
    if scope == "sample":
        share = active[0].sum().item() / layer.num_heads
    else:
        share = layer.budget.active / layer.num_heads
    reason = f"{share:.0%} of the heads run, packed pays up to {limit:.0%} ({kind}, {keys} keys)"
    if share > limit:
        return "masked", reason
    if scope == "token" and not blocks and padded_share(layer, routing.stats.counts, active.shape[1]) > limit:
        return "masked", reason + ", but they are spread too unevenly over the tokens"
    return "packed", reason


def alike(active: Tensor) -> bool:
    """Whether several sequences all chose the same heads, active [B, 1, H]."""
    return active.shape[0] > 1 and bool((active == active[:1]).all())


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


AMONG = {"packed": packed, "decode": decode, "masked": masked}


@lru_cache(maxsize=256)
def say(picked: str, reason: str) -> None:
    """Log a decision the first time it is made."""
    log.info("auto picked %s: %s", picked, reason)


def auto(call: Call) -> Tensor:
    """`packed`, `decode` or `masked`, whichever `choose` says.

    What was picked and why is logged once at level INFO under "moh_vision.attention".
    """
    picked, reason = choose(call)
    if not torch.compiler.is_compiling() and log.isEnabledFor(logging.INFO):
        say(picked, reason)
    return AMONG[picked](call)
