"""Read `--config FILE` and `--section.key value` into a configuration, with one-line messages; write --help."""

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from moh_vision.common.errors import message_of, nearest, reason_of
from moh_vision.common.imports import import_files
from moh_vision.common.io import RUN_CONFIG, run_of
from moh_vision.common.progress import say
from moh_vision.common.wings import WINGS
from moh_vision.engine.keys import (
    Key,
    Section,
    as_type,
    flat,
    idle_keys,
    key,
    keys_of,
    needs_of,
    unknown_key,
)

SHIPPED = Path(__file__).parents[1] / "configs"  # the configurations of the package
MAX_BYTES = 2**20  # largest size of a configuration file
# Deepest nesting of values in values, and longest chain of files of which each is the base of the one before.
MAX_DEPTH = 20
# Width of the column of keys in --help. The text of a longer key begins on the next line.
KEY_WIDTH = 32


@dataclass
class _Asked(Section):
    """Options of every script that are not keys of a configuration."""

    config: str = key("", kept=False)
    """YAML file, or a configuration of the package such as cls/NAME; options override it. `base: FILE` in it names another
    one, whose keys it takes where it has none of its own."""
    print_config: bool = key(False, kept=False)
    """Print the whole configuration as YAML, and stop."""
    help: list[str] | None = key(None, kept=False)
    """KEY ...: the whole text of keys or sections."""


class SavedConfig(NamedTuple):
    """The config.yaml of a run, which is read once and then passed around.

    Attributes:
        file: path of the file.
        text: text of the file.
        values: the values that the text holds; a dict, unless somebody has edited the file.
    """

    file: Path
    text: str
    values: Any


def saved_config(run: Path) -> SavedConfig | None:
    """Read the config.yaml in a folder; return None if there is none."""
    file = run / RUN_CONFIG
    if not file.is_file():
        return None
    _refuse_large(file, str(file))
    text = file.read_text("utf-8", "surrogateescape")  # `load` refuses broken UTF-8
    return SavedConfig(file, text, load(text, str(file)))


def parse_config(
    config_class: type, argv: list[str] | None, prog: str, saved: SavedConfig | None = None
) -> Any:
    """Read the command line of a script into a configuration: options override files, later files earlier ones.

    Raise ValueError for a key that has no effect beside the other keys, see `idle_keys`. --help and --print_config end
    the process.

    Args:
        config_class: class of the configuration. If it has `runs`, it opens a run: without --config the configuration
            of the run in --checkpoint is read, and keys in files that `config_class` lacks are ignored.
        argv: the command line without the program; None: that of the process.
        prog: name of the script.
        saved: a config.yaml that has been read already, and is not read again.
    """
    keys = keys_of(config_class)
    if argv is None:
        argv = sys.argv[1:]
    files: list[str] = []
    options: dict[str, Any] = {}
    for name, value in _options(argv, keys | keys_of(_Asked)):
        if name == "config":
            files.append(value)
        elif name in keys and isinstance(options.get(name), list):
            options[name] = options[name] + value  # the option was given before; both lists count
        else:
            options[name] = value
    if "help" in options:
        say(help_text(prog, config_class, options["help"]))
        raise SystemExit(0)
    runs = config_class.runs
    if runs and options.get("checkpoint") and not files:
        run_config = run_of(options["checkpoint"]) / RUN_CONFIG
        if run_config.is_file():
            files = [str(run_config)]
    values: dict[str, Any] = {}  # by dotted name
    origins: dict[str, str] = {}  # the file of each value, for messages
    for file in files:
        for name, value, origin in _file_entries(file, config_class, prog, saved):
            key_name = _key_of(name, keys)
            if key_name in keys:
                values[key_name] = _changed(values, key_name, name, value)
                origins[key_name] = origin
    prints = options.pop("print_config", False)
    given: set[str] = set()
    for name, value in options.items():
        key_name = _key_of(name, keys)
        values[key_name] = _changed(values, key_name, name, value)
        given.add(key_name)
    # Check the types of values from files here, where the message can name the file.
    for name, origin in origins.items():
        if name not in given:
            keys[name].as_type(values[name], name, f"{origin}: ")
    _import(values, given, runs, origins.get("imports"))
    config = _without_idle(_make(config_class, values), values, given, ", ".join(files), prog)
    config.given = frozenset(given)
    if prints:
        say(dump(config.tree()))
        raise SystemExit(0)
    return config


