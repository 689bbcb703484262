"""The stochastic sampler of SiT (Ma 2024), missing in diffusers. Saved pipelines name this path."""

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SchedulerMixin,  # noqa: F401  where diffusers looks for it to load this class in a pipeline
)
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteSchedulerOutput,
)
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor


class FlowMatchSDEScheduler(FlowMatchEulerDiscreteScheduler):
    """Euler-Maruyama steps of dx = (v - w s / 2) dt + sqrt(w) dW from t = 1 (noise) to 0, w = 2 t (Ma 2024).

    The score is s = -((1 - t) v + x) / t; (1 - t) v + x is the expected noise. Any w has the ODE's
    marginals; w = 2 t is "sigma" of the released SiT. The last step adds no noise: it ends at the
    expected image. `stochastic_sampling` of diffusers' Euler scheduler has other marginals.
    """

    def step(
        self,
        model_output: Tensor,
        timestep: Tensor,
        sample: Tensor,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = True,
    ) -> FlowMatchEulerDiscreteSchedulerOutput | tuple[Tensor]:
        """Make a step, as diffusers' schedulers do.

        Args:
            model_output: velocity [B, C, h, w] at `sample`.
            timestep: where the first step begins; later ones follow from the scheduler's own count.
            sample: x [B, C, h, w].
            generator: of z, the noise of the step; a list has one for each image.
            return_dict: return diffusers' output class; False: a tuple.
        """
        if self.step_index is None:
            self._init_step_index(timestep)
        x = sample.float()
        v = model_output.float()
        t = self.sigmas[self.step_index].item()
        after = self.sigmas[self.step_index + 1].item()  # the time to which the step goes
        if after == 0:
            x = x - t * v  # the expected image
        else:
            eps = (1 - t) * v + x
            h = t - after
            z = randn_tensor(x.shape, generator=generator, device=x.device, dtype=x.dtype)
            x = x - h * (v + eps) + (2 * t * h) ** 0.5 * z  # w s / 2 = -eps
        self._step_index += 1
        x = x.to(model_output.dtype)
        if not return_dict:
            return (x,)
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=x)
