"""Images -> latents for diffusion training.   python -m moh_vision latents --vae NAME|FOLDER --data ROOT --out DIR

    DIR/train-000000.npy ...   posterior moments [N, 2, 2C, h, w] of at most --samples-per-shard images, shuffled
    DIR/train.labels.npy       class number of each latent, int64 [N]
    DIR/train.numbers.npy      number in ROOT of the image of each latent, int64 [N]
    DIR/train.meta.json        the record: VAE (name, sha256, factors), size, dtype, classes, input, sha256 of every shard
    DIR/train.bad.txt          unreadable images and what is wrong with them, if any were left out

An array holds mean and log variance of the VAE's posterior for the image and for its mirror image, so that training
draws from the posterior and flips without the VAE. A VAE without posteriors (AutoencoderDC) gives its latents,
[N, 2, C, h, w]. They are scaled when they are read. Images are center-cropped to --size (ADM).

Many processes share the work: `torchrun --nproc_per_node N -m moh_vision latents ...`, or `accelerate launch -m`;
DIR is then on a disk that all see. A batch never reaches into the next shard, so the result does not depend on their
number. A shard is written under a hidden name, recorded, flushed and only then renamed, so the same command goes on
after a kill at any moment. Another VAE, other arguments or changed images are refused.
"""

import contextlib
import datetime
import io
import os
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from moh_vision.common.cli import refuse_unwritable
from moh_vision.common.io import only_one, whole_file, write_whole
from moh_vision.common.progress import Progress
from moh_vision.data.batches import BadSamples, LabelledImages, check_images_fit, evaluation_loader
from moh_vision.data.decode import Decoding, add_decoding
from moh_vision.data.first_look import say_what_is_lost
from moh_vision.data.latents import latents_path
from moh_vision.data.shard_writer import ShardWriter, end_with, plan_shards
from moh_vision.data.sources import ImageSource
from moh_vision.data.splits import open_source
from moh_vision.diffusion.batches import cropped
from moh_vision.diffusion.latents.stored import (
    DTYPES,
    LatentCache,
    labels_path,
    stored_shape,
)
from moh_vision.diffusion.latents.vae import (
    DEFAULT_VAE,
    LatentSpace,
    encode_moments,
    image_channels,
    load_vae,
)
from moh_vision.engine.ranks import first, from_first, say

KEPT = "shards"  # what an interrupted command finds again


def options(add: Callable) -> None:
    add(
        "--vae",
        default=DEFAULT_VAE,
        metavar="NAME|FOLDER",
        help=f"on the hub, or a local folder ({DEFAULT_VAE})",
    )
    add(
        "--data",
        dest="root",
        required=True,
        metavar="ROOT",
        help="what data.root of a training run takes",
    )
    add("--out", required=True, metavar="DIR", help="a new folder, or that of the same command")
    add("--split", choices=("train", "val"), default="train", help="(train)")
    add("--size", type=int, default=256, help="pixels of the center-cropped images (256)")
    add("--dtype", choices=DTYPES, default="float16", help="of the moments on disk (float16)")
    add_decoding(add)
    add("--batch-size", type=int, default=32, help="images at a time (32)")
    add("--samples-per-shard", type=int, default=1000, help="at most (1000)")
    add("--seed", type=int, default=0, help="of the shuffle (0)")
    add("--workers", type=int, default=2, help="processes of each rank that read images (2)")
    add(
        "--max-bad-fraction",
        type=float,
        default=0.0,
        help="share of images that may be unreadable and left out (0)",
    )


def work(options: Namespace) -> None:
    """Write latents; set up the process group first if the environment names several ranks."""
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several:
        # End with the launcher: a rank that outlives it would go on writing beside the next command.
        end_with(os.getppid())
        # The timeout is long because every rank waits until the slowest has written its last shard.
        PartialState(cpu=True, backend="gloo", timeout=datetime.timedelta(days=7))
    try:
        with warnings.catch_warnings():
            # Pillow warns about unusual files although it decodes them.
            warnings.filterwarnings("ignore", module="PIL")
            write_latents(options)
    finally:
        if several:
            PartialState().destroy_process_group()


