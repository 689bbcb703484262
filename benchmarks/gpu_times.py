"""Times of benchmarks/gpu.py: one layer, a prompt, whole training steps and sampling."""

import contextlib
import functools
import io
from typing import NamedTuple

import timm
import torch
from attention import Dense, Released, bound, copies, draw_router, layer_step, picked, saved_bytes
from gpu_numerics import DTYPES, Shape, excluded, make_layer, precision
from models import inputs, released, routed, task
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import moh_vision
from moh_vision.attention import HeadBudget, HeadMixtureAttention
from moh_vision.attention.executors import Masked
from moh_vision.attention.routing import Call

SHAPES = {  # of the goals; inputs and outputs are larger than the L2 cache
    "n4096": Shape(8, 4096, 12, 64),
    "vit_base": Shape(256, 197, 12, 64),
    "n1024": Shape(32, 1024, 12, 64),
    "dit_xlarge": Shape(128, 256, 16, 72),
    "n16384": Shape(2, 16384, 12, 64),
}
QUICK_SHAPES = {"vit_base": Shape(2, 24, 8, 64), "dit_xlarge": Shape(2, 24, 8, 72)}
SHARES = (0.75, 0.5)  # --quick and compiled layers: the first
TIMED = ("masked", "packed", "auto")
BACKENDS = {
    "dense": None,
    "dense flash": SDPBackend.FLASH_ATTENTION,
    "dense cudnn": SDPBackend.CUDNN_ATTENTION,
    "dense efficient": SDPBackend.EFFICIENT_ATTENTION,
}
COMPILER = "inductor"
KEYS, HEADS, WIDTH = 8192, 32, 128  # of the prompt


class Model(NamedTuple):
    """A family of models in whole training steps: name and arguments in timm's registry."""

    batch: int
    layers: int
    dense: tuple
    token: tuple  # 0.75 of the heads, chosen per token
    sample: tuple  # half of the heads, chosen per sample


VIT, DIT = "vit_base_patch16_224", "dit_xlarge_patch2"
# Compiling the 28 layers of DiT-XL takes minutes for each contestant: 9 of them, three of each number of heads.
NINE = dict(depth=9, num_heads=[8] * 3 + [16] * 3 + [24] * 3, head_dim=72)
NINE_BUDGET = [(8, 0)] * 3 + [(10, 2)] * 3 + [(14, 2)] * 3
HALF = dict(head_budget="uniform:0.5", scope="sample")
VITS = Model(128, 12, (VIT, {}), (f"moh_{VIT}", dict(head_budget=0.75)), (f"moh_{VIT}", HALF))
MODELS = {
    ("vit_base", "eager"): VITS,
    ("vit_base", "compiled"): VITS,
    ("dit_xlarge", "eager"): Model(
        32, 28, (DIT, {}), (f"moh_{DIT}_75", {}), (f"moh_{DIT}_75", HALF)
    ),
    ("dit_xlarge", "compiled"): Model(
        64,
        9,
        (DIT, dict(depth=9)),
        (f"moh_{DIT}_75", dict(NINE, head_budget=NINE_BUDGET)),
        (f"moh_{DIT}_75", dict(NINE, **HALF)),
    ),
}
QUICK_MODELS = {
    "vit_base": dict(img_size=32, embed_dim=96, num_heads=12, depth=2),
    "dit_xlarge": dict(img_size=8, embed_dim=96, num_heads=6, head_dim=16, depth=2),
}


class Backend(nn.Module):
    """A module under one backend of scaled_dot_product_attention."""

    def __init__(self, module, backend):
        super().__init__()
        self.module, self.backend = module, backend

    def forward(self, x, **options):
        with sdpa_kernel(self.backend):
            return self.module(x, **options)


class Grouped(nn.Module):
    """Dense causal attention with shared key-value heads, as LLaMA has it, without positions.

    expand: repeat the key-value heads before attention, for backends that want as many as there are query heads.
    """

    def __init__(self, layer, expand=False):
        super().__init__()
        self.layer, self.expand = layer, expand

    def forward(self, x, is_causal=False):
        q, k, v = self.layer.project(Call(x, None))
        if self.expand:
            k, v = (
                t.repeat_interleave(self.layer.num_heads // self.layer.kv_heads, 1) for t in (k, v)
            )
        o = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=not self.expand)
        return self.layer.proj(o.transpose(1, 2).flatten(2))


def with_backends(module):
    return {
        name: Backend(module, backend) if backend else module for name, backend in BACKENDS.items()
    }


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
        "peaks:",
        ", ".join(
            f"{name} {rate:.3g} {'B' if name == 'copy' else 'FLOP'}/s"
            for name, rate in found.items()
        ),
    )


