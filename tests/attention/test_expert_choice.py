"""A router by which each head takes its best tokens: each token has its own heads, which depend on all tokens."""

import pytest
import timm
import torch

from moh_vision import convert
from moh_vision.attention import (
    ROUTERS,
    ContextCache,
    GroupMixtureMlp,
    HeadBudget,
    HeadMixtureAttention,
    KeyValueCache,
)
from moh_vision.models.counts import count_macs
from tests.support import llama_tiny, text_tiny, tiny_vit
from tests.support.layers import B, C, D, H, N, assert_equal, build, call_of
from tests.support.refusals import refuse
from tests.support.users_routers import ExpertChoiceRouter

BUDGET = HeadBudget(H, D, 0, 2)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(ROUTERS, "expert_choice", ExpertChoiceRouter)


@pytest.mark.parametrize("options", [{}, dict(padding=True), dict(mask=(N, N)), dict(contexts=B)])
def test_executors_equal_the_reference(options):
    x, call, _ = call_of(options, torch.float64)
    layer = build((0, 2), torch.float64, router="expert_choice")
    active = layer.router(x).active
    assert (active.sum(1) == N * 2 // H).all()  # every head has as many tokens
    assert active.sum(-1).unique().numel() > 1  # and tokens have unequal numbers of heads
    assert_equal(layer, ["masked", "packed"], x, **call)


def test_keys_and_values_of_all_heads_are_counted():
    """As with a router of as many weights by which each token chooses from itself, and more than with one choice for all."""
    images = torch.zeros(1, 3, 16, 16)

    def macs(router, **options):
        sizes = dict(tiny_vit.TINY, head_budget="uniform:0.5:0", router=router, **options)
        return count_macs(timm.create_model("moh_vit_tiny_patch16_224", **sizes), images).ideal

    assert macs("expert_choice") == macs("moa") > macs("moa", scope="sample")


def test_what_would_tell_a_token_of_later_ones_is_refused():
    x = torch.randn(B, N, C)
    layer = HeadMixtureAttention(C, BUDGET, router="expert_choice")
    who = "ExpertChoiceRouter scope 'token'"
    refuse(f"is_causal {who}", layer, x, is_causal=True)
    refuse(f"cache {who}", layer, x, cache=KeyValueCache())
    refuse(f"cache {who}", layer, x, context=x, cache=ContextCache())


def test_it_is_refused_where_one_vector_chooses():
    make = dict(router="expert_choice")
    refuse("scope 'sample' 'token'", HeadMixtureAttention, C, BUDGET, scope="sample", **make)
    refuse(
        "route_by 'context' 'expert_choice'",
        HeadMixtureAttention,
        C,
        BUDGET,
        route_by="context",
        **make,
    )
    refuse("router 'expert_choice' MLP moh", GroupMixtureMlp, C, BUDGET, **make)


def test_in_text_it_is_for_encoders():
    spec = dict(router="expert_choice", head_budget=0.5)
    model = text_tiny.tiny("mlm_base", spec, dtype=torch.float32)
    assert model(text_tiny.words(2, 6)).logits.isfinite().all()
    for preset in ("clm_wt103_base", "mt_transformer_base"):
        refuse("router 'expert_choice' all tokens decoder", text_tiny.tiny, preset, spec)
    crosses = dict(cross_attention=spec)
    refuse("router 'expert_choice' decoder", text_tiny.tiny, "mt_transformer_base", **crosses)
    refuse("router 'expert_choice' causal moh", convert, llama_tiny.dense(), router="expert_choice")


def test_a_table_of_gates_does_not_say_that_every_token_chooses_as_many():
    layer = build((0, 2), router="expert_choice")
    assert "chooses" not in layer.router.gate_columns("token", [BUDGET])
    counted = build((0, 2), router="moa").router
    assert "every token chooses 2" in counted.gate_columns("token", [BUDGET])
