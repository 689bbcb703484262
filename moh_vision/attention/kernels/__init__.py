"""The operators under the executors: compiled C++ where they are built, plain PyTorch where not."""

from moh_vision.attention.kernels.build import path, use

__all__ = ["path", "use"]
