"""The oracle: equation (*) as a loop over heads, without any fused kernel. Slow, for tests."""

from typing import Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.executors.masked import Projections, project_queries
from moh_vision.attention.routing import Routing


def reference(
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
    """See `masked` for the arguments. Heads of weight 0 contribute exactly nothing, as if they had not run."""
    B, N, _ = x.shape
    M, D = k.shape[-2:]
    if q is None:
        q = project_queries(x, projections, D)
    H = q.shape[1]
    bias = torch.zeros(N, M, dtype=q.dtype, device=q.device)
    if is_causal:
        bias = bias.masked_fill(torch.ones(N, M, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, float("-inf"))
        bias = bias + attn_mask
    bias = bias.expand(B, H, N, M)

    y = x.new_zeros(B, N, projections.out_weight.shape[0])
    for h in range(H):
        g = h * k.shape[1] // H  # its key-value head
        scores = q[:, h] @ k[:, g].transpose(1, 2) / D**0.5 + bias[:, h]  # [B, N, M]
        o = F.dropout(scores.softmax(-1), dropout_p) @ v[:, g]  # [B, N, D]
        if routing.weights is not None:
            o = routing.weights[:, :, h, None].to(o.dtype) * o
        y = y + o @ projections.out_weight[:, h * D : (h + 1) * D].T
    return y if projections.out_bias is None else y + projections.out_bias
