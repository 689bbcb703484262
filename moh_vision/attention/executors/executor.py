"""`Executor`, the base class of all executors."""

from torch import Tensor, nn

from moh_vision.attention.routing import Call


class Executor:
    """Computes equation (*) for one call of a layer, in three steps. Output and gradients equal those of `Reference`.

    Args:
        layer: a HeadMixtureAttention, whose projections are used.
        call: what the layer was called with, after routing.
    """

    def __init__(self, layer: nn.Module, call: Call):
        self.layer = layer
        self.call = call

    @staticmethod
    def why_not(layer: nn.Module, call: Call, compiling: bool) -> str:
        """Return why this executor cannot run a call; "" where it can.

        Args:
            layer: the layer that is called.
            call: the call, after routing.
            compiling: answer for a compiled call. Then only sizes and settings may decide, never the values of tensors.
        """
        return ""

    @staticmethod
    def pays_up_to(layer: nn.Module, call: Call, compiling: bool) -> float:
        """Return the largest share of active heads with which this executor is known to be faster than all heads.

        0 where nothing is known without measuring, see `known`. Arguments as in `why_not`.
        """
        return 0.0

    def project(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, normalised and rotated, in the layout that `attend` of this class reads."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the outputs of the heads, in the layout that `combine` of this class reads."""
        raise NotImplementedError

    def combine(self, o: Tensor) -> Tensor:
        """Return y [B, N, C]: weigh the outputs of the heads, project them by W_O and sum over heads."""
        raise NotImplementedError
