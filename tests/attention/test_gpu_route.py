"""The Triton router against the same in plain PyTorch: values, gradients, ties, lists, compilation.

On a machine without a GPU the kernels run in Triton's interpreter.
"""

import pytest
import torch

pytest.importorskip("triton")

from moh_vision.attention import HeadBudget, kernels
from moh_vision.attention.kernels import build, eager
from moh_vision.attention.kernels.eager import choose, gate_logits
from moh_vision.attention.kernels.gpu.library import OPS
from moh_vision.attention.kernels.route import route
from moh_vision.attention.routers import MoARouter, MoHRouter

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter: NaN and infinity

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# candidates, shared, routed, kind, whether both groups are balanced
ROUTERS = {
    "released": (9, 3, 6, "released", True),
    "paper": (9, 3, 6, "paper", True),
    "one shared": (5, 1, 2, "released", True),
    "one shared, paper": (5, 1, 2, "paper", True),
    "no shared": (31, 0, 7, "released", False),
    "no shared, all run": (4, 0, 4, "released", False),
    "all run": (9, 3, 9, "released", True),
    "all run, paper": (2, 2, 2, "paper", True),
    "one shared, all run": (3, 1, 3, "released", True),
    "not balanced": (4, 2, 1, "released", False),
    "not balanced, paper": (4, 2, 1, "paper", False),
    "shared only": (0, 3, 0, "released", False),
    "one head": (0, 1, 0, "paper", False),
    "one candidate": (1, 1, 1, "released", True),
    "33 candidates": (33, 4, 8, "released", True),
    "MoA": (64, 0, 8, "renormalised", False),
    "MoA, plain": (64, 0, 8, "paper", False),
    "MoA, one": (8, 0, 1, "renormalised", False),
    "MoA, all": (8, 0, 8, "renormalised", False),
    "200 candidates": (200, 0, 5, "renormalised", False),
}


@pytest.fixture(autouse=True)
def triton():
    kernels.use("triton")
    yield
    kernels.use(None)


def make(name, shape=(2, 37, 20), dtype=torch.float32):
    """Tokens and weight whose products are exact in float32, so that both paths choose from the same logits."""
    candidates, shared, _, _, balance = ROUTERS[name]
    rows = candidates + (shared if shared > 1 else 0) + 2 * balance
    x = torch.randint(-4, 5, shape) / 4
    weight = torch.randint(-8, 9, (rows, shape[-1])) / 16
    return x.to(DEVICE, dtype).requires_grad_(), weight.to(DEVICE, dtype).requires_grad_()


def some_padding(B, N):
    return (torch.rand(B, N) < 0.3).to(DEVICE)


def flat(routing):
    return routing.weights, routing.stats.probs, routing.stats.logits


def compare(x, weight, name, padding=None, tolerance=1e-5, through=((0, 1, 2),)):
    """The kernels and PyTorch in float64 on the same arguments; gradients come through sets of `flat`."""
    ours = route(x, weight, *ROUTERS[name], padding)
    assert ours.pairs is not None
    x2, weight2 = (t.detach().double().requires_grad_() for t in (x, weight))
    want = choose(gate_logits(x2, weight2), *ROUTERS[name], padding)
    assert torch.equal(ours.active, want.active) and torch.equal(ours.stats.counts, want.stats.counts.float())
    assert not ours.stats.counts.requires_grad
    assert all(map(torch.equal, ours.pairs, eager.pairs(want.active)))
    for a, b in zip(flat(ours), flat(want)):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, check_dtype=False)
    for chosen in through:
        loss, loss2 = 0.0, 0.0
        for i in chosen:
            slope = torch.randn(flat(ours)[i].shape, device=DEVICE)
            loss = loss + (flat(ours)[i] * slope).sum()
            loss2 = loss2 + (flat(want)[i] * slope).sum()
        if not loss2.requires_grad or weight.numel() == 0:
            continue
        grads = torch.autograd.grad(loss, (x, weight), retain_graph=True)
        grads2 = torch.autograd.grad(loss2, (x2, weight2), retain_graph=True)
        for a, b, like in zip(grads, grads2, (x, weight)):
            assert a.dtype == like.dtype and a.shape == like.shape
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item(), check_dtype=False)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_equal_to_pytorch_in_float64(name, padded):
    padding, through = (some_padding(2, 37), ((0, 1, 2),)) if padded else (None, ((0,), (1,), (2,)))
    compare(*make(name), name, padding, through=through)


