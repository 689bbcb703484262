"""Dense ViTs turned into MoH, budgets changed afterwards, and weights read from files as others write them."""

import argparse
import copy

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor

import moh_vision
from moh_vision.attention import HeadBudget, HeadMixtureAttention, attention_layers, load_balance_loss
from moh_vision.attention.budget import change_routed
from moh_vision.models.convert import share_strongest_heads
from moh_vision.models.head_order import head_lengths
from moh_vision.models.weights import init_from

SMALL = dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=6, num_classes=5)
# What pretrained ViTs are made of.
KINDS = {
    "augreg": {},
    "dinov2": dict(init_values=1e-1, reg_tokens=4, no_embed_class=True),
    "siglip": dict(class_token=False, global_pool="map"),
    "no class token": dict(class_token=False, global_pool="avg", fc_norm=True),
    "qk-norm": dict(qk_norm=True),
    "pre-norm": dict(pre_norm=True),
}


def dense(**kwargs):
    torch.manual_seed(3)
    model = timm.create_model("vit_small_patch16_224", **{**SMALL, **kwargs}).eval()
    for p in model.parameters():  # LayerNorms and biases that show, heads that differ
        p.data += 0.1 * torch.randn_like(p)
    return model


def images(n=4):
    return torch.randn(n, 3, 32, 32)


# ---------------------------------------------------------------- convert


@pytest.mark.parametrize("options", [{}, dict(scope="sample"), dict(router="mae")], ids=str)
def test_traced_by_fx(options):
    """As torchvision's create_feature_extractor does: attention is no leaf, and masks are inputs of the graph."""
    budget = None if options.get("router") == "mae" else 0.5
    model, x = moh_vision.convert(dense(), head_budget=budget, **options).eval(), images()
    with torch.no_grad():
        features, outputs = model.forward_intermediates(x, indices=[1], output_fmt="NLC", return_prefix_tokens=True)[1][
            0
        ]
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))
        found = create_feature_extractor(model, {"blocks.1": "block"})(x)["block"]
    torch.testing.assert_close(found, torch.cat([outputs, features], 1))


@pytest.mark.parametrize("router", ["moh", "query_norm", "mae"])
@pytest.mark.parametrize("kind", KINDS)
def test_converted_with_all_heads_is_the_dense_model(kind, router):
    model, x = dense(**KINDS[kind]), images()
    with torch.no_grad():
        want = model(x)
        kept = {name: p.data_ptr() for name, p in model.named_parameters()}
        assert moh_vision.convert(model, router=router) is model
        got = model(x)
    assert moh_vision.head_budget(model)["share"] == 1
    if router == "mae":  # six numbers of 5/6 * 6/5 each
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(got, want)
    now = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert {n: now[n] for n in kept} == kept  # no copies
    assert router == "mae" or all(".router." in n for n in now.keys() - kept.keys())
    if router == "query_norm":
        assert now.keys() == kept.keys()


def test_our_own_dense_models():
    model, x = timm.create_model("moh_vit_small_patch16_224", router="dense", **SMALL).eval(), images()
    with torch.no_grad():
        want = model(x)
        assert torch.equal(moh_vision.convert(model, calibrate=None)(x), want)
    assert moh_vision.set_head_budget(model, 0.5).blocks[0].attn.budget.routed == 1


@pytest.mark.parametrize("size, heads", [("tiny", 3), ("base", 12)])
def test_other_numbers_of_heads(size, heads):
    model = timm.create_model(f"vit_{size}_patch16_224", img_size=32, depth=2).eval()
    x = images(1)
    with torch.no_grad():
        want = model(x)
        assert torch.equal(moh_vision.convert(model)(x), want)


@pytest.mark.parametrize("router, options", [("moa", {}), ("moh", dict(gate_scale="paper"))])
def test_a_single_routed_head_is_told_only_where_its_weight_is_constant(router, options, caplog):
    layer = HeadMixtureAttention(16, HeadBudget(4, 4, 0, 2), router=router, router_kwargs=options)
    moh_vision.set_head_budget(layer, 0.25)
    layer(torch.randn(2, 5, 16))[0].square().sum().backward()
    (weight,) = layer.router.parameters()
    assert weight.grad.abs().max() > 1e-3 and not caplog.messages


def test_conversion_tells_of_single_routed_heads(caplog):
    told = "one routed head in layers [0]: only the balance loss trains those routers"
    moh_vision.convert(dense(), head_budget="ramp:0.5")
    assert caplog.messages == [told]
    # A saved one is made so.
    timm.create_model("moh_vit", base="vit_small_patch16_224", **SMALL, head_budget="ramp:0.5")
    assert caplog.messages == [told]


