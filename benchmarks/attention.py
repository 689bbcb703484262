"""Time and memory of one attention layer, against plain attention, in one interleaved run.

    python benchmarks/attention.py                       # the whole grid, about 30 minutes on 2 cores
    python benchmarks/attention.py --shapes vit_small --shares 0.5 --threads 2 --modes forward --output /tmp/one.json
    python benchmarks/attention.py --draw                # the figure again, from the results that are there

Every case times, in turn and in alternating order, so that a noisy machine hits all alike:

    dense    fused qkv product, scaled_dot_product_attention, output product: no routing at all
    masked   our executor that computes every head and multiplies
    packed   our executor that skips heads, whether or not that pays
    auto     what a user gets

and reports the median and the quartiles of the ratio to dense, round by round. `bound` is the ratio of multiplications
that are left when everything a head needs is skipped: what a perfect implementation would take.
Routing is balanced (random router): a trained router is not, and pads more. Left out for their time: one thread at
4096 tokens and for the experts of MoA and MAE, and training of 8 x 4096 tokens (on one thread of 8 x 1024). Results, machine and load go to
benchmarks/results/attention.json, the figure to docs/images/attention_speed.png.
"""

import argparse
import json
import os
import platform
import sys
import time
from datetime import date
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from moh_vision.attention import HeadBudget, HeadMixtureAttention, resolve_budget  # noqa: E402
from moh_vision.attention.executors import choose  # noqa: E402
from moh_vision.attention.routing import Call  # noqa: E402

HERE = Path(__file__).parent
# name -> batch, tokens, width, heads
SHAPES = {
    "vit_small": (8, 197, 384, 6),
    "vit_base": (8, 197, 768, 12),
    "dit_small": (8, 256, 384, 6),
    "dit_xlarge": (2, 256, 1152, 16),
    "n1024": (1, 1024, 768, 12),
    "n4096": (1, 4096, 768, 12),
}
MOA = {"8K8E128D": (8, 8, 128), "16K32E256D": (16, 32, 256), "8K64E256D": (8, 64, 256)}  # active, experts, width
MOA_TOKENS = MAE_TOKENS = (128, 1024)
TOKENS = 8192  # MoA and MAE: 512 wide, and as many tokens a batch as fit in this
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCOPES = ("token", "sample", "alike")
MODES = ("forward", "train")  # train: forward and backward
SECONDS, ROUNDS = 2.0, (5, 31)  # per case; at least and at most


class Dense(nn.Module):
    """Attention as timm and DiT have it."""

    def __init__(self, dim, heads, dtype):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, dtype=dtype), nn.Linear(dim, dim, dtype=dtype)

    def forward(self, x, is_causal=False):
        B, N, C = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.proj(o.transpose(1, 2).reshape(B, N, C))


class Experts(nn.Module):
    """MAE as its formula reads: every expert of h - 1 heads computed by itself, then mixed by the gate."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        layer, y = self.layer, 0
        q, k, v = layer.project(x, None, None, None, None)
        gate = layer.router(x).stats.probs[:, 0]  # [B, experts]
        for expert, members in enumerate(layer.router.members.bool()):
            o = F.scaled_dot_product_attention(q[:, members], k[:, members], v[:, members])  # [B, h - 1, N, D]
            w = layer.proj.weight.unflatten(1, (-1, layer.head_dim))[:, members].flatten(1)
            y = y + gate[:, expert, None, None] * F.linear(o.transpose(1, 2).flatten(2), w)
        return y * layer.router.scale + layer.proj.bias


def run(module, x, mode):
    """One call, without what a module returns beside its output."""
    if mode == "forward":
        with torch.no_grad():
            return module(x)
    y = module(x)
    (y[0] if isinstance(y, tuple) else y).sum().backward()
    return None


def saved_bytes(module, x):
    """Bytes that autograd keeps for backward, the input included and parameters left out, each storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = module(x)
    del y
    return sum(kept.values())


