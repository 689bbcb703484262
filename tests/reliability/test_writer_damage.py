"""What a power cut, a bad disk or a hand does to the newest checkpoint is found, named, and passed over."""

import json

import pytest
from small_training import again, one_threaded, seeded

from moh_vision.engine.commands import user_errors
from moh_vision.engine.step_folders import damage, latest_checkpoint, record_text, resume_point

FILES = ("model.safetensors", "optimizer.safetensors", "ema.safetensors", "beside.safetensors", "step.json")


@pytest.fixture
def training():
    yield from one_threaded()


@pytest.fixture
def run(training, tmp_path):
    """Steps 2 and 4 are saved."""
    for step in range(1, 5):
        training.step(step)
        if step % 2 == 0:
            assert training.save(tmp_path / "run", step, keep=2) is None
    assert {p.name for p in (tmp_path / "run/checkpoints/step_4").iterdir()} == set(FILES)
    return tmp_path / "run"


def falls_back(run, name):
    """Whether step 2 is taken and one line says that `name` of step 4 is why."""
    said = []
    step, folder = latest_checkpoint(run, said.append)
    assert (step, folder) == (2, run / "checkpoints" / "step_2")
    assert len(said) == 1 and f"{run / 'checkpoints' / 'step_4'} is skipped: {name} " in said[0], said
    return True


