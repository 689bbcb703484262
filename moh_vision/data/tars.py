"""Read the tar files of shards to their last byte; refuse files that are damaged, cut off, or continue past their end."""

import math
import re
import tarfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

from webdataset.tariterators import base_plus_ext

from moh_vision.common.errors import BadData, reason_of
from moh_vision.data.folder import IMAGES

# tar ends a file with two blocks of zeros, and then fills up a record of 20 blocks (its option -b).
MOST_ZEROS = tarfile.RECORDSIZE + tarfile.BLOCKSIZE
META = re.compile("__[^/]*__($|/)")  # names of members that webdataset skips
IMAGE_EXTENSIONS = tuple(ending.removeprefix(".") for ending in IMAGES)
LABEL_EXTENSIONS = ("cls",)


def sample_of(name: str) -> tuple[str, str] | None:
    """Return the key and the lower-case extension of a member of a shard; None if it belongs to no sample.

    As in webdataset, the key ends at the first dot of the base name. README, .DS_Store and ._0001.jpg have no key.
    """
    key, extension = base_plus_ext(name)
    # For FOLDER/.DS_Store, webdataset returns the key "FOLDER/".
    if META.match(name) or key is None or key.endswith("/"):
        return None
    return key, extension.lower()


def ending_with(extensions: Iterable[str], wanted: Collection[str]) -> list[str]:
    """Return which extensions of a sample's files are among `wanted`, such as png.

    webdataset's extension is all behind the first dot. If none is wanted as it is, its last part decides: rgb.png is
    taken where no png is.
    """
    extensions = list(extensions)
    found = [extension for extension in extensions if extension in wanted]
    return found or [one for one in extensions if one.rpartition(".")[2] in wanted]


class _Header(tarfile.TarInfo):
    """A tar header that raises an error if it is damaged; tarfile alone takes a damaged header for the end."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # a block of zeros: the regular end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


def open_tar(name: Path | str, stream: BinaryIO | None = None) -> tarfile.TarFile:
    """Open a shard: the file at the path `name` or, if given, a `stream`, which messages call `name`."""
    # Both modes refuse compressed files, where offsets of members would not be offsets in the file.
    mode = "r|" if stream else "r:"
    try:
        return tarfile.open(name, mode, stream, tarinfo=_Header)
    except tarfile.TarError as error:
        raise ValueError(f"{name}: not a readable tar file, uncompressed ({error})") from None


def members(
    tar: tarfile.TarFile, name: Path | str, size: float = math.inf
) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a shard that are regular files.

    Raise ValueError, naming the shard and the byte, if the shard is damaged or cut off, or if more follows its end than
    the zeros that tar writes.

    Args:
        tar: from `open_tar`.
        name: path or URL of the shard.
        size: of the shard in bytes, if known.
    """
    count = 0
    while True:
        try:
            member = tar.next()
        except BadData:  # the stream has said what is wrong
            raise
        except Exception as error:  # damaged headers raise exceptions of many classes
            raise ValueError(
                f"{name}: cut off or damaged behind member {count}, at byte {tar.offset} ({reason_of(error)})"
            ) from None
        if member is None:
            break
        count += 1
        tar.members.clear()  # else tarfile keeps all headers of the shard in memory
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
    """Read what follows a shard's `count` members; raise ValueError for anything but the zeros that tar writes."""
    end = tar.offset  # where the first block of zeros begins; tarfile has read this block
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
