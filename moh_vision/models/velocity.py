"""Turn what a flow-matching network predicts into our velocity, and our timesteps into the time of SiT's and JiT's networks."""

import torch
from torch import Tensor

PREDICTS = ("velocity", "x", "noise")
LEAST = 0.05  # smallest divisor: JiT's t_eps
# `compat` of networks whose released weights read a time from 0 (noise) to 1 (image) -> their name, and what they predict.
FROM_NOISE = {"sit": ("SiT", "velocity"), "jit": ("JiT", "x")}


def to_velocity(predict: str | None, output: Tensor, xt: Tensor, timestep: Tensor) -> Tensor:
    """Return the velocity eps - x_0 that an output [B, C, h, w] stands for (Li and He 2025, table 1, time reversed).

    x_t = (1 - t) x_0 + t eps [B, C, h, w], and timestep = 1000 t, [B] or a scalar. If the output predicts "x", the
    image x_0, the velocity is (x_t - x_0) / t; if it predicts "noise", (eps - x_t) / (1 - t). Divisors are at least
    0.05. Any other output is a velocity already, and returned unchanged.
    """
    if predict not in ("x", "noise"):
        return output
    output = output.to(torch.promote_types(output.dtype, torch.float32))
    t = (timestep / 1000).to(output.dtype).view(-1, *[1] * (xt.ndim - 1))  # [B, 1, 1, 1]
    if predict == "x":
        return (xt - output) / t.clamp(min=LEAST)
    return (output - xt) / (1 - t).clamp(min=LEAST)


def time_from_noise(timestep: Tensor) -> Tensor:
    """Return the time of SiT's and JiT's released networks, from 0 (noise) to 1 (image).

    timestep: any shape, from 0 (image) to 1000 (noise).
    """
    return 1 - timestep.float() / 1000
