"""A mistake at a command is reported in one line, before anything is printed or written."""

import re
import shutil

import pytest
from PIL import Image

from tests.support.refusals import assert_says

# Arguments of a command -> what its error says. CLS, IMAGE and so on are paths of the fixture `paths`. If there is no
# --output, the test adds one.
LINES = {
    "table none": "none no folder",
    "table .": ". config.yaml",
    "table CLS TEXT": "CLS classification TEXT translation",
    "table CLS CLS": "CLS same seed 0",
    "table": "required RUN",
    "table --nams CLS": "--nams --names",
    "table DIT": "DIT scores sample.py --checkpoint --score",
    "table CLS --names a b": "--names 2 1 RUN",
    "report CLS/../cls CLS --output a.html": "CLS/../cls twice",
    "report CLS --output a.pdf": "--output a.pdf .html",
    "curves CLS --window 0": "--window 0 1",
    "curves CLS --over optim.lrr": "--over optim.lrr CLS/config.yaml optim.lr",
    "curves CLS --over model.name": "--over model.name CLS 'moh_vit_tiny_patch16_224' number",
    "curves CLS --over optim.lr --beside a": "--beside a effect --over",
    "curves CLS --beside cls/none": "--beside cls/none cls/cifar10_small_cpu quickstart/cls",
    "head-load none": "none no file --head-load",
    "head-load DIT": "DIT/head_load.json no file --head-load",
    "head-load CLS --output a.jpg": "--output a.jpg .png .svg",
    "head-load CLS --output none/a.png": "--output none/a.png folder",
    "head-load CLS --output IMAGE": "--output IMAGE exists",
    "head-load CLS --by timestep": "--by timestep class",
    "head-load CLS --groups 1 dog": "--groups dog 10 0 1",
    "head-load CLS --layer 2": "--layer 2 0 1",
    "gates DENSE": "DENSE classification train_text.py",
    "gates TEXT --split test": "--split test TEXT data.test",
    "patches TEXT --image IMAGE": "TEXT text classifier",
    "patches DENSE --image IMAGE": "DENSE every gate 1",
    "patches CLS --image none.png": "none.png No file",
    "patches CLS --image CLS/config.yaml": "CLS/config.yaml format",
    "patches CLS --image IMAGE --layer 0 2": "--layer 2 0 1",
    "patches CLS --image IMAGE --model.depth 3": "model.depth --checkpoint CLS moh_vit_tiny_patch16_224 model.head_budget model.mlp_budget",
    "patches --image IMAGE CLS": "RUN --image",
    "patches x --model.name dit_small_patch2 --image IMAGE": "RUN x run file registered",
    "patches no_such --image IMAGE": "RUN no_such run file registered",
    "predict CLS none.png": "none.png no file",
    "predict CLS CLS/checkpoints": "CLS/checkpoints images .jpg .png .tiff",
    "predict CLS IMAGE --output a.txt": "--output a.txt .json",
    "predict CLS IMAGE --top 0": "--top 0 1",
    "predict CLS IMAGE --data.root digits": "data.root digits effect images",
    "predict CLS IMAGE --checkpoint CLS": "--checkpoint CLS effect RUN",
    "predict IMAGE IMAGE --model.name dit_small_patch2": "diffusion classifier",
    "budget-curve CLS --shares 1.5": "--shares 1.5 0 1 uniform:S ramp:S",
    "budget-curve CLS --shares uniform:0.5:0.4": "--shares uniform:0.5:0.4 0 1 uniform:S ramp:S",
    "budget-curve CLS --model.head_budget 0.5": "model.head_budget 0.5 effect --shares",
    "budget-curve CLS --rounds 0": "--rounds 0 1",
    "budget-curve DIT": "--score REFERENCE sample.py",
    "budget-curve DIT --score digits --extractor CLS --grid g.png": "grid effect samples",
    "budget-curve DIT --score digits --extractor CLS --head-budget 0.75": "head_budget 0.75 effect --shares",
    "budget-curve DIT --score digits --extractor CLS --cache taylorseer:2": "cache taylorseer:2 sampling-curve",
    "budget-curve DIT CLS --score digits": "DIT CLS diffusion classification",
    "budget-curve CLM --max-steps 2": "max_steps effect CLM data.* mixed_precision tf32",
    "search CLS --share 0": "--share 0 above 0 1",
    "search CLS --share 0.5 --images 0": "--images 0 1",
    "search CLS --share 1 --model.head_budget 0.5": "model.head_budget 0.5 effect --share",
    "search DIT --share 0.8 --model.depth 3": "model.depth --help",
    "search CLM --share 0.75 --max-steps 3": "max_steps effect CLM data.* mixed_precision tf32",
    "search CLM --share 0.75 --images 99": "--images 99 train 76",
    "export CLS --format torch-export --output m.onnx": "--output m.onnx .pt2 --format torch-export",
    "export CLS --format torch-export --batch 0": "--batch 0 1",
    "export CLS --format torch-export --checkpoint CLS": "--checkpoint CLS effect",
    "export moh_vit_tiny_patch16_22 --format torch-export": "moh_vit_tiny_patch16_22 moh_vit_tiny_patch16_224",
    "export FOREIGN --format torch-export": "FOREIGN NAME --checkpoint",
    "export CLS --format torch-export --static-heads no.json": "--static-heads no.json no file",
    "export CLS --format torch-export --static-heads CLS/config.yaml": "--static-heads CLS/config.yaml heads",
    "export DENSE --format torch-export --static-heads CLS/head_load.json": "--static-heads CLS/head_load.json heads model",
    "publish none --output a": "none no file folder",
    "publish CLS --output a --repo digits": "--repo digits OWNER/NAME",
    "publish CLS --output a --repo anna/a/b": "--repo anna/a/b OWNER/NAME",
    # Names that the hub does not allow.
    "publish CLS --output a --repo anna/": "--repo anna/",
    "publish CLS --output a --repo anna/a--b": "--repo anna/a--b",
    "publish CLS --output a --repo anna/-a": "--repo anna/-a",
    "publish CLS --output a --repo anna/a.git": "--repo anna/a.git '.git'",
    "publish CLS --output a --repo änna/a": "--repo änna/a",
}


