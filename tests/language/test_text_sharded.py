"""train_text.py with sharded weights (FSDP2), on two gloo processes."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moh_vision import load_run
from moh_vision.language import train as train_text
from tests.support import sharded_on_cpu
from tests.support.processes import on_two_ranks
from tests.support.refusals import assert_says
from tests.support.small_runs import entries, logged, results
from tests.support.small_text import write_pairs, write_plain

pytestmark = pytest.mark.slow

WIDTH = "--model.kwargs.hidden_size 32 --model.kwargs.intermediate_size 48 --model.kwargs.num_attention_heads 4 "
CLM = WIDTH + (
    "--model.kwargs.num_hidden_layers 2 --model.name clm_moh_small_50 --data.merges 30 --data.block 16 "
    "--label_smoothing 0 --optim.batch_size 8 --optim.clip_norm 1 --checkpointing true"
)
MT = WIDTH + (
    "--model.kwargs.encoder_layers 1 --model.kwargs.decoder_layers 1 --data.source de --data.target en --data.merges 60 "
    "--data.max_tokens 200 --data.max_length 60 --generate.beam 2 --generate.max_length 4"
)


def arguments(settings, data, run, steps, *more):
    common = (
        f"--log-every 1 --optim.lr 3e-3 --optim.warmup_steps 5 --max-steps {steps} --output {run}"
    )
    return [*settings.split(), *common.split(), "--data.root", str(data), *map(str, more)]


def sharded(folder, argv, policy="no_wrap"):
    on_two_ranks(sharded_on_cpu.run, argv, folder, policy)


def test_a_causal_model(tmp_path):
    """It learns what one process learns, stops and goes on to the same bits, and leaves a whole model."""
    data = write_plain(tmp_path / "plain", val=37)
    options = ["--eval-every", 3, "--patience", 9, "--balance_weight", 0]
    train_text.main(
        arguments(CLM, data, tmp_path / "alone", 6, *options, "--optim.accumulation", 4)
    )
    options += ["--optim.accumulation", 2]
    sharded(tmp_path, arguments(CLM, data, tmp_path / "whole", 6, *options))
    sharded(tmp_path, arguments(CLM, data, tmp_path / "run", 4, *options))
    parts = (tmp_path / "run" / "checkpoints" / "step_4").glob("model-0000[01].safetensors")
    assert all(load_file(part) for part in parts)
    between = load_run(str(tmp_path / "run" / "checkpoints" / "step_4")).state_dict()
    sharded(tmp_path, arguments(CLM, data, tmp_path / "run", 6, *options))
    alone, whole, run = (
        load_file(tmp_path / name / "model.safetensors") for name in ("alone", "whole", "run")
    )
    assert between.keys() >= run.keys() and any(
        not torch.equal(between[name], tensor) for name, tensor in run.items()
    )
    assert whole.keys() == run.keys() == alone.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, run[name]), name
        if ".router." not in name:  # whose gradients are next to nothing, and Adam takes full steps
            torch.testing.assert_close(tensor, alone[name], rtol=1e-3, atol=2e-4)
    for one, two in zip(entries(tmp_path / "alone"), entries(tmp_path / "whole"), strict=True):
        assert all(
            one[key] == pytest.approx(two[key], rel=1e-3)
            for key in ("nll", "grad_norm")
            if key in one
        )
        if "validation" in one:  # 37 lines do not divide by two: each token counts once
            assert one["validation"] == pytest.approx(two["validation"], rel=1e-3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in run.items())
    found = results(tmp_path / "whole")
    assert found["weights"] == "best.safetensors" and found["best_step"] == 6
    assert load_file(tmp_path / "whole" / "best.safetensors").keys() == whole.keys()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_layers_gathered_one_by_one(precision, tmp_path):
    """configs/accelerate/fsdp2_layers.yaml: the weights and the balance loss of a model that is gathered as a whole."""
    data = write_plain(tmp_path / "plain", val=37)
    options = ["--balance_weight", 0.1, "--mixed-precision", precision]
    runs = {}
    units = {"no_wrap": 1, "transformer_based_wrap": 3}  # the task; and its two layers
    for policy, count in units.items():
        sharded(tmp_path, arguments(CLM, data, tmp_path / policy, 5, *options), policy)
        assert (tmp_path / "units").read_text() == str(count)
        runs[policy] = (
            load_file(tmp_path / policy / "model.safetensors"),
            logged(tmp_path / policy),
        )
    (whole, looks), (layers, looks_by_layers) = runs.values()
    assert whole.keys() == layers.keys()
    near = 1e-4 if precision == "no" else 2e-2
    for name, tensor in whole.items():
        if (
            precision == "no" or ".router." not in name
        ):  # in 16 bits the sign of a gradient of nearly nothing is chance
            torch.testing.assert_close(layers[name], tensor, rtol=near, atol=near / 10)
    assert len(looks) == 5
    for one, two in zip(looks, looks_by_layers, strict=True):
        assert all(
            one[key] == pytest.approx(two[key], rel=near)
            for key in ("nll", "balance_loss", "grad_norm")
        )
    # A loss that the routers learn by: without it they end elsewhere.
    sharded(
        tmp_path,
        arguments(CLM, data, tmp_path / "free", 5, "--balance_weight", 0),
        "transformer_based_wrap",
    )
    free = load_file(tmp_path / "free" / "model.safetensors")
    moved = [
        (free[name] - layers[name]).norm() / layers[name].norm()
        for name in layers
        if ".router." in name
    ]
    assert min(moved) > 1e-2


def test_the_best_weights_are_scored_at_the_end(tmp_path):
    """What is learned of numbers in their order is wrong for numbers in the opposite one, from some step on."""
    data = write_plain(tmp_path / "plain", val=37)
    lines = (data / "valid.txt").read_text().splitlines()
    (data / "valid.txt").write_text(
        "".join(" ".join(reversed(line.split())) + "\n" for line in lines)
    )
    options = ["--eval-every", 6, "--patience", 9, "--optim.lr", 0.02, "--optim.weight_decay", 0]
    sharded(tmp_path, arguments(CLM, data, tmp_path / "run", 30, *options))
    found = results(tmp_path / "run")
    losses = {
        e["step"]: e["validation"]["loss"] for e in entries(tmp_path / "run") if "validation" in e
    }
    assert found["best_step"] == min(losses, key=losses.get) < 30
    assert found["validation"]["loss"] == pytest.approx(min(losses.values()), rel=1e-6)


@pytest.mark.parametrize(
    "preset, mode", [("mt_moh_50", []), ("mt_nobcd", ["--block_descent.mode", "joint"])]
)
def test_a_translation_model_with_tied_weights(tmp_path, preset, mode):
    """mt_nobcd has gates beside the main optimiser's weights; the second start reads what the first one saved."""
    data = write_pairs(tmp_path / "pairs", train=60, val=9, test=4)
    for steps in (2, 3):
        more = ["--model.name", preset, "--data.test", "test", *mode]
        argv = arguments(MT, data, tmp_path / "run", steps, *more)
        sharded(tmp_path, argv, "transformer_based_wrap")  # which is for other models
    assert (tmp_path / "units").read_text() == "1"
    assert results(tmp_path / "run")["bleu_pairs"] == 4
    assert len((tmp_path / "run" / "translations.txt").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    "more, facts",
    [
        (["--model.name", "mt_mae_7"], "block_descent.mode bcd FSDP DDP joint"),
        (
            ["--model.name", "mt_moh_50", "--average", 2],
            "average 2 FSDP",
        ),
    ],
)
def test_what_cannot_be_sharded(tmp_path, more, facts):
    data = write_pairs(tmp_path / "pairs", train=60, val=9, test=4)
    with pytest.raises(torch.multiprocessing.ProcessExitedException):
        sharded(tmp_path, arguments(MT, data, tmp_path / "run", 3, *more))
    assert_says((tmp_path / "stderr.0").read_text(), facts)
    assert not (tmp_path / "run").exists()
