"""`Sequences` skips whole heads, keys and values included, where heads are chosen once for a sequence."""

from typing import NamedTuple

from torch import Tensor, nn

from moh_vision.attention import kernels
from moh_vision.attention.executors.executor import Executor
from moh_vision.attention.executors.known import share_of_gathered
from moh_vision.attention.executors.masked import attend
from moh_vision.attention.executors.products import Products, products_of
from moh_vision.attention.executors.reasons import (
    HEADS_VARY,
    not_looked_up,
    not_whole_heads,
    nothing_to_skip,
    path_of,
)
from moh_vision.attention.executors.signature import Signature
from moh_vision.attention.linear import cast_bias, product_dtype
from moh_vision.attention.routing import Call


class PreparedSequences(NamedTuple):
    """What is the same in all calls of `Sequences` with one signature."""

    products: type[Products]
    in_cpp: bool  # whether the C++ operator attends


class Sequences(Executor):
    """Computes K heads for every sequence. A sequence with fewer active heads also computes some heads of weight 0.

    The products with the weights of these heads are made in one of four forms: where one choice serves all sequences,
    `KernelSlicedProducts` on a GPU in inference and `SlicedProducts` elsewhere; where it does not, `LookedUpProducts` on a
    GPU in inference and `GatheredProducts` elsewhere.
    """

    def __init__(self, layer: nn.Module, call: Call, prepared: PreparedSequences):
        # Tokens are cast once for all products.
        super().__init__(layer, call._replace(x=call.x.to(product_dtype(call.x))))
        self.products = prepared.products(layer, self.call)
        self.in_cpp = prepared.in_cpp

    @staticmethod
    def why_not(signature: Signature) -> str:
        s = signature
        reason = nothing_to_skip(s) or not_whole_heads(s)
        if reason:
            return reason
        if s.choice != "all" and path_of(s) == "triton":
            # On a GPU, products with gathered weights are slower than all heads; only `LookedUpProducts` are faster.
            reason = not_looked_up(s)
        if not reason and s.mode == "compiled" and not s.counted:
            reason = HEADS_VARY
        return reason

    @staticmethod
    def pays_up_to(signature: Signature) -> float:
        if signature.mode == "compiled" or path_of(signature) != "cpp":
            return 0.0
        return share_of_gathered(signature.tokens)

    @staticmethod
    def prepare(signature: Signature) -> PreparedSequences:
        products = products_of(signature, not_looked_up(signature))
        # With 4,096 tokens in bfloat16 `attend_all` takes half of the time of PyTorch's attention.
        return PreparedSequences(products, in_cpp=path_of(signature) == "cpp")

    def project(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, K, N, D], k and v [B, K, M, D]."""
        layer = self.layer
        call = self.call
        context = call.x
        if call.context is not None:
            context = call.context.to(call.x.dtype).expand(call.x.shape[0], -1, -1)
        q, k, v = self.products.project(call.x, context)
        q = layer.prepare_queries(q, call.rotary).to(v.dtype)
        k = layer.prepare_keys(k, call.rotary).to(v.dtype)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the outputs of the heads that run [B, K, N, D]."""
        call = self.call
        mask = call.attn_mask
        if mask is not None and mask.shape[1] > 1:  # one mask per head: pick the heads that run
            B = q.shape[0]
            heads = self.products.heads.long().expand(B, -1)[:, :, None, None]
            mask = mask.expand(B, -1, -1, -1)
            mask = mask.gather(1, heads.expand(-1, -1, *mask.shape[2:]))
        if self.in_cpp:
            return kernels.attend_all(q, k, v, call.is_causal, mask)
        return attend(q, k, v, mask, call.is_causal, call.dropout_p)

    def combine(self, o: Tensor) -> Tensor:
        """Weigh and project the outputs of the heads that run, o [B, K, N, D], to y [B, N, C]."""
        proj = self.layer.proj
        bias = cast_bias(proj.bias, o.dtype)
        return self.products.combine(o.transpose(1, 2), proj.weight, bias)
