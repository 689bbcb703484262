"""Steps that follow from the number of images, and the two configurations for a user's own pictures."""

import re

import pytest
import yaml
from PIL import Image

from moh_vision.classification import train as train_cls
from moh_vision.classification import validate
from moh_vision.classification.config import ClsConfig
from moh_vision.diffusion import train as train_dit
from moh_vision.diffusion.config import DitConfig
from moh_vision.engine.command_line import parse_config
from tests.support.pictures import gradient, write_folder
from tests.support.refusals import refuse

SCRIPTS = {"cls": (train_cls, ClsConfig), "dit": (train_dit, DitConfig)}
# The configurations as they are: test_a_folder_of_classes_needs_no_splits[cls] and test_pictures_without_classes.
SMALLER = {
    "cls": ["--model.depth", "1", "--model.embed_dim", "48"],
    "dit": ["--model.depth", "3"],
}
# Training images and images of a batch -> steps and warm-up of a classifier and of a diffusion model.
STEPS = {
    "100": (100, 64, dict(cls=(600, 30), dit=(2400, 120))),
    "1,000": (1000, 64, dict(cls=(1897, 94), dit=(7589, 379))),
    "20,000": (20000, 64, dict(cls=(8485, 424), dit=(33941, 1697))),
    "larger batches": (20000, 256, dict(cls=(2121, 106), dit=(8485, 424))),
    "one image": (1, 80000, dict(cls=(1, 0), dit=(1, 0))),
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("case", STEPS)
def test_steps_follow_from_the_number_of_images(script, case):
    images, batch, expected = STEPS[case]
    steps, warmup = expected[script]
    options = ["--max-steps", "auto", "--optim.batch_size", str(batch)]
    config = parse_config(SCRIPTS[script][1], options, "t")
    found, line = config.settle_steps(images)
    assert (config.max_steps, found) == (steps, warmup)
    assert config.optim.warmup_steps == 0  # a key that may not change when a run goes on
    said = f"max_steps auto: {steps} steps of {batch} for {images} images, the first {warmup} are"
    assert line.startswith(said)
    assert config.settle_steps(images) == (0, "")  # settled already


@pytest.mark.parametrize("given", [0, 7])
def test_a_warm_up_that_is_given_stays(given):
    options = f"--max-steps auto --optim.warmup_steps {given} --optim.batch_size 64"
    config = parse_config(DitConfig, options.split(), "t")
    line = "max_steps auto: 2400 steps of 64 for 100 images"
    assert config.settle_steps(100) == (given, line)


def test_numbers_of_steps_stay():
    config = parse_config(ClsConfig, ["--max-steps", "9", "--optim.warmup_steps", "3"], "t")
    assert config.settle_steps(100) == (3, "")
    assert config.max_steps == 9


def test_the_warm_up_of_auto_begins_where_asked():
    config = parse_config(ClsConfig, "--max-steps auto --optim.warmup_lr 1e-5".split(), "t")
    assert config.optim.warmup_lr == 1e-5


@pytest.mark.parametrize("option", ["--optim.epochs", "--optim.warmup_epochs"])
def test_epochs_and_steps_of_the_images_are_two_schedules(option):
    facts = "max_steps auto optim.epochs optim.warmup_epochs"
    refuse(facts, parse_config, ClsConfig, ["--max-steps", "auto", option, "3"], "t")


def write_pictures(root):
    """Write pictures of other sizes, one of them grey, and classes of other sizes."""
    write_folder(root, size=(90, 40))
    gradient(300, 200).convert("L").save(root / "train" / "cat" / "grey.png")
    Image.new("RGB", (20, 70), "red").save(root / "train" / "dog" / "small.png")
    return root


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_needs_the_folder_alone(script, tmp_path, monkeypatch, capsys):
    """It is trained; the same command, and one for more steps, go on with it."""
    config_class = SCRIPTS[script][1]
    monkeypatch.setattr(config_class, "images_per_root", 10)  # 10 sqrt(14) / 2 steps
    main = SCRIPTS[script][0].main
    root = write_pictures(tmp_path / "photos")
    command = ["--config", f"{script}/own_pictures", "--data.root", str(root)]
    command += ["--output", str(tmp_path / "run"), "--optim.batch_size", "2"]
    command += SMALLER[script]
    rates = tmp_path / "run" / "metrics.jsonl"
    main([*command, "--log_every", "1"])
    out = capsys.readouterr().out
    assert "max_steps auto: 19 steps of 2 for 14 images, the first 0 are the warm-up" in out
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (saved["max_steps"], saved["optim"]["warmup_steps"]) == (19, 0)
    assert (tmp_path / "run" / "ema.safetensors").is_file()
    before = rates.read_text().splitlines()[:19]
    main(command)
    assert "max_steps auto: 19 steps" in capsys.readouterr().out
    assert rates.read_text().splitlines()[:19] == before
    monkeypatch.setattr(config_class, "images_per_root", 11)  # a warm-up of one step
    main(command)
    assert "max_steps auto: 21 steps of 2 for 14 images, the first 1 are" in capsys.readouterr().out
    main([*command, "--max-steps", "22"])
    assert (tmp_path / "run" / "checkpoints" / "step_22").is_dir()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_folder_of_classes_needs_no_splits(script, tmp_path, capsys):
    """A classifier keeps some for validation, also when it is opened again; a DiT trains on all."""
    write_pictures(tmp_path / "both")
    root = (tmp_path / "both" / "train").rename(tmp_path / "photos")
    run = str(tmp_path / "run")
    main = SCRIPTS[script][0].main
    argv = ["--config", f"{script}/own_pictures", "--data.root", str(root), "--output", run]
    argv += ["--max_steps", "2"]
    if script == "dit":
        main([*argv, *SMALLER["dit"]])
        out = capsys.readouterr().out
        assert f"{root}: 14 training images of 2 classes; 2 steps" in out
        return
    main([*argv, "--data.val_fraction", "0.5"])  # a tenth of so few may be none
    out = capsys.readouterr().out
    (count,) = re.findall(rf"([0-9]+) of the 14 images in {root} are for validation alone", out)
    images = f"{14 - int(count)} training images of 2 classes, {count} for validation"
    assert f"{root}: {images}" in out
    validate.main(["--checkpoint", run])
    again = capsys.readouterr().out
    assert f"{count} of the 14 images" in again and f", {count} images, " in again


def test_pictures_without_classes(tmp_path):
    root = tmp_path / "photos"
    root.mkdir()
    for number in range(6):
        gradient(50 + number, 40).save(root / f"{number}.png")
    command = ["--config", "dit/own_pictures", "--data.root", str(root)]
    train_dit.main([*command, "--output", str(tmp_path / "run"), "--max_steps", "2"])
    assert (tmp_path / "run" / "checkpoints" / "step_2").is_dir()
