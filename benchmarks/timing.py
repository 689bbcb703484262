"""What all benchmarks share: interleaved times, their spread, the machine, the operators in use, and the report."""

import json
import os
import platform
import random
import time
from datetime import date
from pathlib import Path

import torch

from moh_vision.attention import kernels

PATHS = ("cpp", "torch")


def wall(step):
    """Seconds that a call of `step` takes."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def interleaved(steps, rounds, seconds=None, warm_up=2, before=None, clock=wall):
    """Run all steps once a round, in another random order each round, so that a noisy machine hits all alike.

    Args:
        steps: {name: function without arguments}.
        rounds: how many rounds count, or (least, most) where `seconds` decides.
        seconds: no further round begins after so long, once one warm-up and the least rounds are done.
        warm_up: rounds before, which do not count.
        before: called with the number of the round at its beginning (negative: warm-up), outside of the times.
        clock: runs a step and returns its seconds.

    Returns:
        {name: seconds [rounds], float64}, in the order of `steps`.
    """
    least, most = (rounds, rounds) if isinstance(rounds, int) else rounds
    times, names = {name: [] for name in steps}, list(steps)
    shuffle, begin = random.Random(0).shuffle, time.perf_counter()
    for number in range(-warm_up, most):
        late = seconds is not None and time.perf_counter() - begin > seconds
        if late and -warm_up < number < 0:
            continue  # steps that take seconds need no second warm-up
        if late and number >= least:
            break
        if number == 0:
            begin = time.perf_counter()
        if before is not None:
            before(number)
        shuffle(names)
        for name in names:
            taken = clock(steps[name])
            if number >= 0:
                times[name].append(taken)
    return {name: torch.tensor(taken, dtype=torch.float64) for name, taken in times.items()}


def spread(values, digits=3):
    """Median and quartiles of the values of all rounds [rounds]."""
    values = torch.as_tensor(values, dtype=torch.float64)
    low, middle, high = values.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return dict(median=round(middle, digits), quartiles=[round(low, digits), round(high, digits)])


def to_first(times):
    """{name: dict(ratio, quartiles, milliseconds, milliseconds_quartiles, rounds)}: ratios to the first, by round."""
    base, rows = next(iter(times.values())), {}
    for name, seconds in times.items():
        ratio, milliseconds = spread(seconds / base), spread(1e3 * seconds)
        rows[name] = dict(
            ratio=ratio["median"],
            quartiles=ratio["quartiles"],
            milliseconds=milliseconds["median"],
            milliseconds_quartiles=milliseconds["quartiles"],
            rounds=len(seconds),
        )
    return rows


def verdict(low, limit):
    """Whether a goal is met: the lower quartile reaches it, because smaller differences are noise."""
    return "met" if round(low, 3) <= round(limit, 3) else "**missed**"


def cell(middle, quartiles, limit=None):
    """A figure in a table: median, quartiles, and the goal if there is one."""
    text = f"{middle:.2f} [{quartiles[0]:.2f} {quartiles[1]:.2f}]"
    return text if limit is None else f"{text}, goal {limit:.2f} {verdict(quartiles[0], limit)}"


def markdown(title, columns, rows):
    """A table under its title."""
    lines = [f"## {title}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows]) + "\n"


def machine():
    names = (
        [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if "model name" in line]
        if os.path.exists("/proc/cpuinfo")
        else []
    )
    return dict(
        cpu=names[0] if names else platform.processor(),
        isa=torch.backends.cpu.get_cpu_capability(),
        cores=os.cpu_count(),
        python=platform.python_version(),
        torch=torch.__version__,
        date=date.today().isoformat(),
    )


def about_machine(report):
    """One line for the head of tables."""
    m = report["machine"]
    about = f"{m['cores']} cores of {m['cpu']} ({m.get('isa', 'instruction set not recorded')}), torch {m['torch']}"
    before, after = (report[when][0] for when in ("load_before", "load_after"))
    return f"{about}, operators: {report.get('path', 'torch')}, {m['date']}, load {before:.1f} before and {after:.1f} after."


def use_path(path):
    """Choose the operators of this process, "cpp", "torch" or None for what a user gets, and return what runs."""
    kernels.use(path)
    return kernels.path()


def write_report(path, report, indent=1, quiet=False):
    """As JSON, with the load of the machine at the end."""
    report["load_after"] = os.getloadavg()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=indent) + "\n")
    if not quiet:
        print(path)
