import hashlib
import json

import pytest
import torch
from accelerate import Accelerator
from refusals import one_line
from safetensors import safe_open
from timm.utils import ModelEmaV3

from moh_vision.engine.checkpoint import latest_checkpoint, load_training, resume_point, save_training
from moh_vision.engine.ema import make_ema
from moh_vision.engine.manifest import manifest_text


@pytest.fixture
def trained(tmp_path):
    """A model with optimiser and EMA after a few steps, saved at steps 2, 4 and 6; two are kept."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 2)
    task, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    ema = ModelEmaV3(model, decay=0.9)
    states = {}
    for step in range(1, 7):
        task(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model, step)
        if step % 2 == 0:
            save_training(accelerator, tmp_path, step, model, ema, {"architecture": "linear"}, keep=2)
            states[step] = [p.detach().clone() for p in (*model.parameters(), *ema.module.parameters())]
    return tmp_path, accelerator, model, optimizer, ema, states


def test_layout_and_rotation(trained):
    run = trained[0]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_4", "step_6"]
    newest = run / "checkpoints" / "step_6"
    manifest = json.loads((newest / "manifest.json").read_text())
    assert manifest["step"] == 6 and set(manifest["sha256"]) == {p.name for p in newest.iterdir()} - {"manifest.json"}
    assert not list(newest.glob("random_states*"))
    with safe_open(run / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["architecture"]) == "linear" and json.loads(file.metadata()["step"]) == 6


def test_loading_restores_weights_optimiser_and_ema(trained):
    run, accelerator, model, optimizer, ema, states = trained
    moments = [v["exp_avg"].clone() for v in optimizer.state.values()]
    for p in (*model.parameters(), *ema.module.parameters()):
        p.data.zero_()
    for v in optimizer.state.values():
        v["exp_avg"].zero_()
    step, folder = latest_checkpoint(run)
    load_training(accelerator, folder, model, ema)
    assert step == 6
    assert all(
        torch.equal(a, b) for a, b in zip((*model.parameters(), *ema.module.parameters()), states[6], strict=True)
    )
    assert all(torch.equal(v["exp_avg"], m) for v, m in zip(optimizer.state.values(), moments, strict=True))


def test_rotation_keeps_the_good_one_and_passes_over_damaged_newer_ones(trained):
    run, accelerator, model, _, ema, _ = trained
    damage_by("flipped", run / "checkpoints" / "step_6")
    assert latest_checkpoint(run, lambda text: None)[0] == 4
    save_training(accelerator, run, 5, model, ema, {}, keep=1)
    assert latest_checkpoint(run, lambda text: None)[0] == 5


def test_ema_switched_on_and_off(trained):
    run, accelerator, model, _, ema, _ = trained
    save_training(accelerator, run, 8, model, None, {}, keep=2)
    assert not (run / "ema.safetensors").exists() and (run / "old_ema.safetensors").exists()
    said = []
    load_training(accelerator, run / "checkpoints" / "step_8", model, ema, said.append)
    assert "has no EMA" in said[0] and torch.equal(ema.module.weight, model.weight)


def test_tensors_that_are_not_contiguous(tmp_path):
    """channels_last; safetensors refuses them."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    ema = ModelEmaV3(model)
    assert not ema.module.weight.is_contiguous()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert save_training(accelerator, tmp_path, 1, model, ema, {}, keep=1) is None
    weight = model.weight.detach().clone()
    model.weight.data.zero_()
    ema.module.weight.data.zero_()
    load_training(accelerator, latest_checkpoint(tmp_path)[1], model, ema)
    assert torch.equal(model.weight, weight) and torch.equal(ema.module.weight, weight)


def test_no_checkpoint_is_none(tmp_path):
    assert latest_checkpoint(tmp_path) is None


