"""`attend` in Triton equals a loop over pairs in float64, values and gradients, and reads nothing else."""

import importlib
import math

import pytest
import torch

pytest.importorskip("triton")

from moh_vision.attention import kernels
from moh_vision.attention.kernels.gpu import attend

module = importlib.import_module("moh_vision.attention.kernels.gpu.attend")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("o", "dq", "dk", "dv", "dweights")


@pytest.fixture
def small_blocks(monkeypatch):
    """So that few tokens fill several tiles."""
    block = dict(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1)
    monkeypatch.setattr(module, "blocks", lambda *shape: block)


def attend_in_a_loop(q, k, v, weights, active, is_causal=False, mask=None):
    """The equation, one pair at a time: active [B, N, H]."""
    (B, H, N, D), (_, G, M, _) = q.shape, k.shape
    outputs = []
    for b in range(B):
        for n in range(N):
            for h in range(H):
                if not active[b, n, h]:
                    outputs.append(torch.zeros(D, dtype=q.dtype))
                    continue
                key, value = k[b, h * G // H], v[b, h * G // H]
                scores = key @ q[b, h, n] / math.sqrt(D)
                seen = torch.ones(M, dtype=torch.bool)
                if is_causal:
                    seen = torch.arange(M) <= n
                if mask is not None:
                    row = mask.expand(B, H, N, M)[b, h, n]
                    seen, scores = (seen & row, scores) if row.dtype == torch.bool else (seen, scores + row)
                scores = scores.masked_fill(~seen, -math.inf)
                if scores.isneginf().all():
                    outputs.append(q[b, h, n] * 0)
                    continue
                gate = 1 if weights is None else weights.expand(B, N, H)[b, n, h]
                outputs.append(gate * (scores.softmax(0) @ value))
    return torch.stack(outputs).view(B, N, H * D)


def some_active(B, N, H, share=0.5):
    """A head that all tokens run, one that no token of the first sequence runs, and one that runs for its last token."""
    active = torch.rand(B, N, H) < share
    active[:, :, 0] = True
    if H > 2:
        active[0, :, 1] = False
        active[0, :, 2] = torch.arange(N) == N - 1
    return active


def list_of(active, tail=5):
    """The list of pairs, with numbers behind it that are no tokens."""
    pairs = kernels.list_pairs(active)
    token = torch.cat([pairs.token, torch.full((tail,), 2**31 - 1, dtype=torch.int32)])
    return token.to(DEVICE), pairs.offsets.to(DEVICE)


def fused(B, N, H, D):
    """Views of one product [B, N, 3 * H * D]."""
    return torch.randn(B, N, 3, H, D).permute(2, 0, 3, 1, 4)


def gradients(function, tensors, do, *args, **kwargs):
    """Output and gradients; a tensor may be None."""
    tensors = [None if x is None else x.detach().requires_grad_() for x in tensors]
    o = function(*tensors, *args, **kwargs)
    o = o if isinstance(o, torch.Tensor) else o[0]
    given = [x for x in tensors if x is not None]
    return [o, *torch.autograd.grad(o, given, do)]


def check(q, k, v, weights, active, tolerance=2e-5, **how):
    """`attend` against the loop in float64; returns its output and gradients."""
    B, H, N, D = q.shape
    active = active.expand(B, N, H)
    do = torch.randn(B, N, H * D).to(q.dtype)
    tensors = q, k, v, weights
    exact = [None if x is None else x.double() for x in tensors]
    expected = gradients(attend_in_a_loop, exact, do.double(), active, **how)
    on_device = [None if x is None else x.to(DEVICE) for x in tensors]
    how = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in how.items()}
    results = gradients(attend, on_device, do.to(DEVICE), *list_of(active), **how)
    for name, result, value in zip(NAMES, results, expected):
        error = (result.cpu().double() - value).abs().max() / value.abs().max().clamp(min=1e-3)
        assert error < tolerance, f"{name}: {error}"
    return results


