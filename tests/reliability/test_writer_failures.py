"""A save that fails costs that save: training goes on, earlier checkpoints are as they were, nothing is left over."""

import contextlib
import errno
import os
import resource
import shutil
import socket
import stat
import tempfile
import threading
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from pictures import write_folder
from small_training import SmallTraining, at_point, fork, hidden, one_threaded, sums, wait, watched

from moh_vision.__main__ import main
from moh_vision.engine.saver import SaveError, check_writable
from moh_vision.engine.step_folders import latest_checkpoint


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
    spare = ("unlink", "rmdir", "link")  # a deletion is not needed, and a copy is made where there are no links
    points = [point for point in points if point.split()[0] not in spare]
    earlier = sums(run / "checkpoints" / "step_2")
    named = points.index("rename .step_2.tmp")
    for last in range(len(points)):
        step = 3 + last
        training.step(step)
        fail = at_point(last, disk_full)
        problem = training.save(run, step, 2, lambda p, fail=fail: p.split()[0] in spare or fail(p))
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


def file_sizes(run):
    return sorted({p.stat().st_size for p in (run / "checkpoints").rglob("*") if p.is_file()})


def test_files_that_cannot_grow(tmp_path, monkeypatch):
    """As the system says it, to safetensors, to torch.save, and to a text file."""

    def work():
        training = SmallTraining(width=512)
        told = []
        saver = training.saver(tmp_path, 2, background=False)
        monkeypatch.setattr("moh_vision.engine.saver.say", told.append)
        training.step(1)
        saver.save(1, {})
        earlier, sizes = sums(tmp_path / "checkpoints"), file_sizes(tmp_path)
        assert sizes[0] < 1000 and sizes[-1] > 30_000
        # The files of what is beside the model and of the record are the smallest, the optimiser's the largest.
        for n, limit in enumerate((sizes[0] // 2, 5000, sizes[-1] - 10_000)):
            training.step(2)
            saver.in_a_row = 0
            with largest_file(limit):
                saver.save(2 + n, {})
            assert saver.failed == n + 1 and str(tmp_path) in told[-1], told
            assert "File too large" in told[-1] and "training goes on" in told[-1], told
            assert sums(tmp_path / "checkpoints") == earlier and hidden(tmp_path) == []
        saver.save(5, {})
        assert saver.in_a_row == 0 and saver.failed == 3
        with largest_file(5000):
            saver.save(6, {}), saver.save(7, {})
            with pytest.raises(SaveError, match=f"{tmp_path}: step 8 .*File too large.*, the 3. failure in a row"):
                saver.save(8, {})
        assert latest_checkpoint(tmp_path, pytest.fail)[0] == 5

    assert wait(fork(work)) == 0


@pytest.mark.parametrize("background", [False, True])
def test_three_failures_in_a_row_end_a_run(training, tmp_path, monkeypatch, background):
    """In the background each failure is told at once; the third one ends the run where the next save is due."""
    told = []
    saver = training.saver(tmp_path, 2, background)
    monkeypatch.setattr("moh_vision.engine.saver.say", told.append)

    def failed(step):
        saver.save(step, {})
        saver.wait()
        return bool(saver.problem)

    (tmp_path / "checkpoints").write_text("in the way")
    assert failed(1) and failed(2)
    (tmp_path / "checkpoints").unlink()
    assert not failed(3)  # two are forgotten
    (tmp_path / "checkpoints").rename(tmp_path / "away")
    (tmp_path / "checkpoints").write_text("in the way")
    assert failed(4) and failed(5) and len(told) == 4
    with pytest.raises(SaveError, match=f"{tmp_path}: step 6 could not be saved .*Not a directory.*earlier .* intact"):
        saver.save(6, {})
        saver.save(7, {})
    assert saver.failed == 5 and sum("training goes on" in text for text in told) == 4
    with pytest.raises(SaveError, match="step 9 could not be saved"):
        training.saver(tmp_path, 2).save(9, {}, last=True)


def test_a_step_waits_for_the_one_that_is_written(training, tmp_path, monkeypatch):
    """Training goes on meanwhile: what is written is the state after its step."""
    told, may_end = [], threading.Event()
    monkeypatch.setattr("moh_vision.engine.saver.say", lambda text: (told.append(text), may_end.set()))
    saver, states = training.saver(tmp_path, 9), {}
    with watched(lambda point: may_end.wait(60) if point.startswith("save_tensors") else None):
        for step in (1, 2):
            training.step(step)
            states[step] = training.state()
            saver.save(step, {})
        training.step(3)
        saver.finish()
    assert told == ["step 2 waits for the checkpoint that is being written"] and not saver.failed
    for step, state in states.items():
        training.load(tmp_path / "checkpoints" / f"step_{step}")
        assert training.state() == state


def test_where_there_are_no_links_the_weights_are_copied(training, tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr("os.link", no_links)
    assert training.save(tmp_path, 1, 1) is None and hidden(tmp_path) == []
    for name in ("model.safetensors", "ema.safetensors"):
        copy, saved = tmp_path / name, tmp_path / "checkpoints" / "step_1" / name
        assert not copy.samefile(saved) and copy.read_bytes() == saved.read_bytes()


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
        saver = training.saver(run, 2, background=False)
        monkeypatch.setattr("moh_vision.engine.saver.say", told.append)
        saver.save(2, {}), saver.save(3, {})
        assert all("Permission denied" in t for t in told) and saver.failed == 2
        with pytest.raises(SaveError, match="Permission denied"):
            saver.save(4, {})

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
        cases = [(0, "mkdir .step_2.tmp"), (0, "save_tensors ema.safetensors"), (0, "write_text step.json")]
        for failing, where in [*cases, (0, "rename .model.safetensors.tmp")]:

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
