"""Keys of configurations. Each is defined once, as a dataclass field with a string below it, its help text:

    batch_size: int = key(128, ge=1)
    "Images per step."

Types, limits, refusals, --help and the reference page are all made from these definitions.
"""

import ast
import dataclasses
import fnmatch
import functools
import inspect
import math
import operator
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar, NamedTuple

from moh_vision.common.errors import nearest

NUMBERS = dict(
    gt=("above", operator.gt),
    ge=("at least", operator.ge),
    lt=("below", operator.lt),
    le=("at most", operator.le),
)
# `Literal[...] | None` is a typing.Union, `int | None` is a UnionType.
UNIONS = (typing.Union, types.UnionType)


def key(default: Any = MISSING, **options: Any) -> Any:
    """Return a field of a `Section`. If a subclass defines a key again, options that it leaves out are inherited.

    Args:
        default: value if the key is not given; without a default the key must be given.
        gt, ge, lt, le: limit of a number, or of each number in a list: a number, or the name of a key of the section.
        rising: for a pair: the first number is below the second.
        ends: for a path: the allowed endings.
        needs: a condition without which the key has no effect: "KEY", "not KEY", "KEY=VALUE" or "KEY!=VALUE". A * in
            VALUE matches any text. " or " joins alternatives; "; " joins conditions that must all hold. ".KEY" is a key
            of the same section.
        also: names that other projects use for the key, with or without a section.
        names: a function that returns the end of the help text, where it names what may be registered later.
        free: whether a run may be resumed with another value.
        kept: whether configurations are saved with the key. If not, it is an option of a single call, and no file may
            have it.
    """
    assert set(options) <= {
        *NUMBERS,
        "rising",
        "ends",
        "needs",
        "also",
        "names",
        "free",
        "kept",
    }, options
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=options)
    return dataclasses.field(default=default, metadata=options)


class Idle(NamedTuple):
    """A condition under which keys have an effect, where `needs` of `key` cannot express it."""

    keys: str  # patterns of the keys' names, separated by spaces
    has_effect: Any  # whether the keys have an effect; only its truth value counts
    needs: str  # the condition in words
    deciding: str  # names of the keys that the condition depends on, separated by spaces


