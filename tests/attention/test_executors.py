"""Every executor equals the reference, in output and in every gradient; and what skipping is for: memory."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moh_vision.attention import (
    GroupMixtureMlp,
    HeadBudget,
    HeadMixtureAttention,
    Routing,
    kernels,
)
from moh_vision.attention.executors import Reference
from moh_vision.attention.losses import load_balance_loss
from moh_vision.attention.routers.base import Router
from moh_vision.attention.routers.moh import MoHRouter
from moh_vision.attention.routing import RoutingStats, run_block
from tests.support.attend_backends import Launched
from tests.support.benchmarks import benchmark
from tests.support.covering import covering
from tests.support.layers import (
    CASES,
    ROUTERS,
    TOLERANCE,
    B,
    C,
    D,
    H,
    N,
    assert_equal,
    build,
    call_of,
    is_possible,
    output_and_gradients,
)
from tests.support.processes import on_two_ranks
from tests.support.refusals import refuse

# "called projections": the layer may not read their weights, and packs queries that are projected for all. "unfused": every
# attention matrix is made. What `auto` picks of them: test_choice.py.
UNDER_TEST = ("masked", "packed", "packed, called projections", "masked, unfused")
EVERY_ROUTER = {
    **{name: options for name, options in ROUTERS.items() if name == options["router"]},
    "moh all routed": dict(router="moh", budget=(0, 3)),
    "moh all shared": dict(router="moh", budget=(6, 0)),
    "moh all heads": dict(router="moh", budget=(1, 5)),
    "query_norm, groups": dict(
        router="query_norm", budget=(2, 2), kv_heads=3, router_kwargs=dict(group=2)
    ),
}


def assert_equal_to_the_reference(options, dtype, width, executors):
    x, call, options = call_of(options, dtype, width)
    layer = build(dtype=dtype, width=width, **options).eval()
    assert_equal(layer, executors, x, **call)
    with torch.no_grad():  # here query_norm skips heads, and masked works in place
        layer.executor = Reference
        want = layer(x, **call)[0]
        # The reference comes again, because the executors before it may not change the weights.
        for executor in [*executors[:2], Reference]:
            layer.executor = executor
            error = (layer(x, **call)[0] - want).norm()
            assert error <= TOLERANCE[dtype] * want.norm(), executor


DTYPES = [("float64", "torch")]  # has no C++ form
DTYPES += [(dtype, path) for dtype in ("float32", "bfloat16") for path in ("cpp", "torch")]


# Budgets of the same router differ in no kernel: one run of each kind is enough.
EVERY = [
    (router, case, dtype, path)
    for router in EVERY_ROUTER
    for case in (
        CASES
        if router != "query_norm, groups"
        else ["self", "causal", "padding", "cross", "one token"]
    )
    for dtype, path in (DTYPES if router in ROUTERS else DTYPES[:2])
    if is_possible(EVERY_ROUTER[router], **CASES[case])
]


@pytest.mark.parametrize("router, case, dtype, path", covering(EVERY), indirect=["path"])
def test_equal_to_the_reference(router, case, dtype, path):
    executors = UNDER_TEST if dtype == "float64" else UNDER_TEST[:-1]
    assert_equal_to_the_reference(
        {**EVERY_ROUTER[router], **CASES[case]}, getattr(torch, dtype), D, executors
    )


# What reaches its kernels otherwise; masks are in test_operators.py.
FOR_KERNELS = (
    "self",
    "sample scope",
    "cross, one context for all",
    "cross, no key",
    "causal",
    "padding",
)
FOR_KERNELS += ("mask of each head", "three key-value heads", "separate projections", "one token")
ON_TRITON = [("moh", case) for case in FOR_KERNELS] + [
    ("query_norm", "causal"),
    ("moa", "causal"),
    ("mae", "self"),
]


@pytest.mark.parametrize("path", ["triton"], indirect=True)
@pytest.mark.parametrize("router, case", ON_TRITON)
def test_triton_equals_the_reference(router, case, path):
    assert_equal_to_the_reference(
        {**EVERY_ROUTER[router], **CASES[case]}, torch.float32, 16, ["packed"]
    )


NODE = ["route_and_attend"]
APART = ["route", "pairs", "attend_in_place"]  # the product may not be read as one
ONE_PRODUCT = ["route", "pairs", "attend_product"]
OF_SEQUENCES = ["route_sequences_and_attend"]
NO_ROUTER = ["pairs", "attend_product"]  # of Triton's: PyTorch routes
OF_PARTS = [
    "project_and_route",
    "pairs",
    "attend_in_place",
]  # queries or keys are changed after the product


def count_calls(module, hook):
    """Hook a module: a list that grows by every call."""
    calls = []
    getattr(module, f"register_{hook}")(lambda *_: calls.append(hook))
    return calls


def adapted(layer):
    """An adapter around the product, as peft's."""
    layer.qkv = nn.Sequential(layer.qkv)


