"""Nobody asks which source of images it has: a source says what it knows, and `SOURCES` which class opens a root."""

import ast
import functools
import sys

import pytest

from moh_vision.data.sources import Source
from moh_vision.data.splits import SOURCES
from tests.support.paths import ROOT

PACKAGE = ROOT / "moh_vision"
TREES = {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
# Texts have sources of their own, in language/data/sources.py.
OF_IMAGES = [inside for inside in TREES if inside.parts[0] != "language"]
TABLE = tuple(SOURCES.values())  # now: pages and tests add sources of their own
# The files that define what data.root may name, and the file of the table.
SOURCE_FILES = {
    *(sys.modules[source.__module__].__file__ for source in TABLE),
    sys.modules["moh_vision.data.splits"].__file__,
}
BEGINNINGS = {
    "digits",
    "hfds/",
    "PREFIX",
}  # texts, and the name of one, that a root is compared with


@functools.cache
def source_classes():
    """Return the names of all classes of the package that are sources, from `Source` on."""
    found = {Source.__name__}
    classes = [
        node
        for inside in OF_IMAGES
        for node in ast.walk(TREES[inside])
        if isinstance(node, ast.ClassDef)
    ]
    for _ in classes:  # subclasses may stand before their bases
        found |= {node.name for node in classes if found.intersection(map(name_of, node.bases))}
    assert {"ShardStream", "LatentCache", *(source.__name__ for source in TABLE)} < found
    return found


def name_of(node):
    """Return the last part of a name, such as Shards of shards.Shards; a text; "" for another expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return getattr(node, "id", None) or getattr(node, "attr", "")


def names_in(nodes):
    return {name_of(node) for outer in nodes for node in ast.walk(outer)}


def asks_for_a_class(node):
    """Return whether an expression is `isinstance(x, Shards)`, `issubclass(x, Shards)` or `type(x) is Shards`."""
    if isinstance(node, ast.Call) and name_of(node.func) in ("isinstance", "issubclass"):
        return bool(names_in(node.args[1:]) & source_classes())
    if isinstance(node, ast.Compare):
        return bool(names_in([node.left, *node.comparators]) & source_classes())
    return False


def asks_how_a_root_begins(node):
    if isinstance(node, ast.Call) and name_of(node.func) in ("startswith", "removeprefix"):
        return bool(names_in(node.args) & BEGINNINGS)
    if isinstance(node, ast.Compare):
        return bool(names_in([node.left, *node.comparators]) & BEGINNINGS)
    return False


def lines_that_ask(files, asks):
    """List FILE:LINE of each expression of some files that `asks` finds."""
    return [
        f"{inside}:{node.lineno}"
        for inside in files
        for node in ast.walk(TREES[inside])
        if asks(node)
    ]


def test_a_source_is_not_asked_for_its_class():
    found = lines_that_ask(OF_IMAGES, asks_for_a_class)
    assert not found, f"{found}: ask the source what it knows (data/sources.py)"


def test_only_the_table_knows_which_root_is_whose():
    """Outside of data/ nobody imports a class of SOURCES, or looks into a folder for splits."""
    others = [inside for inside in OF_IMAGES if str(PACKAGE / inside) not in SOURCE_FILES]
    of_the_table = {"split_folders", *(source.__name__ for source in TABLE)}

    def imports_one(node):
        return isinstance(node, ast.ImportFrom) and bool(
            {alias.name for alias in node.names} & of_the_table
        )

    found = lines_that_ask(others, asks_how_a_root_begins)
    outside = [inside for inside in others if inside.parts[0] != "data"]
    found += lines_that_ask(outside, imports_one)
    assert not found, f"{found}: ask data/splits.py, such as open_source or splits_of"


@pytest.mark.parametrize(
    "code, found",
    [
        ("isinstance(source, Shards)", (True, False)),
        ("isinstance(a.source, (str, folder.ImageFolder))", (True, False)),
        ("type(source) is HubDataset", (True, False)),
        ('root == "digits"', (False, True)),
        ("root.startswith(hub.PREFIX)", (False, True)),
        ("isinstance(content, bytes)", (False, False)),
        ('root.startswith("https:")', (False, False)),
    ],
)
def test_the_questions_are_found(code, found):
    node = ast.parse(code).body[0].value
    assert (asks_for_a_class(node), asks_how_a_root_begins(node)) == found
