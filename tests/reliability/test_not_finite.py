"""Losses and gradients that are not finite change nothing, are counted, and end a run after ten in a row."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from small_runs import arguments, logged

from moh_vision.classification import train as train_cls
from moh_vision.diffusion import train as train_dit
from moh_vision.engine.step import Updater

SCRIPTS = dict(cls=train_cls, dit=train_dit)


def poison(monkeypatch, script, steps, value=math.nan):
    batches = script.training_batches

    def poisoned(*args, **kwargs):
        for step, batch in enumerate(batches(*args, **kwargs)):
            if step in steps:
                batch["images"][0, 0, 0, 0] = value
            yield batch

    monkeypatch.setattr(script, "training_batches", poisoned)


@pytest.mark.parametrize("kind", ["cls", "dit"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_batch_changes_nothing(tmp_path, monkeypatch, kind, value):
    poison(monkeypatch, SCRIPTS[kind], {2, 3}, value)
    SCRIPTS[kind].main(arguments(kind, tmp_path, 6, 1, "--keep-checkpoints", 9))
    weights, averages, moments = [], [], []
    for step in range(1, 7):
        folder = tmp_path / "checkpoints" / f"step_{step}"
        weights.append(load_file(folder / "model.safetensors"))
        averages.append(load_file(folder / "ema.safetensors"))
        moments.append(load_file(folder / "optimizer.safetensors"))
    for kept in (weights, averages, moments):
        for name in kept[0]:
            assert torch.equal(kept[1][name], kept[3][name]), name  # after 2 steps, and after two bad ones
        assert any(not torch.equal(kept[3][name], kept[4][name]) for name in kept[0])
    assert [entry["skipped"] for entry in logged(tmp_path)] == [0, 0, 1, 2, 2, 2]
    assert [entry["loss"] is None for entry in logged(tmp_path)] == [False, False, True, True, False, False]


def test_a_huge_learning_rate_ends_the_run(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        more = ("--optim.lr", "1e20", "--optim.warmup_steps", "0", "--optim.schedule", "constant")
        train_dit.main(arguments("dit", tmp_path, 100, 1, *more))
    error = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1
    assert "10 steps in a row without finite loss and gradient" in error and "lr 1e+20" in error and "norm" in error
    state = load_file(tmp_path / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in state.values())


def test_a_bad_loss_with_good_gradients_is_skipped_too():
    """Such as a loss that overflows in a term whose gradient is cut off."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    update, before = Updater(accelerator, 0.0), model.weight.detach().clone()
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    assert update(model, optimizer, 0, [dict(loss=loss + math.inf)])[1] is False
    assert update.skipped == 1 and torch.equal(model.weight, before) and model.weight.grad is None


def test_a_gradient_scalers_first_skips_do_not_count():
    """float16 begins with a scale that overflows; only below 1 it is the model that is broken."""
    model = torch.nn.Linear(2, 1)
    scale = dict(value=2.0**16)

    class Optimizer:
        param_groups = [dict(lr=0.1)]

        def step(self):
            scale["value"] /= 2  # what a scaler does with a step that overflowed

        def zero_grad(self, set_to_none):
            pass

    scaler = SimpleNamespace(get_scale=lambda: scale["value"], update=lambda: None)
    accelerator = SimpleNamespace(scaler=scaler, clip_grad_norm_=lambda *_: torch.tensor(math.inf))
    update, losses = Updater(accelerator, 1.0), [dict(loss=torch.tensor(1.0))]
    for step in range(16):  # down to a scale of 1
        assert update(model, Optimizer(), step, losses)[1] is False
    assert update.skipped == update.in_a_row == 0
    with pytest.raises(FloatingPointError, match="step 25"):
        for step in range(16, 30):
            update(model, Optimizer(), step, losses)
