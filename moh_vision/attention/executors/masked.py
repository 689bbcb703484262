"""`Masked` and `Unfused` compute all heads, by one fused call or step by step, and then weigh them. They take any call."""

import torch
import torch.fx
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention import kernels
from moh_vision.attention.executors.executor import Executor
from moh_vision.attention.executors.reference import attention_matrix

torch.fx.wrap("attend")  # a leaf while fx traces: masks may then be proxies that stand for None


class Masked(Executor):
    """All heads by one fused call. A subclass may override any of the three steps."""

    def project(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, H, N, D], k and v [B, G, M, D], normalised and rotated."""
        return self.layer.project(self.call)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the outputs of the heads [B, H, N, D]."""
        call = self.call
        return attend(q, k, v, call.attn_mask, call.is_causal, call.dropout_p, self.layer.grouped)

    def combine(self, o: Tensor) -> Tensor:
        """Weigh and project o [B, H, N, D] to y [B, N, C]."""
        return self.output(weighted(o, self.call.routing.weights))


class Unfused(Masked):
    """All heads, step by step: as in timm, the module `attn_drop` is called with the attention matrix [B, H, N, M]."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the outputs of the heads [B, H, N, D]."""
        call = self.call
        group = q.shape[1] // k.shape[1]  # query heads that share a key-value head
        k = k.repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
        matrix = attention_matrix(q, k, call.attn_mask, call.is_causal)
        return self.layer.attn_drop(matrix) @ v


def weighted(o: Tensor, weights: Tensor | None) -> Tensor:
    """Multiply the outputs of heads by w_h(x_t) and join them: o [B, H, N, D] -> [B, N, H*D].

    Args:
        o: overwritten where no gradients are recorded.
        weights: [B or 1, N or 1, H]; None: every head counts as 1.
    """
    if weights is None:
        return o.transpose(1, 2).flatten(2)
    y = kernels.weigh(o, weights)
    if y is not None:
        return y
    o = o.transpose(1, 2)  # [B, N, H, D]
    weights = weights.unsqueeze(-1).to(o.dtype)
    # In place, because a new tensor would cost another pass over memory.
    in_place = type(o) is Tensor and not torch.is_grad_enabled() and not torch.jit.is_tracing()
    if in_place:
        return o.mul_(weights).flatten(2)
    return (o * weights).flatten(2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    grouped: bool = False,
) -> Tensor:
    """Attend with every head, by F.scaled_dot_product_attention.

    Args:
        q: [B, h, N, D].
        k, v: [B, G, M, D].
        attn_mask, is_causal, dropout_p: see `Call`.
        grouped: whether h > G, so that each key-value head serves h / G consecutive query heads.

    Returns:
        [B, h, N, D]
    """
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, q.dtype):
        attn_mask = attn_mask.float()  # the fused call takes these three dtypes alone
    if grouped and q.shape[2] == 1 and not is_causal:
        if attn_mask is None or attn_mask.shape[1] == 1:
            # One token: the query heads of a key-value head take the places of tokens, so that its keys are read once.
            # On a CPU this takes half the time of enable_gqa in float32, and an eleventh of it in bfloat16.
            rows = q.unflatten(1, (k.shape[1], -1)).squeeze(3)  # [B, G, h / G, D]
            o = F.scaled_dot_product_attention(rows, k, v, attn_mask, dropout_p)
            return o.flatten(1, 2).unsqueeze(2)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask, dropout_p, is_causal, enable_gqa=grouped
    )
