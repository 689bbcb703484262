"""The list of pairs in Triton: two kernels and a cumulative sum, and nothing waits for the device.

The first kernel counts the pairs of every head in every block of tokens. The cumulative sum of these counts says where
they begin in the list, and the second kernel writes them there. The list is made by the executor that reads it, not by
the router: where all heads are computed nobody needs it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moh_vision.attention.kernels.gpu.blocks import cdiv
from moh_vision.attention.kernels.gpu.route import tile

TOKENS = 128  # of a block; fewer of many heads, whose tile would not fit into shared memory


@triton.jit(do_not_specialize=["B", "N"])
def _count_kernel(active, counts, B, N, H, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr):
    """A program counts the pairs of BLOCK_N tokens of one sequence for every head: counts [H, B, blocks]."""
    blocks = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) % blocks
    sequence = tl.program_id(0) // blocks
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.arange(0, COLUMNS)
    token = sequence.to(tl.int64) * N + n
    real = (n < N)[:, None] & (head < H)[None, :]
    runs = tl.load(active + token[:, None] * H + head[None, :], mask=real, other=0)
    count = tl.sum((runs != 0).to(tl.int32), 0)
    tl.store(counts + (head.to(tl.int64) * B + sequence) * blocks + block, count, mask=head < H)


@triton.jit(do_not_specialize=["B", "N"])
def _list_kernel(
    active, counts, ends, token_list, offsets, B, N, H, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """A program lists the pairs of BLOCK_N tokens of one sequence; counts, ends [H, B, blocks]."""
    blocks = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) % blocks
    sequence = tl.program_id(0) // blocks
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.arange(0, COLUMNS)
    token = sequence.to(tl.int64) * N + n
    real = (n < N)[:, None] & (head < H)[None, :]
    runs = tl.load(active + token[:, None] * H + head[None, :], mask=real, other=0)
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
    """Return how many pairs there can be: those of `count` heads of every token, or of all H heads."""
    if count is None:
        count = H
    return B * N * count


def pairs(active: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
    """List the pairs that run, sorted by head, then sequence, then token.

    Args:
        active: bool [B, N, H].
        count: how many heads run for every token, where that is known; None: any number.

    Returns:
        token: int32 [B * N * count] or [B * N * H], b * N + n of every pair. What lies beyond the last pair is undefined.
        offsets: int32 [H * B + 1], where segment h * B + b begins. The last is the number of pairs.
    """
    if active.dim() != 3 or active.dtype != torch.bool:
        raise ValueError("pairs: active must be bool [B, N, H]")
    B, N, H = active.shape
    length = longest_list(B, N, H, count)
    if length >= 2**31:
        raise ValueError(f"pairs: {length} pairs are too many for int32")
    token = torch.empty(length, dtype=torch.int32, device=active.device)
    if token.numel() == 0:
        return token, token.new_zeros(H * B + 1)
    active = active.contiguous().view(torch.uint8)
    _, columns, _ = tile(H)
    warps = 4
    if columns > 32:
        warps = 8
    tokens = max(16, min(TOKENS, 8192 // columns))
    blocks = cdiv(N, tokens)
    counts = torch.empty((H, B, blocks), dtype=torch.int32, device=active.device)
    options = dict(BLOCK_N=tokens, COLUMNS=columns, num_warps=warps)
    _count_kernel[(B * blocks,)](active, counts, B, N, H, **options)
    ends = counts.flatten().cumsum(0, dtype=torch.int32)
    offsets = torch.empty(H * B + 1, dtype=torch.int32, device=active.device)
    _list_kernel[(B * blocks,)](active, counts, ends, token, offsets, B, N, H, **options)
    return token, offsets
