"""What all benchmarks share: interleaved times on a CPU or a GPU, their spread, the machine, reports and tables."""

import argparse
import json
import os
import platform
import random
import time
from datetime import date
from pathlib import Path

import torch

from moh_vision.attention import kernels

RESULTS = Path(__file__).parent / "results"
PATHS = ("cpp", "torch")


def wall(step):
    """Seconds that a call of `step` takes."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def clock_of(device):
    """A function that runs a step and returns its seconds.

    On a CPU it is `wall`; on a GPU the time between two events, before which the L2 cache is overwritten.
    """
    if device == "cpu":
        return wall
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(max(size, 2**27), dtype=torch.uint8, device=device)

    def between_events(step):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return between_events


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
    low, middle, high = values.quantile(
        torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    ).tolist()
    return dict(median=round(middle, digits), quartiles=[round(low, digits), round(high, digits)])


def to_base(times, base=None):
    """{name: dict(ratio, quartiles, milliseconds, milliseconds_quartiles, rounds)}.

    Ratios are those to the times of `base`, left out the first name, round by round.
    """
    rows = {}
    for name, seconds in times.items():
        ratio, milliseconds = (
            spread(seconds / times[base or next(iter(times))]),
            spread(1e3 * seconds, 4),
        )
        rows[name] = dict(
            ratio=ratio["median"],
            quartiles=ratio["quartiles"],
            milliseconds=milliseconds["median"],
            milliseconds_quartiles=milliseconds["quartiles"],
            rounds=len(seconds),
        )
    return rows


def cell(middle, quartiles):
    """A figure in a table: median and quartiles."""
    return f"{middle:.2f} [{quartiles[0]:.2f} {quartiles[1]:.2f}]"


def markdown(columns, rows):
    """A table; its first column is text."""
    lines = [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
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
    """One line for the head of a table."""
    m = report["machine"]
    operators = f", operators: {report['path']}" if "path" in report else ""
    return f"{m['cores']} cores of {m['cpu']} ({m['isa']}), torch {m['torch'].partition('+')[0]}{operators}, {m['date']}."


def use_path(path):
    """Choose the operators of this process, "cpp", "torch" or None for what a user gets, and return what runs."""
    kernels.use(path)
    return kernels.path()


def parser_of(doc, result):
    """A parser with what all benchmarks take: where their result goes, and whether it is only shown."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=RESULTS / f"{result}.json", help="default: %(default)s"
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="only print what is in --output, as docs/results have it",
    )
    return parser


def new_report(**about):
    return dict(machine=machine(), load_before=os.getloadavg(), **about)


def write_report(path, report, indent=1):
    """As JSON, with the load of the machine at the end."""
    report["load_after"] = os.getloadavg()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=indent) + "\n")
