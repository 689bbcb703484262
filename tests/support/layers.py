"""Small layers with every router, tables of calls, and the comparison of executors with the reference."""

import torch
from torch import nn

from moh_vision import attention
from moh_vision.attention import HeadBudget, HeadMixtureAttention, SeparateHeadMixtureAttention
from moh_vision.attention.routers.gate_norm import GateNorm

C = 24  # width of a token
H = 6  # heads
D = 4  # width of a head
B = 3  # sequences of a call
N = 7  # tokens of a sequence


def budget_of(router, shared=2, routed=2):
    """Return (shared, routed) of H heads for the name of a router: all heads, or as many shared ones as it can have."""
    chooser = attention.ROUTERS[router]
    if chooser.all_heads:
        return (H, 0)
    if chooser.shared_share == 0:
        return (0, 3)
    return (shared, routed)


# Name -> arguments of `build`: every registered router, some as their papers have them, and more of MAE.
ROUTERS = {name: dict(router=name, budget=budget_of(name)) for name in attention.ROUTERS}
ROUTERS["moa"].update(kv_heads=1, qkv_bias=False, proj_bias=False)
ROUTERS["mae"].update(router_kwargs=dict(mode="argmax", dropout=0.0))
for pool in ("running", "window"):
    options = dict(pool=pool, dropout=0.0)
    ROUTERS[f"mae {pool}"] = dict(router="mae", budget=(H, 0), router_kwargs=options)
# Case -> arguments of `build`, and options of a call, which `call_of` takes out.
CASES = {
    "self": {},
    "sample scope": dict(scope="sample"),
    "a condition of each": dict(scope="sample", condition=(B, C)),
    "one condition for all": dict(scope="sample", condition=(C,)),
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
    "separate projections": dict(layer_class=SeparateHeadMixtureAttention, kv_heads=3),
    "sample scope, separate projections": dict(
        layer_class=SeparateHeadMixtureAttention, scope="sample"
    ),
    "qk-norm": dict(qk_norm=True),
    "sample scope, qk-norm": dict(qk_norm=True, scope="sample"),
    "rotary": dict(rotary=True),
    "one token": dict(tokens=1),
    "one sequence": dict(batch=1),
}


def is_possible(options, **call):
    """Return whether a layer takes a scope, and causal calls, by what its router says; both are refused elsewhere.

    options, call: arguments of `build` and of a case; the latter take the place of the former.
    """
    options = {**options, **call}
    chooser = attention.ROUTERS[options.get("router", "moh")]
    if options.get("scope", "token") not in chooser.scopes:
        return False
    pool = (options.get("router_kwargs") or {}).get("pool", "sequence")
    reads_all = chooser.reads == "sequence" and pool == "sequence"
    return not (options.get("is_causal") and reads_all)


def build(
    budget, dtype=torch.float32, layer_class=HeadMixtureAttention, width=D, heads=H, **options
):
    """Return a layer in training mode whose router chooses different heads for different tokens.

    The gates of MAE have random running statistics, as after some batches.
    """
    layer = layer_class(C, HeadBudget(heads, width, *budget), dtype=dtype, **options)
    for p in layer.router.parameters():
        if p.ndim > 1:
            nn.init.normal_(p)
    for module in layer.router.modules():
        if isinstance(module, GateNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.1, 1)
            if layer.router.pool == "window":
                layer.router.window = 4  # shorter than N, so that a window leaves tokens out
    return layer


def angles(tokens, start=0, dtype=torch.float32, width=D):
    """Return cosines and sines, each [tokens, width], of rotary positions."""
    positions = torch.arange(start, start + tokens, dtype=dtype).unsqueeze(1)
    angle = positions / torch.logspace(0, 1, width // 2, dtype=dtype).repeat(2)
    return angle.cos(), angle.sin()


def call_of(options, dtype, width=D):
    """Split the options of a case into the tokens [B, N, C], the other arguments of the call, and those of `build`."""
    options = dict(options)
    call = {}
    x = torch.randn(
        options.pop("batch", B), options.pop("tokens", N), C, dtype=dtype, requires_grad=True
    )
    if contexts := options.pop("contexts", 0):
        call["context"] = torch.randn(
            contexts, options.pop("keys", 9), C, dtype=dtype, requires_grad=True
        )
    if condition := options.pop("condition", ()):
        call["condition"] = torch.randn(condition, dtype=dtype)
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
    """Return the output of a layer and its gradients by x, the context if there is one, and all parameters.

    executor: a name in EXECUTORS. ", unfused" behind the name sets `fused_attn` to False. ", called projections" registers
    a forward hook, so that executors must call the module of the projection and may not read its weights.
    """
    name, _, variant = executor.partition(", ")
    layer.executor = name
    layer.fused_attn = variant != "unfused"
    hook = None
    if variant == "called projections":
        hook = layer.projections[0].register_forward_hook(lambda *_: None)
    y, _ = layer(x, **call)
    layer.fused_attn = True
    if hook is not None:
        hook.remove()
    loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)).sum()
    inputs = [t for t in (x, call.get("context")) if t is not None] + list(layer.parameters())
    return y.detach(), torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)


TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def assert_equal(layer, executors, x, done=None, **call):
    """Assert that the output and every gradient of each executor are those of the reference.

    done: what `output_and_gradients` returned for other executors, by name.
    """
    y_ref, grads_ref = output_and_gradients(layer, "reference", x, call)
    names = ["y", "x"]
    if "context" in call:
        names.append("context")
    names += [name for name, _ in layer.named_parameters()]
    # Errors are relative to the norm. Some gradients are small because large terms cancel (a router's through its softmax,
    # that of a key's bias), and have the rounding errors of these terms: the largest gradient adds to their scale.
    cancelled_scale = 0.04 * max(g.norm() for g in grads_ref)
    results = dict(done or {})
    for executor in executors:
        results[executor] = output_and_gradients(layer, executor, x, call)
    for executor, (y, grads) in results.items():
        for name, got, want in zip(names, [y, *grads], [y_ref, *grads_ref], strict=True):
            error = (got - want).norm().item()
            scale = (want.norm() + (0 if name == "y" else cancelled_scale)).item()
            assert error <= TOLERANCE[x.dtype] * scale, (
                f"{executor}, {name}: {error:.2e} of {scale:.2e}"
            )
