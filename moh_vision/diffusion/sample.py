"""Sample from a diffusion run, draw a grid, score.   python sample.py --checkpoint RUN --num-images 500 --grid grid.png

RUN may also be a saved pipeline, or with --model NAME a file of published weights. Under `accelerate launch` processes
share the images, which do not depend on their number. The same command goes on after a kill.
Installed: python -m moh_vision.diffusion.sample; --help prints every option.
"""

import contextlib
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from moh_vision.attention.measure import collect, measured_table
from moh_vision.attention.model_heads import budget_rows
from moh_vision.common.cli import refuse_unwritable
from moh_vision.common.errors import user_errors
from moh_vision.common.io import only_one, step_of
from moh_vision.common.progress import Progress
from moh_vision.common.seeds import Stream, derive_seed
from moh_vision.data.decode import AS_STORED, Decoding
from moh_vision.diffusion import MoHDiTPipeline
from moh_vision.diffusion.config import SampleConfig, chosen_classes, parse_cache
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
from moh_vision.diffusion.prediction_graphs import PredictionGraphs
from moh_vision.diffusion.sampling import (
    Guidance,
    all_that_predicts,
    predicted,
    to_uint8,
    weak_predict,
)
from moh_vision.diffusion.schedulers import step_count
from moh_vision.diffusion.scores import make_scorer, record_text
from moh_vision.engine.accelerator import finish, make_accelerator
from moh_vision.engine.attention_record import AttentionRecord, keep_settings
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.cuda_graphs import RECORD, CudaGraphs, in_words
from moh_vision.engine.logging import peak_memory_mib, versions, write_json
from moh_vision.engine.ranks import by_main, say
from moh_vision.evaluation.fidelity.reference import is_adm
from moh_vision.models.dit_caches import cached
from moh_vision.models.head_load import HeadLoad
from moh_vision.models.weights import Weights, find_weights

NAME = "sample.py"
WORTH_MEASURING = 60  # seconds that drawing must take
ADAPTIVE_PASSES = 100  # assumed for a sampler that chooses its own steps
# The keys that the images depend on.
SAMPLING = (
    "sampler",
    "steps",
    "cfg_scale",
    "guide_channels",
    "cfg_interval",
    "seed",
    "labels",
    "mixed_precision",
    "cuda_graph",
    "head_budget",
    "mlp_budget",
    "cache",
    "weights",
)


