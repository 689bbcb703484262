"""The C++ router against the same in plain PyTorch: values, gradients, ties, lists, threads, compilation."""

import pytest
import torch

from moh_vision.attention import HeadBudget, HeadMixtureAttention, kernels
from moh_vision.attention.kernels.build import load
from moh_vision.attention.kernels.eager import choose, gate_logits, select_top_k
from moh_vision.attention.kernels.route import route
from moh_vision.attention.routers import MoARouter, MoHRouter

pytestmark = pytest.mark.skipif(
    not load(), reason="the C++ operators are not built: python -m moh_vision.attention.kernels"
)

# candidates, shared, routed, kind, whether both groups are balanced
ROUTERS = {
    "released": (9, 3, 6, "released", True),
    "paper": (9, 3, 6, "paper", True),
    "one shared": (5, 1, 2, "released", True),
    "no shared": (31, 0, 7, "released", False),
    "all routed run": (9, 3, 9, "released", True),
    "all run, paper": (2, 2, 2, "paper", True),
    "not balanced": (4, 2, 1, "released", False),
    "shared only": (0, 3, 0, "released", False),
    "one head": (0, 1, 0, "paper", False),
    "one candidate": (1, 1, 1, "released", True),
    "33 candidates": (33, 4, 8, "released", True),
    "MoA": (64, 0, 8, "renormalised", False),
    "MoA, plain": (64, 0, 8, "paper", False),
    "MoA, one": (8, 0, 1, "renormalised", False),
    "200 candidates": (200, 0, 5, "renormalised", False),
}


@pytest.fixture(autouse=True)
def cpp():
    kernels.use("cpp")
    yield
    kernels.use(None)


def make(name, shape=(2, 37, 50), dtype=torch.float32, seed=0):
    """Tokens and weight whose products are exact in float32, so that both paths choose from the same logits."""
    candidates, shared, _, _, balance = ROUTERS[name]
    rows = candidates + (shared if shared > 1 else 0) + 2 * balance
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, shape, generator=g) / 4
    weight = torch.randint(-8, 9, (rows, shape[-1]), generator=g) / 16
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def plain(x, weight, name, padding=None):
    return choose(gate_logits(x, weight), *ROUTERS[name], padding)


def flat(routing):
    return routing.weights, routing.stats.probs, routing.stats.logits


def compare(x, weight, name, padding=None, tolerance=1e-5, exact_dtype=None):
    """Both paths on the same arguments, forward and backward; `exact_dtype`: of the plain one."""
    ours = route(x, weight, *ROUTERS[name], padding)
    assert ours.pairs is not None
    x2, weight2 = (t.detach().to(exact_dtype or t.dtype).requires_grad_() for t in (x, weight))
    want = plain(x2, weight2, name, padding)
    assert torch.equal(ours.active, want.active) and torch.equal(ours.stats.counts, want.stats.counts.float())
    assert not ours.stats.counts.requires_grad
    close = dict(rtol=tolerance, atol=tolerance, check_dtype=False)
    for a, b in zip(flat(ours), flat(want)):
        torch.testing.assert_close(a, b, **close)
    if weight.numel() == 0:
        return
    for chosen in ((0,), (1,), (2,), (0, 1, 2)):  # gradients through each alone, and through all
        loss, loss2 = 0.0, 0.0
        for i in chosen:
            slope = torch.randn(flat(ours)[i].shape)
            loss = loss + (flat(ours)[i] * slope).sum()
            loss2 = loss2 + (flat(want)[i] * slope).sum()
        if not loss2.requires_grad:
            continue
        grads = torch.autograd.grad(loss, (x, weight), retain_graph=True)
        grads2 = torch.autograd.grad(loss2, (x2, weight2), retain_graph=True)
        for a, b, like in zip(grads, grads2, (x, weight)):
            assert a.dtype == like.dtype
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item(), check_dtype=False)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_both_paths_are_equal(name, padded):
    x, weight = make(name)
    padding = torch.rand(2, 37, generator=torch.Generator().manual_seed(1)) < 0.3 if padded else None
    compare(x, weight, name, padding)


