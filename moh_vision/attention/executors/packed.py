"""Heads chosen per token: only the (head, sequence, token) pairs that run, through the operators of `kernels`."""

import torch
from torch import Tensor, nn

from moh_vision.attention import kernels
from moh_vision.attention.executors.masked import Masked
from moh_vision.attention.linear import in_float
from moh_vision.attention.routing import Call, Pairs


class Tokens(Masked):
    """Skips queries, attention and output projection. Other tokens need the keys and values of a head.

    The operators are C++ for float32; for 16 bits attention alone is, and the projections are those of all heads.
    """

    def __init__(self, layer: nn.Module, call: Call):
        super().__init__(layer, call)
        routing = call.routing
        B, N, _ = call.x.shape
        if routing.pairs is not None and routing.active.shape[:2] == (B, N):
            self.pairs = routing.pairs
        else:
            self.pairs = kernels.list_pairs(routing.active.expand(B, N, -1))

    def project(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [P, D], k and v [B, G, M, D]."""
        queries, *keys_values = self.layer.weights()
        q, B = self.queries(*queries), self.call.x.shape[0]
        k, v = self.layer.project_kv(self.call, keys_values)
        # A norm leaves queries and keys in float32 under autocast. One context may serve all sequences.
        return q.to(v.dtype), k.to(v.dtype).expand(B, -1, -1, -1), v.expand(B, -1, -1, -1)

    def queries(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The queries of the pairs [P, D], normalised and rotated."""
        layer, call, pairs = self.layer, self.call, self.pairs
        if call.q is None:
            q = kernels.project(call.x.flatten(0, 1), weight, bias, pairs, layer.num_heads)
        else:
            q = kernels.select(call.q.transpose(1, 2), pairs, layer.num_heads)
        return layer.prepare_queries(q.unsqueeze(1), of_pairs(call.rotary, pairs, call.x)).squeeze(
            1
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[P, D]"""
        call = self.call
        H, N = self.layer.num_heads, call.x.shape[1]
        return kernels.attend(q, k, v, self.pairs, H, N, call.is_causal, call.attn_mask)

    def combine(self, o: Tensor) -> Tensor:
        layer, (B, N, _) = self.layer, self.call.x.shape
        gates = in_float(self.call.routing.weights).expand(B, N, -1).reshape(B * N, -1)
        y = kernels.combine(
            o, gates, layer.proj.weight, layer.proj.bias, self.pairs, layer.num_heads
        )
        return y.view(B, N, -1)


class WholeSequences(Tokens):
    """Heads chosen per sequence: keys and values too are those of heads that run, [1, X, M, D]."""

    def project(self) -> tuple[Tensor, Tensor, Tensor]:
        layer, call = self.layer, self.call
        context = call.x if call.context is None else call.context.expand(call.x.shape[0], -1, -1)
        M = context.shape[1]
        key_pairs = (
            self.pairs
            if M == call.x.shape[1]
            else kernels.list_pairs(call.routing.active.expand(call.x.shape[0], M, -1))
        )
        queries, *keys_values = layer.weights()
        k, v = (
            kernels.project(context.flatten(0, 1), *rows, key_pairs, layer.num_heads)
            for rows in keys_values
        )
        k = layer.prepare_keys(k.unsqueeze(1), of_pairs(call.rotary, key_pairs, context)).squeeze(1)
        return self.queries(*queries), *(t.view(1, -1, M, layer.head_dim) for t in (k, v))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call = self.call
        source = (self.pairs.offsets.diff() > 0).cumsum(
            0, dtype=torch.int32
        ) - 1  # of every segment
        H, N = self.layer.num_heads, call.x.shape[1]
        return kernels.attend(q, k, v, self.pairs, H, N, call.is_causal, call.attn_mask, source)


class OnGpu(Masked):
    """All queries are projected. One kernel in Triton attends for the pairs that run, weighs, and puts in place."""

    def project(self) -> tuple[Tensor, Tensor, Tensor]:
        """As `Masked`. Where q, k and v are views of one product, attention reads that."""
        self.product = self.layer.product(self.call)
        return self.layer.project(self.call._replace(product=self.product))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, N, H*D], weighted."""
        layer, call = self.layer, self.call
        if self.product is not None:
            # It gets one gradient, and nothing is joined afterwards.
            return kernels.attend_product_on_gpu(
                self.product,
                layer.num_heads,
                layer.kv_heads,
                call.routing,
                call.is_causal,
                call.attn_mask,
            )
        B = q.shape[0]
        q, k, v = q.to(v.dtype), k.to(v.dtype).expand(B, -1, -1, -1), v.expand(B, -1, -1, -1)
        return kernels.attend_on_gpu(q, k, v, call.routing, call.is_causal, call.attn_mask)

    def combine(self, o: Tensor) -> Tensor:
        return self.layer.proj(o)


def of_pairs(
    rotary: tuple[Tensor, Tensor] | None, pairs: Pairs, x: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines of the pairs' tokens, [P, D] each, of those of x [B, N, C]."""
    if rotary is None:
        return None
    B, N, _ = x.shape
    cos, sin = (
        t.expand(B, N, t.shape[-1]).flatten(0, 1).index_select(0, pairs.token) for t in rotary
    )
    return cos, sin
