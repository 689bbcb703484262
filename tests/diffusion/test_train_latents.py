"""Diffusion on latents, stored and made on the way, through train_dit.py."""

import hashlib
import json
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from PIL import Image
from safetensors import safe_open

from moh_vision.__main__ import main
from moh_vision.diffusion import train as train_dit
from moh_vision.diffusion.inputs import CachedInputs, EncodedInputs, open_inputs
from moh_vision.diffusion.latents.vae import load_vae
from moh_vision.diffusion.objectives.noise import draw_step
from moh_vision.models.counts import count_macs
from moh_vision.models.weights import find_weights
from tests.support.pictures import write_folder
from tests.support.refusals import assert_says, refused
from tests.support.small_runs import entries
from tests.support.tiny_vae import coarse_vae, save_tiny_vae, write_latents


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """dict(vae, other, coarse, images, cache): three VAEs, images of 21 x 16 pixels, and their latents by the first."""
    tmp = tmp_path_factory.mktemp("latents")
    vae = save_tiny_vae(tmp / "vae")
    other = save_tiny_vae(tmp / "other", seed=1)
    images = write_folder(tmp / "images", train=10, size=(21, 16))
    cache = tmp / "cache"
    argv = f"--vae {vae} --data {images} --out {cache} --size 16 --dtype float32 --samples-per-shard 9 --workers 0"
    assert write_latents(argv.split()) == 0
    coarse_vae().save_pretrained(tmp / "coarse")
    return dict(
        vae=vae, other=other, coarse=str(tmp / "coarse"), images=str(images), cache=str(cache)
    )


def collated(items):
    kept = [{k: v for k, v in item.items() if k not in ("position", "bad")} for item in items]
    return torch.utils.data.default_collate(kept)


@pytest.mark.parametrize("augment", ["none", "flip"])
def test_stored_and_encoded_latents_are_the_same_at_every_position(folders, augment):
    cached = open_inputs(folders["cache"], "none", None, augment)
    encoded = open_inputs(folders["images"], folders["vae"], 16, augment)
    assert (type(cached), type(encoded)) == (CachedInputs, EncodedInputs)
    for inputs in (cached, encoded):
        assert (inputs.img_size, inputs.channels, inputs.space.downsampling) == (8, 4, 2)
    assert (
        open_inputs(folders["images"], folders["vae"], None, augment).img_size == 128
    )  # of 256 pixels
    assert encoded.space == cached.space
    numbers = np.load(f"{folders['cache']}/train.numbers.npy")  # in the folder of images
    stored, images = (inputs.dataset(7, draw_step, 0.3) for inputs in (cached, encoded))
    positions = range(100, 140)
    a = cached.encode(collated([stored[(p, p % 20)] for p in positions]))
    b = encoded.encode(collated([images[(p, numbers[p % 20])] for p in positions]))
    assert a.keys() == b.keys() == {"images", "labels", "timesteps", "noise"}
    assert a["images"].shape == (40, 4, 8, 8) and a["images"].dtype == torch.float32
    torch.testing.assert_close(a["images"], b["images"], rtol=1e-5, atol=1e-6)
    for key in ("labels", "timesteps", "noise"):
        assert torch.equal(a[key], b[key])
    assert 0.1 < (a["labels"] == 2).float().mean() < 0.5


def test_draws_depend_on_seed_and_position_alone_and_flip_half_the_time(folders):
    flipped, plain = (
        open_inputs(folders["cache"], "none", None, augment) for augment in ("flip", "none")
    )
    data = flipped.dataset(3, draw_step, 0.1)
    again = data[(5, 2)]["images"]
    other = flipped.dataset(4, draw_step, 0.1)[(5, 2)]["images"]
    assert torch.equal(data[(5, 2)]["images"], again)
    assert not torch.equal(other, again)

    def image_and_mirror(i):
        """Moments of one value each, log variance too."""
        return torch.stack([torch.full((8, 8, 8), value) for value in (-90.0, 90.0)])

    for inputs in (flipped, plain):
        inputs.source.read = image_and_mirror
    drawn = torch.stack([data[(p, 0)]["images"] for p in range(400)]) / flipped.space.scaling_factor
    mirrored = drawn.std((1, 2, 3)) > 1
    assert 0.4 < mirrored.float().mean() < 0.6
    torch.testing.assert_close(
        drawn[~mirrored], torch.full_like(drawn[~mirrored], -90), rtol=1e-5, atol=1e-4
    )
    assert all(plain.dataset(3, draw_step, 0.1)[(p, 0)]["images"].std() < 1e-3 for p in range(20))


def test_streams_do_not_share_numbers(folders):
    item = open_inputs(folders["images"], folders["vae"], 16, "none").dataset(0, draw_step, 0)[
        (0, 0)
    ]
    noise = torch.stack([item["noise"], item["posterior_noise"]]).flatten(1)
    assert abs(torch.corrcoef(noise)[0, 1]) < 0.2


