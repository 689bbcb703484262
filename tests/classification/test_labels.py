"""validate.py --labels: ImageNet's ReaL, V2, A, R and Sketch, in the layouts they come in, against timm's own label maps."""

import json
import pkgutil
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import ImageNetInfo
from timm.data.real_labels import RealLabelsImagenet

from moh_vision.classification.labels import open_labelled, refuse_other_classifier
from moh_vision.classification.validate import main
from moh_vision.models.creation import create
from tests.support.pictures import convert
from tests.support.refusals import one_line, refuse

SYNSETS = ImageNetInfo().label_names()
SMALL = dict(patch_size=4, embed_dim=24, depth=1, num_heads=3, img_size=8)
MODEL = (
    "--model.name moh_vit_tiny_patch16_224 --model.patch_size 4 --model.embed_dim 24 --model.depth 1 --model.num_heads 3 "
    "--data.img_size 8 --data.workers 0 --data.augment none"
).split()


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """A picture of each class, weights of a tiny model that knows all of them, and its logits of the pictures [1000, 1000]."""
    folder = tmp_path_factory.mktemp("imagenet")
    model = create("moh_vit_tiny_patch16_224", "classification", num_classes=1000, **SMALL).eval()
    pixels = np.random.default_rng(0).integers(0, 256, (1000, 8, 8, 3), dtype=np.uint8)
    mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    images = (torch.tensor(pixels).permute(0, 3, 1, 2) / 255 - mean) / std
    with torch.no_grad():
        known = model.forward_head(model.forward_features(images), pre_logits=True)  # [1000, 24]
        model.head.weight.copy_(2 * known)  # the class of the nearest features
        model.head.bias.copy_(-known.square().sum(1))
        logits = model(images)
    assert logits.argmax(1).tolist() == list(range(1000))
    torch.save(model.state_dict(), folder / "weights.pth")
    (folder / "pictures").mkdir()
    for c, picture in enumerate(pixels):
        Image.fromarray(picture).save(folder / "pictures" / f"{c}.png")
    return folder, logits


def class_folders(root, pictures, chosen, names):
    """ROOT/NAME/0.png, a link to the picture that is chosen for each name."""
    for name, c in zip(names, chosen, strict=True):
        (root / name).mkdir(parents=True)
        (root / name / "0.png").symlink_to(pictures / f"{c}.png")
    return root


def scores(folder, root, labels, tmp_path):
    file = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
    argv = f"--checkpoint {folder}/weights.pth --data.root {root} --labels {labels} --score-file {file}"
    main([*MODEL, *argv.split()])
    found = json.loads(file.read_text())
    assert found["split"] == labels and found["data"] == str(root)
    return found


def expected(logits, labels):
    best = logits.topk(5).indices
    hits = best == torch.tensor(labels)[:, None]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels)).item()
    return dict(
        top1=100 * hits[:, 0].float().mean().item(),
        top5=100 * hits.any(1).float().mean().item(),
        loss=loss,
    )


def shifted(classes, every):
    """The classes, but the next one in place of each whose number `every` divides: the picture of another."""
    return [c if c % every else (c + 1) % 1000 for c in classes]


def test_v2_and_sketch(imagenet, tmp_path, capsys):
    """V2's folders are called 0 to 999: sorted as texts, 10 comes before 2."""
    folder, logits = imagenet
    chosen = shifted(range(1000), every=4)
    truth = expected(logits[chosen], list(range(1000)))
    assert truth["top1"] == 75
    v2 = class_folders(tmp_path / "v2", folder / "pictures", chosen, map(str, range(1000)))
    found = scores(folder, v2, "v2", tmp_path)
    assert {key: found[key] for key in truth} == pytest.approx(truth, rel=1e-5)
    assert found["images"] == 1000
    assert ", labels v2): top-1 75.00 %" in capsys.readouterr().out

    sketch = tmp_path / "sketch"
    sketch.mkdir()
    for c, synset in enumerate(SYNSETS):
        (v2 / str(c)).rename(sketch / synset)
    source = open_labelled(str(sketch), "sketch")
    assert source.labels.tolist() == list(range(1000)) and source.classes == SYNSETS
    facts = f"data.root {sketch} 200 classes --labels a 1000 val n01440764"
    refuse(facts, open_labelled, str(sketch), "a")
    facts = f"data.root {sketch} 0.JPEG --labels real ImageNet ILSVRC2012_val_00000001.JPEG"
    refuse(facts, open_labelled, str(sketch), "real")
    shutil.rmtree(sketch / SYNSETS[7])
    facts = f"data.root {sketch} 1000 classes --labels sketch 999 val {SYNSETS[7]}"
    refuse(facts, open_labelled, str(sketch), "sketch")


