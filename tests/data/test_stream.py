"""Shards as a stream, `data.exact_order false`, from files, servers and commands, with failures on the way."""

import contextlib
import http.server
import io
import itertools
import math
import os
import re
import shutil
import sys
import tarfile
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from moh_vision.classification import train as cls
from moh_vision.data import batches, stream
from moh_vision.data.batches import BadSamples, LabelledImages, image_transform, training_loader
from moh_vision.data.decode import UnreadableImage
from moh_vision.data.order import PositionSampler
from moh_vision.data.splits import open_source
from moh_vision.data.stream import ShardStream, StreamedFile
from moh_vision.diffusion import train as dit
from moh_vision.engine import command_line
from tests.support.pictures import convert, encoded, write_folder
from tests.support.processes import on_two_ranks
from tests.support.refusals import assert_says, one_line, refused
from tests.support.shards import append, write_shards
from tests.support.small_runs import logged

PIXELS = dict(mean=(0, 0, 0), std=(1, 1, 1))


@pytest.fixture
def shards(tmp_path):
    """A folder of 46 images in shards of ten; image i has a red value of i and class i % 3."""
    folder = write_shards(tmp_path / "shards", count=46)
    (folder / "classes.txt").write_text("a\nb\nc\n")
    return folder


@contextlib.contextmanager
def served(folder, port=0, cut=0, ranges=True):
    """Serve a folder by HTTP; yield (URL, list of (path, Range header) of the requests so far).

    cut: how many answers, from the first on, break off half way. ranges: whether the server respects a Range header.
    """
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append((self.path, self.headers["Range"]))
            file = folder / self.path[1:]
            if not file.exists():
                return self.send_error(404)
            data = file.read_bytes()
            first = 0
            if self.headers["Range"] and ranges:
                first = int(self.headers["Range"][6:-1])
            self.send_response(206 if first else 200)
            self.send_header("Content-Length", str(len(data) - first))
            self.end_headers()
            end = len(data)
            if len(requests) <= cut:
                end = len(data) // 2
            self.wfile.write(data[first:end])

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def paths(folder):
    """Return the paths of the training shards."""
    return [str(path) for path in sorted(folder.glob("train-*.tar"))]


def source_of(urls, samples=46):
    return ShardStream(urls, ["a", "b", "c"], samples, "some")


def arriving(source, count, parts=1):
    """Return which images the next `count` samples are, by their red values, and check their labels."""
    found = []
    for sample in itertools.islice(source.samples(0, 0, parts), count):
        found.append(source.decode(sample).getpixel((0, 0))[0])
        assert sample.label == found[-1] % 3
    return found


# ---------------------------------------------------------------- a file


@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_that_ends_early_is_resumed_at_its_byte(shards, capfd, no_pauses, ranges):
    no_pauses()
    data = (shards / "train-000000.tar").read_bytes()
    with served(shards, cut=1, ranges=ranges) as (url, requests):
        with contextlib.closing(StreamedFile(f"{url}/train-000000.tar", 5)) as file:
            assert b"".join(iter(lambda: file.read(3000), b"")) == data
    assert requests[1] == ("/train-000000.tar", f"bytes={len(data) // 2}-") and len(requests) == 2
    missing = len(data) - len(data) // 2
    said = (
        f"{url}/train-000000.tar: the connection ended {missing} bytes early; tried again for 5 s\n"
    )
    assert capfd.readouterr().err == said


def test_a_command_that_fails_is_run_again(shards, tmp_path, capfd, no_pauses):
    """The command breaks off in its first call only, when there is no file `once` yet."""
    no_pauses()
    shard = shards / "train-000000.tar"
    once = tmp_path / "once"
    url = f"pipe:test -e {once} && cat {shard} || {{ head -c 4000 {shard}; touch {once}; exit 3; }}"
    with contextlib.closing(StreamedFile(url, 5)) as file:
        assert b"".join(iter(lambda: file.read(3000), b"")) == shard.read_bytes()
    assert capfd.readouterr().err == f"{url}: exit code 3; tried again for 5 s\n"


