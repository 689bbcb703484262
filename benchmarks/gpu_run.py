"""A run of benchmarks/gpu.py: a report that survives failures, a time limit, and tables of contestants."""

import gc
import importlib.metadata
import json
import signal
import subprocess
import time
from contextlib import contextmanager

import torch
from timing import cell, clock_of, interleaved, new_report, to_base

SECONDS = 1.5  # of one table
ROUNDS = (5, 50)  # at least and at most
PART = 90.0  # seconds of a part that does not use torch.compile: one that hangs must not take the time of the rest
PACKAGES = ("torch", "torchvision", "triton", "timm", "diffusers")


class OutOfTime(BaseException):
    """The time is over. Not an Exception: a measurement that records its own errors must not swallow it."""


@contextmanager
def stop_after(seconds):
    """Raise OutOfTime in the main thread once `seconds` have passed."""

    def stop(*_):
        raise OutOfTime

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def one_line(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


class Run:
    """The report, the file it goes to, and the time that is left.

    Args:
        device: "cuda" or "cpu".
        out: path of the JSON file, written again after every part.
        minutes: the time for everything.
        compile_seconds: the time for the parts that compile, together.
        quick: two rounds, no warm-up.
        **about: further entries of the report.
    """

    def __init__(self, device, out, minutes, compile_seconds, quick, **about):
        self.device = device
        self.cuda = device == "cuda"
        self.out = out
        self.quick = quick
        self.deadline = time.monotonic() + 60 * minutes
        self.compile_seconds = compile_seconds
        self.clock = clock_of(device)
        self.lost = False  # whether the device answers no more
        distributions = importlib.metadata.distributions()
        installed = {package.name: package.version for package in distributions}
        versions = {name: installed.get(name) for name in PACKAGES} | dict(cuda=torch.version.cuda)
        self.report = new_report(
            versions=versions, quick=quick, **about, seconds={}, errors={}, skipped=[]
        )
        if self.cuda:
            card = torch.cuda.get_device_properties(device)
            self.report["card"] = dict(
                name=card.name,
                capability=f"{card.major}.{card.minor}",
                multiprocessors=card.multi_processor_count,
                memory_gib=round(card.total_memory / 2**30, 1),
                l2_mib=card.L2_cache_size / 2**20,
                **self.clocks(),
            )

    def part(self, name, measure, *arguments, compiles=False):
        """Call measure(self, *arguments). A failure, or the end of the time, goes into the report and is not raised.

        After an error such as an illegal address nothing runs on the device in this process: `lost` is set, and all
        other parts are left to another process.
        """
        if self.lost:
            return
        begin = time.monotonic()
        limit = self.compile_seconds if compiles else PART
        left = min(self.deadline - begin, limit)
        try:
            if left <= 0:
                raise OutOfTime
            with stop_after(left):
                measure(self, *arguments)
        except OutOfTime:
            if left <= 0:
                self.report["skipped"].append(name)
            else:
                self.report["skipped"].append(f"{name}: stopped after {left:.0f} s")
        except Exception as error:
            self.report["errors"][name] = one_line(error)
            print(f"failed: {name}: {one_line(error)}", flush=True)
        taken = time.monotonic() - begin
        self.report["seconds"][name] = round(taken, 1)
        if compiles:
            self.compile_seconds -= taken
        if self.cuda:
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                self.lost = True
                self.report["errors"][name] = one_line(error)
        self.write()

    def write(self):
        self.report["time_left"] = [self.deadline, self.compile_seconds]
        self.out.write_text(json.dumps(self.report, indent=1) + "\n")

    def resume(self):
        """Go on with the report and the time that another process of this machine left."""
        self.report = json.loads(self.out.read_text())
        self.deadline, self.compile_seconds = self.report["time_left"]

    def add(self):
        """Go on with the report of an earlier run; what it skipped, or where it failed, may run again.

        Raises:
            ValueError: it is of another card or other versions.
        """
        earlier = json.loads(self.out.read_text())
        for key in ("versions", "quick"):
            if earlier[key] != self.report[key]:
                raise ValueError(
                    f"{self.out} was measured with {key} {earlier[key]}, this is {self.report[key]}"
                )
        here, there = (report.get("card", {}).get("name") for report in (self.report, earlier))
        if here != there:
            raise ValueError(f"{self.out} was measured on {there}, this is {here}")
        repeated = {name.split(":")[0] for name in earlier["skipped"]} | set(earlier["errors"])
        seconds = {
            name: taken for name, taken in earlier["seconds"].items() if name not in repeated
        }
        self.report = {**earlier, "seconds": seconds, "errors": {}, "skipped": []}

    def clocks(self):
        """Return driver, clocks, power and temperature as nvidia-smi reads them; nothing on a CPU."""
        if not self.cuda:
            return {}
        fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
        card = f"--id=GPU-{torch.cuda.get_device_properties(self.device).uuid}"
        command = ["nvidia-smi", card, f"--query-gpu={fields}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            return dict(nvidia_smi=one_line(error))
        values = [value.strip() for value in done.stdout.split(",")]
        return dict(zip(fields.split(","), values))

    def interleaved(self, steps):
        """Time {name: step}: {name: seconds [rounds], float64}."""
        rounds = (1, 2) if self.quick else ROUNDS
        return interleaved(steps, rounds, SECONDS, warm_up=0, clock=self.clock)

    def median(self, step):
        """Return the seconds of one step by itself."""
        step()
        return self.interleaved({"": step})[""].quantile(0.5).item()

    def table(self, about, makers, floors):
        """Time, print and return contestants.

        Args:
            about: what they have in common; with form "graph" replays of CUDA graphs are timed.
            makers: {name: function that returns a step}; what raises has a row with its error.
            floors: {name: the least seconds that it could take}, for some or none.

        Returns:
            about, with the rows by name; `ratio` is to `base`, the fastest whose name begins with "dense". Where time
            runs out, what is ready then is measured.
        """
        if self.cuda:  # what earlier tables held
            gc.collect()
            torch.cuda.empty_cache()
        rows = {name: dict(error="no time was left") for name in makers}
        steps = {}
        warm_up = 1 if self.quick else 5
        try:
            for name, make in makers.items():
                try:
                    step = make()
                    for _ in range(warm_up):
                        step()
                    row = {}
                    if self.cuda:
                        row["peak_mib"] = self.peak_mib(step)
                    if about["form"] == "graph":
                        step = captured(step)
                    steps[name] = step
                    rows[name] = row
                except Exception as error:
                    rows[name] = dict(error=one_line(error))
        except OutOfTime:
            if len(steps) < 2:
                raise
        times = self.interleaved(steps)
        dense = [name for name in times if name.startswith("dense")]
        base = min(dense or times, key=lambda name: times[name].quantile(0.5).item(), default=None)
        for name, row in to_base(times, base).items():
            rows[name].update(row)
            if name in floors:
                reached = floors[name] / times[name].quantile(0.5).item()
                rows[name]["roofline"] = float(f"{reached:.3g}")
        print("\n" + " ".join(str(value) for value in about.values()))
        for name, row in rows.items():
            print(f"  {name:21}{line(row, base)}", flush=True)
        return dict(about, base=base, clocks=self.clocks(), rows=rows)

    def peak_mib(self, step):
        """Return the MiB that a call takes on the card, beyond what was allocated before it."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def captured(step):
    """Return the replay of a CUDA graph of a step.

    The replay keeps the step: a graph does not own what it reads, and a freed input faults.

    Raises:
        RuntimeError: if the step waits for the device. This is found out before capturing, because a capture that fails
            half-way leaves the allocator in an unusable state.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return lambda step=step: graph.replay()


def line(row, base):
    """Write the row of a contestant, without its name."""
    if "error" in row:
        return f"  {row['error'][:100]}"
    text = f"{row['milliseconds']:12.3f} ms  {cell(row['ratio'], row['quartiles'])} of {base}"
    if "roofline" in row:
        text += f"   {row['roofline']:.2f} of the roofline"
    if "peak_mib" in row:
        text += f"   peak {row['peak_mib']:.0f} MiB"
    return text