def measure(modules, x, mode):
    """Interleaved times of {name: module}; ratios to the first, round by round."""
    names = list(modules)
    times = {name: [] for name in names}
    for name in names:
        run(modules[name], x, mode), run(modules[name], x, mode)
    start = time.perf_counter()
    while True:
        rounds = len(times[names[0]])
        if rounds >= ROUNDS[1] or (rounds >= ROUNDS[0] and time.perf_counter() - start > SECONDS):
            break
        for name in names if rounds % 2 == 0 else reversed(names):
            for p in modules[name].parameters():
                p.grad = None
            x.grad = None
            begin = time.perf_counter()
            run(modules[name], x, mode)
            times[name].append(time.perf_counter() - begin)
    base = torch.tensor(times[names[0]], dtype=torch.float64)
    result = {}
    for name in names:
        ratio = torch.tensor(times[name], dtype=torch.float64) / base
        low, middle, high = ratio.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
        result[name] = dict(
            ratio=round(middle, 3),
            quartiles=[round(low, 3), round(high, 3)],
            milliseconds=round(1e3 * torch.tensor(times[name]).median().item(), 3),
            rounds=len(times[name]),
        )
    return result


def copies(layer, executors):
    """The same layer, same weights, under several executors."""
    result = {}
    for name in executors:
        other = object.__new__(type(layer))
        other.__dict__ = {**layer.__dict__, "executor": name}
        result[name] = other
    return result


def bound(share, tokens, dim, scope):
    """Multiplications left, with the router free: projections 4 N C^2, attention 2 N^2 C."""
    if scope != "token":
        return share
    return 1 - (1 - share) * (2 * dim + 2 * tokens) / (4 * dim + 2 * tokens)


