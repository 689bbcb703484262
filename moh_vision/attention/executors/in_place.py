"""`InPlace` skips attention alone, for heads chosen per token or sequence: by Triton, or in 16 bits by C++."""

from torch import Tensor, nn

from moh_vision.attention import kernels
from moh_vision.attention.executors.executor import Executor
from moh_vision.attention.executors.reasons import (
    PRODUCTS_ARE_SKIPPED_TOO,
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
            return PRODUCTS_ARE_SKIPPED_TOO
        return unlisted(signature)

    @staticmethod
    def pays_up_to(signature: Signature) -> float:
        return 1.0 if path_of(signature) == "cpp" else 0.0

    @staticmethod
    def prepare(signature: Signature) -> bool:
        """Return whether attention reads queries, keys and values from one product.

        It cannot if they are not projected together, or a norm or rotation still has to change them.
        """
        s = signature
        changed = s.qk_norm or s.rotary
        return s.joint is not None and not (changed or s.queries or s.context or s.cache)

    @classmethod
    def attends_product(cls, prepared: bool) -> bool:
        # A subclass that attends in its own way must be asked.
        inherited = cls.project is InPlace.project and cls.attend is InPlace.attend
        return prepared and inherited

    def __init__(self, layer: nn.Module, call: Call, prepared: bool):
        super().__init__(layer, call)
        self.reads_product = prepared

    def project(self) -> tuple[Tensor, ...]:
        """Return queries, keys and values as one product [B, N, (H + 2 * G) * D], or q [B, H, N, D], k and v [B, G, M, D].

        Return nothing where one operator has projected and attended already.
        """
        call = self.call
        if call.attended is not None:
            return ()
        if not self.reads_product:
            return self.layer.project(call)
        if call.product is None:
            return (self.layer.qkv(call.x),)
        return (call.product,)

    def attend(self, *projected: Tensor) -> Tensor:
        """Return the weighted outputs of the heads [B, N, H*D], from what `project` returned."""
        call = self.call
        if call.attended is not None:
            return call.attended
        if self.reads_product:
            # In backward the operator writes one gradient of the product; autograd need not join those of q, k and v.
            return kernels.attend_product(
                *projected,
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
        return self.output(o)
