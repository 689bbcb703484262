"""`Executor`: what every executor is, and what the layer asks of it."""

from torch import Tensor, nn

from moh_vision.attention.routing import Call


class Executor:
    """One call of a layer. It does the work of equation (*) in three steps, and equals `Reference` in each result.

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

        compiling: as under torch.compile. Only sizes and settings may decide then, never the values of tensors.
        """
        return ""

    @staticmethod
    def pays_up_to(layer: nn.Module, call: Call, compiling: bool) -> float:
        """Return up to which share of the heads skipping is known to take less time than all heads, without measuring.

        0 where nothing is known, see `known`. compiling: as under torch.compile.
        """
        return 0.0

    def project(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, ready for attention, in a form that `attend` reads."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the outputs of the heads, in a form that `combine` reads."""
        raise NotImplementedError

    def combine(self, o: Tensor) -> Tensor:
        """Return the weighted sum of the heads' outputs, through W_O: [B, N, C]."""
        raise NotImplementedError
