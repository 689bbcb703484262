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
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlparse
from urllib.request import Request, urlopen

import webdataset
from webdataset.gopen import Pipe, gopen, gopen_schemes
from webdataset.tariterators import group_by_keys

from moh_vision.common.errors import message_of
from moh_vision.common.io import class_names
from moh_vision.common.progress import say
from moh_vision.common.seeds import Stream, derive_seed
from moh_vision.data.decode import AS_STORED, Decoding, UnreadableImage
from moh_vision.data.records import read_record, record_path, refuse_difference
from moh_vision.data.sources import BadSample, Sample, Source
from moh_vision.data.tars import (
    IMAGE_EXTENSIONS,
    LABEL_EXTENSIONS,
    ending_with,
    members,
    open_tar,
    sample_of,
)

PATIENCE = 300  # seconds for which reading a shard is retried
SILENCE = 60  # seconds without a byte after which a server counts as gone
BUFFER = 1000  # samples, not yet decoded, in the shuffle buffer of a worker
PROMISE = (
    "data.exact_order false: images come as webdataset's stream shuffles them; their order depends on processes and "
    "workers, an epoch is a number of images and not every image once, and a resumed run draws a new order"
)


def open_stream(data, given: Collection[str], accelerator) -> "ShardStream | None":
    """Open the training images of a `DataConfig` as a stream, and read its first sample; None with exact_order.

    `given` holds the options of the command line. A command in data.stream is accepted only there, because a stranger's
    configuration file must not run programs.
    """
    if data.exact_order:
        return None
    root = Path(data.root)
    names_file = root / "classes.txt"
    if not names_file.is_file():
        raise FileNotFoundError(
            f"data.root {data.root}: no file classes.txt in it, one class name a line, which data.exact_order false "
            "needs (empty: without classes); URLs of shards go into data.stream"
        )
    urls = _shard_urls(data, given)
    record = record_path(root, "train")
    entries = {}
    # With both keys given, the shards of data.stream are not those that data.root's record describes.
    if record.exists() and not (data.stream and data.samples):
        written = read_record(record)["shards"]
        for url in urls:
            tars = re.findall(r"[^/\s]+\.tar", url)
            if tars and tars[-1] in written:
                entries[url] = written[tars[-1]]
    if not data.samples and len(entries) < len(set(urls)):
        raise ValueError(
            f"data.samples is needed: how many images an epoch has; no record {record} has all these shards"
        )
    samples = data.samples or sum(entries[url]["samples"] for url in urls)
    source = ShardStream(
        urls, class_names(names_file), samples, root.name, record, entries, Decoding.of(data)
    )
    source.check()  # report a wrong URL or shard before the run's folder is made
    parts = accelerator.num_processes * max(1, data.workers)
    if accelerator.is_main_process:
        say(PROMISE)
        if parts > len(urls):
            say(f"{len(urls)} shards for {parts} processes x workers: some read the same shards")
    return source


def _shard_urls(data, given: Collection[str]) -> list[str]:
    """Return the URLs of data.stream, or the shards in data.root.

    Raise ValueError for an unknown scheme, and for a command that a configuration file names.
    """
    if data.stream:
        try:
            urls = webdataset.shardlists.expand_urls(data.stream)
        except AssertionError:
            problem = "${NAME} is the environment variable WDS_NAME, which is not set"
            raise ValueError(f"data.stream {data.stream}: {problem}") from None
        except ValueError as error:
            raise ValueError(f"data.stream {data.stream}: {message_of(error)}") from None
    else:
        urls = [str(path) for path in sorted(Path(data.root).glob("train-*.tar"))]
    if not urls:
        raise FileNotFoundError(
            f"data.root {data.root}: no train-*.tar shards in it, and data.stream names none"
        )
    schemes = {urlparse(url).scheme for url in urls}
    unknown = sorted(schemes - {"", "file", *gopen_schemes})
    if unknown:
        raise ValueError(
            f"data.stream {data.stream}: {unknown[0]}: is not read; pipe:COMMAND reads what a command writes"
        )
    if "data.stream" not in given and "pipe" in schemes:
        raise ValueError(
            f"data.stream {data.stream} runs a command; give it on the command line, it is not taken from a configuration"
        )
    return urls


