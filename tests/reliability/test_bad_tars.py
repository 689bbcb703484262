"""Tar shards that are cut off, damaged or hostile are refused by name.

No sample is lost in silence, and nothing is written outside of the shards' folder.
"""

import itertools
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest
import webdataset

from moh_vision.data.shards import Shards
from moh_vision.data.stream import ShardStream
from moh_vision.diffusion import train as dit
from tests.support.pictures import convert, encoded, gradient, write_folder
from tests.support.refusals import assert_says, one_line, refuse, refused
from tests.support.repeat import cases
from tests.support.shards import info, shard, write_shards

PNG = encoded(gradient())


def padded(member):
    """Return the byte at which a member ends: its data are padded to whole blocks of 512 bytes."""
    return member.offset_data + -(-member.size // 512) * 512


@pytest.mark.parametrize("layout", ["webdataset", "pax", "gnu"])
def test_a_tar_cut_at_100_places(tmp_path, layout):
    """Every cut that loses something is refused with the file's name. Behind the end mark a cut only loses padding."""
    whole = tmp_path / "whole.tar"
    if layout == "webdataset":
        (write_shards(tmp_path / "d", count=12, per_shard=12) / "train-000000.tar").rename(whole)
    else:
        long = "very/long/" * 15  # a name of this length takes an additional header
        members = [
            (f"{long}{i}.{end}", data)
            for i in range(12)
            for end, data in (("png", PNG), ("cls", b"1"))
        ]
        shard(whole, members, form=tarfile.PAX_FORMAT if layout == "pax" else tarfile.GNU_FORMAT)
    data = whole.read_bytes()
    with tarfile.open(whole) as tar:
        end = max(map(padded, tar))
    rng = cases(100, f"cuts of {layout}")
    # A cut between two blocks is the hardest to detect: members and headers end there.
    edges = list(range(0, end + 1, 512))
    cuts = [*rng.sample(edges, 30), end, end + 1, end + 511, end + 512]
    cuts += [rng.randrange(len(data)) for _ in range(66)]
    folder = tmp_path / "cut"
    refused = 0
    folder.mkdir()
    for cut in cuts:
        (folder / "train-000000.tar").write_bytes(data[:cut])
        try:
            found = Shards(str(folder), "train")
        except ValueError as error:
            message = str(error)
            names_file = message.startswith(str(folder / "train-000000.tar"))
            assert names_file and "\n" not in message, (cut, error)
            refused += 1
        else:
            assert cut >= end + 512 and len(found) == 12 and found.image(11).size, cut
            (folder / ".train-000000.tar.index.npy").unlink()
    assert len(cuts) == 100 and refused == sum(cut < end + 512 for cut in cuts) >= 60


def zeroed(data, first, end=None):
    """Return `data` with zeros in place of the bytes first to end."""
    count = len(data[first:end])
    return data[:first] + bytes(count) + data[first + count :]


def flipped(data, offset):
    """Return `data` with the lowest bit of one byte flipped."""
    return data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]


# Fault -> changes the bytes of a tar whose members are `m`; returns them, and what the error says.
TORN = {
    "a bit of a header": lambda data, m: (flipped(data, m[20].offset + 5), "behind 20 byte {offset}"),
    "a header": lambda data, m: (zeroed(data, m[20].offset, m[20].offset_data), "{data} zero {offset}"),
    "a page": lambda data, m: (zeroed(data, m[20].offset, m[20].offset + 4096), "zero byte {offset}"),
    "all behind": lambda data, m: (zeroed(data, m[20].offset), "zeros behind 20 {offset} 10752"),
    "two joined": lambda data, m: (data + data, "{size} zero behind 80"),
    "one record more": lambda data, m: (data + bytes(10240), "zeros behind 80 10752"),
}  # fmt: skip


@pytest.mark.parametrize("reader", ["exact", "stream", "pipe"])
@pytest.mark.parametrize("fault", TORN)
def test_zeros_inside_a_tar_are_not_its_end(tmp_path, fault, reader):
    """A power cut or a torn download leaves blocks of zeros; cat joins tars. tarfile would silently stop reading there."""
    path = write_shards(tmp_path / "d", count=40, per_shard=40) / "train-000000.tar"
    with tarfile.open(path) as tar:
        listed = tar.getmembers()
    whole = path.read_bytes()
    data, facts = TORN[fault](whole, listed)
    path.write_bytes(data)
    facts = facts.format(size=len(whole), offset=listed[20].offset, data=listed[20].offset_data)
    if reader == "exact":
        refuse(f"{path} {facts}", Shards, str(tmp_path / "d"), "train")
        assert not list((tmp_path / "d").glob(".*"))
    else:
        url = f"pipe:cat {path}" if reader == "pipe" else str(path)
        samples = ShardStream([url], ["a", "b", "c"], 40, "some").samples(0, 0, 1)
        with one_line(f"{url} {facts}"):
            list(itertools.islice(samples, 100))


# Ways to write a tar of one sample: write(path, size), with an image that has `size` bytes more than PNG.


