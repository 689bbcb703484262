"""Opens a diffusion model: a run, a saved pipeline, or weights with a model's name."""

from __future__ import annotations

import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from moh_vision.data.batches import BadSamples, calibration_halves
from moh_vision.data.imagenet import unnamed_classes
from moh_vision.diffusion import MoHDiTPipeline
from moh_vision.diffusion.config import OpenedDitConfig, SampleConfig, ScoreConfig
from moh_vision.diffusion.image_parts import ImageParts
from moh_vision.diffusion.inputs import PixelInputs, open_inputs
from moh_vision.diffusion.latents.vae import LatentSpace
from moh_vision.diffusion.loading import open_pipeline, published_model, read_pipeline
from moh_vision.diffusion.objectives import NUM_TIMESTEPS, make_objective
from moh_vision.diffusion.sample import draw, draw_labels, open_scorer, settle
from moh_vision.diffusion.task import DiffusionTask
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.commands import reason_of
from moh_vision.engine.opened import Opened
from moh_vision.models.weight_files import weights_file, weights_said
from moh_vision.models.weights import create, from_run

KEPT = ("out", "grid", "denoising", "head_load", "save_pipeline", "score_file", "overwrite")  # outputs of sample.py


class OpenedDiffusion(Opened):
    """A diffusion model without a VAE. `config`: an `OpenedDitConfig`, or for scores a `SampleConfig`."""

    kind, loss_name = "diffusion", "diffusion loss at fixed timesteps and noise"
    scored_on = "{c.num_images} samples, {c.sampler} {c.steps} steps, guidance {c.cfg_scale:g}; reference {c.score}"

    @cached_property
    def objective(self) -> nn.Module:
        if "config" not in self.metadata:
            raise ValueError(
                f"{self.metadata['weights']}: of no run, whose configuration says how the model was trained"
            )
        return make_objective(self.metadata["config"])

    def opened_inputs(self, split: str) -> PixelInputs:
        """Open the images or latents of a split; image i has the timestep and noise of (0, i)."""
        if split not in self.splits:
            config, about = self.config, self.metadata
            d, path = config.data, config.checkpoint
            inputs = open_inputs(d.root, config.vae, d.img_size, "none", self.accelerator.device, split=split)
            sizes = [about["arguments"][key] for key in ("img_size", "in_chans", "num_classes")]
            given = [inputs.img_size, inputs.channels, len(inputs.source.classes)]
            if sizes != given:
                raise ValueError(
                    f"data.root {d.root} has side, channels and classes {given}, the model of {path} takes {sizes}"
                )
            trained = about.get("vae") and LatentSpace(**about["vae"])
            made = inputs.space
            if (trained and trained.sha256) != (made and made.sha256):
                raise ValueError(
                    f"data.root {d.root}: latents of the VAE {made}, {path} was trained on those of {trained}"
                )
            self.splits[split] = inputs
        return self.splits[split]

    def data(self, split: str) -> Any:
        return self.opened_inputs(split).dataset(0, self.objective.draw, 0.0)

    def halves(self, count: int) -> Tuple[List[dict], List[dict]]:
        inputs, images = self.opened_inputs("train"), self.data("train")
        device = self.accelerator.device
        unreadable = BadSamples(len(inputs.source), self.config.data.max_bad_fraction)
        halves = calibration_halves(images, count, self.config.data.workers, unreadable)

        def encode(batch: dict) -> dict:
            return send_to_device(inputs.encode(send_to_device(batch, device), self.accelerator.autocast()), "cpu")

        return tuple([encode(batch) for batch in half] for half in halves)

    def inputs(self, batch: dict) -> Tuple[Tensor, Tensor, Tensor]:
        noisy = self.objective.add_noise(batch["images"], batch["noise"], batch["timesteps"])
        return noisy, batch["timesteps"], batch["labels"]

    def loss(self, batch: dict) -> Tensor:
        device = self.accelerator.device
        task = DiffusionTask(self.model, 0.0, self.objective).to(device).eval()
        with self.accelerator.autocast():
            return task(**send_to_device(batch, device))["task_loss"]

    @cached_property
    def _judge(self) -> Tuple[SampleConfig, MoHDiTPipeline, Tensor, Callable]:
        """Return what scoring needs: sample.py's configuration, a pipeline with our model, labels, scorer."""
        config = self.config
        if isinstance(config, OpenedDitConfig):  # as the section score of the run says
            said = ScoreConfig(**self.metadata["config"]["score"])
            drawn = {key: getattr(said, key) for key in ("steps", "cfg_scale", "seed")}
            drawn["sampler"] = said.sampler or said.default_sampler[self.objective.name]
            by = said.scoring(config.data.root)
            judged = {key: by[key] for key in ("extractor", "inception_weights", "allow_biased", "num_images")}
            split = by["split"] or by["default_split"] * (said.reference is None)
            judged.update(score=by["reference"], score_split=split or None)
            config = SampleConfig(checkpoint=config.checkpoint, **drawn, **judged)
        pipe, about = self.splits.get("pipeline") or open_pipeline(config)
        chosen, _ = settle(config, about)
        scorer = open_scorer(config, pipe, about)
        pipe.register_modules(transformer=self.model)
        pipe.to(self.accelerator.device).set_progress_bar_config(disable=True)
        return config, pipe, draw_labels(config, chosen), scorer

    def scores(self) -> Dict[str, Any]:
        """Score samples of the same noise, whatever heads run."""
        config, pipe, labels, scorer = self._judge
        with tempfile.TemporaryDirectory() as folder:
            parts = ImageParts(Path(folder), config.num_images, config.batch_size, {})
            draw(config, self.accelerator, pipe, parts, labels, self.metadata["classes"])
            found, _ = scorer(parts, labels, self.accelerator.device, config.batch_size)
        for key in ("recognised", "recognised_real"):
            if found.get(key) is not None:
                found[key] *= 100  # percent, as in tables
        return found

    def forward(self) -> Tuple[Callable[[], Any], int]:
        config, _, labels, _ = self._judge
        generator = torch.Generator().manual_seed(config.seed)
        count = min(config.batch_size, config.num_images)
        noise = torch.randn(count, *self.example()[0][0].shape[1:], generator=generator)
        timesteps = torch.randint(NUM_TIMESTEPS, (count,), generator=generator)
        inputs = send_to_device((noise, timesteps, labels[:count]), self.accelerator.device)

        def forward() -> Any:
            with self.accelerator.autocast():
                return self.model(*inputs)

        return forward, count

    def example(self) -> Tuple[List[Tensor], dict]:
        m = self.model.config
        zeros = torch.zeros(1, dtype=torch.long)  # timestep and class
        return [torch.zeros(1, m.in_channels, m.sample_size, m.sample_size), zeros, zeros], {}


