"""The rule of `auto` for calls that were not measured: with how many active heads the C++ operators beat all heads.

It follows from measurements with torch 2.14 on two cores of each processor below. `moh_vision.measure` measures the user's
own machine.

    float32, AMD Zen 5      With AVX-512 and with AVX2: faster up to 11 of 12 heads, forward and in training. torch calls
                            MKL, which on AMD reaches about half of the speed of the operators with AVX-512. Older AMDs
                            were not measured, and take the rule of Intel.
    float32, Intel          With AVX-512: 10 of 12 heads take as long as all heads. With heads of width 72, which is no
                            multiple of the vector length, 12 of 16 heads are slower than all heads.
    16 bits                 On processors with AVX512-BF16, `InPlace` is faster up to 11 of 12 heads. It differs from
                            `Masked` in attention alone, where the operator beats torch even with that many heads.
                            `Sequences`, which gathers weights for every sequence, is faster with 14 of 16 heads for 256
                            tokens, but slower with 7 of 8 heads for 128 tokens.
"""

import re
from functools import lru_cache
from pathlib import Path

import torch

SMALLEST_QUERIES = 25_000  # elements in the queries of all heads (B * N * H * D); calls with fewer compute all heads
MOST = 0.9  # largest share of active heads with which skipping is faster
MOST_OF_UNEVEN_WIDTHS = 0.7  # the same where the head width is no multiple of VECTOR
VECTOR = 16  # float32 elements in an AVX-512 vector
MOST_OF_SHORT = 0.75  # the same for `Sequences` with fewer than SHORT tokens, for which gathering weights costs more
SHORT = 197


@torch.compiler.assume_constant_result  # the processor does not change, and torch.compile need not trace its detection
def share_in_float32(head_dim: int) -> float:
    """Return the largest share of active heads with which the float32 operators are known to be faster than all heads."""
    return share_on(is_zen5(), torch.backends.cpu.get_cpu_capability(), head_dim)


def share_on(zen5: bool, capability: str, head_dim: int) -> float:
    """Return `share_in_float32` of a processor: an AMD Zen 5 or not, whose instruction set torch calls `capability`."""
    if zen5:
        return 1.0
    if capability == "AVX512" and head_dim % VECTOR:
        return MOST_OF_UNEVEN_WIDTHS
    return MOST


@torch.compiler.assume_constant_result  # with dynamic sizes torch.compile takes MOST itself for a variable
def share_of_sliced() -> float:
    """Return the largest share of active groups with which one choice for all sequences is known to be faster."""
    return MOST


def share_of_gathered(tokens: int) -> float:
    """Return the largest share of active heads with which `Sequences`, on sequences of `tokens`, is known to be faster."""
    if tokens < SHORT:
        return MOST_OF_SHORT
    return MOST


@lru_cache
def is_zen5() -> bool:
    """Return whether the processor is an AMD of family 26."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return False
    text = info.read_text()
    return (
        "AuthenticAMD" in text and re.search(r"^cpu family\s*: 26$", text, re.MULTILINE) is not None
    )


def rule(share: float) -> str:
    """Return the rule in words. They name no sizes of the call, because torch.compile cannot format dynamic sizes.

    share: a literal, or a constant of torch.compile as the functions above return.
    """
    return f"not measured; skipping pays for up to {share:.0%} of the heads, from {SMALLEST_QUERIES:,} numbers on"
