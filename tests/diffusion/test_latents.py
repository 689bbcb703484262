"""Latents on disk: what is written, what goes on after a kill, what is refused."""

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from functools import partial

import numpy as np
import pytest
import torch
from conftest import ROOT
from pictures import contents, write_folder
from tiny_vae import save_tiny_vae
from writer_suite import *  # noqa: F403  its tests
from writer_suite import Writer, told

from moh_vision.data.crop import center_crop
from moh_vision.data.decode import UnreadableImage
from moh_vision.data.folder import ImageFolder
from moh_vision.data.splits import open_source
from moh_vision.diffusion.batches import NoisedLatents, posterior_draw
from moh_vision.diffusion.latents import writer as writing
from moh_vision.diffusion.latents.__main__ import main
from moh_vision.diffusion.latents.cache import LatentCache
from moh_vision.diffusion.latents.vae import encode_moments, load_vae, sample_posterior
from moh_vision.diffusion.objectives import draw_step


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory):
    return save_tiny_vae(tmp_path_factory.mktemp("vae"))


@pytest.fixture
def root(tmp_path):
    return write_folder(tmp_path / "images", train=10, val=2, size=(21, 16))


def arguments(vae, root, out, *more):
    fixed = ["--size", "16", "--samples-per-shard", "7", "--batch-size", "3", "--workers", "0"]
    return ["--vae", str(vae), "--data", str(root), "--out", str(out), *fixed, *map(str, more)]


def run(*given):
    return main(arguments(*given))


@pytest.fixture
def writer(vae_folder, root):
    opened = lambda out: LatentCache(str(out), "train")  # noqa: E731
    return Writer(root, partial(run, vae_folder, root), opened, (writing, "encode_moments"))


def error_line(capfd):
    line = told(capfd)
    assert line.startswith("latents: error: ")
    return line


def stored_numbers(folder, split="train"):
    """The number in the source of every sample, in the order of the cache."""
    names = []
    for path in sorted(folder.glob(f"{split}-*.tar")):
        with tarfile.open(path) as tar:
            names += [m.name for m in tar if m.name.endswith(".npy")]
    return [int(name.removesuffix(".npy")) for name in names]


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("float16", 1e-3)])
def test_stored_are_the_moments_of_the_cropped_image_and_of_its_mirror(tmp_path, vae_folder, root, dtype, tolerance):
    out = tmp_path / "out"
    assert run(vae_folder, root, out, "--dtype", dtype) == 0
    cache, source, vae = LatentCache(str(out), "train"), ImageFolder(str(root), "train"), load_vae(vae_folder)
    numbers = stored_numbers(out)
    assert sorted(numbers) == list(range(20)) and numbers != sorted(numbers)
    assert cache.shard_sizes == (6, 7, 7) and cache.classes == ["cat", "dog"]
    assert cache.labels.tolist() == [source.labels[n] for n in numbers]
    assert min(np.bincount(cache.labels[:6], minlength=2)) > 0, "a shard of one class"
    for i, number in enumerate(numbers):
        pixels = torch.from_numpy(np.array(center_crop(source.image(number), 16))).permute(2, 0, 1) / 127.5 - 1
        expected = torch.cat([encode_moments(vae, x[None]) for x in (pixels, pixels.flip(-1))])
        moments = cache.moments(i)
        assert moments.shape == (2, 8, 8, 8) and moments.dtype == torch.float32
        torch.testing.assert_close(moments, expected, rtol=tolerance, atol=tolerance)
        assert not torch.allclose(moments[0], moments[1], atol=0.01)


