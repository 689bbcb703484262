"""How densely the code is written, room by room: python benchmarks/density.py [FOLDER ...].

Counted on lines of code: without docstrings, comments and blank lines. These are figures to look at, not limits.

    lines    of the files, all of them
    mean     characters of a line of code
    cond     conditional expressions in 100 lines of code
    packed   statements that assign several unrelated values at once: a, b = x, y, but neither a swap nor a shape
    tricks   something times a condition, such as a text that is left out where the condition is false
    long     functions of more than 60 lines
    params   functions with more than 7 parameters
    bare     public functions without a docstring
    fmt      "# fmt: skip"
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

FOLDERS = ("moh_vision", "tests", "benchmarks")
COLUMNS = ("lines", "mean", "cond", "packed", "tricks", "long", "params", "bare", "fmt")
LONGEST_FUNCTION = 60  # lines
MOST_PARAMETERS = 7
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of_code(text: str, tree: ast.Module) -> list[str]:
    """Return the lines of a file that are neither blank nor of docstrings or comments alone."""
    left_out = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            if ast.get_docstring(node) is not None:
                docstring = node.body[0]
                left_out.update(range(docstring.lineno, docstring.end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            left_out.add(token.start[0])
    numbered = enumerate(text.splitlines(), 1)
    return [line for number, line in numbered if line.strip() and number not in left_out]


def is_packed(node: ast.AST) -> bool:
    """Return whether a statement assigns a tuple to a tuple, but no swap and no shapes."""
    if not isinstance(node, ast.Assign):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    names = {ast.unparse(element) for element in target.elts}
    values = {ast.unparse(element) for element in node.value.elts}
    of_shapes = all(
        isinstance(name, ast.Tuple) or ast.unparse(value).endswith(".shape")
        for name, value in zip(target.elts, node.value.elts)
    )
    return names != values and not of_shapes


def is_trick(node: ast.AST) -> bool:
    """Return whether an expression multiplies something by a condition that shows that it is one."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    for factor in (node.left, node.right):
        if isinstance(factor, (ast.Compare, ast.BoolOp)):
            return True
        if isinstance(factor, ast.UnaryOp) and isinstance(factor.op, ast.Not):
            return True
        if isinstance(factor, ast.Call) and ast.unparse(factor.func) == "bool":
            return True
    return False


def count(files: Iterable[Path]) -> Counter:
    """Count what COLUMNS name in Python files, and "code" and "characters" for the means."""
    total = Counter()
    for file in files:
        text = file.read_text()
        tree = ast.parse(text)
        code = lines_of_code(text, tree)
        total["lines"] += text.count("\n")
        total["code"] += len(code)
        total["characters"] += sum(map(len, code))
        total["fmt"] += text.count("# fmt: skip")
        for node in ast.walk(tree):
            total["cond"] += isinstance(node, ast.IfExp)
            total["packed"] += is_packed(node)
            total["tricks"] += is_trick(node)
            if isinstance(node, FUNCTIONS):
                total["long"] += node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION
                parameters = len(node.args.args) + len(node.args.kwonlyargs)
                total["params"] += parameters > MOST_PARAMETERS
                total["bare"] += not node.name.startswith("_") and ast.get_docstring(node) is None
    return total


def rooms_of(folder: Path) -> list[Path]:
    """Return the folders of Python files directly in a folder, and the folder itself."""
    inside = [path for path in folder.iterdir() if path.is_dir() and any(path.rglob("*.py"))]
    return [*sorted(inside), folder]


def table(folders: Iterable[Path]) -> Iterator[str]:
    """Yield the lines of a table with a row for each room of the folders."""
    yield f"{'':28}" + "".join(f"{column:>8}" for column in COLUMNS)
    for folder in folders:
        for room in rooms_of(folder):
            total = count(sorted(room.rglob("*.py")))
            code = max(total["code"], 1)
            row = {column: str(total[column]) for column in COLUMNS}
            row["mean"] = f"{total['characters'] / code:.1f}"
            row["cond"] = f"{100 * total['cond'] / code:.1f}"
            yield f"{str(room):28}" + "".join(f"{row[column]:>8}" for column in COLUMNS)


if __name__ == "__main__":
    for line in table(map(Path, sys.argv[1:] or FOLDERS)):
        print(line)
