"""`project`, `attend` and `combine`: both forms equal a loop over segments in float64, values and gradients."""

import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from torch.nn import functional as F

from moh_vision.attention import HeadBudget, HeadMixtureAttention, Routing, kernels
from moh_vision.attention.kernels import build, eager
from moh_vision.attention.routing import Call

OPS = torch.ops.moh_vision


def lists(B, N, H, share):
    """A random choice with a head that all tokens run and, in the first sequence, one that none runs."""
    active = torch.rand(B, N, H) < share
    active[:, :, 0] = True
    if H > 2:
        active[0, :, 2] = False
    return active, kernels.list_pairs(active)


def attend(path, q, k, v, pairs, heads, tokens, is_causal=False, mask=None, source=None):
    if path == "cpp":
        return kernels.attend(q, k, v, pairs, heads, tokens, is_causal, mask, source)
    return eager.attend(q, k, v, *pairs, heads, tokens, source, is_causal, mask)


def attend_in_a_loop(q, k, v, pairs, heads, tokens, source, is_causal, mask):
    (_, G, M, D), segments = k.shape, len(pairs.offsets) - 1
    sequences = segments // heads
    outputs = []
    for s in range(segments):
        begin, end = pairs.offsets[s : s + 2].tolist()
        h, b = divmod(s, sequences)
        read = int(source[s]) if source is not None else b * G + h * G // heads
        key, value = k.flatten(0, 1)[read], v.flatten(0, 1)[read]
        n = pairs.token[begin:end].long() % tokens
        scores = q[begin:end] @ key.t() / math.sqrt(D)
        if mask is not None:
            rows = mask.expand(sequences, heads, tokens, M)[b, h, n]
            scores = scores.masked_fill(~rows, -math.inf) if rows.dtype == torch.bool else scores + rows
        if is_causal:
            scores = scores.masked_fill(torch.arange(M) > n.unsqueeze(1), -math.inf)
        blind = scores.isneginf().all(-1, keepdim=True)
        outputs.append(scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0) @ value)
    return torch.cat(outputs)


def layer_in_a_loop(tensors, pairs, heads, tokens, **attend):
    """project, attend, combine in the dtype of the tensors."""
    x, w, b, k, v, gates, wo, bo = tensors
    T, D = x.shape[0], k.shape[-1]
    head = torch.repeat_interleave(torch.arange(heads), pairs.offsets.diff().view(heads, -1).sum(1))
    token = pairs.token.long()
    q = F.linear(x, w, b).view(T, heads, D)[token, head]
    o = attend_in_a_loop(q, k, v, pairs, heads, tokens, attend.get("source"), attend["is_causal"], attend["mask"])
    every = x.new_zeros(T, heads, D).index_put((token, head), o * gates[token, head].unsqueeze(1))
    return F.linear(every.flatten(1), wo, bo)


