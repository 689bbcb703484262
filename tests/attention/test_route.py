"""`route` on every back end against plain PyTorch in float64: values, gradients, ties, lists, threads."""

import itertools
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from moh_vision.attention import HeadBudget, HeadMixtureAttention, kernels
from moh_vision.attention.kernels import eager
from moh_vision.attention.kernels.eager import choose, gate_logits, select_top_k
from moh_vision.attention.kernels.route import (
    PROJECT_AND_ROUTE,
    LinearRouter,
    ProductAttention,
    project_and_route,
    route,
)
from moh_vision.attention.linear import product_dtype
from moh_vision.attention.routers import MoARouter, MoHRouter
from moh_vision.attention.routing import Call
from tests.support.attend_backends import CPP, EAGER, TRITON, on, threads
from tests.support.covering import covering
from tests.support.refusals import refuse

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # numpy's, of the interpreter: NaN and infinity

# candidates, shared, routed, gate_form, whether both groups are balanced
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
# Which of `differentiable` a gradient comes through.
SEPARATE = (0,), (1,), (2,)
TOGETHER = ((0, 1, 2),)
EVERY = CPP, TRITON, EAGER
on_every = on(*EVERY)
on_compiled = on(CPP, TRITON)  # one operator: they differ from plain PyTorch in what a test says


def make(backend, name, shape=(2, 37, 50), dtype=torch.float32):
    """Tokens and weight whose products are exact in float32, so that every back end chooses from the same logits."""
    candidates, shared, _, _, balance = ROUTERS[name]
    rows = candidates + (shared if shared > 1 else 0) + 2 * balance
    x = torch.randint(-4, 5, shape) / 4
    weight = torch.randint(-8, 9, (rows, shape[-1])) / 16
    return x.to(backend.device, dtype).requires_grad_(), weight.to(
        backend.device, dtype
    ).requires_grad_()


def some_padding(B, N, backend):
    return (torch.rand(B, N) < 0.3).to(backend.device)


def oracle(x, weight, name, padding=None):
    return choose(gate_logits(x, weight), *ROUTERS[name], padding)


def list_of(backend, routing):
    """The list of pairs, which on a GPU is made by whoever reads it."""
    if backend == TRITON:
        return backend.operators.pairs(routing.active, routing.count)
    return routing.pairs


def differentiable(routing):
    return routing.weights, routing.stats.probs, routing.stats.logits


def compare(backend, x, weight, name, padding=None, tolerance=1e-5, through=TOGETHER):
    """The back end and the oracle in float64 on the same arguments; gradients come through sets of `differentiable`."""
    ours = route(x, LinearRouter(weight, *ROUTERS[name]), padding)
    x2, weight2 = (t.detach().double().requires_grad_() for t in (x, weight))
    want = oracle(x2, weight2, name, padding)
    assert torch.equal(ours.active, want.active) and torch.equal(
        ours.stats.counts, want.stats.counts.float()
    )
    assert not ours.stats.counts.requires_grad
    assert (ours.pairs is not None) == (backend == CPP)
    if backend != EAGER:
        assert all(map(torch.equal, list_of(backend, ours), eager.pairs(want.active)))
    near = partial(torch.testing.assert_close, rtol=tolerance, check_dtype=False)
    for got, expected in zip(differentiable(ours), differentiable(want), strict=True):
        assert got.dtype == torch.float32
        near(got, expected, atol=tolerance)
    for chosen in through:
        slopes = [torch.randn_like(differentiable(ours)[i]) for i in chosen]
        losses = [
            sum((differentiable(r)[i] * s).sum() for i, s in zip(chosen, slopes))
            for r in (ours, want)
        ]
        if not losses[1].requires_grad or weight.numel() == 0:
            continue
        grads = torch.autograd.grad(losses[0], (x, weight), retain_graph=True)
        exact = torch.autograd.grad(losses[1], (x2, weight2), retain_graph=True)
        for got, expected, like in zip(grads, exact, (x, weight), strict=True):
            assert got.dtype == like.dtype and got.shape == like.shape
            near(
                got,
                expected,
                atol=tolerance * (expected.abs().max().item() if expected.numel() else 0),
            )


