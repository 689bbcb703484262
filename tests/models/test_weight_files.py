"""Weights in files, ours and as others write them, through every door; what does not fit is named.

Weights that carry routers decide which heads are shared; how many run can be lowered while they are loaded.
"""

import argparse
import copy
import json
import shlex

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import moh_vision
from moh_vision.models.creation import create
from moh_vision.models.weight_files import unpickling_problem
from moh_vision.models.weights import find_weights
from tests.support import official_dit as dit
from tests.support import small_runs
from tests.support import small_transnext as transnext
from tests.support.dense_vits import DEIT, SMALL, dense, images
from tests.support.refusals import one_line
from tests.support.weights import init_from

VIT = "moh_vit_small_patch16_224"
DOORS = ("load_checkpoint", "checkpoint_path", "overlay")


def load(door, name, file, **arguments):
    """A model of timm's registry with the weights of a file, by one of the three ways in."""
    if door == "load_checkpoint":
        return moh_vision.load_checkpoint(timm.create_model(name, **arguments), file).eval()
    if door == "checkpoint_path":
        return timm.create_model(name, checkpoint_path=str(file), **arguments).eval()
    overlay = dict(file=str(file), num_classes=arguments["num_classes"])
    return timm.create_model(
        name, pretrained=True, pretrained_cfg_overlay=overlay, **arguments
    ).eval()


ARGS = argparse.Namespace(model="DiT-S/2", lr=1e-4)


def official_dit(case, training):
    """Return a DiT as the training script saves it: the EMA is what the papers report."""
    name, arguments, sizes = dit.CASES[case]
    weights = dit.official_weights(**sizes)
    content = weights
    if training:
        last = dit.official_weights(**sizes, seed=1)
        content = dict(model=last, ema=weights, opt=dict(state={}), args=ARGS)
    return name, arguments, content, dit.INPUT, dit.official_forward(weights, **sizes).float()


def official_transnext():
    model = transnext.scramble(transnext.small())
    x = torch.randn(1, 3, 64, 64)
    content = dict(model=transnext.official_names(model), epoch=3, args=ARGS)
    arguments = dict(transnext.SMALL, head_budget=transnext.MIXED)
    return "moh_transnext_base_50", arguments, content, (x,), model(x)


def timms_vit(wrapped):
    """Return a dense ViT of timm: all heads run, with a budget of 1 and without one; routers come out as zero."""
    model = dense()
    x = images()
    content = model.state_dict()
    if wrapped:
        state = {f"module.{name}": tensor for name, tensor in content.items()}
        content = dict(state_dict=state, args=ARGS)
    return VIT, dict(SMALL, head_budget=1.0), content, (x,), model(x)


def compiled_vit(prefix, inner=""):
    """Return a ViT with the names that torch.compile and DDP give tensors, in either order; `inner`: of one block alone."""
    name, arguments, content, inputs, want = timms_vit(False)
    state = {}
    for key, tensor in content.items():
        state[prefix + key.replace("blocks.0.", f"blocks.0.{inner}")] = tensor
    return name, arguments, state, inputs, want


# Each returns a model's name, its arguments, the content of the file, the model's inputs, and its output.
LAYOUTS = {
    "DiT": lambda: official_dit("dense", False),
    "DiT, training": lambda: official_dit("dense", True),
    "DiT, routed": lambda: official_dit("zero routers", False),
    "MoH-DiT": lambda: official_dit("moh", False),
    "MoH-DiT, training": lambda: official_dit("moh", True),
    "MoH-ViT": official_transnext,
    "timm's ViT": lambda: timms_vit(False),
    "timm's ViT, wrapped": lambda: timms_vit(True),
    "compiled": lambda: compiled_vit("_orig_mod."),
    "compiled, wrapped, safetensors": lambda: compiled_vit("_orig_mod.module."),
    "wrapped, compiled, safetensors": lambda: compiled_vit("module._orig_mod."),
    "block compiled, safetensors": lambda: compiled_vit("", "_orig_mod."),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("door", DOORS)
@torch.no_grad()
def test_files_of_others_give_their_outputs(layout, door, tmp_path):
    if (layout, door) == ("block compiled, safetensors", "overlay"):
        pytest.skip("timm reads the file itself")
    name, arguments, content, inputs, want = LAYOUTS[layout]()
    if layout == "timm's ViT" or layout.endswith("safetensors"):
        file = tmp_path / "weights.safetensors"
        save_file(content, file, metadata={"format": "pt", "note": "not JSON"})
    else:
        file = tmp_path / "weights.pth"
        torch.save(content, file)
    output = load(door, name, file, **arguments)(*inputs)
    got = getattr(output, "sample", output)
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, atol=1e-5 * want.abs().max().item(), rtol=0)