def parametrised(layer):
    nn.utils.parametrizations.weight_norm(layer.qkv)


def replaced_forward(layer):
    forward = layer.qkv.forward
    layer.qkv.forward = lambda x: forward(x)


class LastHeads(MoHRouter):
    """Routes otherwise than its base: by the tokens' negatives."""

    def forward(self, x, q=None, padding_mask=None):
        return super().forward(-x, q, padding_mask)


def of_a_subclass(layer):
    layer.router.__class__ = LastHeads


def in_64_bits(layer):
    layer.double()


def hooked(name, hook):
    """What hooks a module of a layer, and says how often it was called."""
    return lambda layer: count_calls(layer.get_submodule(name), hook)


CHANGED = {  # what changes a layer with router "moh", and what it launches then
    "nothing": (lambda layer: None, NODE),
    "hook on the layer": (hooked("", "forward_hook"), NODE),
    "hook on proj": (hooked("proj", "forward_hook"), NODE),
    "hook on qkv": (hooked("qkv", "forward_hook"), APART),
    "pre-hook on qkv": (hooked("qkv", "forward_pre_hook"), APART),
    "backward hook on qkv": (hooked("qkv", "full_backward_hook"), APART),
    "backward pre-hook on qkv": (hooked("qkv", "full_backward_pre_hook"), APART),
    "hook on the router": (hooked("router", "forward_hook"), ONE_PRODUCT),
    "pre-hook on the router": (hooked("router", "forward_pre_hook"), ONE_PRODUCT),
    "backward hook on the router": (hooked("router", "full_backward_hook"), ONE_PRODUCT),
    "hook on the router's linear layer": (hooked("router.routed", "forward_hook"), NO_ROUTER),
    "backward hook on the router's linear layer": (
        hooked("router.routed", "full_backward_hook"),
        NO_ROUTER,
    ),
    "adapter": (adapted, APART),
    "parametrisation": (parametrised, APART),
    "forward of qkv is replaced": (replaced_forward, APART),
    "router of a subclass": (of_a_subclass, ONE_PRODUCT),
    "64 bits": (in_64_bits, []),
}


@pytest.mark.parametrize("path", ["triton"], indirect=True)
@pytest.mark.parametrize("name", CHANGED)
def test_product_and_router_are_one_node_where_nothing_is_in_between(name, path):
    change, names = CHANGED[name]
    layer = build((2, 2), width=16)
    calls = change(layer)
    dtype = layer.proj.weight.dtype
    x = torch.randn(B, N, C, dtype=dtype, requires_grad=True)
    with Launched() as launched:
        packed = output_and_gradients(layer, "packed", x, {})
    assert launched.names[: len(names)] == names
    assert not [name for name in launched.names[len(names) :] if not name.endswith("backward")]
    assert calls is None or len(calls) == 1
    assert_equal(layer, ["masked"], x, done=dict(packed=packed))