def test_encoding_under_autocast_gives_float32_near_by(folders):
    inputs = open_inputs(folders["images"], folders["vae"], 16, "none")
    batch = collated([inputs.dataset(0, draw_step, 0)[(0, n)] for n in range(4)])
    exact = inputs.encode(batch)["images"]
    near = inputs.encode(batch, torch.autocast("cpu", torch.bfloat16))["images"]
    assert near.dtype == torch.float32 and not near.requires_grad
    assert 0 < (near - exact).abs().max() < 0.05 * exact.abs().max()


ARGV = (
    "--model.depth 2 --model.embed_dim 32 --model.num_heads 4 --model.head_budget 0.75 --optim.batch_size 8 "
    "--max-steps 2 --log-every 1 --data.workers 0 --data.augment flip --ema.decay 0.9"
).split()


def train(output, *more):
    train_dit.main([*ARGV, "--output", str(output), *more])
    return entries(output)


@pytest.mark.parametrize("root", ["cache", "images"])
def test_training(folders, tmp_path, capsys, root):
    more = ["--data.root", folders[root]]
    if root == "images":  # the teacher of REPA sees the images
        sizes = dict(embed_dim=24, depth=1, num_heads=3, patch_size=8, img_size=32)
        timm.models.save_for_hf(
            timm.create_model("vit_tiny_patch16_224", **sizes), tmp_path / "t", model_args=sizes
        )
        more += ["--vae", folders["vae"], "--data.img_size", "16"]
        more += ["--repa.teacher", f"local-dir:{tmp_path / 't'}", "--repa.block", "1"]
    lines = train(tmp_path / "run", *more)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert all(("repa_loss" in line) == (root == "images") for line in lines)
    space = vars(open_inputs(folders["cache"], "none", None, "none").space)
    for weights in ("ema", "model"):
        found = find_weights(tmp_path / "run", prefer=weights)
        model = found.build()
        assert found.metadata["vae"] == space
        config = model.config
        assert config.sample_size == 8
        assert config.in_channels == 4
        assert config.num_classes == 2
    for file in (tmp_path / "run").rglob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():
                assert "encoder" not in name and "quant_conv" not in name, file
    train(tmp_path / "run", *more, "--max-steps", "3")  # resumes
    if root == "cache":  # latents of another VAE are other numbers
        cache = tmp_path / "other"
        other = folders["other"]
        argv = f"--vae {other} --data {folders['images']} --out {cache} --size 16 --workers 0"
        assert write_latents(argv.split()) == 0
        argv = f"search {tmp_path}/run --share 0.8 --images 4 --output {tmp_path}/b.json --data.root {cache}"
        error = refused(capsys, main, *argv.split())
        facts = f"data.root {cache} VAE {other} sha256 {tmp_path}/run {folders['vae']}"
        assert_says(error, facts)


def test_a_dry_run_counts_the_vae_apart(folders, tmp_path, capsys):
    def lines(*argv):
        train_dit.main([*ARGV, "--output", str(tmp_path / "run"), *argv, "--dry-run"])
        return [
            line
            for line in capsys.readouterr().out.splitlines()
            if "VAE:" in line or "encoder" in line
        ]

    vae = load_vae(folders["vae"])
    size = sum(p.numel() for p in vae.parameters())
    said, encoder = lines(
        "--data.root", folders["images"], "--vae", folders["vae"], "--data.img_size", "16"
    )
    assert f"{size:,} parameters, frozen, no part of the model" in said
    macs = count_macs(vae.encoder, torch.zeros(1, 3, 16, 16)).dense
    assert f"its encoder runs in every step: {macs:,} MACs" in encoder
    for more in ([], ["--vae", folders["vae"]]):
        (said,) = lines("--data.root", folders["cache"], *more)
        assert "latents are stored: it does not count" in said
        assert (f"{size:,}" in said) == bool(more)
    assert lines("--model.patch_size", "4") == []


def named(cache, folder, name):
    """The latents, moved to `folder`, as if made with the VAE of that name."""
    shutil.copytree(cache, folder)
    manifest = folder / "train.meta.json"
    about = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(dict(about, vae=dict(about["vae"], name=name))))
    return str(folder)


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """A hub that cannot be reached, and a folder that is its local cache."""

    download = huggingface_hub.hf_hub_download

    def offline(*what, local_files_only=False, **more):
        if not local_files_only:
            raise LocalEntryNotFoundError("offline")
        return download(*what, local_files_only=True, **more)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    return tmp_path / "hub"


PICTURES = "--preview.every 2 --preview.images 4 --preview.steps 2".split()


