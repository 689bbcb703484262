"""Time and memory of one attention layer, against plain attention, in one interleaved run.

    python benchmarks/attention.py                       # the whole grid, about 25 minutes on 2 cores
    python benchmarks/attention.py --shapes vit_small --shares 0.5 --modes forward --output /tmp/one.json
    python benchmarks/attention.py --path torch --output /tmp/torch.json    # without the C++ operators
    python benchmarks/attention.py --table               # the tables of docs/results/speed.md, from the results that are there
    python benchmarks/attention.py --draw                # the figure again, likewise

Every case times, in a random order each round, so that a noisy machine hits all alike:

    dense     fused qkv product, scaled_dot_product_attention, output product: no routing at all
    released  the published MoH attention: all heads, gates by softmax, top-k and one-hot masks, then an einsum
    masked    our executor that computes every head and multiplies
    packed    our executor that skips heads, whether or not that pays
    auto      what a user gets
    router    the router alone (forward, one choice per token)

and reports the median and the quartiles of the ratio to dense, round by round. `bound` is the ratio of multiplications
that are left when everything a head needs is skipped: what a perfect implementation would take. `auto_to_best` is the time of
auto over that of masked or released, whichever is faster. With `alike` all samples choose the same heads. Routing is
balanced (random router): a trained router is not. Left out for their time: `alike` beyond 256 tokens, and with 8 x 4096 tokens
training, released and packed.
Results, machine, operators and load go to benchmarks/results/attention.json, the figure to docs/images/attention_speed.png.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple, Tuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402
from timing import (  # noqa: E402
    PATHS,
    about_machine,
    cell,
    interleaved,
    machine,
    markdown,
    spread,
    to_first,
    use_path,
    verdict,
    write_report,
)
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from moh_vision.attention import HeadBudget, HeadMixtureAttention, resolve_budget  # noqa: E402
from moh_vision.attention.executors import choose  # noqa: E402
from moh_vision.attention.routing import Call, Routing, RoutingStats  # noqa: E402

HERE = Path(__file__).parent


class Shape(NamedTuple):
    batch: int  # with one choice of heads per token
    samples: int  # batch with one choice per sample
    tokens: int
    width: int
    heads: int


SHAPES = {
    "vit_small": Shape(8, 8, 197, 384, 6),
    "vit_base": Shape(8, 8, 197, 768, 12),
    "dit_small": Shape(8, 8, 256, 384, 6),
    "dit_xlarge": Shape(2, 8, 256, 1152, 16),
    "n1024": Shape(1, 8, 1024, 768, 12),
    "n4096": Shape(1, 8, 4096, 768, 12),
    "one_image": Shape(1, 1, 256, 384, 6),  # DiT-S, as people sample; forward alone
}
MOA = {"8K8E128D": (8, 8, 128), "16K32E256D": (16, 32, 256), "8K64E256D": (8, 64, 256)}  # active, experts, width
MOA_TOKENS = MAE_TOKENS = (128, 1024)
TOKENS = 8192  # MoA and MAE: 512 wide, and as many tokens a batch as fit in this
MANY_TOKENS = 16384  # of a batch: beyond it only forward of dense, masked and auto is timed
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCOPES = ("token", "sample", "alike")
MODES = ("forward", "train")  # train: forward and backward
SHARES = (0.5, 0.75, 0.9)
EXECUTORS = ("masked", "packed", "auto")
SECONDS, ROUNDS = 2.0, (5, 31)  # per case; at least and at most


class Goal(NamedTuple):
    """Time of auto over plain attention that is aimed at, for all cases that match."""

    dtypes: Tuple[str, ...]
    modes: Tuple[str, ...]
    shapes: Tuple[str, ...]
    limits: tuple  # for each of SHARES: a number, a function of the share of heads that run, or None for no goal
    scopes: Tuple[str, ...] = ("token",)


FLOAT, SHORT, FORWARD, TRAIN = ("float32",), ("bfloat16",), ("forward",), ("train",)
PER_SAMPLE = ("sample", "alike")
BATCHES = tuple(name for name in SHAPES if name != "one_image")
# With 6 heads 0.75 and 0.9 are both 5 of 6, which is measured once, as 0.75.
GOALS = (
    Goal(FLOAT, FORWARD, ("vit_small", "dit_small"), (0.74, 0.90, None)),
    Goal(FLOAT, FORWARD, ("vit_base",), (0.80, 0.93, 1.00)),
    Goal(FLOAT, FORWARD, ("dit_xlarge",), (0.85, 0.98, 1.02)),
    Goal(FLOAT, TRAIN, ("vit_small", "vit_base", "dit_small"), (0.74, 0.92, 1.01)),
    Goal(FLOAT, TRAIN, ("dit_xlarge",), (0.82, 1.00, 1.02)),
    Goal(FLOAT, FORWARD, ("n1024",), (0.70, 0.86, 0.97)),
    Goal(FLOAT, TRAIN, ("n1024",), (0.68, 0.86, 0.97)),
    Goal(FLOAT, MODES, ("n4096",), (0.61, 0.82, 0.96)),
    Goal(SHORT, FORWARD, ("vit_small", "vit_base", "dit_small"), (0.82, 0.90, 0.95)),
    Goal(SHORT, FORWARD, ("dit_xlarge",), (0.95, 0.99, 1.02)),
    Goal(SHORT, TRAIN, ("vit_small", "vit_base", "dit_small", "dit_xlarge"), (0.90, 0.97, 1.02)),
    Goal(SHORT, MODES, ("n1024",), (0.78, 0.92, 1.02)),
    Goal(SHORT, MODES, ("n4096",), (0.62, 0.76, 1.02)),
    Goal(FLOAT, MODES, BATCHES, (lambda share: share + 0.12, lambda share: share + 0.12, 1.02), PER_SAMPLE),
    Goal(SHORT, MODES, BATCHES, (lambda share: share + 0.15, lambda share: share + 0.15, 1.02), PER_SAMPLE),
    Goal(FLOAT, FORWARD, ("one_image",), (0.80, None, None), ("token", "sample")),
    Goal(SHORT, FORWARD, ("one_image",), (0.92, None, None), ("token", "sample")),
)
TO_BEST_GOALS = {"cpp": 1.02, "torch": 1.05}  # auto over the faster of masked and released, everywhere
ROUTER_GOALS = {("vit_base", "float32"): 0.36, ("vit_base", "bfloat16"): 0.16}  # milliseconds
SAVED_GOAL = 0.82  # bytes that auto keeps for backward over those of dense, at half of the heads
MOA_GOALS = {"8K8E128D": 1.10, "16K32E256D": 1.30, "8K64E256D": 1.30}  # auto over the bound
# MAE's F step, auto over dense: what it took before there were C++ operators (2026-11-21).
MAE_GOALS = {
    (128, "float32", "forward"): 1.10,
    (128, "float32", "train"): 1.05,
    (1024, "float32", "forward"): 0.98,
    (1024, "float32", "train"): 0.92,
    (128, "bfloat16", "forward"): 1.41,
    (128, "bfloat16", "train"): 1.08,
    (1024, "bfloat16", "forward"): 0.93,
    (1024, "bfloat16", "train"): 0.94,
}


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


class ReleasedRouter(nn.Module):
    """The gates of one of our MoH routers by the operations of the released code: Jin 2024, eq. 5 and 6, as scaled there.

    Softmax and top-k in the dtype of the tokens, the choice as a sum of one-hot masks.
    """

    def __init__(self, router):
        super().__init__()
        self.router, self.budget, self.reads, self.aux_loss = router, router.budget, router.reads, router.aux_loss

    def forward(self, x, *_):
        """x [B, N, C]; the weight of a head that is not chosen is 0."""
        router = self.router

        def logits_of(of):
            return F.linear(x, of.weight)  # a call of our routers computes in float32

        logits = logits_of(router.routed)  # [B, N, E]
        probs = logits.softmax(-1)
        chosen = F.one_hot(probs.topk(router.num_routed, -1).indices, router.num_candidates).sum(-2)  # [B, N, E]
        routed = probs * chosen
        routed = router.num_routed * routed / routed.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).eps)
        alpha = 2 * logits_of(router.balance).softmax(-1)  # [B, N, 2], eq. 6
        shared = torch.ones_like(alpha[..., :1]) if router.shared is None else logits_of(router.shared).softmax(-1)
        shared = torch.einsum("bn,bne->bne", alpha[..., 0], router.num_shared * shared)
        gates = torch.cat([shared, torch.einsum("bn,bne->bne", alpha[..., 1], routed)], -1)  # [B, N, H]
        counts = torch.cat([torch.ones_like(shared), chosen], -1).sum(1)
        return Routing(gates, None, RoutingStats(probs, counts, logits))


class Released(nn.Module):
    """The published MoH attention with the weights of our layer: all heads, then `ReleasedRouter`'s gates by einsum.

    With scope "sample" it reads the mean token.
    """

    def __init__(self, layer):
        super().__init__()
        self.layer, self.router = layer, ReleasedRouter(layer.router)

    def forward(self, x, is_causal=False):
        q, k, v = self.layer.qkv(x).unflatten(-1, (3, self.layer.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2)  # [B, N, H, D]
        gates = self.router(x.mean(1, keepdim=True) if self.layer.scope == "sample" else x).weights
        return self.layer.proj(torch.einsum("bnh,bnhd->bnhd", gates, o).flatten(2))


class Experts(nn.Module):
    """MAE as its formula reads: every expert of h - 1 heads computed by itself, then mixed by the gate."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        layer, y = self.layer, 0
        q, k, v = layer.project(Call(x, None))
        gate = layer.router(x).stats.probs[:, 0]  # [B, experts]
        for expert, members in enumerate(layer.router.members.bool()):
            o = F.scaled_dot_product_attention(q[:, members], k[:, members], v[:, members])  # [B, h - 1, N, D]
            w = layer.proj.weight.unflatten(1, (-1, layer.head_dim))[:, members].flatten(1)
            y = y + gate[:, expert, None, None] * F.linear(o.transpose(1, 2).flatten(2), w)
        return y * layer.router.scale + layer.proj.bias


