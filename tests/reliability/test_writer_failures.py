"""A save that fails costs that save: training goes on, earlier checkpoints are as they were, nothing is left over."""

import contextlib
import errno
import os
import resource
import shutil
import socket
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState
from pictures import write_folder
from small_training import SmallTraining, at_point, fork, hidden, one_threaded, sums, wait
from torch.distributed.checkpoint.api import CheckpointException

from moh_vision.__main__ import main
from moh_vision.engine.checkpoint import latest_checkpoint, save_training
from moh_vision.engine.saver import SaveError, Saver, check_writable


@pytest.fixture
def training():
    yield from one_threaded()


def disk_full(point):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), point)


@contextlib.contextmanager
def largest_file(n):
    """Files of this process end at n bytes, with the error that a full disk gives, but for its number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_disk_full_at_every_point_of_a_save(training, tmp_path):
    run, points = tmp_path, []
    training.step(1)
    assert training.save(run, 1, 2) is None
    training.step(2)
    assert training.save(run, 2, 2, points.append) is None
    earlier = sums(run / "checkpoints" / "step_2")
    named = points.index("renamed .step_2.tmp")
    for last in range(len(points)):
        step = 3 + last
        training.step(step)
        problem = training.save(run, step, 2, at_point(last, disk_full))
        assert problem and "No space left on device" in problem
        assert hidden(run) == [], points[last]
        newest, folder = latest_checkpoint(run, lambda text: pytest.fail(text))
        # From its rename on a checkpoint is there, whatever becomes of the rest.
        assert newest == (step if last >= named else 2), points[last]
        if last < named:
            assert sums(folder) == earlier
    assert training.save(run, step + 1, 2) is None
    assert latest_checkpoint(run)[0] == step + 1
    print(f"{len(points)} of {len(points)} failures left the newest checkpoint and no rubbish")


def test_disk_full_while_a_step_is_saved_again(training, tmp_path):
    """Between the two renames the old folder has to get its name back."""
    assert training.save(tmp_path, 2, 1) is None
    before = sums(tmp_path / "checkpoints")
    training.step(2)

    def full(point):
        return disk_full(point) if point == "moved step_2 aside" else None

    assert "No space left" in training.save(tmp_path, 2, 1, full)
    assert sums(tmp_path / "checkpoints") == before and hidden(tmp_path) == []


def file_sizes(run):
    return sorted({p.stat().st_size for p in (run / "checkpoints").rglob("*") if p.is_file()})


def test_files_that_cannot_grow(tmp_path, monkeypatch):
    """As the system says it, to safetensors, to torch.save, and to a text file."""

    def work():
        training = SmallTraining(width=512)
        told = []
        saver = Saver(training.accelerator, tmp_path, 2)
        monkeypatch.setattr("moh_vision.engine.saver.say", told.append)
        about = (training.model, training.ema, {"name": "small"})
        training.step(1)
        assert saver.save(1, *about)
        earlier, sizes = sums(tmp_path / "checkpoints"), file_sizes(tmp_path)
        assert sizes[0] < 1000 and sizes[-1] > 30_000
        # The manifest is the smallest file, the optimiser's the largest.
        for n, limit in enumerate((sizes[0] // 2, 5000, sizes[-1] - 10_000)):
            training.step(2)
            saver.in_a_row = 0
            with largest_file(limit):
                assert not saver.save(2 + n, *about)
            assert saver.failed == n + 1 and str(tmp_path) in told[-1], told
            assert "File too large" in told[-1] and "training goes on" in told[-1], told
            assert sums(tmp_path / "checkpoints") == earlier and hidden(tmp_path) == []
        assert saver.save(5, *about) and saver.in_a_row == 0 and saver.failed == 3
        with largest_file(5000):
            assert [saver.save(step, *about) for step in (6, 7)] == [False, False]
            with pytest.raises(SaveError, match=f"{tmp_path}: step 8 .*File too large.*, the 3. failure in a row"):
                saver.save(8, *about)
        assert latest_checkpoint(tmp_path, pytest.fail)[0] == 5

    assert wait(fork(work)) == 0


def test_three_failures_in_a_row_end_a_run(training, tmp_path, monkeypatch):
    told = []
    saver = Saver(training.accelerator, tmp_path, 2)
    monkeypatch.setattr("moh_vision.engine.saver.say", told.append)
    about = (training.model, training.ema, {})
    (tmp_path / "checkpoints").write_text("in the way")
    assert not saver.save(1, *about) and not saver.save(2, *about)
    (tmp_path / "checkpoints").unlink()
    assert saver.save(3, *about)  # two are forgotten
    (tmp_path / "checkpoints").rename(tmp_path / "away")
    (tmp_path / "checkpoints").write_text("in the way")
    assert not saver.save(4, *about) and not saver.save(5, *about)
    with pytest.raises(SaveError, match=f"{tmp_path}: step 6 could not be saved .*Not a directory.*earlier .* intact"):
        saver.save(6, *about)
    assert saver.failed == 5 and len(told) == 4
    with pytest.raises(SaveError, match="step 9 could not be saved"):
        Saver(training.accelerator, tmp_path, 2).save(9, *about, last=True)


@pytest.fixture
def readable(tmp_path):
    """A folder that another user may enter, which those of pytest are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)


