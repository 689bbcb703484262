"""From a folder and a split to its token ids, if it holds any; see `token_files` and `token_shards`."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Optional, Union

from moh_vision.data.hub import PREFIX
from moh_vision.language.data.sources import SPLIT_NAMES
from moh_vision.language.data.token_files import TokenFiles
from moh_vision.language.data.token_shards import TokenShards

ENDINGS = (".bin", ".npy", ".tokens.safetensors")
Tokens = Union[TokenFiles, TokenShards]


def find_tokens(root: str, split: str) -> Optional[List[Path]]:
    """The files of a split that holds token ids; None if there are none, and text is to be looked for.

    Args:
        root: a folder.
        split: any name; "val" is also valid, validation or dev.

    Raises:
        ValueError: naming two files, if there are ids in two forms, or ids and text.
    """
    folder = Path(root)
    if root.startswith(PREFIX) or not folder.is_dir():
        return None
    for name in SPLIT_NAMES.get(split, (split,)):
        forms: Dict[str, List[Path]] = {}
        for ending in ENDINGS:
            forms[f"{name}{ending}"] = [p for p in (folder / f"{name}{ending}",) if p.exists()]
            forms[f"{name}-*{ending}"] = sorted(folder.glob(f"{name}-*{ending}"))
        forms[f"{name}-*.tar"] = sorted(folder.glob(f"{name}-*.tar"))
        forms[f"{name}.txt"] = [p for p in (folder / f"{name}.txt", folder / f"{name}.txt.gz") if p.exists()]
        found = [files for files in forms.values() if files]
        if len(found) > 1:
            raise ValueError(f"data.root {root}: both {found[0][0].name} and {found[1][0].name}; remove one")
        if found:
            return None if found[0] is forms[f"{name}.txt"] else found[0]
    return None


def open_tokens(paths: List[Path], index_dir: Optional[str] = None, dtype: Optional[str] = None) -> Tokens:
    """The ids of the files that `find_tokens` found.

    Args:
        index_dir: see `TokenShards`.
        dtype: see `TokenFiles`.

    Raises:
        ValueError: naming the file.
    """
    if paths[0].suffix == ".tar":
        return TokenShards(paths, paths[0].name.rpartition("-")[0], index_dir)
    return TokenFiles(paths, dtype)
