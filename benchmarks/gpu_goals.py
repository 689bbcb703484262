"""What benchmarks/gpu.py aims at on one H100 or H200 in bfloat16, and what of it was reached."""

from typing import NamedTuple

from timing import cell, markdown, verdict


class Goal(NamedTuple):
    """Largest time of `auto` over that of dense attention on the fastest backend of the card, or over that of `masked`."""

    part: str  # "layer", "prefill" or "step"
    shape: str
    scope: str
    share: float  # of the heads that run
    mode: str  # "forward" or "train" (forward and backward; a step: the whole training step)
    limit: float
    base: str = "dense"


MODES = ("forward", "train")
LONG = {"n1024": (0.82, 0.92), "n4096": (0.65, 0.84), "n16384": (0.56, 0.79)}  # at shares 0.5 and 0.75
SHORT = ("vit_base", "dit_xlarge")
GOALS = (
    *(
        Goal("layer", n, "token", s, mode, x)
        for n, xs in LONG.items()
        for s, x in zip((0.5, 0.75), xs)
        for mode in MODES
    ),
    *(Goal("layer", n, "token", s, mode, 1.0) for n in SHORT for s in (0.5, 0.75) for mode in MODES),
    *(Goal("layer", n, "token", s, mode, 0.95, "masked") for n in SHORT for s in (0.5, 0.75) for mode in MODES),
    *(
        Goal("layer", n, "sample", s, mode, round(s + 0.08, 2))
        for n in (*SHORT, *LONG)
        for s in (0.5, 0.75)
        for mode in MODES
    ),
    Goal("prefill", "llama_8b", "token", 0.5, "forward", 0.7),
    *(Goal("step", family, "token", 0.75, "train", 1.02) for family in SHORT),
    *(Goal("step", family, "sample", 0.5, "train", 0.9) for family in SHORT),
)
# The first form that was measured counts: replays of a graph are the time of the device alone.
FORMS = {"step": ("compiled",)}
# What a goal is about.
OURS = ("packed",)


def ratios(goal, report):
    """{executor: spread of the ratio} of those of OURS that were measured, by the first form that has any."""
    for form in FORMS.get(goal.part, ("graph", "eager")):
        about = dict(part=goal.part, shape=goal.shape, mode=goal.mode, form=form, dtype="bfloat16")
        for table in report["tables"]:
            if all(table[key] == value for key, value in about.items()):
                found = {name: table["rows"].get(f"{name} {goal.share} {goal.scope}", {}) for name in OURS}
                found = {name: row[f"to_{goal.base}"] for name, row in found.items() if f"to_{goal.base}" in row}
                if found:
                    return found
    return {}


def judged(report):
    """One dict for each goal: what it is, the ratios that were measured, and "met", "missed" or "not measured"."""
    rows, counts = [], "card" in report and not report["quick"]
    for goal in GOALS:
        found = ratios(goal, report) if counts else {}
        judgement = "not measured"
        if found:
            judgement = verdict(next(iter(found.values()))["quartiles"][0], goal.limit).strip("*")
        rows.append(dict(goal._asdict(), measured=found, verdict=judgement))
    return rows


def goal_table(report):
    """Markdown, all goals."""
    rows = []
    for row in judged(report):
        figures = [f"{name} {cell(r['median'], r['quartiles'])}" for name, r in row["measured"].items()]
        what = [row[key] for key in ("part", "shape", "scope", "share", "mode", "base")]
        rows.append([*map(str, what), f"{row['limit']:g}", "; ".join(figures), row["verdict"]])
    columns = ("part", "shape", "heads per", "share", "mode", "time over", "goal", "measured [quartiles]", "")
    return markdown("Goals", columns, rows)
