"""`project`, `attend` and `combine` on every back end: a loop in float64, values and gradients, and what is promised beside."""

import functools
import importlib
import itertools
import math
import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional as F

from moh_vision.attention import kernels
from moh_vision.attention.kernels.contract import split_product
from moh_vision.attention.routing import Routing
from tests.support import attend_backends as backends
from tests.support.attend_backends import (
    CPP,
    CPP16,
    DEVICE,
    EAGER,
    IN_PLACE,
    OPS,
    TRITON,
    TRITON16,
    list_for_triton,
    on,
    outputs_and_gradients,
)
from tests.support.covering import covering
from tests.support.paths import ROOT
from tests.support.refusals import refuse

PAIRS = EAGER, CPP  # they have `project` and `combine` too
ON_CPU = *PAIRS, *CPP16
EVERY = *ON_CPU, TRITON


class Case(NamedTuple):
    backends: tuple
    B: int
    N: int
    H: int
    G: int
    D: int
    M: int | None = None  # N
    share: float | None = (
        None  # of the tokens that run a head; None: another share in every sequence and head
    )
    counts: list | None = None  # how many tokens run head h of sequence b, instead
    mask: str | None = None
    is_causal: bool = False
    gates: int | str | None = None  # "tokens", 1 for one of a sequence, or None
    keys: str = "fused"
    source: list | None = None
    scale: int = 1  # of the queries
    small_blocks: bool = True  # of Triton: few tokens fill several tiles


MASKS = {  # of which scores are seen, and what is added to them [B, H, N, M]
    "bool": lambda seen, added: seen,
    "bool of one head": lambda seen, added: seen[-1:, :1],
    "bool of keys": lambda seen, added: seen[:, :1, :1],  # in the first sequence there is none
    "a head's that hides everything": lambda seen, added: torch.ones_like(
        seen[:1, :, :1]
    ).index_fill(1, torch.tensor(1), False),
    "float": lambda seen, added: added,
    "float, minus infinity": lambda seen, added: added.masked_fill(~seen, -math.inf),
    "float, minus infinity, one for all": lambda seen, added: added.masked_fill(~seen, -math.inf)[
        :1, :1
    ],
    "one for all": lambda seen, added: added[:1, :1],
    "expanded": lambda seen, added: added[:, :1].expand_as(added),
    "strided": lambda seen, added: added.transpose(1, 2).contiguous().transpose(1, 2),
}
SHAPES = (
    (2, 197, 4, 4, 16, None, 0.5),
    (2, 50, 3, 3, 24, None, 0.5),  # widths that are no multiple of a vector
    (2, 33, 4, 4, 72, None, 0.6),
    (1, 300, 4, 1, 128, None, 0.4),  # one key-value head
    (1, 70, 4, 2, 256, 33, 0.4),  # cross-attention
    (2, 19, 5, 5, 7, None, 0.3),
    (2, 50, 4, 2, 33, None, None),
    (2, 50, 4, 2, 48, None, None),
    (3, 1, 5, 5, 8, None, 0.3),
    (2, 40, 4, 4, 96, None, 1.0),
    (1, 1100, 3, 3, 80, None, 0.7),  # several tiles of keys
)
CASES = {
    **{f"D={shape[4]}": Case(ON_CPU, *shape) for shape in SHAPES},
    **{
        f"{N} tokens, {is_causal=}": Case(ON_CPU, 2, N, 4, 2, 64, is_causal=is_causal)
        for N in (1, 7, 197, 1030)
        for is_causal in (False, True)
    },
    "empty and single": Case(EVERY, 2, 40, 4, 2, 64, counts=[[0, 1], [0, 0], [40, 0], [1, 17]]),
    "nothing runs": Case(EVERY, 2, 40, 4, 2, 64, counts=[[0, 0]] * 4),
    "no key": Case(EVERY, 2, 5, 4, 2, 16, M=0, share=0.5),
    "700 keys": Case(CPP16, 2, 40, 4, 2, 64, M=700),
    # Segments read any of six rows of keys, as where sequences choose their heads: one nothing, since it is empty, some the
    # same; nobody reads row 2.
    "source": Case(PAIRS, 2, 60, 4, 6, 64, source=[5, 0, -1, 3, 1, 5, 4, 4]),
    "source, mask": Case(
        PAIRS, 2, 30, 4, 6, 16, M=21, source=[5, 0, -1, 3, 1, 5, 4, 4], mask="bool"
    ),
    # Scores of several hundred: the softmax must take the highest off first, in every block.
    "large scores": Case(CPP16, 2, 1030, 4, 2, 64, scale=60),
    "1100 tokens, padding": Case(PAIRS, 2, 1100, 2, 2, 16, share=0.3, mask="bool of keys"),
    **{f"mask: {mask}": Case(PAIRS, 2, 70, 4, 2, 32, share=0.5, mask=mask) for mask in MASKS},
    **{
        f"mask: {mask}, {N=} {is_causal=}": Case(
            CPP16, 2, N, 4, 2, 64, mask=mask, is_causal=is_causal
        )
        for mask in MASKS
        for N in (30, 600)
        for is_causal in (False, True)
    },
    **{  # two query heads read one key-value head, of another sequence length
        f"mask: {mask}, cross, {is_causal=}": Case(
            (TRITON,), 2, 20, 4, 2, 16, 27, 0.5, mask=mask, is_causal=is_causal, keys="contiguous"
        )
        for mask in (
            "bool",
            "bool of keys",
            "float, minus infinity",
            "float, minus infinity, one for all",
        )
        for is_causal in (False, True)[: 1 + (mask == "bool of keys")]
    },
    "transposed mask and keys of one sequence": Case(
        (TRITON,),
        2,
        18,
        2,
        2,
        16,
        M=21,
        share=0.5,
        mask="transposed",
        gates=1,
        keys="of one sequence, across",
    ),
    **{
        f"gates, {D=} {is_causal=}": Case(
            IN_PLACE, 2, 20, 3, 3, D, share=0.5, gates="tokens", is_causal=is_causal
        )
        for D, is_causal in ((24, False), (32, True), (72, True), (80, False))
    },
    **{
        f"gates, own blocks, {D=}": Case(
            (TRITON,), 1, 70, 2, 2, D, share=0.3, gates="tokens", is_causal=True, small_blocks=False
        )
        for D in (48, 96, 256)
    },
    "gates, 16 bits": Case(
        TRITON16, 1, 40, 2, 2, 72, share=0.5, gates="tokens", small_blocks=False
    ),
    "gates, few pairs": Case(IN_PLACE, 1, 40, 3, 3, 24, share=0.1, gates="tokens"),
    "gates, odd width": Case(CPP16, 2, 30, 4, 2, 33, gates="tokens"),
    "gates, several tasks a head": Case(CPP16, 1, 700, 2, 1, 32, share=0.5, gates="tokens"),
    "sequences choose": Case(
        IN_PLACE, 3, 21, 4, 4, 16, counts=[[0, 21, 0], [0, 0, 21], [21] * 3, [0, 21, 0]], gates=1
    ),
    "sequences choose, gates": Case(
        IN_PLACE, 2, 20, 3, 3, 24, counts=[[20, 0], [20, 0], [0, 20]], gates="tokens"
    ),
    **{
        f"gates, causal, {M=}": Case(
            (TRITON,), 1, 40, 2, 1, 16, M, 0.5, gates="tokens", is_causal=True, keys="contiguous"
        )
        for M in (5, 60)
    },
}


