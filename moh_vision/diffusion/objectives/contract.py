"""The contract of an objective: what a diffusion model is trained for."""

import inspect
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from torch import Tensor, nn

from moh_vision.common.errors import closest
from moh_vision.models.prediction import Prediction

NUM_TIMESTEPS = 1000


class Objective(nn.Module):
    """Draws timesteps, adds noise, and computes a loss per image; says what its models predict.

    Timesteps go from 0 (clean) to 1000 (noise) everywhere. A subclass has `prediction`, `draw`, `add_noise` and `forward`;
    for the other members there are values here.

    Attributes:
        prediction: what its models predict. From that follow the samplers (`schedulers.SAMPLERS`), which models may guide
            each other, and what weights and pipelines keep.
        learn_sigma: whether its models predict the variance of a step, too.
        draw: function from a numpy generator to a timestep. It is pickled for the loader's worker processes, so it is a
            function of a module, or `functools.partial` of one.
        keys: patterns, separated by spaces, of the keys of a run's configuration that it reads; an objective with other keys
            makes them refused. The constructor's arguments as `objective_kwargs`, unless `from_config` reads others.
    """

    prediction: Prediction
    learn_sigma: bool = False
    draw: Callable[[np.random.Generator], float]
    keys: str = "objective_kwargs"

    @classmethod
    def from_config(cls, config: dict) -> Self:
        """Make the objective from its keys in a run's configuration, given as nested plain values."""
        options = config.get("objective_kwargs") or {}
        known = inspect.signature(cls).parameters
        for name in options:
            if name not in known:
                allowed = closest(name, known) if known else "it has no options"
                raise ValueError(
                    f"objective_kwargs.{name}: no such option of the objective, {allowed}"
                )
        return cls(**options)

    @classmethod
    def complete(cls, config: Any, prediction: Prediction) -> None:
        """Set keys of a new run's configuration that are left out to what its model predicts by itself."""

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return x_t [B, C, h, w] of images x0 and N(0, 1) noise [B, C, h, w] at t [B]."""
        raise NotImplementedError

    def weighted(self, squared_error: Tensor, t: Tensor) -> Tensor:
        """Return squared errors [B] of predictions at t [B], weighted as "loss" weights them; here by 1.

        A teacher's term is weighted so, too.
        """
        return squared_error

    def forward(
        self, output: Tensor, x0: Tensor, xt: Tensor, noise: Tensor, t: Tensor
    ) -> dict[str, Tensor]:
        """Return [B] tensors: "loss", "mse", and others to be logged; with `learn_sigma` "vb", the variance's part of "loss".

        Args:
            output: `prediction.output` [B, C, h, w]; with `learn_sigma` [B, 2C, h, w].
            x0, xt, noise: the image, the noisy image and the noise that `add_noise` got, [B, C, h, w].
            t: [B].
        """
        raise NotImplementedError