def output(module, x, **options):
    """y [B, N, C] of one attention layer."""
    y = module(x, **options)
    return y[0] if isinstance(y, tuple) else y


def layer_step(module, x, mode, **options):
    """A function that runs one attention layer once."""
    module.train(mode == "train")
    if mode == "forward":
        return torch.no_grad()(lambda: module(x, **options))
    inputs, dy = [x, *module.parameters()], torch.randn_like(x)
    # Unused: MAE's gate in an F step.
    return lambda: torch.autograd.grad(output(module, x, **options), inputs, dy, allow_unused=True)


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


def draw_router(router, averaged=1):
    """Random weights whose logits have a spread of 1.5; `averaged`: the router reads the mean of so many random tokens.

    Larger logits saturate the gates: these become denormal numbers, which slow every product down.
    """
    for p in router.parameters():
        nn.init.normal_(p, std=1.5 * (averaged / p.shape[-1]) ** 0.5)


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


def picked(layer, x, mode):
    """The executor that auto takes."""
    with torch.set_grad_enabled(mode == "train"):
        routing = layer.router(x.mean(1, keepdim=True) if layer.scope == "sample" else x)
        return type(choose(layer, Call(x, routing))).__name__


def moh_case(name, share, scope, dtype):
    """`scope` "alike": per sample, and all samples are the same, so that they choose the same heads."""
    shape, per_sample = SHAPES[name], scope != "token"
    N, C, h = shape.tokens, shape.width, shape.heads
    B = shape.samples if per_sample else shape.batch
    budget = resolve_budget(f"uniform:{share}", 1, h, C // h)[0]
    layer = HeadMixtureAttention(C, budget, scope="sample" if per_sample else "token", dtype=dtype)
    draw_router(layer.router, N if per_sample else 1)
    about = dict(shape=name, batch=B, tokens=N, width=C, heads=h, share=share, active=budget.active, scope=scope)
    modules = {"dense": Dense(C, h, dtype), "released": Released(layer), **copies(layer, EXECUTORS)}
    if B * N > MANY_TOKENS:
        del modules["released"], modules["packed"]
    x = torch.randn(B, N, C, dtype=dtype)
    if scope == "alike":
        x = x[:1].repeat(B, 1, 1)
    return about, modules, x, bound(budget.active / h, N, C, scope)


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
    draw_router(layer.router)
    about = dict(shape=name, batch=B, tokens=tokens, width=512, heads=experts, active=active, scope="token")
    macs = 2 * 512 * width * (active + 1) + 2 * tokens * width * active  # for one token
    # Computing every one of many experts takes seconds.
    modules = {"dense": Dense(512, 8, dtype), **copies(layer, EXECUTORS if active == experts else EXECUTORS[1:])}
    return about, modules, torch.randn(B, tokens, 512, dtype=dtype), macs / (4 * 512 * 512 + 2 * tokens * 512)


def mae_case(tokens, dtype):
    """The F step of MAE-7: one expert of 7 of 8 heads a sequence."""
    layer = HeadMixtureAttention(
        512, HeadBudget(8, 64, 8, 0), router="mae", router_kwargs=dict(mode="sampled"), dtype=dtype
    )
    about = dict(shape="mae_f_step", batch=8, tokens=tokens, width=512, heads=8, active=7, scope="sample")
    modules = {"dense": Dense(512, 8, dtype), **copies(layer, EXECUTORS), "every_expert": Experts(layer)}
    return about, modules, torch.randn(8, tokens, 512, dtype=dtype), 7 / 8


def cases(args):
    """(name of the dtype, what tells the case, {name: module}, x [B, N, C], bound)"""
    for shape in args.shapes:
        for dtype in args.dtypes:
            if shape in SHAPES:
                for scope in args.scopes:
                    if scope == "alike" and (SHAPES[shape].samples == 1 or SHAPES[shape].tokens > 256):
                        continue
                    known = set()
                    for share in args.shares:
                        case = moh_case(shape, share, scope, DTYPES[dtype])
                        if case[0]["active"] not in known:  # of 6 heads 0.75 and 0.9 are both 5
                            yield (dtype, *case)
                        known.add(case[0]["active"])
            elif shape in MOA:
                for tokens in MOA_TOKENS:
                    yield (dtype, *moa_case(shape, tokens, DTYPES[dtype]))
            else:
                for tokens in MAE_TOKENS:
                    yield (dtype, *mae_case(tokens, DTYPES[dtype]))


def measure(modules, x, mode, routed_per_token):
    """Times and what follows from them, for the report."""
    contestants = dict(modules)
    if mode == "forward" and routed_per_token:
        contestants["router"] = modules["auto"].router
    x.requires_grad_(mode == "train")
    steps = {name: layer_step(module, x, mode) for name, module in contestants.items()}
    times = interleaved(steps, ROUNDS, SECONDS)
    entry = dict(times=to_first(times), picked=picked(modules["auto"], x, mode))
    others = [name for name in ("masked", "released") if name in times]
    if others:
        best = min(others, key=lambda name: times[name].median().item())
        entry.update(auto_to_best=spread(times["auto"] / times[best]), best=best)
    if mode == "train":
        tokens = x.shape[0] * x.shape[1]
        entry["saved_bytes_per_token"] = {name: round(saved_bytes(m, x) / tokens) for name, m in modules.items()}
    return entry


def key(case):
    """What tells cases apart, but for repetitions."""
    return tuple(case.get(k) for k in ("shape", "tokens", "scope", "share", "dtype", "mode", "threads"))


def limit(case):
    """The goal for auto over dense, or None."""
    if case["shape"] in MOA:
        return MOA_GOALS[case["shape"]] * case["bound"]
    if case["shape"] == "mae_f_step":
        return MAE_GOALS.get((case["tokens"], case["dtype"], case["mode"]))
    for goal in GOALS:
        where = (goal.dtypes, goal.modes, goal.shapes, goal.scopes)
        asked = (case["dtype"], case["mode"], case["shape"], case["scope"])
        if case["share"] in SHARES and all(value in allowed for value, allowed in zip(asked, where)):
            found = goal.limits[SHARES.index(case["share"])]
            return found(case["active"] / case["heads"]) if callable(found) else found
    return None


def name_of(case):
    return f"{case['shape']}, {case['scope']}, {case['batch']} x {case['tokens']}"


def auto_cell(case):
    """Ratio of auto with its goal; "p" where it took `packed`."""
    row = case["times"]["auto"]
    text = f"{row['ratio']:.2f} [{row['quartiles'][0]:.2f} {row['quartiles'][1]:.2f}]"
    mark, aim = " p" if case["picked"] != "Masked" else "", limit(case)
    return text + mark + ("" if aim is None else f", goal {aim:.2f} {verdict(row['quartiles'][0], aim)}")


def median_of(case, name):
    return f"{case['times'][name]['ratio']:.2f}" if name in case["times"] else ""


def tables(report):
    """The tables of docs/results/speed.md, Markdown."""
    legend = "Ratios to dense: median [quartiles]; p: auto took packed. A goal is met if the lower quartile reaches it."
    text = [about_machine(report) + "\n" + legend + "\n", goal_table(report)]
    settings = dict.fromkeys((c["mode"], c["dtype"], c["threads"]) for c in report["cases"])
    for mode, dtype, threads in sorted(settings, key=lambda s: (-s[2], s[1] != "float32", s[0])):
        some = [c for c in report["cases"] if (c["mode"], c["dtype"], c["threads"]) == (mode, dtype, threads)]
        title = f"{'Forward' if mode == 'forward' else 'Forward and backward'}, {dtype}, threads: {threads}"
        text += [table(title, some) for table in (moh_table, experts_table)]
    return "\n".join(filter(None, [*text, router_table(report), memory_table(report)]))


def goal_table(report):
    """How many cases reach each kind of goal, and the name of every one that does not."""
    kinds, path = {}, report.get("path", "torch")

    def count(kind, case, low, aim, digits=2):
        missed = f"{name_of(case)}, {case['active']}/{case['heads']}: {low:.{digits}f} (goal {aim:.{digits}f})"
        setting = f"{case['dtype']}, {case['mode']}, threads: {case['threads']}"
        reached = verdict(low, aim) == "met"
        kinds.setdefault((setting, kind), []).append(None if reached else missed)

    for case in report["cases"]:
        aim, auto, router = limit(case), case["times"]["auto"], case["times"].get("router")
        if aim is not None:
            per = "MoA" if case["shape"] in MOA else "MAE's F step" if case["shape"] == "mae_f_step" else case["scope"]
            count(per, case, auto["quartiles"][0], aim)
        if "auto_to_best" in case:
            count(
                "auto / the faster of masked and released",
                case,
                case["auto_to_best"]["quartiles"][0],
                TO_BEST_GOALS[path],
            )
        if router is not None and (case["shape"], case["dtype"]) in ROUTER_GOALS:
            aim = ROUTER_GOALS[case["shape"], case["dtype"]]
            count("router alone, ms", case, router["milliseconds_quartiles"][0], aim, 3)
        if "saved_bytes_per_token" in case and case.get("share") == 0.5:
            saved = case["saved_bytes_per_token"]
            count("bytes kept for backward", case, saved["auto"] / saved["dense"], SAVED_GOAL)
    rows = [
        (*what, f"{results.count(None)} of {len(results)}", "; ".join(filter(None, results)))
        for what, results in sorted(kinds.items(), key=lambda item: item[0][0], reverse=True)
    ]
    return markdown("Goals", ("setting", "kind", "met", "missed"), rows)


def moh_table(title, some):
    """One row for a shape and scope, one column for a share."""
    groups = {}
    for case in some:
        if case["shape"] in SHAPES:
            groups.setdefault((case["shape"], case["scope"]), {})[case["share"]] = case
    if not groups:
        return None
    shares = sorted({share for group in groups.values() for share in group})
    rows = []
    for _, group in sorted(groups.items(), key=lambda item: SCOPES.index(item[0][1])):
        every = list(group.values())
        heads = "/".join(str(case["active"]) for case in every)
        of_dense = [" ".join(median_of(case, name) for case in every) for name in ("released", "masked", "packed")]
        row = [
            name_of(every[0]),
            f"{heads} of {every[0]['heads']}",
            f"{every[0]['times']['dense']['milliseconds']:.1f}",
        ]
        row += [" ".join(f"{case['bound']:.2f}" for case in every), *of_dense]
        rows.append(row + [auto_cell(group[share]) if share in group else "" for share in shares])
    columns = ("shape", "heads", "dense ms", "bound", "released", "masked", "packed", *(f"auto {s}" for s in shares))
    return markdown(title, columns, rows)


def experts_table(title, some):
    """MoA's layers and MAE's F step, one row each."""
    rows = []
    for case in some:
        if case["shape"] not in SHAPES:
            others = [median_of(case, name) for name in ("every_expert", "masked", "packed")]
            name = f"{case['shape']} {case['batch']} x {case['tokens']}"
            over = case["times"]["auto"]["ratio"] / case["bound"]
            rows.append((name, f"{case['bound']:.2f}", *others, auto_cell(case), f"{over:.2f}"))
    columns = ("layer", "bound", "every expert", "masked", "packed", "auto", "auto / bound")
    return markdown(f"MoA's experts and MAE's F step: {title}", columns, rows) if rows else None


def router_table(report):
    rows = []
    for case in report["cases"]:
        row = case["times"].get("router")
        if row is not None:
            aim = ROUTER_GOALS.get((case["shape"], case["dtype"]))
            name = f"{name_of(case)}, {case['active']} of {case['heads']}"
            time = cell(row["milliseconds"], row["milliseconds_quartiles"], aim)
            rows.append((name, case["dtype"], str(case["threads"]), time, f"{row['ratio']:.2f}"))
    return markdown("Router alone, ms", ("shape", "dtype", "threads", "ms", "of dense"), rows) if rows else None


def memory_table(report):
    rows = []
    for case in report["cases"]:
        saved = case.get("saved_bytes_per_token")
        if saved is not None and case["dtype"] == "float32":
            others = [f"{saved[n] / saved['dense']:.2f}" if n in saved else "" for n in ("released", *EXECUTORS)]
            if case.get("share") == 0.5:
                others[-1] += f", goal {SAVED_GOAL} {verdict(saved['auto'] / saved['dense'], SAVED_GOAL)}"
            name = f"{name_of(case)}, {case['active']} of {case['heads']}"
            rows.append((name, str(saved["dense"]), *others))
    columns = ("layer", "dense, bytes a token", "released", *EXECUTORS)
    return markdown("Kept for backward, float32", columns, rows) if rows else None


def line(entry):
    name = f"{entry['shape']} {entry['batch']}x{entry['tokens']} {entry['active']}/{entry['heads']} {entry['scope']}"
    text = f"{name:<31}{entry['dtype'][:2]}{entry['dtype'][-2:]} {entry['mode']:<7} {entry['threads']}"
    text = f"{text:<44}{entry['times']['dense']['milliseconds']:9.2f}  {entry['bound']:.2f}  "
    for name in ("released", *EXECUTORS):
        t = entry["times"].get(name)
        text += f"{t['ratio']:8.3f} [{t['quartiles'][0]:.3f} {t['quartiles'][1]:.3f}]" if t else " " * 22
    text += f"  {entry['picked']}"
    if "router" in entry["times"]:
        text += f"  router {entry['times']['router']['milliseconds']:.3f} ms"
    if "every_expert" in entry["times"]:
        text += f"  every expert {entry['times']['every_expert']['ratio']:.2f}"
    if "saved_bytes_per_token" in entry:
        s = entry["saved_bytes_per_token"]
        text += "  saved " + " ".join(f"{s[n] / s['dense']:.2f}" for n in EXECUTORS if n in s)
    return text


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
    marks = dict(zip([*SHAPES, *MOA, "mae_f_step"], "osD^vP*Xhd<"))
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*SHAPES, *MOA, "mae_f_step"]
    parser.add_argument("--shapes", nargs="+", default=every, choices=every)
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--scopes", nargs="+", default=list(SCOPES), choices=SCOPES)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--threads", nargs="+", type=int, default=[2])
    parser.add_argument("--path", choices=PATHS, help="operators; default: what a user gets")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "attention.json")
    parser.add_argument("--figure", type=Path, help="default: beside the output, or docs/images for the whole grid")
    parser.add_argument("--add", action="store_true", help="replace these cases in --output and keep its others")
    parser.add_argument("--table", action="store_true", help="only print what is in --output, as Markdown")
    parser.add_argument("--draw", action="store_true", help="only draw what is in --output")
    args = parser.parse_args()
    if args.figure is None:
        whole = args.output.resolve() == HERE.resolve() / "results" / "attention.json"
        args.figure = HERE.parent / "docs/images/attention_speed.png" if whole else args.output.with_suffix(".png")
    if args.table:
        return print(tables(json.loads(args.output.read_text())))
    if args.draw:
        return draw(json.loads(args.output.read_text()), args.figure)

    torch.manual_seed(0)
    report = dict(machine=machine(), path=use_path(args.path), load_before=os.getloadavg(), cases=[])
    if args.add:
        earlier = json.loads(args.output.read_text())
        if earlier["path"] != report["path"]:
            parser.error(
                f"{args.output} was measured with the operators {earlier['path']!r}, this is {report['path']!r}"
            )
        report["cases"] = earlier["cases"]
    print(f"{'':44}{'dense ms':>9}  bound  " + "".join(f"{n:>22}" for n in ("released", *EXECUTORS)))
    for threads in args.threads:
        torch.set_num_threads(threads)
        for dtype, about, modules, x, best in cases(args):
            for mode in args.modes:
                if mode == "train" and (about["shape"] == "one_image" or x.shape[0] * x.shape[1] > MANY_TOKENS):
                    continue
                entry = dict(about, dtype=dtype, mode=mode, threads=threads, bound=round(best, 3))
                entry.update(measure(modules, x, mode, about["shape"] in SHAPES and about["scope"] == "token"))
                entry["load"] = os.getloadavg()[0]
                report["cases"] = [case for case in report["cases"] if key(case) != key(entry)] + [entry]
                print(line(entry), flush=True)
                write_report(args.output, report, indent=None, quiet=True)  # what comes later may fail
    write_report(args.output, report, indent=None)
    draw(report, args.figure)
    print(args.figure)


if __name__ == "__main__":
    sys.exit(main())
