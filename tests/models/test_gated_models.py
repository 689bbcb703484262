"""Models with the router "gated": dense to the bit at zero weights; saved and loaded, checkpointed, described, trained."""

import copy
import json

import pytest
import timm
import torch
from safetensors.torch import save_file

import moh_vision
from moh_vision.attention import attention_layers
from moh_vision.classification import train as train_cls
from moh_vision.language.models.create import create_text_model
from moh_vision.models.describe import describe, in_short
from tests.support import text_tiny
from tests.support.families import FAMILIES, awake
from tests.support.official_dit import diffusers_dit
from tests.support.refusals import assert_says, refuse, refused

# Name -> family of `FAMILIES`, and options of the model.
MODELS = {
    "vit": ("vit", {}),
    "vit, sample": ("vit", dict(scope="sample")),
    "vit, one key-value head": ("vit", dict(kv_heads=1)),
    "transnext": ("transnext", {}),
    "dit": ("dit", {}),
    "dit, sample": ("dit", dict(scope="sample")),
    "dit, timestep": ("dit", dict(scope="sample", route_by="timestep")),
}
# What our own models can be converted to.
OURS = {name: options for name, (family, options) in MODELS.items() if family != "transnext"}
TINY_TEXT = ["mt_transformer_base", "mlm_base", "clm_wt103_base"]
QUICK = (
    "--data.root digits --data.workers 0 --optim.batch_size 8 --max-steps 2 --log-every 1 "
    "--data.augment none --optim.schedule constant"
).split()
SMALL_RUN = (
    "--model.embed_dim 32 --model.num_heads 4 --model.depth 2 --model.patch_size 4 "
    "--data.img_size 8 --model.kwargs.in_chans 1"
).split()


def output(model, inputs):
    with torch.no_grad():
        y = model(*inputs)
    return y if isinstance(y, torch.Tensor) else y[0]


def dense_and_gated(name):
    """Return a dense model with random weights, a gated one with random gates, and the inputs of a batch of two."""
    family, options = MODELS[name]
    plain = {key: value for key, value in options.items() if key == "kv_heads"}
    dense, inputs = FAMILIES[family]("dense", **plain)
    gated, _ = FAMILIES[family]("gated", **options)
    inputs = [torch.cat([x, x.flip(-1)]) for x in inputs]
    return awake(dense, 0.3), awake(gated, 0.3), inputs


def save_weights(model, file):
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, file)


@pytest.mark.parametrize("name", MODELS)
def test_dense_weights_are_the_dense_model_to_the_bit(name, tmp_path):
    dense, gated, inputs = dense_and_gated(name)
    want = output(dense, inputs)
    save_weights(dense, tmp_path / "dense.safetensors")
    moh_vision.load_checkpoint(gated, tmp_path / "dense.safetensors")
    assert torch.equal(output(gated, inputs), want)
    for layer in attention_layers(gated):
        torch.nn.init.normal_(layer.router.gate.weight)
    assert not torch.allclose(output(gated, inputs), want)


@pytest.mark.parametrize("name", MODELS)
def test_a_new_model_has_zero_gates(name):
    family, options = MODELS[name]
    model, _ = FAMILIES[family]("gated", **options)
    layers = attention_layers(model)
    assert not any(layer.router.gate.weight.any() for layer in layers)
    assert all(layer.router.gate.weight.shape == (layer.num_heads, layer.dim) for layer in layers)


@pytest.mark.parametrize("name", OURS)
def test_converted_is_the_dense_model_to_the_bit(name):
    dense, _, inputs = dense_and_gated(name)
    want = output(dense, inputs)
    scope = OURS[name].get("scope", "token")
    gated = moh_vision.convert(copy.deepcopy(dense), router="gated", scope=scope)
    assert torch.equal(output(gated, inputs), want)
    assert moh_vision.head_budget(gated)["share"] == 1


def test_a_dit_of_diffusers_is_converted_to_the_same_output():
    dense = diffusers_dit(in_channels=3, out_channels=6, num_layers=2, num_embeds_ada_norm=10)
    x = torch.randn(2, 3, dense.config.sample_size, dense.config.sample_size)
    inputs = x, torch.tensor([3, 500]), torch.tensor([1, 9])
    plain = moh_vision.convert(copy.deepcopy(dense), router="dense")
    gated = moh_vision.convert(copy.deepcopy(dense), router="gated")
    assert torch.equal(output(gated, inputs), output(plain, inputs))


@pytest.mark.parametrize("name", MODELS)
def test_saved_and_loaded(name, tmp_path):
    """By timm or diffusers with the router, and into a new model by `load_checkpoint`."""
    _, gated, inputs = dense_and_gated(name)
    want = output(gated, inputs)
    if "dit" in name:
        gated.save_pretrained(tmp_path / "saved")
        again = type(gated).from_pretrained(tmp_path / "saved").eval()
    else:
        timm.models.save_for_hf(gated, tmp_path / "saved", safe_serialization=True)
        again = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True).eval()
    assert torch.equal(output(again, inputs), want)
    save_weights(gated, tmp_path / "model.safetensors")
    family, options = MODELS[name]
    new, _ = FAMILIES[family]("gated", **options)
    moh_vision.load_checkpoint(new, tmp_path / "model.safetensors")
    assert torch.equal(output(new, inputs), want)