def unprivileged(folder, work):
    """Exit code of `work` done by a user who may not write into `folder`; the administrator may write anywhere."""

    def child():
        for path in (folder, *folder.rglob("*")):
            path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
        if os.geteuid() == 0:
            os.setegid(65534)
            os.seteuid(65534)
        work()

    return wait(fork(child))


def test_a_folder_that_turns_read_only(training, readable, monkeypatch):
    run, told = readable / "run", []
    training.step(1)
    assert training.save(run, 1, 2) is None
    before = sums(run)

    def work():
        saver = Saver(training.accelerator, run, 2)
        monkeypatch.setattr("moh_vision.engine.saver.say", told.append)
        about = (training.model, training.ema, {})
        assert not saver.save(2, *about) and not saver.save(3, *about)
        assert all("Permission denied" in t for t in told) and saver.failed == 2
        with pytest.raises(SaveError, match="Permission denied"):
            saver.save(4, *about)

    assert unprivileged(run, work) == 0
    assert sums(run) == before and hidden(run) == []


WRITERS = """shards --in IMAGES --out /proc/x
latents --data IMAGES --out /proc/x --vae /no/vae
tokenise /no.txt --tokenizer /no.json --out /proc/x
fidelity IMAGES IMAGES --out /proc/x.json
curves RUN --output /proc/x.png
report RUN --output /proc/x.html
publish RUN --output /proc/x
predict RUN IMAGE --output /proc/x.csv"""


@pytest.mark.parametrize("line", WRITERS.splitlines())
def test_where_nothing_can_be_written_the_option_is_named_before_any_work(tmp_path, capsys, line):
    """Permissions do not tell of it: for root all are there."""
    write_folder(tmp_path / "IMAGES")
    argv = [str(tmp_path / a) if a.isupper() else a for a in line.split()]
    assert main(argv) == 2
    option, path = argv[argv.index("--out" if "--out" in argv else "--output") :][:2]
    assert f"error: {option} {path} cannot be written: /proc: No such file or directory\n" in capsys.readouterr().err


def test_unwritable_output_is_found_before_any_work(readable, tmp_path):
    check_writable(tmp_path / "not" / "yet" / "there")
    assert list(tmp_path.iterdir()) == []
    (readable / "run").mkdir()
    (readable / "run" / "checkpoints").mkdir()

    def work():
        for folder in (readable / "run", readable / "run" / "not yet"):
            with pytest.raises(ValueError, match=f"--output {folder} cannot be written: .*: Permission denied"):
                check_writable(folder)

    assert unprivileged(readable, work) == 0
    (readable / "run").chmod(0o777)

    def only_checkpoints():
        with pytest.raises(ValueError, match="cannot be written: .*checkpoints: Permission denied"):
            check_writable(readable / "run")

    def child():
        if os.geteuid() == 0:
            os.seteuid(65534)
        only_checkpoints()

    assert wait(fork(child)) == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file/run cannot be written: .*Not a directory"):
        check_writable(tmp_path / "file" / "run")

    def full():
        with largest_file(100), pytest.raises(ValueError, match="cannot be written: .*File too large"):
            check_writable(tmp_path)

    assert wait(fork(full)) == 0
    assert hidden(tmp_path) == [] and hidden(readable) == []


def test_the_words_of_fsdp(training, tmp_path):
    """It wraps what went wrong on any rank in an exception that is not even an Exception."""

    def save_state(folder):
        raise CheckpointException("write", {1: (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), None)})

    broken = SimpleNamespace(is_main_process=True, save_state=save_state)
    assert "quota exceeded" in save_training(broken, tmp_path, 1, training.model, None, {}, 2)
    assert hidden(tmp_path) == [] and latest_checkpoint(tmp_path) is None


def test_two_processes_agree(tmp_path):
    """What fails on one is known to both, so that neither waits for the other or goes on alone."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def process(rank):
        os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true")
        AcceleratorState._reset_state(True)
        training = SmallTraining()
        assert training.accelerator.num_processes == 2 and training.accelerator.process_index == rank
        assert training.save(tmp_path, 1, 2) is None
        earlier = sums(tmp_path / "checkpoints")
        cases = [(0, "made .step_2.tmp"), (0, "wrote the state"), (1, "wrote the state"), (0, "wrote manifest.json")]
        for failing, where in [*cases, (0, "renamed model.safetensors")]:

            def full(point, here=where if rank == failing else None):
                return disk_full(f"rank {rank}") if point == here else None

            problem = training.save(tmp_path, 2, 2, full)
            assert problem and "No space left" in problem and f"rank {failing}" in problem, problem
            training.accelerator.wait_for_everyone()  # the main process has tidied up
            if (failing, where) in cases:
                assert sums(tmp_path / "checkpoints") == earlier and hidden(tmp_path) == []
            training.accelerator.wait_for_everyone()
        assert training.save(tmp_path, 3, 2) is None
        training.accelerator.end_training()

    children = [fork(lambda rank=rank: process(rank)) for rank in (0, 1)]
    assert [wait(child) for child in children] == [0, 0]
    assert latest_checkpoint(tmp_path)[0] == 3
