"""Damage to the newest checkpoint is detected and named, and the run resumes from the checkpoint before it."""

import json

import pytest

import moh_vision
from moh_vision.engine.step_folders import damage, latest_checkpoint, resume_point
from tests.support.refusals import one_line, refuse
from tests.support.repeat import cases
from tests.support.small_training import seal

FILES = (
    "model.safetensors",
    "optimizer.safetensors",
    "ema.safetensors",
    "beside.safetensors",
    "step.json",
)


@pytest.fixture
def run(training, tmp_path):
    """Train four steps, save steps 2 and 4, and return the folder of the run."""
    for step in range(1, 5):
        training.step(step)
        if step % 2 == 0:
            assert training.save(tmp_path / "run", step, keep=2) is None
    assert {p.name for p in (tmp_path / "run/checkpoints/step_4").iterdir()} == set(FILES)
    return tmp_path / "run"


def falls_back(run, reason):
    """Assert that step 2 is taken and that one line says why step 4 is not; return True."""
    said = []
    checkpoints = run / "checkpoints"
    assert latest_checkpoint(run, said.append) == (2, checkpoints / "step_2")
    assert len(said) == 1 and f"{checkpoints / 'step_4'} is skipped: {reason}" in said[0], said
    return True


def flipped(data, bit):
    """Return `data` with one bit flipped; bits are counted over all bytes."""
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


@pytest.mark.parametrize("fault", ["truncated", "flipped"])
def test_200_damages(run, fault):
    numbers = cases(200, fault)
    found = 0
    for trial in range(200):
        file = run / "checkpoints" / "step_4" / FILES[trial % 5]
        data = file.read_bytes()
        # Of each file: first an empty one, then one without its last byte, then random lengths.
        length = [0, len(data) - 1, numbers.randrange(len(data))][min(trial // 5, 2)]
        if fault == "truncated":
            file.write_bytes(data[:length])
        else:
            file.write_bytes(flipped(data, numbers.randrange(8 * len(data))))
        found += falls_back(run, f"{file.name} ")
        file.write_bytes(data)
    assert latest_checkpoint(run)[0] == 4
    print(f"{found} of 200 files {fault} found")


def test_a_flipped_bit_of_a_record_is_found(run):
    """The record has a sum of itself because many flipped bits leave readable JSON."""
    folder = run / "checkpoints" / "step_4"
    readable = 0
    data = (folder / "step.json").read_bytes()
    for bit in range(0, 8 * len(data), 3):  # a third of all bits
        changed = flipped(data, bit)
        (folder / "step.json").write_bytes(changed)
        try:
            readable += isinstance(json.loads(changed), dict)
        except ValueError:
            pass
        assert (damage(folder, 4) or "").startswith("step.json"), bit
    assert readable > len(data) // 3
    print(f"all flipped bits of a record are found, {readable} of them in readable JSON")


def record(folder):
    return json.loads((folder / "step.json").read_text())


def put(folder, **more):
    """Change entries of the record, but not its sum of itself, which becomes wrong."""
    (folder / "step.json").write_text(json.dumps(record(folder) | more))


def list_files(folder, changes):
    """Change the sums that the record lists, name -> sum or None to remove, and update its sum of itself."""
    listed = record(folder)["sha256"] | changes
    seal(folder, sha256={name: digest for name, digest in listed.items() if digest})


def list_fewer_files(folder):
    """Remove a file from the record, but do not update the record's sum of itself."""
    listed = record(folder)["sha256"]
    del listed[FILES[2]]
    put(folder, sha256=listed)


def list_a_file_outside(folder):
    """Add a file of another checkpoint, with its right sum, to the record."""
    other = record(folder.with_name("step_2"))["sha256"]["model.safetensors"]
    list_files(folder, {"../step_2/model.safetensors": other})


def to_folder(file):
    """Replace a file by an empty folder."""
    file.unlink()
    file.mkdir()


# Fault -> (damages the folder `f` of a checkpoint, the reason that is given).
CASES = {
    "no record": (lambda f: (f / "step.json").unlink(), "step.json is missing"),
    "a future format": (lambda f: put(f, format=6), f"step.json has format 6 of moh_vision {moh_vision.__version__}; this is {moh_vision.__version__}, which reads 5"),
    "another step": (lambda f: seal(f, step=40), "step.json is of step 40"),
    "a name outside": (list_a_file_outside, "step.json names ../step_2/model.safetensors, which is outside of the folder"),
    "an absolute name": (lambda f: list_files(f, {"/etc/hostname": "0"}), "step.json names /etc/hostname, which is"),
    "fewer files": (list_fewer_files, "step.json does not have its own sha256"),
    "a file less": (lambda f: (f / FILES[1]).unlink(), "optimizer.safetensors is missing"),
    "a folder for a file": (lambda f: to_folder(f / FILES[1]), "optimizer.safetensors is"),
    "a file more": (lambda f: (f / "x.safetensors").write_bytes(b""), "x.safetensors is not in step.json"),
    "a file unlisted": (lambda f: list_files(f, {"ema.safetensors": None}), "ema.safetensors is not in step.json"),
    "a list": (lambda f: (f / "step.json").write_text("[]"), "step.json is not readable"),
    "a sum that is none": (lambda f: list_files(f, {FILES[1]: 7}), "optimizer.safetensors does not have the sha256"),
    "sums that are none": (lambda f: put(f, sha256=7), "step.json is not readable"),
    "deep": (lambda f: (f / "step.json").write_text("[" * 10**6), "step.json is not readable"),
    "a folder for a record": (lambda f: to_folder(f / "step.json"), "step.json is not readable"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_folder_is_passed_over(run, name):
    damage_folder, reason = CASES[name]
    damage_folder(run / "checkpoints" / "step_4")
    assert falls_back(run, reason)


def test_rubbish_beside_is_no_checkpoint(run):
    for name in (".step_6.tmp", ".step_6.gone", "step_6.tmp", "step_x", "step_", "step_²", "other"):
        (run / "checkpoints" / name).mkdir()
    (run / "checkpoints" / "step_9").write_text("a file")
    (run / "checkpoints" / "step_4" / ".nfs0001").write_text("of a network disk")
    assert latest_checkpoint(run, pytest.fail)[0] == 4


def test_where_no_checkpoint_is_whole_the_run_does_not_begin_anew(run, tmp_path):
    for step in (2, 4):
        (run / "checkpoints" / f"step_{step}" / "optimizer.safetensors").write_bytes(b"")
    with one_line(f"{run / 'checkpoints'} every damaged --fresh"):
        resume_point(run, 10, fresh=False)
    assert resume_point(run, 10, fresh=True) is None
    for folder in (run / "checkpoints").iterdir():
        folder.rename(tmp_path / folder.name)
    refuse(
        f"{run} model.safetensors checkpoints --fresh",
        resume_point,
        run,
        10,
        fresh=False,
    )
    assert resume_point(run, 10, fresh=True) is None
