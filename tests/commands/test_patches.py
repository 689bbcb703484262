"""The command patches, which draws for one image which heads each patch runs."""

import json
import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits

from moh_vision import load_run
from moh_vision.commands import patches

# Images have 4 x 6 patches.
SIZES = dict(img_size=(16, 24), patch_size=4, embed_dim=48, num_heads=6, depth=2, num_classes=3)


def vit(**kwargs):
    return timm.create_model(
        "moh_vit_tiny_patch16_224", **{**SIZES, "head_budget": [(2, 2), (1, 2)], **kwargs}
    ).eval()


def pyramid():
    sizes = dict(
        embed_dims=(24, 24, 48, 48), num_heads=(2, 2, 4, 4), depths=(1, 1, 1, 2), img_size=(64, 96)
    )
    return timm.create_model(
        "moh_transnext_base_50", **sizes, head_budget=[(1, 1), (1, 1), (1, 2), (2, 1)]
    ).eval()


@pytest.mark.parametrize(
    "tokens",
    [{}, dict(reg_tokens=3), dict(class_token=False, global_pool="avg")],
    ids=["class token", "registers", "patches only"],
)
@pytest.mark.parametrize("row, column", [(0, 5), (2, 1)])
def test_a_patch_has_its_position_in_the_image(tokens, row, column):
    """Gates of the first layer depend on the token's own patch only, so a changed patch changes them at its position."""
    model = vit(**tokens)
    image = torch.randn(3, 16, 24)
    other = image.clone()
    other[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
    one, two = (patches.patch_heads(model, x)[0] for x in (image, other))
    changed = (one.gates != two.gates).any(0)
    assert changed.shape == (4, 6) and changed.nonzero().tolist() == [[row, column]]
    assert one.shared == 2 and one.active.sum(0).unique().tolist() == [4]
    assert not one.gates[~one.active].any()


def test_stages_have_grids_of_their_own():
    model = pyramid()
    image = torch.randn(3, 64, 96)
    found = patches.patch_heads(model, image)
    shapes = [tuple(heads.gates.shape) for heads in found]  # [heads, rows, columns]
    assert shapes == [(2, 16, 24), (2, 8, 12), (4, 4, 6), (4, 2, 3), (4, 2, 3)]
    # Changes 2 x 2 patches of the first stage, and their neighbours, which its overlapping convolution reaches.
    other = image.clone()
    other[:, :8, 88:] += 1
    changed = (found[0].gates != patches.patch_heads(model, other)[0].gates).any(0).nonzero()
    assert len(changed) and changed[:, 0].max() <= 2 and changed[:, 1].min() >= 21


def test_figures_have_a_map_per_head_and_mark_what_is_off():
    """The map of a head, drawn over a grey image, has a colour only at the patches that run the head."""
    model = vit()
    image = torch.randn(3, 16, 24)
    seen = np.full((16, 24, 3), 0.5)
    heads = patches.patch_heads(model, image)[0]
    figure = patches.draw_patch_heads([(0, heads)], seen, "title")
    cells = [axes for axes in figure.axes if axes.get_title()]
    assert [cell.get_title().partition(":")[0] for cell in cells] == [
        "image",
        *(f"head {i}" for i in range(6)),
    ]
    figure.canvas.draw()
    for cell, active in zip(cells[1:], heads.active):
        shown = cell.images[1].to_rgba(cell.images[1].get_array())  # [4, 6, 4]
        assert np.array_equal(shown[..., :3].any(-1), active.numpy())


@pytest.fixture(scope="module")
def run(trained):
    """A run of one step on digits, with 4 x 4 patches, whose last layer runs all heads."""
    return trained("cls", 1, "--model.head_budget", "[[1, 3], [8, 0]]")


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    """A folder with a dense run, an image in and outside of the folder of its class, and the config.yaml of a text run."""
    folder = tmp_path_factory.mktemp("patches")
    dense = trained("cls", 1, "--model.router", "dense", "--model.head_budget", "null")
    (folder / "dense").symlink_to(dense)
    (folder / "0").mkdir()
    for name in ("zero.png", "0/zero.png"):
        Image.fromarray((load_digits().images[0] * 15.9).astype(np.uint8)).save(folder / name)
    (folder / "text").mkdir()
    (folder / "text" / "config.yaml").write_text("kind: text\n")
    return folder


def test_the_command(run, folder, tmp_path, run_command):
    """Layers whose tokens choose heads are drawn, and the title has the predicted and the true class."""
    image = folder / "0" / "zero.png"
    code, said, _ = run_command(
        "patches", run, "--image", image, "--output", tmp_path / "heads.svg"
    )
    assert code == 0 and f"heads of 1 of 2 layers, weights of {run / 'ema.safetensors'}\n" in said
    numbers = json.loads((tmp_path / "heads.json").read_text())
    (layer,) = numbers.pop("layers")
    gates = np.array(layer["gates"], dtype=float)  # null where a head does not run
    assert layer["layer"] == 0 and gates.shape == (8, 4, 4)
    assert np.isfinite(gates).sum(0).tolist() == [[4] * 4] * 4
    np.testing.assert_allclose(np.isfinite(gates).mean((1, 2)), layer["share_of_patches"])
    x = torch.tensor(np.asarray(Image.open(image)))[None] / 255
    model = load_run(run)
    normal = (x - model.pretrained_cfg["mean"][0]) / model.pretrained_cfg["std"][0]
    np.testing.assert_allclose(
        patches.as_seen(normal, model.pretrained_cfg), np.stack([x[0]] * 3, -1), atol=1e-6
    )
    with torch.no_grad():
        likely = model(normal[None])[0].softmax(-1)
    assert numbers["probability"] == pytest.approx(likely.max().item(), rel=1e-5)
    assert (numbers["predicted"], numbers["true"]) == (str(int(likely.argmax())), "0")
    drawn = (tmp_path / "heads.svg").read_text()
    assert "cls, 75 % of the heads: zero.png" in drawn
    assert f"predicted class {likely.argmax()} ({100 * likely.max():.1f} %), true class 0" in drawn
    argv = ["--image", folder / "zero.png", "--layer", "1", "--output", tmp_path / "last.png"]
    assert run_command("patches", run, *argv).code == 0
    numbers = json.loads((tmp_path / "last.json").read_text())
    assert numbers["true"] is None and numbers["layers"][0]["layer"] == 1
    assert Image.open(tmp_path / "last.png").size[0] > 600


def test_gates_of_heads_that_all_run_are_drawn(trained, folder, tmp_path, run_command):
    gated = trained("cls", 2, "--model.router", "gated", "--model.head_budget", "null")
    argv = ["--image", folder / "zero.png", "--output", tmp_path / "gates.png"]
    assert run_command("patches", gated / "model.safetensors", *argv).code == 0
    for layer in json.loads((tmp_path / "gates.json").read_text())["layers"]:
        gates = np.array(layer["gates"], dtype=float)  # [H, rows, columns]
        assert gates.shape == (8, 4, 4) and gates.min() > 0 and gates.max() < 2
        assert (gates != 1).any() and layer["share_of_patches"] == [1] * 8


def test_the_true_class_is_known_in_folders_of_a_mac():
    """A Mac writes the umlaut of a folder's name as two characters."""
    metadata = dict(weights="w.pth", architecture="vit", img_size=16)
    metadata["classes"] = ["ant", "Übersee", "bee"]
    bare = SimpleNamespace(brings_model=False)
    opened = SimpleNamespace(model=vit(), metadata=metadata, weights=bare)
    file = unicodedata.normalize("NFD", "/images/Übersee/0.png")
    assert patches.classified(opened, torch.zeros(3, 16, 24), file)[0]["true"] == "Übersee"