def _import(values: dict[str, Any], given: set[str], runs: type | None, file: str | None) -> None:
    """Import the files of --imports, so that what they register is known before the configuration is checked.

    A configuration in `file` must not name code that the command line does not name. That of a run that is opened may,
    because the model may do without: there its files are left out.
    """
    files = values.pop("imports", [])
    if "imports" in given:
        values["imports"] = files
        import_files(files)
    elif files and not runs:
        named = " ".join(files)
        raise ValueError(
            f"{file}: imports {named} is code, which is imported only if the command line says so: --imports {named}"
        )


def _file_entries(
    file: str, config_class: type, prog: str, saved: SavedConfig | None
) -> Iterator[tuple[str, Any, str]]:
    """Return an iterator over (dotted key, value, origin) of a file; see `parse_config` for the arguments."""
    known = keys_of(config_class)
    script = prog
    if config_class.runs:  # the file may be the configuration of a training run, with its keys
        known = keys_of(config_class.runs) | known
        script = ""
    if saved is not None and Path(file) == saved.file:
        return _entries(saved.values, saved.file, known, script)
    return _read(file, known, script)


def _make(config_class: type, values: dict[str, Any]) -> Any:
    """Make a configuration from values by dotted name."""
    for name, known in keys_of(config_class).items():
        if known.default is MISSING and values.get(name) is None:
            raise ValueError(f"--{name} is needed: {known.text}")
    arguments = {}
    for f in fields(config_class):
        start = f"{f.name}."
        section = {
            name.removeprefix(start): value
            for name, value in values.items()
            if name.startswith(start)
        }
        if section:
            # Begin with the field's defaults, which may differ from those of the section's class.
            arguments[f.name] = replace(f.default_factory(), **section)
        elif f.name in values:
            arguments[f.name] = values[f.name]
    return config_class(**arguments)


def _without_idle(
    config: Section, values: dict[str, Any], given: set[str], files: str, prog: str
) -> Any:
    """Raise ValueError for a key that has no effect; drop the key instead if a file gives it and an option disables it.

    A printed line names the dropped keys. Values such as false and null are always allowed, and defaults in files too.

    Args:
        config: the configuration, made from `values`.
        values: values from files and options, by dotted name.
        given: names of the keys that options give.
        files: the files, for messages.
        prog: the script, for messages.
    """
    left_out: dict[str, str] = {}
    for name, needed, deciding_keys in idle_keys(config):
        value = attrgetter(name)(config)
        if name not in values or not value:
            continue
        if name not in given and value == keys_of(type(config))[name].default:
            continue
        option_decides = bool(given & deciding_keys)
        if name in given or not option_decides:
            problem = f"{name} {value!r} needs {needed}, and has no effect otherwise"
            if files and name not in given:
                problem = f"--config {files}: {problem}"
            raise ValueError(problem)
        left_out[name] = f"{name} {value!r} (needs {needed})"
    if not left_out:
        return config
    if os.environ.get("LOCAL_RANK", "0") == "0":
        listed = ", ".join(left_out.values())
        print(f"{prog}: left out of {files}, without effect here: {listed}", file=sys.stderr)
    return _make(type(config), {name: values[name] for name in values if name not in left_out})


def named_options(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, texts) of every option: "--lr 1" and "--lr=1" have the name "lr" and the texts ["1"]."""
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "-h":
            token = "--help"
        if not token.startswith("--"):
            raise ValueError(f"unrecognized argument {token}")
        name, equals, text = token[2:].partition("=")
        name = name.replace("-", "_")
        texts = []
        if equals:
            texts.append(text)
        while not equals and rest and not rest[0].startswith("--"):
            texts.append(rest.pop(0))
        yield name, texts


def _options(argv: list[str], keys: dict[str, Key]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of every option; for an option that names a section, yield each key of its value."""
    for name, texts in named_options(argv):
        option = f"--{name}"
        if name in keys:
            yield name, _value(name, texts, keys[name])
        elif _key_of(name, keys) in keys:
            yield name, load(_single(name, texts), option)
        elif any(known.startswith(f"{name}.") for known in keys):
            yield from _known({name: load(_single(name, texts), option)}, keys, option)
        else:
            raise ValueError(unknown_key(name, keys))