def open_run(
    path: str,
    weights: Optional[str] = None,
    device: Optional[torch.device] = None,
    options: Sequence[str] = (),
    *,
    name: Optional[str] = None,
    scores: bool = False,
    command: str = "open_run",
    **_,
) -> OpenedDiffusion:
    """See `moh_vision.open_run`. Options: of `OpenedDitConfig`, or with `scores` of sample.py."""
    if scores:
        config = parse_scored(path, options, command)
        pipe, about = open_pipeline(config)
        said = dict(about, weights=weights_said(about["weights"], config.weights))
        return OpenedDiffusion(config, pipe.transformer.to(device or "cpu").eval(), said, dict(pipeline=(pipe, about)))
    config = OpenedDitConfig(checkpoint=path)
    if not name and not Path(path, "model_index.json").is_file():
        config = parse_config(OpenedDitConfig, ["--checkpoint", path, *options], command)
    model, about = open_transformer(path, name, weights or "ema")
    return OpenedDiffusion(config, model.to(device or "cpu"), about)


def parse_scored(path: str, options: Sequence[str], command: str) -> SampleConfig:
    """Read options of sample.py, for scores of samples that are not kept."""
    given = {option.partition("=")[0].replace("-", "_").removeprefix("__") for option in options if option[:2] == "--"}
    for name in KEPT:
        if name in given:
            raise ValueError(f"{name} has no effect: the samples are scored and not kept")
    if "score" not in given:
        raise ValueError("--score REFERENCE is needed, as sample.py takes it")
    return parse_config(SampleConfig, ["--checkpoint", path, *options], command)


def open_transformer(path: str, name: Optional[str] = None, weights: str = "ema") -> Tuple[nn.Module, dict]:
    """Open a model in eval mode, without a VAE; also return its metadata.

    `path`: a run, a saved pipeline or, with a model's `name`, published weights; the `name` itself fetches them.
    """
    if name:
        if path == name:
            try:
                model, said = create(name, "diffusion", pretrained=True).eval(), name
            except (RuntimeError, OSError) as error:  # none are published, or the fetch failed
                raise ValueError(f"{name}: no weights ({reason_of(error)}); give --checkpoint FILE") from None
        else:
            model, said = published_model(path, name, weights), weights_said(weights_file(path))
        classes = unnamed_classes(model.config.num_classes)
        return model, dict(architecture=name, classes=classes, weights=said, objective="noise")
    if (Path(path) / "model_index.json").is_file():
        pipe, classes = read_pipeline(Path(path))
        about = dict(architecture=Path(path).name, classes=classes, weights=str(weights_file(path)))
        return pipe.transformer.eval(), dict(about, objective=pipe.config.objective)
    model, about = from_run(path, "diffusion", weights)
    return model, dict(about, objective=make_objective(about["config"]).name)
