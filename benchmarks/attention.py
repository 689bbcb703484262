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

from moh_vision.attention import HeadBudget, HeadMixtureAttention, Router, resolve_budget
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
MOA = {  # active, experts, width
    "8K8E128D": (8, 8, 128),
    "16K32E256D": (16, 32, 256),
    "8K64E256D": (8, 64, 256),
}
MOA_TOKENS = (128, 1024)
MAE_TOKENS = (128, 1024)
TOKENS = 8192  # MoA and MAE: 512 wide, and as many tokens a batch as fit in this
MANY_TOKENS = 16384  # of a batch: beyond it only forward of dense, masked and auto is timed
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCOPES = ("token", "sample")
MODES = ("forward", "train")  # train: forward and backward
SHARES = (0.5, 0.75, 0.9)
EXECUTORS = ("masked", "packed", "auto")
SECONDS = 2.0  # of a case
ROUNDS = (5, 31)  # at least and at most
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
        self.qkv = nn.Linear(dim, 3 * dim, dtype=dtype)
        self.proj = nn.Linear(dim, dim, dtype=dtype)

    def forward(self, x, is_causal=False):
        B, N, C = x.shape
        qkv = self.qkv(x).view(B, N, 3, self.heads, C // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, D]
        o = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.proj(o.transpose(1, 2).reshape(B, N, C))


class ReleasedRouter(Router):
    """The gates of one of our MoH routers by the operations of the released code: Jin 2024, eq. 5 and 6, as scaled there.

    Softmax and top-k in the dtype of the tokens, the choice as a sum of one-hot masks.
    """

    def __init__(self, router):
        super().__init__(router.budget)
        self.router = router
        self.aux_loss = router.aux_loss

    def forward(self, x, *_):
        """Route tokens x [B, N, C]; the weight of a head that is not chosen is 0."""
        router = self.router

        def logits_of(linear):
            return F.linear(x, linear.weight)  # a call of our routers computes in float32

        logits = logits_of(router.routed)  # [B, N, E]
        probs = logits.softmax(-1)
        indices = probs.topk(router.num_routed, -1).indices
        chosen = F.one_hot(indices, router.num_candidates).sum(-2)  # [B, N, E]
        routed = probs * chosen
        sums = routed.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).eps)
        routed = router.num_routed * routed / sums
        alpha = 2 * logits_of(router.balance).softmax(-1)  # [B, N, 2], eq. 6
        shared = torch.ones_like(alpha[..., :1])
        if router.shared is not None:
            shared = logits_of(router.shared).softmax(-1)
        shared = torch.einsum("bn,bne->bne", alpha[..., 0], router.num_shared * shared)
        routed = torch.einsum("bn,bne->bne", alpha[..., 1], routed)
        gates = torch.cat([shared, routed], -1)  # [B, N, H]
        counts = torch.cat([torch.ones_like(shared), chosen], -1).sum(1)
        return Routing(gates, None, RoutingStats(probs, counts, logits))


