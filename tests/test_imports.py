"""The map of the design: commands stand on the wings, wings on the ground floor, and no arrow points up."""

import ast
import contextlib
import graphlib
import re
import runpy
import subprocess
import sys
import tomllib

import pytest

from moh_vision.__main__ import COMMANDS, main
from moh_vision.common.errors import EXTRAS, user_errors
from moh_vision.diffusion import OBJECTIVES
from tests.support.paths import ROOT
from tests.support.refusals import assert_says

PACKAGE = ROOT / "moh_vision"
TREES = {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
GROUND = {
    "attention": set(),
    "engine": {"attention"},  # it measures, and descends by blocks
    "data": set(),
    "models": {"attention"},
    "evaluation": {"data", "engine", "models"},
}
WINGS = ("classification", "diffusion", "language")
ALLOWED = {**GROUND, **{wing: set(GROUND) for wing in WINGS}}
ALLOWED["opening"] = {"engine", "models", *WINGS}  # it picks the wing
ALLOWED["__init__"] = {"attention", "models", "language", "opening"}
ALLOWED["commands"] = {*GROUND, *WINGS, "opening", "__init__"}
ALLOWED["__main__"] = {*ALLOWED["commands"], "commands"}
# Every room may import the common one, which imports no other.
ALLOWED = {room: {*rooms, "common"} for room, rooms in ALLOWED.items()}
ALLOWED["common"] = set()

# What a wing of a stranger may import, by room. The language wing has nothing else, so that one can be written outside
# of the package; a name that begins with an underscore is of nobody else. None: all modules of the room.
PUBLIC = {
    "attention": {
        "",  # what `moh_vision.attention` exports
        "budget",
        "executors",
        "kernels.eager",  # the operators in PyTorch, see docs/guides/extend.md
        "linear",  # products whose heads are skipped; `is_captured`
        "losses",
        "model_heads",
        "routers",
        "routers.gate_norm",
        "routing",
    },
    "common": None,
    "data": {"hub", "order", "records", "workers"},  # what is not of images
    "engine": None,
    "models": {
        "convert",
        "counts",
        "describe",
        "elastic",
        "fine_tuning",
        "fitting",
        "head_load",
        "head_order",
        "registry",
        "set_up",
        "weight_files",
        "weights",
    },
}


def modules(tree):
    """The modules that the imports of a file name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def test_arrows():
    seen = 0
    for inside, tree in TREES.items():
        room = inside.parts[0].removesuffix(".py")
        for name in modules(tree):
            assert not name.startswith("."), f"{inside}: a relative import"
            if name == "moh_vision":
                target = "__init__"
            elif name.startswith("moh_vision."):
                target = name.split(".")[1]
            else:
                continue
            assert target in {room, *ALLOWED[room]}, f"{inside} imports {target}"
            seen += 1
    assert seen > 20


def imported_from_the_house(tree):
    """Yield (module, name) of what a file imports of moh_vision; name "" for `import moh_vision.room`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moh_vision."):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            yield from ((name, "") for name in names if name.startswith("moh_vision."))


def test_the_language_wing_imports_what_a_stranger_may():
    seen = set()
    for inside, tree in TREES.items():
        if inside.parts[0] != "language":
            continue
        for module, name in imported_from_the_house(tree):
            _, room, *rest = module.split(".")
            if room == "language":
                continue
            seen.add(room)
            what = f"{inside} imports {name} of {module}"
            assert room in PUBLIC, f"{what}: the room is not in PUBLIC"
            public = PUBLIC[room]
            assert public is None or ".".join(rest) in public, f"{what}: not in PUBLIC"
            assert not any(part.startswith("_") for part in (*rest, name)), f"{what}: private"
    assert seen == PUBLIC.keys()


def test_public_modules_are_there():
    for room, public in PUBLIC.items():
        for module in public or ():
            path = PACKAGE.joinpath(room, *module.split("."))
            assert path.is_dir() or path.with_suffix(".py").is_file(), f"{room}.{module}"


def test_no_files_import_one_another_in_a_circle():
    """Imports inside functions count too."""
    names = {inside: ".".join(("moh_vision", *inside.with_suffix("").parts)) for inside in TREES}
    files = {name.removesuffix(".__init__"): TREES[inside] for inside, name in names.items()}
    arrows = {name: set() for name in files}
    for name, tree in files.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                arrows[name] |= files.keys() & {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                members = files.keys() & {f"{node.module}.{alias.name}" for alias in node.names}
                arrows[name] |= members or files.keys() & {node.module}
    list(
        graphlib.TopologicalSorter(arrows).static_order()
    )  # raises CycleError, which names the files


def test_the_core_needs_torch_only():
    # torch itself needs filelock.
    allowed = {"torch", "filelock", "moh_vision", *sys.stdlib_module_names}
    for inside, tree in TREES.items():
        if inside.parts[0] == "attention":
            needed = {name.split(".")[0] for name in modules(tree)}
            if inside.parent.name == "gpu":
                needed.discard("triton")  # it is imported only where it is there
            assert needed <= allowed, inside


def test_nobody_asks_which_objective_a_run_has():
    """Outside diffusion/objectives no name of an objective is compared, and no class of one is used but to export it."""
    classes = {objective.__name__ for objective in OBJECTIVES.values()}
    for inside, tree in TREES.items():
        if inside.is_relative_to("diffusion/objectives"):
            continue
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.Compare) or (
                isinstance(node, ast.keyword) and node.arg == "needs"
            ):
                text = ast.unparse(node)
            words = set(re.findall(r"\w+", text))
            asks = any("objective" in word for word in words) and words & OBJECTIVES.keys()
            assert not asks, f"{inside}: {text}"
            if inside.name != "__init__.py":
                uses = isinstance(node, ast.Name) and node.id in classes
                assert not uses, f"{inside}: {node.id}"


def test_no_string_names_a_function():
    """But the table of converters, by class of model."""
    for inside, tree in TREES.items():
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) else ""
            if isinstance(text, str) and re.fullmatch(r"moh_vision(\.\w+)+:\w+", text):
                assert "convert" in text, f"{inside}: {text}"


