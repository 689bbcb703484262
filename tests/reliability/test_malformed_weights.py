"""Every malformed file of weights or statistics raises a ValueError of one line that names the file."""

import copy
import io
import json
import struct
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

import moh_vision
from moh_vision.evaluation.fidelity import load_statistics, score
from moh_vision.models.creation import create
from moh_vision.models.weights import find_weights
from tests.support.damages import with_header
from tests.support.refusals import one_line, refuse
from tests.support.small_runs import same
from tests.support.weights import init_from

NAME = "moh_vit_small_patch16_224"
SMALL = dict(img_size=32, embed_dim=32, depth=2, num_heads=2, num_classes=3, in_chans=3)
# The metadata of a valid model.safetensors.
ABOUT = dict(
    architecture=NAME,
    arguments=SMALL,
    classes=["a", "b", "c"],
    step=3,
    config=dict(kind="diffusion", label_drop=0.1),
)


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    return create(NAME, "classification", **SMALL)


def metadata(about) -> dict:
    """Return metadata in the form of a safetensors header, all values as text."""
    return {"format": "pt", **{k: json.dumps(v) for k, v in about.items()}}


def pickled(state) -> bytes:
    torch.save(state, out := io.BytesIO())
    return out.getvalue()


STATISTICS = dict(
    count=20,
    extractor="x",
    weights_sha256="0" * 64,
    source="s",
    channels=3,
    size=[4, 4],
    formats=None,
)


def statistics_file(says=STATISTICS, **changes) -> bytes:
    """Return a file of statistics with the record `says`; `changes` replaces arrays, or removes those that are None."""
    x = np.random.default_rng(0).standard_normal((20, 4))
    arrays = dict(
        mu=x.mean(0), sigma=np.cov(x.T), features=x.astype(np.float32), record=json.dumps(says)
    )
    arrays |= changes
    file = io.BytesIO()
    np.savez(file, **{name: array for name, array in arrays.items() if array is not None})
    return file.getvalue()


def edited(state, change) -> bytes:
    """Return a safetensors file whose JSON header is changed by `change`."""
    return with_header(save(state), change)