@pytest.mark.parametrize("name", ["released", "paper", "MoA", "not balanced"])
def test_against_float64(name):
    x, weight = make(name)
    compare(x, weight, name, exact_dtype=torch.float64)


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 5, 16), (3, 48, 33), (2, 49, 64), (5, 97, 7), (1, 300, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_types(shape, dtype):
    compare(*make("released", shape, dtype), "released", tolerance=1e-5 if dtype == torch.float32 else 1e-2)


def test_16_bit_tokens_with_a_float32_weight():
    x, weight = make("released", dtype=torch.bfloat16)
    compare(x, weight.detach().float().requires_grad_(), "released", tolerance=1e-2)


def test_tokens_that_do_not_lie_side_by_side():
    x, weight = make("released", (2, 80, 100))
    compare(x[:, 1:], weight, "released")
    compare(x[:, ::2, :], weight, "released")
    compare(x[..., ::2], weight[:, ::2], "released")
    compare(x.transpose(0, 1), weight, "released")
    compare(x[:, :1].expand(2, 7, 100), weight, "released")


@pytest.mark.parametrize("name", ["released", "MoA", "33 candidates"])
def test_equal_logits_rank_the_lowest_index_first(name):
    candidates, shared, routed = ROUTERS[name][:3]
    x, weight = make(name)
    active = route(x, torch.zeros_like(weight), *ROUTERS[name]).active
    assert active[..., : shared + routed].all() and not active[..., shared + routed :].any()
    with torch.no_grad():
        weight[1:candidates:2] = weight[0]  # every other candidate equals the first
    compare(x, weight, name)


def test_with_equal_logits_and_all_heads_every_gate_is_one():
    x, weight = make("all routed run")
    assert (route(x, torch.zeros_like(weight), *ROUTERS["all routed run"]).weights == 1).all()


@pytest.mark.parametrize("name", ["released", "MoA", "one shared"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_spoils_itself_only(name, bad):
    candidates, shared, routed, _, _ = ROUTERS[name]
    x, weight = make(name)
    with torch.no_grad():
        x[0, 3, 5] = bad
    ours, want = route(x, weight, *ROUTERS[name]), plain(x, weight, name)
    assert (ours.active.sum(-1) == shared + routed).all() and torch.equal(ours.active, want.active)
    assert (ours.weights[~ours.active] == 0).all()  # plain PyTorch writes NaN here too
    for a, b in zip((ours.weights[ours.active], *flat(ours)[1:]), (want.weights[want.active], *flat(want)[1:])):
        torch.testing.assert_close(a, b, equal_nan=True)
    assert ours.weights.isnan().any(-1).sum() == 1


def test_logits_far_apart():
    x, weight = make("released")
    with torch.no_grad():
        weight *= 1000
    routing = route(x, weight, *ROUTERS["released"])
    gates = routing.weights.detach()
    assert gates.isfinite().all() and ((gates == 0) | (gates >= 1e-30)).all()
    torch.testing.assert_close(gates, plain(x, weight, "released").weights)


def sorted_pairs(active):
    B, N, H = active.shape
    token = [b * N + n for h in range(H) for b in range(B) for n in range(N) if active[b, n, h]]
    sizes = active.permute(2, 0, 1).sum(-1).flatten().tolist()
    return token, [sum(sizes[:i]) for i in range(H * B + 1)]


@pytest.mark.parametrize("path", ["cpp", "torch"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 17, 5), (2, 40, 70), (0, 4, 3), (2, 0, 3)])
def test_pairs_are_sorted_by_head_sequence_and_token(path, shape):
    kernels.use(path)
    active = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.4
    if shape[0] > 1 and shape[1]:
        active[1, :, 0] = False  # a head that no token of a sequence runs
        active[0, :, 1] = True
    for a in (active, active.transpose(1, 2).contiguous().transpose(1, 2)):
        token, offsets = kernels.list_pairs(a)
        assert token.dtype == offsets.dtype == torch.int32
        assert (token.tolist(), offsets.tolist()) == sorted_pairs(active)


def test_the_router_lists_its_pairs():
    x, weight = make("released")
    routing = route(x, weight, *ROUTERS["released"])
    token, offsets = routing.pairs
    assert (token.tolist(), offsets.tolist()) == sorted_pairs(routing.active)


def test_long_lists_are_made_by_several_threads():
    active = torch.rand(5, 1500, 12) < 0.5
    want = kernels.list_pairs(active)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert all(map(torch.equal, kernels.list_pairs(active), want))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["released", "MoA"])
def test_any_number_of_threads_gives_the_same_bits(name, dtype):
    x, weight = make(name, (3, 97, 70), dtype)
    with torch.no_grad():
        x.normal_()
    threads, answers = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            out = flat(route(x, weight, *ROUTERS[name]))
            answers.append((*out, *torch.autograd.grad(sum(t.square().sum() for t in out), (x, weight))))
    finally:
        torch.set_num_threads(threads)
    for other in answers[1:]:
        assert all(map(torch.equal, answers[0], other))


@pytest.mark.parametrize("name", ["released", "MoA"])
def test_opcheck(name):
    x, weight = make(name)
    padding = torch.rand(2, 37) < 0.3
    torch.library.opcheck(torch.ops.moh_vision.route.default, (x, weight, *ROUTERS[name][:4], padding))
    torch.library.opcheck(torch.ops.moh_vision.pairs.default, (torch.rand(2, 5, 3) < 0.5,))


@pytest.mark.parametrize("name", ["released", "paper", "not balanced", "MoA"])
def test_second_derivatives_are_those_of_pytorch(name):
    results = []
    for path in ("cpp", "torch"):
        kernels.use(path)
        x, weight = make(name)
        routing = route(x, weight, *ROUTERS[name])
        loss = routing.weights.square().sum() + routing.stats.probs.square().sum()
        first = torch.autograd.grad(loss, (x, weight), create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight)))
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= 1e-4 * want.norm()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((9, 3, 6, "loud"), "kind"),
        ((9, 3, 10, "released"), "10 routed"),
        ((9, 2, 6, "released"), "a weight of 14 rows"),
        ((9, 3, 6, "renormalised"), "renormalised"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    x, weight = make("released")
    with pytest.raises(ValueError, match=message):
        route(x, weight, *arguments)


def both(router, x):
    """The router's answer on both paths."""
    kernels.use("torch")
    want = router(x)
    kernels.use("cpp")
    return router(x), want


def test_routers_take_the_operator():
    for router in (MoHRouter(16, HeadBudget(8, 2, 2, 3)), MoARouter(16, HeadBudget(8, 2, 0, 3))):
        ours, want = both(router, torch.randn(2, 9, 16))
        assert ours.pairs is not None and want.pairs is None
        torch.testing.assert_close(ours.weights, want.weights)


def test_what_must_be_called_is_called_and_float64_stays():
    router, calls = MoHRouter(16, HeadBudget(8, 2, 2, 3)), []
    router.routed.register_forward_hook(lambda *_: calls.append(1))
    assert router(torch.randn(2, 9, 16)).pairs is None and calls == [1]
    noisy = MoARouter(16, HeadBudget(8, 2, 0, 3), noisy=True)
    assert noisy(torch.randn(2, 9, 16)).pairs is None
    assert noisy.eval()(torch.randn(2, 9, 16)).pairs is not None
    assert noisy.double()(torch.randn(2, 9, 16).double()).weights.dtype == torch.float64


def test_autocast_does_not_reach_the_router():
    x, router = torch.randn(2, 9, 16), MoHRouter(16, HeadBudget(8, 2, 2, 3))
    with torch.autocast("cpu", torch.bfloat16):
        inside = router(x)
    assert inside.weights.dtype == torch.float32 and torch.equal(inside.weights, router(x).weights)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="is_exporting() is True under torch.compile: plain PyTorch")