def main(argv: list[str] | None = None) -> None:
    held = contextlib.ExitStack()  # keeps the folder locked and the attention settings in force
    with user_errors(NAME):
        config = parse_config(SampleConfig, argv, NAME)
        accelerator = make_accelerator(config.mixed_precision)
        drawing, metadata = _open_drawing(config, accelerator)
        record = drawing.record()
        folder = (metadata["run"] or Path()).absolute()
        if config.out:
            folder = Path(config.out).absolute().parent
        parts = ImageParts(
            folder,
            config.num_images,
            config.batch_size,
            record["sampling"],
            counted=bool(config.head_load),
        )
        # `by_main` waits for all ranks, so every rank has checked the existing outputs before one writes.
        by_main(lambda: held.enter_context(only_one(parts.folder, "samples in")), accelerator)
        attention_record = keep_settings(parts.folder, accelerator, held)
        if attention_record:
            refused = attention_record.settle(build=True)
            if refused:
                raise ValueError(
                    f"{parts.folder} was begun otherwise: {'; '.join(refused)}; delete it to start over"
                )
            by_main(lambda: attention_record.save(parts.folder), accelerator)
    if config.save_pipeline and accelerator.is_main_process:
        drawing.pipe.save_pretrained(config.save_pipeline)
        say(f"pipeline: {config.save_pipeline}, weights of {metadata['weights']}")
    if config.protocol and not config.score:
        say(record_text(record))

    if config.num_images:
        said = f"{config.sampling_in_words}, {config.labels} labels, {metadata['weights']}"
        say(f"{config.num_images} images, {said}")
    denoising = None
    if config.denoising:
        denoising = Denoising(config.denoising, len(drawing.pipe.scheduler.timesteps))
    drawing.open_graphs(parts.folder)
    if attention_record and attention_record.table is None:
        drawing.measure(parts, attention_record)
    load = drawing.draw(parts, denoising)
    accelerator.wait_for_everyone()

    if accelerator.is_main_process:
        drawing.write(parts)
        if denoising:
            denoising.save(drawing.class_names(len(denoising.frames[0])))
            say(f"denoising, from noise to image: {config.denoising}")
    if config.score:
        with user_errors(NAME):  # an error here is raised on every rank
            scores, text = drawing.scorer(parts, drawing.labels, accelerator.device)
        if accelerator.is_main_process:
            scores.update(weights=metadata["weights"], step=metadata.get("step"), **record)
            write_json(Path(config.score_file), scores)
            say(f"{text}\n{record_text(record)}\nscores: {config.score_file}")
    if config.head_load and accelerator.is_main_process:
        load.sums = parts.sums()
        load.of = dict(
            model=metadata["architecture"],
            data=f"{config.num_images} samples",
            split=config.sampling_in_words,
            weights=metadata["weights"],
        )
        load.save(Path(config.head_load))
        say(f"head load: {config.head_load}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        # Release the lock first: NFS cannot delete its file while that is open.
        held.close()
        shutil.rmtree(parts.folder)
    finish(accelerator)


def _open_drawing(config: SampleConfig, accelerator) -> tuple["Drawing", dict]:
    """Open all that can fail before the first image; return the `Drawing` and the model's metadata."""
    found = find_checkpoint(config)
    if accelerator.is_main_process:
        say(f"loading {config.checkpoint}")
    pipe, metadata = open_pipeline(config, found)
    drawing = Drawing(config, found, pipe, metadata, accelerator)
    claim_outputs(config, metadata)
    with accelerator.main_process_first():
        drawing.open_scorer()
    return drawing, metadata


def claim_outputs(config: SampleConfig, metadata: dict) -> None:
    """Set `config.score_file`, create parent folders of all outputs, and refuse outputs that cannot be written."""
    run = metadata["run"]
    if config.score and not run and not config.score_file:
        raise ValueError(
            f"--score-file is needed: {config.checkpoint} is no run, whose folder would take the scores"
        )
    if config.score:
        step = step_of(metadata["file"].parent)
        name = "scores.json" if step is None else f"scores_step_{step}.json"
        config.score_file = str(Path(config.score_file or run / name))
    else:
        config.score_file = None
    outputs = ("grid", "denoising", "head_load", "score_file", "out", "save_pipeline")
    paths = {name: Path(getattr(config, name)) for name in outputs if getattr(config, name)}
    for name, path in paths.items():
        option = f"--{name.replace('_', '-')}"
        if list(paths.values()).count(path) > 1:
            raise ValueError(f"{option} {path} is given for two outputs")
        _claim_output(config, name, option, path)


def _claim_output(config: SampleConfig, name: str, option: str, path: Path) -> None:
    """Create the parent folder of one output, and refuse a path whose files must not be replaced.

    Args:
        config: keys of sample.py.
        name: the key of the output, such as "grid".
        option: its option, such as "--grid", for messages.
        path: its value.
    """
    is_folder = name == "save_pipeline" or (name == "out" and path.suffix != ".npz")
    if path.is_dir() and not is_folder:
        raise ValueError(f"{option} {path} is a folder, expected a file")
    if path.is_file() and is_folder:
        raise ValueError(f"{option} {path} is a file, expected a folder")
    existing = set()
    if path.is_dir():
        existing = {file.name for file in path.iterdir()}
    elif path.exists():
        existing = {path.name}
    if existing - {WRITTEN} and not config.overwrite:
        problem = f"{option} {path} exists; give another path, or --overwrite true"
        if config.score and name == "out":
            problem += f"; {fidelity_command(config)} scores what is there"
        raise ValueError(problem)
    if name == "out" and path.is_dir():
        strangers = refuse_strangers(option, path, config.num_images)
        if strangers:
            shown = strangers[0]
            if len(strangers) > 1:
                shown += f" and {len(strangers) - 1} more"
            say(
                f"{option} {path} also holds {shown}, which sample.py did not write and leaves there"
            )
    refuse_unwritable(option, path)
    path.parent.mkdir(parents=True, exist_ok=True)


def fidelity_command(config: SampleConfig) -> str:
    """Return the shell command that scores the samples in --out."""
    command = ["python", "-m", "moh_vision.evaluation.fidelity", config.out, config.score]
    for option in ("score_split", "extractor", "inception_weights"):
        value = getattr(config, option)
        if value:
            command += [f"--{option.replace('score', 'reference').replace('_', '-')}", value]
    if config.score_colour_space:
        command += ["--colour-space", config.score_colour_space]
    if config.score_value_range:
        command += ["--value-range", *map(str, config.score_value_range)]
    if config.allow_biased:
        command.append("--allow-biased")
    return shlex.join(command)


class Drawing:
    """Draws the images that a `SampleConfig` asks for; image i has its own class and noise.

    Args:
        like: another one with the same --score and VAE, whose scorer is taken, and whose guide if it is the same.
    """

    def __init__(
        self,
        config: SampleConfig,
        found: Weights,
        pipe: MoHDiTPipeline,
        metadata: dict,
        accelerator,
        like: "Drawing | None" = None,
    ):
        self.config = config
        self.found = found
        self.pipe = pipe.to(accelerator.device)
        self.accelerator = accelerator
        self.names = metadata["classes"]
        self.trained_on = found.config.get("data", {})
        vae = metadata["vae"] or pipe.vae
        if like and like.config.guide == config.guide:
            self.weak = like.weak
        else:
            self.weak = open_guide("--guide", config.guide, pipe.transformer, vae)
        self.scorer = like and like.scorer
        self.cache = parse_cache(config.cache)
        try:
            with cached(pipe.transformer, self.cache):
                pipe.check_tools(pipe.transformer, self.weak, pipe.scheduler, None)
        except ValueError as error:
            raise ValueError(f"cache {config.cache}: {error}") from None
        pipe.set_progress_bar_config(disable=True)
        # None: the file does not say.
        self.ema = {"ema": True, "ema2": True, "model": False}.get(found.held)
        against_adm = bool(config.score) and is_adm(config.score)
        if config.protocol and self.ema is False:
            raise ValueError(
                f"protocol {config.protocol} samples with EMA weights, and {found.file} holds none"
            )
        if config.protocol and config.score and not against_adm:
            statistics = "ADM's statistics (an .npz with mu and sigma, such as VIRTUAL_imagenet256_labeled.npz)"
            raise ValueError(
                f"--score {config.score}: protocol {config.protocol} compares with {statistics}"
            )
        if not config.labels:
            config.labels = "random" if against_adm else "balanced"
        self.classes = chosen_classes("--classes", config.classes, self.names)
        draws = list(range(config.num_images))
        if config.labels == "random":
            draws = [derive_seed(config.seed, i, Stream.DIFFUSION) for i in draws]
        labels = [self.classes[draw % len(self.classes)] for draw in draws]
        self.labels = torch.tensor(labels, dtype=torch.long)
        self.predictions: PredictionGraphs | None = None  # None: predictions run eagerly
        # Measures for eager predictions, after `measure` has done so for graphs.
        self.measure_again: Callable | None = None

    def class_names(self, count: int) -> list[str]:
        """Return the class names of the first `count` images; [] for a model without classes."""
        if not self.names:
            return []
        return [self.names[label] for label in self.labels[:count]]

    def open_scorer(self, **reads) -> None:
        """Open the reference of --score, if it is given and not open yet; `reads` are options of `make_scorer`."""
        if self.config.score and not self.scorer:
            reads.setdefault("decoding", self.decoding_of_reference())
            channels = image_channels(self.pipe.vae or self.pipe.transformer)
            self.scorer = make_scorer(self.config, channels, self.names, **reads)

    def decoding_of_reference(self) -> Decoding:
        """Return how the images of --score become pixels: as the options say, else as those of the training did."""
        values = dict(AS_STORED.record)
        for name in values:
            asked = getattr(self.config, f"score_{name}")
            if asked is None:
                asked = self.trained_on.get(name)
            if asked is not None:
                values[name] = asked
        return Decoding.of(SimpleNamespace(**values), "--score-")

    def record(self) -> dict:
        """Return what scores.json says about how the images were made: protocol, sampling and versions."""
        config = self.config
        vae = self.pipe.vae
        sampling = {name: getattr(config, name) for name in SAMPLING}
        if step_count(self.pipe.scheduler) is None:
            sampling["steps"] = None
        sampling["ema"] = self.ema
        if config.classes is not None:
            sampling["classes"] = self.classes
        if config.guide:
            sampling.update(guide=config.guide, guide_scale=config.guide_scale, guide_sha256=None)
            if config.guide != self.weak:  # the guide is a file or folder, not "heads:SHARE"
                sampling["guide_sha256"] = find_weights(config.guide).sha256
        sampling.update(
            num_images=config.num_images,
            batch_size=config.batch_size,
            vae=vae and vae.config.get("_name_or_path"),
            weights_sha256=self.found.sha256,
            vae_sha256=vae and vae_fingerprint(vae),
        )
        return dict(protocol=config.protocol, sampling=sampling, versions=versions())

    def one_step(self, size: int) -> tuple[nn.Module, Callable[[], Tensor]]:
        """Return all that predicts in a step of drawing, and a function that does so for `size` images of noise.

        The predictions are those of a guided step. Steps outside `cfg_interval` make the first of them, without the half
        for "no class".
        """
        config = self.config
        model = self.pipe.transformer
        device = self.accelerator.device
        labels = self.labels[torch.arange(size) % len(self.labels)].to(device)
        interval = tuple(config.cfg_interval)
        guidance = Guidance(config.cfg_scale, config.guide_channels, interval, config.guide_scale)
        guided = guidance.around(
            partial(predicted, model),
            labels,
            model.config.num_classes,
            weak_predict(model, self.weak),
        )
        generator = torch.Generator().manual_seed(config.seed)
        side = model.config.sample_size
        noise = torch.randn(size, model.config.in_channels, side, side, generator=generator)
        noise = noise.to(device)
        timestep = torch.tensor(NUM_TIMESTEPS * sum(interval) / 2)  # in the middle of the interval

        def forward() -> Tensor:
            with self.accelerator.autocast():
                return guided(noise, timestep)

        return all_that_predicts(model, self.weak), forward

    def measure(self, parts: ImageParts, attention_record: AttentionRecord) -> None:
        """Measure for which attention calls skipping heads saves time, if drawing takes over a minute.

        They are measured in the mode that will run, and once more if predictions then do not run as CUDA graphs.
        """
        calls: dict = {}
        graphs = None
        if self.predictions:
            graphs = self.predictions.capturing
        self.measure_again = None
        if graphs is not None:
            self.measure_again = partial(self.measure, parts, attention_record)
        todo = len(parts.missing(self.accelerator))
        step = 0.0
        if todo:
            models, forward = self.one_step(len(parts.numbers(0)))
            collect(calls, models, forward, training=False, graphs=graphs)  # warms up
            step = collect(calls, models, forward, training=False, graphs=graphs)
            if self.config.score:
                for network, forward in self.scorer.passes(
                    parts.batch_size, self.accelerator.device
                ):
                    collect(calls, network, forward, training=False)
        passes_of_image = step_count(self.pipe.scheduler)
        if passes_of_image is None:
            passes_of_image = ADAPTIVE_PASSES
        seconds = step * todo * passes_of_image

        def table() -> tuple[dict, str]:
            if not todo or seconds < WORTH_MEASURING:
                return {}, ""
            return measured_table(calls, step)

        attention_record.measure(table, parts.folder, self.accelerator)

    def open_graphs(self, folder: Path) -> None:
        """Set `predictions`, if --cuda-graph asks for it; say why if it does so in vain.

        folder: of the images that are being drawn, where the decision is kept.
        """
        config = self.config
        if config.cuda_graph == "off" or not config.num_images:
            return
        graphs = CudaGraphs()
        reason = graphs.why_not(self.accelerator.device)
        if self.accelerator.num_processes > 1:
            reason = reason or "several processes share the images"
        if config.head_load:
            reason = reason or "--head-load looks at the heads of every prediction"
        if reason:
            say(in_words("predictions", False, reason))
            return
        self.predictions = PredictionGraphs(config.cuda_graph, graphs, folder / RECORD)
        self.predictions.decision.follow(folder / RECORD, f"deleting {folder}")

    def draw(self, parts: ImageParts, denoising: Denoising | None = None) -> HeadLoad:
        """Draw the missing images of this rank into `parts`.

        Return a `HeadLoad` that only has layers and groups: `parts` keeps the sums of each batch.
        """
        config = self.config
        pipe = self.pipe
        accelerator = self.accelerator
        names = [*self.names]
        if config.cfg_scale != 1 or not self.names:
            names.append("none")  # heads also run for the label "no class"
        # Distinct timesteps in order: Heun's scheduler lists most of them twice.
        timesteps = list(dict.fromkeys(pipe.scheduler.timesteps.tolist()))
        index_of_timestep = {t: index for index, t in enumerate(timesteps)}
        groups = {"class": names, "timestep": [f"{t:g}" for t in timesteps]}
        load = HeadLoad(budget_rows(pipe.transformer), groups)

        def count(stats: list, labels: Tensor, t: Tensor) -> None:
            load.add(stats, labels, index_of_timestep[t[0].item()])

        todo = parts.missing(accelerator)
        assigned = len(range(accelerator.process_index, parts.count, accelerator.num_processes))
        if len(todo) < assigned:
            say(f"{assigned - len(todo)} of {assigned} batches of this process are there already")
        if denoising and accelerator.is_main_process and 0 not in todo:
            todo = [0, *todo]  # draw it again: `parts` keeps final images, not the steps to them
        steps = step_count(pipe.scheduler)
        if steps is not None:
            steps *= len(todo)
        with (
            user_errors(NAME, (FloatingPointError, OSError), every_rank=True, code=1),
            Progress("sampling", steps, "step", enabled=accelerator.is_main_process) as progress,
        ):

            def after_step(pipe: MoHDiTPipeline, step: int, t: Tensor, inputs: dict) -> None:
                progress.add()
                # `numbers` is set by the loop below: the images of the batch that is being drawn.
                if denoising and numbers.start == 0:
                    denoising.add(pipe, step, inputs["latents"])

            options = dict(
                guidance_scale=config.cfg_scale,
                guide_channels=config.guide_channels,
                guidance_interval=config.cfg_interval,
                num_inference_steps=config.steps,
                output_type="latent",
                callback_on_step_end=after_step,
                on_routing=count if config.head_load else None,
                guide=self.weak,
                guide_scale=config.guide_scale,
                graphs=self.predictions,
            )
            total = config.num_images
            for batch in todo:
                if self.measure_again and self.predictions.capturing is None:
                    self.measure_again()
                numbers = parts.numbers(batch)
                progress.note(f"images {numbers.start + 1} to {numbers.stop} of {total}")
                load.sums.zero_()
                labels = self.labels[numbers.start : numbers.stop]
                seeds = [derive_seed(config.seed, i) for i in numbers]
                generators = [torch.Generator().manual_seed(seed) for seed in seeds]
                with accelerator.autocast(), cached(pipe.transformer, self.cache):
                    latents = pipe(labels, generator=generators, **options).images
                    parts.add(batch, to_uint8(pipe.decode(latents)), load.sums)
                progress.note(f"{numbers.stop} of {total} images, peak {peak_memory_mib():.0f} MiB")
        return load

    def write(self, parts: ImageParts) -> None:
        """Write --out and --grid."""
        config = self.config
        if config.out:
            write_images(parts.batches(), self.labels, Path(config.out))
            say(f"images: {config.out}")
        if not config.grid:
            return
        columns = config.grid_columns
        if not self.names:
            count = min(config.num_images, 10 * columns)
            draw_image_grid(parts.images(list(range(count))), min(columns, count), config.grid)
            say(f"grid of {count} images: {config.grid}")
            return
        classes = self.classes
        if not config.classes:
            classes = sorted(set(self.labels.tolist()))[:10]
        rows = draw_class_rows(parts.images, self.labels, classes, columns, config.grid, self.names)
        title = "grid, one class a row"
        if rows != len(self.classes):
            title += f" ({rows} of {len(self.classes)} classes; --classes chooses)"
        say(f"{title}: {config.grid}")


if __name__ == "__main__":
    main()
