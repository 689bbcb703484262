"""Executors of `GroupMixtureMlp`: all groups, and those that leave out the groups that a sequence does not run.

The layer calls `project`, its activation on what that returns, and `combine`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from moh_vision.attention import kernels
from moh_vision.attention.executors import known
from moh_vision.attention.executors.executor import Executor
from moh_vision.attention.executors.products import Products, products_of
from moh_vision.attention.executors.reasons import (
    GROUPS_VARY,
    HIDDEN_WEIGHTS,
    PAIRS_VARY,
    SLICED_IS_FASTER,
    hidden_weights,
    no_products,
    not_tiled,
    nothing_to_skip,
)
from moh_vision.attention.executors.signature import Signature
from moh_vision.attention.linear import cast_bias, in_float, plain, product_dtype
from moh_vision.attention.routing import Call


class AllGroups(Executor):
    """All groups by the layer's two products, and the hidden channels times the weights of their groups."""

    def project(self) -> Tensor:
        """Return the hidden channels before the activation, [B, N, G * D]."""
        return self.layer.fc1(self.call.x)

    def combine(self, hidden: Tensor) -> Tensor:
        """Weigh and project hidden [B, N, G * D] to y [B, N, C]."""
        weights = self.call.routing.weights
        if weights is not None:
            by_group = hidden.unflatten(-1, (self.layer.num_heads, -1))
            hidden = (by_group * weights.unsqueeze(-1).to(hidden.dtype)).flatten(-2)
        return self.layer.fc2(hidden)


class ReferenceGroups(Executor):
    """The oracle: the sum over groups as a loop, in which every group has products of its own."""

    def __init__(self, layer: nn.Module, call: Call, prepared: Any = None):
        super().__init__(layer, call, prepared)
        if not all(map(plain, layer.projections)):
            raise ValueError(
                f"executor 'reference' reads the weights of fc1 and fc2, but {HIDDEN_WEIGHTS}: give 'auto', 'packed' or "
                "'masked', which call such layers"
            )

    def project(self) -> Tensor:
        """Return the hidden channels before the activation, [B, N, G * D]."""
        layer = self.layer
        weights = layer.fc1.weight.unflatten(0, (layer.num_heads, -1))  # [G, D, C]
        hidden = torch.cat([self.call.x @ weight.t() for weight in weights], -1)
        if layer.fc1.bias is not None:
            hidden = hidden + layer.fc1.bias
        return hidden

    def combine(self, hidden: Tensor) -> Tensor:
        """Weigh and project hidden [B, N, G * D] to y [B, N, C]."""
        layer = self.layer
        G = layer.num_heads
        gates = self.call.routing.weights  # [B or 1, 1, G]
        groups = hidden.unflatten(-1, (G, -1))
        weights = layer.fc2.weight.unflatten(1, (G, -1))  # [C, G, D]
        y = hidden.new_zeros(*hidden.shape[:-1], layer.dim)
        for g in range(G):
            part = groups[..., g, :] @ weights[:, g].t()
            if gates is not None:
                part = part * gates[..., g, None].to(part.dtype)
            y = y + part
        if layer.fc2.bias is not None:
            y = y + layer.fc2.bias
        return y


class GroupPairs(Executor):
    """Groups of every sequence, in float32 by the C++ operators that project and combine heads."""

    def __init__(self, layer: nn.Module, call: Call, prepared: Any = None):
        super().__init__(layer, call, prepared)
        B, N, _ = call.x.shape
        self.pairs = kernels.pairs_of(call.routing, B, N)

    @staticmethod
    def why_not(signature: Signature) -> str:
        s = signature
        reason = nothing_to_skip(s) or no_products(s) or hidden_weights(s)
        if reason:
            return reason
        if s.choice == "all":
            return SLICED_IS_FASTER
        if s.mode == "compiled":
            return PAIRS_VARY
        return ""

    @staticmethod
    def pays_up_to(signature: Signature) -> float:
        return known.share_in_float32(signature.head_dim)

    def project(self) -> Tensor:
        """Return the hidden channels of the pairs before the activation, [P, D]."""
        layer = self.layer
        x = self.call.x.flatten(0, 1)
        return kernels.project(x, layer.fc1.weight, layer.fc1.bias, self.pairs, layer.num_heads)

    def combine(self, hidden: Tensor) -> Tensor:
        """Weigh hidden [P, D], and project and add up the groups of each token: [B, N, C]."""
        fc2 = self.layer.fc2
        G = self.layer.num_heads
        B, N, _ = self.call.x.shape
        gates = in_float(self.call.routing.weights).expand(B, N, -1).reshape(B * N, G)
        y = kernels.combine(hidden, gates, fc2.weight, fc2.bias, self.pairs, G)
        return y.view(B, N, -1)


class GroupsOfSequences(Executor):
    """Groups of every sequence by products with the weights of these groups alone, in the forms of `Sequences`."""

    def __init__(self, layer: nn.Module, call: Call, prepared: type[Products]):
        # Tokens are cast once for both products.
        super().__init__(layer, call._replace(x=call.x.to(product_dtype(call.x))))
        self.products = prepared(layer, self.call)

    @staticmethod
    def why_not(signature: Signature) -> str:
        s = signature
        reason = nothing_to_skip(s) or hidden_weights(s)
        if reason:
            return reason
        if not s.one_weight() and s.path == "triton":
            # On a GPU, products with gathered weights are slower than all groups; only `LookedUpProducts` are faster.
            reason = not_tiled(s)
        if not reason and s.mode == "compiled" and not s.counted:
            reason = GROUPS_VARY
        return reason

    @staticmethod
    def pays_up_to(signature: Signature) -> float:
        # Slices of weights are small beside the products that they save; the other forms are measured first.
        if signature.one_weight() and signature.device.type == "cpu":
            return known.share_of_sliced()
        return 0.0

    @staticmethod
    def prepare(signature: Signature) -> type[Products]:
        return products_of(signature, not_tiled(signature))

    def project(self) -> Tensor:
        """Return the hidden channels of the groups that run, before the activation: [B, N, K, D]."""
        fc1 = self.layer.fc1
        return self.products.linear(self.call.x, fc1.weight, fc1.bias)

    def combine(self, hidden: Tensor) -> Tensor:
        """Weigh and project hidden [B, N, K, D] to y [B, N, C]."""
        fc2 = self.layer.fc2
        return self.products.combine(hidden, fc2.weight, cast_bias(fc2.bias, hidden.dtype))
