"""All heads: one fused attention call, or step by step, then the weights. Never wrong, skips nothing."""

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention import kernels
from moh_vision.attention.routing import Call

torch.fx.wrap("attend")  # a leaf while tracing, where masks may be proxies that stand for None


class Masked:
    """The executor of one call of `layer`. The others override some of its three steps."""

    def __init__(self, layer: nn.Module, call: Call):
        self.layer, self.call = layer, call

    def project(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, N, D], k and v [B, G, M, D], normalised and rotated."""
        return self.layer.project(self.call)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The outputs of the heads [B, H, N, D]."""
        call = self.call
        return attend(q, k, v, call.attn_mask, call.is_causal, call.dropout_p, self.layer.grouped)

    def combine(self, o: Tensor) -> Tensor:
        """o [B, H, N, D] -> y [B, N, C]."""
        weights = self.call.routing.weights
        y = None if weights is None else kernels.weigh(o, weights)
        return self.layer.proj(weighted(o, weights) if y is None else y)


class Unfused(Masked):
    """As timm's layers where `fused_attn` is False: the module `attn_drop` is called with the matrix [B, H, N, M]."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return (
            self.layer.attn_drop(attention_matrix(q, k, self.call.attn_mask, self.call.is_causal))
            @ v
        )


class Reference(Masked):
    """The oracle: equation (*) as a loop over heads, without any fused kernel. Slow, for tests."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call, (B, H, N, _), (_, G, M, _) = self.call, q.shape, k.shape
        mask = call.attn_mask
        if mask is not None:
            mask = mask.expand(B, H, N, M)
        heads = []
        for h in range(H):
            g = h * G // H  # its key-value head
            matrix = attention_matrix(
                q[:, h], k[:, g], None if mask is None else mask[:, h], call.is_causal
            )
            heads.append(F.dropout(matrix, call.dropout_p) @ v[:, g])
        return torch.stack(heads, 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    grouped: bool = False,
) -> Tensor:
    """q [B, h, N, D], k and v [B, G, M, D] -> [B, h, N, D]. grouped: h / G query heads in a row read one key-value head."""
    # One token: the query heads of a key-value head as rows of one product, which reads that once. On a CPU it takes half
    # the time of enable_gqa in float32, and in bfloat16 an eleventh.
    if (
        grouped
        and q.shape[2] == 1
        and not is_causal
        and (attn_mask is None or attn_mask.shape[1] == 1)
    ):
        rows = q.unflatten(1, (k.shape[1], -1)).squeeze(3)  # [B, G, h / G, D]
        return (
            F.scaled_dot_product_attention(rows, k, v, attn_mask, dropout_p)
            .flatten(1, 2)
            .unsqueeze(2)
        )
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask, dropout_p, is_causal, enable_gqa=grouped
    )


def attention_matrix(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return the matrix that multiplies v [B, h, M, D]: q [B, h, N, D], k [B, h, M, D] -> [B, h, N, M].

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


def weighted(o: Tensor, weights: Tensor | None) -> Tensor:
    """Outputs of heads [B, h, N, D] by weights [B, N or 1, h] -> [B, N, h*D]."""
    o = o.transpose(1, 2)  # [B, N, h, D]
    if weights is None:
        return o.flatten(2)
    weights = weights.unsqueeze(-1).to(o.dtype)
    # Where no gradient can be asked for the result may overwrite o, which saves a pass over fresh memory.
    in_place = type(o) is Tensor and not torch.is_grad_enabled() and not torch.jit.is_tracing()
    return (o.mul_(weights) if in_place else o * weights).flatten(2)
