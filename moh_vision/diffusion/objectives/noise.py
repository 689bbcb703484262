"""DiT's noise prediction with a bound for the learned variance (Ho 2020; Nichol and Dhariwal 2021, eq. 15 and 16).

diffusers does not have this loss.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from moh_vision.diffusion.objectives.contract import NUM_TIMESTEPS, Objective
from moh_vision.engine.keys import Section, key
from moh_vision.models.prediction import Prediction

BETA_START = 1e-4  # betas are linear in t
BETA_END = 0.02


@dataclass
class NoiseKeys(Section):
    """The keys of `HybridLoss`."""

    learn_sigma: bool = key(True)
    """Learn the variance too (hybrid loss), with objective noise."""
    min_snr_gamma: float | None = key(None, gt=0)
    """With objective noise: weigh the squared error by min(SNR, gamma) / SNR, with gamma 5 in Hang 2023."""


def draw_step(rng: np.random.Generator) -> int:
    """Draw a whole timestep, 0 .. 999."""
    return int(rng.integers(NUM_TIMESTEPS))


class HybridLoss(Objective):
    """L_simple + L_t per image, over 1000 steps with linear betas from 1e-4 to 0.02.

    This plain sum is L_hybrid = L_simple + lambda * L_vlb with lambda = 1/1000, since L_vlb = 1000 * E_t[L_t].
    L_t is in bits per dimension. The predicted mean is detached in L_t, so that L_t trains the variance only.

    Args:
        min_snr_gamma: weigh L_simple by min(SNR, gamma) / SNR (Hang 2023, with gamma 5). None: by 1.
        learn_sigma: whether its models predict the variance too.
    """

    prediction = Prediction()
    keys = "learn_sigma min_snr_gamma"
    draw = staticmethod(draw_step)

    def __init__(self, min_snr_gamma: float | None = None, learn_sigma: bool = True):
        super().__init__()
        self.learn_sigma = learn_sigma
        gamma = math.inf if min_snr_gamma is None else min_snr_gamma
        if not (isinstance(gamma, (int, float)) and gamma > 0):
            raise ValueError(f"min_snr_gamma {min_snr_gamma!r} is out of range: above 0")
        beta = torch.linspace(BETA_START, BETA_END, NUM_TIMESTEPS, dtype=torch.float64)
        alpha_bar = (1 - beta).cumprod(0)
        previous = torch.cat([torch.ones(1, dtype=torch.float64), alpha_bar[:-1]])
        posterior = beta * (1 - previous) / (1 - alpha_bar)  # Ho 2020 eq. 7
        # At t = 0 the variance is 0; take that of t = 1, so that the logarithm is finite.
        posterior[0] = posterior[1]
        tables = dict(
            sqrt_alpha_bar=alpha_bar.sqrt(),
            sqrt_one_minus=(1 - alpha_bar).sqrt(),
            log_beta=beta.log(),
            log_posterior=posterior.log(),
            mean_x0=beta * previous.sqrt() / (1 - alpha_bar),  # Ho 2020 eq. 7
            mean_xt=(1 - previous) * (1 - beta).sqrt() / (1 - alpha_bar),
        )
        tables["weight"] = (gamma * (1 - alpha_bar) / alpha_bar).clamp(max=1)
        for name, table in tables.items():
            self.register_buffer(name, table.float(), persistent=False)

    @classmethod
    def from_config(cls, config: dict) -> Self:
        return cls(config.get("min_snr_gamma"), config.get("learn_sigma", True))

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return x_t of q(x_t | x_0), Ho 2020 eq. 4, for x0 and noise [B, C, h, w] at t [B], 0 .. 999."""
        if t.is_floating_point():
            raise ValueError(
                f"timesteps are {t.dtype}; expected integers from 0 to {NUM_TIMESTEPS - 1}"
            )
        return _at(self.sqrt_alpha_bar, t, x0) * x0 + _at(self.sqrt_one_minus, t, x0) * noise

    def weighted(self, squared_error: Tensor, t: Tensor) -> Tensor:
        """Weight squared errors [B] at t [B] as L_simple is weighted: by 1, or with `min_snr_gamma` by the SNR."""
        return self.weight[t] * squared_error

    def forward(
        self, output: Tensor, x0: Tensor, xt: Tensor, noise: Tensor, t: Tensor
    ) -> dict[str, Tensor]:
        """Return loss, mse (not weighted) and, if the variance is predicted, vb: L_t; all [B].

        Args:
            output: predicted noise [B, C, h, w], or noise and interpolation of the variance [B, 2C, h, w].
            x0, xt, noise: the image, the noisy image and the noise, [B, C, h, w].
            t: integers [B], 0 .. 999.
        """
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        eps = output[:, : x0.shape[1]]  # [B, C, h, w]
        mse = (eps - noise).square().flatten(1).mean(1)  # [B]
        simple = self.weighted(mse, t)
        if output.shape[1] == x0.shape[1]:
            return dict(loss=simple, mse=mse)
        vb = self.variational_bound(eps.detach(), output[:, x0.shape[1] :], x0, xt, t)
        return dict(loss=simple + vb, mse=mse, vb=vb)

    def variational_bound(
        self, eps: Tensor, interpolation: Tensor, x0: Tensor, xt: Tensor, t: Tensor
    ) -> Tensor:
        """Return L_t in bits per dimension, [B]: a KL divergence, or for t = 0 a discretised likelihood.

        The variance is exp(v log beta + (1 - v) log beta-tilde) with v = (interpolation + 1) / 2.

        Args:
            eps: predicted noise [B, C, h, w].
            interpolation: what the model predicts for the variance, [B, C, h, w].
            x0, xt, t: as in `forward`.
        """
        v = (interpolation + 1) / 2
        log_var = v * _at(self.log_beta, t, xt) + (1 - v) * _at(self.log_posterior, t, xt)
        x0_pred = (xt - _at(self.sqrt_one_minus, t, xt) * eps) / _at(self.sqrt_alpha_bar, t, xt)
        mean = self._posterior_mean(x0_pred, xt, t)
        true_mean = self._posterior_mean(x0, xt, t)
        kl = gaussian_kl(true_mean, _at(self.log_posterior, t, xt), mean, log_var)
        nll = discretised_nll(x0, mean, log_var)
        bits = torch.where((t == 0).view(-1, 1, 1, 1), nll, kl) / math.log(2)
        return bits.flatten(1).mean(1)

    def _posterior_mean(self, x0: Tensor, xt: Tensor, t: Tensor) -> Tensor:
        return _at(self.mean_x0, t, xt) * x0 + _at(self.mean_xt, t, xt) * xt


