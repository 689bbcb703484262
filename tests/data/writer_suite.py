"""What both commands that write shards have to bear, of images (test_shards.py) and of latents (test_latents.py).

Each of the two files imports these tests and has a fixture `writer`, a `Writer`.
"""

import os
import re
import resource
import shutil
import signal
import time
from typing import Callable, NamedTuple

import pytest
import torch
from pictures import contents
from PIL import Image


class Writer(NamedTuple):
    root: object  # train/cat and train/dog with ten images each, val with two
    run: Callable  # (folder, options) -> exit code
    open: Callable  # the training split of a folder -> labels, shard_sizes
    encoder: tuple  # module, and name in it of what encodes images

    def shards(self, count: int) -> tuple:
        """The option for so many shards."""
        return "--samples-per-shard", -(-20 // count)


def told(capfd):
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and ": error: " in lines[0], lines
    return lines[0]


def test_the_bytes_depend_on_the_seed_and_not_on_workers_or_time(tmp_path, writer):
    for name, more in (("a", ("--workers", 1)), ("b", ("--workers", 2)), ("c", ("--seed", 1))):
        assert writer.run(tmp_path / name, *writer.shards(5), *more) == 0
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b and len([n for n in a if n.startswith("train-")]) == 5
    assert a["train-000000.tar"] != c["train-000000.tar"]


@pytest.mark.parametrize("size", [(), ("--size", 4)])
def test_a_killed_run_goes_on_and_ends_as_an_undisturbed_one(tmp_path, writer, monkeypatch, capfd, size):
    out, other, more = tmp_path / "out", tmp_path / "other", (*writer.shards(10), "--workers", 2, *size)
    with monkeypatch.context() as patch:
        encode = getattr(*writer.encoder)
        patch.setattr(*writer.encoder, lambda *given: time.sleep(0.02) or encode(*given))
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            os._exit(writer.run(out, *more))
        deadline = time.monotonic() + 30
        while len(list(out.glob("train-*.tar"))) < 3 or not list(out.glob(".*.tmp")):
            assert time.monotonic() < deadline and os.waitpid(child, os.WNOHANG) == (0, 0)
            time.sleep(0.005)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    kept = {p.name: p.stat().st_mtime_ns for p in out.glob("train-*.tar")}
    assert 3 <= len(kept) < 10 and list(out.glob(".*.tmp"))
    assert writer.run(out, *more) == 0
    assert f"{len(kept)} of 10 shards are there" in capfd.readouterr().out
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept
    assert writer.run(other, *more) == 0
    assert contents(out) == contents(other) and not list(out.glob(".*.tmp"))
    assert writer.open(out).labels.tolist() == writer.open(other).labels.tolist()


def test_a_finished_run_is_left_alone(tmp_path, writer, capfd):
    assert writer.run(tmp_path / "out") == 0
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    assert writer.run(tmp_path / "out", "--workers", 2) == 0
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()} == before
    assert "all there already" in capfd.readouterr().out


def test_a_damaged_shard_is_moved_aside_and_a_lost_or_torn_one_written_again(tmp_path, writer, capfd):
    out, more = tmp_path / "out", writer.shards(4)
    assert writer.run(out, *more) == 0
    good = contents(out)
    damaged = bytearray(good["train-000001.tar"])
    damaged[700] ^= 1
    (out / "train-000001.tar").write_bytes(damaged)
    (out / "train-000002.tar").unlink()
    (out / "train.shards.jsonl").write_bytes(good["train.shards.jsonl"][:-9])  # killed in the last line ...
    (out / "train-000003.tar").rename(out / ".train-000003.tar.tmp")  # ... before the rename
    assert writer.run(out, *more) == 0
    assert "train-000001.tar does not have its recorded sha256; moved to" in capfd.readouterr().out
    after = contents(out)
    assert after.pop("train-000001.tar.damaged") == bytes(damaged) and after == good
    assert len(writer.open(out)) == 20


def test_records_of_other_processes_are_taken_over(tmp_path, writer, capfd):
    """As a kill of two processes leaves them: a line of the second in its own part, another one torn."""
    out, more = tmp_path / "out", writer.shards(3)
    assert writer.run(out, *more) == 0
    good = contents(out)
    header, first, second, third = good["train.shards.jsonl"].decode().splitlines(keepends=True)
    (out / "train.shards.jsonl").write_text(header + first)
    (out / ".train.shards.1.jsonl").write_text(second + third[:50])
    (out / "train-000002.tar").unlink()
    assert writer.run(out, *more) == 0
    assert "2 of 3 shards are there" in capfd.readouterr().out
    assert contents(out) == good


@pytest.mark.parametrize(
    "change, words",
    [
        (("--seed", 5), "--seed was 0, now 5"),
        (("--samples-per-shard", 9), "--samples-per-shard was 10, now 9"),
        ("more", "class dog has other files \\(10 images, now 11\\)"),
        ("touched", "class cat has other files \\(10 images, now 10\\)"),
        ("class", "class ant is new"),
        ("gone", "class dog is gone"),
    ],
)
def test_other_arguments_or_input_are_refused_and_named(tmp_path, writer, capfd, change, words):
    out, root = tmp_path / "out", writer.root
    assert writer.run(out, *writer.shards(2)) == 0
    if change == "more":
        Image.new("RGB", (4, 4)).save(root / "train" / "dog" / "new.png")
    if change == "touched":
        os.utime(root / "train" / "cat" / "3.png", ns=(1, 1))
    for split in ("train", "val"):
        if change == "class":
            shutil.copytree(root / split / "cat", root / split / "ant")
        if change == "gone":
            shutil.rmtree(root / split / "dog")
    before = contents(out)
    assert writer.run(out, *writer.shards(2), *(change if isinstance(change, tuple) else ())) == 2
    assert re.search(words, told(capfd))
    assert contents(out) == before


def test_other_files_are_not_touched_and_other_shards_refused(tmp_path, writer, capfd):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "test-000000.tar").write_text("another split's")
    for name in (
        "train-000007.tar", "train.files.txt", "train.bad.txt", "train.latents.json", ".train.index.safetensors"
    ):  # fmt: skip
        (out / name).write_text("mine")
        assert writer.run(out) == 2
        assert f"holds {name}, which this command did not write" in told(capfd)
        assert (out / name).read_text() == "mine" and not (out / "train.shards.jsonl").exists()
        (out / name).unlink()
    (out / "classes.txt").write_text("ant\nbee\n")
    assert writer.run(out) == 2
    assert "classes.txt is there and lists other classes" in told(capfd)
    (out / "classes.txt").unlink()
    assert writer.run(out) == 0
    assert (out / "notes.txt").read_text() == "mine" and (out / "test-000000.tar").read_text() == "another split's"
    (out / "train-000009.tar").write_text("mine")
    assert writer.run(out) == 2
    assert "holds train-000009.tar" in told(capfd)


def test_a_full_disk_is_one_line_and_the_command_goes_on(tmp_path, writer, capfd):
    out = tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, hard))  # a shard has 20,480 bytes or more
    try:
        assert writer.run(out, *writer.shards(2)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"--out {out}: File too large; finished shards are kept" in told(capfd)
    assert not list(out.glob("*.tar")) and not list(out.glob(".*.tmp"))
    assert writer.run(out, *writer.shards(2)) == 0
