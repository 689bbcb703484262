"""Part "profile" of benchmarks/gpu.py: where a whole training step of a ViT-B spends its time, dense and routed."""

import os
import time
from collections import Counter
from importlib.util import find_spec

import torch
from gpu_times import MODELS, QUICK_MODELS, drawn, training_step
from timing import to_base
from timm.utils import ModelEmaV3
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from moh_vision.attention.routed_layer import routed_layers
from moh_vision.engine.compiling import compile_blocks

FAMILY = "vit_base"
PIXELS = 224
STEPS = 3  # that the profiler records
LAUNCHES = 200  # fewer than a device queues, so that the host does not wait for it
SLOWEST = 8  # kernels of a step that are listed
FRAMES = 4  # of a wait's Python stack
# What the host waits in: for a value, a copy, an event, or for memory. On a CPU the operators that would wait on a card.
WAITS = {
    "cuda": (
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cudaMalloc",
        "cudaFree",
    ),
    "cpu": ("aten::_local_scalar_dense", "aten::nonzero"),
}


def profile(run, form):
    """Profile whole steps of ViT-B under bfloat16 autocast: dense (timm), `masked` and `packed`, AdamW and an EMA.

    Reported of every contestant: the time of a step, how long the device is busy in it, how many launches it gets (kernels,
    copies, fills), the slowest kernels, and every wait of the host with its Python stack. The device is busy for less than
    the step where it waits for the host: then launches and Python count, else kernels do.

    Once: what an empty launch takes on the host, and the router's time for float32 tokens, which it gets under autocast,
    and for bfloat16 ones, which the tables of layers feed.

    Args:
        run: the `Run`.
        form: "eager", or "blocks": each block is compiled.
    """
    sizes = MODELS[FAMILY, "eager"]
    batch = sizes.batch
    small = {}
    small_budget = {}
    if run.quick:
        batch = 2
        small = QUICK_MODELS[FAMILY]
        small_budget = dict(head_budget="uniform:0.5")
    if form == "blocks":
        torch.compiler.reset()  # shapes of earlier parts count against the limit of recompilations

    # ------------------------------------------------ the steps
    steps = {}
    models = {}
    for name in ("dense", "masked", "packed"):
        if name == "dense":
            model_name, options = sizes.dense
            options = {**options, **small}
        else:
            model_name, options = sizes.token
            options = {**options, **small, **small_budget, "executor": name}
        models[name] = drawn(model_name, options)
        steps[name] = whole_step(run, models[name], batch, options.get("img_size", PIXELS), form)
        steps[name]()
        steps[name]()  # a fused optimiser and the allocator have all memory after the first

    # ------------------------------------------------ their times, and what the profiler sees
    rows = to_base(run.interleaved(steps), "dense")
    for name, step in steps.items():
        rows[name].update(recorded(run, step))

    # ------------------------------------------------ the price of a launch, and the router
    found = dict(form=form, batch=batch, steps=rows)
    if form == "eager":
        found["empty_launch_us"] = empty_launches(run)
        tokens = torch.randn(batch, 197, models["packed"].embed_dim, device=run.device)
        router = routed_layers(models["packed"])[0].router
        found["router_ms"] = router_times(run, router, tokens)
    run.report["profile"][form] = found
    print_profile(found)


def whole_step(run, model, batch, pixels, form):
    """Make a step of training with an EMA; its blocks are compiled if `form` is "blocks"."""
    model.to(run.device)
    average = ModelEmaV3(model, decay=0.999)
    if form == "blocks":
        compile_blocks(model)
    train = training_step(run, model, batch, pixels, "eager")

    def step():
        train()
        average.update(model)

    return step


def recorded(run, step):
    """Return what the profiler sees in a step, for the report.

    The second recording has Python stacks, which slow the host down: times are those of the first.
    """
    events = events_of(run, step, stacks=False)
    device_events = [event for event in events if is_of_device(event)]
    kernels = Counter()
    for event in device_events:
        kernels[event.name[:80]] += event.time_range.elapsed_us()
    waits = Counter()
    for event in events_of(run, step, stacks=True):
        if event.name.startswith(WAITS[run.device]):
            place = where(event)
            if "profiler.py" not in place:  # the profiler's own
                waits[f"{event.name}: {place}"] += 1
    return dict(
        busy_ms=round(busy(device_events) / 1e3 / STEPS, 3),
        launches=round(len(device_events) / STEPS),
        waits={place: round(count / STEPS, 2) for place, count in waits.most_common()},
        slowest_ms={
            name: round(total / 1e3 / STEPS, 3) for name, total in kernels.most_common(SLOWEST)
        },
    )


