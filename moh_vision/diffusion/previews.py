"""Pictures of a diffusion model, and its scores, while it trains."""

import shutil
import time
from collections.abc import Callable
from functools import partial

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from tqdm import tqdm

from moh_vision.diffusion.config import chosen_classes
from moh_vision.diffusion.image_grid import draw_class_rows, draw_image_grid
from moh_vision.diffusion.image_parts import ImageParts
from moh_vision.diffusion.latents.vae import image_channels
from moh_vision.diffusion.loading import open_guide
from moh_vision.diffusion.sampling import (
    Guidance,
    make_scheduler,
    sample_images,
    sampler_for,
    to_uint8,
    weak_predict,
)
from moh_vision.diffusion.scores import make_scorer
from moh_vision.engine.errors import message_of
from moh_vision.engine.ranks import attempt, by_main

BATCH = 32  # images at a time
LONG = 10  # seconds that drawing may take before it is said how long it takes
ROWS, COLUMNS = 10, 10  # the most classes that have a row each, and images a row


def open_drawings(setup, inputs, model: nn.Module, objective: nn.Module) -> list["Samples"]:
    """Open the previews and the scores of a run, of its EMA weights if any."""
    config = setup.config
    accelerator = setup.accelerator
    sections, last = (config.preview, config.score), config.max_steps
    for c in sections:
        if c.every > last:
            hint = f"--{c.section}.every {last} asks for it"
            accelerator.print(f"{c.section}.every {c.every}: none in {last} steps; {hint}")
    draws = any(0 < c.every <= last for c in sections)
    if draws and not config.ema.decay and accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(
            "preview.every and score.every with FSDP need ema.decay, whose weights are whole"
        )
    with accelerator.main_process_first():
        decode = inputs.decoder(accelerator.device) if draws else None
    how = (inputs, model, objective, decode)
    previews, scores = Previews(config.preview, *how), Scores(config.score, *how)
    if 0 < config.score.every <= last:
        judged = config.score.sampled(config.output, config.data.root, objective.name)
        channels = image_channels(inputs.vae or model)
        with accelerator.main_process_first():
            scores.scorer = make_scorer(judged, channels, **config.score.reads)
    return [previews, scores]


class Samples:
    """Samples of the same noise and labels at every training step; `failed` counts."""

    def __init__(
        self, config, inputs, model: nn.Module, objective: nn.Module, decode: Callable | None = None
    ):
        self.config, self.names, self.failed = config, inputs.source.classes, 0
        self.classes = torch.tensor(
            chosen_classes(f"{config.section}.classes", config.classes, self.names)
        )
        if 0 < config.every and config.cfg_scale != 1 and not self.names:
            said = f"{config.section}.cfg_scale {config.cfg_scale:g}"
            raise ValueError(
                f"{said} needs classes, and the images have none: set 1, for no guidance"
            )
        self.decode = decode or (lambda x: x)  # to images in [-1, 1]
        self.sampler = sampler_for(objective.name, config, f"{config.section}.sampler")
        how = (model.config.learn_sigma, inputs.space is None, getattr(objective, "shift", 1.0))
        try:
            self.scheduler = make_scheduler(self.sampler, config.steps, *how)
        except ValueError as error:
            raise ValueError(f"{config.section}.{error}") from None
        guide, vae = config.guide if config.every else None, inputs.space and vars(inputs.space)
        self.weak = open_guide(f"{config.section}.guide", guide, model, objective.name, vae)

    def labels(self, numbers: range) -> Tensor:
        """Return the classes of images, [len(numbers)]."""
        return self.classes[torch.arange(numbers.start, numbers.stop) % len(self.classes)]

    def sample(self, model: nn.Module, numbers: range, on_step: Callable | None = None) -> Tensor:
        """Return images uint8 [len(numbers), 1 or 3, h, w], on the CPU. The model's mode is restored."""
        c, m, mode = self.config, model.config, model.training
        labels = self.labels(numbers).to(next(model.parameters()).device)
        shape, seeds = (
            (m.in_channels, m.sample_size, m.sample_size),
            [c.seed + number for number in numbers],
        )
        guidance, weak = (
            Guidance(c.cfg_scale, weak_scale=c.guide_scale),
            weak_predict(model, self.weak),
        )
        how = (labels, shape, seeds, len(self.names), guidance, on_step, weak)
        model.eval()
        try:
            x = sample_images(lambda x, t, y: model(x, t, y).sample, self.scheduler, *how)
            return to_uint8(self.decode(x)).cpu()
        finally:
            model.train(mode)

    def announce(self, log, batches: int) -> Callable:
        """Return an `on_step` that says, once drawing begins, if it takes long."""
        steps, ends = len(self.scheduler.timesteps), []

        def on_step(*_) -> None:
            ends.append(time.monotonic())
            if len(ends) == 2:  # the first step warms up
                seconds = (ends[1] - ends[0]) * steps * batches
                if seconds >= LONG:
                    title = (
                        f"{self.config.section}: {self.config.images} images in {steps} steps each"
                    )
                    log.say(f"{title} take about {tqdm.format_interval(seconds)}")

        return on_step