MASKS = {
    None: lambda B, H, N, M: None,
    "additive": lambda B, H, N, M: torch.randn(B, H, N, M),
    "of all heads": lambda B, H, N, M: torch.rand(1, 1, N, M) < 0.7,
    "padding": lambda B, H, N, M: torch.rand(B, 1, 1, M) < 0.7,
    "a head's that hides everything": lambda B, H, N, M: torch.arange(H).view(1, H, 1, 1).expand(1, H, 1, M) != 1,
}
SHAPES = [
    # B, N, C, H, G, D, share, M, mask, causal
    (2, 197, 64, 4, 4, 16, 0.5, None, None, False),
    (2, 50, 72, 3, 3, 24, 0.5, None, None, False),  # widths that are no multiple of a vector
    (2, 33, 50, 4, 4, 72, 0.6, None, None, False),
    (1, 300, 64, 4, 1, 128, 0.4, None, None, False),  # one key-value head
    (1, 70, 64, 4, 2, 256, 0.4, 33, None, False),  # cross-attention
    (2, 19, 40, 5, 5, 7, 0.3, None, None, False),
    (3, 1, 40, 5, 5, 8, 0.3, None, None, False),
    (2, 40, 64, 4, 4, 96, 1.0, None, None, False),
    *((2, 70, 64, 4, 2, 32, 0.5, None, mask, False) for mask in MASKS if mask),
    (2, 150, 64, 4, 2, 32, 0.5, None, None, True),
    (1, 1300, 32, 2, 2, 16, 0.5, None, None, True),  # several tiles and ranges of keys
    (1, 1100, 32, 3, 3, 80, 0.7, None, None, False),
    (2, 1100, 32, 2, 2, 16, 0.3, None, "padding", False),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_to_a_loop(shape, path):
    B, N, C, H, G, D, share, M, mask, is_causal = shape
    M = M or N
    pairs = lists(B, N, H, share)[1]
    mask = MASKS[mask](B, H, N, M)
    tensors = [
        torch.randn(B * N, C), torch.randn(H * D, C) / C**0.5, torch.randn(H * D),
        torch.randn(B, M, G, D).transpose(1, 2), torch.randn(B, M, G, D).transpose(1, 2),
        torch.rand(B * N, H), torch.randn(C, H * D) / (H * D) ** 0.5, torch.randn(C),
    ]  # fmt: skip
    slope = torch.randn(B * N, C)

    exact = [t.double().requires_grad_() for t in tensors]
    loop_mask = mask.double() if mask is not None and mask.dtype != torch.bool else mask
    want = layer_in_a_loop(exact, pairs, H, N, is_causal=is_causal, mask=loop_mask)
    want_grads = torch.autograd.grad((want * slope).sum(), exact)

    ours = [t.requires_grad_() for t in tensors]
    x, w, b, k, v, gates, wo, bo = ours
    q = kernels.project(x, w, b, pairs, H)
    o = attend(path, q, k, v, pairs, H, N, is_causal, mask)
    y = kernels.combine(o, gates, wo, bo, pairs, H)
    grads = torch.autograd.grad((y * slope).sum(), ours)
    for name, got, exactly in zip(("y", *"x w b k v gates wo bo".split()), (y, *grads), (want, *want_grads)):
        assert (got - exactly).abs().max() <= 2e-5 * exactly.abs().max() + 1e-6, name


def test_whole_sequences_with_keys_of_their_own(path):
    """Scope "sample": each sequence has heads of its own, and keys and values only of these."""
    B, N, M, C, H, D = 3, 30, 21, 48, 4, 16
    active = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 0, 0]]).bool().unsqueeze(1)  # nobody runs the last head
    pairs, key_pairs = (kernels.list_pairs(active.expand(B, tokens, H)) for tokens in (N, M))
    mask = torch.rand(B, H, N, M) < 0.6
    x, context, w = torch.randn(B * N, C), torch.randn(B * M, C), torch.randn(3, H * D, C) / C**0.5
    gates, wo = torch.rand(B * N, H), torch.randn(C, H * D)
    leaves = [t.requires_grad_() for t in (x, context, w, gates, wo)]
    q = kernels.project(x, w[0], None, pairs, H)
    k, v = (kernels.project(context, part, None, key_pairs, H).view(1, -1, M, D) for part in w[1:])
    source = (pairs.offsets.diff() > 0).cumsum(0, dtype=torch.int32) - 1
    o = attend(path, q, k, v, pairs, H, N, mask=mask, source=source)
    y = kernels.combine(o, gates, wo, None, pairs, H)
    grads = torch.autograd.grad(y.square().sum(), leaves)

    x, context, w, gates, wo = exact = [t.detach().double().requires_grad_() for t in leaves]
    k, v = (F.linear(context, part).view(B, M, H, D).transpose(1, 2) for part in w[1:])
    tensors = (x, w[0], None, k, v, gates, wo, None)
    want = layer_in_a_loop(tensors, pairs, H, N, is_causal=False, mask=mask)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    for got, exactly in zip(grads, torch.autograd.grad(want.square().sum(), exact), strict=True):
        assert (got - exactly).abs().max() <= 1e-5 * exactly.abs().max()


@pytest.fixture
def operators():
    if not build.load():
        pytest.skip("the C++ operators are not built")


def arguments(B=2, N=37, C=40, H=3, G=3, D=24):
    pairs = lists(B, N, H, 0.5)[1]
    x, w, b = torch.randn(B * N, C), torch.randn(H * D, C), torch.randn(H * D)
    k, v = (torch.randn(B, N, G, D).transpose(1, 2) for _ in range(2))
    q, gates, wo = torch.randn(len(pairs.token), D), torch.rand(B * N, H), torch.randn(C, H * D)
    for t in (x, w, b, k, v, q, gates, wo):
        t.requires_grad_()
    return dict(
        project=(x, w, b, *pairs, H),
        attend=(q, k, v, *pairs, H, N, None, False, None),
        combine=(q, gates, wo, None, *pairs, H),
    )


@pytest.mark.parametrize("name", ["project", "attend", "combine"])
def test_operators_are_registered_as_torch_asks(name, operators):
    torch.library.opcheck(getattr(OPS, name), arguments()[name])