@pytest.mark.parametrize("where", ["folder", "hub's cache"])
@pytest.mark.parametrize("asked", ["none", "some/vae"])
def test_pictures_use_the_vae_that_latents_were_made_with(folders, tmp_path, no_hub, where, asked):
    """Where it is at hand, without the hub; also if the configuration names one on the hub that cannot be reached."""
    cache = folders["cache"]
    if where == "hub's cache":
        name = "other/vae" if asked == "none" else asked
        cache = named(cache, tmp_path / "cache", name)
        repository = no_hub / f"models--{name.replace('/', '--')}"
        shutil.copytree(folders["vae"], repository / "snapshots" / ("0" * 40) / "vae")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
    train(tmp_path / "run", "--data.root", cache, "--vae", asked, *PICTURES)
    assert Image.open(tmp_path / "run" / "previews" / "step_2.png").size[1] > 16


def test_a_hub_that_cannot_be_reached_costs_no_run_without_pictures(
    folders, tmp_path, no_hub, capsys
):
    cache = named(folders["cache"], tmp_path / "cache", "some/vae")
    for vae, is_asked_for in (("none", False), ("other/vae", True)):
        run = tmp_path / vae.replace("/", "-")
        train(run, "--data.root", cache, "--vae", vae, "--preview.every", "3")
        assert find_weights(run).metadata["vae"]["name"] == "some/vae"
        argv = [*ARGV, *PICTURES, "--output", tmp_path / "no", "--data.root", cache, "--vae", vae]
        error = refused(capsys, train_dit.main, *argv)
        assert_says(error, "preview.every score.every VAE --vae some/vae 0")
        assert (f"vae {vae}: " in error) == is_asked_for
    assert not (tmp_path / "no").exists()


def test_shards_that_changed_are_refused_and_hashed_only_where_they_may_have(
    folders, tmp_path, capsys, monkeypatch
):
    """By the sums of the record: once for a copy, whose times are new, and never for what was written here."""
    hashed = []  # files of latents
    digest = hashlib.file_digest

    def noted(file, *rest):
        if file.name.endswith(".npy"):
            hashed.append(Path(file.name).name)
        return digest(file, *rest)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    train(tmp_path / "first", "--data.root", folders["cache"])
    assert hashed == []
    cache = tmp_path / "copy"
    shutil.copytree(folders["cache"], cache, copy_function=shutil.copyfile)
    names = sorted(path.name for path in cache.glob("train-*.npy"))
    for run in ("second", "third"):
        train(tmp_path / run, "--data.root", str(cache))
        assert hashed == names
    shard = cache / names[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # of the same size
    argv = [*ARGV, "--output", tmp_path / "run", "--data.root", cache]
    said = refused(capsys, train_dit.main, *argv)
    assert_says(said, f"{shard} changed sha256 {cache}/train.meta.json")
    assert not (tmp_path / "run").exists()
    shard.write_bytes(whole)
    train(tmp_path / "run", "--data.root", str(cache))


def test_a_vae_that_changed_between_two_starts_is_refused(folders, tmp_path, capsys):
    vae = tmp_path / "vae"
    run = tmp_path / "run"
    shutil.copytree(folders["vae"], vae)
    online = ["--data.root", folders["images"], "--vae", str(vae), "--data.img_size", "16"]
    train(run, *online)
    shutil.copytree(folders["other"], vae, dirs_exist_ok=True)
    argv = [*ARGV, *online, "--output", run, "--max-steps", 3]
    said = refused(capsys, train_dit.main, *argv)
    assert_says(said, f"vae {vae} weights {run} sha256 frozen.json --allow-change")
    train(run, *online, "--max-steps", "3", "--allow-change", "vae")
    assert_says(capsys.readouterr().out, f"vae {vae} weights {run}")


@pytest.mark.parametrize(
    "more, facts",
    [
        ("{cache} --vae {other}", "vae {other} sha256 {cache} {vae}"),
        ("{cache} --vae {coarse}", "vae {coarse} sha256 {cache} {vae} downsampling 4 2"),
        ("{cache} --data.img_size 32", "data.img_size 32 {cache} 16"),
        ("{cache} --data.augment affine", "data.augment affine latents none flip"),
        ("{images} --vae {vae} --data.augment crop_flip", "data.augment crop_flip none flip"),
        ("{images} --vae {vae} --data.img_size 15", "data.img_size 15 2 downsampling {vae}"),
        ("{cache} --repa.teacher x", "repa.teacher x data.root {cache} latents images vae"),
        ("{images}", "data.img_size {images} 21 16 pixels"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(folders, tmp_path, capsys, more, facts):
    argv = [*ARGV, "--output", tmp_path / "run", "--data.root", *more.format(**folders).split()]
    assert_says(refused(capsys, train_dit.main, *argv), facts.format(**folders))
    assert not list(tmp_path.iterdir())
