"""The command publish: the folder that timm, diffusers or transformers load, and its model card."""

import builtins
import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import timm
import torch
import yaml
from PIL import Image

from moh_vision import load_run
from moh_vision.__main__ import main
from moh_vision.attention import head_budget
from moh_vision.classification import train as train_cls
from moh_vision.commands.publish import data_of, datasets_of, without_paths
from moh_vision.commands.runs import TEXT, ScoredRun
from moh_vision.diffusion import sample
from moh_vision.language import train as train_text
from tests.support import small_runs
from tests.support.paths import ROOT
from tests.support.refusals import assert_says, refused

# Runs the code of each card and compares the model that it loads with that of the run. Weights are cloned first: the last
# bits of a product depend on the alignment of its tensors, which differs between files.
ROUND_TRIP = """
import re, sys, torch
import moh_vision
from diffusers import DiffusionPipeline
from moh_vision.classification.config import ClsConfig
from moh_vision.data.imagenet import classification_transforms
from moh_vision.engine.command_line import parse_config
from PIL import Image

def of_card(name):
    space = {}
    exec(re.search(r"```python\\n(.*?)```", open(f"{name}/README.md").read(), re.S)[1], space)
    return space

def same(published, run, **inputs):
    original = moh_vision.load_run(run)
    assert published.state_dict().keys() == original.state_dict().keys() and not published.training
    outputs = []
    for model in (original, published):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        with torch.no_grad():
            found = model(**inputs)
        outputs.append(found if torch.is_tensor(found) else found[0])
    assert torch.equal(*outputs)

runs = sys.argv[1]
space = of_card("cls")
same(space["model"], f"{runs}/cls", x=torch.randn(3, 1, 8, 8))
config = parse_config(ClsConfig, ["--config", f"{runs}/cls/config.yaml"], "")
own = classification_transforms(config.data, space["model"].pretrained_cfg, 8, 1)[1]
image = Image.open("image.png")
assert torch.equal(own(image), space["transform"](image.convert("L")))

space = of_card("dit")
inputs = dict(hidden_states=torch.randn(2, 1, 8, 8), timestep=torch.tensor([5, 900]), class_labels=torch.tensor([1, 10]))
again = DiffusionPipeline.from_pretrained("dit", custom_pipeline="dit", trust_remote_code=True)
for pipe in (space["pipe"], again):
    assert pipe.labels == {str(i): i for i in range(10)} and len(space["images"]) == 2
    same(pipe.transformer, f"{runs}/dit", **inputs)

space = of_card("text")
from moh_vision.language.data.vocabulary import EOS, Vocabulary
text = "eins neun null sieben"
ids = space["tokenizer"](text).input_ids
assert ids == [*Vocabulary.load(f"{runs}/text/tokenizer.json").encode([text])[0], EOS]
assert space["tokenizer"].decode(ids, skip_special_tokens=True) == text
example = {}
exec(open("example.py").read(), example)
assert example["inputs"].input_ids[1, -1] == 0 and len(example["ids"]) == 2  # padded
ids = torch.tensor([ids])
same(space["model"], f"{runs}/text/averaged.safetensors", input_ids=ids, decoder_input_ids=ids)
"""


@pytest.fixture(scope="module")
def runs(trained, tmp_path_factory):
    """A folder with runs cls, dit and text; the diffusion run has scores."""
    folder = tmp_path_factory.mktemp("runs")
    # A learning rate that makes every step worse, so that the average is better than the last weights.
    worse = "--optim.schedule constant --optim.warmup_steps 0 --optim.lr 0.3".split()
    text = (2, "--save-every", 1, "--average", "2", *worse)
    options = dict(cls=(4, "--eval_every", "2"), dit=(2,), text=text)
    for name, (steps, *more) in options.items():
        shutil.copytree(trained(name, steps, *more), folder / name)
    draw = f"--checkpoint {folder}/dit --num-images 8 --batch-size 8 --steps 2 --sampler ddim"
    sample.main([*draw.split(), *f"--score digits --extractor {folder}/cls".split()])
    return folder


@pytest.fixture(scope="module")
def published(runs, tmp_path_factory):
    """A folder with each of `runs` published."""
    folder = tmp_path_factory.mktemp("published")
    for name in ("cls", "dit", "text"):
        assert main(["publish", str(runs / name), "--output", str(folder / name)]) == 0
    return folder


def head_and_text(folder):
    """Return the metadata of a model card, parsed, and its text."""
    _, head, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), text


