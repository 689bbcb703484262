"""The two commands that write shards, `shards` and `latents`, survive the same kills, damage and mistakes."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from tqdm import tqdm

from moh_vision.__main__ import main
from moh_vision.common import io
from moh_vision.data import write_shards
from moh_vision.data.shards import Shards
from moh_vision.diffusion.latents import write_latents
from moh_vision.diffusion.latents.stored import LatentCache
from tests.support.pictures import contents, write_folder
from tests.support.refusals import assert_says, error_line, one_line
from tests.support.tiny_vae import save_tiny_vae


class Writer(NamedTuple):
    """One of the commands, with its input."""

    command: str
    root: object  # folder of the input: train/cat and train/dog have ten images each, those of val two
    argv: list  # arguments, without --out
    open: Callable  # opens the training split of an output folder
    encoder: tuple  # (module, name) of the function that encodes images
    record: str  # file name of the record
    ending: str  # the ending of its shards

    def run(self, out, *more):
        """Run the command and return its exit code."""
        return main([self.command, *self.argv, "--out", str(out), *map(str, more)])

    def shard(self, number):
        return f"train-{number:06d}.{self.ending}"

    @staticmethod
    def shards(count: int) -> tuple:
        """Return the option with which the training split has `count` shards."""
        return "--samples-per-shard", -(-20 // count)


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return save_tiny_vae(tmp_path_factory.mktemp("vae"))


@pytest.fixture(params=["shards", "latents"])
def writer(request, tmp_path, vae):
    root = write_folder(tmp_path / "images", train=10, val=2, size=(21, 16))
    if request.param == "shards":
        return Writer(
            command="shards",
            root=root,
            argv=["--in", str(root), "--workers", "1"],
            open=lambda out: Shards(str(out), "train"),
            encoder=(write_shards, "encode_sample"),
            record="train.shards.json",
            ending="tar",
        )
    options = "--size 16 --samples-per-shard 7 --batch-size 3 --workers 0"
    return Writer(
        command="latents",
        root=root,
        argv=["--vae", vae, "--data", str(root), *options.split()],
        open=lambda out: LatentCache(str(out), "train"),
        encoder=(write_latents, "encode_moments"),
        record="train.meta.json",
        ending="npy",
    )


def forked(writer, out, *more):
    """Run the command in a fork, which the test will kill, and return its process id."""
    child = os.fork()
    if child == 0:
        # tqdm shares a lock with this process, which would wait forever for a fork that was killed while it printed.
        tqdm.set_lock(threading.RLock())
        torch.set_num_threads(1)
        os._exit(writer.run(out, *more))
    return child


def test_the_bytes_depend_on_the_seed_and_not_on_workers_or_time(tmp_path, writer):
    for name, more in (("a", ("--workers", 1)), ("b", ("--workers", 2)), ("c", ("--seed", 1))):
        assert writer.run(tmp_path / name, *writer.shards(5), *more) == 0
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b and len([n for n in a if n.startswith("train-")]) == 5
    assert a[writer.shard(0)] != c[writer.shard(0)]


# ---------------------------------------------------------------- kills and damage, and the call that resumes


@pytest.mark.parametrize("size", [(), ("--size", 4)])
def test_a_killed_run_goes_on_and_ends_as_an_undisturbed_one(
    tmp_path, writer, monkeypatch, capfd, size
):
    out = tmp_path / "out"
    other = tmp_path / "other"
    more = (*writer.shards(10), "--workers", 2, *size)
    encode = getattr(*writer.encoder)

    def encode_up_to_three_shards(*given):
        # However fast the machine is, the kill comes before the end.
        while len(list(out.glob("train-*"))) >= 3:
            time.sleep(0.02)
        return encode(*given)

    with monkeypatch.context() as patch:
        patch.setattr(*writer.encoder, encode_up_to_three_shards)
        child = forked(writer, out, *more)
        deadline = time.monotonic() + 120
        while len(list(out.glob("train-*"))) < 3:
            assert time.monotonic() < deadline and os.waitpid(child, os.WNOHANG) == (0, 0)
            time.sleep(0.005)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    time.sleep(0.5)  # its workers notice that it is dead, and end in the middle of a shard
    kept = {p.name: p.stat().st_mtime_ns for p in out.glob("train-*")}
    assert 3 <= len(kept) < 10
    with one_line(f"{out}/{writer.record} record not written yet"):
        writer.open(out)
    assert writer.run(out, *more) == 0
    assert f"{len(kept)} of 10 shards are there" in capfd.readouterr().out
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept
    assert writer.run(other, *more) == 0
    assert contents(out) == contents(other)
    assert not list(out.glob(".*.tmp")) and not list(out.glob(".*.parts"))
    assert writer.open(out).labels.tolist() == writer.open(other).labels.tolist()


@pytest.mark.reliability
def test_killed_at_50_instants(tmp_path, writer, monkeypatch):
    more = (*writer.shards(10), "--workers", 2)
    kills = 0
    assert writer.run(tmp_path / "whole", *more) == 0
    encode = getattr(*writer.encoder)
    monkeypatch.setattr(*writer.encoder, lambda *given: time.sleep(0.02) or encode(*given))
    for number, seconds in enumerate(np.random.default_rng(0).uniform(0, 0.25, 50)):
        out = tmp_path / f"out{number // 5}"  # each output survives five kills
        child = forked(writer, out, *more)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        kills += os.waitpid(child, 0)[1] == signal.SIGKILL
        if number % 5 == 4:
            assert writer.run(out, *more) == 0
            assert contents(out) == contents(tmp_path / "whole")
    assert kills > 20, "too few kills came before the end"


def test_a_finished_run_is_left_alone(tmp_path, writer, capfd):
    assert writer.run(tmp_path / "out") == 0
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    assert writer.run(tmp_path / "out", "--workers", 2) == 0
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()} == before
    assert "all there already" in capfd.readouterr().out


def test_a_damaged_a_lost_and_an_unnamed_shard_are_written_again(tmp_path, writer, capfd):
    out = tmp_path / "out"
    more = writer.shards(4)
    assert writer.run(out, *more) == 0
    good = contents(out)
    damaged = bytearray(good[writer.shard(1)])
    damaged[700] ^= 1
    (out / writer.shard(1)).write_bytes(damaged)
    (out / writer.shard(2)).unlink()
    # A kill before the rename leaves such a file.
    (out / writer.shard(3)).rename(out / f".{writer.shard(3)}.tmp")
    assert writer.run(out, *more) == 0
    assert_says(capfd.readouterr().out, f"{writer.shard(1)} sha256 again")
    assert contents(out) == good and len(writer.open(out)) == 20


def test_a_full_disk_is_one_line_and_the_command_goes_on(tmp_path, writer, capfd):
    out = tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, hard))  # a shard has 20,480 bytes or more
    try:
        assert writer.run(out, *writer.shards(2)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_says(error_line(capfd), f"{out}/{writer.shard(0)} large kept")
    assert not list(out.glob("train-*")) and not list(out.glob(".*.tmp"))
    assert writer.run(out, *writer.shards(2)) == 0


def test_two_runs_at_a_time_are_refused(tmp_path, writer, capfd, no_pauses):
    out = tmp_path / "out"
    out.mkdir()
    no_pauses()
    with io.only_one(out, "--out", with_children=writer.command == "shards"):
        # The second run is a fork: a POSIX lock does not keep out the process that holds it.
        child = os.fork()
        if child == 0:
            os._exit(writer.run(out))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    assert_says(error_line(capfd), f"--out {out} {owner} writing")
    assert writer.run(out) == 0


# ---------------------------------------------------------------- what is refused


# Option or change of the input -> facts of the error: what differs, the value before and now.
CHANGES = {
    "--seed 5": "--seed 0 5",
    "--size 4": "--size 4",
    "--samples-per-shard 9": "--samples-per-shard 10 9",
    "an image more": "class dog 10 11 sha256 input",
    "another time": "sha256 input names sizes times",
    "a class more": "class ant None 10",
    "a class less": "class dog 10 None",
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_arguments_or_input_are_refused_and_named(tmp_path, writer, capfd, change):
    facts = CHANGES[change]
    out = tmp_path / "out"
    root = writer.root
    assert writer.run(out, *writer.shards(2)) == 0
    if change == "an image more":
        Image.new("RGB", (4, 4)).save(root / "train" / "dog" / "new.png")
    if change == "another time":
        os.utime(root / "train" / "cat" / "3.png", ns=(1, 1))
    for folder in (root / "train", root / "val"):
        if change == "a class more":
            shutil.copytree(folder / "cat", folder / "ant")
        if change == "a class less":
            shutil.rmtree(folder / "dog")
    before = contents(out)
    options = change.split() if change.startswith("--") else ()
    assert writer.run(out, *writer.shards(2), *options) == 2
    line = error_line(capfd)
    # `shards` has the classes in a file of their own, and compares it first.
    if change in ("a class more", "a class less") and writer.command == "shards":
        facts = f"{out}/classes.txt other classes {root}"
    assert_says(line, f"{facts} --out")
    if "sha256" in facts:
        assert len(re.findall(r"\b[0-9a-f]{64}\b", line)) == 2
    assert contents(out) == before


def test_other_files_are_not_touched_and_other_shards_refused(tmp_path, writer, capfd):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "test-000000.tar").write_text("another split's")
    # Names of files that the command would write itself.
    strangers = ["train-000007.tar", "train.files.txt", "train.bad.txt"]
    if writer.command == "shards":
        strangers += ["train.meta.json", ".train-000000.tar.index.npy"]
    for name in strangers:
        (out / name).write_text("mine")
        assert writer.run(out) == 2
        assert_says(error_line(capfd), f"--out {out} {name} write")
        assert (out / name).read_text() == "mine" and not (out / writer.record).exists()
        (out / name).unlink()
    (out / "classes.txt").write_text("ant\nbee\n")
    if writer.command == "shards":  # the command latents writes its classes into the record
        assert writer.run(out) == 2
        assert_says(error_line(capfd), f"{out}/classes.txt other classes {writer.root}")
        (out / "classes.txt").unlink()
    assert writer.run(out) == 0
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "test-000000.tar").read_text() == "another split's"
    (out / writer.shard(9)).write_text("mine")
    assert writer.run(out) == 2
    assert_says(error_line(capfd), f"--out {out} {writer.shard(9)}")


def test_a_record_cannot_name_files_elsewhere(tmp_path, writer):
    out = tmp_path / "out"
    victim = tmp_path / "victim"
    victim.write_text("precious")
    assert writer.run(out) == 0
    record = json.loads((out / writer.record).read_text())
    record["shards"].append(dict(record["shards"][0], shard="../victim", sha256="0" * 64))
    (out / writer.record).write_text(json.dumps(record))
    assert writer.run(out) == 0 and victim.read_text() == "precious"
    with one_line(f"{out}/{writer.record} ../victim gone"):
        (out / writer.record).write_text(json.dumps(record))
        writer.open(out)


# ---------------------------------------------------------------- training compares shards with their record

# Faults: each damages an output and returns facts of the error.


def shorten(writer, out):
    path = out / writer.shard(1)
    os.truncate(path, size := path.stat().st_size - 512)
    return f"{path} {size} 7 samples {writer.record} {size + 512}"


def lose(writer, out):
    (out / writer.shard(1)).unlink()
    return f"{out}/{writer.record} {writer.shard(1)} gone"


def add(writer, out):
    shutil.copy(out / writer.shard(1), out / writer.shard(9))
    return f"{out}/{writer.record} {writer.shard(9)} not in"


def rewritten(change):
    """Return a fault that changes the record."""

    def fault(writer, out):
        record = json.loads((out / writer.record).read_text())
        change(record)
        (out / writer.record).write_text(json.dumps(record))
        return f"{out}/{writer.record}"

    return fault


# Fault -> (damages an output and returns facts of the error, more of them).
FAULTS = {
    "shorter": (shorten, ""),
    "a shard less": (lose, ""),
    "a shard more": (add, ""),
    "unfinished": (rewritten(lambda r: r.update(shards=None)), "record not written yet"),
    "another version": (rewritten(lambda r: r.update(format=1)), "record format 1 2"),
    "a sample less": (rewritten(lambda r: r["shards"][1].update(samples=6)), ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_shards_that_differ_from_their_record_are_refused(tmp_path, writer, fault):
    out = tmp_path / "out"
    assert writer.run(out, *writer.shards(3)) == 0
    for index in out.glob(".*.index.npy"):
        index.unlink()
    damage, more = FAULTS[fault]
    facts = f"{damage(writer, out)} {more}"
    if fault == "a sample less":
        shard = out / writer.shard(1)
        facts = f"{shard} {shard.stat().st_size} 7 samples {writer.record} 6"
        if writer.command == "latents":  # the labels count too
            facts = f"{out}/train.labels.npy int64 (20,) (19,)"
    with one_line(facts):
        writer.open(out)
    # A shard that is refused gets no index, so that it is read again next time.
    assert not (out / f".{writer.shard(1)}.index.npy").exists()
