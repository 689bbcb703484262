"""Times of benchmarks/gpu.py: one layer, a prompt, whole training steps and sampling."""

import contextlib
import functools
import io
from typing import NamedTuple

import timm
import torch
from attention import Dense, Released, bound, copies, draw_router, layer_step, picked, saved_bytes
from gpu_numerics import DTYPES, GELU, Shape, excluded, make_layer, precision
from models import inputs, released, task
from timm.layers import Mlp
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import moh_vision
from moh_vision.attention import HeadBudget, HeadMixtureAttention
from moh_vision.attention.executors import Masked
from moh_vision.attention.routed_layer import routed_layers
from moh_vision.attention.routing import Call

SHAPES = {  # of the goals; inputs and outputs are larger than the L2 cache
    "n4096": Shape(8, 4096, 12, 64),
    "vit_base": Shape(256, 197, 12, 64),
    "n1024": Shape(32, 1024, 12, 64),
    "dit_xlarge": Shape(128, 256, 16, 72),
    "n16384": Shape(2, 16384, 12, 64),
}
QUICK_SHAPES = {"vit_base": Shape(2, 24, 8, 64), "dit_xlarge": Shape(2, 24, 8, 72)}
MLP_SHAPES = {"dit_xlarge_mlp": Shape(128, 256, 8, 576, mlp=True)}
QUICK_MLP_SHAPES = {"dit_xlarge_mlp": Shape(2, 24, 8, 48, mlp=True)}
SHARES = (0.75, 0.5)  # --quick and compiled layers: the first
TIMED = ("masked", "packed", "auto")
BACKENDS = {
    "dense": None,
    "dense flash": SDPBackend.FLASH_ATTENTION,
    "dense cudnn": SDPBackend.CUDNN_ATTENTION,
    "dense efficient": SDPBackend.EFFICIENT_ATTENTION,
}
COMPILER = "inductor"
KEYS = 8192  # of the prompt


class Model(NamedTuple):
    """A family of models in whole training steps: name and arguments in timm's registry."""

    batch: int
    layers: int
    dense: tuple
    token: tuple  # 0.75 of the heads, chosen per token
    sample: tuple  # half of the heads, chosen per sample
    groups: tuple  # half of the heads and half of the groups of the MLP, chosen per sample


VIT = "vit_base_patch16_224"
DIT = "dit_xlarge_patch2"
# Compiling the 28 layers of DiT-XL takes minutes for each contestant: 9 of them, three of each number of heads.
NINE = dict(depth=9, num_heads=[8] * 3 + [16] * 3 + [24] * 3, head_dim=72)
NINE_BUDGET = [(8, 0)] * 3 + [(10, 2)] * 3 + [(14, 2)] * 3
HALF = dict(head_budget="uniform:0.5", scope="sample")
HALF_OF_BOTH = dict(HALF, mlp_budget="uniform:0.5")
VITS = Model(
    128,
    12,
    (VIT, {}),
    (f"moh_{VIT}", dict(head_budget=0.75)),
    (f"moh_{VIT}", HALF),
    (f"moh_{VIT}", HALF_OF_BOTH),
)
MODELS = {
    ("vit_base", "eager"): VITS,
    ("vit_base", "compiled"): VITS,
    ("dit_xlarge", "eager"): Model(
        32,
        28,
        (DIT, {}),
        (f"moh_{DIT}_75", {}),
        (f"moh_{DIT}_75", HALF),
        (f"moh_{DIT}_75", HALF_OF_BOTH),
    ),
    ("dit_xlarge", "compiled"): Model(
        64,
        9,
        (DIT, dict(depth=9)),
        (f"moh_{DIT}_75", dict(NINE, head_budget=NINE_BUDGET)),
        (f"moh_{DIT}_75", dict(NINE, **HALF)),
        (f"moh_{DIT}_75", dict(NINE, **HALF_OF_BOTH)),
    ),
}
QUICK_MODELS = {
    "vit_base": dict(img_size=32, embed_dim=96, num_heads=12, depth=2),
    "dit_xlarge": dict(img_size=8, embed_dim=96, num_heads=6, head_dim=16, depth=2),
}


