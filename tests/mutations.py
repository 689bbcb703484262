"""Change one operator or constant in a folder of code at a time, and see whether a test fails.

    python tests/mutations.py --room moh_vision/attention --seed 17 --count 20 --tests tests/attention [--list]

The tests run in a copy of the repository, first without a mutation, where they must pass. A mutation dies if a test fails or
if the tests take three times as long. One that survives shows a missing test, code without effect, or is equivalent to the
original.
"""

import argparse
import ast
import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from moh_vision.common.io import cache_folder

ROOT = Path(__file__).resolve().parents[1]
PAIRS = "Lt LtE Gt GtE Eq NotEq Is IsNot In NotIn Add Sub Mult Div BitAnd BitOr LShift RShift And Or USub UAdd".split()
# Name of an operator's class in `ast` -> the class that replaces it.
NEIGHBOUR = {**dict(zip(PAIRS[::2], PAIRS[1::2])), **dict(zip(PAIRS[1::2], PAIRS[::2]))}
NEIGHBOUR.update(FloorDiv="Mult", Mod="FloorDiv", Pow="Mult")


def nodes(node):
    """Yield `node` and the nodes below it in their order in the code, without type hints, messages and string operations."""
    joins_strings = isinstance(node, ast.BinOp) and re.search("[\"']", ast.unparse(node))
    if joins_strings or isinstance(node, (ast.Raise, ast.JoinedStr)):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "msg"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from nodes(child)


def mutations(tree):
    """Mutate `tree` in place and yield the line number; the mutation is undone when the iterator goes on to the next one."""
    for node in nodes(tree):
        fields = vars(node)
        found = []  # (dict or list, key or index, new value): holder[key] = new makes the mutation
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            found.append((fields, "value", not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value < 100:
            found.append((fields, "value", node.value + 1))
        elif isinstance(fields.get("op"), ast.Not):
            found.append((fields, "operand", ast.UnaryOp(ast.Not(), node.operand)))
        operators = [(node.ops, k) for k, _ in enumerate(fields.get("ops", []))]
        if "op" in fields:
            operators = [(fields, "op")]
        for holder, key in operators:
            if neighbour := NEIGHBOUR.get(type(holder[key]).__name__):
                found.append((holder, key, getattr(ast, neighbour)()))
        for holder, key, new in found:
            old = holder[key]
            holder[key] = new
            yield node.lineno
            holder[key] = old


def draw(files, count, seed):
    """Draw one mutation from each of `count` equal parts of all mutations of `files`.

    Returns [(file, description of the change, source before, source after)].
    """
    every = []  # (file, index of the mutation within it)
    for file in files:
        tree = ast.parse((ROOT / file).read_text())
        every += [(file, k) for k, _ in enumerate(mutations(tree))]
    pick = random.Random(seed)
    drawn = []
    for part in range(count):
        first = part * len(every) // count
        end = (part + 1) * len(every) // count
        file, k = every[pick.randrange(first, end)]
        tree = ast.parse((ROOT / file).read_text())
        before = ast.unparse(tree)
        # Stops at the k-th mutation, so `tree` stays mutated.
        line = next(itertools.islice(mutations(tree), k, None))
        after = ast.unparse(tree)
        lines = zip(before.splitlines(), after.splitlines())
        old, new = next(pair for pair in lines if pair[0] != pair[1])
        drawn.append((file, f"{file}:{line}  {old.strip()}  ->  {new.strip()}", before, after))
    return drawn


def first_failure(tree, tests, limit=None):
    """Run tests in `tree` and return the name of the first that fails, or why the run ended; "" if all pass.

    limit: seconds after which the run is killed.
    """
    command = [
        sys.executable,
        *"-m pytest -xq -p no:cacheprovider -m".split(),
        "not slow and not reliability",
        *tests,
    ]
    env = {**os.environ, "PYTHONPATH": str(tree), "MOH_VISION_CACHE": str(tree.parent / "cache")}
    with open(tree.parent / "printed", "w") as output:
        run = subprocess.Popen(
            command, cwd=tree, env=env, stdout=output, stderr=output, start_new_session=True
        )
    try:
        code = run.wait(limit)
    except subprocess.TimeoutExpired:
        return "time limit"
    finally:
        with contextlib.suppress(ProcessLookupError):
            # Kill the whole process group, because tests may have started processes.
            os.killpg(run.pid, signal.SIGKILL)
    if code == 0:
        return ""
    printed = (tree.parent / "printed").read_text()
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, flags=re.MULTILINE)
    return failed[1] if failed else f"exit code {code}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--room", required=True, help="folder of the Python files to change")
    parser.add_argument(
        "--exclude", nargs="+", default=[], help="files that stay: 'kernels/gpu/*' tune.py"
    )
    parser.add_argument(
        "--tests", nargs="+", default=["tests"], help="slow and reliability tests are left out"
    )
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    args = parser.parse_args()
    files = [path.relative_to(ROOT) for path in sorted((ROOT / args.room).resolve().rglob("*.py"))]
    files = [file for file in files if not any(map(file.match, args.exclude))]
    drawn = draw(files, args.count, args.seed)
    if args.list:
        print(*(change for _, change, _, _ in drawn), sep="\n")
        sys.exit()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder) / "tree"
        start = time.monotonic()
        shutil.copytree(
            ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv*", "runs")
        )
        if (built := cache_folder() / "kernels").is_dir():
            shutil.copytree(built, Path(folder) / "cache" / "kernels")
        # The files are written as ast.unparse prints them, so that only the mutation differs between the runs.
        for file, _, before, _ in drawn:
            (tree / file).write_text(before)
        if failed := first_failure(tree, args.tests):
            sys.exit(f"without a mutation: {failed}")
        seconds = time.monotonic() - start
        print(f"without a mutation the tests take {seconds:.0f} s", flush=True)
        for file, change, before, after in drawn:
            (tree / file).write_text(after)
            failed = first_failure(tree, args.tests, 3 * seconds)
            (tree / file).write_text(before)
            print(f"{change}  {'died: ' + failed if failed else 'SURVIVED'}", flush=True)
