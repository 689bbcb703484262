"""Training, validation and the commands predict, shards, latents and fidelity take the same files of a folder as images."""

import numpy as np
import pytest

from moh_vision.__main__ import main as command
from moh_vision.classification import validate
from moh_vision.data.splits import in_short, open_source, open_splits
from moh_vision.diffusion.latents.stored import LatentCache
from moh_vision.engine.checkpoint import export_weights
from moh_vision.evaluation.fidelity.images import open_images, open_set
from moh_vision.models.creation import create
from tests.support.pictures import convert, encoded, gradient
from tests.support.refusals import refuse
from tests.support.tiny_vae import save_tiny_vae

SIZES = dict(img_size=8, patch_size=4, embed_dim=24, depth=1, num_heads=3, num_classes=2)


def odd_folder(folder):
    """Write nine images of two classes in many formats and depths of folders, and files that are no images of theirs."""
    picture = gradient(8, 8)
    palette = picture.convert("RGBA").convert("P")
    palette.info["transparency"] = 0
    files = {
        "ant/1.png": encoded(picture),
        "ant/2.PNG": encoded(picture.convert("L")),
        "ant/3.JPG": encoded(picture.convert("CMYK"), "JPEG"),
        "ant/deep/deeper/4.png": encoded(picture.convert("LA")),
        "ant/5.bmp": encoded(picture, "BMP"),
        "bee/6.png": encoded(palette),
        "bee/7.tiff": encoded(picture, "TIFF"),
        "bee/8.webp": encoded(picture.convert("RGBA"), "WEBP"),
        "bee/9.ppm": encoded(picture, "PPM"),
        # None of these is taken.
        "ant/.hidden.png": encoded(picture),
        "ant/._1.png": b"of a Mac",
        "bee/.thumbnails/6.png": encoded(picture),
        "bee/.DS_Store": b"of a Mac",
        "bee/notes.txt": b"text",
        "bee/more.txt": b"text",
        "bee/README": b"text",
        "bee/10.heic": b"of a telephone",
    }
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


LEFT_OUT = (
    "1 .heic (bee/10.heic), 2 .txt (bee/more.txt, ...), 3 hidden (ant/._1.png, ...), "
    "1 without an ending (bee/README)"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for split in ("train", "val"):
        odd_folder(root / split)
    return root


def test_every_reader_takes_the_same_images_and_says_what_it_leaves_out(root, tmp_path, capfd):
    train, val = open_splits(str(root))
    assert (len(train), len(val)) == (9, 9)
    line = f"left out of {root}/train: {LEFT_OUT}"
    assert line in in_short(str(root), train, 1, 1, val).splitlines()
    assert f"left out of {root}/val: {LEFT_OUT}" in in_short(str(root), train, 1, 1, val)

    model = create("moh_vit_tiny_patch16_224", "classification", head_budget=1.0, **SIZES)
    about = dict(architecture="moh_vit_tiny_patch16_224", classes=["ant", "bee"])
    about["config"] = dict(kind="classification")
    about["arguments"] = dict(SIZES, head_budget=1.0)
    export_weights(model, tmp_path / "run" / "model.safetensors", about)
    run = str(tmp_path / "run" / "model.safetensors")
    validate.main(["--checkpoint", run, "--data.root", str(root), "--data.workers", "0"])
    out = capfd.readouterr().out
    assert f"left out of {root}/val: {LEFT_OUT}" in out and "9 images" in out

    assert command(["predict", run, str(root / "val"), "--data.workers", "0"]) == 0
    said = capfd.readouterr()
    assert said.out.count("\n") == 9 and f"left out of {root}/val: {LEFT_OUT}" in said.err

    assert convert(root, tmp_path / "shards", "--size 8") == 0
    assert line in capfd.readouterr().out.splitlines()
    assert len(open_source(str(tmp_path / "shards"), "train")) == 9

    vae = save_tiny_vae(tmp_path / "vae")
    argv = f"latents --vae {vae} --data {root} --out {tmp_path}/latents --size 8 --workers 0"
    assert command(argv.split()) == 0
    assert line in capfd.readouterr().out.splitlines()
    assert len(LatentCache(str(tmp_path / "latents"), "train")) == 9

    scored = open_images(root / "train", "generated")
    assert (scored.count, scored.channels) == (9, 3)
    scored_line, alpha = scored.remarks
    assert scored_line == line and "1 of 9 images that were looked at have transparent" in alpha
    as_trained = open_set("GENERATED", str(root), "train", "train")
    as_trained.size = 8
    assert (as_trained.count, as_trained.remarks[0]) == (9, line)
    # Scores and training also decode the same pixels, whatever the colour mode of a file.
    one, other = (
        np.sort(images.read(0, 9).reshape(9, -1), axis=0) for images in (scored, as_trained)
    )
    assert (one == other).all()


def test_a_class_called_train_is_no_split(tmp_path):
    for name in ("bus", "train"):
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        gradient(8, 8).save(folder / "0.png")
    root = str(tmp_path / "data")
    for split in ("train", "val"):
        facts = f"data.root {root} classes shards --in {root} --val-fraction"
        refuse(facts, open_source, root, split)
    assert open_set("REFERENCE", root, None, "train") == root
    assert open_images(root, "reference").count == 2
    # A folder without images beside `train` is no class, so `train` is taken for the split.
    (tmp_path / "data" / "bus" / "0.png").rename(tmp_path / "data" / "bus" / "notes.txt")
    assert len(open_source(root, "train")) == 1


@pytest.mark.parametrize(
    "names", [("a/0.png", "b/0.png"), ("0.png", "1.png")], ids=["classes", "flat"]
)
def test_training_reads_a_folder_in_no_split_as_a_whole(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        gradient(8, 8).save(tmp_path / name)
    images = open_set("REFERENCE", str(tmp_path), "train", "val")
    assert (images.count, images.name) == (2, f"{tmp_path}, train split")
    facts = f"REFERENCE {tmp_path} split val train"
    refuse(facts, open_set, "REFERENCE", str(tmp_path), "val", "val")


def test_both_names_of_the_validation_split_are_refused(root, tmp_path):
    for name in ("train", "val", "validation"):
        odd_folder(tmp_path / name)
    refuse(f"{tmp_path} both val validation", open_source, str(tmp_path), "val")
