"""Positions: which keys a token sees, and the rotation of queries and keys."""

from typing import Optional, Tuple

import torch
from torch import Tensor


def visible(
    attn_mask: Optional[Tensor],
    is_causal: bool,
    padding_mask: Optional[Tensor],
    tokens: int,
    past: int,
    device: torch.device,
) -> Tuple[Optional[Tensor], bool]:
    """One mask out of several, or none, for an attention call that takes a mask or `is_causal`.

    Args:
        attn_mask: [.., N, M], True (attend) or an additive float.
        is_causal: token n sees the `past` cached keys and 0 .. n.
        padding_mask: [B, M], True where a key is padding. A token always sees itself, so that no row is empty.
        tokens, past: N, and how many keys come before the first token.

    Returns:
        the mask and whether the call is to be causal; at most one of them says something.
    """
    if padding_mask is None and (not is_causal or (attn_mask is None and past == 0)):
        return attn_mask, is_causal
    if padding_mask is None and attn_mask is None and tokens == 1:
        return None, False  # one new token sees all
    keys = padding_mask.shape[1] if padding_mask is not None else past + tokens
    if attn_mask is not None:
        keys = attn_mask.shape[-1]
    distance = torch.arange(keys, device=device) - torch.arange(past, past + tokens, device=device).unsqueeze(1)
    if is_causal:
        seen = distance <= 0  # [N, M]
    else:
        seen = torch.ones_like(distance, dtype=torch.bool)
    if padding_mask is not None:
        seen = (seen & ~padding_mask[:, None, None, :]) | (distance == 0)  # [B, 1, N, M]
    if attn_mask is None:
        return seen, False
    if attn_mask.dtype != torch.bool:
        return attn_mask.masked_fill(~seen, float("-inf")), False
    seen = seen & attn_mask
    if padding_mask is not None:
        seen = seen | (distance == 0)
    return seen, False


def rotate(x: Tensor, rotary: Tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding: x [B, N, h, D], cosines and sines [N, D] or [B, N, D]; the halves of D are the two coordinates."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos.unsqueeze(-2).to(x.dtype) + turned * sin.unsqueeze(-2).to(x.dtype)
