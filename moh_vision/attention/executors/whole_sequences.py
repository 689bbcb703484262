"""`WholeSequences` skips whole heads, keys and values included, in C++, where heads are chosen once for a sequence."""

import torch
from torch import Tensor

from moh_vision.attention import kernels
from moh_vision.attention.executors.reasons import (
    QUERIES_ARE_MADE,
    SLICED_IS_FASTER,
    no_operator,
    no_products,
    not_looked_up,
    not_whole_heads,
    nothing_to_skip,
    path_of,
)
from moh_vision.attention.executors.signature import Signature
from moh_vision.attention.executors.tokens import Tokens, of_pairs


class WholeSequences(Tokens):
    """Computes the pairs of `Tokens`, and keys and values of the X (head, sequence) pairs that run alone: [1, X, M, D]."""

    @staticmethod
    def why_not(signature: Signature) -> str:
        s = signature
        reason = nothing_to_skip(s) or not_whole_heads(s)
        if reason:
            return reason
        if s.choice == "all":
            return SLICED_IS_FASTER
        path = path_of(s)
        if path == "triton":
            # C++ runs nothing on a GPU. In the table of `measure`, the reason why `Sequences` cannot run is of more use.
            return not_looked_up(s) or no_products(s)
        if path == "torch":
            return no_operator(s)
        reason = no_products(s)
        if reason:
            return reason
        if s.queries or s.mode == "compiled":
            return QUERIES_ARE_MADE
        return ""

    def project(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [P, D], and k and v [1, X, M, D] of the X (head, sequence) pairs that run."""
        layer = self.layer
        call = self.call
        B, N, _ = call.x.shape
        context = call.x
        if call.context is not None:
            context = call.context.expand(B, -1, -1)
        M = context.shape[1]
        key_pairs = self.pairs
        if M != N:
            key_pairs = kernels.list_pairs(call.routing.active.expand(B, M, -1))
        of_queries, of_keys, of_values = layer.weights()
        k = kernels.project(context.flatten(0, 1), *of_keys, key_pairs, layer.num_heads)
        v = kernels.project(context.flatten(0, 1), *of_values, key_pairs, layer.num_heads)
        angles = of_pairs(call.rotary, key_pairs, context)
        k = layer.prepare_keys(k.unsqueeze(1), angles).squeeze(1)
        q = self.queries(*of_queries)
        return q, k.view(1, -1, M, layer.head_dim), v.view(1, -1, M, layer.head_dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the outputs of the pairs [P, D]."""
        call = self.call
        runs = self.pairs.offsets.diff() > 0  # [H * B], whether the head runs for the sequence
        # [H * B], the index 0 .. X - 1 of the keys and values of each head and sequence in k and v.
        source = runs.cumsum(0, dtype=torch.int32) - 1
        H = self.layer.num_heads
        N = call.x.shape[1]
        return kernels.attend(q, k, v, self.pairs, H, N, call.is_causal, call.attn_mask, source)
