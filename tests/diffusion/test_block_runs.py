"""Runs of DiTs with JiT's block: resumed, published, trained for many shares, and what is said of rotary positions."""

import re

import pytest
import torch

import moh_vision
from moh_vision.__main__ import main as command
from moh_vision.attention import head_budget
from moh_vision.diffusion import MoHDiTPipeline, train
from tests.support.small_runs import arguments, whole_and_resumed

# Heads of width 8: the small run has 8 heads of width 4, with one frequency for rows and one for columns.
BLOCK = [
    "--model.num_heads=4",
    "--model.kwargs={norm_layer: rmsnorm, swiglu_mlp: true, use_rot_pos_emb: true, qk_norm: true, "
    "class_tokens: 3, class_tokens_start: 1}",
]


def forward(model):
    torch.manual_seed(0)
    images = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        return model(images, torch.tensor([10, 500, 999]), torch.tensor([0, 4, 10])).sample


def test_a_run_goes_on_to_the_bit_and_is_published(tmp_path, run_command):
    whole, _ = whole_and_resumed("dit", tmp_path, [1, 2], *BLOCK)
    model = moh_vision.load_run(whole).eval()
    config = model.config
    block = (config.norm_layer, config.swiglu_mlp, config.use_rot_pos_emb, config.qk_norm)
    assert block == ("rmsnorm", True, True, True)
    assert model.class_positions.shape == (1, 3, 32)
    code, _, _ = run_command("publish", whole, "--output", tmp_path / "published")
    assert code == 0
    card = (tmp_path / "published" / "README.md").read_text()
    assert "class_tokens 3, norm_layer rmsnorm, swiglu_mlp, use_rot_pos_emb, qk_norm" in card
    pipe = MoHDiTPipeline.from_pretrained(tmp_path / "published")
    assert torch.equal(forward(pipe.transformer), forward(model))
    half = MoHDiTPipeline.from_pretrained(tmp_path / "published", torch_dtype=torch.bfloat16)
    assert half.transformer.rotary_cos.dtype == torch.float32


def test_one_run_for_many_shares(tmp_path):
    shares = ["--budget_range", "0.5", "1", "--model.scope", "sample"]
    train.main(arguments("dit", tmp_path / "run", 3, 3, *BLOCK, *shares))
    model = moh_vision.load_run(tmp_path / "run")
    outputs = []
    for share in (0.5, 1.0):
        moh_vision.set_head_budget(model, share)
        assert head_budget(model)["share"] == share
        outputs.append(forward(model))
    assert not torch.equal(*outputs)


POSITIONS = {
    "rotary to none": ("true", "false", "true, this model with false (model.kwargs)"),
    "none to rotary": ("false", "true", "false, this model with true (model.kwargs)"),
    "rotary to rotary": ("true", "true", None),
}


def positions(rotary):
    return ["--model.num_heads=4", f"--model.kwargs={{use_rot_pos_emb: {rotary}}}"]


@pytest.fixture(scope="module")
def sources(trained, tmp_path_factory):
    """(rotary, published) -> a run with or without rotary positions, or the folder published of it."""
    found = {}
    for rotary in ("true", "false"):
        run = trained("dit", 1, *positions(rotary))
        folder = tmp_path_factory.mktemp("published") / rotary
        assert command(["publish", str(run), "--output", str(folder)]) == 0
        found |= {(rotary, False): run, (rotary, True): folder}
    return found


@pytest.mark.parametrize("case", POSITIONS)
@pytest.mark.parametrize("published", [False, True], ids=["run", "published"])
def test_a_line_says_if_weights_begin_at_other_positions(
    case, published, sources, tmp_path, capsys
):
    """No weight of a file differs, and every output does."""
    before, now, words = POSITIONS[case]
    source = sources[before, published]
    capsys.readouterr()
    options = [*positions(now), "--init-from", source]
    train.main(arguments("dit", tmp_path / "next", 1, 1, *options))
    found = re.search("was trained with use_rot_pos_emb (.*)", capsys.readouterr().out)
    assert (found and found[1]) == words
