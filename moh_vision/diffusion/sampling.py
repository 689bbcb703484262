"""Class-conditional sampling with classifier-free guidance on diffusers' schedulers."""

from __future__ import annotations  # annotations name classes that only type checkers import

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moh_vision.attention import ModelBudgets, budgets_at, model_budgets, running
from moh_vision.diffusion.objectives import NUM_TIMESTEPS
from moh_vision.diffusion.schedulers import (
    set_steps,
    step_count,
    step_options,
    uses_learned_variance,
)

if TYPE_CHECKING:
    from diffusers import SchedulerMixin

OnStep = Callable[[int, Tensor, Tensor], Tensor | None] | None  # (step, t, x) -> a new x or None


@dataclass(frozen=True)
class Guidance:
    """Moves a prediction away from the one without a class, and away from a weak model's.

        guided = eps(none) + scale (eps(class) - eps(none)) + (weak_scale - 1) (eps(class) - weak(class))

    With weak_scale 1 this is classifier-free guidance (Ho and Salimans 2022); with scale 1 it is autoguidance,
    weak + weak_scale (eps - weak) (Karras et al. 2024). Each scale other than 1 adds one prediction per image
    and step. Velocities are guided in the same way. The learned variance is never guided: it is always the
    prediction with the class.

    Args:
        scale: scale of classifier-free guidance; 1: none; 0: predict as if without a class.
        channels: number of guided channels, counted from the first, or "all" as in diffusers' DiT. The other
            channels keep eps(class). None: 3 of 4 channels, as in the official DiT's published scores, and all
            channels if there are not 4.
        interval: (low, high): both scales apply where low < t / 1000 < high, and are 1 elsewhere; a low of 0 and a
            high of 1 are no bounds. The timestep t goes from 0 (clean) to 1000 (noise). Kynkaanniemi et al. 2024 state
            the interval in noise levels.
        weak_scale: scale of autoguidance; 1: no weak model.
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
        if len(self.interval) != 2 or not 0 <= self.interval[0] < self.interval[1] <= 1:
            raise ValueError(
                f"guidance interval {self.interval} is out of range: 0 <= low < high <= 1"
            )

    def around(
        self, predict: Callable, labels: Tensor, null_label: int, weak: Callable | None = None
    ) -> Callable:
        """Return a function of x [B, C, h, w] and a timestep that returns the guided prediction.

        Args:
            predict: (x, t, labels) -> prediction [n, C or 2C, h, w].
            labels: class numbers [B].
            null_label: the label that means "no class".
            weak: as `predict`, for the weak model; see `weak_predict`.

        The timestep of the function is on the host, as schedulers keep theirs.
        """
        outside = (labels < 0) | (labels > null_label)
        if outside.any():
            allowed = f"0 to {null_label}, where {null_label} is no class"
            raise ValueError(
                f"class_labels {labels[outside][:5].tolist()} are out of range: {allowed}"
            )
        both = torch.cat([labels, torch.full_like(labels, null_label)])

        def predict_guided(x: Tensor, t: Tensor) -> Tensor:
            guides = self.scale != 1 or self.weak_scale != 1
            timestep = t.item()
            applies = guides and self.applies_at(timestep)
            # [1]: all images share the timestep. Filled on the device: a copy from the host would wait for the device.
            t = torch.full((1,), timestep, dtype=t.dtype, device=x.device)
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

        return predict_guided

    def applies_at(self, timestep: float) -> bool:
        """Return whether a timestep, 0 .. 1000, lies in the interval."""
        low, high = self.interval
        t = round(timestep / NUM_TIMESTEPS, 6)  # schedulers round timesteps to float32
        return (low == 0 or t > low) and (high == 1 or t < high)

    def guided(self, channels: int) -> int:
        """Return how many of `channels` channels are guided."""
        if self.channels is None and channels == 4:
            return 3
        if self.channels in (None, "all"):
            return channels
        return min(channels, self.channels)

    def combine(self, cond: Tensor, uncond: Tensor, noise_channels: int) -> Tensor:
        """Apply classifier-free guidance to predictions [B, C or 2C, h, w], with C = noise_channels."""
        n = self.guided(noise_channels)
        guided = uncond[:, :n] + self.scale * (cond[:, :n] - uncond[:, :n])
        return torch.cat([guided, cond[:, n:]], dim=1)


def predicted(model: nn.Module, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """Return a model's prediction for x [n, C, h, w], t [1] and labels [n]."""
    return model(x.to(model.dtype), t, labels).sample


