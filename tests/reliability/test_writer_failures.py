"""After a save that fails, training goes on, earlier checkpoints are intact and no temporary files are left."""

import contextlib
import errno
import os
import resource
import shutil
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest

from moh_vision.engine import saver
from moh_vision.engine.saver import check_writable
from moh_vision.engine.step_folders import latest_checkpoint
from moh_vision.engine.training_loop import TrainingLoop
from tests.support import refusals
from tests.support.pictures import write_folder
from tests.support.processes import fork, on_two_ranks, wait
from tests.support.refusals import assert_says, refuse
from tests.support.small_runs import arguments, checkpoint_steps, logged, script
from tests.support.small_training import SmallTraining, at_point, hidden, sums, watched


def disk_full(point):
    """Raise the error of a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), point)


@contextlib.contextmanager
def largest_file(n):
    """Within the block, writing more than n bytes to a file fails with an OSError, EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_disk_full_at_every_point_of_a_save(training, tmp_path):
    run = tmp_path
    points = []
    training.step(1)
    assert training.save(run, 1, 2) is None
    training.step(2)
    assert training.save(run, 2, 2, points.append) is None
    # These calls may fail without harm: a file too many stays, or a copy is made instead of a link.
    spare = ("unlink", "rmdir", "link")
    points = [point for point in points if point.split()[0] not in spare]
    earlier = sums(run / "checkpoints" / "step_2")
    named = points.index("replace .step_2.tmp")
    for last in range(len(points)):
        step = 3 + last
        training.step(step)
        fail = at_point(last, disk_full)
        problem = training.save(run, step, 2, lambda p, fail=fail: p.split()[0] in spare or fail(p))
        assert problem and "No space left on device" in problem
        assert hidden(run) == [], points[last]
        newest, folder = latest_checkpoint(run, pytest.fail)
        # Once its folder is renamed, a checkpoint counts, even if a later call of the save fails.
        assert newest == (step if last >= named else 2), points[last]
        if last < named:
            assert sums(folder) == earlier
    assert training.save(run, step + 1, 2) is None
    assert latest_checkpoint(run)[0] == step + 1
    print(f"{len(points)} of {len(points)} failures left the newest checkpoint and no rubbish")


