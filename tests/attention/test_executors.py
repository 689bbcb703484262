"""Every executor equals the reference, in output and in every gradient; and what skipping is for: memory."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from moh_vision.attention import (
    EXECUTORS,
    HeadBudget,
    HeadMixtureAttention,
    Routing,
    load_balance_loss,
    router_z_loss,
    run_block,
)
from moh_vision.attention.routing import RoutingStats

B, N, M, C, H, D = 3, 7, 9, 24, 6, 4
# "packed, called projections": where the layer may not read their weights, and packs queries that are projected for all.
UNDER_TEST = (*sorted(set(EXECUTORS) - {"reference"}), "packed, called projections")
ROUTERS = {
    "moh": dict(router="moh", budget=(2, 2)),
    "moh all routed": dict(router="moh", budget=(0, 3)),
    "moh all shared": dict(router="moh", budget=(6, 0)),
    "moh all heads": dict(router="moh", budget=(1, 5)),
    "query_norm": dict(router="query_norm", budget=(2, 3)),
    "moa": dict(router="moa", budget=(0, 2), kv_heads=1, qkv_bias=False, proj_bias=False),
    "mae": dict(router="mae", budget=(6, 0), router_kwargs=dict(mode="argmax", dropout=0.0)),
    "dense": dict(router="dense", budget=(6, 0)),
}
CASES = {
    "self": {},
    "sample scope": dict(scope="sample"),
    "cross": dict(context=True),
    "sample scope, cross": dict(scope="sample", context=True),
    "causal": dict(is_causal=True),
    "padding": dict(padding=True),
    "mask": dict(mask=(N, N)),
    "mask of each head": dict(mask=(B, H, N, N)),
    "mask of each head, for all sequences": dict(mask=(H, N, N)),
    "sample scope, mask of each head": dict(mask=(1, H, N, N), scope="sample"),
    "additive mask": dict(mask=(1, 1, N, N), additive=True),
    "two key-value heads": dict(kv_heads=2),
    "three key-value heads": dict(kv_heads=3),
    "sample scope, two key-value heads": dict(kv_heads=2, scope="sample"),
    "qk-norm": dict(qk_norm=True),
    "sample scope, qk-norm": dict(qk_norm=True, scope="sample"),
    "rotary": dict(rotary=True),
    "one token": dict(tokens=1),
    "one sequence": dict(batch=1),
}
SHORTER = {"f32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def build(budget, dtype=torch.float32, **kwargs):
    layer = HeadMixtureAttention(C, HeadBudget(H, D, *budget), dtype=dtype, **kwargs)
    for p in layer.router.parameters():
        if p.ndim > 1:
            nn.init.normal_(p)
    return layer


def output_and_gradients(layer, executor, x, context, call):
    layer.executor = executor.split(",")[0]
    hook = layer.qkv.register_forward_hook(lambda *_: None) if "called" in executor else None
    y, stats = layer(x, context, **call)
    if hook is not None:
        hook.remove()
    weight = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
    inputs = [t for t in (x, context) if t is not None] + list(layer.parameters())
    grads = torch.autograd.grad((y * weight).sum(), inputs, allow_unused=True)
    return y.detach(), [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, grads)]


def assert_equal(layer, executor, x, context=None, **call):
    tolerance = TOLERANCE[x.dtype]
    y, grads = output_and_gradients(layer, executor, x, context, call)
    y_ref, grads_ref = output_and_gradients(layer, "reference", x, context, call)
    names = ["y", "x", *(["context"] if context is not None else []), *(n for n, _ in layer.named_parameters())]
    # Relative in norm. What is small by cancellation (a router's gradient through its softmax, a key's bias) is held to
    # the rounding of what it is the difference of.
    beside = 0.04 * max(g.norm() for g in grads_ref)
    for name, got, want in zip(names, [y, *grads], [y_ref, *grads_ref], strict=True):
        error, scale = (got - want).norm().item(), (want.norm() + (0 if name == "y" else beside)).item()
        assert error <= tolerance * scale, f"{name}: {error:.2e} of {scale:.2e}"


@pytest.mark.parametrize(
    "dtype, path",
    [
        pytest.param(torch.float64, "torch", id="f64"),  # has no C++ form
        *(
            pytest.param(dtype, path, id=f"{name}-{path}")
            for name, dtype in SHORTER.items()
            for path in ("cpp", "torch")
        ),
    ],
    indirect=["path"],
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("router", ROUTERS)
def test_equal_to_the_reference(router, case, dtype, path):
    options = {**ROUTERS[router], **CASES[case]}
    batch, tokens = options.pop("batch", B), options.pop("tokens", N)
    x = torch.randn(batch, tokens, C, dtype=dtype, requires_grad=True)
    context = torch.randn(B, M, C, dtype=dtype, requires_grad=True) if options.pop("context", False) else None
    call = {}
    if options.pop("is_causal", False):
        call["is_causal"] = True
    if options.pop("padding", False):
        call["padding_mask"] = torch.arange(N) >= torch.tensor([[7], [5], [2]])
    if options.pop("rotary", False):
        angles = torch.arange(N).unsqueeze(1) / torch.tensor([1.0, 10.0]).repeat(2)
        call["rotary"] = angles.cos(), angles.sin()
    mask = options.pop("mask", None)
    if mask is not None:
        allowed = (torch.rand(mask) > 0.4) | torch.eye(N, dtype=torch.bool)
        call["attn_mask"] = torch.randn(mask, dtype=dtype) if options.pop("additive", False) else allowed
    layer = build(dtype=dtype, **options)
    layer.eval()
    for executor in UNDER_TEST:
        assert_equal(layer, executor, x, context, **call)
    with torch.no_grad():  # here query_norm skips heads, and masked works in place
        layer.executor = "reference"
        want = layer(x, context, **call)[0]
        for name in set(EXECUTORS) - {"reference"}:
            layer.executor = name
            got = layer(x, context, **call)[0]
            assert (got - want).norm() <= TOLERANCE[dtype] * want.norm(), name


class Fixed(nn.Module):
    """Routing by a given table [B, N or 1, H], for cases that no router makes today."""

    reads = "token"
    needs_query = False
    budget = HeadBudget(H, D, 2, 2)

    def __init__(self, active):
        super().__init__()
        self.active = active
        self.gate = nn.Parameter(torch.rand(active.shape, dtype=torch.float64) + 0.5)

    def forward(self, x, q=None, padding_mask=None):
        none = x.new_zeros(*self.active.shape[:2], 0)
        return Routing(self.gate * self.active, self.active, RoutingStats(none, self.active.sum(1), none))


def table(rule):
    active = torch.rand(B, N, H) < 0.5
    active[..., :2] = True  # shared
    rule(active)
    return active


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize(
    "active",
    [
        table(lambda a: None),
        table(lambda a: a[..., 3].fill_(False)),  # a head with no token
        table(lambda a: a[1, :, 2:].fill_(False)),  # a sequence without any routed head
        table(lambda a: a[:, 2, 2:].fill_(False)),  # a token without any routed head
        table(lambda a: a[..., 2:].fill_(False)),  # nothing routed at all
        table(lambda a: a[..., 2:].fill_(True)),  # everything
        table(lambda a: a[0, :, 5].fill_(True)),  # one very popular head
        table(lambda a: None)[:, :1],  # sequences with unequal numbers of heads
    ],
    ids=["any", "idle head", "bare sequence", "bare token", "none", "all", "popular", "unequal"],
)
@pytest.mark.parametrize("executor", UNDER_TEST)
def test_any_table_of_heads(executor, active, kv_heads):
    layer = build((2, 2), torch.float64, kv_heads=kv_heads)
    layer.router = Fixed(active)
    assert_equal(layer, executor, torch.randn(B, N, C, dtype=torch.float64, requires_grad=True))


def test_odd_sizes():
    for tokens, batch in ((1, 1), (13, 5), (129, 1), (300, 2)):
        layer = build((1, 3), torch.float64)
        x = torch.randn(batch, tokens, C, dtype=torch.float64, requires_grad=True)
        for executor in UNDER_TEST:
            assert_equal(layer, executor, x)


@pytest.mark.parametrize("scope", ["token", "sample"])
def test_a_query_that_sees_no_key_attends_to_nothing(scope):
    layer = build((2, 2), torch.float64, scope=scope)
    mask = torch.ones(N, N, dtype=torch.bool).tril(-1)  # the first token sees nothing
    additive = torch.zeros(N, N, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    for executor in UNDER_TEST:
        for attn_mask in (mask, additive):
            assert_equal(layer, executor, x, attn_mask=attn_mask)
    layer.executor = "reference"
    torch.testing.assert_close(layer(x, attn_mask=mask)[0][:, 0], layer.proj.bias.expand(B, C))


# Per token only compiled operators skip.
@pytest.mark.parametrize("scope, path", [("token", "cpp"), ("sample", "cpp"), ("sample", "torch")], indirect=["path"])
def test_heads_that_are_off_cost_nothing_to_break(scope, path):
    """What is skipped is not even read: NaN in the weights of a head that nobody chose does no harm."""
    layer = build((2, 2), scope=scope, executor="packed")
    active = torch.zeros(B, 1 if scope == "sample" else N, H, dtype=torch.bool)
    active[..., [0, 1, 4]] = True
    layer.router = Fixed(active).float()
    x = torch.randn(B, N, C)
    want = layer(x)[0]
    with torch.no_grad():
        for h in (3, 5):
            layer.proj.weight[:, h * D : (h + 1) * D] = torch.nan
            for part in range(3 if scope == "sample" else 1):  # per token, keys and values serve other tokens
                layer.qkv.weight[part * H * D + h * D : part * H * D + (h + 1) * D] = torch.nan
    assert torch.equal(layer(x)[0], want)


@pytest.mark.parametrize("scope", ["token", "sample"])
def test_attention_dropout(scope):
    """With one key the attention matrix is 1, so a head's output is dropped whole or doubled: the mean is right."""
    torch.manual_seed(0)
    layer = build((1, 2), attn_drop=0.5, executor="packed", scope=scope, proj_bias=False, qkv_bias=False)
    x = torch.randn(1, 1, C).expand(4000, 1, C)
    dropped = layer(x)[0].detach()
    layer.eval()
    exact = layer(x[:1])[0].detach()
    assert len(dropped.unique(dim=0)) == 8  # three heads, each on or off
    torch.testing.assert_close(dropped.mean(0), exact[0], atol=0.1 * exact.abs().max().item(), rtol=0)


