"""The command alignment: CKNNA of a diffusion model's blocks with a teacher, and the cosine behind REPA's projector."""

import json

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import moh_vision
from moh_vision.diffusion import train as train_dit
from moh_vision.diffusion.objectives import HybridLoss
from moh_vision.evaluation.representations import cknna
from moh_vision.models.teachers import Teacher
from tests.support.refusals import assert_says
from tests.support.small_runs import arguments

IMAGES = 40


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    sizes = dict(
        img_size=32, patch_size=8, in_chans=1, embed_dim=24, depth=1, num_heads=3, num_classes=0
    )
    torch.manual_seed(1)
    model = timm.create_model("vit_tiny_patch16_224", **sizes)
    timm.models.save_for_hf(model, folder, model_args=sizes)
    return f"local-dir:{folder}"


@pytest.fixture(scope="module")
def run(teacher, tmp_path_factory):
    """A run of a DiT of two blocks with the teacher."""
    folder = tmp_path_factory.mktemp("run") / "dit"
    lively = (
        "--optim.lr 0.01 --optim.warmup_steps 0 --optim.schedule constant --ema.decay 0".split()
    )
    train_dit.main(
        arguments("dit", folder, 4, 4, "--repa.teacher", teacher, "--repa.block", 1, *lively)
    )
    return folder


@pytest.fixture
def aligned(run_command):
    """aligned(*argv) runs the command on a few images and returns the lines of its JSON, and what it printed."""

    def begin(*argv):
        code, out, err = run_command("alignment", *argv, "--images", IMAGES, "--neighbours", 5)
        assert code == 0, err
        figure = argv[argv.index("--output") + 1]
        return json.loads(figure.with_suffix(".json").read_text())["lines"], out

    return begin


def test_scores_of_blocks_and_the_cosine_of_the_projector(run, teacher, tmp_path, aligned):
    """What they are is computed here again, image by image."""
    figure = tmp_path / "alignment.svg"
    [line], said = aligned(run, "--teacher", teacher, "--at", 0.1, 0.8, "--output", figure)
    opened = moh_vision.open_run(run)
    network = Teacher("", teacher, [0.5], [0.5])
    width = network.match_grid(opened.model.config.sample_size // opened.model.config.patch_size)
    dataset = opened.data("val")
    total = len(dataset.source)
    positions = [number * total // IMAGES for number in range(IMAGES)]
    samples = [dataset[position, position] for position in positions]
    images = torch.stack([sample["images"] for sample in samples])
    noise = torch.stack([sample["noise"] for sample in samples])
    targets = network.tokens(images)
    assert targets.shape[-1] == width
    beside = load_file(run / "checkpoints/step_4/beside.safetensors")
    weights = [beside[f"alignment.projector.{i}.weight"] for i in (0, 2, 4)]
    biases = [beside[f"alignment.projector.{i}.bias"] for i in (0, 2, 4)]
    for number, step in enumerate((100, 800)):
        t = torch.full((IMAGES,), step)
        noisy = HybridLoss().add_noise(images, noise, t)
        tokens = []
        none = torch.full((IMAGES,), opened.model.config.num_classes)
        with torch.no_grad():
            opened.model.forward_routed(noisy, t, none, tokens=tokens)
        expected = [cknna(x.mean(1), targets.mean(1), 5) for x in tokens]
        assert line["cknna"][number] == pytest.approx(expected, abs=1e-4)
        x = tokens[0]
        for layer, (weight, bias) in enumerate(zip(weights, biases)):
            x = F.linear(x, weight, bias)
            if layer < 2:
                x = F.silu(x)
        cosine = F.cosine_similarity(x, targets, dim=-1).mean().item()
        assert line["cosine"][number] == pytest.approx(cosine, abs=1e-5)
    assert len(line["cknna"][0]) == 2
    assert "t = 0.1" in said and "cosine" in said
    assert "<svg" in figure.read_text()


def test_a_run_without_a_teacher_has_scores_alone(trained, teacher, tmp_path, aligned):
    dit = trained("dit", 2)
    lines, said = aligned(dit, "--teacher", teacher, "--output", tmp_path / "a.png")
    assert lines[0]["cosine"] is None and "cosine" not in said
    assert [len(of_t) for of_t in lines[0]["cknna"]] == [2, 2, 2, 2]


def test_a_file_of_others_takes_its_model_s_name_and_data(trained, teacher, tmp_path, aligned):
    """Weights of a flow, in a file that does not say so."""
    model = timm.create_model("sit_small_patch2", img_size=8, in_chans=1, num_classes=10)
    file = tmp_path / "sit.pt"
    torch.save(model.state_dict(), file)
    options = ["--model", "sit_small_patch2", "--data.root", "digits", "--at", 0.5]
    [line], _ = aligned(file, *options, "--teacher", teacher, "--output", tmp_path / "a.png")
    assert line["model"] == "sit_small_patch2" and len(line["cknna"][0]) == 12


MISTAKES = {
    "--at 1.5": "--at 1.5 0 1",
    "--images 10 --neighbours 10": "--neighbours 10 2 --images 10",
    "--neighbours 1": "--neighbours 1 2",
    "--images 1000 --neighbours 400": "--neighbours 400 digits 355",
    "--data.img_size 12": "digits 12 8",
}


@pytest.mark.parametrize("options", MISTAKES)
def test_mistakes(options, run, teacher, tmp_path, refused):
    argv = [run, "--teacher", teacher, "--output", tmp_path / "a.png", *options.split()]
    assert_says(refused("alignment", *argv), MISTAKES[options])


def test_what_cannot_be_compared(trained, teacher, tmp_path, refused):
    output = ["--output", tmp_path / "a.png"]
    classifier = trained("cls", 2)
    said = refused("alignment", classifier, "--teacher", teacher, *output)
    assert_says(said, f"{classifier}/ema.safetensors classifier train_dit.py")
    without = trained("dit", 1, "--label_drop", "0")
    said = refused("alignment", without, "--teacher", teacher, *output)
    assert_says(said, f"{without} label_drop 0")
    file = tmp_path / "a.pt"
    torch.save(timm.create_model("dit_small_patch2", img_size=8, in_chans=1).state_dict(), file)
    assert_says(refused("alignment", file, "--teacher", teacher, *output), f"{file} --model")