class Key(NamedTuple):
    """A key of a configuration, as `keys_of` finds it."""

    section_class: type  # the `Section` that has the key as a field
    field: str  # name of the field
    hint: Any  # type of the field
    default: Any
    options: dict[str, Any]  # options of `key`

    def as_type(self, value: Any, name: str, where: str = "") -> Any:
        """Return the value in the key's type; if it does not fit, raise ValueError, which begins with `where`."""
        try:
            return as_type(self.hint, value)
        except TypeError:
            got = str(value)[:200]
            if value is None:
                got = "null"
            problem = f"Expected {words_of(self.hint)}. Got value: {got}"
            raise ValueError(f'{where}key "{name}": {problem}') from None

    def check(self, value: Any, name: str, section: "Section") -> None:
        """Raise ValueError, naming the key, if a value is outside of the key's limits."""
        if not self._in_range(value, section):
            allowed = self.limits or "a finite number"
            if value == []:
                allowed = "at least one"
            raise ValueError(f"{name} {value!r} is out of range: {allowed}")

    def _in_range(self, value: Any, section: "Section") -> bool:
        numbers = list(_numbers(value))
        if not all(math.isfinite(number) for number in numbers if type(number) is float):
            return False
        if value == [] and self.default != []:
            return False  # an empty list is allowed only where it is the default
        for _, holds, bound in self.bounds:
            if isinstance(bound, str):  # the name of another key of the section
                bound = getattr(section, bound)
            if not all(holds(number, bound) for number in numbers):
                return False
        if self.options.get("rising") and value is not None and value[0] >= value[1]:
            return False
        if value and "ends" in self.options:
            return value.endswith(self.options["ends"])
        return True

    @property
    def bounds(self) -> list[tuple[str, Callable, Any]]:
        """(words, comparison, bound) of each limit of the key's numbers."""
        return [
            (words, holds, self.options[limit])
            for limit, (words, holds) in NUMBERS.items()
            if limit in self.options
        ]

    @property
    def limits(self) -> str:
        """The key's limits in words."""
        texts = []
        for words, _, bound in self.bounds:
            if isinstance(bound, str):  # the name of another key of the section
                bound = f"{self.section_class.section}.{bound}"
            texts.append(f"{words} {bound}")
        if "ends" in self.options:
            texts.append(f"a path that ends in {' or '.join(self.options['ends'])}")
        text = " and ".join(texts)
        if self.options.get("rising"):
            text += ", the smaller one first"
        return text

    @property
    def takes_mapping(self) -> bool:
        """Whether the value may be a mapping. Then an option or a line of a file may also set one entry, KEY.NAME."""
        return dict in _alternatives(self.hint)

    @property
    def allowed(self) -> str:
        """The key's type and limits in words."""
        return ", ".join(filter(None, (words_of(self.hint), self.limits)))

    @property
    def text(self) -> str:
        """The key's help text, which is the string below its definition, and what `names` adds."""
        text = texts_of(self.section_class).get(self.field, "")
        if "names" in self.options:
            text = f"{text} {self.options['names']()}"
        return text


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield the numbers in a value, also in nested lists."""
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _numbers(inner)
    elif type(value) in (int, float):
        yield value


@dataclass
class Section:
    """Keys that belong together. Making a section converts its values to the keys' types, and checks their limits."""

    # A subclass sets these in its class statement: class DataConfig(Section, section="data").
    section: ClassVar[str] = ""  # name of the section
    needs: ClassVar[str] = ""  # `needs` of `key`, for all keys of the section
    free: ClassVar[bool] = False  # `free` of `key`, for all keys of the section
    runs: ClassVar[type | None] = None  # configuration class of the runs that --checkpoint names

    given: ClassVar[frozenset[str]] = frozenset()  # keys that the command line gives

    def __init_subclass__(cls, **arguments: Any) -> None:
        for name, value in arguments.items():
            setattr(cls, name, value)

    def __post_init__(self):
        # Sections inside this one have converted and checked their own keys already.
        named = {
            f"{self.section}.{key.field}".strip("."): key
            for key in keys_of(type(self)).values()
            if key.section_class is type(self)
        }
        for name, key in named.items():
            setattr(self, key.field, key.as_type(getattr(self, key.field), name))
        for name, key in named.items():
            key.check(getattr(self, key.field), name, self)
        self.agree()

    def agree(self) -> None:
        """Raise ValueError for keys that contradict each other."""

    def idle(self) -> Iterator[Idle]:
        """Yield the conditions under which keys have an effect, where `needs` of `key` cannot express them."""
        return iter(())

    def tree(self) -> dict:
        """Return the configuration as nested plain values, in the form that config.yaml has."""
        keys = keys_of(type(self))
        not_kept = {name for name, key in keys.items() if not key.options["kept"]}
        values = dataclasses.asdict(self).items()
        return plain({name: value for name, value in values if name not in not_kept})