def some_active(B, N, H, share=None, counts=None):
    """Head 0 runs for all tokens; in the first sequence head 1 for none, head 2 for the last; in the last head 2 for all."""
    if counts is not None:
        return torch.rand(B, N, H).argsort(1).argsort(1) < torch.tensor(counts).t().unsqueeze(1)
    active = torch.rand(B, N, H) < (torch.rand(B, 1, H) if share is None else share)
    active[:, :, 0] = True
    if H > 2:
        active[-1, :, 2] = True
        active[0, :, 1] = False
        active[0, :, 2] = torch.arange(N) == N - 1
    return active


def draw_mask(name, *shape):
    """Where heads and tokens are told apart, some rows that run see no key."""
    if name == "transposed":
        return torch.randn(*shape[:1:-1]).t()[None, None]
    seen = torch.rand(shape) < 0.6
    added = torch.randn(shape)
    seen[0, 0, 0] = seen[0, :, -1] = seen[-1, -2, 3:4] = False
    return MASKS[name](seen, added) if name else None


def draw(case, dtype=torch.float32):
    """What `attend` is given, by name."""
    B, N, H, G, D = case.B, case.N, case.H, case.G, case.D
    M = case.N if case.M is None else case.M
    q = torch.randn(B, H, N, D)
    k, v = torch.randn(1 if case.source else B, M, 2, G, D).permute(2, 0, 3, 1, 4)
    if case.keys == "fused" and M == N and G == H:  # views of one product
        q, k, v = torch.randn(B, N, 3, H, D).permute(2, 0, 3, 1, 4)
    if case.keys == "contiguous":
        k = k.contiguous()
        v = v.contiguous()
    if case.keys == "of one sequence, across":
        q = torch.randn(B, H, D, N).transpose(2, 3)
        k, v = (torch.randn(1, H, M, D).expand(B, -1, -1, -1) for _ in range(2))
    active = some_active(B, N, H, case.share, case.counts)
    gates = None if case.gates is None else torch.rand(B, N if case.gates == "tokens" else 1, H)
    options = dict(is_causal=case.is_causal, mask=draw_mask(case.mask, B, H, N, M))
    if case.source:
        options["source"] = torch.tensor(case.source, dtype=torch.int32)
    q, k, v = ((x * scale).to(dtype) for x, scale in ((q, case.scale), (k, 1), (v, 1)))
    return dict(q=q, k=k, v=v, gates=gates, active=active, **options)


def slope_of(given):
    return torch.randn(given["q"].transpose(1, 2).shape).to(given["q"].dtype)


@pytest.fixture
def small_blocks(monkeypatch):
    """Few tokens fill several tiles; head widths of one part are read through descriptors."""
    if backends.gpu is not None:
        use_blocks(monkeypatch, 16, 16, tma=True)


