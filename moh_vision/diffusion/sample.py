"""Sample from a diffusion run, draw a grid, score.   python sample.py --checkpoint RUN --num-images 500 --grid grid.png

RUN may also be a saved pipeline, or with --model NAME a file of published weights. Under `accelerate launch` processes
share the images, which do not depend on their number. The same command goes on after a kill.
Installed: python -m moh_vision.diffusion.sample; --help prints every option.
"""

import contextlib
import hashlib
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from moh_vision.attention import head_budget
from moh_vision.attention.measure import collect, measured_table
from moh_vision.diffusion import MoHDiTPipeline
from moh_vision.diffusion.config import SampleConfig, chosen_classes
from moh_vision.diffusion.image_grid import (
    WRITTEN,
    Denoising,
    draw_class_rows,
    draw_image_grid,
    refuse_strangers,
    write_images,
)
from moh_vision.diffusion.image_parts import ImageParts
from moh_vision.diffusion.latents.vae import image_channels, vae_fingerprint
from moh_vision.diffusion.loading import find_checkpoint, open_guide, open_pipeline
from moh_vision.diffusion.objectives import NUM_TIMESTEPS
from moh_vision.diffusion.sampling import to_uint8, weak_predict
from moh_vision.diffusion.scores import make_scorer, record_text
from moh_vision.engine.accelerator import finish, make_accelerator
from moh_vision.engine.attention_record import keep_settings
from moh_vision.engine.cli import refuse_unwritable
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.errors import user_errors
from moh_vision.engine.io import only_one, sha256_of, step_of, tensor_files
from moh_vision.engine.logging import peak_memory_mib, versions, write_json
from moh_vision.engine.progress import Progress
from moh_vision.engine.ranks import by_main, say
from moh_vision.engine.seeds import Stream, derive_seed
from moh_vision.evaluation.fidelity.reference import is_adm
from moh_vision.models.head_load import HeadLoad
from moh_vision.models.weight_files import kind_in, weights_file