@pytest.mark.parametrize("D, is_causal", [(24, False), (32, True), (72, False), (72, True), (80, False)])
def test_equals_the_loop(small_blocks, D, is_causal):
    B, N, H = 2, 37, 3
    active = some_active(B, N, H)
    weights = torch.rand(B, N, H) * active
    weights[0, 0, 0] = 0  # a head that runs with gate 0 has a gradient
    o, dq, *_, dweights = check(*fused(B, N, H, D), weights, active, is_causal=is_causal)
    assert dweights[0, 0, 0] != 0
    off = ~active.to(DEVICE)
    assert not o.unflatten(2, (H, D))[off].any() and not dq.transpose(1, 2)[off].any() and not dweights[off].any()


@pytest.mark.parametrize("D", [48, 96, 256])
def test_equals_the_loop_in_its_own_blocks(D):
    B, N, H = 1, 70, 2
    active = some_active(B, N, H, 0.3)
    check(*fused(B, N, H, D), torch.rand(B, N, H), active, is_causal=True)


@pytest.mark.parametrize(
    "kind, shape",
    [
        ("bool", (2, 4, 20, 27)),
        ("bool", (2, 1, 1, 27)),
        ("float", (2, 4, 20, 27)),
        ("float", (1, 1, 20, 27)),
        ("bool and causal", (2, 1, 1, 27)),
    ],
)
def test_masks_groups_and_cross(small_blocks, kind, shape):
    """Two query heads read one key-value head, of another sequence length; one query sees no key."""
    B, N, M, H, G, D = 2, 20, 27, 4, 2, 16
    mask = torch.rand(shape) < 0.7
    mask[0, 0, 0] = False
    if kind == "float":
        mask = torch.randn(shape).masked_fill(~mask, -math.inf)
    q, k, v = torch.randn(B, H, N, D), torch.randn(B, G, M, D), torch.randn(B, G, M, D)
    check(q, k, v, None, some_active(B, N, H), mask=mask, is_causal="causal" in kind)


@pytest.mark.parametrize("lowest", [-1e9, -1e12])
def test_a_finite_bias_hides_all_keys(small_blocks, lowest):
    """The mean of all values, as in PyTorch; the gradients of what has no digits left stay of its size."""
    B, N, H, D = 1, 20, 2, 16
    q, k, v = (x.to(DEVICE) for x in fused(B, N, H, D))
    mask = torch.full((1, 1, N, N), lowest, device=DEVICE)
    pairs = list_of(torch.ones(B, N, H, dtype=torch.bool))
    do = torch.ones(B, N, H * D, device=DEVICE)
    o, *grads = gradients(attend, (q, k, v), do, None, *pairs, mask=mask)
    torch.testing.assert_close(o.unflatten(2, (H, D)), v.mean(2).unsqueeze(1).expand(B, N, H, D))
    assert all(grad.abs().max() < 1e4 for grad in grads)


def test_sequences_far_apart(small_blocks):
    """2^31 numbers between two sequences, in memory that is hardly touched."""
    B, N, H, D, far = 2, 9, 2, 16, 2**31
    near = fused(B, N, H, D).half().to(DEVICE)
    memory = torch.empty(far + near[:, 0].numel(), dtype=near.dtype, device=DEVICE)
    apart = memory.as_strided(near.shape, (H * D, far, D, 3 * H * D, 1)).copy_(near)
    pairs, do = list_of(some_active(B, N, H)), torch.randn(B, N, H * D, device=DEVICE).half()
    for x, y in zip(gradients(attend, near, do, None, *pairs), gradients(attend, apart, do, None, *pairs)):
        assert x.equal(y)


def test_transposed_mask_and_keys_of_one_sequence(small_blocks):
    B, N, M, H, D = 2, 18, 21, 2, 16
    mask = torch.randn(M, N).t()[None, None]
    k, v = (torch.randn(1, H, M, D).expand(B, -1, -1, -1) for _ in range(2))
    check(torch.randn(B, H, D, N).transpose(2, 3), k, v, torch.rand(B, 1, H), some_active(B, N, H), mask=mask)


