"""Names, refusals and parameter counts of the text models."""

import re
from copy import deepcopy

import pytest
import torch

import moh_vision
from moh_vision.attention import attention_layers
from moh_vision.language.config import LanguageConfig, TextModelConfig
from moh_vision.language.models.create import create_text_model, list_text_presets, task_of
from tests.support.refusals import one_line, refuse
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
    "preset, overrides, facts",
    [
        ("mt_mae_8", {}, "'mt_mae_8' mt_mae_7 mt_mae_6"),
        ("nonsense", {}, "'nonsense' mt_transformer_base"),
        ("mt_moa_9K8E128D", {}, "attention top_k=9 8 experts"),
        ("mt_moa_0K8E128D", {}, "attention 'moa' top_k 1 0"),
        ("mlm_base", {"encoder_layers": 3}, "mlm_base 'encoder_layers' num_hidden_layers"),
        ("mt_mae_7", {"head_budget": 0.5}, "attention 'mae' 'head_budget' leave_out"),
        ("mt_mae_7", {"encoder_layer": 3}, "mt_mae_7 'encoder_layer' encoder_layers"),
        ("mt_mae_7", {"dropout": 1.0}, "dropout=1.0 0 1"),
        ("mt_mae_7", {"encoder_layers": 0}, "encoder_layers=0 whole 1"),
        ("mt_mae_7", {"num_attention_heads": 5}, "hidden_size=512 num_attention_heads=5"),
        (
            "mt_mae_7",
            {"attention": {"router": "mae", "leave": 1}},
            "attention 'mae' 'leave' leave_out",
        ),
        (
            "mt_mae_7",
            {"cross_attention": {"router": "moe"}},
            "cross_attention 'moe' mae moa moh query_norm",
        ),
        (
            "mt_moh_75",
            {"attention": {"router": "moh", "head_budget": 2}},
            "head_budget 2 0 1 pair",
        ),
        (
            "clm_wt103_base",
            {"adaptive_cutoffs": [9, 5]},
            "adaptive_cutoffs=[9, 5] increasing",
        ),
        ("clm_wt103_base", {"vocab_size": 40}, "adaptive_cutoffs=[20000, 60000] 0 vocab_size=40"),
        ("clm_moh_smal_75", {}, "'clm_moh_smal_75' clm_moh_small_75"),
        (
            "clm_small",
            {"hidden_sise": 8},
            "clm_small 'hidden_sise' hidden_size",
        ),
        ("clm_small", {"head_budget": 0.5}, "clm_small head_budget router='moh' 'query_norm'"),
        ("clm_small", {"hidden_size": 30, "num_attention_heads": 4}, "30 multiple 4"),
        ("clm_small", {"hidden_size": "wide"}, "clm_small 'hidden_size' int 'wide'"),
        (
            "clm_small",
            {"num_hidden_layers": 0},
            "num_hidden_layers=0 whole 1",
        ),
        (
            "clm_small",
            {"num_key_value_heads": 5},
            "num_key_value_heads=5 num_attention_heads=12",
        ),
        (
            "clm_moh_small_75",
            {"router_kwargs": {"twostage": 1}},
            "router_kwargs 'moh' 'twostage' gate_scale two_stage",
        ),
    ],
    ids=str,
)
def test_refusals_are_one_line(preset, overrides, facts):
    refuse(facts, empty, preset, **overrides)


def test_the_head_budget_of_a_text_model_is_spelt_as_that_of_an_image_model():
    small = dict(hidden_size=32, num_attention_heads=4, intermediate_size=32, vocab_size=50)
    for preset in ("mt_moh_75", "clm_moh_small_75"):
        layers = "encoder_layers" if preset.startswith("mt") else "num_hidden_layers"
        model = create_text_model(preset, head_budget="uniform:0.5", **{layers: 2}, **small)
        assert {layer["active"] for layer in moh_vision.head_budget(model)["layers"]} == {2}
    spelt = LanguageConfig(model=TextModelConfig(name="mt_moh_75", head_budget=[(1, 2)]))
    assert spelt.model_arguments({}) == dict(head_budget=[[1, 2]])
    with one_line("model.head_budget model.kwargs.head_budget"):
        TextModelConfig(name="mt_moh_75", head_budget=0.5, kwargs=dict(head_budget=0.5))
