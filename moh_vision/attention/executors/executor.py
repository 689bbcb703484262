"""`Executor`, the base class of all executors."""

from typing import Any

from torch import Tensor, nn

from moh_vision.attention.executors.signature import Signature
from moh_vision.attention.linear import apply_linear
from moh_vision.attention.routing import Call


class Executor:
    """Computes equation (*) for one call of a layer, in three steps. Output and gradients equal those of `Reference`.

    Args:
        layer: a HeadMixtureAttention, whose projections are used.
        call: what the layer was called with, after routing.
        prepared: what `prepare` made of the call's signature.
    """

    def __init__(self, layer: nn.Module, call: Call, prepared: Any = None):
        self.layer = layer
        self.call = call

    @staticmethod
    def why_not(signature: Signature) -> str:
        """Return why this executor cannot run calls with a signature; "" where it can."""
        return ""

    @staticmethod
    def pays_up_to(signature: Signature) -> float:
        """Return the largest share of active heads with which this executor is known to be faster than all heads.

        0 where nothing is known without measuring, see `known`.
        """
        return 0.0

    @staticmethod
    def prepare(signature: Signature) -> Any:
        """Decide what is the same in all calls with a signature; it is kept in their plan and given to the constructor."""
        return None

    @classmethod
    def attends_product(cls, prepared: Any) -> bool:
        """Return whether attention of this class reads one product of all queries, keys and values.

        The operator that makes the product then attends too, see `plan.operator_of`.

        prepared: what `prepare` returned.
        """
        return False

    def output(self, o: Tensor) -> Tensor:
        """Project the joined and weighted outputs of the heads, o [B, N, H*D], to y [B, N, C]."""
        proj = self.layer.proj
        if self.call.mode == "eager":
            return apply_linear(proj, o)
        return proj(o)

    def project(self) -> tuple[Tensor, ...]:
        """Return queries, keys and values, normalised and rotated, in the form that `attend` of this class reads."""
        raise NotImplementedError

    def attend(self, *projected: Tensor) -> Tensor:
        """Return the outputs of the heads, in the layout that `combine` of this class reads.

        projected: what `project` returned.
        """
        raise NotImplementedError

    def combine(self, o: Tensor) -> Tensor:
        """Return y [B, N, C]: weigh the outputs of the heads, project them by W_O and sum over heads."""
        raise NotImplementedError
