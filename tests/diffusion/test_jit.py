"""JiT's published weights: sampled, converted and fine-tuned, against a loop written from the paper's equations.

z = t x + (1 - t) noise; the network gets t itself, 0 to 1, and predicts the image x; the velocity is (x - z) / (1 - t) with
a divisor of at least 0.05 (Li and He 2025).
"""

import argparse
import itertools
import re

import numpy as np
import pytest
import timm
import torch

import moh_vision
from moh_vision.common.seeds import derive_seed
from moh_vision.diffusion import FlowMatchingLoss, sample, train
from moh_vision.models import dit
from moh_vision.models.prediction import prediction_said
from moh_vision.models.weights import find_weights, load_checkpoint
from tests.support.covering import covering
from tests.support.jit_equations import CLASSES, SIZES, predicted_image, published_weights
from tests.support.pictures import write_folder
from tests.support.refusals import assert_says, refuse, refused
from tests.support.sampling import draws_the_same_when_converted
from tests.support.small_runs import same, whole_and_resumed
from tests.support.weights import init_from

STEPS = 10  # one begins at t = 0.1, where guidance does not yet apply
SMALL_BLOCKS = dict(embed_dim=32, depth=2, num_heads=4, class_tokens_start=1)
# Arguments that make a DiT's layers those of the small JiT.
BLOCK = dict(
    norm_layer="rmsnorm",
    swiglu_mlp=True,
    use_rot_pos_emb=True,
    qk_norm=True,
    class_tokens=SIZES["class_tokens"],
    class_tokens_start=SIZES["class_tokens_start"],
)


@pytest.fixture(scope="module")
def weights():
    return published_weights()


@pytest.fixture(scope="module")
def file(weights, tmp_path_factory):
    """As JiT's training script saves a checkpoint."""
    content = dict(
        model=published_weights(1),
        model_ema1=weights,
        model_ema2=published_weights(2),
        optimizer=dict(state={}),
        epoch=3,
        args=argparse.Namespace(blr=5e-5),
    )
    path = tmp_path_factory.mktemp("jit") / "checkpoint-last.pth"
    torch.save(content, path)
    return path


def jit(file, **more):
    return timm.create_model("jit_base_patch16", checkpoint_path=str(file), **SIZES, **more).eval()


@torch.no_grad()
def test_the_velocity_is_the_equations(weights, file):
    torch.manual_seed(0)
    z = torch.randn(4, 3, 8, 8)
    t = torch.tensor([0.0, 0.3, 0.97, 1.0])
    labels = torch.tensor([0, 2, 4, CLASSES])
    image = predicted_image(weights, z, t, labels)
    want = -(image - z) / (1 - t).clamp(min=0.05).view(
        -1, 1, 1, 1
    )  # ours runs from the image to the noise
    got = jit(file).double()(z.double(), 1000 * (1 - t), labels).sample
    # RMSNorm is computed in float32.
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def drawn_by_hand(weights, labels, scale, heun, noise_scale):
    """Euler's or Heun's method from t = 0 to 1 in equal steps, the last always Euler's; guided where t > 0.1."""

    def velocity(z, step):
        t = torch.full([len(labels)], step / STEPS, dtype=torch.float64)
        velocities = []
        for y in (torch.tensor(labels), torch.full([len(labels)], CLASSES)):
            image = predicted_image(weights, z, t, y)
            velocities.append((image - z) / max(1 - step / STEPS, 0.05))
        cond, uncond = velocities
        guidance = scale if step / STEPS > 0.1 else 1
        return uncond + guidance * (cond - uncond)

    generators = [torch.Generator().manual_seed(derive_seed(0, i)) for i in range(len(labels))]
    z = torch.stack([torch.randn(3, 8, 8, generator=g) for g in generators]).double()
    z = noise_scale * z
    for step in range(STEPS):
        v = velocity(z, step)
        if heun and step < STEPS - 1:
            v = (v + velocity(z + v / STEPS, step + 1)) / 2
        z = z + v / STEPS
    return z


@pytest.fixture
def small_variant(monkeypatch):
    for key, value in SIZES.items():
        if key in ("img_size", "num_classes"):  # which a command reads from the weights
            continue
        for name in ("jit_base_patch16", "jit_base_patch32"):
            monkeypatch.setitem(dit.VARIANTS[name], key, value)


