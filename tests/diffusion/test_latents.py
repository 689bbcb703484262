"""Latents on disk: what is written, what goes on after a kill, what is refused."""

import contextlib
import json
import os
import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch

from moh_vision.__main__ import main
from moh_vision.common.io import sha256_of
from moh_vision.data.decode import UnreadableImage, center_crop
from moh_vision.data.folder import ImageFolder
from moh_vision.diffusion.latents import write_latents as writing
from moh_vision.diffusion.latents.stored import LatentCache
from moh_vision.diffusion.latents.vae import LatentSpace, encode_moments, load_vae
from tests.support import refusals
from tests.support.pictures import contents, write_folder
from tests.support.processes import on_two_ranks
from tests.support.refusals import assert_says, one_line
from tests.support.tiny_vae import save_tiny_vae


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


error_line = partial(refusals.error_line, command="latents")


@pytest.fixture(scope="module")
def written(tmp_path_factory, vae_folder):
    """The latents of `root` in shards of 6, 7 and 7; who changes them takes `out`."""
    folder = tmp_path_factory.mktemp("written")
    images = write_folder(folder / "images", train=10, val=2, size=(21, 16))
    assert run(vae_folder, images, folder / "out") == 0
    return folder / "out"


@pytest.fixture
def out(written, tmp_path):
    return shutil.copytree(written, tmp_path / "out")


def stored_numbers(folder, split="train"):
    """The number in the source of every sample, in the order of the cache."""
    return np.load(folder / f"{split}.numbers.npy").tolist()


@pytest.mark.parametrize(
    "dtype, tolerance", [("float32", 2e-6), ("float16", 1e-3), ("bfloat16", 8e-3)]
)
def test_stored_are_the_moments_of_the_cropped_image_and_of_its_mirror(
    tmp_path, vae_folder, root, dtype, tolerance
):
    out = tmp_path / "out"
    assert run(vae_folder, root, out, "--dtype", dtype) == 0
    cache = LatentCache(str(out), "train")
    source = ImageFolder(root / "train")
    vae = load_vae(vae_folder)
    numbers = stored_numbers(out)
    assert sorted(numbers) == list(range(20)) and numbers != sorted(numbers)
    assert cache.shard_sizes == (6, 7, 7) and cache.classes == ["cat", "dog"]
    assert cache.labels.tolist() == [source.labels[n] for n in numbers]
    assert min(np.bincount(cache.labels[:6], minlength=2)) > 0, "a shard of one class"
    for i, number in enumerate(numbers):
        image = np.array(center_crop(source.image(number), 16))
        pixels = torch.from_numpy(image).permute(2, 0, 1) / 127.5 - 1
        expected = torch.cat([encode_moments(vae, x[None]) for x in (pixels, pixels.flip(-1))])
        moments = cache.read(i)
        assert moments.shape == (2, 8, 8, 8) and moments.dtype == torch.float32
        torch.testing.assert_close(moments, expected, rtol=tolerance, atol=tolerance)
        assert not torch.allclose(moments[0], moments[1], atol=0.01)


def test_the_record_and_what_reads_without_us(vae_folder, written, out):
    assert run(vae_folder, written.parent / "images", out, "--split", "val") == 0
    record = json.loads((out / "train.meta.json").read_text())
    shards = record.pop("shards")
    made_from = record.pop("made_from")
    sha = record["vae"]["sha256"]
    assert re.fullmatch("[0-9a-f]{64}", sha) and made_from["sha256 of --vae"] == sha
    assert record == dict(
        format=2,
        source="images",
        size=16,
        dtype="float16",
        decoding=dict(colour_space="keep", value_range=None),
        shape=[2, 8, 8, 8],
        classes=["cat", "dog"],
        vae=vars(LatentSpace(vae_folder, sha, 0.18215, None, 2, 4)),
    )
    assert [shard["shard"] for shard in shards] == [f"train-00000{i}.npy" for i in range(3)]
    assert [shard["samples"] for shard in shards] == [6, 7, 7]
    assert all(s["sha256"] == sha256_of(out / s["shard"]) for s in shards)
    assert len(LatentCache(str(out), "val")) == 4
    array = np.load(out / "train-000000.npy", mmap_mode="r")
    assert array.shape == (6, 2, 8, 8, 8) and array.dtype == np.float16
    assert np.bincount(np.load(out / "train.labels.npy")).tolist() == [10, 10]


