"""diffusers' schedulers: those that our samplers use, and what we work around in them.

Users may replace a scheduler by one of another class, made with diffusers' `from_config`. The new one then also has
settings of the old one that do not fit it. n is the number of steps.

    scheduler                      what goes wrong                             what we do
    -----------------------------  ------------------------------------------  ----------------------------------------
    FlowMatchEulerDiscrete,        its own last step begins at t = 0.001 and   `set_steps` sets equal steps: 1,
      FlowMatchHeunDiscrete,         does almost nothing; Heun's shifts that     1 - 1/n, ..., 1/n, shifted once
      FlowMatchSDE (ours)            time twice
    FlowMatchSiTSDE (ours)         its last step is 0.04, whatever n and the   `set_steps` sets equal steps from 1
                                     shift                                       to the time that is shifted to 0.04
    FlowMatchDopri5 (ours)         its steps are not known before              `denoise` steps its solver;
                                                                                 `step_count` is None
    any with "leading" timesteps   if n does not divide 1000, the first may    `set_steps` refuses n if the first
                                     be far from noise                           timestep is too small
    multistep solvers              keep predictions of the last sampling       `denoise` sets the steps again
    DDIM from DDPM's settings      its steps have length 1000 // n, which      `fit_scheduler` makes the timesteps
                                     "linspace" timesteps do not fit             "leading"
    DPM-Solver from DDPM's         a learned `variance_type` makes it cut      `fit_scheduler` sets it to None, and
      settings                       the prediction to three channels            `denoise` drops the variance
    one without `clip_sample`,     nothing is clipped                          `fit_scheduler` sets `thresholding`, if
      from settings with it                                                      the class has it
    DDIM with `clip_sample`        uses the noise of the image before          `step_options` asks for the noise of the
                                     clipping, which turns pixels grey           clipped image, as the official DiT
    deterministic: UniPC, Heun     `step` takes no generator                   `step_options` passes none
    flow: FlowMatch...             has neither `init_noise_sigma` nor          `denoise` scales by 1
                                     `scale_model_input`
    UniPC, DPM-Solver              call the shift `flow_shift`                 `shift_of` reads both names
    Heun                           lists most timesteps twice                  sample.py counts heads by distinct ones
    ours                           diffusers opens them from a saved           pipeline.py imports flow_sde.py and
                                     pipeline only if their module is            flow_ode.py, which import the name
                                     imported, and has the name
                                     `SchedulerMixin`
"""

from __future__ import annotations  # annotations name classes that only type checkers import

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from moh_vision.diffusion.objectives.contract import NUM_TIMESTEPS
from moh_vision.diffusion.objectives.flow import shifted
from moh_vision.diffusion.objectives.noise import BETA_END, BETA_START
from moh_vision.models.prediction import DDPM, LINEAR, Prediction

if TYPE_CHECKING:
    from diffusers import SchedulerMixin

LEARNED = ("learned", "learned_range")  # values of `variance_type`


@dataclass(frozen=True)
class Sampler:
    """A sampler: a scheduler, and the models that it samples from.

    Args:
        make: function of (learned_variance, clip, shift), see `make_scheduler`, that returns a scheduler.
        output: what the scheduler takes: `Prediction.output` of the models.
        path: the path that the scheduler knows; None: it takes the output on any path, as a solver of dx = v dt does.
        draws_noise: whether its steps draw noise.
        order: order of its error in the length of a step; 0: it chooses its own steps.
    """

    make: Callable[[bool, bool, float], SchedulerMixin]
    output: str
    path: str | None
    draws_noise: bool = False
    order: int = 1

    def fits(self, prediction: Prediction) -> bool:
        """Return whether it samples from models with this prediction."""
        return self.output == prediction.output and self.path in (None, prediction.path)


def _with_betas(class_name: str, **options) -> SchedulerMixin:
    """Return a scheduler of diffusers for the 1000 steps of DDPM."""
    import diffusers

    betas = dict(beta_schedule="linear", beta_start=BETA_START, beta_end=BETA_END)
    scheduler_class = getattr(diffusers, class_name)
    return scheduler_class(num_train_timesteps=NUM_TIMESTEPS, **betas, **options)


