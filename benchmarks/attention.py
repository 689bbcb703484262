"""Time and memory of one attention layer, against plain attention, in one interleaved run.

    python benchmarks/attention.py                       # the whole grid, less than 25 minutes on 2 cores
    python benchmarks/attention.py --shapes vit_small --shares 0.5 --modes forward --output /tmp/one.json
    python benchmarks/attention.py --path torch --output /tmp/torch.json    # without the C++ operators
    python benchmarks/attention.py --table               # the tables of docs/results/speed.md

Every case times, in a random order each round, so that a noisy machine hits all alike:

    dense     fused qkv product, scaled_dot_product_attention, output product: no routing at all
    released  the published MoH attention: all heads, gates by softmax, top-k and one-hot masks, then an einsum
    masked    our executor that computes every head and multiplies
    packed    our executor that skips heads, whether or not that pays
    auto      what a user gets
    router    the router alone (forward, one choice per token)

and reports the median and the quartiles of the ratio to dense, round by round. `bound` is the ratio of multiplications
that are left when everything a head needs is skipped: what a perfect implementation would take. Routing is balanced (random
router): a trained router is not. With 8 x 4096 tokens training, released and packed are left out for their time.
Results, machine, operators and load go to benchmarks/results/attention.json.
"""

import json
import os
import sys
from typing import NamedTuple

import torch
from timing import (
    PATHS,
    about_machine,
    interleaved,
    markdown,
    new_report,
    parser_of,
    to_base,
    use_path,
    write_report,
)
from torch import nn
from torch.nn import functional as F

from moh_vision.attention import HeadBudget, HeadMixtureAttention, resolve_budget
from moh_vision.attention.executors import select_executor
from moh_vision.attention.routing import Call, Routing, RoutingStats


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
MOA = {
    "8K8E128D": (8, 8, 128),
    "16K32E256D": (16, 32, 256),
    "8K64E256D": (8, 64, 256),
}  # active, experts, width
MOA_TOKENS = MAE_TOKENS = (128, 1024)
TOKENS = 8192  # MoA and MAE: 512 wide, and as many tokens a batch as fit in this
MANY_TOKENS = 16384  # of a batch: beyond it only forward of dense, masked and auto is timed
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCOPES = ("token", "sample")
MODES = ("forward", "train")  # train: forward and backward
SHARES = (0.5, 0.75, 0.9)
EXECUTORS = ("masked", "packed", "auto")
SECONDS, ROUNDS = 2.0, (5, 31)  # per case; at least and at most
SHORT = ("vit_small", "vit_base", "dit_small", "dit_xlarge")
GROUPS = {  # rows of the table: scope, shapes
    "per token, 197 to 256 tokens": ("token", SHORT),
    "per token, 1,024 tokens": ("token", ("n1024",)),
    "per token, 4,096 tokens": ("token", ("n4096",)),
    "per sample, 197 to 256 tokens": ("sample", SHORT),
    "per sample, 1,024 and 4,096 tokens": ("sample", ("n1024", "n4096")),
    "per token, one image of DiT-S": ("token", ("one_image",)),
}