def test_manifest(tmp_path, vae_folder, root):
    out = tmp_path / "out"
    assert run(vae_folder, root, out, "--split", "val") == 0
    assert run(vae_folder, root, out) == 0
    m = json.loads((out / "train.latents.json").read_text())
    shards = m.pop("shards")
    sha = m["vae"].pop("sha256")
    assert re.fullmatch("[0-9a-f]{64}", sha)
    assert m == dict(
        format=1, complete=True, split="train", source="images", size=16, dtype="float16", shape=[2, 8, 8, 8],
        vae=dict(
            name=vae_folder, scaling_factor=0.18215, shift_factor=None, downsampling=2, latent_channels=4,
            latents_mean=None, latents_std=None, deterministic=False,
        ),
        classes=["cat", "dog"], samples=20, bad=0,
    )  # fmt: skip
    assert [(s["shard"], s["samples"]) for s in shards] == [(f"train-00000{i}.tar", n) for i, n in enumerate((6, 7, 7))]
    for s in shards:
        data = (out / s["shard"]).read_bytes()
        assert (s["bytes"], s["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert (out / "classes.txt").read_text() == "cat\ndog\n"
    assert len(LatentCache(str(out), "val")) == 4
    with tarfile.open(out / "train-000000.tar") as tar:
        array = np.load(
            io.BytesIO(tar.extractfile(next(m for m in tar if m.name.endswith(".npy"))).read()), allow_pickle=False
        )
        assert array.shape == (2, 8, 8, 8) and array.dtype == np.float16


def test_grey_images(tmp_path, vae_folder):
    assert run(vae_folder, "digits", tmp_path / "out", "--split", "val", "--batch-size", 100) == 0
    source, cache = open_source("digits", "val"), LatentCache(str(tmp_path / "out"), "val")
    number = stored_numbers(tmp_path / "out", "val")[3]
    pixels = torch.from_numpy(np.array(center_crop(source.image(number), 16))).expand(1, 3, 16, 16) / 127.5 - 1
    expected = encode_moments(load_vae(vae_folder), pixels)[0]
    torch.testing.assert_close(cache.moments(3)[0], expected, rtol=1e-3, atol=1e-3)


def test_a_killed_run_is_not_trained_on(tmp_path, vae_folder, root, monkeypatch):
    encode, left = writing.encode_moments, iter(range(5))
    monkeypatch.setattr(writing, "encode_moments", lambda *a: encode(*a) if next(left, None) is not None else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(vae_folder, root, tmp_path / "out")
    with pytest.raises(ValueError, match="train.latents.json: the latents are not all there yet"):
        LatentCache(str(tmp_path / "out"), "train")


def test_draws_are_of_the_image_and_only_with_flip_of_its_mirror(tmp_path, vae_folder, root):
    assert run(vae_folder, root, tmp_path / "out") == 0
    cache = LatentCache(str(tmp_path / "out"), "train")
    for flip, images in ((False, {0}), (True, {0, 1})):
        data, seen = NoisedLatents(cache, seed=0, draw=draw_step, label_drop=0.0, flip=flip), set()
        for position in range(16):
            _, noise = posterior_draw(0, position, data.noise_shape)
            draws = [sample_posterior(moments, noise, cache.space) for moments in cache.moments(3)]
            seen.add([torch.equal(data[position, 3]["images"], draw) for draw in draws].index(True))
        assert seen == images


@pytest.mark.parametrize(
    "change, words",
    [
        (("--size", 8), "--size was 16, now 8"),
        (("--dtype", "float32"), "--dtype was float16, now float32"),
        ("vae", "--vae was {vae} \\(sha256 [0-9a-f]{{12}}\\), now {other} \\(sha256 [0-9a-f]{{12}}\\)"),
    ],
)
def test_another_vae_size_or_dtype_is_refused_and_named(tmp_path, vae_folder, root, capfd, change, words):
    out, vae, other = tmp_path / "out", vae_folder, tmp_path / "vae"
    assert run(vae, root, out) == 0
    if change == "vae":
        vae = save_tiny_vae(other, seed=1)
    before = contents(out)
    assert run(vae, root, out, *(change if isinstance(change, tuple) else ())) == 2
    assert re.search(words.format(vae=vae_folder, other=other), error_line(capfd))
    assert contents(out) == before


def test_the_same_weights_elsewhere_are_the_same_vae(tmp_path, vae_folder, root, capfd):
    assert run(vae_folder, root, tmp_path / "out") == 0
    shutil.copytree(vae_folder, tmp_path / "pipeline" / "vae")
    assert run(tmp_path / "pipeline", root, tmp_path / "out") == 0
    assert "all there already" in capfd.readouterr().out


def test_bad_images_stop_it_or_are_left_out_and_listed(tmp_path, vae_folder, root, capfd):
    (root / "train" / "dog" / "3.png").write_bytes(b"text")
    assert run(vae_folder, root, tmp_path / "out", "--max-bad-fraction", 0.04) == 2
    line = error_line(capfd)
    assert "dog/3.png: cannot identify" in line and "1 bad of 20 images, more than --max-bad-fraction 0.04" in line
    assert run(vae_folder, root, tmp_path / "out", "--max-bad-fraction", 0.05, "--workers", 1) == 0
    assert "of 19 images" in (shown := capfd.readouterr().out) and "1 bad images left out, train.bad.txt" in shown
    assert (tmp_path / "out" / "train.bad.txt").read_text().startswith("13\t")
    cache = LatentCache(str(tmp_path / "out"), "train")
    assert (len(cache), cache.manifest["samples"], cache.manifest["bad"]) == (19, 19, 1)
    assert run(vae_folder, root, tmp_path / "out") == 2, "what was allowed once is not allowed for ever"
    assert "1 bad of 20" in error_line(capfd)


def test_an_unreadable_file_is_one_line(tmp_path, vae_folder, root, capfd, monkeypatch):
    def gone(*_):
        raise OSError(5, "Input/output error", "disk")

    monkeypatch.setattr(ImageFolder, "image", gone)
    assert run(vae_folder, root, tmp_path / "out", "--max-bad-fraction", 0.9, "--workers", 1) == 2
    assert error_line(capfd) == "latents: error: [Errno 5] Input/output error: 'disk'"


def test_numbers_that_float16_cannot_hold_are_refused(tmp_path, vae_folder, root, capfd, monkeypatch):
    encode = writing.encode_moments
    monkeypatch.setattr(writing, "encode_moments", lambda *a: encode(*a) * 1e7)
    assert run(vae_folder, root, tmp_path / "out") == 2
    assert re.search(
        "latents of image [0-9]+ of images are not finite in float16; take --dtype float32", error_line(capfd)
    )
    assert run(vae_folder, root, tmp_path / "wide", "--dtype", "float32") == 0


def test_a_batch_that_does_not_fit_is_one_line(tmp_path, vae_folder, root, capfd, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(writing, "encode_moments", full)
    assert run(vae_folder, root, tmp_path / "out") == 2
    assert "--batch-size: 3 images do not fit into the memory of cpu" in error_line(capfd)


@pytest.mark.parametrize(
    "more, words",
    [
        (["--vae", "{tmp}/none"], "vae {tmp}/none: no such folder"),
        (["--data", "{tmp}/none"], "{tmp}/none: no such folder"),
        (["--size", "0"], "--size 0: expected 1 or more"),
        (["--size", "1000000"], "--size 1000000: a batch of 3 such images takes 11,176 GiB, this machine has "),
        (["--size", "17"], "--size 17: not a multiple of 2, the downsampling of"),
        (["--workers", "-1"], "--workers -1: expected 0 or more"),
        (["--batch-size", "0"], "--batch-size 0: expected 1 or more"),
        (["--samples-per-shard", "0"], "--samples-per-shard 0: expected 1 or more"),
        (["--max-bad-fraction", "1"], "--max-bad-fraction 1: expected 0 <= fraction < 1"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--sise", "8"], "unknown argument --sise, did you mean --size?"),
        (["--out", "{tmp}/file"], "--out {tmp}/file is a file, expected a folder"),
        (["--out", "{tmp}/images/out"], "--out {tmp}/images/out is inside --data {tmp}/images"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(tmp_path, vae_folder, root, capfd, more, words):
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert run(vae_folder, root, tmp_path / "out", *(m.format(tmp=tmp_path) for m in more)) == 2
    assert words.format(tmp=tmp_path) in error_line(capfd)
    assert sorted(tmp_path.rglob("*")) == before


def rewrite(manifest, **changes):
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **changes}))


def test_a_manifest_of_before_statistics(tmp_path, vae_folder, root):
    out = tmp_path / "out"
    assert run(vae_folder, root, out) == 0
    before, manifest = LatentCache(str(out), "train").space, out / "train.latents.json"
    vae = json.loads(manifest.read_text())["vae"]
    rewrite(manifest, vae={k: v for k, v in vae.items() if k not in ("latents_mean", "latents_std", "deterministic")})
    assert LatentCache(str(out), "train").space == before


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(format=2), "train.latents.json: format 2, this version reads 1"),
        (dict(complete=False), "train.latents.json: the latents are not all there yet"),
        (dict(dtype="float32"), "train-000000.tar, 0+\\d+.npy at byte [0-9]+: 2176 bytes, not float32 of shape"),
        (dict(size=32), "dtype float16, shape \\[2, 8, 8, 8\\] are not those of its VAE and size"),
        (dict(vae=None), "not a manifest of latents"),
        ("text", "train.latents.json: Expecting value"),
        ("gone", "train-000002.tar of .*/train.latents.json is gone"),
        ("added", "train-000003.tar is not in train.latents.json"),
        ("shorter", "train-000000.tar: 10240 bytes, 1 samples; train.latents.json says"),
        ("zeros", "train-000000.tar: byte [0-9]+ is not zero, but a block of zeros behind member 2, at byte"),
        ("touched", "shard train-000000.tar was added or changed since the index"),
    ],
)
def test_a_cache_that_is_not_what_its_manifest_says(tmp_path, vae_folder, root, change, words):
    out = tmp_path / "out"
    assert run(vae_folder, root, out) == 0
    if change != "touched":
        (out / ".train.index.safetensors").unlink()
    if isinstance(change, dict):
        rewrite(out / "train.latents.json", **change)
    if change == "text":
        (out / "train.latents.json").write_text("x")
    if change == "gone":
        (out / "train-000002.tar").unlink()
    if change == "added":
        shutil.copy(out / "train-000000.tar", out / "train-000003.tar")
    if change == "shorter":
        with tarfile.open(out / "train-000000.tar") as old, tarfile.open(out / "new", "w") as new:
            for member in old.getmembers()[:2]:
                new.addfile(member, old.extractfile(member))
        (out / "new").rename(out / "train-000000.tar")
    if change == "zeros":
        with tarfile.open(out / "train-000000.tar") as tar, open(out / "train-000000.tar", "r+b") as file:
            file.seek(tar.getmembers()[2].offset)
            file.write(bytes(512))
    if change == "touched":
        os.utime(out / "train-000000.tar")
    with pytest.raises(ValueError, match=words):
        LatentCache(str(out), "train")


def test_damage_is_noticed(tmp_path, vae_folder, root):
    out = tmp_path / "out"
    assert run(vae_folder, root, out) == 0
    cache, path = LatentCache(str(out), "train"), out / "train-000000.tar"
    data, before = bytearray(path.read_bytes()), path.stat()
    data[int(cache.offset[0])] ^= 1
    path.write_bytes(data)
    with pytest.raises(UnreadableImage, match="train-000000.tar: the shard has changed since its index was made"):
        cache.moments(0)
    os.utime(path, ns=(0, before.st_mtime_ns))  # as if the disk had done it
    with pytest.raises(UnreadableImage, match="train-000000.tar, 0+\\d+.npy at byte 1536: not float16 of shape"):
        cache.moments(0)


def test_classifiers_are_told(tmp_path, vae_folder, root, capfd):
    out = tmp_path / "out"
    assert run(vae_folder, root, out) == 0
    with pytest.raises(ValueError, match="data.root .*: latents, which train_dit.py reads; images are needed here"):
        open_source(str(out), "train")
    assert run(vae_folder, out, tmp_path / "again") == 2
    assert "images are needed here" in error_line(capfd)


@pytest.mark.slow
def test_two_ranks_write_what_one_writes(tmp_path, vae_folder, root):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29541"]
    command = [*torchrun, "-m", "moh_vision.diffusion.latents"]
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    how = dict(env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    done = subprocess.run([*command, *arguments(vae_folder, root, tmp_path / "two")], **how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1 and "20 written" in done.stdout
    assert run(vae_folder, root, tmp_path / "one") == 0
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    done = subprocess.run([*command, *arguments(vae_folder, root, tmp_path / "two", "--seed", 3)], **how)
    assert done.returncode != 0 and done.stderr.count("latents: error: ") == 1
    assert "--seed was 0, now 3" in done.stderr
