"""All heads with one fused attention call, then the weights: never wrong, skips nothing."""

from typing import NamedTuple, Optional

from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.routing import Routing


class Projections(NamedTuple):
    """The query and output projections of a layer; rows h*D .. (h+1)*D of q_* and columns of out_weight are head h."""

    q_weight: Tensor  # [H*D, C]
    q_bias: Optional[Tensor]  # [H*D]
    out_weight: Tensor  # [C, H*D]
    out_bias: Optional[Tensor]  # [C]


def project_queries(x: Tensor, projections: Projections, head_dim: int) -> Tensor:
    """x [B, N, C] -> q [B, H, N, D]"""
    q = F.linear(x, projections.q_weight, projections.q_bias)  # [B, N, H*D]
    return q.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def masked(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    routing: Routing,
    projections: Projections,
    q: Optional[Tensor] = None,
    attn_mask: Optional[Tensor] = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """Equation (*) of the package.

    Args:
        x: query tokens [B, N, C].
        k, v: keys and values [B, G, M, D]; G = H, or a divisor of H whose heads are shared by H / G query heads each.
        routing: weights and active heads.
        projections: query and output projections.
        q: projected queries [B, H, N, D], where the layer already has them.
        attn_mask: [.., N, M], True (attend) or an additive float, as in scaled_dot_product_attention.
        is_causal: token n attends to keys 0 .. n.
        dropout_p: dropout of the attention matrix.

    Returns:
        y [B, N, C].
    """
    if q is None:
        q = project_queries(x, projections, k.shape[-1])
    o = F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1]
    )  # [B, H, N, D]
    o = o.transpose(1, 2)  # [B, N, H, D]
    weights = routing.weights
    if weights is not None:
        o = o * weights.unsqueeze(-1).to(o.dtype)
    return F.linear(o.flatten(2), projections.out_weight, projections.out_bias)  # [B, N, C]