def test_another_vae_is_refused_and_the_same_weights_elsewhere_are_taken(
    tmp_path, vae_folder, written, out, capfd
):
    other = save_tiny_vae(tmp_path / "vae", seed=1)
    before = contents(out)
    root = written.parent / "images"
    assert run(other, root, out) == 2
    line = error_line(capfd)
    assert_says(line, f"--out {out} sha256 --vae")
    was, now = re.findall(r"\b[0-9a-f]{64}\b", line)
    assert was == json.loads((out / "train.meta.json").read_text())["vae"]["sha256"] != now
    assert contents(out) == before
    shutil.copytree(vae_folder, tmp_path / "pipeline" / "vae")
    assert run(tmp_path / "pipeline", root, out) == 0
    assert "all there already" in capfd.readouterr().out


def test_bad_images_stop_it_or_are_left_out_and_listed(tmp_path, vae_folder, root, capfd):
    (root / "train" / "dog" / "3.png").write_bytes(b"text")
    assert run(vae_folder, root, tmp_path / "out", "--max-bad-fraction", 0.04) == 2
    bad = f"{root}/train/dog/3.png format 4 bytes 1"
    assert_says(error_line(capfd), f"{bad} --max-bad-fraction 0.04 20 0.05")
    assert run(vae_folder, root, tmp_path / "out", "--max-bad-fraction", 0.05, "--workers", 1) == 0
    said = capfd.readouterr().out
    assert "of 19 images" in said
    assert "1 bad images left out, train.bad.txt" in said
    assert (tmp_path / "out" / "train.bad.txt").read_text().startswith("13\t")
    cache = LatentCache(str(tmp_path / "out"), "train")
    assert len(cache) == 19 and 13 not in stored_numbers(tmp_path / "out")
    # What was allowed once is not allowed for ever.
    assert run(vae_folder, root, tmp_path / "out") == 2
    assert_says(error_line(capfd), f"{bad} --max-bad-fraction 0 20 0.05")


def test_what_cannot_be_encoded_is_one_line(tmp_path, vae_folder, root, capfd, monkeypatch):
    encode = writing.encode_moments
    monkeypatch.setattr(writing, "encode_moments", lambda *a: encode(*a) * 1e7)
    assert run(vae_folder, root, tmp_path / "out") == 2
    assert_says(error_line(capfd), "latents image 16 images finite float16 --dtype float32")
    assert run(vae_folder, root, tmp_path / "wide", "--dtype", "float32") == 0

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(writing, "encode_moments", full)
    assert run(vae_folder, root, tmp_path / "more") == 2
    assert_says(error_line(capfd), "--batch-size 3 memory cpu")