BACKENDS_AND_CASES = [(backend, name) for name, case in CASES.items() for backend in case.backends]


@pytest.mark.parametrize("backend, name", BACKENDS_AND_CASES, ids=str, indirect=["backend"])
def test_attend_equals_a_loop(backend, name, request):
    case = CASES[name]
    if case.small_blocks and backend.path == "triton":
        request.getfixturevalue("small_blocks")
    given = draw(case, backend.dtype)
    gates = given["gates"]
    active = given["active"]
    if gates is not None:
        gates *= active if case.gates == "tokens" else 1
        first = tuple(active.nonzero()[0]) if case.gates == "tokens" else (0, 0, 0)
        gates[first] = 0  # a head that runs with gate 0 has a gradient
    do = slope_of(given)
    got = outputs_and_gradients(backend, **given, do=do)

    exact = {
        key: given[key].double().requires_grad_()
        for key in ("q", "k", "v", "gates")
        if given[key] is not None
    }
    o, lse = backends.attend_in_a_loop(**{**given, **exact})
    grads = torch.autograd.grad(o, list(exact.values()), do.double())
    if backend.path == "cpp":  # such rows are infinite, so that backward's exponential is 0
        lse = lse.masked_fill(lse.isneginf(), math.inf)
    want = dict(o=o, lse=lse) | {f"d{key}": grad for key, grad in zip(exact, grads)}
    if backend == EAGER:
        assert got["lse"] is None and want.pop("lse") is not None
    else:
        assert got["lse"].dtype == torch.float32
    assert got["o"].dtype == backend.dtype
    for key, exactly in want.items():
        have = got[key]
        finite = exactly.isfinite()
        assert have.shape == exactly.shape, key
        assert torch.equal(have.isfinite(), finite) and torch.equal(
            have[~finite].double(), exactly[~finite]
        ), key
        if finite.any():
            error = (have - exactly)[finite].abs().max()
            size = exactly[finite].abs().max()
            rounding = 1e-6 if backend in PAIRS else 0
            assert error <= backend.tolerance * size.clamp_min(1e-3) + rounding, (
                f"{key}: {error} of {size}"
            )
    off = ~active
    assert not got["o"][off].any() and not got["dq"].transpose(1, 2)[off].any()
    if case.gates == "tokens":
        assert not got["dgates"][off].any()
        assert got["dgates"][first] != 0


def use_blocks(monkeypatch, queries, keys, tma):
    """Blocks of this size for all kernels of attention in Triton."""
    module = importlib.import_module("moh_vision.attention.kernels.gpu.attend")
    blocks = importlib.import_module("moh_vision.attention.kernels.gpu.blocks")
    block = blocks.Block(queries=queries, keys=keys, warps=4, stages=1, tma=tma)
    row = blocks.TABLE[0]._replace(forward=block, queries=block, keys=block)
    launches = functools.lru_cache(module.find_launch.__wrapped__)  # none that other blocks made
    monkeypatch.setattr(module, "row_of", lambda *call: row)
    for name in ("attend", "attend_backward"):
        file = importlib.import_module(f"moh_vision.attention.kernels.gpu.{name}")
        monkeypatch.setattr(file, "find_launch", launches)


def assert_near(got, want, tolerance):
    for key, exactly in want.items():
        error = (got[key] - exactly).abs().max()
        size = exactly.abs().max()
        assert error <= tolerance * size, f"{key}: {error} of {size}"


@pytest.mark.parametrize(
    "backend, tokens, tma",
    covering(itertools.product([TRITON, TRITON16[1]], [65, 80, 197], [True, False])),
    ids=str,
    indirect=["backend"],
)
def test_the_last_block_of_keys_may_be_small(backend, tokens, tma, monkeypatch):
    """1, 16 and 5 keys against blocks of 64."""
    use_blocks(monkeypatch, 64, 64, tma)
    given = draw(Case((), 1, tokens, 2, 2, 16, share=0.5, gates="tokens"), backend.dtype)
    do = slope_of(given)
    got = outputs_and_gradients(backend, **given, do=do)
    names = "q", "k", "v", "gates"
    exact = {name: given[name].double().requires_grad_() for name in names}
    o, lse = backends.attend_in_a_loop(**{**given, **exact})
    grads = torch.autograd.grad(o, list(exact.values()), do.double())
    want = dict(o=o, lse=lse, **{f"d{name}": grad for name, grad in zip(names, grads)})
    assert_near(got, want, 2e-5 if backend == TRITON else 5e-3)


PRODUCTS = {
    "groups": dict(G=2, D=24),
    "one key-value head": dict(G=1, D=16),
    "two parts": dict(G=4, D=72),
    "causal": dict(G=2, D=16, is_causal=True),
    "mask": dict(G=2, D=16, mask="float, minus infinity"),
    "a gate of a sequence": dict(G=4, D=16, gates=1),
    "no gates": dict(G=4, D=32, gates=None),
}


