"""List the pairs in Triton: two kernels and a cumulative sum, without a synchronisation of host and device.

The first kernel counts the pairs of each head in each block of tokens. The cumulative sum of the counts is the index where
the pairs of each block end in the list. The second kernel writes them there. The executor that reads the list makes it, not
the router, because an executor that computes all heads needs no list.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moh_vision.attention.kernels.gpu.blocks import cdiv, contiguous_rows
from moh_vision.attention.kernels.gpu.launch import launch
from moh_vision.attention.kernels.gpu.route import tile

TOKENS = 128  # most tokens of a block
LARGEST_TILE = 8192  # most elements of a tile [tokens, heads] that fit into shared memory; more heads get fewer tokens


@triton.jit(do_not_specialize=["B", "N"])
def _count_kernel(active, counts, B, N, H, active_by, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr):
    """A program counts the pairs of each head among BLOCK_N tokens of one sequence, into counts [H, B, blocks]."""
    blocks = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) % blocks
    sequence = tl.program_id(0) // blocks
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.arange(0, COLUMNS)
    real = (n < N)[:, None] & (head < H)[None, :]
    # active_by: strides of active along b and n. Heads are contiguous.
    rows = sequence.to(tl.int64) * active_by[0] + n.to(tl.int64) * active_by[1]
    runs = tl.load(active + rows[:, None] + head[None, :], mask=real, other=0)
    count = tl.sum((runs != 0).to(tl.int32), 0)
    tl.store(counts + (head.to(tl.int64) * B + sequence) * blocks + block, count, mask=head < H)


@triton.jit(do_not_specialize=["B", "N"])
def _list_kernel(
    active, counts, ends, token_list, offsets, B, N, H, active_by, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """A program lists the pairs of BLOCK_N tokens of one sequence.

    counts, ends: [H, B, blocks], for each head and block the number of its pairs, and the index in the list after its last.
    """
    blocks = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) % blocks
    sequence = tl.program_id(0) // blocks
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.arange(0, COLUMNS)
    token = sequence.to(tl.int64) * N + n
    real = (n < N)[:, None] & (head < H)[None, :]
    rows = sequence.to(tl.int64) * active_by[0] + n.to(tl.int64) * active_by[1]
    runs = tl.load(active + rows[:, None] + head[None, :], mask=real, other=0)
    runs = (runs != 0).to(tl.int32)

    segment = head.to(tl.int64) * B + sequence
    end = tl.load(ends + segment * blocks + block, mask=head < H, other=0)
    begin = end - tl.load(counts + segment * blocks + block, mask=head < H, other=0)
    position = begin[None, :] + tl.cumsum(runs, 0) - 1
    tokens = tl.broadcast_to(token[:, None].to(tl.int32), [BLOCK_N, COLUMNS])
    tl.store(token_list + position, tokens, mask=runs != 0)
    if block == 0:
        tl.store(offsets + segment, begin, mask=head < H)
    if tl.program_id(0) == B * blocks - 1:
        tl.store(offsets + segment + 1, end, mask=head == H - 1)


def longest_list(B: int, N: int, H: int, count: int | None) -> int:
    """Return the largest possible number of pairs, if `count` heads run for every token, or any number (None) of H."""
    if count is None:
        count = H
    return B * N * count


def pairs(active: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
    """List the pairs that run, sorted by head, then sequence, then token.

    Args:
        active: bool [B, N, H]; one choice for a sequence may be expanded along N.
        count: how many heads run for every token, if that is one known number; else None.

    Returns:
        token: int32 [B * N * count] or [B * N * H], b * N + n of each pair. Elements after the last pair are undefined.
        offsets: int32 [H * B + 1], index of the first pair of each segment h * B + b; the last element is the number of
            pairs.
    """
    if active.dim() != 3 or active.dtype != torch.bool:
        raise ValueError("pairs: active must be bool [B, N, H]")
    B, N, H = active.shape
    length = longest_list(B, N, H, count)
    if length >= 2**31:
        raise ValueError(f"pairs: {length} pairs are too many for int32")
    token = active.new_empty(length, dtype=torch.int32)
    if length == 0:
        return token, token.new_zeros(H * B + 1)
    active = contiguous_rows(active).view(torch.uint8)
    active_by = active.stride()[:2]
    _, columns, _ = tile(H)
    warps = 4
    if columns > 32:
        warps = 8
    tokens = max(16, min(TOKENS, LARGEST_TILE // columns))
    blocks = cdiv(N, tokens)
    counts = token.new_empty(H * B * blocks)
    constants = dict(BLOCK_N=tokens, COLUMNS=columns, num_warps=warps)
    numbers = (B, N, H, active_by)
    launch(_count_kernel, B * blocks, (active, counts), numbers, **constants)
    ends = counts.cumsum(0, dtype=torch.int32)
    offsets = token.new_empty(H * B + 1)
    lists = (active, counts, ends, token, offsets)
    launch(_list_kernel, B * blocks, lists, numbers, **constants)
    return token, offsets
