"""The oracle: equation (*) as a loop over heads, without any fused kernel. Slow, for tests."""

from typing import Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.routing import Routing


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    routing: Routing,
    attn_mask: Optional[Tensor] = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """Heads of weight 0 contribute exactly nothing, as if they had not run."""
    B, H, N, D = q.shape
    M = k.shape[2]
    bias = torch.zeros(N, M, dtype=q.dtype, device=q.device)
    if is_causal:
        bias = bias.masked_fill(torch.ones(N, M, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, float("-inf"))
        bias = bias + attn_mask
    bias = bias.expand(B, H, N, M)

    blind = bias.isneginf().all(-1, keepdim=True)  # rows without any key: 0, as in torch's own attention, and not NaN

    heads = []
    for h in range(H):
        g = h * k.shape[1] // H  # its key-value head
        scores = q[:, h] @ k[:, g].transpose(1, 2) / D**0.5 + bias[:, h]  # [B, N, M]
        attention = scores.masked_fill(blind[:, h], 0).softmax(-1).masked_fill(blind[:, h], 0)
        o = F.dropout(attention, dropout_p) @ v[:, g]  # [B, N, D]
        if routing.weights is not None:
            o = routing.weights[:, :, h, None].to(o.dtype) * o
        heads.append(o)
    return torch.cat(heads, -1)
