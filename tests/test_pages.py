"""README and docs: links lead somewhere, generated pages are those of the code, and what a page says to type runs.

Python runs as it stands, commands on small stand-ins: training commands get `--dry_run true`, and every placeholder
(IMAGENET, RUN, ...) something small of the same layout. Of all pages each option is one that its command takes.
docs/papers.md has a row for every table and figure, and names only configurations whose models can be made.
"""

import contextlib
import functools
import importlib
import importlib.util
import io
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from moh_vision.__main__ import COMMANDS
from moh_vision.__main__ import main as moh_vision_main
from moh_vision.attention import ROUTERS, attention_layers, head_budget, resolve_budget
from moh_vision.classification.config import ClsConfig
from moh_vision.data.splits import SOURCES
from moh_vision.diffusion import OBJECTIVES
from moh_vision.diffusion.config import DitConfig
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.keys import keys_of
from moh_vision.language.config import LanguageConfig
from moh_vision.language.models.create import preset_config
from moh_vision.models.transnext import SMALL, by_layer
from tests.support.paths import ROOT
from tests.support.small_text import write_pairs
from tests.support.tiny_vae import save_tiny_vae

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location(
        "make_reference", ROOT / "docs" / "make_reference.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        file = page
        if path:
            file = page.parent / path
        assert "://" in target or file.exists() and (not anchor or anchor in anchors(file)), target
    if page.name != "CHANGELOG.md":  # it names files as they were called then
        named = re.findall(r"(?<![\w/.-])docs/[\w/-]+\.md", text)
        assert [name for name in named if not (ROOT / name).exists()] == []
    # Importing moh_vision does not make our types known to transformers; that these lines do: tests/commands/test_publish.py.
    ours = re.compile(r"^(import|from) moh_vision\.language\.models\.(create|llama\.model)\b", re.M)
    code = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert [block for block in code if "AutoModelFor" in block and not ours.search(block)] == []


def test_environment_variables_are_on_their_page():
    read = r"""environ(?:\.get\(|\.setdefault\(|\[)"(\w+)"|"(\w+)" in os\.environ|^(?:BUILD|VARIABLE) = "(\w+)\""""
    product, tests = (
        "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / room).rglob("*.py")))
        for room in ("moh_vision", "tests")
    )
    found = {name for names in re.findall(read, product, re.M) for name in names if name}
    found -= {"ACCELERATE_USE_CPU"}  # is set, not read
    found |= set(re.findall(r"environ\.get\(\"(MOH_VISION_\w+)\"", tests))
    page = (ROOT / "docs/reference/environment.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page, re.M)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == found
    named = {
        name
        for text in (product, tests)
        for name in re.findall(r"MOH_VISION_[A-Z0-9]+(?!\w)", text)
    }
    assert named <= found


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 135 and len(text.split()) <= 1000
    assert [line for line in text.splitlines() if len(line) > 100] == []


def test_every_guide_is_in_the_table_of_contents():
    shown = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page != "README.md" and f"({page})" not in shown] == []


@pytest.mark.parametrize(
    "name", ["reference/config", "reference/commands", "reference/routers", "results/runs"]
)
def test_generated_pages_are_those_of_the_code(reference, name):
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert page == reference.MAKERS[name](), f"python docs/make_reference.py {name}"


def test_the_models_are_those_of_the_registry(reference):
    page = (ROOT / "docs/reference/models.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)`", page, flags=re.MULTILINE) == [
        *reference.image_models(),
        *reference.list_text_presets(),
    ]


def test_keys_that_a_resumed_run_may_change_are_listed():
    page = (ROOT / "docs" / "guides" / "scale.md").read_text(encoding="utf-8")
    listed = page.split("Accepted keys:")[1].split(";")[0]
    free = {
        name
        for config_class in KINDS.values()
        for name, found in keys_of(config_class).items()
        if found.options["free"]
    }
    named = set(re.findall(r"`([\w.]+)`", listed))  # a section stands for all its keys
    sections = {name.partition(".")[0] for name in free} & named
    alone = {name for name in free if name.partition(".")[0] not in named}
    assert sections | alone == named | {"output"}


# ---------------------------------------------------------------- docs/papers.md

KINDS = {"cls": ClsConfig, "dit": DitConfig, "text": LanguageConfig}
SCRIPTS = {
    "sample.py": "moh_vision.diffusion.sample",
    "train_cls.py": "moh_vision.classification.train",
    "train_dit.py": "moh_vision.diffusion.train",
    "train_text.py": "moh_vision.language.train",
    "validate.py": "moh_vision.classification.validate",
}
PAPERS = (ROOT / "docs" / "papers.md").read_text()
CODE = sorted(
    set(re.findall(r"`([^`]+)`", PAPERS))
    | {line.strip() for line in PAPERS.splitlines() if line[:4] == " " * 4}
)
RUNS = [code for code in CODE if re.match(r"(cls|dit|text)/\w", code)]
VARIANTS = [
    f"{file.parent.name}/{file.stem} {options}"
    for file in sorted((ROOT / "configs").glob("*/*.yaml"))
    for options in re.findall(r"^# {3}(--.+?)(?: {2}|$)", file.read_text(), re.M)
]
OF_PAPERS = [code for code in CODE if re.match(r"(python|accelerate launch|torchrun) ", code)]
BUDGETS = re.findall(r"^\| ([\d.]+) % \| (\d+) \| `(\[\[.+?\]\])` \|$", PAPERS, re.M)
OTHER = {"cls/", "dit/", "text/", "--model.head_budget", "load_checkpoint", "MoHDiTPipeline"}


def numbered(text):
    """{"Table 1", "Figure A", ...} of the first cells of a section's rows."""
    found = set()
    for heading, names in re.findall(r"^\| (Table|Figure)s? ((?:\w(?:, )?)+) \|", text, re.M):
        found |= {f"{heading} {name}" for name in names.split(", ")}
    return found


@pytest.mark.parametrize(
    "paper, tables, figures",
    [("MoH", "1234567ABCDE", "123ABC"), ("MoA", "1234567", "1234"), ("MAE", "12345678", "123")],
)
def test_every_table_and_figure_has_a_row(paper, tables, figures):
    section = re.search(rf"^## {paper}: .*?(?=^## )", PAPERS, re.M | re.S)[0]
    assert numbered(section) == {f"Table {n}" for n in tables} | {f"Figure {n}" for n in figures}


def test_all_code_is_a_run_or_a_command():
    known = {*RUNS, *OF_PAPERS, *OTHER, *(budget for _, _, budget in BUDGETS)}
    assert [code for code in CODE if code not in known] == []
    assert len(RUNS) > 40 and len(OF_PAPERS) > 10 and len(VARIANTS) > 40


def model_of(folder, *argv):
    """The model of a configuration in this folder, on meta; of language its preset or what it is converted from."""
    config = parse_config(KINDS[folder], ["--config", *argv], "test")
    if folder == "text":
        return config.model.pretrained or preset_config(config.model.name)
    with torch.device("meta"):
        return timm.create_model(config.model.name, **config.model.arguments())


@pytest.mark.parametrize("code", RUNS + VARIANTS)
def test_runs(code):
    """The configuration is there, its keys are taken and their values allowed; and the model can be made."""
    name, *options = shlex.split(code)
    files = sorted((ROOT / "configs").glob(f"{name}.yaml"))
    assert files and not ("*" in name and options)
    for file in files:
        assert model_of(file.parent.name, str(file), *options)


@pytest.mark.parametrize(
    "config", ["cls/moh_transnext_small_75", "dit/moh_dit_small_patch2_75", "cls/cifar10_vit_cpu"]
)
def test_the_ablation_of_components(config):
    """Jin 2024, table 6: equally many heads of each layer run in all three rows, that is 75 %."""
    rows = [
        row
        for row in RUNS
        if row.startswith(f"{config} ") and ("head_budget" in row or "two_stage" in row)
    ]
    [routed_only] = [
        row for row in rows if "[[0,3]" in row or ":0.75:0" == row[-7:] and "moa" not in row
    ]
    [one_stage] = [row for row in rows if "two_stage" in row]
    neither, shared, both = (
        model_of(row[:3], *shlex.split(row)) for row in (routed_only, one_stage, config)
    )
    active = [
        [layer["active"] for layer in head_budget(model)["layers"]]
        for model in (neither, shared, both)
    ]
    assert active[0] == active[1] == active[2] and head_budget(both)["share"] == pytest.approx(
        0.75, abs=0.004
    )
    for model, some_shared, balanced in (
        (neither, False, False),
        (shared, True, False),
        (both, True, True),
    ):
        layers = attention_layers(model)
        assert any(layer.budget.shared for layer in layers) == some_shared
        assert (
            any(getattr(layer.router, "balance", None) is not None for layer in layers) == balanced
        )


def test_the_shares_of_shared_heads():
    """Jin 2024, table 7: the budgets of the page have the shares that the paper prints."""
    assert len(BUDGETS) == 9
    for share, shared, spec in BUDGETS:
        pairs = by_layer(json.loads(spec), SMALL["depths"])
        heads = by_layer(SMALL["num_heads"], SMALL["depths"])
        layers = resolve_budget(pairs, len(heads), heads, head_dim=24)
        assert sum(b.active for b in layers) == 323 and sum(b.shared for b in layers) == int(shared)
        assert 100 * int(shared) / 323 == pytest.approx(float(share), abs=0.06)


# ---------------------------------------------------------------- what pages say to type

GUIDES = "classifier diffusion data scale extend analysis convert sampling mlp"
RUN_PAGES = [
    "README",
    "docs/architecture",
    "docs/getting-started",
    "docs/concepts",
    *(f"docs/guides/{name}" for name in GUIDES.split()),
]
LAUNCHERS = r"(?:accelerate launch(?: --config_file \S+)?|torchrun(?: --\S+ \d+)?|python)(?: -m)? "
NOT_RUN = {
    "python train_cls.py --config quickstart/cls --estimate": "not beside --dry_run; tests/engine/test_estimate.py",
    "git clone": "needs a network",
    "pip install": "installs packages",
    "uv pip": "installs packages",
    "python -m venv": "installs packages",
    "make ": "its targets are what runs this",
    "python -m moh_vision.attention.kernels": "compiles the operators; tests/attention/test_kernels_build.py",
    "python -m moh_vision publish RUN --output FOLDER --repo": "a second one in FOLDER; tests/commands/test_publish.py",
    "python -m moh_vision publish TEXT_RUN": "of a run of text; tests/commands/test_publish.py",
    "accelerate launch train_cls.py --config cls/convert_vit_small_75": "loads weights of the hub; tests/models/test_pretrained.py",
    "accelerate launch --config_file configs/accelerate/fsdp2_layers.yaml": "an 8B model",
    "accelerate launch train_text.py --config configs/text/moh_llama3_stage2.yaml": "an 8B model",
    "python train_cls.py --config cls/convert_vit_small_75 --data.root IMAGENET --distill": "loads weights of the hub; tests/classification/test_distillation.py",
    "python train_dit.py --config quickstart/dit --data.root DATA --model.name pretrained": "a folder of a DiT; tests/models/test_pretrained.py",
    "python train_dit.py --config dit/cifar10_groups_convert_small_cpu --data.root PHOTOS --model.pretrained DENSE_DIT --output RUN --distill": "a dense run as teacher; tests/diffusion/test_distillation.py",
    "python sample.py --checkpoint SiT-XL-2-256x256.pt": "released weights; tests/diffusion/test_sit.py",
    "python sample.py --checkpoint checkpoint-last.pth": "released weights; tests/diffusion/test_jit.py",
    "accelerate launch train_dit.py --config dit/jit_base_patch16 --data.root IMAGENET": "a folder of released weights; tests/diffusion/test_jit.py",
    "accelerate launch train_dit.py --config dit/moh_sit_xlarge_patch2_75": "released weights; tests/diffusion/test_sit.py",
    "python -m moh_vision export moh_dit_xlarge_patch2_90": "released weights; tests/commands/test_export.py",
    "python -m moh_vision gates TEXT_RUN": "runs of text; tests/commands/test_gates.py",
    "python -m moh_vision curves TEXT_RUN": "runs of text; tests/commands/test_curves.py",
    "accelerate launch train_cls.py --config cls/moh_vit_small_patch16_224 --data.root ROOT --data.exact_order": "a server; tests/data/test_stream.py",
    "accelerate launch sample.py --checkpoint RUN --": "50,000 images; tests/diffusion/test_sample.py",
    "python sample.py --checkpoint RUN --num-images 50000": "50,000 images; tests/diffusion/test_sample.py",
    "python -m moh_vision.evaluation.fidelity samples.npz dinov2": "weights of the hub; tests/evaluation/test_fidelity.py",
    "python validate.py --checkpoint FOLDER": "a published folder; tests/commands/test_predict.py",
    "python validate.py --checkpoint WEIGHTS": "weights for ImageNet; tests/classification/test_train_cls.py",
    "python validate.py --checkpoint RUN --labels": "files of ImageNet; tests/classification/test_labels.py",
    "python validate.py --checkpoint runs/": "a run of the command before it, which is dry here; tests/engine/test_elastic.py",
}
REST = {  # commands that take the options of others too
    "budget-curve": [SCRIPTS["validate.py"], SCRIPTS["sample.py"]],
    "sampling-curve": [SCRIPTS["sample.py"]],
    "patches": [SCRIPTS["validate.py"]],
    "predict": [SCRIPTS["validate.py"]],
}
MORE = {  # what makes a command small
    "moh_vision.classification.train": "--dry_run true --mixed_precision no --data.workers 0 --data.max_bad_fraction 0",
    "moh_vision.diffusion.train": "--dry_run true --mixed_precision no --data.workers 0",
    "moh_vision.language.train": "--dry_run true --mixed_precision no",
    "moh_vision.classification.validate": "--data.workers 0",
    "moh_vision.diffusion.sample": "--num-images 10 --steps 2 --sampler ddim",
    "moh_vision.evaluation.fidelity": "--extractor RUN --allow-biased",
    "alignment": "--neighbours 3",
    "measure": "--rounds 1 --batch-size 1 --img-size 32",
}


def pieces(page):
    """(Python, None) or (None, command) in a page's order: fenced blocks, and indented lines that are commands.

    A line that ends in a backslash goes on in the next.
    """
    text = (ROOT / f"{page}.md").read_text(encoding="utf-8").replace("\\\n", " ")
    ours = LAUNCHERS + r"(\w+\.py|moh_vision[. ]\S+) "
    for block, line in re.findall(r"^```python\n(.*?)^```|^ {4}(?! )([^\n]*)$", text, re.M | re.S):
        if block or re.match(ours, f"{line.strip()} ") or excused(line.strip()):
            yield block, line.strip()


def commands(page):
    """The commands of a page that the project runs; of docs/papers.md those in its tables."""
    typed = [line for _, line in pieces(page)]
    if page == "docs/papers":
        typed = OF_PAPERS
    return [
        line
        for line in typed
        if re.match(LAUNCHERS, line) and not re.search("-m venv|quickstart.py", line)
    ]


def excused(command):
    return next((name for name in NOT_RUN if command.startswith(name)), None)


def words_of(command):
    """(name, function, options) of a command; its name is that of a module, or what stands behind `python -m moh_vision`."""
    words = shlex.split(re.sub(LAUNCHERS, "", command, count=1).partition(" > ")[0], comments=True)
    if words[0] == "moh_vision":
        return *main_of(words[1]), words[2:]
    return *main_of(words[0]), words[1:]


def main_of(name):
    """(name, function) of a script or module."""
    if name in COMMANDS:
        return name, lambda argv: moh_vision_main([name, *argv])
    module = importlib.import_module(SCRIPTS.get(name, name))
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{module.__name__}.__main__")
    return module.__name__.removesuffix(".__main__"), module.main


@pytest.fixture(scope="module")
def stand_ins(trained, tmp_path_factory):
    """Placeholder -> folder. RUN depends on the command: see `filled`."""
    root = tmp_path_factory.mktemp("pages")
    colours = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for name in ("cat", "dog"):
            (root / "photos" / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = colours.integers(0, 256, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / "photos" / split / name / f"{i}.jpg")
    for name in ("cat", "dog"):
        (root / "classes" / name).mkdir(parents=True)
        for i in range(60):  # enough that a tenth is not nothing
            Image.new("RGB", (8, 8), (4 * i, 0, 0)).save(root / "classes" / name / f"{i}.jpg")
    blocks = dict(
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4
    )
    vae = save_tiny_vae(root / "vae", **blocks, block_out_channels=(8,) * 4)
    three = ("--model.depth", 3)  # pages name layer 2
    data = ("--data.root", root / "photos", "--data.img_size", 8)
    for name, *more in (("cls", *three), ("other", *three, "--seed", 1), ("dit",)):
        shutil.copytree(trained(name.replace("other", "cls"), 2, *data, *more), root / name)
    groups = ("--model.mlp_budget", 0.5, "--model.scope", "sample")
    shutil.copytree(trained("dit", 2, *data, *groups), root / "groups")
    shutil.copytree(trained("dit", 2, *data, "--objective", "flow"), root / "flow")
    encode = (
        f"latents --vae {vae} --data {root}/photos --out {root}/latents --size 256 --batch-size 4"
    )
    assert not moh_vision_main(encode.split())
    texts = write_pairs(root / "texts")
    for file in list(texts.glob("val.*")):
        shutil.copyfile(
            file, file.with_name(file.name.replace("val", "valid", 1))
        )  # configurations name either
    photos = root / "photos"
    places = dict.fromkeys(("IMAGENET", "PHOTOS", "ROOT", "IMAGE_OR_FOLDER"), photos)
    places |= {
        "LATENTS": root / "latents",
        "TEXTS": texts,
        "CLASSES": root / "classes",
        "OTHER_RUN": root / "other",
        "MLP_RUN": root / "groups",
        "DENSE_DIT": "dit_small_patch2",
    }
    places |= {
        "PHOTOS/train": photos / "train",
        "PHOTOS/val": photos / "val",
        "IMAGE.jpg": photos / "val/cat/0.jpg",
    }
    places |= {
        "SAMPLES": photos / "train/cat",
        "REFERENCE": photos / "train/dog",
        "stabilityai/sd-vae-ft-ema": vae,
    }
    places["SHARDS"] = "SHARDS"
    return {"folder": root, **{name: str(path) for name, path in places.items()}}


def filled(name, words, places):
    """The options of a command with small things in place of its placeholders, and options that make it small."""
    dit = str(places["folder"] / "dit")
    if "heun" in words:  # a sampler of flows
        dit = str(places["folder"] / "flow")
    run = dit if name.startswith("moh_vision.diffusion") else str(places["folder"] / "cls")
    given = {word.replace("_", "-") for word in words}
    more = MORE.get(name, "")
    if "--save-statistics" in words:  # nothing is scored
        more = more.replace("--allow-biased", "")
    for option, value in re.findall(r"(--\S+) ([^-]\S*)?", more + " "):
        if option.replace("_", "-") not in given:
            words = [*words, option]
            if value:
                words.append(value)
    if "LATENTS" in words and name.endswith("diffusion.train"):
        # The configurations name it, and it is not here.
        words = [*words, "--vae", "stabilityai/sd-vae-ft-ema"]
    known = {**places, "RUN": run, "DIT": dit, "EARLIER": dit}
    known["LATENTS"] = "new" if name.endswith("latents") else places["LATENTS"]
    words = [known.get(word, word) for word in words if word != "..."]
    if "--extractor" in words:
        words[words.index("--extractor") + 1] = str(places["folder"] / "cls")
    if "--max_steps" in words and name.endswith(
        "classification.train"
    ):  # more than the epochs of a few images
        at = words.index("--max_steps")
        words = words[:at] + words[at + 2 :]
    if "--output" in words and name.endswith("train"):
        words[words.index("--output") + 1] = "output"
    return words


def run_page(page, places):
    """Run a page's commands and Python in the current folder: a run for "RUN", an image, no weights of the hub."""
    known = {"RUN": f"{places['folder']}/cls", "IMAGE.jpg": places["IMAGE.jpg"]}
    (places["folder"] / "dit/scores.json").unlink(missing_ok=True)  # of another page
    create = timm.create_model
    names = {}
    files = []  # a block is one if its first line says so: "# NAME.py"

    def create_without_weights(name, pretrained=False, **kwargs):
        return create(name, **kwargs)

    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.dict(ROUTERS),
        mock.patch.dict(OBJECTIVES),
        mock.patch.dict(SOURCES),
    ):
        patch.setattr(timm, "create_model", create_without_weights)
        for block, command in pieces(page):
            if block:
                block = re.sub(r'"(RUN|IMAGE\.jpg)"', lambda found: repr(known[found[1]]), block)
                if named := re.match(r"# (\w+)\.py\n", block):
                    files.append(named[1])
                    Path(f"{named[1]}.py").write_text(block)
                exec(compile(block, page, "exec"), names)
            elif excused(command) or page == "README" and "--format onnx" in command:
                continue  # ONNX takes seconds: docs/guides/convert.md
            elif '"hfds/' in command:
                continue  # a download; tests/data/test_sources.py opens such data from files
            else:
                name, main, words = words_of(command)
                words = filled(name, words, places)
                code = 0
                try:
                    code = main(words)
                except SystemExit as end:
                    code = end.code
                assert not code, f"{command}\n  as {words}"
        for name in files:
            sys.modules.pop(name, None)
            sys.path[:] = [folder for folder in sys.path if folder != str(Path.cwd())]


@pytest.mark.parametrize(
    "page", [*RUN_PAGES[:2], *(pytest.param(p, marks=pytest.mark.slow) for p in RUN_PAGES[2:])]
)
def test_what_a_page_says_runs(page, stand_ins, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert page != "README" or len(commands(page)) > 8
    if page.endswith("convert"):
        dense = timm.create_model("vit_small_patch16_224", num_classes=10)
        torch.save(dense.state_dict(), "dense.pth")
    run_page(page, stand_ins)


@functools.cache
def options_of(name):
    """What --help of a script, module or command names."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main_of(name)[1](["--help"])
    return {
        option.replace("_", "-")
        for option in re.findall(r"(?<![\w-])--[\w.-]+", printed.getvalue())
    }


def test_options_of_all_pages():
    free = ("--model.kwargs.", "--model.convert.", "--model.router-kwargs.")
    unknown = []
    for page in PAGES:
        for command in commands(page.relative_to(ROOT).with_suffix("").as_posix()):
            name, _, words = words_of(command)
            taken = options_of(name).union(*map(options_of, REST.get(name, ())))
            options = [word.replace("_", "-") for word in words if word.startswith("--")]
            unknown += [
                f"{page}: {command}: {o}"
                for o in options
                if o not in taken and not o.startswith(free)
            ]
    assert unknown == []