def in_bytes(images):
    return ((images + 1) * 127.5).clamp(0, 255).round().permute(0, 2, 3, 1).numpy()


@torch.no_grad()
@pytest.mark.parametrize(
    "patch, scale, sampler", covering(itertools.product([16, 32], [1, 2], ["euler", "heun"]))
)
def test_sampled_images_equal_those_of_a_loop(
    weights, file, tmp_path, small_variant, patch, scale, sampler
):
    name = f"jit_base_patch{patch}"
    noise_scale = patch // 16
    argv = f"--checkpoint {file} --model {name} --num-images 3 --sampler {sampler} --steps {STEPS}"
    guidance = ["--cfg-scale", str(scale)]
    if scale > 1:
        guidance += ["--cfg-interval", "0", "0.9"]
    pipeline = ["--save-pipeline", f"{tmp_path}/pipeline"]
    sample.main([*argv.split(), *guidance, *pipeline, "--out", f"{tmp_path}/images.npz"])
    images = np.load(tmp_path / "images.npz")["arr_0"]
    by_hand = in_bytes(drawn_by_hand(weights, [0, 1, 2], scale, sampler == "heun", noise_scale))
    assert np.abs(images.astype(int) - by_hand).max() <= 1
    assert images.std() > 10
    argv = f"--checkpoint {tmp_path}/pipeline --num-images 3 --sampler {sampler} --steps {STEPS}"
    sample.main([*argv.split(), *guidance, "--out", f"{tmp_path}/again.npz"])
    assert np.array_equal(np.load(tmp_path / "again.npz")["arr_0"], images)


# What `weights` asks for -> the seed of the weights in `file`, and what is said of it.
HELD = {
    "ema": (0, "(ema, the first of two; weights ema2 is the second)"),
    "ema2": (2, "(ema2)"),
    "model": (1, "(model)"),
}


@pytest.mark.parametrize("asked", HELD)
def test_both_emas_of_a_checkpoint_are_read(file, tmp_path, small_variant, capsys, asked):
    seed, said = HELD[asked]
    positions = published_weights(seed)["net.in_context_posemb"]
    model = timm.create_model("jit_base_patch16", **SIZES)
    assert torch.equal(load_checkpoint(model, file, asked).class_positions, positions)
    opened = moh_vision.open_run(file, asked, name="jit_base_patch16")
    assert torch.equal(opened.model.class_positions, positions)
    argv = f"--checkpoint {file} --model jit_base_patch16 --num-images 2 --sampler euler --steps 1"
    sample.main([*argv.split(), "--weights", asked, "--out", f"{tmp_path}/images.npz"])
    assert f"{file} {said}" in capsys.readouterr().out


def test_a_second_ema_that_is_not_there(weights, file, tmp_path, small_variant):
    one = tmp_path / "one.pth"
    torch.save(dict(model_ema1=weights), one)
    model = jit(file)
    model.save_pretrained(tmp_path / "folder")
    refuse(f"{one} weights ema2 model_ema1 model_ema2", load_checkpoint, model, one, "ema2")
    for path in (tmp_path / "folder", next(tmp_path.glob("folder/*.safetensors"))):
        refuse(f"weights ema2 {path} second EMA JiT", load_checkpoint, model, path, "ema2")
    refuse("weights 'last' ema ema2 model", load_checkpoint, model, file, "last")


def test_what_the_model_saves_is_read_back(file, tmp_path):
    model = jit(file)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert (again.config.compat, again.prediction) == ("jit", model.prediction)
    saved = next(tmp_path.glob("*.safetensors"))
    assert same(saved, model) and same(jit(saved), model)


def test_converted_with_all_heads_it_draws_the_same_images(file):
    draws_the_same_when_converted(jit(file))


FLOW = "--objective flow --flow.predict x --data.img_size 8 --data.workers 0 --optim.batch_size 2".split()


def run_of(source, output, steps, photos, *more):
    argv = ["--data.root", photos, "--output", output, "--max-steps", steps, "--save-every", 1]
    argv += ["--log-every", 1, *FLOW, *source, *more]
    train.main([str(option) for option in argv])


