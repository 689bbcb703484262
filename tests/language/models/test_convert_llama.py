"""LLaMA-style models converted: in place, saved, calibrated, the released layout, refusals, other libraries."""

import copy
import json

import pytest
import torch
from accelerate import cpu_offload
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, GPT2LMHeadModel

import moh_vision
from moh_vision.attention import attention_layers, load_balance_loss
from moh_vision.attention.routing import Call
from moh_vision.language.models.create import create_text_model
from moh_vision.language.models.llama.model import MoHLlamaForCausalLM, load_moh_llama3
from moh_vision.models.head_order import head_lengths
from tests.support.llama_tiny import (
    DEPTH,
    FAMILIES,
    GROUPS,
    SIZES,
    by_norm,
    dense,
    left_padded,
    slow,
    words,
)
from tests.support.refusals import one_line, refuse


def head_contributions(model, batches):
    attentions = [layer.self_attn for layer in model.model.layers]
    return head_lengths(model.model, attentions, batches, use_cache=False)


def pairs_of(model):
    return [(b["shared"], b["routed"]) for b in moh_vision.head_budget(model)["layers"]]


@pytest.mark.parametrize("family", FAMILIES)
def test_in_place_without_new_parameters(family):
    model = dense(family)
    config = model.config
    parameters = dict(model.named_parameters())
    modules = set(map(id, model.modules()))
    before = [layer.self_attn for layer in model.model.layers]
    assert moh_vision.convert(model, head_budget=0.75) is model
    assert type(model).__name__ == f"MoH{FAMILIES[family][1].__name__}"
    assert model.config.model_type == f"moh_{family}" and model.config.moh["router"] == "query_norm"
    assert config.model_type == family
    assert not hasattr(config, "moh")  # another model may have this configuration too
    assert {id(m.config) for m in model.modules() if hasattr(m, "config")} == {id(model.config)}
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is p for name, p in parameters.items())
    for module in model.modules():
        if id(module) not in modules:
            assert not list(module.parameters(recurse=False))
    for layer, old in zip(model.model.layers, before):
        assert isinstance(layer.self_attn, type(old))


@pytest.mark.parametrize(
    "spec, options, pairs",
    [
        (None, {}, [(1, 7), (1, 7)]),  # a fifth, at least one
        (None, dict(group=True), [(2, 6), (2, 6)]),
        (1.0, {}, [(4, 4), (4, 4)]),
        (0.75, {}, [(3, 3), (3, 3)]),
        ("ramp:0.75", {}, [(2, 2), (4, 4)]),
        ("uniform:0.75", {}, [(3, 3), (3, 3)]),
        ("uniform:0.5", {}, [(2, 2), (2, 2)]),
        ("uniform:0.125", {}, [(0, 1), (0, 1)]),
        ([(4, 2), (1, 3)], {}, [(4, 2), (1, 3)]),
        ("uniform:0.75", dict(group=True), [(2, 4), (2, 4)]),
        ([(4, 2), (2, 2)], dict(group=True), [(4, 2), (2, 2)]),
        ("uniform:0.75", dict(router="moh"), [(2, 4), (2, 4)]),
    ],
)
def test_which_heads_are_shared(spec, options, pairs):
    model = moh_vision.convert(dense(), head_budget=spec, **options)
    assert pairs_of(model) == pairs
    assert model.config.moh["head_budget"] == [list(pair) for pair in pairs]


def test_a_new_moh_router_is_the_dense_model_while_all_heads_run():
    plain = dense()
    model = moh_vision.convert(copy.deepcopy(plain), router="moh")
    assert torch.equal(model(words()).logits, plain(words()).logits)
    dense_names = {name for name, _ in plain.named_parameters()}
    added = {name for name, _ in model.named_parameters()} - dense_names
    assert len(added) == 2 * DEPTH  # one shared head has no gate
    assert all(".self_attn.router." in name for name in added)
    moh_vision.set_head_budget(model, 0.75)
    assert not torch.equal(model(words()).logits, plain(words()).logits)
    _, _, stats = model.routed_loss(words(), input_ids=words())
    load_balance_loss(stats).backward()
    parameters = dict(model.named_parameters())
    assert all(parameters[name].grad is not None for name in added if "routed" in name)


@pytest.mark.parametrize("options", [{}, dict(router="moh"), dict(group=True, executor="packed")])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded(family, options, tmp_path):
    model = moh_vision.convert(dense(family), head_budget=[(2, 4), (2, 2)], **options)
    for p in (p for name, p in model.named_parameters() if ".router." in name):
        p.data.normal_()
    for budget in (None, [(2, 2), (2, 6)]):
        if budget:
            before = model(words()).logits
            moh_vision.set_head_budget(model, budget)
            assert not torch.equal(model(words()).logits, before)
        model.save_pretrained(tmp_path)
        assert not list(tmp_path.glob("*.py"))
        assert "auto_map" not in (tmp_path / "config.json").read_text()
        for model_class in (type(model), AutoModelForCausalLM):
            loaded = model_class.from_pretrained(tmp_path)
            assert type(loaded) is type(model) and loaded.config.moh == model.config.moh
            assert pairs_of(loaded) == pairs_of(model) == (budget or [(2, 4), (2, 2)])
            executors = [layer.executor for layer in attention_layers(loaded)]
            assert executors == [options.get("executor", "auto")] * DEPTH
            assert torch.equal(loaded(words()).logits, model(words()).logits)