def plain(value: Any) -> Any:
    """Return a value with every tuple turned into a list, also inside dicts and lists."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


@functools.cache
def keys_of(section_class: type) -> dict[str, Key]:
    """Return all keys of a configuration or section by their dotted names, such as "optim.lr"."""
    return dict(_fields(section_class, ""))


def _fields(
    section_class: type, prefix: str, defaults: Section | None = None
) -> Iterator[tuple[str, Key]]:
    """Yield (dotted name, key) of a section and of the sections in it.

    Args:
        section_class: the section.
        prefix: what the dotted names begin with.
        defaults: the section as the configuration makes it, whose values may differ from those of the section's class.
    """
    hints = typing.get_type_hints(section_class)
    for f in dataclasses.fields(section_class):
        hint = hints[f.name]
        name = prefix + f.name
        if isinstance(hint, type) and issubclass(hint, Section):
            yield from _fields(hint, f"{name}.", f.default_factory())
            continue
        options: dict[str, Any] = dict(free=section_class.free, kept=True)
        for base in reversed(section_class.__mro__):
            options.update(getattr(base, "__dataclass_fields__", {}).get(f.name, f).metadata)
        needs = [*section_class.needs.split("; "), *options.get("needs", "").split("; ")]
        named = [re.sub(r"(?<!\w)\.(?=\w)", prefix, need) for need in filter(None, needs)]
        # `needs` of a whole section may name one of its keys, which does not need itself.
        options["needs"] = [need for need in named if name not in deciding(need)]
        if defaults is not None:
            default = getattr(defaults, f.name)
        elif f.default_factory is not MISSING:
            default = f.default_factory()
        else:
            default = f.default
        yield name, Key(section_class, f.name, hint, default, options)


@functools.cache
def texts_of(section_class: type) -> dict[str, str]:
    """Return the help texts of a section's keys by field: the strings below the fields in the source code."""
    texts: dict[str, str] = {}
    sections = [base for base in section_class.__mro__ if issubclass(base, Section)]
    for base in reversed(sections):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for line, below in zip(body, body[1:]):
            if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr):
                texts[line.target.id] = " ".join(ast.literal_eval(below.value).split())
    return texts


def as_type(hint: Any, value: Any) -> Any:
    """Return a value in the type `hint`, turning lists into tuples and ints into floats, or raise TypeError."""
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin in UNIONS:
        # Try the alternative first that needs no conversion.
        for alternative in sorted(inner, key=lambda hint: hint is not type(value)):
            try:
                return as_type(alternative, value)
            except TypeError:
                pass
    elif origin is typing.Literal:
        # Compare types too, because True == 1.
        if any(value == one and type(value) is type(one) for one in inner):
            return value
    elif origin is tuple:
        if isinstance(value, (list, tuple)) and len(value) == len(inner):
            return tuple(map(as_type, inner, value))
    elif origin is list:
        if isinstance(value, list):
            return [as_type(inner[0], one) for one in value]
    elif origin is dict:
        if isinstance(value, dict):
            return value
    elif hint is Any or type(value) is hint:
        return value
    elif hint is float and type(value) is int and abs(value) < 2**1023:
        return float(value)
    raise TypeError


def _alternatives(hint: Any) -> list[Any]:
    """Return the types that a hint allows, without what they hold: [dict, NoneType] for dict[str, int] | None."""
    origin = typing.get_origin(hint)
    if origin in UNIONS:
        return [one for inner in typing.get_args(hint) for one in _alternatives(inner)]
    return [origin or hint]


def words_of(hint: Any) -> str:
    """Return a type in words: a Literal's allowed values, "or null" for an optional type."""
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin in UNIONS:
        return " or ".join(map(words_of, inner))
    if origin is typing.Literal:
        return ", ".join(map(str, inner))
    if origin is list:
        return f"[{words_of(inner[0])}, ...]"
    if origin is tuple:
        return f"[{', '.join(map(words_of, inner))}]"
    words = {str: "text", type(None): "null", dict: "mapping", Any: "any"}
    return words.get(origin or hint) or hint.__name__


def idle_keys(config: Section) -> Iterator[tuple[str, str, set[str]]]:
    """Yield (name, condition in words, names of the deciding keys) for each key that has no effect in `config`."""
    keys = keys_of(type(config))
    values = {name: operator.attrgetter(name)(config) for name in keys}
    for name, key in keys.items():
        for need in key.options["needs"]:
            if not any(condition.holds(values) for condition in conditions(need)):
                yield name, _in_words(need, keys), deciding(need)
    for idle in config.idle():
        if idle.has_effect:
            continue
        for pattern in idle.keys.split():
            for name in fnmatch.filter(keys, pattern):
                yield name, idle.needs, set(idle.deciding.split())


