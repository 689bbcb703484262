"""Measure on this machine where `packed` takes less time than `masked`, and keep the limits for `auto`.

Two minutes on an idle machine, with as many threads as torch takes (OMP_NUM_THREADS). Both paths are measured where the
C++ operators are built. What is too slow for two minutes keeps the limits that come with the package.

With a GPU two more minutes go to Triton's kernels there, one minute of which compiles them. Each is first compared with
`masked`: a kind of call for which a kernel fails or is wrong gets no limits, so that `auto` computes all heads there.
"""

import copy
import datetime
import functools
import itertools
import json
import random
import re
import time
from statistics import median
from typing import Callable, Collection, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from moh_vision.attention import kernels
from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.executors import EXECUTORS
from moh_vision.attention.executors.limits import (
    BITS,
    COMMAND,
    KINDS,
    MODES,
    ON_GPU,
    checked,
    gpu_name,
    processor,
    shipped,
    table,
    table_path,
)
from moh_vision.attention.layer import HeadMixtureAttention
from moh_vision.attention.routing import Routing, RoutingStats
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
GPU_SHAPES = [
    (8, 197, 384),
    (64, 197, 768),
    (2, 1024, 768),
    (16, 1024, 768),
    (1, 4096, 768),
    (8, 4096, 768),
]
DECODE_SHAPES = [(1, 2048, 4096), (1, 8192, 4096), (8, 4096, 4096)]  # batch, keys in the cache, width of all heads
SHARES = (0.5, 0.75, 0.9)
PATHS = {"cpp": "C++", "triton": "Triton", "varlen": "varlen", "torch": "PyTorch"}
SCOPES = ("token", "sample")
DTYPES = {"float32": torch.float32, "16 bits": torch.bfloat16}
AGREES = {"float32": 1e-3, "16 bits": 0.05}  # largest relative difference between packed and masked
PAYS = 0.97  # time of packed over that of masked; what is nearer to 1 may be noise
MOST = 0.95  # no limit goes further: with all heads `masked` is plain attention to the bit, which models promise
REACH = 0.9  # a row holds from this part of the keys and numbers that were measured
VISIT = 0.01  # seconds that one step runs at a time: of small ones several calls
LEAST_ROUNDS = 3


class Case(NamedTuple):
    """What one row of the table is measured by."""

    scope: str  # or "decode"
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


def measure(seconds: float, device: str = "cpu") -> Tuple[Measured, int, List[str]]:
    """Time all cases round after round, so that a noisy machine hits all alike.

    Args:
        seconds: no further round begins after so long, once LEAST_ROUNDS are done.
        device: "cpu", or "cuda" for Triton's kernels.

    Returns:
        what was measured, in how many rounds, and a line for each kind of call that fails on a GPU.
    """
    begin = time.perf_counter()
    if device == "cpu":
        paths = ["cpp", "torch"] if kernels.path() == "cpp" else ["torch"]
        cases = {case: steps_of(case, paths) for case in itertools.starmap(Case, every(SHAPES))}
        failures = []
    else:
        cases, failures = cases_on_gpu(device)
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
    return measured, number - 1, failures


def every(shapes: Sequence[Tuple[int, int, int]]) -> Iterator[tuple]:
    return itertools.product(SCOPES, BITS, MODES, shapes)


def cases_on_gpu(device: str) -> Tuple[Dict[Case, List["Step"]], List[str]]:
    """The cases of a GPU with their steps, and a line for each kind of call that fails or is wrong.

    Such a kind has no steps. A case that needs more memory than there is is left out.
    """
    paths = ON_GPU if kernels.path("cuda") == "triton" else ("varlen",)
    wanted = [*every(GPU_SHAPES), *itertools.product(["decode"], BITS, ["forward"], DECODE_SHAPES)]
    cases: Dict[Case, List[Step]] = {}
    failed: Dict[Tuple[str, str, str], str] = {}
    for case, path in itertools.product(itertools.starmap(Case, wanted), paths):
        kind = (path, case.scope, case.bits)
        if kind in failed or case.scope not in KINDS[path] or (path == "varlen" and case.bits == "float32"):
            continue
        try:
            use(path)
            steps = decoding_steps(case, device) if case.scope == "decode" else steps_of(case, [path], device)
            cases.setdefault(case, []).extend(steps)
        except torch.OutOfMemoryError:
            continue
        except Exception as error:  # whatever a compiler or a driver throws
            said = " ".join(str(error).split())[:200]
            what = f"{PATHS[path]}, {case.scope}, {case.bits}"
            failed[kind] = f"{what}: no limits, {case.mode} of {case.shape}: {said}"
    for case in cases:
        cases[case] = [step for step in cases[case] if (step.path, case.scope, case.bits) not in failed]
    return {case: steps for case, steps in cases.items() if steps}, list(failed.values())