def _value(name: str, texts: list[str], known: Key) -> Any:
    """Convert the texts behind an option to the key's type.

    The first reading that fits the type counts. A single text is read as YAML, then as plain text; after that, all
    texts are read as a list of YAML values, then as a list of plain texts.
    """
    if name == "help":
        return texts or [""]
    if not texts and takes_true(known.hint):  # --key alone means true
        return True
    values = [load(text, f"--{name}", text) for text in texts]
    readings: list[Any] = []
    if len(texts) == 1:
        readings += [values[0], texts[0]]
    if texts:
        readings += [values, texts]
    for reading in readings:
        try:
            return as_type(known.hint, reading)
        except TypeError:
            pass
    if len(texts) == 1:
        return values[0]  # `Section` refuses the type, with a message that names the key
    return _single(name, texts)


def takes_true(hint: Any) -> bool:
    """Return whether `true` is a value of a key of this type."""
    try:
        return as_type(hint, True) is True
    except TypeError:
        return False


def _single(name: str, texts: list[str]) -> str:
    """Return the one text behind an option; raise ValueError if there are more or none."""
    if len(texts) != 1:
        raise ValueError(f'key "{name}": Expected one value. Got {" ".join(texts) or "none"}')
    return texts[0]


def _key_of(name: str, keys: dict[str, Key]) -> str:
    """Return the key that a name sets: for an entry of a mapping, such as model.kwargs.NAME, model.kwargs."""
    for mapping, known in keys.items():
        if name.startswith(f"{mapping}.") and known.takes_mapping:
            return mapping
    return name


def _changed(values: dict[str, Any], key_name: str, name: str, value: Any) -> Any:
    """Return what `values` should hold for a key once `name` is set: the key itself, or an entry of its mapping."""
    path_inside = name[len(key_name) :].split(".")[1:]
    return _put(values.get(key_name), path_inside, value)


def _put(earlier: Any, path: list[str], value: Any) -> Any:
    """Return a copy of the mapping `earlier` with `value` at a path of nested keys; an empty path gives `value`."""
    if not path:
        return value
    mapping = {}
    if isinstance(earlier, dict):
        mapping = earlier
    return {**mapping, path[0]: _put(mapping.get(path[0]), path[1:], value)}


class WrittenTwice(ValueError):
    """A YAML text has a key twice in one mapping."""

    def __init__(self, name: Any, line: int, first: int):
        before = f"on line {first} already"
        if line == first:
            before = "in it twice"
        super().__init__(f"line {line}: {name!r} is {before}; keep one of the two")


class _Loader(yaml.SafeLoader):
    """Loads plain values from YAML; refuses aliases, deep nesting and keys that are there twice.

    Unlike for PyYAML, 1e-3 is a number, and no, 1:30 and 2001-01-01 are texts, as in YAML 1.2.
    """

    yaml_implicit_resolvers: dict = {}
    depth = 0

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):  # aliases of aliases can expand beyond memory
            raise ValueError(f"an alias, *{self.peek_event().anchor}; write the value out")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"values inside values, more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node, deep=False):
        first_lines: dict = {}
        for key_node, _ in node.value:
            name = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(name, Hashable):
                continue  # super().construct_mapping refuses it
            if name in first_lines:  # YAML forbids this, but PyYAML silently keeps the last value
                raise WrittenTwice(name, line, first_lines[name])
            first_lines[name] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Dumps plain values; quotes texts that `_Loader` would not read as texts."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_NUMBER = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
_PLAIN_FORMS = dict(  # tag -> form of the unquoted values that have it, as in YAML 1.2
    null="~|null|Null|NULL|",
    bool="true|True|TRUE|false|False|FALSE",
    int=r"[-+]?(0|[1-9][0-9]*)",
    float=_NUMBER + r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
)
for _tag, _form in _PLAIN_FORMS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_form})\\Z"), None)


