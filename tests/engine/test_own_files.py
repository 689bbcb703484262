"""--imports: files of a user's own reach scripts and commands, are named by a run, and are imported only if asked for."""

import builtins
import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch

import moh_vision
from moh_vision.__main__ import COMMANDS
from moh_vision.__main__ import main as command_line
from moh_vision.attention import ROUTERS
from moh_vision.classification import validate
from moh_vision.classification.train import main
from moh_vision.common.imports import import_files
from moh_vision.diffusion.config import DitConfig
from moh_vision.engine.command_line import dump, load_tree, parse_config
from tests.support.own_files import OBJECTIVE, ROUTER
from tests.support.paths import ROOT
from tests.support.refusals import assert_says, one_line, refused
from tests.support.small_runs import arguments

NEAREST = "--model.router nearest --model.head_budget uniform:0.5 --balance_weight 0".split()


def imported(run):
    """Return what each start of a run imported: file -> SHA-256."""
    starts = (run / "environment.jsonl").read_text().splitlines()
    return [json.loads(start)["imports"] for start in starts]


def test_a_router_of_ones_own_does_all_that_the_packages_do(
    own_files, tmp_path, run_command, capsys
):
    file = own_files.write("nearest_router", ROUTER)
    imports = ["--imports", file]
    whole = tmp_path / "run"
    main(arguments("cls", whole, 1, 1, *imports, *NEAREST))
    said = capsys.readouterr().out
    assert f"imports {file} (sha256 " in said
    assert f" predict {whole} IMAGES --imports {file}\n" in said
    assert load_tree(whole / "config.yaml")["imports"] == [file]
    assert set(imported(whole)[0]) == {file}

    own_files.forget()
    facts = f"router 'nearest' moh --imports {file}"
    with one_line(facts):
        moh_vision.open_run(whole)
    published = tmp_path / "published"
    publish = ["publish", whole, "--output", published]
    assert_says(run_command(*publish).err, facts)
    assert_says(refused(capsys, validate.main, "--checkpoint", whole), facts)
    assert "nearest" not in ROUTERS

    validate.main(["--checkpoint", str(whole), "--data.workers", "0", *imports])
    assert run_command(*publish, *imports).code == 0
    own_files.forget()
    with one_line("router 'nearest' moh --imports"):
        timm.create_model(f"local-dir:{published}", pretrained=True)
    import_files([file])
    again = timm.create_model(f"local-dir:{published}", pretrained=True).eval()
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(again(images), moh_vision.load_run(whole)(images))


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"kernels"}))
def test_every_command_takes_the_option(command, capsys):
    with contextlib.suppress(SystemExit):
        command_line([command, "--help"])
    assert "--imports FILE" in capsys.readouterr().out


def test_a_changed_file_is_said(own_files, tmp_path, capsys):
    file = own_files.write("nearest_router", ROUTER)
    argv = arguments("cls", tmp_path / "run", 1, 1, "--imports", file, *NEAREST)
    main(argv)
    assert "which has changed" not in capsys.readouterr().out
    own_files.forget()
    own_files.write("nearest_router", ROUTER + "\n")
    main([*argv, "--max-steps", "2"])
    before, now = (start[file] for start in imported(tmp_path / "run"))
    said = capsys.readouterr().out
    assert f"imports {file} (sha256 {now[:12]}), which has changed" in said
    assert before != now and before[:12] in said


def test_a_file_twice_is_imported_once(own_files):
    counted = "import builtins\nbuiltins.times = getattr(builtins, 'times', 0) + 1\n"
    file = own_files.write("counted", counted)
    import_files([file, file])
    import_files([str(Path(file).parent / "." / "counted.py")])
    assert builtins.times == 1
    del builtins.times


def test_a_file_imports_its_neighbours(own_files):
    own_files.write("neighbour", "NUMBER = 3\n")
    import_files([own_files.write("of_neighbour", "from neighbour import NUMBER\n")])
    assert sys.modules["of_neighbour"].NUMBER == 3


# Name of the file, its text (None: there is no such file), what the error says.
BROKEN = {
    "missing": ("missing", None, "missing.py no such file"),
    "exception": ("raises", "x = 1\nx / 0\n", "raises.py line 2 ZeroDivisionError"),
    "syntax": ("syntax", "x = 1\n\nx = = 2\n", "syntax.py line 3 SyntaxError"),
    "end": ("ends", "import sys\nsys.exit(3)\n", "ends.py line 2 SystemExit 3"),
    "import": ("lacks", "import no_such_module\n", "lacks.py line 1 no_such_module"),
    "name": ("json", "", "json.py module json name"),
    "no module": ("my-router", "", "my-router.py NAME.py"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_cannot_be_imported(case, own_files, tmp_path, capsys, run_command):
    name, text, facts = BROKEN[case]
    file = str(own_files.folder / f"{name}.py")
    if text is not None:
        own_files.write(name, text)
    argv = arguments("cls", tmp_path / "run", 1, 1, "--imports", file)
    assert_says(refused(capsys, main, *argv), f"--imports {facts}")
    done = run_command("gates", tmp_path, "--imports", file, "--output", tmp_path / "a.png")
    assert done.code == 2
    assert_says(done.err, f"gates: error: --imports {facts}")
    assert name == "json" or name not in sys.modules
    assert not (tmp_path / "run").exists()


def test_no_configuration_names_code(own_files, tmp_path, capsys):
    """Not that of a training, and not that of a run that is opened, which others may have written."""
    file = own_files.write("touches", f"open({str(tmp_path / 'touched')!r}, 'w')\n")
    config = tmp_path / "config.yaml"
    config.write_text(f"imports: [{file}]\n")
    argv = arguments("cls", tmp_path / "run", 1, 1, "--config", config)
    assert_says(refused(capsys, main, *argv), f"{config} imports {file} code command line")
    main(arguments("cls", tmp_path / "run", 1, 1))
    saved = tmp_path / "run" / "config.yaml"
    saved.write_text(dump(load_tree(saved) | dict(imports=[file])))
    opened = moh_vision.open_run(tmp_path / "run")
    assert opened.config.imports == []
    assert not (tmp_path / "touched").exists()
    moh_vision.open_run(tmp_path / "run", options=["--imports", file])
    assert (tmp_path / "touched").exists()


def test_a_configuration_may_say_what_the_command_line_imports(own_files, tmp_path):
    file = own_files.write("cosine_interpolant", OBJECTIVE)
    config = tmp_path / "config.yaml"
    config.write_text(f"imports: [{file}]\nobjective: cosine\n")
    argv = ["--config", str(config), "--imports", file]
    assert parse_config(DitConfig, argv, "train_dit.py").objective == "cosine"


@pytest.mark.slow  # imports everything again, several times
def test_fresh_processes(own_files, tmp_path):
    """With loader workers, whose processes unpickle what the file defines."""
    file = own_files.write("cosine_interpolant", OBJECTIVE)
    run = tmp_path / "run"
    options = ["--imports", file, "--objective", "cosine", "--data.workers", "1"]
    train = ["train_dit.py", *arguments("dit", run, 2, 2, *options)]
    draw = ["sample.py", "--checkpoint", str(run), "--num-images", "4", "--steps", "2"]
    budget = ["-m", "moh_vision", "search", str(run), "--share", "0.5", "--images", "8"]
    for argv in (
        train,
        [*draw, "--grid", str(tmp_path / "grid.png")],
        [*budget, "--imports", file, "--output", str(tmp_path / "budget.yaml")],
    ):
        done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