def test_a_dense_model_of_ours_is_saved_and_converted(tmp_path):
    model = create_text_model("clm_small", **{**SIZES, "eos_token_id": 2}).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    want = model(words()).logits
    assert loaded.config.moh is None and torch.equal(loaded(words()).logits, want)
    assert torch.equal(moh_vision.convert(loaded)(words()).logits, want)
    moh_vision.set_head_budget(loaded, [(1, 4), (1, 5)])
    assert not torch.equal(loaded(words()).logits, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_calibration_puts_the_strongest_first_and_keeps_the_output(family):
    plain = dense(family, torch.float64)
    batches = [words(2, 7), dict(input_ids=words(2, 6, seed=3), attention_mask=torch.ones(2, 6))]
    batches[1]["attention_mask"][0, 4:] = 0
    strength = head_contributions(plain, batches)
    first, second = words(2, 6, seed=3).split(1)  # padding does not count
    without_padding = head_contributions(plain, [words(2, 7), first[:, :4], second])
    torch.testing.assert_close(strength, without_padding)
    model = moh_vision.convert(copy.deepcopy(plain), head_budget=1.0, calibrate=batches)
    torch.testing.assert_close(model(words()).logits, plain(words()).logits)
    for before, after in zip(strength, head_contributions(model, batches)):
        groups = after.view(GROUPS, -1)
        assert (groups.sum(1).diff() <= 1e-6).all() and (groups.diff(dim=1) <= 1e-6).all()
        torch.testing.assert_close(after.sort().values, before.sort().values)
        assert not torch.equal(before, after)
    one = moh_vision.convert(dense(family), head_budget=0.5, calibrate=batches[1])
    listed = moh_vision.convert(dense(family), head_budget=0.5, calibrate=batches[1:])
    assert torch.equal(one(words()).logits, listed(words()).logits)


def test_the_released_layout(tmp_path):
    """A folder as MoH-LLaMA3-8B is: LLaMA's names and config, weights in .bin, and code that must not run."""
    plain = dense(dtype=torch.float32)
    plain.config.save_pretrained(tmp_path)
    torch.save(plain.state_dict(), tmp_path / "pytorch_model.bin")
    config = json.loads((tmp_path / "config.json").read_text())
    config.update(
        rope_theta=config.pop("rope_parameters")["rope_theta"],
        architectures=["LlamaForCausalLM"],
        transformers_version="4.33.1",
        auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"},
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling_llama.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    model = load_moh_llama3(tmp_path)
    assert pairs_of(model) == [(4, 2)] * DEPTH and moh_vision.head_budget(model)["share"] == 0.75
    assert not (tmp_path / "ran").exists()
    ids = words(2, 6)
    with torch.no_grad():
        rows = [slow(plain.double(), row, by_norm([(4, 2)] * DEPTH)) for row in ids]
        want = torch.stack(rows).float()
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-3, atol=1e-3)
        assert (plain.float()(ids).logits - want).abs().max() > 0.1
    model.save_pretrained(tmp_path / "ours")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert set(load_file(tmp_path / "ours" / "model.safetensors")) == set(plain.state_dict())
    with one_line(f"{tmp_path}/ours config.json 'moh_llama' from_pretrained 'llama'"):
        load_moh_llama3(tmp_path / "ours")
    model = load_moh_llama3(tmp_path, dtype=torch.bfloat16, executor="packed")
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "family, options, facts",
    [
        (
            "llama",
            dict(router="moh", router_kwargs=dict(gate_scale="x")),
            "gate_scale 'x' released paper",
        ),
        ("llama", dict(calibrate=[]), "calibrate no batch"),
        (
            "llama",
            dict(router="mae"),
            "router 'mae' causal query_norm moh",
        ),
        (
            "llama",
            dict(router="gated"),
            "router 'gated' all head_budget query_norm moh",
        ),
        ("llama", dict(scope="sample"), "scope 'sample' 'token'"),
        ("llama", dict(head_budget=[(4, 2)]), "head_budget 1 layers 2"),
        (
            "llama",
            dict(head_budget=[(4, 2), (7, 2)]),
            "head_budget 1 shared=7 routed=2 9 8",
        ),
        ("llama", dict(head_budget=[(4, 2), (3, 2)], group=True), "head_budget 1 (3, 2) group=2"),
        ("llama", dict(group=True, router="moh"), "group=True 'query_norm' 'moh'"),
        ("qwen2", dict(executor="fast"), "executor 'fast' auto masked packed reference"),
        (
            "qwen3",
            dict(router_kwargs=dict(group=2)),
            "router_kwargs 'query_norm' 'group' nothing",
        ),
    ],
)
def test_refused_options_leave_the_model_as_it_was(family, options, facts):
    model = dense(family)
    model_class = type(model)
    config = model.config
    want = model(words()).logits
    modules = list(model.modules())
    refuse(facts, lambda: moh_vision.convert(model, **options))
    assert type(model) is model_class
    assert model.config is config and not hasattr(config, "moh")
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert torch.equal(model(words()).logits, want)


