"""Keys of configurations, each defined once: `name: type = key(default, limits, needs)` and its text."""

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

from moh_vision.engine.errors import nearest

NUMBERS = dict(
    gt=("above", operator.gt), ge=("at least", operator.ge), lt=("below", operator.lt), le=("at most", operator.le)
)  # fmt: skip
UNIONS = (typing.Union, types.UnionType)  # Literal[...] | None makes the first


def key(default: Any = MISSING, **options: Any) -> Any:
    """Return a field of a `Section`. A subclass that repeats a key inherits what it leaves out.

    Args:
        default: what it is where it is left out; without one it must be given.
        gt, ge, lt, le: limits of a number, or of each in a list; or the name of a key of the section.
        rising: of a pair: the first is not above the second.
        ends: endings of a path, one of which it has.
        needs: what it has no effect without: "KEY", "not KEY", "KEY=VALUE" or "KEY!=VALUE", where * in VALUE
            is any text; joined by " or ", or by "; " for and. ".KEY" is of the same section.
        also: what other projects call it, with or without a section.
        free: another value does not make a run another run.
        kept: False: an option of one call, which no file holds and no run remembers.
    """
    assert set(options) <= {*NUMBERS, "rising", "ends", "needs", "also", "free", "kept"}, options
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=options)
    return dataclasses.field(default=default, metadata=options)


class Idle(NamedTuple):  # where no `needs` can tell
    keys: str  # patterns
    has_effect: Any
    needs: str  # in words
    deciding: str  # the keys that decide


class Key(NamedTuple):
    """A key as `keys_of` finds it."""

    kind: type  # the section that it is a field of
    field: str  # its name there
    hint: Any  # its type
    default: Any
    options: dict[str, Any]  # of `key`

    def as_type(self, value: Any, name: str, where: str = "") -> Any:
        """Return the value as the key's type, or raise ValueError, naming the key and `where` it stands."""
        try:
            return as_type(self.hint, value)
        except TypeError:
            got = "null" if value is None else str(value)[:200]
            raise ValueError(
                f'{where}key "{name}": Expected {words_of(self.hint)}. Got value: {got}'
            ) from None

    def check(self, value: Any, name: str, section: "Section") -> None:
        """Raise ValueError, naming the key, for a value that is out of its range."""
        numbers = list(_numbers(value))
        fine = all(math.isfinite(n) for n in numbers if type(n) is float) and (
            value != [] or self.default == []
        )
        for _, holds, bound in self.bounds:
            bound = getattr(section, bound) if isinstance(bound, str) else bound
            fine = fine and all(holds(n, bound) for n in numbers)
        fine = fine and not (self.options.get("rising") and value[0] > value[1])
        fine = fine and not (
            value and "ends" in self.options and not value.endswith(self.options["ends"])
        )
        if not fine:
            allowed = "at least one" if value == [] else self.limits or "a finite number"
            raise ValueError(f"{name} {value!r} is out of range: {allowed}")

    @property
    def bounds(self) -> list[tuple[str, Callable, Any]]:
        """Words, comparison and bound of each limit of its numbers."""
        return [
            (*how, self.options[limit]) for limit, how in NUMBERS.items() if limit in self.options
        ]

    @property
    def limits(self) -> str:
        """Its range in words."""
        section = f"{self.kind.section}."
        texts = [
            f"{words} {section * isinstance(bound, str)}{bound}" for words, _, bound in self.bounds
        ]
        if "ends" in self.options:
            texts.append(f"a path that ends in {' or '.join(self.options['ends'])}")
        return " and ".join(texts) + ", the smaller one first" * self.options.get("rising", False)

    @property
    def allowed(self) -> str:
        """Its type and its range in words."""
        return ", ".join(filter(None, (words_of(self.hint), self.limits)))

    @property
    def text(self) -> str:
        """What stands below it."""
        return texts_of(self.kind).get(self.field, "")


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _numbers(inner)
    elif type(value) in (int, float):
        yield value


