"""Dense ViTs of timm turned into MoH, and budgets changed afterwards."""

import copy

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import moh_vision
from moh_vision.attention import (
    HeadBudget,
    HeadMixtureAttention,
    attention_layers,
    load_balance_loss,
)
from moh_vision.models.convert import share_strongest_heads
from moh_vision.models.head_order import head_lengths
from tests.support.dense_vits import DEIT, DINOV3, EVA02, SMALL, VIT, dense, images
from tests.support.official_dit import diffusers_dit
from tests.support.refusals import refuse
from tests.support.weights import init_from

# Variants of pretrained ViTs: a model of timm, and its options.
VARIANTS = {
    "augreg": (VIT, {}),
    "dinov2": (VIT, dict(init_values=1e-1, reg_tokens=4, no_embed_class=True)),
    "siglip": (VIT, dict(class_token=False, global_pool="map")),
    "no class token": (VIT, dict(class_token=False, global_pool="avg", fc_norm=True)),
    "qk-norm": (VIT, dict(qk_norm=True)),
    "pre-norm": (VIT, dict(pre_norm=True)),
    "registers, LayerScale, rotated halves": (DINOV3, {}),
    "biases of queries and values": ("vit_small_patch16_dinov3_qkvb", {}),
    "rotated neighbours": (EVA02, {}),
    "three projections": ("eva02_base_patch14_224", {}),
    "Eva without rotation": ("eva_giant_patch14_224", {}),
    "AttentionRope": ("vit_medium_patch16_rope_reg1_gap_256", {}),
    "pooled by attention": ("vit_pe_core_tiny_patch16_384", {}),
    "fewer key-value heads": ("vit_base_patch16_sapiens2", dict(num_kv_heads=3)),
    "distilled": (DEIT, {}),
}


def moh_vit(**kwargs):
    return timm.create_model("moh_vit_small_patch16_224", **{**SMALL, **kwargs}).eval()