def test_a_number_is_the_same_share_in_every_layer():
    table = moh_vision.head_budget(moh_vision.convert(dense(), 0.5))
    assert [(layer["shared"], layer["routed"]) for layer in table["layers"]] == [(1, 2)] * 3


def test_then_the_budget_is_lowered(caplog):
    model, x = moh_vision.convert(dense()), images()
    assert not caplog.messages
    before = model(x)
    assert moh_vision.set_head_budget(model, 0.5) is model
    assert caplog.messages == ["one routed head in layers [0]: only the balance loss trains those routers"]
    table = moh_vision.head_budget(model)
    assert table["share"] == 0.5 and [layer["shared"] for layer in table["layers"]] == [1, 1, 1]
    logits, stats = model.train().forward_routed(x)
    assert all(s.counts.sum() == 4 * 17 * layer["active"] for s, layer in zip(stats, table["layers"]))
    assert not torch.allclose(logits, before)
    (logits.square().mean() + load_balance_loss(stats)).backward()
    assert all(p.grad is not None for p in model.parameters())
    moh_vision.set_head_budget(model, 1.0)
    assert torch.equal(model.eval()(x), before)


@pytest.mark.parametrize("heads", [2, 3, 4, 5, 6, 7, 12, 15])
def test_half_of_few_heads(heads):
    model = moh_vision.convert(dense(embed_dim=4 * heads, num_heads=heads, depth=4))
    assert moh_vision.head_budget(moh_vision.set_head_budget(model, 0.5))["active"] == 2 * heads


def test_budget_at_once():
    model = moh_vision.convert(dense(), head_budget="uniform:0.5")
    assert [(b["shared"], b["routed"]) for b in moh_vision.head_budget(model)["layers"]] == [(1, 2)] * 3
    model(images())


def test_dropout_training_mode_and_frozen_weights_stay():
    model = dense(attn_drop_rate=0.1, proj_drop_rate=0.2).train()
    model.blocks[0].attn.qkv.weight.requires_grad_(False)
    moh_vision.convert(model)
    attn = model.blocks[0].attn
    assert attn.attn_drop.p == 0.1 and attn.proj_drop.p == 0.2 and attn.training and attn.router.training
    assert not attn.qkv.weight.requires_grad
    assert moh_vision.convert(dense().to(torch.float64)).blocks[0].attn.router.routed.weight.dtype == torch.float64


def test_calibration_puts_the_strongest_heads_first():
    model, x = dense(), images(8)
    # Heads 4 and 1 of the first layer are made the strong ones.
    proj = model.blocks[0].attn.proj.weight.data.unflatten(1, (6, 8))
    proj[:, 4] *= 30
    proj[:, 1] *= 10
    share = head_lengths(model, [block.attn for block in model.blocks], [x[:4], x[4:]])
    assert share[0].argsort(descending=True)[:2].tolist() == [4, 1]
    # Against the definition: each head alone through the output projection.
    attn, seen = model.blocks[0].attn, []
    hook = attn.proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        want = model(x)
    hook.remove()
    heads = [slice(8 * h, 8 * h + 8) for h in range(6)]
    alone = [nn.functional.linear(seen[0][..., own], attn.proj.weight[:, own]) for own in heads]
    lengths = torch.stack([a.norm(dim=-1).mean() for a in alone])
    torch.testing.assert_close(share[0], lengths, rtol=1e-4, atol=0)

    plain = moh_vision.convert(copy.deepcopy(model), head_budget=0.5)
    strongest = moh_vision.convert(copy.deepcopy(model), head_budget=0.5, calibrate=[x])
    with torch.no_grad():
        one = moh_vision.convert(copy.deepcopy(model), head_budget=0.5, calibrate=x)  # a tensor is one batch
        assert torch.equal(one(x), strongest(x))
        moved = moh_vision.convert(model, calibrate=iter([x[:4], x[4:]]))(x)
        torch.testing.assert_close(moved, want, rtol=1e-4, atol=1e-4)
        assert (strongest(x) - want).norm() < (plain(x) - want).norm()


def test_saved_and_loaded_by_timm(tmp_path):
    model = moh_vision.convert(dense(**KINDS["dinov2"]), router="query_norm")
    moh_vision.set_head_budget(model, 0.75)
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert moh_vision.head_budget(again) == moh_vision.head_budget(model)
    x = images()
    assert torch.equal(again(x), model.eval()(x))