def everything(threads):
    """Outputs and gradients of the three operators, computed by so many threads."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    results = []
    for name, given in arguments(N=150, C=100, G=1, D=72).items():
        y = getattr(OPS, name)(*given)
        y = y[0] if isinstance(y, tuple) else y
        leaves = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
        results += [y.detach(), *torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), leaves)]
    return results


def test_threads_change_no_bit(operators):
    before = torch.get_num_threads()
    try:
        one, *others = (everything(threads) for threads in (1, 2, 3))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in others for a, b in zip(one, other, strict=True))


def test_nan_stays_where_it_is(path):
    """A query that is not a number spoils its own output and no other."""
    pairs = lists(1, 40, 2, 0.5)[1]
    q, k, v = torch.randn(len(pairs.token), 16), *torch.randn(2, 1, 2, 40, 16)
    q[5, 3] = math.nan
    o = attend(path, q, k, v, pairs, 2, 40)
    assert o[5].isnan().all() and not torch.cat([o[:5], o[6:]]).isnan().any()


def test_one_token_leaves_the_bias_as_it_is(path):
    """A bias [C] spread over one token is its own memory, which sums must not go into."""
    layer = HeadMixtureAttention(32, HeadBudget(4, 8, 1, 1), executor="packed")
    torch.nn.init.normal_(layer.proj.bias)
    before = [p.clone() for p in layer.parameters()]
    x = torch.randn(1, 1, 32)
    with torch.no_grad():
        y = layer(x)[0]
        layer.executor = "reference"
        torch.testing.assert_close(y, layer(x)[0])
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


@pytest.mark.parametrize("size", [(1, 1, 20, 1), (2, 1, 1, 20), (1, 3, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_spread_over_every_dimension(size, dtype, operators):
    if not kernels.native(torch.device("cpu"), dtype, "attend"):
        pytest.skip("this processor has no products in 16 bits")
    B, H, N, D = 2, 3, 20, 16
    pairs = lists(B, N, H, 0.5)[1]
    q, k, v = torch.randn(len(pairs.token), D), *torch.randn(2, B, H, N, D)
    mask = torch.randn(size)
    got = kernels.attend(*(t.to(dtype) for t in (q, k, v)), pairs, H, N, mask=mask)
    want = kernels.attend(q, k, v, pairs, H, N, mask=mask.expand(B, H, N, N).contiguous())
    torch.testing.assert_close(
        got.float(), want, **dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=0.02, atol=0.02)
    )


@pytest.mark.parametrize("size", [(3, 1, 5, 5), (1, 2, 5, 5), (1, 1, 5, 3), (1, 1, 9, 5), (1, 1, 5, 9)], ids=str)
def test_masks_of_another_size_are_refused(size, operators):
    pairs = lists(2, 5, 3, 0.5)[1]
    q, k, v = torch.randn(len(pairs.token), 16), *torch.randn(2, 2, 3, 5, 16)
    with pytest.raises((RuntimeError, IndexError)):
        kernels.attend(q, k, v, pairs, 3, 5, mask=torch.zeros(size))


@pytest.mark.parametrize("scope", ["token", "sample"])
def test_a_context_for_all_sequences_and_one_of_another_width(scope, path):
    layer = HeadMixtureAttention(32, HeadBudget(4, 8, 1, 1), scope=scope, executor="packed")
    x, context = torch.randn(3, 7, 32), torch.randn(1, 5, 32)
    y = layer(x, context)[0]
    torch.testing.assert_close(y, layer(x, context.expand(3, -1, -1).contiguous())[0])
    with pytest.raises(RuntimeError):
        layer(x, torch.randn(3, 5, 48))
    layer.executor = "masked"
    empty = torch.randn(3, 0, 32)
    want = layer(x, empty)[0]
    layer.executor = "packed"
    assert torch.equal(layer(x, empty)[0], want)


def test_gates_that_are_0_and_1(path):
    """As a bool, which query_norm hands on where no gradient is asked for."""
    layer = HeadMixtureAttention(32, HeadBudget(4, 8, 1, 1), router="query_norm", executor="packed")
    x = torch.randn(2, 7, 32)
    with torch.no_grad():
        routing, q = layer.route(x)
        call, outputs = Call(x, Routing(routing.active, routing.active, routing.stats), q=q), []
        for layer.executor in ("packed", "reference"):
            heads = layer.choose(call)
            outputs.append(heads.combine(heads.attend(*heads.project())))
        torch.testing.assert_close(*outputs)


def test_compiled_with_tokens_that_lie_across(operators):
    """Shapes without values must have the strides of the values, or a compiled backward fails."""
    layer = HeadMixtureAttention(32, HeadBudget(4, 8, 1, 1), executor="packed")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 32, 20, requires_grad=True)
    grads = [torch.autograd.grad(f(x.transpose(1, 2))[0].square().sum(), x)[0] for f in (layer, compiled)]
    torch.testing.assert_close(*grads)


def test_backward_under_autocast(path):
    layer = HeadMixtureAttention(32, HeadBudget(4, 8, 1, 1), executor="packed")
    x = torch.randn(2, 9, 32, requires_grad=True)
    (want,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
    y = layer(x)[0].square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        (got,) = torch.autograd.grad(y, x)
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_other_dtypes_are_refused_by_name(operators):
    given = list(arguments()["project"])
    given[0] = given[0].double()
    with pytest.raises(RuntimeError, match="x is Double, not float32"):
        OPS.project(*given)


@pytest.mark.parametrize("isa", ["avx2", pytest.param("default", marks=pytest.mark.slow)])
def test_smaller_instruction_sets(isa, operators):
    """The library for an older processor, compiled and held to the same loop."""
    environment = {
        **os.environ,
        "ATEN_CPU_CAPABILITY": isa,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    code = (
        "import torch, test_kernels as t; from moh_vision.attention import kernels; "
        "from moh_vision.attention.kernels.__main__ import main; assert main([]) == 0; kernels.use('cpp'); "
        "[(torch.manual_seed(0), t.test_equal_to_a_loop(shape, 'cpp')) for shape in t.SHAPES]; "
        "print(torch.backends.cpu.get_cpu_capability())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT / "tests/attention", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1].lower() == isa
