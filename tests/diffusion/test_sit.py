"""SiT's published weights: sampled, scored, converted and fine-tuned, against a loop written from the paper's equations.

x_t = t x_1 + (1 - t) x_0, noise x_0 and data x_1; the network gets t itself, 0 to 1, and predicts x_1 - x_0 in the first
half of its output channels (Ma 2024, and the released models.py and transport.py).
"""

import argparse
import re

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file

import moh_vision
from moh_vision.common.seeds import derive_seed
from moh_vision.diffusion import FlowMatchingLoss, MoHDiTPipeline, make_scheduler, sample, train
from moh_vision.diffusion.config import DitConfig
from moh_vision.diffusion.sampling import to_uint8
from moh_vision.diffusion.task import DiffusionTask
from moh_vision.engine.command_line import parse_config
from moh_vision.models import dit
from moh_vision.models.creation import arguments_of
from moh_vision.models.prediction import prediction_said
from moh_vision.models.weights import find_weights
from tests.support.official_dit import CLASSES, DENSE, official_forward, official_weights
from tests.support.paths import ROOT
from tests.support.refusals import assert_says, refuse, refused
from tests.support.sampling import (
    JUDGE,
    JUDGE_SIZES,
    draws_the_same_when_converted,
    exported,
)
from tests.support.small_runs import arguments, logged, same, whole_and_resumed
from tests.support.tiny_dit import awake
from tests.support.tiny_vae import save_tiny_vae
from tests.support.weights import init_from

SIZES = dict(heads=[4] * 3, head_dim=8)
STEPS = 5
# Of digits, with the sizes of the small run of train_dit.py.
SMALL = dict(img_size=8, in_chans=1, num_classes=10, embed_dim=32, depth=2, num_heads=8)
FLOW = "--objective flow --model.name sit_small_patch2".split()
FLOWS = FlowMatchingLoss.prediction


@pytest.fixture(scope="module")
def weights():
    state = official_weights(**SIZES)
    # Velocities of about the size of the noise: coordinates stay where float32 is exact enough.
    return {name: 0.5 * value if "final_layer" in name else value for name, value in state.items()}


@pytest.fixture(scope="module")
def file(weights, tmp_path_factory):
    """As SiT's training script saves a checkpoint."""
    last = official_weights(**SIZES, seed=1)
    content = dict(model=last, ema=weights, opt=dict(state={}), args=argparse.Namespace(lr=1e-4))
    path = tmp_path_factory.mktemp("sit") / "0400000.pt"
    torch.save(content, path)
    return path


def sit(file, **more):
    return timm.create_model("sit_small_patch2", checkpoint_path=str(file), **DENSE, **more).eval()


def drawn_by_hand(weights, labels, scale, sampler):
    """Euler's method from t = 0 to 1; guidance as in the released code: of the first three channels.

    "sde": of dx = (v + w s) dt + sqrt(2 w) dW with w = 1 - t and the score s, up to a last step along v. "sit-sde":
    with a last step of 0.04 along v + w s.
    """
    times = [step / STEPS for step in range(STEPS)] + [1]
    if sampler == "sit-sde":
        times = [0.96 * step / (STEPS - 1) for step in range(STEPS)] + [1]
    generators = [torch.Generator().manual_seed(derive_seed(0, i)) for i in range(len(labels))]
    x = torch.stack([torch.randn(4, 8, 8, generator=g) for g in generators]).double()
    for step in range(STEPS):
        t = torch.full([len(labels)], times[step], dtype=torch.float64)
        length = times[step + 1] - times[step]
        velocities = []
        for y in (torch.tensor(labels), torch.full([len(labels)], CLASSES)):
            output = official_forward(weights, **SIZES, inputs=(x, t, y))
            velocities.append(output[:, :4])
        cond, uncond = velocities
        v = cond.clone()
        v[:, :3] = uncond[:, :3] + scale * (cond[:, :3] - uncond[:, :3])
        left = 1 - times[step]
        last = step == STEPS - 1
        if sampler == "euler" or (sampler == "sde" and last):
            x = x + length * v
            continue
        score = ((1 - left) * v - x) / left
        x = x + length * (v + left * score)
        if not last:
            z = torch.stack([torch.randn(4, 8, 8, generator=g) for g in generators])
            x = x + (2 * left * length) ** 0.5 * z
    return x