def _ddpm(learned_variance: bool, clip: bool, shift: float) -> SchedulerMixin:
    variance = "learned_range" if learned_variance else "fixed_small"
    return _with_betas(
        "DDPMScheduler", clip_sample=clip, variance_type=variance, timestep_spacing="linspace"
    )


def _ddim(learned_variance: bool, clip: bool, shift: float) -> SchedulerMixin:
    return _with_betas("DDIMScheduler", clip_sample=clip, timestep_spacing="leading")


def _dpm_solver(learned_variance: bool, clip: bool, shift: float) -> SchedulerMixin:
    return _with_betas(
        "DPMSolverMultistepScheduler",
        algorithm_type="dpmsolver++",
        solver_order=2,
        use_lu_lambdas=True,
        final_sigmas_type="zero",
        thresholding=clip,  # clips to [-1, 1]: `sample_max_value` is 1 by default
    )


def _euler(learned_variance: bool, clip: bool, shift: float) -> SchedulerMixin:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(NUM_TIMESTEPS, shift=shift)


def _heun(learned_variance: bool, clip: bool, shift: float) -> SchedulerMixin:
    from diffusers import FlowMatchHeunDiscreteScheduler

    return FlowMatchHeunDiscreteScheduler(NUM_TIMESTEPS, shift=shift)


# The modules of our schedulers import diffusers.


def _dopri5(learned_variance: bool, clip: bool, shift: float) -> SchedulerMixin:
    from moh_vision.diffusion.flow_ode import FlowMatchDopri5Scheduler

    return FlowMatchDopri5Scheduler(NUM_TIMESTEPS, shift=shift)


def _sde(learned_variance: bool, clip: bool, shift: float) -> SchedulerMixin:
    from moh_vision.diffusion.flow_sde import FlowMatchSDEScheduler

    return FlowMatchSDEScheduler(NUM_TIMESTEPS, shift=shift)


def _sit_sde(learned_variance: bool, clip: bool, shift: float) -> SchedulerMixin:
    from moh_vision.diffusion.flow_sde import FlowMatchSiTSDEScheduler

    return FlowMatchSiTSDEScheduler(NUM_TIMESTEPS, shift=shift)


ADAPTIVE = "dopri5"  # the sampler that chooses its own steps
# By name. Of those that fit a model the first one that draws noise is the default of sample.py, and the first one that
# draws none the default of previews and of scores while training.
SAMPLERS: dict[str, Sampler] = {
    "ddpm": Sampler(_ddpm, "noise", DDPM, draws_noise=True),
    "ddim": Sampler(_ddim, "noise", DDPM),
    "dpm-solver++": Sampler(_dpm_solver, "noise", DDPM, order=2),
    "euler": Sampler(_euler, "velocity", None),
    "heun": Sampler(_heun, "velocity", None, order=2),
    ADAPTIVE: Sampler(_dopri5, "velocity", None, order=0),
    "sde": Sampler(_sde, "velocity", LINEAR, draws_noise=True),
    "sit-sde": Sampler(_sit_sde, "velocity", LINEAR, draws_noise=True),
}


def check_sampler(key: str, sampler: str | None) -> None:
    """Raise ValueError for the name of an unknown sampler; None is allowed."""
    if sampler is not None and sampler not in SAMPLERS:
        raise ValueError(f"{key} {sampler!r} is not one of {', '.join(SAMPLERS)}")


def samplers_of(prediction: Prediction) -> list[str]:
    """Return the samplers for models with this prediction."""
    return [name for name, sampler in SAMPLERS.items() if sampler.fits(prediction)]


def sampler_for(prediction: Prediction, asked: str | None, key: str, draws_noise: bool) -> str:
    """Return the sampler that a key asks for, or its default, for models with this prediction.

    Args:
        prediction: what the model predicts.
        asked: the key's value; None: the default.
        key: the key, for messages.
        draws_noise: whether the default is a sampler that draws noise, if there is one.
    """
    fitting = samplers_of(prediction)
    if not fitting:
        raise ValueError(
            f"{key} {asked or ''}: there is no sampler for a prediction of {prediction}; one of your own goes into "
            "SAMPLERS of moh_vision.diffusion"
        )
    if asked and asked not in fitting:
        raise ValueError(
            f"{key} {asked}: a model that predicts {prediction} takes {', '.join(fitting)}"
        )
    preferred = [name for name in fitting if SAMPLERS[name].draws_noise == draws_noise]
    return asked or (preferred or fitting)[0]