def damage_by(kind, folder):
    manifest = folder / "manifest.json"
    if kind == "truncated":
        (folder / "ema.safetensors").write_bytes((folder / "ema.safetensors").read_bytes()[:-7])
    elif kind == "flipped":
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[-3] ^= 1
        (folder / "model.safetensors").write_bytes(data)
    elif kind == "file gone":
        (folder / "optimizer.bin").unlink()
    elif kind == "no manifest":
        manifest.unlink()
    elif kind == "torn manifest":
        manifest.write_text(manifest.read_text()[:20])
    elif kind == "future":
        manifest.write_text(manifest.read_text().replace('"format": 3', '"format": 4'))
    elif kind == "other step":
        folder.rename(folder.with_name("step_8"))


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("truncated", "step_6 is skipped: ema.safetensors does not have the sha256"),
        ("flipped", "step_6 is skipped: model.safetensors does not have the sha256"),
        ("file gone", "step_6 is skipped: optimizer.bin is missing"),
        ("no manifest", "step_6 is skipped: manifest.json is missing"),
        ("torn manifest", "step_6 is skipped: manifest.json is not readable"),
        ("future", "step_6 is skipped: manifest.json has format 4 of moh_vision 0.1.0; this is 0.1.0, which reads 3"),
        ("other step", "step_8 is skipped: manifest.json is of step 6"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(trained, kind, reason):
    run = trained[0]
    damage_by(kind, run / "checkpoints" / "step_6")
    said = []
    assert latest_checkpoint(run, said.append)[0] == 4
    assert len(said) == 1 and reason in said[0]
    damage_by("flipped", run / "checkpoints" / "step_4")
    with pytest.raises(ValueError, match="every checkpoint in .* is damaged; --fresh"):
        latest_checkpoint(run, said.append)


@pytest.mark.parametrize("absolute", [False, True])
def test_a_manifest_that_names_a_file_outside_is_refused(trained, absolute):
    run = trained[0]
    folder, outside = run / "checkpoints" / "step_6", run / "model.safetensors"
    sums = json.loads((folder / "manifest.json").read_text())["sha256"]
    name = str(outside.resolve()) if absolute else "../../model.safetensors"
    sums[name] = hashlib.sha256(outside.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(manifest_text(6, sums))
    said = []
    assert latest_checkpoint(run, said.append)[0] == 4
    assert f"names {name}, which is outside of the folder" in said[0]


def test_a_finished_run_is_resumed_at_its_end_and_one_that_is_past_it_refused(trained):
    run = trained[0]
    for max_steps in (6, 7):
        assert resume_point(run, max_steps, fresh=False) == (6, run / "checkpoints" / "step_6")
    assert resume_point(run, 5, fresh=True) is None
    with pytest.raises(ValueError, match="--max-steps 5: .* has already done 6 steps"):
        resume_point(run, 5, fresh=False)


@pytest.mark.parametrize("warmup, average", [(False, 0.1), (True, 5 ** (-2 / 3))])
def test_a_moving_average_with_and_without_warmup(warmup, average):
    """timm's warm-up: the decay after n updates is 1 - (1 + n) ** (-2 / 3), at most the given one."""
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    ema = make_ema(model, 0.9, warmup, "cpu")
    torch.nn.init.ones_(model.weight)
    ema.update(model, step=5)
    assert ema.module.weight.item() == pytest.approx(average)
    assert make_ema(model, 0.0, warmup, "cpu") is None


def test_an_unfinished_save_is_never_taken(trained):
    run, accelerator, model, _, ema, _ = trained
    hidden = run / "checkpoints" / ".step_8.tmp"
    hidden.mkdir()
    (hidden / "model.safetensors").write_bytes(b"torn")
    assert latest_checkpoint(run)[0] == 6
    save_training(accelerator, run, 8, model, ema, {}, keep=2)
    assert latest_checkpoint(run)[0] == 8 and not hidden.exists()


def test_checkpoints_of_other_models_and_versions_are_refused_in_one_line(trained):
    run, accelerator, model, _, ema, _ = trained
    folders = [run / "checkpoints" / f"step_{step}" for step in (4, 6)]
    with torch.no_grad():
        accelerator._models = [torch.nn.Linear(4, 2)]  # as after a change of the model's code
        with one_line("step_6, of moh_vision 0.1.0, cannot be loaded into this model .*size mismatch"):
            load_training(accelerator, folders[1], model, ema)
    for folder in folders:
        (folder / "manifest.json").write_text(json.dumps(dict(format=9, version="0.9.0", files={})))
    with one_line("step_6: manifest.json has format 9 of moh_vision 0.9.0; .* take that version"):
        latest_checkpoint(run, pytest.fail)