@pytest.mark.parametrize(
    "backend, name, padded",
    covering(itertools.product(EVERY, ROUTERS, [False, True])),
    ids=str,
    indirect=["backend"],
)
def test_every_router(backend, name, padded):
    padding = some_padding(2, 37, backend) if padded else None
    compare(backend, *make(backend, name), name, padding, through=SEPARATE + TOGETHER)


SHAPES = [
    (2, 0, 8),
    (1, 1, 8),
    (1, 5, 16),
    (5, 1, 16),
    (3, 32, 33),
    (3, 48, 33),
    (2, 49, 64),
    (1, 65, 64),
    (3, 97, 7),
    (1, 7, 130),
    (1, 300, 130),
]


@pytest.mark.parametrize(
    "backend, shape, dtype",
    covering(itertools.product(EVERY, SHAPES, [torch.float32, torch.bfloat16, torch.float16])),
    ids=str,
    indirect=["backend"],
)
def test_shapes_and_types(backend, shape, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    compare(backend, *make(backend, "released", shape, dtype), "released", tolerance=tolerance)


@on_every
def test_the_gate_of_a_single_head_trains_nothing(backend):
    """Its renormalised gate is 1: the gradient of its logit is 0 to the bit, or Adam would make steps of the rounding."""
    x, weight = make(backend, "not balanced")
    weights = route(x, LinearRouter(weight, *ROUTERS["not balanced"])).weights
    slopes = torch.randn_like(weights)
    (gradient,) = torch.autograd.grad((weights * slopes).sum(), weight)
    candidates = ROUTERS["not balanced"][0]
    assert not gradient[:candidates].any() and gradient[candidates:].any()


@on_every
def test_16_bit_tokens_are_not_rounded_further(backend):
    """Logits of 16-bit tokens are those of float32: what a product in 16 bits returns would be farther off."""
    x, weight = make(backend, "released", dtype=torch.bfloat16)
    compare(backend, x, weight.detach().float().requires_grad_(), "released", tolerance=1e-2)
    x, weight = (
        torch.randn(shape).bfloat16().to(backend.device) for shape in ((1, 20, 300), (14, 300))
    )
    want = (x.double() @ weight.double().t())[..., :9]
    for w in (weight, weight.float()):
        logits = route(x, LinearRouter(w, *ROUTERS["released"])).stats.logits
        torch.testing.assert_close(logits.double(), want, rtol=1e-5, atol=1e-4)


@on_every
def test_tokens_that_do_not_lie_side_by_side(backend):
    x, weight = make(backend, "released", (2, 40, 60))
    for tokens in (x[:, 1:], x[:, ::2, :], x.transpose(0, 1)[:5], x[:, :1].expand(2, 7, 60)):
        compare(backend, tokens, weight, "released")
    compare(backend, x[..., ::2], weight[:, ::2], "released")


@on_every
@pytest.mark.parametrize("name", ["released", "MoA", "33 candidates"])
def test_equal_logits_rank_the_lowest_index_first(backend, name):
    candidates, shared, routed = ROUTERS[name][:3]
    x, weight = make(backend, name)
    active = route(x, LinearRouter(torch.zeros_like(weight), *ROUTERS[name])).active
    assert active[..., : shared + routed].all() and not active[..., shared + routed :].any()
    with torch.no_grad():
        weight[1:candidates:2] = weight[0]  # every other candidate equals the first
    compare(backend, x, weight, name)


ONES = [
    "all run",
    "one head",
    "one shared, all run",
    "no shared, all run",
    "shared only",
    "MoA, one",
]


@on_every
@pytest.mark.parametrize("name", ONES)
def test_gates_that_are_one_are_exactly_one(backend, name):
    x, weight = make(backend, name)
    routing = route(x, LinearRouter(torch.zeros_like(weight), *ROUTERS[name]))
    assert (routing.weights[routing.active] == 1).all()


@on_compiled
@pytest.mark.parametrize("name", ["released", "MoA", "one shared"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_token_spoils_itself_only(backend, name, bad):
    _, shared, routed, _, _ = ROUTERS[name]
    x, weight = make(backend, name)
    with torch.no_grad():
        x[0, 3, 5] = bad
    ours = route(x, LinearRouter(weight, *ROUTERS[name]))
    want = oracle(x, weight, name)
    assert (ours.active.sum(-1) == shared + routed).all() and torch.equal(ours.active, want.active)
    assert (ours.weights[~ours.active] == 0).all()  # plain PyTorch writes NaN here too
    torch.testing.assert_close(ours.weights[ours.active], want.weights[want.active], equal_nan=True)
    torch.testing.assert_close(differentiable(ours)[1:], differentiable(want)[1:], equal_nan=True)
    assert ours.weights.isnan().any(-1).sum() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "experts, k", [(1, 1), (4, 0), (4, 4), (5, 2), (12, 7), (32, 8), (33, 8), (64, 8)]
)
def test_top_k_is_that_of_a_stable_sort(experts, k, dtype):
    """NaN counts as the smallest."""
    scores = torch.rand(experts, 7, 11, dtype=dtype)
    scores[:, 1:3] = scores[:, 1:3].mul(3).round()  # ties
    scores[:, 4] = 0
    scores[::3, 5] = float("nan")
    order = scores.nan_to_num(-1).argsort(dim=0, descending=True, stable=True)[:k]
    want = torch.zeros(scores.shape, dtype=torch.bool).scatter(0, order, True)
    assert torch.equal(select_top_k(scores, k), want)


@on_compiled
def test_small_gates_are_zero(backend):
    x, weight = make(backend, "released")
    with torch.no_grad():
        weight *= 1000
    gates = route(x, LinearRouter(weight, *ROUTERS["released"])).weights.detach()
    assert gates.isfinite().all() and ((gates == 0) | (gates >= 1e-30)).all()
    torch.testing.assert_close(gates, oracle(x, weight, "released").weights)


LISTS = [
    (1, 1, 1),
    (3, 17, 5),
    (2, 40, 70),
    (1, 64, 16),
    (2, 33, 3),
    (0, 4, 3),
    (2, 0, 3),
    (3, 500, 12),
]


@on_every
@pytest.mark.parametrize("shape", LISTS, ids=str)
def test_pairs_are_sorted_by_head_sequence_and_token(backend, shape):
    """Several threads make a long list."""
    active = torch.rand(shape) < 0.4
    if shape[0] > 1 and shape[1]:
        active[1, :, 0] = False  # a head that no token of a sequence runs
        active[0, :, 1] = True
    h, b, n = active.permute(2, 0, 1).nonzero().T
    token = b * shape[1] + n
    segment = h * shape[0] + b
    want = token.tolist(), [int((segment < s).sum()) for s in range(shape[2] * shape[0] + 1)]
    active = active.to(backend.device)
    for same in (active, active.transpose(1, 2).contiguous().transpose(1, 2)):
        with threads(3):
            token, offsets = (
                backend.operators.pairs(same, None)
                if backend == TRITON
                else kernels.list_pairs(same)
            )
        assert token.dtype == offsets.dtype == torch.int32
        if backend == TRITON:  # what lies beyond the last pair is undefined
            assert token.shape == (active.numel(),)
            token = token[: len(want[0])]
        assert (token.tolist(), offsets.tolist()) == want


@on(TRITON)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 128, 5), (3, 129, 17), (1, 400, 70)], ids=str)
def test_pairs_of_a_known_number(backend, shape):
    """The list is as long as what runs, also where it is made in several blocks."""
    B, N, H = shape
    count = (H + 1) // 2
    active = (torch.rand(shape).argsort(-1).argsort(-1) < count).to(backend.device)
    token, offsets = backend.operators.pairs(active, count)
    assert token.shape == (B * N * count,)
    assert all(map(torch.equal, (token, offsets), eager.pairs(active)))


