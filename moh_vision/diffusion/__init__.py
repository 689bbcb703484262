"""Diffusion: training, objectives, stored latents, sampling with diffusers' schedulers, and the pipeline."""

from typing import TYPE_CHECKING, Any

from moh_vision.diffusion.objectives import OBJECTIVES, FlowMatchingLoss, HybridLoss, Objective
from moh_vision.diffusion.sampling import Guidance, sample_images
from moh_vision.diffusion.schedulers import SAMPLERS, Sampler, make_scheduler
from moh_vision.models.prediction import Prediction

if TYPE_CHECKING:
    from moh_vision.diffusion.pipeline import MoHDiTPipeline

__all__ = [
    "OBJECTIVES",
    "SAMPLERS",
    "FlowMatchingLoss",
    "Guidance",
    "HybridLoss",
    "MoHDiTPipeline",
    "Objective",
    "Prediction",
    "Sampler",
    "make_scheduler",
    "sample_images",
]


def __getattr__(name: str) -> Any:
    if name == "MoHDiTPipeline":  # imported on first use: importing diffusers takes seconds
        from moh_vision.diffusion.pipeline import MoHDiTPipeline

        return MoHDiTPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