def least_seconds(rates, shape, dtype_name, mode, share):
    """What a layer takes at least, at these rates: for its multiplications or for its bytes, each moved once."""
    B, N, C = shape.batch, shape.tokens, shape.heads * shape.width
    flops = B * N * (8 * C * C + 4 * N * C) * bound(share, N, C, shape.scope)
    numbers = 2 * B * N * C + 4 * C * C  # x, y and the weights
    if (
        mode == "train"
    ):  # backward has two products for each of forward; and dy, x, dx, the weights and their gradients
        flops, numbers = 3 * flops, numbers + 3 * B * N * C + 8 * C * C
    return max(flops / rates[dtype_name], numbers * DTYPES[dtype_name][0].itemsize / rates["copy"])


def report_table(run, about, makers, floors=None):
    """Time contestants and add the table to the report; executors that numerics found wrong are left out."""
    wrong = excluded(run.report, about["dtype"])
    makers = {name: make for name, make in makers.items() if name.split()[0] not in wrong}
    table = run.table(about, makers, floors or {})
    run.report["tables"].append(table)
    return table


def layers(run, shape_name, shape, shares, dtype_name, mode, form):
    """Report the times of one attention layer, of all contestants."""
    B, N, C, dtype = shape.batch, shape.tokens, shape.heads * shape.width, DTYPES[dtype_name][0]
    compiles = form == "compiled"
    contestants = with_backends(Dense(C, shape.heads, dtype).to(run.device))
    active = dict.fromkeys(contestants, 1.0)
    if compiles:
        torch.compiler.reset()  # shapes of earlier tables count against the limit of recompilations
        contestants, shares = {"dense": contestants["dense"]}, shares[:1]
    for share in shares:
        layer = make_layer(shape, share, dtype, run.device)
        group = {"released": Released(layer), **copies(layer, TIMED[:2] if compiles else TIMED)}
        if shape.scope == "one":
            del group["released"]
            group = {name: Conditioned(module) for name, module in group.items()}
        if "auto" in group:
            # As a script does it before its first step; what it prints is not of interest here.
            group["auto"].train(mode == "train")
            with contextlib.redirect_stdout(io.StringIO()):
                moh_vision.measure(
                    group["auto"], torch.randn(B, N, C, device=run.device, dtype=dtype)
                )
        for name, module in group.items():
            label = f"{name} {share} {shape.scope}"
            contestants[label], active[label] = module, layer.budget.active / shape.heads
    x = torch.randn(B, N, C, device=run.device, dtype=dtype, requires_grad=mode == "train")

    def make(module):
        if compiles:
            module = torch.compile(module, dynamic=False, backend=COMPILER)
        return layer_step(module, x, mode)

    about = dict(
        part="layer", shape=shape_name, scope=shape.scope, dtype=dtype_name, mode=mode, form=form
    )
    about.update(batch=B, tokens=N, heads=shape.heads, width=shape.width)
    with precision(dtype_name):
        rates, floors = run.report["peaks"], {}
        if rates:
            floors = {
                name: least_seconds(rates, shape, dtype_name, mode, active[name])
                for name in contestants
            }
        makers = {name: functools.partial(make, module) for name, module in contestants.items()}
        rows = report_table(run, about, makers, floors)["rows"]
        for name, row in rows.items():
            if "error" in row or compiles:
                continue
            if mode == "train":
                row["saved_bytes"] = saved_bytes(contestants[name], x)
            if name.startswith("auto") and shape.scope != "one":
                row["picked"] = picked(contestants[name], x, mode)


