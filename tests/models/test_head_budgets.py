"""Weights that carry routers decide which heads are shared; how many run can be lowered while they are loaded."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file

import moh_vision
from moh_vision.models.weights import create, from_run, init_from

CLASSES = dict(num_classes=3, img_size=16)
FAMILIES = {
    "moh_vit_small_patch16_224": dict(CLASSES, patch_size=8, embed_dim=48, num_heads=12, depth=4),
    "moh_transnext_small_75": dict(CLASSES, img_size=64, depths=(1, 1, 1, 2), embed_dims=(12, 12, 24, 48)),
    "moh_dit_small_patch2_75": dict(CLASSES, img_size=8, embed_dim=48, num_heads=12, depth=4),
}
TRAINED, LOWER = "uniform:0.75:0.35", "uniform:0.5"
family = pytest.mark.parametrize("name", FAMILIES)


def trained(name, spec=TRAINED, **kwargs):
    model = timm.create_model(name, **{**FAMILIES[name], **kwargs}, head_budget=spec).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def save_run(model, name, file, **arguments):
    """As a run writes its weights."""
    kind = "diffusion" if "dit" in name else "classifier"
    about = dict(architecture=name, arguments={**FAMILIES[name], **arguments}, classes=["a", "b", "c"], config={})
    save_file(model.state_dict(), file, metadata={k: json.dumps(v) for k, v in about.items()})
    return kind


def pretrained(name, file, **kwargs):
    overlay = dict(file=str(file), num_classes=3)
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **FAMILIES[name], **kwargs).eval()


def same(model, other):
    assert moh_vision.head_budget(model) == moh_vision.head_budget(other)
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    return True


@family
def test_the_file_of_a_run(name, tmp_path):
    model = trained(name)
    save_run(model, name, tmp_path / "ema.safetensors", head_budget=TRAINED)
    assert same(pretrained(name, tmp_path / "ema.safetensors"), model)
    lower = pretrained(name, tmp_path / "ema.safetensors", head_budget=LOWER)
    assert same(lower, moh_vision.set_head_budget(model, LOWER))
    with pytest.raises(ValueError, match="layer 0: . heads are shared and stay so"):
        shared = [(b["heads"] - 1, 1) for b in moh_vision.head_budget(model)["layers"]]
        pretrained(name, tmp_path / "ema.safetensors", head_budget=shared)


@family
@pytest.mark.parametrize("kind", ["safetensors", "pth"])
def test_weights_alone(name, kind, tmp_path):
    model, file = trained(name), tmp_path / f"weights.{kind}"
    (save_file if kind == "safetensors" else torch.save)(model.state_dict(), file)
    loaded = [
        pretrained(name, file, head_budget=LOWER),
        timm.create_model(name, checkpoint_path=str(file), head_budget=LOWER, **FAMILIES[name]),
        moh_vision.load_checkpoint(timm.create_model(name, head_budget=LOWER, **FAMILIES[name]), file),
    ]
    moh_vision.set_head_budget(model, LOWER)
    assert all(same(other, model) for other in loaded)
    other = timm.create_model(name, head_budget="uniform:0.5:0.8", **FAMILIES[name])
    with pytest.raises(ValueError, match=f"{file}: head_budget 'uniform:0.5:0.8': the shared heads of a model stay"):
        moh_vision.load_checkpoint(other, file)


@family
def test_weights_without_shared_heads(name, tmp_path):
    model = trained(name, "uniform:0.75:0")
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    loaded = timm.create_model(name, head_budget="uniform:0.75", **FAMILIES[name])
    assert moh_vision.head_budget(loaded)["layers"][0]["shared"] > 0
    assert same(moh_vision.load_checkpoint(loaded, tmp_path / "weights.safetensors"), model)


@pytest.mark.parametrize("router", ["moh", "query_norm"])
def test_a_lower_share_of_what_timm_saved(router, tmp_path):
    model = trained("moh_vit_small_patch16_224", router=router)
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    lower = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, head_budget=LOWER)
    assert same(lower, moh_vision.set_head_budget(model, LOWER))
    timm.models.save_for_hf(lower, tmp_path / "lower", safe_serialization=True)
    assert same(timm.create_model(f"local-dir:{tmp_path / 'lower'}", pretrained=True), lower)
    anew = timm.create_model(f"local-dir:{tmp_path}", head_budget=LOWER)  # no weights, so nothing to keep
    assert moh_vision.head_budget(anew)["layers"][0]["shared"] == 2


@family
def test_a_run_from_a_run(name, tmp_path):
    """init_from with a lower share, and what is read of the new run."""
    model = trained(name)
    kind = save_run(model, name, tmp_path / "first.safetensors", head_budget=TRAINED)
    arguments = dict(FAMILIES[name], head_budget=LOWER)
    second = create(name, kind, **arguments)
    assert not init_from(second, str(tmp_path / "first.safetensors"))
    assert same(second, moh_vision.set_head_budget(model, LOWER))
    save_run(second, name, tmp_path / "second.safetensors", head_budget=LOWER)
    assert same(from_run(str(tmp_path / "second.safetensors"), kind)[0], second)


def test_dense_weights_keep_a_given_budget_and_run_all_heads_without(tmp_path):
    name = "moh_vit_small_patch16_224"
    dense = timm.create_model(name, router="dense", **FAMILIES[name])
    save_file(dense.state_dict(), tmp_path / "vit.safetensors")
    all_run = pretrained(name, tmp_path / "vit.safetensors")
    assert moh_vision.head_budget(all_run)["share"] == 1
    other = timm.create_model(name, head_budget="uniform:0.75:0.2", **FAMILIES[name])  # fewer shared heads
    save_file(other.state_dict(), tmp_path / "moh.safetensors")
    assert moh_vision.head_budget(moh_vision.load_checkpoint(all_run, tmp_path / "moh.safetensors"))["share"] == 1
    given = pretrained(name, tmp_path / "vit.safetensors", head_budget=LOWER)
    assert moh_vision.head_budget(given)["share"] == 0.5