def gaussian_kl(mean1: Tensor, log_var1: Tensor, mean2: Tensor, log_var2: Tensor) -> Tensor:
    """Return KL(N(mean1, var1) || N(mean2, var2)) elementwise, in nats."""
    return 0.5 * (
        log_var2
        - log_var1
        + (log_var1 - log_var2).exp()
        + (mean1 - mean2).square() * (-log_var2).exp()
        - 1
    )


def discretised_nll(x: Tensor, mean: Tensor, log_var: Tensor) -> Tensor:
    """Return -log of the Gaussian's mass in the 8-bit bin of x, in nats (Ho 2020 eq. 13).

    x is in [-1, 1]; the first and the last bin extend to infinity.
    """
    scale = (-0.5 * log_var).exp()
    above = torch.special.ndtr((x - mean + 1 / 255) * scale)
    below = torch.special.ndtr((x - mean - 1 / 255) * scale)
    above = torch.where(x > 0.999, 1.0, above)
    below = torch.where(x < -0.999, 0.0, below)
    return -(above - below).clamp_min(1e-12).log()


def _at(table: Tensor, t: Tensor, like: Tensor) -> Tensor:
    """Return the table's entries at t [B], shaped to broadcast with `like`."""
    return table[t].view(-1, *[1] * (like.ndim - 1))  # [B, 1, 1, 1]
