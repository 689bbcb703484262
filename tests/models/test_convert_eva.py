"""timm's Eva (DINOv3, EVA-02, rotary ViTs) and distilled DeiT turned into MoH, as test_convert.py has it of plain ViTs."""

import copy

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor

import moh_vision
from moh_vision.attention import attention_layers, load_balance_loss
from moh_vision.attention.masks import rotate
from moh_vision.models.weights import init_from

SMALL = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=6, num_classes=5)
DINOV3, EVA02, DEIT = "vit_small_patch16_dinov3", "eva02_tiny_patch14_224", "deit_tiny_distilled_patch16_224"
KINDS = {
    DINOV3: {},  # registers, LayerScale, halves are rotated
    "vit_small_patch16_dinov3_qkvb": {},  # biases of queries and values
    EVA02: {},  # neighbours are rotated
    "eva02_base_patch14_224": {},  # three projections
    "eva_giant_patch14_224": {},  # no rotation
    "vit_medium_patch16_rope_reg1_gap_256": {},  # timm's AttentionRope
    "vit_pe_core_tiny_patch16_384": {},  # pooled by attention
    "vit_base_patch16_sapiens2": dict(num_kv_heads=3),
    DEIT: {},
}


def dense(name, **kwargs):
    torch.manual_seed(3)
    model = timm.create_model(name, **{**SMALL, **KINDS.get(name, {}), **kwargs}).eval()
    for p in model.parameters():  # LayerScale and biases that show, heads that differ
        p.data += 0.1 * torch.randn_like(p)
    return model


def images(n=3, height=32, width=32):
    return torch.randn(n, 3, height, width)


def trained_routers(model):
    for layer in attention_layers(model):
        nn.init.normal_(layer.router.routed.weight)
    return model


@pytest.mark.parametrize("name", KINDS)
def test_converted_saved_and_loaded(name, tmp_path):
    """All heads: the dense model to the bit, in float32 and float64; from timm's weights too. Fewer: what timm saves."""
    model, x = dense(name), images()
    save_file(model.state_dict(), tmp_path / "dense.safetensors")
    with torch.no_grad():
        want = model(x)
        for router in ("query_norm", "moh"):
            for dtype in (torch.float64, torch.float32):
                theirs = copy.deepcopy(model).to(dtype)
                ours = moh_vision.convert(copy.deepcopy(theirs), router=router)
                assert ours.blocks[0].attn.proj.weight.dtype == dtype
                assert torch.equal(ours(x.to(dtype)), theirs(x.to(dtype)))
        assert moh_vision.head_budget(ours)["share"] == 1
        ours = moh_vision.convert(moh_vision.convert(copy.deepcopy(model), router="dense"))  # a baseline of ours
        assert torch.equal(ours(x), want)

        options = dict(base=name, **SMALL, **KINDS[name])
        loaded = timm.create_model("moh_vit", head_budget=1.0, **options).eval()
        assert torch.equal(moh_vision.load_checkpoint(loaded, tmp_path / "dense.safetensors")(x), want)
        file = dict(file=str(tmp_path / "dense.safetensors"), num_classes=5)
        again = timm.create_model("moh_vit", pretrained=True, pretrained_cfg_overlay=file, **options).eval()
        assert torch.equal(again(x), want)

        trained_routers(moh_vision.set_head_budget(ours, 0.6))
        timm.models.save_for_hf(ours, tmp_path / "moh", safe_serialization=True)
        again = timm.create_model(f"local-dir:{tmp_path / 'moh'}", pretrained=True).eval()
        assert type(again) is type(ours) and moh_vision.head_budget(again) == moh_vision.head_budget(ours)
        assert torch.equal(again(x), ours(x)) and not torch.allclose(ours(x), want)
        moved = moh_vision.convert(copy.deepcopy(model), calibrate=[x])(x)  # the heads in another order
        torch.testing.assert_close(moved, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [DINOV3, EVA02, DEIT])
