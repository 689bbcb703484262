"""Images of webdataset shards as they arrive, from files, servers and commands: `data.exact_order false`.

webdataset shuffles the shards, divides them among processes and workers, and shuffles the samples of each worker in a
buffer. What the exact order promises does not hold here: see `PROMISE`.
"""

import contextlib
import itertools
import re
import sys
import tarfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlparse
from urllib.request import Request, urlopen

import webdataset
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from webdataset.gopen import Pipe, gopen, gopen_schemes
from webdataset.tariterators import group_by_keys

from moh_vision.data.decode import UnreadableImage, decode_image
from moh_vision.data.order import StepBatches
from moh_vision.data.records import read_record, record_path, refuse_difference
from moh_vision.data.sources import ImageSource
from moh_vision.data.tars import IMAGE_EXTENSIONS, members, open_tar, sample_of
from moh_vision.engine.errors import message_of
from moh_vision.engine.io import class_names
from moh_vision.engine.progress import say
from moh_vision.engine.seeds import Stream, derive_seed

PATIENCE = 300  # seconds that a shard that cannot be read is tried again
SILENCE = 60  # seconds without a byte after which a server counts as gone
BUFFER = 1000  # samples that a worker shuffles, as they are in the shard
PROMISE = (
    "data.exact_order false: images come as webdataset's stream shuffles them; their order depends on processes and "
    "workers, an epoch is a number of images and not every image once, and a resumed run draws a new order"
)


def open_stream(data, given: Collection[str], accelerator) -> "ShardStream | None":
    """Open the training images of a `DataConfig`, and read the first sample; None if the order is exact.

    `given` are the options on the command line: a command in data.stream is only taken from there, because a
    configuration of a stranger must not run programs.
    """
    if data.exact_order:
        return None
    root = Path(data.root)
    names = root / "classes.txt"
    if not names.is_file():
        raise FileNotFoundError(
            f"data.root {data.root}: no file classes.txt in it, one class name a line, which data.exact_order false "
            "needs (empty: without classes); URLs of shards go into data.stream"
        )
    urls = [str(path) for path in sorted(root.glob("train-*.tar"))]
    try:
        urls = webdataset.shardlists.expand_urls(data.stream) if data.stream else urls
    except (AssertionError, ValueError) as error:
        unset = "${NAME} is the environment variable WDS_NAME, which is not set"
        problem = unset if isinstance(error, AssertionError) else message_of(error)
        raise ValueError(f"data.stream {data.stream}: {problem}") from None
    if not urls:
        raise FileNotFoundError(
            f"data.root {data.root}: no train-*.tar shards in it, and data.stream names none"
        )
    kinds = {urlparse(url).scheme for url in urls}
    for kind in sorted(kinds - {"", "file", *gopen_schemes}):
        raise ValueError(
            f"data.stream {data.stream}: {kind}: is not read; pipe:COMMAND reads what a command writes"
        )
    if "data.stream" not in given and "pipe" in kinds:
        raise ValueError(
            f"data.stream {data.stream} runs a command; give it on the command line, it is not taken from a configuration"
        )
    record, entries = record_path(root, "train"), {}
    # Who counts the images of a stream himself has shards that are not those of data.root.
    if record.exists() and not (data.stream and data.samples):
        written = read_record(record)["shards"]
        shards = {url: (re.findall(r"[^/\s]+\.tar", url) or [""])[-1] for url in urls}
        entries = {url: written[shard] for url, shard in shards.items() if shard in written}
    if not data.samples and len(entries) < len(set(urls)):
        raise ValueError(
            f"data.samples is needed: how many images an epoch has; no record {record} has all these shards"
        )
    samples = data.samples or sum(entries[url]["samples"] for url in urls)
    source = ShardStream(urls, class_names(names), samples, root.name, record, entries)
    source.check()  # a wrong URL or shard is told before the run is made
    parts = accelerator.num_processes * max(1, data.workers)
    if accelerator.is_main_process:
        say(PROMISE)
        if parts > len(urls):
            say(f"{len(urls)} shards for {parts} processes x workers: some read the same shards")
    return source


