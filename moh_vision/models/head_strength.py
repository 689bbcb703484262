"""How much a head adds to the residual stream."""

import torch
from torch import Tensor


def output_gram(weight: Tensor, heads: int) -> Tensor:
    """W^T W of every head's part of an output projection, weight [C, H * D] -> [H, D, D], in float32."""
    w = weight.float().unflatten(1, (heads, -1))  # [C, H, D]
    return torch.einsum("chd,che->hde", w, w)


def output_lengths(o: Tensor, gram: Tensor) -> Tensor:
    """|W_O^h o_h| for every token and head, o [B, N, H * D], gram [H, D, D] -> [B, N, H].

    |W o|^2 = o^T (W^T W) o, without the width of the model in memory for every head.
    """
    o = o.float().unflatten(-1, gram.shape[:2])  # [B, N, H, D]
    return torch.einsum("bnhd,hde,bnhe->bnh", o, gram, o).clamp_min(0).sqrt()