@pytest.fixture(scope="module")
def paths(trained, tmp_path_factory):
    """Runs by name, an image, and a file of weights that do not say where they come from."""
    folder = tmp_path_factory.mktemp("paths")
    Image.effect_noise((8, 8), 90).save(folder / "image.png")
    (folder / "foreign.pt").touch()
    dense = trained("cls", 1, "--model.router", "dense", "--model.head_budget", "null")
    named = dict(CLS=trained("cls", 2), DENSE=dense, DIT=trained("dit", 2), TEXT=trained("text", 2))
    return named | dict(
        CLM=trained("clm", 4), IMAGE=folder / "image.png", FOREIGN=folder / "foreign.pt"
    )


@pytest.mark.parametrize("line", LINES)
def test_lines(paths, tmp_path, refused, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    written, facts = (
        re.sub(r"\b[A-Z]+\b", lambda name: str(paths.get(name[0], name[0])), text)
        for text in (line, LINES[line])
    )
    argv = written.split()
    if argv[0] not in ("table", "predict") and "--output" not in argv:
        file = "new.pt2" if argv[0] == "export" else "new.png"
        argv += ["--output", file]
    error = refused(*argv)
    assert_says(error, f"{argv[0]}: error: {facts}")
    assert not list(tmp_path.iterdir())


# Case -> (command, file of a run, its new text or None to delete it, what the error says).
DAMAGES = {
    "a score of text": ("table", "results.json", '{"top1": "x"}', "top1 'x' number"),
    "a number for scores": (
        "table",
        "results.json",
        '{"top1_by_class": 3}',
        "scores",
    ),
    "results are a list": (
        "table",
        "results.json",
        "[1]",
        "results.json keys list",
    ),
    "results are torn": ("table", "results.json", "{", "results.json readable line 1"),
    "no results": (
        "table",
        "results.json",
        None,
        "results.json ended",
    ),
    "a number for a model": (
        "table",
        "config.yaml",
        "kind: text\nmodel: {name: 3}\n",
        "config.yaml model.name 3",
    ),
    "null for a model": (
        "table",
        "config.yaml",
        "kind: classification\nmodel: {name: null}\n",
        "config.yaml model.name None",
    ),
    "an unknown text model": (
        "table",
        "config.yaml",
        "kind: text\nmodel: {name: llama_base}\n",
        "config.yaml model.name 'llama_base' mt_ mlm_ clm_",
    ),
    "counts of one class more": (
        "report",
        "confusion.json",
        '{"classes": ["a"], "counts": [[0, 1, 2]]}',
        "confusion.json classes counts",
    ),
    "text for counts": (
        "report",
        "confusion.json",
        '{"classes": ["a"], "counts": "x"}',
        "confusion.json classes counts",
    ),
    "a list for a start": (
        "report",
        "environment.jsonl",
        "[]\n",
        "environment.jsonl keys list",
    ),
    "a loss of text": (
        "report",
        "metrics.jsonl",
        '{"step": 0, "loss": "x"}\n',
        "metrics.jsonl loss 'x' number",
    ),
    "text for head loads": (
        "report",
        "head_load.json",
        "x",
        "head_load.json loads",
    ),
    "a line of nonsense": (
        "curves",
        "metrics.jsonl",
        '{"step": 0, "loss": 1}\nnonsense\n',
        "metrics.jsonl readable",
    ),
    "a line without step": (
        "curves",
        "metrics.jsonl",
        '{"loss": 1}\n',
        "metrics.jsonl without step",
    ),
    "no loss": (
        "curves",
        "metrics.jsonl",
        '{"step": 0, "trained_parameters": 1}\n',
        "metrics.jsonl no loss",
    ),
    "a number for data": (
        "publish",
        "data.json",
        '{"train": 3}',
        "data.json record",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_files(paths, tmp_path, refused, case):
    command, file, text, facts = DAMAGES[case]
    run = shutil.copytree(paths["CLS"], tmp_path / "run")
    if command == "report":
        (run / "metrics.jsonl").unlink()  # its curves take seconds
    (run / file).unlink(missing_ok=True)
    if text is not None:
        (run / file).write_text(text)
    argv = [command, run]
    output = dict(report="new.html", curves="new.png", publish="new").get(command)
    if output:
        argv += ["--output", tmp_path / output]
    assert_says(refused(*argv), facts)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
