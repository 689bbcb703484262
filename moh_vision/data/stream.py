"""Images of webdataset shards in the order in which they arrive, from files, servers and commands: `data.exact_order
false`.

webdataset's own pipeline reads them: shards are shuffled, divided among processes and workers, and a buffer shuffles the
samples of each worker. What the exact order promises does not hold here: see `PROMISE`.
"""

from __future__ import annotations

import itertools
import re
import sys
import tarfile
import time
from http.client import HTTPException
from pathlib import Path
from typing import Collection, Dict, Iterable, Iterator, List, Optional
from urllib.error import HTTPError, URLError
from urllib.parse import urlparse
from urllib.request import Request, urlopen

import webdataset
from torch.utils.data import IterableDataset, get_worker_info
from webdataset.gopen import Pipe, gopen, gopen_schemes
from webdataset.tariterators import group_by_keys

from moh_vision.data.decode import UnreadableImage, decode_image
from moh_vision.data.shard_files import record_path, recorded, refuse_other
from moh_vision.data.sources import IMAGE_EXTENSIONS
from moh_vision.data.tar_index import members, open_tar
from moh_vision.data.tar_samples import class_names
from moh_vision.engine.commands import message_of, say
from moh_vision.engine.seeds import Stream, derive_seed

PATIENCE = 300  # seconds that a shard that cannot be read is tried again
SILENCE = 60  # seconds without a byte after which a server counts as gone
META = re.compile("__[^/]*__($|/)")  # members that webdataset passes over, by their names
BUFFER = 1000  # samples that a worker shuffles, as they are in the shard
PROMISE = (
    "data.exact_order false: images come as webdataset's stream shuffles them; their order depends on processes and "
    "workers, an epoch is a number of images and not every image once, and a resumed run draws a new order"
)


def open_stream(data, given: Collection[str], accelerator) -> Optional[ShardStream]:
    """The training images of a configuration with `data.exact_order false`; None where the order is exact.

    Args:
        data: a `DataConfig`.
        given: names of the options on the command line. A command in data.stream is only taken from there, because
            a configuration of a stranger must not run programs.
        accelerator: accelerate's Accelerator; its main process says what a stream does not promise.

    Raises:
        ValueError, FileNotFoundError: naming the key, file or URL; the first sample is read.
    """
    if data.exact_order:
        return None
    root = Path(data.root)
    names = root / "classes.txt"
    if not names.is_file():
        raise FileNotFoundError(
            f"data.root {data.root}: no file classes.txt in it, one class name a line, which data.exact_order false "
            "needs; URLs of shards go into data.stream"
        )
    if data.stream is None:
        urls = [str(path) for path in sorted(root.glob("train-*.tar"))]
    else:
        urls = _expanded(data.stream)
    if not urls:
        raise FileNotFoundError(f"data.root {data.root}: no train-*.tar shards in it, and data.stream names none")
    kinds = {urlparse(url).scheme for url in urls}
    for kind in sorted(kinds - {"", "file", *gopen_schemes}):
        raise ValueError(f"data.stream {data.stream}: {kind}: is not read; pipe:COMMAND reads what a command writes")
    if "data.stream" not in given and "pipe" in kinds:
        raise ValueError(
            f"data.stream {data.stream} runs a command; give it on the command line, it is not taken from a configuration"
        )
    record = record_path(root, "train")
    # Who counts the images of a stream himself has shards that are not those of data.root.
    entries = {} if data.stream and data.samples else _entries(record, urls)
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


def _expanded(text: str) -> List[str]:
    try:
        return webdataset.shardlists.expand_urls(text)
    except AssertionError:
        raise ValueError(
            f"data.stream {text}: ${{NAME}} is the environment variable WDS_NAME, which is not set"
        ) from None
    except ValueError as error:
        raise ValueError(f"data.stream {text}: {message_of(error)}") from None


def _entries(record: Path, urls: List[str]) -> Dict[str, dict]:
    """Entries of a record by the URLs of their shards, as far as it has them."""
    entries = recorded(record) or {}
    names = {url: (re.findall(r"[^/\s]+\.tar", url) or [""])[-1] for url in urls}
    return {url: entries[name] for url, name in names.items() if name in entries}


