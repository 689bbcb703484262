"""The code of README and of the guides for users of images runs: Python as it stands, commands on small stand-ins.

Training commands get `--dry_run true`, and every placeholder (IMAGENET, RUN, ...) something small of the same layout.
Of the other pages each option is one that its command takes.
"""

import contextlib
import importlib
import re
import shlex
import shutil
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from conftest import ROOT
from PIL import Image
from small_text import write_pairs
from test_papers import SCRIPTS
from tiny_vae import save_tiny_vae

from moh_vision.__main__ import COMMANDS
from moh_vision.__main__ import main as moh_vision_main
from moh_vision.attention import ROUTERS

README = "README.md"
RUN_PAGES = [
    README,
    "docs/getting-started.md",
    "docs/concepts.md",
    *(f"docs/guides/{n}.md" for n in "classifier diffusion data scale extend analysis convert sampling".split()),
]
ALL_PAGES = sorted(p.relative_to(ROOT).as_posix() for p in [ROOT / README, *(ROOT / "docs").rglob("*.md")])
LAUNCHERS = r"(?:accelerate launch(?: --config_file \S+)?|torchrun(?: --\S+ \d+)?|python)(?: -m)? "
NOT_RUN = {
    "git clone": "needs a network",
    "pip install": "installs packages",
    "uv pip": "installs packages",
    "python -m venv": "installs packages",
    "make ": "its targets are what runs this",
    "python -m moh_vision.attention.kernels": "compiles the operators; tests/attention/test_kernels_build.py",
    "python -m moh_vision publish RUN --output FOLDER --push": "uploads; tests/commands/test_publish.py",
    "python -m moh_vision publish TEXT_RUN": "of a run of text; tests/commands/test_publish.py",
    "accelerate launch train_cls.py --config cls/convert_vit_small_75": "loads weights of the hub; tests/models/test_pretrained.py",
    "accelerate launch --config_file configs/accelerate/fsdp2_layers.yaml": "an 8B model",
    "accelerate launch train_text.py --config configs/text/moh_llama3_stage2.yaml": "an 8B model",
    "python train_cls.py --config cls/convert_vit_small_75 --data.root IMAGENET --distill": "loads weights of the hub; tests/classification/test_distillation.py",
    "python train_dit.py --config quickstart/dit --data.root DATA --model.name pretrained": "a folder of a DiT; tests/models/test_pretrained.py",
    "python -m moh_vision export moh_dit_xlarge_patch2_90": "released weights; tests/commands/test_export.py",
    "python -m moh_vision gates TEXT_RUN": "runs of text; tests/commands/test_gates.py",
    "python -m moh_vision curves TEXT_RUN": "runs of text; tests/commands/test_curves.py",
    "python -m moh_vision lm-curve": "needs lm_eval; tests/commands/test_lm_curve.py",
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
    "patches": [SCRIPTS["validate.py"]],
    "predict": [SCRIPTS["validate.py"]],
    "lm-curve": ["lm"],
}
MORE = {  # what makes a command small
    "moh_vision.classification.train": "--dry_run true --mixed_precision no --data.workers 0 --data.max_bad_fraction 0",
    "moh_vision.diffusion.train": "--dry_run true --mixed_precision no --data.workers 0",
    "moh_vision.language.train": "--dry_run true --mixed_precision no",
    "moh_vision.classification.validate": "--data.workers 0",
    "moh_vision.diffusion.sample": "--num-images 10 --steps 2 --sampler ddim",
    "moh_vision.evaluation.fidelity": "--extractor RUN --allow-biased",
}


def pieces(page):
    """(Python, None) or (None, command) in a page's order: fenced blocks, and indented lines that are commands.

    A line that ends in a backslash goes on in the next.
    """
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    ours = LAUNCHERS + r"(\w+\.py|moh_vision[. ]\S+) "
    for block, line in re.findall(r"^```python\n(.*?)^```|^ {4}(?! )([^\n]*)$", text, re.M | re.S):
        if block or re.match(ours, f"{line.strip()} ") or excused(line.strip()):
            yield block, line.strip()


