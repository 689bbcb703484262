"""Messages that pages quote: each is said as it is quoted. Other tests assert the facts in a message, not its wording."""

import re
import shutil

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

import moh_vision
from moh_vision.__main__ import main as command
from moh_vision.data import copies
from moh_vision.data.latents import latents_path
from moh_vision.data.shards import Shards
from moh_vision.data.splits import open_source, open_splits
from moh_vision.diffusion import sample
from moh_vision.diffusion import train as train_dit
from moh_vision.diffusion.latents.vae import load_vae
from moh_vision.evaluation.accuracy import refuse_not_finite
from moh_vision.models import dit
from moh_vision.models.creation import create
from tests.support import sampling
from tests.support.paths import ROOT
from tests.support.pictures import convert, gradient, write_folder
from tests.support.shards import append, write_shards
from tests.support.small_runs import arguments, script
from tests.support.tiny_vae import save_tiny_vae, write_latents

SIZES = dict(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=3)


# ---------------------------------------------------------------- what provokes a message: functions of a folder and a monkeypatch


def train(kind, options="", steps=1):
    """Return a function that trains a small run in its folder, for which {0} stands in the options."""

    def provoke(folder, patch):
        argv = arguments(kind, folder / "run", steps, 1, *options.format(folder).split())
        script(kind).main(argv)

    return provoke


def after(first, then):
    """Return a function that does one thing after another."""

    def provoke(folder, patch):
        first(folder, patch)
        then(folder, patch)

    return provoke


def pictures(folder, patch):
    write_folder(folder / "data")


def small_share(folder, patch):
    pictures(folder, patch)
    open_splits(str(folder / "data/train"), val_fraction=1e-9)


def copies_in_val(folder, patch):
    root = write_folder(folder / "data")
    shutil.rmtree(root / "val")
    shutil.copytree(root / "train", root / "val")
    copies.warn_of_copies(f"data.root {root}", *open_splits(str(root)), print)


def unreadable_image(folder, patch):
    root = write_folder(folder / "data")
    (root / "train/cat/0.png").write_text("no image")
    convert(root, folder / "shards")


def empty_class(folder, patch):
    (write_folder(folder / "data") / "train/cow").mkdir()
    open_source(str(folder / "data"), "train")


def plain_folder(folder, patch):
    for split in ("train", "val"):
        (folder / "plain" / split).mkdir(parents=True)
        for number in range(8):
            gradient(8, 8).save(folder / "plain" / split / f"{number}.png")


def folder_of_latents(folder, patch):
    (folder / "latents").mkdir()
    for split in ("train", "val"):
        latents_path(folder / "latents", split).write_text("{}")


def table_without_a_split(folder, patch):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["cat"]))
    table = datasets.Dataset.from_dict(dict(image=[gradient()], label=[0]), features=features)
    patch.setattr(datasets, "load_dataset", lambda name, config: dict(train=table))
    open_splits("hfds/anna/pets")


def saved_classifier(folder, patch):
    model = timm.create_model("vit_tiny_patch16_224", **SIZES)
    timm.models.save_for_hf(model, folder / "timm", model_args=SIZES, safe_serialization=True)


def predict(folder, patch):
    saved_classifier(folder, patch)
    root = write_folder(folder / "data")
    (root / "val/cat/0.png").write_text("no image")
    command(["predict", f"{folder}/timm", f"{root}/val/cat", "--data.img_size", "8"])


def taught(options, options_of_student):
    """Return a function that trains a teacher with some options, and a student with others."""

    def provoke(folder, patch):
        teacher = folder / "teacher"
        train_dit.main(arguments("dit", teacher, 1, 1, *options.split()))
        student = ["--distill.teacher", teacher, *options_of_student.split()]
        train_dit.main(arguments("dit", folder / "run", 1, 1, *student))

    return provoke


def changed_shard(folder, patch):
    root = write_shards(folder / "shards")
    Shards(str(root), "train")
    append(root / "train-000001.tar", "0100.txt", bytes(20_000))
    Shards(str(root), "train")