@dataclass
class Section:
    """Keys that belong together, in their types and ranges however it is made."""

    section: ClassVar[str] = ""  # its name; a subclass's arguments are these
    needs: ClassVar[str] = ""  # what all keys need
    free: ClassVar[bool] = False  # whether all keys are
    runs: ClassVar[type | None] = None  # configuration of the runs for its key checkpoint
    given: ClassVar[frozenset[str]] = frozenset()  # options on the command line

    def __init_subclass__(cls, **arguments: Any) -> None:
        for name, value in arguments.items():
            setattr(cls, name, value)

    def __post_init__(self):
        own = [key for key in keys_of(type(self)).values() if key.kind is type(self)]
        named = {f"{self.section}.{key.field}".strip("."): key for key in own}
        for name, key in named.items():
            setattr(self, key.field, key.as_type(getattr(self, key.field), name))
        for name, key in named.items():
            key.check(getattr(self, key.field), name, self)
        self.agree()

    def agree(self) -> None:
        """Raise ValueError for keys that contradict each other."""

    def idle(self) -> Iterator[Idle]:
        """What no `needs` can tell."""
        return iter(())

    def tree(self) -> dict:
        """The configuration as nested plain values, as it is saved."""
        of_a_call = {name for name, key in keys_of(type(self)).items() if not key.options["kept"]}
        return plain(
            {
                name: value
                for name, value in dataclasses.asdict(self).items()
                if name not in of_a_call
            }
        )


def plain(value: Any) -> Any:
    """The same value with lists for tuples."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


@functools.cache
def keys_of(kind: type) -> dict[str, Key]:
    """Return every key of a configuration or section by its dotted name."""
    return dict(_fields(kind, ""))


def _fields(kind: type, prefix: str, made: Section | None = None) -> Iterator[tuple[str, Key]]:
    hints = typing.get_type_hints(kind)
    for f in dataclasses.fields(kind):
        hint, name = hints[f.name], prefix + f.name
        if isinstance(hint, type) and issubclass(hint, Section):
            yield from _fields(hint, f"{name}.", f.default_factory())
            continue
        options: dict[str, Any] = dict(free=kind.free, kept=True)
        for base in reversed(kind.__mro__):
            options.update(getattr(base, "__dataclass_fields__", {}).get(f.name, f).metadata)
        needs = [*kind.needs.split("; "), *options.get("needs", "").split("; ")]
        # A key does not need itself.
        named = [re.sub(r"(?<!\w)\.(?=\w)", prefix, need) for need in filter(None, needs)]
        options["needs"] = [need for need in named if name not in deciding(need)]
        default = f.default if f.default_factory is MISSING else f.default_factory()
        yield (
            name,
            Key(kind, f.name, hint, default if made is None else getattr(made, f.name), options),
        )


@functools.cache
def texts_of(kind: type) -> dict[str, str]:
    """The strings below the keys of a section."""
    texts: dict[str, str] = {}
    for base in reversed([base for base in kind.__mro__ if issubclass(base, Section)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for line, below in zip(body, body[1:]):
            if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr):
                texts[line.target.id] = " ".join(ast.literal_eval(below.value).split())
    return texts


def as_type(hint: Any, value: Any) -> Any:
    """Return the value, lists as tuples and whole numbers as floats if the type says so; or TypeError."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        for kind in sorted(inner, key=lambda kind: kind is not type(value)):
            try:
                return as_type(kind, value)
            except TypeError:
                pass
    elif origin is typing.Literal and any(
        value == one and type(value) is type(one) for one in inner
    ):
        return value
    elif origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(inner):
        return tuple(map(as_type, inner, value))
    elif origin is list and isinstance(value, list):
        return [as_type(inner[0], one) for one in value]
    elif hint is Any or origin is dict and isinstance(value, dict) or type(value) is hint:
        return value
    elif hint is float and type(value) is int and abs(value) < 2**1023:
        return float(value)
    raise TypeError


