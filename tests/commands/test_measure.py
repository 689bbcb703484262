"""The command measure, which times a dense model and its conversions."""

import pytest
import torch

from moh_vision.attention import model_budgets
from moh_vision.commands import measure
from tests.support.refusals import assert_says

VIT = ("vit_tiny_patch16_224", "--img-size", "32", "--batch-size", "2")
DIT = ("dit_small_patch2", "--img-size", "8", "--batch-size", "2")


@pytest.fixture
def table(run_command, monkeypatch):
    """table(*argv) runs the command, each pass once, with 8 ms for dense models and 2 for others; returns its lines."""

    def turns(timed, rounds):
        for one in timed:
            with one.context():
                one.run()
            one.milliseconds[:] = [1.0, 2.0, 3.0]
        timed[0].milliseconds[:] = [7.0, 8.0, 9.0]

    monkeypatch.setattr(measure, "take_turns", turns)

    def run(*argv):
        code, out, _ = run_command("measure", *argv)
        assert code == 0
        return out.splitlines()

    return run


def test_a_table_has_the_times_over_those_of_the_dense_model(table):
    *_, title, head, dense, half = table(*VIT, "--shares", "0.5")
    assert title.startswith("vit_tiny_patch16_224, forward, 2x3x32x32, float32, ")
    assert head.split() == ["ms", "over", "dense", "calls", "that", "skip"]
    assert dense.split() == ["dense", "model", "8", "[7", "9]", "1.00"]
    assert half == "66.7 % of the heads   2  [1 3]        0.25     not measured"


@pytest.mark.parametrize("ratio, skips", [(0.5, "1 of 1"), (2.0, "0 of 1")])
def test_a_table_says_how_many_kinds_of_calls_skip_heads(table, skipping_takes, ratio, skips):
    skipping_takes(ratio)
    *_, half = table(*VIT, "--shares", "0.5")
    assert half.endswith(f"  {skips}")


def test_training_goes_backward_through_all_models(table, monkeypatch):
    passes = []
    grad = torch.autograd.grad

    def counted(loss, weights, **options):
        passes.append(len(weights))
        return grad(loss, weights, **options)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    lines = table(*DIT, "--shares", "0.5", "--training", "--mixed-precision", "bf16")
    assert ", forward and backward, 2x4x8x8, bf16, " in lines[-4]
    assert len(passes) >= 2  # measuring attention adds its own


def test_a_vit_chooses_for_every_token_and_a_dit_by_the_timestep():
    models = measure.models_of("vit_base_patch16_224", [0.75, 0.5], groups=False, img_size=32)
    assert list(models) == ["dense model", "75.0 % of the heads", "50.0 % of the heads"]
    for model, share in zip(list(models.values())[1:], (0.75, 0.5)):
        budgets = model_budgets(model)
        assert budgets.share == share and not budgets.groups
        assert {layer.scope for layer in measure.routed_layers(model)} == {"token"}
    for name in ("dit_small_patch2", "sit_small_patch2"):
        _, half = measure.models_of(name, [0.5], groups=True, img_size=8).values()
        assert model_budgets(half).share == 0.5 and len(model_budgets(half).groups) == 12
        assert half.config.scope == "sample" and half.config.route_by == "timestep"


def test_shares_of_equal_budgets_are_one_model():
    """Of three heads two run, whatever share is asked for."""
    models = measure.models_of("vit_tiny_patch16_224", [0.75, 0.5], groups=False, img_size=32)
    assert list(models) == ["dense model", "66.7 % of the heads"]


def test_a_dit_has_one_timestep_for_all_images_but_in_training():
    dense, _ = measure.models_of("dit_small_patch2", [0.5], groups=False, img_size=8).values()
    for training, size in ((True, 3), (False, 1)):
        dense.train(training)
        _, timesteps, _ = measure.inputs_of(dense, 3, torch.device("cpu"))
        assert len(timesteps) == size


def test_tokens_take_different_heads():
    model = measure.models_of("vit_base_patch16_224", [0.5], groups=False, img_size=64)
    model = model["50.0 % of the heads"].eval()
    _, statistics = model.forward_routed(torch.randn(2, 3, 64, 64))
    counts = statistics[0].counts[0]  # [H], how many of the 17 tokens of an image run each head
    assert ((0 < counts) & (counts < 17)).any()


MISTAKES = {
    ("vit_tny_patch16_224",): "vit_tny_patch16_224 registry did you mean vit_tiny_patch16_224",
    ("qqqqqq",): "qqqqqq is not a model in timm's registry",
    ("resnet18",): "resnet18 convert takes VisionTransformer not ResNet",
    ("moh_vit_tiny_patch16_224",): "moh_vit_tiny_patch16_224 has routed heads already",
    (*VIT, "--shares", "1"): "--shares 1 above 0 and below 1",
    ("vit_tiny_patch16_224.nope",): "vit_tiny_patch16_224.nope Invalid pretrained tag",
    ("vit_tiny_patch16_224", "--shares", "0.001"): "--shares 0.001 head_budget",
    (*VIT, "--rounds", "0"): "--rounds 0 1 or more",
    (*VIT[:1], "--batch-size", "-1"): "--batch-size -1 1 or more",
    (*VIT[:1], "--img-size", "8"): f"{VIT[0]} --img-size 8 Kernel size can't be greater",
    (*VIT[:1], "--batch-size", "1000000000"): f"{VIT[0]} --batch-size 1000000000 memory",
}


@pytest.mark.parametrize("argv", MISTAKES, ids=lambda argv: " ".join(argv))
def test_mistakes_are_one_line(argv, refused):
    assert_says(refused("measure", *argv), MISTAKES[argv])