class Dense(nn.Module):
    """Attention as timm and DiT have it."""

    def __init__(self, dim, heads, dtype):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, dtype=dtype), nn.Linear(dim, dim, dtype=dtype)

    def forward(self, x, is_causal=False):
        B, N, C = x.shape
        q, k, v = (
            self.qkv(x).view(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        )
        o = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.proj(o.transpose(1, 2).reshape(B, N, C))


class ReleasedRouter(nn.Module):
    """The gates of one of our MoH routers by the operations of the released code: Jin 2024, eq. 5 and 6, as scaled there.

    Softmax and top-k in the dtype of the tokens, the choice as a sum of one-hot masks.
    """

    def __init__(self, router):
        super().__init__()
        self.router, self.budget, self.reads, self.aux_loss = (
            router,
            router.budget,
            router.reads,
            router.aux_loss,
        )

    def forward(self, x, *_):
        """x [B, N, C]; the weight of a head that is not chosen is 0."""
        router = self.router

        def logits_of(of):
            return F.linear(x, of.weight)  # a call of our routers computes in float32

        logits = logits_of(router.routed)  # [B, N, E]
        probs = logits.softmax(-1)
        chosen = F.one_hot(probs.topk(router.num_routed, -1).indices, router.num_candidates).sum(
            -2
        )  # [B, N, E]
        routed = probs * chosen
        routed = (
            router.num_routed
            * routed
            / routed.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).eps)
        )
        alpha = 2 * logits_of(router.balance).softmax(-1)  # [B, N, 2], eq. 6
        shared = (
            torch.ones_like(alpha[..., :1])
            if router.shared is None
            else logits_of(router.shared).softmax(-1)
        )
        shared = torch.einsum("bn,bne->bne", alpha[..., 0], router.num_shared * shared)
        gates = torch.cat(
            [shared, torch.einsum("bn,bne->bne", alpha[..., 1], routed)], -1
        )  # [B, N, H]
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
        q, k, v = (
            self.layer.qkv(x)
            .unflatten(-1, (3, self.layer.num_heads, -1))
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        o = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(
            1, 2
        )  # [B, N, H, D]
        gates = self.router(x.mean(1, keepdim=True) if self.layer.scope == "sample" else x).weights
        return self.layer.proj(torch.einsum("bnh,bnhd->bnhd", gates, o).flatten(2))


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
        return select_executor(layer, Call(x, routing)).__name__


def moh_case(name, share, scope, dtype):
    shape, per_sample = SHAPES[name], scope == "sample"
    N, C, h = shape.tokens, shape.width, shape.heads
    B = shape.samples if per_sample else shape.batch
    budget = resolve_budget(f"uniform:{share}", 1, h, C // h)[0]
    layer = HeadMixtureAttention(C, budget, scope=scope, dtype=dtype)
    draw_router(layer.router, N if per_sample else 1)
    about = dict(
        shape=name,
        batch=B,
        tokens=N,
        width=C,
        heads=h,
        share=share,
        active=budget.active,
        scope=scope,
    )
    modules = {"dense": Dense(C, h, dtype), "released": Released(layer), **copies(layer, EXECUTORS)}
    if B * N > MANY_TOKENS:
        del modules["released"], modules["packed"]
    return about, modules, torch.randn(B, N, C, dtype=dtype), bound(budget.active / h, N, C, scope)


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
    about = dict(
        shape=name, batch=B, tokens=tokens, width=512, heads=experts, active=active, scope="token"
    )
    macs = 2 * 512 * width * (active + 1) + 2 * tokens * width * active  # for one token
    # Computing every one of many experts takes seconds.
    modules = {
        "dense": Dense(512, 8, dtype),
        **copies(layer, EXECUTORS if active == experts else EXECUTORS[1:]),
    }
    return (
        about,
        modules,
        torch.randn(B, tokens, 512, dtype=dtype),
        macs / (4 * 512 * 512 + 2 * tokens * 512),
    )


def mae_case(tokens, dtype):
    """The F step of MAE-7: one expert of 7 of 8 heads a sequence."""
    layer = HeadMixtureAttention(
        512, HeadBudget(8, 64, 8, 0), router="mae", router_kwargs=dict(mode="sampled"), dtype=dtype
    )
    about = dict(
        shape="mae_f_step", batch=8, tokens=tokens, width=512, heads=8, active=7, scope="sample"
    )
    modules = {"dense": Dense(512, 8, dtype), **copies(layer, EXECUTORS)}
    return about, modules, torch.randn(8, tokens, 512, dtype=dtype), 7 / 8


def cases(args):
    """(name of the dtype, what tells the case, {name: module}, x [B, N, C], bound)"""
    for shape in args.shapes:
        for dtype in args.dtypes:
            if shape in SHAPES:
                for scope in args.scopes:
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
    entry = dict(times=to_base(times), picked=picked(modules["auto"], x, mode))
    if mode == "train":
        tokens = x.shape[0] * x.shape[1]
        entry["saved_bytes_per_token"] = {
            name: round(saved_bytes(m, x) / tokens) for name, m in modules.items()
        }
    return entry


def key(case):
    """What tells cases apart, but for repetitions."""
    return tuple(
        case.get(k) for k in ("shape", "tokens", "scope", "share", "dtype", "mode", "threads")
    )


def span(values):
    """The smallest and the largest value, as text."""
    texts = [f"{value:.2f}" for value in (min(values), max(values))] if values else [""]
    return "–".join(dict.fromkeys(texts))


def layer_table(cases):
    """Time of auto over dense, medians, a row for a group of shapes and a dtype; and what stays in memory for backward."""

    def row(scope, shapes, dtype):
        some = [
            c for c in cases if c["shape"] in shapes and c["scope"] == scope and c["dtype"] == dtype
        ]
        for mode in MODES:
            for share in SHARES:
                found = [c for c in some if c["mode"] == mode and c["share"] == share]
                yield span([c["times"]["auto"]["ratio"] for c in found])
        kept = [
            c["saved_bytes_per_token"]
            for c in some
            if c["share"] == 0.5 and "saved_bytes_per_token" in c
        ]
        yield span([each["auto"] / each["dense"] for each in kept])

    columns = [f"{mode}, {share}" for mode in MODES for share in SHARES]
    rows = [
        [name, dtype, *row(*group, dtype)] for name, group in GROUPS.items() for dtype in DTYPES
    ]
    return markdown(
        ["heads chosen", "dtype", *columns, "kept, 0.5"], [row for row in rows if any(row[2:])]
    )


def experts_table(cases):
    """MoA's layers and MAE's F step: the bound and the time of auto over dense attention of 8 heads."""
    rows = {}
    for case in cases:
        if case["shape"] not in SHAPES:
            name = f"{case['shape']}, {case['batch']} x {case['tokens']}"
            rows.setdefault(name, {"": case["bound"]})[case["dtype"], case["mode"]] = case["times"][
                "auto"
            ]["ratio"]
    columns = [(dtype, mode) for dtype in DTYPES for mode in MODES]
    lines = [
        [name, *(span([row[key]] if key in row else []) for key in ("", *columns))]
        for name, row in rows.items()
    ]
    return markdown(["layer", "bound", *map(", ".join, columns)], lines)


def tables(report):
    return "\n".join(
        [about_machine(report) + "\n", layer_table(report["cases"]), experts_table(report["cases"])]
    )


def line(entry):
    name = f"{entry['shape']} {entry['batch']}x{entry['tokens']} {entry['active']}/{entry['heads']} {entry['scope']}"
    text = f"{name:<31}{entry['dtype']:<9}{entry['mode']:<8}{entry['times']['dense']['milliseconds']:9.2f} ms"
    text += f"  bound {entry['bound']:.2f}"
    for name, row in entry["times"].items():
        low, high = row["quartiles"]
        text += f"  {name} {row['ratio']:.3f} [{low:.3f} {high:.3f}]" if name != "dense" else ""
    kept = entry.get("saved_bytes_per_token", {})
    return f"{text}  {entry['picked']}" + "".join(f"  {name} keeps {kept[name]} B" for name in kept)


def main():
    parser = parser_of(__doc__, "attention")
    every = [*SHAPES, *MOA, "mae_f_step"]
    parser.add_argument("--shapes", nargs="+", default=every, choices=every)
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--scopes", nargs="+", default=list(SCOPES), choices=SCOPES)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--path", choices=PATHS, help="operators; default: what a user gets")
    parser.add_argument(
        "--add", action="store_true", help="replace these cases in --output and keep its others"
    )
    args = parser.parse_args()
    if args.table:
        return print(tables(json.loads(args.output.read_text())), end="")

    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    report = new_report(path=use_path(args.path), cases=[])
    if args.add:
        earlier = json.loads(args.output.read_text())
        if earlier["path"] != report["path"]:
            parser.error(
                f"{args.output}: measured with operators {earlier['path']!r}, this is {report['path']!r}"
            )
        report["cases"] = earlier["cases"]
    for dtype, about, modules, x, best in cases(args):
        for mode in args.modes:
            if mode == "train" and (
                about["shape"] == "one_image" or x.shape[0] * x.shape[1] > MANY_TOKENS
            ):
                continue
            entry = dict(about, dtype=dtype, mode=mode, threads=args.threads, bound=round(best, 3))
            entry.update(
                measure(modules, x, mode, about["shape"] in SHAPES and about["scope"] == "token")
            )
            entry["load"] = os.getloadavg()[0]
            report["cases"] = [case for case in report["cases"] if key(case) != key(entry)] + [
                entry
            ]
            print(line(entry), flush=True)
            write_report(args.output, report, indent=None)  # what comes later may fail
    print(args.output)


if __name__ == "__main__":
    sys.exit(main())
