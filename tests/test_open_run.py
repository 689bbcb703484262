"""`moh_vision.open_run`: runs, their checkpoints and files, published folders, and weights with a name, in one way."""

import shutil

import pytest
import timm
import torch

import moh_vision
from moh_vision.__main__ import main as command
from moh_vision.common.io import write_tensors
from moh_vision.models.weight_files import read_safetensors
from moh_vision.models.weights import find_weights
from moh_vision.opening import open_weights, wing_of
from tests.support.refusals import one_line
from tests.support.small_runs import same

TITLES = dict(cls="classifier", dit="diffusion", clm="text")
KINDS = dict(cls="classification", dit="diffusion", clm="text")


@pytest.fixture(scope="module")
def runs(trained, tmp_path_factory):
    """Runs by name, and what publish makes of them."""
    folder = tmp_path_factory.mktemp("published")
    found = {}
    for name in KINDS:
        found[name] = trained(name, 2, "--save-every", 1)
        found[f"{name}_published"] = folder / name
        assert command(["publish", str(found[name]), "--output", str(folder / name)]) == 0
    return found


@pytest.mark.parametrize("name", KINDS)
def test_every_form_of_a_run_is_the_same_model(runs, name, tmp_path, monkeypatch):
    run = runs[name]
    opened = moh_vision.open_run(run)
    assert opened.kind == KINDS[name] == find_weights(run).wing
    assert not opened.model.training
    weights = "model" if name == "clm" else "ema"
    forms = [
        run / f"{weights}.safetensors",
        run / "checkpoints" / "step_2",
        runs[f"{name}_published"],
    ]
    if name != "clm":  # weights alone say their kind
        forms.append(shutil.copy(run / "ema.safetensors", tmp_path / "weights.safetensors"))
    for form in forms:
        again = moh_vision.open_run(str(form))
        assert again.kind == KINDS[name]
        assert same(again.model, opened.model)
        assert same(moh_vision.load_run(form), opened.model)
    assert same(moh_vision.load_run(run), opened.model)
    if name == "cls":
        shares = [each.model.pretrained_cfg["crop_pct"] for each in (again, opened)]
        assert shares == [1, 1]
    assert same(
        moh_vision.load_run(run, "model").state_dict(),
        moh_vision.open_run(run, "model").model.state_dict(),
    )
    inputs, named = opened.example()
    with torch.no_grad():
        opened.model(*inputs, **named)
    monkeypatch.chdir(run / "checkpoints" / "step_1")
    earlier = moh_vision.open_run("model.safetensors")
    assert earlier.metadata["step"] == 1 and not same(earlier.model, opened.model)


def test_weights_that_training_keeps_are_opened_like_a_run(trained):
    run = trained("clm", 4, "--keep-weights-every", 2)
    early, late = (moh_vision.load_run(run / "weights" / f"step_{step}") for step in (2, 4))
    assert same(late, moh_vision.load_run(run)) and not same(early, late)


def test_weights_with_the_name_of_a_model(tmp_path):
    for name, wing in (
        ("moh_vit_tiny_patch16_224", "classification"),
        ("moh_dit_small_patch2_75", "diffusion"),
    ):
        model = timm.create_model(name)
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        opened = moh_vision.open_run(tmp_path / "weights.pt", name=name)
        assert opened.kind == wing
        assert opened.metadata["architecture"] == name
        assert same(opened.model, model)


@pytest.mark.parametrize(
    "options, wing",
    [
        ("--model.name moh_dit_small_patch2_75", "diffusion"),
        ("--model.name=moh_dit_small_patch2_75", "diffusion"),
        (
            "--model.name=moh_dit_small_patch2_75 --model.name moh_vit_tiny_patch16_224",
            "classification",
        ),
        ("--data.root digits --model.name", "classification"),
    ],
)
def test_an_option_names_the_model_of_a_file(tmp_path, options, wing):
    """In either of its forms; of two the last counts, as everywhere."""
    (tmp_path / "weights.pt").touch()
    assert wing_of(find_weights(tmp_path / "weights.pt"), options.split()) == wing