PACKED = dict(executor="packed")
BY_TIMESTEP = dict(PACKED, scope="sample", route_by="timestep")
SAMPLERS = {  # family -> {contestant: name and arguments in timm's registry}
    "dit_xlarge": {
        "dense": (DIT, {}),
        "packed 0.5 timestep with groups": (f"moh_{DIT}_75", dict(BY_TIMESTEP, **HALF_OF_BOTH)),
        "packed 0.5 sample with groups": (f"moh_{DIT}_75", dict(PACKED, **HALF_OF_BOTH)),
        "packed 0.5 timestep": (f"moh_{DIT}_75", dict(BY_TIMESTEP, **HALF)),
        "masked 0.5 timestep with groups": (
            f"moh_{DIT}_75",
            dict(BY_TIMESTEP, **HALF_OF_BOTH, executor="masked"),
        ),
    },
    "dit_small": {
        "dense": ("dit_small_patch2", {}),
        "packed 0.75 token": ("moh_dit_small_patch2_75", PACKED),
        "packed 0.75 timestep": ("moh_dit_small_patch2_75", BY_TIMESTEP),
        "packed 0.5 timestep": ("moh_dit_small_patch2_75", dict(BY_TIMESTEP, head_budget=0.5)),
    },
}
QUICK_SAMPLERS = {
    "dit_xlarge": QUICK_MODELS["dit_xlarge"],
    "dit_small": dict(img_size=8, embed_dim=96),
}


class Backend(nn.Module):
    """A module under one backend of scaled_dot_product_attention."""

    def __init__(self, module, backend):
        super().__init__()
        self.module = module
        self.backend = backend

    def forward(self, x, **options):
        with sdpa_kernel(self.backend):
            return self.module(x, **options)


class Grouped(nn.Module):
    """Dense causal attention with shared key-value heads, as LLaMA has it, without positions.

    expand: repeat the key-value heads before attention, for backends that want as many as there are query heads.
    """

    def __init__(self, layer, expand=False):
        super().__init__()
        self.layer = layer
        self.expand = expand

    def forward(self, x, is_causal=False):
        q, k, v = self.layer.project(Call(x, None))
        if self.expand:
            repeats = self.layer.num_heads // self.layer.kv_heads
            k = k.repeat_interleave(repeats, 1)
            v = v.repeat_interleave(repeats, 1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=not self.expand)
        return self.layer.proj(o.transpose(1, 2).flatten(2))


def with_backends(module):
    """Return {name: module} of a dense module under torch's choice, and under each backend."""
    modules = {}
    for name, backend in BACKENDS.items():
        if backend is None:
            modules[name] = module
        else:
            modules[name] = Backend(module, backend)
    return modules


def peaks(run):
    """Report what this machine reaches: matrix products in FLOP/s by dtype, a copy in bytes/s, read and written."""
    size = 8192
    length = 2**29
    if run.quick:
        size = 256
        length = 2**20
    found = run.report["peaks"]
    for name in ("bfloat16", "tf32"):
        with precision(name):
            a, b = torch.randn(2, size, size, device=run.device, dtype=DTYPES[name][0])
            found[name] = 2 * size**3 / run.median(lambda a=a, b=b: a @ b)
    source, target = torch.ones(2, length, device=run.device, dtype=torch.uint8)
    found["copy"] = 2 * length / run.median(lambda: target.copy_(source))
    rates = []
    for name, rate in found.items():
        unit = "B/s" if name == "copy" else "FLOP/s"
        rates.append(f"{name} {rate:.3g} {unit}")
    print("peaks:", ", ".join(rates))


def dense_contestants(shape, dtype):
    """Return {name: module} of what a routed layer is held to."""
    if shape.mlp:
        return {"dense": Mlp(shape.dim, 4 * shape.dim, act_layer=GELU, dtype=dtype)}
    return with_backends(Dense(shape.dim, shape.heads, dtype))


