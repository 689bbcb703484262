"""An EMA whose decay is too slow for the run: it still consists of the weights of step 1, and messages say so."""

import pytest
import torch

import moh_vision
from moh_vision.__main__ import main
from moh_vision.classification import train as train_cls
from moh_vision.diffusion import train as train_dit
from moh_vision.engine.config import EmaConfig
from moh_vision.engine.weights import ModelEma, first_weights_left, short_enough
from tests.support.small_runs import arguments, entries, results

LONG = "--ema.decay 0.9999 --ema.warmup false"


@pytest.mark.parametrize(
    "ema, steps",
    [
        (EmaConfig(decay=0.9999), 150),
        (EmaConfig(decay=0.9), 20),
        (EmaConfig(decay=0.9999, warmup=True), 6),
        (EmaConfig(decay=0.5), 1),
    ],
    ids=["0.9999", "0.9", "warmup", "one step"],
)
def test_the_share_of_the_first_weights_is_what_the_average_has(ema, steps):
    """The weight is 1 at step 1 and 0 later, so the average is the share of the first weights."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    average = ModelEma(model, decay=ema.decay, use_warmup=ema.warmup)
    for step in range(1, steps + 1):
        model.weight.data.fill_(1.0 if step == 1 else 0.0)
        average.update(model, step)
    assert average.module.weight.item() == pytest.approx(first_weights_left(ema, steps))


@pytest.mark.parametrize("steps", [2, 5, 10, 150, 300, 12345])
def test_the_advised_decay_forgets_the_first_weights(steps):
    *_, last = short_enough(EmaConfig(decay=0.9999999), steps).split()
    assert first_weights_left(EmaConfig(decay=float(last)), steps) == 0
    assert first_weights_left(EmaConfig(decay=0.9999, warmup=True), 150) == 0
    assert short_enough(EmaConfig(decay=0.9999), 150) == "ema.warmup true or ema.decay 0.96"


def test_a_classifier_is_scored_with_the_better_weights(tmp_path, capsys):
    """If the EMA still consists of the first weights, the run is validated, opened and published with the last weights."""
    run = tmp_path / "run"
    options = f"{LONG} --optim.lr 1e-2 --optim.warmup_steps 5 --optim.batch_size 32"
    train_cls.main(arguments("cls", run, 60, 100, *options.split()))
    out = capsys.readouterr().out
    found = results(run)
    warning = "ema.decay 0.9999: after 60 steps 99.4% of the EMA are still the weights of step 1"
    advice = "set ema.warmup true or "
    assert out.index(f"{warning}; {advice}") < out.index("classification 1/60")
    assert found["weights"] == "model" and found["top1"] > found["ema_weights"]["top1"] + 5
    assert entries(run)[-1]["weights"] == "model"
    assert entries(run)[-1]["validation"]["top1"] == found["top1"]
    assert "EMA, 99.4% of it still the weights of step 1: top-1" in out
    opened = moh_vision.open_run(run)
    assert opened.metadata["weights"] == str(run / "model.safetensors")
    assert opened.scores()["top1"] == pytest.approx(found["top1"])
    assert main(["publish", str(run), "--output", str(tmp_path / "published")]) == 0
    published = moh_vision.load_run(tmp_path / "published").state_dict()
    for name, value in opened.model.state_dict().items():
        assert torch.equal(published[name], value)


def test_an_ema_of_first_weights_is_said_where_it_is_taken(tmp_path, capsys, caplog):
    """Diffusion runs are not validated and use their EMA; previews and opened runs warn of the share of first weights."""
    run = tmp_path / "run"
    preview = "--preview.every 3 --preview.steps 1 --preview.images 4"
    train_dit.main(arguments("dit", run, 3, 100, *LONG.split(), *preview.split()))
    assert "EMA, 100.0% of it still the weights of step 1): " in capsys.readouterr().out
    moh_vision.load_run(run)
    warning = "100.0% of this EMA are still the weights of step 1"
    assert f"{run}/ema.safetensors: {warning}" in caplog.text
    caplog.clear()
    moh_vision.load_run(run, "model")
    assert not caplog.text
