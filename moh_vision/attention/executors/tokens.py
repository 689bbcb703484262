"""`Tokens` computes only the (head, sequence, token) pairs that run, in C++, where heads are chosen per token."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention import kernels
from moh_vision.attention.executors.executor import Executor
from moh_vision.attention.executors.known import share_in_float32
from moh_vision.attention.executors.reasons import (
    hidden_weights,
    no_operator,
    no_products,
    nothing_to_skip,
    unlisted,
)
from moh_vision.attention.executors.signature import Signature
from moh_vision.attention.linear import in_float
from moh_vision.attention.routing import Call, Pairs


class Tokens(Executor):
    """Skips queries, attention and output projection of a head for tokens that do not run it, in float32.

    Keys and values are computed for all tokens and heads: the tokens that do run a head attend to all of them.
    """

    def __init__(self, layer: nn.Module, call: Call, prepared: Any = None):
        super().__init__(layer, call, prepared)
        B, N, _ = call.x.shape
        self.pairs = kernels.pairs_of(call.routing, B, N)

    @staticmethod
    def why_not(signature: Signature) -> str:
        return (
            nothing_to_skip(signature)
            or no_operator(signature)
            or no_products(signature)
            or hidden_weights(signature)
            or unlisted(signature)
        )

    @staticmethod
    def pays_up_to(signature: Signature) -> float:
        return share_in_float32(signature.head_dim)

    def project(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [P, D] of the pairs, k and v [B, G, M, D] of all heads."""
        layer = self.layer
        call = self.call
        context = call.x if call.context is None else call.context
        of_queries, of_keys, of_values = layer.weights()
        q = self.queries(*of_queries)
        k = layer.by_head(F.linear(context, *of_keys))
        v = layer.by_head(F.linear(context, *of_values))
        k, v = layer.prepare_keys_values(k, v, call)
        # Under autocast a norm returns float32. The context may be one for all sequences, [1, M, C].
        B = call.x.shape[0]
        return q.to(v.dtype), k.to(v.dtype).expand(B, -1, -1, -1), v.expand(B, -1, -1, -1)

    def queries(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the queries of the pairs [P, D], normalised and rotated."""
        layer = self.layer
        call = self.call
        if call.q is None:
            q = kernels.project(call.x.flatten(0, 1), weight, bias, self.pairs, layer.num_heads)
        else:
            q = kernels.select(call.q, self.pairs, layer.num_heads)
        angles = of_pairs(call.rotary, self.pairs, call.x)
        return layer.prepare_queries(q.unsqueeze(1), angles).squeeze(1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the outputs of the pairs [P, D]."""
        call = self.call
        H = self.layer.num_heads
        N = call.x.shape[1]
        return kernels.attend(q, k, v, self.pairs, H, N, call.is_causal, call.attn_mask)

    def combine(self, o: Tensor) -> Tensor:
        """Weigh and project the outputs of the pairs, o [P, D], and sum over the heads of each token: y [B, N, C]."""
        layer = self.layer
        B, N, _ = self.call.x.shape
        gates = in_float(self.call.routing.weights).expand(B, N, -1).reshape(B * N, -1)
        y = kernels.combine(
            o, gates, layer.proj.weight, layer.proj.bias, self.pairs, layer.num_heads
        )
        return y.view(B, N, -1)


def of_pairs(
    rotary: tuple[Tensor, Tensor] | None, pairs: Pairs, x: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return the cosines and sines of each pair's token, [P, D] each.

    Args:
        rotary: cosines and sines of all tokens, see `HeadMixtureAttention.forward`, or None.
        pairs: what runs.
        x: the tokens [B, N, C]; only the shape is used.
    """
    if rotary is None:
        return None
    B, N, _ = x.shape
    cos, sin = (
        t.expand(B, N, t.shape[-1]).flatten(0, 1).index_select(0, pairs.token) for t in rotary
    )
    return cos, sin