@pytest.mark.parametrize(
    "backend, name, tma",
    covering(itertools.product(IN_PLACE, PRODUCTS, [True, False])),
    ids=str,
    indirect=["backend"],
)
def test_attention_of_one_product_is_that_of_its_parts(backend, name, tma, monkeypatch):
    """The same bits, in one gradient; by pointers also of rows that lie apart."""
    if backend == TRITON:
        use_blocks(monkeypatch, 16, 16, tma)
    options = dict(gates="tokens") | PRODUCTS[name]
    case = Case((), 2, 19, 4, share=0.5, **options)
    H, G, D = case.H, case.G, case.D
    given = draw(case)
    pairs = kernels.list_pairs(given["active"])
    if backend == TRITON:
        pairs = list_for_triton(given["active"])
    mask = given["mask"]
    if mask is not None:
        mask = mask.to(backend.device)
    rest = [*pairs, given["is_causal"], mask]
    gates = given["gates"]
    if gates is not None:
        gates = gates.to(backend.device).requires_grad_()
    numbers = dict(device=backend.device, dtype=backend.dtype)
    product = torch.randn(2, 19, (H + 2 * G) * D + 8, **numbers)[..., :-8]
    product = (product.contiguous() if tma else product).detach().requires_grad_()
    do = torch.randn(2, 19, H * D, **numbers)
    operators = backend.operators
    leaves = [product] if gates is None else [product, gates]
    results = []
    for whole in (True, False):
        with backends.fresh_memory_is_nan():
            if whole:
                o, lse = operators.attend_product(product, H, G, gates, *rest)
            else:
                parts = split_product(product, H, G)
                o, lse = operators.attend_in_place(*parts, gates, *rest)
            grads = torch.autograd.grad(o, leaves, do)
        results.append([o, lse[: rest[1][-1]], *grads])
    assert all(map(torch.equal, *results))


WEIGHED = {  # of o: whether heads of a token lie side by side, and of weights: one of a sequence
    "by token": (lambda o: o, False),
    "by head": (lambda o: o.contiguous(), False),
    "a part of wider rows": (lambda o: torch.cat([o, o], 3)[..., : o.shape[3]], False),
    "every other token": (lambda o: o.repeat_interleave(2, 2)[:, :, ::2], False),
    "numbers apart": (lambda o: o.repeat_interleave(2, 3)[..., ::2], False),
    "a gate of a sequence": (lambda o: o, True),
}


@pytest.mark.parametrize(
    "backend, name, D",
    covering(itertools.product([TRITON, TRITON16[1]], WEIGHED, [7, 16, 72])),
    ids=str,
    indirect=["backend"],
)
def test_outputs_times_gates(backend, name, D):
    """Values, gradients and second derivatives; tokens of two sequences share a program."""
    B, N, H = 2, 45, 3
    lies, of_sequence = WEIGHED[name]
    o = torch.randn(B, N, H, D, device=DEVICE, dtype=backend.dtype).transpose(1, 2)
    o = lies(o).detach().requires_grad_()
    weights = torch.rand(H, B, 1 if of_sequence else N, device=DEVICE).permute(1, 2, 0)
    weights.requires_grad_()
    slope = torch.randn(B, N, H * D, device=DEVICE, dtype=backend.dtype)
    results = []
    for operator, leaves in (
        (torch.ops.moh_vision_triton.weigh, (o, weights)),
        (weighed, [t.detach().double().requires_grad_() for t in (o, weights)]),
    ):
        y = operator(*leaves)
        first = torch.autograd.grad(y, leaves, slope.to(y.dtype), retain_graph=True)
        again = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in again), leaves)
        results.append([y, *first, *second])
    got, want = results
    assert got[0].dtype == backend.dtype
    assert [t.dtype for t in got[1:3]] == [backend.dtype, torch.float32]
    for number, (have, exactly) in enumerate(zip(got, want)):
        assert have.shape == exactly.shape
        near = 1e-5 if backend == TRITON else 5e-3
        assert (have - exactly).abs().max() <= near * exactly.abs().max(), number


def weighed(o, weights):
    return (o.transpose(1, 2) * weights.unsqueeze(-1)).flatten(2)


def project_and_combine(x, w, bias, gates, wo, out_bias, active):
    """Queries of the pairs that run as if they were what attention gives."""
    pairs = kernels.list_pairs(active)
    H = active.shape[2]
    return kernels.combine(kernels.project(x, w, bias, pairs, H), gates, wo, out_bias, pairs, H)


def draw_linears(B, N, H, D, C, share):
    """What `project_and_combine` is given."""
    T = B * N
    shapes = (H * D, C), (H * D,), (B * N, H), (C, H * D), (C,)
    return [torch.randn(T, C), *map(torch.randn, shapes)], some_active(B, N, H, share)


LINEARS = [
    (*shape[:3], shape[4], C, shape[6])
    for shape, C in zip(SHAPES, (64, 72, 50, 64, 64, 40, 64, 64, 40, 64, 32))
]