@pytest.mark.parametrize("path", ["triton"], indirect=True)
@pytest.mark.parametrize(
    "dtype, names", [(torch.float16, OF_SEQUENCES), (torch.float64, NO_ROUTER)]
)
def test_a_condition_of_another_dtype_than_the_tokens(dtype, names, path):
    """A kernel reads it in its own dtype; one of float64 is left to PyTorch."""
    x = torch.randn(B, N, C, requires_grad=True)
    condition = torch.randn(B, C).to(dtype).requires_grad_()
    layer = build((2, 2), width=16, scope="sample")
    answers = []
    for executor in ("packed", "masked"):
        layer.executor = executor
        with Launched() as launched:
            y, _ = layer(x, condition=condition)
        if executor == "packed":
            assert launched.names == names
        answers.append((y, *torch.autograd.grad(y.square().sum(), (x, condition))))
    for got, want in zip(*answers):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


LAYERS = {  # a layer and its call, and what it launches
    "moh": (dict(budget=(2, 2)), NODE),
    "moh, no bias": (dict(budget=(2, 2), qkv_bias=False), NODE),
    "moh, one shared head": (dict(budget=(1, 2)), NODE),
    "moh, gates of the paper": (dict(budget=(2, 2), router_kwargs=dict(gate_scale="paper")), NODE),
    "moh, one stage": (dict(budget=(2, 2), router_kwargs=dict(two_stage=False)), NODE),
    "moh, nothing shared": (dict(budget=(0, 3)), NODE),
    "moh, all shared": (dict(budget=(6, 0)), NODE),
    "moa": (ROUTERS["moa"], NODE),
    "moa, noisy": (dict(ROUTERS["moa"], router_kwargs=dict(noisy=True)), NO_ROUTER),
    "groups": (dict(budget=(2, 2), kv_heads=2), NODE),
    "causal": (dict(budget=(2, 2), is_causal=True), NODE),
    "padding": (dict(budget=(2, 2), padding=True), NODE),
    "mask": (dict(budget=(2, 2), mask=(N, N)), NODE),
    "rotary": (dict(budget=(2, 2), rotary=True), OF_PARTS),
    "qk-norm": (dict(budget=(2, 2), qk_norm=True), OF_PARTS),
    "query_norm": (ROUTERS["query_norm"], ["weigh"]),  # its gradient needs all heads
    "mae": (ROUTERS["mae"], NO_ROUTER),
    "gated": (ROUTERS["gated"], ["weigh"]),  # every head runs
    "sample scope": (dict(budget=(2, 2), scope="sample"), OF_SEQUENCES),
    "sample scope, moa": (dict(ROUTERS["moa"], scope="sample"), OF_SEQUENCES),
    "sample scope, padding": (dict(budget=(2, 2), scope="sample", padding=True), OF_SEQUENCES),
    "sample scope, groups": (dict(budget=(2, 2), scope="sample", kv_heads=2), OF_SEQUENCES),
    "sample scope, qk-norm": (dict(budget=(2, 2), scope="sample", qk_norm=True), APART),
    "a condition of each": (
        dict(budget=(2, 2), scope="sample", condition=(B, C)),
        OF_SEQUENCES,
    ),
    "one condition for all": (dict(budget=(2, 2), scope="sample", condition=(C,)), ["route"]),
    "cross": (dict(budget=(2, 2), contexts=B), APART),
    "separate projections": (dict(CASES["separate projections"], budget=(2, 2)), APART),
}


@pytest.mark.parametrize("path", ["triton"], indirect=True)
@pytest.mark.parametrize("name", LAYERS)
def test_what_a_layer_launches_on_a_gpu(name, path):
    options, names = LAYERS[name]
    x, call, options = call_of(options, torch.float32, 16)
    layer = build(width=16, **options)
    with Launched() as launched:
        packed = output_and_gradients(layer, "packed", x, call)
    forward = [name for name in launched.names if not name.endswith("backward")]
    assert forward == names
    assert sorted(launched.names) == sorted(
        [*forward, *(f"{name}_backward" for name in forward if name != "pairs")]
    )
    if "noisy" not in name:
        assert_equal(layer, ["masked"], x, done=dict(packed=packed), **call)


