"""What a script's keys are, for `--help` (a line or two a key, in groups) and for docs/reference/config.md."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
import typing
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import jsonargparse

KEY_WIDTH = 32  # of the column of keys and defaults; behind a longer one the text begins on the next line


class Key(NamedTuple):
    """One key of a configuration."""

    name: str
    kind: str  # type, or the allowed values
    default: str  # as YAML, empty for null
    text: str


def key_groups(
    parser: jsonargparse.ArgumentParser, shown: Callable[[str], bool] = lambda name: True
) -> List[Tuple[str, List[Key]]]:
    """The keys of a parser, with the title of each group.

    Args:
        parser: with groups of options, as jsonargparse makes them of dataclasses.
        shown: whether a key, by its name, is listed.
    """
    groups = []
    for group in parser._action_groups:
        actions = [
            a for a in group._group_actions if a.help and not a.dest.startswith(("help", "print_")) and shown(a.dest)
        ]
        keys = [
            Key(a.dest, _kind(getattr(a, "_typehint", None)), _plain(a.default), " ".join(a.help.split()))
            for a in actions
            if a.default != "==SUPPRESS=="  # a whole section as one option
        ]
        if keys:
            groups.append((group.title, keys))
    return groups


def help_text(prog: str, groups: List[Tuple[str, List[Key]]], about: Optional[str], width: Optional[int] = None) -> str:
    """The text of `--help`: at most two lines of text a key. With `about`, the whole text of the keys whose names begin with it, or with one of several.

    Args:
        prog: name of the script.
        groups: see `key_groups`.
        about: what follows `--help` on the command line.
        width: of a line; left out: the terminal's, at least 80.

    Raises:
        ValueError: no key begins with `about`.
    """
    width = max(80, width or shutil.get_terminal_size().columns)
    if about:
        found = []
        for name in about.split():
            own = [key for _, keys in groups for key in keys if key.name == name or key.name.startswith(name + ".")]
            if not own:
                raise ValueError(f"--help {name}: no such key or section")
            found += own
        return "\n\n".join(f"--{k.name} {k.default}\n  {k.kind}\n  {k.text}" for k in found)
    lines = [f"usage: {prog} [--config FILE] [--KEY VALUE ...]", ""]
    lines += [
        "FILE is a YAML file, or a configuration of the package such as cls/NAME.",
        "A key comes with its default here. In names - and _ are the same.",
        "",
    ]
    for title, keys in groups:
        lines += [f"{title}:", *(line for key in keys for line in _lines(key, width)), ""]
    return "\n".join(
        [*lines, f"The whole text of a key or section: {prog} --help KEY ...", "of all keys: docs/reference/config.md"]
    )


def _lines(key: Key, width: int) -> List[str]:
    """The key with its default, then what it is, and what it does where it is left out."""
    name = f"  --{key.name} {key.default}".rstrip()
    text = re.split(r"(?<=[^.])[.;] |[:;]? *$", key.text)[0].rstrip(".:;")
    left_out = re.search(r"; (left out: .+?)(?=[.;] |[.;]?$)", key.text)
    if left_out:
        text += f"; {left_out[1]}"
    lines = textwrap.wrap(text, width - KEY_WIDTH - 2, max_lines=2, placeholder="...", break_on_hyphens=False)
    if len(name) > KEY_WIDTH:
        lines.insert(0, "")
    return [f"{name if number == 0 else '':{KEY_WIDTH}}  {line}".rstrip() for number, line in enumerate(lines)]


def _kind(hint: Any) -> str:
    """A type as people write it: allowed values of a Literal, `or null` for an Optional."""
    inner = typing.get_args(hint)
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) is typing.Union:
        return " or ".join(_kind(kind) for kind in inner)
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(map(str, inner))
    if typing.get_origin(hint) in (list, tuple):
        return f"[{', '.join(_kind(kind) for kind in inner)}{', ...' if typing.get_origin(hint) is list else ''}]"
    if typing.get_origin(hint) is dict:
        return "mapping"
    return {str: "text", None: "text"}.get(hint) or getattr(hint, "__name__", str(hint))


def _plain(default: Any) -> str:
    if default is None:
        return ""
    return default if isinstance(default, str) else json.dumps(default)
