"""`Sequences` skips whole heads, keys and values included, where heads are chosen once for a sequence."""

from torch import Tensor, nn

from moh_vision.attention import kernels
from moh_vision.attention.executors.executor import Executor
from moh_vision.attention.executors.known import share_of_gathered
from moh_vision.attention.executors.masked import attend
from moh_vision.attention.executors.products import make_products, why_not_looked_up
from moh_vision.attention.executors.reasons import (
    not_whole_heads,
    nothing_to_skip,
    one_choice_for_all,
    path_of,
)
from moh_vision.attention.linear import cast_bias, product_dtype
from moh_vision.attention.routing import Call


class Sequences(Executor):
    """Computes K heads for every sequence. A sequence with fewer active heads also computes some heads of weight 0.

    The products with the weights of these heads are made in one of three forms: `SlicedProducts` where one choice serves all
    sequences, `LookedUpProducts` on a GPU in inference, `GatheredProducts` elsewhere.
    """

    def __init__(self, layer: nn.Module, call: Call):
        # Tokens are cast once for all products.
        super().__init__(layer, call._replace(x=call.x.to(product_dtype(call.x))))
        self.products = make_products(layer, self.call, why_not_looked_up(layer, call))

    @staticmethod
    def why_not(layer: nn.Module, call: Call, compiling: bool) -> str:
        reason = nothing_to_skip(layer, call) or not_whole_heads(layer, call)
        if reason:
            return reason
        if not one_choice_for_all(call) and path_of(layer, call) == "triton":
            # On a GPU, products with gathered weights are slower than all heads; only `LookedUpProducts` are faster.
            reason = why_not_looked_up(layer, call)
        if not reason and compiling and call.routing.count is None:
            reason = "compiled, and the number of heads varies"
        return reason

    @staticmethod
    def pays_up_to(layer: nn.Module, call: Call, compiling: bool) -> float:
        if compiling or path_of(layer, call) != "cpp":
            return 0.0
        return share_of_gathered(call.x.shape[1])

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
        # With 4,096 tokens in bfloat16 `attend_all` takes half of the time of PyTorch's attention.
        if kernels.attend_path(q.device, q.dtype, q.shape[-1], mask, call.dropout_p) == "cpp":
            return kernels.attend_all(q, k, v, call.is_causal, mask)
        return attend(q, k, v, mask, call.is_causal, call.dropout_p)

    def combine(self, o: Tensor) -> Tensor:
        """Weigh and project the outputs of the heads that run, o [B, K, N, D], to y [B, N, C]."""
        proj = self.layer.proj
        bias = cast_bias(proj.bias, o.dtype)
        return self.products.combine(o.transpose(1, 2), proj.weight, bias)
