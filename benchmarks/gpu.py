"""Numerics, time and memory of routed attention on a GPU, against dense attention and the released MoH operations.

    python benchmarks/gpu.py                          # one card, at most 7 minutes (--minutes)
    python benchmarks/gpu.py --device cpu --quick     # tiny shapes: checks that the benchmark itself runs

Numerics come first. Every executor runs every shape in every dtype of DTYPES; output and gradients are compared with the
executor `reference` in float64. In float64 the router and the released operations take part; below, all executors get
the routing that float64 gave, and how many tokens the router sends elsewhere is counted. A result that is off by more
than DTYPES allows ends the run before anything is timed, with exit code 1.

Then follow times of one attention layer (forward; train: forward and backward) and of whole training steps:

    dense       fused qkv product, scaled_dot_product_attention (torch's choice, and each backend), output product
    released    the published MoH operations: all heads, gates by softmax, top-k and a mask, then an einsum
    masked, packed, auto    our executors; the number behind a name is the share of heads that runs

    eager       as called from Python, including the time to launch kernels
    graph       replays of a CUDA graph: the time of the device alone; code that waits for the device has none
    compiled    torch.compile, which computes all heads whichever executor is set

Each round runs all contestants once, in another random order, so that drift hits all alike. The table gives medians, and the
median and quartiles of the ratios to the fastest dense contestant, round by round. The share of the roofline is the least
time over the time taken: the least time is that of the multiplications of the heads that run, or of moving inputs, outputs
and weights once, at the rates that matrix products and copies reach in the same run. A failure is recorded and the run goes
on; parts that the time does not suffice for are listed under "skipped". Results go to benchmarks/results/gpu.json.
"""

import argparse
import copy
import importlib.util
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import timm
import torch
from attention import Dense, Released, bound, copies, draw_router, layer_step, output, picked, saved_bytes
from device_run import Run, one_line
from models import inputs, task
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from moh_vision.attention import EXECUTORS, HeadMixtureAttention, Routing, resolve_budget

