"""docs/glossary.md: what is not a name is bound nowhere in the package, and a word stands once."""

import ast
import re
from collections import Counter

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "moh_vision"
# The key of config.yaml, `Opened.kind`, and the function that finds it.
KIND = {"engine/config.py", "engine/opened.py"} | {
    f"{wing}/{file}.py"
    for wing in ("classification", "diffusion", "language")
    for file in ("config", "opening")
}


def forbidden():
    """The words behind "Not as names"."""
    sentence = PAGE.split("## Not as names")[1]
    return set(re.findall(r"`(\w+)`", sentence)) - {"yaml"}


def bound(tree):
    """(name, line) of all that a file binds: variables, arguments, attributes, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def test_words_that_say_nothing_are_not_names():
    words = forbidden()
    assert {"kind", "place", "way", "own"} <= words
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        for name, line in bound(ast.parse(path.read_text(encoding="utf-8"))):
            if name in words and not (name == "kind" and file in KIND):
                found.append(f"{file}:{line}: {name}")
    assert found == []


def test_a_word_stands_once_on_the_page():
    words = re.findall(r"^\| ([\w -]+?)(?:, [\w -]+)? \|", PAGE, re.M)
    words = [word for word in words if word != "word"]
    assert len(words) > 40
    assert [word for word, count in Counter(words).items() if count > 1] == []


def test_docstrings_use_the_project_s_words():
    """A short list: what a reader of the page would look for under another name."""
    instead = {
        r"mini-?batch": "batch or micro-batch",
        r"\bways? to skip\b": "executor",
        r"check point": "checkpoint",
        r"hyper-?parameter": "key",
    }
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node) or ""
                for pattern, word in instead.items():
                    if re.search(pattern, text, re.I):
                        found.append(
                            f"{path.relative_to(PACKAGE)}: {pattern} in {text[:60]!r}: {word}"
                        )
    assert found == []
