"""From `--config FILE` and `--key.sub value` to the dataclasses of the configurations, with one line for every mistake."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import typing
from pathlib import Path
from typing import Any, Dict, List, Optional, Set

import jsonargparse
import yaml

from moh_vision.engine.commands import message_of, nearest
from moh_vision.engine.config import FREE_KEYS, LATER_KEYS, Flags, RunConfig, config_file
from moh_vision.engine.effects import VALIDATION_KEYS, idle_keys
from moh_vision.engine.io import run_of

FREE_FORM = ("model.kwargs", "model.router_kwargs", "model.convert")  # mappings whose keys are the model's
MAX_BYTES = 2**20  # of a configuration
MAX_DEPTH = 20


def parse_config(kind, argv: Optional[List[str]], prog: str, to_validate: bool = False):
    """Read `--config FILE` and `--key.sub value` overrides.

    A key that has no effect beside the others (see `effects`) is refused. If an option on the command line makes
    a key of the file ineffective, the key is left out instead, and a line on stderr says so.

    Args:
        kind: the dataclass to fill; a RunConfig also takes --dry-run, --fresh and --allow-change.
        argv: command line without the program, None: that of the process; - and _ are the same in option names.
        prog: name of the script.
        to_validate: instead of these take --checkpoint, whose run's config.yaml is read where there is no --config, and
            only options that validation reads.

    Returns:
        (config, Flags or None)

    Raises:
        ValueError: one line that names the key, the value and what is allowed.
    """
    argv = sys.argv[1:] if argv is None else argv
    argv = _paired(_switched_on(_named([_underscored(token) for token in argv]), kind), kind)
    is_run = issubclass(kind, RunConfig) and not to_validate
    known = list(_leaf_keys(kind))
    flags = ["config", "print_config", "help"] + ["dry_run", "fresh", "allow_change"] * is_run
    flags += ["checkpoint"] * to_validate
    _refuse_unknown_options(argv, known, flags)
    given = _given(argv)
    _refuse_strange_values(argv, kind)
    if to_validate:
        argv = _with_the_runs_config(argv)
    for path in _config_files(argv):
        _refuse_unknown_keys(path, kind, flags)
    parser = jsonargparse.ArgumentParser(prog=prog, exit_on_error=False, allow_abbrev=False, default_env=False)
    parser.add_argument("--config", action="config", help="YAML file; later options override it")
    if is_run:
        parser.add_argument("--dry_run", action="store_true", help="print model, budget, parameters and MACs, and stop")
        parser.add_argument("--fresh", action="store_true", help="move an earlier run in --output aside and start over")
        parser.add_argument(
            "--allow_change", action="append", default=[], metavar="KEY", help="resume although KEY has changed"
        )
    if to_validate:
        parser.add_argument("--checkpoint", metavar="PATH", help="run, its checkpoint, or weights for model.*")
    parser.add_class_arguments(kind)
    try:
        namespace = parser.parse_args(argv)
        _refuse_nulls(namespace, kind)
        config = _built(kind, parser, namespace)  # before the next step, which compares values: they must be in range
        if to_validate:
            _refuse_for_validation(given)
        elif _leave_out_idle(namespace, parser.get_defaults(), given, known, argv, prog):
            config = _built(kind, parser, namespace)
    except (jsonargparse.ArgumentError, TypeError, RecursionError) as error:
        raise ValueError(_one_line(str(error))) from None
    if to_validate:
        if namespace.checkpoint is None:
            raise ValueError("--checkpoint PATH is needed: a run, its checkpoint, or weights for model.*")
        return config, Flags(checkpoint=namespace.checkpoint, given=given)
    if not is_run:
        return config, None
    for key in namespace.allow_change:
        if key not in known:
            raise ValueError(f"--allow-change {key}: {_unknown_key(key, known)}")
    return config, Flags(namespace.dry_run, namespace.fresh, list(namespace.allow_change), given)


def _built(kind, parser, namespace):
    built = parser.instantiate(namespace)
    return kind(**{f.name: built[f.name] for f in dataclasses.fields(kind)})


def _given(argv: List[str]) -> Set[str]:
    """Names of the options on the command line; model.kwargs for --model.kwargs.NAME."""
    options = {token[2:].partition("=")[0] for token in argv if token.startswith("--")}
    return {next((key for key in FREE_FORM if name.startswith(key + ".")), name) for name in options}


def _refuse_for_validation(given: Set[str]) -> None:
    """Raise ValueError for an option that validation does not read."""
    for name in sorted(given):
        read = name in ("config", "checkpoint", "data", *VALIDATION_KEYS)
        if not read and name.partition(".")[0] != "model":
            raise ValueError(f"{name} has no effect on a validation; allowed are model.*, {', '.join(VALIDATION_KEYS)}")


def _leave_out_idle(namespace, defaults, given: Set[str], known: List[str], argv: List[str], prog: str) -> bool:
    """Refuse keys without effect, or reset them to their defaults. Return whether any key was reset."""
    files, left_out = ", ".join(_config_files(argv)), {}
    for key, deciding, needed in idle_keys({k: namespace[k] for k in known}):
        value = namespace[key]
        if not value or (key not in given and value == defaults[key]):  # off anyway, or as it always is
            continue
        if key in given or not given.intersection(deciding):
            where = f"--config {files}: " if files and key not in given else ""
            raise ValueError(f"{where}{key} {value!r} needs {needed}, and has no effect otherwise")
        left_out[key] = f"{key} {value!r} (needs {needed})"
    for key in left_out:
        namespace[key] = defaults[key]
    if left_out and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{prog}: left out of {files}, without effect here: {', '.join(left_out.values())}", file=sys.stderr)
    return bool(left_out)


def _refuse_nulls(namespace, kind, prefix: str = "") -> None:
    """Raise ValueError for a null where the type has none, which jsonargparse lets through."""
    for f in dataclasses.fields(kind):
        hint, key = typing.get_type_hints(kind)[f.name], prefix + f.name
        if dataclasses.is_dataclass(hint):
            _refuse_nulls(namespace, hint, key + ".")
        elif namespace[key] is None and type(None) not in typing.get_args(hint):
            name = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            raise ValueError(f'key "{key}": Expected {name}. Got value: null')


def _one_line(message: str) -> str:
    """jsonargparse's message without its line breaks, its list of failed attempts and Python's names of types."""
    text = " ".join(message.replace("Parser key", "key").split())
    text = re.sub(r"<class '(\w+)'>|typing\.", r"\1", text).replace("NoneType", "null")
    union = re.match(r"(.*?)Does not validate against any of the Union subtypes Subtypes: \[(.*?)\] Errors: .*", text)
    if union is None:
        return text
    value = text.rpartition("Given value: ")[2]
    kinds = re.sub(r", (?![^\[]*\])", " or ", union[2])  # not the commas inside brackets
    return f"{union[1]}Expected {kinds}. Got value: {value}"


def changed_keys(old: dict, new: dict, allowed: List[str]) -> List[str]:
    """Keys, with both values, that differ between two saved configurations and may not.

    Raises:
        ValueError: if the old one is none.
    """
    if not isinstance(old, dict):
        raise ValueError(f"the config.yaml that is there holds no keys and values but {type(old).__name__}")
    old, new = LATER_KEYS | _flat(old), _flat(new)
    if old.get("optim.name") == "adam":  # as earlier versions called it
        old["optim.name"] = "adamw"
    # A run of an earlier version may have saved keys that have no effect.
    free = {*FREE_KEYS, *allowed, *(key for key, *_ in idle_keys(new))}
    keys = [
        k for k in sorted({*old, *new}) if k not in free and k.split(".")[0] not in free and old.get(k) != new.get(k)
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


def _named(argv: List[str]) -> List[str]:
    """The arguments, with the file behind a configuration that is given by its name."""
    before = ["", *argv]
    named = [f"--config={config_file(a[9:])}" if a.startswith("--config=") else a for a in argv]
    return [config_file(a) if b == "--config" else a for a, b in zip(named, before)]


def _switched_on(argv: List[str], kind) -> List[str]:
    """The arguments, with "true" after a switch that stands alone, as in `--compile --seed 1`."""
    switches = {f"--{key}" for key, hint in _leaf_keys(kind).items() if hint is bool}
    written = []
    for token, following in zip(argv, [*argv[1:], "--"]):
        written += [token, "true"] if token in switches and following.startswith("--") else [token]
    return written


def _paired(argv: List[str], kind) -> List[str]:
    """The arguments, with `--cfg_interval 0.1 0.8` as `--cfg_interval [0.1,0.8]`, for keys that hold two values."""
    pairs = {f"--{key}" for key, hint in _leaf_keys(kind).items() if typing.get_origin(hint) is tuple}
    written, rest = [], list(argv)
    while rest:
        written.append(rest.pop(0))
        if written[-1] in pairs and len(rest) > 1 and not any(token.startswith(("[", "--")) for token in rest[:2]):
            written.append(f"[{rest.pop(0)},{rest.pop(0)}]")
    return written


def _leaf_keys(kind, prefix: str = "") -> Dict[str, Any]:
    """Every dotted key of a dataclass, with its type."""
    hints, found = typing.get_type_hints(kind), {}
    for f in dataclasses.fields(kind):
        inside = dataclasses.is_dataclass(hints[f.name])
        found.update(_leaf_keys(hints[f.name], f"{prefix}{f.name}.") if inside else {prefix + f.name: hints[f.name]})
    return found


def _unknown_key(key: str, known: List[str]) -> str:
    near = nearest(key, known, 1)
    if not near:  # a right name under a wrong section, or without its section
        near = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    return f"unknown key '{key}'" + (f", did you mean '{near[0]}'?" if near else f"; known: {', '.join(known)}")


def _refuse_unknown_options(argv: List[str], known: List[str], flags: List[str]) -> None:
    sections = _sections(known)
    for token in argv:
        key = token[2:].partition("=")[0]
        if token.startswith("--") and key not in known and key not in flags and key not in sections:
            inside = any(key.startswith(k + ".") and key != k + "." for k in FREE_FORM)
            if not inside:
                raise ValueError(_unknown_key(key, known + flags))


def _refuse_strange_values(argv: List[str], kind) -> None:
    """Sections given as a whole, and values that hold a class for jsonargparse to make."""
    known = list(_leaf_keys(kind))
    for token, following in zip(argv, [*argv[1:], ""]):
        if not token.startswith("--"):
            continue
        key, equals, value = token[2:].partition("=")
        value = value if equals else following
        if key not in _sections(known) and "class_path" not in token + value:
            continue
        tree = _yaml(value, f"--{key} {value}")
        _refuse_classes({key: tree} if "class_path" not in key.split(".") else {"class_path": tree}, f"--{key}")
        if key in _sections(known):
            # Or jsonargparse would take the value for the name of another file.
            _walk({key: tree}, "", known, f"--{key}")


def _with_the_runs_config(argv: List[str]) -> List[str]:
    """The arguments, behind --config of the run that --checkpoint names, unless one is given."""
    values = [b for a, b in zip(argv, argv[1:]) if a == "--checkpoint"]
    values += [a.partition("=")[2] for a in argv if a.startswith("--checkpoint=")]
    if not values or any(_config_files(argv)):
        return argv
    saved = run_of(values[-1]) / "config.yaml"
    return ["--config", str(saved), *argv] if saved.is_file() else argv


def _config_files(argv: List[str]):
    for i, token in enumerate(argv):
        if token == "--config" and i + 1 < len(argv):
            yield argv[i + 1]
        elif token.startswith("--config="):
            yield token.partition("=")[2]


def _refuse_unknown_keys(path: str, kind, flags: List[str]) -> None:
    if not os.path.isfile(path):
        raise ValueError(f"--config {path}: no such file")
    if os.path.getsize(path) > MAX_BYTES:
        raise ValueError(f"--config {path}: {os.path.getsize(path)} bytes, a configuration has at most {MAX_BYTES}")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--config {path}: not readable as YAML: {error}") from None
    tree = _yaml(text, f"--config {path}")
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ValueError(f"--config {path}: expected keys and values, found {type(tree).__name__}")
    for flag in flags:  # --print_config writes them too
        tree.pop(flag, None)
    _walk(tree, "", list(_leaf_keys(kind)), path)
    _refuse_classes(tree, path)


def _yaml(text: str, where: str):
    """The plain values that a YAML text means; ValueError, naming `where`, if it is none."""
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:  # the time to read it grows with the square
                raise ValueError(f"values inside values, more than {MAX_DEPTH} deep")
            # A few lines of aliases of aliases mean more values than memory holds.
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"an alias, *{event.anchor}; write the value out")
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not readable as YAML: {message_of(error)}") from None


def _walk(node: dict, prefix: str, known: List[str], where: str) -> None:
    """Raise ValueError for a key that is none."""
    sections = _sections(known)
    for key, value in node.items():
        full = f"{prefix}{key}"
        if full in sections:
            if not isinstance(value, dict):
                raise ValueError(f'{where}: key "{full}" is a section of keys, got {value!r}')
            _walk(value, full + ".", known, where)
        elif full not in known:
            raise ValueError(f"{where}: {_unknown_key(full, known + sorted(sections))}")


def _refuse_classes(node, where: str) -> None:
    """Raise ValueError for a class_path anywhere: jsonargparse would import that class and call it."""
    if isinstance(node, dict):
        if "class_path" in node:
            raise ValueError(
                f"{where}: key 'class_path' {node['class_path']!r}: values are plain, classes are not made"
            )
        for value in node.values():
            _refuse_classes(value, where)
    elif isinstance(node, list):
        for value in node:
            _refuse_classes(value, where)