@on_compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["released", "MoA", "one shared"])
def test_the_same_bits_every_time_and_in_cpp_with_any_number_of_threads(backend, name, dtype):
    x, weight = make(backend, name, (3, 97, 70) if backend == CPP else (2, 37, 20), dtype)
    with torch.no_grad():
        x.normal_()
    answers = []
    for count in (1, 2, 3) if backend == CPP else (1, 1):
        with threads(count):
            routing = route(x, LinearRouter(weight, *ROUTERS[name]))
            loss = sum(t.square().sum() for t in differentiable(routing))
            grads = torch.autograd.grad(loss, (x, weight))
            answers.append((*differentiable(routing), *list_of(backend, routing), *grads))
    for other in answers[1:]:
        assert all(map(torch.equal, answers[0], other))


@on_compiled
def test_opcheck(backend):
    for name in ("released", "MoA"):
        x, weight = make(backend, name, (2, 9, 20))
        arguments = x, weight, *ROUTERS[name][:4], some_padding(2, 9, backend)
        if backend == TRITON:
            arguments = *arguments, None, None
        torch.library.opcheck(backend.operators.route.default, arguments)
    active = torch.rand(2, 5, 3, device=backend.device) < 0.5
    if backend == TRITON:
        active[:] = True  # else a tail is undefined, and opcheck compares all
    arguments = (active, None) if backend == TRITON else (active,)
    torch.library.opcheck(backend.operators.pairs.default, arguments)


