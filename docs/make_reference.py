"""Write pages from the code and from what ships with it: `python docs/make_reference.py [PAGE ...]`.

docs/reference/{config,commands,models,routers}.md are of the code, docs/results/runs.md is of the logs beside the configurations.
tests/test_pages.py compares all but models with what this makes, and the names in models with the registry.
"""

import inspect
import json
import re
import statistics
import sys
from pathlib import Path

import timm
import torch
from torch import nn

import moh_vision
from moh_vision.__main__ import COMMANDS
from moh_vision.attention import ROUTERS, Router
from moh_vision.classification.config import ClsConfig, ValidateConfig
from moh_vision.commands.table import PAPER_ROWS
from moh_vision.diffusion.config import DitConfig, SampleConfig
from moh_vision.engine.command_line import default_of, groups_of
from moh_vision.language.config import LanguageConfig
from moh_vision.language.models.configs import causal_routers
from moh_vision.language.models.create import create_text_model, list_text_presets
from moh_vision.models.counts import count_macs, count_parameters
from moh_vision.models.creation import image_models

DOCS = Path(__file__).parent
CONFIGS = DOCS.parent / "configs"
SCRIPTS = {
    "train_cls.py": ("classification.train", ClsConfig),
    "validate.py": ("classification.validate", ValidateConfig),
    "train_dit.py": ("diffusion.train", DitConfig),
    "sample.py": ("diffusion.sample", SampleConfig),
    "train_text.py": ("language.train", LanguageConfig),
}
TOKENS = {"mt": 10, "mlm": 128, "clm": 512}  # of each text
HEAD = "<!-- Written by docs/make_reference.py; change the code instead. -->\n"


ABOUT_KEYS = """\
A key is set in the YAML file of `--config`, in sections, or as an option: `--optim.lr 1e-3`. In options `-` and `_` are
the same, options override the file, and later options earlier ones. What a key takes and means, a script prints:

    python train_cls.py --help                     # all keys, in short
    python train_cls.py --help optim data.augment  # the whole text of keys or sections
    python train_cls.py --config FILE --print_config

**Files.** `--config` takes a path, or the name of a configuration of the package, such as `quickstart/cls`.
`base: FILE`, relative to the file it stands in, names another one, whose keys it takes where it has none of its own;
bases may have bases. A file holds only keys of its script, and no options of one call, such as `dry_run`.
RUN/config.yaml has all keys as the run used them, and is a file for `--config`.

**Values.** `int`, `float`, `bool` and `text` as in YAML; `null`, or nothing in the file, is an empty default below: the
text of the key says what is done then. Lists are `--data.crop_scale 0.2 1.0` or `[0.2, 1.0]`. A mapping is YAML,
`--model.kwargs "{depth: 2}"`, which replaces that of a file, or set by parts, `--model.kwargs.depth 2`, in a file
`kwargs.depth: 2`, which keeps its other entries. A number has limits, a choice its words; both are in the text, and a
value outside of them is refused.

**Needs.** A key that has no effect beside the others is refused by name: `--ema.warmup true` without `--ema.decay`. The
text says what a key needs. Keys of the model that are left out keep the registered model's own value.

**Another start.** A run goes on only with the keys that it began with, but for those that change no number, such as
`log_every` ([scale](../guides/scale.md)); `--allow_change KEY` permits another.

Below stands every key with its default, once: what a later script shares with an earlier one is left out, where the
default is the same.
"""


def config_page() -> str:
    """Say how keys work, and list the keys of every script with defaults; what scripts share stands once."""
    parts = [HEAD, "# Configuration keys\n", ABOUT_KEYS]
    seen = set()
    for script, (_, config_class) in SCRIPTS.items():
        parts.append(f"## {script}\n")
        for title, keys in groups_of(config_class):
            rows = [f"| `{name}` | {_code(default_of(found))} |" for name, found in keys.items()]
            new = [row for row in rows if row not in seen]
            seen.update(new)
            if new:
                parts.append("\n".join([f"| {title} | |", "|---|---|", *new]) + "\n")
    return "\n".join(parts)


def commands_page() -> str:
    """Write the list of scripts and commands; what each takes, it says itself."""
    scripts = [f"- `{script}`: `moh_vision.{module}`" for script, (module, _) in SCRIPTS.items()]
    lines = [f"- `{name}`: {line}" for name, line in COMMANDS.items()]
    parts = [
        HEAD,
        "# Commands\n",
        "The scripts; each is a module too (`python -m`). Their options are [configuration keys](config.md).\n",
        "\n".join(scripts) + "\n",
        "`python -m moh_vision COMMAND`, for finished runs, data and models; `--help` says what each takes,\n"
        "[analysis](../guides/analysis.md) has examples.\n",
        "\n".join(lines) + "\n",
    ]
    return "\n".join(parts)