class Released(nn.Module):
    """The published MoH attention with the weights of our layer: all heads, then `ReleasedRouter`'s gates by einsum.

    With scope "sample" it reads the mean token.
    """

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.router = ReleasedRouter(layer.router)

    def forward(self, x, is_causal=False):
        qkv = self.layer.qkv(x).unflatten(-1, (3, self.layer.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, D]
        o = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        o = o.transpose(1, 2)  # [B, N, H, D]
        gates = self.router(router_input(self.layer, x)).weights
        return self.layer.proj(torch.einsum("bnh,bnhd->bnhd", gates, o).flatten(2))


def router_input(layer, x):
    """Return what a layer's router reads: the tokens, or with scope "sample" their mean."""
    if layer.scope == "sample":
        return x.mean(1, keepdim=True)
    return x


def output(module, x, **options):
    """Run one attention layer, and return y [B, N, C]."""
    y = module(x, **options)
    if isinstance(y, tuple):
        return y[0]
    return y


def layer_step(module, x, mode, **options):
    """Make a function that runs one attention layer once."""
    module.train(mode == "train")
    if mode == "forward":
        return torch.no_grad()(lambda: module(x, **options))
    inputs = [x, *module.parameters()]
    dy = torch.randn_like(x)

    def step():
        y = output(module, x, **options)
        # MAE's gate has no part in an F step.
        return torch.autograd.grad(y, inputs, dy, allow_unused=True)

    return step


def saved_bytes(module, x):
    """Count the bytes that autograd keeps for backward, the input included and parameters left out, each storage once."""
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
    """Draw weights whose logits have a spread of 1.5; `averaged`: the router reads the mean of so many random tokens.

    Larger logits saturate the gates: these become denormal numbers, which slow every product down.
    """
    for p in router.parameters():
        nn.init.normal_(p, std=1.5 * (averaged / p.shape[-1]) ** 0.5)


def copies(layer, executors):
    """Return {executor: layer} of a layer under several executors; all share its weights."""
    result = {}
    for name in executors:
        copied = object.__new__(type(layer))
        copied.__dict__ = {**layer.__dict__, "executor": name}
        result[name] = copied
    return result


def bound(share, tokens, dim, scope):
    """Return the share of multiplications that is left, with the router free: projections 4 N C^2, attention 2 N^2 C."""
    if scope != "token":
        return share
    return 1 - (1 - share) * (2 * dim + 2 * tokens) / (4 * dim + 2 * tokens)


def picked(layer, x, mode):
    """Return the name of the executor that auto takes."""
    with torch.set_grad_enabled(mode == "train"):
        routing = layer.router(router_input(layer, x))
        return layer.plan(Call(x, routing)).executor.__name__


def moh_case(name, share, scope, dtype):
    """Return a case of `cases` without its dtype: MoH in a shape of SHAPES."""
    shape = SHAPES[name]
    width = shape.width
    batch = shape.batch
    averaged = 1
    if scope == "sample":
        batch = shape.samples
        averaged = shape.tokens
    budget = resolve_budget(f"uniform:{share}", 1, shape.heads, width // shape.heads)[0]
    layer = HeadMixtureAttention(width, budget, scope=scope, dtype=dtype)
    draw_router(layer.router, averaged)
    about = dict(
        shape=name,
        batch=batch,
        tokens=shape.tokens,
        width=width,
        heads=shape.heads,
        share=share,
        active=budget.active,
        scope=scope,
    )
    modules = {
        "dense": Dense(width, shape.heads, dtype),
        "released": Released(layer),
        **copies(layer, EXECUTORS),
    }
    if batch * shape.tokens > MANY_TOKENS:
        del modules["released"]
        del modules["packed"]
    x = torch.randn(batch, shape.tokens, width, dtype=dtype)
    return about, modules, x, bound(budget.active / shape.heads, shape.tokens, width, scope)


def moa_case(name, tokens, dtype):
    """Return a case of `cases` without its dtype: MoA, dense being 8 heads of 64, as the paper's models have."""
    active, experts, width = MOA[name]
    batch = TOKENS // 8 // tokens
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
        shape=name,
        batch=batch,
        tokens=tokens,
        width=512,
        heads=experts,
        active=active,
        scope="token",
    )
    executors = EXECUTORS
    if active < experts:  # "masked" would compute every one of many experts, which takes seconds
        executors = EXECUTORS[1:]
    modules = {"dense": Dense(512, 8, dtype), **copies(layer, executors)}
    x = torch.randn(batch, tokens, 512, dtype=dtype)
    macs = 2 * 512 * width * (active + 1) + 2 * tokens * width * active  # for one token
    dense_macs = 4 * 512 * 512 + 2 * tokens * 512
    return about, modules, x, macs / dense_macs


def mae_case(tokens, dtype):
    """Return a case of `cases` without its dtype: the F step of MAE-7, one expert of 7 of 8 heads a sequence."""
    layer = HeadMixtureAttention(
        512, HeadBudget(8, 64, 8, 0), router="mae", router_kwargs=dict(mode="sampled"), dtype=dtype
    )
    about = dict(
        shape="mae_f_step", batch=8, tokens=tokens, width=512, heads=8, active=7, scope="sample"
    )
    modules = {"dense": Dense(512, 8, dtype), **copies(layer, EXECUTORS)}
    return about, modules, torch.randn(8, tokens, 512, dtype=dtype), 7 / 8


def cases(args):
    """Yield (name of the dtype, what tells the case, {name: module}, x [B, N, C], bound)."""
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
    """Time the modules of a case, and return what the report says of it."""
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
            name: round(saved_bytes(module, x) / tokens) for name, module in modules.items()
        }
    return entry