def damaged_checkpoint(folder, patch):
    train("cls")(folder, patch)
    for file in (folder / "run/checkpoints").rglob("*.safetensors"):
        file.write_bytes(b"torn")
    train("cls", steps=2)(folder, patch)


def launched_otherwise(folder, patch):
    patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    train("cls", "--mixed_precision no")(folder, patch)


def float16_on_a_cpu(folder, patch):
    if torch.accelerator.is_available():
        pytest.skip("runs here")
    train("cls", "--mixed_precision fp16")(folder, patch)


def configuration_of_another_script(folder, patch):
    script("cls").main(["--config", "dit/jit_base_patch16", "--output", f"{folder}/run"])


def stored_latents_for_a_teacher(folder, patch):
    pictures(folder, patch)
    vae = save_tiny_vae(folder / "vae")
    made = f"--vae {vae} --data {folder}/data --out {folder}/latents --size 8 --workers 0"
    assert write_latents(made.split()) == 0
    train("dit", "--data.root {0}/latents --data.img_size 8 --repa.teacher x --repa.block 1")(
        folder, patch
    )


def weights_of_another_budget(folder, patch):
    for share, pair in ((75, (1, 2)), (90, (2, 2))):
        small = dict(embed_dim=32, depth=2, num_heads=4, head_budget=[pair] * 2)
        for key, value in small.items():
            patch.setitem(dit.VARIANTS[f"moh_dit_small_patch2_{share}"], key, value)
    model = create("moh_dit_small_patch2_75", "diffusion", img_size=8)
    torch.save(dict(ema=model.state_dict()), folder / "dit.pt")
    vae = save_tiny_vae(folder / "vae")
    argv = f"--checkpoint {folder}/dit.pt --model moh_dit_small_patch2_90 --vae {vae} --grid {folder}/x.png"
    sample.main(argv.split())


def load(change):
    """Return a function that reads weights of a classifier that `change` has altered in place."""

    def provoke(folder, patch):
        model = timm.create_model("vit_tiny_patch16_224", **SIZES)
        state = model.state_dict()
        change(state)
        torch.save(state, folder / "vit.pth")
        moh_vision.load_checkpoint(model, folder / "vit.pth")

    return provoke


def hold_nan(state):
    state["head.weight"][0, 0] = float("nan")


def have_more_classes(state):
    state["head.bias"] = torch.zeros(5)


def logits_of_nan(folder, patch):
    refuse_not_finite(dict(not_finite=2, images=3), "vit.pth")


def guidance_without_dropped_labels(folder, patch):
    run = sampling.run_of(folder, 3, label_drop=0)
    sampling.call(run, "--out", folder / "a.npz")


def hub_without_a_network(folder, patch):
    def offline(*what, **more):
        raise LocalEntryNotFoundError("offline")

    patch.setattr(huggingface_hub, "hf_hub_download", offline)
    load_vae("some/vae")


def rotary_positions(folder, patch):
    options = "--model.num_heads 4 --model.kwargs.use_rot_pos_emb true"
    train("dit", options)(folder, patch)
    (folder / "run").rename(folder / "before")
    train("dit", "--model.num_heads 4 --init-from {0}/before")(folder, patch)


def another_time(folder, patch):
    flow = "--model.head_budget null --objective flow"
    train("dit", f"{flow} --model.name sit_small_patch2")(folder, patch)
    (folder / "run").rename(folder / "before")
    train("dit", f"{flow} --model.name dit_small_patch2 --init-from {{0}}/before")(folder, patch)


# ---------------------------------------------------------------- page -> what it quotes, `...` for what differs -> what provokes it

