"""Linear layers that torchao has quantised, beside a model with the rounded weights, and diffusers' own DiT."""

import pytest
import torch
from diffusers import TorchAoConfig
from torch import nn

import moh_vision
from moh_vision.attention.executors import Masked
from moh_vision.attention.executors.groups import AllGroups
from moh_vision.diffusion import MoHDiTPipeline, make_scheduler
from moh_vision.models.dit_transformer import MoHDiTTransformer2DModel, from_diffusers
from tests.support.official_dit import diffusers_dit
from tests.support.pipelines import LABELS, WITH_HEADS, draw, predict, transformer
from tests.support.refusals import refuse

quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

# Those that a CPU computes.
WEIGHTS = {
    "int8": quantization.Int8WeightOnlyConfig,
    "float8": quantization.Float8WeightOnlyConfig,
    "integers": quantization.IntxWeightOnlyConfig,
}
WITH_ACTIVATIONS = {
    "int8": quantization.Int8DynamicActivationInt8WeightConfig,
    "integers": quantization.Int8DynamicActivationIntxWeightConfig,
}
MODELS = {**WITH_HEADS, "dense": dict(head_budget=None), "MoA": dict(router="moa")}


def quantised(model, config):
    quantization.quantize_(model, config())
    return model


def rounded_names(model):
    """Return the names of the layers whose weights are quantised."""
    names = [name for name, p in model.named_parameters() if type(p) is not nn.Parameter]
    return {name.removesuffix(".weight") for name in names}


@pytest.mark.parametrize("config", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_a_quantised_model_computes_with_its_rounded_weights_and_keeps_its_routers(options, config):
    """No operator reads quantised weights, and heads are chosen as before."""
    options = {
        **options,
        "executor": "packed",
    }  # "auto" would skip nothing in layers as small as these
    model = transformer(**options)
    plain = predict(model)
    quantised(model, config)
    names = rounded_names(model)
    assert "blocks.0.attn.qkv" in names and not any("router" in name for name in names)
    rounded = transformer(**options)
    with torch.no_grad():
        for name in names:
            rounded.get_submodule(name).weight.copy_(model.get_submodule(name).weight.dequantize())
    torch.testing.assert_close(predict(model), predict(rounded), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(predict(model), plain, atol=1e-3)


@pytest.mark.parametrize("config", WITH_ACTIVATIONS.values(), ids=WITH_ACTIVATIONS)
@pytest.mark.parametrize("options", WITH_HEADS.values(), ids=WITH_HEADS)
def test_heads_are_not_skipped_where_activations_are_quantised_too(options, config):
    model = transformer(**options, executor="packed")
    plain = predict(model)
    quantised(model, config)
    for layer in model.modules():
        if hasattr(layer, "plans"):
            layer.plans.clear()
    difference = (predict(model) - plain).abs().max()
    assert 1e-3 < difference < 0.05
    plans = [plan for block in model.blocks for plan in block.attn.plans.values()]
    plans += [plan for block in model.blocks for plan in getattr(block.mlp, "plans", {}).values()]
    assert {plan.executor for plan in plans} <= {Masked, AllGroups}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_are_quantised_as_in_diffusers_dit(config, dtype):
    """One weight of q, k and v has the rows, and so the scales, of three."""
    theirs = diffusers_dit(num_layers=2)
    ours = from_diffusers(theirs)
    outputs = [predict(quantised(model.to(dtype), config)) for model in (ours, theirs)]
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(*outputs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("config", [*WEIGHTS.values(), *WITH_ACTIVATIONS.values()])
@pytest.mark.parametrize("options", WITH_HEADS.values(), ids=WITH_HEADS)
def test_a_quantised_model_runs_in_bfloat16(options, config):
    """Before routers were left out, a float32 token met a bfloat16 weight in some of them."""
    model = transformer(**options).to(torch.bfloat16)
    plain = predict(model)
    torch.testing.assert_close(predict(quantised(model, config)), plain, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("options", WITH_HEADS.values(), ids=WITH_HEADS)
def test_from_pretrained_quantises_the_same_layers(options, tmp_path):
    model = transformer(**options)
    model.save_pretrained(tmp_path / "plain")
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    opened = MoHDiTTransformer2DModel.from_pretrained(
        tmp_path / "plain", quantization_config=config, torch_dtype=torch.bfloat16
    )
    quantised(model.to(torch.bfloat16), quantization.Int8WeightOnlyConfig)
    assert rounded_names(opened) == rounded_names(model)
    assert torch.equal(predict(opened), predict(model))


def test_a_pipeline_samples_from_a_quantised_model():
    images = []
    for config in (None, quantization.Int8WeightOnlyConfig):
        model = transformer(channels=3, **WITH_HEADS["per timestep, and groups"])
        if config:
            quantised(model, config)
        pipe = MoHDiTPipeline(model, make_scheduler("ddim", 4, True, clip=True))
        images.append(draw(pipe, [1, 2], 3, 4))
    difference = abs(images[1] - images[0]).max()
    assert 0 < difference < 0.1


def test_quantised_weights_are_not_sorted_or_read_by_the_reference():
    model = quantised(transformer(head_budget=None), quantization.Int8WeightOnlyConfig)
    batches = [(torch.randn(2, 4, 4, 4), torch.tensor([5, 5]), LABELS)]
    weight = model.blocks[0].attn.proj.weight
    facts = f"calibrate {type(weight).__name__} convert quantise afterwards"
    refuse(facts, moh_vision.convert, model, calibrate=batches)
    options = WITH_HEADS["per timestep, and groups"]
    model = transformer(**options, executor="reference")
    quantised(model, quantization.Int8WeightOnlyConfig)
    refuse("executor 'reference' fc1 fc2 'masked'", predict, model)


def test_an_adapter_learns_on_quantised_weights():
    pytest.importorskip("peft", reason="peft is not installed")
    from peft import LoraConfig

    model = quantised(transformer(**WITH_HEADS["per image"]), quantization.Int8WeightOnlyConfig)
    plain = predict(model)
    model.add_adapter(LoraConfig(r=3, target_modules=["attn.qkv", "mlp.fc1"]))
    torch.testing.assert_close(predict(model), plain)  # B is zero
    model(torch.ones(2, 4, 4, 4), torch.tensor([500]), LABELS).sample.square().sum().backward()
    gradients = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert len(gradients) == 4 and all(g.norm() > 0 for g in gradients)