class Fixed(Router):
    """Routing by a given table [B, N or 1, H], for cases that no router makes today."""

    def __init__(self, active):
        super().__init__(HeadBudget(H, D, 2, 2))
        self.active = active
        self.gate = nn.Parameter(torch.rand(active.shape, dtype=torch.float64) + 0.5)

    def forward(self, x, q=None, padding_mask=None):
        none = x.new_zeros(*self.active.shape[:2], 0)
        return Routing(
            self.gate * self.active, self.active, RoutingStats(none, self.active.sum(1), none)
        )


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("tokens", [N, 1], ids=["token", "sample"])
@pytest.mark.parametrize(
    "rule",
    [
        lambda a: None,  # of sequences that run unequal numbers of heads, too
        lambda a: a[..., 3].fill_(False),  # a head with no token
        lambda a: a[1, :, 2:].fill_(False),  # a sequence without any routed head
        lambda a: a[:, -1, 2:].fill_(False),  # a token without any routed head
        lambda a: a[..., 2:].fill_(False),  # nothing routed at all
        lambda a: a[..., 2:].fill_(True),  # everything
        lambda a: a[0, :, 5].fill_(True),  # one very popular head
    ],
)
def test_any_table_of_heads(rule, tokens, kv_heads):
    active = torch.rand(B, tokens, H) < 0.5
    active[..., :2] = True  # shared
    rule(active)
    layer = build((2, 2), torch.float64, kv_heads=kv_heads)
    layer.router = Fixed(active)
    assert_equal(layer, UNDER_TEST, torch.randn(B, N, C, dtype=torch.float64, requires_grad=True))


NOBODY = [
    (HeadMixtureAttention, (B, N)),
    *itertools.product((HeadMixtureAttention, GroupMixtureMlp), ((B, 1), (1, 1))),
]