def moh_case(shape, share, scope, dtype):
    """`scope` "alike": per sample, and all samples are the same, so that they choose the same heads."""
    B, N, C, h = SHAPES[shape]
    per_sample = scope != "token"
    B = 8 if per_sample else B
    budget = resolve_budget(f"uniform:{share}", 1, h, C // h)[0]
    layer = HeadMixtureAttention(C, budget, scope="sample" if per_sample else "token", dtype=dtype)
    for p in layer.router.parameters():  # logits near 1, of tokens and of their mean
        nn.init.normal_(p, std=C**-0.5 * (N**0.5 if per_sample else 1))
    real = budget.active / h
    about = dict(shape=shape, batch=B, tokens=N, width=C, heads=h, share=share, active=budget.active, scope=scope)
    modules = {"dense": Dense(C, h, dtype), **copies(layer, ("masked", "packed", "auto"))}
    x = torch.randn(B, N, C, dtype=dtype)
    if scope == "alike":
        x = x[:1].repeat(B, 1, 1)
    return about, modules, x, bound(real, N, C, scope)


def moa_case(name, tokens, dtype):
    """Against dense attention of 8 heads of 64, as the paper's models have it, in the same place."""
    active, experts, width = MOA[name]
    B = TOKENS // 8 // tokens
    layer = HeadMixtureAttention(
        512,
        HeadBudget(experts, width, 0, active),
        router="moa",
        kv_heads=1,
        qkv_bias=False,
        proj_bias=False,
        dtype=dtype,
    )
    nn.init.normal_(layer.router.gate.weight, std=512**-0.5)
    about = dict(shape=name, batch=B, tokens=tokens, width=512, heads=experts, active=active, scope="token")
    macs = 2 * 512 * width * (active + 1) + 2 * tokens * width * active  # for one token
    modules = {"dense": Dense(512, 8, dtype), **copies(layer, ("masked", "packed", "auto"))}
    return about, modules, torch.randn(B, tokens, 512, dtype=dtype), macs / (4 * 512 * 512 + 2 * tokens * 512)


def mae_case(tokens, dtype):
    """The F step of MAE-7: one expert of 7 of 8 heads a sequence."""
    layer = HeadMixtureAttention(
        512, HeadBudget(8, 64, 8, 0), router="mae", router_kwargs=dict(mode="sampled"), dtype=dtype
    )
    about = dict(shape="mae_f_step", batch=8, tokens=tokens, width=512, heads=8, active=7, scope="sample")
    modules = {
        "dense": Dense(512, 8, dtype),
        **copies(layer, ("masked", "packed", "auto")),
        "every_expert": Experts(layer),
    }
    return about, modules, torch.randn(8, tokens, 512, dtype=dtype), 7 / 8


def cases(args):
    for shape in args.shapes:
        for dtype in args.dtypes:
            if shape in SHAPES:
                for scope in args.scopes:
                    for share in args.shares:
                        yield (dtype, *moh_case(shape, share, scope, DTYPES[dtype]))
            elif shape in MOA:
                for tokens in MOA_TOKENS:
                    yield (dtype, *moa_case(shape, tokens, DTYPES[dtype]))
            else:
                for tokens in MAE_TOKENS:
                    yield (dtype, *mae_case(tokens, DTYPES[dtype]))


def picked(layer, x, mode):
    with torch.set_grad_enabled(mode == "train"):
        routing = layer.router(x.mean(1, keepdim=True) if layer.scope == "sample" else x)
        return choose(Call(layer, x, routing))[0]


def key(case):
    """What tells cases apart, but for repetitions."""
    return tuple(case.get(k) for k in ("shape", "tokens", "scope", "share", "dtype", "mode", "threads"))


def machine():
    names = (
        [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if "model name" in line]
        if os.path.exists("/proc/cpuinfo")
        else []
    )
    return dict(
        cpu=names[0] if names else platform.processor(),
        cores=os.cpu_count(),
        python=platform.python_version(),
        torch=torch.__version__,
        date=date.today().isoformat(),
    )


def spread(ratios):
    """Median and quartiles of the ratios of all rounds [rounds], float64."""
    low, middle, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return dict(median=round(middle, 3), quartiles=[round(low, 3), round(high, 3)])


def write_report(path, report):
    """As JSON, with the load of the machine at the end; the other benchmarks' too."""
    report["load_after"] = os.getloadavg()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*SHAPES, *MOA, "mae_f_step"]
    parser.add_argument("--shapes", nargs="+", default=every, choices=every)
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.75, 0.9])
    parser.add_argument("--scopes", nargs="+", default=list(SCOPES), choices=SCOPES)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--output", type=Path, default=HERE / "results" / "attention.json")
    parser.add_argument("--figure", type=Path, help="default: beside the output, or docs/images for the whole grid")
    parser.add_argument("--add", action="store_true", help="replace these cases in --output and keep its others")
    parser.add_argument("--draw", action="store_true", help="only draw what is in --output")
    args = parser.parse_args()
    if args.figure is None:
        whole = args.output == HERE / "results" / "attention.json"
        args.figure = HERE.parent / "docs/images/attention_speed.png" if whole else args.output.with_suffix(".png")
    if args.draw:
        return draw(json.loads(args.output.read_text()), args.figure)

    torch.manual_seed(0)
    report = dict(machine=machine(), load_before=os.getloadavg(), cases=[])
    print(f"{'':44}{'dense ms':>9}  bound  " + "".join(f"{n:>22}" for n in ("masked", "packed", "auto")))
    for threads in args.threads:
        torch.set_num_threads(threads)
        for dtype, about, modules, x, best in cases(args):
            for mode in args.modes:
                if threads == 1 and (about["shape"] not in SHAPES or about["tokens"] > 2048):
                    continue
                if mode == "train" and x.shape[0] * x.shape[1] > (16384 if threads > 1 else 4096):
                    continue
                x.requires_grad_(mode == "train")
                for module in modules.values():
                    module.train(mode == "train")
                times = measure(modules, x, mode)
                entry = dict(about, dtype=dtype, mode=mode, threads=threads, bound=round(best, 3), times=times)
                entry["picked"] = picked(modules["auto"], x, mode)
                if mode == "train":
                    B, N = x.shape[:2]
                    entry["saved_bytes_per_token"] = {k: round(saved_bytes(m, x) / (B * N)) for k, m in modules.items()}
                entry["load"] = os.getloadavg()[0]
                report["cases"].append(entry)
                print(line(entry), flush=True)
    report["load_after"] = os.getloadavg()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    if args.add:
        earlier, new = json.loads(args.output.read_text()), {key(case) for case in report["cases"]}
        report["cases"] = [case for case in earlier["cases"] if key(case) not in new] + report["cases"]
    args.output.write_text(json.dumps(report))
    draw(report, args.figure)
    print(args.output, args.figure)


