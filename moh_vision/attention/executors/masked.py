"""All heads: one fused attention call, or step by step, then the weights. Never wrong, skips nothing."""

import torch.fx
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.executors.executor import Executor
from moh_vision.attention.executors.reference import attention_matrix, weighted

torch.fx.wrap("attend")  # a leaf while tracing, where masks may be proxies that stand for None


class Masked(Executor):
    """All heads by one fused call. Executors that skip heads override some of its three steps."""

    def project(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, H, N, D], k and v [B, G, M, D], normalised and rotated."""
        return self.layer.project(self.call)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the outputs of the heads [B, H, N, D]."""
        call = self.call
        return attend(q, k, v, call.attn_mask, call.is_causal, call.dropout_p, self.layer.grouped)

    def combine(self, o: Tensor) -> Tensor:
        """Weigh and project o [B, H, N, D] to y [B, N, C]."""
        return self.layer.proj(weighted(o, self.call.routing.weights))


class Unfused(Masked):
    """As timm's layers where `fused_attn` is False: the module `attn_drop` is called with the matrix [B, H, N, M]."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call = self.call
        shared_by = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(shared_by, 1)
        v = v.repeat_interleave(shared_by, 1)
        matrix = attention_matrix(q, k, call.attn_mask, call.is_causal)
        return self.layer.attn_drop(matrix) @ v


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    grouped: bool = False,
) -> Tensor:
    """Attend with every head.

    Args:
        q: [B, h, N, D].
        k, v: [B, G, M, D].
        attn_mask, is_causal, dropout_p: see `Call`.
        grouped: h / G query heads in a row read one key-value head.

    Returns:
        [B, h, N, D]
    """
    if grouped and q.shape[2] == 1 and not is_causal:
        if attn_mask is None or attn_mask.shape[1] == 1:
            # One token: the query heads of a key-value head are the rows of one product, which reads the keys once. On a
            # CPU this takes half the time of enable_gqa in float32, and in bfloat16 an eleventh.
            rows = q.unflatten(1, (k.shape[1], -1)).squeeze(3)  # [B, G, h / G, D]
            o = F.scaled_dot_product_attention(rows, k, v, attn_mask, dropout_p)
            return o.flatten(1, 2).unsqueeze(2)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask, dropout_p, is_causal, enable_gqa=grouped
    )
