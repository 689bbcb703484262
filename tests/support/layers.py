"""Small layers of every router, ways to call them, and the comparison of an executor with the reference."""

import torch
from torch import nn

from moh_vision.attention import HeadBudget, HeadMixtureAttention, SeparateHeadMixtureAttention
from moh_vision.attention.routers.gate_norm import GateNorm

C = 24
H = 6
D = 4
B = 3  # of the cases
N = 7  # of the cases
ROUTERS = {
    "moh": dict(router="moh", budget=(2, 2)),
    "query_norm": dict(router="query_norm", budget=(2, 2)),
    "moa": dict(router="moa", budget=(0, 3), kv_heads=1, qkv_bias=False, proj_bias=False),
    "mae": dict(router="mae", budget=(6, 0), router_kwargs=dict(mode="argmax", dropout=0.0)),
    "dense": dict(router="dense", budget=(6, 0)),
    "mae running": dict(
        router="mae", budget=(6, 0), router_kwargs=dict(pool="running", dropout=0.0)
    ),
    "mae window": dict(router="mae", budget=(6, 0), router_kwargs=dict(pool="window", dropout=0.0)),
}
CASES = {  # options of a layer, and what `call_of` takes out of them
    "self": {},
    "sample scope": dict(scope="sample"),
    "a condition of each": dict(scope="sample", conditions=B),
    "one condition for all": dict(scope="sample", conditions=1),
    "cross": dict(contexts=B),
    "cross, one context for all": dict(contexts=1),
    "cross, fewer keys than queries": dict(contexts=B, keys=4),
    "cross, no key": dict(contexts=B, keys=0),
    "sample scope, cross": dict(scope="sample", contexts=B),
    "sample scope, cross, fewer keys than queries": dict(scope="sample", contexts=B, keys=4),
    "causal": dict(is_causal=True),
    "padding": dict(padding=True),
    "mask": dict(mask=(N, N)),
    "mask of each head": dict(mask=(B, H, N, N)),
    "mask of each head, for all sequences": dict(mask=(H, N, N)),
    "sample scope, mask of each head": dict(mask=(1, H, N, N), scope="sample"),
    "additive mask": dict(mask=(1, 1, N, N), additive=True),
    "mask that shows a token nothing": dict(mask=(N, N), blind=True),
    "additive mask that shows a token nothing": dict(mask=(N, N), additive=True, blind=True),
    "sample scope, mask that shows a token nothing": dict(mask=(N, N), blind=True, scope="sample"),
    "two key-value heads": dict(kv_heads=2),
    "three key-value heads": dict(kv_heads=3),
    "sample scope, two key-value heads": dict(kv_heads=2, scope="sample"),
    "separate projections": dict(kind=SeparateHeadMixtureAttention, kv_heads=3),
    "sample scope, separate projections": dict(kind=SeparateHeadMixtureAttention, scope="sample"),
    "qk-norm": dict(qk_norm=True),
    "sample scope, qk-norm": dict(qk_norm=True, scope="sample"),
    "rotary": dict(rotary=True),
    "one token": dict(tokens=1),
    "one sequence": dict(batch=1),
}


def build(budget, dtype=torch.float32, kind=HeadMixtureAttention, width=D, heads=H, **options):
    """A layer in training whose router chooses otherwise for every token, and whose gates have seen batches."""
    layer = kind(C, HeadBudget(heads, width, *budget), dtype=dtype, **options)
    for p in layer.router.parameters():
        if p.ndim > 1:
            nn.init.normal_(p)
    for module in layer.router.modules():
        if isinstance(module, GateNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.1, 1)
            if layer.router.pool == "window":
                layer.router.window = 4  # shorter than the sequences of tests
    return layer


def angles(tokens, start=0, dtype=torch.float32, width=D):
    """Cosines and sines [tokens, width] of rotary positions."""
    places = torch.arange(start, start + tokens, dtype=dtype).unsqueeze(1)
    turned = places / torch.logspace(0, 1, width // 2, dtype=dtype).repeat(2)
    return turned.cos(), turned.sin()


def call_of(options, dtype, width=D):
    """Tokens [B, N, C] of a case, what the layer is called with beside them, and the options that make it."""
    options = dict(options)
    call = {}
    x = torch.randn(
        options.pop("batch", B), options.pop("tokens", N), C, dtype=dtype, requires_grad=True
    )
    if contexts := options.pop("contexts", 0):
        call["context"] = torch.randn(
            contexts, options.pop("keys", 9), C, dtype=dtype, requires_grad=True
        )
    if conditions := options.pop("conditions", 0):
        call["condition"] = torch.randn(conditions, C, dtype=dtype)
    if options.pop("is_causal", False):
        call["is_causal"] = True
    if options.pop("padding", False):
        call["padding_mask"] = torch.arange(N) >= torch.tensor([[7], [5], [2]])
    if options.pop("rotary", False):
        call["rotary"] = angles(N, width=width)
    if mask := options.pop("mask", ()):
        allowed = (torch.rand(mask) > 0.4) | torch.eye(N, dtype=torch.bool)
        if options.pop("blind", False):
            allowed[..., 0, :] = False
        if options.pop("additive", False):
            call["attn_mask"] = torch.randn(mask, dtype=dtype).masked_fill(~allowed, -torch.inf)
        else:
            call["attn_mask"] = allowed
    return x, call, options


def output_and_gradients(layer, executor, x, call):
    layer.executor = executor.split(",")[0]
    layer.fused_attn = "unfused" not in executor
    hook = (
        layer.projections[0].register_forward_hook(lambda *_: None)
        if "called" in executor
        else None
    )
    y, stats = layer(x, **call)
    if hook is not None:
        hook.remove()
    loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)).sum()
    inputs = [t for t in (x, call.get("context")) if t is not None] + list(layer.parameters())
    return y.detach(), torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)


TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def assert_equal(layer, executors, x, **call):
    """The output and every gradient of the executors are those of the reference."""
    y_ref, grads_ref = output_and_gradients(layer, "reference", x, call)
    names = [
        "y",
        "x",
        *(["context"] if "context" in call else []),
        *(n for n, _ in layer.named_parameters()),
    ]
    # Relative in norm. What is small by cancellation (a router's gradient through its softmax, a key's bias) is held to
    # the rounding of what it is the difference of.
    cancelled_scale = 0.04 * max(g.norm() for g in grads_ref)
    for executor in executors:
        y, grads = output_and_gradients(layer, executor, x, call)
        for name, got, want in zip(names, [y, *grads], [y_ref, *grads_ref], strict=True):
            error = (got - want).norm().item()
            scale = (want.norm() + (0 if name == "y" else cancelled_scale)).item()
            assert error <= TOLERANCE[x.dtype] * scale, (
                f"{executor}, {name}: {error:.2e} of {scale:.2e}"
            )
