"""Positions: which keys a token sees, and the rotation of queries and keys."""

from typing import Optional, Tuple

import torch
from torch import Tensor


def visible(
    attn_mask: Optional[Tensor],
    is_causal: bool,
    padding_mask: Optional[Tensor],
    tokens: int,
    keys: int,
    past: int,
    device: torch.device,
) -> Tuple[Optional[Tensor], bool]:
    """One mask out of several, or none, for an attention call that takes a mask or `is_causal`.

    Args:
        attn_mask: [N, M], [H or 1, N, M] or [B or 1, H or 1, N, M], True (attend) or an additive float.
        is_causal: token n sees the `past` cached keys and 0 .. n.
        padding_mask: [B, M], True where a key is padding, which only itself sees, so that no row is empty.
        tokens, keys, past: N, M, and how many keys come before the first token.

    Returns:
        the mask [B or 1, H or 1, N, M] or None, and whether the call is to be causal; at most one says something.
    """
    if attn_mask is not None:
        for _ in range(4 - attn_mask.dim()):
            attn_mask = attn_mask.unsqueeze(0)
    if padding_mask is None and (not is_causal or (attn_mask is None and past == 0)):
        return attn_mask, is_causal
    if padding_mask is None and attn_mask is None and tokens == 1:
        return None, False  # one new token sees all
    distance = torch.arange(keys, device=device) - torch.arange(past, past + tokens, device=device).unsqueeze(1)
    distance = distance.view(1, 1, tokens, keys)
    if is_causal:
        seen = distance <= 0
    else:
        seen = torch.ones_like(distance, dtype=torch.bool)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    if padding_mask is not None:
        padding = padding_mask[:, None, None, :]  # [B, 1, 1, M]
        seen = (seen & ~padding) | (padding & (distance == 0))
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        return attn_mask.masked_fill(~seen, float("-inf")), False
    return seen, False


def without_padding(attn_mask: Optional[Tensor], padding: Tensor) -> Tensor:
    """Hide padded keys: padding [B, M], True at padding; attn_mask as for `visible`, or None."""
    real = ~padding[:, None, None, :]  # [B, 1, 1, M]
    if attn_mask is None:
        return real
    if attn_mask.dtype == torch.bool:
        return attn_mask & real
    return attn_mask.masked_fill(~real, float("-inf"))


def rotate(x: Tensor, rotary: Tuple[Tensor, Tensor], pairs: bool = False) -> Tensor:
    """Rotary embedding: x [B, N, h, D], cosines and sines [N, D] or [B or 1, N, D].

    The halves of D are the two coordinates; with `pairs`, neighbours are.
    """
    cos, sin = rotary
    if pairs:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    return x * cos.unsqueeze(-2).to(x.dtype) + turned * sin.unsqueeze(-2).to(x.dtype)


def check_length(name: str, padding: Optional[Tensor], past: int, tokens: int, x: Tensor) -> None:
    """Refuse padding [B, columns] for another number of tokens; not while tracing, where x is no plain tensor."""
    if padding is not None and type(x) is Tensor and padding.shape[1] != past + tokens:
        cached = f": {past} cached tokens and {tokens} new ones" if past else ""
        raise ValueError(f"{name} has {padding.shape[1]} columns, not {past + tokens}{cached}")