def load(text: str, where: str, otherwise: str | None = None) -> Any:
    """Return the plain values of a YAML text.

    If the text is not YAML, return `otherwise`, or without it raise ValueError, which begins with `where`.
    """
    try:
        return _Loader(text).get_single_data()
    except WrittenTwice as error:
        raise ValueError(f"{where}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if otherwise is not None:
            return otherwise
        raise ValueError(f"{where}: not readable as YAML: {message_of(error)}") from None


def load_as(file: Path, text: str) -> Any:
    """Return the plain values in the text of a YAML or JSON file; raise ValueError, naming it, for broken text."""
    if file.suffix == ".yaml":
        return load(text, str(file))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not readable ({reason_of(error)})") from None


def load_tree(file: Path, option: str = "") -> dict:
    """Return the keys and values of a YAML file; messages name `option`, which named the file."""
    where = f"{option} {file}".strip()
    tree = load(file.read_text("utf-8", "surrogateescape"), where)  # `load` refuses broken UTF-8
    if tree is None:
        raise ValueError(f"{where}: the file is empty; expected keys and values")
    if not isinstance(tree, dict):
        raise ValueError(f"{where}: expected keys and values, found {type(tree).__name__}")
    return tree


def dump(tree: dict) -> str:
    """Return the YAML text of plain values, in their order."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)


def _read(
    name: str,
    keys: dict[str, Key],
    prog: str,
    folder: Path = Path(),
    option: str = "--config",
    upon: int = 0,
) -> Iterator[tuple[str, Any, str]]:
    """Yield (dotted key, value, origin) of a configuration file, first those of the file that is its base.

    Args:
        name: path of the file, relative to `folder`, or the name of a configuration of the package.
        keys: known keys by name.
        prog: the script that reads the file, for the message about a file that another script takes; "": any script.
        folder: the folder to which paths are relative.
        option: the option or key that named the file, for messages.
        upon: number of files of which this one is the base, directly or not.
    """
    short = name.removeprefix("configs/").removesuffix(".yaml")
    path = next((p for p in (folder / name, SHIPPED / f"{short}.yaml") if p.is_file()), None)
    if path is None:
        problem = f"{option} {name}: no such file"
        shipped = [f"{file.parent.name}/{file.stem}" for file in SHIPPED.glob("*/*.yaml")]
        near = nearest(short, shipped, 1)
        if near:
            problem += f", did you mean {near[0]}?"
        raise ValueError(problem)
    _refuse_large(path, f"{option} {path}")
    yield from _entries(load_tree(path, option), path, keys, prog, upon)


def _refuse_large(path: Path, where: str) -> None:
    """Raise ValueError for a file of more than MAX_BYTES."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{where}: {size} bytes, a configuration has at most {MAX_BYTES}")


def _entries(
    tree: dict, path: Path, keys: dict[str, Key], prog: str, upon: int = 0
) -> Iterator[tuple[str, Any, str]]:
    """Yield (dotted key, value, origin) of `tree`, the values of a file, first those of its base; see `_read`."""
    tree = dict(tree)
    base = tree.pop("base", None)
    if base is not None:
        if not isinstance(base, str) or upon >= MAX_DEPTH:
            raise ValueError(
                f"{path}: base {base!r}: expected a file, and at most {MAX_DEPTH} of them upon each other"
            )
        yield from _read(base, keys, prog, path.parent, f"{path}: base", upon + 1)
    scripts = {wing.configurations: wing.script for wing in WINGS.values()}
    script = scripts.get(path.parent.name, prog)
    origin = str(path)
    if prog and script != prog:
        origin = f"{script} takes this file; {path}"
    for name, value in _known(tree, keys, origin):
        yield name, value, origin


