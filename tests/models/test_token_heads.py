"""What hooks and `token_heads` read: which heads a token runs, and the attention matrix of every head."""

import pytest
import torch
from timm.layers import set_fused_attn
from timm.utils import AttentionExtract

from moh_vision.attention import attention_layers, token_heads
from tests.support.families import FAMILIES, awake
from tests.support.refusals import refuse

# Name -> family of `FAMILIES`, router and options.
MODELS = {
    "moh": ("vit", "moh", dict(head_budget=[(2, 2), (0, 3)])),
    "moh, sample": ("vit", "moh", dict(scope="sample", head_budget=0.5)),
    "query_norm": ("vit", "query_norm", dict(head_budget=0.5)),
    "moa": ("vit", "moa", dict(head_budget=[(0, 3), (0, 1)])),
    "mae": ("vit", "mae", {}),
    "mae, argmax": ("vit", "mae", dict(router_kwargs=dict(mode="argmax"))),
    "gated": ("vit", "gated", {}),
    "gated, sample": ("vit", "gated", dict(scope="sample")),
    "dense": ("vit", "dense", dict(head_budget=None)),
    "transnext": ("transnext", "moh", {}),
    "transnext, sample": ("transnext", "moh", dict(scope="sample")),
    "dit": ("dit", "moh", {}),
    "dit, sample": ("dit", "moh", dict(scope="sample")),
    "vit, routed MLPs": ("vit", "moh", dict(scope="sample", head_budget=0.5, mlp_budget=0.5)),
    "dit, routed MLPs": ("dit", "moh", dict(scope="sample", mlp_budget=0.5)),
}


def another(x):
    """Return an input that differs from `x`: a mirrored image, other labels."""
    return x.flip(-1) if x.is_floating_point() else x + 2


def model_and_inputs(name):
    """Make a model whose routers decide, as trained routers do, and a batch of two inputs."""
    family, router, options = MODELS[name]
    model, inputs = FAMILIES[family](router, **options)
    return awake(model, 0.5), [torch.cat([x, another(x)]) for x in inputs]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_token_heads_are_those_that_the_routers_chose(name):
    model, inputs = model_and_inputs(name)
    asked = []
    layers = attention_layers(model)
    # What each router is given, so that it can be asked again.
    hooks = [
        layer.router.register_forward_pre_hook(lambda _, args: asked.append(args))
        for layer in layers
    ]
    routings = token_heads(model, *inputs)
    for hook in hooks:
        hook.remove()
    for layer, args, (weights, active, stats, *_) in zip(layers, asked, routings, strict=True):
        expected = layer.router(*args)
        assert weights.shape == active.shape == (2, weights.shape[1], layer.num_heads)
        assert active.dtype == torch.bool
        if expected.active is None:  # all heads run
            assert active.all()
        else:
            assert torch.equal(active, expected.active.expand_as(active))
        if expected.weights is None:
            assert (weights == 1).all()
        else:
            assert torch.equal(weights, expected.weights.expand_as(weights))
        assert not weights[~active].any()
        assert active[..., : layer.budget.shared].all() == (name != "mae, argmax")
        counts = active.sum(1)
        if expected.stats.probs.shape[1] == 1:  # one choice for a sequence
            counts = active[:, 0]
        assert torch.equal(counts.to(stats.counts.dtype), stats.counts)
    assert not any(m._forward_hooks for layer in layers for m in (layer, layer.router))


def test_token_heads_of_a_translation_model():
    """Encoder, decoder and cross-attention have tokens of their own; query_norm in training computes all heads."""
    model, (words, _, summary) = FAMILIES["translation"]("mae_7")
    routings = token_heads(model, input_ids=words, decoder_input_ids=summary[:, :5])
    assert [r.weights.shape[:2] for r in routings] == [(2, 6)] * 2 + [(2, 5)] * 4
    trained, images = model_and_inputs("query_norm")
    for routing, layer in zip(token_heads(trained.train(), *images), attention_layers(trained)):
        assert routing.active.sum(-1).unique().tolist() == [layer.budget.active]


def test_token_heads_refuses_what_it_cannot_see():
    facts = "Linear HeadMixtureAttention moh_vision.convert"
    refuse(facts, token_heads, torch.nn.Linear(2, 2), torch.randn(1, 2))
    model, images = model_and_inputs("moh")

    def route_once_more(block, args):
        block.attn(args[0])

    model.blocks[0].register_forward_pre_hook(route_once_more)
    refuse("blocks.0.attn 2 times once", token_heads, model, *images)
    assert not any(layer._forward_hooks for layer in attention_layers(model))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_timms_extractor_sees_every_matrix_and_outputs_stay(name):
    set_fused_attn(False)
    try:
        model, inputs = model_and_inputs(name)
    finally:
        set_fused_attn(True)
    layers = attention_layers(model.double())
    call = [x.double() if x.is_floating_point() else x for x in inputs]
    assert not any(layer.fused_attn for layer in layers)
    extract = AttentionExtract(model, method="hook")
    step_by_step = model(*call)
    matrices = extract.hooks.get_output(device=torch.device("cpu"))
    assert len(matrices) == len(layers)
    assert all(module.endswith(".attn.attn_drop") for module in matrices)
    for layer, matrix in zip(layers, matrices.values()):
        rows = matrix.sum(2 if hasattr(layer, "pool") else 3)  # with a window the queries come last
        assert matrix.shape[:2] == (2, layer.num_heads)
        torch.testing.assert_close(rows, torch.ones_like(rows))
        layer.fused_attn = True
    outputs = [getattr(output, "sample", output) for output in (step_by_step, model(*call))]
    torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-10)
