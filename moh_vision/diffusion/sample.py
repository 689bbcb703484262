"""Sample from a diffusion run, draw a grid, score.   python sample.py --checkpoint RUN --num-images 500 --grid grid.png

RUN may also be a saved pipeline, or with --model NAME a file of published weights. Under `accelerate launch` processes
share the images, which do not depend on their number. The same command goes on after a kill.
Installed: python -m moh_vision.diffusion.sample; --help prints every option.
"""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Callable, List, Optional, Tuple

import torch
from torch import Tensor

from moh_vision.attention import head_budget
from moh_vision.attention import settings as attention
from moh_vision.diffusion import MoHDiTPipeline
from moh_vision.diffusion.class_rows import chosen_classes, class_rows
from moh_vision.diffusion.config import SampleConfig
from moh_vision.diffusion.denoising import Denoising
from moh_vision.diffusion.image_grid import draw_image_grid, write_images
from moh_vision.diffusion.image_parts import ImageParts
from moh_vision.diffusion.latents.vae import vae_fingerprint
from moh_vision.diffusion.loading import open_pipeline
from moh_vision.diffusion.sampling import to_uint8
from moh_vision.diffusion.scores import make_scorer, record_text
from moh_vision.engine.attention_record import keep_settings
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.commands import Progress, refuse_missing, refuse_unwritable, user_errors
from moh_vision.engine.io import only_one, sha256_of, step_of
from moh_vision.engine.logging import peak_memory_mib, versions, write_json
from moh_vision.engine.ranks import by_main, say
from moh_vision.engine.run import finish, make_accelerator
from moh_vision.engine.seeds import Stream, derive_seed
from moh_vision.evaluation.fidelity.reference import is_adm
from moh_vision.models.head_load import HeadLoad
from moh_vision.models.weight_files import kind_in, weights_said

NAME = "sample.py"
WORTH_MEASURING = 60  # seconds of drawing
# What the images depend on, beside the weights.
SAMPLING = (
    "sampler", "steps", "cfg_scale", "guide_channels", "cfg_interval", "seed", "labels", "mixed_precision", "head_budget"
)  # fmt: skip


def main(argv: Optional[List[str]] = None) -> None:
    # ---------------------------------------------------------------- set-up
    held = contextlib.ExitStack()
    with user_errors(NAME):
        config = parse_config(SampleConfig, argv, NAME)
        accelerator = make_accelerator(config.mixed_precision)
        refuse_missing("--checkpoint", config.checkpoint)
        if accelerator.is_main_process:
            say(f"loading {config.checkpoint}")
        pipe, about = open_pipeline(config)
        classes, weights = about["classes"], Path(about["weights"])
        chosen, ema = settle(config, about)
        said = weights_said(weights, config.weights)
        run, step = about["run"], step_of(weights.parent)
        if config.score and not run and not config.score_file:
            raise ValueError(
                f"--score-file is needed: {config.checkpoint} is no run, whose folder would take the scores"
            )
        scores_name = "scores.json" if step is None else f"scores_step_{step}.json"
        scores_path = Path(config.score_file or run / scores_name) if config.score else None
        claim_outputs(config, scores_path)
        with accelerator.main_process_first():
            scorer = open_scorer(config, pipe, about) if config.score else None
        settings = {name: getattr(config, name) for name in SAMPLING}
        settings["ema"] = ema
        if config.classes is not None:
            settings["classes"] = chosen
        hashes = dict(weights=sha256_of(weights), vae=pipe.vae and vae_fingerprint(pipe.vae))
        place = Path(config.out).absolute().parent if config.out else (run or Path()).absolute()
        parts = ImageParts(place, config.num_images, config.batch_size, {**settings, **hashes}, bool(config.head_load))
        # All processes have looked at what is there when one of them begins to write.
        by_main(lambda: held.enter_context(only_one(parts.folder, "samples in")), accelerator)
        kept = keep_settings(attention, parts.folder, accelerator, held)
        if kept and kept.settle(build=True):
            raise ValueError(f"{parts.folder} was begun otherwise: {'; '.join(kept.refused)}; delete it to start over")
        if kept:
            by_main(lambda: kept.save(parts.folder), accelerator)
    pipe.to(accelerator.device).set_progress_bar_config(disable=True)
    if config.save_pipeline and accelerator.is_main_process:
        pipe.save_pretrained(config.save_pipeline)
        say(f"pipeline: {config.save_pipeline}, weights of {said}")

    record = dict(settings, num_images=config.num_images, batch_size=config.batch_size)
    record.update(
        vae=pipe.vae and pipe.vae.config.get("_name_or_path"), **{f"{k}_sha256": v for k, v in hashes.items()}
    )
    record = dict(protocol=config.protocol, sampling=record, versions=versions())
    if config.protocol and not config.score:
        say(record_text(record))

    # ---------------------------------------------------------------- sample
    labels = draw_labels(config, chosen)
    how = f"{config.sampler} {pipe.scheduler.num_inference_steps} steps, guidance {config.cfg_scale:g}"
    if config.cfg_scale != 1 and config.cfg_interval != (0, 1):
        how += " between {:g} and {:g} of the timesteps".format(*config.cfg_interval)
    if config.num_images:
        say(f"{config.num_images} images, {how}, {config.labels} labels, {said}")
    denoising = Denoising(config.denoising, len(pipe.scheduler.timesteps)) if config.denoising else None
    if kept and kept.table is None:
        measure(config, accelerator, pipe, parts, labels, kept)
    load = draw(config, accelerator, pipe, parts, labels=labels, classes=classes, denoising=denoising)
    accelerator.wait_for_everyone()

    # ---------------------------------------------------------------- write and score
    if accelerator.is_main_process:
        write(config, parts, labels, classes, chosen)
        if denoising:
            denoising.save([classes[c] for c in labels[: len(denoising.frames[0])]])
            say(f"denoising, from noise to image: {config.denoising}")
    if scorer:
        with user_errors(NAME):  # what fails on one process fails on all
            scores, text = scorer(parts, labels, accelerator.device, config.batch_size)
        if accelerator.is_main_process:
            scores.update(weights=said, step=about.get("step"), **record)
            write_json(scores_path, scores)
            say(f"{text}\n{record_text(record)}\nscores: {scores_path}")
    if config.head_load and accelerator.is_main_process:
        load.sums = parts.sums()
        load.of = dict(model=about["architecture"], data=f"{config.num_images} samples", split=how, weights=said)
        load.save(Path(config.head_load))
        say(f"head load: {config.head_load}")

    # ---------------------------------------------------------------- the end
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        held.close()  # before its file is removed, which NFS does not do to an open one
        parts.remove()
    finish(accelerator)


