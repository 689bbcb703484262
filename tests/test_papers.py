"""docs/papers.md: every table and figure has its row; every run and command in it, and in headers of configurations, exists."""

import importlib
import json
import re
import shlex

import pytest
import timm
import torch
from conftest import ROOT

from moh_vision.attention import attention_layers, head_budget
from moh_vision.classification.config import ClsConfig
from moh_vision.diffusion.config import DitConfig
from moh_vision.engine.command_line import parse_config
from moh_vision.language.config import LanguageConfig
from moh_vision.language.models.create import preset_config
from moh_vision.models.transnext import SMALL, stage_budgets

KINDS = {"cls": ClsConfig, "dit": DitConfig, "text": LanguageConfig}
SCRIPTS = {
    "sample.py": "moh_vision.diffusion.sample",
    "train_cls.py": "moh_vision.classification.train",
    "train_dit.py": "moh_vision.diffusion.train",
    "train_text.py": "moh_vision.language.train",
    "validate.py": "moh_vision.classification.validate",
}
PAGE = (ROOT / "docs" / "papers.md").read_text()
CODE = sorted(set(re.findall(r"`([^`]+)`", PAGE)) | {line.strip() for line in PAGE.splitlines() if line[:4] == " " * 4})
RUNS = [code for code in CODE if re.match(r"(cls|dit|text)/\w", code)]
VARIANTS = [
    f"{file.parent.name}/{file.stem} {options}"
    for file in sorted((ROOT / "configs").glob("*/*.yaml"))
    for options in re.findall(r"^# {3}(--.+?)(?: {2}|$)", file.read_text(), re.M)
]
COMMANDS = [code for code in CODE if re.match(r"(python|accelerate launch|torchrun) ", code)]
BUDGETS = re.findall(r"^\| ([\d.]+) % \| (\d+) \| `(\[\[.+?\]\])` \|$", PAGE, re.M)
OTHER = {"cls/", "dit/", "text/", "--model.head_budget", "load_checkpoint", "MoHDiTPipeline"}


def numbered(text):
    """{"Table 1", "Figure A", ...} of the first cells of a section's rows."""
    found = set()
    for kind, names in re.findall(r"^\| (Table|Figure)s? ((?:\w(?:, )?)+) \|", text, re.M):
        found |= {f"{kind} {name}" for name in names.split(", ")}
    return found


@pytest.mark.parametrize(
    "paper, tables, figures",
    [("MoH", "1234567ABCDE", "123ABC"), ("MoA", "1234567", "1234"), ("MAE", "12345678", "123")],
)
def test_every_table_and_figure_has_a_row(paper, tables, figures):
    section = re.search(rf"^## {paper}: .*?(?=^## )", PAGE, re.M | re.S)[0]
    assert numbered(section) == {f"Table {n}" for n in tables} | {f"Figure {n}" for n in figures}


def test_all_code_is_a_run_or_a_command():
    known = {*RUNS, *COMMANDS, *OTHER, *(budget for _, _, budget in BUDGETS)}
    assert [code for code in CODE if code not in known] == []
    assert len(RUNS) > 40 and len(COMMANDS) > 10 and len(VARIANTS) > 40


def made(kind, *argv):
    """The model of a configuration, on meta; of language its preset or what it is converted from."""
    config = parse_config(KINDS[kind], ["--config", *argv], "test")
    if kind == "text":
        return config.model.pretrained or preset_config(config.model.name)
    with torch.device("meta"):
        return timm.create_model(config.model.name, **config.model.arguments())


@pytest.mark.parametrize("code", RUNS + VARIANTS)
def test_runs(code):
    """The configuration is there, its keys are taken and their values allowed; and the model can be made."""
    name, *options = shlex.split(code)
    files = sorted((ROOT / "configs").glob(f"{name}.yaml"))
    assert files and not ("*" in name and options)
    for file in files:
        assert made(file.parent.name, str(file), *options)


@pytest.mark.parametrize("code", COMMANDS)
def test_commands(code, capsys):
    """The script or module is there, and takes these options."""
    words = [word for word in shlex.split(code, comments=True) if word not in ("python", "accelerate", "launch")]
    words = words[1 + words.index("-m") :] if "-m" in words else words
    module = importlib.import_module(SCRIPTS.get(words[0], words[0]))
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{module.__name__}.__main__")
    command = words[1:2] if words[0] == "moh_vision" else []
    try:
        assert module.main([*command, "--help"]) in (None, 0)
    except SystemExit as end:
        assert not end.code
    text = capsys.readouterr().out
    taken = set(re.findall(r"(?<![\w-])--[\w.-]+", text))
    taken |= {option.replace("_", "-") for option in taken}
    assert [word for word in words if word.startswith("--") and word not in taken] == []


@pytest.mark.parametrize("config", ["cls/moh_transnext_small_75", "dit/moh_dit_small_patch2_75", "cls/cifar10_vit_cpu"])
def test_the_ablation_of_components(config):
    """Jin 2024, table 6: equally many heads of each layer run in all three rows, that is 75 %."""
    rows = [row for row in RUNS if row.startswith(f"{config} ") and ("head_budget" in row or "two_stage" in row)]
    [routed_only] = [row for row in rows if "[[0,3]" in row or ":0.75:0" == row[-7:] and "moa" not in row]
    [one_stage] = [row for row in rows if "two_stage" in row]
    neither, shared, both = (made(row[:3], *shlex.split(row)) for row in (routed_only, one_stage, config))
    active = [[layer["active"] for layer in head_budget(model)["layers"]] for model in (neither, shared, both)]
    assert active[0] == active[1] == active[2] and head_budget(both)["share"] == pytest.approx(0.75, abs=0.004)
    for model, some_shared, balanced in ((neither, False, False), (shared, True, False), (both, True, True)):
        layers = attention_layers(model)
        assert any(layer.budget.shared for layer in layers) == some_shared
        assert any(getattr(layer.router, "balance", None) is not None for layer in layers) == balanced


def test_the_shares_of_shared_heads():
    """Jin 2024, table 7: the budgets of the page have the shares that the paper prints."""
    assert len(BUDGETS) == 9
    for share, shared, spec in BUDGETS:
        stages = stage_budgets(json.loads(spec), SMALL["depths"], SMALL["num_heads"], SMALL["embed_dims"])
        layers = [budget for stage in stages for budget in stage]
        assert sum(b.active for b in layers) == 323 and sum(b.shared for b in layers) == int(shared)
        assert 100 * int(shared) / 323 == pytest.approx(float(share), abs=0.06)