@pytest.mark.parametrize("sampler", ["euler", "sde", "sit-sde"])
@pytest.mark.parametrize("scale", [1, 2])
def test_sampled_images_equal_those_of_a_loop(weights, file, tmp_path, monkeypatch, scale, sampler):
    for key, value in dict(embed_dim=32, depth=3, num_heads=4).items():
        monkeypatch.setitem(dit.VARIANTS["sit_small_patch2"], key, value)
    vae = save_tiny_vae(tmp_path / "vae", seed=5)
    argv = f"--checkpoint {file} --model sit_small_patch2 --vae {vae} --num-images 3 --sampler {sampler}"
    outputs = f"--out {tmp_path}/images.npz --save-pipeline {tmp_path}/pipe"
    sample.main(f"{argv} --steps {STEPS} --cfg-scale {scale} {outputs}".split())
    images = np.load(tmp_path / "images.npz")["arr_0"]

    want = drawn_by_hand(weights, [0, 1, 2], scale, sampler)
    pipe = MoHDiTPipeline.from_pretrained(tmp_path / "pipe")
    generators = [torch.Generator().manual_seed(derive_seed(0, i)) for i in range(3)]
    options = dict(num_inference_steps=STEPS, generator=generators, output_type="latent")
    latents = pipe([0, 1, 2], guidance_scale=scale, **options).images
    torch.testing.assert_close(latents.double(), want, atol=2e-4, rtol=2e-4)
    by_hand = to_uint8(pipe.decode(want.float())).permute(0, 2, 3, 1).numpy()
    assert np.abs(images.astype(int) - by_hand).max() <= 1
    assert images.std() > 10


def test_solvers_of_the_ode_come_near_to_each_other(file):
    model = sit(file)
    images = {}
    for sampler, steps in (("heun", 50), ("dopri5", 1), ("euler", 100), ("euler", 25)):
        pipe = MoHDiTPipeline(model, make_scheduler(sampler, steps, False, False))
        generators = [torch.Generator().manual_seed(i) for i in range(8)]
        options = dict(num_inference_steps=steps, generator=generators, output_type="latent")
        images[sampler, steps] = pipe([0] * 8, guidance_scale=1, **options).images
    exact = images["heun", 50]
    far, near = ((images["euler", steps] - exact).square().mean().sqrt() for steps in (25, 100))
    assert near < 0.3 * far and far < 0.05 * exact.std()
    assert (images["dopri5", 1] - exact).square().mean().sqrt() < 2e-3 * exact.std()


def test_files_of_either_layout_and_what_the_model_saves(weights, file, tmp_path):
    """With the unused channels and without; saved weights are read back as they are."""
    model = sit(file)
    assert model.final_layer.linear.weight.shape == (16, 32)
    half = dict(weights)
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        pixels, channels = 4, 8
        rows = torch.arange(pixels * channels)
        half[name] = weights[name][rows % channels < 4]
    torch.save(half, tmp_path / "half.pt")
    assert same(sit(tmp_path / "half.pt"), model) and same(model, half)
    model.save_pretrained(tmp_path / "folder")
    again = type(model).from_pretrained(tmp_path / "folder")
    assert again.config.compat == "sit"
    saved = next((tmp_path / "folder").glob("*.safetensors"))
    assert same(saved, model) and same(sit(saved), model)


