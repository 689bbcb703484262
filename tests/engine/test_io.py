import contextlib
import csv
import errno
import os
import signal
import socket

import pytest
import torch
from safetensors import safe_open

from moh_vision.common import io
from moh_vision.common.io import (
    hidden_path,
    only_one,
    run_of,
    sha256_of,
    step_of,
    whole_file,
    write_csv,
    write_tensors,
    write_whole,
)
from tests.support.processes import hold
from tests.support.refusals import one_line


@contextlib.contextmanager
def writing_with_a_child(folder, with_children):
    os.setsid()
    with only_one(folder, "--output", with_children=with_children):
        os.fork()  # as loader processes are, which outlive a kill for some seconds
        yield


@pytest.mark.parametrize("with_children", [False, True])
def test_a_second_process_is_refused_until_the_first_has_died(tmp_path, monkeypatch, with_children):
    monkeypatch.setattr(io, "PAUSE", 0)
    pid = hold(writing_with_a_child, tmp_path, with_children)

    def is_refused():
        with one_line(
            f"--output {tmp_path}: process {pid} on {socket.gethostname()} is writing there"
        ):
            with only_one(tmp_path, "--output", with_children):
                pass

    is_refused()
    is_refused()  # being refused does not take the lock away from its owner
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if with_children:  # held by the child, which may write
        is_refused()
        os.killpg(pid, signal.SIGKILL)
        with open(tmp_path / ".lock") as file:
            io.fcntl.flock(file, io.fcntl.LOCK_EX)  # waits until the child has died
    with only_one(tmp_path, "--output", with_children):
        assert (
            tmp_path / ".lock"
        ).read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    assert not list(tmp_path.iterdir())
    if not with_children:
        os.killpg(pid, signal.SIGKILL)


def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch, caplog):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(io.fcntl, "lockf", none)
    with only_one(tmp_path, "--output"):
        assert caplog.messages == [
            f"{tmp_path} cannot be locked (No locks available): start one run there"
        ]


def test_the_run_of_a_path(tmp_path, monkeypatch):
    run, step = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_20"
    step.mkdir(parents=True)
    (step / "ema.safetensors").write_text("")
    assert step_of(step) is None and run_of(step) == step  # a folder of that name in something else
    (run / "config.yaml").write_text("")
    (tmp_path / "link").symlink_to(step)
    monkeypatch.chdir(step)
    places = [
        run,
        run / "model.safetensors",
        step,
        step / "ema.safetensors",
        ".",
        "ema.safetensors",
        tmp_path / "link",
    ]
    for place in places:
        assert run_of(place) == run
    assert step_of(step) == step_of(tmp_path / "link") == 20 and step_of(run) is None


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_is_there_whole_or_not_at_all(tmp_path, shared):
    place = tmp_path / "new" / "file"
    with whole_file(place, shared) as file:
        file.write(b"one")
        assert (
            os.listdir(place.parent) == [hidden_path(place, shared).name]
            and hidden_path(place, shared) != place
        )
    assert place.read_bytes() == b"one" and len(sha256_of(place)) == 64
    with pytest.raises(OSError) as full, whole_file(place, shared) as file:
        file.write(b"two")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert full.value.filename == str(place)
    with pytest.raises(KeyError), whole_file(place, shared):
        raise KeyError
    before = place.stat().st_mtime_ns
    write_whole(place, "one", shared)
    assert place.read_bytes() == b"one" and place.stat().st_mtime_ns == before
    write_whole(place, b"\xff", shared)
    assert place.read_bytes() == b"\xff" and os.listdir(place.parent) == ["file"]


def test_tensors_with_metadata(tmp_path):
    place = tmp_path / "new" / "file.safetensors"
    for value in (1.0, 2.0):
        write_tensors(place, {"x": torch.full((2,), value)}, dict(step=3, names=["a", "b"]))
        with safe_open(place, "pt") as file:
            assert file.metadata() == {"format": "pt", "step": "3", "names": '["a", "b"]'}
            assert file.get_tensor("x").tolist() == [value, value]
    with pytest.raises(TypeError):
        write_tensors(place, {}, dict(odd=object()))
    assert place.stat().st_mode & 0o777 == 0o644 and os.listdir(place.parent) == [place.name]


def test_csv_of_any_file_name(tmp_path):
    names = ["a,b\n.png", 'says "x"', os.fsdecode(b"\xff.png")]
    write_csv(tmp_path / "a.csv", [("image", "p"), *((name, 0.5) for name in names)])
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows == [["image", "p"], [names[0], "0.5"], [names[1], "0.5"], ["\\udcff.png", "0.5"]]