@pytest.mark.parametrize("shape", [(1, 1, 8), (5, 1, 16), (3, 32, 33), (1, 65, 64), (1, 7, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_types(shape, dtype):
    compare(*make("released", shape, dtype), "released", tolerance=1e-5 if dtype == torch.float32 else 1e-2)


def test_16_bit_tokens_with_a_float32_weight():
    x, weight = make("released", dtype=torch.bfloat16)
    compare(x, weight.detach().float().requires_grad_(), "released", tolerance=1e-2)


def test_16_bit_tokens_are_not_rounded_further():
    """Logits of 16-bit tokens are those of float32: what a product in 16 bits returns would be farther off."""
    x, weight = torch.randn(1, 20, 300).bfloat16().to(DEVICE), torch.randn(14, 300).bfloat16().to(DEVICE)
    want = x.double() @ weight.double().t()
    for w in (weight, weight.float()):
        torch.testing.assert_close(
            route(x, w, *ROUTERS["released"]).stats.logits.double(), want[..., :9], rtol=1e-5, atol=1e-4
        )


def test_no_tokens():
    for shape in ((0, 5, 16), (2, 0, 16)):
        x, weight = make("released", shape)
        routing = route(x, weight, *ROUTERS["released"])
        assert routing.weights.shape == (*shape[:2], 12) and not routing.stats.counts.any()
        assert routing.pairs.token.shape == (0,) and not routing.pairs.offsets.any()
        routing.weights.sum().backward()
        assert not weight.grad.any()


def test_tokens_that_do_not_lie_side_by_side():
    x, weight = make("released", (2, 40, 60))
    compare(x[:, 1:], weight, "released")
    compare(x[:, ::2, :], weight, "released")
    compare(x[..., ::2], weight[:, ::2], "released")
    compare(x.transpose(0, 1)[:5], weight, "released")
    compare(x[:, :1].expand(2, 7, 60), weight, "released")


@pytest.mark.parametrize("name", ["released", "MoA", "33 candidates"])
def test_equal_logits_rank_the_lowest_index_first(name):
    candidates, shared, routed = ROUTERS[name][:3]
    x, weight = make(name)
    active = route(x, torch.zeros_like(weight), *ROUTERS[name]).active
    assert active[..., : shared + routed].all() and not active[..., shared + routed :].any()
    with torch.no_grad():
        weight[1:candidates:2] = weight[0]  # every other candidate equals the first
    compare(x, weight, name)


@pytest.mark.parametrize("name", ["all run", "one shared, all run", "no shared, all run", "MoA, one"])
def test_gates_that_are_one_are_exactly_one(name):
    x, weight = make(name)
    routing = route(x, torch.zeros_like(weight), *ROUTERS[name])
    assert (routing.weights[routing.active] == 1).all()


@pytest.mark.parametrize("name", ["released", "MoA", "one shared"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_token_spoils_itself_only(name, bad):
    candidates, shared, routed, _, _ = ROUTERS[name]
    x, weight = make(name)
    with torch.no_grad():
        x[0, 3, 5] = bad
    ours = route(x, weight, *ROUTERS[name])
    want = choose(gate_logits(x, weight), *ROUTERS[name])
    assert (ours.active.sum(-1) == shared + routed).all() and torch.equal(ours.active, want.active)
    assert (ours.weights[~ours.active] == 0).all()  # plain PyTorch writes NaN here too
    for a, b in zip((ours.weights[ours.active], *flat(ours)[1:]), (want.weights[want.active], *flat(want)[1:])):
        torch.testing.assert_close(a, b, equal_nan=True)
    assert ours.weights.isnan().any(-1).sum() == 1


def test_nan_and_infinite_logits_rank_as_in_pytorch():
    values = torch.tensor([float("nan"), float("-inf"), float("inf"), -1.0, 0.0, -0.0, 3.0])
    x = torch.ones(1, 1, 1, device=DEVICE)
    for _ in range(10):
        weight = values[torch.randint(len(values), (8, 1))].to(DEVICE)
        for router in ((8, 0, 3, "paper"), (8, 0, 7, "renormalised")):
            assert torch.equal(route(x, weight, *router).active, choose(gate_logits(x, weight), *router).active)


def test_small_gates_are_zero():
    x, weight = make("released")
    with torch.no_grad():
        weight *= 1000
    gates = route(x, weight, *ROUTERS["released"]).weights.detach()
    assert gates.isfinite().all() and ((gates == 0) | (gates >= 1e-30)).all()
    torch.testing.assert_close(gates, choose(gate_logits(x, weight), *ROUTERS["released"]).weights)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 17, 5), (2, 40, 70), (1, 64, 16), (2, 33, 3), (0, 4, 3), (2, 0, 3)])
def test_pairs_are_sorted_by_head_sequence_and_token(shape):
    active = torch.rand(shape, device=DEVICE) < 0.4
    if shape[0] > 1 and shape[1]:
        active[1, :, 0] = False  # a head that no token of a sequence runs
        active[0, :, 1] = True
    want = eager.pairs(active)
    for a in (active, active.transpose(1, 2).contiguous().transpose(1, 2)):
        token, offsets = OPS.pairs(a)
        assert token.dtype == offsets.dtype == torch.int32 and token.shape == (active.numel(),)
        assert torch.equal(offsets, want[1]) and torch.equal(token[: len(want[0])], want[0])


@pytest.mark.parametrize("name", ["released", "MoA", "one shared"])
def test_twice_the_same_bits(name):
    x, weight = make(name)
    with torch.no_grad():
        x.normal_()
    answers = []
    for _ in range(2):
        routing = route(x, weight, *ROUTERS[name])
        loss = sum(t.square().sum() for t in flat(routing))
        answers.append((*flat(routing), *routing.pairs, *torch.autograd.grad(loss, (x, weight))))
    assert all(map(torch.equal, *answers))


@pytest.mark.parametrize("name", ["released", "MoA"])
def test_opcheck(name):
    x, weight = make(name, (2, 9, 20))
    torch.library.opcheck(OPS.route.default, (x, weight, *ROUTERS[name][:4], some_padding(2, 9)))


def test_opcheck_pairs():
    active = torch.zeros(2, 5, 3, dtype=torch.bool, device=DEVICE)
    active[:] = True  # else a tail is undefined, and opcheck compares all
    torch.library.opcheck(OPS.pairs.default, (active,))


@pytest.mark.parametrize("name", ["released", "MoA", "paper"])
def test_second_derivatives_equal_pytorch(name):
    x, weight = make(name, (1, 3, 16))
    results = []
    for run, dtype in ((route, torch.float32), (lambda x, w, *how: choose(gate_logits(x, w), *how), torch.float64)):
        inputs = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
        loss = sum(t.square().sum() for t in flat(run(*inputs, *ROUTERS[name])))
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(grad.square().sum() for grad in first), inputs))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item(), check_dtype=False)


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