@pytest.mark.parametrize("path", ["cpp", "torch"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer_class, table", NOBODY)
def test_nobody_runs_a_head(layer_class, table, dtype, path):
    """A router of one's own may do so, for a whole batch: what is left is the bias of the output."""
    layer = build((2, 2), dtype=dtype, layer_class=layer_class)
    layer.router = Fixed(torch.zeros(*table, H, dtype=torch.bool)).float()
    x = torch.randn(B, N, C, dtype=dtype, requires_grad=True)
    assert_equal(layer, ["masked", "packed", "auto"], x)
    y = layer(x)[0]
    bias = layer.projections[1].bias
    assert torch.equal(y, bias.expand_as(y))


@pytest.mark.parametrize("path", ["cpp", "torch"], indirect=True)
@pytest.mark.parametrize(
    "mask", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scope", ["token", "sample"])
def test_additive_masks_of_other_dtypes(scope, dtype, mask, path):
    layer = build((2, 2), dtype=dtype, scope=scope)
    x = torch.randn(B, N, C, dtype=dtype, requires_grad=True)
    attn_mask = torch.randn(N, N).half().to(mask)
    assert_equal(layer, UNDER_TEST, x, attn_mask=attn_mask)


# Per token only compiled operators skip.
@pytest.mark.parametrize(
    "scope, path", [("token", "cpp"), ("sample", "cpp"), ("sample", "torch")], indirect=["path"]
)
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
            layer.proj.weight.unflatten(1, (H, D))[:, h] = torch.nan
            # Per token, keys and values serve other tokens.
            layer.qkv.weight.unflatten(0, (3, H, D))[: 3 if scope == "sample" else 1, h] = torch.nan
    assert torch.equal(layer(x)[0], want)


@pytest.mark.parametrize("scope", ["token", "sample"])
def test_attention_dropout(scope):
    """With one key the attention matrix is 1, so a head's output is dropped whole or doubled: the mean is right."""
    torch.manual_seed(0)
    layer = build(
        (1, 2), attn_drop=0.5, executor="packed", scope=scope, proj_bias=False, qkv_bias=False
    )
    x = torch.randn(1, 1, C).expand(4000, 1, C)
    with torch.no_grad():
        dropped = layer(x)[0]
        exact = layer.eval()(x[:1])[0]
    assert len(dropped.unique(dim=0)) == 8  # three heads, each on or off
    atol = 0.1 * exact.abs().max().item()
    torch.testing.assert_close(dropped.mean(0), exact[0], atol=atol, rtol=0)


class Block(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.attn = build((2, 2), executor="packed", width=16, **kwargs)

    def forward(self, x, stats):
        y, s = self.attn(x)
        stats.append(s)
        return x + y


@pytest.mark.parametrize(
    "scope, reentrant, path",
    [
        ("token", False, "cpp"),
        ("token", True, "cpp"),
        ("sample", True, "cpp"),
        ("token", True, "triton"),
        ("token", False, "triton"),
    ],
    indirect=["path"],
)
def test_activation_checkpointing(scope, reentrant, path):
    """A list filled inside a reentrant checkpoint would give the balance loss a gradient of 0, without an error."""
    block = Block(scope=scope)
    x = torch.randn(B, N, C, requires_grad=True)
    grads = []
    for function in (None, partial(checkpoint, use_reentrant=reentrant)):
        stats = []
        y = run_block(block, x, stats=stats, checkpoint=function)
        block.zero_grad()
        (y.square().mean() + load_balance_loss(stats)).backward()
        assert len(stats) == 1
        grads.append([p.grad.clone() for p in block.parameters()])
    assert all(map(torch.equal, *grads))
    assert all(p.grad.norm() > 0 for p in block.attn.router.parameters())


@pytest.mark.parametrize("path", ["cpp", "triton"], indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        ROUTERS["query_norm"],
        dict(scope="sample", **ROUTERS["moh"]),
        dict(scope="sample", **ROUTERS["moa"]),
        dict(qk_norm=True, kv_heads=2, is_causal=True, **ROUTERS["moh"]),
        dict(kv_heads=2, padding=True, **ROUTERS["moh"]),
        ROUTERS["moa"],
    ],
)
def test_autocast(options, path):
    """Results are near `Masked`'s, routed by float32 logits; Triton's interpreter has no bfloat16."""
    x, call, options = call_of(options, torch.float32)
    if path == "cpp":
        dtype = torch.bfloat16
        tolerance = 2e-2
    else:
        dtype = torch.float16
        tolerance = 5e-3
    layer = build(width=16, **options)
    results = []
    for layer.executor, inside in (("masked", False), ("packed", False), ("packed", True)):
        with torch.autocast(x.device.type, dtype):
            y, stats = layer(x, **call)
        assert y.dtype == dtype and stats.probs.dtype == torch.float32
        loss = y.float().square().sum()
        with torch.autocast(x.device.type, dtype, enabled=inside):  # of backward
            grads = torch.autograd.grad(loss, [x, *layer.parameters()], materialize_grads=True)
        results.append([y.float(), *grads])
    largest = max(g.norm() for g in results[0][1:])
    for want, *both in zip(*results, strict=True):
        for got in both:
            assert got.dtype == torch.float32
            assert (got - want).norm() <= tolerance * (want.norm() + 0.1 * largest)


def sharded(layer):
    return fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))


def sharded_in_parts(layer):
    """Shard a layer, and its product and router apart: their weights are there only while they are called."""
    for module in (layer.qkv, layer.router, layer):
        sharded(module)
    return layer


def gradients_on_a_rank(rank):
    """Compare a layer on Triton's kernels with half of the batch to all heads computed with the whole batch."""
    dist.init_process_group("gloo")
    kernels.use("triton")
    for scope, wrap in (
        ("token", DistributedDataParallel),
        ("token", sharded),
        ("token", sharded_in_parts),
        ("sample", sharded),
    ):
        torch.manual_seed(0)
        layer = build((2, 2), scope=scope, executor="masked", width=16)
        x = torch.randn(2 * B, N, C)
        loss = layer(x)[0].square().sum() / 2  # both wrappers take the mean over ranks
        want = torch.autograd.grad(loss, list(layer.parameters()))
        layer.executor = "packed"
        wrapped = wrap(layer)  # which gradients are summed by: it must live
        with Launched() as launched:
            y = wrapped(x[rank * B : rank * B + B])[0]
        operator = "route_and_attend" if scope == "token" else "route_sequences_and_attend"
        assert (operator in launched.names) == (wrap is not sharded_in_parts)
        y.square().sum().backward()
        for p, grad in zip(layer.parameters(), want, strict=True):
            whole = p.grad if wrap is DistributedDataParallel else p.grad.full_tensor()
            assert (whole - grad).norm() <= 1e-4 * grad.norm()
    dist.destroy_process_group()


@pytest.mark.slow  # two processes import Triton and its interpreter
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="two processes share Triton's interpreter on a CPU"
)
def test_two_processes_on_triton():
    on_two_ranks(gradients_on_a_rank)