def test_files_that_cannot_grow(tmp_path):
    """The limit comes from the system, so that both safetensors and writing text meet a real error."""

    def work():
        training = SmallTraining(width=512)
        training.step(1)
        assert training.save(tmp_path, 1, 2) is None
        earlier = sums(tmp_path / "checkpoints")
        files = [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]
        sizes = sorted({path.stat().st_size for path in files})
        # beside.safetensors and step.json are the smallest files, optimizer.safetensors is the largest.
        assert sizes[0] < 1000 and sizes[-1] > 30_000
        for limit in (sizes[0] // 2, 5000, sizes[-1] - 10_000):
            training.step(2)
            with largest_file(limit):
                problem = training.save(tmp_path, 2, 2)
            assert "File too large" in problem, problem
            assert sums(tmp_path / "checkpoints") == earlier and hidden(tmp_path) == []
        assert training.save(tmp_path, 2, 2) is None

    assert wait(fork(work)) == 0


def test_a_step_waits_for_the_one_that_is_written(training, tmp_path, monkeypatch):
    """A save in the background writes the state after its step, although training goes on meanwhile."""
    told = []
    may_end = threading.Event()
    monkeypatch.setattr(saver, "say", lambda text: (told.append(text), may_end.set()))
    saves = training.saver(tmp_path, 9)
    states = {}
    with watched(lambda point: may_end.wait(60) if point.startswith("save_tensors") else None):
        for step in (1, 2):
            training.step(step)
            states[step] = training.state()
            saves.save(step, {})
        training.step(3)
        saves.finish()
    waited, first_save = told
    assert waited == "step 2 waits for the checkpoint that is being written" and not saves.failed
    assert first_save.startswith(f"first save: {tmp_path / 'checkpoints' / 'step_1'}, ")
    for step, state in states.items():
        training.saved.restore(tmp_path / "checkpoints" / f"step_{step}")
        assert training.state() == state


def test_where_there_are_no_links_the_weights_are_copied(training, tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr("os.link", no_links)
    assert training.save(tmp_path, 1, 1) is None and hidden(tmp_path) == []
    for name in ("model.safetensors", "ema.safetensors"):
        copy = tmp_path / name
        saved = tmp_path / "checkpoints" / "step_1" / name
        assert not copy.samefile(saved) and copy.read_bytes() == saved.read_bytes()


# ---------------------------------------------------------------- folders that cannot be written


@pytest.fixture
def readable(tmp_path):
    """A temporary folder that another user may enter; pytest's tmp_path is private."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)


def unprivileged(work, *read_only):
    """Return the exit code of `work`, called in a fork by a user who may not write the paths `read_only`.

    Root could write them all the same, so a fork of root becomes another user.
    """

    def child():
        for path in read_only:
            path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
        if os.geteuid() == 0:
            os.setegid(65534)
            os.seteuid(65534)
        work()

    return wait(fork(child))


def test_a_folder_that_turns_read_only(training, readable):
    run = readable / "run"
    training.step(1)
    assert training.save(run, 1, 2) is None
    before = sums(run)

    def work():
        assert "Permission denied" in training.save(run, 2, 2)

    assert unprivileged(work, run, *run.rglob("*")) == 0
    assert sums(run) == before and hidden(run) == []


def not_writable(folder, reason):
    """Expect that the check of --output refuses `folder` for a reason."""
    refuse(f"--output {folder} written {reason}", check_writable, folder)


def test_unwritable_output_is_found_before_any_work(readable, tmp_path):
    check_writable(tmp_path / "not" / "yet" / "there")
    assert list(tmp_path.iterdir()) == []
    checkpoints = readable / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    checkpoints.parent.chmod(0o777)
    checkpoints.chmod(0o555)

    def refuses_checkpoints():
        not_writable(readable / "run", "checkpoints Permission denied")

    assert unprivileged(refuses_checkpoints) == 0
    for folder in (readable / "run", readable / "run" / "not yet"):

        def refuses(folder=folder):
            not_writable(folder, "Permission denied")

        assert unprivileged(refuses, readable / "run") == 0
    (tmp_path / "file").write_text("")
    not_writable(tmp_path / "file" / "run", "Not a directory")

    def full():
        with largest_file(100):
            not_writable(tmp_path, "File too large")

    assert wait(fork(full)) == 0
    assert hidden(tmp_path) == [] and hidden(readable) == []


# Commands that write, given an output in a folder where not even root can write. Words in capitals are paths.
WRITERS = """shards --in IMAGES --out /proc/x
latents --data IMAGES --out /proc/x --vae /no/vae
tokenise /no.txt --tokenizer /no.json --out /proc/x
fidelity IMAGES IMAGES --out /proc/x.json
curves RUN --output /proc/x.png
report RUN --output /proc/x.html
publish RUN --output /proc/x
predict RUN IMAGE --output /proc/x.json"""


@pytest.mark.parametrize("line", WRITERS.splitlines(), ids=lambda line: line.split()[0])
def test_where_nothing_can_be_written_the_option_is_named_before_any_work(tmp_path, refused, line):
    """Looking at permissions would not be enough: root has them all, and still cannot write in /proc."""
    write_folder(tmp_path / "IMAGES")
    argv = [str(tmp_path / a) if a.isupper() else a for a in line.split()]
    option, path = argv[argv.index("--out" if "--out" in argv else "--output") :][:2]
    assert_says(refused(*argv), f"{option} {path} written /proc No directory")


# ---------------------------------------------------------------- through the training scripts


@pytest.mark.parametrize("background", ["false", "true"])
def test_training_goes_on_and_is_saved_later_until_three_saves_failed_in_a_row(
    tmp_path, monkeypatch, capsys, background
):
    """A failure in the background is noticed when the next save is due, so such a run ends one save later.

    A failure of the last save ends the run at once: no later save could make up for it.
    """
    seal = saver.seal

    def seal_unless_full(folder, step, *rest):
        if step in {2, 4, 8, 12, 14, 16}:
            disk_full(step)
        seal(folder, step, *rest)

    monkeypatch.setattr(saver, "seal", seal_unless_full)
    with pytest.raises(SystemExit) as stop:
        more = ("--keep-checkpoints", 9, "--save_in_background", background)
        script("cls").main(arguments("cls", tmp_path, 100, 2, *more))
    out, error = capsys.readouterr()
    assert stop.value.code == 1
    assert_says(error, "step 16 saved 3 row earlier checkpoints intact")
    assert checkpoint_steps(tmp_path) == [6, 10]
    assert out.count("No space left on device: ") == out.count("; training goes on") == 5
    last_step = 18 if background == "true" else 16
    assert logged(tmp_path)[-1]["step"] == last_step
    if background == "false":
        failures = [e["failed_saves"] for e in logged(tmp_path)]
        assert failures == [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 5]
    with pytest.raises(SystemExit, match="1"):
        script("cls").main(arguments("cls", tmp_path / "last", 2, 2, *more))
    assert_says(capsys.readouterr().err, "step 2 saved")


def test_an_error_waits_for_the_checkpoint_that_is_being_written(tmp_path, monkeypatch):
    seal = saver.seal
    step = TrainingLoop.step

    def seal_late(*arguments):
        time.sleep(0.5)
        seal(*arguments)

    def step_until_3(self, *arguments, **more):
        if self.done == 3:
            assert checkpoint_steps(tmp_path) == []
            raise RuntimeError("of the code")
        return step(self, *arguments, **more)

    monkeypatch.setattr(saver, "seal", seal_late)
    monkeypatch.setattr(TrainingLoop, "step", step_until_3)
    refuse("of the code", script("cls").main, arguments("cls", tmp_path, 10, 3), error=RuntimeError)
    assert checkpoint_steps(tmp_path) == [3]


def test_an_output_that_cannot_be_written_is_refused_by_the_scripts(capsys):
    error = refusals.refused(capsys, script("dit").main, *arguments("dit", "/proc/run", 10, 2))
    refusals.assert_says(error, "--output /proc/run written /proc: No directory")


def saves_that_fail_on_one(rank, folder):
    """Save on two processes, of which only the main process writes and can fail."""
    training = SmallTraining()
    assert training.accelerator.num_processes == 2 and training.accelerator.process_index == rank
    assert training.save(folder, 1, 2) is None
    earlier = sums(folder / "checkpoints")
    linked = "replace .model.safetensors.tmp"
    for failing in (
        "mkdir .step_2.tmp",
        "save_tensors ema.safetensors",
        "write_text step.json",
        linked,
    ):
        problem = training.save(
            folder, 2, 2, lambda point, failing=failing: point == failing and disk_full("the disk")
        )
        assert problem and "No space left" in problem and "the disk" in problem, problem
        training.accelerator.wait_for_everyone()  # the main process has tidied up
        if failing != linked:
            assert sums(folder / "checkpoints") == earlier and hidden(folder) == []
        training.accelerator.wait_for_everyone()
    assert training.save(folder, 3, 2) is None
    training.accelerator.end_training()


def test_two_processes_agree(tmp_path):
    """Both processes learn of a failed save, so that neither waits forever for the other or goes on alone."""
    on_two_ranks(saves_that_fail_on_one, tmp_path)
    assert latest_checkpoint(tmp_path)[0] == 3
