"""Sizes of blocks, by kernel, numbers, card and call: one table, which the tests compile row by row."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

# Cards, each of which can do what those before it can.
SMALL = 0  # about 99 KB of shared memory for a program: RTX 4090, L4
LARGE = 1  # 163 KB: A100
HOPPER = 2  # 227 KB, and copies of tiles by tensor descriptors (TMA): H100, H200, B200


class Block(NamedTuple):
    """How a kernel divides its work."""

    queries: int
    keys: int
    warps: int
    stages: int
    tma: bool = False  # tiles are read through tensor descriptors


class Row(NamedTuple):
    """Blocks of the three kernels of attention, for calls that fit."""

    numbers: str  # "16 bits", "tf32" or "float32"
    card: int  # this or a larger one
    widest: int  # largest D
    masked: bool | None  # whether there is a mask, which takes registers; None: either
    longest: int | None  # largest N; None: any
    forward: Block
    queries: Block
    keys: Block


# The first row that fits decides. Those for HOPPER are the fastest of 4 to 14 candidates each on an H100
# (docs/results/speed.md); the others have not been timed. Few tokens: small blocks, because the last tile of a segment is
# half empty on average. The kernel of keys is limited by registers: few queries with many keys do best.
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


# On the host Triton's own functions of these names take microseconds, and a training step of a layer calls dozens.


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x, or a copy of x where the numbers of a row do not lie side by side."""
    if x.stride(-1) == 1:
        return x
    return x.contiguous()


@functools.cache
def row_of(numbers: str, card: int, D: int, masked: bool, tokens: int) -> Row:
    """Return the row of a call.

    Args:
        numbers: see `numbers_of`.
        card: see `card_of`.
        D: head width.
        masked: whether there is a mask.
        tokens: N.
    """
    for row in TABLE:
        fits = numbers == row.numbers and card >= row.card and row.widest >= D
        if not fits or row.masked not in (None, masked):
            continue
        if row.longest is None or row.longest >= tokens:
            return row
    raise ValueError(f"no row for {numbers}, head width {D}")


def numbers_of(dtype: torch.dtype) -> str:
    """Return how numbers are multiplied: "16 bits", or float32 by tensor cores in "tf32" or exactly in "float32"."""
    if dtype != torch.float32:
        return "16 bits"
    return "tf32" if uses_tf32() else "float32"


def uses_tf32() -> bool:
    """Return whether PyTorch multiplies float32 in tf32 on a GPU.

    Not torch.get_float32_matmul_precision, which raises where this was set the newer way, by `fp32_precision`.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


@functools.cache
def card_of(device: torch.device) -> int:
    """Return SMALL, LARGE or HOPPER; the interpreter has no limits."""
    if device.type != "cuda":
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
