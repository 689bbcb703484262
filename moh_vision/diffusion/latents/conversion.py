"""From images to latents: checks first, then every rank writes its shards."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Callable, List

from accelerate import PartialState
from accelerate.utils import gather_object

from moh_vision.data.batches import check_images_fit
from moh_vision.data.shards.out_folder import check_out, full_disk_in_one_line
from moh_vision.data.splits import open_source
from moh_vision.diffusion.latents.cache import DTYPES
from moh_vision.diffusion.latents.vae import DEFAULT_VAE, LatentSpace, load_vae
from moh_vision.diffusion.latents.writer import LatentWriter
from moh_vision.engine.io import only_one
from moh_vision.engine.ranks import first, from_first


def write_latents(
    root: str,
    out: str,
    *,
    vae: str = DEFAULT_VAE,
    split: str = "train",
    size: int = 256,
    batch_size: int = 32,
    samples_per_shard: int = 1000,
    dtype: str = "float16",
    seed: int = 0,
    workers: int = 2,
    max_bad_fraction: float = 0.0,
    say: Callable[[str], None] = print,
) -> None:
    """Encode the images of a split and their mirror images, with all processes of accelerate's PartialState.

    `size` is the side of the center crop in pixels; `samples_per_shard` a maximum, as samples are spread evenly;
    `seed` shuffles; `workers` read on each rank. After a mistake on rank 0 the others raise MistakeElsewhere.
    """
    from_first(lambda: _check(root, out, size, batch_size, samples_per_shard, dtype, workers, max_bad_fraction))
    index_dir = str(Path(out).resolve().with_name(".index"))
    source = first(lambda: open_source(root, split, index_dir))
    model = first(lambda: load_vae(vae))
    space = LatentSpace.of(model, vae)
    from_first(lambda: space.side(size, "--size"))

    with ExitStack() as stack:
        stack.enter_context(full_disk_in_one_line(out))
        arguments = dict(size=size, dtype=dtype, samples_per_shard=samples_per_shard, seed=seed)
        writer = LatentWriter(source, split, Path(out), space, max_bad_fraction=max_bad_fraction, **arguments)

        def begin() -> List[str]:
            Path(out).mkdir(parents=True, exist_ok=True)
            stack.enter_context(only_one(Path(out), "--out"))
            return writer.begin(max(1, workers), say)

        todo = from_first(begin)
        entries = gather_object(writer.write(todo, model, batch_size, workers))
        if PartialState().is_main_process:
            writer.end(entries, say)


def _check(
    root: str, out: str, size: int, batch_size: int, samples_per_shard: int, dtype: str, workers: int, bad: float
) -> None:
    least = (("size", size, 1), ("batch-size", batch_size, 1), ("samples-per-shard", samples_per_shard, 1))
    for name, value, lowest in (*least, ("workers", workers, 0)):
        if value < lowest:
            raise ValueError(f"--{name} {value}: expected {lowest} or more")
    check_images_fit("--size", size, 1, batch_size)
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: expected {' or '.join(DTYPES)}")
    if not 0 <= bad < 1:
        raise ValueError(f"--max-bad-fraction {bad:g}: expected 0 <= fraction < 1")
    check_out(out)
    if Path(root).is_dir() and Path(out).resolve().is_relative_to(Path(root).resolve()):
        raise ValueError(f"--out {out} is inside --data {root}")
