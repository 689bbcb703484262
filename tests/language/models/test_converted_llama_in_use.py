"""Converted LLaMA-style models where other libraries, or other models, have a hand in them."""

import pytest
import torch
from accelerate import cpu_offload
from llama_tiny import dense, left_padded, words
from refusals import refuse
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import moh_vision
from moh_vision.attention.routing import Call
from moh_vision.language.models.llama.model import MoHLlamaForCausalLM

CPU = torch.device("cpu")
HALF = "uniform:0.5"


def test_models_that_share_a_config_keep_their_own_routing(tmp_path):
    first = dense()
    config = first.config
    second, third = LlamaForCausalLM(config), LlamaForCausalLM(config)
    moh_vision.convert(second, head_budget=HALF)
    moh_vision.convert(third, head_budget="uniform:0.75")
    assert second.config.moh["head_budget"] == [[2, 2]] * 2 and third.config.moh["head_budget"] == [[3, 3]] * 2
    first.save_pretrained(tmp_path)
    for kind in (LlamaForCausalLM, AutoModelForCausalLM):  # a folder without the field is transformers' own
        loaded = kind.from_pretrained(tmp_path)
        assert type(loaded) is LlamaForCausalLM and not hasattr(loaded.config, "moh")


@pytest.mark.parametrize("batches", [words(), dict(input_ids=words())], ids=["tensor", "dict"])
def test_one_batch_needs_no_list(batches):
    model, listed = (moh_vision.convert(dense(), head_budget=HALF, calibrate=b) for b in (batches, [batches]))
    assert torch.equal(model(words()).logits, listed(words()).logits)


def test_offloaded_weights():
    model = moh_vision.convert(dense(), head_budget=HALF, executor="packed")
    want = model(words()).logits
    cpu_offload(model, CPU)
    assert torch.equal(model(words()).logits, want)

    model = dense()
    cpu_offload(model, CPU)
    refuse("convert before offloading", lambda: moh_vision.convert(model, head_budget=HALF, calibrate=[words()]))


def test_pages_of_continuous_batching_are_left_to_transformers():
    """Its attention function reads them, which ours cannot; the call has them as `cache`."""
    model = moh_vision.convert(dense(), head_budget=HALF, executor="reference")
    attn = model.model.layers[0].self_attn
    x, rotary = torch.randn(1, 3, 32), (torch.ones(1, 3, 4), torch.zeros(1, 3, 4))
    with torch.no_grad():
        routing, q = attn.route(x)
        call = Call(x, routing, q=q, rotary=rotary)
        assert attn.executor_of(call, None, None) is not None
        assert attn.executor_of(call, None, None, cache=object()) is None


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
    inputs, grads = left_padded(), {}
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    for each in ("masked", executor):
        model = moh_vision.convert(dense(attention="eager"), head_budget=HALF, router="moh", executor=each).train()
        model(**inputs, labels=labels).loss.backward()
        grads[each] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert grads["masked"].keys() == grads[executor].keys()
    for name, grad in grads["masked"].items():
        torch.testing.assert_close(grads[executor][name], grad, rtol=1e-4, atol=1e-5)


def test_hooks_of_the_dense_layers_stay():
    model, seen = dense(), []
    attn = model.model.layers[0].self_attn
    hooks = (attn.register_forward_pre_hook, attn.register_forward_hook)
    handles = [hook(lambda module, args, kwargs, *out: seen.append(sorted(kwargs)), with_kwargs=True) for hook in hooks]
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
    assert model.config.moh["head_budget"] == [[2, 2]] * 2 and model.config.moh["router"] == "query_norm"
    with pytest.raises(ValueError, match="router 'mae' is not for a causal model"):
        MoHLlamaForCausalLM.from_pretrained(tmp_path, moh=dict(router="mae"))