# Case -> makes the bytes of a malformed file from a model's state dict. A case that ends in .pth is a file of torch.save.
STATES = {
    "a length of 2**62": lambda s: struct.pack("<Q", 2**62) + save(s)[8:],
    "nothing": lambda s: b"",
    "no JSON": lambda s: struct.pack("<Q", 8) + b"{{{{{{{{" + save(s)[8:],
    "deep JSON": lambda s: struct.pack("<Q", 10**6) + b"[" * 10**6,
    "overlapping offsets": lambda s: edited(s, lambda h: {k: dict(v, data_offsets=[0, 4], shape=[1]) for k, v in h.items() if k != "__metadata__"}),
    "a hole": lambda s: edited(s, lambda h: (h["norm.bias"].update(data_offsets=[n + 4 for n in h["norm.bias"]["data_offsets"]]), h)[1]),
    "a shape that does not fit its bytes": lambda s: edited(s, lambda h: (h["norm.bias"].update(shape=[2**40]), h)[1]),
    "a list": lambda s: edited(s, lambda h: b"[]"),
    "whole numbers": lambda s: save({k: v.to(torch.int32) for k, v in s.items()}),
    "complex numbers": lambda s: save({k: v.to(torch.complex64) for k, v in s.items()}),
    "another shape": lambda s: save({**s, "norm.bias": torch.zeros(7)}),
    "patches of rank 1": lambda s: save({**s, "patch_embed.proj.weight": torch.zeros(7)}),
    "patches of another width": lambda s: save({**s, "patch_embed.proj.weight": torch.zeros(2, 3, 5, 7)}),
    "no positions": lambda s: save({**s, "pos_embed": torch.zeros(1, 0, 32)}),
    "another model": lambda s: save({"x": torch.zeros(1)}),
    "only a marker of CLIP": lambda s: save({"visual.class_embedding": torch.zeros(1)}),
    "only a marker of DINOv2": lambda s: save({"mask_token": torch.zeros(1)}),
    "only a marker of IJEPA": lambda s: save({"encoder": torch.zeros(1)}),
    "only a marker of diffusers": lambda s: save({"transformer_blocks.0.attn1.to_q.weight": torch.zeros(1)}),
    "names of paths": lambda s: save({"../../../etc/passwd": torch.zeros(1)}),
    "a list.pth": lambda s: pickled([torch.zeros(1)]),
    "a tensor.pth": lambda s: pickled(torch.zeros(1)),
    "numbers for names.pth": lambda s: pickled({1: torch.zeros(1)}),
    "no tensors.pth": lambda s: pickled({"head.weight": [1, 2]}),
    "empty.pth": lambda s: pickled({}),
    "nested.pth": lambda s: pickled({"state_dict": {"state_dict": {"x": torch.zeros(1)}}}),
    "sparse.pth": lambda s: pickled({"head.weight": torch.eye(3).to_sparse()}),
    "stretched.pth": lambda s: pickled({"head.weight": torch.zeros(1).expand(2**20, 2**20)}),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_states_that_are_wrong(tmp_path, vit, case):
    file = tmp_path / ("w.pth" if case.endswith(".pth") else "w.safetensors")
    file.write_bytes(STATES[case](vit.state_dict()))
    for read in (moh_vision.load_checkpoint, init_from):
        with one_line(str(file)) as error:
            read(copy.deepcopy(vit), str(file))
        assert len(str(error.value)) < 1000


@pytest.mark.parametrize("end", [".pth", ".npz"])
def test_a_zip_that_unpacks_to_gigabytes_is_refused(tmp_path, vit, end):
    file = tmp_path / f"w{end}"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("archive/data.pkl", "archive/data/0", "embedding/kernel.npy"):
            archive.writestr(name, bytes(30 * 2**20))
    with one_line(f"{file} 94371840 bytes"):
        moh_vision.load_checkpoint(copy.deepcopy(vit), file)


def test_a_bad_npz_leaves_the_model_as_it_was(tmp_path, vit):
    file = tmp_path / "w.npz"
    model = copy.deepcopy(vit)
    kernel = np.ones((16, 16, 3, 32), np.float32)
    bias = np.ones(32, np.float32)
    np.savez(file, **{"embedding/kernel": kernel, "embedding/bias": bias})
    refuse(f"{file} ViT", moh_vision.load_checkpoint, model, file)
    assert same(model, vit)
    file.write_bytes(file.read_bytes()[:-30])
    refuse(f"{file} not", moh_vision.load_checkpoint, model, file)
    assert same(model, vit)


# Case -> the entries of `ABOUT` that are wrong.
ABOUTS = {
    "no arguments": dict(arguments=None),
    "a number for a name": dict(architecture=5),
    "an unknown name": dict(architecture="moh_vit_of_nobody"),
    "unknown arguments": dict(arguments={**SMALL, "colour": 3}),
    "a depth of a billion": dict(arguments={**SMALL, "depth": 10**9}),
    "a width of a billion": dict(arguments={**SMALL, "embed_dim": 10**9}),
    "a width that would fit into memory": dict(arguments={**SMALL, "embed_dim": 8192}),
    "a billion classes": dict(arguments={**SMALL, "num_classes": 10**9}),
    "images of a million pixels a side": dict(arguments={**SMALL, "img_size": 10**6}),
    "a negative depth": dict(arguments={**SMALL, "depth": -2}),
    "a text for a width": dict(arguments={**SMALL, "embed_dim": "wide"}),
    "a budget of nonsense": dict(arguments={**SMALL, "head_budget": {"a": 1}}),
    "other weights to load": dict(arguments={**SMALL, "checkpoint_path": "/etc/passwd"}),
    "weights to fetch": dict(arguments={**SMALL, "pretrained": True}),
    "classes that are none": dict(classes=5),
    "classes of numbers": dict(classes=[1, 2, 3]),
    "a config that is none": dict(config="x"),
    "infinity": dict(arguments={**SMALL, "drop_path_rate": float("inf")}),
}


@pytest.mark.parametrize("case", ABOUTS)
def test_weights_with_wrong_metadata(tmp_path, vit, case):
    file = tmp_path / "model.safetensors"
    save_file(vit.state_dict(), file, metadata({**ABOUT, **ABOUTS[case]}))
    for read in (
        lambda: find_weights(tmp_path, wing="classification").build(),
        lambda: find_weights(file).build(img_size=64),
    ):
        refuse(str(file), read)


def test_files_that_are_not_there(tmp_path, vit):
    for read in (
        lambda: moh_vision.load_checkpoint(vit, tmp_path / "w.pth"),
        lambda: moh_vision.load_checkpoint(vit, tmp_path),
        lambda: find_weights(tmp_path),
        lambda: init_from(vit, str(tmp_path / "w.pth")),
        lambda: load_statistics(tmp_path / "s.npz"),
    ):
        refuse(str(tmp_path), read, error=FileNotFoundError)


# ---------------------------------------------------------------- statistics


# Case -> (what the error says behind the file, the file).
MALFORMED_STATISTICS = {
    "no mean": ("mu", statistics_file(mu=None)),
    "a covariance that is no square": ("sigma [4, 5] [4, 4]", statistics_file(sigma=np.zeros((4, 5)))),
    "a mean of rank 0": ("mu [] [1 to 16384]", statistics_file(mu=np.zeros(()))),
    "other features": ("features [20, 7] [20, 4]", statistics_file(features=np.zeros((20, 7)))),
    "whole numbers": ("mu int64 floats", statistics_file(mu=np.zeros(4, int))),
    "NaN": ("mu finite", statistics_file(mu=np.full(4, np.nan))),
    "spatial mean and covariance of two sizes": ("sigma_s [3, 3] [4, 4]", statistics_file(mu_s=np.zeros(4), sigma_s=np.zeros((3, 3)))),
    "a list": ("statistics list", statistics_file([1])),
    "no count": ("statistics count", statistics_file({k: v for k, v in STATISTICS.items() if k != "count"})),
    "a count of text": ("statistics count many", statistics_file(dict(STATISTICS, count="many"))),
    "an extractor that is none": ("statistics extractor [1]", statistics_file(dict(STATISTICS, extractor=[1]))),
    "deep JSON": ("statistics recursion", statistics_file(record="[" * 4000)),
    "long text": ("statistics record text", statistics_file(record=" " * 10**6)),
    "a record of numbers": ("statistics record float64 text", statistics_file(record=np.zeros(3))),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED_STATISTICS)
def test_statistics_that_are_wrong(tmp_path, case):
    facts, content = MALFORMED_STATISTICS[case]
    file = tmp_path / "s.npz"
    file.write_bytes(content)
    refuse(f"{file} {facts}", load_statistics, file)


def test_statistics_that_are_right(tmp_path):
    """The file of which each of `MALFORMED_STATISTICS` changes one entry."""
    file = tmp_path / "s.npz"
    file.write_bytes(statistics_file())
    assert load_statistics(file).pooled[0].shape == (4,)


def raw_npy(shape, dtype="<f8", data=b"") -> bytes:
    """Return a .npy file whose header says this shape and dtype, whether or not `data` have as many bytes."""
    text = (
        f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117)
        + b"\n"
    )
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