def test_reading_from_a_server_that_stays_away_ends_after_a_while(shards, capfd):
    with served(shards) as (url, _):
        pass
    began = time.monotonic()
    with one_line(f"{url}/a.tar refused 0.6", UnreadableImage):
        StreamedFile(f"{url}/a.tar", 0.6).read(10)
    assert 0.6 < time.monotonic() - began < 60  # and not for ever
    assert capfd.readouterr().err.count("\n") == 1


def test_a_missing_file_is_refused_without_trying_again(shards):
    with served(shards) as (url, requests):
        with one_line(f"{url}/a.tar HTTP 404", UnreadableImage):
            StreamedFile(f"{url}/a.tar", 600).read(10)
    assert len(requests) == 1
    with one_line("/no/where.tar file", UnreadableImage):
        StreamedFile("/no/where.tar", 600).read(10)


# ---------------------------------------------------------------- samples


def test_parts_read_shards_of_their_own(shards, monkeypatch):
    """A part is one process, or one worker of a process."""
    seen = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        one_pass = itertools.islice(source_of([], 40)._passes(paths(shards)[:4], 1), 20)
        seen.append({sample.name for sample in one_pass})
    assert len(seen[0]) == len(seen[1]) == 20 and len(set.union(*seen)) == 40
    monkeypatch.setenv("RANK", "1")  # with fewer shards than parts, each part still reads one
    assert set(arriving(source_of(paths(shards)[:1]), 400, parts=4)) == set(range(10))


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("world, workers", [(1, 1), (2, 1), (3, 1), (3, 2), (2, 4)])
def test_parts_read_every_image_equally_often(shards, monkeypatch, count, world, workers):
    """A pass has every shard once or, with fewer shards than parts, so often that each part gets one."""
    monkeypatch.setattr(stream, "BUFFER", 1)  # no shuffling across passes
    urls = paths(shards)[:count]
    copies = math.ceil(world * workers / count)
    dataset = LabelledImages(source_of(urls), image_transform("flip", 4, 3, **PIXELS), seed=0)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("NUM_WORKERS", str(workers))
    seen = Counter()
    for rank, worker in itertools.product(range(world), range(workers)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORKER", str(worker))
        info = SimpleNamespace(id=worker, num_workers=workers)
        monkeypatch.setattr(batches, "get_worker_info", lambda info=info: info)
        order = PositionSampler(
            [10 * count],
            group=8,
            seed=0,
            batch_size=world,
            accumulation=1,
            rank=rank,
            world=world,
            start=0,
            stop=1000,
        )
        own_shards = len(range(count * copies)[rank::world][worker::workers])
        images = iter(batches.StreamDataset(dataset, order, lambda items: items[0]["images"]))
        for image in itertools.islice(images, 10 * own_shards):
            seen[round(image[0, 0, 0].item() * 255)] += 1
    assert seen == dict.fromkeys(range(10 * count), copies)


def test_the_stream_is_endless_and_its_order_follows_from_the_seed(shards):
    first = arriving(source_of(paths(shards)), 300)
    assert set(first) == set(range(46)) and first == arriving(source_of(paths(shards)), 300)
    assert first[:46] != sorted(first[:46])
    samples = source_of(paths(shards)).samples
    resumed = [sample.name for sample in itertools.islice(samples(0, 7, 1), 40)]
    assert [sample.name for sample in itertools.islice(samples(0, 0, 1), 40)] != resumed


def test_samples_hold_image_and_label(shards):
    """A sample does not change when later ones arrive, and samples can be decoded in any order."""
    source = source_of(paths(shards))
    samples = list(itertools.islice(source.samples(0, 0, 1), 60))
    for sample in reversed(samples):
        assert source.decode(sample).getpixel((0, 0))[0] % 3 == sample.label
        assert sample.name.startswith(str(shards))
    assert not len(source.labels)  # labels are not known before their samples arrive


def batches_of(source, workers, bad=None, steps=40):
    """Return a training loader, from step 3 on, of 2 micro-batches of 4 images a step."""
    dataset = LabelledImages(source, image_transform("flip", 4, 3, **PIXELS), seed=0)
    order = PositionSampler(
        source.shard_sizes,
        group=8,
        seed=0,
        batch_size=8,
        accumulation=2,
        rank=0,
        world=1,
        start=3,
        stop=3 + steps,
    )
    return training_loader(dataset, order, workers, bad)


def test_two_workers_take_turns(shards):
    seen = []
    for batch in batches_of(source_of(paths(shards)), 2):
        assert batch["images"].shape == (4, 3, 4, 4)
        red = (batch["images"][:, 0, 0, 0] * 255).round().long()
        assert torch.equal(red % 3, batch["labels"])
        seen.append(red)
    assert len(seen) == 80 and set(torch.cat(seen).tolist()) == set(range(46))


def test_bad_samples_are_replaced_counted_and_bounded(tmp_path):
    folder = write_shards(tmp_path / "d", count=19, per_shard=30)
    for name, data in {
        "x0.png": b"no image",
        "x0.cls": b"0",
        "x1.cls": b"0",
        "x2.png": b"",
        "x3.cls": b"3",
    }.items():
        append(paths(folder)[0], name, data)
    bad = BadSamples(23, 0.2)
    assert len(list(batches_of(source_of(paths(folder), 23), 0, bad, steps=15))) == 30
    assert len(bad.seen) == 4
    assert all(name.startswith(f"{paths(folder)[0]}, x") for name in bad.seen)
    with one_line(f"{paths(folder)[0]} 1 data.max_bad_fraction 0 23 0.044") as refusal:
        list(batches_of(source_of(paths(folder), 23), 0, BadSamples(23), steps=15))
    assert re.search(r"\bx[0-3]\b", str(refusal.value))  # the first that is met


@pytest.mark.parametrize("where", ["within a file", "between two", "a header", "compressed"])
def test_damaged_shards_are_refused(shards, where):
    """Shards with zeros in them are tested in tests/reliability/test_bad_tars.py."""
    path = shards / "train-000001.tar"
    with tarfile.open(path) as tar:
        member = tar.getmembers()[9]
    data = path.read_bytes()
    cut = {
        "within a file": data[: member.offset_data + 20],
        "between two": data[: member.offset],
        "a header": data[: member.offset] + b"\1" * 512 + data[member.offset + 512 :],
        "compressed": b"\x1f\x8b" + data,
    }
    path.write_bytes(cut[where])
    with served(shards) as (url, _):
        for address in (str(path), f"{url}/{path.name}"):
            with one_line(address, UnreadableImage):
                arriving(source_of([address]), 100)


# ---------------------------------------------------------------- runs

SMALL = "--model.depth 1 --model.embed_dim 32 --model.num_heads 2 --data.img_size 8 --optim.batch_size 8 --log-every 1"


MODELS = dict(
    cls="--model.name moh_vit_tiny_patch16_224 --model.patch_size 4",
    dit="--model.name moh_dit_small_patch2_75 --model.head_budget 0.5",
)


def options(name, output, *more):
    """Return the command line of a small run, "cls" or "dit", that reads a stream."""
    given = [*MODELS[name].split(), *SMALL.split(), "--output", output]
    return [*given, "--data.exact_order", "false", *map(str, more)]


def test_two_processes_go_on_when_the_server_does(shards, tmp_path):
    write_shards(tmp_path / "root", count=4, split="val")
    (tmp_path / "root" / "classes.txt").write_text("a\nb\nc\n")
    with served(shards) as (url, _):  # find a free port
        port = int(url.rpartition(":")[2])
    argv = options(
        "cls", str(tmp_path / "run"), "--data.root", tmp_path / "root", "--data.samples", 46, "--max-steps", 6,
        "--data.stream", url + "/train-{000000..000004}.tar", "--data.workers", 2,
    )  # fmt: skip
    thread = threading.Thread(target=goes_away, args=(shards, port, tmp_path / "run"))
    thread.start()
    on_two_ranks(train_on_a_rank, argv, tmp_path)
    thread.join()
    assert [entry["step"] for entry in logged(tmp_path / "run")] == list(range(1, 7))
    said = [(tmp_path / f"log{rank}").read_text() for rank in range(2)]
    of_both = said[0] + said[1]
    assert f"{url}/train-00000" in of_both and "tried again for 300 s" in of_both
    assert said[0].count(stream.PROMISE) == 1 and stream.PROMISE not in said[1]


def goes_away(folder, port, run):
    """Serve until the run has begun to read, stop for a moment, and serve again until the run has ended."""
    with served(folder, port) as (_, requests):
        while len(requests) < 14:
            time.sleep(0.005)
    time.sleep(0.3)
    with served(folder, port, cut=3):
        while not (run / "results.json").exists():
            time.sleep(0.01)


def train_on_a_rank(rank, argv, folder):
    """Train with all output of this process in folder/logRANK."""
    for number in (1, 2):
        os.dup2(os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    cls.main(argv)
    sys.stdout.flush()


def test_a_diffusion_run_resumes_in_another_order(shards, tmp_path, capsys):
    for stop in (1, 2):
        dit.main(options(
            "dit", str(tmp_path / "run"), "--data.root", shards, "--data.samples", 46, "--max-steps", stop,
            "--data.workers", 0, "--data.stream", f"pipe:cat {shards}/train-{{000000..000004}}.tar",
        ))  # fmt: skip
    assert [entry["step"] for entry in logged(tmp_path / "run")] == [1, 2]
    assert "resuming" in capsys.readouterr().out


def test_mistakes_are_told_before_the_run(shards, tmp_path, capsys):
    def said(*more, name="cls"):
        script = dict(cls=cls, dit=dit)[name]
        argv = options(name, str(tmp_path / "run"), *more, "--data.workers", 0)
        return refused(capsys, script.main, *argv)

    root = ["--data.root", shards]
    assert_says(said(*root), f"data.samples images epoch {shards}/train.shards.json")
    assert_says(said(), "data.root digits classes.txt data.exact_order false data.stream")
    there = [*root, "--data.samples", 46]
    assert_says(said(*there), f"data.root {shards} split val train data.exact_order false")
    assert_says(said(*there, "--data.stream", "/no/train-{0..9}.tar"), "/no/train-0.tar file")
    with served(shards) as (url, _):
        missing = said(*there, "--data.stream", url + "/a-{0..9}.tar")
        assert_says(missing, f"{url}/a-0.tar HTTP 404")
    assert_says(said(*there, "--data.stream", url + "/a.tar"), f"{url}/a.tar refused")
    assert_says(said(*there, "--data.stream", "pipe:false"), "pipe:false exit 1")
    for address, facts in (
        ("http://${HOST}/a.tar", "${NAME} environment WDS_NAME"),
        ("s3://a/b.tar", "s3: pipe:COMMAND"),
    ):
        error = said(*there, "--data.stream", address)
        assert_says(error, f"data.stream {address} {facts}")
    for pipe in ("pipe", "/a.tar::PIPE"):
        url = f"{pipe}:touch {tmp_path}/canary"
        (tmp_path / "of_a_stranger.yaml").write_text(f"data: {{stream: '{url}'}}\n")
        config = ["--config", tmp_path / "of_a_stranger.yaml"]
        assert_says(said(*there, *config), f"data.stream {url} command line configuration")
    assert not (tmp_path / "canary").exists() and not (tmp_path / "run").exists()
    (shards / "train.meta.json").write_text("{}")
    latents = said(*there, name="dit")
    assert_says(latents, f"data.root {shards} latents data.exact_order false")


@pytest.mark.parametrize(
    "processes, workers, shared",
    [(1, 5, False), (5, 0, False), (5, 1, False), (1, 6, True), (6, 0, True), (3, 2, True)],
)
def test_fewer_shards_than_parts_are_reported(shards, capsys, processes, workers, shared):
    """There are five shards."""
    argv = ["--data.root", str(shards), "--data.exact_order", "false", "--data.samples", "46"]
    config = command_line.parse_config(
        cls.ClsConfig, [*argv, "--data.workers", str(workers)], "test"
    )
    accelerator = SimpleNamespace(is_main_process=True, num_processes=processes)
    stream.open_stream(config.data, [], accelerator)
    lines = [stream.PROMISE]
    if shared:
        lines.append("5 shards for 6 processes x workers: some read the same shards")
    assert capsys.readouterr().out.splitlines() == lines


def test_the_record_of_the_shard_writer_counts_the_images(tmp_path):
    folder = tmp_path / "d"
    assert convert(write_folder(tmp_path / "i"), folder, "--samples-per-shard 5") == 0
    first, second, third = paths(folder)

    def opened(*more):
        argv = ["--data.root", str(folder), "--data.exact_order", "false", *more]
        data = command_line.parse_config(cls.ClsConfig, argv, "test").data
        accelerator = SimpleNamespace(is_main_process=True, num_processes=1)
        return stream.open_stream(data, ["data.stream"], accelerator)

    assert len(opened()) == 12
    assert len(opened("--data.stream", f"pipe:cat {second} | cat::{first}")) == 8
    shutil.copy(first, folder / "others.tar")
    with one_line(f"data.samples images epoch {folder}/train.shards.json"):
        opened("--data.stream", f"{first}::{folder}/others.tar")
    # The shard now differs from its record, but --data.samples gives the count, so the record is not used.
    shutil.copy(third, first)
    samples = opened("--data.stream", first, "--data.samples", "7").samples(0, 0, 1)
    assert len({sample.name for sample in itertools.islice(samples, 50)}) == 4


def write_tar(file, names):
    """Write a tar of members with these names: images whose red value is the index of the name, labels of 1, and texts."""
    with tarfile.open(file, "w") as tar:
        for number, name in enumerate(names):
            ending = name.rpartition(".")[2].lower()
            data = b"1" if ending == "cls" else b"some text"
            if ending in ("bmp", "png", "tif"):
                image = Image.new("RGB", (6, 4), (number, 0, 0))
                data = encoded(image, ending.replace("tif", "tiff"))
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file


def test_both_orders_read_the_same_members(tmp_path):
    """The tar has hidden files of a Mac, notes, endings in capitals, and names that webdataset ignores."""
    names = "README LICENSE .DS_Store ._a.png ._a.cls __meta__/info.json a.PNG a.CLS a.JSON".split()
    names += "x/.DS_Store x/._b.png x/b.tif x/b.cls x/b.txt c.bmp c.Cls".split()
    write_tar(tmp_path / "train-000000.tar", names)
    (tmp_path / "classes.txt").write_text("ant\nbee\n")
    exact = open_source(str(tmp_path), "train")
    found = [exact.image(i).getpixel((0, 0))[0] for i in range(len(exact))]
    assert [names[number] for number in found] == ["a.PNG", "x/b.tif", "c.bmp"]
    assert exact.labels.tolist() == [1, 1, 1]
    stream_of_tar = source_of([str(tmp_path / "train-000000.tar")], 3)
    streamed = set()
    # 60 samples are enough to meet each of the three.
    for sample in itertools.islice(stream_of_tar.samples(0, 0, 1), 60):
        streamed.add(stream_of_tar.decode(sample).getpixel((0, 0))[0])
        assert sample.label == 1
    assert sorted(streamed) == found


def test_two_images_of_one_sample_are_refused_in_both_orders(tmp_path):
    file = tmp_path / "train-000000.tar"
    (tmp_path / "classes.txt").write_text("ant\nbee\n")
    for names, both in (
        ("a.png a.bmp a.cls", "png bmp"),
        ("a.rgb.png a.seg.png a.cls", "rgb.png seg.png"),
    ):
        write_tar(file, names.split())
        facts = f"{file} a 2 images {both}"
        with one_line(facts):
            open_source(str(tmp_path), "train")
        with one_line(facts, UnreadableImage):
            source_of([str(file)], 1).check()


@pytest.mark.parametrize(
    "names, taken",
    [
        ("a.rgb.png a.cls", "a.rgb.png"),
        ("a.RGB.PNG a.cls", "a.RGB.PNG"),
        ("a.rgb.png a.rgb.cls", "a.rgb.png"),
        ("a.seg.png a.png a.cls a.old.cls", "a.png"),  # the plain name goes before
        ("a.tar.gz a.left.rgb.png a.cls", "a.left.rgb.png"),
    ],
)
def test_an_extension_of_several_parts_is_taken_in_both_orders(tmp_path, names, taken):
    """webdataset's extension is all behind the first dot, and people write 0001.rgb.png beside 0001.cls."""
    names = names.split()
    file = write_tar(tmp_path / "train-000000.tar", names)
    (tmp_path / "classes.txt").write_text("ant\nbee\n")
    exact = open_source(str(tmp_path), "train")
    stream = source_of([str(file)], 1)
    stream.check()
    assert exact.labels.tolist() == [1] == [stream.first.label]
    for image in (exact.image(0), stream.decode(stream.first)):
        assert names[image.getpixel((0, 0))[0]] == taken