def test_files_that_do_not_fit(tmp_path):
    """Nothing of such a file is loaded. Damaged files: tests/reliability/test_malformed_weights.py."""
    state = dense().state_dict()
    torch.save(dict(ema=state, args=tmp_path), tmp_path / "path.pth")
    torch.save(dict(model=state, best=np.float64(81.5)), tmp_path / "score.pth")
    scored = dict(model=state, best=np.float32(81.5))
    torch.save(scored, tmp_path / "old_score.pth", _use_new_zipfile_serialization=False)
    (tmp_path / "pointer.pth").write_text("version https://git-lfs.github.com/spec/v1\n")
    save_file(dense(num_classes=7).state_dict(), tmp_path / "classes.safetensors")
    save_file(dense(depth=2).state_dict(), tmp_path / "depth.safetensors")
    torch.save(dit.official_weights([4] * 3, 8), tmp_path / "dense.pt")
    weights = dit.official_weights(dit.HEADS, dit.D, dit.BUDGET)
    del weights["final_layer.linear.bias"]
    torch.save(weights, tmp_path / "less.pt")
    vit = timm.create_model(VIT, **SMALL)
    moh_dit = timm.create_model(dit.CASES["moh"][0], **dit.MOH)
    before = [copy.deepcopy(model.state_dict()) for model in (vit, moh_dit)]
    qkv = "blocks.0.attn.qkv.weight"
    missing = "1 missing final_layer.linear.bias 0 unexpected"
    for model, name, facts in (
        (vit, "path.pth", "pathlib.PosixPath code weights_only=False"),
        (vit, "score.pth", "scalar code weights_only=False"),
        (vit, "old_score.pth", "scalar code weights_only=False"),
        (vit, "pointer.pth", "readable tensors"),
        (vit, "classes.safetensors", "head.bias [7] [5]"),
        (vit, "depth.safetensors", "12 missing blocks.2.norm1.weight 0 unexpected"),
        (moh_dit, "dense.pt", f"{qkv} [96, 32] [48, 32]"),
        (moh_dit, "less.pt", missing),
    ):
        with one_line(f"{tmp_path}/{name} {facts}"):
            moh_vision.load_checkpoint(model, tmp_path / name)
    with one_line(f"{tmp_path}/less.pt {missing}"):
        load("checkpoint_path", dit.CASES["moh"][0], tmp_path / "less.pt", **dit.MOH)
    assert small_runs.same(vit, before[0]) and small_runs.same(moh_dit, before[1])


def test_what_a_message_says_of_other_objects_helps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = timm.create_model(VIT, **SMALL).state_dict()
    torch.save(dict(model=state, best=np.float64(81.5)), "score.pth")
    model = timm.create_model(VIT, **SMALL)
    with one_line("score.pth") as caught:
        moh_vision.load_checkpoint(model, "score.pth")
    assert str(caught.value).isprintable()
    command = str(caught.value).partition(": python -c ")[2]
    (code,) = shlex.split(command)
    exec(code, {})
    moh_vision.load_checkpoint(model, "weights.pth")
    assert small_runs.same(model, state)


def test_timms_own_models_load_as_before(tmp_path):
    model = timm.create_model("resnet10t", num_classes=3)
    file = tmp_path / "theirs.pth"
    torch.save(dict(state_dict=model.state_dict()), file)
    loaded = timm.create_model("resnet10t", num_classes=3, checkpoint_path=str(file))
    assert small_runs.same(loaded, model)


def test_the_head_of_distillation_follows_the_classes(tmp_path):
    save_file(dense(DEIT).state_dict(), tmp_path / "dense.safetensors")
    model = timm.create_model("moh_vit", base=DEIT, **{**SMALL, "num_classes": 7})
    said = []
    init_from(model, str(tmp_path / "dense.safetensors"), said.append)
    assert "init_from: head_dist.weight is made anew, [5, 48] -> [7, 48]" in said


CLASSES = dict(num_classes=3, img_size=16)
FAMILIES = {
    VIT: dict(CLASSES, patch_size=8, embed_dim=48, num_heads=12, depth=4),
    "moh_transnext_small_75": dict(
        CLASSES, img_size=64, depths=(1, 1, 1, 2), embed_dims=(12, 12, 24, 48)
    ),
    "moh_dit_small_patch2_75": dict(CLASSES, img_size=8, embed_dim=48, num_heads=12, depth=4),
}
TRAINED = "uniform:0.75:0.35"
LOWER = "uniform:0.5"
family = pytest.mark.parametrize("name", FAMILIES)