@pytest.mark.parametrize("sizes", LINEARS, ids=str)
@on(*PAIRS)
def test_project_and_combine_equal_linear_layers(backend, sizes):
    tensors, active = draw_linears(*sizes)
    exact = [t.double().requires_grad_() for t in tensors]
    x, w, bias, gates, wo, out_bias = exact
    heads = F.linear(x, w, bias).unflatten(1, (active.shape[2], -1)) * gates.unsqueeze(2)
    want = F.linear((heads * active.flatten(0, 1).unsqueeze(2)).flatten(1), wo, out_bias)
    tensors = [t.requires_grad_() for t in tensors]
    y = project_and_combine(*tensors, active)
    slope = torch.randn(want.shape)
    grads = (
        torch.autograd.grad((y * slope).sum(), tensors),
        torch.autograd.grad((want * slope).sum(), exact),
    )
    for key, got, exactly in zip(
        ("y", *"x w b gates wo bo".split()), (y, *grads[0]), (want, *grads[1])
    ):
        assert (got - exactly).abs().max() <= 2e-5 * exactly.abs().max() + 1e-6, key


LOWEST = [
    *((backend, torch.finfo(torch.float32).min) for backend in CPP16),
    (TRITON, -1e9),
    (TRITON, -1e12),
]


@pytest.mark.parametrize("backend, lowest", LOWEST, ids=str, indirect=["backend"])
def test_a_finite_bias_hides_all_keys(backend, lowest, small_blocks):
    """The mean of all values, as in PyTorch; the gradients of what has no digits left stay of its size."""
    given = draw(Case((backend,), 2, 20, 2, 2, 16, counts=[[20, 20]] * 2), backend.dtype)
    hidden = slice(None) if backend == TRITON else slice(4, 5)
    given["mask"] = torch.zeros(2, 1, 20, 20)
    given["mask"][:, :, hidden] = lowest
    got = outputs_and_gradients(backend, **given, do=torch.ones(2, 20, 2, 16, dtype=backend.dtype))
    mean = given["v"].float().mean(2).unsqueeze(1).expand(2, 20, 2, 16)
    near = {} if backend == TRITON else dict(atol=backend.tolerance, rtol=0)
    torch.testing.assert_close(got["o"][:, hidden].float(), mean[:, hidden], **near)
    assert all(got[name].abs().max() < 1e4 for name in ("dq", "dk", "dv"))


@on(*EVERY)
def test_nan_stays_in_its_row(backend, small_blocks):
    """A query that is not a number spoils its own output and no other."""
    sizes = (2, 197, 4, 4, 64) if backend.path == "cpp" else (2, 20, 2, 2, 16)
    given = draw(Case((backend,), *sizes, share=0.7), backend.dtype)
    do = slope_of(given)
    clean = outputs_and_gradients(backend, **given, do=do)
    given["q"] = given["q"].clone()
    given["q"][1, 0, 7, 3] = (
        math.nan
    )  # head 0 runs for all tokens, and the first head's pairs come first
    dirty = outputs_and_gradients(backend, **given, do=do)
    rows = dict(o=(1, 7, 0), lse=given["q"].shape[2] + 7, dq=(1, 0, 7))
    for name in ("o", "lse", "dq") if backend.path == "cpp" else ("o",):
        have = dirty[name].clone()
        want = clean[name].clone()
        row = rows[name]
        assert have[row].isnan().all(), name
        have[row] = want[row] = 0
        assert torch.equal(have, want) if backend.path == "cpp" else not have.isnan().any(), name


@on(TRITON)
def test_what_does_not_run_is_not_read(backend, small_blocks):
    """NaN in the queries, gates and output gradients of heads that are off, and in keys that no token sees."""
    given = draw(Case((backend,), 2, 20, 3, 3, 16, share=0.5, gates="tokens", is_causal=True))
    given["active"][1, :, 2] = False
    off = ~given["active"]
    do = slope_of(given)
    expected = outputs_and_gradients(backend, **given, do=do)
    given |= {name: given[name].clone() for name in ("q", "k", "v", "gates")}
    given["q"].transpose(1, 2)[off] = given["gates"][off] = do[off] = math.nan
    given["k"][1, 2] = given["v"][1, 2] = math.nan
    for name, got in outputs_and_gradients(backend, **given, do=do).items():
        assert got.equal(expected[name]), name


@on(*TRITON16[1:])
def test_sequences_far_apart(backend, small_blocks):
    """2^31 numbers between two sequences, in memory that is hardly touched."""
    B, N, H, D = 2, 9, 2, 16
    far = 2**31
    near = torch.randn(B, N, 3, H, D).permute(2, 0, 3, 1, 4).half().to(DEVICE)
    memory = torch.empty(far + near[:, 0].numel(), dtype=near.dtype, device=DEVICE)
    apart = memory.as_strided(near.shape, (H * D, far, D, 3 * H * D, 1)).copy_(near)
    pairs = list_for_triton(some_active(B, N, H, 0.5))
    do = torch.randn(B, N, H * D, device=DEVICE).half()
    results = []
    for rows in (near, apart):
        leaves = [x.detach().requires_grad_() for x in rows]
        o = backends.gpu.attend(*leaves, None, *pairs)[0]
        results.append([o, *torch.autograd.grad(o, leaves, do)])
    assert all(map(torch.equal, *results))


SAME_BITS = [(CPP, 150), (TRITON, 20), *((backend, N) for backend in CPP16 for N in (197, 1030))]


