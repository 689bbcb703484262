"""LLaMA-style models with routed heads: against dense transformers, a slow rewrite, caches, padding and gradients."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import DynamicCache, StaticCache

import moh_vision
from moh_vision.attention import RoutingStats, attention_layers, load_balance_loss
from moh_vision.language.models.create import create_text_model, list_text_presets, task_of
from moh_vision.language.models.llama.model import MoHLlamaForCausalLM
from moh_vision.models.counts import count_macs
from tests.support.llama_tiny import (
    FAMILIES,
    GROUPS,
    HEADS,
    SIZES,
    by_norm,
    dense,
    left_padded,
    slow,
    words,
)
from tests.support.refusals import refuse
from tests.support.text_tiny import empty

PAIRS = [(3, 2), (2, 1)]
ATTENTION = ("sdpa", "eager")


def routed(family="llama", pairs=PAIRS, executor="auto", dtype=torch.float64, **options):
    model = moh_vision.convert(
        dense(family, dtype, **options), head_budget=pairs, executor=executor
    )
    return model.eval()


def generated(model, inputs, **options):
    greedy = dict(max_new_tokens=5, do_sample=False, output_logits=True)
    out = model.generate(**inputs, **greedy, return_dict_in_generate=True, **options)
    return out.sequences, torch.stack(out.logits)


def by_executors(model, *executors):
    """Go through executors, each set in every layer."""
    for executor in executors:
        for layer in attention_layers(model):
            layer.executor = executor
        yield executor


def in_pieces(model, ids, ends, cache=None, **inputs):
    """Logits by a cache of pieces that end at `ends`; attention_mask and position_ids [B, N] are cut alike."""
    if cache is None:
        cache = DynamicCache(config=model.config)
    parts = []
    for begin, end in zip([0, *ends], ends):
        cuts = dict(attention_mask=slice(end), position_ids=slice(begin, end))
        piece = {name: value[:, cuts[name]] for name, value in inputs.items()}
        parts.append(model(ids[:, begin:end], past_key_values=cache, **piece).logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_heads_are_the_dense_model_bit_for_bit(family, attention):
    plain = dense(family, attention=attention)
    model = moh_vision.convert(copy.deepcopy(plain), head_budget=1.0)
    for inputs in (dict(input_ids=words()), left_padded()):
        assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
        for options in ({}, dict(cache_implementation="static")):
            got = generated(model, inputs, **options)
            want = generated(plain, inputs, **options)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want))
    labels = words()
    for each in (model, plain):
        each.train()(input_ids=words(), labels=labels).loss.backward()
    for (name, p), (same, wanted) in zip(model.named_parameters(), plain.named_parameters()):
        assert name == same and torch.equal(p.grad, wanted.grad), name


@pytest.mark.parametrize("executor", ["masked", "packed", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_a_slow_rewrite(family, executor):
    ids = words(2, 5)
    for attention in ATTENTION:
        model = routed(family, executor=executor, attention=attention)
        with torch.no_grad():
            want = torch.stack([slow(model, row, by_norm(PAIRS)) for row in ids])
            # Rotation is in float32.
            torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=3e-5)
            everything = torch.stack(
                [slow(model, row, lambda i, q: torch.ones(HEADS)) for row in ids]
            )
            assert (want - everything).abs().max() > 0.1  # so heads were left out


@pytest.mark.parametrize("cache_class", ["dynamic", "static"])
@pytest.mark.parametrize("executor", ["masked", "packed"])
@pytest.mark.parametrize(
    "attention, dtype, tolerance",
    [
        ("sdpa", torch.float64, 1e-9),
        # In float64 transformers' eager attention makes NaN of the rows of padding.
        ("eager", torch.float32, 1e-4),
    ],
    ids=ATTENTION,
)
def test_token_by_token_is_the_whole(attention, dtype, tolerance, executor, cache_class):
    model = routed(executor=executor, attention=attention, dtype=dtype)
    inputs = left_padded()
    ids = inputs["input_ids"]
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        want = model(ids, attention_mask=mask, position_ids=positions).logits
        cache = None
        if cache_class == "static":
            cache = StaticCache(config=model.config, max_cache_len=16)
        got = in_pieces(
            model, ids, (4, 6, 7, 8, 9), cache, attention_mask=mask, position_ids=positions
        )
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_left_padding_and_beams(family):
    model = routed(family)
    inputs = left_padded()
    alone = dict(
        input_ids=inputs["input_ids"][-1:, 3:], attention_mask=inputs["attention_mask"][-1:, 3:]
    )
    for _ in by_executors(model, "masked", "packed"):
        for options in ({}, dict(cache_implementation="static"), dict(num_beams=3)):
            together, logits = generated(model, inputs, **options)
            single, one = generated(model, alone, **options)
            assert torch.equal(together[-1, 9:], single[-1, 6:])
            if "num_beams" not in options:
                torch.testing.assert_close(logits[:, -1], one[:, 0], rtol=1e-8, atol=1e-8)


def test_group_routing_runs_whole_key_value_groups():
    model = moh_vision.convert(dense(dtype=torch.float64), head_budget=0.5, group=True)
    size = HEADS // GROUPS
    budgets = moh_vision.head_budget(model)["layers"]
    for budget in budgets:
        assert budget["shared"] % size == budget["routed"] % size == 0
    assert moh_vision.head_budget(model)["share"] == 0.5
    pairs = [[budget["shared"] // size, budget["routed"] // size] for budget in budgets]

    def gates(layer, queries):  # [H, D]: a group is one head of twice the width
        return by_norm(pairs)(layer, queries.view(GROUPS, -1)).repeat_interleave(size)

    ids = words(2, 5)
    with torch.no_grad():
        want = torch.stack([slow(model, row, gates) for row in ids])
        for _ in by_executors(model, "masked", "packed"):
            for logits in (model(ids).logits, in_pieces(model, ids, range(1, 6))):
                torch.testing.assert_close(logits, want, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_go_straight_through(family):
    model = routed(family, executor="packed").train()
    ids = words(1, 5)
    weight = torch.randn(5, SIZES["vocab_size"], dtype=torch.float64)
    logits = [
        model(ids).logits[0],
        slow(model, ids[0], by_norm(PAIRS, True)),
        slow(model, ids[0], by_norm(PAIRS, False)),
    ]
    got, want, other = (
        torch.autograd.grad((each * weight).sum(), list(model.parameters())) for each in logits
    )
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    names = [name for name, _ in model.named_parameters()]
    index = names.index("model.layers.0.self_attn.q_proj.weight")
    assert (other[index] - got[index]).norm() > 0.01 * got[index].norm()


def test_losses_per_token_and_statistics_without_padding():
    model = routed()
    inputs = left_padded()
    labels = words(seed=5)
    labels[:, :4] = -100
    loss, nll, stats = model.routed_loss(labels, label_smoothing=0.1, **inputs)
    logits, same = model.forward_routed(**inputs)
    assert torch.equal(logits, model(**inputs).logits)
    log_p = logits.float().log_softmax(-1)
    want = -log_p.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    here = labels != -100
    torch.testing.assert_close(nll, want * here)
    torch.testing.assert_close(loss, (0.9 * want - 0.1 * log_p.mean(-1)) * here)
    for entry, other, (shared, chosen) in zip(stats, same, PAIRS, strict=True):
        assert isinstance(entry, RoutingStats) and torch.equal(entry.probs, other.probs)
        assert entry.probs.shape == (2, 9, HEADS - shared)
        assert entry.counts.sum(1).tolist() == [9 * (shared + chosen), 6 * (shared + chosen)]
        assert (entry.probs[1, :3] == 0).all()
        assert (entry.probs[1, 3:].sum(-1) - 1).abs().max() < 1e-6


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("all_heads_on_top", [False, True])
def test_activation_checkpointing_keeps_gradients_and_statistics(all_heads_on_top):
    ids = words()
    labels = words(seed=2)

    def gradients(model):
        loss, _, stats = model.routed_loss(labels, input_ids=ids)
        assert len(stats) == 2
        return torch.autograd.grad(
            loss.mean() + 0.1 * load_balance_loss(stats), list(model.parameters())
        )

    model = create_text_model("clm_moh_small_50", **{**SIZES, "eos_token_id": 2}).train()
    for p in model.parameters():
        p.data.normal_(std=0.2)
    if all_heads_on_top:
        model = routed(pairs=[(3, 2), (4, 4)]).train()
    want = gradients(model)
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    for got, wanted in zip(gradients(model), want):
        torch.testing.assert_close(got, wanted)
    stats = model.routed_loss(labels, input_ids=ids)[2]
    kept = weakref.ref(stats[0].probs)  # a step without backward leaves nothing behind
    del stats
    gc.collect()
    assert kept() is None
    model.gradient_checkpointing_enable(dict(use_reentrant=True))
    refuse(
        "activation checkpointing use_reentrant=False",
        lambda: model.routed_loss(labels, input_ids=ids),
    )
    model.eval().routed_loss(labels, input_ids=ids)


@pytest.mark.parametrize(
    "preset", [p for p in list_text_presets() if p.startswith("clm_") and "wt103" not in p]
)
def test_budgets_of_table_a(preset):
    """tests/models/test_counts.py counts its parameters."""
    model = empty(preset)
    assert type(model) is MoHLlamaForCausalLM and task_of(preset) == "clm"
    share = {"75": 0.75, "50": 0.5}.get(preset[-2:], 1.0)
    for layer in moh_vision.head_budget(model)["layers"]:
        heads = layer["heads"]
        shared = heads if share == 1 else round(0.45 * share * heads)
        assert (layer["active"], layer["shared"]) == (round(share * heads), shared)
        assert layer["shared"] > 0.4 * layer["active"]  # the advice of section 4.5
    if share == 1:
        assert model.config.moh is None
    else:
        assert model.config.moh["router"] == "moh"


def test_macs_of_table_a():
    for preset, active in (("clm_small", 12), ("clm_moh_small_75", 9)):
        found = count_macs(empty(preset), torch.zeros(1, 512, dtype=torch.long))
        N, C, H, D, V = 512, 768, 12, 64, 65_536
        mlp = 12 * 3 * N * C * 2048
        head = N * C * V
        router = N * C * (8 + 4 + 2)
        if active == H:
            router = 0
        attention = 12 * (N * C * D * (2 * active + 2 * H) + router)
        # Older versions of transformers multiply positions and frequencies as matrices.
        assert found.linears == pytest.approx(mlp + head + attention, rel=1e-6)
        assert found.scores == 12 * 2 * N * N * active * D


def test_overrides_are_fields():
    fields = dict(router="query_norm", head_budget="uniform:0.5", group=True, executor="masked")
    model = create_text_model("clm_small", **SIZES, **fields)
    budget = dict(head_budget=[[2, 2]] * 2, head_budget_shape="uniform")
    assert model.config.moh == {**fields, **budget, "router_kwargs": None}
    assert [layer.executor for layer in attention_layers(model)] == ["masked"] * 2
    assert model.lm_head.weight.shape == (40, 32)
    for router in ("query_norm", "moh"):  # a budget may say how many heads are shared
        layers = moh_vision.head_budget(
            empty("clm_small", router=router, head_budget="uniform:0.75:0.2")
        )["layers"]
        assert {(b["shared"], b["active"]) for b in layers} == {(2, 9)}
