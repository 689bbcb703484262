"""Latents on disk: what is written, what goes on after a kill, what is refused."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from conftest import ROOT
from pictures import contents, write_folder
from test_writers import told
from tiny_vae import save_tiny_vae

from moh_vision.__main__ import main
from moh_vision.data.decode import UnreadableImage, center_crop
from moh_vision.data.folder import ImageFolder
from moh_vision.data.splits import open_source
from moh_vision.diffusion.batches import NoisedLatents, posterior_draw
from moh_vision.diffusion.latents import write_latents as writing
from moh_vision.diffusion.latents.stored import LatentCache
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
    return main(["latents", *arguments(*given)])


error_line = partial(told, command="latents")


def stored_numbers(folder, split="train"):
    """The number in the source of every sample, in the order of the cache."""
    return np.load(folder / f"{split}.numbers.npy").tolist()


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("float16", 1e-3), ("bfloat16", 8e-3)])
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


def test_the_record_and_what_reads_without_us(tmp_path, vae_folder, root):
    out = tmp_path / "out"
    assert run(vae_folder, root, out, "--split", "val") == 0
    assert run(vae_folder, root, out) == 0
    m = json.loads((out / "train.meta.json").read_text())
    shards, made_from = m.pop("shards"), m.pop("made_from")
    assert re.fullmatch("[0-9a-f]{64}", m["vae"].pop("sha256")) and made_from["--vae"].startswith(
        f"{vae_folder} (sha256 "
    )
    assert m == dict(
        format=2, source="images", size=16, dtype="float16", shape=[2, 8, 8, 8],
        vae=dict(
            name=vae_folder, scaling_factor=0.18215, shift_factor=None, downsampling=2, latent_channels=4,
            latents_mean=None, latents_std=None, deterministic=False, img_size=None,
        ),
        classes=["cat", "dog"],
    )  # fmt: skip
    assert [(s["shard"], s["samples"]) for s in shards] == [(f"train-00000{i}.npy", n) for i, n in enumerate((6, 7, 7))]
    for s in shards:
        data = (out / s["shard"]).read_bytes()
        assert (s["bytes"], s["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert len(LatentCache(str(out), "val")) == 4
    array, labels = np.load(out / "train-000000.npy", mmap_mode="r"), np.load(out / "train.labels.npy")
    assert array.shape == (6, 2, 8, 8, 8) and array.dtype == np.float16 and np.bincount(labels).tolist() == [10, 10]


def test_grey_images(tmp_path, vae_folder):
    assert run(vae_folder, "digits", tmp_path / "out", "--split", "val", "--batch-size", 100) == 0
    source, cache = open_source("digits", "val"), LatentCache(str(tmp_path / "out"), "val")
    number = stored_numbers(tmp_path / "out", "val")[3]
    pixels = torch.from_numpy(np.array(center_crop(source.image(number), 16))).expand(1, 3, 16, 16) / 127.5 - 1
    expected = encode_moments(load_vae(vae_folder), pixels)[0]
    torch.testing.assert_close(cache.moments(3)[0], expected, rtol=1e-3, atol=1e-3)


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
    assert len(cache) == 19 and 13 not in stored_numbers(tmp_path / "out")
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


def rewrite(record, **changes):
    record.write_text(json.dumps({**json.loads(record.read_text()), **changes}))


def test_a_record_of_before_statistics(tmp_path, vae_folder, root):
    out = tmp_path / "out"
    assert run(vae_folder, root, out) == 0
    before, record = LatentCache(str(out), "train").space, out / "train.meta.json"
    vae = json.loads(record.read_text())["vae"]
    rewrite(record, vae={k: v for k, v in vae.items() if k not in ("latents_mean", "latents_std", "deterministic")})
    assert LatentCache(str(out), "train").space == before


def labels(values):
    return lambda out: np.save(out / "train.labels.npy", values)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(dtype="int8"), r"train.meta.json: dtype int8, shape \[2, 8, 8, 8\] are not those of its VAE and size"),
        (dict(size=32), r"train.meta.json: dtype float16, shape \[2, 8, 8, 8\] are not those of its VAE and size"),
        (dict(vae=None), "train.meta.json: not a record of latents"),
        (dict(classes="cat"), "train.meta.json: classes are not a list of names"),
        (dict(classes=["cat"]), "train.labels.npy: label 1 of latents [0-9]+, but the record names 1 classes"),
        (labels(np.zeros(20)), r"train.labels.npy: float64 of shape \(20,\), expected int64 of \(20,\)"),
        (labels(np.zeros(3, np.int64)), r"train.labels.npy: int64 of shape \(3,\), expected"),
        (labels(np.full(20, -1)), "train.labels.npy: label -1 of latents 0"),
        (labels(np.array([{}], object)), "train.labels.npy: labels that cannot be read .*pickle"),
        (lambda out: (out / "train.labels.npy").unlink(), "train.labels.npy: labels that cannot be read"),
        (lambda out: (out / "train.labels.npy").write_bytes(b""), "train.labels.npy: labels that cannot be read"),
    ],
)
def test_a_cache_that_is_not_what_its_record_says(tmp_path, vae_folder, root, change, words):
    out = tmp_path / "out"
    assert run(vae_folder, root, out) == 0
    rewrite(out / "train.meta.json", **change) if isinstance(change, dict) else change(out)
    with pytest.raises(ValueError, match=words):
        LatentCache(str(out), "train")


@pytest.mark.parametrize("fault", ["header", "dtype", "shape", "changed", "gone", "cut off"])
def test_damage_is_noticed(tmp_path, vae_folder, root, fault):
    """What has the size of the record is noticed when it is read, whatever damaged it."""
    out = tmp_path / "out"
    assert run(vae_folder, root, out) == 0
    path, words = out / "train-000000.npy", "train-000000.npy: the shard has changed since the run began"
    array = np.load(path)
    if fault in ("header", "dtype", "shape"):
        data = bytearray(path.read_bytes())
        data[3] ^= 1
        other = dict(header=None, dtype=array.view(np.int16), shape=array.reshape(12, 1, 8, 8, 8)).get(fault)
        path.write_bytes(data) if fault == "header" else np.save(path, other)
        words = dict(header="train-000000.npy: .*magic", dtype="int16 of shape", shape="float16 of shape").get(fault)
    cache = LatentCache(str(out), "train")
    assert torch.equal(cache.moments(19), cache.moments(19))
    if fault == "changed":
        np.save(path, array + 1)
    if fault == "gone":
        path.unlink()
        words = "train-000000.npy: .*No such file"
    if fault == "cut off":
        cache.moments(1)  # it is open
        os.truncate(path, 128)
        words = "train-000000.npy: latents 0: 0 bytes of 2048 are there"
    with pytest.raises(UnreadableImage, match=words):
        cache.moments(0)


def test_more_shards_than_files_may_be_open(tmp_path, vae_folder, root):
    assert run(vae_folder, root, tmp_path / "out", "--samples-per-shard", 1) == 0
    cache, before = LatentCache(str(tmp_path / "out"), "train"), len(os.listdir("/proc/self/fd"))
    for i in (*range(20), 0, 19):
        assert cache.moments(i).isfinite().all()
    assert len(os.listdir("/proc/self/fd")) <= before + 16


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
    command = [*torchrun, "-m", "moh_vision", "latents"]
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
