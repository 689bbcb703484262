"""Class-conditional sampling with classifier-free guidance on diffusers' schedulers."""

from __future__ import annotations  # they name what only type checkers import

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from moh_vision.attention import ModelBudgets, budgets_at, model_budgets, running
from moh_vision.diffusion.objectives import BETA_END, BETA_START, NUM_TIMESTEPS

if TYPE_CHECKING:
    from diffusers import SchedulerMixin

# Each with the objective of the models that it samples from.
SAMPLERS = {
    "ddpm": "noise",
    "ddim": "noise",
    "dpm-solver++": "noise",
    "euler": "flow",
    "heun": "flow",
    "sde": "flow",
}
LEARNED = ("learned", "learned_range")
OnStep = Callable[[int, Tensor, Tensor], Tensor | None] | None  # (step, t, x) -> a replacement of x


@dataclass(frozen=True)
class Guidance:
    """Guidance away from the prediction without a class and from that of a weak model.

        guided = eps(none) + scale (eps(class) - eps(none)) + (weak_scale - 1) (eps(class) - weak(class))

    With weak_scale 1 this is classifier-free guidance (Ho and Salimans 2022); with scale 1 it is autoguidance,
    weak + weak_scale (eps - weak) (Karras et al. 2024). Each scale other than 1 costs a pass. Velocities
    are guided alike. The learned variance is never guided: it is predicted with the class.

    Args:
        scale: 0: as if without a class.
        channels: how many channels are guided, from the first, or "all", as diffusers' DiT; others keep
            eps(class). None: 3 of 4, as the official DiT's published scores; all of any other number.
        interval: (low, high), fractions of the training timesteps t / 1000, from 0 (clean) to 1 (noise). Outside
            the scales are 1; Kynkaanniemi et al. 2024, there in noise levels.
        weak_scale: 1: no weak model.
    """

    scale: float = 1.0
    channels: int | str | None = None
    interval: tuple[float, float] = (0.0, 1.0)
    weak_scale: float = 1.0

    def __post_init__(self):
        for name, scale in (("guidance", self.scale), ("guide", self.weak_scale)):
            if not scale >= 0:
                raise ValueError(f"{name} scale {scale} is out of range: 0 or more")
        if self.channels not in (None, "all"):
            if not isinstance(self.channels, int) or self.channels < 1:
                raise ValueError(
                    f'guidance channels {self.channels!r} is out of range: at least 1, or "all"'
                )
        if len(self.interval) != 2 or not 0 <= self.interval[0] <= self.interval[1] <= 1:
            raise ValueError(
                f"guidance interval {self.interval} is out of range: 0 <= low <= high <= 1"
            )

    def around(
        self, predict: Callable, labels: Tensor, null_label: int, weak: Callable | None = None
    ) -> Callable:
        """Return a function of x [B, C, h, w] and a timestep: the guided prediction. `weak`: see `weak_predict`."""
        outside = labels[(labels < 0) | (labels > null_label)].tolist()
        if outside:
            allowed = f"0 to {null_label}, where {null_label} is no class"
            raise ValueError(f"class_labels {outside[:5]} are out of range: {allowed}")
        both = torch.cat([labels, torch.full_like(labels, null_label)])

        def guided(x: Tensor, t: Tensor) -> Tensor:
            applies = (self.scale, self.weak_scale) != (1, 1)
            if applies:
                low, high = self.interval
                applies = low <= t.item() / NUM_TIMESTEPS <= high
            t = t.to(x.device).reshape(1)  # the same for all images
            if applies and self.scale != 1:
                cond, uncond = predict(torch.cat([x, x]), t, both).float().chunk(2)
                out = self.combine(cond, uncond, x.shape[1])
            else:
                cond = predict(x, t, labels).float()
                out = cond
            if applies and self.weak_scale != 1:
                n = self.guided(x.shape[1])
                away = cond[:, :n] - weak(x, t, labels).float()[:, :n]
                out = torch.cat([out[:, :n] + (self.weak_scale - 1) * away, out[:, n:]], dim=1)
            return out

        return guided

    def guided(self, channels: int) -> int:
        """Return how many of the channels are guided."""
        if self.channels is None and channels == 4:
            return 3
        if self.channels in (None, "all"):
            return channels
        return min(channels, self.channels)

    def combine(self, cond: Tensor, uncond: Tensor, noise_channels: int) -> Tensor:
        """Guide predictions [B, C or 2C, h, w]; the first noise_channels predict the noise."""
        n = self.guided(noise_channels)
        guided = uncond[:, :n] + self.scale * (cond[:, :n] - uncond[:, :n])
        return torch.cat([guided, cond[:, n:]], dim=1)


