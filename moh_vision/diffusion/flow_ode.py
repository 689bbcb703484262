"""The adaptive sampler of SiT (Ma 2024), which diffusers lacks. Saved pipelines name this module: it never moves."""

from collections.abc import Callable

import torch
from diffusers import ConfigMixin, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from scipy.integrate import RK45
from torch import Tensor


class FlowMatchDopri5Scheduler(SchedulerMixin, ConfigMixin):
    """Dormand and Prince's method of order 5(4) on dx = v dt from t = 1 (noise) to 0, in steps that it chooses.

    A step is accepted if the root mean square of error / (atol + rtol |x|) is below 1. The mean is over a whole
    batch, so an image depends on its batch, by about the tolerance. The defaults are those of SiT's released code.
    The solver is scipy's; x is float64 and on the CPU between two predictions.

    Times are not known before, so `timesteps` has the first alone and there is no `step`: `denoise` steps `solver`.

    Args:
        num_train_timesteps: the timestep of noise.
        shift: changes nothing here; kept for schedulers that are made from this configuration.
        atol, rtol: absolute and relative tolerance.
    """

    @register_to_config
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        shift: float = 1.0,
        atol: float = 1e-6,
        rtol: float = 1e-3,
    ):
        self.timesteps = torch.tensor([float(num_train_timesteps)])
        self.num_inference_steps: int | None = None

    def set_timesteps(self, num_inference_steps: int, device=None) -> None:
        """Do nothing but keep the number, which other schedulers need."""
        self.num_inference_steps = num_inference_steps

    def solver(self, velocity: Callable[[Tensor, Tensor], Tensor], x: Tensor, t: float) -> RK45:
        """Return scipy's solver, from x [B, C, h, w] at time t; its `step` makes one step towards t = 0.

        velocity: (x, timestep) -> velocity [B, C, h, w], with timestep = 1000 t.
        """

        def derivative(t: float, flat):
            here = self.unflattened(flat, x)
            timestep = torch.tensor(t * self.config.num_train_timesteps)
            return velocity(here, timestep).double().flatten().cpu().numpy()

        start = x.double().flatten().cpu().numpy()
        return RK45(derivative, t, start, 0.0, rtol=self.config.rtol, atol=self.config.atol)

    @staticmethod
    def unflattened(flat, like: Tensor) -> Tensor:
        """Return the solver's numbers, float64 [B * C * h * w], with the shape, type and device of `like`."""
        return torch.from_numpy(flat).to(like.dtype).to(like.device).view_as(like)