def test_refused_models():
    gpt = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8))
    model = dense()
    model.model.layers[1].self_attn.k_proj = type("Quantised", (nn.Linear,), {})(32, 16, bias=False)
    routed = moh_vision.convert(dense(), head_budget=0.5)
    other = nn.Sequential(dense())
    for refused, options, facts in (
        (gpt, {}, "convert LlamaForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM GPT2LMHeadModel"),
        (other, {}, "convert Llama- Qwen2- Qwen3ForCausalLM Sequential"),
        (routed, {}, "already set_head_budget"),
        (model, {}, "model.layers.1.self_attn.k_proj Quantised linear adapters"),
        (nn.Linear(2, 2), dict(group=True), "group=True language key-value"),
    ):
        refuse(facts, moh_vision.convert, refused, **options)


HALF = "uniform:0.5"


def test_offloaded_weights():
    model = moh_vision.convert(dense(), head_budget=HALF, executor="packed")
    plain = dense()
    want = model(words()).logits
    for each in (model, plain):
        cpu_offload(each, torch.device("cpu"))
    assert torch.equal(model(words()).logits, want)
    facts = "calibrate offloading"
    refuse(facts, moh_vision.convert, plain, head_budget=HALF, calibrate=[words()])


@torch.no_grad()
def test_what_is_left_to_transformers():
    """Pages of continuous batching, which come as `cache`; but one token beside a cache reads its groups once, by ours."""
    model = moh_vision.convert(dense(), head_budget=HALF, executor="reference")
    attn = model.model.layers[0].self_attn

    def executor(tokens, past=None, **kwargs):
        x = torch.randn(1, tokens, 32)
        rotary = (torch.ones(1, tokens, 4), torch.zeros(1, tokens, 4))
        routing, q = attn.route(x)
        return attn.executor_of(Call(x, routing, q=q, rotary=rotary), None, past, **kwargs)

    assert executor(3) is not None and executor(3, cache=object()) is None
    attn.executor = "auto"
    past = DynamicCache(config=attn.config)
    past.update(*torch.randn(2, 1, GROUPS, 5, 4), 0)
    assert executor(1, past) is not None and executor(1) is None


@pytest.mark.parametrize("executor", ["packed", "auto", "masked", "reference"])
def test_attention_matrices_by_the_config(executor):
    model = moh_vision.convert(dense(attention="eager"), head_budget=HALF, executor=executor)
    model.config.output_attentions = True
    with torch.no_grad():
        found = model(words()).attentions
    assert [tuple(matrix.shape) for matrix in found] == [(2, 8, 9, 9)] * 2


@pytest.mark.parametrize("executor", ["packed", "auto", "reference"])
def test_gradients_under_left_padding_with_eager_attention(executor):
    """Rows of padding see no key, and the first real token is predicted from one."""
    inputs = left_padded()
    grads = {}
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    for each in ("masked", executor):
        model = moh_vision.convert(
            dense(attention="eager"), head_budget=HALF, router="moh", executor=each
        ).train()
        model(**inputs, labels=labels).loss.backward()
        grads[each] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert grads["masked"].keys() == grads[executor].keys()
    for name, grad in grads["masked"].items():
        torch.testing.assert_close(grads[executor][name], grad, rtol=1e-4, atol=1e-5)


def test_hooks_of_the_dense_layers_stay():
    model = dense()
    seen = []

    def note(module, args, kwargs, *out):
        seen.append(sorted(kwargs))

    attn = model.model.layers[0].self_attn
    handles = [
        attn.register_forward_pre_hook(note, with_kwargs=True),
        attn.register_forward_hook(note, with_kwargs=True),
    ]
    moh_vision.convert(model, head_budget=HALF)
    model(words())
    assert len(seen) == 2 and all("hidden_states" in kwargs for kwargs in seen)
    for handle in handles:
        handle.remove()
    model(words())
    assert len(seen) == 2


def test_routing_given_to_from_pretrained_is_checked(tmp_path):
    dense().save_pretrained(tmp_path)
    model = MoHLlamaForCausalLM.from_pretrained(tmp_path, moh=dict(head_budget=HALF))
    assert model.config.moh["head_budget"] == [[2, 2]] * 2
    assert model.config.moh["router"] == "query_norm"
    with one_line("router 'mae' causal query_norm moh"):
        MoHLlamaForCausalLM.from_pretrained(tmp_path, moh=dict(router="mae"))
