"""The operators in Triton, for GPUs; importing this imports Triton. `moh_vision.attention.kernels` says what they mean."""

from moh_vision.attention.kernels.gpu.library import attend

__all__ = ["attend"]
