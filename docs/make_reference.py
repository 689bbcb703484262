"""Write docs/reference/{config,commands,models}.md from the code: `python docs/make_reference.py [PAGE ...]`.

tests/test_docs.py compares the first two with what this makes, and the names in the third with the registry.
"""

import sys
from pathlib import Path
from typing import Dict

import timm
import torch
import yaml

import moh_vision
from moh_vision.__main__ import COMMANDS
from moh_vision.classification.config import ClsConfig, ValidateConfig
from moh_vision.commands.macs import PAPERS, count, image_models
from moh_vision.diffusion.config import DitConfig, SampleConfig
from moh_vision.engine.command_line import default_of, groups_of
from moh_vision.engine.keys import needs_of
from moh_vision.language.config import LanguageConfig

PAGES = Path(__file__).parent / "reference"
PACKAGE = Path(moh_vision.__file__).parent
SCRIPTS = {
    "train_cls.py": ("classification.train", ClsConfig),
    "validate.py": ("classification.validate", ValidateConfig),
    "train_dit.py": ("diffusion.train", DitConfig),
    "sample.py": ("diffusion.sample", SampleConfig),
    "train_text.py": ("language.train", LanguageConfig),
}
HEAD = "<!-- Written by docs/make_reference.py; change the code instead. -->\n"


def config_page() -> str:
    """Every key of every script, with type, default and meaning; keys that scripts share stand once."""
    parts = [HEAD, "# Configuration keys\n"]
    parts.append(
        "A key is set in the YAML file of `--config`, in sections, or as an option: `--optim.lr 1e-3`. In options `-` and `_` are the same.\n"
        "A key that has no effect beside the others is refused by name. An empty default is null.\n"
    )
    seen: Dict[tuple, str] = {}
    for script, (_, kind) in SCRIPTS.items():
        every = dict(pair for _, keys in groups_of(kind) for pair in keys.items())
        parts.append(f"## {script}\n")
        for title, keys in groups_of(kind):
            # What all keys of a section need stands in its title.
            common = [name for name, k in keys.items() if k.kind.needs and len(k.about["needs"]) == 1]
            title += f"; n{needs_of(common[0], every)[1:-1]}" if common else ""
            rows = {}
            for name, k in keys.items():
                text = f"{k.text} {'' if name in common else needs_of(name, every)}".rstrip()
                rows[name] = f"| {_cell(k.allowed)} | {_code(default_of(k))} | {_cell(text)} |"
            new = [row for row in rows.items() if row not in seen]
            if not new:
                continue
            shared = sorted({seen[row] for row in rows.items() if row in seen})
            seen.update(dict.fromkeys(new, script))
            parts.append(f"**{title}**" + (f", and those of {', '.join(shared)}" if shared else "") + "\n")
            rows = [f"| `{name}` {row}" for name, row in new]
            parts.append("\n".join(["| key | type | default | |", "|---|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def commands_page() -> str:
    """Write the list of scripts and commands; what each takes, it says itself."""
    scripts = [f"| `{script}` | `python -m moh_vision.{module}` |" for script, (module, _) in SCRIPTS.items()]
    lines = [f"| `python -m moh_vision {name}` | {line} |" for name, line in COMMANDS.items()]
    parts = [
        HEAD,
        "# Commands\n",
        "The scripts; each is a module too. Their options are [configuration keys](config.md).\n",
        "\n".join(["| script | module |", "|---|---|", *scripts]) + "\n",
        "What people do with finished runs, data and models. `python -m moh_vision COMMAND --help` says what each takes; "
        "[analysis](../guides/analysis.md) has examples.\n",
        "\n".join(["| command | |", "|---|---|", *lines]) + "\n",
    ]
    return "\n".join(parts)


def models_page() -> str:
    """Every image model of the registry and every preset of text models, counted; the papers' scores beside them."""
    parts = [HEAD, "# Models\n"]
    parts.append(
        "Parameters, active share of the heads, and multiply-accumulates of a forward of one image (linear layers and attention scores of the heads "
        "that run),\ncounted by `python -m moh_vision macs NAME`. Scores are the papers', not reproduced here; small runs of ours "
        "are in [results](../README.md).\n"
    )
    papers = yaml.safe_load((PACKAGE / "commands" / "paper_rows.yaml").read_text(encoding="utf-8"))
    for title, names, unit in (
        ("Image models: `timm.create_model(name)`", image_models(), 1e9),
        ("Text models: `moh_vision.language.create_text_model(name)`", list(PAPERS), 1e6),
    ):
        images = unit == 1e9
        columns = ["name", "parameters, M", *(["active heads, %"] if images else []), f"{'G' if images else 'M'}MACs"]
        lines = [f"| {' | '.join(columns)} | in the paper |", f"|---|{'---:|' * (len(columns) - 1)}---|"]
        for name in names:
            found = count(name)
            macs = (found.macs.linears + found.macs.scores) if found.macs.attention else found.macs.every_head
            share = [_share(name)] if images else []
            numbers = " | ".join([f"{found.parameters / 1e6:.1f}", *share, f"{macs / unit:,.1f}"])
            scored = [_scores(row) for row in papers if row["model"] == name]
            lines.append(f"| `{name}` | {numbers} | {'; '.join(filter(None, scored))} |")
        parts.append("\n".join([f"## {title}\n", *lines]) + "\n")
    return "\n".join(parts)


def _share(name: str) -> str:
    with torch.device("meta"):
        budget = moh_vision.head_budget(timm.create_model(name))
    return f"{100 * budget['share']:.0f}" if budget.get("share") else "100"


def _scores(row: dict) -> str:
    names = dict(top1="top-1 {} %", fid="FID {}", bleu="BLEU {}", test_perplexity="perplexity {}")
    words = [text.format(row[key]) for key, text in names.items() if key in row]
    steps = f", {row['steps']} steps" if "steps" in row else ""
    return f"{row['row']}: {', '.join(words)} ({row['data']}{steps}; {row['source']})" if words else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if text else ""


MAKERS = {"config": config_page, "commands": commands_page, "models": models_page}

if __name__ == "__main__":
    for page in sys.argv[1:] or MAKERS:
        (PAGES / f"{page}.md").write_text(MAKERS[page](), encoding="utf-8")
        print(f"docs/reference/{page}.md")
