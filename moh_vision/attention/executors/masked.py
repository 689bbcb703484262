"""All heads with one fused attention call, then the weights: never wrong, skips nothing."""

from typing import Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.routing import Routing


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Optional[Tensor],
    attn_mask: Optional[Tensor] = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    grouped: bool = False,
) -> Tensor:
    """Weighted attention of h heads: q [B, h, N, D], k and v [B, G, M, D], weights [B, N or 1, h] -> [B, N, h*D].

    grouped: G < h, and h / G query heads in a row read one key-value head.
    """
    # One token: the query heads of a key-value head as rows of one product, which reads that once. On a CPU it takes half
    # the time of enable_gqa in float32, and in bfloat16 an eleventh.
    if grouped and q.shape[2] == 1 and not is_causal and (attn_mask is None or attn_mask.shape[1] == 1):
        rows = q.unflatten(1, (k.shape[1], -1)).squeeze(3)  # [B, G, h / G, D]
        o = F.scaled_dot_product_attention(rows, k, v, attn_mask=attn_mask, dropout_p=dropout_p)
        o = o.flatten(1, 2).unsqueeze(2)  # [B, h, 1, D]
    else:
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=grouped
        )  # [B, h, N, D]
    return weighted(o, weights)


def attention_matrix(
    q: Tensor, k: Tensor, attn_mask: Optional[Tensor] = None, is_causal: bool = False, scale: Optional[float] = None
) -> Tensor:
    """What the fused call multiplies v [B, h, M, D] with: q [B, h, N, D], k [B, h, M, D] -> [B, h, N, M].

    Rows sum to 1, or to 0 where the mask hides all keys, as in the fused call. scale: of q k^T; None: 1 / sqrt(D).
    """
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is None:
        return scores.softmax(-1)
    if attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -float("inf"))
    else:
        scores = scores + attn_mask
    blind = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def weighted(o: Tensor, weights: Optional[Tensor]) -> Tensor:
    """Outputs of heads [B, h, N, D] by weights [B, N or 1, h] -> [B, N, h*D]."""
    o = o.transpose(1, 2)  # [B, N, h, D]
    if weights is not None:
        weights = weights.unsqueeze(-1).to(o.dtype)
        if not torch.jit.is_scripting():
            # Where no gradient can be asked for the result may overwrite o, which saves a pass over fresh memory.
            if type(o) is Tensor and not torch.is_grad_enabled() and not torch.jit.is_tracing():
                return o.mul_(weights).flatten(2)
        o = o * weights
    return o.flatten(2)


def has_head_masks(attn_mask: Optional[Tensor]) -> bool:
    """Whether heads have masks of their own, attn_mask [B or 1, H or 1, N, M]."""
    return attn_mask is not None and attn_mask.shape[1] > 1


def is_short(dtype: torch.dtype) -> bool:
    """16 bits."""
    return dtype not in (torch.float32, torch.float64)


def autocast(x: Tensor) -> Tensor:
    """x as autocast would hand it to a matrix product, for products that it does not see."""
    return x.to(product_dtype(x))


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products of x, under autocast or not."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    routing: Routing,
    attn_mask: Optional[Tensor] = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """Equation (*) of the package."""
    return attend(q, k, v, routing.weights, attn_mask, is_causal, dropout_p, k.shape[1] < q.shape[1])
