"""peft's adapters on our transformer, beside a model with the same weights in place, and diffusers' own DiT."""

import copy

import pytest
import torch
from diffusers import DiTTransformer2DModel
from diffusers.loaders import PeftAdapterMixin
from safetensors.torch import load_file, save_file
from torch import nn

import moh_vision
from moh_vision.attention.executors import Masked
from moh_vision.attention.executors.groups import AllGroups
from moh_vision.diffusion import MoHDiTPipeline, make_scheduler
from moh_vision.models.dit_transformer import MoHDiTTransformer2DModel, from_diffusers
from moh_vision.models.fixed_heads import gather_heads, keep_heads
from tests.support.official_dit import diffusers_dit
from tests.support.pipelines import LABELS, WITH_HEADS, draw, predict, transformer
from tests.support.refusals import refuse

peft = pytest.importorskip("peft", reason="peft is not installed")

PROJECTIONS = ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]
FILE = "pytorch_lora_weights.safetensors"
SAVED = dict(prefix=None, weight_name=FILE)  # as `save_lora_adapter` names weights


def lora(*layers, **more):
    """The adapter W x + b + 2 B A x of the layers whose names end so, with A and B other than zero."""
    options = dict(r=3, lora_alpha=6, target_modules=list(layers or PROJECTIONS))
    return peft.LoraConfig(**{**options, "init_lora_weights": False, **more})


def adapted(*layers, name="default", model=None, **options):
    """A transformer with an adapter."""
    if model is None:
        model = transformer(**options)
    torch.manual_seed(len(name))
    model.add_adapter(lora(*layers), adapter_name=name)
    return model


def add_to_weights(model, adapters, name="default", scale=2.0):
    """Add B A of the adapter `name` of a model to the weights of another, which has none."""
    for layer_name, layer in adapters.named_modules():
        if name in getattr(layer, "lora_A", ()):
            delta = layer.lora_B[name].weight @ layer.lora_A[name].weight
            model.get_submodule(layer_name).weight.data += scale * delta.detach()