@on_compiled
def test_wrong_arguments_are_refused(backend):
    x, weight = make(backend, "released")
    for arguments, words in (
        ((9, 3, 6, "loud"), "kind"),
        ((9, 3, 10, "released"), "10 routed"),
        ((9, 2, 6, "released"), "weight 14 rows"),
        ((9, 3, 6, "renormalised"), "renormalised"),
    ):
        refuse(words, route, x, LinearRouter(weight, *arguments))


def small_moh(backend):
    return MoHRouter(16, HeadBudget(8, 2, 2, 3)).to(backend.device)


def small_moa(backend, noisy=False):
    return MoARouter(16, HeadBudget(8, 2, 0, 3), noisy=noisy).to(backend.device)


@on_compiled
@pytest.mark.parametrize("make_router", [small_moh, small_moa])
def test_routers_take_the_operator(backend, make_router):
    router = make_router(backend)
    x = torch.randn(2, 9, 16, device=backend.device)
    ours = router(x)
    kernels.use("torch")
    want = router(x)
    kernels.use(backend.path)
    # On a GPU the list is made by the executor that reads it.
    assert (ours.pairs is not None) == (backend == CPP)
    assert want.pairs is None
    torch.testing.assert_close(ours.weights, want.weights)
    noisy = small_moa(backend, noisy=True)
    assert noisy(x).pairs is None
    assert (noisy.eval()(x).pairs is not None) == (backend == CPP)
    assert router.double()(x.double()).weights.dtype == torch.float64


@on_every
def test_autocast_does_not_reach_the_router(backend):
    x = torch.randn(2, 9, 16, device=backend.device)
    router = small_moh(backend)
    answers = []
    for enabled in (False, True):
        router.zero_grad()
        with torch.autocast(backend.device, torch.bfloat16, enabled=enabled):
            gates = router(x).weights
        with torch.autocast(backend.device, torch.bfloat16, enabled=enabled and backend != EAGER):
            gates.square().sum().backward()  # in PyTorch the products of backward would be of 16 bits
        assert gates.dtype == torch.float32
        answers.append((gates, *[p.grad for p in router.parameters()]))
    assert all(map(torch.equal, *answers))


def in_parts(weight, name):
    """A router whose weight lies in up to three tensors, as the layers of a MoHRouter have it."""
    candidates, shared, _, _, balanced = ROUTERS[name]
    sizes = [candidates, shared if shared > 1 else 0, 2 * balanced]
    first, *more = weight.split([size for size in sizes if size])
    return LinearRouter(first, *ROUTERS[name], *more)