def few_steps(prediction: Prediction) -> str:
    """Return the options of sample.py for a good image in little time: few steps of the sampler of the highest order."""
    best = max(samplers_of(prediction), key=lambda name: SAMPLERS[name].order)
    return f"--sampler {best} --steps 20"


def why_unfit(scheduler: SchedulerMixin, prediction: Prediction) -> str:
    """Return why a scheduler, ours or another of diffusers, does not sample from such models; "" if it does."""
    name = type(scheduler).__name__
    path = DDPM
    flow_prediction = scheduler.config.get("prediction_type") == "flow_prediction"
    if name.startswith("FlowMatch") or flow_prediction:
        path = LINEAR
    if path == prediction.path:
        return ""
    fitting = samplers_of(prediction)
    # On a path that diffusers does not know only the schedulers of our samplers are known to fit. diffusers' Euler
    # with stochastic sampling adds noise as on the linear path.
    adds_noise = scheduler.config.get("stochastic_sampling")
    if prediction.path not in (DDPM, LINEAR) and not adds_noise:
        schedulers = [type(SAMPLERS[each].make(False, False, 1.0)) for each in fitting]
        if type(scheduler) in schedulers:
            return ""
    return (
        f"scheduler {name} is for path {path}, the transformer predicts {prediction}; make_scheduler has "
        f"{', '.join(fitting)}"
    )


def shift_of(scheduler: SchedulerMixin) -> float:
    """Return the factor that shifts a flow scheduler's steps towards the noise; 1 if there is no shift."""
    config = scheduler.config
    return config.get("shift", config.get("flow_shift", 1.0))


def step_count(scheduler: SchedulerMixin) -> int | None:
    """Return how many predictions a scheduler whose steps are set takes; None if it chooses its own steps."""
    from moh_vision.diffusion.flow_ode import FlowMatchDopri5Scheduler

    if isinstance(scheduler, FlowMatchDopri5Scheduler):
        return None
    return len(scheduler.timesteps)


def sampler_in_words(sampler: str, steps: int) -> str:
    """Return a sampler and its number of steps, if it has one, in words."""
    if sampler == ADAPTIVE:
        return sampler
    return f"{sampler} {steps} steps"


def uses_learned_variance(scheduler: SchedulerMixin) -> bool:
    """Return whether the scheduler takes a prediction with the variance, [B, 2C, h, w]; only DDPM's can."""
    from diffusers import DDPMScheduler

    return isinstance(scheduler, DDPMScheduler) and scheduler.config.variance_type in LEARNED


def make_scheduler(
    sampler: str, num_steps: int, learned_variance: bool, clip: bool, shift: float = 1.0
) -> SchedulerMixin:
    """Make a diffusers scheduler, set to `num_steps`.

    Args:
        sampler: a name of `SAMPLERS`. For models that predict noise: "ddpm", the official DiT's sampler with
            respaced steps ("linspace"); "ddim", deterministic ("leading": the official steps where num_steps
            divides 1000); "dpm-solver++", second order and multistep, with equal steps of log SNR down to zero
            noise (Lu et al. 2022). On images with fine detail "dpm-solver++" comes nearest to exact solutions
            (docs/guides/sampling.md). For models that predict a velocity: "euler" and "heun" (two passes a step, one
            in the last) solve the ODE in equal steps, "dopri5" in steps of its own, see `FlowMatchDopri5Scheduler`;
            on the linear path "sde" solves the stochastic equation of `FlowMatchSDEScheduler` in equal steps, "sit-sde" with a last
            step of 0.04, see `FlowMatchSiTSDEScheduler`.
        num_steps: number of steps; without effect for "dopri5".
        learned_variance: the model also predicts the variance, as an interpolation; "ddpm" uses it.
        clip: clip the predicted image to [-1, 1]: for pixels, not for latents; ignored for flow.
        shift: factor that shifts the steps of a flow towards the noise; take the one of the training.
    """
    check_sampler("sampler", sampler)
    scheduler = SAMPLERS[sampler].make(learned_variance, clip, shift)
    set_steps(scheduler, num_steps)
    return scheduler