def test_data_losses_and_scores(runs):
    for name, key in (("cls", "top1"), ("clm", "perplexity")):
        opened = moh_vision.open_run(runs[name], device="cpu")
        assert opened.data("val") is not None and opened.scores()[key] > 0
    for name in KINDS:
        opened = moh_vision.open_run(runs[name])
        searched, compared = opened.halves(4)
        loss = opened.mean_loss(searched)
        assert loss > 0 and loss != opened.mean_loss(compared)
        assert float(opened.loss(searched[0])) == pytest.approx(loss, rel=1e-5)


def test_samples_are_scored_as_asked(runs):
    asked = f"--score digits --extractor {runs['cls']} --num-images 20 --steps 2 --batch-size 10".split()
    opened = open_weights(find_weights(runs["dit"]), asked, scores=True)
    assert opened.make_forward()[1] == 10
    for reference in (None, "digits"):  # the training images, as while training
        by_config = moh_vision.open_run(runs["dit"])
        by_config.metadata["config"]["score"].update(
            images=20, steps=3, extractor=str(runs["cls"]), reference=reference
        )
        assert by_config.scores()["num_reference"] == 1442
    assert opened.scores() == opened.scores() and 0 <= opened.scores()["recognised"] <= 100


def test_mistakes_are_one_line(runs, tmp_path):
    with one_line(f"{tmp_path}/nowhere", FileNotFoundError):
        moh_vision.open_run(tmp_path / "nowhere")
    with one_line("nowhere run file registered", FileNotFoundError):
        moh_vision.open_run("nowhere")
    shutil.copytree(runs["cls"], tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    text = config.read_text()
    for said, facts in (
        ("clasification", "'clasification' classification"),
        ("null", "None classification diffusion text"),
    ):
        config.write_text(text.replace("kind: classification", f"kind: {said}"))
        with one_line(f"{config} kind {facts}"):
            moh_vision.open_run(tmp_path / "run")
    config.write_text("kind: [")
    with one_line(f"{config} YAML"):
        moh_vision.open_run(tmp_path / "run")
    config.write_text(text + "kind: text\n")
    with one_line(f"{config} 'kind' line already"):
        moh_vision.open_run(tmp_path / "run")
    with one_line(f"{runs['clm_published']} run configuration"):
        moh_vision.open_run(runs["clm_published"]).data("val")
    with one_line(f"model.depth effect {runs['cls']} model.head_budget model.mlp_budget"):
        moh_vision.open_run(runs["cls"], options=["--model.depth", "3"])
    with one_line(f"optim.lr effect {runs['clm']} data.* mixed_precision tf32"):
        moh_vision.open_run(runs["clm"], options=["--optim.lr", "1"])


def test_what_has_no_effect_is_refused_by_its_name(runs):
    root = ["--data.root", "digits"]
    for name in ("dit_published", "clm_published"):
        with one_line(f"--data.root digits effect {runs[name]} run"):
            moh_vision.open_run(runs[name], options=root)
    with one_line("weights 'model' effect options"):
        last = find_weights(runs["dit"], prefer="model")
        open_weights(last, ["--score", "digits"], scores=True)
    for form in ("cls_published", "dit_published", "clm_published"):
        with one_line(f"weights ema effect {runs[form]} one"):
            moh_vision.open_run(runs[form], "ema")
    for name in KINDS:
        with one_line(f"name 'moh_dit_small_patch2_75' effect {runs[name]} {TITLES[name]}"):
            moh_vision.open_run(runs[name], name="moh_dit_small_patch2_75")


def test_a_diffusion_run_numbers_the_classes_of_its_data_by_name(runs, tmp_path):
    """Of a run whose data had them in another order."""
    run = runs["dit"]
    state, metadata = read_safetensors(run / "ema.safetensors")
    turned = dict(metadata, classes=metadata["classes"][::-1])
    write_tensors(tmp_path / "ema.safetensors", state, turned)
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    one, other = (moh_vision.open_run(str(folder)).data("val").source for folder in (run, tmp_path))
    assert (other.labels == 9 - one.labels).all() and other.classes == turned["classes"]
