"""`--estimate`: what a run will cost, here from a few of its steps and elsewhere; nothing of the run is written."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from moh_vision.attention.executors.measurement_table import device_name
from moh_vision.common.io import memory_limit
from moh_vision.engine.logging import UNITS, peak_memory_mib
from moh_vision.engine.published_rates import PublishedRate, rows_of_rates
from moh_vision.engine.ranks import from_all
from moh_vision.engine.step_times import PARTS, Pace

# Steps before the measured ones: they compile, measure attention and fill caches. MAE's gates learn in the first one,
# and an elastic budget runs its smallest and its largest share within four.
WARM_UP = 4
STEPS = 20
LARGEST = "largest-batch"
PRODUCT_SECONDS = 0.5
FLOPS_OF_MAC = (
    6  # of training: a forward has 2 for each multiply-accumulate, a backward twice as many
)
MOST_SAMPLES = 2**16  # the largest micro-batch that is tried
# Growth of a process's memory from which memory per sample is computed; a smaller one may be the allocator's.
ENOUGH_MIB = 64
EXACT = 16  # the largest micro-batch is found to one part in so many

Row = tuple[str, str, str]  # of the table: a name, its value, what is said of it


class Fetched(NamedTuple):
    """The data of a step.

    Attributes:
        micro_batches: micro-batches of this process, arguments of the task.
        count: images or tokens of the step over all processes.
        more: further arguments of the task, the same for every micro-batch.
    """

    micro_batches: Iterable[dict]
    count: int
    more: dict


@dataclass(frozen=True)
class Cost:
    """What was measured on one process.

    Args:
        pace: the mean of the steps.
        memory: peak memory in MiB.
        flops: floating point operations of a second of training.
        product: floating point operations of a second of one large matrix product.
    """

    pace: Pace
    memory: float
    flops: float
    product: float


def steps_needed(stop: int, config) -> int:
    """Return for how many steps a sampler must have data; an estimate may take more than a short run has."""
    if config.estimate:
        return max(stop, WARM_UP + STEPS)
    return stop


def check_estimate(config, holds_run: bool, accelerator) -> None:
    """Raise ValueError for an estimate that cannot be made.

    Args:
        config: the configuration of the run.
        holds_run: whether config.output holds a run that would be resumed.
        accelerator: accelerate's Accelerator.
    """
    if not config.estimate:
        return
    if holds_run:
        raise ValueError(
            f"estimate: --output {config.output} holds a run; an estimate is of a new one, take another folder or --fresh"
        )
    if config.max_steps == 0:
        raise ValueError("estimate: max_steps 0 trains nothing, an estimate needs at least 1")
    processes = accelerator.num_processes
    if config.estimate == LARGEST and processes > 1:
        # After a failure in one process the others would wait for it.
        raise ValueError(
            f"estimate {LARGEST} needs one process, not {processes}: the largest micro-batch is that of each process"
        )


def estimate_cost(
    loop,
    sampler,
    fetch: Callable[[], Fetched],
    macs_of: Callable[[dict], int],
    more_rows: Sequence[Row] = (),
) -> None:
    """Do some steps, and print a table of what the run will cost; every process calls it.

    Args:
        loop: a `TrainingLoop` at its first step.
        sampler: says which epoch a step of the run is in.
        fetch: returns the data of the next step.
        macs_of: returns the multiply-accumulates of one forward of a micro-batch.
        more_rows: of the table, at its end.
    """
    config = loop.config
    device = loop.accelerator.device
    # Go through all epochs of the run: MAE's gates learn in some only.
    epochs = sampler.epoch(loop.span.stop - 1) + 1
    last: dict = {}  # the latest micro-batch

    def noted(batches: Iterable[dict]) -> Iterator[dict]:
        for batch in batches:
            last.clear()
            last.update(batch)
            yield batch

    def do(steps: int) -> Fetched:
        loop.log.pause()
        for number in range(steps):
            fetched = fetch()
            batches = noted(fetched.micro_batches)
            loop.step(batches, epoch=number % epochs, count=fetched.count, **fetched.more)
        return fetched

    do(WARM_UP)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    fetched = do(STEPS)
    pace = loop.log.times.pace()
    memory = peak_memory_mib()
    flops = FLOPS_OF_MAC * macs_of(last) * config.optim.accumulation / pace.step
    cost = Cost(pace, memory, flops, product_rate(device, config.mixed_precision))
    rows = table(from_all(cost), loop.span.stop, UNITS[loop.log.unit], device, product_name(config))
    title = f"estimate from {STEPS} steps after {WARM_UP} to warm up, on {device_name(device)}"
    lines = [title, *lines_of([*rows, *more_rows])]
    loop.accelerator.print("\n".join(lines))
    if config.estimate == LARGEST:
        loop.accelerator.print(largest_batch(loop, last, fetched.more))


def estimate_images(
    loop, sampler, batches: Iterator[dict], macs: int, rates: Sequence[PublishedRate]
) -> None:
    """Do `estimate_cost` for a model of images.

    Args:
        loop, sampler: see `estimate_cost`.
        batches: micro-batches on the device.
        macs: multiply-accumulates of one forward of one image.
        rates: of models of its kind elsewhere.
    """
    optim = loop.config.optim
    images = loop.span.stop * optim.batch_size

    def fetch() -> Fetched:
        return Fetched(islice(batches, optim.accumulation), optim.batch_size, {})

    published = rows_of_rates(rates, images, macs)
    estimate_cost(loop, sampler, fetch, lambda batch: macs * samples_in(batch), published)


def table(costs: list[Cost], steps: int, unit: str, device: torch.device, dtype: str) -> list[Row]:
    """Return the rows of the table.

    Args:
        costs: one for each process.
        steps: number of steps of the whole run.
        unit: short name of what the speed counts.
        device: where the model is trained.
        dtype: name of the type of the large product.
    """
    processes = len(costs)
    rate = mean(cost.pace.rate for cost in costs)
    step = mean(cost.pace.step for cost in costs)
    product = mean(cost.product for cost in costs)
    share = 100 * mean(cost.flops for cost in costs) / product
    where = "resident in the process"
    if device.type == "cuda":
        where = "allocated on the GPU"
    if processes > 1:
        where = f"{where}, the most of {processes} processes"
    noun = "process"
    if processes > 1:
        noun = "processes"
    rows = [("speed", f"{rate:,.0f} {unit}/s", f"{processes} {noun}")]
    if processes > 1:
        rows.append(("", f"{rate / processes:,.0f} {unit}/s", "each process"))
    rows.append(("step", f"{1000 * step:,.1f} ms", "100 %"))
    for part, name in PARTS.items():
        if part not in costs[0].pace.parts:
            continue
        seconds = mean(cost.pace.parts[part] for cost in costs)
        rows.append((f"  {name}", f"{1000 * seconds:,.1f} ms", f"{100 * seconds / step:.0f} %"))
    memory = max(cost.memory for cost in costs)
    rows.append(("peak memory", f"{memory:,.0f} MiB", where))
    rate_said = f"of {product / 1e9:,.0f} GFLOP/s, the rate of one large {dtype} product here"
    rows.append(("product rate", f"{share:.3g} %", rate_said))
    hours = steps * step / 3600
    rows.append(
        ("whole run", f"{hours:,.3f} h", f"{steps:,} steps, without validation and sampling")
    )
    return rows


def lines_of(rows: Sequence[Row]) -> list[str]:
    """Return the lines of some rows, the values right-aligned."""
    first = max(len(name) for name, _, _ in rows)
    second = max(len(value) for _, value, _ in rows)
    return [f"{name:{first}}  {value:>{second}}  {said}" for name, value, said in rows]


def mean(values: Iterable[float]) -> float:
    """Return the mean of some numbers."""
    listed = list(values)
    return sum(listed) / len(listed)


def product_name(config) -> str:
    """Return the name of the type in which a run multiplies matrices."""
    if config.mixed_precision != "no":
        return config.mixed_precision
    if config.tf32:
        return "TF32"
    return "float32"


def product_rate(device: torch.device, mixed_precision: str) -> float:
    """Return the floating point operations of a second of one large matrix product, measured in half a second."""
    dtypes = dict(no=torch.float32, bf16=torch.bfloat16, fp16=torch.float16)
    size = 1024
    at_once = 1  # products between two looks at the clock
    if device.type != "cpu":
        size = 8192
        at_once = 8
    a = torch.randn(size, size, device=device, dtype=dtypes[mixed_precision])
    result = a @ a
    finish_work(device)
    products = 0
    begun = time.monotonic()
    seconds = 0.0
    while seconds < PRODUCT_SECONDS:
        for _ in range(at_once):
            torch.mm(a, a, out=result)
        finish_work(device)
        products += at_once
        seconds = time.monotonic() - begun
    return 2 * size**3 * products / seconds


def finish_work(device: torch.device) -> None:
    """Wait until a device has done all of its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def largest_batch(loop, batch: dict, more: dict) -> str:
    """Return a line about the largest micro-batch that fits into memory.

    Args:
        loop: a `TrainingLoop` that has done some steps.
        batch: a micro-batch, whose samples are repeated.
        more: further arguments of the task.
    """
    present = samples_in(batch)
    if loop.elastic:  # all steps run the largest share
        steps = range(loop.done, loop.done + 8)
        loop.done = next(s for s in steps if loop.elastic.share_of(s) == loop.elastic.largest)

    def do(samples: int) -> None:
        done = loop.done
        try:
            batches = [resized(batch, samples)] * loop.config.optim.accumulation
            loop.step(batches, epoch=0, count=samples, **more)
        finally:
            loop.done = done

    if loop.accelerator.device.type == "cuda":
        found = largest_on_gpu(loop, do, present)
    else:
        before = peak_memory_mib()

        def grow(samples: int) -> float:
            do(samples)
            return peak_memory_mib() - before

        found = largest_by_growth(memory_limit(loop.accelerator.device), before, grow, present)
    shapes = " and ".join(
        dict.fromkeys(
            str(list(v.shape[1:])) for v in batch.values() if isinstance(v, Tensor) and v.dim() > 1
        )
    )
    return f"largest micro-batch: {found}; now {present:,}, of {shapes}"