@pytest.mark.parametrize(
    "scope, path, limit",
    [("token", "cpp", 0.80), ("sample", "cpp", 0.62), ("sample", "torch", 0.67)],
    indirect=["path"],
)
def test_saves_less_for_backward(scope, path, limit):
    """x, K, V and compact q and o: (3 + 2 f) / 6 of what masked keeps, and (1 + 4 f) / 6 where samples are skipped."""
    layer = HeadMixtureAttention(192, HeadBudget(6, 32, 1, 2), scope=scope)
    x = torch.randn(4, 256, 192)
    sizes = []
    for layer.executor in ("masked", "packed"):
        sizes.append(benchmark("attention").saved_bytes(layer, x))
    assert sizes[1] <= limit * sizes[0], sizes


def test_sums_over_many_sequences_do_not_stall_in_16_bits():
    """512 equal terms: summed one by one in bfloat16 they would stop growing at 256."""
    layer = build((2, 2), torch.bfloat16, scope="sample", executor="packed")
    layer.router = Fixed(torch.tensor([True, True, False, True, False, True]).expand(512, 1, H))
    x = torch.randn(1, 2, C, dtype=torch.bfloat16).expand(512, 2, C)
    weights = (layer.qkv.weight, layer.qkv.bias, layer.proj.weight)
    grads = []
    for layer.executor in ("packed", "masked"):
        grads.append(torch.autograd.grad(layer(x)[0].sum(), weights))
    for got, want in zip(*grads, strict=True):
        assert (got.float() - want.float()).norm() <= 2e-2 * want.float().norm()


@pytest.mark.parametrize("path", ["cpp", "torch", "triton"], indirect=True)
def test_a_batch_of_nothing_and_one_of_one_token(path):
    """A bias [C] spread over one token is its own memory, which sums must not go into."""
    layer = build((2, 2), executor="packed", width=16)
    x = torch.randn(1, 1, C)
    outputs = []
    for shape in ((0, N, C), (B, 0, C)):
        y, stats = layer(torch.randn(shape))
        assert y.shape == shape and not stats.counts.any()
        pairs = layer.router(torch.randn(shape)).pairs
        assert pairs is None or not pairs.offsets.any()
        (y.sum() + stats.probs.sum()).backward()
        assert not any(p.grad.any() for p in layer.parameters() if p.grad is not None)
    with torch.no_grad():
        for layer.executor in (Reference, "packed", Reference):
            outputs.append(layer(x)[0])
    assert torch.equal(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[0], outputs[1])


