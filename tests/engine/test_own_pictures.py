"""Steps that follow from the number of images, and the two configurations for a user's own pictures."""

import pytest
import yaml
from PIL import Image

from moh_vision.classification import train as train_cls
from moh_vision.classification.config import ClsConfig
from moh_vision.diffusion import train as train_dit
from moh_vision.diffusion.config import DitConfig
from moh_vision.engine import config as engine_config
from moh_vision.engine.command_line import parse_config
from tests.support.pictures import gradient, write_folder
from tests.support.refusals import refuse

SCRIPTS = {"cls": (train_cls, ClsConfig), "dit": (train_dit, DitConfig)}
# Training images and images of a batch -> steps and warm-up.
STEPS = {
    "100": (100, 64, 600, 30),
    "1,000": (1000, 64, 1897, 94),
    "20,000": (20000, 64, 8485, 424),
    "larger batches": (20000, 256, 2121, 106),
    "one image": (1, 8000, 1, 0),
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("case", STEPS)
def test_steps_follow_from_the_number_of_images(script, case):
    images, batch, steps, warmup = STEPS[case]
    options = ["--max-steps", "auto", "--optim.batch_size", str(batch)]
    config = parse_config(SCRIPTS[script][1], options, "t")
    line = config.settle_steps(images)
    assert (config.max_steps, config.optim.warmup_steps) == (steps, warmup)
    said = f"max_steps auto: {steps} steps of {batch} for {images} images, the first {warmup} are"
    assert line.startswith(said)
    assert config.settle_steps(images) is None  # settled already


def test_a_warm_up_that_is_given_stays():
    options = "--max-steps auto --optim.warmup_steps 7 --optim.batch_size 64"
    config = parse_config(DitConfig, options.split(), "t")
    assert config.settle_steps(100) == "max_steps auto: 600 steps of 64 for 100 images"
    assert config.optim.warmup_steps == 7


def test_numbers_of_steps_stay():
    config = parse_config(ClsConfig, ["--max-steps", "9"], "t")
    assert config.settle_steps(100) is None
    assert config.max_steps == 9


@pytest.mark.parametrize("option", ["--optim.epochs", "--optim.warmup_epochs"])
def test_epochs_and_steps_of_the_images_are_two_schedules(option):
    words = "max_steps auto: leave out optim.epochs and optim.warmup_epochs"
    refuse(words, parse_config, ClsConfig, ["--max-steps", "auto", option, "3"], "t")


def write_pictures(root):
    """Write pictures of other sizes, one of them grey, and classes of other sizes."""
    write_folder(root, size=(90, 40))
    gradient(300, 200).convert("L").save(root / "train" / "cat" / "grey.png")
    Image.new("RGB", (20, 70), "red").save(root / "train" / "dog" / "small.png")
    return root


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_needs_the_folder_alone(script, tmp_path, monkeypatch, capsys):
    """It is trained, and resumes although its folder has numbers where the configuration says auto."""
    monkeypatch.setattr(engine_config, "AUTO", 40)  # 40 sqrt(14) images
    main = SCRIPTS[script][0].main
    root = write_pictures(tmp_path / "photos")
    command = ["--config", f"{script}/own_pictures", "--data.root", str(root)]
    command += ["--output", str(tmp_path / "run")]
    main(command)
    out = capsys.readouterr().out
    assert "max_steps auto: 2 steps of 64 for 14 images, the first 0 are the warm-up" in out
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["max_steps"] == 2
    assert (tmp_path / "run" / "ema.safetensors").is_file()
    monkeypatch.setattr(engine_config, "AUTO", 60)
    main([*command, "--allow_change", "max_steps"])
    assert "max_steps auto: 4 steps" in capsys.readouterr().out
    assert (tmp_path / "run" / "checkpoints" / "step_4").is_dir()


def test_pictures_without_classes(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_config, "AUTO", 40)
    root = tmp_path / "photos"
    root.mkdir()
    for number in range(6):
        gradient(50 + number, 40).save(root / f"{number}.png")
    command = ["--config", "dit/own_pictures", "--data.root", str(root)]
    train_dit.main([*command, "--output", str(tmp_path / "run")])
    assert (tmp_path / "run" / "checkpoints" / "step_2").is_dir()