def test_fine_tuning_starts_with_the_strongest_heads(tmp_path):
    """What `calibrate_images` does in train_cls.py."""
    source, x = dense(), images(8)
    source.blocks[0].attn.proj.weight.data.unflatten(1, (6, 8))[:, 4] *= 30
    save_file(source.state_dict(), tmp_path / "vit.safetensors")
    model = moh_vit(head_budget="uniform:0.5")
    assert init_from(model, str(tmp_path / "vit.safetensors"), lambda text: None)
    routers = [layer.router for layer in attention_layers(model)]
    share_strongest_heads(model, [x])
    assert [layer.router for layer in attention_layers(model)] == routers
    assert not any(p.any() for router in routers for p in router.parameters())
    strongest = source.blocks[0].attn.qkv.weight.data[4 * 8 : 5 * 8]
    assert torch.equal(model.blocks[0].attn.qkv.weight.data[:8], strongest)
    want = moh_vision.convert(source, "uniform:0.5", calibrate=[x])
    assert torch.equal(model(x), want(x))
    with pytest.raises(ValueError, match="heads are ordered in ViTs and DiTs, not in a TransNeXt"):
        share_strongest_heads(timm.create_model("transnext_micro", device="meta"), [x])


@pytest.mark.parametrize(
    "make, kwargs, words",
    [
        (lambda: timm.create_model("resnet10t"), {}, "takes timm's VisionTransformer, .*, not ResNet"),
        (lambda: moh_vision.convert(dense()), {}, "has routed heads already: set_head_budget"),
        (lambda: dense(scale_attn_norm=True), {}, "blocks.0.attn has a norm over all heads"),
        (dense, dict(router="moa"), "'moa' cannot start as plain attention: give one of moh, query_norm, mae, dense"),
        (dense, dict(head_budget=2), "head_budget 2 is not understood"),
        (dense, dict(head_budget=[(2, 2)]), "lists 1 layers, the model has 3"),
        (dense, dict(calibrate=[]), "calibrate holds no batch"),
        (dense, dict(calibrate=["hello"]), "calibrate holds 'hello'; expected batches, each a tensor"),
    ],
)
def test_what_cannot_be_converted(make, kwargs, words):
    model = make()
    kind = type(model)
    with pytest.raises(ValueError, match=words):
        moh_vision.convert(model, **kwargs)
    assert type(model) is kind


# ---------------------------------------------------------------- set_head_budget


B = HeadBudget


@pytest.mark.parametrize(
    "spec, layers, active",
    [
        (0.5, [B(8, 4, 2, 6)] * 4, [3, 4, 4, 5]),
        ("uniform:0.5", [B(8, 4, 2, 6)] * 4, [4, 4, 4, 4]),
        (1.0, [B(8, 4, 2, 2), B(4, 4, 4, 0)], [8, 4]),
        ([(2, 1), (4, 0)], [B(8, 4, 2, 2), B(4, 4, 4, 0)], [3, 4]),
        (0.75, [B(8, 4, 0, 2), B(16, 4, 15, 1)], [2, 16]),  # the second cannot run fewer than 15 + 1
    ],
)
def test_routed_heads_change(spec, layers, active):
    changed = change_routed(spec, layers)
    assert [b.active for b in changed] == active
    assert [b.shared for b in changed] == [b.shared for b in layers]


@pytest.mark.parametrize(
    "spec, words",
    [
        (0.5, "layer 1 has no routed heads, all 4 are shared; give a list of pairs with .4, 0. there"),
        ([(1, 2), (4, 0)], "layer 0: 2 heads are shared and stay so, not 1"),
        ([(2, 0), (4, 0)], "layer 0: routed=0 with shared=2"),
        ([(2, 7), (4, 0)], "layer 0: shared=2 . routed=7 = 9 of only 8"),
        ("half", "'half' is not understood"),
        ("ramp:0.5:0.4", "'ramp:0.5:0.4': the shared heads of a model stay; leave out 0.4"),
    ],
)
def test_routed_heads_refused(spec, words):
    with pytest.raises(ValueError, match=words):
        change_routed(spec, [B(8, 4, 2, 2), B(4, 4, 4, 0)])


def test_too_small_a_share_is_refused():
    with pytest.raises(ValueError, match="the shared heads and one routed head per layer are 12 of 16 already"):
        change_routed(0.5, [B(8, 4, 5, 2)] * 2)
    with pytest.raises(ValueError, match="layer 0 would run 4 of 8 heads, but 5 are shared"):
        change_routed("uniform:0.5", [B(8, 4, 5, 2)] * 2)


def test_refusal_leaves_the_model_as_it_was():
    model = timm.create_model("moh_transnext_small_75", device="meta")
    before = moh_vision.head_budget(model)
    with pytest.raises(ValueError, match="layer 0 has no routed heads, all 3 are shared .so have 9 other layers."):
        moh_vision.set_head_budget(model, 0.5)
    assert moh_vision.head_budget(model) == before


