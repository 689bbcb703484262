"""`InPlace` skips attention alone, for heads chosen per token or sequence: by Triton, or in 16 bits by C++."""

from torch import Tensor, nn

from moh_vision.attention import kernels
from moh_vision.attention.executors.executor import Executor
from moh_vision.attention.executors.reasons import (
    has_products,
    no_operator,
    nothing_to_skip,
    path_of,
    unlisted,
)
from moh_vision.attention.executors.signature import Signature
from moh_vision.attention.routing import Call


class InPlace(Executor):
    """Projects all heads. One operator attends for the pairs that run and writes weighted outputs where `proj` reads them.

    This suits devices and dtypes whose products are so fast that leaving rows out gains less than gathering them costs.
    """

    @staticmethod
    def why_not(signature: Signature) -> str:
        reason = nothing_to_skip(signature) or no_operator(signature)
        if reason or path_of(signature) == "triton":
            return reason
        if has_products(signature):
            return "in float32 the C++ operators leave out products too"
        return unlisted(signature)

    @staticmethod
    def pays_up_to(signature: Signature) -> float:
        return 1.0 if path_of(signature) == "cpp" else 0.0

    def project(self) -> tuple[Tensor, ...]:
        """Return queries, keys and values as one product [B, N, (H + 2 * G) * D], if attention can read them from it.

        Else q [B, H, N, D], k and v [B, G, M, D].
        """
        product = readable_product(self.layer, self.call)
        if product is None:
            return self.layer.project(self.call)
        return (product,)

    def attend(self, *projected: Tensor) -> Tensor:
        """Return the weighted outputs of the heads [B, N, H*D], from what `project` returned."""
        call = self.call
        if len(projected) == 1:
            # In backward the operator writes one gradient of the product; autograd need not join those of q, k and v.
            return kernels.attend_product(
                projected[0],
                self.layer.num_heads,
                self.layer.kv_heads,
                call.routing,
                call.is_causal,
                call.attn_mask,
            )
        q, k, v = projected
        B = q.shape[0]
        q = q.to(v.dtype)
        k = k.to(v.dtype).expand(B, -1, -1, -1)
        v = v.expand(B, -1, -1, -1)
        return kernels.attend_in_place(q, k, v, call.routing, call.is_causal, call.attn_mask)

    def combine(self, o: Tensor) -> Tensor:
        """Project o [B, N, H*D] to [B, N, C]."""
        return self.layer.proj(o)


def readable_product(layer: nn.Module, call: Call) -> Tensor | None:
    """Return queries, keys and values as one product [B, N, (H + 2 * G) * D], if attention can read them from it.

    None if they are not projected together, or a norm or rotation still has to change them.
    """
    if layer.qk_norm or call.rotary is not None:
        return None
    if call.product is not None:
        return call.product
    if call.q is not None or call.context is not None or call.cache is not None:
        return None
    if not layer.projects_at_once():
        return None
    return layer.qkv(call.x)