def trained(name, spec=TRAINED, **kwargs):
    model = timm.create_model(name, **{**FAMILIES[name], **kwargs}, head_budget=spec).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def save_run(model, name, file, **arguments):
    """Write weights as a run does, and return the task of the model."""
    record = dict(
        architecture=name,
        arguments={**FAMILIES[name], **arguments},
        classes=["a", "b", "c"],
        config={},
    )
    metadata = {key: json.dumps(value) for key, value in record.items()}
    save_file(model.state_dict(), file, metadata=metadata)
    return "diffusion" if "dit" in name else "classification"


def pretrained(name, file, **kwargs):
    return load("overlay", name, file, **FAMILIES[name], **kwargs)


def same(model, other):
    """Whether their budgets and weights are equal."""
    same_budget = moh_vision.head_budget(model) == moh_vision.head_budget(other)
    return same_budget and small_runs.same(model, other)


@family
def test_a_run_and_a_run_from_it(name, tmp_path):
    """The file of a run, with its budget and a lower one; init_from with a lower share, and what is read of the new run."""
    model = trained(name)
    first = tmp_path / "ema.safetensors"
    second = tmp_path / "second.safetensors"
    task = save_run(model, name, first, head_budget=TRAINED)
    assert same(pretrained(name, first), model)
    shared = [(layer["heads"] - 1, 1) for layer in moh_vision.head_budget(model)["layers"]]
    were = moh_vision.head_budget(model)["layers"][0]["shared"]
    with one_line(f"head_budget layer 0 {were} heads shared {shared[0][0]}"):
        pretrained(name, first, head_budget=shared)
    moh_vision.set_head_budget(model, LOWER)
    assert same(pretrained(name, first, head_budget=LOWER), model)
    new = create(name, task, **FAMILIES[name], head_budget=LOWER)
    assert not init_from(new, str(first)) and same(new, model)
    save_run(new, name, second, head_budget=LOWER)
    assert same(find_weights(str(second), wing=task).build(), new)


@family
@pytest.mark.parametrize("save, ending", [(save_file, "safetensors"), (torch.save, "pth")])
def test_weights_alone(name, save, ending, tmp_path):
    none_shared = trained(name, "uniform:0.75:0")
    model = trained(name)
    file = tmp_path / f"weights.{ending}"
    save(model.state_dict(), file)
    moh_vision.set_head_budget(model, LOWER)
    for door in DOORS:
        assert same(load(door, name, file, head_budget=LOWER, **FAMILIES[name]), model)
    with one_line(f"{file} head_budget 'uniform:0.5:0.8' shared stay 0.8"):
        load("load_checkpoint", name, file, head_budget="uniform:0.5:0.8", **FAMILIES[name])
    save(none_shared.state_dict(), file)
    loaded = load("load_checkpoint", name, file, head_budget="uniform:0.75", **FAMILIES[name])
    assert same(loaded, none_shared)


@pytest.mark.parametrize("router", ["moh", "query_norm"])
def test_a_lower_share_of_what_timm_saved(router, tmp_path):
    model = trained(VIT, router=router)
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    lower = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, head_budget=LOWER)
    assert same(lower, moh_vision.set_head_budget(model, LOWER))
    timm.models.save_for_hf(lower, tmp_path / "lower", safe_serialization=True)
    assert same(timm.create_model(f"local-dir:{tmp_path / 'lower'}", pretrained=True), lower)
    # Without weights there are no shared heads to keep.
    anew = timm.create_model(f"local-dir:{tmp_path}", head_budget=LOWER)
    assert moh_vision.head_budget(anew)["layers"][0]["shared"] == 2


def test_dense_weights_keep_a_given_budget_and_run_all_heads_without(tmp_path):
    name = VIT
    dense = timm.create_model(name, router="dense", **FAMILIES[name])
    save_file(dense.state_dict(), tmp_path / "vit.safetensors")
    all_run = pretrained(name, tmp_path / "vit.safetensors")
    assert moh_vision.head_budget(all_run)["share"] == 1
    fewer_shared = timm.create_model(name, head_budget="uniform:0.75:0.2", **FAMILIES[name])
    save_file(fewer_shared.state_dict(), tmp_path / "moh.safetensors")
    moh_vision.load_checkpoint(all_run, tmp_path / "moh.safetensors")
    assert moh_vision.head_budget(all_run)["share"] == 1
    given = pretrained(name, tmp_path / "vit.safetensors", head_budget=LOWER)
    assert moh_vision.head_budget(given)["share"] == 0.5


def test_a_message_quotes_no_whole_tensors(tmp_path):
    """torch prints what a damaged pickle calls as a function, such as all weights."""
    printed = f"WeightsUnpickler error: Trying to call reduce for {[0.5] * 5000}"
    problem = unpickling_problem(RuntimeError(f"Weights only load failed. {printed}"), tmp_path)
    assert "Trying to call reduce" in problem and len(problem) < 400
