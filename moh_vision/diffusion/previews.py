"""Draw and score samples of a diffusion model while it trains."""

import shutil
import time
from collections.abc import Callable
from functools import partial

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from tqdm import tqdm

from moh_vision.common.errors import message_of
from moh_vision.diffusion.config import chosen_classes
from moh_vision.diffusion.image_grid import draw_class_rows, draw_image_grid
from moh_vision.diffusion.image_parts import ImageParts
from moh_vision.diffusion.latents.vae import image_channels
from moh_vision.diffusion.loading import open_guide
from moh_vision.diffusion.objectives import NUM_TIMESTEPS
from moh_vision.diffusion.sampling import (
    Guidance,
    all_that_predicts,
    predicted,
    sample_images,
    to_uint8,
    weak_predict,
)
from moh_vision.diffusion.schedulers import (
    make_scheduler,
    sampler_in_words,
    step_count,
)
from moh_vision.diffusion.scores import Scorer, make_scorer
from moh_vision.engine.ranks import attempt, by_main

BATCH = 32  # images in one forward
LONG = 10  # seconds; drawing that takes at least this long is announced
ROWS = 10  # with at most this many classes, each class has a row
COLUMNS = 10  # images in a row


def open_drawings(setup, inputs, model: nn.Module) -> list["Samples"]:
    """Return the `Previews` and `Scores` of a run; open the VAE and the reference only if they will be needed."""
    config = setup.config
    accelerator = setup.accelerator
    last = config.max_steps
    draws = False  # whether a preview or a score will be drawn
    for keys in (config.preview, config.score):
        if keys.every > last:
            hint = f"--{keys.section}.every {last} asks for it"
            accelerator.print(f"{keys.section}.every {keys.every}: none in {last} steps; {hint}")
        elif keys.every > 0:
            draws = True
    if draws and not config.ema.decay and accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(
            "preview.every and score.every with FSDP need ema.decay, whose weights are whole"
        )
    decode = None
    with accelerator.main_process_first():
        if draws:
            decode = inputs.decoder(accelerator.device)
    previews = Previews(config.preview, inputs, model, decode)
    scores = Scores(config.score, inputs, model, decode)
    if 0 < config.score.every <= last:
        sample_config = config.score.sampled(config.output, config.data.root, model.prediction)
        channels = image_channels(inputs.vae or model)
        with accelerator.main_process_first():
            scores.scorer = make_scorer(
                sample_config, channels, decoding=inputs.source.decoding, **config.score.reads
            )
    return [previews, scores]


class Samples:
    """Draws samples with the same noise and labels at every training step; `failed` counts failures.

    Args:
        config: a `DrawConfig`.
        inputs: what the run trains on, see `open_inputs`.
        model: the model that trains.
        decode: samples [B, C, h, w] -> images in [-1, 1]; None: samples are images.
    """

    def __init__(self, config, inputs, model: nn.Module, decode: Callable | None = None):
        self.config = config
        self.names = inputs.source.classes
        self.failed = 0
        classes = chosen_classes(f"{config.section}.classes", config.classes, self.names)
        self.classes = torch.tensor(classes)
        if 0 < config.every and config.cfg_scale != 1 and not self.names:
            said = f"{config.section}.cfg_scale {config.cfg_scale:g}"
            raise ValueError(
                f"{said} needs classes, and the images have none: set 1, for no guidance"
            )
        self.guidance = Guidance(
            config.cfg_scale, interval=tuple(config.cfg_interval), weak_scale=config.guide_scale
        )
        self.decode = decode
        self.sampler = config.sampler_for(model.prediction)
        on_pixels = inputs.space is None
        try:
            self.scheduler = make_scheduler(
                self.sampler,
                config.steps,
                model.config.learn_sigma,
                clip=on_pixels,
                shift=model.prediction.shift,
            )
        except ValueError as error:
            raise ValueError(f"{config.section}.{error}") from None
        guide = config.guide if config.every else None
        vae = inputs.space and vars(inputs.space)
        self.weak = open_guide(f"{config.section}.guide", guide, model, vae)

    def labels(self, numbers: range) -> Tensor:
        """Return the classes of the images with these numbers, [len(numbers)]."""
        return self.classes[torch.arange(numbers.start, numbers.stop) % len(self.classes)]

    def sample(self, model: nn.Module, numbers: range, on_step: Callable | None = None) -> Tensor:
        """Draw images uint8 [len(numbers), 1 or 3, h, w], on the CPU; then restore the model's training mode."""
        labels = self.labels(numbers).to(next(model.parameters()).device)
        seeds = [self.config.seed + number for number in numbers]
        null_label = len(self.names)
        weak = weak_predict(model, self.weak)
        was_training = model.training
        model.eval()
        try:
            x = sample_images(
                partial(predicted, model),
                self.scheduler,
                labels,
                shape_of(model),
                seeds,
                null_label,
                self.guidance,
                on_step,
                weak,
                model.prediction.noise_scale,
            )
            if self.decode:
                x = self.decode(x)
            return to_uint8(x).cpu()
        finally:
            model.train(was_training)

    def passes(self, model: nn.Module) -> list[tuple[nn.Module, Callable[[], object]]]:
        """Return [(all that predicts in a step of a drawing, function that does so for its first batch)]."""
        labels = self.labels(range(self.config.images)[:BATCH]).to(next(model.parameters()).device)
        weak = weak_predict(model, self.weak)
        guided = self.guidance.around(partial(predicted, model), labels, len(self.names), weak)
        noise = torch.randn(len(labels), *shape_of(model)).to(labels.device)
        # In the middle of the interval, so that the step is a guided one.
        timestep = torch.tensor(NUM_TIMESTEPS * sum(self.guidance.interval) / 2)
        step = partial(guided, noise, timestep)
        return [(all_that_predicts(model, self.weak), step)]

    def announce(self, log, batches: int) -> Callable:
        """Return an `on_step` that times the second step, and logs how long drawing takes if that is long.

        Of a sampler that chooses its own steps nothing is logged: their number is not known.
        """
        steps = step_count(self.scheduler)
        step_ends: list[float] = []  # seconds

        def on_step(*_) -> None:
            step_ends.append(time.monotonic())
            # The first step warms up; from the third on there is nothing left to do.
            if steps is None or len(step_ends) != 2:
                return
            seconds = (step_ends[1] - step_ends[0]) * steps * batches
            if seconds >= LONG:
                title = f"{self.config.section}: {self.config.images} images in {steps} steps each"
                log.say(f"{title} take about {tqdm.format_interval(seconds)}")

        return on_step


