"""How noise becomes images: a strip (.png) or an animation (.gif)."""

from __future__ import annotations

from pathlib import Path
from typing import Optional, Sequence

import torch
from torch import Tensor

from moh_vision.diffusion.image_grid import draw_image_grid, image_grid
from moh_vision.diffusion.pipeline import MoHDiTPipeline
from moh_vision.diffusion.sampling import to_uint8

IMAGES = 8
MOMENTS = {".png": 8, ".gif": 25}  # by the file's ending, at most
FRAME_MS, LAST_FRAME_MS = 120, 2000


class Denoising:
    """Collects what a sampler holds after some of its steps; latents are decoded.

    A .png has a row per image with its timesteps; a .gif shows the images side by side.
    """

    def __init__(self, path: str, steps: int):
        self.path, self.frames, self.times = path, [], []
        count = min(steps, MOMENTS[path[-4:]])
        self.moments = torch.linspace(0, steps - 1, count).round().int().tolist() if count > 1 else [steps - 1]

    def add(self, pipe: MoHDiTPipeline, step: int, timestep: Tensor, inputs: dict) -> None:
        """Keep the images if `step` is one to show; for `callback_on_step_end`."""
        if step in self.moments:
            self.frames.append(to_uint8(pipe.decode(inputs["latents"][:IMAGES])).cpu())
            after = pipe.scheduler.timesteps[step + 1 : step + 2].tolist()
            self.times.append(f"t={after[0]:.0f}" if after else "image")

    def save(self, names: Optional[Sequence[str]] = None) -> None:
        """Write the file; `names` of the images, such as their classes, label rows of a .png."""
        if self.path.endswith(".png"):
            strip = torch.stack(self.frames, dim=1).flatten(0, 1)  # [images * moments, C, h, w]
            return draw_image_grid(strip, len(self.frames), self.path, names=names, above=self.times)
        pictures = [image_grid(frame, min(4, len(frame))) for frame in self.frames]
        times = [FRAME_MS] * (len(pictures) - 1) + [LAST_FRAME_MS]
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        pictures[0].save(self.path, save_all=True, append_images=pictures[1:], duration=times, loop=0)