NAME = "sample.py"
WORTH_MEASURING = 60  # seconds of drawing
# What the images depend on, beside the weights.
SAMPLING = (
    "sampler", "steps", "cfg_scale", "guide_channels", "cfg_interval", "seed", "labels", "mixed_precision", "head_budget"
)  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    held = contextlib.ExitStack()
    with user_errors(NAME):
        config = parse_config(SampleConfig, argv, NAME)
        accelerator = make_accelerator(config.mixed_precision)
        find_checkpoint(config)
        if accelerator.is_main_process:
            say(f"loading {config.checkpoint}")
        pipe, metadata = open_pipeline(config)
        drawing = Drawing(config, pipe, metadata, accelerator)
        claim_outputs(config, metadata)
        with accelerator.main_process_first():
            drawing.open_scorer()
        record = drawing.record()
        place = (
            Path(config.out).absolute().parent
            if config.out
            else (metadata["run"] or Path()).absolute()
        )
        parts = ImageParts(
            place, config.num_images, config.batch_size, record["sampling"], bool(config.head_load)
        )
        # All processes have looked at what is there when one of them begins to write.
        by_main(lambda: held.enter_context(only_one(parts.folder, "samples in")), accelerator)
        kept = keep_settings(parts.folder, accelerator, held)
        if kept and kept.settle(build=True):
            raise ValueError(
                f"{parts.folder} was begun otherwise: {'; '.join(kept.refused)}; delete it to start over"
            )
        if kept:
            by_main(lambda: kept.save(parts.folder), accelerator)
    if config.save_pipeline and accelerator.is_main_process:
        pipe.save_pretrained(config.save_pipeline)
        say(f"pipeline: {config.save_pipeline}, weights of {metadata['weights']}")
    if config.protocol and not config.score:
        say(record_text(record))

    if config.num_images:
        say(
            f"{config.num_images} images, {drawing.how}, {config.labels} labels, {metadata['weights']}"
        )
    denoising = (
        Denoising(config.denoising, len(pipe.scheduler.timesteps)) if config.denoising else None
    )
    if kept and kept.table is None:
        drawing.measure(parts, kept)
    load = drawing.draw(parts, denoising)
    accelerator.wait_for_everyone()

    if accelerator.is_main_process:
        drawing.write(parts)
        if denoising:
            denoising.save(
                [
                    drawing.names[c]
                    for c in drawing.labels[: len(denoising.frames[0])]
                    if drawing.names
                ]
            )
            say(f"denoising, from noise to image: {config.denoising}")
    if config.score:
        with user_errors(NAME):  # what fails on one process fails on all
            scores, text = drawing.scorer(parts, drawing.labels, accelerator.device)
        if accelerator.is_main_process:
            scores.update(weights=metadata["weights"], step=metadata.get("step"), **record)
            write_json(Path(config.score_file), scores)
            say(f"{text}\n{record_text(record)}\nscores: {config.score_file}")
    if config.head_load and accelerator.is_main_process:
        load.sums = parts.sums()
        model, weights = metadata["architecture"], metadata["weights"]
        load.of = dict(
            model=model, data=f"{config.num_images} samples", split=drawing.how, weights=weights
        )
        load.save(Path(config.head_load))
        say(f"head load: {config.head_load}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        held.close()  # before its file is removed, which NFS does not do to an open one
        shutil.rmtree(parts.folder)
    finish(accelerator)


def claim_outputs(config: SampleConfig, metadata: dict) -> None:
    """Settle --score-file, make the parents of all outputs, and refuse what cannot be written."""
    run, step = metadata["run"], step_of(metadata["file"].parent)
    if config.score and not run and not config.score_file:
        raise ValueError(
            f"--score-file is needed: {config.checkpoint} is no run, whose folder would take the scores"
        )
    own = "scores.json" if step is None else f"scores_step_{step}.json"
    config.score_file = str(Path(config.score_file or run / own)) if config.score else None
    outputs = ("grid", "denoising", "head_load", "score_file", "out", "save_pipeline")
    paths = {name: Path(getattr(config, name)) for name in outputs if getattr(config, name)}
    for name, path in paths.items():
        is_folder = name == "save_pipeline" or name == "out" and path.suffix != ".npz"
        option = f"--{name.replace('_', '-')}"
        if list(paths.values()).count(path) > 1:
            raise ValueError(f"{option} {path} is given for two outputs")
        if path.is_dir() and not is_folder:
            raise ValueError(f"{option} {path} is a folder, expected a file")
        if path.is_file() and is_folder:
            raise ValueError(f"{option} {path} is a file, expected a folder")
        there = {file.name for file in path.iterdir()} if path.is_dir() else {path.name}
        if not config.overwrite and path.exists() and there - {WRITTEN}:
            use = (
                f"; {fidelity_command(config)} scores what is there"
                if config.score and name == "out"
                else ""
            )
            raise ValueError(f"{option} {path} exists; give another path, or --overwrite true{use}")
        if name == "out" and path.is_dir():
            strangers = refuse_strangers(option, path, config.num_images)
            if strangers:
                more = f" and {len(strangers) - 1} more" if strangers[1:] else ""
                say(
                    f"{option} {path} also holds {strangers[0]}{more}, which sample.py did not write and leaves there"
                )
        refuse_unwritable(option, path)
        path.parent.mkdir(parents=True, exist_ok=True)


def fidelity_command(config: SampleConfig) -> str:
    """Return the shell command that scores existing samples."""
    command = ["python", "-m", "moh_vision.evaluation.fidelity", config.out, config.score]
    for option in ("score_split", "extractor", "inception_weights"):
        if value := getattr(config, option):
            command += [f"--{option.replace('score', 'reference').replace('_', '-')}", value]
    return shlex.join([*command, *["--allow-biased"] * config.allow_biased])


def weights_sha256(file: Path) -> str:
    """Return the SHA-256 of a file of weights; in parts, as of a sharded run, of the lines with theirs."""
    sums = [sha256_of(shard) for shard in tensor_files(file)]
    return sums[0] if len(sums) == 1 else hashlib.sha256("\n".join(sums).encode()).hexdigest()


class Drawing:
    """The images that a `SampleConfig` asks for; image i has its own class and noise."""

    def __init__(self, config: SampleConfig, pipe: MoHDiTPipeline, metadata: dict, accelerator):
        self.config, self.pipe, self.accelerator = config, pipe.to(accelerator.device), accelerator
        self.names, self.file = metadata["classes"], metadata["file"]
        expected = metadata["objective"], metadata["vae"] or pipe.vae
        self.weak = open_guide("--guide", config.guide, pipe.transformer, *expected)
        pipe.set_progress_bar_config(disable=True)
        kind = self.file.stem if metadata["run"] else kind_in(self.file, config.weights)
        self.ema = {"ema": True, "model": False}.get(kind)  # None: the file does not tell
        against_adm = bool(config.score) and is_adm(config.score)
        if config.protocol and self.ema is False:
            raise ValueError(
                f"protocol {config.protocol} samples with EMA weights, and {self.file} holds none"
            )
        if config.protocol and config.score and not against_adm:
            statistics = "ADM's statistics (an .npz with mu and sigma, such as VIRTUAL_imagenet256_labeled.npz)"
            raise ValueError(
                f"--score {config.score}: protocol {config.protocol} compares with {statistics}"
            )
        config.labels = config.labels or ("random" if against_adm else "balanced")
        self.classes = chosen_classes("--classes", config.classes, self.names)
        draws = range(config.num_images)
        if config.labels == "random":
            draws = (derive_seed(config.seed, i, Stream.DIFFUSION) for i in draws)
        self.labels = torch.tensor(
            [self.classes[i % len(self.classes)] for i in draws], dtype=torch.long
        )

    def open_scorer(self, **reads) -> None:
        """Open what --score compares with, if anything."""
        if self.config.score:
            channels = image_channels(self.pipe.vae or self.pipe.transformer)
            self.scorer = make_scorer(self.config, channels, self.names, **reads)

    @property
    def how(self) -> str:
        """Sampler and guidance, in words."""
        c, (low, high) = self.config, self.config.cfg_interval
        partly = (c.cfg_scale != 1 or c.guide) and (low, high) != (0, 1)
        between = f" between {low:g} and {high:g} of the timesteps" if partly else ""
        return f"{c.sampler} {self.pipe.scheduler.num_inference_steps} steps, {c.guidance}{between}"

    def record(self) -> dict:
        """Return what scores.json says of the images: protocol, sampling and versions."""
        c, vae = self.config, self.pipe.vae
        how = dict({name: getattr(c, name) for name in SAMPLING}, ema=self.ema)
        if c.classes is not None:
            how["classes"] = self.classes
        if c.guide:
            how.update(guide=c.guide, guide_scale=c.guide_scale)
            how["guide_sha256"] = (
                None if c.guide == self.weak else weights_sha256(weights_file(c.guide))
            )
        how.update(
            num_images=c.num_images,
            batch_size=c.batch_size,
            vae=vae and vae.config.get("_name_or_path"),
        )
        how.update(
            weights_sha256=weights_sha256(self.file), vae_sha256=vae and vae_fingerprint(vae)
        )
        return dict(protocol=c.protocol, sampling=how, versions=versions())

    def one_pass(self, size: int, predict: Callable | None = None) -> Callable[[], Any]:
        """Return a function that makes a pass of the model, or of `predict`, over so many images."""
        model, generator = self.pipe.transformer, torch.Generator().manual_seed(self.config.seed)
        m = model.config
        noise = torch.randn(size, m.in_channels, m.sample_size, m.sample_size, generator=generator)
        timesteps = torch.randint(NUM_TIMESTEPS, (size,), generator=generator)
        labels = self.labels[torch.arange(size) % len(self.labels)]
        inputs = send_to_device((noise, timesteps, labels), self.accelerator.device)

        def forward() -> Any:
            with self.accelerator.autocast():
                return (predict or model)(*inputs)

        return forward

    def measure(self, parts: ImageParts, kept) -> None:
        """Measure where skipping heads pays, if drawing takes over a minute, for an `AttentionRecord`."""
        calls: dict = {}
        todo, size, model = (
            len(parts.missing(self.accelerator)),
            len(parts.numbers(0)),
            self.pipe.transformer,
        )
        passes = [(model, self.one_pass(size * (2 if self.config.cfg_scale != 1 else 1)))]
        if self.weak:
            weak = model if isinstance(self.weak, str) else self.weak
            passes.append((weak, self.one_pass(size, weak_predict(model, self.weak))))
        for _ in range(2 if todo else 0):  # the first time also warms up
            forward = sum(collect(calls, of, one_pass, training=False) for of, one_pass in passes)
        short = not todo or forward * todo * len(self.pipe.scheduler.timesteps) < WORTH_MEASURING
        empty = ({}, "") if short else None
        kept.measure(
            lambda: empty or measured_table(calls, forward),
            parts.folder,
            self.accelerator,
        )

    def draw(self, parts: ImageParts, denoising: Denoising | None = None) -> HeadLoad:
        """Draw this process's missing images; return a `HeadLoad` whose sums are in `parts`."""
        c, pipe, accelerator = self.config, self.pipe, self.accelerator
        names = [*self.names, "none"] if c.cfg_scale != 1 or not self.names else self.names
        # Heun's has most of them twice.
        places = {
            t: place for place, t in enumerate(dict.fromkeys(pipe.scheduler.timesteps.tolist()))
        }
        groups = {"class": names, "timestep": [f"{t:g}" for t in places]}
        load = HeadLoad(head_budget(pipe.transformer)["layers"], groups)

        def count(stats: list, labels: Tensor, t: Tensor) -> None:
            load.add(stats, labels, places[t[0].item()])

        todo = parts.missing(accelerator)
        here = len(range(accelerator.process_index, parts.count, accelerator.num_processes))
        if len(todo) < here:
            say(f"{here - len(todo)} of {here} batches of this process are there already")
        if denoising and accelerator.is_main_process and 0 not in todo:
            todo = [0, *todo]  # nobody kept how its images came about
        steps = len(todo) * len(pipe.scheduler.timesteps)
        with (
            user_errors(NAME, (FloatingPointError, OSError), every_rank=True, code=1),
            Progress("sampling", steps, "step", enabled=accelerator.is_main_process) as progress,
        ):

            def after_step(pipe: MoHDiTPipeline, step: int, t: Tensor, inputs: dict) -> None:
                progress.add()
                if denoising and numbers.start == 0:
                    denoising.add(pipe, step, inputs["latents"])

            how = (c.cfg_scale, c.guide_channels, c.cfg_interval, c.steps)
            more = dict(callback_on_step_end=after_step, on_routing=count if c.head_load else None)
            more.update(guide=self.weak, guide_scale=c.guide_scale)
            for number in todo:
                numbers = parts.numbers(number)
                progress.note(f"images {numbers.start + 1} to {numbers.stop} of {c.num_images}")
                load.sums.zero_()
                labels = self.labels[numbers.start : numbers.stop]
                noise = [torch.Generator().manual_seed(derive_seed(c.seed, i)) for i in numbers]
                with accelerator.autocast():
                    latents = pipe(labels, *how, noise, output_type="latent", **more).images
                    parts.add(number, to_uint8(pipe.decode(latents)), load.sums)
                progress.note(
                    f"{numbers.stop} of {c.num_images} images, peak {peak_memory_mib():.0f} MiB"
                )
        return load

    def write(self, parts: ImageParts) -> None:
        """Write --out and --grid."""
        c, labels = self.config, self.labels
        if c.out:
            write_images(parts.batches(), labels, Path(c.out))
            say(f"images: {c.out}")
        if c.grid and not self.names:
            count = min(c.num_images, 10 * c.grid_columns)
            draw_image_grid(parts.images(list(range(count))), min(c.grid_columns, count), c.grid)
            say(f"grid of {count} images: {c.grid}")
        elif c.grid:
            wanted = self.classes if c.classes else sorted(set(labels.tolist()))[:10]
            rows = draw_class_rows(parts.images, labels, wanted, c.grid_columns, c.grid, self.names)
            every = len(self.classes)
            of = "" if rows == every else f" ({rows} of {every} classes; --classes chooses)"
            say(f"grid, one class a row{of}: {c.grid}")


if __name__ == "__main__":
    main()