def counted(name: str) -> tuple[nn.Module, int]:
    """Return a model without weights, and MACs of linear layers and scores in one forward of batch 1."""
    named = {}
    with torch.device("meta"):
        if name in image_models():
            model = sized = timm.create_model(name)
            inputs = [torch.zeros(1, *model.pretrained_cfg["input_size"])]
            if image_models()[name] == "diffusion":
                inputs += [torch.zeros(1, dtype=torch.long)] * 2  # timestep and class
        else:
            task = name.partition("_")[0]
            model = sized = create_text_model(name)
            ids = torch.zeros(1, TOKENS[task], dtype=torch.long)
            inputs = [ids]
            if task == "mt":
                # Zhang 2022 counts parameters with about 37,000 words, MACs of translation with 32,000.
                sized = create_text_model(name, vocab_size=32_000)
                named["decoder_input_ids"] = ids
        macs = count_macs(sized, *inputs, **named)
    if macs.attention:
        return model, macs.linears + macs.scores
    return model, macs.every_head


def models_page() -> str:
    """Count every image model of the registry and every preset of text models, and list the papers' scores."""
    parts = [HEAD, "# Models\n"]
    parts.append(
        "Parameters, active share of the heads, and multiply-accumulates of a forward of one image or text: linear layers and\n"
        "attention scores of the heads that run. Texts have 10 source and 10 target tokens and 32,000 words (translation, as in\n"
        "Zhang 2022, appendix E), 128 tokens (`mlm`) or 512 (`clm`). The papers leave the scores out; Zhang's table 2 counts them\n"
        "twice. [`--dry-run`](../guides/analysis.md#parameters-and-macs-of-every-module) counts any configuration.\n\n"
        "Scores of the last column are the papers', not reproduced here, FIDs those of Jin 2024 on ImageNet 256 x 256; small\n"
        "runs of ours: [quality](../results/quality.md).\n"
    )
    for title, names, unit in (
        ("Image models: `timm.create_model(name)`", image_models(), 1e9),
        ("Text models: `moh_vision.language.create_text_model(name)`", list_text_presets(), 1e6),
    ):
        images = unit == 1e9
        columns = ["name", "parameters, M", "MMACs"]
        if images:
            columns = ["name", "parameters, M", "active heads, %", "GMACs"]
        lines = [
            f"| {' | '.join(columns)} | in the paper |",
            f"|---|{'---:|' * (len(columns) - 1)}---|",
        ]
        for name in names:
            model, macs = counted(name)
            cells = [f"`{name}`", f"{count_parameters(model) / 1e6:.1f}"]
            if images:
                share = moh_vision.head_budget(model).get("share") or 1
                cells.append(f"{100 * share:.0f}")
            cells.append(f"{macs / unit:,.1f}")
            scored = [_scores(row) for row in PAPER_ROWS if row["model"] == name]
            cells.append("; ".join(filter(None, scored)))
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join([f"## {title}\n", *lines]) + "\n")
    return "\n".join(parts)


def _scores(row: dict) -> str:
    names = dict(top1="top-1 {} %", fid="FID {}", bleu="BLEU {}", test_perplexity="perplexity {}")
    words = [text.format(row[key]) for key, text in names.items() if key in row]
    if not words:
        return ""
    about = [row["data"], row["source"].partition(",")[0]]
    if "fid" in row:  # all FIDs are of one paper and data set
        about = [f"{row['steps']} steps", *re.findall(r"cfg = [\d.]+", row["row"])]
    return f"{', '.join(words)} ({', '.join(about)})"


ABOUT_RUNS = """\
# What a run should show

Most configurations that train in minutes on a CPU ship with the log of one run, `configs/*/*.jsonl`, whose first line has
the command. Here are their losses, so that you can compare your first run after a few steps, and the scores at the end.
Add `--log_every 10`, as those runs did, and for WikiText-2 `--data.train valid`. The same steps on another processor
differ in the last digits at first, and by a few per cent later, because rounding changes which of two close heads runs.
`python -m moh_vision curves RUN configs/dit/NAME.jsonl --output curves.png` draws both runs.

Each number is the mean of the last five logged steps up to the one that is named. "loss" is what is minimised: the task's
loss and 0.01 of the balance loss. The mse and vb are the parts of a DiT's task loss. A balance loss of 0 is of a dense
model or of a router without one. The time is that of the configuration's first lines; `--estimate true` says yours.
"""
# The loss of a log -> its column.
LOSSES = dict(loss="loss", task_loss="task", mse="mse", vb="vb", balance_loss="balance")


