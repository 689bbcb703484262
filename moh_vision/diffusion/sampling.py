"""Class-conditional sampling with classifier-free guidance, on diffusers' schedulers."""

from typing import Callable, Iterable, Optional, Sequence

import torch
from torch import Tensor

from moh_vision.diffusion.hybrid_loss import BETA_END, BETA_START, NUM_TIMESTEPS

SAMPLERS = ("ddpm", "ddim")


def make_scheduler(sampler: str, num_steps: int, learned_variance: bool, clip: bool):
    """A diffusers scheduler set to `num_steps`.

    Args:
        sampler: "ddpm": the official DiT's, with its respaced steps ('linspace'); "ddim": deterministic ('leading',
            the official step set).
        learned_variance: the model predicts the variance's interpolation, which DDPM uses.
        clip: clip the predicted image to [-1, 1]; for pixels, not for latents.

    Raises:
        ValueError: for an unknown sampler or number of steps.
    """
    from diffusers import DDIMScheduler, DDPMScheduler

    if sampler not in SAMPLERS:
        raise ValueError(f"sampler {sampler!r} is not one of {', '.join(SAMPLERS)}")
    if not 1 <= num_steps <= NUM_TIMESTEPS:
        raise ValueError(f"steps {num_steps} is out of range: 1 to {NUM_TIMESTEPS}")
    common = dict(
        num_train_timesteps=NUM_TIMESTEPS,
        beta_schedule="linear",
        beta_start=BETA_START,
        beta_end=BETA_END,
        clip_sample=clip,
    )
    if sampler == "ddpm":
        variance = "learned_range" if learned_variance else "fixed_small"
        scheduler = DDPMScheduler(**common, variance_type=variance, timestep_spacing="linspace")
    else:
        scheduler = DDIMScheduler(**common, timestep_spacing="leading")
    scheduler.set_timesteps(num_steps)
    return scheduler


@torch.no_grad()
def sample_images(
    predict: Callable[[Tensor, Tensor, Tensor], Tensor],
    scheduler,
    labels: Tensor,
    shape: Sequence[int],
    seeds: Iterable[int],
    null_label: int,
    guidance: float = 1.0,
    on_step: Optional[Callable[[], None]] = None,
) -> Tensor:
    """Sample one image per label.

    The noise of an image, at the start and at every step, comes from its own seed: it does not depend on the images
    beside it.

    Args:
        predict: (x [n, C, h, w], t [n], labels [n]) -> noise [n, C, h, w], or [n, 2C, h, w] with the learned variance.
        scheduler: of `make_scheduler`.
        labels: [B] classes.
        shape: (C, h, w).
        seeds: B whole numbers.
        null_label: the label that means "no class".
        guidance: s in eps = eps(none) + s * (eps(class) - eps(none)); 1: no guidance, half the work.
        on_step: called after every step.

    Returns:
        [B, C, h, w]
    """
    generators = [torch.Generator().manual_seed(s) for s in seeds]
    x = torch.stack([torch.randn(tuple(shape), generator=g) for g in generators]).to(labels.device)
    channels = shape[0]
    guided = guidance != 1.0
    both = torch.cat([labels, torch.full_like(labels, null_label)]) if guided else labels
    for t in scheduler.timesteps:
        out = predict(torch.cat([x, x]) if guided else x, t.to(x.device).expand(len(both)), both).float()
        if guided:
            cond, uncond = out.chunk(2)
            eps = uncond[:, :channels] + guidance * (cond[:, :channels] - uncond[:, :channels])
            out = torch.cat([eps, cond[:, channels:]], dim=1)
        if getattr(scheduler, "variance_type", None) != "learned_range":
            out = out[:, :channels]
        x = scheduler.step(out, t, x, generator=generators).prev_sample  # DDIM with eta = 0 draws nothing
        if on_step is not None:
            on_step()
    return x


def to_uint8(images: Tensor) -> Tensor:
    """[-1, 1] -> 0 .. 255, rounded."""
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
