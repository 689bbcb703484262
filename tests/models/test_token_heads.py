"""What hooks and `token_heads` read: which heads a token runs, and the attention matrix of every head."""

import pytest
import timm
import torch
from refusals import refuse
from timm.layers import set_fused_attn
from timm.utils import AttentionExtract

import moh_vision
from moh_vision.attention import HeadBudget, HeadMixtureAttention, attention_layers, token_heads
from moh_vision.language import create_text_model

VIT = dict(img_size=16, patch_size=4, embed_dim=48, depth=2, num_heads=6, num_classes=3)
PYRAMID = dict(
    img_size=64, embed_dims=(24, 24, 48, 48), num_heads=(2, 2, 4, 4), depths=(1, 1, 1, 2), mlp_ratios=(2, 2, 2, 2)
)
DIT = dict(img_size=8, embed_dim=48, depth=2, num_heads=6, num_classes=3, head_budget=0.5)


def vit(**kwargs):
    return timm.create_model("moh_vit_tiny_patch16_224", **{**VIT, "reg_tokens": 2, **kwargs}).eval()


def pyramid(**kwargs):
    return timm.create_model("moh_transnext_base_50", **PYRAMID, head_budget=[(1, 1), (1, 1), (1, 2), (2, 1)], **kwargs)


def dit(**kwargs):
    model = timm.create_model("moh_dit_small_patch2_75", **DIT, **kwargs)
    for block in model.blocks:  # they start as identities
        torch.nn.init.normal_(block.adaLN_modulation[1].weight, std=0.1)
    return model


def inputs(model, batch=2):
    if hasattr(model, "x_embedder"):
        return torch.randn(batch, 4, 8, 8), torch.arange(batch), torch.arange(batch)
    side = 64 if hasattr(model, "stages") else 16
    return (torch.randn(batch, 3, side, side),)


MODELS = {
    "moh": lambda: vit(head_budget=[(2, 2), (0, 3)]),
    "moh, sample": lambda: vit(scope="sample", head_budget=0.5),
    "query_norm": lambda: vit(router="query_norm", head_budget=0.5),
    "moa": lambda: vit(router="moa", head_budget=[(0, 3), (0, 1)]),
    "mae": lambda: vit(router="mae"),
    "mae, argmax": lambda: vit(router="mae", router_kwargs=dict(mode="argmax")),
    "dense": lambda: vit(router="dense"),
    "transnext": lambda: pyramid(),
    "transnext, sample": lambda: pyramid(scope="sample"),
    "dit": lambda: dit(),
    "dit, sample": lambda: dit(scope="sample"),
}


def made(kind):
    """A model whose routers decide, as trained ones do."""
    model = MODELS[kind]()
    for layer in attention_layers(model):
        for p in layer.router.parameters():
            torch.nn.init.normal_(p)
    return model.eval()


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_token_heads_are_those_that_the_routers_chose(kind):
    model, asked = made(kind), []
    layers = attention_layers(model)
    # What each router is given, so that it can be asked again.
    hooks = [layer.router.register_forward_pre_hook(lambda _, args: asked.append(args)) for layer in layers]
    routings = token_heads(model, *inputs(model))
    for hook in hooks:
        hook.remove()
    for layer, args, (weights, active, stats, *_) in zip(layers, asked, routings, strict=True):
        own = layer.router(*args)
        B, N = 2, weights.shape[1]
        assert weights.shape == active.shape == (B, N, layer.num_heads) and active.dtype == torch.bool
        want = own.active if own.active is not None else torch.ones(1, 1, layer.num_heads, dtype=torch.bool)
        assert torch.equal(active, want.expand_as(active))
        want = own.weights if own.weights is not None else torch.ones(1)
        assert torch.equal(weights, want.expand_as(weights))
        assert not weights[~active].any() and active[..., : layer.budget.shared].all() == (kind != "mae, argmax")
        counts = active[:, 0] if own.stats.probs.shape[1] == 1 else active.sum(1)
        assert torch.equal(counts.to(stats.counts.dtype), stats.counts)
    assert not any(m._forward_hooks for layer in layers for m in (layer, layer.router))