@dataclass(eq=False)
class ShardStream(ImageSource):
    """Images of webdataset shards as they arrive; samples have no numbers but names, URL and key.

    `urls` are uncompressed tar files: paths, http(s)://, pipe:COMMAND, and what webdataset opens. `samples` are the images
    of an epoch. URLs in `entries` must agree with these entries of a `record`. `labels` has the label of the sample that
    came last; none is known ahead.
    """

    urls: list[str]
    classes: list[str]
    samples: int
    name: str
    record: Path | None = None
    entries: dict[str, dict] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    _sample: dict = field(default_factory=dict)

    def __len__(self) -> int:
        return self.samples

    def check(self) -> None:
        """Read the first shard up to a sample that can be decoded; raise UnreadableImage if there is none."""
        problem = UnreadableImage(f"{self.urls[0]}: no samples in it")
        for name in self._named(self._samples(self.urls[0], patience=0)):
            try:
                self.image(name)
                return
            except UnreadableImage as error:
                problem = error
        raise problem

    def names(self, seed: int, start: int, parts: int) -> Iterator[str]:
        """Yield names of this process's and worker's samples, without end; `image` and `labels` take the latest one.

        `start` is the step that a run goes on from; `parts` are processes x workers.
        """
        first = derive_seed(seed, start, Stream.SHARDS)
        shards = self.urls * -(
            -parts // len(self.urls)
        )  # a part without a shard would block all processes
        yield from self._named(webdataset.shuffle(BUFFER, seed=first)(self._passes(shards, first)))

    def image(self, name: str):
        """Decode the latest sample, and put its label into `labels`; raise UnreadableImage if it has not both."""
        text = (
            self._sample.get("cls", b"")[:32].decode("ascii", "replace").strip()
            if self.classes
            else "0"
        )
        if not text.isdigit() or int(text) >= max(1, len(self.classes)):
            raise UnreadableImage(
                f"{name}: label {text!r}, expected a .cls of 0 to {len(self.classes) - 1}"
            )
        images = [ending for ending in IMAGE_EXTENSIONS if ending in self._sample]
        if not images:
            raise UnreadableImage(f"{name}: no image, which ends in {', '.join(IMAGE_EXTENSIONS)}")
        if len(images) > 1:
            raise UnreadableImage(f"{name}: {images[1]} is a second image of the same sample")
        self.labels = {name: int(text)}
        return decode_image(self._sample[images[0]], name)

    def _named(self, samples: Iterable[dict]) -> Iterator[str]:
        for sample in samples:
            self._sample = sample
            yield f"{sample['__url__']}, {sample['__key__']}"

    def _passes(self, shards: list[str], seed: int) -> Iterator[dict]:
        """Yield the samples of one pass over this process's and worker's shards after the other."""
        for number in itertools.count():
            order = webdataset.SimpleShardList(shards, seed=derive_seed(seed, number))
            own = webdataset.DataPipeline(
                order, webdataset.split_by_node, webdataset.split_by_worker
            )
            empty = True
            for shard in own:
                for sample in self._samples(shard["url"], PATIENCE):
                    yield sample
                    empty = False
            if empty:
                raise UnreadableImage(
                    f"{self.urls[0]} and the others that this process reads: no samples in them"
                )

    def _samples(self, url: str, patience: float) -> Iterator[dict]:
        """Yield the samples of a shard, which is read to its last byte."""

        def refuse(error: Exception):
            raise UnreadableImage(f"{url}: {error.args[0]}") from None

        try:
            with (
                contextlib.closing(StreamedFile(url, patience)) as file,
                open_tar(url, file) as tar,
            ):
                plain = (m for m in members(tar, url) if sample_of(m.name))
                files = (
                    dict(fname=m.name, data=tar.extractfile(m).read(), __url__=url) for m in plain
                )
                count = 0
                for sample in group_by_keys(files, handler=refuse):
                    yield sample
                    count += 1
                if url in self.entries:
                    refuse_difference(url, file.offset, count, self.entries[url], self.record)
        except tarfile.TarError as error:
            raise UnreadableImage(
                f"{url}: cut off within a member, at byte {file.offset} ({error})"
            ) from None
        except ValueError as error:
            raise UnreadableImage(str(error)) from None


