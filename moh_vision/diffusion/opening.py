"""Open a diffusion model of a finished run, with its data, loss and scores."""

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from moh_vision.data.batches import BadSamples, calibration_halves
from moh_vision.data.decode import Decoding
from moh_vision.data.splits import match_classes
from moh_vision.diffusion.config import OpenedDitConfig, SampleConfig, ScoreConfig
from moh_vision.diffusion.image_parts import ImageParts
from moh_vision.diffusion.inputs import PixelInputs, open_inputs
from moh_vision.diffusion.latents.vae import LatentSpace
from moh_vision.diffusion.loading import (
    find_checkpoint,
    make_pipeline,
    open_model,
    open_pipeline,
)
from moh_vision.diffusion.objectives import make_objective
from moh_vision.diffusion.sample import Drawing
from moh_vision.diffusion.task import DiffusionTask
from moh_vision.engine.command_line import SavedConfig, named_options, parse_config
from moh_vision.engine.opened import Opened, refuse_options
from moh_vision.engine.ranks import say
from moh_vision.models.weights import OF_RUNS, Weights

# Options of sample.py that write files. `OpenedDiffusion.scores` writes none.
KEPT = (
    "out",
    "grid",
    "denoising",
    "head_load",
    "save_pipeline",
    "score_file",
    "overwrite",
)


class OpenedDiffusion(Opened):
    """A diffusion model that was opened without its VAE.

    `config` is an `OpenedDitConfig`, or a `SampleConfig` if the model was opened for scores.

    Attributes:
        first: what `drawn_with` made this one of, or None.
        seconds: that the last `scores` drew for.
    """

    first: "OpenedDiffusion | None" = None
    seconds: float = 0.0

    kind = "diffusion"
    loss_name = "diffusion loss at fixed timesteps and noise"
    scored_on = (  # a format string, see `Opened`
        "{c.num_images} samples, {c.sampling_in_words}; reference {c.score}"
    )

    @cached_property
    def objective(self) -> nn.Module:
        """The objective that the model was trained with; ValueError for weights without a configuration."""
        if "config" not in self.metadata:
            said = "of no run, whose configuration says how the model was trained"
            raise ValueError(f"{self.metadata['weights']}: {said}")
        return make_objective(self.metadata["config"])

    def opened_inputs(self, split: str) -> PixelInputs:
        """Open the images or latents of a split, once; ValueError if they do not fit the model or its VAE."""
        if split in self.splits:
            return self.splits[split]
        data = self.config.data
        path = self.config.checkpoint
        device = self.accelerator.device
        inputs = open_inputs(
            data.root,
            self.config.vae,
            data.img_size,
            "none",
            device,
            split=split,
            decoding=Decoding.of(data),
        )
        sizes = [self.metadata["arguments"][key] for key in ("img_size", "in_chans", "num_classes")]
        given = [inputs.img_size, inputs.channels, len(inputs.source.classes)]
        if sizes != given:
            takes = f"the model of {path} takes {sizes}"
            raise ValueError(
                f"data.root {data.root} has side, channels and classes {given}, {takes}"
            )
        for remark in inputs.source.remarks:
            say(remark)
        named = f"data.root {data.root}"
        match_classes(self.metadata["classes"], f"--checkpoint {path}", inputs.source, named)
        trained = None
        if self.metadata["vae"]:
            trained = LatentSpace(**self.metadata["vae"])
        # The sha256 of the VAE; None for pixels.
        vae_of_model = trained and trained.sha256
        vae_of_data = inputs.space and inputs.space.sha256
        if vae_of_model != vae_of_data:
            raise ValueError(
                f"data.root {data.root}: latents of the VAE {inputs.space}, {path} was trained on those of {trained}"
            )
        self.splits[split] = inputs
        return inputs

    def data(self, split: str) -> Any:
        # Read `objective` before opening data: it raises ValueError for weights that are not of a run.
        draw = self.objective.draw
        # Seed 0: image i always has the timestep and noise of (0, i). No label is dropped.
        return self.opened_inputs(split).dataset(seed=0, draw=draw, label_drop=0.0)

    def halves(self, count: int) -> tuple[list[dict], list[dict]]:
        images = self.data("train")
        inputs = self.opened_inputs("train")
        unreadable = BadSamples(len(inputs.source), self.config.data.max_bad_fraction)
        halves = calibration_halves(images, count, self.config.data.workers, unreadable)
        return tuple(
            [inputs.encoded_on_cpu(batch, self.accelerator) for batch in half] for half in halves
        )

    def inputs(self, batch: dict) -> tuple[Tensor, Tensor, Tensor]:
        noisy = self.objective.add_noise(batch["images"], batch["noise"], batch["timesteps"])
        return noisy, batch["timesteps"], batch["labels"]

    def loss(self, batch: dict) -> Tensor:
        device = self.accelerator.device
        task = DiffusionTask(self.model, balance_weight=0.0, diffusion=self.objective)
        task.to(device).eval()
        with self.accelerator.autocast():
            return task(**send_to_device(batch, device))["task_loss"]

    @cached_property
    def drawing(self) -> Drawing:
        """The `Drawing` that scores need, from options of sample.py or else from the run's `score` section."""
        config = self.config
        reads = {}
        if isinstance(config, OpenedDitConfig):
            section = ScoreConfig(**self.metadata["config"]["score"])
            config = section.sampled(config.checkpoint, config.data.root, self.model.prediction)
            reads = dict(section.reads, decoding=Decoding.of(self.config.data))
        pipe = self.splits.get("pipeline") or make_pipeline(config, self.model, self.metadata)
        pipe.register_modules(transformer=self.model)
        like = self.first and self.first.drawing
        drawing = Drawing(config, self.weights, pipe, self.metadata, self.accelerator, like)
        drawing.open_scorer(**reads)
        return drawing

    def open_drawing(self) -> None:
        """Open the reference and the guide now; ValueError if they do not fit."""
        _ = self.drawing

    def drawn_with(self, options: Sequence[str], command: str) -> "OpenedDiffusion":
        """Open the same weights with other options of sample.py, but those of --score.

        Model, VAE, guide and the opened reference are shared; a model or guide only if the options choose the same.

        Args:
            options: all options.
            command: what messages call the program.
        """
        config = parse_scored(self.weights.source, options, command, None)
        found = self.weights
        model = self.model
        metadata = self.metadata
        if config.weights != self.config.weights:
            found = find_checkpoint(config)
            model, metadata = open_model(found, self.accelerator.device)
        pipe = make_pipeline(config, model, metadata, self.splits["pipeline"].vae)
        other = OpenedDiffusion(found, config, model, metadata, dict(pipeline=pipe))
        other.first = self
        return other

    def scores(self) -> dict[str, Any]:
        """Draw samples and score them. The samples begin from the same noise at every head budget."""
        drawing = self.drawing
        config = drawing.config
        with tempfile.TemporaryDirectory() as folder:
            parts = ImageParts(Path(folder), config.num_images, config.batch_size, {})
            began = time.monotonic()
            drawing.draw(parts)
            self.seconds = time.monotonic() - began
            scores, _ = drawing.scorer(parts, drawing.labels, self.accelerator.device)
        for key in ("recognised", "recognised_real"):
            if scores.get(key) is not None:
                scores[key] *= 100  # percent, as in tables
        return scores

    def make_forward(self) -> tuple[Callable[[], Any], int]:
        count = self._batch
        _, forward = self.drawing.one_step(count)
        return forward, count

    def passes_beside(self) -> list[tuple[nn.Module, Callable[[], Any]]]:
        drawing = self.drawing
        # With the weak model that guides, if there is one.
        step = drawing.one_step(self._batch)
        scoring = drawing.scorer.passes(drawing.config.batch_size, self.accelerator.device)
        return [step, *scoring]

    @property
    def _batch(self) -> int:
        """Number of images that are drawn at a time."""
        return min(self.drawing.config.batch_size, self.drawing.config.num_images)

    def example(self) -> tuple[list[Tensor], dict]:
        config = self.model.config
        images = torch.zeros(1, config.in_channels, config.sample_size, config.sample_size)
        zeros = torch.zeros(1, dtype=torch.long)  # timestep and class
        return [images, zeros, zeros], {}