def prompt(run, form):
    """Report the times of the attention of one layer of LLaMA-8B's shape on a long prompt, whole groups chosen."""
    heads, kv_heads, width, N = (16, 4, 16, 32) if run.quick else (32, 8, 128, KEYS)
    C, dtype, share = heads * width, torch.bfloat16, 0.5
    layer = HeadMixtureAttention(
        C, HeadBudget(heads, width, heads // 4, heads // 4), router="query_norm", kv_heads=kv_heads,
        router_kwargs=dict(group=heads // kv_heads), qkv_bias=False, proj_bias=False, dtype=dtype, device=run.device,
    )  # fmt: skip
    contestants = with_backends(Grouped(layer, expand=True)) | {"dense shared": Grouped(layer)}
    contestants.update(
        {f"{name} {share} token": module for name, module in copies(layer, TIMED).items()}
    )
    x = torch.randn(1, N, C, device=run.device, dtype=dtype)
    about = dict(
        part="prefill", shape="llama_8b", scope="token", dtype="bfloat16", mode="forward", form=form
    )
    about.update(batch=1, tokens=N, heads=heads, width=width)
    makers = {
        name: functools.partial(layer_step, module, x, "forward", is_causal=True)
        for name, module in contestants.items()
    }
    rates, floors = run.report["peaks"], {}
    if rates:  # the router reads the queries of all heads
        rest, skipped = 2 * N * C * (C + 2 * kv_heads * width), 2 * N * C * C + 2 * N * N * C
        kept = {name: share if name.endswith("token") else 1.0 for name in makers}
        floors = {name: (rest + part * skipped) / rates["bfloat16"] for name, part in kept.items()}
    report_table(run, about, makers, floors)


class Conditioned(nn.Module):
    """A layer with scope "sample" whose router reads one condition for all samples."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        weight = layer.qkv.weight
        self.condition = torch.randn(1, layer.dim, device=weight.device, dtype=weight.dtype)

    def forward(self, x):
        return self.layer(x, condition=self.condition)


class ReleasedExecutor(Masked):
    """All heads, and gates by an einsum, as in the released code."""

    def combine(self, o):
        weights = self.call.routing.weights
        if weights is None:
            return self.layer.proj(o.transpose(1, 2).flatten(2))
        y = torch.einsum("bnh,bnhd->bnhd", weights.to(o.dtype), o.transpose(1, 2))
        return self.layer.proj(y.flatten(2))


def drawn(name, arguments):
    """A model whose routers tell tokens apart: a new DiT is the identity, and its routers see no difference."""
    model = timm.create_model(name, **arguments)
    if hasattr(model, "final_layer"):
        for block in [*model.blocks, model.final_layer]:
            nn.init.normal_(block.adaLN_modulation[1].weight, std=0.02)
    for layer in routed(model):
        draw_router(layer.router)
    return model


def training_step(run, model, batch, pixels, form):
    """One step of a whole model: bfloat16 autocast, the tasks' losses, AdamW."""
    model = model.to(run.device).train()
    given_inputs, losses = inputs(model, batch, pixels, run.device), task(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=run.cuda)
    if form == "compiled":
        losses = torch.compile(losses, dynamic=False, backend=COMPILER)

    def step():
        optimizer.zero_grad()
        with torch.autocast(run.device, torch.bfloat16):
            loss = losses(**given_inputs)["loss"]
        loss.backward()
        optimizer.step()

    return step


def training(run, family, form):
    """Report the times of whole training steps of one family's contestants, the most wanted first."""
    models, small = MODELS[family, form], QUICK_MODELS[family] if run.quick else {}
    batch = 2 if run.quick else models.batch
    if form == "compiled":
        torch.compiler.reset()
    routed_models = {"packed 0.75 token": models.token, "packed 0.5 sample": models.sample}
    if form != "compiled":  # they would take the time of another family
        routed_models["masked 0.75 token"] = models.token
        routed_models["released 0.75 token"] = models.token
    contestants = {"dense": models.dense}
    for label, (name, arguments) in routed_models.items():
        executor = "masked" if label.startswith("released") else label.split()[0]
        contestants[label] = (name, dict(arguments, executor=executor))
    if small:
        half = {label: dict(head_budget="uniform:0.5") for label in contestants if label != "dense"}
        contestants = {
            label: (n, {**kw, **small, **half.get(label, {})})
            for label, (n, kw) in contestants.items()
        }

    def make(label, name, arguments):
        model = drawn(name, arguments)
        if label.startswith("released"):
            model = released(model)
            for layer in routed(model):
                layer.executor = ReleasedExecutor
        return training_step(run, model, batch, arguments.get("img_size", 224), form)

    about = dict(part="step", shape=family, scope="both", dtype="bfloat16", mode="train", form=form)
    about.update(batch=batch, layers=small.get("depth", models.layers), autocast=True)
    report_table(
        run,
        about,
        {label: functools.partial(make, label, *model) for label, model in contestants.items()},
    )


def sampling(run, form):
    """Report the times of one step of sampling by DiT-S: the model on a batch of latents, heads by token or timestep."""
    name, batch = "dit_small_patch2", 2 if run.quick else 64
    small = dict(img_size=8, embed_dim=96) if run.quick else {}
    contestants = {"dense": (name, small)}
    for executor in ("packed",):
        common = dict(small, executor=executor)
        contestants[f"{executor} 0.75 token"] = (f"moh_{name}_75", common)
        for share, budget in ((0.75, {}), (0.5, dict(head_budget=0.5))):
            by_step = dict(common, scope="sample", route_by="timestep", **budget)
            contestants[f"{executor} {share} timestep"] = (f"moh_{name}_75", by_step)

    def make(name, arguments):
        model = drawn(name, arguments).to(run.device).eval()
        given_inputs = inputs(model, batch, None, run.device)
        call = (
            given_inputs["images"],
            given_inputs["timesteps"][:1].expand(batch),
            given_inputs["labels"],
        )

        def step():
            with torch.no_grad(), torch.autocast(run.device, torch.bfloat16):
                model(*call)

        return step

    about = dict(
        part="sampling",
        shape="dit_small",
        scope="both",
        dtype="bfloat16",
        mode="forward",
        form=form,
    )
    about.update(batch=batch, autocast=True)
    report_table(
        run, about, {label: functools.partial(make, *model) for label, model in contestants.items()}
    )
