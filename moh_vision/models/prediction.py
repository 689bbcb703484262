"""What a diffusion model predicts, and our timesteps as the time of SiT's and JiT's networks.

A path leads from an image x_0, timestep 0, to noise eps, timestep 1000. Two paths are known here:
    "ddpm"      x_t = sqrt(alpha_bar_t) x_0 + sqrt(1 - alpha_bar_t) eps, 1000 steps (Ho 2020)
    "linear"    x_t = (1 - t) x_0 + t eps with t = timestep / 1000 (Lipman 2023; Ma 2024)
An objective of a user's own may have a path with another name.
"""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor, nn

DDPM = "ddpm"
LINEAR = "linear"
PREDICTS = ("velocity", "x", "noise")
LEAST = 0.05  # smallest divisor: JiT's t_eps
# `compat` of networks whose released weights read a time from 0 (noise) to 1 (image) -> their name, and what they predict.
FROM_NOISE = {"sit": ("SiT", "velocity"), "jit": ("JiT", "x")}


@dataclass(frozen=True)
class Prediction:
    """What a model predicts. An objective gives it to its models, and their weights keep it.

    Args:
        path: name of the path from image to noise.
        predict: what the network predicts: "noise", "velocity" (dx_t / dt along the path) or "x", the image x_0.
        noise_scale: standard deviation of the noise at the end of the path; 2 in JiT's models of 512 pixels. Samplers
            begin from such noise.
        shift: factor by which training moved times towards the noise, see `FlowMatchingLoss`; samplers move theirs as far.
    """

    path: str = DDPM
    predict: str = "noise"
    noise_scale: float = 1.0
    shift: float = 1.0

    def __post_init__(self):
        if not isinstance(self.path, str) or not self.path:
            raise ValueError(f"prediction.path {self.path!r} is no name")
        if self.predict not in PREDICTS:
            raise ValueError(
                f"prediction.predict {self.predict!r} is not one of {', '.join(PREDICTS)}"
            )
        for key in ("noise_scale", "shift"):
            number = getattr(self, key)
            is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
            if not is_number or not 0 < number < math.inf:
                raise ValueError(f"prediction.{key} {number!r} is out of range: above 0")
        if self.path == DDPM and (self.predict, self.noise_scale, self.shift) != ("noise", 1, 1):
            raise ValueError(
                f"prediction {self.tree()}: on path {DDPM} it is noise of N(0, 1), without a shift"
            )

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return the prediction that an argument of a model says: one, a mapping as `tree` returns it, or None for DDPM's."""
        if isinstance(value, cls):
            return value
        if value is None:
            return cls()
        known = [field.name for field in fields(cls)]
        if not isinstance(value, dict) or not set(value) <= set(known):
            raise ValueError(f"prediction {value!r}: expected a mapping of {', '.join(known)}")
        return cls(**value)

    def tree(self) -> dict:
        """Return the prediction as plain values, which weights and configurations keep."""
        return asdict(self)

    @property
    def output(self) -> str:
        """What the model gives to samplers and to the loss. On the linear path that is always the velocity."""
        if self.path == LINEAR:
            return "velocity"
        return self.predict

    def to_output(self, network: Tensor, xt: Tensor, timestep: Tensor) -> Tensor:
        """Return the model's `output` [B, C, h, w] from what its network predicts at x_t and timestep.

        On paths other than the linear one the network predicts the output itself.
        """
        if self.path == LINEAR:
            return to_velocity(self.predict, network, xt, timestep)
        return network

    def __str__(self) -> str:
        """The prediction in words, for messages."""
        return f"{self.predict} on path {self.path}"


def other_training(
    model: nn.Module, trained: Prediction | None, arguments: dict, source: str
) -> list[str]:
    """Return a line for each way in which a diffusion model differs from the training of its weights, unseen by shapes.

    Args:
        model: has the weights.
        trained: what the weights were trained to predict; None: their file does not say.
        arguments: those of the model that the weights were trained in; {}: their file does not say.
        source: where the weights are from, for the lines.
    """
    config = model.config
    now = prediction_said(model.prediction, config.compat)
    if trained is not None:
        before = prediction_said(trained, arguments.get("compat", "official"))
    elif config.compat == "sit":
        before = now  # a file of SiT's does not say what it is: it is taken for what the model is
    else:
        before = str(Prediction())  # other files that say nothing are of DiTs
    lines = []
    if before != now:
        lines.append(f"{source} was trained to predict {before}, this model predicts {now}")
    # Argument -> its value where the weights do not say it. DiT and SiT have no rotary positions.
    unseen: dict[str, Any] = {"use_rot_pos_emb": False}
    if config.class_tokens:
        unseen["class_tokens_start"] = config.class_tokens_start
    for key, otherwise in unseen.items():
        before = str(arguments.get(key, otherwise)).lower()
        now = str(config[key]).lower()
        if before != now:
            lines.append(
                f"{source} was trained with {key} {before}, this model with {now} (model.kwargs)"
            )
    return lines


def prediction_said(prediction: Prediction, compat: str) -> str:
    """Return a prediction as text, with what distinguishes it from one in our time and of N(0, 1).

    Args:
        prediction: the model's.
        compat: the model's.
    """
    details = []
    if compat in FROM_NOISE:
        family, _ = FROM_NOISE[compat]
        details.append(f"in {family}'s time")
    if prediction.noise_scale != 1:
        details.append(f"noise_scale {prediction.noise_scale:g}")
    if not details:
        return str(prediction)
    return f"{prediction} ({', '.join(details)})"


def to_velocity(predict: str, output: Tensor, xt: Tensor, timestep: Tensor) -> Tensor:
    """Return the velocity eps - x_0 that an output [B, C, h, w] stands for (Li and He 2025, table 1, time reversed).

    x_t = (1 - t) x_0 + t eps [B, C, h, w], and timestep = 1000 t, [B] or a scalar. If the output predicts "x", the
    image x_0, the velocity is (x_t - x_0) / t; if it predicts "noise", (eps - x_t) / (1 - t). Divisors are at least
    0.05. A velocity is returned unchanged.
    """
    if predict == "velocity":
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
