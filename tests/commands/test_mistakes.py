"""A mistake at a command is reported in one line, before anything is printed or written."""

import re
import shutil

import pytest
from PIL import Image

# Arguments of a command -> what its error says. Words in capitals are paths of the fixture `paths`. If there is no
# --output, the test adds one.
LINES = {
    "table none": "none: no such folder",
    "table .": ". is no run: it has no config.yaml",
    "table CLS TEXT": "text (translation) are of different kinds",
    "table CLS CLS": "are the same run with the same seed, 0",
    "table": "required: RUN",
    "table --nams CLS": "did you mean --names?",
    "table DIT": "dit has no scores yet: python sample.py",
    "table CLS --names a b": "--names: 2 for 1 runs; expected one for each RUN",
    "report CLS/../cls CLS --output a.html": "/../cls is given twice",
    "report CLS --output a.pdf": "expected a name that ends in .html",
    "curves CLS --window 0": "--window 0: expected 1 or more",
    "curves CLS --over optim.lrr": "--over optim.lrr: no such key in",
    "curves CLS --over model.name": "has 'moh_vit_tiny_patch16_224' there; expected a number",
    "curves CLS --over optim.lr --beside a": "--beside a has no effect",
    "curves CLS --beside cls/none": "--beside cls/none: no such log; there are cls/cifar10_small_cpu, ",
    "head-load none": "none: no such file; a run whose tokens choose heads",
    "head-load DIT": "dit/head_load.json: no such file",
    "head-load CLS --output a.jpg": "a.jpg: expected a name that ends in .png or .svg",
    "head-load CLS --output none/a.png": "none/a.png: no such folder",
    "head-load CLS --output IMAGE": "image.png exists; give another path",
    "head-load CLS --by timestep": "--by timestep: only class",
    "head-load CLS --groups 1 dog": "--groups dog: no class has this name; there are 10, such as",
    "head-load CLS --layer 2": "--layer 2: expected 0 to 1",
    "gates DENSE": "cls (classification): expected runs of train_text.py",
    "gates TEXT --split test": "text has no data.test",
    "patches TEXT --image IMAGE": "text is a text model; expected a classifier, whose tokens are patches",
    "patches DENSE --image IMAGE": "cls: every patch runs every head with gate 1, so there is nothing",
    "patches CLS --image none.png": "none.png: No such file or directory",
    "patches CLS --image CLS/config.yaml": "config.yaml: cannot identify the image format",
    "patches CLS --image IMAGE --layer 0 2": "--layer 2: expected 0 to 1",
    "patches CLS --image IMAGE --model.depth 3": "brings its model, moh_vit_tiny_patch16_224; allowed are model.head",
    "patches --image IMAGE CLS": "RUN comes before --image",
    "patches x --model.name dit_small_patch2 --image IMAGE": "x is a diffusion model; expected a class",
    "patches no_such --image IMAGE": "no_such: neither a run, a file of weights, nor a registered model",
    "predict CLS none.png": "none.png: no such file",
    "predict CLS CLS/checkpoints": "checkpoints: a folder without images (.jpg,",
    "predict CLS IMAGE --output a.txt": "--output a.txt: expected a name that ends in .json",
    "predict CLS IMAGE --top 0": "--top 0: expected 1 or more",
    "predict CLS IMAGE --data.root digits": "data.root has no effect: only the images that are named are read",
    "predict CLS IMAGE --checkpoint CLS": "--checkpoint has no effect: RUN says",
    "predict x IMAGE --model.name dit_small_patch2": "x is a diffusion model; expected a classifier",
    "budget-curve CLS --shares 1.5": "--shares 1.5: expected above 0 and up to 1",
    "budget-curve CLS --shares uniform:0.5:0.4": "--shares uniform:0.5:0.4: expected above 0 and up to 1",
    "budget-curve CLS --model.head_budget 0.5": "model.head_budget has no effect",
    "budget-curve DIT": "--score REFERENCE is needed",
    "budget-curve DIT --score digits --extractor CLS --grid g.png": "grid has no effect",
    "budget-curve DIT --score digits --extractor CLS --head-budget 0.75": "head_budget has no effect",
    "budget-curve DIT CLS --score digits": "one figure has one kind",
    "budget-curve CLM --max-steps 2": "max_steps has no effect",
    "search CLS --share 0": "--share 0: expected above 0, up to 1",
    "search CLS --share 0.5 --images 0": "--images 0: expected 1 or more",
    "search CLS --share 1 --model.head_budget 0.5": "model.head_budget has no effect",
    "search DIT --share 0.8 --model.depth 3": "unknown key 'model.depth'",
    "search CLM --share 0.75 --max-steps 3": "max_steps has no effect",
    "search CLM --share 0.75 --images 99": "--images 99: these and",
    "export CLS --format torch-export --output m.onnx": "ends in .pt2",
    "export CLS --format torch-export --batch 0": "--batch 0: expected 1 or more",
    "export CLS --format torch-export --checkpoint CLS": "--checkpoint has no effect",
    "export moh_vit_tiny_patch16_22 --format torch-export": "is no file or folder, and is not a registered model, did",
    "export FOREIGN --format torch-export": "does not say of which model it is",
    "export CLS --format torch-export --static-heads no.json": "no.json",
    "publish none --output a": "none: no such file or folder",
    "publish CLS --output a --repo digits": "--repo digits: expected OWNER/NAME",
    "publish CLS --output a --repo anna/a/b": "--repo anna/a/b: expected OWNER/NAME",
    # Names that the hub does not allow.
    "publish CLS --output a --repo anna/": "--repo anna/: ",
    "publish CLS --output a --repo anna/a--b": "--repo anna/a--b: ",
    "publish CLS --output a --repo anna/-a": "--repo anna/-a: ",
    "publish CLS --output a --repo anna/a.git": "--repo anna/a.git: ",
    "publish CLS --output a --repo änna/a": "--repo änna/a: ",
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
    argv = re.sub(r"\b[A-Z]+\b", lambda name: str(paths[name[0]]), line).split()
    if argv[0] not in ("table", "predict") and "--output" not in argv:
        file = "new.pt2" if argv[0] == "export" else "new.png"
        argv += ["--output", file]
    error = refused(*argv)
    assert error.startswith(f"{argv[0]}: error: ") and LINES[line] in error
    assert not list(tmp_path.iterdir())


# Case -> (command, file of a run, its new text or None to delete it, what the error says).
DAMAGES = {
    "a score of text": ("table", "results.json", '{"top1": "x"}', "top1 'x'; expected a number"),
    "a number for scores": (
        "table",
        "results.json",
        '{"top1_by_class": 3}',
        "run: its scores are not as a run writes them",
    ),
    "results are a list": (
        "table",
        "results.json",
        "[1]",
        "results.json: expected keys and values, found list",
    ),
    "results are torn": ("table", "results.json", "{", "results.json is not readable"),
    "no results": (
        "table",
        "results.json",
        None,
        "run has no results.json: the run has not ended yet",
    ),
    "a number for a model": (
        "table",
        "config.yaml",
        "kind: text\nmodel: {name: 3}\n",
        "config.yaml: model.name 3; expected the name of",
    ),
    "null for a model": (
        "table",
        "config.yaml",
        "kind: classification\nmodel: {name: null}\n",
        "config.yaml: model.name None; expected the name of",
    ),
    "an unknown text model": (
        "table",
        "config.yaml",
        "kind: text\nmodel: {name: llama_base}\n",
        "model.name 'llama_base'; expected a text model's, which begins with mt_ or mlm_ or clm_",
    ),
    "counts of one class more": (
        "report",
        "confusion.json",
        '{"classes": ["a"], "counts": [[0, 1, 2]]}',
        "expected classes, and counts",
    ),
    "text for counts": (
        "report",
        "confusion.json",
        '{"classes": ["a"], "counts": "x"}',
        "expected classes, and counts",
    ),
    "a list for a start": (
        "report",
        "environment.jsonl",
        "[]\n",
        "environment.jsonl: expected keys and values, found list",
    ),
    "a loss of text": (
        "report",
        "metrics.jsonl",
        '{"step": 0, "loss": "x"}\n',
        "metrics.jsonl: loss 'x'; expected a number",
    ),
    "text for head loads": (
        "report",
        "head_load.json",
        "x",
        "head_load.json: not a file of head loads",
    ),
    "a line of nonsense": (
        "curves",
        "metrics.jsonl",
        '{"step": 0, "loss": 1}\nnonsense\n',
        "metrics.jsonl is not readable",
    ),
    "a line without step": (
        "curves",
        "metrics.jsonl",
        '{"loss": 1}\n',
        "metrics.jsonl: a line without step",
    ),
    "no loss": (
        "curves",
        "metrics.jsonl",
        '{"step": 0, "trained_parameters": 1}\n',
        "metrics.jsonl: no line has a loss",
    ),
    "a number for data": (
        "publish",
        "data.json",
        '{"train": 3}',
        "data.json: not the record of a run's data",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_files(paths, tmp_path, refused, case):
    command, file, text, words = DAMAGES[case]
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
    assert words in refused(*argv)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
