"""A step whose loss or gradient is not finite changes nothing and is counted; ten in a row end the run."""

import math

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from tests.support.refusals import one_line
from tests.support.small_loop import small_loop
from tests.support.small_runs import arguments, logged, same, script


def test_a_bad_batch_changes_nothing(tmp_path, monkeypatch):
    batches = script("dit").training_loader

    def poisoned(*args, **kwargs):
        for step, batch in enumerate(batches(*args, **kwargs)):
            if step in (2, 3):
                batch["images"][0, 0, 0, 0] = math.nan if step == 2 else math.inf
            yield batch

    monkeypatch.setattr(script("dit"), "training_loader", poisoned)
    script("dit").main(arguments("dit", tmp_path, 6, 1, "--keep-checkpoints", 9))
    for name in ("model", "ema", "optimizer"):
        before, after_bad_steps, after_good_step = (
            load_file(tmp_path / f"checkpoints/step_{step}/{name}.safetensors")
            for step in (2, 4, 5)
        )
        assert same(before, after_bad_steps), name
        assert not same(after_bad_steps, after_good_step), name
    entries = logged(tmp_path)
    assert [entry["skipped"] for entry in entries] == [0, 0, 1, 2, 2, 2]
    assert [entry["step"] for entry in entries if entry["loss"] is None] == [3, 4]
    assert len(entries) == 6


def test_a_huge_learning_rate_ends_the_run(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        more = ("--optim.lr", "1e20", "--optim.warmup_steps", "0", "--optim.schedule", "constant")
        script("dit").main(arguments("dit", tmp_path, 100, 1, *more))
    error = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1
    assert "10 steps in a row without finite loss and gradient" in error
    assert "lr 1e+20" in error and "norm" in error
    state = load_file(tmp_path / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in state.values())


class Given(torch.nn.Module):
    """A task whose loss, and whose every gradient, are given by the batch."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(2, 1)
        for p in self.model.parameters():
            p.register_hook(lambda gradient: torch.full_like(gradient, self.gradient))

    def forward(self, loss, gradient):
        self.gradient = gradient
        zero = sum((0 * p).sum() for p in self.model.parameters())
        return dict(loss=zero + loss)


@pytest.mark.parametrize("loss, gradient", [(math.nan, 1.0), (1.0, math.inf)])
def test_a_loss_or_a_gradient_alone_that_is_not_finite_changes_nothing(loss, gradient):
    """A loss can overflow in a detached term, with a finite gradient. A good step begins a new count."""
    accelerator = Accelerator(cpu=True)
    task = Given()
    optimizer = torch.optim.AdamW(task.parameters(), lr=0.1)
    loop = small_loop(accelerator, task, optimizer, clip_norm=1.0)
    weight = task.model.weight
    before = weight.detach().clone()

    def step(loss, gradient):
        loop.step(iter([dict(loss=loss, gradient=gradient)]), epoch=0, count=1)

    for number in range(1, 10):
        step(loss, gradient)
        assert loop.skipped.total == loop.skipped.in_a_row == number
    assert torch.equal(weight, before) and weight.grad is None
    step(1.0, 1.0)
    assert loop.skipped.in_a_row == 0 and not torch.equal(weight, before)
    for _ in range(10, 19):
        step(loss, gradient)
    with one_line(
        "step 19: 10 steps in a row without finite loss and gradient .*lr 0.1", FloatingPointError
    ):
        step(loss, gradient)


def test_skipped_updates_are_said_at_the_end_of_an_epoch(monkeypatch):
    task = Given()
    loop = small_loop(Accelerator(cpu=True), task, torch.optim.SGD(task.parameters(), lr=0.1))
    said = []
    monkeypatch.setattr(loop.log, "say", said.append, raising=False)
    for epoch, loss in ((0, 1.0), (0, math.nan), (1, 1.0), (2, 1.0), (2, math.nan), (3, 1.0)):
        loop.step(iter([dict(loss=loss, gradient=1.0)]), epoch=epoch, count=1)
    words = "updates skipped so far, whose loss or gradient was not finite"
    assert said == [f"epoch 1: 1 {words}", f"epoch 3: 2 {words}"]


def test_a_gradient_scalers_first_skips_do_not_count():
    """float16 training begins with a loss scale that overflows; only from a scale of 1 down is the model to blame."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    accelerator = Accelerator(cpu=True)
    task = Given()
    accelerator.scaler = scaler  # accelerate makes a GradScaler only on GPUs
    loop = small_loop(accelerator, task, torch.optim.SGD(task.parameters(), lr=0.1))
    batch = dict(loss=1.0, gradient=math.inf)
    for _ in range(16):  # down to a scale of 1
        loop.step(iter([batch]), epoch=0, count=1)
    assert scaler.get_scale() == 1
    assert loop.skipped.total == loop.skipped.in_a_row == 0
    with pytest.raises(FloatingPointError, match="step 25"):
        for _ in range(16, 30):
            loop.step(iter([batch]), epoch=0, count=1)