def use(path: str) -> None:
    """Take a path; "varlen" is an executor, beside whatever operators this machine has."""
    kernels.use(None if path == "varlen" else path)


def steps_of(case: Case, paths: Sequence[str], device: str = "cpu") -> List[Step]:
    """`masked` and, with several shares of heads, `packed` on every path that has the operators for such a case.

    Raises:
        ValueError: on a GPU the results differ from those of masked.
    """
    (B, N, C), dtype = case.shape, DTYPES[case.bits]
    heads = C // HEAD_DIM
    x = torch.randn(B, N, C, dtype=dtype, device=device, requires_grad=case.mode == "training")
    budget = HeadBudget(heads, HEAD_DIM, 1, heads - 2)
    base = HeadMixtureAttention(C, budget, scope=case.scope, dtype=dtype, device=device)
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
            layer.executor = "masked"
            run = step_of(layer, x, case.mode)
            if share is not None:
                want = run() if path in ON_GPU else None
                layer.executor = "varlen" if path == "varlen" else "packed"
                if want is not None:
                    compare(run(), want, AGREES[case.bits])
            steps.append(Step(path, None if share is None else share / heads, run))
    return steps


@torch.no_grad()
def decoding_steps(case: Case, device: str) -> List[Step]:
    """As `steps_of`, of attention of one new token with a cache: `masked`, and `decode` with several shares of heads."""
    (B, M, C), dtype = case.shape, DTYPES[case.bits]
    H = C // HEAD_DIM
    q = torch.randn(B, H, 1, HEAD_DIM, dtype=dtype, device=device)
    k, v = torch.randn(2, B, H, M, HEAD_DIM, dtype=dtype, device=device)
    none, steps = torch.empty(0, device=device), []
    for share in (None, *sorted({min(round(share * H), H - 1) for share in SHARES})):
        active = torch.rand(B, 1, H, device=device).argsort(-1).argsort(-1) < (H // 2 if share is None else share)
        routing = Routing(active.float(), active, RoutingStats(none, none, none))
        masked = functools.partial(EXECUTORS["masked"], q, k, v, routing)
        run = masked if share is None else functools.partial(EXECUTORS["decode"], q, k, v, routing)
        if share is not None:
            compare([run()], [masked()], AGREES[case.bits])
        steps.append(Step("triton", None if share is None else share / H, torch.no_grad()(run)))
    return steps


def compare(got: Sequence[Optional[Tensor]], want: Sequence[Optional[Tensor]], allowed: float) -> None:
    """Raise ValueError where tensors differ by more than `allowed`, relative in norm.

    Gradients that are small by cancellation are held to the rounding of the largest one.
    """
    norms = [0.0 if t is None else t.norm(dtype=torch.float32).item() for t in want]
    for a, b, norm in zip(got, want, norms):
        if b is not None:
            error = (a.float() - b.float()).norm().item() / max(norm, 0.02 * max(norms))
            if not error <= allowed:  # also for NaN
                raise ValueError(f"it differs from masked by {error:.1e}, allowed is {allowed:.0e}")


def with_heads(base: HeadMixtureAttention, active: int) -> HeadMixtureAttention:
    """A layer with the projections of `base`, of whose heads so many run for a token, a fifth of them shared."""
    shared = max(1, active // 5)
    budget = HeadBudget(base.num_heads, base.head_dim, shared, active - shared)
    weight = base.qkv.weight
    layer = HeadMixtureAttention(base.dim, budget, scope=base.scope, dtype=weight.dtype, device=weight.device)
    layer.qkv, layer.proj = base.qkv, base.proj
    return layer


def step_of(layer: HeadMixtureAttention, x: Tensor, mode: str) -> Callable[[], Sequence[Optional[Tensor]]]:
    """What computes the output, or all gradients."""
    layer.train(mode == "training")
    if mode == "forward":
        return torch.no_grad()(lambda: layer(x)[:1])
    inputs, dy = [x, *layer.parameters()], torch.randn_like(x)
    return lambda: torch.autograd.grad(layer(x)[0], inputs, dy, allow_unused=True)


def visit(steps: Sequence[Step]) -> List[float]:
    """Seconds that each step takes, in a random order, as a mean over calls of VISIT seconds together."""
    times = [0.0] * len(steps)
    for i in random.sample(range(len(steps)), len(steps)):
        use(steps[i].path)
        clock = on_gpu if steps[i].path in ON_GPU and torch.cuda.is_available() else on_cpu
        times[i] = clock(steps[i].run)
    return times


def on_cpu(run: Callable[[], object]) -> float:
    calls, begin = 0, time.perf_counter()
    while calls == 0 or time.perf_counter() - begin < VISIT:
        run()
        calls += 1
    return (time.perf_counter() - begin) / calls


def on_gpu(run: Callable[[], object]) -> float:
    """Between two events: what the device takes, or Python where that is slower, as in a model."""
    seconds = VISIT
    for calls in (1, None):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        calls = calls or max(1, min(100, int(VISIT / seconds)))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        seconds = max(start.elapsed_time(end) / 1e3 / calls, 1e-6)
    return seconds


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
        what = scope if scope == "decode" else f"per {scope}"
        name = f"{PATHS[path]}, {what}, {shape[0]} x {shape[1]} x {shape[2]}"
        yield f"{name:44}" + "".join(f"{'-' if cell is None else f'{limit(cell):.0%}':>18}" for cell in cells)


def without_limits(table: dict, paths: Collection[str]) -> dict:
    """A table with empty rows for these of a GPU's paths, and none for its others."""
    empty = {p: {kind: {bits: {mode: [] for mode in MODES} for bits in BITS} for kind in KINDS[p]} for p in paths}
    return {path: part for path, part in table.items() if path not in ON_GPU} | empty


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, 2 for what the user can mend, 130 when interrupted."""

    def work() -> None:
        parser = Parser(COMMAND, __doc__)
        parser.add_argument("--seconds", type=float, default=120, help="how long to measure on each device (120)")
        parser.add_argument("--device", choices=("cpu", "cuda"), help="measure on this one only; default: on all")
        args, place = parser.parse(argv), table_path()
        runs = gpu_name() is not None
        if args.device == "cuda" and not runs:
            raise ValueError("--device cuda: torch finds no GPU")
        devices = [args.device] if args.device else ["cpu", "cuda"] if runs else ["cpu"]
        place.parent.mkdir(parents=True, exist_ok=True)  # an error now, and not after two minutes
        before = table()
        after = {**before, **(shipped() if "cpu" in devices else {})}  # a GPU's rows stay until it is measured again
        about = before["about"].split("; ")  # of the processor, and of the GPU
        for device in devices:
            machine = f"{processor()}, {torch.get_num_threads()} threads" if device == "cpu" else gpu_name()
            machine = f"{machine}, torch {torch.__version__}"
            say(f"{machine}: about {args.seconds:.0f} s")
            measured, rounds, failures = measure(args.seconds, device)
            for line in failures:
                say(line)
            if device == "cuda":
                after = without_limits(after, {path for _, path in measured})
            if measured:
                say("largest share of the heads at which skipping the others pays, batch x tokens x width:")
                for line in lines_of(measured):
                    say(line)
                said = f"{machine}, {rounds} rounds, {datetime.date.today()}"
                about = [said, *about[1:]] if device == "cpu" else [about[0], said]
                after = tabulate(measured, after, "; ".join(about))
        write_whole(place, text_of(checked(after)), shared=True)
        say(f"kept for auto in {place}")

    return exit_code("tune", work)


if __name__ == "__main__":
    raise SystemExit(main())