def events_of(run, step, stacks):
    """Return the profiler's events of STEPS steps."""
    activities = [ProfilerActivity.CPU]
    if run.cuda:
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    # Without `verbose` events have no stacks.
    options = torch._C._profiler._ExperimentalConfig(verbose=stacks)
    with torch.profiler.profile(
        activities=activities, with_stack=stacks, experimental_config=options, acc_events=True
    ) as profiler:
        for _ in range(STEPS):
            step()
    return profiler.events()


def is_of_device(event):
    """Return whether an event is a kernel, a copy or a fill on the device, and not a range that somebody has named."""
    return event.device_type == DeviceType.CUDA and not event.is_user_annotation


def busy(events):
    """Return the microseconds in which at least one of the events lasts."""
    total = 0.0
    end = float("-inf")
    for event in sorted(events, key=lambda event: event.time_range.start):
        span = event.time_range
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total


def where(event):
    """Return where in Python an event began, innermost first; without Python, as in a backward, in which operator."""
    outermost = event
    parent = event
    while parent is not None:
        frames = [frame for frame in parent.stack if not frame.startswith("<built-in")]
        if frames:
            return " < ".join(frames[:FRAMES])
        outermost = parent
        parent = parent.cpu_parent
    return f"no Python, in {outermost.name}"


def empty_launches(run):
    """Return the microseconds that the host takes to launch next to nothing: {what: time}."""
    small = torch.zeros(16, device=run.device)

    def torch_operator():
        small.zero_()

    launches = {"torch operator": torch_operator}
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if find_spec("triton") and (run.cuda or interpreted):
        kernel = empty_kernel()

        def triton_kernel():
            kernel[(1,)](small)

        launches["triton kernel"] = triton_kernel
    found = {}
    for name, launch in launches.items():
        times = []
        for _ in range(5):
            if run.cuda:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(LAUNCHES):
                launch()
            times.append((time.perf_counter() - begin) / LAUNCHES)
        found[name] = round(1e6 * min(times), 2)
    return found


def empty_kernel():
    """Return a Triton kernel that does nothing."""
    import triton

    @triton.jit
    def nothing(pointer):
        pass

    return nothing


@torch.no_grad()
def router_times(run, router, tokens):
    """Return the milliseconds that a router takes, by dtype of its tokens [B, N, C]; on a card those of its kernels."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = tokens.to(dtype)

        def route(x=x):
            with torch.autocast(run.device, torch.bfloat16):
                router(x)

        route()
        if run.cuda:
            events = [event for event in events_of(run, route, stacks=False) if is_of_device(event)]
            milliseconds = busy(events) / 1e3 / STEPS
        else:
            milliseconds = 1e3 * run.median(route)
        found[str(dtype).removeprefix("torch.")] = round(milliseconds, 4)
    return found


def print_profile(found):
    """Print what `profile` found."""
    print(
        f"\nprofile {FAMILY} {found['form']}: whole steps, batch {found['batch']}, bfloat16 autocast"
    )
    print(f"  {'':8}{'step, ms':>10}{'of dense':>10}{'device, ms':>12}{'launches':>10}{'waits':>8}")
    for name, row in found["steps"].items():
        waits = sum(row["waits"].values())
        times = f"{row['milliseconds']:10.2f}{row['ratio']:10.2f}{row['busy_ms']:12.2f}"
        print(f"  {name:8}{times}{row['launches']:10}{waits:8.1f}")
    for what in ("empty_launch_us", "router_ms"):
        if what in found:
            times = ", ".join(f"{name} {value}" for name, value in found[what].items())
            print(f"  {what}: {times}")
    for name, row in found["steps"].items():
        for kernel, milliseconds in row["slowest_ms"].items():
            print(f"  {name:8}{milliseconds:8.3f} ms  {kernel}")
        for place, count in row["waits"].items():
            print(f"  {name:8}waits {count:g} times a step  {place}")
