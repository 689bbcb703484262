"""Forwards to `moh_vision.diffusion.latents`."""

from moh_vision.diffusion.latents import *  # noqa: F403
