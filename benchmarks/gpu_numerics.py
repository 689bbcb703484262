"""Numerics of benchmarks/gpu.py: every executor and the router against float64, and against themselves."""

import copy
import functools
import math
import zlib
from contextlib import contextmanager
from typing import NamedTuple

import torch
from attention import Released, copies, draw_router, output, router_input
from gpu_run import one_line
from torch import nn

from moh_vision.attention import (
    EXECUTORS,
    GroupMixtureMlp,
    HeadMixtureAttention,
    Router,
    Routing,
    resolve_budget,
)
from moh_vision.attention.kernels import eager
from moh_vision.attention.routing import Pairs


class Shape(NamedTuple):
    """Self-attention of one layer, or the MLP of a block."""

    batch: int
    tokens: int
    heads: int  # of attention, or groups of the MLP
    width: int  # D
    kv_heads: int | None = None
    causal: bool = False
    mask: str = ""  # "keys": bool, of each sequence; "bias": additive, of each head
    scope: str = "token"  # "one": one choice for all samples, from a condition
    mlp: bool = False

    @property
    def dim(self):
        """C, width of the tokens; the hidden width of an MLP is four times as large."""
        hidden = self.heads * self.width
        if self.mlp:
            return hidden // 4
        return hidden


CASES = {
    "token 64": Shape(2, 197, 6, 64),
    "token 72": Shape(2, 256, 16, 72),
    "grouped causal 128": Shape(2, 300, 8, 128, kv_heads=2, causal=True),
    "sample 64": Shape(3, 197, 6, 64, scope="sample"),
    "sample 72": Shape(3, 256, 16, 72, scope="sample"),
    "groups of a sample 72": Shape(3, 256, 8, 72, scope="sample", mlp=True),
    "groups of a sample 576": Shape(3, 256, 8, 576, scope="sample", mlp=True),
    "keys masked 64": Shape(2, 197, 6, 64, mask="keys"),
    "bias 64": Shape(2, 197, 6, 64, mask="bias"),
}
QUICK_CASES = {name: shape._replace(tokens=24, heads=8) for name, shape in CASES.items()}
# name -> dtype, torch's float32 matmul precision, largest relative error
DTYPES = {
    "float64": (torch.float64, "highest", 1e-10),
    "float32": (torch.float32, "highest", 1e-5),
    "tf32": (torch.float32, "high", 5e-3),
    "bfloat16": (torch.bfloat16, "highest", 2e-2),
    "float16": (torch.float16, "highest", 5e-3),
}
CHECKED = sorted(set(EXECUTORS) - {"reference"})
GELU = functools.partial(nn.GELU, approximate="tanh")  # of a DiT's MLP


class Given(Router):
    """A router that answers with a routing computed before, whose weights are its parameter.

    A choice for whole sequences comes with its list, as from a top-k router; for tokens the executors list it themselves.
    """

    def __init__(self, routing, budget):
        super().__init__(budget)
        self.weights = nn.Parameter(routing.weights.float())
        self.active = routing.active
        self.stats = routing.stats
        self.pairs = None
        if routing.active.shape[1] == 1:
            self.pairs = Pairs(*eager.pairs(routing.active))

    def forward(self, x, q=None, padding_mask=None):
        weights = self.weights * self.active
        return Routing(weights, self.active, self.stats, self.budget.active, self.pairs)


