"""Causal attention of packed queries, without a mask for every one of them. For inference on a CPU.

The queries of a head are taken in blocks, in the order of their tokens, each with the keys up to its last token. So about
half of the keys are never read, as in a fused causal kernel, and a mask is needed only for those between the first
token of a block and its last.
"""

from typing import Sequence, Tuple

import torch
from torch import Tensor
from torch.nn import functional as F

# Queries in a block. More waste keys behind a block's first token, fewer make narrow products. At 2048 and 4096 tokens,
# half and three quarters of 16 heads of 64 (float32, AVX2, a busy core), 64 to 256 differed by less than the noise, and
# 32 took about 10 % longer at 2048.
ROWS = 128


def attend_causal(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, segments: Sequence[Tuple[int, int, int]]
) -> Tensor:
    """Attention of queries at any tokens to the keys of the same and earlier tokens. No gradient is recorded.

    Args:
        q: queries [P, D], segment after segment, each in rising order of tokens.
        k, v: [B, G, M, D], one for every token that a query stands at, or more.
        position: [P] token of each query in its sequence.
        segments: (sequence, key-value head, queries), which together make P.

    Returns:
        o [P, D].
    """
    o = torch.empty_like(q)
    starts, ends = [], []  # of blocks, in q
    sources = []  # and the keys that they read
    begin = 0
    for b, g, count in segments:
        for i in range(begin, begin + count, ROWS):
            starts.append(i)
            ends.append(min(i + ROWS, begin + count))
            sources.append((b, g))
        begin += count
    if not starts:
        return o
    edges = torch.tensor([starts, [end - 1 for end in ends]], device=q.device)
    first_tokens, last_tokens = position[edges].tolist()
    keys = torch.arange(k.shape[2], device=q.device)
    mask = q.new_zeros(ROWS, k.shape[2])  # 0 again after every block
    for i, j, first, last, (b, g) in zip(starts, ends, first_tokens, last_tokens, sources):
        late = mask[: j - i, first + 1 : last + 1]  # the keys that some of the block may not see
        late.masked_fill_(position[i:j].unsqueeze(1) < keys[first + 1 : last + 1], float("-inf"))
        o[i:j] = F.scaled_dot_product_attention(
            q[None, None, i:j],
            k[b, g, : last + 1][None, None],
            v[b, g, : last + 1][None, None],
            attn_mask=mask[None, None, : j - i, : last + 1],
        )[0, 0]
        late.zero_()
    return o