MESSAGES = "reference/messages"
DIFFUSION = "guides/diffusion"
PREVIEW = "--preview.every 1 --preview."
SIZED = "--data.img_size 8"
COSINE = "--optim.schedule cosine --optim.warmup_steps 0"
QUOTED = {
    MESSAGES: {
        "... needs ..., and has no effect otherwise": train(
            "dit", f"--objective flow {PREVIEW}sampler dopri5 --preview.steps 5"
        ),
        "... takes this file; ...": configuration_of_another_script,
        '... needs a GPU; on a CPU it is "no" or "bf16"': float16_on_a_cpu,
        "data.img_size is needed for ...: images are cropped to it": after(
            pictures, train("dit", "--data.root {0}/data")
        ),
        "data.root ...: no split ...; it has ...": table_without_a_split,
        "none of its ... images falls into val_fraction ... for validation": small_share,
        "... of ... images for validation that were looked at are trained on too": copies_in_val,
        "... unreadable so far": unreadable_image,
        "... holds no images": empty_class,
        "images without classes, which train_dit.py takes": after(
            plain_folder, train("cls", f"--data.root {{0}}/plain {SIZED}")
        ),
        "data.root ...: latents, which train_dit.py reads; images are needed here": after(
            folder_of_latents, train("cls", f"--data.root {{0}}/latents {SIZED}")
        ),
        "... does not name its ... classes, which are ...": predict,
        "... was changed since the index ...": changed_shard,
        "... of ... images could not be read": predict,
        "has already done ... steps": after(train("cls", steps=2), train("cls")),
        "every checkpoint in ... is damaged, or of another version": damaged_checkpoint,
        "accelerate was launched with ..., but mixed_precision is ...: set both": launched_otherwise,
        "model.name '...' has no head routing": train("cls", "--model.name resnet10t"),
        "distill.teacher ... cannot take images of ...": after(
            saved_classifier,
            train("cls", "--data.img_size 12 --distill.teacher local-dir:{0}/timm"),
        ),
        "distill.teacher ...: its ... is ..., that of the model is ...": taught(
            "--label_drop 0.1", "--objective flow"
        ),
        "distill.teacher ... was trained with label_drop 0": taught("--label_drop 0", ""),
        "repa.teacher ... needs images: ... holds stored latents": stored_latents_for_a_teacher,
        "; --model ... fits": weights_of_another_budget,
        "... of ... tensors hold NaN or infinity": load(hold_nan),
        "the logits of ... images are NaN or infinite": logits_of_nan,
        "has shape ..., the model needs ...": load(have_more_classes),
        "--cfg-scale ... needs a run trained with label_drop above 0": guidance_without_dropped_labels,
        "... needs classes, and the images have none": after(
            plain_folder, train("dit", f"--data.root {{0}}/plain {SIZED} {PREVIEW}cfg_scale 1.5")
        ),
        ": a model that predicts ... takes ...": train("dit", f"{PREVIEW}sampler sde"),
        "the hub cannot be reached, and it is not in the local cache": hub_without_a_network,
    },
    "guides/scale": {
        "max_steps ... -> ...: the learning rate at step ... goes from ... to ...": after(
            train("cls", COSINE), train("cls", COSINE, steps=3)
        ),
    },
    DIFFUSION: {
        "was trained with use_rot_pos_emb true, this model with false": rotary_positions,
        "was trained to predict velocity on path linear (in SiT's time)": another_time,
    },
}


def pattern(quoted):
    """Return a regular expression of a quoted message, where `...` stands for what differs."""
    return ".+".join(map(re.escape, quoted.split("...")))


@pytest.mark.parametrize(
    "page, quoted", [(page, quoted) for page, messages in QUOTED.items() for quoted in messages]
)
def test_a_quoted_message_is_said(page, quoted, tmp_path, monkeypatch, capsys, forget_precision):
    forget_precision()
    file = f"docs/{page}.md"
    shown = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(pattern(quoted), shown), f"{file} does not quote it: {quoted}"
    raised = ""
    try:
        QUOTED[page][quoted](tmp_path, monkeypatch)
    except (Exception, SystemExit) as error:
        raised = str(error)
    out, error = capsys.readouterr()
    said = f"{out}\n{error}\n{raised}"
    assert re.search(pattern(quoted), said), f"{file} quotes {quoted}, but it is said as: {said}"


def test_every_row_of_the_page_of_messages_is_here():
    file = f"docs/{MESSAGES}.md"
    page = (ROOT / file).read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.*?)` \|", page, flags=re.MULTILINE)
    assert rows == list(QUOTED[MESSAGES]), f"the rows of {file} are not those of QUOTED, in order"