def test_converted_with_all_heads_it_draws_the_same_images(file):
    draws_the_same_when_converted(sit(file))


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The file of a SiT on digits, and the DiT whose layers it has."""
    torch.manual_seed(0)
    network = awake(timm.create_model("dit_small_patch2", **SMALL)).eval()
    path = tmp_path_factory.mktemp("digits") / "sit.pt"
    torch.save(network.state_dict(), path)
    return path, network


def test_the_first_steps_loss_is_the_equations(digits, tmp_path, monkeypatch):
    path, network = digits
    batches = []
    forward = DiffusionTask.forward

    def watched(self, **batch):
        batches.append(batch)
        return forward(self, **batch)

    monkeypatch.setattr(DiffusionTask, "forward", watched)
    train.main(arguments("dit", tmp_path / "run", 1, 1, *FLOW, "--init-from", path))
    (batch,) = batches
    t = (1 - batch["timesteps"] / 1000).view(-1, 1, 1, 1)
    xt = t * batch["images"] + (1 - t) * batch["noise"]
    with torch.no_grad(), pytest.warns(UserWarning) as warned:
        output = network(xt, t.flatten(), batch["labels"]).sample
    assert_says(str(warned[0].message), "timestep 0 999")
    loss = (output[:, :1] - (batch["images"] - batch["noise"])).square().mean()
    assert logged(tmp_path / "run")[0]["mse"] == pytest.approx(loss.item(), rel=1e-4)


@pytest.fixture
def folder(digits, tmp_path):
    """The model of `digits`, saved as a folder that says its sizes and that it is a SiT."""
    model = timm.create_model("sit_small_patch2", checkpoint_path=str(digits[0]), **SMALL)
    model.save_pretrained(tmp_path / "folder")
    return tmp_path / "folder"


def test_it_is_converted_fine_tuned_to_the_bit_and_scored(folder, tmp_path, capsys):
    sizes = "--model.embed_dim null --model.depth null --model.num_heads null"
    convert = "--model.convert.router moh --model.head_budget 0.5 --calibrate-images 8"
    source = f"--model.name pretrained --model.pretrained {folder}"
    options = f"--objective flow {source} {sizes} {convert}".split()
    whole, resumed = whole_and_resumed("dit", tmp_path, [1, 2], *options)
    said = capsys.readouterr().out
    assert re.search(r"^sit_small_patch2 with .* 8 of 16 heads active \(50.0 %\)", said, re.M)
    assert "was trained to predict" not in said
    opened = moh_vision.open_run(whole)
    assert opened.model.config.compat == "sit"
    assert opened.objective.prediction == opened.model.prediction == FLOWS
    dense = load_file(next(folder.glob("*.safetensors")))
    moved = opened.model.blocks[0].mlp.fc1.weight - dense["blocks.0.mlp.fc1.weight"]
    assert 0 < moved.abs().max() < 0.05

    judge = tmp_path / "judge"
    judge.mkdir()
    images = dict(img_size=8, patch_size=2, in_chans=1)
    exported(judge, JUDGE, opened.metadata["classes"], **images, **JUDGE_SIZES)
    score = f"--score digits --extractor {judge}"
    sample.main(f"--checkpoint {resumed} --num-images 12 --steps 2 {score}".split())
    assert (resumed / "scores.json").is_file()


def test_a_line_says_if_weights_begin_in_another_time(digits, tmp_path, capsys):
    """The file of a SiT says nothing, and is taken for one if the model is one; a run and a pipeline say what they are."""

    def said(output, name, source):
        options = ["--objective", "flow", "--model.name", name, "--init-from", source]
        train.main(arguments("dit", tmp_path / output, 1, 1, *options))
        found = re.search("was trained to predict (.*)", capsys.readouterr().out)
        return found and found[1]

    run = tmp_path / "sit"
    assert said("sit", "sit_small_patch2", digits[0]) is None
    assert said("again", "sit_small_patch2", run) is None
    other = "velocity on path linear (in SiT's time), this model predicts velocity on path linear"
    assert said("dit", "dit_small_patch2", run) == other
    options = f"--num-images 0 --save-pipeline {tmp_path}/pipe"
    sample.main(f"--checkpoint {run} {options}".split())
    assert said("of_pipe", "dit_small_patch2", tmp_path / "pipe") == other
    backwards = (
        "velocity on path linear, this model predicts velocity on path linear (in SiT's time)"
    )
    assert said("back", "sit_small_patch2", tmp_path / "dit") == backwards


def test_rotary_positions_that_sits_file_lacks_are_said(digits, tmp_path, capsys):
    options = [*FLOW, "--model.num_heads", 4, "--model.kwargs.use_rot_pos_emb", "true"]
    train.main(arguments("dit", tmp_path / "run", 1, 1, *options, "--init-from", digits[0]))
    said = re.findall("was trained with (.*)", capsys.readouterr().out)
    assert said == ["use_rot_pos_emb false, this model with true (model.kwargs)"]


def test_what_is_left_out_is_said_and_files_of_repa_are_refused(file, tmp_path):
    said = []
    model = timm.create_model("sit_small_patch2", **DENSE)
    init_from(model, str(file), said.append)
    assert "init_from: final_layer.linear.weight is resized, [32, 32] -> [16, 32]" in said
    repa = dict(official_weights(**SIZES))
    repa["projectors.0.0.weight"] = torch.zeros(2, 2)
    torch.save(repa, tmp_path / "repa.pt")
    facts = f"init_from {tmp_path}/repa.pt {type(model).__name__} 0 missing 1 unexpected projectors.0.0.weight"
    refuse(facts, init_from, model, str(tmp_path / "repa.pt"))


@pytest.mark.parametrize("size", ["small", "base", "large", "xlarge"])
def test_the_dense_twin_that_a_configuration_names_reads_the_same_time(size):
    file = f"dit/moh_sit_{size}_patch2_75"
    config = parse_config(DitConfig, ["--config", file, "--data.root", "LATENTS"], "train_dit.py")
    text = (ROOT / f"configs/{file}.yaml").read_text()
    (twin,) = re.findall(r"dense baseline is SiT-\w+/2: --model.name (\w+)\.", text)
    assert twin == f"sit_{size}_patch2"
    assert arguments_of(twin, {})["compat"] == config.model.kwargs["compat"] == "sit"


# Arguments of a model that save_pretrained wrote -> the prediction that its folder says.
OF_SIT = "velocity on path linear (in SiT's time)"
SAVED = {
    "DDPM": (dict(), "noise on path ddpm"),
    "a flow": (dict(learn_sigma=False, prediction=FLOWS), "velocity on path linear"),
    "JiT": (
        dict(learn_sigma=False, prediction=FlowMatchingLoss("x").prediction),
        "x on path linear",
    ),
    "SiT": (dict(learn_sigma=False, prediction=FLOWS, compat="sit"), OF_SIT),
}


@pytest.mark.parametrize("model", SAVED)
def test_a_saved_folder_says_its_prediction(tmp_path, model):
    options, prediction = SAVED[model]
    dense = dict(embed_dim=32, depth=1, num_heads=4)
    timm.create_model("dit_small_patch2", **dense, **options).save_pretrained(tmp_path)
    assert prediction_of(tmp_path) == prediction


@pytest.mark.parametrize(
    "name, prediction",
    [
        ("sit_xlarge_patch2.in1k_256", OF_SIT),
        ("dit_xlarge_patch2.in1k_256", "noise on path ddpm"),
    ],
)
def test_a_name_says_its_prediction(name, prediction):
    assert prediction_of(name) == prediction


def prediction_of(source):
    found = find_weights(source)
    return prediction_said(found.prediction, found.trained_arguments.get("compat", "official"))


@pytest.mark.parametrize(
    "argv, facts",
    [
        pytest.param(
            "--model.name sit_small_patch2",
            "objective noise sit_small_patch2 SiT flow flow.predict velocity",
            id="noise",
        ),
        pytest.param(
            "--model.name sit_small_patch2 --learn_sigma false",
            "objective noise sit_small_patch2 SiT flow flow.predict velocity",
            id="noise alone",
        ),
        pytest.param(
            "--model.name sit_small_patch2 --objective flow --flow.predict x",
            "objective flow x sit_small_patch2 SiT flow.predict velocity",
            id="image",
        ),
        pytest.param(
            "--model.name dit_small_patch2 --model.kwargs.compat sit",
            "objective noise dit_small_patch2 SiT flow flow.predict velocity",
            id="argument",
        ),
        pytest.param(
            "--model.name dit_small_patch2 --model.kwargs.compat SiT --objective flow",
            "compat 'SiT' official diffusers sit jit",
            id="compat",
        ),
        pytest.param(
            "--model.name SiT-S/2 --objective flow",
            "model.name 'SiT-S/2' sit_small_patch2",
            id="name",
        ),
        pytest.param(
            "--model.name sit_small_patch2 --objective flow --preview.every 1 --preview.sampler ddim",
            "preview.sampler ddim velocity linear euler heun dopri5 sde sit-sde",
            id="preview",
        ),
    ],
)
def test_training_it_otherwise_is_refused(argv, facts, tmp_path, capsys):
    argv = arguments("dit", tmp_path / "run", 1, 1, "--model.head_budget", "null", *argv.split())
    assert_says(refused(capsys, train.main, *argv), facts)
    assert not list(tmp_path.iterdir())


SAMPLERS = "euler heun dopri5 sde sit-sde"


def test_samplers_of_noise_are_refused(file, tmp_path, monkeypatch, capsys):
    for key, value in dict(embed_dim=32, depth=3, num_heads=4).items():
        monkeypatch.setitem(dit.VARIANTS["sit_small_patch2"], key, value)
    vae = save_tiny_vae(tmp_path / "vae", seed=5)
    argv = f"--checkpoint {file} --model sit_small_patch2 --vae {vae} --grid {tmp_path}/never.png"
    for option in ("--sampler ddpm", "--protocol adm"):
        error = refused(capsys, sample.main, *argv.split(), *option.split())
        assert_says(error, f"--sampler ddpm velocity linear {SAMPLERS}")
    model = sit(file)
    facts = f"scheduler DDPMScheduler ddpm velocity linear {SAMPLERS}"
    refuse(facts, MoHDiTPipeline, model, make_scheduler("ddpm", 4, True, False))
    refuse("velocity learn_sigma", timm.create_model, "sit_small_patch2", **DENSE, learn_sigma=True)
    facts = "compat 'sit' velocity linear learn_sigma False x flow.predict"
    x = FlowMatchingLoss("x").prediction
    refuse(facts, timm.create_model, "sit_small_patch2", **DENSE, prediction=x)
