"""A router of a file of one's own goes wherever the package's go: models, conversion, scripts, commands, published folders."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import moh_vision
from moh_vision.attention import ROUTERS, attention_layers
from moh_vision.models.fixed_heads import keep_heads
from tests.support import dense_vits, llama_tiny, small_runs, text_tiny
from tests.support.families import FAMILIES
from tests.support.refusals import refuse
from tests.support.users_routers import CosineRouter

HEAD_BUDGET = "uniform:0.5"


@pytest.fixture(scope="module", autouse=True)
def registered():
    ROUTERS["cosine"] = CosineRouter
    yield
    del ROUTERS["cosine"]


@pytest.mark.parametrize("family", ["vit", "transnext", "dit"])
def test_image_models_have_it(family):
    model, inputs = FAMILIES[family]("cosine", head_budget=HEAD_BUDGET)
    active = {layer.budget.active for layer in attention_layers(model)}
    assert all(layer.budget.shared == 0 for layer in attention_layers(model)) and active
    _, stats = model.forward_routed(*inputs)
    assert all(entry.counts.sum() > 0 for entry in stats)


@pytest.mark.parametrize("preset", text_tiny.DEPTH)
def test_text_models_have_it_with_its_options(preset):
    spec = dict(router="cosine", head_budget=0.5, first_scale=3.0)
    model = text_tiny.tiny(preset, spec)
    for layer in attention_layers(model):
        assert layer.budget.shared == 0 and layer.router_kwargs == dict(first_scale=3.0)
    wrong = dict(router="cosine", first_size=1)
    refuse("attention router 'cosine' 'first_size' first_scale", text_tiny.tiny, preset, wrong)
    experts = dict(router="cosine", top_k=2, experts=5, head_dim=6)
    assert all(layer.kv_heads == 1 for layer in attention_layers(text_tiny.tiny(preset, experts)))


@pytest.mark.parametrize("make", [dense_vits.dense, llama_tiny.dense], ids=["vit", "llama"])
@torch.no_grad()
def test_a_dense_model_is_converted_to_it(make):
    dense = make()
    inputs = dense_vits.images(2)
    if make is llama_tiny.dense:
        inputs = llama_tiny.words()

    def output():
        found = dense(inputs)
        return found if torch.is_tensor(found) else found.logits

    want = output()
    dense = moh_vision.convert(dense, router="cosine")
    torch.testing.assert_close(output(), want, rtol=1e-4, atol=1e-4)
    moh_vision.set_head_budget(dense, 0.5)
    assert not torch.allclose(output(), want, rtol=1e-2)


def test_dense_weights_make_it_plain_attention(tmp_path):
    model, (images,) = FAMILIES["vit"]("cosine", head_budget=1.0)
    dense, _ = FAMILIES["vit"]("dense")
    save_file(dense.state_dict(), tmp_path / "dense.safetensors")
    moh_vision.load_checkpoint(model, tmp_path / "dense.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(model(images), dense(images), rtol=1e-4, atol=1e-5)


def test_heads_do_not_leave_a_router_that_does_not_say_how():
    model, _ = FAMILIES["vit"]("cosine", head_budget=HEAD_BUDGET)
    refuse("layer 0 router weights", keep_heads, model, [[0, 1, 2]] * 2)


def test_a_classifier_trains_is_drawn_published_and_opened(trained, run_command, tmp_path):
    run = trained("cls", 2, "--model.router", "cosine", "--model.head_budget", HEAD_BUDGET)
    image = tmp_path / "image.png"
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(image)
    command = ("patches", run, "--image", image, "--output", tmp_path / "heads.svg")
    assert run_command(*command).code == 0
    layers = json.loads((tmp_path / "heads.json").read_text())["layers"]
    gates = np.array(layers[0]["gates"], dtype=float)  # null where a head does not run
    assert np.isfinite(gates).sum(0).tolist() == [[len(gates) // 2] * 4] * 4
    published = tmp_path / "published"
    assert run_command("publish", run, "--output", published).code == 0
    for folder in (run, published):
        model = moh_vision.load_run(folder)
        assert isinstance(attention_layers(model)[0].router, CosineRouter)
    best = load_file(next(published.glob("*.safetensors")))
    assert small_runs.same(model.state_dict(), best)
    card = (published / "README.md").read_text()
    assert (
        "```python\nimport tests.support.users_routers  #" in card
    )  # without it the folder does not open


def test_a_text_model_trains_is_read_published_and_opened(trained, run_command, tmp_path):
    attention = "{router: cosine, head_budget: 0.5}"
    run = trained(
        "text", 2, "--model.name", "mt_transformer_base", "--model.kwargs.attention", attention
    )
    figure = tmp_path / "gates.svg"
    code, said, _ = run_command("gates", run, "--output", figure)
    assert code == 0 and "every token chooses 2" in said
    (told,) = json.loads(figure.with_suffix(".json").read_text())["runs"]
    assert {layer["experts"] for layer in told["layers"]} == {4}
    published = tmp_path / "published"
    assert run_command("publish", run, "--output", published).code == 0
    models = [moh_vision.load_run(folder) for folder in (run, published)]
    assert all(isinstance(attention_layers(m)[0].router, CosineRouter) for m in models)