def settle(config: SampleConfig, about: dict) -> Tuple[List[int], Optional[bool]]:
    """Choose the labels that --labels leaves open, and check weights and reference against --protocol.

    Returns (class numbers to draw, whether the weights are an EMA; None: the file does not tell).
    """
    chosen = chosen_classes("--classes", config.classes, about["classes"])
    weights = Path(about["weights"])
    kind = weights.stem if about["run"] else kind_in(weights, config.weights)
    ema = {"ema": True, "model": False}.get(kind)
    against_adm = bool(config.score) and is_adm(config.score)
    if config.protocol and ema is False:
        raise ValueError(f"protocol {config.protocol} samples with EMA weights, and {weights} holds none")
    if config.protocol and config.score and not against_adm:
        raise ValueError(
            f"--score {config.score}: protocol {config.protocol} compares with ADM's statistics (an .npz with mu and "
            "sigma, such as VIRTUAL_imagenet256_labeled.npz)"
        )
    config.labels = config.labels or ("random" if against_adm else "balanced")
    return chosen, ema


def claim_outputs(config: SampleConfig, scores_path: Optional[Path]) -> None:
    """Make the parents of all output paths, and refuse paths that cannot be written."""
    names = ("grid", "denoising", "head_load")
    files = {f"--{name.replace('_', '-')}": getattr(config, name) for name in names} | {"--score-file": scores_path}
    folders = {"--save-pipeline": config.save_pipeline}
    (files if str(config.out).endswith(".npz") else folders)["--out"] = config.out
    paths = {option: Path(path) for option, path in {**files, **folders}.items() if path}
    for option, path in paths.items():
        if list(paths.values()).count(path) > 1:
            raise ValueError(f"{option} {path} is given for two outputs")
        if path.is_dir() and option in files:
            raise ValueError(f"{option} {path} is a folder, expected a file")
        if path.is_file() and option in folders:
            raise ValueError(f"{option} {path} is a file, expected a folder")
        if not config.overwrite and (any(path.iterdir()) if path.is_dir() else path.exists()):
            use = f"; {fidelity_command(config)} scores what is there" if config.score and option == "--out" else ""
            raise ValueError(f"{option} {path} exists; give another path, or --overwrite true{use}")
        refuse_unwritable(option, path)
        path.parent.mkdir(parents=True, exist_ok=True)


def open_scorer(config: SampleConfig, pipe: MoHDiTPipeline, about: dict) -> Callable:
    """Open what --score compares with."""
    channels = (pipe.vae or pipe.transformer).config.in_channels
    return make_scorer(**config.scoring(), channels=channels, classes=about["classes"])


def fidelity_command(config: SampleConfig) -> str:
    """Return the shell command that scores existing samples."""
    command = ["python", "-m", "moh_vision.evaluation.fidelity", config.out, config.score]
    for option in ("score_split", "extractor", "inception_weights"):
        if value := getattr(config, option):
            command += [f"--{option.replace('score', 'reference').replace('_', '-')}", value]
    return shlex.join([*command, *["--allow-biased"] * config.allow_biased])