@contextmanager
def precision(dtype_name):
    """Multiply float32 matrices in float32, or in tf32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(DTYPES[dtype_name][1])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def make_layer(shape, share, dtype, device):
    """Make a layer with a random router in a shape."""
    budget = resolve_budget(f"uniform:{share}", 1, shape.heads, shape.width)[0]
    if shape.mlp:
        layer = GroupMixtureMlp(shape.dim, budget, act_layer=GELU, dtype=dtype, device=device)
    else:
        layer = HeadMixtureAttention(
            shape.dim,
            budget,
            scope="token" if shape.scope == "token" else "sample",
            kv_heads=shape.kv_heads,
            dtype=dtype,
            device=device,
        )
    averaged = shape.tokens if shape.scope == "sample" else 1
    draw_router(layer.router, averaged)
    return layer


def make_mask(shape, dtype, device):
    """Return the mask of a call, in which every token sees a key, or None."""
    N = shape.tokens
    if shape.mask == "keys":
        seen = torch.rand(shape.batch, 1, 1, N, device=device) < 0.8
        seen[..., 0] = True
        return seen.expand(-1, 1, N, N)
    if shape.mask == "bias":
        return torch.randn(1, shape.heads, N, N, device=device, dtype=dtype)
    return None


def poison(run):
    """Fill free memory with NaN, so that reading memory that was never written shows."""
    if run.cuda:
        blocks = []
        for size in [16] * 64 + [22] * 64 + [28]:
            blocks.append(torch.full((2**size,), float("nan"), device=run.device))
        del blocks


def results(module, x, dy, **options):
    """Return {name: tensor}: the output with and without autograd, and the gradients of x and of all parameters."""
    with torch.no_grad():
        found = {"y without autograd": output(module, x, **options)}
    x = x.detach().requires_grad_()
    found["y"] = output(module, x, **options)
    inputs = {"x": x, **dict(module.named_parameters())}
    grads = torch.autograd.grad(found["y"], list(inputs.values()), dy.to(x.dtype))
    for name, grad in zip(inputs, grads):
        found[f"gradient of {name.removeprefix('layer.')}"] = grad
    return found


def router_results(router, x, alike, dw):
    """Return the same as `results` for a router; tokens [B, N or 1] that are not `alike` routed count for nothing."""
    x = x.detach().requires_grad_()
    weights = router(x).weights * alike.unsqueeze(-1)
    inputs = {"x": x, **dict(router.named_parameters())}
    grads = torch.autograd.grad(weights, list(inputs.values()), dw.to(weights.dtype))
    found = {"weights": weights}
    for name, grad in zip(inputs, grads):
        found[f"gradient of {name}"] = grad
    return found


def worst_error(got, want):
    """Return (error, name) of the tensor that is farthest from `want` {name: float64 tensor}, relative in norm.

    Gradients that are small by cancellation are held to the rounding of the largest one.
    """
    norms = {name: tensor.norm().item() for name, tensor in want.items()}
    gradients = [norm for name, norm in norms.items() if name.startswith("gradient")]
    largest = max(gradients, default=0.0)
    errors = []
    for name, tensor in want.items():
        scale = norms[name]
        if name.startswith("gradient"):
            scale += 0.02 * largest
        error = (got[name].double() - tensor).norm().item() / scale
        if math.isnan(error):
            error = math.inf
        errors.append((error, name))
    return max(errors)


def differing(first, second):
    """Return the names of the tensors that have other bits when computed again."""
    return [name for name in first if not torch.equal(first[name], second[name])]


def check(run, about, compute, want):
    """Compute twice and report a row: the error, what differs between both, or what was raised."""
    row = dict(about, allowed=DTYPES[about["dtype"]][2])
    try:
        poison(run)
        got = compute()
        row["error"], row["of"] = worst_error(got, want)
        row["differs"] = differing(got, compute())
    except Exception as error:
        row["raised"] = one_line(error)
        values = [*about.values(), row["raised"]]
        print("raised: " + ", ".join(map(str, values)), flush=True)
    run.report["numerics"].append(row)


def numerics(run, case, shape, dtype_name, share):
    """Report what every executor makes of a case, and the router, which below float64 is checked apart.

    In float64 the router and the released operations take part; below, all executors get the routing that float64 gave.

    Args:
        run: the `Run`.
        case: its name.
        shape: of the layer.
        dtype_name: a key of DTYPES.
        share: of the heads that run.
    """
    # Each case has its own numbers, whichever ran before it.
    torch.manual_seed(run.report["seed"] + zlib.crc32(f"{case} {dtype_name} {share}".encode()))
    dtype = DTYPES[dtype_name][0]
    about = dict(case=case, dtype=dtype_name, share=share)
    with precision(dtype_name):
        layer = make_layer(shape, share, dtype, run.device)
        x, dy = torch.randn(2, shape.batch, shape.tokens, layer.dim, device=run.device, dtype=dtype)
        mask = make_mask(shape, dtype, run.device)
        oracle = copy.deepcopy(layer).double()
        contestants = copies(layer, CHECKED)
        if dtype_name == "float64":
            if shape.kv_heads is None and not shape.mask and not shape.mlp:
                contestants["released"] = Released(layer)
        else:
            routing = check_router(run, about, layer, oracle, x)
            for module in (oracle, *contestants.values()):
                module.router = Given(routing, module.budget)
        oracle.double().executor = "reference"
        options = {}
        if shape.causal:
            options["is_causal"] = True
        exact_options = dict(options)
        if mask is not None:
            options["attn_mask"] = mask
            exact_options["attn_mask"] = mask.double() if shape.mask == "bias" else mask
        want = results(oracle, x.double(), dy, **exact_options)
        for name, module in contestants.items():
            compute = functools.partial(results, module, x, dy, **options)
            check(run, dict(about, executor=name), compute, want)


def check_router(run, about, layer, oracle, x):
    """Report the router of a layer, against that of its oracle for the tokens that both route alike.

    Args:
        run: the `Run`.
        about: what the row says of the case.
        layer: in the dtype of the case.
        oracle: the same layer in float64.
        x: tokens [B, N, C].

    Returns:
        The oracle's routing.
    """
    read = router_input(layer, x)
    with torch.no_grad():
        exact = oracle.router(read.double())
        routing = layer.router(read)
    alike = (exact.active == routing.active).all(-1)  # [B, N or 1]
    row = dict(about, tokens_routed_otherwise=1 - alike.double().mean().item())
    if routing.pairs is not None:
        tokens, offsets = [tensor.clone() for tensor in routing.pairs]
        expected = eager.pairs(routing.active)
        same_tokens = torch.equal(tokens[: len(expected.token)], expected.token)
        row["list_is_right"] = same_tokens and torch.equal(offsets, expected.offsets)
    run.report["routers"].append(row)
    dw = torch.randn(exact.weights.shape, device=x.device, dtype=torch.float64)
    want = router_results(oracle.router, read.double(), alike, dw)
    # The router of a layer in 16 bits has weights in 16 bits, whose gradients are rounded to them.
    compute = functools.partial(router_results, layer.router, read, alike, dw)
    check(run, dict(about, executor="router"), compute, want)
    return exact


def races(run, name, shape, dtype_name, share):
    """Report whether `packed` at its full size gives the same bits twice; arguments as of `numerics`."""
    dtype = DTYPES[dtype_name][0]
    with precision(dtype_name):
        layer = make_layer(shape, share, dtype, run.device)
        layer.executor = "packed"
        x, dy = torch.randn(2, shape.batch, shape.tokens, layer.dim, device=run.device, dtype=dtype)
        differs = differing(results(layer, x, dy), results(layer, x, dy))
    row = dict(
        case=name,
        scope=shape.scope,
        dtype=dtype_name,
        share=share,
        executor="packed",
        differs=differs,
    )
    run.report["races"].append(row)


def wrong(report):
    """Say what numerics found wrong, one line each; errors first."""
    lines = []
    for row in report["numerics"]:
        if row.get("error", 0) > row["allowed"]:
            what = f"{row['executor']}, {row['case']}, {row['dtype']}, share {row['share']}: {row['of']}"
            lines.append(f"{what} is off by {row['error']:.1e}, allowed is {row['allowed']:.0e}")
    for row in report["routers"]:
        if not row.get("list_is_right", True):
            lines.append(
                f"router, {row['case']}, {row['dtype']}, share {row['share']}: the list of pairs is wrong"
            )
    for row in report["numerics"] + report["races"]:
        names = row.get("differs", [])
        # In float64 sums are torch's, and heads chosen per sample go through torch's attention, whose gradient of the
        # queries may be added up in any order.
        if "sample" in (row.get("scope") or row["case"]):
            names = [name for name in names if name.startswith("y")]
        if names and row["executor"] in ("packed", "router") and row["dtype"] != "float64":
            what = f"{row['executor']}, {row['case']}, {row['dtype']}, share {row['share']}"
            lines.append(f"{what}: other bits when computed again: {', '.join(names)}")
    return lines


def excluded(report, dtype_name):
    """Return the executors that are wrong somewhere in this dtype, and are not timed in it."""
    rows = (row for row in report["numerics"] if row["dtype"] == dtype_name)
    return {row["executor"] for row in rows if row.get("error", 0) > row["allowed"]}


def summary(report):
    """Yield lines on what was checked, the largest errors, and what is wrong."""
    checked = [row for row in report["numerics"] if "error" in row]
    raised = len(report["numerics"]) - len(checked)
    yield f"numerics: {len(checked)} checked, {raised} raised"
    for name in sorted({row["executor"] for row in checked}):
        worst = {}
        for row in checked:
            if row["executor"] == name:
                worst[row["dtype"]] = max(worst.get(row["dtype"], 0.0), row["error"])
        yield f"  {name}: " + ", ".join(f"{dtype} {error:.1e}" for dtype, error in worst.items())
    for dtype in DTYPES:
        rows = [row for row in report["routers"] if row["dtype"] == dtype]
        otherwise = [row["tokens_routed_otherwise"] for row in rows]
        if otherwise:
            yield f"  {dtype}: at most {max(otherwise):.2g} of the tokens are routed otherwise than in float64"
    yield from (f"  wrong: {line}" for line in wrong(report))
