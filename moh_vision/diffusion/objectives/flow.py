"""SiT's flow matching on the linear path (Lipman 2023; Ma 2024). diffusers does not have this loss."""

import inspect
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from moh_vision.diffusion.objectives.contract import NUM_TIMESTEPS, Objective
from moh_vision.engine.keys import Section, key
from moh_vision.models.prediction import LEAST, LINEAR, PREDICTS, Prediction, to_velocity

TIMESTEPS = ("uniform", "logit-normal")


@dataclass
class FlowConfig(Section, section="flow"):
    """Flow matching, objective flow; see `moh_vision.diffusion.objectives.FlowMatchingLoss`."""

    predict: Literal["velocity", "x", "noise"] = key("velocity")
    """What the network predicts; "x", the image, learns from large patches of pixels (JiT, Li and He 2025). Samplers see
    its velocity."""
    loss: Literal["velocity", "x", "noise"] = key("velocity")
    """What the loss compares: the velocity, the image or the noise that follow from the prediction, with the true ones
    (Li and He 2025, table 1). JiT: velocity."""
    timesteps: Literal["uniform", "logit-normal"] = key("uniform")
    """How times are drawn from 0 (clean) to 1 (noise): "uniform", or "logit-normal", more of them in between."""
    location: float = key(0.0, ge=-10, le=10, needs=".timesteps=logit-normal")
    """Mean of the normal whose sigmoid the time is; above 0 nearer to the noise. JiT: 0.8."""
    spread: float = key(1.0, gt=0, needs=".timesteps=logit-normal")
    """Standard deviation of that normal. JiT: 0.8."""
    shift: float = key(1.0, gt=0)
    """Above 1, moves times towards the noise, for larger latents (Esser 2024, eq. 23): about the side over the side at
    which 1 was right. RAE: the root of channels * side ** 2 / 4096 (Zheng 2025)."""
    noise_scale: float | None = key(None, gt=0)
    """Standard deviation of the noise, in training and sampling; left out: the model's, 2 of jit_*_patch32 (JiT for 512
    pixels) and 1 of others."""


def draw_time(
    rng: np.random.Generator, sampling: str, shift: float, location: float, spread: float
) -> np.float32:
    """Draw a real timestep, 0 .. 1000, which is 1000 times the t of `FlowMatchingLoss`.

    Args:
        rng: generator for the position of the sample.
        sampling: `timesteps` of `FlowMatchingLoss`.
        shift, location, spread: as in `FlowMatchingLoss`.
    """
    if sampling == "uniform":
        t = rng.random()
    else:
        t = 1 / (1 + math.exp(-location - spread * rng.standard_normal()))
    return np.float32(NUM_TIMESTEPS * shifted(t, shift))


def shifted(t, shift: float):
    """Return times of a flow, moved towards the noise (Esser 2024, eq. 23); 1 / shift is the inverse of shift."""
    return shift * t / (1 + (shift - 1) * t)


