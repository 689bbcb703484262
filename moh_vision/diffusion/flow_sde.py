"""The stochastic samplers of SiT (Ma 2024), which diffusers lacks. Saved pipelines name this module: it never moves."""

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SchedulerMixin,  # noqa: F401  diffusers needs the name in this module to load the class in a pipeline
)
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteSchedulerOutput,
)
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor


class FlowMatchSDEScheduler(FlowMatchEulerDiscreteScheduler):
    """Euler-Maruyama steps of dx = (v - w s / 2) dt + sqrt(w) dW from t = 1 (noise) to 0, w = 2 t (Ma 2024).

    The score is s = -((1 - t) v + x) / t, where (1 - t) v + x is the expected noise. With any w, the
    stochastic equation has the marginals of the ODE; w = 2 t is "sigma" in SiT's released code. The last
    step adds no noise and ends at the expected image. We do not use `stochastic_sampling` of diffusers'
    Euler scheduler, which has other marginals.
    """

    last_step: float | None = None  # length of the last step in t; None: as long as the others

    def step(
        self,
        model_output: Tensor,
        timestep: Tensor,
        sample: Tensor,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = True,
    ) -> FlowMatchEulerDiscreteSchedulerOutput | tuple[Tensor]:
        """Return x after one step, with the interface of diffusers' schedulers.

        Args:
            model_output: velocity [B, C, h, w] at `sample`.
            timestep: where the first step begins; later calls ignore it, because the scheduler counts steps.
            sample: x [B, C, h, w].
            generator: draws z, the noise of the step; a list has one generator for each image.
            return_dict: return diffusers' output class; False: a tuple.
        """
        if self.step_index is None:
            self._init_step_index(timestep)
        x = sample.float()
        v = model_output.float()
        t = self.sigmas[self.step_index].item()
        next_t = self.sigmas[self.step_index + 1].item()
        if next_t == 0:
            x = self.end(x, v, t)
        else:
            eps = (1 - t) * v + x  # the expected noise
            h = t - next_t
            z = drawn(x, generator)
            x = x - h * (v + eps) + (2 * t * h) ** 0.5 * z  # -w s / 2 = eps
        self._step_index += 1
        x = x.to(model_output.dtype)
        if not return_dict:
            return (x,)
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=x)

    def end(self, x: Tensor, v: Tensor, t: float) -> Tensor:
        """Return x after the last step, from time t: the expected image."""
        return x - t * v


def drawn(x: Tensor, generator: torch.Generator | list[torch.Generator] | None) -> Tensor:
    """Return noise N(0, 1) with the shape, type and device of x."""
    device = x.device
    first = generator
    if isinstance(generator, list):
        first = generator[0]
    if first is not None:
        device = first.device
    noise = randn_tensor(x.shape, generator=generator, device=device, dtype=x.dtype)
    # randn_tensor's own copy from a generator on the host would wait until the device has done its work.
    return noise.to(x.device, non_blocking=True)


class FlowMatchSiTSDEScheduler(FlowMatchSDEScheduler):
    """The same with the end of SiT's released sampler, with which its FIDs were made: a last step of 0.04.

    n - 1 equal steps lead from t = 1 to 0.04. The last step follows the drift of the stochastic equation without
    its noise ("Mean" in the released code), so that 0.04 times the expected noise is taken from the expected image.
    """

    last_step = 0.04

    def end(self, x: Tensor, v: Tensor, t: float) -> Tensor:
        """Return x after the last step, from time t: its mean."""
        eps = (1 - t) * v + x  # the expected noise
        return x - t * (v + eps)