def draw_labels(config: SampleConfig, chosen: List[int]) -> Tensor:
    """Draw the class of every image from `chosen`, [num_images]."""
    if config.labels == "balanced":
        draws = range(config.num_images)
    else:
        draws = (derive_seed(config.seed, i, Stream.DIFFUSION) for i in range(config.num_images))
    return torch.tensor([chosen[i % len(chosen)] for i in draws], dtype=torch.long)


def measure(config: SampleConfig, accelerator, pipe: MoHDiTPipeline, parts: ImageParts, labels: Tensor, kept) -> None:
    """Measure where skipping heads pays if drawing takes over a minute; `kept`: an `AttentionRecord`."""
    calls: dict = {}
    todo = len(parts.missing(accelerator.process_index, accelerator.num_processes))

    class OneStep(Exception):
        pass

    def stop(*_):
        raise OneStep

    def step() -> None:
        with accelerator.autocast(), contextlib.suppress(OneStep):
            noise = [torch.Generator().manual_seed(0) for _ in labels[: config.batch_size]]
            pipe(
                labels[: config.batch_size], config.cfg_scale, config.guide_channels, config.cfg_interval, config.steps,
                noise, output_type="latent", callback_on_step_end=stop,
            )  # fmt: skip

    for _ in range(2 if todo else 0):  # the first one also warms up
        forward = attention.collect(calls, pipe.transformer, step, training=False)
    short = not todo or forward * todo * len(pipe.scheduler.timesteps) < WORTH_MEASURING
    kept.measure(lambda: ({}, "") if short else attention.measured_table(calls, forward), parts.folder, accelerator)


def draw(
    config: SampleConfig,
    accelerator,
    pipe: MoHDiTPipeline,
    parts: ImageParts,
    labels: Tensor,
    classes: List[str],
    denoising: Optional[Denoising] = None,
) -> HeadLoad:
    """Draw this process's missing images; return an empty count of heads, since `parts` keeps the sums."""
    names = [*classes, "none"] if config.cfg_scale != 1 else classes
    # Heun's has most of them twice.
    places = {t: place for place, t in enumerate(dict.fromkeys(pipe.scheduler.timesteps.tolist()))}
    steps = [f"{t:g}" for t in places]
    load = HeadLoad(head_budget(pipe.transformer)["layers"], {"class": names, "timestep": steps})

    def count(stats: list, labels: Tensor, t: Tensor) -> None:
        load.add(stats, labels, places[t[0].item()])

    todo = parts.missing(accelerator.process_index, accelerator.num_processes)
    here = -(-(parts.count - accelerator.process_index) // accelerator.num_processes)
    if len(todo) < here:
        say(f"{here - len(todo)} of {here} batches of this process are there already")
    if denoising and accelerator.is_main_process and 0 not in todo:
        todo = [0, *todo]  # nobody kept how its images came about
    steps, main = len(todo) * len(pipe.scheduler.timesteps), accelerator.is_main_process
    with (
        user_errors(NAME, (FloatingPointError, OSError), every_rank=True, code=1),
        Progress("sampling", steps, "step", enabled=main) as progress,
    ):

        def after_step(pipe: MoHDiTPipeline, step: int, t: Tensor, inputs: dict) -> None:
            progress.add()
            if denoising and numbers.start == 0:
                denoising.add(pipe, step, t, inputs)

        for number in todo:
            numbers = parts.numbers(number)
            progress.note(f"images {numbers.start + 1} to {numbers.stop} of {config.num_images}")
            load.sums.zero_()
            with accelerator.autocast():
                latents = pipe(
                    labels[numbers.start : numbers.stop],
                    config.cfg_scale,
                    config.guide_channels,
                    config.cfg_interval,
                    config.steps,
                    [torch.Generator().manual_seed(derive_seed(config.seed, i)) for i in numbers],
                    output_type="latent",
                    callback_on_step_end=after_step,
                    on_routing=count if config.head_load else None,
                ).images
                parts.add(number, to_uint8(pipe.decode(latents)), load.sums)
            progress.note(f"{numbers.stop} of {config.num_images} images, peak {peak_memory_mib():.0f} MiB")
    return load


def write(config: SampleConfig, parts: ImageParts, labels: Tensor, classes: List[str], chosen: List[int]) -> None:
    """Write --out and --grid."""
    if config.out:
        write_images((batch for _, batch in parts.batches()), labels, Path(config.out))
        say(f"images: {config.out}")
    if config.grid:
        wanted = chosen if config.classes else sorted(set(labels.tolist()))[:10]
        rows, numbers, columns = class_rows(labels, wanted, config.grid_columns)
        draw_image_grid(parts.images(numbers), columns, config.grid, names=[classes[c] for c in rows])
        of = "" if len(rows) == len(chosen) else f" ({len(rows)} of {len(chosen)} classes; --classes chooses)"
        say(f"grid, one class a row{of}: {config.grid}")


if __name__ == "__main__":
    main()