def runs_page() -> str:
    """docs/results/runs.md: losses and scores in the logs that ship with configurations."""
    lines = [HEAD, ABOUT_RUNS]
    lines += ["## Losses\n", f"| configuration | step | {' | '.join(LOSSES.values())} |"]
    lines.append("|---|" + "---:|" * (1 + len(LOSSES)))
    ends = [
        "",
        "## Scores and time\n",
        "| configuration | scores | time | run |",
        "|---|---|---|---|",
    ]
    for file in sorted(CONFIGS.glob("*/*.jsonl")):
        name = f"`{file.parent.name}/{file.stem}`"
        about, *rows = [json.loads(line) for line in file.read_text().splitlines()]
        steps = [row for row in rows if "task_loss" in row]
        last = steps[-1]["step"]
        for step in [1, *(step for step in (100, 1000) if step < last), last]:
            losses = _mean_losses(steps, step)
            cells = [f"{losses[key]:.3f}" if key in losses else "" for key in LOSSES]
            lines.append(f"| {name} | {step:,} | {' | '.join(cells)} |")
        run = f"{about['device']}, torch {about['versions']['torch']}, {about['date'][:10]}"
        ends.append(f"| {name} | {_validation(rows)} | {_time(file)} | {run} |")
    return "\n".join([*lines, *ends]) + "\n"


def _mean_losses(rows: list[dict], step: int) -> dict[str, float]:
    """Return the means of the last five logged values of each loss up to a step."""
    logged = [row for row in rows if row["step"] <= step][-5:]
    return {key: statistics.mean(row[key] for row in logged) for key in LOSSES if key in logged[0]}


def _time(log: Path) -> str:
    """Return the time that the first lines of the configuration of a log name; "" if they name none."""
    lines = log.with_suffix(".yaml").read_text(encoding="utf-8").splitlines()
    header = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    found = re.search(r"Time: (.+?)\.(?= |$)", header)
    return found[1] if found else ""


def _validation(rows: list[dict]) -> str:
    """Return the scores of the last validation in a log; "" without one."""
    names = dict(top1="top-1 {:.2f} %", bleu="BLEU {:.1f}", perplexity="perplexity {:.1f}")
    found = [row["validation"] for row in rows if "validation" in row]
    if not found:
        return ""
    scores = found[-1]
    return ", ".join(text.format(scores[key]) for key, text in names.items() if key in scores)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _code(text: str) -> str:
    if not text:
        return ""
    return f"`{_cell(text)}`"


ABOUT_ROUTERS = """\
What each router says of itself (`moh_vision.attention.Router`), by its name in `ROUTERS`. [Concepts](../concepts.md) has the
papers and the meaning of the options; `mae` with a causal `pool` reads earlier tokens, and each token then has its own choice.

- **reads**: what the heads of a token depend on: the token, those before it too, or the whole sequence, which no causal
  layer may read.
- **chooses**: each token its own heads, or a sequence once for all of its tokens.
- **scopes**: `scope` of a layer; "sample" gives one vector to the router.
- **heads**: shared and routed, routed alone, or all.
- **loss**: the auxiliary losses, by `balance_weight` (moh), or `moa_balance_weight` and `z_weight` (moa).
- **convert**: whether it can start as plain attention; **LLaMA**: in language models of that style; **MLP**: whether it
  can choose groups of an MLP.
"""


def routers_page() -> str:
    """List the routers with what their classes say."""
    columns = (
        "name, what it does, reads, chooses, scopes, heads, loss, options, convert, LLaMA, MLP"
    )
    lines = [f"| {' | '.join(columns.split(', '))} |", "|---" * len(columns.split(", ")) + "|"]
    lines += [router_row(name, router) for name, router in ROUTERS.items()]
    return "\n".join([HEAD, "# Routers\n", ABOUT_ROUTERS, *lines]) + "\n"


def router_row(name: str, router: type[Router]) -> str:
    """Return the row of a router."""
    says = " ".join(inspect.getdoc(router).split("\n\n")[0].split())
    heads = "shared and routed"
    if router.all_heads:
        heads = "all"
    elif router.shared_share == 0:
        heads = "routed"
    options = [*router.options(), *router.layer_options]
    can = (router.can_become_dense(), name in causal_routers(), router.chooses_from_a_vector())
    cells = [
        f"`{name}`",
        says,
        router.reads,
        router.choice,
        ", ".join(router.scopes),
        heads,
        router.aux_loss,
        ", ".join(f"`{option}`" for option in options),
        *("yes" if one else "" for one in can),
    ]
    return f"| {' | '.join(cells)} |"


MAKERS = {
    "reference/routers": routers_page,
    "reference/config": config_page,
    "reference/commands": commands_page,
    "reference/models": models_page,
    "results/runs": runs_page,
}

if __name__ == "__main__":
    for page in sys.argv[1:] or MAKERS:
        (DOCS / f"{page}.md").write_text(MAKERS[page](), encoding="utf-8")
        print(f"docs/{page}.md")