def test_it_is_converted_and_fine_tuned(file, tmp_path, capsys):
    jit(file).save_pretrained(tmp_path / "folder")
    photos = write_folder(tmp_path / "photos", size=(8, 8))
    source = ["--model.name", "pretrained", "--model.pretrained", tmp_path / "folder"]
    source += ["--model.convert.router", "moh", "--model.head_budget", 0.5]
    run_of(source, tmp_path / "run", 2, photos)
    said = capsys.readouterr().out
    assert re.search(r"^jit_base_patch16 with .* 6 of 12 heads active \(50.0 %\)", said, re.M)
    assert "was trained with" not in said
    opened = moh_vision.open_run(tmp_path / "run")
    assert opened.model.config.compat == "jit"
    moved = opened.model.class_positions - jit(file).class_positions
    assert 0 < moved.abs().max() < 0.05


def test_a_run_goes_on_to_the_bit(tmp_path):
    sizes = "--model.name jit_base_patch16 --model.patch_size 2 --model.patch_bottleneck 4 --model.num_heads 4"
    kwargs = "--model.kwargs.class_tokens_start 1 --objective flow --flow.predict x"
    whole_and_resumed(
        "dit", tmp_path, [1, 2], "--model.head_budget", "null", *sizes.split(), *kwargs.split()
    )


def test_the_noise_of_512_pixels_stays_with_a_run(file, tmp_path, small_variant, capsys):
    """It is the model's, in the run, its weights, its pipeline, and what begins from them."""
    photos = write_folder(tmp_path / "photos", size=(8, 8))
    source = ["--model.name", "jit_base_patch32", "--init-from", file]
    preview = "--preview.every 1 --preview.images 2 --preview.steps 2".split()
    run_of(source, tmp_path / "run", 1, photos, *preview)
    opened = moh_vision.open_run(tmp_path / "run")
    config = opened.metadata["config"]
    assert (config["flow"]["noise_scale"], opened.model.prediction.noise_scale) == (2, 2)
    assert opened.objective.prediction == opened.model.prediction
    assert (tmp_path / "run" / "previews" / "step_1.png").is_file()
    run_of(source, tmp_path / "run", 2, photos, *preview)  # the same command goes on
    argv = f"--checkpoint {tmp_path}/run --num-images 0 --save-pipeline {tmp_path}/pipeline"
    sample.main(argv.split())
    for start in (["--init-from", tmp_path / "run"], ["--init-from", tmp_path / "pipeline"]):
        capsys.readouterr()
        run_of(["--model.name", "jit_base_patch16", *start], tmp_path / "new", 1, photos, "--fresh")
        said = re.findall("was trained (.*)", capsys.readouterr().out)
        before = "to predict x on path linear (in JiT's time, noise_scale 2)"
        assert said == [f"{before}, this model predicts x on path linear (in JiT's time)"]
    dense = dit_with_jits_layers()
    run_of([*dense, "--init-from", tmp_path / "pipeline"], tmp_path / "dit", 1, photos)
    assert f"{before}, this model predicts x on path linear\n" in capsys.readouterr().out
    source = ["--model.name", "pretrained", "--model.pretrained", tmp_path / "pipeline"]
    run_of(source, tmp_path / "from_pipeline", 1, photos)
    assert moh_vision.load_run(tmp_path / "from_pipeline").prediction.noise_scale == 2
    assert "was trained" not in capsys.readouterr().out
    source = ["--model.name", "jit_base_patch32", "--flow.noise_scale", 1]
    run_of(source, tmp_path / "asked", 1, photos)
    assert moh_vision.load_run(tmp_path / "asked").prediction.noise_scale == 1


def test_patches_of_32_have_the_noise_of_512_pixels(tmp_path, capsys):
    """A file of JiT's does not say its noise: its patches do."""
    for patch, noise_scale in ((16, 1), (32, 2)):
        variant = timm.create_model(f"jit_base_patch{patch}", **{**SMALL_BLOCKS, "num_classes": 2})
        config = variant.config
        assert (config.sample_size, config.patch_size) == (16 * patch, patch)
        assert variant.prediction.noise_scale == noise_scale
        state = published_weights()
        kernel = torch.zeros(SIZES["patch_bottleneck"], 3, patch, patch)
        torch.save({**state, "net.x_embedder.proj1.weight": kernel}, tmp_path / "file.pth")
        trained = find_weights(tmp_path / "file.pth").prediction
        assert trained == variant.prediction


def dit_with_jits_layers(**changed):
    options = ["--model.name", "dit_small_patch2", "--model.kwargs", str(BLOCK | changed)]
    for key in ("embed_dim", "depth", "num_heads", "patch_bottleneck"):
        options.append(f"--model.{key}={SIZES[key]}")
    return options


