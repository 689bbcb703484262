"""Names, refusals and parameter counts of the text models."""

import re
from copy import deepcopy

import pytest
import torch

import moh_vision
from moh_vision.attention import attention_layers
from moh_vision.language.config import LanguageConfig, TextModelConfig
from moh_vision.language.models.create import create_text_model, list_text_presets, task_of
from tests.support.refusals import refuse
from tests.support.text_tiny import empty, stir, words


def test_every_preset_is_built_and_routes_as_its_name_says():
    for preset in list_text_presets():
        layers = attention_layers(empty(preset))
        router = type(layers[0].router).__name__.lower()
        if "nobcd" in preset:
            expected = "mae"
        else:
            named = [name for name in ("mae", "moa", "moh") if f"_{name}_" in preset]
            expected = named[0] if named else "dense"
        assert router == f"{expected}router", preset
        if expected == "mae":
            heads = 28 if preset.endswith("_6") else 8
            assert layers[0].router.mode == ("uniform" if "_uni_" in preset else "soft")
            assert layers[0].router.members.shape == (heads, 8)
        if expected == "moa":
            named = re.findall(r"(\d+)[KED]", preset)
            budget = layers[0].budget
            assert [budget.active, budget.heads, layers[0].head_dim] == [*map(int, named)], preset


def test_where_gates_of_mae_pool():
    translation = empty("mt_mae_7")
    language = empty("clm_wt103_mae_7")
    assert {layer.self_attn.router.pool for layer in translation.encoder.layers} == {"sequence"}
    assert {layer.self_attn.router.pool for layer in translation.decoder.layers} == {"running"}
    assert all(layer.cross_attn.by_context for layer in translation.decoder.layers)
    assert {(layer.router.pool, layer.router.window) for layer in attention_layers(language)} == {
        ("window", 100)
    }


SMALL = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_attention_heads=8)
DEPTH = {
    "mt": dict(encoder_layers=1, decoder_layers=2),
    "clm": dict(num_hidden_layers=2),
}


@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_no_token_moves_the_predictions_before_it(training):
    """Of every preset that predicts the next token."""
    tokens = words(2, 9)
    n = 5  # the first token that is another
    other = torch.cat([tokens[:, :n], words(2, 4, seed=2)], 1)
    # Of MoA's one: the others differ in sizes alone.
    kinds = {re.sub(r"\d+K\d+E\d+D", "", preset): preset for preset in list_text_presets()}
    for preset in kinds.values():
        task = task_of(preset)
        if task == "mlm":
            continue
        overrides = {**SMALL, **DEPTH[task]}
        if "wt103" in preset:
            overrides["adaptive_cutoffs"] = [10, 25]
        model = create_text_model(preset, **overrides).double().train(training)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        stir(model)
        before = deepcopy(model)  # running statistics move on in training

        want = predict(model, task, tokens)
        got = predict(before, task, other)
        torch.testing.assert_close(got[:, :n], want[:, :n], msg=preset)
        assert (got[:, n] - want[:, n]).abs().max() > 1e-3, preset


def predict(model, task, ids):
    """Return the log-probabilities of the token after each of `ids`, with the same experts drawn in every call."""
    torch.manual_seed(0)
    if task == "mt":
        return model(input_ids=words(2, 5), decoder_input_ids=ids).logits
    return model(input_ids=ids).logits


@pytest.mark.parametrize(
    "preset, overrides, words",
    [
        ("mt_mae_8", {}, "there is no text model 'mt_mae_8': did you mean mt_mae_"),
        ("nonsense", {}, "there is no text model 'nonsense': only .*mt_transformer_base"),
        ("mt_moa_9K8E128D", {}, "top_k=9 of only 8 experts"),
        ("mt_moa_0K8E128D", {}, "needs top_k, a whole number of at least 1, not 0"),
        ("mlm_base", {"encoder_layers": 3}, "mlm_base has no 'encoder_layers': "),
        ("mt_mae_7", {"head_budget": 0.5}, "attention: router 'mae' has no 'head_budget'"),
        ("mt_mae_7", {"encoder_layer": 3}, "did you mean encoder_layers"),
        ("mt_mae_7", {"dropout": 1.0}, "dropout=1.0 is out of range"),
        ("mt_mae_7", {"encoder_layers": 0}, "encoder_layers=0 is not a whole number"),
        ("mt_mae_7", {"num_attention_heads": 5}, "no multiple of num_attention_heads=5"),
        (
            "mt_mae_7",
            {"attention": {"router": "mae", "leave": 1}},
            "has no 'leave', did you mean leave_out",
        ),
        (
            "mt_mae_7",
            {"cross_attention": {"router": "moe"}},
            "cross_attention: .*not a dict with a router out of",
        ),
        (
            "mt_moh_75",
            {"attention": {"router": "moh", "head_budget": 2}},
            "head_budget 2 is not understood",
        ),
        (
            "clm_wt103_base",
            {"adaptive_cutoffs": [9, 5]},
            r"adaptive_cutoffs=\[9, 5\] are not increasing",
        ),
        ("clm_wt103_base", {"vocab_size": 40}, "between 0 and vocab_size=40"),
        ("clm_moh_smal_75", {}, "did you mean clm_moh_small_75"),
        (
            "clm_small",
            {"hidden_sise": 8},
            "clm_small has no 'hidden_sise': did you mean hidden_size",
        ),
        ("clm_small", {"head_budget": 0.5}, "clm_small is dense: head_budget needs router="),
        ("clm_small", {"hidden_size": 30, "num_attention_heads": 4}, "30.* is not a multiple of"),
        ("clm_small", {"hidden_size": "wide"}, "clm_small: .*hidden_size.*'wide'"),
        (
            "clm_small",
            {"num_hidden_layers": 0},
            "num_hidden_layers=0 is not a whole number of at least 1",
        ),
        (
            "clm_small",
            {"num_key_value_heads": 5},
            "num_key_value_heads=5 does not divide num_attention_heads=12",
        ),
        (
            "clm_moh_small_75",
            {"router_kwargs": {"twostage": 1}},
            "router 'moh' has no 'twostage', it takes gate_scale",
        ),
    ],
    ids=str,
)
def test_refusals_are_one_line(preset, overrides, words):
    refuse(words, empty, preset, **overrides)


def test_the_head_budget_of_a_text_model_is_spelt_as_that_of_an_image_model():
    small = dict(hidden_size=32, num_attention_heads=4, intermediate_size=32, vocab_size=50)
    for preset in ("mt_moh_75", "clm_moh_small_75"):
        layers = "encoder_layers" if preset.startswith("mt") else "num_hidden_layers"
        model = create_text_model(preset, head_budget="uniform:0.5", **{layers: 2}, **small)
        assert {layer["active"] for layer in moh_vision.head_budget(model)["layers"]} == {2}
    spelt = LanguageConfig(model=TextModelConfig(name="mt_moh_75", head_budget=[(1, 2)]))
    assert spelt.model_arguments({}) == dict(head_budget=[[1, 2]])
    with pytest.raises(
        ValueError, match="model.head_budget and model.kwargs.head_budget are the same thing"
    ):
        TextModelConfig(name="mt_moh_75", head_budget=0.5, kwargs=dict(head_budget=0.5))