@pytest.mark.parametrize("labels", ["a", "r"])
def test_200_of_the_classes(imagenet, tmp_path, labels):
    """Only their outputs compete; shards keep the names of the classes."""
    folder, logits = imagenet
    indices = pkgutil.get_data("timm.data", f"_info/imagenet_{labels}_indices.txt")
    of = [int(c) for c in indices.split()]
    chosen = shifted(of, every=3)
    truth = expected(logits[chosen][:, of], list(range(200)))
    assert 50 < truth["top1"] < 100
    assert truth["loss"] < expected(logits[chosen], of)["loss"]  # fewer compete
    root = class_folders(
        tmp_path / "plain" / "val", folder / "pictures", chosen, [SYNSETS[c] for c in of]
    )
    (root / "README.txt").write_text("as it comes")
    if labels == "a":
        assert convert(root.parent, tmp_path / "shards") == 0
        root = tmp_path / "shards"
    found = scores(folder, root, labels, tmp_path)
    assert found["images"] == 200
    assert {key: found[key] for key in truth} == pytest.approx(truth, rel=1e-5)


def test_real_labels(imagenet, tmp_path, capsys):
    """As timm's RealLabelsImagenet counts them: any of an image's labels is right, and some images have none."""
    folder, logits = imagenet
    names = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 61)]
    shown = []
    timms = RealLabelsImagenet(range(50_000))
    for i, name in enumerate(names):
        labels = timms.real_labels[name] or [3]
        if i % 3:
            shown.append(labels[-1])
        else:
            shown.append((labels[0] + 1) % 1000)
        picture = tmp_path / "d" / "val" / SYNSETS[i % 2] / name
        picture.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "pictures" / f"{shown[-1]}.png", picture)
    timms.filenames = names
    timms.add_result(logits[shown])
    truth = timms.get_accuracy()
    kept = len(timms.is_correct[1])
    assert 50 < truth[1] < 80 and 50 < kept < 60
    found = scores(folder, tmp_path / "d", "real", tmp_path)
    assert (found["top1"], found["top5"], found["images"]) == (
        *map(pytest.approx, truth.values()),
        kept,
    )
    assert f"{60 - kept} images of 60 have no label" in capsys.readouterr().out

    shards = tmp_path / "s"
    assert convert(tmp_path / "d", shards, "--samples-per-shard 25") == 0
    files, again = (open_labelled(str(root), "real") for root in (tmp_path / "d", shards))
    pictures = [
        sorted((s.image(i).tobytes(), *s.labels[i]) for i in range(kept)) for s in (files, again)
    ]
    assert pictures[0] == pictures[1]
    listing = shards / "val.files.txt"
    listing.write_text("".join(listing.read_text().splitlines(keepends=True)[:-1]))
    refuse(
        f"{listing} 59 files 60 images",
        lambda: open_labelled(str(shards), "real"),
    )
    listing.unlink()
    file = (
        tmp_path
        / "none"
        / "val"
        / SYNSETS[0]
        / next(n for n, labels in timms.real_labels.items() if not labels)
    )
    file.parent.mkdir(parents=True)
    file.touch()
    refuse(
        f"data.root {tmp_path}/none 1 images ReaL",
        open_labelled,
        str(tmp_path / "none"),
        "real",
    )
    for root in (str(shards), "digits"):
        refuse(
            f"data.root {root} --labels real names folders val.files.txt",
            open_labelled,
            root,
            "real",
        )


def test_other_classifiers_are_refused():
    model = create("moh_vit_tiny_patch16_224", "classification", num_classes=2, **SMALL)
    allowed = "--labels a ImageNet 1,000 classes"
    for classes, first in ((None, ""), (["cat", "dog"], "cat")):
        facts = f"{allowed} --checkpoint x 2 {first}"
        refuse(facts, refuse_other_classifier, model, classes, "--checkpoint x", "a")
    model.num_classes = 1000
    for right in (None, SYNSETS, [str(c) for c in range(1000)]):
        refuse_other_classifier(model, right, "--checkpoint x", "a")
    with one_line(f"{allowed} --checkpoint x 1000 0"):
        refuse_other_classifier(model, sorted(map(str, range(1000))), "--checkpoint x", "a")