@pytest.mark.parametrize("name", MODELS)
def test_activation_checkpointing_changes_nothing(name):
    _, gated, inputs = dense_and_gated(name)
    gradients = []
    for checkpointing in (False, True):
        gated.zero_grad()
        if "dit" not in name:
            gated.train().set_grad_checkpointing(checkpointing)
        elif checkpointing:
            gated.train().enable_gradient_checkpointing()
        y, stats = gated.forward_routed(*inputs)
        (y if isinstance(y, torch.Tensor) else y[0]).square().mean().backward()
        gradients.append([p.grad.clone() for p in gated.parameters() if p.grad is not None])
        assert all(s.probs.shape[-1] == 0 for s in stats)
    assert len(gradients[0]) == len(gradients[1]) and all(map(torch.equal, *gradients))
    assert all(layer.router.gate.weight.grad.norm() > 0 for layer in attention_layers(gated))


@pytest.mark.parametrize("preset", TINY_TEXT)
def test_text_models_with_zero_gates_are_dense_to_the_bit(preset):
    dense = text_tiny.tiny(preset, "dense")
    gated = text_tiny.tiny(preset, "gated")
    missing, unexpected = gated.load_state_dict(dense.state_dict(), strict=False)
    assert not unexpected and all(name.endswith(".router.gate.weight") for name in missing)
    for layer in attention_layers(gated):
        layer.router.init_weights()
    words = text_tiny.words(2, 6)
    inputs = dict(input_ids=words)
    if preset.startswith("mt_"):
        inputs["decoder_input_ids"] = words[:, :4]
    with torch.no_grad():
        assert torch.equal(gated(**inputs)[0], dense(**inputs)[0])


@pytest.mark.parametrize("preset", TINY_TEXT)
def test_a_new_text_model_has_zero_gates(preset):
    fields = {**text_tiny.TINY, **text_tiny.DEPTH[preset]}
    model = create_text_model(preset, attention=dict(router="gated"), **fields)
    assert not any(layer.router.gate.weight.any() for layer in attention_layers(model))


def vit(**options):
    return FAMILIES["vit"]("gated", **options)[0]


def dit(**options):
    return FAMILIES["dit"]("gated", **options)[0]


def text(**options):
    return text_tiny.tiny("mlm_base", {"router": "gated", **options})


# Name -> call that gives a head_budget, and facts of the refusal.
BUDGETS = {
    "vit": (lambda: vit(head_budget=0.5), "router 'gated' 6 heads 2 head_budget"),
    "dit": (lambda: dit(head_budget=0.5), "router 'gated' 4 heads 1 head_budget"),
    "text": (
        lambda: text(head_budget=0.5),
        "attention router 'gated' 'head_budget' bias executor",
    ),
    "set_head_budget": (
        lambda: moh_vision.set_head_budget(vit(), 0.5),
        "head_budget 'ramp:0.5' no routed heads moh_vision.convert",
    ),
}


@pytest.mark.parametrize("case", BUDGETS)
def test_a_head_budget_is_refused(case):
    call, facts = BUDGETS[case]
    refuse(facts, call)


def test_it_is_described():
    line = "gated: a gate from 0 to 2 weighs each head, and every head runs"
    model, inputs = FAMILIES["vit"]("gated")
    assert line in describe("x", model, *inputs).splitlines()
    assert in_short("x", model).endswith(f"active (100.0 %); {line}")
    dense, _ = FAMILIES["vit"]("dense")
    assert "gate" not in describe("x", dense, *inputs)


@pytest.mark.parametrize("router", ["gated", "mae"])
def test_a_run_is_a_pretrained_source_with_its_gates(router, tmp_path, capsys):
    """Its router stays, and convert refuses it."""
    argv = [*QUICK, *SMALL_RUN, "--model.router", router]
    train_cls.main([*argv, "--output", f"{tmp_path}/first"])
    lines = (tmp_path / "first/metrics.jsonl").read_text().splitlines()
    steps = [entry for entry in map(json.loads, lines) if "balance_loss" in entry]
    assert steps and all(entry["balance_loss"] == 0 for entry in steps)
    first = moh_vision.load_run(tmp_path / "first")
    on = [*QUICK, "--model.name", "pretrained", "--model.pretrained", f"{tmp_path}/first"]
    still = ["--optim.lr", "1e-12", "--optim.weight_decay", "0"]
    train_cls.main([*on, *still, "--output", f"{tmp_path}/second"])
    second = moh_vision.load_run(tmp_path / "second")
    assert [type(layer.router) for layer in attention_layers(second)] == [
        type(layer.router) for layer in attention_layers(first)
    ]
    weights = second.state_dict()
    for name, before in first.state_dict().items():
        if (
            router == "gated" or ".router." not in name
        ):  # MAE's gates have a learning rate of their own
            torch.testing.assert_close(weights[name], before, rtol=1e-4, atol=1e-6)
    on += ["--model.convert.router", "moh", "--output", f"{tmp_path}/third"]
    facts = f"model.convert model.pretrained {tmp_path}/first routed already"
    assert_says(refused(capsys, train_cls.main, *on), facts)