def samples_in(batch: dict) -> int:
    """Return the number of samples of a micro-batch."""
    return next(len(value) for value in batch.values() if isinstance(value, Tensor))


def resized(batch: dict, samples: int) -> dict:
    """Return a micro-batch with this number of samples, those of `batch` repeated."""
    present = samples_in(batch)

    def rows_of(value):
        if not isinstance(value, Tensor) or len(value) != present:
            return value
        rows = torch.arange(samples, device=value.device) % present
        return value[rows]

    return {name: rows_of(value) for name, value in batch.items()}


def largest_on_gpu(loop, do: Callable[[int], None], present: int) -> str:
    """Double the micro-batch until it fails, then halve the interval; return what was found."""
    problem = ""

    def fits(samples: int) -> bool:
        nonlocal problem
        try:
            do(samples)
            torch.cuda.synchronize()
            return True
        except RuntimeError as error:
            problem = str(error).partition("\n")[0]
            out_of_memory = isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in problem
        # Outside of the handler the failed step's tensors are free: the traceback held them.
        loop.losses = []
        loop.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if out_of_memory:
            problem = ""
            torch.cuda.empty_cache()
        return False

    fitting = present
    failing = present * 2
    while failing <= MOST_SAMPLES and fits(failing):
        fitting = failing
        failing *= 2
    if problem:
        return (
            f"at least {fitting:,} samples; {failing:,} failed, not for want of memory ({problem})"
        )
    if failing > MOST_SAMPLES:
        return f"at least {fitting:,} samples"
    while failing - fitting > max(1, fitting // EXACT) and not problem:
        middle = (fitting + failing) // 2
        if fits(middle):
            fitting = middle
        else:
            failing = middle
    return f"{fitting:,} samples, {failing:,} do not fit"


def largest_by_growth(
    limit: int | None,
    before: float,
    grow: Callable[[int], float],
    present: int,
) -> str:
    """Return what fits by the memory that a process grows with each sample: it would not survive a failure.

    Args:
        limit: bytes of memory; None: unknown.
        before: MiB of memory that the process has.
        grow: does a step with a number of samples; returns by how many MiB the process has grown since `before`.
        present: samples of the micro-batches so far.
    """
    if limit is None:
        return "not known on this device, whose memory cannot be read"
    room = limit / 2**20
    samples = present
    growth = 0.0
    # A doubled micro-batch adds less than the whole process has.
    while growth < ENOUGH_MIB and samples < MOST_SAMPLES and 2 * (before + growth) < room:
        samples *= 2
        growth = grow(samples)
    if growth < ENOUGH_MIB:
        # All of the process counts as if it were of samples: an upper bound of what one takes.
        least = samples + int((room - before - growth) / ((before + growth) / samples))
        return f"at least {max(least, samples):,} samples"
    each = growth / (samples - present)
    most = present + int((room - before) / each)
    said = f"{each:.3g} MiB for each sample, {room / 1024:.1f} GiB of memory"
    return f"about {most:,} samples by {said}"
