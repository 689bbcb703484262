"""`Reference`: equation (*) as a loop over heads. Read this first; every other executor computes the same, faster.

y_t = sum_h  w_h(x_t) * softmax(q_h(x_t) K_h^T / sqrt(D)) V_h  W_O^h            (*)
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.executors.executor import Executor


class Reference(Executor):
    """The oracle of the tests. It computes one head after another, each by its whole attention matrix, and is slow."""

    def project(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, H, N, D], k and v [B, G, M, D]: H / G query heads in a row share one of the G key-value heads."""
        return self.layer.project(self.call)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return softmax(q_h(x_t) K_h^T / sqrt(D)) V_h of every head h and token t: [B, H, N, D]."""
        call = self.call
        B, H, N, _ = q.shape
        _, G, M, _ = k.shape
        mask = call.attn_mask
        if mask is not None:
            mask = mask.expand(B, H, N, M)
        outputs = []
        for h in range(H):
            g = h * G // H  # its key-value head
            mask_h = None
            if mask is not None:
                mask_h = mask[:, h]
            matrix = attention_matrix(q[:, h], k[:, g], mask_h, call.is_causal)  # [B, N, M]
            matrix = F.dropout(matrix, call.dropout_p)
            outputs.append(matrix @ v[:, g])
        return torch.stack(outputs, 1)

    def combine(self, o: Tensor) -> Tensor:
        """Return sum_h  w_h(x_t) * o_h(x_t)  W_O^h of the heads' outputs o [B, H, N, D]: [B, N, C].

        One product sums over the heads, because the weight of `proj` is [W_O^1 .. W_O^H].
        """
        o = o.transpose(1, 2)  # [B, N, H, D]
        weights = self.call.routing.weights  # [B or 1, N or 1, H]; None: every head counts as 1
        if weights is not None:
            o = o * weights.unsqueeze(-1).to(o.dtype)
        return self.layer.proj(o.flatten(2))


def attention_matrix(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T), which multiplies v [B, h, M, D].

    Args:
        q: [B, h, N, D].
        k: [B, h, M, D].
        attn_mask, is_causal: see `Call`.
        scale: factor of q k^T; None: 1 / sqrt(D).

    Returns:
        [B, h, N, M] in the dtype of q. Rows sum to 1, or to 0 where the mask hides all keys, as in the fused call.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    scores = q @ k.transpose(-2, -1) * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is None:
        return scores.softmax(-1)
    if attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -float("inf"))
    else:
        scores = scores + attn_mask
    # Rows without a visible key, whose softmax would be NaN.
    blind = scores.isneginf().all(-1, keepdim=True)
    matrix = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return matrix.to(q.dtype)  # an additive mask may be wider
