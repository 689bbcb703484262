"""Diffusion: training, objectives, inputs and stored latents, sampling with diffusers' schedulers, the pipeline."""

from moh_vision.diffusion.objectives import FlowMatchingLoss, HybridLoss
from moh_vision.diffusion.sampling import SAMPLERS, Guidance, make_scheduler, sample_images

__all__ = [
    "SAMPLERS",
    "FlowMatchingLoss",
    "Guidance",
    "HybridLoss",
    "MoHDiTPipeline",
    "make_scheduler",
    "sample_images",
]


def __getattr__(name: str):
    if name == "MoHDiTPipeline":  # its base class takes diffusers, which takes seconds to import
        from moh_vision.diffusion.pipeline import MoHDiTPipeline

        return MoHDiTPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
