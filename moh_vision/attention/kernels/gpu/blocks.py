"""Block sizes of the attention kernels, by precision, card and call: one table, whose rows the tests compile one by one.

The file also has small functions that all kernels' launches use.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

# Classes of cards. A block that runs on one class also runs on the classes after it.
SMALL = 0  # about 99 KB of shared memory per program: RTX 4090, L4
LARGE = 1  # 163 KB: A100
HOPPER = 2  # 227 KB, and tiles can be copied through tensor descriptors (TMA): H100, H200, B200


class Block(NamedTuple):
    """Block sizes and launch options of a kernel."""

    queries: int
    keys: int
    warps: int
    stages: int
    tma: bool = False  # keys and values are read through tensor descriptors


class Row(NamedTuple):
    """Conditions on a call, and the blocks of the three kernels for calls that meet them."""

    precision: str  # "16 bits", "tf32" or "float32", see `precision_of`
    card: int  # the smallest class of cards
    widest: int  # largest D
    masked: bool | None  # whether there is a mask, which takes registers; None: with or without
    longest: int | None  # largest N; None: any
    forward: Block
    queries: Block
    keys: Block


# The first row that a call meets is used. Each row for HOPPER is the fastest of 4 to 14 candidates on an H100
# (docs/results/speed.md); the other rows have not been timed. Calls with few tokens get small blocks, because the last tile
# of a segment is half empty on average. The keys kernel is limited by registers: it is fastest with few queries and many
# keys.
TABLE = (
    Row("16 bits", HOPPER,  64, False,  512, Block(64, 32, 4, 3, True),  Block(64, 64, 4, 3, True), Block(32, 128, 4, 3)),
    Row("16 bits", HOPPER,  64, False, None, Block(64, 64, 4, 3, True),  Block(64, 64, 4, 3, True), Block(32, 128, 4, 3)),
    Row("16 bits", HOPPER,  80, False, None, Block(64, 64, 4, 3),        Block(64, 32, 4, 3),       Block(32, 64, 4, 2)),
    Row("16 bits", HOPPER, 128, False, None, Block(64, 64, 4, 3, True),  Block(64, 64, 4, 3, True), Block(32, 64, 4, 3)),
    Row("16 bits", LARGE,   48, True,  None, Block(64, 32, 4, 2),        Block(64, 32, 8, 2),       Block(16, 64, 4, 3)),
    Row("16 bits", LARGE,   64, True,  None, Block(64, 64, 4, 2),        Block(64, 32, 8, 2),       Block(16, 64, 4, 3)),
    Row("16 bits", LARGE,   80, True,  None, Block(64, 32, 8, 2),        Block(64, 32, 8, 2),       Block(16, 64, 4, 3)),
    Row("16 bits", LARGE,  128, True,  None, Block(64, 32, 8, 2),        Block(64, 32, 8, 2),       Block(16, 64, 8, 3)),
    Row("16 bits", LARGE,  256, True,  None, Block(64, 32, 8, 2),        Block(32, 32, 8, 2),       Block(32, 32, 8, 3)),
    Row("16 bits", LARGE,   80, False,  512, Block(64, 64, 4, 3),        Block(64, 64, 4, 2),       Block(64, 64, 4, 3)),
    Row("16 bits", LARGE,  128, False,  512, Block(64, 64, 4, 3),        Block(64, 64, 8, 2),       Block(64, 64, 8, 3)),
    Row("16 bits", LARGE,   64, False, None, Block(128, 128, 8, 3),      Block(128, 64, 8, 2),      Block(64, 64, 4, 3)),
    Row("16 bits", LARGE,   80, False, None, Block(128, 64, 8, 3),       Block(64, 64, 8, 2),       Block(64, 64, 4, 3)),
    Row("16 bits", LARGE,  128, False, None, Block(128, 64, 8, 3),       Block(64, 64, 8, 2),       Block(64, 64, 8, 3)),
    Row("16 bits", LARGE,  256, False, None, Block(64, 64, 8, 2),        Block(32, 32, 8, 2),       Block(32, 32, 8, 3)),
    Row("16 bits", SMALL,   80, False, None, Block(64, 32, 4, 2),        Block(64, 32, 4, 2),       Block(32, 32, 4, 3)),
    Row("16 bits", SMALL,   80, True,  None, Block(64, 32, 8, 2),        Block(64, 32, 8, 2),       Block(16, 32, 4, 3)),
    Row("16 bits", SMALL,  128, False, None, Block(64, 32, 4, 2),        Block(64, 32, 8, 2),       Block(32, 32, 8, 3)),
    Row("16 bits", SMALL,  128, True,  None, Block(64, 32, 4, 2),        Block(64, 32, 8, 2),       Block(16, 32, 8, 3)),
    Row("16 bits", SMALL,  256, False, None, Block(32, 32, 4, 2),        Block(32, 32, 8, 2),       Block(32, 32, 8, 2)),
    Row("16 bits", SMALL,  256, True,  None, Block(32, 32, 4, 2),        Block(32, 32, 8, 2),       Block(16, 32, 8, 2)),
    Row("tf32",    SMALL,   80, False, None, Block(64, 32, 4, 2),        Block(64, 32, 4, 2),       Block(16, 32, 4, 3)),
    Row("tf32",    SMALL,   80, True,  None, Block(64, 32, 8, 2),        Block(32, 32, 4, 2),       Block(16, 32, 4, 3)),
    Row("tf32",    SMALL,  128, None,  None, Block(32, 32, 8, 1),        Block(32, 32, 8, 1),       Block(16, 32, 8, 3)),
    Row("tf32",    SMALL,  256, None,  None, Block(32, 32, 8, 1),        Block(16, 32, 8, 1),       Block(16, 16, 8, 1)),
    Row("float32", SMALL,   80, None,  None, Block(32, 32, 4, 2),        Block(32, 32, 4, 2),       Block(16, 32, 4, 1)),
    Row("float32", SMALL,  256, None,  None, Block(16, 32, 8, 1),        Block(16, 16, 8, 1),       Block(16, 16, 8, 1)),
)  # fmt: skip


# `cdiv` and `next_power_of_2` replace triton.cdiv and triton.next_power_of_2, which take microseconds on the host: a
# training step calls them dozens of times for each layer.


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy if its last dimension is not contiguous."""
    if x.stride(-1) == 1:
        return x
    return x.contiguous()