JITS = "to predict x on path linear (in JiT's time), this model predicts x on path linear"
# Weights, model -> what the run says of the weights.
ORIGINS = {
    "file, JiT": ("file", ["--model.name", "jit_base_patch16"], []),
    "file, DiT": ("file", dit_with_jits_layers(), [JITS]),
    "run, JiT": ("run", ["--model.name", "jit_base_patch16"], []),
    "run, DiT": ("run", dit_with_jits_layers(), [JITS]),
    "run, other blocks": (
        "run",
        ["--model.name", "jit_base_patch16", "--model.kwargs.class_tokens_start", "0"],
        ["with class_tokens_start 1, this model with 0 (model.kwargs)"],
    ),
    "file, no rotation": (
        "file",
        ["--model.name", "jit_base_patch16", "--model.kwargs.use_rot_pos_emb", "false"],
        ["with use_rot_pos_emb true, this model with false (model.kwargs)"],
    ),
}


@pytest.mark.parametrize("case", ORIGINS)
def test_a_line_says_if_weights_are_of_another_training(
    case, file, small_variant, tmp_path, capsys
):
    kind, model, lines = ORIGINS[case]
    photos = write_folder(tmp_path / "photos", size=(8, 8))
    source = file
    if kind == "run":
        source = tmp_path / "jit"
        run_of(["--model.name", "jit_base_patch16"], source, 1, photos)
    capsys.readouterr()
    run_of(model, tmp_path / "run", 1, photos, "--init-from", source)
    said = capsys.readouterr().out
    assert re.findall("was trained (.*)", said) == lines
    # The file has 5 classes, the photos 2.
    assert ("y_embedder.embedding_table.weight is made anew" in said) == (kind == "file")


def test_a_name_says_its_prediction():
    found = find_weights("jit_large_patch16")
    said = prediction_said(found.prediction, found.trained_arguments["compat"])
    assert said == "x on path linear (in JiT's time)"


def test_a_saved_model_of_any_size_is_a_source(tmp_path):
    """The patches must fit its own images, not those of the variant."""
    timm.create_model(
        "jit_base_patch16", **SIZES | dict(patch_size=6, img_size=24)
    ).save_pretrained(tmp_path)
    assert find_weights(tmp_path).build().config.sample_size == 24


def test_an_image_alone_is_predicted(file, tmp_path, capsys):
    photos = write_folder(tmp_path / "photos", size=(8, 8))
    argv = ["--data.root", photos, "--data.img_size", 8, "--output", tmp_path / "run"]
    argv += ["--model.name", "jit_base_patch16"]
    for more, objective in (([], "noise"), (["--objective", "flow"], "flow")):
        error = refused(capsys, train.main, *argv, *more)
        assert_says(error, f"objective {objective} jit_base_patch16 JiT flow flow.predict x")
    assert not (tmp_path / "run").exists()
    facts = "compat 'jit' x learn_sigma False velocity objective flow flow.predict x"
    velocity = FlowMatchingLoss.prediction
    refuse(facts, timm.create_model, "jit_base_patch16", **SIZES, prediction=velocity)


@pytest.mark.parametrize(
    "name, near",
    [
        ("JiT-B/16", "jit_base_patch16"),
        ("JiT-H/16", "jit_huge_patch16"),
        ("JiT-L/32", "jit_large_patch32"),
    ],
)
def test_a_name_that_a_reader_would_type(capsys, tmp_path, name, near):
    argv = ["--data.root", "digits", "--output", tmp_path / "run", "--model.name", name]
    error = refused(capsys, train.main, *argv)
    assert_says(error, f"model.name {name!r} {near}")


def test_weights_without_the_network_in_front(weights, tmp_path):
    """A plain state dict, and one that keeps the angles of its rotary positions."""
    plain = {name.removeprefix("net."): tensor for name, tensor in weights.items()}
    plain["feat_rope.freqs_cos"] = torch.zeros(16, 8)
    torch.save(plain, tmp_path / "plain.pt")
    model = timm.create_model("jit_base_patch16", **SIZES)
    init_from(model, str(tmp_path / "plain.pt"), lambda line: None)
    assert torch.equal(model.class_positions, weights["net.in_context_posemb"])