@pytest.mark.parametrize("backend, N", SAME_BITS, ids=str, indirect=["backend"])
def test_same_bits(backend, N, small_blocks):
    """For any number of threads, and on Triton twice."""
    case = Case((backend,), 2, N, 4, *((1, 72) if backend == CPP else (2, 64)))
    if backend == TRITON:
        case = Case((backend,), 2, N, 2, 2, 16, share=0.5, gates="tokens", is_causal=True)
    given = draw(case, backend.dtype)
    tensors, active = draw_linears(2, N, 4, 72, 100, None)
    tensors = [t.requires_grad_() for t in tensors]
    do = slope_of(given)
    results = []
    for count in (1, 2) if backend == TRITON else (1, 2, 3):
        with backends.threads(count):
            results.append([*outputs_and_gradients(backend, **given, do=do).values()])
            if backend == CPP:
                y = project_and_combine(*tensors, active)
                results[-1] += [y, *torch.autograd.grad(y.square().sum(), tensors)]
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def arguments(N=37, D=24):
    """Of the C++ operators in float32, by name."""
    (x, w, b, gates, wo, _), active = draw_linears(2, N, 3, D, 40, 0.5)
    pairs = kernels.list_pairs(active)
    given = draw(Case((), 2, N, 3, 3, D))
    q = kernels.select(given["q"].transpose(1, 2), pairs, 3)
    k = given["k"]
    v = given["v"]
    q, k, v, x, w, b, gates, wo = (
        t.detach().requires_grad_() for t in (q, k, v, x, w, b, gates, wo)
    )
    return dict(
        project=(x, w, b, *pairs, 3),
        attend=(q, k, v, *pairs, 3, N, None, False, None),
        combine=(q, gates, wo, None, *pairs, 3),
    )


def arguments_in_place(dtype, N=37, D=24):
    """Of the C++ operators in 16 bits, by name."""
    H = 3
    product = torch.randn(2, N, 3 * H * D).to(dtype).requires_grad_()
    q, k, v = (t.detach().requires_grad_() for t in split_product(product, H, H))
    gates = torch.rand(2, N, H, requires_grad=True)
    pairs = kernels.list_pairs(some_active(2, N, H, 0.5))
    rest = gates, *pairs, True, None
    return dict(attend_in_place=(q, k, v, *rest), attend_product=(product, H, H, *rest))


def arguments_of_triton(dtype=torch.float32):
    drawn = torch.randn(1, 6, 3, 2, 16, device=DEVICE, dtype=dtype).permute(2, 0, 3, 1, 4)
    q, k, v = (x.requires_grad_() for x in drawn.unbind())
    weights = torch.rand(1, 6, 2, device=DEVICE, requires_grad=True)
    pairs = list_for_triton(some_active(1, 6, 2, 0.5), tail=0)
    mask = torch.rand(1, 1, 6, 6, device=DEVICE) < 0.8
    return q, k, v, weights, *pairs, False, mask


def detached(given):
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in given]


@on(CPP)
def test_operators_are_registered_as_torch_asks(backend):
    for name, given in arguments().items():
        torch.library.opcheck(getattr(OPS, name).default, given)


@on(*CPP16)
def test_operators_in_16_bits_are_registered_as_torch_asks(backend):
    """Each one, with its backward."""
    for name, given in arguments_in_place(backend.dtype).items():
        torch.library.opcheck(getattr(OPS, name).default, given)
        inputs = detached(of_backward(name, given))
        torch.library.opcheck(getattr(OPS, f"{name}_backward").default, inputs)
        *computed, dgates = getattr(OPS, f"{name}_backward")(*inputs)
        assert {x.dtype for x in computed} == {backend.dtype}
        assert dgates.dtype == torch.float32


def of_backward(name, given):
    """What the backward of an operator of `arguments_in_place` gets."""
    o, lse = getattr(OPS, name)(*given)
    tensors = given[:3]
    numbers = ()
    if name == "attend_product":
        tensors = given[:1]
        numbers = given[1:3]
    return o, *tensors, o, lse, *numbers, *given[3:]