class StreamedFile:
    """A URL that is read once through. After a failure it is opened again and read on from the same byte.

    After `patience` seconds without a byte a failure is final: UnreadableImage, naming the URL.
    """

    def __init__(self, url: str, patience: float):
        self.url, self.patience, self.offset, self._file = url, patience, 0, None

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes; none at the end."""
        failed_at, pause = None, 0.5
        while True:
            try:
                if self._file is None:
                    self._open()
                data = self._file.read(size)
                if not data:
                    self._refuse_early_end()
                self.offset += len(data)
                return data
            except (OSError, HTTPException) as error:
                why, absent = self._failure(error)
            if absent or not self.patience:
                raise UnreadableImage(f"{self.url}: {why}")
            if failed_at is None:
                failed_at = time.monotonic()
                print(
                    f"{self.url}: {why}; tried again for {self.patience:g} s",
                    file=sys.stderr,
                    flush=True,
                )
            if time.monotonic() - failed_at > self.patience:
                raise UnreadableImage(f"{self.url}: {why}, and so for {self.patience:g} s")
            time.sleep(min(pause, self.patience))
            pause = min(2 * pause, 10)

    def close(self) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(OSError):  # of a command that this ends
            if file:
                file.close()

    def _open(self) -> None:
        # Not by webdataset's curl, which waits for a silent server forever, and starts at byte 0.
        if re.match("https?:", self.url):
            wanted = {"Range": f"bytes={self.offset}-"} if self.offset else {}
            self._file = urlopen(Request(self.url, headers=wanted), timeout=SILENCE)
            there = self.offset if self._file.status == 206 else 0
        else:
            self._file, there = gopen(self.url), 0
        while there < self.offset:
            data = self._file.read(min(2**20, self.offset - there))
            if not data:
                raise OSError(f"ended at byte {there}, {self.offset} were there before")
            there += len(data)

    def _refuse_early_end(self) -> None:
        """Raise OSError if the end of the file is the end of the connection, or of a command that failed."""
        if isinstance(self._file, Pipe) and self._file.proc.wait():
            raise OSError(f"exit code {self._file.proc.returncode}")
        if missing := getattr(self._file, "length", None):
            raise OSError(f"the connection ended {missing} bytes early")

    def _failure(self, error: Exception) -> tuple[str, bool]:
        """Close the file; return why it failed, and whether trying again is of no use."""
        if isinstance(self._file, Pipe):  # its own words are those of Python
            error = OSError(f"exit code {self._file.proc.wait()}")
        self.close()
        if isinstance(error, URLError) and isinstance(error.reason, OSError):
            error = error.reason
        absent = (
            isinstance(error, HTTPError)
            and 400 <= error.code < 500
            and error.code not in (408, 429)
        )
        absent = absent or isinstance(error, FileNotFoundError | PermissionError)
        return message_of(error).removeprefix(f"{self.url}: "), absent


@dataclass(eq=False)
class StreamedBatches(IterableDataset):
    """Micro-batches of a `LabelledImages` of a `ShardStream`, made in the processes of a loader with `batch_size=None`.

    A sample's augmentation, noise and timestep follow from the seed and its position, as in the exact order.
    """

    dataset: Dataset
    batches: StepBatches
    collate: Callable[[list[dict]], dict]

    def __iter__(self):
        info, images, batches = get_worker_info(), self.dataset, self.batches
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        names = images.source.names(images.seed, batches.start, batches.world * workers)
        for positions in itertools.islice(batches.positions(), worker, None, workers):
            yield self.collate([images.item(position, names) for position in positions])