def test_token_heads_of_a_translation_model():
    """Encoder, decoder and cross-attention have tokens of their own; query_norm in training computes all heads."""
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=8, encoder_layers=1, decoder_layers=1)
    model = create_text_model("mt_mae_7", vocab_size=50, **sizes).eval()
    found = token_heads(model, input_ids=torch.randint(4, 50, (2, 7)), decoder_input_ids=torch.randint(4, 50, (2, 5)))
    assert [tuple(r.weights.shape) for r in found] == [(2, 7, 8), (2, 5, 8), (2, 5, 8)]
    trained = vit(router="query_norm", head_budget=0.5).train()
    for routing, layer in zip(token_heads(trained, torch.randn(2, 3, 16, 16)), attention_layers(trained)):
        assert routing.active.sum(-1).unique().tolist() == [layer.budget.active]


def test_token_heads_refuses_what_it_cannot_see():
    refuse("has no HeadMixtureAttention layer", lambda: token_heads(torch.nn.Linear(2, 2), torch.randn(1, 2)))
    model = vit()
    images = torch.randn(1, 3, 16, 16)
    model.blocks[0].register_forward_pre_hook(lambda block, args: block.attn(args[0]) and None)
    refuse(r"blocks\.0\.attn routes 2 times in this call, expected once", lambda: token_heads(model, images))
    assert not any(layer._forward_hooks for layer in attention_layers(model))


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_timms_extractor_sees_every_matrix_and_outputs_stay(kind):
    set_fused_attn(False)
    try:
        model = made(kind).double()
    finally:
        set_fused_attn(True)
    layers, call = attention_layers(model), [t.double() if t.is_floating_point() else t for t in inputs(model)]
    assert not any(layer.fused_attn for layer in layers)
    extract = AttentionExtract(model, method="hook")
    step_by_step = model(*call)
    matrices = extract.hooks.get_output(device=torch.device("cpu"))
    assert len(matrices) == len(layers) and all(name.endswith(".attn.attn_drop") for name in matrices)
    for layer, matrix in zip(layers, matrices.values()):
        rows = matrix.sum(2 if hasattr(layer, "pool") else 3)  # with a window the queries come last
        assert matrix.shape[:2] == (2, layer.num_heads)
        torch.testing.assert_close(rows, torch.ones_like(rows))
        layer.fused_attn = True
    outputs = [getattr(output, "sample", output) for output in (step_by_step, model(*call))]
    torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-10)


def layer_of(*budget, **options):
    return HeadMixtureAttention(24, HeadBudget(6, 4, *budget), **options)


def test_the_matrix_is_that_of_torchs_attention():
    ours = layer_of(6, 0, router="dense", fused_attn=False).eval()
    theirs = torch.nn.MultiheadAttention(24, 6, batch_first=True)
    state = {"in_proj_weight": ours.qkv.weight, "in_proj_bias": ours.qkv.bias}
    theirs.load_state_dict({**state, "out_proj.weight": ours.proj.weight, "out_proj.bias": ours.proj.bias})
    seen, x = [], torch.randn(2, 7, 24)
    ours.attn_drop.register_forward_hook(lambda *hook: seen.append(hook[-1]))
    torch.testing.assert_close((ours(x)[0], seen[0]), theirs(x, x, x, average_attn_weights=False), rtol=1e-5, atol=1e-6)


def test_the_switch_is_taken_over_and_set_by_layer():
    """From a converted model's layers; from TIMM_FUSED_ATTN when a model is made, which is on if left out."""
    dense = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32)
    dense.blocks[1].attn.fused_attn = False
    assert [layer.fused_attn for layer in attention_layers(moh_vision.convert(dense))] == [True, False]


def test_dropout_of_the_matrix():
    layer = layer_of(2, 2, attn_drop=0.5, fused_attn=False)
    x, seen = torch.randn(2, 7, 24), []
    layer.attn_drop.register_forward_hook(lambda *hook: seen.append(hook[-1]))
    layer(x)
    layer.eval()(x)
    assert 0.3 < (seen[0] == 0).double().mean() < 0.7 and (seen[1] > 0).all()