def with_tarfile(form):
    return lambda path, size: shard(
        path, [("0.cls", b"0"), ("0.png", PNG + bytes(size))], form=form
    )


def with_webdataset(path, size):
    with webdataset.TarWriter(str(path)) as sink:
        sink.write({"__key__": "0", "cls": "0", "png": PNG + bytes(size)})


def with_program(name, *options):
    """Return a writer that calls a program, or None if it is not installed."""
    if not shutil.which(name):
        return None

    def write(path, size):
        folder = path.parent.parent
        (folder / "0.cls").write_bytes(b"0")
        (folder / "0.png").write_bytes(PNG + bytes(size))
        subprocess.run([name, *options, "-cf", path, "0.cls", "0.png"], cwd=folder, check=True)

    return write


WRITERS = {
    "webdataset": with_webdataset,
    "tarfile pax": with_tarfile(tarfile.PAX_FORMAT),
    "tarfile gnu": with_tarfile(tarfile.GNU_FORMAT),
    "tarfile ustar": with_tarfile(tarfile.USTAR_FORMAT),
    "tar": with_program("tar"),
    "tar -b1": with_program("tar", "-b1"),
    "tar -b7": with_program("tar", "-b7"),
    "bsdtar": with_program("bsdtar"),
}


@pytest.mark.parametrize("blocks", ["all", "one"])
@pytest.mark.parametrize("program", WRITERS)
def test_what_tar_writes_at_the_end_is_taken(tmp_path, program, blocks):
    """A tar may end with any number of zero blocks that fill up its record, or with a single one."""
    write = WRITERS[program]
    if write is None:
        pytest.skip(f"no {program} here")
    folder = tmp_path / "d"
    folder.mkdir()
    for number in range(21):
        path = folder / f"train-{number:06d}.tar"
        write(path, number * 512)
        if blocks == "one":
            with tarfile.open(path) as tar:
                last = tar.getmembers()[-1]
            os.truncate(path, padded(last) + 512)
    assert len(Shards(str(folder), "train")) == 21
    urls = sorted(map(str, folder.glob("*.tar")))
    samples = ShardStream(urls, ["a"], 21, "some").samples(0, 0, 1)
    assert len({sample.name for sample in itertools.islice(samples, 200)}) == 21


@pytest.mark.parametrize(
    "prefix", ["../../outside/", "/outside/", "a/../../outside/", "./", "C:\\outside\\", "\n"]
)
def test_names_that_point_elsewhere_are_only_names(tmp_path, prefix):
    folder = tmp_path / "deep" / "d"
    folder.mkdir(parents=True)
    shard(folder / "train-000000.tar", [(f"{prefix}0.png", PNG), (f"{prefix}0.cls", b"0")])
    before = tree(tmp_path)
    source = Shards(str(folder), "train")
    assert len(source) == 1 and source.image(0).size == (12, 8)
    assert tree(tmp_path) - before == {"deep/d/.train-000000.tar.index.npy"}
    assert not os.path.exists("/outside")