def within_cache(call: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    """Return `call` for one sampling, during which diffusers' caches keep what a model computes for later steps.

    Args:
        call: calls a model, as `predicted` does.
        name: of what the predictions are; with guidance by fewer heads one network makes two kinds, which do not mix.
    """
    images = None

    def predict(model: nn.Module, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        nonlocal images
        if not getattr(model, "has_cache", False):
            return call(model, x, t, labels)
        if len(x) != images:
            # The first step, or guidance begins or ends: what a cache still has is of other images or of steps long past.
            model._reset_stateful_cache()
            images = len(x)
        with model.cache_context(name):
            return call(model, x, t, labels)

    return predict


def all_that_predicts(model: nn.Module, guide: str | nn.Module | None) -> nn.Module:
    """Return the model, beside the weak model of `weak_predict` where that is another network."""
    if isinstance(guide, nn.Module):
        return nn.ModuleList([model, guide])
    return model


def weak_predict(
    model: nn.Module,
    guide: str | nn.Module | None,
    name: str = "guide",
    must_agree: Iterable[tuple] = (),
    call: Callable[..., Tensor] = predicted,
) -> Callable | None:
    """Return a function of (x, t, labels) that returns the weak model's prediction; None without `guide`.

    Args:
        model: the model to guide.
        guide: the weak model: another model, or "heads:SHARE" for `model` with fewer heads.
        name: what error messages begin with.
        must_agree: (name, value of the weak model, value of `model`) for further values that must be equal.
        call: calls a model, as `predicted` does.
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
        refuse_other_inputs(weak, model, "model to guide", "output", must_agree)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None

    def predict(x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        with running(weak, budgets):
            return call(weak, x, t, labels)

    return predict


def refuse_other_inputs(
    other: nn.Module, model: nn.Module, role: str, quantity: str, must_agree: Iterable[tuple] = ()
) -> None:
    """Raise ValueError unless two models predict the same quantity at the same noisy images, timesteps and classes.

    Args:
        other, model: the models.
        role: what messages call `model`.
        quantity: "output", what samplers see, or "predict", what the network itself predicts.
        must_agree: (name, value of `other`, value of `model`) for further values that must be equal.
    """
    keys = ("in_channels", "sample_size", "num_classes")
    compared = [(key, other.config[key], model.config[key]) for key in keys]
    for key in ("path", quantity, "noise_scale"):
        compared.append((key, getattr(other.prediction, key), getattr(model.prediction, key)))
    for key, found, needed in [*compared, *must_agree]:
        if found != needed:
            raise ValueError(f"its {key} is {found}, that of the {role} is {needed}")


def _fewer_heads(model: nn.Module, guide: str) -> ModelBudgets:
    """Return the budgets of a model for "heads:SHARE"; refuse a share that runs no fewer heads and groups than now.

    Groups of routed MLPs run at the same share.
    """
    word, _, share = guide.partition(":")
    if word != "heads":
        raise ValueError(f'{guide!r}: expected a model, or "heads:SHARE" such as "heads:0.5"')
    budgets = budgets_at(model, share)
    running_now = model_budgets(model)
    fewer = False
    for part, asked, now in (
        ("heads", budgets.heads, running_now.heads),
        ("groups", budgets.groups, running_now.groups),
    ):
        weak = sum(budget.active for budget in asked)
        strong = sum(budget.active for budget in now)
        fewer = fewer or weak < strong
        if weak > strong:
            raise ValueError(
                f"{guide}: that is {weak} {part}, and the model runs {strong}: give a smaller share"
            )
    if not fewer:
        parts = "groups" if budgets.chosen is budgets.groups else "heads"
        active = sum(budget.active for budget in budgets.chosen)
        raise ValueError(
            f"{guide}: that is {active} {parts}, and the model runs {active}: give a smaller share"
        )
    return budgets


def initial_noise(shape: Sequence[int], generators: Sequence[torch.Generator], device) -> Tensor:
    """Draw noise [B, *shape]: image i from generator i, on the generator's device, then move it to `device`."""
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
    noise_scale: float = 1.0,
) -> Tensor:
    """Denoise x [B, C, h, w], float32.

    `moh_vision.diffusion.schedulers` has the table of what this function works around.

    Args:
        predict: (x, timestep) -> noise or velocity [B, C, h, w], or with the variance [B, 2C, h, w].
        scheduler: of diffusers, with its number of steps set.
        x: the initial noise, N(0, 1).
        generators: one per image.
        on_step: called with (step, t, x) after every step; returns None, or a tensor that replaces x.
        noise_scale: of the model, standard deviation of the noise. The scheduler works on x over noise_scale, where the
            noise is N(0, 1): so its own noise has this scale, too.
    """
    # Start over: multistep solvers keep predictions of the last sampling.
    set_steps(scheduler, scheduler.num_inference_steps)
    if step_count(scheduler) is None:
        return _denoise_adaptively(predict, scheduler, x * noise_scale, on_step)
    uses_variance = uses_learned_variance(scheduler)
    options = step_options(scheduler, generators)
    channels = x.shape[1]
    # Flow schedulers have neither of these two members.
    x = x * getattr(scheduler, "init_noise_sigma", 1.0) * noise_scale
    scale = getattr(scheduler, "scale_model_input", lambda x, t: x)
    broken = []  # after each step the number of images that hold NaN or infinity, on the device
    for step, t in enumerate(scheduler.timesteps):
        out = predict(scale(x, t), t)
        if not uses_variance:
            out = out[:, :channels]
        step_taken = scheduler.step(out / noise_scale, t, x / noise_scale, **options)
        x = step_taken.prev_sample * noise_scale
        if on_step is not None:
            replacement = on_step(step, t, x)
            if replacement is not None:
                x = replacement
        broken.append(count_not_finite(x))
    # Read after the last step: a look at each would wait until the device has done it.
    for step, count in enumerate(torch.stack(broken).tolist()):
        refuse(count, len(x), f"step {step + 1} of {len(broken)}")
    return x


def _denoise_adaptively(
    predict: Callable, scheduler: SchedulerMixin, x: Tensor, on_step: OnStep
) -> Tensor:
    """Denoise with a scheduler that chooses its own steps; arguments as in `denoise`."""

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        out = predict(x, t)[:, : x.shape[1]]
        # The solver would make its steps ever shorter.
        refuse_not_finite(out, f"the prediction at timestep {t:g}")
        return out

    solver = scheduler.solver(velocity, x, t=1.0)
    step = 0
    while solver.t > 0:
        began = torch.tensor(solver.t * NUM_TIMESTEPS)
        problem = solver.step()
        if problem:
            raise FloatingPointError(f"step {step + 1} from timestep {began:g}: {problem}")
        x = scheduler.unflattened(solver.y, x)
        if on_step is not None:
            replacement = on_step(step, began, x)
            if replacement is not None:
                x = replacement
                if solver.t > 0:
                    solver = scheduler.solver(velocity, x, solver.t)
        step += 1
        refuse_not_finite(x, f"step {step}")
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
    noise_scale: float = 1.0,
) -> Tensor:
    """Sample one image per label [B, C, h, w], with any function that predicts noise or a velocity.

    All noise of an image comes from the image's own seed, so it does not depend on the rest of the batch.

    Args:
        predict: (x [n, C, h, w], t [1], labels [n]) -> noise or velocity [n, C, h, w], or with the variance
            [n, 2C, h, w]. n is B, or 2B with classifier-free guidance.
        scheduler: of diffusers, with its number of steps set; see `fit_scheduler`.
        labels: class numbers [B].
        shape: shape of an image, [C, h, w].
        seeds: one for each image.
        null_label: the label that means "no class".
        guidance: how predictions are guided.
        on_step: called with (step, t, x) after every step; returns None, or a tensor that replaces x.
        weak: as `predict`, for the weak model that `guidance` guides away from.
        noise_scale: of the model, standard deviation of the noise.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    x = initial_noise(shape, generators, labels.device)
    guided = guidance.around(predict, labels, null_label, weak)
    return denoise(guided, scheduler, x, generators, on_step, noise_scale)


def refuse_not_finite(images: Tensor, when: str) -> None:
    """Raise FloatingPointError if images [B, ...] hold NaN or infinity; `when` begins the message."""
    refuse(int(count_not_finite(images)), len(images), when)


def count_not_finite(images: Tensor) -> Tensor:
    """Return how many of images [B, ...] hold NaN or infinity, a scalar on their device."""
    finite = images.isfinite().reshape(len(images), -1).all(1)
    return (~finite).sum()


def refuse(broken: int, images: int, when: str) -> None:
    """Raise FloatingPointError if `broken` of some images, more than none, hold NaN or infinity."""
    if broken:
        raise FloatingPointError(f"{when}: {broken} of {images} images hold NaN or infinity")


def to_uint8(images: Tensor) -> Tensor:
    """Round images in [-1, 1] to 0 .. 255; FloatingPointError for NaN or infinity."""
    refuse_not_finite(images, "after decoding")
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
