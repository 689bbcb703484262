"""A layer on Triton's kernels, in its interpreter: every way through them equals the reference, gradients included."""

import pytest
import torch
import torch.distributed as dist
from processes import on_two_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moh_vision.attention import HeadBudget, HeadMixtureAttention, KeyValueCache, SeparateHeadMixtureAttention, kernels

B, N, M, C, H, D = 2, 7, 9, 24, 6, 16
ROUTERS = {
    "moh": dict(router="moh", budget=(2, 2)),
    "moa": dict(router="moa", budget=(0, 2), kv_heads=1, qkv_bias=False, proj_bias=False),
    "query_norm": dict(router="query_norm", budget=(2, 2)),
    "mae": dict(router="mae", budget=(6, 0), router_kwargs=dict(mode="argmax", dropout=0.0)),
}
CASES = {
    "self": {},
    "sequences choose": dict(scope="sample"),
    "sequences choose, cross": dict(scope="sample", context=True),
    "sequences choose, masks": dict(scope="sample", mask=(1, 1, N, N)),
    "sequences choose, masks of heads": dict(scope="sample", mask=(B, H, N, N)),
    "sequences choose, two key-value heads": dict(scope="sample", kv_heads=2),
    "sequences choose, separate projections": dict(scope="sample", kind=SeparateHeadMixtureAttention),
    "sequences choose, norms and rotation": dict(scope="sample", qk_norm=True, rotary=True),
    "cross": dict(context=True),
    "cross, one context for all": dict(context=True, contexts=1),
    "causal": dict(is_causal=True),
    "masks of heads": dict(mask=(H, N, N)),
    "three key-value heads": dict(kv_heads=3),
    "norms and rotation": dict(qk_norm=True, rotary=True),
}


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.parametrize("path", ["triton"], indirect=True)


@pytest.fixture(autouse=True)
def everywhere(path):
    """All of this file runs on Triton's kernels, on a GPU where one is."""
    torch.set_default_device("cuda" if DEVICE == "cuda" else None)
    yield
    torch.set_default_device(None)


def build(budget, kind=HeadMixtureAttention, width=D, **kwargs):
    layer = kind(C, HeadBudget(H, width, *budget), **kwargs)
    for p in layer.router.parameters():
        if p.ndim > 1:
            nn.init.normal_(p)
    return layer.eval()


def call_of(context=False, contexts=B, mask=None, rotary=False, is_causal=False):
    call = dict(context=torch.randn(contexts, M, C, requires_grad=True)) if context else {}
    if mask is not None:
        call["attn_mask"] = (torch.rand(mask) > 0.4) | torch.eye(N, dtype=torch.bool)
    if rotary:
        angles = torch.arange(N).unsqueeze(1) / torch.logspace(0, 1, D // 2).repeat(2)
        call["rotary"] = angles.cos(), angles.sin()
    if is_causal:
        call["is_causal"] = True
    return call


def output_and_gradients(layer, x, call):
    y, stats = layer(x, **call)
    inputs = [x, *(t for t in call.values() if isinstance(t, torch.Tensor) and t.requires_grad), *layer.parameters()]
    loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() + stats.probs.square().sum()
    return [y.detach(), *torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)]


def assert_near(got, want):
    largest = max(t.norm() for t in want[1:])
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 2e-5 * (b.norm() + 0.04 * largest)


@pytest.mark.parametrize(
    "router, case",
    [("moh", case) for case in CASES]
    + [(router, case) for router in ROUTERS if router != "moh" for case in ("self", "sequences choose", "causal")],
)
def test_packed_equals_the_reference(router, case):
    options = {**ROUTERS[router], **CASES[case]}
    call = call_of(
        **{k: options.pop(k) for k in ("context", "contexts", "mask", "rotary", "is_causal") if k in options}
    )
    layer, x = build(**options), torch.randn(B, N, C, requires_grad=True)
    results = []
    for executor in ("reference", "packed"):
        layer.executor = executor
        results.append(output_and_gradients(layer, x, call))
    assert_near(results[1], results[0])


@pytest.mark.parametrize("scope, operators", [("token", {"route", "attend"}), ("sample", {"route"})])
def test_tritons_operators_run(scope, operators):
    layer = build((2, 2), scope=scope, executor="packed")
    with torch.no_grad(), torch.profiler.profile() as profile:
        layer(torch.randn(B, N, C))
    libraries = [event.key.split("::") for event in profile.key_averages() if "::" in event.key]
    assert {name for library, name in libraries if library == "moh_vision_triton"} - {"pairs"} == operators