def trained_routers(model):
    for layer in attention_layers(model):
        nn.init.normal_(layer.router.routed.weight)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_converted_saved_and_loaded(variant, tmp_path):
    """All heads: the dense model to the bit, float32 and float64; from timm's weights too. Fewer: what timm saves."""
    name, options = VARIANTS[variant]
    model = dense(name, **options)
    x = images()
    save_file(model.state_dict(), tmp_path / "dense.safetensors")
    with torch.no_grad():
        want = model(x)
        for router, budget in (
            ("query_norm", None),
            ("gated", None),
            ("moh", [(0, 6)] * 3),
            ("moh", [(6, 0)] * 3),
            ("moh", None),
        ):
            for dtype in (torch.float64, torch.float32):
                theirs = copy.deepcopy(model).to(dtype)
                ours = moh_vision.convert(copy.deepcopy(theirs), budget, router)
                assert ours.blocks[0].attn.proj.weight.dtype == dtype
                assert torch.equal(ours(x.to(dtype)), theirs(x.to(dtype)))
        assert moh_vision.head_budget(ours)["share"] == 1
        baseline = moh_vision.convert(copy.deepcopy(model), router="dense")
        ours = moh_vision.convert(baseline)
        assert torch.equal(ours(x), want)

        options = dict(base=name, **SMALL, **options)
        loaded = timm.create_model("moh_vit", head_budget=1.0, **options).eval()
        moh_vision.load_checkpoint(loaded, tmp_path / "dense.safetensors")
        assert torch.equal(loaded(x), want)
        file = dict(file=str(tmp_path / "dense.safetensors"), num_classes=5)
        options = dict(options, pretrained=True, pretrained_cfg_overlay=file)
        again = timm.create_model("moh_vit", **options).eval()
        assert torch.equal(again(x), want)

        trained_routers(moh_vision.set_head_budget(ours, 0.6))
        timm.models.save_for_hf(ours, tmp_path / "moh", safe_serialization=True)
        again = timm.create_model(f"local-dir:{tmp_path / 'moh'}", pretrained=True).eval()
        assert type(again) is type(ours)
        assert moh_vision.head_budget(again) == moh_vision.head_budget(ours)
        assert torch.equal(again(x), ours(x)) and not torch.allclose(ours(x), want)
        # Calibration puts the heads into another order.
        calibrated = moh_vision.convert(copy.deepcopy(model), calibrate=[x])
        torch.testing.assert_close(calibrated(x), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name, prefix_tokens", [(DINOV3, 5), (EVA02, 1), (DEIT, 2)])
def test_fewer_heads(name, prefix_tokens):
    """Prefix tokens are routed like patches; every parameter learns, with checkpointing too."""
    model = trained_routers(moh_vision.convert(dense(name), "uniform:0.5"))
    x = images(3)
    grads = []
    with torch.no_grad():
        assert torch.equal(model.forward_routed(x)[0], model(x))
    for checkpointing in (False, True):
        model.train().set_grad_checkpointing(checkpointing)
        logits, stats = model.forward_routed(x)
        for layer_stats in stats:  # 3 images, 16 patches, 3 active heads
            assert layer_stats.counts.sum() == 3 * (16 + prefix_tokens) * 3
        loss = logits.square().mean() + load_balance_loss(stats)
        grads.append(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", [DINOV3, EVA02, DEIT])
def test_other_image_sizes(name):
    """Sizes change by dynamic_img_size and set_input_size; patch dropout keeps the positions of the patches that stay."""
    wide = images(2, 24, 48)
    for dynamic in (True, False):
        theirs = dense(name, dynamic_img_size=dynamic)
        ours = moh_vision.convert(copy.deepcopy(theirs))
        if not dynamic:
            theirs.set_input_size((24, 48))
            ours.set_input_size((24, 48))
        with torch.no_grad():
            assert torch.equal(ours(wide), theirs(wide))
            assert torch.equal(ours.forward_features(wide), theirs.forward_features(wide))
    if name != DEIT:  # its model leaves patch dropout out
        theirs = dense(name, patch_drop_rate=0.5).train()
        ours = moh_vision.convert(copy.deepcopy(theirs))
        outputs = []
        for model in (theirs, ours):
            torch.manual_seed(1)
            outputs.append(model(images()))
        assert torch.equal(*outputs)


@pytest.mark.parametrize(
    "router, options, constant",
    [("moa", {}, False), ("moh", dict(gate_scale="paper"), False), ("moh", {}, True)],
)
def test_a_single_routed_head_is_told_only_where_its_weight_is_constant(
    router, options, constant, caplog
):
    layer = HeadMixtureAttention(16, HeadBudget(4, 4, 0, 2), router=router, router_kwargs=options)
    moh_vision.set_head_budget(layer, 0.25)
    layer(torch.randn(2, 5, 16))[0].square().sum().backward()
    (weight,) = layer.router.parameters()
    assert (weight.grad.abs().max() < 1e-6, bool(caplog.messages)) == (constant, constant)


def test_budgets_of_a_converted_model(caplog):
    # A number is the same share in every layer.
    table = moh_vision.head_budget(moh_vision.convert(dense(), 0.5))
    assert [(layer["shared"], layer["routed"]) for layer in table["layers"]] == [(1, 2)] * 3
    model = moh_vision.convert(dense())
    x = images()
    assert not caplog.messages
    before = model(x)
    assert moh_vision.set_head_budget(model, 0.5) is model  # as convert(model, 0.5)
    assert not caplog.messages and moh_vision.head_budget(model) == table
    moh_vision.set_head_budget(model, "ramp:0.5")
    told = "one routed head in layers [0]: only the balance loss trains those routers"
    assert caplog.messages == [told]
    table = moh_vision.head_budget(model)
    assert table["share"] == 0.5 and [layer["shared"] for layer in table["layers"]] == [1, 1, 1]
    assert not torch.allclose(model(x), before)
    moh_vision.set_head_budget(model, 1.0)
    assert torch.equal(model(x), before)
    moh_vision.convert(dense(), head_budget="ramp:0.5")
    assert caplog.messages == [told] * 2
    # A model that is saved with such a budget is made without a word.
    timm.create_model("moh_vit", base=VIT, **SMALL, head_budget="ramp:0.5")
    assert caplog.messages == [told] * 2


def test_dropout_training_mode_and_frozen_weights_stay():
    model = dense(attn_drop_rate=0.1, proj_drop_rate=0.2).train()
    model.blocks[0].attn.qkv.weight.requires_grad_(False)
    model.blocks[1].attn.fused_attn = False
    kept = {name: p.data_ptr() for name, p in model.named_parameters()}
    layers = attention_layers(moh_vision.convert(model))
    assert [layer.fused_attn for layer in layers] == [True, False, True]
    # Parameters are not copied.
    assert kept.items() <= {name: p.data_ptr() for name, p in model.named_parameters()}.items()
    attn = model.blocks[0].attn
    assert attn.attn_drop.p == 0.1 and attn.proj_drop.p == 0.2
    assert attn.training and attn.router.training
    assert not attn.qkv.weight.requires_grad
    double = moh_vision.convert(dense().to(torch.float64))
    assert double.blocks[0].attn.router.routed.weight.dtype == torch.float64
    model = dense("eva02_base_patch14_224")
    for letter in "qkv":
        getattr(model.blocks[0].attn, f"{letter}_proj").requires_grad_(False)
    moh_vision.convert(model)
    assert [block.attn.qkv.weight.requires_grad for block in model.blocks] == [False, True, True]
    assert not model.blocks[0].attn.qkv.bias.requires_grad


def test_calibration_puts_the_strongest_heads_first():
    model = dense()
    x = images(8)
    # Heads 4 and 1 of the first layer become the strong ones.
    proj = model.blocks[0].attn.proj.weight.data.unflatten(1, (6, 8))
    proj[:, 4] *= 30
    proj[:, 1] *= 10
    share = head_lengths(model, [block.attn for block in model.blocks], [x[:4], x[4:]])
    assert share[0].argsort(descending=True)[:2].tolist() == [4, 1]
    # Against the definition: each head alone through the output projection.
    attn = model.blocks[0].attn
    seen = []
    hook = attn.proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        want = model(x)
    hook.remove()
    lengths = []
    for head in range(6):
        columns = slice(8 * head, 8 * head + 8)
        output = nn.functional.linear(seen[0][..., columns], attn.proj.weight[:, columns])
        lengths.append(output.norm(dim=-1).mean())
    lengths = torch.stack(lengths)
    torch.testing.assert_close(share[0], lengths, rtol=1e-4, atol=0)

    plain = moh_vision.convert(copy.deepcopy(model), head_budget=0.5)
    strongest = moh_vision.convert(copy.deepcopy(model), head_budget=0.5, calibrate=[x])
    with torch.no_grad():
        # A tensor is one batch.
        one = moh_vision.convert(copy.deepcopy(model), head_budget=0.5, calibrate=x)
        assert torch.equal(one(x), strongest(x))
        assert (strongest(x) - want).norm() < (plain(x) - want).norm()


@torch.no_grad()
def test_calibration_puts_the_strongest_channels_into_the_first_groups():
    model = dense()
    x = images(8)
    mlp = model.blocks[0].mlp
    mlp.fc2.weight[:, [100, 7]] *= torch.tensor([30.0, 60.0])
    strong = mlp.fc1.weight[[7, 100]].clone()
    want = model(x)
    seen = []
    hook = mlp.fc2.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(x)
    hook.remove()
    # The definition: each channel alone through the second layer, as long as it is on average.
    channels = range(mlp.fc2.in_features)
    lengths = [(seen[0][..., [j]] * mlp.fc2.weight[:, j]).norm(dim=-1).mean() for j in channels]
    order = torch.stack(lengths).argsort(descending=True)
    assert order[:2].tolist() == [7, 100]

    plain = moh_vision.convert(copy.deepcopy(model), scope="sample", mlp_budget=0.5)
    strongest = moh_vision.convert(
        copy.deepcopy(model), scope="sample", mlp_budget=0.5, calibrate=iter([x[:4], x[4:]])
    )
    assert torch.equal(strongest.blocks[0].mlp.fc1.weight[:2], strong)
    assert (strongest(x) - want).norm() < (plain(x) - want).norm()
    moh_vision.set_head_budget(strongest, 1.0, mlp=1.0)
    torch.testing.assert_close(strongest(x), want, rtol=1e-4, atol=1e-5)


ROUTED = {"heads": {}, "heads and groups": dict(scope="sample", mlp_budget="uniform:0.5")}


@pytest.mark.parametrize("parts", ROUTED)
def test_fine_tuning_starts_with_the_strongest(tmp_path, parts):
    """`share_strongest_heads` is what `calibrate_images` calls in train_cls.py."""
    source = dense()
    x = images(8)
    source.blocks[0].attn.proj.weight.data.unflatten(1, (6, 8))[:, 4] *= 30
    source.blocks[0].mlp.fc2.weight.data[:, 100] *= 30
    save_file(source.state_dict(), tmp_path / "vit.safetensors")
    model = moh_vit(head_budget="uniform:0.5", **ROUTED[parts])
    assert init_from(model, str(tmp_path / "vit.safetensors"), lambda text: None)
    share_strongest_heads(model, [x])
    assert not any(p.any() for layer in attention_layers(model) for p in layer.router.parameters())
    want = moh_vision.convert(source, "uniform:0.5", calibrate=[x], **ROUTED[parts])
    assert torch.equal(model(x), want(x))
    transnext = timm.create_model("transnext_micro", device="meta")
    refuse("ViTs DiTs TransNeXt", share_strongest_heads, transnext, [x])


def test_groups_of_trained_routers_stay_where_they_are():
    """Their routers chose them by number."""
    model = moh_vit(head_budget="uniform:0.5", scope="sample", mlp_budget="uniform:0.5")
    trained, fresh = model.blocks[0].mlp, model.blocks[1].mlp
    for parameter in fresh.router.parameters():
        nn.init.zeros_(parameter)
    before = [mlp.fc1.weight.clone() for mlp in (trained, fresh)]
    share_strongest_heads(model, [images(8)])
    assert torch.equal(trained.fc1.weight, before[0])
    assert not torch.equal(fresh.fc1.weight, before[1])


@torch.no_grad()
def test_mae_without_a_gate_starts_as_plain_attention():
    """With mode "uniform" the router has no layers that could be set to zero."""
    model = moh_vit(router="dense")
    x = images()
    want = model(x)
    model = moh_vision.convert(model, router="mae", router_kwargs=dict(mode="uniform"))
    torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("router", ["moh", "query_norm", "mae", "gated"])
@torch.no_grad()
def test_our_own_dense_models_with_shared_keys(router, tmp_path):
    """Converted models keep their name."""
    model = moh_vit(router="dense", kv_heads=2)
    x = images()
    want = model(x)
    moved = moh_vision.convert(copy.deepcopy(model), calibrate=[x])
    torch.testing.assert_close(moved(x), want, rtol=1e-4, atol=1e-5)
    assert not torch.equal(moved.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)
    routed = moh_vision.convert(model, router=router)
    torch.testing.assert_close(routed(x), want, rtol=1e-5, atol=1e-5)
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert moh_vision.head_budget(again) == moh_vision.head_budget(model)
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize(
    "make, kwargs, facts",
    [
        (
            lambda: timm.create_model("resnet10t"),
            {},
            "VisionTransformer Eva DiTTransformer2DModel Qwen3ForCausalLM ResNet",
        ),
        (lambda: moh_vision.convert(dense()), {}, "routed heads already set_head_budget"),
        (lambda: moh_vision.convert(dense(), router="gated"), {}, "gates already all heads"),
        (
            dense,
            dict(router="gated", head_budget=0.5),
            "router 'gated' 6 heads 3 head_budget",
        ),
        (
            lambda: timm.create_model("transnext_micro"),
            {},
            "TransNeXt router='moh' load_checkpoint",
        ),
        (lambda: dense(scale_attn_norm=True), {}, "blocks.0.attn norm heads scale_norm"),
        (lambda: dense(EVA02, scale_attn_inner=True), {}, "blocks.0.attn norm heads"),
        (lambda: dense("vit_small_patch16_rope_mixed_224"), {}, "rotary layer head mixed"),
        (
            lambda: dense("eva_giant_patch14_224", use_post_norm=True),
            {},
            "blocks.0 EvaBlockPostNorm EvaAttention EvaBlock",
        ),
        (
            lambda: diffusers_dit(out_channels=8, num_layers=1, activation_fn="geglu"),
            {},
            "DiT activation_fn 'geglu' 'gelu-approximate'",
        ),
        (
            lambda: dense("beit_base_patch16_224"),
            {},
            "VisionTransformer Eva DiTTransformer2DModel Beit bias relative positions",
        ),
        (dense, dict(router="moa"), "router 'moa' moh query_norm mae gated dense"),
        (dense, dict(head_budget=2), "head_budget 2 above 0 1 0.75 'ramp:0.75' 'uniform:0.75'"),
        (dense, dict(head_budget=[(2, 2)]), "head_budget 1 layers 3"),
        (dense, dict(calibrate=[]), "calibrate no batch"),
        (dense, dict(calibrate=["hello"]), "calibrate 'hello' batches tensor tuple dict"),
    ],
)
def test_what_cannot_be_converted_stays_as_it_was(make, kwargs, facts):
    model = make()
    model_class = type(model)
    before = str(model)
    refuse(facts, moh_vision.convert, model, **kwargs)
    assert type(model) is model_class and str(model) == before


def test_a_refused_budget_leaves_the_model_as_it_was():
    model = timm.create_model("moh_transnext_small_75", device="meta")
    before = moh_vision.head_budget(model)
    facts = "head_budget 'ramp:0.5' layer 0 routed 3 shared 9 other pairs (3, 0)"
    refuse(facts, moh_vision.set_head_budget, model, 0.5)
    assert moh_vision.head_budget(model) == before
