"""From `--config FILE` and `--key.sub value` to the dataclasses of the configurations, with one line for every mistake."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import typing
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Set, Tuple

import jsonargparse
import yaml

from moh_vision.engine.commands import message_of, nearest, say
from moh_vision.engine.config import (
    FORMER_DEFAULTS,
    FREE_KEYS,
    KEPT_KEYS,
    LATER_KEYS,
    Flags,
    RunConfig,
    config_file,
    shipped_configs,
)
from moh_vision.engine.effects import VALIDATION_KEYS, idle_keys
from moh_vision.engine.io import run_of
from moh_vision.engine.key_help import help_text, key_groups

FREE_FORM = ("model.kwargs", "model.router_kwargs", "model.convert")  # mappings whose keys are the model's
MAX_BYTES = 2**20  # of a configuration
MAX_DEPTH = 20
SCRIPTS = dict(cls="train_cls.py", dit="train_dit.py", text="train_text.py")  # by the folder of a configuration

# What other projects call a key, with or without a section before it, and which may be meant: the first one that the configuration has.
ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "base_lr"), ("optim.lr",)),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), ("optim.epochs", "max_steps")),
    **dict.fromkeys(("data.batch_size", "train_batch_size", "per_device_train_batch_size"), ("optim.batch_size",)),
    **dict.fromkeys(("out_dir", "save_dir", "resume"), ("output",)),
    **dict.fromkeys(("optimizer", "opt"), ("optim.name",)),
    **dict.fromkeys(("data_path", "dataset", "path"), ("data.root",)),
    **dict.fromkeys(("grad_clip", "max_grad_norm"), ("optim.clip_norm",)),
    **dict.fromkeys(("fp16", "bf16", "amp"), ("mixed_precision",)),
    "wd": ("optim.weight_decay",),
    "resolution": ("data.img_size",),
    "ckpt": ("checkpoint",),
}

# Options that a run does not remember: name, type, default, help.
RUN_FLAGS = (
    ("dry_run", bool, False, "print model, budget, parameters and MACs, and stop"),
    ("fresh", bool, False, "move an earlier run in --output aside and start over"),
    ("allow_change", List[str], [], "KEY: resume although it has changed; may be given several times"),
)
VALIDATION_FLAGS = (("checkpoint", Optional[str], None, "run, its checkpoint, folder of timm, or weights for model.*"),)
# What --print_config wrote beside the keys in earlier versions.
PRINTED = (
    "config", "print_config", "help", "validate_only", "head_load", *(name for name, *_ in RUN_FLAGS + VALIDATION_FLAGS),
)  # fmt: skip


def parse_config(kind, argv: Optional[List[str]], prog: str, to_validate: bool = False, more: tuple = ()):
    """Read `--config FILE` and `--key.sub value` overrides.

    A key that has no effect beside the others (see `effects`) is refused. If an option on the command line makes
    a key of the file ineffective, the key is left out instead, and a line on stderr says so.

    Args:
        kind: the dataclass to fill; a RunConfig also takes --dry-run, --fresh and --allow-change.
        argv: command line without the program, None: that of the process; - and _ are the same in option names.
        prog: name of the script.
        to_validate: instead of these take --checkpoint, whose run's config.yaml is read where there is no --config, and
            only options that validation reads.
        more: further options, as in RUN_FLAGS, for fields of `Flags`.

    Returns:
        (config, Flags or None)

    Raises:
        ValueError: one line that names the key, the value and what is allowed.
    """
    keys = _leaf_keys(kind)
    flags = (*(VALIDATION_FLAGS if to_validate else RUN_FLAGS if issubclass(kind, RunConfig) else ()), *more)
    switches = {name: hint for name, hint, *_ in flags} | dict(config=str, print_config=bool, help=bool)
    options = list(_options(sys.argv[1:] if argv is None else argv, keys, switches))
    about = dict(options).get("help")
    if about:
        groups = key_groups(
            _parser(kind, prog, flags), lambda key: not to_validate or key in switches or _read_by_validation(key)
        )
        say(help_text(prog, groups, "" if about == "true" else about.removeprefix("--").replace("-", "_")))
        raise SystemExit(0)
    given = {next((key for key in FREE_FORM if name.startswith(key + ".")), name) for name, _ in options}
    if to_validate:
        options = _with_the_runs_config(options)
    values: Dict[str, Any] = {}
    for name, text in options:
        if name == "config":
            try:
                values.update(_file_values(text, keys))
            except ValueError as error:
                script = SCRIPTS.get(Path(text).parent.name, prog)
                foreign = script != prog and not to_validate and os.path.isfile(text)
                raise ValueError(f"{script} takes this file; {error}" if foreign else f"{error}") from None
        elif name == "allow_change":
            values[name] = [*values.get(name, []), text]
        elif name != "print_config":
            values.update(_option_values(name, text, keys, values))
    parser = _parser(kind, prog, flags)
    try:
        namespace = parser.parse_object(values)
        for key, hint in keys.items():  # jsonargparse lets a null through where the type has none
            if namespace[key] is None and type(None) not in typing.get_args(hint):
                text = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
                raise ValueError(f'key "{key}": Expected {text}. Got value: null')
        config = _built(kind, parser, namespace)  # before the next step, which compares values: they must be in range
        files = ", ".join(text for name, text in options if name == "config")
        if to_validate:
            _refuse_for_validation(given.difference(switches))
        elif _leave_out_idle(namespace, parser.get_defaults(), given, keys, files, prog):
            config = _built(kind, parser, namespace)
    except (jsonargparse.ArgumentError, TypeError, RecursionError) as error:
        raise ValueError(_one_line(str(error))) from None
    if any(name == "print_config" for name, _ in options):
        for name in ("config", *(name for name, *_ in flags)):
            namespace.pop(name, None)
        say(parser.dump(namespace, skip_validation=True))
        raise SystemExit(0)
    if to_validate and namespace.checkpoint is None:
        raise ValueError(
            "--checkpoint PATH is needed: a run, its checkpoint, a folder that timm saved, or weights for model.*"
        )
    found = Flags(**{name: namespace[name] for name, *_ in flags}, given=given)
    for key in found.allow_change:
        if key not in keys and key not in KEPT_KEYS:
            raise ValueError(f"--allow-change {key}: {_unknown_key(key, [*keys, *KEPT_KEYS])}")
        if key == "optim.name":
            raise ValueError(
                "--allow-change optim.name: a checkpoint keeps the state of its own optimiser; init_from begins a run with its weights"
            )
    return config, found if flags else None


def _parser(kind, prog: str, flags) -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(prog=prog, exit_on_error=False, default_env=False)
    parser.add_argument("--config", help="YAML file; later options override it")
    for name, hint, default, text in flags:
        parser.add_argument(f"--{name}", type=hint, default=default, help=text)
    parser.add_class_arguments(kind)
    return parser


def _options(argv: List[str], keys: Dict[str, Any], switches: Dict[str, Any]) -> Iterable[Tuple[str, str]]:
    """(name, value) of every option: a switch that stands alone is true, several values of a list or pair become one."""
    rest, hints = list(argv), {**keys, **switches}
    while rest:
        token = rest.pop(0)
        token = "--help" if token == "-h" else token
        name, equals, value = token[2:].partition("=")
        name = name.replace("-", "_")
        if not token.startswith("--"):
            raise ValueError(f"unrecognized argument {token}")
        if name not in hints and name not in _sections(keys) and not any(_inside(name, key) for key in FREE_FORM):
            raise ValueError(_unknown_key(name, hints))
        found = [value] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            found.append(rest.pop(0))
        if hints.get(name) is bool and not found:
            found = ["true"]
        if tuple in map(typing.get_origin, (hints.get(name), *typing.get_args(hints.get(name)))) and len(found) == 2:
            found = [f"[{', '.join(found)}]"]
        if name == "help" and found:  # of several keys
            found = [" ".join(found)]
        if found and _lists_texts(keys.get(name)) and not found[0].startswith("["):
            found = [json.dumps(found)]
        if len(found) != 1:
            raise ValueError(f'key "{name}": Expected one value. Got {" ".join(found) or "none"}')
        yield name, config_file(found[0]) if name == "config" else found[0]


def _lists_texts(hint: Any) -> bool:
    """Whether a type is a list of texts, or null; its values may follow the option one by one."""
    kinds = [hint] if typing.get_origin(hint) is list else [k for k in typing.get_args(hint) if k is not type(None)]
    return len(kinds) == 1 and typing.get_origin(kinds[0]) is list and "Any" not in str(kinds[0])


def _inside(name: str, key: str) -> bool:
    return name.startswith(key + ".") and name != key + "."


def _option_values(name: str, text: str, keys: Dict[str, Any], earlier: dict) -> Dict[str, Any]:
    """Dotted keys and values that one option means; texts stay for jsonargparse to read as the key's type."""
    free = next((key for key in FREE_FORM if _inside(name, key)), None)
    # A section as text would be taken for the name of another file, and values of any type may hold a class.
    if not free and name not in _sections(keys) and "Any" not in str(keys.get(name)):
        return {name: text}
    value = _yaml(text, f"--{name} {text}")
    if free:  # --model.kwargs.NAME VALUE
        *outer, last = name[len(free) + 1 :].split(".")
        inner = whole = dict(earlier.get(free) or {})
        for part in outer:
            inner[part] = inner = dict(inner.get(part) or {})
        inner[last], value = value, whole
    return _checked({free or name: value}, keys, f"--{name}")


