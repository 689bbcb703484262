"""The training loss of DiT: noise prediction plus the variational bound for a learned variance.

Ho 2020 (q and L_simple), Nichol and Dhariwal 2021 (learned range, eq. 15, and L_hybrid, eq. 16). diffusers has the
samplers but no such loss.

What training asks of an objective, and where another one would go in: a module with `add_noise(x0, noise, t)` and a
forward (output, x0, xt, noise, t) -> dict of [B] tensors with "loss". `moh_vision.diffusion.task.DiffusionTask` knows no more.
"""

import math
from typing import Dict

import torch
from torch import Tensor, nn

NUM_TIMESTEPS = 1000
BETA_START, BETA_END = 1e-4, 0.02  # linear in t


class HybridLoss(nn.Module):
    """L_simple + L_t per image, over 1000 steps with linear betas from 1e-4 to 0.02.

    L_hybrid = L_simple + lambda * L_vlb with lambda = 1/1000 and L_vlb = 1000 * E_t[L_t], hence the plain sum. L_t is
    in bits per dimension, and its mean is detached: the bound trains the variance only.
    """

    def __init__(self):
        super().__init__()
        beta = torch.linspace(BETA_START, BETA_END, NUM_TIMESTEPS, dtype=torch.float64)
        alpha_bar = (1 - beta).cumprod(0)
        previous = torch.cat([torch.ones(1, dtype=torch.float64), alpha_bar[:-1]])
        posterior = beta * (1 - previous) / (1 - alpha_bar)  # beta tilde, Ho 2020 eq. 7; 0 at t = 0
        posterior[0] = posterior[1]  # only its logarithm is used there
        tables = dict(
            sqrt_alpha_bar=alpha_bar.sqrt(),
            sqrt_one_minus=(1 - alpha_bar).sqrt(),
            log_beta=beta.log(),
            log_posterior=posterior.log(),
            mean_x0=beta * previous.sqrt() / (1 - alpha_bar),  # Ho 2020 eq. 7
            mean_xt=(1 - previous) * (1 - beta).sqrt() / (1 - alpha_bar),
        )
        for name, table in tables.items():
            self.register_buffer(name, table.float(), persistent=False)

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x_t of q(x_t | x_0), Ho 2020 eq. 4. x0, noise [B, C, h, w]; t [B], integers 0 .. 999.

        Raises:
            ValueError: for timesteps that are not integers.
        """
        if t.is_floating_point():
            raise ValueError(f"timesteps are {t.dtype}; expected integers from 0 to {NUM_TIMESTEPS - 1}")
        return _at(self.sqrt_alpha_bar, t, x0) * x0 + _at(self.sqrt_one_minus, t, x0) * noise

    def forward(self, output: Tensor, x0: Tensor, xt: Tensor, noise: Tensor, t: Tensor) -> Dict[str, Tensor]:
        """The loss of a model's output.

        Args:
            output: [B, C, h, w] predicted noise, or [B, 2C, h, w] with the variance's interpolation behind it.
            x0, xt, noise: [B, C, h, w].
            t: [B], 0 .. 999.

        Returns:
            dict of [B] tensors: loss, mse, and vb if the variance is learned.
        """
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        eps = output[:, : x0.shape[1]]  # [B, C, h, w]
        mse = (eps - noise).square().flatten(1).mean(1)  # [B]
        if output.shape[1] == x0.shape[1]:
            return dict(loss=mse, mse=mse)
        vb = self.variational_bound(eps.detach(), output[:, x0.shape[1] :], x0, xt, t)
        return dict(loss=mse + vb, mse=mse, vb=vb)

    def variational_bound(self, eps: Tensor, interpolation: Tensor, x0: Tensor, xt: Tensor, t: Tensor) -> Tensor:
        """L_t in bits per dimension, [B]: a KL divergence for t > 0, a discretised likelihood for t = 0.

        The variance is exp(v log beta + (1 - v) log beta-tilde) with v = (interpolation + 1) / 2.
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
    """KL(N(mean1, var1) || N(mean2, var2)) elementwise, in nats."""
    return 0.5 * (log_var2 - log_var1 + (log_var1 - log_var2).exp() + (mean1 - mean2).square() * (-log_var2).exp() - 1)


def discretised_nll(x: Tensor, mean: Tensor, log_var: Tensor) -> Tensor:
    """-log of the Gaussian mass of the 8-bit bin around x in [-1, 1]; outer bins reach to infinity (Ho 2020 eq. 13)."""
    scale = (-0.5 * log_var).exp()
    above = torch.special.ndtr((x - mean + 1 / 255) * scale)
    below = torch.special.ndtr((x - mean - 1 / 255) * scale)
    above = torch.where(x > 0.999, 1.0, above)
    below = torch.where(x < -0.999, 0.0, below)
    return -(above - below).clamp_min(1e-12).log()


def _at(table: Tensor, t: Tensor, like: Tensor) -> Tensor:
    return table[t].view(-1, *[1] * (like.ndim - 1))  # [B, 1, 1, 1]
