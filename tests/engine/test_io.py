"""Files that are written whole or not at all, locks of folders, and the run that a path belongs to."""

import contextlib
import csv
import errno
import fcntl
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
from tests.support.processes import fork, hold, wait
from tests.support.refusals import one_line


@contextlib.contextmanager
def writing_with_a_child(folder, with_children):
    os.setsid()
    with only_one(folder, "--output", with_children=with_children):
        os.fork()  # the child stands for a loader process, which outlives a kill by some seconds
        yield


@pytest.mark.parametrize("with_children", [False, True])
def test_a_second_process_is_refused_until_the_first_has_died(tmp_path, no_pauses, with_children):
    pid = hold(writing_with_a_child, tmp_path, with_children)
    no_pauses()

    host = socket.gethostname()

    def assert_refused():
        with one_line(f"--output {tmp_path} {pid} {host}"):
            with only_one(tmp_path, "--output", with_children):
                pass

    assert_refused()
    assert_refused()  # being refused does not take the lock away from its owner
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if with_children:  # the child may still write, so it holds the lock on
        assert_refused()
        os.killpg(pid, signal.SIGKILL)
        with open(tmp_path / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # waits until the child has died
    with only_one(tmp_path, "--output", with_children):
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {host}"
    assert not list(tmp_path.iterdir())
    if not with_children:
        os.killpg(pid, signal.SIGKILL)


def test_a_forked_child_does_not_take_the_lock_away(tmp_path):
    """Nor does it hold the lock, and it may leave the block itself."""
    lock = contextlib.ExitStack()
    lock.enter_context(only_one(tmp_path, "--output"))
    assert wait(fork(lock.close)) == 0
    assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    child = fork(signal.pause)
    lock.close()
    with only_one(tmp_path, "--output"):  # a child that lives on is not in the way
        pass
    os.kill(child, signal.SIGKILL)
    assert wait(child) == -signal.SIGKILL


def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch, caplog):
    def no_locks(*_, **options):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(io, "lock_descriptor", no_locks)
    warning = f"{tmp_path} cannot be locked (No locks available): start one run there"
    with only_one(tmp_path, "--output"):
        assert caplog.messages == [warning]


def test_the_run_of_a_path(tmp_path, monkeypatch):
    run = tmp_path / "run"
    step = run / "checkpoints" / "step_20"
    step.mkdir(parents=True)
    (step / "ema.safetensors").write_text("")
    # No config.yaml says that `run` is a run, so step_20 is a folder like any other.
    assert step_of(step) is None
    assert run_of(step) == step
    (run / "config.yaml").write_text("")
    (tmp_path / "link").symlink_to(step)
    monkeypatch.chdir(step)
    paths = [
        run,
        run / "model.safetensors",
        step,
        step / "ema.safetensors",
        ".",
        "ema.safetensors",
        tmp_path / "link",
    ]
    for path in paths:
        assert run_of(path) == run
    assert step_of(step) == step_of(tmp_path / "link") == 20 and step_of(run) is None


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_is_there_whole_or_not_at_all(tmp_path, shared):
    path = tmp_path / "new" / "file"
    with whole_file(path, shared) as file:
        file.write(b"one")
        hidden = hidden_path(path, shared)
        assert hidden != path
        assert os.listdir(path.parent) == [hidden.name]
    assert path.read_bytes() == b"one" and len(sha256_of(path)) == 64
    with pytest.raises(OSError) as full, whole_file(path, shared) as file:
        file.write(b"two")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert full.value.filename == str(path)
    with pytest.raises(KeyError), whole_file(path, shared):
        raise KeyError
    before = path.stat().st_mtime_ns
    write_whole(path, "one", shared)
    assert path.read_bytes() == b"one" and path.stat().st_mtime_ns == before
    write_whole(path, b"\xff", shared)
    assert path.read_bytes() == b"\xff" and os.listdir(path.parent) == ["file"]


def test_tensors_with_metadata(tmp_path):
    path = tmp_path / "new" / "file.safetensors"
    for value in (1.0, 2.0):
        write_tensors(path, {"x": torch.full((2,), value)}, dict(step=3, names=["a", "b"]))
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt", "step": "3", "names": '["a", "b"]'}
            assert file.get_tensor("x").tolist() == [value, value]
    with pytest.raises(TypeError):
        write_tensors(path, {}, dict(odd=object()))
    assert path.stat().st_mode & 0o777 == 0o644 and os.listdir(path.parent) == [path.name]


def test_csv_of_any_file_name(tmp_path):
    names = ["a,b\n.png", 'says "x"', os.fsdecode(b"\xff.png")]
    write_csv(tmp_path / "a.csv", [("image", "p"), *((name, 0.5) for name in names)])
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows == [["image", "p"], [names[0], "0.5"], [names[1], "0.5"], ["\\udcff.png", "0.5"]]