def least_seconds(rates, shape, dtype_name, mode, share):
    """Return the least time of a layer at these rates: for its multiplications or for its bytes, each moved once.

    Args:
        rates: {dtype: FLOP/s} and "copy" in bytes/s, see `peaks`.
        shape: of the layer.
        dtype_name: a key of DTYPES.
        mode: "forward" or "train".
        share: of the heads or groups that run.
    """
    tokens = shape.batch * shape.tokens
    width = shape.dim
    if shape.mlp:
        weights = 8 * width * width
        flops = 2 * tokens * weights * share
    else:
        weights = 4 * width * width
        flops = tokens * (2 * weights + 4 * shape.tokens * width)
        flops *= bound(share, shape.tokens, width, shape.scope)
    numbers = 2 * tokens * width + weights  # x, y and the weights
    if mode == "train":
        flops *= 3  # backward has two products for each of forward
        numbers += 3 * tokens * width + 2 * weights  # dy, x, dx, the weights, their gradients
    moving = numbers * DTYPES[dtype_name][0].itemsize / rates["copy"]
    return max(flops / rates[dtype_name], moving)


def report_table(run, about, makers, floors=None):
    """Time contestants and add the table to the report; executors that numerics found wrong are left out."""
    wrong = excluded(run.report, about["dtype"])
    makers = {name: make for name, make in makers.items() if name.split()[0] not in wrong}
    table = run.table(about, makers, floors or {})
    run.report["tables"].append(table)
    return table


def routed_contestants(layer, shape, executors):
    """Return {name: module} of a layer under several executors, and of the released operations."""
    modules = copies(layer, executors)
    if shape.scope == "one":
        return {name: Conditioned(module) for name, module in modules.items()}
    if shape.mlp:
        return modules
    return {"released": Released(layer), **modules}


