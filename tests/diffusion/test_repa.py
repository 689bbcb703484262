"""REPA: the loss, whose weights it moves, runs with a teacher, teachers that do not fit."""

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from moh_vision.diffusion import train as train_dit
from moh_vision.diffusion.objectives import FlowMatchingLoss, HybridLoss
from moh_vision.diffusion.task import Alignment, DiffusionTask
from moh_vision.models.teachers import Teacher
from tests.support.refusals import assert_says, refuse, refused
from tests.support.small_runs import arguments, logged, whole_and_resumed

SIZES = dict(embed_dim=24, depth=1, num_heads=3, num_classes=0)


def saved(folder, seed=1, **sizes) -> str:
    torch.manual_seed(seed)
    model = timm.create_model("vit_tiny_patch16_224", **SIZES, **sizes)
    timm.models.save_for_hf(model, folder, model_args=dict(SIZES, **sizes))
    return f"local-dir:{folder}"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("t"), img_size=32, patch_size=8, in_chans=1)


@pytest.mark.parametrize(
    "objective, checkpointing", [(HybridLoss(), False), (FlowMatchingLoss(), True)]
)
def test_the_loss_moves_the_blocks_up_to_its_own(objective, checkpointing):
    torch.manual_seed(0)
    model = timm.create_model(
        "moh_dit_small_patch2_75", img_size=8, in_chans=1, num_classes=3, embed_dim=32, depth=3, num_heads=4,
        head_budget=[(1, 2)] * 3, learn_sigma=objective.learn_sigma,
    )  # fmt: skip
    for p in model.parameters():  # a new DiT's blocks are the identity
        p.requires_grad and torch.nn.init.normal_(p, std=0.1)
    if checkpointing:
        model.enable_gradient_checkpointing()
    alignment = Alignment(block=2, weight=0.3, width=32, teacher_width=5)
    assert [m.out_features for m in alignment.projector[::2]] == [128, 128, 5]
    assert Alignment(8, 0.5, 768, 5).projector[0].out_features == 2048
    x, noise, targets = torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8), torch.randn(2, 16, 5)
    batch = x, torch.tensor([0, 3]), torch.tensor([10, 500]), noise

    def gradients(task, *more):
        losses = task(*batch, *more)
        task.zero_grad()
        losses["loss"].backward()
        return losses, {
            name: p.grad.clone() for name, p in task.named_parameters() if p.grad is not None
        }

    task = DiffusionTask(model, 0.01, objective, alignment)
    plain, without = gradients(DiffusionTask(model, 0.01, objective))
    losses, found = gradients(task, targets)
    # DDP waits for the gradients of all.
    assert found.keys() == {name for name, p in task.named_parameters() if p.requires_grad}
    moved = {name for name in without if not torch.equal(without[name], found[name])}
    assert not any(name.startswith(("model.blocks.2.", "model.final_layer.")) for name in moved)
    for part in ("x_embedder", "blocks.0.attn.router", "blocks.1.attn.router", "blocks.1.mlp"):
        assert any(part in name for name in moved), part

    tokens = []
    model.forward_routed(objective.add_noise(x, noise, batch[2]), batch[2], batch[1], tokens=tokens)
    assert len(tokens) == 3
    projected = alignment.projector(tokens[1])
    pairs = zip(projected.flatten(0, 1), targets.flatten(0, 1), strict=True)
    cosines = [(p @ t / p.norm() / t.norm()).item() for p, t in pairs]
    assert losses["repa_loss"].item() == pytest.approx(1 - sum(cosines) / 32, abs=1e-5)
    added = (losses["loss"] - plain["loss"]).item()
    assert added == pytest.approx(0.3 * losses["repa_loss"].item(), abs=1e-5)
    assert losses["mse"] == plain["mse"]


def test_the_teacher_sees_images_of_the_size_that_its_patches_need(teacher):
    network = Teacher("repa.teacher", teacher, [0.5], [0.5])
    assert network.match_grid(3) == 24
    images = torch.rand(2, 1, 6, 6) * 2 - 1
    large = F.interpolate((images + 1) / 2, (24, 24), mode="bicubic", antialias=True)
    cfg = network.teacher.model.pretrained_cfg
    resized = timm.create_model(teacher, pretrained=True, img_size=24)  # positions of 3 x 3
    expected = resized.eval().forward_features((large - cfg["mean"][0]) / cfg["std"][0])[:, 1:]
    torch.testing.assert_close(network.tokens(images), expected)
    assert not any(p.requires_grad for p in network.parameters())


def test_a_run_goes_on_to_the_bit_and_its_weights_are_the_models(teacher, tmp_path):
    learn = ["--repa.teacher", teacher, "--repa.block", 2]
    learn += "--optim.schedule constant --optim.warmup_steps 0".split()
    whole, resumed = whole_and_resumed("dit", tmp_path, [3, 6], *learn)
    plain = tmp_path / "plain"
    train_dit.main(arguments("dit", plain, 1, 1))
    lines = logged(whole)
    # Draws and first weights are as without a teacher.
    assert lines[0]["mse"] == logged(plain)[0]["mse"]
    assert 0 < lines[-1]["repa_loss"] < lines[0]["repa_loss"] < 2
    weights = load_file(whole / "model.safetensors").keys()
    assert weights == load_file(whole / "ema.safetensors").keys()
    assert weights == load_file(plain / "model.safetensors").keys()
    states = [load_file(resumed / f"checkpoints/step_{step}/beside.safetensors") for step in (3, 6)]
    projector = states[0].keys()
    assert projector == {
        f"alignment.projector.{i}.{part}" for i in (0, 2, 4) for part in ("weight", "bias")
    }
    assert not any(torch.equal(states[0][name], states[1][name]) for name in projector)


def test_a_teacher_that_changed_between_two_starts_is_refused(tmp_path, capsys):
    sizes = dict(img_size=32, patch_size=8, in_chans=1)
    teacher = saved(tmp_path / "t", **sizes)
    run = tmp_path / "run"
    options = ["--repa.teacher", teacher, "--repa.block", 2]
    train_dit.main(arguments("dit", run, 1, 1, *options))
    saved(tmp_path / "t", **sizes, seed=2)
    said = refused(capsys, train_dit.main, *arguments("dit", run, 2, 1, *options))
    assert_says(said, f"repa.teacher {teacher} weights {run} sha256 frozen.json --allow-change")


def test_teachers_that_do_not_fit(teacher, tmp_path, capsys):
    def error(*argv):
        return refused(capsys, train_dit.main, *arguments("dit", tmp_path / "run", 1, 1, *argv))

    assert_says(error("--repa.teacher", teacher), "repa.block 8 1 2 blocks")
    said = error("--repa.teacher", "vit_tniy", "--repa.block", 1)
    assert_says(said, "repa.teacher vit_tniy davit_tiny")
    none = Teacher("repa.teacher", teacher, [0.5], [0.5])
    del none.teacher.model.feature_info
    facts = f"repa.teacher {teacher} features 4 patches AttributeError feature_info"
    refuse(facts, none.match_grid, 4)
    assert not (tmp_path / "run").exists()
