"""Losses and gradients that are not finite change nothing, are counted, and end a run after ten in a row."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from moh_vision.engine.step import Updater
from tests.support.refusals import one_line
from tests.support.small_runs import arguments, logged, same, script


def test_a_bad_batch_changes_nothing(tmp_path, monkeypatch):
    batches = script("dit").training_batches

    def poisoned(*args, **kwargs):
        for step, batch in enumerate(batches(*args, **kwargs)):
            if step in (2, 3):
                batch["images"][0, 0, 0, 0] = math.nan if step == 2 else math.inf
            yield batch

    monkeypatch.setattr(script("dit"), "training_batches", poisoned)
    script("dit").main(arguments("dit", tmp_path, 6, 1, "--keep-checkpoints", 9))
    for name in ("model", "ema", "optimizer"):
        steps = [
            load_file(tmp_path / f"checkpoints/step_{step}/{name}.safetensors")
            for step in (2, 4, 5)
        ]
        assert same(*steps[:2]), name  # after 2 steps, and after two bad ones
        assert not same(*steps[1:]), name
    assert [entry["skipped"] for entry in logged(tmp_path)] == [0, 0, 1, 2, 2, 2]
    assert [entry["loss"] is None for entry in logged(tmp_path)] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]


def test_a_huge_learning_rate_ends_the_run(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        more = ("--optim.lr", "1e20", "--optim.warmup_steps", "0", "--optim.schedule", "constant")
        script("dit").main(arguments("dit", tmp_path, 100, 1, *more))
    error = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1
    assert (
        "10 steps in a row without finite loss and gradient" in error
        and "lr 1e+20" in error
        and "norm" in error
    )
    state = load_file(tmp_path / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in state.values())


@pytest.mark.parametrize("loss, gradient", [(math.nan, 1.0), (1.0, math.inf)])
def test_a_loss_or_a_gradient_alone_that_is_not_finite_changes_nothing(loss, gradient):
    """Such as a loss that overflows in a term whose gradient is cut off. A good step between them begins a new count."""
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 1)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
    update, before = Updater(accelerator, 1.0), model.weight.detach().clone()

    def step(number, loss, gradient):
        for p in model.parameters():
            p.grad = torch.full_like(p, gradient)
        return update(model, optimizer, number, [dict(loss=torch.tensor(loss))])[1]

    assert not any(step(number, loss, gradient) for number in range(9))
    assert torch.equal(model.weight, before) and model.weight.grad is None and update.skipped == 9
    assert step(9, 1.0, 1.0) and not torch.equal(model.weight, before)
    assert not any(step(number, loss, gradient) for number in range(10, 19))
    with one_line(
        "step 19: 10 steps in a row without finite loss and gradient .*lr 0.1", FloatingPointError
    ):
        step(19, loss, gradient)


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