def draw(report, path):
    """Ratio of `auto` to plain attention against the bound, one panel for forward and one for training."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 5.2), sharey=True, layout="constrained")
    threads = max(case["threads"] for case in report["cases"])
    kinds = {
        "token": ("token scope", "tab:blue"),
        "sample": ("sample scope", "tab:orange"),
        "alike": ("sample scope, all samples alike", "tab:red"),
        "moa": ("MoA", "tab:green"),
    }
    marks = dict(zip([*SHAPES, *MOA, "mae_f_step"], "osD^vPXhd<"))
    for panel, mode, title in zip(panels, MODES, ("forward", "forward + backward")):
        for case in report["cases"]:
            if case["mode"] != mode or case["threads"] != threads:
                continue
            kind = "moa" if case["shape"] in MOA else case["scope"]
            colour = kinds[kind][1]
            fill = colour if case["dtype"] == "float32" else "none"
            ratio, (low, high) = case["times"]["auto"]["ratio"], case["times"]["auto"]["quartiles"]
            style = dict(
                marker=marks[case["shape"]], color=colour, markerfacecolor=fill, markersize=6, linestyle="none"
            )
            panel.errorbar(case["bound"], ratio, yerr=[[max(0, ratio - low)], [max(0, high - ratio)]], lw=0.8, **style)
        ends = [0.3, 6.5]
        panel.plot(ends, ends, color="0.5", lw=1)
        panel.axhline(1, color="0.5", lw=1, ls=":")
        panel.set(
            xscale="log", yscale="log", title=title, xlabel="bound: multiplications left / those of plain attention"
        )
        panel.set_xticks([0.5, 0.75, 1, 2, 4], ["0.5", "0.75", "1", "2", "4"])
        panel.set_yticks([0.5, 0.75, 1, 2, 4, 8], ["0.5", "0.75", "1", "2", "4", "8"])
        panel.minorticks_off()
    panels[0].set_ylabel("time of auto / time of plain attention")
    for label, colour in kinds.values():
        panels[0].plot([], [], "s", color=colour, label=label)
    panels[0].plot([], [], "s", color="0.3", label="float32")
    panels[0].plot([], [], "s", color="0.3", markerfacecolor="none", label="bfloat16")
    panels[0].plot([], [], color="0.5", lw=1, label="bound reached")
    panels[0].legend(loc="upper left")
    for name, mark in marks.items():
        if any(case["shape"] == name for case in report["cases"]):
            panels[1].plot([], [], mark, color="0.3", markerfacecolor="none", label=name)
    panels[1].legend(loc="upper left", ncols=2, fontsize=8)
    m = report["machine"]
    figure.suptitle(
        f"{m['cpu']}, {threads} threads, torch {m['torch']}, {m['date']}; medians and quartiles", fontsize=9
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def line(entry):
    name = f"{entry['shape']} {entry['batch']}x{entry['tokens']} {entry['active']}/{entry['heads']} {entry['scope']}"
    text = f"{name:<31}{entry['dtype'][:2]}{entry['dtype'][-2:]} {entry['mode']:<7} {entry['threads']}"
    text = f"{text:<44}{entry['times']['dense']['milliseconds']:9.2f}  {entry['bound']:.2f}  "
    for name in ("masked", "packed", "auto", "every_expert"):
        if name in entry["times"]:
            t = entry["times"][name]
            text += f"{t['ratio']:8.3f} [{t['quartiles'][0]:.3f} {t['quartiles'][1]:.3f}]"
    if "saved_bytes_per_token" in entry:
        s = entry["saved_bytes_per_token"]
        text += "  saved " + " ".join(f"{s[n] / s['dense']:.2f}" for n in ("masked", "packed"))
    return text + f"  {entry['picked']}"


if __name__ == "__main__":
    sys.exit(main())