def open_weights(
    found: Weights,
    options: Sequence[str],
    device,
    *,
    scores: bool,
    command: str,
    saved: SavedConfig | None,
) -> OpenedDiffusion:
    """Open a diffusion model, see `moh_vision.opening.open_weights`.

    Args:
        found: its weights.
        options: command-line options, of `OpenedDitConfig` or, with `scores`, of sample.py.
        device: where the model goes; None: the CPU.
        scores: open the model for `OpenedDiffusion.scores`, with options of sample.py.
        command: what messages call the program.
        saved: the run's config.yaml, if it was read before.
    """
    path = found.source
    if scores:
        if found.asked:
            raise ValueError(
                f"weights {found.asked!r} has no effect: the options say what is scored"
            )
        config = parse_scored(path, options, command, saved)
        found = find_checkpoint(config)
        pipe, metadata = open_pipeline(config, found)
        model = pipe.transformer.to(device or "cpu")
        return OpenedDiffusion(found, config, model, metadata, dict(pipeline=pipe))
    config = OpenedDitConfig(checkpoint=path)
    if found.form in OF_RUNS:
        asked = ["--checkpoint", path, *options]
        config = parse_config(OpenedDitConfig, asked, command, saved)
    else:
        refuse_options(options, f"{path} is of no run, whose data they would change")
    model, metadata = open_model(found, device)
    return OpenedDiffusion(found, config, model, metadata)


def parse_scored(
    path: str, options: Sequence[str], command: str, saved: SavedConfig | None
) -> SampleConfig:
    """Parse options of sample.py. Raise ValueError if --score is missing, or if an option of KEPT is given."""
    given = {name for name, _ in named_options(options)}
    for name in KEPT:
        if name in given:
            raise ValueError(f"{name} has no effect: the samples are scored and not kept")
    if "score" not in given:
        raise ValueError("--score REFERENCE is needed, as sample.py takes it")
    return parse_config(SampleConfig, ["--checkpoint", path, *options], command, saved)