@on_every
@pytest.mark.parametrize("name", ["released", "one shared", "not balanced", "33 candidates", "MoA"])
def test_a_weight_in_parts(backend, name):
    """Bit for bit what one tensor gives, in values, gradients and second derivatives; parts of two dtypes too."""
    x, weight = make(backend, name)
    padding = some_padding(*x.shape[:2], backend)
    projection = torch.randn(5, x.shape[-1], device=x.device)
    routers = LinearRouter(weight, *ROUTERS[name]), in_parts(weight, name)
    assert len(routers[1].parts()) == {"MoA": 1, "one shared": 2, "not balanced": 2}.get(name, 3)
    calls = [lambda router: (None, route(x, router, padding))]
    if backend == TRITON:
        calls.append(
            lambda router: project_and_route(x, projection, None, x.dtype, router, padding)[::-1]
        )
    for call in calls:
        answers = []
        for router in routers:
            _, routing = call(router)
            ends = differentiable(routing)
            loss = sum(end.square().sum() for end in ends)
            grads = torch.autograd.grad(loss, (x, weight), create_graph=True)
            second = torch.autograd.grad(sum(grad.square().sum() for grad in grads), (x, weight))
            answers.append((*ends, *grads, *second))
        assert all(map(torch.equal, *answers))
    if len(routers[1].parts()) > 1:
        mixed = routers[1]._replace(second=routers[1].second.double())
        assert mixed.dtype_in_triton() is None and mixed.form().linear is None
        torch.testing.assert_close(route(x, mixed, padding).weights.float(), ends[0])


# ---- product and router as one node

OUTPUTS = 21
NODES = [
    "released",
    "paper",
    "one shared",
    "not balanced",
    "no shared, all run",
    "shared only",
    "MoA",
]


def make_node(backend, name, shape=(2, 37, 50), dtype=torch.float32, biased=True):
    """Tokens, weight and bias of the product, and the router's weight; all are leaves."""
    x, router_weight = make(backend, name, shape, dtype)
    weight = torch.randn(OUTPUTS, shape[-1]).to(x).requires_grad_()
    bias = torch.randn(OUTPUTS).to(x).requires_grad_() if biased else None
    return x, weight, bias, router_weight


def exact_node(x, weight, bias, router_weight, name, padding=None):
    return oracle(x, router_weight, name, padding), F.linear(x, weight, bias)


def node(x, weight, bias, router_weight, name, padding=None):
    router = LinearRouter(router_weight, *ROUTERS[name])
    return project_and_route(x, weight, bias, product_dtype(x), router, padding)


def gradients(routing, product, slopes, leaves, **options):
    ends = product, *differentiable(routing)
    loss = sum((end * slope).sum() for end, slope in zip(ends, slopes))
    return torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True, **options)


def in_double(leaves):
    return [None if t is None else t.detach().double().requires_grad_() for t in leaves]


def assert_near(got, want, tolerance):
    for number, (have, exactly) in enumerate(zip(got, want, strict=True)):
        assert have.shape == exactly.shape
        size = exactly.abs().max() if exactly.numel() else 0
        assert not have.numel() or (have - exactly).abs().max() <= tolerance * size, number


@on(TRITON)
@pytest.mark.parametrize(
    "name, padded, biased", covering(itertools.product(NODES, [False, True], [True, False]))
)
def test_product_and_router_as_one_node(backend, name, padded, biased):
    """Values, gradients of all that may have one, and second derivatives."""
    leaves = make_node(backend, name, biased=biased)
    exact = in_double(leaves)
    padding = some_padding(2, 37, backend) if padded else None
    both = node(*leaves, name, padding), exact_node(*exact, name, padding)
    (routing, product), (want, exact_product) = both
    assert product.dtype == torch.float32
    assert type(product.grad_fn) is type(routing.weights.grad_fn)
    assert torch.equal(routing.active, want.active)
    assert torch.equal(routing.stats.counts, want.stats.counts.float())
    assert routing.count == want.count and not routing.stats.counts.requires_grad
    ends = product, *differentiable(routing)
    assert_near(ends, (exact_product, *differentiable(want)), 1e-5)
    slopes = [torch.randn(end.shape, device=end.device) for end in ends]
    results = []
    for answer, given in zip(both, (leaves, exact)):
        given = [t for t in given if t is not None]
        first = gradients(*answer, slopes, given, retain_graph=True)
        again = gradients(*answer, slopes, given, create_graph=True)
        norm = sum(grad.square().sum() for grad in again)
        second = torch.autograd.grad(norm, given, materialize_grads=True, allow_unused=True)
        results.append([*first, *again, *second])
    assert_near(*results, 1e-4)


