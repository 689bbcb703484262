"""From `--config FILE` and `--key.sub value` to the dataclasses of `config`, with one line for every mistake."""

from __future__ import annotations

import dataclasses
import difflib
import os
import typing
from pathlib import Path
from typing import List

import jsonargparse
import yaml

from moh_vision.config import FREE_KEYS, Flags, RunConfig


def parse_config(kind, argv: List[str], prog: str):
    """Read `--config FILE` and `--key.sub value` overrides.

    Args:
        kind: the dataclass to fill; a RunConfig also takes --dry-run, --fresh and --allow-change.
        argv: command line without the program; - and _ are the same in option names.
        prog: name of the script.

    Returns:
        (config, Flags or None)

    Raises:
        ValueError: one line that names the key, the value and what is allowed.
    """
    argv = [_underscored(token) for token in argv]
    is_run = issubclass(kind, RunConfig)
    known = list(_leaf_keys(kind))
    flags = ["config", "print_config", "help"] + [f.name for f in dataclasses.fields(Flags) if is_run]
    _refuse_unknown_options(argv, known, flags)
    parser = jsonargparse.ArgumentParser(prog=prog, exit_on_error=False, allow_abbrev=False, default_env=False)
    parser.add_argument("--config", action="config", help="YAML file; later options override it")
    if is_run:
        parser.add_argument("--dry_run", action="store_true", help="print model, budget, parameters and MACs, and stop")
        parser.add_argument("--fresh", action="store_true", help="move an earlier run in --output aside and start over")
        parser.add_argument(
            "--allow_change", action="append", default=[], metavar="KEY", help="resume although KEY has changed"
        )
    parser.add_class_arguments(kind)
    for path in _config_files(argv):
        _refuse_unknown_keys(path, kind, flags)
    try:
        namespace = parser.parse_args(argv)
        built = parser.instantiate(namespace)
        config = kind(**{f.name: built[f.name] for f in dataclasses.fields(kind)})
    except (jsonargparse.ArgumentError, TypeError) as error:
        raise ValueError(" ".join(str(error).replace("Parser key", "key").split())) from None
    if not is_run:
        return config, None
    for key in namespace.allow_change:
        if key not in known:
            raise ValueError(f"--allow-change {key}: {_unknown_key(key, known)}")
    return config, Flags(namespace.dry_run, namespace.fresh, list(namespace.allow_change))


def changed_keys(old: dict, new: dict, allowed: List[str]) -> List[str]:
    """Keys, with both values, that differ between two saved configurations and may not."""
    old, new = _flat(old), _flat(new)
    keys = [
        k for k in sorted(set(old) | set(new)) if k not in FREE_KEYS and k not in allowed and old.get(k) != new.get(k)
    ]
    return [f"{k}: {old.get(k)!r} -> {new.get(k)!r}" for k in keys]


def _flat(tree: dict) -> dict:
    """Dotted keys; the only dicts at the top are sections, and dicts inside a section are values."""
    flat = {}
    for key, value in tree.items():
        flat.update({f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value})
    return flat


def _sections(known: List[str]) -> set:
    return {key.partition(".")[0] for key in known if "." in key}


def _underscored(token: str) -> str:
    if not token.startswith("--"):
        return token
    name, equals, value = token.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _leaf_keys(kind, prefix: str = ""):
    hints = typing.get_type_hints(kind)
    for f in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[f.name]):
            yield from _leaf_keys(hints[f.name], f"{prefix}{f.name}.")
        else:
            yield prefix + f.name


def _unknown_key(key: str, known: List[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not near:  # a right name under a wrong section, or without its section
        near = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    return f"unknown key '{key}'" + (f", did you mean '{near[0]}'?" if near else f"; known: {', '.join(known)}")


def _refuse_unknown_options(argv: List[str], known: List[str], flags: List[str]) -> None:
    sections = _sections(known)
    for token in argv:
        key = token[2:].partition("=")[0]
        if token.startswith("--") and key not in known and key not in flags and key not in sections:
            inside = any(key.startswith(k + ".") for k in ("model.kwargs", "model.router_kwargs"))
            if not inside:
                raise ValueError(_unknown_key(key, known + flags))


def _config_files(argv: List[str]):
    for i, token in enumerate(argv):
        if token == "--config" and i + 1 < len(argv):
            yield argv[i + 1]
        elif token.startswith("--config="):
            yield token.partition("=")[2]


def _refuse_unknown_keys(path: str, kind, flags: List[str]) -> None:
    if not os.path.isfile(path):
        raise ValueError(f"--config {path}: no such file")
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ValueError(f"--config {path}: expected keys and values, found {type(tree).__name__}")
    known = list(_leaf_keys(kind))
    sections = _sections(known)
    for flag in flags:  # --print_config writes them too
        tree.pop(flag, None)

    def walk(node: dict, prefix: str):
        for key, value in node.items():
            full = f"{prefix}{key}"
            if full in sections:
                if not isinstance(value, dict):
                    raise ValueError(f'{path}: key "{full}" is a section of keys, got {value!r}')
                walk(value, full + ".")
            elif full not in known:
                raise ValueError(f"{path}: {_unknown_key(full, known + sorted(sections))}")

    walk(tree, "")
