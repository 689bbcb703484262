"""The C++ operator `attend` in bfloat16 and float16, forward and backward, against a loop in float64."""

import math

import pytest
import torch

from moh_vision.attention.kernels import build

BATCH, HEADS, GROUPS = 2, 4, 2
TOLERANCE = 2e-2  # of the largest number


@pytest.fixture(autouse=True, params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def dtype(request):
    if not build.load():
        pytest.skip(f"the C++ operators are not built: {build.COMMAND}")
    if not torch.ops.moh_vision.brgemm_available(request.param):
        pytest.skip(f"this processor has no instructions for matrices of {request.param}")
    return request.param


def make_pairs(counts, tokens):
    """Draw counts[h][b] sorted tokens of every segment; returns token [P] and offsets [H * B + 1]."""
    token, offsets = [], [0]
    for row in counts:
        for b, count in enumerate(row):
            token.append(b * tokens + torch.randperm(tokens)[:count].sort().values)
            offsets.append(offsets[-1] + count)
    return torch.cat(token).int(), torch.tensor(offsets, dtype=torch.int32)


def make_case(dtype, tokens, counts, keys=None, width=64, groups=GROUPS, batch=BATCH, heads=HEADS, source=None):
    """Inputs of one call. Keys and values lie as a projection leaves them: [B, M, 2, G, D]."""
    torch.manual_seed(tokens)
    token, offsets = make_pairs(counts, tokens)
    q = torch.randn(len(token), width, dtype=dtype)
    k, v = torch.randn(batch, keys or tokens, 2, groups, width, dtype=dtype).permute(2, 0, 3, 1, 4)
    return dict(
        q=q,
        k=k,
        v=v,
        token=token,
        offsets=offsets,
        heads=heads,
        tokens=tokens,
        source=source,
        is_causal=False,
        mask=None,
    )


def random_counts(tokens, heads=HEADS, batch=BATCH):
    torch.manual_seed(tokens)
    return torch.randint(0, tokens + 1, (heads, batch)).tolist()


def reference(q, k, v, token, offsets, heads, tokens, source, is_causal, mask):
    """The loop over segments that the operator's docstring describes, differentiable."""
    groups, keys, width = k.shape[1:]
    segments = len(offsets) - 1
    batch = segments // heads
    o, lse = [], []
    for s in range(segments):
        h, b = divmod(s, batch)
        at, g = (b, h * groups // heads) if source is None else divmod(int(source[s]), groups)
        rows = slice(int(offsets[s]), int(offsets[s + 1]))
        n = (token[rows] % tokens).long()
        scores = q[rows] @ k[at, g].T / math.sqrt(width)
        if is_causal:
            scores = scores.masked_fill(torch.arange(keys) > n[:, None], -math.inf)
        if mask is not None:
            part = mask.expand(batch, heads, tokens, keys)[b, h, n]
            scores = scores.masked_fill(~part, -math.inf) if part.dtype == torch.bool else scores + part.double()
        blind = scores.detach().amax(1, keepdim=True) == -math.inf if keys else scores.new_ones(len(n), 1).bool()
        o.append(torch.where(blind, 0, scores.masked_fill(blind, 0).softmax(1) @ v[at, g]))
        lse.append(torch.where(blind[:, 0], math.inf, scores.logsumexp(1)))
    return torch.cat(o), torch.cat(lse)


def poison():
    """Leave NaN in the memory that the next call is given."""
    for size in (2**10, 2**14, 2**18, 2**20, 2**22):
        for _ in range(4):
            torch.full((size,), math.nan)


def run(case, grad):
    """Output, log-sum-exp and the three gradients of the operator."""
    poison()
    o, lse = torch.ops.moh_vision.attend(**case)
    poison()
    rest = {name: case[name] for name in ("token", "offsets", "heads", "tokens", "source", "is_causal", "mask")}
    return o, lse, *torch.ops.moh_vision.attend_backward(grad, case["q"], case["k"], case["v"], o, lse, **rest)


def check(case):
    """Compare all that the operator computes with the loop in float64."""
    grad = torch.randn_like(case["q"])
    got = run(case, grad)
    exact = {name: case[name].detach().double().requires_grad_() for name in ("q", "k", "v")}
    o, lse = reference(**(case | exact))
    gradients = torch.autograd.grad(o, tuple(exact.values()), grad.double())
    assert got[2].dtype == got[0].dtype == case["q"].dtype and got[1].dtype == torch.float32
    for name, have, want in zip(("o", "lse", "dq", "dk", "dv"), got, (o, lse, *gradients)):
        assert have.shape == want.shape, name
        finite = want.isfinite()
        assert torch.equal(have.isfinite(), finite) and torch.equal(have[~finite].double(), want[~finite]), name
        if finite.any():
            error, size = (have - want)[finite].abs().max(), want[finite].abs().max()
            assert error <= TOLERANCE * size.clamp_min(1e-3), f"{name}: {error} of {size}"


@pytest.mark.parametrize("tokens", [1, 7, 197, 300, 1030])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths(dtype, tokens, is_causal):
    check(make_case(dtype, tokens, random_counts(tokens)) | dict(is_causal=is_causal))


@pytest.mark.parametrize("width", [24, 33, 48, 72, 80, 96, 128, 256])
def test_widths(dtype, width):
    check(make_case(dtype, 50, random_counts(50), width=width))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_share_keys(dtype, groups):
    check(make_case(dtype, 100, random_counts(100), groups=groups))


def test_empty_and_single(dtype):
    check(make_case(dtype, 40, [[0, 1], [0, 0], [40, 0], [1, 17]]))
    check(make_case(dtype, 40, [[0, 0], [0, 0], [0, 0], [0, 0]]))


def test_other_number_of_keys(dtype):
    check(make_case(dtype, 40, random_counts(40), keys=700))


def test_source(dtype):
    """Segments read any key row, some none, some several; nobody reads pair 2."""
    source = torch.tensor([5, 0, 0, 3, 1, 5, 4, 4], dtype=torch.int32)
    check(make_case(dtype, 60, random_counts(60), batch=3, source=source))


def test_no_keys(dtype):
    """Nothing runs and nothing is read: what sequences that choose no routed head pass."""
    source = torch.full((HEADS * BATCH,), -1, dtype=torch.int32)
    case = make_case(dtype, 40, [[0, 0]] * HEADS, source=source)
    case["k"], case["v"] = torch.empty(2, 1, 0, 40, 64, dtype=dtype)
    assert [x.numel() for x in run(case, torch.empty(0, 64, dtype=dtype))] == [0] * 5


@pytest.mark.parametrize(
    "name", ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
)
def test_opcheck(dtype, name):
    case = make_case(dtype, 20, random_counts(20)) | dict(is_causal=True)
    for x in ("q", "k", "v"):
        case[x].requires_grad_()
    torch.library.opcheck(torch.ops.moh_vision.attend.default, (), case, test_utils=name)


def masks(tokens):
    torch.manual_seed(1)
    seen = torch.rand(BATCH, HEADS, tokens, tokens) < 0.5
    seen[1, 2, 3] = seen[0, :, 5] = False  # rows that see no key
    added = torch.randn(BATCH, HEADS, tokens, tokens)
    return {
        "bool": seen,
        "bool of keys": seen[:, :1, :1],
        "float": added,
        "float, minus infinity": added.masked_fill(~seen, -math.inf),
        "one for all": added[:1, :1],
        "expanded": added[:, :1].expand(-1, HEADS, -1, -1),
        "strided": added.transpose(1, 2).contiguous().transpose(1, 2),
    }


@pytest.mark.parametrize("name", masks(8))
@pytest.mark.parametrize("is_causal", [False, True])
def test_masks(dtype, name, is_causal):
    for tokens in (30, 600):
        counts = random_counts(tokens)
        counts[2][1] = counts[0][0] = tokens  # the rows that see no key run
        check(make_case(dtype, tokens, counts) | dict(mask=masks(tokens)[name], is_causal=is_causal))


def test_smallest_mask_is_a_number(dtype):
    """A row of float32's smallest number weighs all keys alike: transformers masks padding so."""
    case = make_case(dtype, 30, [[30, 30]] * HEADS)
    case["mask"] = torch.zeros(BATCH, 1, 30, 30).index_fill(2, torch.tensor([4]), torch.finfo(torch.float32).min)
    o, _ = torch.ops.moh_vision.attend(**case)
    mean = case["v"].float().mean(2).repeat_interleave(HEADS // GROUPS, 1).transpose(0, 1).flatten(0, 1)
    torch.testing.assert_close(o.view(-1, 30, 64)[:, 4].float(), mean, atol=TOLERANCE, rtol=0)


def test_nan_stays_in_its_row(dtype):
    case = make_case(dtype, 197, [[150, 150]] * HEADS)
    grad = torch.randn_like(case["q"])
    clean = run(case, grad)[:3]
    case["q"][200] = math.nan
    others = torch.arange(len(case["q"])) != 200
    for have, want in zip(run(case, grad)[:3], clean):
        assert have[200].isnan().all()
        assert torch.equal(have[others], want[others])


@pytest.mark.parametrize("tokens", [197, 1030])
def test_same_bits_for_any_number_of_threads(dtype, tokens):
    case = make_case(dtype, tokens, random_counts(tokens))
    grad = torch.randn_like(case["q"])
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(case, grad))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_overflow(dtype):
    """Scores of several hundred: the softmax must take the highest off first, in every block."""
    case = make_case(dtype, 1030, random_counts(1030))
    case["q"] *= 60
    check(case)
