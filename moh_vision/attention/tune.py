"""Measure on this machine where `packed` takes less time than `masked`, and keep the limits for `auto`.

Two minutes on an idle machine, with as many threads as torch takes (OMP_NUM_THREADS). Both paths are measured where the
C++ operators are built. What is too slow for two minutes keeps the limits that come with the package.
"""

import copy
import datetime
import itertools
import json
import random
import re
import time
from statistics import median
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from moh_vision.attention import kernels
from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.executors.limits import BITS, COMMAND, MODES, checked, processor, shipped, table_path
from moh_vision.attention.layer import HeadMixtureAttention
from moh_vision.engine.commands import Parser, exit_code, say
from moh_vision.engine.io import write_whole

HEAD_DIM = 64
SHAPES = [  # batch, tokens, width
    (1, 197, 384),
    (1, 197, 768),
    (8, 197, 384),
    (8, 197, 768),
    (1, 1024, 384),
    (1, 1024, 768),
]
SHARES = (0.5, 0.75, 0.9)
PATHS = {"cpp": "C++", "torch": "PyTorch"}
SCOPES = ("token", "sample")
DTYPES = {"float32": torch.float32, "16 bits": torch.bfloat16}
PAYS = 0.97  # time of packed over that of masked; what is nearer to 1 may be noise
MOST = 0.95  # no limit goes further: with all heads `masked` is plain attention to the bit, which models promise
REACH = 0.9  # a row holds from this part of the keys and numbers that were measured
VISIT = 0.01  # seconds that one step runs at a time: of small ones several calls
LEAST_ROUNDS = 3


class Case(NamedTuple):
    """What one row of the table is measured by."""

    scope: str
    bits: str
    mode: str
    shape: Tuple[int, int, int]  # batch, tokens, width


class Step(NamedTuple):
    """One layer to be timed."""

    path: str
    share: Optional[float]  # of the heads that run, under packed; None: masked
    run: Callable[[], object]


Points = List[Tuple[float, float]]  # share of the heads, median time of packed over that of masked; by rising share
Measured = Dict[Tuple[Case, str], Points]  # by case and path


def measure(seconds: float) -> Tuple[Measured, int]:
    """Time all cases round after round, so that a noisy machine hits all alike.

    Args:
        seconds: no further round begins after so long, once LEAST_ROUNDS are done.

    Returns:
        what was measured, and in how many rounds.
    """
    begin, paths = time.perf_counter(), ["cpp", "torch"] if kernels.path() == "cpp" else ["torch"]
    cases = {
        case: steps_of(case, paths) for case in itertools.starmap(Case, itertools.product(SCOPES, BITS, MODES, SHAPES))
    }
    taken: Dict[Case, List[List[float]]] = {case: [] for case in cases}  # seconds by round and step
    try:
        for number in itertools.count():
            if number > LEAST_ROUNDS and time.perf_counter() - begin > seconds:
                break
            for case, steps in cases.items():
                times = visit(steps)
                if number > 0:  # the first round warms up
                    taken[case].append(times)
    finally:
        kernels.use(None)
    measured = {
        (case, path): ratios(steps, taken[case], path)
        for case, steps in cases.items()
        for path in sorted({step.path for step in steps})
    }
    return measured, number - 1


