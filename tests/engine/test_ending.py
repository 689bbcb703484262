"""What a run prints at its end."""

import contextlib
import importlib
import re
import shlex

import pytest
from small_runs import arguments

from moh_vision.diffusion.config import SampleConfig
from moh_vision.diffusion.sampling import SAMPLERS
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.logging import NEXT, OF_FILES, ending


@pytest.mark.parametrize(
    "command", [*(command for commands in NEXT.values() for command in commands), *OF_FILES.values()]
)
def test_what_comes_next_is_a_command(command, capsys):
    module, *words = shlex.split(f"python -m moh_vision{command}")[2:]
    module, name = ("moh_vision.__main__", words[:1]) if module == "moh_vision" else (module, [])
    with contextlib.suppress(SystemExit):
        importlib.import_module(module).main([*name, "--help"])
    taken = re.findall(r"(?<![\w-])--[\w-]+", capsys.readouterr().out)
    assert {w for w in words if w.startswith("--")} <= {option.replace("_", "-") for option in taken}


def test_a_run_names_the_files_that_it_made(tmp_path, capsys):
    from moh_vision.classification.train import main

    main(arguments("cls", tmp_path / "run", 1, 1))
    made, _, following = capsys.readouterr().out.partition(f"{tmp_path / 'run'} has ")[2].partition("\nnext\n")
    named = made.split(", ")
    assert {"results.json", "model.safetensors", "checkpoints", "config.yaml"} <= set(named)
    assert all((tmp_path / "run" / name).exists() for name in named) and "best.safetensors" not in named
    assert shlex.split(following.splitlines()[0])[-1] == str(tmp_path / "run")


@pytest.mark.parametrize("objective", ["noise", "flow"])
def test_a_diffusion_run_suggests_few_steps_of_a_sampler_for_its_objective(tmp_path, objective):
    command = ending("train_dit.py", tmp_path, objective).splitlines()[2]
    config = parse_config(SampleConfig, shlex.split(command)[3:], "sample.py")
    assert SAMPLERS[config.sampler] == objective and config.steps == 20