def test_truncated_at_200_places(run):
    numbers, found = seeded("truncated", 200), 0
    for trial in range(200):
        file = run / "checkpoints" / "step_4" / FILES[trial % 5]
        data = file.read_bytes()
        # The ends first: an empty file, and one without its last byte.
        file.write_bytes(data[: [0, len(data) - 1, numbers.randrange(len(data))][min(trial // 5, 2)]])
        found += falls_back(run, file.name)
        file.write_bytes(data)
    assert latest_checkpoint(run)[0] == 4
    print(f"{found} of 200 truncations found")


def test_200_bits_flipped(run):
    numbers, found = seeded("flipped", 200), 0
    for trial in range(200):
        file = run / "checkpoints" / "step_4" / FILES[trial % 5]
        data = bytearray(file.read_bytes())
        place, bit = numbers.randrange(len(data)), 1 << numbers.randrange(8)
        data[place] ^= bit
        file.write_bytes(data)
        found += falls_back(run, file.name)
        data[place] ^= bit
        file.write_bytes(data)
    assert latest_checkpoint(run)[0] == 4
    print(f"{found} of 200 flipped bits found")


def test_every_bit_of_a_record(run):
    """Most of them leave readable JSON, so the record has a sum of itself."""
    folder = run / "checkpoints" / "step_4"
    data = bytearray((folder / "step.json").read_bytes())
    readable = 0
    for place in range(8 * len(data)):
        data[place // 8] ^= 1 << place % 8
        (folder / "step.json").write_bytes(data)
        try:
            readable += isinstance(json.loads(bytes(data)), dict)
        except ValueError:
            pass
        reason = damage(folder, 4)
        assert reason and reason.startswith("step.json"), place
        data[place // 8] ^= 1 << place % 8
    assert readable > len(data)
    print(f"{8 * len(data)} of {8 * len(data)} flipped bits of a record found, {readable} of them in readable JSON")


def record(folder):
    read = json.loads((folder / "step.json").read_text())
    return {key: value for key, value in read.items() if key != "own_sha256"}


def sums(folder):
    return record(folder)["sha256"]


def rewrite(folder, step=4, **more):
    """A record with the right sum of itself."""
    listed = {name: digest for name, digest in {**sums(folder), **more}.items() if digest}
    (folder / "step.json").write_text(record_text(dict(record(folder), step=step, sha256=listed)))


def lists_fewer_files(folder):
    written = json.loads((folder / "step.json").read_text())
    del written["sha256"]["ema.safetensors"]
    (folder / "step.json").write_text(json.dumps(written, indent=1) + "\n")


def future(folder):
    written = json.loads((folder / "step.json").read_text())
    (folder / "step.json").write_text(json.dumps(dict(written, format=5, files="elsewhere")))


def outside(folder):
    other = "../step_2/model.safetensors"
    rewrite(folder, **{other: sums(folder.with_name("step_2"))["model.safetensors"]})


def empty(folder):
    for file in folder.iterdir():
        file.unlink()


CASES = {
    "no record": (lambda f: (f / "step.json").unlink(), "step.json is missing"),
    "a future format": (future, "step.json has format 5 of moh_vision 0.1.0; this is 0.1.0, which reads 4"),
    "another step": (lambda f: rewrite(f, step=40), "step.json is of step 40"),
    "a name outside": (outside, "step.json names ../step_2/model.safetensors, which is outside of the folder"),
    "an absolute name": (lambda f: rewrite(f, **{"/etc/hostname": "0"}), "step.json names /etc/hostname, which is"),
    "fewer files": (lists_fewer_files, "step.json does not have its own sha256"),
    "a file less": (lambda f: (f / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
    "a folder for a file": (lambda f: ((f / "optimizer.safetensors").unlink(), (f / "optimizer.safetensors").mkdir()), "optimizer.safetensors is"),
    "a file more": (lambda f: (f / "x.safetensors").write_bytes(b""), "x.safetensors is not in step.json"),
    "a file unlisted": (lambda f: rewrite(f, **{"ema.safetensors": None}), "ema.safetensors is not in step.json"),
    "nothing": (empty, "step.json is missing"),
    "a list": (lambda f: (f / "step.json").write_text("[]"), "step.json is not readable"),
    "a sum that is none": (lambda f: rewrite(f, **{"optimizer.safetensors": 7}), "optimizer.safetensors does not have the sha256"),
    "sums that are none": (
        lambda f: (f / "step.json").write_text('{"format": 4, "version": "0.1.0", "step": 4, "sha256": 7}'),
        "step.json is not readable",
    ),
    "deep": (lambda f: (f / "step.json").write_text("[" * 10**6), "step.json is not readable"),
    "a folder for a record": (
        lambda f: ((f / "step.json").unlink(), (f / "step.json").mkdir()),
        "step.json is not readable",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_folder_is_passed_over(run, name):
    damaging, reason = CASES[name]
    damaging(run / "checkpoints" / "step_4")
    said = []
    assert latest_checkpoint(run, said.append)[0] == 2
    assert len(said) == 1 and f"step_4 is skipped: {reason}" in said[0], said


def test_rubbish_beside_is_no_checkpoint(run):
    for name in (".step_6.tmp", ".step_6.gone", "step_6.tmp", "step_x", "step_", "step_²", "other"):
        (run / "checkpoints" / name).mkdir()
    (run / "checkpoints" / "step_9").write_text("a file")
    (run / "checkpoints" / "step_4" / ".nfs0001").write_text("of a network disk")
    said = []
    assert latest_checkpoint(run, said.append)[0] == 4 and not said


def test_all_damaged_is_no_fresh_start(training, run, capsys):
    for step in (2, 4):
        (run / "checkpoints" / f"step_{step}" / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(SystemExit) as exit_, user_errors("train.py"):
        resume_point(run, 10, fresh=False)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert (
        f"every checkpoint in {run / 'checkpoints'} is damaged, or of another version; --fresh" in error
        and len(error.splitlines()) == 1
    )
    assert resume_point(run, 10, fresh=True) is None


def test_weights_without_checkpoints_are_no_fresh_start(run, tmp_path):
    again(run / "checkpoints", tmp_path / "elsewhere")
    for folder in (run / "checkpoints").iterdir():
        folder.rename(tmp_path / folder.name)
    with pytest.raises(ValueError, match="holds model.safetensors, but .*checkpoints no checkpoint; --fresh"):
        resume_point(run, 10, fresh=False)
    assert resume_point(run, 10, fresh=True) is None