def write_latents(options: Namespace) -> None:
    """Encode the images of a split and their mirror images, on all ranks.

    After a mistake on rank 0, the other ranks exit with code 2.
    """
    from_first(lambda: _check(options))
    decoding = from_first(lambda: Decoding.of(options, "--"))
    source = first(lambda: open_source(options.root, options.split))
    source.decoding = decoding
    for remark in source.remarks:
        say(remark)
    say_what_is_lost(f"--data {options.root}", {options.split: source}, say)
    model = first(lambda: load_vae(options.vae, decodes=False))
    space = LatentSpace.of(model, options.vae)
    out = Path(options.out)

    def shape_on_disk() -> tuple:
        space.side(options.size, "--size")  # refuses a size that does not fit, and names the option
        return stored_shape(space, options.size)

    shape = from_first(shape_on_disk)
    numbers = map(str, range(len(source)))
    plan = plan_shards(options.split, "npy", numbers, options.samples_per_shard, options.seed)
    # An interrupted command goes on only if these have not changed.
    compared = {"sha256 of --vae": space.sha256}
    for name in ("size", "dtype", "colour_space", "value_range", "samples_per_shard", "seed"):
        compared[f"--{name.replace('_', '-')}"] = getattr(options, name)
    described = dict(
        vae=vars(space),
        source=source.name,
        classes=source.classes,
        size=options.size,
        dtype=options.dtype,
        decoding=decoding.record,
        shape=shape,
    )

    with contextlib.ExitStack() as stack:
        limit = BadSamples(len(source), options.max_bad_fraction, "--max-bad-fraction")

        def begin() -> tuple[ShardWriter, list[str]]:
            """Lock the folder; return the writer, and the names of the shards that are still to be written."""
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(only_one(out, "--out"))
            record = latents_path(out, options.split)
            writer = ShardWriter(record, plan, source, compared, **described)
            todo = writer.begin(max(1, options.workers))
            limit.check(writer.bad)
            return writer, todo

        since = time.monotonic()
        writer, todo = from_first(begin)
        state = PartialState()
        encoder = Encoder(options, source, model, writer, limit)
        written = gather_object(encoder.write(todo[state.process_index :: state.num_processes]))
        if state.is_main_process:
            writer.entries.update({entry["shard"]: entry for entry in written})
            limit.check(writer.bad)
            _write_arrays(writer, source, out, options.split)
            writer.end()
            cache = LatentCache(options.out, options.split)
            images = sum(entry["samples"] for entry in written)
            origin = "all there already"
            if written:
                origin = f"{images} written at {images / (time.monotonic() - since):.1f} img/s"
            shown = f"latents {list(cache.shape)} {options.dtype} of {len(cache)} images"
            writer.report(shown, origin)


def _write_arrays(writer: ShardWriter, source: ImageSource, out: Path, split: str) -> None:
    """Write the labels of all latents, and the numbers that their images have in the source."""
    left_out = {number for number, _ in writer.bad}
    in_order = [number for samples in writer.plan.values() for number in samples]
    numbers = np.array([number for number in in_order if number not in left_out])
    for path, values in (
        (labels_path(out, split), source.labels[numbers]),
        (out / f"{split}.numbers.npy", numbers),
    ):
        npy = io.BytesIO()
        np.save(npy, values.astype(np.int64), allow_pickle=False)
        write_whole(path, npy.getvalue())  # does not touch a file with the same bytes


def _check(options: Namespace) -> None:
    """Raise ValueError for options that are out of range, and for a folder that cannot be written."""
    for name, value, lowest in (
        ("size", options.size, 1),
        ("batch-size", options.batch_size, 1),
        ("samples-per-shard", options.samples_per_shard, 1),
        ("workers", options.workers, 0),
    ):
        if value < lowest:
            raise ValueError(f"--{name} {value}: expected {lowest} or more")
    check_images_fit("--size", options.size, 1, options.batch_size)
    if not 0 <= options.max_bad_fraction < 1:
        raise ValueError(
            f"--max-bad-fraction {options.max_bad_fraction:g}: expected 0 <= fraction < 1"
        )
    refuse_unwritable("--out", latents_path(Path(options.out), options.split))
    root = Path(options.root)
    if root.is_dir() and Path(options.out).resolve().is_relative_to(root.resolve()):
        raise ValueError(f"--out {options.out} is inside --data {options.root}")


