"""The operators in Triton, for GPUs; importing this imports Triton. `moh_vision.attention.kernels` says what they mean."""

from moh_vision.attention.kernels.gpu.library import OPS, attend

pairs = OPS.pairs  # the list of `active`, see `route.pairs`

__all__ = ["attend", "pairs"]
