"""Tar files of shards, read to their last byte: what is cut off, damaged, or has something behind its end is refused."""

import math
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self

from webdataset.tariterators import base_plus_ext

from moh_vision.common.errors import BadData, reason_of
from moh_vision.data.folder import IMAGES

# Two blocks, filled up to a record of 20 (tar's -b).
MOST_ZEROS = tarfile.RECORDSIZE + tarfile.BLOCKSIZE
META = re.compile("__[^/]*__($|/)")  # members that webdataset passes over, by their names
IMAGE_EXTENSIONS = tuple(ending.removeprefix(".") for ending in IMAGES)


def sample_of(name: str) -> tuple[str, str] | None:
    """Return key and extension, in lower case, of a member of a shard; None if it is of no sample.

    As in webdataset, the key ends at the first dot of the base name. README, .DS_Store and ._0001.jpg have no key.
    """
    key, extension = base_plus_ext(name)
    # webdataset takes the key of FOLDER/.DS_Store for FOLDER/.
    if META.match(name) or key is None or key.endswith("/"):
        return None
    return key, extension.lower()


class _Header(tarfile.TarInfo):
    """A header whose damage is an error: tarfile takes a damaged one for the end of the file."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # a block of zeros
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


def open_tar(name: Path | str, stream: BinaryIO | None = None) -> tarfile.TarFile:
    """Open a shard: the path `name`, or a stream that errors call so."""
    # Neither mode reads compressed files: the offsets would not be those of the file.
    mode = "r|" if stream else "r:"
    try:
        return tarfile.open(name, mode, stream, tarinfo=_Header)
    except tarfile.TarError as error:
        raise ValueError(f"{name}: not a readable tar file, uncompressed ({error})") from None


def members(
    tar: tarfile.TarFile, name: Path | str, size: float = math.inf
) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files of a shard from `open_tar`; `size` is that of the file, if known.

    Raise ValueError, naming the shard and the byte, if it is damaged or cut off, or if there is more behind its end than
    the zeros that tar writes.
    """
    count = 0
    while True:
        try:
            member = tar.next()
        except BadData:  # of the stream
            raise
        except Exception as error:  # damaged headers make many kinds
            raise ValueError(
                f"{name}: cut off or damaged behind member {count}, at byte {tar.offset} ({reason_of(error)})"
            ) from None
        if member is None:
            break
        count += 1
        tar.members.clear()  # or tarfile would keep the headers of the whole shard
        if member.size < 0 or member.issparse():
            raise ValueError(
                f"{name}: {member.name} is a sparse file, or has a negative size; expected plain files"
            )
        if not member.isreg():
            continue
        if member.offset_data + member.size > size:
            raise ValueError(
                f"{name}: cut off within {member.name}, member {count}; the file has {size} bytes"
            )
        yield member
    _refuse_more_than_zeros(tar, name, count)


def _refuse_more_than_zeros(tar: tarfile.TarFile, name: Path | str, count: int) -> None:
    """Read a shard on behind its `count` members; raise ValueError for anything but the zeros that tar writes."""
    end = tar.offset  # of the members: here begins the first block of zeros, which was read
    position = tar.offset + tarfile.BLOCKSIZE
    while data := tar.fileobj.read(2**20):
        zeros = len(data) - len(data.lstrip(b"\0"))
        if zeros < len(data):
            raise ValueError(
                f"{name}: byte {position + zeros} is not zero, but a block of zeros behind member {count}, at byte {end}, "
                "ends a tar: damaged, or several tars in one file"
            )
        position += len(data)
    if position - end > MOST_ZEROS:
        raise ValueError(
            f"{name}: {position - end} zeros behind member {count}, from byte {end} to the end; tar writes at most "
            f"{MOST_ZEROS}: damaged"
        )
