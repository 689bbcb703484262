"""Training losses: DiT's noise prediction with a bound for the learned variance, and SiT's flow matching.

Ho 2020; Nichol and Dhariwal 2021 (eq. 15 and 16); Lipman 2023; Ma 2024. diffusers does not have these losses.

An objective is a module with
    name            "noise" or "flow";
    draw            function from a numpy generator to a timestep; picklable, for the loader's worker processes;
    add_noise       (x0, noise, t) -> xt;
    forward         (output, x0, xt, noise, t) -> dict of [B] tensors with "loss" and "mse".
Timesteps go from 0 (clean) to 1000 (noise) everywhere.
"""

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from moh_vision.models.velocity import PREDICTS, to_velocity

NUM_TIMESTEPS = 1000
TIMESTEPS = ("uniform", "logit-normal")
# Arguments of `FlowMatchingLoss`.
FLOW_KEYS = ("predict", "timesteps", "location", "spread", "shift", "noise_scale")
BETA_START = 1e-4  # betas are linear in t
BETA_END = 0.02


def make_objective(config: dict) -> nn.Module:
    """Return the objective that a configuration or a run's metadata names; `HybridLoss` if none is named."""
    name = config.get("objective", HybridLoss.name)
    flow = config.get("flow")
    if name == FlowMatchingLoss.name and isinstance(flow, dict):
        return FlowMatchingLoss(**{key: flow[key] for key in FLOW_KEYS if key in flow})
    if name != HybridLoss.name:
        raise ValueError(
            f"objective {name!r} with flow {flow!r}: expected noise, or flow with its section"
        )
    return HybridLoss(config.get("min_snr_gamma"))


def draw_step(rng: np.random.Generator) -> int:
    """Draw a whole timestep, 0 .. 999."""
    return int(rng.integers(NUM_TIMESTEPS))


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


class FlowMatchingLoss(nn.Module):
    """Squared error of the velocity on the straight path from an image to noise, per image.

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
    """

    name = "flow"

    def __init__(
        self,
        predict: str = "velocity",
        timesteps: str = "uniform",
        location: float = 0.0,
        spread: float = 1.0,
        shift: float = 1.0,
        noise_scale: float = 1.0,
    ):
        super().__init__()
        for key, text, allowed in (
            ("predict", predict, PREDICTS),
            ("timesteps", timesteps, TIMESTEPS),
        ):
            if text not in allowed:
                raise ValueError(f"flow.{key} {text!r} is not one of {', '.join(allowed)}")
        for key, number, above in (
            ("shift", shift, 0),
            ("spread", spread, 0),
            ("noise_scale", noise_scale, 0),
            ("location", location, -math.inf),
        ):
            if not (isinstance(number, (int, float)) and above < number < math.inf):
                raise ValueError(f"flow.{key} {number!r} is out of range: above {above}")
        self.predict = predict
        self.shift = shift
        self.noise_scale = noise_scale
        self.draw = partial(
            draw_time, sampling=timesteps, shift=shift, location=location, spread=spread
        )

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return x_t of x0 and N(0, 1) noise [B, C, h, w] at t [B], 0 .. 1000."""
        t = (t / NUM_TIMESTEPS).to(x0.dtype).view(-1, *[1] * (x0.ndim - 1))  # [B, 1, 1, 1]
        return (1 - t) * x0 + t * (self.noise_scale * noise)

    def forward(
        self, output: Tensor, x0: Tensor, xt: Tensor, noise: Tensor, t: Tensor
    ) -> dict[str, Tensor]:
        """Return the loss of a predicted velocity: loss and mse, equal [B] tensors.

        Args:
            output: velocity [B, C, h, w].
            x0, xt, noise: the image, the noisy image and the noise that `add_noise` got, [B, C, h, w].
            t: [B], 0 .. 1000.
        """
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        eps = self.noise_scale * noise
        exact_prediction = dict(velocity=eps - x0, x=x0, noise=eps)[self.predict]
        target = to_velocity(self.predict, exact_prediction, xt, t)
        mse = (output - target).square().flatten(1).mean(1)  # [B]
        return dict(loss=mse, mse=mse)


class HybridLoss(nn.Module):
    """L_simple + L_t per image, over 1000 steps with linear betas from 1e-4 to 0.02.

    This plain sum is L_hybrid = L_simple + lambda * L_vlb with lambda = 1/1000, since L_vlb = 1000 * E_t[L_t].
    L_t is in bits per dimension. The predicted mean is detached in L_t, so that L_t trains the variance only.

    Args:
        min_snr_gamma: weigh L_simple by min(SNR, gamma) / SNR (Hang 2023, with gamma 5). None: by 1.
    """

    name = "noise"
    draw = staticmethod(draw_step)

    def __init__(self, min_snr_gamma: float | None = None):
        super().__init__()
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

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return x_t of q(x_t | x_0), Ho 2020 eq. 4, for x0 and noise [B, C, h, w] at t [B], 0 .. 999."""
        if t.is_floating_point():
            raise ValueError(
                f"timesteps are {t.dtype}; expected integers from 0 to {NUM_TIMESTEPS - 1}"
            )
        return _at(self.sqrt_alpha_bar, t, x0) * x0 + _at(self.sqrt_one_minus, t, x0) * noise

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
        simple = self.weight[t] * mse
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