def test_round_trip_in_a_new_process(runs, published):
    guide = (ROOT / "docs/guides/text.md").read_text().partition("## Translate a sentence")[2]
    example = re.search(r"```python\n(.*?)```", guide, re.S)[1].replace("FOLDER", "text")
    (published / "example.py").write_text(example)
    Image.effect_noise((20, 30), 60).save(published / "image.png")
    files = sorted(p.relative_to(published).as_posix() for p in published.rglob("*") if p.is_file())
    assert not [file for file in files if file.endswith((".bin", ".pt", ".pth", ".pkl", ".tmp"))]
    env = dict(
        os.environ, PYTHONPATH=str(ROOT), HF_HOME=str(published / ".hub"), HF_HUB_OFFLINE="1"
    )
    command = [sys.executable, "-c", ROUND_TRIP, str(runs)]
    done = subprocess.run(
        command, cwd=published, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_card(runs, published):
    head, text = head_and_text(published / "cls")
    assert head == dict(
        library_name="timm", pipeline_tag="image-classification", tags=["moh_vision"]
    )
    # The title names the sizes: the name of the model alone would be that of a larger one.
    sizes = "patch_size 2, embed_dim 32, depth 2, num_heads 8, head_budget 0.75"
    assert f"\n# moh_vit_tiny_patch16_224 with {sizes}\n" in text
    results = small_runs.results(runs / "cls")
    assert f"| top-1, % | {results['top1']:.2f} |" in text
    assert "355 validation images of digits" in text
    for number, layer in enumerate(head_budget(load_run(runs / "cls"))["layers"]):
        row = [number, *(layer[key] for key in "heads head_dim shared routed active name".split())]
        assert re.search(r"^\s*" + r"\s+".join(map(str, row)) + "$", text, re.M)
    assert "of dense ideal" in text
    assert "10 classes, 1,442 images in train, 355 images in val" in text
    start = json.loads((runs / "cls" / "environment.jsonl").read_text())
    shown = (
        start["date"],
        start["device"],
        f"torch {start['versions']['torch']}",
        without_paths(start["command"]),
    )
    assert all(words in text for words in shown)
    head, text = head_and_text(published / "dit")
    scores = json.loads((runs / "dit" / "scores.json").read_text())
    assert head["library_name"] == "diffusers"
    assert f"| recognised, % | {100 * scores['recognised']:.2f} |" in text
    assert "8 images against 355 of digits, val split" in text and "sampler ddim, steps 2" in text
    scheduler = json.loads((published / "dit/scheduler/scheduler_config.json").read_text())
    assert scheduler["_class_name"] == "DDIMScheduler" and "num_inference_steps=2)" in text
    head, text = head_and_text(published / "text")
    assert (head["library_name"], head["pipeline_tag"]) == ("transformers", "translation")
    assert "averaged.safetensors, mean of steps 1, 2" in text
    assert "| BLEU |" in text and "nrefs:1|case:mixed" in text
    parameters = sum(p.numel() for p in load_run(runs / "text").parameters())  # tied ones once
    assert f"parameters:   {parameters:,}\n" in text
    for name in ("cls", "dit", "text"):  # a card names no folder of this machine
        assert str(runs.parent) not in (published / name / "README.md").read_text()
    # load_run opens a published translation model too.
    averaged = load_run(runs / "text" / "averaged.safetensors").state_dict()
    assert small_runs.same(load_run(published / "text").state_dict(), averaged)


@pytest.mark.parametrize("name", ["cls", "dit", "text"])
@pytest.mark.parametrize("command", ["publish", "table", "report"])
def test_the_configuration_is_read_once(runs, tmp_path, monkeypatch, command, name):
    """One reading serves weights, scores and card, so they cannot disagree if the file changes meanwhile."""
    files = []
    for module in (io, builtins):
        original = module.open

        def counted(file, *args, original=original, **options):
            files.append(str(file))
            return original(file, *args, **options)

        monkeypatch.setattr(module, "open", counted)
    argv = [command, str(runs / name)]
    if command == "publish":
        argv += ["--output", str(tmp_path / name)]
    if command == "report":
        argv += ["--output", str(tmp_path / "report.html")]
    assert main(argv) == 0
    assert files.count(str(runs / name / "config.yaml")) == 1


def test_data_of_a_language_model():
    """The card links data of the hub. A folder may be called as a data set of the hub is, and is not linked."""
    sources = [dict(root="hfds/anna/books:de", weight=3), dict(root="wikitext", weight=1.5)]
    config = {
        "data.root": "all",
        "data.train": "train",
        "data.mixture": sources,
        "data.source": "en",
    }
    run = ScoredRun(ROOT, "text", TEXT["clm"], config, steps=0, scores={}, scored_on="")
    assert datasets_of(run) == ["anna/books"]
    assert data_of(run) == "`hfds/anna/books:de` (weight 3), `wikitext` (weight 1.5), split train."


@pytest.mark.parametrize(
    "root, names",
    [
        ("hfds/uoft-cs/cifar100?label=coarse_label", ["uoft-cs/cifar100"]),
        ("hfds/anna/pets:small?image=a&label=b", ["anna/pets"]),
        ("hfds/cifar100", ["cifar100"]),
        ("hfds/./pics", None),
        ("hfds/../data/pics/", None),
        ("hfds//data/pics", None),
        ("hfds/local/pics", None),
        ("digits", None),
        ("stuff", None),
    ],
)
def test_the_card_names_data_sets_of_the_hub_alone(tmp_path, monkeypatch, root, names):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local" / "pics").mkdir(parents=True)
    run = ScoredRun(
        ROOT, "classification", "images", {"data.root": root}, steps=0, scores={}, scored_on=""
    )
    assert datasets_of(run) == names


def test_a_license_that_the_hub_does_not_know_is_refused(tmp_path, capsys):
    argv = ["publish", tmp_path, "--output", tmp_path / "out", "--license", "Apache 2.0"]
    error = refused(capsys, main, *argv, silent=True)
    assert_says(error, "--license Apache 2.0 apache-2.0")


def test_a_dense_run_is_published_as_timms_own(trained, tmp_path):
    dense = trained("cls", 1, "--model.router", "dense", "--model.head_budget", "null")
    run = shutil.copytree(dense, tmp_path / "run")
    config = (run / "config.yaml").read_text()
    assert "init_from: null\n" in config
    source = "init_from: vit_tiny_patch16_224.augreg_in21k_ft_in1k\n"
    (run / "config.yaml").write_text(config.replace("init_from: null\n", source))
    assert main(["publish", str(run), "--output", str(tmp_path / "card")]) == 0
    model = timm.create_model(f"local-dir:{tmp_path}/card", pretrained=True).eval()
    x = torch.randn(3, 1, 8, 8)
    assert type(model) is timm.models.VisionTransformer
    assert model.pretrained_cfg["label_names"][9] == "9"
    torch.testing.assert_close(model(x), load_run(run)(x))
    head, text = head_and_text(tmp_path / "card")
    # init_from names weights of timm that have this licence.
    assert head["license"] == "apache-2.0"
    size = "with patch_size 2, embed_dim 32, depth 2, num_heads 8"
    assert f"\n# vit_tiny_patch16_224 {size}\n" in text
    assert "import moh_vision" not in text
    assert "is needed" not in text


def test_scores_are_of_the_weights_that_are_published(runs, tmp_path, capsys):
    def scores(weights, name):
        """Publish weights and return the section of scores of the card."""
        argv = ["publish", str(weights), "--output", str(tmp_path / name), "--license", "mit"]
        assert main(argv) == 0
        head, text = head_and_text(tmp_path / name)
        assert head["license"] == "mit"
        return text.partition("## Scores")[2].partition("##")[0]

    best = small_runs.results(runs / "cls")["best_top1"]
    found = scores(runs / "cls" / "best.safetensors", "best")
    assert f"| top-1, % | {best:.2f} |" in found and "the highest of the validations" in found
    assert "No scores of these weights" in scores(runs / "cls" / "model.safetensors", "model")
    assert "No scores of these weights" in scores(runs / "cls" / "checkpoints" / "step_4", "step")
    assert "No scores of these weights" in scores(runs / "dit" / "model.safetensors", "dit")
    worse = "--eval_every 1 --patience 1 --optim.lr 0.5 --optim.warmup_steps 1".split()
    train_text.main(small_runs.arguments("text", tmp_path / "patient", 4, 1, *worse))
    ended = small_runs.results(tmp_path / "patient")
    assert ended["best_step"] < ended["step"]
    assert "| BLEU |" in scores(tmp_path / "patient", "early")
    (tmp_path / "patient" / "results.json").unlink()
    capsys.readouterr()
    assert "No scores of these weights" in scores(tmp_path / "patient", "unscored")
    words = "patient: the run has no results yet; its last weights are taken"
    assert words in capsys.readouterr().out


def test_a_converted_model_is_not_titled_as_its_base(tmp_path, run_command):
    base = dict(img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=32, depth=2)
    model = timm.create_model("vit_tiny_patch16_224", num_heads=4, **base)
    timm.models.save_for_hf(model, str(tmp_path / "base"), model_args=dict(num_heads=4, **base))
    argv = f"--max-steps 1 --optim.batch_size 8 --data.workers 0 --output {tmp_path}/run".split()
    argv += ["--model.pretrained", f"local-dir:{tmp_path}/base"]
    argv += "--model.name pretrained --model.head_budget 0.5".split()
    train_cls.main(argv)
    done = run_command("publish", tmp_path / "run", "--output", tmp_path / "a folder")
    assert f"hf upload OWNER/NAME '{tmp_path}/a folder' ." in done.out, "not quoted for a shell"
    _, text = head_and_text(tmp_path / "a folder")
    title = "vit_tiny_patch16_224 converted to moh with patch_size 2, embed_dim 32, depth 2"
    assert f"\n# {title}" in text


def test_the_card_of_a_repository_loads_it(runs, tmp_path, run_command):
    done = run_command(
        "publish", runs / "cls", "--output", tmp_path / "cls", "--repo", "anna/digits"
    )
    assert done.code == 0
    assert done.out.endswith(f"to upload it: hf upload anna/digits {tmp_path}/cls .\n")
    files = {file.name for file in (tmp_path / "cls").iterdir()}
    assert files == {"README.md", "config.json", "model.safetensors"}
    _, text = head_and_text(tmp_path / "cls")
    assert 'timm.create_model("hf-hub:anna/digits", pretrained=True)' in text
    assert "\n# digits\n" in text
