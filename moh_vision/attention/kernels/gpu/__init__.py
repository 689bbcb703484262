"""The operators in Triton, for GPUs; importing this imports Triton. `moh_vision.attention.kernels` says what they mean."""

from moh_vision.attention.kernels.gpu.library import attend, combine_heads, decode, project_heads

__all__ = ["attend", "combine_heads", "decode", "project_heads"]