@on(TRITON)
def test_a_node_of_which_one_half_is_used(backend):
    """Only the product, or only one answer of the router, has a gradient."""
    leaves = make_node(backend, "released")
    exact = in_double(leaves)
    (routing, product), (want, exact_product) = (
        node(*leaves, "released"),
        exact_node(*exact, "released"),
    )
    ends = product, *differentiable(routing)
    for end, exactly in zip(ends, (exact_product, *differentiable(want))):
        slope = torch.randn(end.shape, device=end.device)
        options = dict(retain_graph=True, allow_unused=True, materialize_grads=True)
        got = torch.autograd.grad(end, leaves, slope, **options)
        assert_near(got, torch.autograd.grad(exactly, exact, slope.double(), **options), 1e-4)


@on(TRITON)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_are_those_of_tokens_that_are_not_rounded(backend, dtype):
    """Under autocast the product is of 16 bits. Backward keeps the 16-bit tokens alone."""
    # Large numbers that all heads see alike: what tells heads apart is lost where they are rounded.
    x = (16 + torch.randn(2, 300, 50, device=backend.device)).requires_grad_()
    _, weight, bias, router_weight = make_node(backend, "released")
    router_weight = router_weight.detach() - router_weight.detach().mean(1, keepdim=True)
    leaves = x, weight, bias, router_weight.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        with torch.autocast(backend.device, dtype):
            routing, product = node(*leaves, "released")
    assert product.dtype == dtype and routing.weights.dtype == torch.float32
    assert [t.dtype for t in kept if t.shape == x.shape] == [dtype]
    exact = in_double(leaves)
    want, exact_product = exact_node(*exact, "released")
    assert torch.equal(routing.active, want.active)
    rounded = oracle(x.to(dtype).double(), router_weight.double(), "released")
    assert not torch.equal(rounded.active, want.active)
    rounding = torch.finfo(dtype).eps
    assert_near(differentiable(routing), differentiable(want), 1e-5)
    assert_near([product], [exact_product], rounding)
    slopes = [torch.randn(t.shape, device=t.device) for t in (product, *differentiable(routing))]
    with torch.autocast(backend.device, dtype):  # which backward may be called under
        grads = gradients(routing, product, slopes, leaves)
    assert all(grad.dtype == torch.float32 for grad in grads)
    assert_near(grads, gradients(want, exact_product, slopes, exact), 2 * rounding)


@on(TRITON)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_node_of_16_bits(backend, dtype):
    for router_dtype in (dtype, torch.float32):
        *leaves, router_weight = make_node(backend, "released", dtype=dtype)
        leaves.append(router_weight.detach().to(router_dtype).requires_grad_())
        exact = in_double(leaves)
        (routing, product), (want, exact_product) = (
            node(*leaves, "released"),
            exact_node(*exact, "released"),
        )
        assert product.dtype == dtype and torch.equal(routing.active, want.active)
        slopes = [
            torch.randn(t.shape, device=t.device).to(dtype)
            for t in (product, *differentiable(routing))
        ]
        grads = gradients(routing, product, slopes, leaves)
        assert [grad.dtype for grad in grads] == [leaf.dtype for leaf in leaves]
        assert_near(
            grads, gradients(want, exact_product, slopes, exact), 4 * torch.finfo(dtype).eps
        )