@pytest.mark.parametrize("token_gates", [False, True])
def test_heads_chosen_per_sequence(small_blocks, token_gates):
    B, N, H, D = 3, 21, 4, 16
    active = torch.rand(B, 1, H) < 0.5
    active[0] = torch.tensor([False, False, True, False])
    check(*fused(B, N, H, D), torch.rand(B, N if token_gates else 1, H), active)


def test_causal_over_more_and_fewer_keys(small_blocks):
    for M in (5, 60):
        q, k, v = torch.randn(1, 2, 40, 16), torch.randn(1, 1, M, 16), torch.randn(1, 1, M, 16)
        check(q, k, v, torch.rand(1, 40, 2), some_active(1, 40, 2), is_causal=True)


def test_no_pairs_and_no_keys():
    q = torch.randn(1, 2, 3, 16, device=DEVICE, requires_grad=True)
    k = torch.randn(1, 2, 3, 16, device=DEVICE, requires_grad=True)
    none = list_of(torch.zeros(1, 3, 2, dtype=torch.bool))
    every = list_of(torch.ones(1, 3, 2, dtype=torch.bool))
    for keys, pairs in ((k, none), (k[:, :, :0], every), (k[:, :1, :0], none)):
        o, lse = attend(q, keys, keys, None, *pairs)
        assert o.shape == (1, 3, 32) and not o.any() and lse[: pairs[1][-1]].isneginf().all()
        assert not any(x.any() for x in torch.autograd.grad(o.sum(), (q, k)))
    assert attend(q[:0], k[:0], k[:0], None, none[0], none[1][:1])[0].shape == (0, 3, 32)
    assert attend(q[:, :, :0], k, k, None, *none)[0].shape == (1, 0, 32)


def test_what_does_not_run_is_not_read(small_blocks):
    """NaN in the queries, gates and output gradients of heads that are off, and in keys that no token sees."""
    B, N, H, D = 2, 37, 3, 24
    active = some_active(B, N, H)
    active[1, :, 2] = False
    weights = torch.rand(B, N, H)
    do = torch.randn(B, N, H * D)
    clean = fused(B, N, H, D)
    q, k, v, spoiled, spoiled_do = clean[0].clone(), *clean[1:].clone(), weights.clone(), do.clone()
    off = ~active
    q.transpose(1, 2)[off] = spoiled[off] = math.nan
    spoiled_do.unflatten(2, (H, D))[off] = math.nan
    k[1, 2], v[1, 2] = math.nan, math.nan
    pairs = list_of(active)
    expected = gradients(attend, [x.to(DEVICE) for x in (*clean, weights)], do.to(DEVICE), *pairs, is_causal=True)
    poisoned = [x.to(DEVICE) for x in (q, k, v, spoiled)]
    for name, x, y in zip(NAMES, gradients(attend, poisoned, spoiled_do.to(DEVICE), *pairs, is_causal=True), expected):
        assert x.equal(y), name


def test_everything_is_written(small_blocks):
    """Fresh memory is full of NaN."""
    B, N, H, D = 2, 40, 3, 72
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        for active in (some_active(B, N, H, 0.1), torch.rand(B, 1, H) < 0.5):
            active[1, :, 1] = False
            check(*fused(B, N, H, D), torch.rand(B, N, H), active)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16 as integers")
    B, N, H, D = 1, 40, 2, 72
    check(*fused(B, N, H, D).to(dtype), torch.rand(B, N, H), some_active(B, N, H), tolerance=2e-2)


def operands():
    q, k, v = (x.to(DEVICE).detach().requires_grad_() for x in fused(1, 6, 2, 16))
    weights = torch.rand(1, 6, 2, device=DEVICE, requires_grad=True)
    return q, k, v, weights, *list_of(some_active(1, 6, 2), tail=0)


def test_two_runs_have_equal_bits(small_blocks):
    B, N, H, D = 2, 37, 2, 16
    active = some_active(B, N, H)
    tensors = [x.to(DEVICE) for x in (*fused(B, N, H, D), torch.rand(B, N, H))]
    do = torch.randn(B, N, H * D, device=DEVICE)
    first, second = (gradients(attend, tensors, do, *list_of(active), is_causal=True) for _ in range(2))
    for name, x, y in zip(NAMES, first, second):
        assert x.equal(y), name