def test_lowered_budget_is_saved_by_diffusers(tmp_path):
    model = timm.create_model("moh_dit_small_patch2_75", depth=2, head_budget=[(2, 2), (2, 2)])
    moh_vision.set_head_budget(model, [(2, 1), (2, 3)])
    model.save_pretrained(tmp_path)
    assert moh_vision.head_budget(type(model).from_pretrained(tmp_path)) == moh_vision.head_budget(model)


# ---------------------------------------------------------------- files


def moh_vit(**kwargs):
    return timm.create_model("moh_vit_small_patch16_224", **{**SMALL, **kwargs}).eval()


def test_dense_vit_files(tmp_path):
    """timm's weights, as .safetensors or .pth, through every door; the routers come out as zero."""
    model, x = dense(), images()
    want = model(x)
    save_file(model.state_dict(), tmp_path / "vit.safetensors", metadata={"format": "pt", "note": "not JSON"})
    state = {f"module.{k}": v for k, v in model.state_dict().items()}
    wrapped = {"state_dict": state, "args": argparse.Namespace(lr=1)}
    torch.save(wrapped, tmp_path / "vit.pth")
    for name in ("vit.safetensors", "vit.pth"):
        file = str(tmp_path / name)
        assert torch.equal(moh_vision.load_checkpoint(moh_vit(head_budget=1.0), file)(x), want)
        assert torch.equal(moh_vit(head_budget=1.0, checkpoint_path=file)(x), want)
        # pretrained=True without a budget: all heads
        again = moh_vit(pretrained=True, pretrained_cfg_overlay=dict(file=file, num_classes=5))
        assert moh_vision.head_budget(again)["share"] == 1 and torch.equal(again(x), want)
        lower = moh_vit(pretrained=True, pretrained_cfg_overlay=dict(file=file, num_classes=5), head_budget=0.5)
        assert moh_vision.head_budget(lower)["share"] == 0.5


def test_weights_at_another_image_size(tmp_path):
    save_file(dense().state_dict(), tmp_path / "vit.safetensors")
    model = moh_vision.load_checkpoint(moh_vit(img_size=64), tmp_path / "vit.safetensors")
    assert model.pos_embed.shape[1] == 65 and model(torch.randn(1, 3, 64, 64)).shape == (1, 5)


def test_transnext_files(tmp_path):
    from test_moh_transnext import official_names, scramble, small

    model, x = scramble(small()), torch.randn(1, 3, 64, 64)
    torch.save({"model": official_names(model), "epoch": 3, "args": argparse.Namespace(lr=1)}, tmp_path / "moh.pth")
    want = model(x)
    file = str(tmp_path / "moh.pth")
    assert torch.equal(moh_vision.load_checkpoint(small().eval(), file)(x), want)
    assert torch.equal(small(checkpoint_path=file).eval()(x), want)
    again = small(pretrained=True, pretrained_cfg_overlay=dict(file=file, num_classes=5)).eval()
    assert torch.equal(again(x), want)
    larger = moh_vision.load_checkpoint(small(img_size=96).eval(), file)
    assert larger(torch.randn(1, 3, 96, 96)).shape == (1, 5)


class Evil:
    def __reduce__(self):
        return (print, ("unpickled",))


def test_files_that_do_not_fit(tmp_path, capsys):
    torch.save({"model": Evil()}, tmp_path / "evil.pth")
    (tmp_path / "cut.pth").write_bytes(b"PK\x03\x04 nothing")
    (tmp_path / "cut.safetensors").write_bytes(b"1234")
    torch.save({"step": 3}, tmp_path / "none.pth")
    save_file(dense(num_classes=7).state_dict(), tmp_path / "classes.safetensors")
    save_file(dense(depth=2).state_dict(), tmp_path / "depth.safetensors")
    for name, words in (
        ("evil.pth", "not a readable file of tensors"),
        ("cut.pth", "not a readable file of tensors"),
        ("cut.safetensors", "not a readable .safetensors file"),
        ("none.pth", "holds no state dict, neither itself nor under ema"),
        ("classes.safetensors", r"head.bias has shape \[7\], the model needs \[5\]"),
        ("depth.safetensors", "tensors are missing"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            moh_vision.load_checkpoint(moh_vit(), tmp_path / name)
        assert str(caught.value).startswith(str(tmp_path / name))
    with pytest.raises(FileNotFoundError, match="gone.pth: no such file"):
        moh_vision.load_checkpoint(moh_vit(), tmp_path / "gone.pth")
    assert "unpickled" not in capsys.readouterr().out
