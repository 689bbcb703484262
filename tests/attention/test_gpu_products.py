"""Projections of the heads that each sequence chose: the Triton kernels equal the PyTorch form in float64.

Without a GPU they run in Triton's interpreter.
"""

import pytest
import torch

pytest.importorskip("triton")

from moh_vision.attention.kernels import eager, gpu
from moh_vision.attention.kernels.gpu import products

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = torch.ops.moh_vision_triton
SHAPES = [
    # B, M, C, H, K, D
    (2, 70, 40, 4, 2, 24),  # nothing is a multiple of a tile, tiles span heads
    (3, 5, 72, 5, 3, 64),
    (2, 33, 130, 3, 2, 72),
    (2, 20, 48, 3, 1, 64),
    (2, 9, 24, 4, 4, 16),  # all heads
    (1, 17, 20, 2, 1, 256),
    (2, 1, 30, 3, 2, 7),
]


@pytest.fixture(autouse=True)
def empty_memory_is_nan():
    """So that what a kernel leaves out shows: torch fills new memory in deterministic mode."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def choose(B, H, K):
    """Rising heads of every sequence, not all sequences the same."""
    return torch.rand(B, H).argsort(1)[:, :K].sort(1).values.int().to(DEVICE)


def tensors(B, M, C, H, K, D, dtype=torch.float32):
    """Arguments of both operators, as leaves."""

    def random(*shape, scale=1.0, dtype=dtype):
        return (torch.randn(shape, device=DEVICE) * scale).to(dtype).requires_grad_()

    project = random(B, M, C), random(H * D, C, scale=C**-0.5), random(H * D)
    gates = random(B, K, dtype=torch.float32)
    combine = random(B, M, K, D), gates, random(C, H * D, scale=(K * D) ** -0.5), random(C)
    return project, combine


def gradients(out, leaves, grad):
    return torch.autograd.grad(out, [leaf for leaf in leaves if leaf is not None], grad)


def compare(function, oracle, leaves, *rest, tolerance=2e-6):
    """Values and all gradients of a function equal those of the oracle in float64."""
    doubles = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    out, expected = function(*leaves, *rest), oracle(*doubles, *rest)
    grad = torch.randn_like(out)
    results = [out, *gradients(out, leaves, grad)]
    wanted = [expected, *gradients(expected, doubles, grad.double())]
    for result, want in zip(results, wanted, strict=True):
        assert result.shape == want.shape and not result.isnan().any()
        assert (result.double() - want).abs().max() <= tolerance * want.abs().max().clamp(min=1)
    return results


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_to_pytorch(shape):
    B, _, _, H, K, D = shape
    heads, (project, combine) = choose(B, H, K), tensors(*shape)
    compare(gpu.project_heads, eager.project_heads, project, heads, D)
    compare(gpu.combine_heads, eager.combine_heads, combine, heads)


def test_pytorch_form_equals_all_heads():
    """The oracle itself: same as all heads, of which only some are kept."""
    heads, (project, combine) = choose(3, 5, 2), tensors(3, 4, 12, 5, 2, 8)
    x, weight, bias = project
    every = torch.nn.functional.linear(x, weight, bias).unflatten(2, (5, 8))
    kept = torch.stack([every[b, :, heads[b].long()] for b in range(3)])
    torch.testing.assert_close(eager.project_heads(*project, heads, 8), kept)
    o, gates, weight, bias = combine
    full = o.new_zeros(3, 4, 5, 8)
    for b in range(3):
        full[b, :, heads[b].long()] = o[b] * gates[b].unsqueeze(1)
    every = torch.nn.functional.linear(full.flatten(2), weight, bias)
    torch.testing.assert_close(eager.combine_heads(*combine, heads), every)


@pytest.mark.parametrize("chosen", [[[0, 2], [0, 2]], [[0, 1], [2, 3]]], ids=["repeated", "disjoint"])
def test_without_bias(chosen):
    heads = torch.tensor(chosen, dtype=torch.int32, device=DEVICE)
    project, combine = tensors(2, 10, 24, 5, 2, 24)
    dweight = compare(gpu.project_heads, eager.project_heads, (*project[:2], None), heads, 24)[2]
    assert (dweight.unflatten(0, (5, 24))[4] == 0).all()  # nobody runs the last head
    dweight = compare(gpu.combine_heads, eager.combine_heads, (*combine[:3], None), heads)[3]
    assert (dweight.unflatten(1, (5, 24))[:, 4] == 0).all()


def test_heads_that_nobody_runs_are_not_read():
    heads = torch.tensor([[1], [3]], dtype=torch.int32, device=DEVICE)
    project, combine = tensors(2, 10, 24, 4, 1, 24)
    clean = [
        compare(gpu.project_heads, eager.project_heads, project, heads, 24),
        compare(gpu.combine_heads, eager.combine_heads, combine, heads),
    ]
    with torch.no_grad():
        for weight in (
            project[1].unflatten(0, (4, 24)),
            project[2].unflatten(0, (4, 24)),
            combine[2].t().unflatten(0, (4, 24)),
        ):
            weight[0::2] = torch.nan
    poisoned = gpu.project_heads(*project, heads, 24), gpu.combine_heads(*combine, heads)
    of_project, of_combine = (
        gradients(out, leaves, torch.ones_like(out)) for out, leaves in zip(poisoned, (project, combine))
    )
    for before, out, grads in zip(clean, poisoned, (of_project, of_combine)):
        assert torch.equal(out, before[0])
        assert not any(grad.isnan().any() for grad in grads)
    for grad in of_project[1], of_project[2], of_combine[2].t():
        assert (grad.unflatten(0, (4, 24))[0::2] == 0).all()


def test_sum_in_parts_and_equal_bits(monkeypatch):
    """Programs may share one sum; the same call gives the same bits."""
    shape = B, M, C, H, K, D = 18, 33, 24, 2, 1, 24
    heads, (project, combine) = choose(B, H, K), tensors(*shape)
    counts, splits = [], products.splits
    monkeypatch.setattr(products, "splits", lambda *args: counts.append(splits(*args)) or counts[-1])
    results = [
        compare(gpu.project_heads, eager.project_heads, project, heads, D),
        compare(gpu.combine_heads, eager.combine_heads, combine, heads),
    ]
    assert counts[-1] > 1
    for function, leaves, rest, before in (
        (gpu.project_heads, project, (heads, D), results[0]),
        (gpu.combine_heads, combine, (heads,), results[1]),
    ):
        grads = [gradients(function(*leaves, *rest), leaves, torch.ones_like(before[0])) for _ in range(2)]
        assert torch.equal(function(*leaves, *rest), before[0])
        assert all(torch.equal(one, other) for one, other in zip(*grads))


def test_list_of_sequences():
    """More places than one step of the kernel reads."""
    B, H, K = 700, 5, 2
    heads = choose(B, H, K)
    heads[heads == 4] = 5  # nobody runs the last head
    runs, counts = products.list_sequences(heads, H)
    for h in range(H):
        places = (heads.flatten() == h).nonzero().flatten()
        assert counts[h] == len(places) and torch.equal(runs[h, : len(places)].long(), places)


def test_strides():
    """Weights that are part of a stacked one, tokens and outputs that are views."""
    B, M, C, H, K, D = 2, 12, 40, 3, 2, 24
    heads = choose(B, H, K).t().contiguous().t()
    stacked = torch.randn(3 * H * D, C, device=DEVICE, requires_grad=True)
    x = torch.randn(M, B, C, device=DEVICE, requires_grad=True)

    def keys(project):
        return lambda x, stacked: project(x.transpose(0, 1), stacked[H * D : 2 * H * D], None, heads, D)

    compare(keys(gpu.project_heads), keys(eager.project_heads), (x, stacked))
    o = torch.randn(B, K, M, D, device=DEVICE, requires_grad=True)  # as attention may leave it
    rest = tensors(B, M, C, H, K, D)[1][1:]

    def out(combine):
        return lambda o, *rest: combine(o.transpose(1, 2), *rest, heads)

    compare(out(gpu.combine_heads), out(eager.combine_heads), (o, *rest))
    columns = torch.randn(B, C, M, device=DEVICE, requires_grad=True)  # last dimension not contiguous

    def by_columns(project):
        return lambda x, weight: project(x.transpose(1, 2), weight.t(), None, heads, D)

    transposed = torch.randn(C, H * D, device=DEVICE, requires_grad=True)
    compare(by_columns(gpu.project_heads), by_columns(eager.project_heads), (columns, transposed))


def test_stacked_projections():
    """Queries, keys and values of the same heads in one call."""
    heads, (x, _, _) = choose(2, 3, 2), tensors(2, 6, 40, 3, 2, 24)[0]
    weight, bias = torch.randn(9 * 24, 40, device=DEVICE), torch.randn(9 * 24, device=DEVICE)
    every = torch.cat([heads, heads + 3, heads + 6], 1)
    qkv = gpu.project_heads(x, weight, bias, every, 24).unflatten(2, (3, 2))
    for i, part in enumerate(qkv.unbind(2)):
        rows = slice(i * 72, i * 72 + 72)
        torch.testing.assert_close(part, gpu.project_heads(x, weight[rows], bias[rows], heads, 24))


@pytest.mark.parametrize("dtype", [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16])
def test_16_bits(dtype):
    """The interpreter has no bfloat16."""
    shape = B, _, _, H, K, D = 2, 20, 40, 3, 2, 72
    heads, (project, combine) = choose(B, H, K), tensors(*shape, dtype=dtype)
    tolerance = 4 * torch.finfo(dtype).eps
    results = compare(gpu.project_heads, eager.project_heads, project, heads, D, tolerance=tolerance)
    results += compare(gpu.combine_heads, eager.combine_heads, combine, heads, tolerance=tolerance)
    assert {result.dtype for result in results} == {dtype, torch.float32}


def test_opcheck():
    B, M, C, H, K, D = 2, 3, 16, 3, 2, 16
    heads, (project, combine) = choose(B, H, K), tensors(B, M, C, H, K, D)
    torch.library.opcheck(OPS.project_heads, (*project, heads, D))
    torch.library.opcheck(OPS.combine_heads, (*combine, heads))
    x, weight, _ = project
    o, gates, w_o, _ = combine
    checks = "test_schema", "test_faketensor"
    grad = torch.randn(B, M, K, D, device=DEVICE)
    torch.library.opcheck(OPS.project_heads_backward, (grad, x, weight, heads, True), test_utils=checks)
    grad = torch.randn(B, M, C, device=DEVICE)
    torch.library.opcheck(OPS.combine_heads_backward, (grad, o, gates, w_o, heads), test_utils=checks)


def test_compile():
    B, M, C, H, K, D = 2, 6, 24, 3, 2, 24
    heads, (project, combine) = choose(B, H, K), tensors(B, M, C, H, K, D)
    leaves = *project, *combine[1:]

    def layer(x, weight, bias, gates, w_o, b_o):
        return gpu.combine_heads(gpu.project_heads(x, weight, bias, heads, D) * 2, gates, w_o, b_o, heads)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = layer(*leaves)
    grad = torch.randn_like(out)
    results = [out, *gradients(out, leaves, grad)]
    again = compiled(*leaves)
    for result, want in zip([again, *gradients(again, leaves, grad)], results):
        torch.testing.assert_close(result, want)


def test_refusals():
    heads, (project, combine) = choose(2, 3, 2), tensors(2, 3, 16, 3, 2, 16)
    x, weight, bias = project
    with pytest.raises(ValueError, match="one dtype"):
        gpu.project_heads(x.double(), weight, bias, heads, 16)
    with pytest.raises(ValueError, match="heads are"):
        gpu.project_heads(x, weight, bias, heads.long(), 16)
    with pytest.raises(ValueError, match="heads of 7"):
        gpu.project_heads(x, weight, bias, heads, 7)
    with pytest.raises(ValueError, match="gates are"):
        gpu.combine_heads(combine[0], combine[1].double(), *combine[2:], heads)
    out = gpu.project_heads(*project, heads, 16)
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        dx.sum().backward()