class Condition(NamedTuple):
    """One alternative of a need: "KEY", "not KEY", "KEY=PATTERN" or "KEY!=PATTERN"."""

    negated: str  # "not " or ""
    name: str  # of the key
    sign: str  # "=", "!=" or ""
    pattern: str

    def holds(self, values: dict[str, Any]) -> bool:
        """Return whether the condition holds for `values` by key."""
        value = values.get(self.name)
        if not self.sign:
            # "KEY" holds for a true value, "not KEY" for a false one.
            return bool(value) != bool(self.negated)
        text = str(value)
        if value is None:
            text = "null"
        elif isinstance(value, float):
            text = f"{value:g}"
        return fnmatch.fnmatchcase(text, self.pattern) == (self.sign == "=")

    def words(self, keys: dict[str, Key]) -> str:
        """Return the condition in words."""
        if self.sign == "=":
            return f"{self.name} {self.pattern}".replace(" null", " left out")
        if self.sign == "!=":
            return f"{self.name} other than {self.pattern}".replace(" null", " left out")
        hint = None
        if self.name in keys:
            hint = keys[self.name].hint
        if hint is bool:
            words = {"": "true", "not ": "false"}
            return f"{self.name} {words[self.negated]}"
        if self.negated:
            return f"{self.name} left out"
        if hint in (int, float):
            return f"{self.name} above 0"
        return self.name


def conditions(need: str) -> list[Condition]:
    """Parse a need into its alternatives."""
    return [
        Condition(*re.fullmatch(r"(not )?([\w.]+)(!?=)?(.*)", text).groups(""))
        for text in need.split(" or ")
    ]


def deciding(need: str) -> set[str]:
    """Return the names of the keys that a need depends on."""
    return {condition.name for condition in conditions(need)}


def needs_of(name: str, keys: dict[str, Key]) -> str:
    """Return a sentence that says what a key needs to have an effect; empty if it always has one."""
    needs = "; ".join(_in_words(need, keys) for need in keys[name].options["needs"])
    if not needs:
        return ""
    return f"Needs {needs}."


def _in_words(need: str, keys: dict[str, Key]) -> str:
    return " or ".join(condition.words(keys) for condition in conditions(need))


def changed_keys(old: dict, new: Section, allowed: Iterable[str]) -> list[str]:
    """Return "KEY: OLD -> NEW" for each key whose value differs from a saved configuration's but must not.

    A key may differ if it is free, in `allowed`, or without effect.
    """
    keys = keys_of(type(new))
    before = dict(flat(old, keys))
    now = dict(flat(new.tree(), keys))
    free = {*allowed, *(name for name, key in keys.items() if key.options["free"])}
    free.update(name for name, *_ in idle_keys(new))
    names = [
        name
        for name in sorted({*before, *now})
        if name not in free and before.get(name) != now.get(name)
    ]
    return [f"{name}: {before.get(name)!r} -> {now.get(name)!r}" for name in names]


def flat(tree: dict, keys: Iterable[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) from nested dicts. A dict is a section, or the value of a key that takes a mapping."""
    for short, value in tree.items():
        name = f"{prefix}{short}"
        is_section = name not in keys and any(known.startswith(f"{name}.") for known in keys)
        if is_section and isinstance(value, dict):
            yield from flat(value, keys, f"{name}.")
        else:
            yield name, value


def unknown_key(name: str, keys: dict[str, Key]) -> str:
    """Return the message for a name that is not a key; it suggests the key that was probably meant."""
    known = list(keys)
    if "." not in name:
        known += dict.fromkeys(key.partition(".")[0] for key in keys if "." in key)
    # First choice: a key that other projects call by this name, with or without a section.
    called = {name, name.partition(".")[2]}
    near = [
        known_name
        for known_name, key in keys.items()
        if not called.isdisjoint(key.options.get("also", "").split())
    ]
    # Second choice: a key of this name in some section, which was left out or is wrong.
    leaf = name.rpartition(".")[2]
    same = [known_name for known_name in known if known_name.rpartition(".")[2] == leaf]
    if not near and "." not in name:
        near = same
    near = near or nearest(name, known, 1) or same
    if near:
        return f"unknown key '{name}', did you mean {near[0]!r}?"
    return f"unknown key '{name}'; --help lists the known ones"