@pytest.mark.parametrize(
    "backend",
    [TRITON, pytest.param(TRITON16[1], marks=pytest.mark.slow)],
    ids=str,
    indirect=True,
)
def test_operators_of_triton_are_registered_as_torch_asks(backend):
    """Every one, with its backward."""
    ops = backend.operators
    q, k, v, *rest = arguments_of_triton(backend.dtype)
    product = torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).flatten(2).detach().requires_grad_()
    given = {}
    given["attend_in_place"] = q, k, v, *rest
    given["attend_product"] = product, 2, 2, *rest
    for name in ("attend_in_place", "attend_product"):
        o, lse = getattr(ops, name)(*given[name])
        tensors, numbers = ([product], (2, 2)) if "product" in name else ([q, k, v], ())
        given[f"{name}_backward"] = o, *tensors, o, lse, *numbers, *rest

    x = torch.randn(2, 9, 20, device=DEVICE, dtype=backend.dtype, requires_grad=True)
    weight = torch.randn(4, 20, device=DEVICE, requires_grad=True)
    # Two candidates, and the two rows of the balance apart.
    first, second = weight.detach().split([2, 2])
    router = first.requires_grad_(), 2, 1, 1, "released", torch.rand(2, 9, device=DEVICE) < 0.3
    further = second.requires_grad_(), None
    given["route"] = x, *router, *further
    gates, active, rows, probs, _ = ops.route(*given["route"])
    given["route_backward"] = gates, probs, rows, rows, x, *router, *further
    linear = (torch.randn(shape, device=DEVICE, dtype=x.dtype) for shape in ((30, 20), (30,)))
    projection = x, *(t.requires_grad_() for t in linear), *router, *further
    given["project_and_route"] = x.detach().float(), *projection
    given["project_and_route_backward"] = (
        *(x.new_ones(2, 9, 30), gates, probs, rows, rows),
        *projection,
    )
    of_3_heads = [torch.randn(shape, device=DEVICE, dtype=x.dtype) for shape in ((36, 20), (36,))]
    attends = x, *(t.requires_grad_() for t in of_3_heads), *router, 3, False, None, *further
    given["route_and_attend"] = x.detach().float(), *attends
    o, gates, _, rows_of_attended, _, _, *saved = ops.route_and_attend(*given["route_and_attend"])
    saved = [t.detach() for t in (o, gates, rows_of_attended, *saved)]
    given["route_and_attend_backward"] = o, None, probs, None, saved, *attends
    of_sequences = x.detach()[:, :1].float().requires_grad_(), *attends
    of_sequences = *of_sequences[:9], None, *of_sequences[10:]  # no padding
    given["route_sequences_and_attend"] = of_sequences
    o, gates, _, rows_of_sequences, _, _, *saved = ops.route_sequences_and_attend(*of_sequences)
    saved = [t.detach() for t in (o, gates, rows_of_sequences, *saved)]
    given["route_sequences_and_attend_backward"] = o, gates, None, None, saved, *of_sequences
    given["pairs"] = active, 2
    o, gates = (t.detach().requires_grad_() for t in (q, rest[0]))
    given["weigh"] = o, gates
    given["weigh_backward"] = ops.weigh(o, gates), o, gates

    names = {name.split("::")[1] for name in backends.gpu.LIBRARY._op_defs}
    # See test_sequences.py.
    of_sequences = {"plan", "project_heads", "project_groups", "combine_heads"}
    of_sequences |= {"slice_rows", "slice_columns"}
    assert given.keys() | of_sequences == names
    for name, inputs in given.items():
        if name.endswith("backward"):
            inputs = [t.detach() if isinstance(t, torch.Tensor) else t for t in inputs]
        torch.library.opcheck(getattr(ops, name).default, inputs)


@pytest.mark.parametrize("shape", [(1, 1, 20, 1), (2, 1, 1, 20), (1, 3, 1, 1)], ids=str)
@on(CPP, *CPP16[:1])
def test_masks_spread_over_every_dimension(backend, shape):
    B, H, N, D = 2, 3, 20, 16
    active = some_active(B, N, H, 0.5)
    pairs = kernels.list_pairs(active)
    q, k, v = torch.randn(3, B, H, N, D).to(backend.dtype)
    mask = torch.randn(shape)
    full = mask.expand(B, H, N, N).contiguous()
    if backend == CPP:
        rows = kernels.select(q.transpose(1, 2), pairs, H)
        got = kernels.attend(rows, k, v, pairs, H, N, mask=mask)
        want = kernels.attend(rows, k, v, pairs, H, N, mask=full)
    else:
        routing = Routing(torch.ones(B, N, H), active, None)
        got = kernels.attend_in_place(q, k, v, routing, False, mask.bfloat16().double())
        want = kernels.attend_in_place(q, k, v, routing, False, full.bfloat16().float())
    assert torch.equal(got, want)


@on(CPP)
def test_other_operands_are_refused(backend):
    given = arguments(N=5, D=16)
    x, *rest = given["project"]
    refuse("x Double float32", OPS.project, x.double(), *rest, error=RuntimeError)
    q, k, v, token, offsets, *_ = given["attend"]
    for size in ((3, 1, 5, 5), (1, 2, 5, 5), (1, 1, 5, 3), (1, 1, 9, 5), (1, 1, 5, 9)):
        with pytest.raises((RuntimeError, IndexError)):
            kernels.attend(q, k, v, (token, offsets), 3, 5, mask=torch.zeros(size))


FIRST = torch.tensor([0])
LAST = torch.tensor([-1])
# Changes to the list of 3 heads, 2 sequences of 5 tokens, all of which run head 0; the operators follow it blindly.
WRONG_LISTS = {
    "a token beyond the last": lambda token, offsets: token.index_fill(0, LAST, 10),
    "a token before the first": lambda token, offsets: token.index_fill(0, FIRST, -1),
    "a token of another sequence": lambda token, offsets: token.index_fill(0, FIRST + 4, 5),
    "one token twice": lambda token, offsets: token.index_fill(0, FIRST + 1, 0),
    "fewer pairs than the offsets say": lambda token, offsets: token[:-1],
    "not one after the other": lambda token, offsets: token.repeat_interleave(2)[::2],
    "offsets that begin later": lambda token, offsets: (token, offsets.index_fill(0, FIRST, 1)),
    "offsets that go back": lambda token, offsets: (token, offsets.index_fill(0, FIRST + 1, 99)),
    "offsets of fewer sequences": lambda token, offsets: (token, offsets[:-1]),
    "no offsets": lambda token, offsets: (token, offsets[:0]),
}