def _file_values(path: str, keys: Dict[str, Any]) -> Dict[str, Any]:
    """Dotted keys and values of a YAML file."""
    if not os.path.isfile(path):
        near = nearest(path.removeprefix("configs/").removesuffix(".yaml"), shipped_configs(), 1)
        raise ValueError(f"--config {path}: no such file{f', did you mean {near[0]}?' if near else ''}")
    if os.path.getsize(path) > MAX_BYTES:
        raise ValueError(f"--config {path}: {os.path.getsize(path)} bytes, a configuration has at most {MAX_BYTES}")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--config {path}: not readable as YAML: {error}") from None
    tree = _yaml(text, f"--config {path}")
    if not isinstance(tree, (dict, type(None))):
        raise ValueError(f"--config {path}: expected keys and values, found {type(tree).__name__}")
    return _checked(
        {key: value for key, value in (tree or {}).items() if key in keys or key not in PRINTED}, keys, path
    )


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
        return jsonargparse.get_loader("yaml")(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not readable as YAML: {message_of(error)}") from None


def _checked(tree: dict, keys: Dict[str, Any], where: str) -> Dict[str, Any]:
    """A tree as dotted keys and values; ValueError for a key that is none, and for a class."""
    _refuse_classes(tree, where)
    sections, flat = _sections(keys), _flat(tree, keys)
    for key, value in flat.items():
        if key in sections:
            raise ValueError(f'{where}: key "{key}" is a section of keys, got {value!r}')
        if key not in keys:
            section = key.partition(".")[0]
            raise ValueError(f"{where}: {_unknown_key(key if section in sections else section, [*keys, *sections])}")
    return flat


def _refuse_classes(node, where: str) -> None:
    """Raise ValueError for a class_path anywhere: jsonargparse would import that class and call it."""
    if isinstance(node, dict) and "class_path" in node:
        raise ValueError(f"{where}: key 'class_path' {node['class_path']!r}: values are plain, classes are not made")
    if isinstance(node, (dict, list)):
        for value in node.values() if isinstance(node, dict) else node:
            _refuse_classes(value, where)


def _built(kind, parser, namespace):
    built = parser.instantiate(namespace)
    return kind(**{f.name: built[f.name] for f in dataclasses.fields(kind)})


def _refuse_for_validation(given: Set[str]) -> None:
    """Raise ValueError for an option that validation does not read."""
    for name in sorted(given):
        if not _read_by_validation(name):
            raise ValueError(f"{name} has no effect on a validation; allowed are model.*, {', '.join(VALIDATION_KEYS)}")


def _read_by_validation(name: str) -> bool:
    return name in ("data", *VALIDATION_KEYS) or name.partition(".")[0] == "model"


def _with_the_runs_config(options: List[Tuple[str, str]]) -> List[Tuple[str, str]]:
    """The options, behind --config of the run that --checkpoint names, unless one is given."""
    named = dict(options)
    saved = run_of(named["checkpoint"]) / "config.yaml" if "checkpoint" in named else None
    if "config" in named or saved is None or not saved.is_file():
        return options
    return [("config", str(saved)), *options]


def _leave_out_idle(namespace, defaults, given: Set[str], known: Iterable[str], files: str, prog: str) -> bool:
    """Refuse keys without effect, or reset them to their defaults. Return whether any key was reset."""
    left_out = {}
    for key, deciding, needed in idle_keys({k: namespace[k] for k in known}):
        value = namespace[key]
        if not value or (
            key not in given and value in (defaults[key], FORMER_DEFAULTS.get(key))
        ):  # off anyway, or as it always is
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


def _one_line(message: str) -> str:
    """jsonargparse's message without its line breaks, its list of failed attempts and Python's names of types."""
    text = " ".join(message.replace("Parser key", "key").split())
    text = re.sub(r"<class '(\w+)'>|typing\.", r"\1", text).replace("NoneType", "null")
    text = re.sub(r"Expected an? ", "Expected ", text)  # "a int"
    union = re.match(r"(.*?)Does not validate against any of the Union subtypes Subtypes: \[(.*?)\] Errors: .*", text)
    if union is None:
        return text
    value = text.rpartition("Given value: ")[2]
    kinds = re.sub(r", (?![^\[]*\])", " or ", union[2])  # not the commas inside brackets
    return f"{union[1]}Expected {kinds}. Got value: {value}"


def _leaf_keys(kind, prefix: str = "") -> Dict[str, Any]:
    """Every dotted key of a dataclass, with its type."""
    hints, found = typing.get_type_hints(kind), {}
    for f in dataclasses.fields(kind):
        inside = dataclasses.is_dataclass(hints[f.name])
        found.update(_leaf_keys(hints[f.name], f"{prefix}{f.name}.") if inside else {prefix + f.name: hints[f.name]})
    return found


def _flat(tree: dict, keys: Iterable[str] = ()) -> Dict[str, Any]:
    """Dotted keys; dicts at the top that are no values of `keys` are sections, and dicts inside a section are values."""
    flat = {}
    for key, value in tree.items():
        inside = isinstance(value, dict) and key not in keys
        flat.update({f"{key}.{k}": v for k, v in value.items()} if inside else {str(key): value})
    return flat


def _sections(keys: Iterable[str]) -> Dict[str, None]:
    return {key.partition(".")[0]: None for key in keys if "." in key}


def _unknown_key(key: str, known: Iterable[str]) -> str:
    known = list(known)
    near = [k for k in ELSEWHERE.get(key, ELSEWHERE.get(key.partition(".")[2], ())) if k in known]
    # Else a right name without its section, or under a wrong one.
    same = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    near = near or ("." not in key and same) or nearest(key, known, 1) or same
    return f"unknown key '{key}'{f', did you mean {near[0]!r}?' if near else '; --help lists the known ones'}"


def changed_keys(old: dict, new: dict, allowed: List[str]) -> List[str]:
    """Keys, with both values, that differ between two saved configurations and may not.

    Raises:
        ValueError: if the old one is none.
    """
    if not isinstance(old, dict):
        raise ValueError(f"the config.yaml that is there holds no keys and values but {type(old).__name__}")
    old, new = _flat(old), _flat(new)
    old = {key: value for key, value in LATER_KEYS.items() if key in new} | old
    if old.get("optim.name") == "adam" and "generate.beam" in old:  # as earlier versions called it, for text
        old["optim.name"] = "adamw"
    # A run of an earlier version may have saved keys that have no effect.
    free = {*FREE_KEYS, *allowed, *(key for key, *_ in idle_keys(new))}
    keys = [
        k for k in sorted({*old, *new}) if k not in free and k.split(".")[0] not in free and old.get(k) != new.get(k)
    ]
    return [f"{k}: {old.get(k)!r} -> {new.get(k)!r}" for k in keys]