def _known(tree: dict, keys: dict[str, Key], where: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of a tree; raise ValueError, which begins with `where`, for an unknown key."""
    found: set[str] = set()
    for name, value in flat(tree, keys):
        if name in found:  # for example as "model.depth", and as "depth" in section "model"
            raise ValueError(f"{where}: {name} is there twice; keep one of the two")
        for other in found:
            if name.startswith(f"{other}.") or other.startswith(f"{name}."):
                raise ValueError(
                    f"{where}: {name} and {other} set the same entry; keep one of the two"
                )
        found.add(name)
        key_name = _key_of(name, keys)
        if key_name not in keys:
            if any(known.startswith(f"{name}.") for known in keys):
                raise ValueError(f'{where}: key "{name}" is a section of keys, got {value!r}')
            if "kind" in keys:
                wing = tree.get("kind")
                expected = keys["kind"].default
                if expected and wing and wing != expected:
                    raise ValueError(f"{where}: kind {wing}, not {expected}")
            raise ValueError(f"{where}: {unknown_key(name, keys)}")
        if not keys[key_name].options["kept"]:
            raise ValueError(
                f"{where}: {name} is an option of one call, which no file holds: --{name}"
            )
        yield name, value


def groups_of(config_class: type) -> list[tuple[str, dict[str, Key]]]:
    """Return (title, keys by name) of groups of keys: options of every script, keys outside sections, each section."""
    groups: dict[str, dict[str, Key]] = {"": {}}
    for name, known in keys_of(config_class).items():
        groups.setdefault(name.rpartition(".")[0], {})[name] = known
    titled = [("Options of every script", keys_of(_Asked))]
    for keys in groups.values():
        first = next(iter(keys.values()))
        title = re.split(r"\.(?=\s|$)", first.section_class.__doc__)[0]
        titled.append((title, keys))
    return titled


def default_of(known: Key) -> str:
    """Return a key's default as YAML, or "" if it is null or if there is none."""
    if known.default is None or known.default is MISSING:
        return ""
    if isinstance(known.default, str):
        return known.default
    return json.dumps(known.default)


def help_text(prog: str, config_class: type, names: list[str]) -> str:
    """Return the text of --help: up to two lines of text per key, or the whole text of keys and sections in `names`."""
    words = [word for text in names for word in text.split()]
    if words:
        return _whole_texts(config_class, words)
    width = max(80, shutil.get_terminal_size().columns)
    lines = [f"usage: {prog} [--config FILE] [--KEY VALUE ...]", ""]
    lines += ["A key comes with its default here. In names - and _ are the same.", ""]
    for title, keys in groups_of(config_class):
        lines.append(f"{title}:")
        for name, known in keys.items():
            lines += _lines(name, known, width)
        lines.append("")
    return "\n".join([*lines, f"The whole text of a key or section: {prog} --help KEY ..."])


def _whole_texts(config_class: type, words: list[str]) -> str:
    """Return the whole text of the keys and sections that `words` name, with or without dashes."""
    all_keys = keys_of(_Asked) | keys_of(config_class)
    texts = []
    for word in words:
        name = word.removeprefix("--").replace("-", "_")
        # In the order of the short help: keys outside sections come first.
        found = [
            (known_name, known)
            for _, keys in groups_of(config_class)
            for known_name, known in keys.items()
            if known_name == name or known_name.startswith(f"{name}.")
        ]
        if not found:
            raise ValueError(f"--help {name}: no such key or section")
        for known_name, known in found:
            head = f"--{known_name} {default_of(known)}"
            text = f"{known.text} {needs_of(known_name, all_keys)}"
            texts.append(f"{head}\n  {known.allowed}\n  {text}".rstrip())
    return "\n\n".join(texts)


def _lines(name: str, known: Key, width: int) -> list[str]:
    """Return the lines of --help for a key: its name and default, then the first sentence of its text.

    The part of the text that begins with "left out:" is kept too.
    """
    head = f"  --{name} {default_of(known)}".rstrip()
    text = re.split(r"(?<=[^.])[.;] |[:;]? *$", known.text)[0].rstrip(".:;")
    left_out = re.search(r"; (left out: .+?)(?=[.;] |[.;]?$)", known.text)
    if left_out:
        text += f"; {left_out[1]}"
    lines = textwrap.wrap(
        text, width - KEY_WIDTH - 2, max_lines=2, placeholder="...", break_on_hyphens=False
    )
    if len(head) > KEY_WIDTH:
        lines.insert(0, "")
    left = [head] + [""] * len(lines)
    return [f"{cell:{KEY_WIDTH}}  {line}".rstrip() for cell, line in zip(left, lines)]