def tree(folder):
    """Return the relative paths of all that is in `folder`."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


LINKS = {
    "symlink": info("1.png", 0, tarfile.SYMTYPE, "/etc/hostname"),
    "hard link": info("1.png", 0, tarfile.LNKTYPE, "../../secret.png"),
    "link to a sample": info("1.png", 0, tarfile.LNKTYPE, "0.png"),
    "character device": info("1.png", 0, tarfile.CHRTYPE),
    "pipe": info("1.png", 0, tarfile.FIFOTYPE),
    "folder": info("1.png", 0, tarfile.DIRTYPE),
}


@pytest.mark.parametrize("member", LINKS)
def test_links_and_devices_are_no_images(tmp_path, member):
    (tmp_path / "secret.png").write_bytes(PNG)
    folder = tmp_path / "d"
    folder.mkdir()
    path = shard(folder / "train-000000.tar", [("0.png", PNG), ("0.cls", b"0"), ("1.cls", b"0")])
    before = tree(tmp_path)
    with tarfile.open(path, "a") as tar:
        tar.addfile(LINKS[member])
    refuse(f"{path} sample 1 image", Shards, str(folder), "train")
    shard(path, [("1.jpg", PNG)], "a")  # now the sample has an image, and the link is ignored
    source = Shards(str(folder), "train")
    assert len(source) == 2 and source.image(1).size == (12, 8)
    assert tree(tmp_path) - before == {"d/.train-000000.tar.index.npy"}


def of_size(size):
    """Return a tar header that claims a member of `size` bytes, and 2048 bytes behind the header."""
    header = tarfile.TarInfo("1.png").tobuf(tarfile.GNU_FORMAT)
    # GNU's form for sizes that do not fit in octal digits, negative ones included.
    if size > 0:
        field = b"\x80" + size.to_bytes(11, "big")
    else:
        field = b"\xff" + (size + 256**11).to_bytes(11, "big")
    header = header[:124] + field + header[136:]
    # The checksum of the header counts its own 8 bytes as spaces.
    total = sum(header[:148]) + 8 * 32 + sum(header[156:])
    return header[:148] + b"%06o\0 " % total + header[156:] + bytes(2048)


def sample(*members, mode="w"):
    """Return the bytes of a tar with the image 0.png and `members`, which are pairs (name, data)."""
    with tempfile.NamedTemporaryFile() as file:
        return Path(shard(file.name, [("0.png", PNG), *members], mode)).read_bytes()


def labelled(label, value=""):
    """Return a case of `REFUSED`: a sample with this label, and what its error says, with `value` for the label."""
    return sample(("0.cls", label)), f"0.cls {value} class 0 999999"


# Case -> (the bytes of a tar, what the error says).
REFUSED = {
    **{f"{size} bytes": (of_size(size), "1.png") for size in (2**62, 2**40, -512, -(2**40))},
    # tarfile could read it, but the index has offsets into the file as it is on disk.
    "compressed": (sample(("0.cls", b"0"), mode="w:gz"), "tar uncompressed"),
    "nothing": (b"", "tar"),
    **{f"{name} twice": (sample(("0.cls", b"0"), (name, b"1")), f"sample 0 2 {name[2:]}") for name in ("0.png", "0.jpg", "0.cls")},
    "a label below 0": labelled(b"-1", "'-1'"),
    "a fraction": labelled(b"3.0", "'3.0'"),
    "no label": labelled(b"", "''"),
    "bytes": labelled(b"\xff\xfe"),
    "a digit for Python": labelled("\u0663".encode()),
    "a tag": labelled(b"!!python/object:os.system"),
    "a million": labelled(b"1000000", "'1000000'"),
    "32 digits": labelled(b"9" * 32, f"'{'9' * 32}'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_tars_that_are_refused(tmp_path, case):
    data, facts = REFUSED[case]
    (tmp_path / "train-000000.tar").write_bytes(data)
    refuse(f"{tmp_path}/train-000000.tar {facts}", Shards, str(tmp_path), "train")


# ---------------------------------------------------------------- the record of the shards, train.shards.json


@pytest.fixture
def written(tmp_path):
    """Write shards of four samples each, with their record, and return the folder."""
    images = write_folder(tmp_path / "images", train=6, val=1)
    assert convert(images, tmp_path / "d", "--samples-per-shard 4") == 0
    return tmp_path / "d"


# Faults: each damages a shard and returns what the error of its reader says.


def tear(folder):
    """Replace the last sample by zeros. The tar still looks complete: only the record says that a sample is missing."""
    path = folder / "train-000001.tar"
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-2]
    path.write_bytes(zeroed(path.read_bytes(), last.offset))
    return "10240 3 samples train.shards.json 4"


def shorten(folder):
    path = folder / "train-000001.tar"
    os.truncate(path, 9728)
    return "9728 4 samples train.shards.json 10240"


@pytest.mark.parametrize("fault", [tear, shorten])
@pytest.mark.parametrize("url", ["{}/train-000001.tar", "pipe:cat {}/train-000001.tar"])
def test_a_stream_is_compared_with_its_record(written, capsys, fault, url):
    facts = fault(written)
    url = url.format(written)
    argv = (
        "--model.name moh_dit_small_patch2_75 --model.depth 1 --model.embed_dim 32 --model.num_heads 2 "
        "--model.head_budget 0.5 --data.img_size 8 --data.exact_order false --data.workers 0 "
        f"--optim.batch_size 4 --max-steps 9 --output {written}/run --data.root {written} --data.stream"
    ).split()
    assert_says(refused(capsys, dit.main, *argv, url), f"{url} {facts}")


# ---------------------------------------------------------------- the index of a shard


def changed(row, column, value):
    """Return a function that sets one number of an index."""

    def change(table):
        table[row, column] = value
        return table

    return change


# Case -> (makes the damaged index, or the bytes of its file, from a good one; what the error says).
CHANGES = {
    "offset": (changed(1, 0, -5), "samples outside"),
    "size": (changed(1, 1, 2**62), "samples outside"),
    "sum": (lambda t: changed(1, 1, 3)(changed(1, 0, 2**62)(t)), "samples outside"),
    "label": (changed(1, 2, -2), "labels -1 999999"),
    "another version": (changed(0, 0, 1), "version"),
    "dtype": (lambda t: t.astype(np.float32), "version"),
    "missing": (lambda t: t[:, :2], "version"),
    "empty": (lambda t: t[:0], "read"),
    "objects": (lambda t: np.array([{}], object), "read"),
    "no file of numpy": (lambda t: b"PK\3\4" + bytes(40), "read"),
    "a header without end": (lambda t: b"\x93NUMPY\x03\x00" + b"[" * 10**5, "read"),
    "a size of another file": (changed(0, 1, 1), "train-000001.tar changed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_index_that_cannot_be_right_is_named(tmp_path, change):
    folder = write_shards(tmp_path / "d", count=10, per_shard=5)
    Shards(str(folder), "train")
    index = folder / ".train-000001.tar.index.npy"
    make, facts = CHANGES[change]
    damaged = make(np.load(index))
    if isinstance(damaged, bytes):
        index.write_bytes(damaged)
    else:
        np.save(index, damaged)
    refuse(f"{index} {facts} delete", Shards, str(folder), "train")