class ShardStream:
    """Images of webdataset shards in the order in which they arrive. Samples have no numbers but names: URL and key.

    Args:
        urls: of the shards, uncompressed tar files: paths, http(s)://, pipe:COMMAND, and what webdataset opens.
        classes: names of the classes.
        samples: images of an epoch.
        name: of the data.
        record, entries: a record of what was written, and URL -> samples and bytes by it, which must be so.

    Attributes:
        labels: of the sample that came last; none is known ahead.
    """

    channels = 3
    img_size = None  # as large as each image is; the transform decides

    def __init__(
        self,
        urls: List[str],
        classes: List[str],
        samples: int,
        name: str,
        record: Optional[Path] = None,
        entries: Optional[Dict[str, dict]] = None,
    ):
        self.urls, self.classes, self.name, self.shard_sizes = urls, classes, name, (samples,)
        self.record, self.entries = record, entries or {}
        self.labels: Dict[str, int] = {}
        self._sample: dict = {}

    def __len__(self) -> int:
        return self.shard_sizes[0]

    def check(self) -> None:
        """Read the first shard up to a sample that can be decoded.

        Raises:
            UnreadableImage: naming the shard, or its last sample if none can be.
        """
        problem = UnreadableImage(f"{self.urls[0]}: no samples in it")
        for name in self._named(self._read(webdataset.SimpleShardList(self.urls[:1]), patience=0)):
            try:
                self.image(name)
                return
            except UnreadableImage as error:
                problem = error
        raise problem

    def names(self, seed: int, start: int, parts: int) -> Iterator[str]:
        """Names of the samples of this process and worker, without end; `image` and `labels` take the latest one.

        Args:
            seed: of the run.
            start: step that the run goes on from.
            parts: processes x workers; each reads its own shards, where there are enough.
        """
        first = derive_seed(seed, start, Stream.SHARDS)
        shards = self.urls * -(-parts // len(self.urls))  # a part without a shard would block all processes
        samples = self._passes(shards, first)
        yield from self._named(webdataset.shuffle(BUFFER, seed=first)(samples))

    def image(self, name: str):
        """The image of the latest sample; its label is in `labels` then.

        Raises:
            UnreadableImage: naming it, also if it has no image or no label.
        """
        text = self._sample.get("cls", b"")[:32].decode("ascii", "replace").strip()
        if not text.isdigit() or int(text) >= len(self.classes):
            raise UnreadableImage(f"{name}: label {text!r}, expected a .cls of 0 to {len(self.classes) - 1}")
        found = [extension for extension in IMAGE_EXTENSIONS if extension in self._sample]
        if not found:
            raise UnreadableImage(f"{name}: no image, which ends in {', '.join(IMAGE_EXTENSIONS)}")
        self.labels = {name: int(text)}
        return decode_image(self._sample[found[0]], name)

    def _named(self, samples: Iterable[dict]) -> Iterator[str]:
        for sample in samples:
            self._sample = sample
            yield f"{sample['__url__']}, {sample['__key__']}"

    def _passes(self, shards: List[str], seed: int) -> Iterator[dict]:
        for number in itertools.count():
            some = False
            order = webdataset.SimpleShardList(shards, seed=derive_seed(seed, number))
            for sample in self._read(order, PATIENCE, webdataset.split_by_node, webdataset.split_by_worker):
                yield sample
                some = True
            if not some:
                raise UnreadableImage(f"{self.urls[0]} and the others that this process reads: no samples in them")

    def _read(self, shards: IterableDataset, patience: float, *splitters) -> Iterator[dict]:
        for shard in webdataset.DataPipeline(shards, *splitters):
            yield from self._samples(shard["url"], patience)

    def _samples(self, url: str, patience: float) -> Iterator[dict]:
        """The samples of a shard, which is read to its last byte."""

        def refuse(error: Exception):
            raise UnreadableImage(f"{url}: {error.args[0]}") from None

        try:
            with StreamedFile(url, patience) as file, open_tar(url, file) as tar:
                found = (m for m in members(tar, url) if not META.match(m.name))
                files = (dict(fname=m.name, data=tar.extractfile(m).read(), __url__=url) for m in found)
                count = 0
                for sample in group_by_keys(files, handler=refuse):
                    yield sample
                    count += 1
                if url in self.entries:
                    refuse_other(url, file.offset, count, self.entries[url], self.record)
        except tarfile.TarError as error:
            raise UnreadableImage(f"{url}: cut off within a member, at byte {file.offset} ({error})") from None
        except ValueError as error:
            raise UnreadableImage(str(error)) from None

    def listing(self) -> Iterator[bytes]:
        """Nothing: what arrives is not known ahead."""
        yield from ()


class StreamedFile:
    """A shard that is read once through; after a failure it is opened again, and read on from the same byte.

    Args:
        url: see `ShardStream`.
        patience: seconds from a failure on; without a byte until then, it is final.

    Raises:
        UnreadableImage: by every method, naming the URL, after a final failure.
    """

    def __init__(self, url: str, patience: float):
        self.url, self.patience = url, patience
        self.file, self.offset = None, 0
        self.failed_at: Optional[float] = None
        self.tries = 0

    def __enter__(self) -> StreamedFile:
        return self

    def __exit__(self, *_) -> None:
        self._close()

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end."""
        while True:
            try:
                if self.file is None:
                    self._open()
                data = self.file.read(size)
                if not data:
                    self._refuse_early_end()
            except (OSError, HTTPException) as error:
                self._failed(error)
                continue
            self.offset += len(data)
            if data:
                self.failed_at, self.tries = None, 0
            return data

    def _open(self) -> None:
        # Not by webdataset's curl, which waits for ever for a server that is silent, and starts at byte 0.
        if re.match("https?:", self.url):
            wanted = {"Range": f"bytes={self.offset}-"} if self.offset else {}
            self.file = urlopen(Request(self.url, headers=wanted), timeout=SILENCE)
            there = self.offset if self.file.status == 206 else 0
        else:
            self.file, there = gopen(self.url), 0
        while there < self.offset:
            data = self.file.read(min(2**20, self.offset - there))
            if not data:
                raise OSError(f"ended at byte {there}, {self.offset} were there before")
            there += len(data)

    def _refuse_early_end(self) -> None:
        """Raise OSError if the end of the file is the end of the connection, or a command that failed."""
        if isinstance(self.file, Pipe) and self.file.proc.wait():
            raise OSError(f"exit code {self.file.proc.returncode}")
        missing = getattr(self.file, "length", None)
        if missing:
            raise OSError(f"the connection ended {missing} bytes early")

    def _failed(self, error: Exception) -> None:
        """Wait before the next try; raise where there is none."""
        if isinstance(self.file, Pipe):  # its own words are those of Python
            error = OSError(f"exit code {self.file.proc.wait()}")
        self._close()
        if isinstance(error, URLError) and isinstance(error.reason, OSError):
            error = error.reason
        why = message_of(error).removeprefix(f"{self.url}: ")
        absent = isinstance(error, HTTPError) and 400 <= error.code < 500 and error.code not in (408, 429)
        absent = absent or isinstance(error, (FileNotFoundError, PermissionError))
        now = time.monotonic()
        if self.failed_at is None and self.patience and not absent:
            self.failed_at = now
            print(f"{self.url}: {why}; tried again for {self.patience:g} s", file=sys.stderr, flush=True)
        if absent or not self.patience:
            raise UnreadableImage(f"{self.url}: {why}") from None
        if now - self.failed_at > self.patience:
            raise UnreadableImage(f"{self.url}: {why}, and so for {self.patience:g} s") from None
        time.sleep(min(0.5 * 2**self.tries, 10, self.patience))
        self.tries += 1

    def _close(self) -> None:
        file, self.file = self.file, None
        try:
            if file:
                file.close()
        except OSError:  # of a command that is ended by this
            pass


class StreamedBatches(IterableDataset):
    """Micro-batches of a `ShardStream`, made in the processes of a loader with `batch_size=None`.

    A sample's augmentation, noise and timestep are functions of the seed and its position in the run, as in the exact
    order; which sample is there is not.

    Args:
        dataset: a `LabelledImages` of the stream.
        batches: a `StepBatches`, for the positions.
        collate: (items) -> micro-batch.
    """

    def __init__(self, dataset, batches, collate):
        self.dataset, self.batches, self.collate = dataset, batches, collate

    def __iter__(self):
        info, d, b = get_worker_info(), self.dataset, self.batches
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        names = d.source.names(d.seed, b.start, b.world * workers)
        for positions in itertools.islice(b.positions(), worker, None, workers):
            yield self.collate([d.item(position, names) for position in positions])
