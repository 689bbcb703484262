"""The map of the design: imports point one way."""

import ast

from conftest import ROOT

ALLOWED = {
    "attention": set(),
    "engine": set(),
    "data": set(),
    "diffusion": {"data", "models"},
    "evaluation": set(),
    "models": {"attention"},
    "analysis": {"models", "attention"},
    "tasks": {"attention", "diffusion"},
    "validation": {"analysis", "attention", "data", "engine", "evaluation", "models", "tasks"},
    "previews": {"analysis", "diffusion", "engine"},
    "sample_scores": {"analysis", "data", "engine", "evaluation", "models"},
    "translation": {"data", "evaluation", "models"},
    "gate_report": {"analysis", "attention", "data", "engine"},
    "text_setup": {"data", "models"},
    "text_scores": {"data", "engine", "evaluation", "gate_report", "tasks", "translation"},
    "config": set(),
    "command_line": {"config"},
    "__init__": {"attention", "models"},
}
# A command is a script; these score with runs too.
COMMANDS = {
    "evaluation/fidelity/__main__.py": {"data", "engine", "sample_scores"},
    "evaluation/lm.py": {"data", "engine"},
    "evaluation/lm_model.py": {"data", "models"},
}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        for name in names:
            if isinstance(node, ast.ImportFrom) and node.level:
                yield "a relative import"
            elif name in ("moh_vision.engine.io", "moh_vision.version"):
                continue  # every room may import it
            elif name.startswith("moh_vision."):
                yield name.split(".")[1]
            elif name == "moh_vision":
                yield "__init__"


def test_arrows():
    package, seen = ROOT / "moh_vision", 0
    for path in package.rglob("*.py"):
        inside = path.relative_to(package)
        room = inside.parts[0].removesuffix(".py")
        for target in imported(path):
            assert target in {room, *ALLOWED[room], *COMMANDS.get(inside.as_posix(), ())}, (
                f"{path.relative_to(ROOT)} imports {target}"
            )
            seen += 1
    assert seen > 20


def test_the_core_needs_torch_only():
    for path in (ROOT / "moh_vision" / "attention").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                root = (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
                assert root in {
                    "torch",
                    "moh_vision",
                    "typing",
                    "math",
                    "dataclasses",
                    "itertools",
                    "functools",
                    "logging",
                    "__future__",
                }, f"{path}: {root}"


def test_scripts_stay_short():
    for name in ("train_cls.py", "train_dit.py", "sample.py"):
        assert len((ROOT / name).read_text().splitlines()) < 200, name