def test_a_compiled_router_calls_the_operator_and_compiles_once():
    router = MoHRouter(16, HeadBudget(8, 2, 2, 3))
    seen = []

    def backend(graph, inputs):
        seen.append([node.target for node in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(router, fullgraph=True, backend=backend)
    for _ in range(3):
        x = torch.randn(2, 9, 16)
        torch.testing.assert_close(compiled(x).weights, router(x).weights, rtol=0, atol=0)
    assert len(seen) == 1 and any("route" in str(target) for target in seen[0])


def test_a_compiled_layer_trains():
    layer = HeadMixtureAttention(32, HeadBudget(4, 8, 1, 1), executor="masked")
    x = torch.randn(2, 9, 32)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        grads = []
        for f in (layer, compiled):
            layer.zero_grad()
            y, stats = f(x)
            (y.square().sum() + (stats.probs * stats.counts.mean()).sum() + stats.logits.square().sum()).backward()
            grads.append([p.grad.clone() for p in layer.parameters()])
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("path", ["cpp", "torch"])
def test_top_k_counts_nan_as_the_smallest(path):
    scores = torch.tensor([float("nan"), 1.0, float("-inf"), 2.0]).view(4, 1, 1)
    assert [select_top_k(scores, k).flatten().tolist() for k in (1, 2, 3)] == [
        [False, False, False, True],
        [False, True, False, True],
        [True, True, False, True],
    ]
