"""Diffusion: training, objectives, stored latents, sampling with diffusers' schedulers, and the pipeline."""

from typing import TYPE_CHECKING, Any

from moh_vision.diffusion.objectives import FlowMatchingLoss, HybridLoss
from moh_vision.diffusion.sampling import SAMPLERS, Guidance, make_scheduler, sample_images

if TYPE_CHECKING:
    from moh_vision.diffusion.pipeline import MoHDiTPipeline

__all__ = [
    "SAMPLERS",
    "FlowMatchingLoss",
    "Guidance",
    "HybridLoss",
    "MoHDiTPipeline",
    "make_scheduler",
    "sample_images",
]


def __getattr__(name: str) -> Any:
    if name == "MoHDiTPipeline":  # importing diffusers takes seconds
        from moh_vision.diffusion.pipeline import MoHDiTPipeline

        return MoHDiTPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