class Encoder:
    """Encodes images on a rank, shard by shard.

    Args:
        options: the options of the command.
        source: where images come from.
        model: the VAE.
        writer: has the plan of the shards, and records finished ones.
        limit: counts unreadable images on this rank.
    """

    def __init__(self, options: Namespace, source, model, writer: ShardWriter, limit: BadSamples):
        self.options = options
        self.source = source
        self.writer = writer
        self.limit = limit
        self.device = torch.device("cpu")
        gpus = torch.cuda.device_count()
        if gpus:
            self.device = torch.device("cuda", PartialState().local_process_index % gpus)
        self.model = model.to(self.device)

    def write(self, names: list[str]) -> list[dict]:
        """Write the shards with these names; return their entries for the record.

        Each shard is finished before the next one begins, so finished shards survive a failure.
        """
        options = self.options
        state = PartialState()
        plan = self.writer.plan
        batches: dict[str, list[list[int]]] = {}
        for name in names:
            starts = range(0, len(plan[name]), options.batch_size)
            batches[name] = [plan[name][i : i + options.batch_size] for i in starts]
        transform = cropped("none", options.size, image_channels(self.model))
        images = LabelledImages(self.source, transform, seed=0, replace_unreadable=False)
        slices = sum(batches.values(), [])
        # Iterate the DataLoader inside the `Loader`: the latter counts bad samples of all batches, while each is
        # recorded with its shard here.
        loaded = iter(evaluation_loader(images, slices, options.workers).loader)
        title = options.split
        if state.use_distributed:
            title += f", rank 0 of {state.num_processes}"
        entries = []
        bad = []
        count = sum(len(plan[name]) for name in names)
        with Progress(title, count, "image", enabled=state.is_main_process) as progress:
            for name in names:
                bad_before = len(bad)
                arrays = []
                for numbers in batches[name]:
                    batch = _next(loaded, options.workers)
                    bad += batch["bad"]
                    self.limit.check(bad)
                    if "images" in batch:
                        good = [n for n in numbers if n not in dict(batch["bad"])]
                        arrays.append(self.encode(good, batch["images"].to(self.device)))
                    progress.add(len(numbers))
                with whole_file(self.writer.out / name) as file:
                    if arrays:
                        np.save(file, np.concatenate(arrays), allow_pickle=False)
                    samples = sum(map(len, arrays))
                    entries.append(self.writer.finish(name, file, samples, bad[bad_before:]))
        return entries

    def encode(self, numbers: list[int], images: Tensor) -> np.ndarray:
        """Encode images [B, C, H, W] in -1 .. 1 and their mirror images to an array to store, [B, 2, 2C, h, w].

        `numbers` are the numbers of the images in the source, for messages.
        """
        # Encode images and mirror images separately: together they would be a batch twice as large as asked for.
        try:
            moments = torch.stack(
                [encode_moments(self.model, x) for x in (images, images.flip(-1))], 1
            )
        except torch.OutOfMemoryError:
            raise ValueError(
                f"--batch-size: {len(images)} images do not fit into the memory of {images.device}"
            ) from None
        stored = moments.cpu().to(getattr(torch, self.options.dtype))
        for number, finite in zip(numbers, stored.isfinite().flatten(1).all(1).tolist()):
            if not finite:
                dtype = self.options.dtype
                problem = (
                    f"the latents of image {number} of {self.source.name} are not finite in {dtype}"
                )
                if dtype == "float16":
                    problem += "; take --dtype float32"
                raise ValueError(problem)
        if self.options.dtype == "bfloat16":
            stored = stored.view(torch.int16)
        return stored.numpy().view(DTYPES[self.options.dtype])


def _next(batches: Iterator[dict], workers: int) -> dict:
    """Return the next batch; ValueError if a worker process died."""
    try:
        return next(batches)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise ValueError(
            f"a reading process of {workers} died, of too little memory perhaps"
        ) from None