def test_fewer_heads(name):
    """Prefix tokens are routed as others; executors agree; every parameter learns, with checkpointing too."""
    model, x = trained_routers(moh_vision.convert(dense(name), "uniform:0.5")), images()
    with torch.no_grad():
        outputs = []
        for executor in ("reference", "masked", "packed"):
            for layer in attention_layers(model):
                layer.executor = executor
            outputs.append(model(x))
        torch.testing.assert_close(outputs[1:], outputs[:1] * 2, rtol=1e-4, atol=1e-5)
        assert torch.equal(model.forward_routed(x)[0], outputs[2])
    grads = []
    for checkpointing in (False, True):
        model.train().set_grad_checkpointing(checkpointing)
        logits, stats = model.forward_routed(x)
        assert all(s.counts.sum() == 3 * (16 + model.num_prefix_tokens) * 3 for s in stats)
        model.zero_grad()
        (logits.square().mean() + load_balance_loss(stats)).backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert model.num_prefix_tokens == {DINOV3: 5, EVA02: 1, DEIT: 2}[name]
    assert all(g is not None for g in grads[0].values())
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("name", [DINOV3, EVA02, DEIT])
def test_other_image_sizes(name):
    """Through dynamic_img_size and set_input_size; patch dropout keeps the positions of the patches that stay."""
    wide = images(2, 24, 48)
    for options in (dict(dynamic_img_size=True), dict(dynamic_img_size=False)):
        theirs = dense(name, **options)
        ours = moh_vision.convert(copy.deepcopy(theirs))
        if not options["dynamic_img_size"]:
            theirs.set_input_size((24, 48))
            ours.set_input_size((24, 48))
        with torch.no_grad():
            assert torch.equal(ours(wide), theirs(wide))
            assert torch.equal(ours.forward_features(wide), theirs.forward_features(wide))
    if name != DEIT:  # its model leaves patch dropout out
        theirs = dense(name, patch_drop_rate=0.5).train()
        ours = moh_vision.convert(copy.deepcopy(theirs))
        torch.manual_seed(1)
        want = theirs(images())
        torch.manual_seed(1)
        assert torch.equal(ours(images()), want)


def test_traced_and_compiled():
    x = images()
    with torch.no_grad():
        model = trained_routers(moh_vision.convert(dense(DINOV3, depth=1), "uniform:0.5"))
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), model(x))
        found = create_feature_extractor(model, {"blocks.0": "block"})(x)["block"]
        (features, first), *_ = model.forward_intermediates(
            x, [0], return_prefix_tokens=True, output_fmt="NLC", intermediates_only=True
        )
        torch.testing.assert_close(found, torch.cat([first, features], 1))


def test_neighbours_are_rotated():
    """The same points, turned by the same angles, whichever channels hold them."""
    x, angles = torch.randn(2, 7, 3, 8), torch.randn(7, 4)
    halves = [f(angles).repeat(1, 2) for f in (torch.cos, torch.sin)]
    pairs = [f(angles).repeat_interleave(2, 1) for f in (torch.cos, torch.sin)]
    side_by_side = torch.stack(x.chunk(2, -1), -1).flatten(-2)
    want = torch.stack(rotate(x, halves).chunk(2, -1), -1).flatten(-2)
    torch.testing.assert_close(rotate(side_by_side, pairs, pairs=True), want)


def test_frozen_projections_stay_frozen():
    model = dense("eva02_base_patch14_224")
    for which in "qkv":
        getattr(model.blocks[0].attn, f"{which}_proj").requires_grad_(False)
    moh_vision.convert(model)
    assert [block.attn.qkv.weight.requires_grad for block in model.blocks] == [False, True]
    assert not model.blocks[0].attn.qkv.bias.requires_grad


def test_our_own_dense_models_with_shared_keys():
    model = timm.create_model("moh_vit_small_patch16_224", router="dense", kv_heads=2, **SMALL).eval()
    x = images()
    with torch.no_grad():
        want = model(x)
        moved = moh_vision.convert(copy.deepcopy(model), calibrate=[x])
        torch.testing.assert_close(moved(x), want, rtol=1e-4, atol=1e-5)
        assert not torch.equal(moved.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)
        assert torch.equal(moh_vision.convert(model)(x), want)


def test_the_head_of_distillation_follows_the_classes(tmp_path):
    save_file(dense(DEIT).state_dict(), tmp_path / "dense.safetensors")
    model, said = timm.create_model("moh_vit", base=DEIT, **{**SMALL, "num_classes": 7}), []
    init_from(model, str(tmp_path / "dense.safetensors"), said.append)
    assert "init_from: head_dist.weight is made anew, [5, 48] -> [7, 48]" in said


@pytest.mark.parametrize(
    "name, kwargs, words",
    [
        ("vit_small_patch16_rope_mixed_224", {}, "rotary positions are learnt for each layer and head"),
        (EVA02, dict(scale_attn_inner=True), "blocks.0.attn has a norm over all heads"),
        ("eva_giant_patch14_224", dict(use_post_norm=True), "blocks.0 is a EvaBlockPostNorm with EvaAttention; only"),
        ("beit_base_patch16_224", {}, "not Beit: its attention adds a learnt bias of relative positions for each head"),
    ],
)
def test_refusals_leave_the_model_as_it_was(name, kwargs, words):
    model = dense(name, **kwargs)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=words):
        moh_vision.convert(model)
    assert type(model) is type(before) and str(model) == str(before)