def test_routers_take_the_operator(monkeypatch):
    for router in (MoHRouter(16, HeadBudget(8, 2, 2, 3)), MoARouter(16, HeadBudget(8, 2, 0, 3))):
        router, x = router.to(DEVICE), torch.randn(2, 9, 16, device=DEVICE)
        ours = router(x)
        with monkeypatch.context() as patch:
            patch.setattr(build, "_used", "torch")
            want = router(x)
        assert ours.pairs is not None and want.pairs is None
        torch.testing.assert_close(ours.weights, want.weights)
        assert router.double()(x.double()).weights.dtype == torch.float64


def test_autocast_does_not_reach_the_router():
    x, router = torch.randn(2, 9, 16, device=DEVICE), MoHRouter(16, HeadBudget(8, 2, 2, 3)).to(DEVICE)
    grads = []
    for enabled in (False, True):
        router.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            gates = router(x).weights
            gates.square().sum().backward()
        grads.append((gates, *[p.grad for p in router.parameters()]))
    assert grads[0][0].dtype == torch.float32 and all(map(torch.equal, *grads))


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="is_exporting() is True under torch.compile: plain PyTorch")
def test_a_compiled_router_trains():
    router = MoHRouter(16, HeadBudget(8, 2, 2, 3)).to(DEVICE)
    x = torch.randn(2, 9, 16, device=DEVICE)
    compiled, seen = torch.compile(router, fullgraph=True, backend="aot_eager"), []
    for f in (router, compiled):
        router.zero_grad()
        routing = f(x)
        loss = routing.weights.square().sum() + (routing.stats.probs * routing.stats.counts.mean()).sum()
        (loss + routing.stats.logits.square().sum()).backward()
        seen.append((*flat(routing), *routing.pairs, *[p.grad.clone() for p in router.parameters()]))
    for a, b in zip(*seen):
        torch.testing.assert_close(a, b)


def test_what_cannot_call_an_operator_does_not():
    x, weight = (t.detach() for t in make("released", (2, 9, 16)))

    def gates(x):
        return route(x, weight, *ROUTERS["released"]).weights

    traced = torch.jit.trace(gates, x)
    assert "moh_vision_triton" not in str(traced.graph)
    for f in (traced, torch.func.vmap(lambda x: gates(x[None])[0])):
        torch.testing.assert_close(f(x), gates(x))
    router = MoHRouter(16, HeadBudget(8, 2, 2, 3)).to(DEVICE)
    assert "moh_vision_triton" not in str(torch.export.export(router, (x,)).graph)


def test_switched_off(monkeypatch):
    kernels.use("torch")
    x, weight = make("released")
    assert route(x, weight, *ROUTERS["released"]).pairs is None