def set_steps(scheduler: SchedulerMixin, num_steps: int) -> None:
    """Set the number of steps and reset the scheduler's state; refuse steps that would begin far from noise."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler

    total = scheduler.config.num_train_timesteps
    least = 1
    if getattr(scheduler, "last_step", None):
        least = 2  # one before the last, whose length is fixed
    if not least <= num_steps <= total:
        raise ValueError(f"steps {num_steps} is out of range: {least} to {total}")
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        scheduler.set_timesteps(sigmas=equal_steps(scheduler, num_steps).tolist())
    elif isinstance(scheduler, FlowMatchHeunDiscreteScheduler):
        scheduler.set_timesteps(num_steps)  # resets its state; takes no times
        times = torch.from_numpy(shifted(equal_steps(scheduler, num_steps), shift_of(scheduler)))
        # Every time but the first ends a step and begins the next, each with a prediction.
        times = torch.cat([times[:1], times[1:].repeat_interleave(2)])
        scheduler.timesteps = (total * times).float()
        scheduler.sigmas = torch.cat([times, torch.zeros(1)]).float()
    else:
        scheduler.set_timesteps(num_steps)
    timesteps = scheduler.timesteps.tolist()
    if len(timesteps) < 2:
        return
    first, second = timesteps[:2]
    # One more step of the same size before the first should reach the noise.
    if first + (first - second) < 0.9 * total:
        begin = (
            f"the steps of {type(scheduler).__name__} would begin at timestep {first:g} of {total}"
        )
        raise ValueError(f"steps {num_steps}: {begin}; take a divisor of {total}")


def equal_steps(scheduler: SchedulerMixin, num_steps: int) -> np.ndarray:
    """Return the times at which the steps of a flow's scheduler begin, before the shift, [num_steps]."""
    last = 1 / num_steps
    length = getattr(scheduler, "last_step", None)
    if length is not None:
        last = shifted(length, 1 / shift_of(scheduler))  # which the shift turns into `length`
    return np.linspace(1, last, num_steps)


def fit_scheduler(scheduler: SchedulerMixin, learned_variance: bool) -> SchedulerMixin:
    """Return the scheduler with settings that fit its class, or itself if they do; see the table above.

    Args:
        scheduler: may have been made by `from_config` of another class.
        learned_variance: whether the model predicts the variance.

    Raises:
        ValueError: if the scheduler needs a learned variance, and the model does not predict it.
    """
    from diffusers import DDIMScheduler

    config = scheduler.config
    parameters = inspect.signature(type(scheduler).__init__).parameters
    needs_variance = uses_learned_variance(scheduler)
    if needs_variance and not learned_variance:
        raise ValueError(
            f"the scheduler's variance_type {config.variance_type} needs a model with a learned variance"
        )
    change: dict = {}
    if isinstance(scheduler, DDIMScheduler) and config.timestep_spacing == "linspace":
        change["timestep_spacing"] = "leading"
    says_learned = "variance_type" in parameters and config.variance_type in LEARNED
    if says_learned and not needs_variance:
        change["variance_type"] = None
    clip_is_ignored = config.get("clip_sample") and "clip_sample" not in parameters
    if clip_is_ignored and "thresholding" in parameters and not config.thresholding:
        change["thresholding"] = True
        change["sample_max_value"] = config.get("clip_sample_range", 1.0)
    if not change:
        return scheduler
    return type(scheduler).from_config(config, **change)


def step_options(scheduler: SchedulerMixin, generators: Sequence[torch.Generator]) -> dict:
    """Return the keyword arguments of the scheduler's `step`; see the table above."""
    parameters = inspect.signature(scheduler.step).parameters
    options: dict = {}
    if "generator" in parameters:
        options["generator"] = generators
    if "use_clipped_model_output" in parameters:
        options["use_clipped_model_output"] = bool(scheduler.config.get("clip_sample"))
    return options