@dataclass(eq=False)
class ShardStream(Source):
    """Images of webdataset shards as they arrive. A sample has no index; its name is its shard's URL and its key.

    Attributes:
        urls: uncompressed tar files: paths, http(s)://, pipe:COMMAND, and what webdataset opens.
        classes: class names; a sample's label is in its .cls file.
        epoch_size: number of images in an epoch.
        name: name of the data set.
        record, entries: path of the record of written shards, and its entries by URL; a shard must match its entry.
        decoding: how files become pixels.
        first: the sample that `check` has read.
    """

    urls: list[str]
    classes: list[str]
    epoch_size: int
    name: str
    record: Path | None = None
    entries: dict[str, dict] = field(default_factory=dict)
    decoding: Decoding = AS_STORED
    first: Sample | None = field(default=None, init=False)

    def __len__(self) -> int:
        return self.epoch_size

    def check(self) -> None:
        """Read the first shard up to a sample that can be decoded; raise UnreadableImage if there is none."""
        problem = f"{self.urls[0]}: no samples in it"
        for sample in self._samples_in(self.urls[0], patience=0):
            if isinstance(sample, BadSample):
                problem = sample.problem
                continue
            try:
                self.decode(sample)
                self.first = sample
                return
            except UnreadableImage as error:
                problem = str(error)
        raise UnreadableImage(problem)

    def looked_at(self, count: int) -> Iterator[Sample]:
        """Yield the sample that `check` has read: others cost a second look at the shards."""
        if self.first is not None:
            yield self.first

    def samples(self, seed: int, start: int, parts: int) -> Iterator[Sample | BadSample]:
        """Return the samples of this process and worker, shuffled and without end.

        `start` is the step from which the run resumes; `parts` is the number of processes x workers.
        """
        stream_seed = derive_seed(seed, start, Stream.SHARDS)
        copies = -(-parts // len(self.urls))  # rounded up: a worker without a shard would block all
        shuffled = webdataset.shuffle(BUFFER, seed=stream_seed)
        return shuffled(self._passes(self.urls * copies, stream_seed))

    def _passes(self, shards: list[str], seed: int) -> Iterator[Sample | BadSample]:
        """Yield the samples of this process and worker in endless passes, each of which shuffles the shards anew."""
        for number in itertools.count():
            order = webdataset.SimpleShardList(shards, seed=derive_seed(seed, number))
            shards_of_part = webdataset.DataPipeline(
                order, webdataset.split_by_node, webdataset.split_by_worker
            )
            empty = True
            for shard in shards_of_part:
                for sample in self._samples_in(shard["url"], PATIENCE):
                    yield sample
                    empty = False
            if empty:
                raise UnreadableImage(
                    f"{self.urls[0]} and the others that this process reads: no samples in them"
                )

    def _samples_in(self, url: str, patience: float) -> Iterator[Sample | BadSample]:
        """Yield the samples of a shard, which is read to its last byte."""

        def refuse(error: Exception):
            raise UnreadableImage(f"{url}: {error.args[0]}") from None

        try:
            with (
                contextlib.closing(StreamedFile(url, patience)) as file,
                open_tar(url, file) as tar,
            ):
                of_samples = (member for member in members(tar, url) if sample_of(member.name))
                files = (
                    dict(fname=member.name, data=tar.extractfile(member).read(), __url__=url)
                    for member in of_samples
                )
                count = 0
                for grouped in group_by_keys(files, handler=refuse):
                    yield self._sample_of(grouped)
                    count += 1
                if url in self.entries:
                    refuse_difference(url, file.offset, count, self.entries[url], self.record)
        except tarfile.TarError as error:
            raise UnreadableImage(
                f"{url}: cut off within a member, at byte {file.offset} ({error})"
            ) from None
        except ValueError as error:
            raise UnreadableImage(str(error)) from None

    def _sample_of(self, grouped: dict) -> Sample | BadSample:
        """Return the sample of a group from webdataset, which maps the ending of each file to its bytes."""
        name = f"{grouped['__url__']}, {grouped['__key__']}"
        text = "0"
        if self.classes:
            labels = ending_with(grouped, LABEL_EXTENSIONS)
            if len(labels) > 1:
                return BadSample(name, f"{name} has {len(labels)} .cls files ({', '.join(labels)})")
            text = b"".join(grouped[label] for label in labels)[:32]
            text = text.decode("ascii", "replace").strip()
        if not text.isdigit() or int(text) >= max(1, len(self.classes)):
            expected = f"expected a .cls of 0 to {len(self.classes) - 1}"
            return BadSample(name, f"{name}: label {text!r}, {expected}")
        images = ending_with(grouped, IMAGE_EXTENSIONS)
        if not images:
            known = ", ".join(IMAGE_EXTENSIONS)
            return BadSample(name, f"{name}: no image, which ends in {known}")
        if len(images) > 1:
            return BadSample(name, f"{name} has {len(images)} images ({', '.join(images)})")
        return Sample(name, grouped[images[0]], int(text))


class StreamedFile:
    """A URL that is read once, from start to end. After a failure it is reopened and read on from the same byte.

    Reading raises UnreadableImage, naming the URL, if it has failed for `patience` seconds.
    """

    def __init__(self, url: str, patience: float):
        self.url = url
        self.patience = patience
        self.offset = 0  # number of bytes read so far
        self._file = None

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes; none at the end."""
        failed_at = None
        pause = 0.5
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
                why, permanent = self._failure(error)
            if permanent or not self.patience:
                raise UnreadableImage(f"{self.url}: {why}")
            if failed_at is None:
                failed_at = time.monotonic()
                line = f"{self.url}: {why}; tried again for {self.patience:g} s"
                print(line, file=sys.stderr, flush=True)
            if time.monotonic() - failed_at > self.patience:
                raise UnreadableImage(f"{self.url}: {why}, and so for {self.patience:g} s")
            time.sleep(min(pause, self.patience))
            pause = min(2 * pause, 10)

    def close(self) -> None:
        file = self._file
        self._file = None
        with contextlib.suppress(OSError):  # closing a `Pipe` raises its command's exit code
            if file:
                file.close()

    def _open(self) -> None:
        # Not with webdataset's curl, which waits for a silent server forever and starts at byte 0.
        position = 0  # offset of the next byte that the opened file returns
        if re.match("https?:", self.url):
            headers = {"Range": f"bytes={self.offset}-"} if self.offset else {}
            self._file = urlopen(Request(self.url, headers=headers), timeout=SILENCE)
            if self._file.status == 206:  # partial content: the server supports the Range header
                position = self.offset
        else:
            self._file = gopen(self.url)
        while position < self.offset:
            data = self._file.read(min(2**20, self.offset - position))
            if not data:
                raise OSError(f"ended at byte {position}, {self.offset} were there before")
            position += len(data)

    def _refuse_early_end(self) -> None:
        """Raise OSError if the file ended because its connection broke or its command failed."""
        if isinstance(self._file, Pipe) and self._file.proc.wait():
            raise OSError(f"exit code {self._file.proc.returncode}")
        missing = getattr(self._file, "length", None)  # of an HTTP response: bytes still to come
        if missing:
            raise OSError(f"the connection ended {missing} bytes early")

    def _failure(self, error: Exception) -> tuple[str, bool]:
        """Close the file; return why it failed, and whether it will fail again at every attempt."""
        if isinstance(self._file, Pipe):  # say the exit code: the message of `Pipe` is Python's
            error = OSError(f"exit code {self._file.proc.wait()}")
        self.close()
        if isinstance(error, URLError) and isinstance(error.reason, OSError):
            error = error.reason
        if isinstance(error, HTTPError):
            permanent = 400 <= error.code < 500 and error.code not in (408, 429)
        else:
            permanent = isinstance(error, FileNotFoundError | PermissionError)
        # `read` names the URL; a message of `open` already begins with it.
        return message_of(error).removeprefix(f"{self.url}: "), permanent
