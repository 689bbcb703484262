"""Where skipping heads in C++ is known to take less time than all heads: the rule of `auto` for calls that were not measured.

Measured with torch 2.14 on two cores each, and only there; `moh_vision.measure` knows more.

    float32, AMD Zen 5      with AVX-512 and with AVX2: up to 11 of 12 heads, forward and in training. torch multiplies by MKL,
                            which on AMD reaches about half of the operators' rate where they have AVX-512.
    float32, Intel          with AVX-512: 10 of 12 heads take as long as all. Heads of 72, which fill no whole number of
                            vectors, lose at 12 of 16.
    16 bits                 on processors with AVX512-BF16, in place: up to 11 of 12 heads. Only attention differs from all
                            heads, and that of the operators is faster than torch's even there. With weights that are
                            gathered for every sequence: 14 of 16 heads pay with 256 tokens, 7 of 8 with 128 lose.
"""

from functools import lru_cache

import torch

from moh_vision.attention.executors.measurement_table import processor

SMALLEST_QUERIES = 25_000  # numbers in the queries of all heads: smaller calls compute all
MOST = 0.9  # share of the heads that run
MOST_OF_UNEVEN_WIDTHS = 0.7
VECTOR = 16  # numbers of float32 with AVX-512
MOST_OF_SHORT = 0.75
SHORT = (
    197  # tokens of a sequence for which weights are gathered: with fewer, gathering weighs more
)


@torch.compiler.assume_constant_result  # under torch.compile the processor stays the same
def share_in_float32(head_dim: int) -> float:
    """Return up to which share of the heads the operators that leave out products are known to pay."""
    if _is_amd():
        return 1.0
    if torch.backends.cpu.get_cpu_capability() == "AVX512" and head_dim % VECTOR:
        return MOST_OF_UNEVEN_WIDTHS
    return MOST


def share_of_gathered(tokens: int) -> float:
    """Return up to which share of the heads weights that are gathered for sequences of so many tokens are known to pay."""
    if tokens < SHORT:
        return MOST_OF_SHORT
    return MOST


@lru_cache
def _is_amd() -> bool:
    return "AMD" in processor()


def rule(share: float) -> str:
    """Return the rule in words; they say nothing of the call, since torch.compile cannot format sizes that are dynamic."""
    return f"not measured; skipping pays for up to {share:.0%} of the heads, from {SMALLEST_QUERIES:,} numbers on"