def weak_predict(
    model: nn.Module,
    guide: str | nn.Module | None,
    name: str = "guide",
    must_agree: Iterable[tuple] = (),
) -> Callable | None:
    """Return the function of (x, t, labels) that predicts as the weak model of `model`; None for None.

    `guide` is another model, or "heads:SHARE", the same one with fewer heads. Messages begin with `name`;
    `must_agree` has (name, value of the weak model, value of `model`) of what else must be equal.
    """
    if guide is None:
        return None
    try:
        if isinstance(guide, str):
            weak = model
            budgets = _fewer_heads(model, guide)
        else:
            weak = guide
            budgets = model_budgets(weak)
        sizes = ("in_channels", "sample_size", "num_classes")
        compared = [(size, weak.config[size], model.config[size]) for size in sizes]
        for key, found, needed in [*compared, *must_agree]:
            if found != needed:
                raise ValueError(f"its {key} is {found}, that of the model to guide is {needed}")
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None

    def predict(x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        with running(weak, budgets):
            return weak(x.to(weak.dtype), t, labels).sample

    return predict


def _fewer_heads(model: nn.Module, guide: str) -> ModelBudgets:
    """Return the budgets of a model's layers for "heads:SHARE"; refuse a share that is none smaller.

    Groups of routed MLPs run at the same share.
    """
    word, _, share = guide.partition(":")
    if word != "heads":
        raise ValueError('expected a model, or "heads:SHARE" such as "heads:0.5"')
    budgets = budgets_at(model, share)
    few = sum(budget.active for budget in budgets.chosen)
    running_now = sum(budget.active for budget in model_budgets(model).chosen)
    if few >= running_now:
        parts = "groups" if budgets.chosen is budgets.groups else "heads"
        raise ValueError(
            f"that is {few} {parts}, and the model runs {running_now}: give a smaller share"
        )
    return budgets


def sampler_for(objective: str, config, key: str) -> str:
    """Return the sampler of a configuration, or its default one, for a model trained with `objective`."""
    fitting = [name for name, of in SAMPLERS.items() if of == objective]
    if config.sampler and config.sampler not in fitting:
        takes = ", ".join(fitting)
        raise ValueError(
            f"{key} {config.sampler}: a model trained with objective {objective} takes {takes}"
        )
    return config.sampler or config.default_sampler[objective]


def objective_of(scheduler: SchedulerMixin) -> str:
    """Return the objective that a scheduler of diffusers samples from: "noise" or "flow"."""
    if type(scheduler).__name__.startswith("FlowMatch"):
        return "flow"
    if scheduler.config.get("prediction_type") == "flow_prediction":
        return "flow"
    return "noise"


def make_scheduler(
    sampler: str, num_steps: int, learned_variance: bool, clip: bool, shift: float = 1.0
) -> SchedulerMixin:
    """Make a diffusers scheduler, set to `num_steps`.

    Args:
        sampler: "ddpm": the official DiT's, with respaced steps ('linspace'); "ddim": deterministic ('leading',
            the official steps where num_steps divides 1000); "dpm-solver++": second order, multistep, with
            equal steps of log SNR down to zero noise (Lu et al. 2022), nearest to exact solutions for images
            with fine detail (docs/guides/sampling.md). For velocities: "euler" and "heun" (two passes a step)
            solve the ODE, "sde" the stochastic equation of `FlowMatchSDEScheduler`.
        learned_variance: the model predicts the variance's interpolation, which DDPM uses.
        clip: clip the predicted image to [-1, 1]; for pixels, not for latents; ignored for flow.
        shift: of flow's steps towards the noise; that of the training.
    """
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler {sampler!r} is not one of {', '.join(SAMPLERS)}")
    import diffusers

    from moh_vision.diffusion.flow_sde import FlowMatchSDEScheduler  # imports diffusers

    variance = "learned_range" if learned_variance else "fixed_small"
    dpm = dict(
        algorithm_type="dpmsolver++", solver_order=2, use_lu_lambdas=True, final_sigmas_type="zero"
    )
    scheduler_class, options = {
        "ddpm": (
            diffusers.DDPMScheduler,
            dict(clip_sample=clip, variance_type=variance, timestep_spacing="linspace"),
        ),
        "ddim": (diffusers.DDIMScheduler, dict(clip_sample=clip, timestep_spacing="leading")),
        # By default the largest value is 1: this clips to [-1, 1].
        "dpm-solver++": (diffusers.DPMSolverMultistepScheduler, dict(dpm, thresholding=clip)),
        "euler": (diffusers.FlowMatchEulerDiscreteScheduler, dict(shift=shift)),
        "heun": (diffusers.FlowMatchHeunDiscreteScheduler, dict(shift=shift)),
        "sde": (FlowMatchSDEScheduler, dict(shift=shift)),
    }[sampler]
    if SAMPLERS[sampler] == "noise":
        options.update(beta_schedule="linear", beta_start=BETA_START, beta_end=BETA_END)
    scheduler = scheduler_class(num_train_timesteps=NUM_TIMESTEPS, **options)
    set_steps(scheduler, num_steps)
    return scheduler


def set_steps(scheduler: SchedulerMixin, num_steps: int) -> None:
    """Set the number of steps, and start over. Steps that would begin far from noise are refused."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    total = scheduler.config.num_train_timesteps
    if not 1 <= num_steps <= total:
        raise ValueError(f"steps {num_steps} is out of range: 1 to {total}")
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        # Equal steps from noise to image; diffusers' own stop 0.001 before it.
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / num_steps, num_steps).tolist())
    else:
        scheduler.set_timesteps(num_steps)
    first, second = [*scheduler.timesteps.tolist(), -1][:2]
    if len(scheduler.timesteps) > 1 and first + (first - second) < 0.9 * total:
        begin = (
            f"the steps of {type(scheduler).__name__} would begin at timestep {first:g} of {total}"
        )
        raise ValueError(f"steps {num_steps}: {begin}; take a divisor of {total}")


def fit_scheduler(scheduler: SchedulerMixin, learned_variance: bool) -> SchedulerMixin:
    """Return the scheduler without settings of another class that break it, taken over by `from_config`."""
    from diffusers import DDIMScheduler, DDPMScheduler

    config = scheduler.config
    parameters = inspect.signature(type(scheduler).__init__).parameters
    learned = "variance_type" in parameters and config.variance_type in LEARNED
    is_ddpm = isinstance(scheduler, DDPMScheduler)  # the only one that uses a learned variance
    if is_ddpm and learned and not learned_variance:
        raise ValueError(
            f"the scheduler's variance_type {config.variance_type} needs a model with a learned variance"
        )
    change: dict = {}
    if isinstance(scheduler, DDIMScheduler) and config.timestep_spacing == "linspace":
        change["timestep_spacing"] = "leading"  # which fits its strides
    if learned and not is_ddpm:
        change["variance_type"] = None  # or diffusers cuts the prediction to three channels
    clipped = config.get("clip_sample") and "clip_sample" not in parameters
    if clipped and "thresholding" in parameters and not config.thresholding:
        change["thresholding"] = True
        change["sample_max_value"] = config.get("clip_sample_range", 1.0)
    if not change:
        return scheduler
    return type(scheduler).from_config(config, **change)


def initial_noise(shape: Sequence[int], generators: Sequence[torch.Generator], device) -> Tensor:
    """Draw noise [B, *shape], one image from every generator."""
    return torch.stack(
        [torch.randn(tuple(shape), generator=g, device=g.device).to(device) for g in generators]
    )


@torch.no_grad()
def denoise(
    predict: Callable,
    scheduler: SchedulerMixin,
    x: Tensor,
    generators: list[torch.Generator],
    on_step: OnStep = None,
) -> Tensor:
    """Denoise x [B, C, h, w], float32.

    Args:
        predict: (x, timestep) -> noise or velocity [B, C or, with variance, 2C, h, w].
        scheduler: of diffusers, with its number of steps set.
        x: first noise.
        generators: one per image.
        on_step: (step, t, x) after every step; returns None, or a replacement of x.
    """
    from diffusers import DDPMScheduler

    set_steps(scheduler, scheduler.num_inference_steps)  # multistep solvers have state
    uses_variance = (
        isinstance(scheduler, DDPMScheduler) and scheduler.config.variance_type in LEARNED
    )
    options: dict = {}
    parameters = inspect.signature(scheduler.step).parameters
    # Deterministic solvers such as UniPC's and Heun's take no generator.
    if "generator" in parameters:
        options["generator"] = generators
    # DDIM's noise must be that of the clipped image, as in the official DiT: that of the unclipped one turns pixels grey.
    if "use_clipped_model_output" in parameters:
        options["use_clipped_model_output"] = bool(scheduler.config.get("clip_sample"))
    channels = x.shape[1]
    # Schedulers of flows have neither of the two.
    x = x * getattr(scheduler, "init_noise_sigma", 1.0)
    scale = getattr(scheduler, "scale_model_input", lambda x, t: x)
    for step, t in enumerate(scheduler.timesteps):
        out = predict(scale(x, t), t)
        if not uses_variance:
            out = out[:, :channels]
        x = scheduler.step(out, t, x, **options).prev_sample
        if on_step is not None:
            changed = on_step(step, t, x)
            if changed is not None:
                x = changed
        refuse_not_finite(x, f"step {step + 1} of {len(scheduler.timesteps)}")
    return x


def sample_images(  # noqa: PLR0913
    predict: Callable[[Tensor, Tensor, Tensor], Tensor],
    scheduler: SchedulerMixin,
    labels: Tensor,
    shape: Sequence[int],
    seeds: Iterable[int],
    null_label: int,
    guidance: Guidance = Guidance(),  # frozen: one object may be the default of all calls
    on_step: OnStep = None,
    weak: Callable | None = None,
) -> Tensor:
    """Sample one image per label [B, C, h, w], with any function that predicts noise or a velocity.

    All noise of an image comes from its own seed: it does not depend on the images beside it.

    Args:
        predict: (x [n, C, h, w], t [n], labels [n]) -> noise or velocity [n, C or, with variance, 2C, h, w].
        scheduler: of diffusers, with its steps set; see `fit_scheduler`.
        labels: class numbers [B].
        shape: of an image, [C, h, w].
        seeds: one for each image.
        null_label: the label that means "no class".
        on_step: (step, t, x) after every step; returns None, or a replacement of x.
        weak: as `predict`, of the weak model that `guidance` guides away from.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    x = initial_noise(shape, generators, labels.device)
    guided = guidance.around(predict, labels, null_label, weak)
    return denoise(guided, scheduler, x, generators, on_step)


def refuse_not_finite(images: Tensor, when: str) -> None:
    """Raise FloatingPointError if images [B, ...] hold NaN or infinity."""
    bad = len(images) - int(images.isfinite().reshape(len(images), -1).all(1).sum())
    if bad:
        raise FloatingPointError(f"{when}: {bad} of {len(images)} images hold NaN or infinity")


def to_uint8(images: Tensor) -> Tensor:
    """Round images in [-1, 1] to 0 .. 255; FloatingPointError for NaN or infinity."""
    refuse_not_finite(images, "after decoding")
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