@pytest.mark.parametrize("scope", ["token", "sample"])
def test_transforms_of_torch_func(scope):
    layer = build((2, 2), scope=scope, executor="packed")
    x = torch.randn(B, N, C, requires_grad=True)
    (want,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
    got = torch.func.grad(lambda x: layer(x)[0].square().sum())(x.detach())
    torch.testing.assert_close(got, want)
    each = torch.func.vmap(torch.func.grad(lambda x: layer(x[None])[0].square().sum()))
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(each(x.detach()), want)


@pytest.mark.parametrize(
    "executor, scope, path",
    [
        ("masked", "token", "cpp"),
        ("packed", "token", "cpp"),
        ("packed", "sample", "cpp"),
        ("packed", "token", "triton"),
        ("masked", "token", "triton"),
    ],
    indirect=["path"],
)
def test_compiles_once_for_many_steps(executor, scope, path):
    """Tokens lie across: shapes without values must have the strides of the values, or a compiled backward fails."""
    layer = build((2, 2), executor=executor, scope=scope, width=16)
    graphs = []
    device = layer.proj.weight.device
    torch.set_default_device(None)  # torch 2.11 compiles no call under its mode

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.randn(2, C, N, device=device, requires_grad=True)
        results = []
        for run in (layer, compiled):
            y, stats = run(x.transpose(1, 2))
            loss = y.square().mean() + load_balance_loss([stats]) + stats.logits.square().mean()
            results.append([y.detach(), *torch.autograd.grad(loss, [x, *layer.parameters()])])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        for parameter, grad in zip(layer.parameters(), results[0][2:]):
            parameter.grad = grad
        optimizer.step()
    assert len(graphs) == 1
    assert any("route" in target for target in graphs[0])
    with torch.no_grad():
        x = torch.randn(3, C, N, device=device).transpose(1, 2)
        torch.testing.assert_close(compiled(x)[0], layer(x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("router", ["moh", "query_norm", "moa", "mae", "dense"])
def test_one_compilation_serves_every_size(router):
    """An operator that takes a size as a plain number would be compiled again for each."""
    layer = build(**ROUTERS[router], executor="packed").eval()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for batch, tokens in ((B, N), (5, N), (3, 9)):
        x = torch.randn(batch, tokens, C)
        torch.testing.assert_close(compiled(x)[0], layer(x)[0])
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "router, strict",
    [
        ("moh", True),
        *[(router, False) for router in ("moh", "query_norm", "moa", "mae", "dense")],
        *[
            pytest.param(router, True, marks=pytest.mark.slow)
            for router in ("query_norm", "moa", "mae", "dense")
        ],
    ],
)
def test_exported_with_a_dynamic_batch(router, strict):
    """Strict export traces by dynamo, as torch.compile does, and is told from it all the same."""
    layer = build(**ROUTERS[router], executor="packed").eval()
    program = torch.export.export(
        layer,
        (torch.randn(B, N, C),),
        dynamic_shapes=dict(x={0: torch.export.Dim("batch")}),
        strict=strict,
    )
    x = torch.randn(5, N, C)
    graph = str(program.graph)
    assert "moh_vision" not in graph  # operators that are not where it will run
    assert "autocast" not in graph  # each region would slow the export of a large model
    torch.testing.assert_close(program.module()(x)[0], layer(x)[0])


def test_traced_and_meta():
    layer = build((2, 2), executor="packed").eval()
    x = torch.randn(B, N, C)
    traced = torch.jit.trace(layer, torch.randn(B, N, C), check_trace=False)
    torch.testing.assert_close(traced(x)[0], layer(x)[0])
    assert "moh_vision::" not in str(traced.graph)
    y, stats = build((2, 2), executor="packed").to("meta")(torch.randn(B, N, C, device="meta"))
    assert y.shape == (B, N, C) and stats.counts.shape == (B, H)


def test_reference_against_plain_softmax():
    """The oracle itself, for one head, in three lines."""
    module = HeadMixtureAttention(
        C, HeadBudget(1, 8, 1, 0), router="dense", executor="reference"
    ).double()
    x = torch.randn(1, N, C, dtype=torch.float64)
    q, k, v = functional.linear(x[0], module.qkv.weight, module.qkv.bias).split(8, dim=-1)
    want = functional.linear(
        (q @ k.T / 8**0.5).softmax(-1) @ v, module.proj.weight, module.proj.bias
    )
    torch.testing.assert_close(module(x)[0][0], want)
    blind = module(x, attn_mask=torch.ones(N, N, dtype=torch.bool).tril(-1))[0]
    torch.testing.assert_close(
        blind[0, 0], module.proj.bias
    )  # a query that sees no key attends to nothing


BAD_ARGUMENTS = {
    "router": (
        dict(router="mho"),
        "router 'mho' dense gated mae moa moh query_norm",
    ),
    "executor": (
        dict(executor="fast"),
        "executor 'fast' auto masked packed reference",
    ),
    "scope": (dict(scope="image"), "scope 'image' sample token"),
    "kv_heads": (dict(kv_heads=4), "kv_heads=4 6 heads"),
}


@pytest.mark.parametrize("options, words", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments(options, words):
    refuse(words, build, (2, 2), **options)
