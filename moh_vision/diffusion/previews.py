"""Pictures of a diffusion model, and its scores, while it trains."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Callable, Optional, Tuple

import torch
from torch import Tensor, nn

from moh_vision.analysis.figures import draw_image_grid
from moh_vision.diffusion.sampling import Guidance, make_scheduler, sample_images, to_uint8
from moh_vision.engine.commands import message_of
from moh_vision.engine.image_parts import ImageParts
from moh_vision.engine.ranks import attempt

BATCH = 32  # images at a time


class Samples:
    """Samples of the same noise and labels, whatever the step and the number of processes.

    Args:
        config: a `DrawConfig`.
        num_classes: of the model; image i has class i modulo it.
        learned_variance: the model predicts the variance too.
        clip: whether predictions are clipped to [-1, 1], as for pixels.
        decode: what the model samples [B, C, h, w] -> images [B, 1 or 3, height, width] in [-1, 1]; None: the same.

    Attributes:
        failed: how often nothing could be drawn, or scored, since the process started.

    Raises:
        ValueError: if the sampler cannot take that number of steps.
    """

    def __init__(
        self,
        config,
        num_classes: int,
        learned_variance: bool,
        clip: bool,
        decode: Optional[Callable[[Tensor], Tensor]] = None,
    ):
        self.config, self.num_classes = config, num_classes
        self.decode = decode or (lambda x: x)
        self.failed = 0
        try:
            self.scheduler = make_scheduler(config.sampler, config.steps, learned_variance, clip)
        except ValueError as error:
            raise ValueError(f"{config.section}.{error}") from None

    def sample(self, model: nn.Module, numbers: range) -> Tensor:
        """Images uint8 [len(numbers), 1 or 3, height, width], on the CPU.

        The mode of the model is as before afterwards, and no global random number is drawn.
        """
        c, device, mode = self.config, next(model.parameters()).device, model.training
        labels = (torch.arange(numbers.start, numbers.stop) % self.num_classes).to(device)
        shape = (model.config.in_channels, model.config.sample_size, model.config.sample_size)
        seeds = [c.seed + number for number in numbers]

        def predict(x, t, y):
            return model(x, t, y).sample

        model.eval()
        try:
            x = sample_images(predict, self.scheduler, labels, shape, seeds, self.num_classes, Guidance(c.cfg_scale))
            return to_uint8(self.decode(x)).cpu()
        finally:
            model.train(mode)

    def draw(self, model: nn.Module, path: Path, log, step: int) -> None:
        """Write a PNG grid and hand its images to the log; every process may call it, and the log's own process writes.

        A failure is counted and logged. It does not end the training.

        Args:
            path: of the PNG.
            log: a `RunLog`.
            step: of the weights.
        """
        c = self.config
        starts = range(0, c.images, BATCH)
        try:
            images = torch.cat([self.sample(model, range(i, min(i + BATCH, c.images))) for i in starts])
            if log.enabled:
                draw_image_grid(images, min(c.columns, c.images), str(path))
                log.pictures(step, "samples", images)
        except Exception as error:  # whatever it is, the weights are worth more than their picture
            self.failed += 1
            log.say(f"{path} could not be drawn: {message_of(error)}; training goes on")

    def score(self, model: nn.Module, scorer: Callable, run: Path, step: int, accelerator) -> Tuple[dict, str]:
        """Scores of `images` samples that the processes share; every process calls it.

        A failure is counted. It does not end the training.

        Args:
            scorer: (ImageParts, labels, device, batch size) -> (scores, text), of `scores.make_scorer`.
            run: folder of the run; the samples stay in its subfolder .scoring while they are scored.
            step: of the weights.
            accelerator: accelerate's Accelerator.

        Returns:
            (scores, text); dict(error=...) where there are none.
        """
        folder, count = run / ".scoring", self.config.images
        labels, found = torch.arange(count) % self.num_classes, []
        open_parts = partial(ImageParts, folder, count, BATCH, dict(step=step))

        def clear() -> None:
            if accelerator.is_main_process:
                shutil.rmtree(folder, ignore_errors=True)

        def make_own() -> None:
            parts = open_parts()
            for batch in parts.missing(accelerator.process_index, accelerator.num_processes):
                parts.add(batch, self.sample(model, parts.numbers(batch)))

        def score_all() -> None:
            found.append(scorer(open_parts(), labels, accelerator.device, BATCH))

        clear()  # a killed run may have left samples of other weights
        accelerator.wait_for_everyone()
        problem = attempt(make_own, Exception) or attempt(score_all, Exception)
        clear()
        if problem:
            self.failed += 1
            return dict(error=problem), f"no scores: {problem}"
        return found[0]