def shape_of(model: nn.Module) -> tuple[int, int, int]:
    """Return the shape of an image of a model, [C, h, w]."""
    size = model.config.sample_size
    return model.config.in_channels, size, size


class Previews(Samples):
    """Draws pictures into RUN/previews/step_N.png."""

    def draw(self, model: nn.Module, loop) -> None:
        """Draw samples on every rank; the rank with the log writes and logs them. A failure is counted, not raised."""
        config = self.config
        log = loop.log
        path = loop.folder / "previews" / f"step_{loop.done}.png"
        numbers = range(config.images)
        starts = numbers[::BATCH]
        on_step = self.announce(log, len(starts))
        try:
            batches = [self.sample(model, numbers[i : i + BATCH], on_step) for i in starts]
            images = torch.cat(batches)
            if log.enabled:
                self._write(images, str(path))
                log.pictures(loop.done, "samples", images)
                sampling = f"{sampler_in_words(self.sampler, config.steps)}, {config.guidance}"
                if loop.ema:
                    sampling = f"{sampling}, {loop.ema_name}"
                log.say(f"preview ({sampling}): {path}")
        except Exception as error:  # whatever it is: a picture must not end the training
            self.failed += 1
            log.say(f"{path} could not be drawn: {message_of(error)}; training goes on")
        log.pause()

    def _write(self, images: Tensor, path: str) -> None:
        """Write all images as a grid, with one class a row if classes were chosen or there are few."""
        config = self.config
        few_classes = len(self.names) <= ROWS and config.images <= COLUMNS * len(self.names)
        if config.classes or (config.columns is None and few_classes):
            labels = self.labels(range(config.images))
            classes = self.classes.tolist()
            columns = config.images  # no limit: each row takes the images that its class has
            draw_class_rows(images.__getitem__, labels, classes, columns, path, self.names)
        else:
            draw_image_grid(images, min(config.columns or COLUMNS, config.images), path)


class Scores(Samples):
    """Scores the fidelity of samples, which are in RUN/.scoring until they are scored."""

    scorer: Scorer | None = None

    def passes(self, model: nn.Module) -> list[tuple[nn.Module, Callable[[], object]]]:
        """As in `Samples`; and those of the network that scores."""
        device = next(model.parameters()).device
        return [*super().passes(model), *self.scorer.passes(BATCH, device)]

    def draw(self, model: nn.Module, loop) -> None:
        """Draw samples, shared out among all ranks, and log their scores; a failure is counted and logged."""
        accelerator = loop.accelerator
        folder = loop.folder / ".scoring"
        clear = partial(by_main, partial(shutil.rmtree, folder, ignore_errors=True), accelerator)
        open_parts = partial(ImageParts, folder, self.config.images, BATCH, dict(step=loop.done))
        scores: dict = {}
        text = ""

        def draw_missing() -> None:
            parts = open_parts()
            missing = parts.missing(accelerator)
            on_step = self.announce(loop.log, len(missing))
            for batch in missing:
                parts.add(batch, self.sample(model, parts.numbers(batch), on_step))

        def score_all() -> None:
            nonlocal scores, text
            labels = self.labels(range(self.config.images))
            scores, text = self.scorer(open_parts(), labels, accelerator.device)
            scores = dict(scores, sampling=self._sampling(model))

        clear()  # a killed run may have left samples of earlier weights
        problem = attempt(draw_missing, Exception)
        if not problem:
            problem = attempt(score_all, Exception)
        clear()
        if problem:
            self.failed += 1
            scores = dict(error=problem)
            text = f"no scores: {problem}"
        weights = f" ({loop.ema_name})" if loop.ema else ""
        loop.event({"scores": scores}, f"scores after {loop.done} steps{weights}:\n{text}")

    def _sampling(self, model: nn.Module) -> dict:
        """Return how the scored images were made, for metrics.jsonl, as in the scores.json of sample.py."""
        config = self.config
        sampling = dict(
            sampler=self.sampler,
            steps=None if step_count(self.scheduler) is None else config.steps,
            cfg_scale=config.cfg_scale,
            guide_channels=Guidance().guided(model.config.in_channels),
            cfg_interval=list(config.cfg_interval),
            seed=config.seed,
        )
        if config.guide:
            sampling.update(guide=config.guide, guide_scale=config.guide_scale)
        sampling.update(labels="balanced", num_images=config.images, batch_size=BATCH)
        return sampling