class FlowMatchingLoss(Objective):
    """Squared error of the velocity on the straight path from an image to noise, or of its ends, per image.

    x_t = (1 - t) x_0 + t eps, with the velocity dx_t / dt = eps - x_0 as target (the linear interpolant of Ma
    2024; Lipman 2023, eq. 23 with sigma_min = 0 and time reversed). Models and schedulers get 1000 t.
    eps is the noise that a batch brings, N(0, 1), times `noise_scale`.

    Args:
        predict: what the network predicts, one of `PREDICTS`. The model turns its prediction into a velocity with
            `to_velocity`; the target is the exact prediction after the same `to_velocity`, as in JiT (Li and He
            2025).
        timesteps: how t is drawn: "uniform", or "logit-normal", a sigmoid of N(location, spread^2) (Esser 2024, 3.1).
        location, spread: mean and standard deviation of that normal.
        shift: above 1, moves the drawn t towards the noise, t = 1 (Esser 2024, eq. 23, shift = sqrt(m / n)).
        noise_scale: standard deviation of eps. Larger images need more noise to hide as much of them: 2 in JiT's models
            of 512 pixels.
        loss: whose squared error "loss" is, one of `PREDICTS` (Li and He 2025, table 1): "velocity", "x" for x_0, or
            "noise" for eps. "mse" is the velocity's in any case.
    """

    prediction = Prediction(LINEAR, "velocity")
    keys = "flow.*"

    def __init__(
        self,
        predict: str = "velocity",
        timesteps: str = "uniform",
        location: float = 0.0,
        spread: float = 1.0,
        shift: float = 1.0,
        noise_scale: float = 1.0,
        loss: str = "velocity",
    ):
        super().__init__()
        for name, text, allowed in (
            ("predict", predict, PREDICTS),
            ("loss", loss, PREDICTS),
            ("timesteps", timesteps, TIMESTEPS),
        ):
            if text not in allowed:
                raise ValueError(f"flow.{name} {text!r} is not one of {', '.join(allowed)}")
        for name, number, above in (
            ("shift", shift, 0),
            ("spread", spread, 0),
            ("noise_scale", noise_scale, 0),
            ("location", location, -math.inf),
        ):
            if not (isinstance(number, (int, float)) and above < number < math.inf):
                raise ValueError(f"flow.{name} {number!r} is out of range: above {above}")
        self.loss = loss
        self.prediction = Prediction(LINEAR, predict, noise_scale, shift)
        self.draw = partial(
            draw_time, sampling=timesteps, shift=shift, location=location, spread=spread
        )

    @classmethod
    def from_config(cls, config: dict) -> Self:
        section = config.get("flow")
        if not isinstance(section, dict):
            raise ValueError(f"flow {section!r}: expected the section of keys of objective flow")
        known = inspect.signature(cls).parameters
        return cls(**{name: value for name, value in section.items() if name in known})

    @classmethod
    def complete(cls, config: Any, prediction: Prediction) -> None:
        if config.flow.noise_scale is None:
            config.flow.noise_scale = prediction.noise_scale

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return x_t of x0 and N(0, 1) noise [B, C, h, w] at t [B], 0 .. 1000."""
        t = (t / NUM_TIMESTEPS).to(x0.dtype).view(-1, *[1] * (x0.ndim - 1))  # [B, 1, 1, 1]
        return (1 - t) * x0 + t * (self.prediction.noise_scale * noise)

    def weighted(self, squared_error: Tensor, t: Tensor) -> Tensor:
        """Return squared errors [B] of velocities at t [B], 0 .. 1000, as those of what `loss` names.

        At a given x_t the image is x_t - t v and the noise x_t + (1 - t) v, so an error of the velocity is t or 1 - t times
        as large in them. What the network itself predicts was divided by max(t, 0.05) or max(1 - t, 0.05) to become a
        velocity, and is multiplied by the same.
        """
        if self.loss == "velocity":
            return squared_error
        t = (t / NUM_TIMESTEPS).to(squared_error.dtype)
        scale = t
        if self.loss == "noise":
            scale = 1 - t
        if self.loss == self.prediction.predict:
            scale = scale.clamp(min=LEAST)
        return scale.square() * squared_error

    def forward(
        self, output: Tensor, x0: Tensor, xt: Tensor, noise: Tensor, t: Tensor
    ) -> dict[str, Tensor]:
        """Return loss, of what `self.loss` names, and mse, of the velocity, [B] each.

        Args:
            output: velocity [B, C, h, w].
            x0, xt, noise: the image, the noisy image and the noise that `add_noise` got, [B, C, h, w].
            t: [B], 0 .. 1000.
        """
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        predict = self.prediction.predict
        eps = self.prediction.noise_scale * noise
        exact_prediction = dict(velocity=eps - x0, x=x0, noise=eps)[predict]
        target = to_velocity(predict, exact_prediction, xt, t)
        mse = (output - target).square().flatten(1).mean(1)  # [B]
        return dict(loss=self.weighted(mse, t), mse=mse)
