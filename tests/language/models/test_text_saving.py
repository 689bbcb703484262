"""Text models saved and loaded: equal, tied, and refused in one line where they do not fit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import moh_vision
from moh_vision.language.models.create import (
    CausalLMModel,
    MaskedLMModel,
    TranslationModel,
    create_text_model,
)
from tests.support.refusals import refuse
from tests.support.small_runs import same
from tests.support.text_tiny import ATTENTIONS, TINY, tiny, words

MT = "mt_transformer_base"
MLM = "mlm_base"
CLASSES = {
    MT: (TranslationModel, AutoModelForSeq2SeqLM),
    MLM: (MaskedLMModel, AutoModelForMaskedLM),
    "clm_wt103_base": (CausalLMModel, AutoModelForCausalLM),
}


def inputs_of(preset):
    inputs = {"input_ids": words(2, 6)}
    if "mt" in preset:
        inputs["decoder_input_ids"] = words(2, 5, seed=2)
    return inputs


@pytest.mark.parametrize("attention", sorted(ATTENTIONS))
@pytest.mark.parametrize("preset", CLASSES)
def test_a_loaded_model_is_the_saved_one(preset, attention, tmp_path):
    model = tiny(preset, attention, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    for model_class in CLASSES[preset]:
        loaded = model_class.from_pretrained(tmp_path)
        assert type(loaded) is type(model)
        for name, value in model.config.to_dict().items():
            if name not in ("_name_or_path", "dtype", "architectures"):
                assert getattr(loaded.config, name) == value
        assert same(loaded, model)
        buffers = dict(loaded.named_buffers())
        for name, value in model.named_buffers():
            if not name.rpartition(".")[2].startswith("taken_"):  # written before they are read
                assert torch.equal(buffers[name], value), name
        assert torch.equal(loaded(**inputs_of(preset)).logits, model(**inputs_of(preset)).logits)


@pytest.mark.parametrize("attention", ["moh", "moa"])
@pytest.mark.parametrize("preset", CLASSES)
def test_a_changed_head_budget_is_saved(preset, attention, tmp_path):
    model = moh_vision.set_head_budget(tiny(preset, attention, dtype=torch.float32), 0.8)
    budget = moh_vision.head_budget(model)
    assert budget != moh_vision.head_budget(tiny(preset, attention))
    model.save_pretrained(tmp_path)
    assert moh_vision.head_budget(CLASSES[preset][1].from_pretrained(tmp_path)) == budget


def test_tied_weights_are_saved_once_and_stay_one(tmp_path):
    for preset, names in (
        (MT, ("encoder.embedding", "decoder.embedding", "output")),
        (MLM, ("embedding", "output")),
    ):
        model = tiny(preset, dtype=torch.float32)
        model.save_pretrained(tmp_path / preset)
        saved = load_file(tmp_path / preset / "model.safetensors")
        assert sum(value.shape == (40, 32) for value in saved.values()) == 1
        for each in (model, CLASSES[preset][0].from_pretrained(tmp_path / preset)):
            first, *tied = (each.get_submodule(name).weight for name in names)
            assert all(weight is first for weight in tied)


def test_missing_weights_are_made_anew_as_in_a_new_model(tmp_path):
    """What a checkpoint lacks (a gate, say) is not left as the memory that it was given."""
    model = tiny("mlm_base", "mae_7", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if "router" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    loaded = MaskedLMModel.from_pretrained(tmp_path)
    router = loaded.layers[0].self_attn.router
    assert router.norm.running_var.eq(1).all() and router.norm.running_mean.eq(0).all()
    assert router.norm.weight.eq(1).all() and router.norm.num_batches_tracked == 0
    assert router.hidden.bias.eq(0).all() and 0 < router.hidden.weight.std() < 0.1
    assert torch.equal(loaded.embedding.weight, model.embedding.weight)


@pytest.mark.parametrize(
    "preset, given, changed, facts",
    [
        (
            MT,
            dict(vocab_size=50),
            {},
            "40 encoder.embedding.weight 50 tokenizer",
        ),
        (
            MT,
            {},
            dict(intermediate_size=64),
            "decoder.layers.0.ffn.inner.bias [48] [64]",
        ),
        (
            MLM,
            {},
            dict(attention={"router": "moe"}),
            "attention 'moe' dense gated mae moa moh query_norm",
        ),
    ],
)
def test_what_does_not_fit_is_named(preset, given, changed, facts, tmp_path):
    tiny(preset).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    refuse(facts, lambda: CLASSES[preset][0].from_pretrained(tmp_path, **given))


def test_first_weights():
    torch.manual_seed(0)
    fields = {**TINY, "hidden_size": 128}
    moa = create_text_model("mt_moa_2K4E64D", **fields).decoder.layers[0].cross_attn
    q, kv = moa.qkv.weight.split([4 * 64, 2 * 64])
    assert torch.equal(moa.router.gate.weight, torch.zeros(4, 128))
    dense = create_text_model("mt_transformer_base", **fields)
    attention = dense.encoder.layers[0].self_attn
    # Zhang 2022's code: experts by Xavier on (d, D) each, the shared key and value with gain 1 / sqrt(2).
    bounds = [(q, 6 / 192), (moa.proj.weight, 6 / 192), (kv, 3 / 192)]
    for weight, bound in [
        *bounds,
        (attention.qkv.weight, 3 / 256),
        (attention.proj.weight, 6 / 256),
    ]:
        assert weight.abs().max().item() == pytest.approx(bound**0.5, rel=0.01)
    assert dense.encoder.embedding.weight.std().item() == pytest.approx(128**-0.5, rel=0.05)
    masked = create_text_model("mlm_moa_2K4E64D", **fields)
    assert masked.layers[0].self_attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(masked.layers[0].self_attn.router.gate.weight, torch.zeros(4, 128))
    assert torch.equal(masked.layers[0].self_attn.head_bias, torch.zeros(4, 128))
