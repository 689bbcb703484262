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
    """Return the seconds that a call of `step` takes."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def clock_of(device):
    """Return a function that runs a step and returns its seconds.

    On a CPU it is `wall`; on a GPU the time between two events, before which the L2 cache is overwritten.
    """
    if device == "cpu":
        return wall
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(max(size, 2**27), dtype=torch.uint8, device=device)

    def between_events(step):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
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
    if isinstance(rounds, int):
        rounds = (rounds, rounds)
    least, most = rounds
    times = {name: [] for name in steps}
    names = list(steps)
    shuffle = random.Random(0).shuffle
    begin = time.perf_counter()
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
    """Return the median and quartiles of the values of all rounds [rounds]."""
    values = torch.as_tensor(values, dtype=torch.float64)
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, middle, high = values.quantile(quartiles).tolist()
    return dict(median=round(middle, digits), quartiles=[round(low, digits), round(high, digits)])


def to_base(times, base=None):
    """Return {name: dict(ratio, quartiles, milliseconds, milliseconds_quartiles, rounds)}.

    Ratios are to the times of `base` round by round; without `base`, to those of the first name.
    """
    rows = {}
    for name, seconds in times.items():
        ratio = spread(seconds / times[base or next(iter(times))])
        milliseconds = spread(1e3 * seconds, 4)
        rows[name] = dict(
            ratio=ratio["median"],
            quartiles=ratio["quartiles"],
            milliseconds=milliseconds["median"],
            milliseconds_quartiles=milliseconds["quartiles"],
            rounds=len(seconds),
        )
    return rows


def cell(middle, quartiles):
    """Write a figure of a table: median and quartiles."""
    return f"{middle:.2f} [{quartiles[0]:.2f} {quartiles[1]:.2f}]"


def markdown(columns, rows):
    """Write a table; its first column is text."""
    lines = [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows]) + "\n"


def machine():
    """Return what a report says of this machine and of today."""
    cpu = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":")[1].strip() for line in lines if "model name" in line]
        if names:
            cpu = names[0]
    return dict(
        cpu=cpu,
        isa=torch.backends.cpu.get_cpu_capability(),
        cores=os.cpu_count(),
        python=platform.python_version(),
        torch=torch.__version__,
        date=date.today().isoformat(),
    )


def about_machine(report):
    """Write one line for the head of a table."""
    about = report["machine"]
    version = about["torch"].partition("+")[0]
    text = f"{about['cores']} cores of {about['cpu']} ({about['isa']}), torch {version}"
    if "path" in report:
        text += f", operators: {report['path']}"
    return f"{text}, {about['date']}."


def use_path(path):
    """Choose the operators of this process, "cpp", "torch" or None for what a user gets, and return what runs."""
    kernels.use(path)
    return kernels.path()


def parser_of(doc, result):
    """Make a parser with the options that all benchmarks have: --output and --table."""
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
    """Begin a report, with the load of the machine before."""
    return dict(machine=machine(), load_before=os.getloadavg(), **about)


def write_report(path, report, indent=1):
    """Write a report as JSON, with the load of the machine at the end."""
    report["load_after"] = os.getloadavg()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=indent) + "\n")
