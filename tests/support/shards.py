"""Webdataset shards of small images."""

import io
import tarfile

import webdataset
from PIL import Image


def write_shards(folder, count=23, per_shard=10, classes=3, split="train", extension="png"):
    """Write shards of 6 x 4 images in one colour, whose classes take turns, and return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with webdataset.ShardWriter(
        str(folder / f"{split}-%06d.tar"), maxcount=per_shard, verbose=0
    ) as sink:
        for i in range(count):
            image = Image.new("RGB", (6, 4), (i, 0, 255 - i))
            sink.write({"__key__": f"{i:04d}", extension: image, "cls": i % classes})
    return folder


def append(path, name, data):
    """Append a member to a tar."""
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))


def info(name, size=0, member_type=tarfile.REGTYPE, link="") -> tarfile.TarInfo:
    """Return the header of a member."""
    member = tarfile.TarInfo(name)
    member.size = size
    member.type = member_type
    member.linkname = link
    return member


def shard(path, members, mode="w", form=tarfile.PAX_FORMAT):
    """Write a tar of `members`, pairs (name, bytes), and return its path."""
    with tarfile.open(path, mode, format=form) as tar:
        for name, data in members:
            tar.addfile(info(name, len(data)), io.BytesIO(data))
    return path
