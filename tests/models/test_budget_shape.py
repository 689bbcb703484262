"""A number of a head budget keeps the shape of the model that it is given to, everywhere."""

import json

import pytest
import timm
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import moh_vision
from moh_vision.__main__ import main
from moh_vision.attention import model_heads
from moh_vision.classification import train as train_cls
from moh_vision.classification import validate
from moh_vision.commands.budget_curve import budgets_of
from moh_vision.language import create_text_model
from moh_vision.models.dit_transformer import MoHDiTTransformer2DModel
from moh_vision.models.elastic import ElasticBudget
from tests.support.small_runs import arguments, results

SIZES = dict(img_size=8, patch_size=4, embed_dim=32, depth=4, num_heads=8, num_classes=3)
DIT = dict(sample_size=4, hidden_size=48, num_layers=4, num_attention_heads=8, num_classes=2)
# Half of eight heads in four layers.
UNIFORM = [4, 4, 4, 4]
RAMP = [3, 4, 4, 5]


def vit(**kwargs):
    return timm.create_model("moh_vit_tiny_patch16_224", **SIZES, **kwargs)


def converted():
    return moh_vision.convert(vit(router="dense"))


def active(model):
    return [layer["active"] for layer in moh_vision.head_budget(model)["layers"]]


def half(model):
    """Active heads of each layer at a share of 0.5."""
    return active(moh_vision.set_head_budget(model, 0.5))


@pytest.fixture(autouse=True)
def said_anew():
    """What is said once a process is said in every test."""
    model_heads._warn_once_of_shape.cache_clear()


def test_a_number_keeps_the_shape_of_the_model(caplog):
    assert half(converted()) == UNIFORM == active(moh_vision.convert(vit(router="dense"), 0.5))
    assert half(vit(head_budget=0.75)) == RAMP == active(vit(head_budget=0.5))
    assert half(vit(head_budget="uniform:0.75")) == UNIFORM
    assert half(vit(head_budget=0.75, head_budget_shape="uniform")) == UNIFORM
    model = moh_vision.set_head_budget(converted(), [[1, 5], [1, 3], [1, 2], [1, 7]])
    assert half(model) == UNIFORM
    moh_vision.set_head_budget(model, "ramp:0.75")
    assert half(model) == RAMP  # the last shape that was said
    shares = [message for message in caplog.messages if "head_budget" in message]
    assert not shares


def test_a_list_without_a_shape_is_taken_for_a_ramp_and_it_is_said(caplog):
    model = vit(head_budget=[[1, 5]] * 4)
    assert half(model) == RAMP
    (said,) = caplog.messages
    assert "does not say how its head_budget is spread over the layers" in said
    assert "taken for a ramp; uniform:S is the same share in every layer" in said


@pytest.mark.parametrize("make, expected", [(converted, UNIFORM), (vit, RAMP)])
def test_elastic_budgets_and_curves_keep_it(make, expected):
    curve = budgets_of(make(), ["0.5"])
    assert [b.active for b in curve[0.5].heads] == expected
    elastic = ElasticBudget(make(), (0.5, 1.0), seed=0)
    assert [b.active for b in elastic.budgets["0.5"].heads] == expected


@pytest.mark.parametrize("spec, expected", [("uniform:0.75", UNIFORM), (0.75, RAMP)])
def test_diffusion_and_language_models_save_it(spec, expected, tmp_path):
    dit = MoHDiTTransformer2DModel(**DIT, head_budget=spec)
    moh_vision.set_head_budget(dit, 1.0).save_pretrained(tmp_path / "dit")
    assert half(MoHDiTTransformer2DModel.from_pretrained(tmp_path / "dit")) == expected
    sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=32, num_attention_heads=8)
    llama = dict(sizes, num_key_value_heads=8, num_hidden_layers=4, router="moh", head_budget=spec)
    model = moh_vision.set_head_budget(create_text_model("clm_small", **llama), 1.0)
    model.save_pretrained(tmp_path / "llama")
    assert half(AutoModelForCausalLM.from_pretrained(tmp_path / "llama")) == expected
    pairs = dict(sizes, encoder_layers=2, decoder_layers=1, head_budget=spec)
    for name, shape in (("made", spec), ("set", "uniform:1.0")):
        model = moh_vision.set_head_budget(create_text_model("mt_moh_75", **pairs), shape)
        model.save_pretrained(tmp_path / name)
        again = half(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name))
        share = f"{str(shape).partition(':')[0]}:0.5" if ":" in str(shape) else "ramp:0.5"
        assert again == active(moh_vision.set_head_budget(model, share))


def test_a_converted_language_model_is_uniform():
    sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=32, num_attention_heads=8)
    model = create_text_model("clm_small", **sizes, num_key_value_heads=8, num_hidden_layers=4)
    assert half(moh_vision.convert(model)) == UNIFORM


@pytest.mark.parametrize(
    "spec, expected",
    [
        ("uniform:0.75", [4, 4]),
        pytest.param("ramp:0.75", [3, 5], marks=pytest.mark.slow),
    ],
)
def test_runs_and_published_folders_keep_it(spec, expected, tmp_path, capsys):
    """A run that is trained at every share, validated at 0.5 and published runs the same heads."""
    run = tmp_path / "run"
    folder = tmp_path / "published"
    elastic = f"--model.head_budget {spec} --budget_range 0.5 1"
    # The smallest share fixes the shared heads.
    elastic = elastic.replace("0.75", "0.5")
    train_cls.main(arguments("cls", run, 2, 2, *elastic.split()))
    assert main(["publish", str(run), "--output", str(folder)]) == 0
    saved = json.loads((folder / "config.json").read_text())["model_args"]
    assert saved["head_budget_shape"] == spec.partition(":")[0]
    for path in (run, folder):
        assert half(moh_vision.load_run(path)) == expected
    assert half(timm.create_model(f"local-dir:{folder}", pretrained=True)) == expected
    capsys.readouterr()
    validate.main(f"--checkpoint {run} --model.head_budget 0.5 --data.workers 0".split())
    out = capsys.readouterr().out
    assert f"active heads per layer: {expected[0]}, {expected[1]} (50.0 % of all)" in out
    assert f"loss {results(run)['by_share']['0.5']['loss']:.4f}" in out


def test_a_pretrained_dit_is_converted_to_a_uniform_share(tmp_path, capsys):
    """As the reference of model.convert says: its share is uniform, for DiTs too."""
    from moh_vision.diffusion import train as train_dit

    sizes = "--model.name dit_small_patch2 --model.head_budget null --model.num_heads 8"
    train_dit.main(arguments("dit", tmp_path / "dense", 1, 1, *sizes.split()))
    argv = arguments("dit", tmp_path / "run", 1, 1)
    argv += ["--model.name", "pretrained", "--model.pretrained", str(tmp_path / "dense")]
    for key in ("depth", "embed_dim", "head_budget", "patch_size", "kwargs", "router", "scope"):
        argv += [f"--model.{key}", "null"]
    train_dit.main([*argv, "--model.convert", "{head_budget: 0.5}"])
    model = moh_vision.load_run(tmp_path / "run")
    assert active(model) == [4, 4] == half(model)
    # A run that starts from that one, with another number.
    again = ["--output", str(tmp_path / "again"), "--model.convert", "null"]
    argv[argv.index("--model.pretrained") + 1] = str(tmp_path / "run")
    train_dit.main([*argv, *again, "--model.head_budget", "0.75"])
    assert active(moh_vision.load_run(tmp_path / "again")) == [6, 6]