@on(TRITON)
def test_what_has_no_node(backend):
    """No tokens are none; float64 and routers with more rows than registers hold are left to others."""
    for shape in ((0, 9, 50), (2, 0, 50)):
        leaves = make_node(backend, "released", shape)
        routing, product = node(*leaves, "released")
        assert product.shape == (*shape[:2], OUTPUTS)
        loss = product.sum() + routing.weights.sum()
        assert not any(grad.any() for grad in torch.autograd.grad(loss, leaves))
    for heads, dtype, operator in (
        (4, torch.float32, PROJECT_AND_ROUTE),
        (4, torch.float64, ""),
        (300, torch.float32, ""),
    ):
        budget = HeadBudget(heads=heads, head_dim=2, shared=1, routed=1)
        layer = HeadMixtureAttention(heads * 2, budget, executor="masked")
        layer.to(backend.device, dtype)
        x = torch.randn(2, 5, heads * 2, device=backend.device, dtype=dtype)
        gates = layer.router.as_linear(x)
        assert layer.plan(Call(x, None), gates.form()).operator == operator


@on(TRITON)
def test_a_gradient_that_is_one_for_all_tokens_is_not_copied(backend):
    """The balance loss gives each token the same gradient of its probabilities: memory of one token, expanded."""
    x, router_weight = make(backend, "released")
    given = (x, router_weight, 9, 3, 6, "released", None, None, None)
    rows = backend.operators.route(*given)[2].detach()
    one = torch.randn(1, 1, 9, device=x.device).expand(*x.shape[:2], -1)
    results = [
        backend.operators.route_backward(None, dprobs, None, rows, *given)
        for dprobs in (one, one.contiguous())
    ]
    for got, want in zip(*results):
        assert torch.equal(got, want) and want.any()


@on(TRITON)
@pytest.mark.parametrize("options", ["", "padding", "causal", "mask", "groups", "no bias"])
def test_router_and_attention_as_one_node(backend, options):
    """Bit for bit what two nodes give, in values, gradients and second derivatives."""
    heads, kv_heads, D, C = 4, 2 if options == "groups" else 4, 8, 24
    budget = dict(candidates=2, shared=2, routed=1)
    leaves = [
        torch.randn(shape, device=backend.device).requires_grad_()
        for shape in (
            (2, 19, C),
            ((heads + 2 * kv_heads) * D, C),
            ((heads + 2 * kv_heads) * D,),
            (6, C),
        )
    ]
    if options == "no bias":
        leaves[2] = None
    padding = some_padding(2, 19, backend) if options == "padding" else None
    mask = None
    if options == "mask":
        mask = torch.rand(2, 1, 19, 19, device=backend.device) < 0.7

    def as_one(x, weight, bias, router_weight):
        router = LinearRouter(router_weight, **budget, gate_form="released")
        attention = ProductAttention(kv_heads, options == "causal", mask)
        return project_and_route(x, weight, bias, x.dtype, router, padding, attention)

    def as_two(x, weight, bias, router_weight):
        router = LinearRouter(router_weight, **budget, gate_form="released")
        routing, product = project_and_route(x, weight, bias, x.dtype, router, padding)
        masks = (options == "causal", mask)
        return routing, kernels.attend_product(product, heads, kv_heads, routing, *masks)

    given = [leaf for leaf in leaves if leaf is not None]
    results = []
    for function in (as_one, as_two):
        routing, o = function(*leaves)
        assert torch.equal(routing.active, routing.weights > 0)
        ends = [o, *differentiable(routing), routing.stats.counts]
        torch.manual_seed(1)
        slopes = [torch.randn_like(end) for end in ends[:-1]]
        loss = sum((end * slope).sum() for end, slope in zip(ends, slopes))
        first = torch.autograd.grad(loss, given, retain_graph=True)
        of_outputs = torch.autograd.grad((o * slopes[0]).sum(), given, retain_graph=True)
        again = torch.autograd.grad(loss, given, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in again), given)
        results.append(([*ends, *first, *of_outputs], [*again, *second]))
    (got, got_again), (want, want_again) = results
    assert all(map(torch.equal, got, want))
    assert_near(got_again, want_again, 1e-5)