@pytest.mark.parametrize("router, scope", [("moh", "token"), ("mae", "sample")])
def test_compiled_in_one_graph(router, scope):
    layer = build(**ROUTERS[router], scope=scope, executor="packed")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(2):
        x = torch.randn(B, N, C, requires_grad=True)
        want, got = output_and_gradients(layer, x, {}), output_and_gradients(compiled, x, {})
        assert_near(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1


@pytest.mark.parametrize("kv_heads, router_kwargs", [(6, {}), (3, dict(group=2))])
def test_a_prompt_and_one_token_after_another(kv_heads, router_kwargs):
    layer = build((2, 2), router="query_norm", kv_heads=kv_heads, router_kwargs=router_kwargs)
    x = torch.randn(B, N, C)
    outputs = {}
    with torch.no_grad():
        for executor in ("reference", "packed"):
            layer.executor, cache = executor, KeyValueCache()
            parts = [layer(x[:, :4], is_causal=True, cache=cache)[0]]
            parts += [layer(x[:, n : n + 1], is_causal=True, cache=cache)[0] for n in range(4, N)]
            outputs[executor] = torch.cat(parts, 1)
    torch.testing.assert_close(outputs["packed"], outputs["reference"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scope", ["token", "sample"])
def test_dropout_double_precision_and_wide_heads_go_another_way(scope):
    layer = build((2, 2), attn_drop=0.5, executor="packed", scope=scope).train()
    assert layer(torch.randn(B, N, C))[0].isfinite().all()
    for dtype, width in ((torch.float64, D), (torch.float32, kernels.WIDEST + 8)):
        layer = build((2, 2), width=width, executor="packed", dtype=dtype, scope=scope)
        x = torch.randn(B, N, C, dtype=dtype)
        got = layer(x)[0]
        layer.executor = "reference"
        torch.testing.assert_close(got, layer(x)[0])


@pytest.mark.parametrize("scope, reentrant", [("token", True), ("sample", False)])
def test_activation_checkpointing(scope, reentrant):
    layer, x = build((2, 2), scope=scope, executor="packed"), torch.randn(B, N, C, requires_grad=True)

    def outputs(x):
        y, stats = layer(x)
        return y, stats.probs

    grads = []
    for run in (outputs, lambda x: checkpoint(outputs, x, use_reentrant=reentrant)):
        y, probs = run(x)
        layer.zero_grad()
        (y.square().sum() + probs.square().sum()).backward()
        grads.append([p.grad.clone() for p in layer.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b) and a.norm() > 0


@pytest.mark.parametrize("options", [{}, dict(scope="sample"), dict(qk_norm=True), dict(kv_heads=2, is_causal=True)])
def test_autocast(options):
    """A float32 layer in float16, which the interpreter multiplies right; bfloat16 it does not."""
    options = dict(options)
    call = call_of(is_causal=options.pop("is_causal", False))
    layer, x = build((2, 2), **options), torch.randn(B, N, C, requires_grad=True)
    results = []
    for executor in ("masked", "packed"):
        layer.executor = executor
        with torch.autocast(DEVICE, torch.float16):
            y, stats = layer(x, **call)
        assert y.dtype == torch.float16 and stats.probs.dtype == torch.float32
        results.append([y.float(), *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])])
    assert all(g.dtype == torch.float32 for g in results[1])
    largest = max(g.norm() for g in results[0][1:])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 5e-3 * (a.norm() + 0.1 * largest)


def gradients_on_a_rank(rank, wrap):
    """Of a layer on Triton's kernels with half of the batch, against all heads computed with the whole batch."""
    dist.init_process_group("gloo")
    kernels.use("triton")
    for scope in ("token", "sample"):
        torch.manual_seed(0)
        layer, x = build((2, 2), scope=scope, executor="masked"), torch.randn(2 * B, N, C)
        (layer(x)[0].square().sum() / 2).backward()  # both wrappers take the mean over ranks
        want = {name: p.grad for name, p in layer.named_parameters()}
        layer.zero_grad(set_to_none=True)
        layer.executor = "packed"
        wrapped = (
            DistributedDataParallel(layer) if wrap == "ddp" else fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        )
        wrapped(x[rank * B : rank * B + B])[0].square().sum().backward()
        for name, p in layer.named_parameters():
            grad = p.grad.full_tensor() if wrap == "fsdp2" else p.grad
            assert (grad - want[name]).norm() <= 1e-4 * want[name].norm(), name
    dist.destroy_process_group()


@pytest.mark.skipif(DEVICE == "cuda", reason="two processes share Triton's interpreter on a CPU")
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_two_processes(wrap):
    on_two_ranks(gradients_on_a_rank, wrap)