def steps_of(case: Case, paths: Sequence[str]) -> List[Step]:
    """`masked` and, with several shares of heads, `packed` on every path that has the operators for such a case."""
    (B, N, C), dtype = case.shape, DTYPES[case.bits]
    heads = C // HEAD_DIM
    x = torch.randn(B, N, C, dtype=dtype, requires_grad=case.mode == "training")
    base = HeadMixtureAttention(C, HeadBudget(heads, HEAD_DIM, 1, heads - 2), scope=case.scope, dtype=dtype)
    steps = []
    for path in paths:
        if path == "cpp":
            kernels.use(path)
            if not kernels.native(x.device, dtype, "attend"):
                continue  # it would be the other path
        for share in (None, *sorted({min(round(share * heads), heads - 1) for share in SHARES})):
            layer = with_heads(base, heads // 2 if share is None else share)
            # Logits with a spread of 1.5; the mean of N random tokens is so much smaller.
            nn.init.normal_(layer.router.routed.weight, std=1.5 * ((N if case.scope == "sample" else 1) / C) ** 0.5)
            layer.executor = "masked" if share is None else "packed"
            steps.append(Step(path, None if share is None else share / heads, step_of(layer, x, case.mode)))
    return steps


def with_heads(base: HeadMixtureAttention, active: int) -> HeadMixtureAttention:
    """A layer with the projections of `base`, of whose heads so many run for a token, a fifth of them shared."""
    shared = max(1, active // 5)
    budget = HeadBudget(base.num_heads, base.head_dim, shared, active - shared)
    layer = HeadMixtureAttention(base.dim, budget, scope=base.scope, dtype=base.qkv.weight.dtype)
    layer.qkv, layer.proj = base.qkv, base.proj
    return layer


def step_of(layer: HeadMixtureAttention, x: Tensor, mode: str) -> Callable[[], object]:
    layer.train(mode == "training")
    if mode == "forward":
        return torch.no_grad()(lambda: layer(x))
    inputs, dy = [x, *layer.parameters()], torch.randn_like(x)
    return lambda: torch.autograd.grad(layer(x)[0], inputs, dy, allow_unused=True)


def visit(steps: Sequence[Step]) -> List[float]:
    """Seconds that each step takes, in a random order, as a mean over calls of VISIT seconds together."""
    times = [0.0] * len(steps)
    for i in random.sample(range(len(steps)), len(steps)):
        kernels.use(steps[i].path)
        calls, begin = 0, time.perf_counter()
        while calls == 0 or time.perf_counter() - begin < VISIT:
            steps[i].run()
            calls += 1
        times[i] = (time.perf_counter() - begin) / calls
    return times


def ratios(steps: Sequence[Step], rounds: Sequence[Sequence[float]], path: str) -> Points:
    """The points of one path, of the seconds by round and step."""
    own = [i for i, step in enumerate(steps) if step.path == path]
    masked = next(i for i in own if steps[i].share is None)
    return [(steps[i].share, median(times[i] / times[masked] for times in rounds)) for i in own if i != masked]


def limit(measured: Points) -> float:
    """The share of heads at which time of packed over masked reaches PAYS, on straight lines through what was measured.

    The packed time grows with the share. Beyond the first and the last share their line goes on, up to 0 and MOST.
    """
    pays = [ratio < PAYS for _, ratio in measured]
    first = pays.index(False) if False in pays else len(measured)  # that does not pay
    high = min(max(first, 1), len(measured) - 1)
    (f0, r0), (f1, r1) = measured[high - 1], measured[high]
    if r1 <= r0:  # noise, or a time that does not depend on the heads
        return MOST if first == len(measured) else 0.0
    return min(max(f0 + (PAYS - r0) / (r1 - r0) * (f1 - f0), 0.0), MOST)


def tabulate(measured: Measured, table: dict, about: str) -> dict:
    """A table with what was measured in place of its rows.

    Rows for fewer keys than were measured stay, as far as what was measured does not contradict, and so do those for more.
    """
    table = {**copy.deepcopy(table), "about": about}
    found: Dict[Tuple[str, str, str, str], List[list]] = {}
    for (case, path), points in measured.items():
        B, N, C = case.shape
        row = [int(REACH * N), int(REACH * B * N * C), round(limit(points), 2)]
        found.setdefault((path, case.scope, case.bits, case.mode), []).append(row)
    for (path, kind, bits, mode), rows in found.items():
        rows.sort()
        least, most = rows[0][0], rows[-1][0]  # keys
        kept = []
        for keys, numbers, share in table[path][kind][bits][mode]:
            if keys < least:  # smaller calls do not pay where larger ones do not
                shares = [s for k, n, s in rows if k == least and n >= numbers] or [rows[-1][2]]
                kept.append([keys, numbers, min(share, shares[0])])
            elif keys > most:
                kept.append([keys, numbers, max(share, rows[-1][2])])
        table[path][kind][bits][mode] = sorted(kept + rows)
    return table


def text_of(table: dict) -> str:
    """JSON with one row a line."""
    return (
        re.sub(
            r"\[[^\[\]]+\]",
            lambda row: re.sub(r"\s+(?=[\d\]])", "", row[0]).replace(",", ", "),
            json.dumps(table, indent=1),
        )
        + "\n"
    )


def lines_of(measured: Measured) -> Iterator[str]:
    """What was measured, to be read."""
    columns = list(itertools.product(BITS, MODES))
    yield " " * 44 + "".join(f"{' '.join(column):>18}" for column in columns)
    for path, scope, shape in sorted({(path, case.scope, case.shape) for case, path in measured}):
        cells = [measured.get((Case(scope, *column, shape), path)) for column in columns]
        name = f"{PATHS[path]}, per {scope}, {shape[0]} x {shape[1]} x {shape[2]}"
        yield f"{name:44}" + "".join(f"{'-' if cell is None else f'{limit(cell):.0%}':>18}" for cell in cells)


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, 2 for what the user can mend, 130 when interrupted."""

    def work() -> None:
        parser = Parser(COMMAND, __doc__)
        parser.add_argument("--seconds", type=float, default=120, help="how long to measure (120)")
        seconds, place = parser.parse(argv).seconds, table_path()
        place.parent.mkdir(parents=True, exist_ok=True)  # an error now, and not after two minutes
        machine = f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        say(f"{machine}: about {seconds:.0f} s")
        measured, rounds = measure(seconds)
        say("largest share of the heads at which skipping the others pays, batch x tokens x width:")
        for line in lines_of(measured):
            say(line)
        about = f"{machine}, {rounds} rounds, {datetime.date.today()}"
        write_whole(place, text_of(checked(tabulate(measured, shipped(), about))), shared=True)
        say(f"kept for auto in {place}")

    return exit_code("tune", work)


if __name__ == "__main__":
    raise SystemExit(main())