@functools.cache
def row_of(precision: str, card: int, D: int, masked: bool, tokens: int) -> Row:
    """Return the row of TABLE for a call.

    Args:
        precision: see `precision_of`.
        card: see `card_of`.
        D: head width.
        masked: whether there is a mask.
        tokens: N.
    """
    for row in TABLE:
        fits = row.precision == precision and row.card <= card and D <= row.widest
        of_mask = row.masked is None or row.masked == masked
        of_length = row.longest is None or tokens <= row.longest
        if fits and of_mask and of_length:
            return row
    raise ValueError(f"no row for {precision}, head width {D}")


def precision_of(dtype: torch.dtype, tf32: bool) -> str:
    """Return the precision of matrix products of a dtype.

    It is "16 bits" for bfloat16 and float16. For float32 it is "tf32" where tensor cores round the factors to tf32, else
    "float32".

    Args:
        dtype: of the factors.
        tf32: see `uses_tf32`.
    """
    if dtype != torch.float32:
        return "16 bits"
    return "tf32" if tf32 else "float32"


@functools.cache
def card_of(device: torch.device) -> int:
    """Return the class of a card: SMALL, LARGE or HOPPER."""
    if device.type != "cuda":  # Triton's interpreter, which has no limits
        return HOPPER
    properties = torch.cuda.get_device_properties(device)
    # Bytes of shared memory that a program may use.
    memory = getattr(
        properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
    )
    if memory > 200 * 1024 and properties.major >= 9:
        return HOPPER
    if memory >= 160 * 1024:
        return LARGE
    return SMALL
