"""--help: every key with its default, in 80 columns; its whole text on demand."""

import pytest
import refusals

from moh_vision.classification.config import ClsConfig
from moh_vision.diffusion.config import DitConfig, SampleConfig
from moh_vision.engine.command_line import _leaf_keys, parse_config
from moh_vision.language.config import LanguageConfig


def helped(kind, argv, capsys, **options):
    with pytest.raises(SystemExit, match="0"):
        parse_config(kind, argv, "script.py", **options)
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", [ClsConfig, DitConfig, LanguageConfig, SampleConfig])
def test_every_key_and_its_default_are_shown(kind, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    every = helped(kind, ["--help"], capsys).splitlines()
    lines = [line for line in every if line.startswith("  --")]
    assert [line for line in every if line.startswith("  ") and len(line) > 80] == []
    named = [line.split()[0][2:] for line in lines]
    assert len(named) == len(set(named)) and set(_leaf_keys(kind)) <= set(named)
    if kind is DitConfig:
        text = " ".join(" ".join(every).split())
        assert "--model.name moh_dit_small_patch2_75 model name in timm's registry" in text
        assert (
            '--preview.sampler as in sample.py; left out: "ddim", or with objective flow "euler" --preview.steps 50'
            in text
        )


def test_nobody_reads_the_help_to_its_end(monkeypatch):
    """As after `| head`: no line about a broken pipe."""
    with refusals.unread(monkeypatch), pytest.raises(SystemExit, match="0"):
        parse_config(ClsConfig, ["--help"], "script.py")


def test_the_whole_text_of_a_key_and_of_a_section(capsys):
    assert "written by moh_vision.analysis.search" in helped(ClsConfig, ["--help", "model.head-budget"], capsys)
    text = helped(ClsConfig, ["--help", "ema"], capsys)
    assert "--ema.decay 0.0\n  float\n" in text and "--ema.warmup false" in text and "--mix" not in text
    both = helped(ClsConfig, ["--help", "optim.lr", "model.head-budget"], capsys)
    assert "--optim.lr " in both and "--model.head_budget " in both
    with pytest.raises(ValueError, match="--help modle: no such key or section"):
        parse_config(ClsConfig, ["--help", "modle"], "script.py")


def test_validation_lists_what_it_reads(capsys):
    text = helped(ClsConfig, ["--help"], capsys, to_validate=True)
    assert "--checkpoint" in text and "--data.root" in text and "--optim.lr" not in text
