"""Checks what torch.distributed.checkpoint would unpickle of a sharded checkpoint.

It unpickles .metadata, and every entry that is no tensor, without limits. A manifest does not help: a stranger can write
one too. So both are first read with an allow-list.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Optional

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

METADATA = "*.metadata"  # .metadata of all processes, else __0.metadata of one
ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


def foreign_objects(folder: Path) -> Optional[str]:
    """Return why a sharded checkpoint would make other things than tensors and plain values, or None.

    Args:
        folder: of a checkpoint; None is returned without sharded files.
    """
    for file in sorted(folder.rglob(METADATA)):
        try:
            outline = _AllowList(io.BytesIO(file.read_bytes())).load()
            for index, info in outline.storage_data.items():
                if isinstance(outline.state_dict_metadata[index.fqn], BytesStorageMetadata):
                    torch.load(io.BytesIO(_part(file.parent, info)), weights_only=True)
        except Exception as error:  # damaged pickles make many kinds
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            return f"{file.relative_to(folder)} is not the outline of a sharded checkpoint alone ({reason})"
    return None


class _AllowList(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        known = (
            name in ALLOWED.get(module, ()) or module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        )
        if not known:
            raise ValueError(f"{module}.{name} is not of a checkpoint")
        return super().find_class(module, name)


def _part(folder: Path, info) -> bytes:
    file = folder / info.relative_path
    if file.resolve().parent != folder.resolve():
        raise ValueError(f"{info.relative_path} is outside of the folder")
    with open(file, "rb") as opened:
        opened.seek(info.offset)
        return opened.read(info.length)
