"""The operators in Triton, for GPUs; importing this imports Triton. `moh_vision.attention.kernels` says what they mean."""

from moh_vision.attention.kernels.gpu.library import OPS, attend, attend_product

pairs = OPS.pairs  # the list of `active`, see `pairs.pairs`
weigh = OPS.weigh  # see `weigh.forward`

__all__ = ["attend", "attend_product", "pairs", "weigh"]
