"""Gaussian diffusion around a model that is handed in: the training loss, and sampling with diffusers' schedulers."""

from moh_vision.diffusion.hybrid_loss import HybridLoss
from moh_vision.diffusion.sampling import SAMPLERS, Guidance, make_scheduler, sample_images

__all__ = ["SAMPLERS", "Guidance", "HybridLoss", "make_scheduler", "sample_images"]