def words_of(hint: Any) -> str:
    """Return a type for people: a Literal's allowed values, `or null` for an Optional."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        return " or ".join(map(words_of, inner))
    if origin is typing.Literal:
        return ", ".join(map(str, inner))
    if origin in (list, tuple):
        return f"[{', '.join(map(words_of, inner))}{', ...' * (origin is list)}]"
    return {str: "text", type(None): "null", dict: "mapping", Any: "any"}.get(
        origin or hint
    ) or hint.__name__


def idle_keys(config: Section) -> Iterator[tuple[str, str, set[str]]]:
    """Yield (key, what it needs, the keys that decide) for keys without effect beside the others."""
    keys = keys_of(type(config))
    values = {name: operator.attrgetter(name)(config) for name in keys}
    for name, key in keys.items():
        for need in key.options["needs"]:
            if not any(condition.holds(values) for condition in conditions(need)):
                yield name, _in_words(need, keys), deciding(need)
    for idle in config.idle():
        for pattern in idle.keys.split() if not idle.has_effect else ():
            yield from (
                (name, idle.needs, set(idle.deciding.split()))
                for name in fnmatch.filter(keys, pattern)
            )


class Condition(NamedTuple):
    """One alternative of a need: "KEY", "not KEY", "KEY=PATTERN" or "KEY!=PATTERN"."""

    negated: str
    name: str
    sign: str
    pattern: str

    def holds(self, values: dict[str, Any]) -> bool:
        """Return whether values by key meet it."""
        value = values.get(self.name)
        if self.sign:
            text = (
                "null"
                if value is None
                else f"{value:g}"
                if isinstance(value, float)
                else str(value)
            )
            return fnmatch.fnmatchcase(text, self.pattern) == (self.sign == "=")
        return bool(value) != bool(self.negated)

    def words(self, keys: dict[str, Key]) -> str:
        """Return it in words."""
        if self.sign:
            return f"{self.name} {'other than ' * (self.sign == '!=')}{self.pattern}".replace(
                " null", " left out"
            )
        hint = keys[self.name].hint if self.name in keys else None
        if hint is bool:
            return f"{self.name} {'false' if self.negated else 'true'}"
        return (
            f"{self.name} left out"
            if self.negated
            else f"{self.name}{' above 0' * (hint in (int, float))}"
        )


def conditions(need: str) -> list[Condition]:
    """Return the alternatives of a need."""
    return [
        Condition(*re.fullmatch(r"(not )?([\w.]+)(!?=)?(.*)", text).groups(""))
        for text in need.split(" or ")
    ]


def deciding(need: str) -> set[str]:
    """Return the keys in a need."""
    return {condition.name for condition in conditions(need)}


def needs_of(name: str, keys: dict[str, Key]) -> str:
    """Return a sentence that says what a key needs to have an effect; empty if it always has one."""
    needs = "; ".join(_in_words(need, keys) for need in keys[name].options["needs"])
    return f"Needs {needs}." if needs else ""


def _in_words(need: str, keys: dict[str, Key]) -> str:
    return " or ".join(condition.words(keys) for condition in conditions(need))


def changed_keys(old: dict, new: Section, allowed: Iterable[str]) -> list[str]:
    """Return keys, with both values, that differ from a saved configuration's and may not."""
    keys = keys_of(type(new))
    before, now = dict(flat(old, keys)), dict(flat(new.tree(), keys))
    free = {*allowed, *(name for name, key in keys.items() if key.options["free"])}
    free.update(name for name, *_ in idle_keys(new))
    names = [
        name
        for name in sorted({*before, *now})
        if name not in free and before.get(name) != now.get(name)
    ]
    return [f"{name}: {before.get(name)!r} -> {now.get(name)!r}" for name in names]


def flat(tree: dict, keys: Iterable[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of nested sections; mappings are values of keys, or hold keys."""
    for short, value in tree.items():
        name = f"{prefix}{short}"
        if (
            name not in keys
            and isinstance(value, dict)
            and any(known.startswith(f"{name}.") for known in keys)
        ):
            yield from flat(value, keys, f"{name}.")
        else:
            yield name, value


def unknown_key(name: str, keys: dict[str, Key]) -> str:
    """The message for a name that is no key, with the one that it may mean."""
    known = [
        *keys,
        *dict.fromkeys(key.partition(".")[0] for key in keys if "." in key and "." not in name),
    ]
    leaf = name.rpartition(".")[2]
    near = [
        k
        for k, key in keys.items()
        if {name, name.partition(".")[2]} & set(key.options.get("also", "").split())
    ]
    # Else a right name without its section, or under a wrong one.
    same = [k for k in known if k.rpartition(".")[2] == leaf]
    near = near or ("." not in name and same) or nearest(name, known, 1) or same
    return f"unknown key '{name}'{f', did you mean {near[0]!r}?' if near else '; --help lists the known ones'}"