def key(case):
    """Return what tells cases apart, but for repetitions."""
    names = ("shape", "tokens", "scope", "share", "dtype", "mode", "threads")
    return tuple(case.get(name) for name in names)


def span(values):
    """Write the smallest and the largest value; "" without values."""
    if not values:
        return ""
    texts = [f"{value:.2f}" for value in (min(values), max(values))]
    return "–".join(dict.fromkeys(texts))


def layer_table(cases):
    """Make the table of layers: a row for a group of shapes and a dtype.

    It has the median time of auto over dense, and how much of dense's memory stays for backward.
    """

    def row(scope, shapes, dtype):
        some = [
            case
            for case in cases
            if case["shape"] in shapes and case["scope"] == scope and case["dtype"] == dtype
        ]
        for mode in MODES:
            for share in SHARES:
                found = [case for case in some if case["mode"] == mode and case["share"] == share]
                yield span([case["times"]["auto"]["ratio"] for case in found])
        kept = [
            case["saved_bytes_per_token"]
            for case in some
            if case["share"] == 0.5 and "saved_bytes_per_token" in case
        ]
        yield span([saved["auto"] / saved["dense"] for saved in kept])

    columns = ["heads chosen", "dtype"]
    columns += [f"{mode}, {share}" for mode in MODES for share in SHARES]
    columns.append("kept, 0.5")
    rows = []
    for name, group in GROUPS.items():
        for dtype in DTYPES:
            cells = list(row(*group, dtype))
            if any(cells):
                rows.append([name, dtype, *cells])
    return markdown(columns, rows)


def experts_table(cases):
    """Make the table of MoA's layers and MAE's F step: the bound, and the time of auto over dense attention of 8 heads."""
    rows = {}
    for case in cases:
        if case["shape"] not in SHAPES:
            name = f"{case['shape']}, {case['batch']} x {case['tokens']}"
            row = rows.setdefault(name, {"bound": [case["bound"]]})
            row[case["dtype"], case["mode"]] = [case["times"]["auto"]["ratio"]]
    columns = [(dtype, mode) for dtype in DTYPES for mode in MODES]
    lines = []
    for name, row in rows.items():
        lines.append([name, *(span(row.get(column)) for column in ("bound", *columns))])
    return markdown(["layer", "bound", *map(", ".join, columns)], lines)


def tables(report):
    """Make the tables of docs/results/speed.md."""
    cases = report["cases"]
    return "\n".join([about_machine(report) + "\n", layer_table(cases), experts_table(cases)])


def line(entry):
    """Write an entry of the report in one line."""
    name = f"{entry['shape']} {entry['batch']}x{entry['tokens']} {entry['active']}/{entry['heads']} {entry['scope']}"
    text = f"{name:<31}{entry['dtype']:<9}{entry['mode']:<8}{entry['times']['dense']['milliseconds']:9.2f} ms"
    text += f"  bound {entry['bound']:.2f}"
    for name, row in entry["times"].items():
        if name != "dense":
            low, high = row["quartiles"]
            text += f"  {name} {row['ratio']:.3f} [{low:.3f} {high:.3f}]"
    text += f"  {entry['picked']}"
    for name, count in entry.get("saved_bytes_per_token", {}).items():
        text += f"  {name} keeps {count} B"
    return text


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
        print(tables(json.loads(args.output.read_text())), end="")
        return

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
        many_tokens = x.shape[0] * x.shape[1] > MANY_TOKENS
        routed_per_token = about["shape"] in SHAPES and about["scope"] == "token"
        for mode in args.modes:
            if mode == "train" and (many_tokens or about["shape"] == "one_image"):
                continue
            entry = dict(about, dtype=dtype, mode=mode, threads=args.threads, bound=round(best, 3))
            entry.update(measure(modules, x, mode, routed_per_token))
            entry["load"] = os.getloadavg()[0]
            report["cases"] = [case for case in report["cases"] if key(case) != key(entry)]
            report["cases"].append(entry)
            print(line(entry), flush=True)
            write_report(args.output, report, indent=None)  # what comes later may fail
    print(args.output)


if __name__ == "__main__":
    sys.exit(main())