HERE = Path(__file__).parent
# name -> batch, tokens, heads, head width, causal
SHAPES = {
    "vit_small": (256, 197, 6, 64, False),
    "vit_base": (256, 197, 12, 64, False),
    "dit_small": (256, 256, 6, 64, False),
    "dit_xlarge": (128, 256, 16, 72, False),
    "causal_lm": (8, 2048, 16, 128, True),
}
QUICK = {name: (2, 24, 6, *SHAPES[name][3:]) for name in ("vit_small", "dit_xlarge", "causal_lm")}
# name -> dtype, torch's float32 matmul precision, largest relative error
DTYPES = {
    "float64": (torch.float64, "highest", 1e-10),
    "float32": (torch.float32, "highest", 1e-5),
    "tf32": (torch.float32, "high", 2e-3),
    "bfloat16": (torch.bfloat16, "highest", 2e-2),
    "float16": (torch.float16, "highest", 5e-3),
}
SHARES = (0.75, 0.5, 1.0)  # --quick and compiled: the first
TIMED = ("masked", "packed", "auto")
MODES = ("forward", "train")
BACKENDS = {
    "dense": None,
    "dense flash": SDPBackend.FLASH_ATTENTION,
    "dense cudnn": SDPBackend.CUDNN_ATTENTION,
    "dense efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# family -> batch, {contestant: (name, arguments)}, arguments of a small model for --quick
MODELS = {
    "vit": (
        256,
        {"dense": ("vit_small_patch16_224", {})}
        | {f"{e} 0.75": ("moh_vit_small_patch16_224", dict(head_budget=0.75, executor=e)) for e in TIMED},
        dict(img_size=32, depth=1),
    ),
    "transnext": (
        64,
        {"dense": ("transnext_small", {}), "masked 0.75": ("moh_transnext_small_75", {})},
        dict(img_size=32, depths=(1, 1, 1, 1), embed_dims=(24, 48, 96, 192)),
    ),
    "dit": (
        128,
        {"dense": ("dit_base_patch2", {})} | {f"{e} 0.75": ("moh_dit_base_patch2_75", dict(executor=e)) for e in TIMED},
        dict(img_size=8, embed_dim=48),
    ),
}
COMPILER = "inductor"


class Given(nn.Module):
    """A router that answers with a routing computed before, whose weights are its parameter."""

    def __init__(self, routing, budget):
        super().__init__()
        self.weights, self.active, self.stats = nn.Parameter(routing.weights.float()), routing.active, routing.stats
        self.budget = budget

    def forward(self, x, q=None, padding_mask=None):
        return Routing(self.weights * self.active, self.active, self.stats)


class Backend(nn.Module):
    """A module under one backend of scaled_dot_product_attention."""

    def __init__(self, module, backend):
        super().__init__()
        self.module, self.backend = module, backend

    def forward(self, x, is_causal=False):
        with sdpa_kernel(self.backend):
            return self.module(x, is_causal=is_causal)


@contextmanager
def precision(dtype_name):
    """Matrix products of float32 tensors in float32, or in tf32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(DTYPES[dtype_name][1])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def make_layer(shape, share, dtype, device):
    _, _, heads, width, _ = shape
    budget = resolve_budget(f"uniform:{share}", 1, heads, width)[0]
    layer = HeadMixtureAttention(heads * width, budget, dtype=dtype, device=device)
    draw_router(layer.router)
    return layer


def results(module, x, causal, dy):
    """{name: tensor}: the output with and without autograd, and the gradients of x and of all parameters."""
    with torch.no_grad():
        found = {"y without autograd": output(module, x, is_causal=causal)}
    x = x.detach().requires_grad_()
    found["y"] = output(module, x, is_causal=causal)
    inputs = {"x": x, **dict(module.named_parameters())}
    grads = torch.autograd.grad(found["y"], list(inputs.values()), dy.to(x.dtype))
    return found | {f"gradient of {name.removeprefix('layer.')}": grad for name, grad in zip(inputs, grads)}


def worst_error(got, want):
    """(error, name) of the tensor that is farthest from `want` {name: float64 tensor}, relative in norm.

    Gradients that are small by cancellation are held to the rounding of the largest one.
    """
    largest = max(t.norm().item() for name, t in want.items() if name.startswith("gradient"))
    errors = []
    for name, tensor in want.items():
        scale = tensor.norm().item() + (0.02 * largest if name.startswith("gradient") else 0)
        error = (got[name].double() - tensor).norm().item() / scale
        errors.append((error if error == error else float("inf"), name))  # nan
    return max(errors)


def numerics(run, shape_name, shape, dtype_name, share):
    """Report the error of every executor, and how many tokens the router routes otherwise than in float64."""
    _, tokens, heads, width, causal = shape
    dtype, _, allowed = DTYPES[dtype_name]
    about = dict(shape=shape_name, dtype=dtype_name, share=share)
    with precision(dtype_name):
        layer = make_layer(shape, share, dtype, run.device)
        x, dy = torch.randn(2, 2, tokens, heads * width, device=run.device, dtype=dtype)
        oracle = copy.deepcopy(layer).double()
        contestants = copies(layer, sorted(set(EXECUTORS) - {"reference"}))
        if dtype_name == "float64":
            contestants["released"] = Released(layer)
        else:
            with torch.no_grad():
                routing, here = oracle.router(x.double()), layer.router(x)
            otherwise = (routing.active != here.active).any(-1).double().mean().item()
            run.report["routers"].append(dict(about, tokens_routed_otherwise=otherwise))
            for module in (oracle, layer, *contestants.values()):
                module.router = Given(routing, module.budget)
        oracle.double().executor = "reference"
        want = results(oracle, x.double(), causal, dy)
        for name, module in contestants.items():
            row = dict(about, executor=name, allowed=allowed)
            try:
                row["error"], row["of"] = worst_error(results(module, x, causal, dy), want)
            except Exception as error:
                row["raised"] = one_line(error)
                print(f"{name}, {shape_name}, {dtype_name}, share {share}: {row['raised']}", flush=True)
            run.report["numerics"].append(row)


def check_numerics(run, shapes, shares):
    """Run all numerics and return what is wrong in one line, or None."""
    for name, shape in shapes.items():
        for dtype in DTYPES:
            for share in shares:
                run.part(f"numerics {name} {dtype} {share}", numerics, name, shape, dtype, share)
    checked = [row for row in run.report["numerics"] if "error" in row]
    wrong = [row for row in checked if row["error"] > row["allowed"]]
    print(f"numerics: {len(checked)} checked, {len(wrong)} wrong, {len(run.report['numerics']) - len(checked)} raised")
    for dtype in DTYPES:
        otherwise = [r["tokens_routed_otherwise"] for r in run.report["routers"] if r["dtype"] == dtype]
        if otherwise:
            print(f"  {dtype}: at most {max(otherwise):.2g} of the tokens are routed otherwise than in float64")
    if not checked:
        return "no executor could be checked; nothing was timed"
    for row in wrong:
        what = f"{row['executor']}, {row['shape']}, {row['dtype']}, share {row['share']}: {row['of']}"
        return f"{what} is off by {row['error']:.1e}, allowed is {row['allowed']:.0e}; nothing was timed"
    return None


def peaks(run):
    """Report what this machine reaches: matrix products in FLOP/s by dtype, a copy in bytes/s, read and written."""
    size, length = (256, 2**20) if run.quick else (8192, 2**29)
    found = run.report["peaks"]
    for name in ("bfloat16", "tf32"):
        with precision(name):
            a, b = torch.randn(2, size, size, device=run.device, dtype=DTYPES[name][0])
            found[name] = 2 * size**3 / run.median(lambda a=a, b=b: a @ b)
    source, target = torch.ones(2, length, device=run.device, dtype=torch.uint8)
    found["copy"] = 2 * length / run.median(lambda: target.copy_(source))
    print(
        "peaks:", ", ".join(f"{name} {rate:.3g} {'B' if name == 'copy' else 'FLOP'}/s" for name, rate in found.items())
    )


def least_seconds(rates, shape, dtype_name, mode, share):
    """What a layer takes at least, at these rates: for its multiplications or for its bytes, each moved once."""
    B, N, heads, width, causal = shape
    C, keys = heads * width, N / 2 if causal else N  # keys that a token attends to, on average
    flops = B * N * (8 * C * C + 4 * keys * C) * bound(share, keys, C, "token")
    numbers = 2 * B * N * C + 4 * C * C  # x, y and the weights
    if mode == "train":  # backward has two products for each of forward; and dy, x, dx, the weights and their gradients
        flops, numbers = 3 * flops, numbers + 3 * B * N * C + 8 * C * C
    return max(flops / rates[dtype_name], numbers * DTYPES[dtype_name][0].itemsize / rates["copy"])


def layers(run, shape_name, shape, shares, dtype_name, mode, form):
    """Report the times of one attention layer, of all contestants."""
    B, N, heads, width, causal = shape
    dtype, compiles = DTYPES[dtype_name][0], form == "compiled"
    dense = Dense(heads * width, heads, dtype).to(run.device)
    contestants = {name: Backend(dense, backend) if backend else dense for name, backend in BACKENDS.items()}
    active = dict.fromkeys(BACKENDS, 1.0)
    if compiles:
        torch.compiler.reset()  # shapes of earlier tables count against the limit of recompilations
        contestants, shares = {"dense": dense}, shares[:1]
    for share in shares:
        layer = make_layer(shape, share, dtype, run.device)
        group = {"released": Released(layer), **copies(layer, TIMED[:1] if compiles else TIMED)}
        for name, module in group.items():
            contestants[f"{name} {share}"], active[f"{name} {share}"] = module, layer.budget.active / heads
    x = torch.randn(B, N, heads * width, device=run.device, dtype=dtype, requires_grad=mode == "train")

    def make(module):
        if compiles:
            module = torch.compile(module, dynamic=False, backend=COMPILER)
        return layer_step(module, x, mode, is_causal=causal)

    about = dict(shape=shape_name, batch=B, tokens=N, heads=heads, width=width, dtype=dtype_name, mode=mode, form=form)
    rates = run.report["peaks"]
    with precision(dtype_name):
        floors = {n: least_seconds(rates, shape, dtype_name, mode, active[n]) for n in contestants} if rates else {}
        found = run.table(about, {name: lambda m=m: make(m) for name, m in contestants.items()}, floors)
        run.report["layers"].append(found)
        for name, row in found["rows"].items():
            if "error" in row or causal or form != "eager":
                continue
            if mode == "train":
                row["saved_bytes"] = saved_bytes(contestants[name], x)
            if name.startswith("auto"):
                row["picked"] = picked(contestants[name], x, mode)


def training_step(run, family, name, arguments, batch, form):
    """One step of a whole model: bfloat16 autocast, our tasks' losses, AdamW."""
    model = timm.create_model(name, **arguments).to(run.device).train()
    given, losses = inputs(model, batch, arguments.get("img_size", 224), run.device), task(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=run.cuda)
    if form == "compiled":
        losses = torch.compile(losses, dynamic=False, backend=COMPILER)

    def step():
        optimizer.zero_grad()
        with torch.autocast(run.device, torch.bfloat16):
            loss = losses(**given)["loss"]
        loss.backward()
        optimizer.step()

    return step


def models(run, family, form):
    """Report the times of whole training steps, of one family's contestants."""
    batch, contestants, small = MODELS[family]
    if form == "compiled":
        torch.compiler.reset()
        contestants = {name: model for name, model in contestants.items() if name.split()[0] in ("dense", "masked")}
    if run.quick:
        batch, contestants = 2, {label: (name, small | kw) for label, (name, kw) in contestants.items()}
    makers = {
        label: lambda name=name, kw=kw: training_step(run, family, name, kw, batch, form)
        for label, (name, kw) in contestants.items()
    }
    about = dict(family=family, batch=batch, dtype="bfloat16 autocast", mode="step", form=form)
    run.report["models"].append(run.table(about, makers, {}))


def time_all(run, shapes, shares):
    """All timings, the most wanted first."""

    def time_layers(dtype, forms, names, compiles=False):
        for name in names:
            for mode in MODES:
                for form in forms:
                    about = (name, shapes[name], shares, dtype, mode, form)
                    run.part(f"{name} {dtype} {mode} {form}", layers, *about, compiles=compiles)

    first, *others = shapes
    eager, families = ("eager", "graph") if run.cuda else ("eager",), list(MODELS)
    if importlib.util.find_spec("diffusers") is None:
        families.remove("dit")
        run.report["skipped"].append("dit step: diffusers is not installed")
    run.part("peaks", peaks)
    time_layers("bfloat16", eager, shapes)
    for family in families:
        run.part(f"{family} step eager", models, family, "eager")
    time_layers("bfloat16", ("compiled",), [first], compiles=True)
    for family in families:
        run.part(f"{family} step compiled", models, family, "compiled", compiles=True)
    time_layers("bfloat16", ("compiled",), others, compiles=True)
    time_layers("tf32", eager, shapes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cuda (the default) or cpu")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, one share, two rounds")
    parser.add_argument("--minutes", type=float, default=7.0, help="for everything; the rest is skipped (default 7)")
    parser.add_argument("--compile-seconds", type=float, default=150.0, help="for all of torch.compile (default 150)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of weights and inputs; default: a new one")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu.json, on a CPU gpu_on_cpu.json")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} finds no CUDA device; allowed here: cpu")
    out = args.out or HERE / "results" / ("gpu_on_cpu.json" if args.device == "cpu" else "gpu.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    empty = dict(seed=args.seed, numerics=[], routers=[], peaks={}, layers=[], models=[])
    run = Run(args.device, out, args.minutes, args.compile_seconds, args.quick, **empty)
    print(", ".join(f"{key} {value}" for key, value in {**run.report["machine"], **run.report.get("card", {})}.items()))
    shapes, shares = (QUICK, SHARES[:1]) if args.quick else (SHAPES, SHARES)
    wrong = check_numerics(run, shapes, shares)
    if wrong is None:
        time_all(run, shapes, shares)
    print("\nskipped:", "; ".join(run.report["skipped"]) or "nothing")
    print(out)
    if wrong is not None:
        print(f"gpu: error: {wrong}", file=sys.stderr)
    return int(wrong is not None)


if __name__ == "__main__":
    sys.exit(main())
