"""The book of budgets: the default of every constructor, and what is recorded for each library."""

import pytest
import timm

import moh_vision
from moh_vision.attention import attention_layers, budgets_at, default_budget, head_budget
from moh_vision.language import create_text_model
from moh_vision.models.dit_transformer import MoHDiTTransformer2DModel
from tests.support.text_tiny import tiny

SIZES = dict(img_size=8, patch_size=4, embed_dim=48, depth=4, num_heads=8, num_classes=3)
LLAMA = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=32,
    num_attention_heads=8,
    num_key_value_heads=8,
    num_hidden_layers=2,
)


def make_vit(router):
    return timm.create_model("moh_vit_tiny_patch16_224", router=router, **SIZES)


def make_converted_vit(router):
    return timm.create_model("moh_vit", base="vit_tiny_patch16_224", router=router, **SIZES)


def make_dit(router):
    sizes = dict(sample_size=4, hidden_size=48, num_layers=4, num_attention_heads=8, num_classes=2)
    return MoHDiTTransformer2DModel(router=router, **sizes)


def make_text(router):
    return create_text_model(
        "mlm_base", attention={"router": router}, hidden_size=48, num_hidden_layers=4
    )


@pytest.mark.parametrize("router", ["moh", "query_norm", "mae", "dense"])
@pytest.mark.parametrize("make", [make_vit, make_converted_vit, make_dit, make_text])
def test_every_constructor_has_the_default_of_its_router(make, router, monkeypatch):
    """Changed in the one file that says it, the share is another one in every family."""
    assert default_budget(router) in (0.75, None)
    monkeypatch.setattr("moh_vision.attention.routers.ACTIVE_SHARE", 0.5)
    model = make(router)
    if default_budget(router) is None:
        assert all(layer.budget.shared == layer.budget.heads for layer in attention_layers(model))
    else:
        assert head_budget(model)["share"] == default_budget(router) == 0.5


def test_default_budgets():
    assert default_budget("moa") == default_budget(None) == default_budget("of_a_user") == 0.75
    assert default_budget("dense") is default_budget("mae") is None
    shared = [layer.budget.shared for layer in attention_layers(make_vit("moa"))]
    assert shared == [0, 0, 0, 0]  # MoA shares none


def test_a_budget_is_recorded_where_each_library_saves_it():
    pairs = [[2, 1], [2, 2], [2, 3], [2, 4]]
    vit = timm.create_model("moh_vit_tiny_patch16_224", **SIZES, head_budget=[(2, 6)] * 4)
    assert "head_budget_shape" not in vit._model_args
    moh_vision.set_head_budget(vit, "uniform:0.5")
    assert vit._model_args["head_budget"] == [[2, 2]] * 4
    moh_vision.set_head_budget(vit, pairs)  # a list keeps the shape
    assert vit._model_args["head_budget"] == pairs
    assert vit._model_args["head_budget_shape"] == "uniform"

    dit = moh_vision.set_head_budget(make_dit("moh"), "uniform:0.75")
    assert dit.config.head_budget == [
        [b.budget.shared, 6 - b.budget.shared] for b in attention_layers(dit)
    ]
    assert dit.config.head_budget_shape == "uniform"

    llama = create_text_model("clm_small", **LLAMA, router="moh", head_budget="uniform:0.5")
    moh_vision.set_head_budget(llama, [(2, 1), (2, 5)])
    assert llama.config.moh["head_budget"] == [[2, 1], [2, 5]]
    assert llama.config.moh["head_budget_shape"] == "uniform"

    text = moh_vision.set_head_budget(tiny("mlm_base", "moh"), "uniform:1.0")
    heads = text.config.num_attention_heads
    assert [sum(pair) for pair in text.config.layer_budgets] == [heads, heads]
    assert text.config.head_budget_shape == text.head_budget_shape == "uniform"


def test_a_dense_llama_may_be_told_to_run_all_its_heads():
    """Nothing changes, and nothing is there to be recorded."""
    model = create_text_model("clm_small", **LLAMA)
    assert moh_vision.set_head_budget(model, 1.0) is model
    assert model.config.moh is None and head_budget(model)["share"] == 1


def test_budgets_at_another_share_leave_the_model_as_it_is():
    model = make_vit("moh")
    before = head_budget(model)
    budgets = budgets_at(model, 0.5)
    assert head_budget(model) == before
    moh_vision.set_head_budget(model, 0.5)
    assert tuple(layer.budget for layer in attention_layers(model)) == budgets.heads