MEAN = raw_npy((4,), data=bytes(32))


# Case -> (what the error says, the .npy files of the archive).
ARCHIVES = {
    "a huge mean": ("mu float64 [1099511627776] [1 to 16384]", dict(mu=raw_npy((2**40,)), sigma=MEAN)),
    "a huge covariance": ("sigma float64 [1048576, 1048576] [4, 4]", dict(mu=MEAN, sigma=raw_npy((2**20, 2**20)))),
    "images of floats": ("arr_0 float32 [4, 8, 8, 3] uint8", dict(arr_0=raw_npy((4, 8, 8, 3), "<f4"))),
    "channels first": ("arr_0 uint8 [4, 3, 8, 8] [N, height", dict(arr_0=raw_npy((4, 3, 8, 8), "|u1"))),
    "another name": ("arr_0 images", dict(images=raw_npy((4, 8, 8, 3), "|u1"))),
    "a mean without data": ("mu damaged", dict(mu=raw_npy((4,)), sigma=MEAN)),
    "a mean of objects": ("mu object", dict(mu=raw_npy((4,), "|O"), sigma=MEAN)),
    "no npy": ("mu array", dict(mu=b"hello", sigma=MEAN)),
    "huge images": ("arr_0 1048576 pixels", dict(arr_0=raw_npy((9, 2**20, 2**20, 3), "|u1"))),
    "a negative count": ("", dict(arr_0=raw_npy((-1, 4, 4, 3), "|u1"))),
    "images without pixels": ("4 0 pixels", dict(arr_0=raw_npy((4, 0, 4, 3), "|u1"))),
    "code for a shape": ("arr_0 array", dict(arr_0=raw_npy("__import__('os').getcwd()"))),
}  # fmt: skip


@pytest.mark.parametrize("case", ARCHIVES)
def test_archives_that_are_wrong(tmp_path, case):
    facts, arrays = ARCHIVES[case]
    file = tmp_path / "r.npz"
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in arrays.items():
            archive.writestr(f"{name}.npy", data)
    images = torch.zeros(4, 3, 4, 4, dtype=torch.uint8)
    options = dict(extractor=torch.nn.Flatten(), allow_biased=True)
    refuse(f"{file} {facts}", score, images, file, **options)