@pytest.mark.parametrize(
    "more, facts",
    [
        (["--size", "0"], "--size 0 1"),
        (["--size", "1000000"], "--size 1000000 3 images 11,176 GiB machine"),
        (["--size", "17"], "--size 17 multiple 2 downsampling VAE"),
        (["--max-bad-fraction", "1"], "--max-bad-fraction 1 0 fraction < 1"),
        (["--out", "{tmp}/file"], "--out {tmp}/file/train.meta.json {tmp}/file directory"),
        (["--out", "{tmp}/images/out"], "--out {tmp}/images/out inside --data {tmp}/images"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(
    tmp_path, vae_folder, root, capfd, more, facts
):
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert run(vae_folder, root, tmp_path / "out", *(m.format(tmp=tmp_path) for m in more)) == 2
    assert_says(error_line(capfd), facts.format(tmp=tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


def changed_record(**changes):
    """change(folder): put these values into the record of the latents."""

    def change(folder):
        record = folder / "train.meta.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), **changes}))

    return change


def changed_labels(values):
    """change(folder): replace the labels of the latents by these."""

    def change(folder):
        np.save(folder / "train.labels.npy", values)

    return change


def remove_labels(folder):
    (folder / "train.labels.npy").unlink()


@pytest.mark.parametrize(
    "change, facts",
    [
        pytest.param(
            changed_record(dtype="int8"),
            "{0}/train.meta.json dtype int8 float16 bfloat16 float32",
            id="dtype",
        ),
        pytest.param(
            changed_record(size=32),
            "{0}/train.meta.json shape [2, 8, 8, 8] [2, 8, 16, 16] VAE size",
            id="image size",
        ),
        pytest.param(changed_record(vae=None), "{0}/train.meta.json record latents", id="no VAE"),
        pytest.param(
            changed_record(classes="cat"),
            "{0}/train.meta.json classes 'cat' list names",
            id="classes that are no list",
        ),
        pytest.param(
            changed_record(classes=["cat"]),
            "{0}/train.labels.npy label 1 latents 0 1 classes",
            id="too few classes",
        ),
        pytest.param(
            changed_labels(np.zeros(20)),
            "{0}/train.labels.npy float64 int64 (20,)",
            id="labels in float64",
        ),
        pytest.param(
            changed_labels(np.full(20, -1)),
            "{0}/train.labels.npy label -1 latents 0 2 classes",
            id="labels of -1",
        ),
        pytest.param(
            changed_labels(np.array([{}], object)),
            "{0}/train.labels.npy labels allow_pickle=False",
            id="pickled labels",
        ),
        pytest.param(remove_labels, "{0}/train.labels.npy labels file directory", id="no labels"),
    ],
)
def test_a_cache_that_is_not_what_its_record_says(out, change, facts):
    change(out)
    with one_line(facts.format(out)):
        LatentCache(str(out), "train")


@pytest.mark.parametrize("fault", ["header", "dtype", "shape", "changed", "gone", "cut off"])
def test_damage_is_noticed(out, fault):
    """What has the size of the record is noticed when it is read, whatever damaged it."""
    path = out / "train-000000.npy"
    facts = "changed since run"
    array = np.load(path)
    if fault == "header":
        data = bytearray(path.read_bytes())
        data[3] ^= 1
        path.write_bytes(data)
        facts = "magic"
    if fault == "dtype":
        np.save(path, array.view(np.int16))
        facts = "int16 float16 (6, 2, 8, 8, 8)"
    if fault == "shape":
        np.save(path, array.reshape(12, 1, 8, 8, 8))
        facts = "float16 (12, 1, 8, 8, 8) (6, 2, 8, 8, 8)"
    cache = LatentCache(str(out), "train")
    assert torch.equal(cache.read(19), cache.read(19))
    if fault == "changed":
        np.save(path, array + 1)
    if fault == "gone":
        path.unlink()
        facts = "file directory"
    if fault == "cut off":
        cache.read(1)  # it is open
        os.truncate(path, 128)
        facts = "latents 0 bytes 2048"
    with one_line(f"{path} {facts}", UnreadableImage):
        cache.read(0)


def test_more_shards_than_files_may_be_open(tmp_path, vae_folder, root):
    assert run(vae_folder, root, tmp_path / "out", "--samples-per-shard", 1) == 0
    cache = LatentCache(str(tmp_path / "out"), "train")
    before = len(os.listdir("/proc/self/fd"))
    for i in (*range(20), 0, 19):
        assert cache.read(i).isfinite().all()
    assert len(os.listdir("/proc/self/fd")) <= before + 16


def on_a_rank(rank, folder, *argv):
    with (
        open(folder / f"said.{rank}", "w") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        with contextlib.suppress(SystemExit):
            main(["latents", *argv])


def test_two_ranks_write_what_one_writes(tmp_path, vae_folder, written):
    def said(*more):
        argv = arguments(vae_folder, written.parent / "images", tmp_path / "two", *more)
        on_two_ranks(on_a_rank, tmp_path, *argv)
        return [(tmp_path / f"said.{rank}").read_text() for rank in range(2)]

    first, second = said()
    assert first.count("\n") == 1 and "20 written" in first and second == ""
    assert contents(tmp_path / "two") == contents(written)
    refused = "".join(said("--seed", "3"))
    assert refused.count("latents: error: ") == 1
    assert_says(refused, "--seed 0 3")