def assert_near(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


# ---- outputs and gradients


@pytest.mark.parametrize("layer", [*PROJECTIONS, "attn.router.routed", "attn.router.balance"])
@pytest.mark.parametrize("options", WITH_HEADS.values(), ids=WITH_HEADS)
def test_an_adapter_counts_in_whatever_heads_and_groups_run(options, layer):
    """The output is that of weights with the adapter added, and the adapter learns: no operator reads past it."""
    # The gate of a single routed head is constant. "auto" would skip nothing in layers as small as these.
    options = {**options, "head_budget": [(1, 2)] * 2, "executor": "packed"}
    model = transformer(**options)
    plain = predict(model)  # plans of calls are made before there is an adapter
    adapted(layer, model=model)
    added = transformer(**options)
    add_to_weights(added, model)
    assert_near(predict(model), predict(added))
    assert not torch.allclose(predict(model), plain, atol=1e-4)
    model.train()
    model(torch.randn(2, 4, 4, 4), torch.tensor([500]), LABELS).sample.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(gradients) == 4 and all(g.norm() > 0 for g in gradients.values())
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


class DiffusersDiT(DiTTransformer2DModel, PeftAdapterMixin):
    """diffusers' DiT with the methods that diffusers' newer transformers have."""


def test_an_adapter_learns_as_in_diffusers_dit():
    """One A for q, k and v is the same A in three adapters, whose gradients add up."""
    theirs = diffusers_dit(num_layers=2)
    theirs.__class__ = DiffusersDiT
    ours = adapted(model=from_diffusers(theirs))
    names = {
        "to_q": ("attn.qkv", 0),
        "to_k": ("attn.qkv", 1),
        "to_v": ("attn.qkv", 2),
        "to_out.0": ("attn.proj", None),
        "ff.net.0.proj": ("mlp.fc1", None),
        "ff.net.2": ("mlp.fc2", None),
    }
    theirs.add_adapter(lora(*names))
    pairs = []  # B of theirs, and the rows of B of ours
    for block, other in zip(ours.blocks, theirs.transformer_blocks, strict=True):
        for name, (own_name, part) in names.items():
            own = block.get_submodule(own_name)
            parent = other if name.startswith("ff") else other.attn1
            twin = parent.get_submodule(name)
            rows = slice(None) if part is None else slice(32 * part, 32 * part + 32)
            twin.lora_A.default.weight.data.copy_(own.lora_A.default.weight)
            twin.lora_B.default.weight.data.copy_(own.lora_B.default.weight[rows])
            pairs.append((twin.lora_B.default.weight, own.lora_B.default.weight, rows))
    assert_near(predict(ours), predict(theirs))
    for model in (ours, theirs):
        x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
        model(x, torch.tensor([500] * 2), LABELS).sample.square().mean().backward()
    for of_theirs, of_ours, rows in pairs:
        assert_near(of_ours.grad[rows], of_theirs.grad)
    attn = theirs.transformer_blocks[0].attn1
    summed = sum(layer.lora_A.default.weight.grad for layer in (attn.to_q, attn.to_k, attn.to_v))
    assert_near(ours.blocks[0].attn.qkv.lora_A.default.weight.grad, summed)
    for model in (ours, theirs):
        model.disable_adapters()
    assert_near(predict(ours), predict(theirs))


@pytest.mark.parametrize("put", [peft.get_peft_model, peft.inject_adapter_in_model])
def test_pefts_own_functions_do_as_add_adapter(put):
    torch.manual_seed(7)
    model = transformer(**WITH_HEADS["per image"])
    expected = adapted(model=copy.deepcopy(model))
    torch.manual_seed(7)
    if put is peft.get_peft_model:
        got = put(copy.deepcopy(model), lora()).base_model.model
    else:
        got = put(lora(), copy.deepcopy(model))
    torch.testing.assert_close(predict(got), predict(expected), rtol=0, atol=0)


def test_dropout_of_an_adapter_counts_in_training_alone(tmp_path):
    """peft makes an adapter for training, also in a model that does not train."""
    model = transformer(**WITH_HEADS["per image"])
    model.add_adapter(lora(lora_dropout=0.9))
    model.save_lora_adapter(tmp_path)
    other = transformer(**WITH_HEADS["per image"])
    other.load_lora_adapter(tmp_path, **SAVED)
    assert torch.equal(predict(other), predict(model))
    for each in (model, other):
        each.train()
        assert not torch.equal(predict(each), predict(each))
    other = transformer(**WITH_HEADS["per image"]).train()
    other.add_adapter(lora(lora_dropout=0.9))
    assert not torch.equal(predict(other), predict(other))


def test_recomputed_blocks_give_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        model = adapted(**WITH_HEADS["per timestep, and groups"]).train()
        if checkpointing:
            model.enable_gradient_checkpointing()
        model(torch.ones(2, 4, 4, 4), torch.tensor([500]), LABELS).sample.square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    torch.testing.assert_close(*gradients)


# ---- several adapters, and adapters that become part of the weights


@pytest.mark.parametrize("options", WITH_HEADS.values(), ids=WITH_HEADS)
def test_adapters_are_weighted_disabled_and_deleted(options):
    model = transformer(**options)
    plain = predict(model)
    adapted(model=model, name="a")
    alone = predict(model)
    adapted("attn.qkv", "mlp.fc2", model=model, name="other")
    model.set_adapters(["a", "other"], [1.0, 0.5])
    added = transformer(**options)
    add_to_weights(added, model, "a")
    add_to_weights(added, model, "other", scale=1.0)
    assert_near(predict(model), predict(added))
    model.disable_adapters()
    assert_near(predict(model), plain)
    model.enable_adapters()
    model.delete_adapters("other")
    model.set_adapter("a")
    assert_near(predict(model), alone)
    model.unload_lora()
    assert torch.equal(predict(model), plain)


@pytest.mark.parametrize("options", WITH_HEADS.values(), ids=WITH_HEADS)
def test_a_fused_adapter_counts_in_operators_that_read_weights(options):
    """Fused and unloaded, the layers are plain again, and heads are left out of their products."""
    model = transformer(**options, executor="packed")
    plain = predict(model)
    adapted(*PROJECTIONS, "attn.router.routed", model=model)
    expected = predict(model)
    model.fuse_lora()
    assert_near(predict(model), expected)
    model.unfuse_lora()
    assert_near(predict(model), expected)
    model.fuse_lora()
    model.unload_lora()
    assert all(type(model.blocks[0].get_submodule(name)) is nn.Linear for name in PROJECTIONS)
    for layer in model.modules():
        if hasattr(layer, "plans"):
            layer.plans.clear()
    assert_near(predict(model), expected)
    assert not torch.allclose(predict(model), plain, atol=1e-2)
    if "route_by" in options:
        block = model.blocks[0]
        for layer in (block.attn, block.mlp):
            executors = {plan.executor for plan in layer.plans.values()}
            assert executors and executors.isdisjoint({Masked, AllGroups})


# ---- files


def test_an_adapter_is_saved_and_loaded(tmp_path):
    options = WITH_HEADS["per timestep, and groups"]
    model = adapted(*PROJECTIONS, "attn.router.routed", "mlp.router.routed", **options)
    model.save_lora_adapter(tmp_path)
    other = transformer(**options)
    plain = predict(other)
    other.load_lora_adapter(tmp_path, **SAVED)
    assert torch.equal(predict(other), predict(model))
    assert not torch.allclose(predict(other), plain, atol=1e-2)
    # As `save_lora_weights` of diffusers' pipelines names them.
    weights = {f"transformer.{name}": w for name, w in load_file(tmp_path / FILE).items()}
    save_file(weights, tmp_path / FILE)
    other = transformer(**options)
    other.load_lora_adapter(tmp_path, weight_name=FILE)
    other.set_adapters("default_0", 2.0)  # the file does not have lora_alpha any more
    assert torch.equal(predict(other), predict(model))


def test_a_model_is_saved_without_its_adapters_or_with_them_in_its_weights(tmp_path):
    """diffusers' own models are saved with an adapter, and then read with other weights or not at all."""
    model = adapted(**WITH_HEADS["per image"])
    expected = predict(model)
    facts = "save_pretrained blocks.0.attn.qkv save_lora_adapter fuse_lora unload_lora"
    refuse(facts, model.save_pretrained, tmp_path)
    pipe = MoHDiTPipeline(model, make_scheduler("ddim", 4, True, clip=False))
    refuse(facts, pipe.save_pretrained, tmp_path)
    model.fuse_lora()
    model.unload_lora()
    model.save_pretrained(tmp_path / "fused")
    pipe.save_pretrained(tmp_path / "pipeline", variant="fp16")
    assert list(tmp_path.glob("pipeline/transformer/*.fp16.safetensors"))  # the option arrived
    assert_near(predict(MoHDiTTransformer2DModel.from_pretrained(tmp_path / "fused")), expected)


def test_an_adapter_is_refused_where_it_would_fail_or_be_read_past():
    options = WITH_HEADS["per image"]
    gathered = transformer(**options)
    gather_heads(gathered)
    refuse("blocks.0.attn gather_heads", gathered.add_adapter, lora())
    cast = transformer(**options)
    cast.enable_layerwise_casting()
    refuse("float8_e4m3fn enable_layerwise_casting", cast.add_adapter, lora())
    router = adapted("attn.router.routed", **WITH_HEADS["per token"])
    refuse("router has an adapter", keep_heads, router, [[0, 1, 2]] * 2)


# ---- beside the other tools


def pixel_pipeline(**options):
    model = transformer(channels=3, **options)
    return MoHDiTPipeline(model, make_scheduler("ddim", 4, True, clip=True))


@pytest.mark.parametrize("options", WITH_HEADS.values(), ids=WITH_HEADS)
def test_a_pipeline_samples_with_an_adapter(options):
    """Also with fewer heads as a guide, and after a sampling without the adapter."""
    guided = {}
    if (
        "mlp_budget" not in options
    ):  # no share is below that of these groups and leaves each layer a routed head
        guided = dict(guide="heads:0.67", guide_scale=1.5)
    pipe = pixel_pipeline(**options)
    plain = draw(pipe, [1, 2], 3, 4, **guided)
    adapted(model=pipe.transformer)
    images = draw(pipe, [1, 2], 3, 4, **guided)
    other = pixel_pipeline(**options)
    add_to_weights(other.transformer, pipe.transformer)
    assert_near(images, draw(other, [1, 2], 3, 4, **guided))
    assert not torch.allclose(images, plain, atol=1e-2)


def test_cuda_graphs_of_a_model_with_adapters_are_refused():
    """A graph that was captured before would go on without the adapter."""
    pipe = pixel_pipeline()
    adapted(model=pipe.transformer)
    facts = "graphs blocks.0.attn.qkv fuse_lora unload_lora"
    refuse(facts, pipe, [1], graphs=lambda *_: None)


def test_an_adapter_counts_in_blocks_that_were_compiled_before():
    options = WITH_HEADS["per timestep, and groups"]
    model = transformer(**options)
    torch.compiler.reset()
    model.compile_repeated_blocks(backend=lambda graph, inputs: graph.forward)
    plain = predict(model)
    adapted(model=model)
    added = transformer(**options)
    add_to_weights(added, model)
    assert_near(predict(model), predict(added))
    model.disable_adapters()
    assert_near(predict(model), plain)


def test_an_adapter_counts_after_measuring(skipping_takes, capsys):
    """Its layers are called, though plain ones were measured to be faster without some heads; the table says why."""
    skipping_takes(0.5)
    options = WITH_HEADS["per image"]
    model = transformer(**options)
    inputs = (torch.randn(2, 4, 4, 4), torch.tensor([500, 500]), LABELS)
    moh_vision.measure(model, *inputs)
    predict(model)
    assert any(plan.executor is not Masked for plan in model.blocks[0].attn.plans.values())
    adapted(model=model)
    added = transformer(**options)
    add_to_weights(added, model)
    assert_near(predict(model), predict(added))
    capsys.readouterr()
    assert not moh_vision.measure(model, *inputs)
    assert "not plain linear layers" in capsys.readouterr().out


def test_weights_of_an_adapter_are_offloaded(tmp_path):
    model = adapted(**WITH_HEADS["per image"])
    expected = predict(model)
    cpu = torch.device("cpu")
    model.enable_group_offload(
        cpu, cpu, offload_type="leaf_level", offload_to_disk_path=str(tmp_path)
    )
    assert_near(predict(model), expected)


# ---- what reads weights itself


def test_what_would_read_past_an_adapter_is_refused():
    batches = [(torch.randn(2, 4, 4, 4), torch.tensor([5, 5]), LABELS)]
    afterwards = "calibrate peft.tuners.lora.layer.Linear convert adapters afterwards"
    for layer in ("attn.qkv", "attn.proj"):
        model = adapted(layer, head_budget=None)
        refuse(afterwards, moh_vision.convert, model, calibrate=batches)
    model = adapted("mlp.fc2", head_budget=None)
    more = dict(scope="sample", mlp_budget=0.5)
    refuse("mlp_budget blocks.0.mlp plain linear", moh_vision.convert, model, **more)
    model = adapted("mlp.fc2", **WITH_HEADS["per timestep, and groups"], executor="reference")
    refuse("executor 'reference' fc1 fc2 'auto' 'packed' 'masked'", predict, model)
    model = adapted("attn.proj", head_budget=[(1, 2)] * 2)
    refuse("layer 0 not plain linear layers", keep_heads, model, [[0, 1, 2]] * 2)


def test_heads_of_a_layer_with_an_adapter_are_not_gathered():
    """An export of such a model computes all of its heads."""
    model = adapted(**WITH_HEADS["per timestep, and groups"])
    expected = predict(model)
    assert gather_heads(model) == 2 * 4
    assert_near(predict(model), expected)


def test_a_dense_model_with_an_adapter_is_converted_with_equal_outputs():
    model = adapted(head_budget=None)
    expected = predict(model)
    assert_near(predict(moh_vision.convert(model)), expected)