def test_commands_are_listed_and_explain_themselves(capsys):
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\w", listed, re.M) for name in COMMANDS)
    for name in COMMANDS:
        if name != "lm":  # needs an extra
            with contextlib.suppress(SystemExit):
                assert main([name, "--help"]) == 0
            assert capsys.readouterr().out.startswith("usage: "), name
    assert main(["tabel"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert_says(error, "moh_vision: error: tabel table")


@pytest.mark.parametrize("name", ["attention.kernels", "evaluation.fidelity"])
def test_promised_modules_run(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module(f"moh_vision.{name}", run_name="__main__")
    assert "usage: " in capsys.readouterr().out


def test_scripts_only_call_the_package():
    for name in ("train_cls", "train_dit", "train_text", "validate", "sample"):
        assert len(ast.parse((ROOT / f"{name}.py").read_text()).body) == 2, name


def test_a_missing_extra_is_named(capsys):
    """One line with what to install, and every package that it knows is in that extra."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for package, extra in EXTRAS.items():
        assert any(re.match(rf"{package}\b", requirement) for requirement in declared[extra]), (
            package
        )
    with pytest.raises(SystemExit, match="2"), user_errors("x"):
        raise ModuleNotFoundError("No module named 'lm_eval'", name="lm_eval")
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert_says(error, "x: error: lm_eval 'moh_vision[lm]'")
    with pytest.raises(ModuleNotFoundError), user_errors("x"):
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")


def test_a_fresh_process_imports_little_and_needs_no_extra():
    """`import moh_vision` leaves out what takes seconds; without extras commands explain themselves or name what to install.

    So do text modules: an import raises ImportError; the script, and the module as a command, print one line with exit code 2.
    """
    code = """import contextlib, runpy, sys
import moh_vision
print([name for name in ("diffusers", "transformers", "accelerate") if name in sys.modules])
from moh_vision.common.errors import EXTRAS
sys.modules.update(dict.fromkeys([*EXTRAS, "peft", "torchao"]))  # which need what extras bring, or are for tests alone
try:
    import moh_vision.language.train
except ImportError as error:
    print(error)
for run, name in ((runpy.run_path, "train_text.py"), (runpy.run_module, "moh_vision.language.train")):
    try:
        run(name, run_name="__main__")
    except SystemExit as end:
        print(end.code, file=sys.stderr)
from moh_vision.__main__ import COMMANDS, main
for name in COMMANDS:
    with contextlib.suppress(SystemExit):
        main([name, "--help"])"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    remedy = "the package tokenizers is missing: pip install 'moh_vision[text]'"
    assert result.stdout.startswith(f"[]\n{remedy}\n")
    of_scripts = f"train_text.py: error: {remedy}\n2\n" * 2
    assert result.stderr.startswith(of_scripts)
    missing = r"^(\w+): error: the package \w+ is missing: pip install 'moh_vision\[\w+\]'$"
    of_commands = result.stderr.removeprefix(of_scripts)
    assert set(re.findall(missing, of_commands, re.M)) == {"gates", "tokenise"}
