"""Tar shards that are cut off, damaged or hostile: refused by name, nothing lost in silence, nothing written outside."""

import io
import os
import tarfile

import numpy as np
import pytest
from pictures import encoded, gradient
from refusals import one_line
from repeat import cases
from safetensors.numpy import load_file, save_file
from test_bad_folders import shard
from test_sources import write_shards

from moh_vision.data.sources import Shards
from moh_vision.data.tar_index import INDEX_FORMAT

PNG = encoded(gradient())


def special(name, kind, link="") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize("layout", ["webdataset", "pax", "gnu"])
def test_a_tar_cut_at_100_places(tmp_path, layout):
    """Every cut is refused with the file's name, but those in the padding behind the end mark, which lose nothing."""
    whole = tmp_path / "whole.tar"
    if layout == "webdataset":
        (write_shards(tmp_path / "d", count=12, per_shard=12) / "train-000000.tar").rename(whole)
    else:
        form = tarfile.PAX_FORMAT if layout == "pax" else tarfile.GNU_FORMAT
        with tarfile.open(whole, "w", format=form) as tar:
            for i in range(12):
                for end, data in (("png", PNG), ("cls", b"1")):
                    info = tarfile.TarInfo("very/long/" * 15 + f"{i}.{end}")  # takes a header of its own
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    data = whole.read_bytes()
    with tarfile.open(whole) as tar:
        end = max(m.offset_data + -(-m.size // 512) * 512 for m in tar)
    rng = cases(100, f"cuts of {layout}")
    # Ends of members and of headers are where a cut is hardest to see.
    edges = [k for k in range(0, end + 1, 512)]
    places = [*rng.sample(edges, 30), end, end + 1, end + 511, end + 512]
    places += [rng.randrange(len(data)) for _ in range(66)]
    folder, refused = tmp_path / "cut", 0
    folder.mkdir()
    for place in places:
        (folder / "train-000000.tar").write_bytes(data[:place])
        try:
            found = Shards(str(folder), "train")
        except ValueError as error:
            assert str(error).startswith(str(folder / "train-000000.tar")) and "\n" not in str(error), (place, error)
            refused += 1
        else:
            assert place >= end + 512 and len(found) == 12 and found.image(11).size, place
            (folder / ".train.index.safetensors").unlink()
    assert len(places) == 100 and refused == sum(place < end + 512 for place in places) >= 60


def test_a_damaged_header_does_not_end_a_shard_in_silence(tmp_path):
    """tarfile takes it for the end, and would lose every sample behind it."""
    path = write_shards(tmp_path / "d", count=10) / "train-000000.tar"
    with tarfile.open(path) as tar:
        member = tar.getmembers()[9]
    data = bytearray(path.read_bytes())
    data[member.offset + 5] ^= 1
    path.write_bytes(data)
    with one_line(f"train-000000.tar: cut off or damaged behind member 9, at byte {member.offset} of"):
        Shards(str(tmp_path / "d"), "train")


@pytest.mark.parametrize("prefix", ["../../outside/", "/outside/", "a/../../outside/", "./", "C:\\outside\\", "\n"])
def test_names_that_point_elsewhere_are_only_names(tmp_path, prefix):
    folder = tmp_path / "deep" / "d"
    folder.mkdir(parents=True)
    shard(folder / "train-000000.tar", [(f"{prefix}0.png", PNG), (f"{prefix}0.cls", b"0")])
    before = tree(tmp_path)
    source = Shards(str(folder), "train")
    assert len(source) == 1 and source.image(0).size == (12, 8)
    assert tree(tmp_path) - before == {"deep/d/.train.index.safetensors"} and not os.path.exists("/outside")


def tree(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


LINKS = {
    "symlink": special("1.png", tarfile.SYMTYPE, "/etc/hostname"),
    "hard link": special("1.png", tarfile.LNKTYPE, "../../secret.png"),
    "link to a sample": special("1.png", tarfile.LNKTYPE, "0.png"),
    "character device": special("1.png", tarfile.CHRTYPE),
    "block device": special("1.png", tarfile.BLKTYPE),
    "pipe": special("1.png", tarfile.FIFOTYPE),
    "folder": special("1.png", tarfile.DIRTYPE),
}


@pytest.mark.parametrize("kind", LINKS)
def test_links_and_devices_are_no_images(tmp_path, kind):
    (tmp_path / "secret.png").write_bytes(PNG)
    folder = tmp_path / "d"
    folder.mkdir()
    path = shard(folder / "train-000000.tar", [("0.png", PNG), ("0.cls", b"0"), ("1.cls", b"0")])
    before = tree(tmp_path)
    with tarfile.open(path, "a") as tar:
        tar.addfile(LINKS[kind])
    with pytest.raises(ValueError, match="train-000000.tar: sample 1 has no image"):
        Shards(str(folder), "train")
    with tarfile.open(path, "a") as tar:  # beside a real image it is passed over
        info = tarfile.TarInfo("1.jpg")
        info.size = len(PNG)
        tar.addfile(info, io.BytesIO(PNG))
    source = Shards(str(folder), "train")
    assert len(source) == 2 and source.image(1).size == (12, 8)
    assert tree(tmp_path) - before == {"d/.train.index.safetensors"}


@pytest.mark.parametrize("size", [2**62, 2**40, -512, -(2**40)])
def test_sizes_that_cannot_be(tmp_path, size):
    info = tarfile.TarInfo("1.png")
    header = info.tobuf(tarfile.GNU_FORMAT)
    field = (b"\x80" + size.to_bytes(11, "big")) if size > 0 else (b"\xff" + (size + 256**11).to_bytes(11, "big"))
    header = header[:124] + field + header[136:]
    total = sum(header[:148]) + 8 * 32 + sum(header[156:])
    header = header[:148] + b"%06o\0 " % total + header[156:]
    (tmp_path / "train-000000.tar").write_bytes(header + bytes(2048))
    with one_line("train-000000.tar: (cut off within 1.png|1.png is a sparse|not a readable tar)"):
        Shards(str(tmp_path), "train")


def test_a_compressed_tar_is_refused(tmp_path):
    """Its offsets would be read from the compressed bytes."""
    with tarfile.open(tmp_path / "train-000000.tar", "w:gz") as tar:
        for name, data in (("0.png", PNG), ("0.cls", b"0")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    with pytest.raises(ValueError, match="train-000000.tar: not a readable tar file, uncompressed"):
        Shards(str(tmp_path), "train")


@pytest.mark.parametrize("name", ["0.png", "0.jpg", "0.cls"])
def test_a_sample_that_comes_twice_is_named(tmp_path, name):
    shard(tmp_path / "train-000000.tar", [("0.png", PNG), ("0.cls", b"0"), (name, b"1")])
    with pytest.raises(ValueError, match=f"train-000000.tar: {name} is a second (image|label) of the same sample"):
        Shards(str(tmp_path), "train")


# ---------------------------------------------------------------- the index beside them


CHANGES = {
    "offset": (lambda a: a["offset"].__setitem__(1, -5), "samples outside of their shard"),
    "size": (lambda a: a["size"].__setitem__(1, 2**62), "samples outside of their shard"),
    "sum": (lambda a: (a["offset"].__setitem__(1, 2**62), a["size"].__setitem__(1, 3)), "samples outside"),
    "label": (lambda a: a["label"].__setitem__(1, -1), "labels outside of 0 to 999999"),
    "large label": (lambda a: a["label"].__setitem__(1, 10**9), "labels outside of 0 to 999999"),
    "shard": (lambda a: a["shard"].__setitem__(9, 7), "samples that no shard has"),
    "order": (lambda a: a["shard"].__setitem__(slice(None), a["shard"][::-1].copy()), "shards out of order"),
    "length": (lambda a: a.update(label=a["label"][1:]), "unequal length"),
    "kind": (lambda a: a.update(label=a["label"].astype(np.float32)), "vectors of int64"),
    "missing": (lambda a: a.pop("label"), "vectors of int64"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_index_that_cannot_be_right_is_named(tmp_path, change):
    folder = write_shards(tmp_path / "d", count=10, per_shard=5)
    Shards(str(folder), "train")
    index = folder / ".train.index.safetensors"
    from safetensors import safe_open

    with safe_open(index, "numpy") as file:
        metadata = file.metadata()
    arrays = load_file(index)
    make, words = CHANGES[change]
    make(arrays)
    save_file(arrays, index, metadata)
    with one_line(f"{index}: not an index that can be right .*{words}.*; delete it to build it again"):
        Shards(str(folder), "train")


def test_random_damage_to_an_index(tmp_path):
    folder = write_shards(tmp_path / "d", count=10, per_shard=5)
    whole = Shards(str(folder), "train")
    index = folder / ".train.index.safetensors"
    data, rng, refused = index.read_bytes(), cases(200, "damaged indices"), 0
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 4, 30))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        index.write_bytes(damaged[: rng.choice((len(data), len(data), rng.randrange(len(data))))])
        try:
            found = Shards(str(folder), "train")
        except ValueError as error:
            assert str(index) in str(error) and "\n" not in str(error), error
            refused += 1
        else:  # a changed number that may be so
            assert len(found) == len(whole) and [len(found.read(i)) for i in range(10)]
    assert refused > 100


@pytest.mark.parametrize("text", ["null", "5", "[]", '{"shards": 3}', '{"shards": [[1]]}', "[" * 100_000, "\xff"])
def test_metadata_of_an_index_that_are_none(tmp_path, text):
    folder = write_shards(tmp_path / "d", count=10)
    Shards(str(folder), "train")
    index = folder / ".train.index.safetensors"
    save_file(load_file(index), index, {"format": str(INDEX_FORMAT), "meta": text})
    with pytest.raises(ValueError, match=f"{index}: not an index that can be read"):
        Shards(str(folder), "train")