def commands(page):
    return [line for _, line in pieces(page) if line]


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
    blocks = dict(down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4)
    vae = save_tiny_vae(root / "vae", **blocks, block_out_channels=(8,) * 4)
    three = ("--model.depth", 3)  # pages name layer 2
    data = ("--data.root", root / "photos", "--data.img_size", 8)
    for name, *more in (("cls", *three), ("other", *three, "--seed", 1), ("dit",)):
        shutil.copytree(trained(name.replace("other", "cls"), 2, *data, *more), root / name)
    encode = f"latents --vae {vae} --data {root}/photos --out {root}/latents --size 256 --batch-size 4"
    assert not moh_vision_main(encode.split())
    texts = write_pairs(root / "texts")
    for file in list(texts.glob("val.*")):
        shutil.copyfile(file, file.with_name(file.name.replace("val", "valid", 1)))  # configurations name either
    photos = root / "photos"
    places = dict.fromkeys(("IMAGENET", "PHOTOS", "ROOT", "IMAGE_OR_FOLDER"), photos)
    places |= {"LATENTS": root / "latents", "TEXTS": texts, "CLASSES": root / "classes", "OTHER_RUN": root / "other"}
    places |= {"PHOTOS/train": photos / "train", "PHOTOS/val": photos / "val", "IMAGE.jpg": photos / "val/cat/0.jpg"}
    places |= {"SAMPLES": photos / "train/cat", "REFERENCE": photos / "train/dog", "stabilityai/sd-vae-ft-ema": vae}
    places["SHARDS"] = "SHARDS"
    return {"folder": root, **{name: str(place) for name, place in places.items()}}


def filled(name, words, places):
    """The options of a command with small things in place of its placeholders, and options that make it small."""
    run = str(places["folder"] / ("dit" if name.startswith("moh_vision.diffusion") else "cls"))
    given = {word.replace("_", "-") for word in words}
    more = MORE.get(name, "")
    if "--save-statistics" in words:  # nothing is scored
        more = more.replace("--allow-biased", "")
    for option, value in re.findall(r"(--\S+) ([^-]\S*)?", more + " "):
        words = words if option.replace("_", "-") in given else [*words, option, *([value] if value else [])]
    if "LATENTS" in words and name.endswith("diffusion.train"):
        words = [*words, "--vae", "stabilityai/sd-vae-ft-ema"]  # the configurations name it, and it is not here
    known = {**places, "RUN": run, **dict.fromkeys(("DIT", "EARLIER"), str(places["folder"] / "dit"))}
    known["LATENTS"] = "new" if name.endswith("latents") else places["LATENTS"]
    words = [known.get(word, word) for word in words if word != "..."]
    if "--extractor" in words:
        words[words.index("--extractor") + 1] = str(places["folder"] / "cls")
    if "--max_steps" in words and name.endswith("classification.train"):  # more than the epochs of a few images
        at = words.index("--max_steps")
        words = words[:at] + words[at + 2 :]
    if "--output" in words and name.endswith("train"):
        words[words.index("--output") + 1] = "output"
    return words


def run_page(page, places):
    """Run a page's commands and Python in the current folder: a run for "RUN", an image, no weights of the hub."""
    known = {"RUN": f"{places['folder']}/cls", "IMAGE.jpg": places["IMAGE.jpg"]}
    (places["folder"] / "dit/scores.json").unlink(missing_ok=True)  # of another page
    create, names = timm.create_model, {}
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(ROUTERS):
        patch.setattr(timm, "create_model", lambda name, pretrained=False, **kwargs: create(name, **kwargs))
        for block, command in pieces(page):
            if block:
                block = re.sub(r'"(RUN|IMAGE\.jpg)"', lambda found: repr(known[found[1]]), block)
                exec(compile(block, page, "exec"), names)
            elif not excused(command):
                name, main, words = words_of(command)
                words, code = filled(name, words, places), 0
                try:
                    code = main(words)
                except SystemExit as end:
                    code = end.code
                assert not code, f"{command}\n  as {words}"


def test_readme(stand_ins, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert len(commands(README)) > 8
    run_page(README, stand_ins)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_PAGES[1:])
def test_first_pages(page, stand_ins, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if page.endswith("convert.md"):
        torch.save(timm.create_model("vit_small_patch16_224", num_classes=10).state_dict(), "dense.pth")
    run_page(page, stand_ins)


@pytest.mark.slow
@pytest.mark.parametrize("page", ALL_PAGES)
def test_options_of_all_pages(page, capsys):
    def options_of(main):
        with contextlib.suppress(SystemExit):
            main(["--help"])
        return {option.replace("_", "-") for option in re.findall(r"(?<![\w-])--[\w.-]+", capsys.readouterr().out)}

    wrong = []
    for command in commands(page):
        if not re.match(LAUNCHERS, command) or "-m venv" in command or "quickstart.py" in command:
            continue
        name, main, words = words_of(command)
        taken = options_of(main).union(*(options_of(main_of(other)[1]) for other in REST.get(name, ())))
        free = ("--model.kwargs.", "--model.convert.", "--model.router-kwargs.")
        options = [word.replace("_", "-") for word in words if word.startswith("--")]
        wrong += [f"{command}: {o}" for o in options if o not in taken and not o.startswith(free)]
    assert wrong == []