def layers(run, shape_name, shape, shares, dtype_name, mode, form):
    """Report the times of one attention layer or one MLP, of all contestants.

    Args:
        run: the `Run`.
        shape_name: as the table has it.
        shape: of the layer.
        shares: of the heads or groups that run.
        dtype_name: a key of DTYPES.
        mode: "forward" or "train".
        form: "eager", "graph" or "compiled".
    """
    B = shape.batch
    N = shape.tokens
    C = shape.dim
    dtype = DTYPES[dtype_name][0]
    compiles = form == "compiled"
    contestants = {
        name: module.to(run.device) for name, module in dense_contestants(shape, dtype).items()
    }
    executors = TIMED
    if compiles:
        torch.compiler.reset()  # shapes of earlier tables count against the limit of recompilations
        contestants = {"dense": contestants["dense"]}
        shares = shares[:1]
        executors = ("masked", "packed")
    active = dict.fromkeys(contestants, 1.0)
    for share in shares:
        layer = make_layer(shape, share, dtype, run.device)
        for name, module in routed_contestants(layer, shape, executors).items():
            if name == "auto":
                # A script measures before its first step, too. What it prints is not of interest here.
                module.train(mode == "train")
                x = torch.randn(B, N, C, device=run.device, dtype=dtype)
                with contextlib.redirect_stdout(io.StringIO()):
                    moh_vision.measure(module, x)
            label = f"{name} {share} {shape.scope}"
            contestants[label] = module
            active[label] = layer.budget.active / shape.heads
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
        rates = run.report["peaks"]
        floors = {}
        if rates:
            for name, share in active.items():
                floors[name] = least_seconds(rates, shape, dtype_name, mode, share)
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
    heads = 32
    kv_heads = 8
    width = 128
    N = KEYS
    if run.quick:
        heads = 16
        kv_heads = 4
        width = 16
        N = 32
    C = heads * width
    share = 0.5
    dtype = torch.bfloat16
    layer = HeadMixtureAttention(
        C,
        HeadBudget(heads, width, heads // 4, heads // 4),
        router="query_norm",
        kv_heads=kv_heads,
        router_kwargs=dict(group=heads // kv_heads),
        qkv_bias=False,
        proj_bias=False,
        dtype=dtype,
        device=run.device,
    )
    contestants = with_backends(Grouped(layer, expand=True))
    contestants["dense shared"] = Grouped(layer)
    for name, module in copies(layer, TIMED).items():
        contestants[f"{name} {share} token"] = module
    x = torch.randn(1, N, C, device=run.device, dtype=dtype)
    about = dict(
        part="prefill", shape="llama_8b", scope="token", dtype="bfloat16", mode="forward", form=form
    )
    about.update(batch=1, tokens=N, heads=heads, width=width)
    makers = {
        name: functools.partial(layer_step, module, x, "forward", is_causal=True)
        for name, module in contestants.items()
    }
    rates = run.report["peaks"]
    floors = {}
    if rates:
        always = 2 * N * C * (C + 2 * kv_heads * width)  # the router reads the queries of all heads
        of_heads = 2 * N * C * C + 2 * N * N * C
        for name in makers:
            active = share if name.endswith("token") else 1.0
            floors[name] = (always + active * of_heads) / rates["bfloat16"]
    report_table(run, about, makers, floors)


class Conditioned(nn.Module):
    """A layer with scope "sample" whose router reads one condition for all samples."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        weight = layer.projections[0].weight
        self.condition = torch.randn(layer.dim, device=weight.device, dtype=weight.dtype)

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
    """Make a model whose routers tell tokens apart: a new DiT is the identity, and its routers see no difference."""
    model = timm.create_model(name, **arguments)
    if hasattr(model, "final_layer"):
        for block in [*model.blocks, model.final_layer]:
            nn.init.normal_(block.adaLN_modulation[1].weight, std=0.02)
    for layer in routed_layers(model):
        draw_router(layer.router)
    return model


def training_step(run, model, batch, pixels, form):
    """Make a step of training a whole model: bfloat16 autocast, the tasks' losses, AdamW.

    Args:
        run: the `Run`.
        model: on any device.
        batch: its size.
        pixels: side of an image; a DiT has its own.
        form: "eager" or "compiled".
    """
    model = model.to(run.device).train()
    given_inputs = inputs(model, batch, pixels, run.device)
    losses = task(model)
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
    models = MODELS[family, form]
    batch = models.batch
    small = {}  # arguments of every model with --quick
    if run.quick:
        batch = 2
        small = QUICK_MODELS[family]
    if form == "compiled":
        torch.compiler.reset()
    routed_models = {"packed 0.75 token": models.token, "packed 0.5 sample": models.sample}
    if form != "compiled":  # they would take the time of another family
        routed_models["packed 0.5 sample with groups"] = models.groups
        routed_models["masked 0.75 token"] = models.token
        routed_models["released 0.75 token"] = models.token
    name, arguments = models.dense
    contestants = {"dense": (name, dict(arguments, **small))}
    for label, (name, arguments) in routed_models.items():
        executor = label.split()[0]
        if executor == "released":
            executor = "masked"
        arguments = dict(arguments, executor=executor)
        if run.quick:
            arguments.update(small, head_budget="uniform:0.5")
        contestants[label] = (name, arguments)

    def make(label, name, arguments):
        model = drawn(name, arguments)
        if label.startswith("released"):
            model = released(model)
            for layer in routed_layers(model):
                layer.executor = ReleasedExecutor
        return training_step(run, model, batch, arguments.get("img_size", 224), form)

    about = dict(part="step", shape=family, scope="both", dtype="bfloat16", mode="train", form=form)
    about.update(batch=batch, layers=small.get("depth", models.layers), autocast=True)
    makers = {label: functools.partial(make, label, *model) for label, model in contestants.items()}
    report_table(run, about, makers)


def sampling(run, family, form):
    """Report the times of one step of sampling by a DiT: the model on a batch of latents, all at one timestep."""
    batch = 64
    small = {}
    if run.quick:
        batch = 2
        small = QUICK_SAMPLERS[family]
    contestants = SAMPLERS[family]

    def make(name, arguments):
        model = drawn(name, dict(arguments, **small)).to(run.device).eval()
        given_inputs = inputs(model, batch, None, run.device)
        latents = given_inputs["images"]
        timesteps = given_inputs["timesteps"][:1].expand(batch)
        labels = given_inputs["labels"]

        def step():
            with torch.no_grad(), torch.autocast(run.device, torch.bfloat16):
                model(latents, timesteps, labels)

        return step

    about = dict(
        part="sampling",
        shape=family,
        scope="both",
        dtype="bfloat16",
        mode="forward",
        form=form,
    )
    about.update(batch=batch, autocast=True)
    makers = {label: functools.partial(make, *model) for label, model in contestants.items()}
    report_table(run, about, makers)