class Block(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.attn = build((2, 2), **kwargs)

    def forward(self, x, stats=None):
        y, s = self.attn(x)
        if stats is not None:
            stats.append(s)
        return x + y


@pytest.mark.parametrize("executor", ["packed", "auto"])
@pytest.mark.parametrize("scope", ["token", "sample"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(scope, executor, reentrant):
    """A list filled inside a reentrant checkpoint would give the balance loss a gradient of 0, without an error."""
    block = Block(scope=scope, executor=executor)
    x = torch.randn(B, N, C, requires_grad=True)
    grads = []
    for function in (None, partial(checkpoint, use_reentrant=reentrant)):
        stats = []
        y = run_block(block, x, stats=stats, checkpoint=function)
        block.zero_grad()
        (y.square().mean() + load_balance_loss(stats)).backward()
        assert len(stats) == 1
        grads.append([p.grad.clone() for p in block.parameters()])
    for (name, _), a, b in zip(block.named_parameters(), *grads, strict=True):
        assert torch.equal(a, b), name
        assert "router" not in name or a.norm() > 0


@pytest.mark.parametrize("scope", ["token", "sample"])
@pytest.mark.parametrize("router", ["moh", "query_norm", "moa"])
def test_autocast(router, scope):
    """The float32 layer under autocast: near masked, routed by float32 logits, gradients in float32."""
    layer = build(dict(moh=(2, 2), query_norm=(2, 2), moa=(0, 3))[router], router=router, scope=scope)
    x = torch.randn(B, N, C, requires_grad=True)
    results = []
    for executor in ("masked", "packed"):
        layer.executor = executor
        with torch.autocast("cpu", torch.bfloat16):
            y, stats = layer(x)
        assert y.dtype == torch.bfloat16 and stats.probs.dtype == torch.float32
        layer.zero_grad()
        y.float().square().sum().backward()
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in layer.parameters())
        results.append([y.float(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 2e-2 * a.norm()


def saved_bytes(layer, x):
    """What autograd keeps, each storage once, parameters left out."""
    skip = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept = {}

    def keep(t):
        if t.untyped_storage().data_ptr() not in skip:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = layer(x)
    del y
    return sum(kept.values())


@pytest.mark.parametrize(
    "scope, path, limit",
    [("token", "cpp", 0.80), ("sample", "cpp", 0.62), ("sample", "torch", 0.67)],
    indirect=["path"],
)
def test_saves_less_for_backward(scope, path, limit):
    """x, K, V and compact q and o: (3 + 2 f) / 6 of what masked keeps, and (1 + 4 f) / 6 where samples are skipped."""
    layer = HeadMixtureAttention(192, HeadBudget(6, 32, 1, 2), scope=scope)
    x = torch.randn(4, 256, 192, requires_grad=True)
    sizes = {}
    for executor in ("masked", "packed"):
        layer.executor = executor
        sizes[executor] = saved_bytes(layer, x)
    assert sizes["packed"] <= limit * sizes["masked"], sizes


def test_sums_over_many_sequences_do_not_stall_in_16_bits():
    """512 equal terms: summed one by one in bfloat16 they would stop growing at 256."""
    layer = build((2, 2), torch.bfloat16, scope="sample", executor="packed")
    layer.router = Fixed(torch.tensor([True, True, False, True, False, True]).expand(512, 1, H))
    x = torch.randn(1, 2, C, dtype=torch.bfloat16).expand(512, 2, C)
    grads = {}
    for executor in ("packed", "masked"):
        layer.executor = executor
        layer.zero_grad()
        layer(x)[0].sum().backward()
        grads[executor] = [p.grad.float() for p in (layer.qkv.weight, layer.qkv.bias, layer.proj.weight)]
    for got, want in zip(grads["packed"], grads["masked"], strict=True):
        assert (got - want).norm() <= 2e-2 * want.norm()


@pytest.mark.parametrize("path", ["torch"], indirect=True)  # the C++ router cannot
def test_masked_can_be_differentiated_twice_in_16_bits(path):
    layer = build((2, 2), torch.bfloat16, executor="reference")
    x = torch.randn(B, N, C, dtype=torch.bfloat16, requires_grad=True)
    (slope,) = torch.autograd.grad(layer(x)[0].float().sum(), x, create_graph=True)
    slope.float().square().sum().backward()
    assert layer.router.routed.weight.grad.norm() > 0


@pytest.mark.parametrize("executor", ["packed", "auto"])
@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_on_projections_are_called(executor, hook):
    layer = build((1, 2), executor=executor)
    calls = []
    getattr(layer.proj, hook)(lambda *args: calls.append(1))
    layer(torch.randn(B, N, C))
    assert calls


def test_empty_batch():
    assert build((2, 2), executor="packed")(torch.randn(0, N, C))[0].shape == (0, N, C)


@pytest.mark.parametrize("scope", ["token", "sample"])
def test_transforms_of_torch_func(scope):
    layer = build((2, 2), torch.float64, scope=scope, executor="packed")
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
    torch.testing.assert_close(torch.func.grad(lambda x: layer(x)[0].square().sum())(x.detach()), want)
    each = torch.func.vmap(torch.func.grad(lambda x: layer(x[None])[0].square().sum()))
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(each(x.detach()), want)


# ---------------------------------------------------------------- captured graphs


@pytest.mark.parametrize("executor", ["masked", "packed", "auto"])
@pytest.mark.parametrize("scope", ["token", "sample"])
def test_compiles_once_for_many_steps(executor, scope):
    torch._dynamo.reset()
    layer = build((2, 2), executor=executor, scope=scope)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(4):
        x, results = torch.randn(B, N, C), []
        for run in (layer, compiled):
            y, stats = run(x)
            optimizer.zero_grad()
            (y.square().mean() + load_balance_loss([stats]) + router_z_loss([stats])).backward()
            results.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        optimizer.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
    with torch.no_grad():
        x = torch.randn(B + 1, N, C)
        torch.testing.assert_close(compiled(x)[0], layer(x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("router", ["moh", "query_norm", "moa", "mae", "dense"])
@pytest.mark.parametrize("executor", ["masked", "auto"])
def test_compiled_and_exported_with_a_dynamic_batch(router, executor):
    layer = build(ROUTERS[router]["budget"], router=router, executor=executor).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    program = torch.export.export(layer, (torch.randn(B, N, C),), dynamic_shapes=dict(x={0: torch.export.Dim("batch")}))
    x = torch.randn(5, N, C)
    for run in (program.module(), compiled):
        torch.testing.assert_close(run(x)[0], layer(x)[0])


def test_traced_and_meta():
    layer = build((2, 2), executor="packed").eval()
    x = torch.randn(B, N, C)
    traced = torch.jit.trace(layer, torch.randn(B, N, C), check_trace=False)
    torch.testing.assert_close(traced(x)[0], layer(x)[0])
    y, stats = build((2, 2), executor="packed").to("meta")(torch.randn(B, N, C, device="meta"))
    assert y.shape == (B, N, C) and stats.counts.shape == (B, H)
