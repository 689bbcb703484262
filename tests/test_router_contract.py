"""A router says everything of itself: nobody outside routers/ asks which router it is, by class, by name or by a part of one."""

import ast

import pytest

from moh_vision.attention import ROUTERS
from moh_vision.attention.routers.base import Router
from tests.support.paths import ROOT

PACKAGE = ROOT / "moh_vision"
ROOM = PACKAGE / "attention" / "routers"
# Kernels call the linear layer of a router `router`; they know no module.
KERNELS = PACKAGE / "attention" / "kernels"
FILES = [
    path
    for path in PACKAGE.rglob("*.py")
    if not path.is_relative_to(ROOM) and not path.is_relative_to(KERNELS)
]
# Classes of routers/ but the base: who imports one asks which router it is. Also those that are no routers.
CLASSES = {
    node.name
    for path in ROOM.rglob("*.py")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.ClassDef)
} - {"Router"}
# What anybody may read of a router, and the name of its class, for tables.
CONTRACT = {*dir(Router), "budget", "training", "__name__"}


def names_in(node):
    """Return the names of routers among constants in a comparison or a collection; values of a dict are no questions."""
    if isinstance(node, ast.Constant):
        return {node.value} & ROUTERS.keys() if isinstance(node.value, str) else set()
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        parts = node.elts
    elif isinstance(node, ast.Dict):
        parts = [key for key in node.keys if key is not None]
    else:
        return set()
    return set().union(*map(names_in, parts))


def is_router(node):
    """Return whether an expression is called a router: `router`, `layer.router`."""
    return getattr(node, "attr", getattr(node, "id", "")) == "router"


def asked_by_import(node):
    if "routers" in (node.module or "").split("."):
        for alias in node.names:
            if alias.name in CLASSES:
                yield f"imports {alias.name}"


def asked_by_comparison(node):
    for side in (node.left, *node.comparators):
        if isinstance(side, ast.Constant):
            for name in names_in(side):
                yield f"compares with {name!r}"


def asked_by_call(node):
    called = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if called in ("startswith", "endswith", "replace", "removeprefix", "fullmatch", "search"):
        for name in set().union(*map(names_in, node.args)):
            yield f"looks for {name!r} in a text"
    if called in ("getattr", "hasattr") and is_router(node.args[0]):
        yield f"{called} of a router"


def asked_by_attribute(node):
    if node.attr in CLASSES:
        yield f"names {node.attr}"
    if is_router(node.value) and node.attr not in CONTRACT:
        yield f"reads .{node.attr}, which Router has not"


def asked_by_collection(node):
    for name in names_in(node):
        yield f"lists {name!r}"


def asked_by_match(node):
    for name in names_in(node.value):
        yield f"matches {name!r}"


ASKED_BY = {
    ast.ImportFrom: asked_by_import,
    ast.Compare: asked_by_comparison,
    ast.Call: asked_by_call,
    ast.Attribute: asked_by_attribute,
    ast.Tuple: asked_by_collection,
    ast.List: asked_by_collection,
    ast.Set: asked_by_collection,
    ast.Dict: asked_by_collection,
    ast.MatchValue: asked_by_match,
}


def questions(tree):
    """Yield (line, what is asked) for every place in a file that asks which router it is."""
    for node in ast.walk(tree):
        if type(node) in ASKED_BY:
            for what in ASKED_BY[type(node)](node):
                yield node.lineno, what


@pytest.mark.parametrize(
    "code",
    [
        "from moh_vision.attention.routers import MoHRouter",
        "from moh_vision.attention.routers.common import TopKRouter",
        "router == 'moh'",
        "'mae' in router",
        "router in ('moa', 'mae')",
        "routers - {'dense'}",
        "ROUTERS = ['moh']",
        "options = {'query_norm': ()}[router]",
        "router.startswith('gated')",
        "getattr(layer.router, 'pool', None)",
        "layer.router.members",
        "isinstance(module, routers.mae.MAERouter)",
        "match router:\n    case 'moh':\n        pass",
    ],
)
def test_a_question_is_found(code):
    assert list(questions(ast.parse(code)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nobody_asks_which_router_it_is(path):
    asked = [f"{path.name}:{line}: {what}" for line, what in questions(ast.parse(path.read_text()))]
    assert not asked, "\n".join(asked)