def changed_list(wrong, token, offsets):
    changed = WRONG_LISTS[wrong](token, offsets)
    if isinstance(changed, torch.Tensor):
        changed = changed, offsets
    return changed


@on(CPP)
@pytest.mark.parametrize("wrong", WRONG_LISTS)
def test_lists_that_point_beyond_their_tensors_are_refused(backend, wrong):
    for name, given in arguments(N=5, D=16).items():
        given = detached(given)
        at = {"project": 3, "attend": 3, "combine": 4}[name]
        changed = changed_list(wrong, *given[at : at + 2])
        forward, backward = (getattr(OPS, name + end) for end in ("", "_backward"))
        outputs = forward(*given)
        if name == "attend":
            inputs = [outputs[0], *given[:3], *outputs]
        else:
            inputs = [outputs, *(t for i, t in enumerate(given[:at]) if i != at - 1)]  # no bias
        backward(*inputs, *given[at:])
        for run, tensors in ((forward, given[:at]), (backward, inputs)):
            with pytest.raises((ValueError, RuntimeError)):
                run(*tensors, *changed, *given[at + 2 :])


@on(*CPP16[:1])
@pytest.mark.parametrize("wrong", WRONG_LISTS)
def test_lists_in_16_bits_that_point_beyond_their_tensors_are_refused(backend, wrong):
    for name, given in arguments_in_place(backend.dtype, N=5, D=16).items():
        given = detached(given)
        inputs = detached(of_backward(name, given))
        for run, right in ((name, given), (f"{name}_backward", inputs)):
            at = len(right) - 4  # token, offsets, is_causal, mask
            operator = getattr(OPS, run)
            operator(*right)
            changed = changed_list(wrong, *right[at : at + 2])
            with pytest.raises((ValueError, RuntimeError)):
                operator(*right[:at], *changed, *right[at + 2 :])


@on(CPP)
@pytest.mark.parametrize("source", [[0, 1, 2, 3, 4, 6], [0, 1, -1, 3, 4, 5], [0, 1, 2, 3, 4]])
def test_sources_that_are_no_keys_are_refused(backend, source):
    q = torch.randn(30, 16)
    k, v = torch.randn(2, 1, 6, 5, 16)
    pairs = kernels.list_pairs(torch.ones(2, 5, 3, dtype=torch.bool))
    kernels.attend(q, k, v, pairs, 3, 5, source=torch.arange(6, dtype=torch.int32))
    wrong = torch.tensor(source, dtype=torch.int32)
    refuse("source", kernels.attend, q, k, v, pairs, 3, 5, source=wrong)


@on(CPP)
def test_gradients_of_other_sizes_are_refused(backend):
    x = torch.randn(2, 5, 8)
    w = torch.randn(8, 8)  # 4 candidates, 2 shared heads, the balance
    gates, active, rows, probs, *_ = OPS.route(x, w, 4, 2, 2, "released", None)
    rest = x, w, 4, 2, 2, "released", None
    OPS.route_backward(gates, probs, rows, rows, *rest)
    for index, name in enumerate(("dweights", "dprobs", "drows", "rows")):
        given = [gates, probs, rows, rows]
        given[index] = given[index][:, 1:]
        refuse(name, OPS.route_backward, *given, *rest)


@on(TRITON)
def test_other_operands_are_refused_by_triton(backend):
    q, k, v, weights, token, offsets, *_ = arguments_of_triton()
    for wrong in (
        (q, k.double(), v, weights, token, offsets),
        (q, k[:, :, :, :8], v, weights, token, offsets),
        (q, k, v, weights.double(), token, offsets),
        (q, k, v, weights[:, :2], token, offsets),
        (q, k, v, weights, token.long(), offsets),
        (q, k, v, weights, token, offsets[1:]),
        (q, k, v, weights, token, offsets, False, torch.ones(6, 6)),
        (q, k, v, weights, token, offsets, False, torch.ones(1, 1, 6, 6, requires_grad=True)),
    ):
        with pytest.raises(ValueError):
            backends.gpu.attend(*wrong)


@on(CPP)
@pytest.mark.parametrize("isa", ["avx2", pytest.param("default", marks=pytest.mark.slow)])
def test_smaller_instruction_sets(isa, backend):
    """The library for an older processor, compiled and held to the same loop."""
    folders = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": isa, "PYTHONPATH": folders}
    code = (
        "import torch, test_operators as t; from moh_vision.attention import kernels; "
        "from moh_vision.attention.kernels.__main__ import main; assert main([]) == 0; kernels.use('cpp'); "
        "[(torch.manual_seed(0), t.test_attend_equals_a_loop(*given, None)) for given in t.BACKENDS_AND_CASES"
        " if given[0] == t.CPP]; [t.test_project_and_combine_equal_linear_layers(t.CPP, sizes) for sizes in t.LINEARS]; "
        "print(torch.backends.cpu.get_cpu_capability())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT / "tests/attention",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1].lower() == isa