class Previews(Samples):
    """Pictures, RUN/previews/step_N.png."""

    def draw(self, model: nn.Module, loop) -> None:
        """Write a grid on the log's process, and log its images; a failure is counted, not raised."""
        c, log, every = self.config, loop.log, range(self.config.images)
        path, starts = loop.folder / "previews" / f"step_{loop.done}.png", every[::BATCH]
        on_step = self.announce(log, len(starts))
        try:
            images = torch.cat([self.sample(model, every[i : i + BATCH], on_step) for i in starts])
            if log.enabled:
                narrow = len(self.names) <= ROWS and c.images <= COLUMNS * len(self.names)
                if c.classes or (c.columns is None and narrow):
                    how = (
                        self.labels(every),
                        self.classes.tolist(),
                        c.images,
                        str(path),
                        self.names,
                    )
                    draw_class_rows(images.__getitem__, *how)
                else:
                    draw_image_grid(images, min(c.columns or COLUMNS, c.images), str(path))
                log.pictures(loop.done, "samples", images)
                how = f"{self.sampler}, {c.steps} steps, {c.guidance}"
                if loop.ema:
                    how = f"{how}, {loop.averaged}"
                log.say(f"preview ({how}): {path}")
        except Exception as error:  # any error: a picture must not end the training
            self.failed += 1
            log.say(f"{path} could not be drawn: {message_of(error)}; training goes on")
        log.pause()


class Scores(Samples):
    """Fidelity scores, of samples that are in RUN/.scoring meanwhile."""

    scorer: Callable | None = None

    def draw(self, model: nn.Module, loop) -> None:
        """Log scores of samples that the processes share; a failure is counted and logged."""
        c, accelerator, folder = self.config, loop.accelerator, loop.folder / ".scoring"
        clear = partial(by_main, partial(shutil.rmtree, folder, ignore_errors=True), accelerator)
        open_parts = partial(ImageParts, folder, c.images, BATCH, dict(step=loop.done))
        drawn = []

        def draw_own() -> None:
            parts = open_parts()
            own = parts.missing(accelerator)
            on_step = self.announce(loop.log, len(own))
            for batch in own:
                parts.add(batch, self.sample(model, parts.numbers(batch), on_step))

        def score_all() -> None:
            scores, text = self.scorer(
                open_parts(), self.labels(range(c.images)), accelerator.device
            )
            guided = Guidance().guided(model.config.in_channels)
            how = dict(
                sampler=self.sampler,
                steps=c.steps,
                cfg_scale=c.cfg_scale,
                guide_channels=guided,
                seed=c.seed,
            )
            how.update(dict(guide=c.guide, guide_scale=c.guide_scale) if c.guide else {})
            how.update(labels="balanced", num_images=c.images, batch_size=BATCH)
            drawn.extend([dict(scores, sampling=how), text])

        clear()  # a killed run may have left samples of other weights
        problem = attempt(draw_own, Exception) or attempt(score_all, Exception)
        clear()
        self.failed += bool(problem)
        scores, text = (dict(error=problem), f"no scores: {problem}") if problem else drawn
        of = f" ({loop.averaged})" if loop.ema else ""
        loop.event({"scores": scores}, f"scores after {loop.done} steps{of}:\n{text}")