def test_opcheck():
    """Schema, shapes and strides without values, and gradients under tracing."""
    arguments = operands()
    torch.library.opcheck(torch.ops.moh_vision_triton.attend.default, (*arguments, True, None))
    mask = torch.rand(1, 1, 6, 6, device=DEVICE) < 0.8
    torch.library.opcheck(
        torch.ops.moh_vision_triton.attend.default, (*arguments[:3], None, *arguments[4:], False, mask)
    )
    o, lse = attend(*arguments)
    backward = torch.ops.moh_vision_triton.attend_backward.default
    saved = [x.detach() for x in (o, *arguments[:3], o, lse, *arguments[3:])]
    torch.library.opcheck(backward, (*saved, False, None))


def test_compiles_whole():
    *tensors, token, offsets = operands()
    do = torch.randn(1, 6, 32, device=DEVICE)

    def function(q, k, v, weights):
        return attend(q * 2, k, v, weights, token, offsets, is_causal=True)[0] + 1

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for x, y in zip(gradients(compiled, tensors, do), gradients(function, tensors, do)):
        assert x.equal(y)


def test_checkpoints():
    *tensors, token, offsets = operands()
    do = torch.randn(1, 6, 32, device=DEVICE)

    def function(*tensors):
        return attend(*tensors, token, offsets)[0]

    def checkpointed(*tensors):
        return torch.utils.checkpoint.checkpoint(function, *tensors, use_reentrant=False)

    for x, y in zip(gradients(checkpointed, tensors, do), gradients(function, tensors, do)):
        assert x.equal(y)


@pytest.fixture
def tf32():
    """Set the newer way, after which torch.get_float32_matmul_precision raises."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"


def test_every_operator_runs_with_tf32(tf32):
    q, k, v, weights, token, offsets = operands()
    attend(q, k, v, weights, token, offsets)[0].sum().backward()
    x, weight = (torch.randn(shape, device=DEVICE, requires_grad=True) for shape in ((1, 6, 16), (4, 16)))
    torch.ops.moh_vision_triton.route(x, weight, 4, 0, 2, "released", None)[0].sum().backward()


@pytest.mark.parametrize("kind, gates", [("none", None), ("causal", 1), ("bool", 6)])
def test_second_derivatives_equal_the_loop(kind, gates):
    """Of a sum too, whose gradient has no graph; the list is longer than what runs."""
    active = some_active(2, 6, 4)
    q, k, v = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 6, 16), torch.randn(2, 2, 6, 16)
    weights = None if gates is None else torch.rand(2, gates, 4)
    how = dict(is_causal=True) if kind == "causal" else {}
    if kind == "bool":
        how = dict(mask=torch.rand(2, 1, 6, 6) < 0.6)
    for loss in (torch.Tensor.sum, lambda o: o.square().sum()):
        results = []
        for function, pairs, convert in (
            (attend_in_a_loop, [active], lambda x: x.double()),
            (lambda *args, **kwargs: attend(*args, **kwargs)[0], list_of(active), lambda x: x.to(DEVICE)),
        ):
            tensors = [convert(x).requires_grad_() for x in (q, k, v, weights) if x is not None]
            given = [*tensors, None][:4]
            on = {name: x.to(given[0].device) if isinstance(x, torch.Tensor) else x for name, x in how.items()}
            first = torch.autograd.grad(loss(function(*given, *pairs, **on)), tensors, create_graph=True)
            norm = sum(grad.square().sum() for grad in first)
            results.append(torch.autograd.grad(norm, tensors))
        for name, want, got in zip(NAMES[1:], *results):
            assert (got.cpu() - want).abs().max() <= 1e-4 * want.abs().max().clamp(min=1e-3), name


def test_other_operands_are_refused():
    q, k, v, weights, token, offsets = operands()
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
            attend(*wrong)
