"""The Triton kernels of decoding, against the equation in float64. Without a GPU they run in Triton's interpreter."""

import importlib
import math

import pytest
import torch
from torch import nan

pytest.importorskip("triton")

from moh_vision.attention.kernels import gpu

module = importlib.import_module("moh_vision.attention.kernels.gpu.decode")  # not the function of this name
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, D = 2, 24
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def few_splits(monkeypatch):
    """A GPU so small that splits take more than one block of keys."""
    monkeypatch.setattr(module, "MULTIPROCESSORS", 6)


def inputs(H, G, M, D=D, dtype=torch.float32):
    """Queries, and keys and values as views of caches with room for more tokens."""
    q = torch.randn(B, H, 1, D).to(DEVICE, dtype)
    k, v = torch.randn(2, B, G, M + 3, D).to(DEVICE, dtype)[..., :M, :]
    active = torch.rand(B, 1, H, device=DEVICE) < 0.5
    active[0, 0, 0], active[-1, 0, -1] = True, False
    weights = torch.randn(B, 1, H, device=DEVICE) * active
    return q, k, v, weights, active


def oracle(q, k, v, weights, active, mask=None):
    (B, H, _, D), (G, M) = q.shape, k.shape[1:3]
    q, k, v = (t.double() for t in (q, k, v))
    o = torch.zeros(B, H, D, dtype=torch.float64, device=q.device)
    for b in range(B):
        for h in range(H):
            if not active[b, 0, h]:
                continue
            g = h // (H // G)
            scores = k[b, g] @ q[b, h, 0] / math.sqrt(D)
            seen = torch.ones(M, dtype=torch.bool, device=q.device)
            if mask is not None:
                row = mask.expand(B, H, 1, M)[b, h, 0]
                if mask.dtype == torch.bool:
                    seen = row
                else:
                    seen, scores = row > -math.inf, scores + row
            gate = 1 if weights is None else weights[b, 0, h].double()
            if seen.any():
                o[b, h] = gate * scores[seen].softmax(0) @ v[b, g][seen]
    return o.view(B, 1, H * D)


def assert_near(got, want, dtype=torch.float32):
    assert got.shape == want.shape and got.dtype == dtype
    error = (got.double() - want).norm() / want.norm()
    assert error <= TOLERANCE[dtype], error


# Heads and key-value heads: keys of every head's own, groups of two, and one group of more than a tile of rows.
HEADS = {"6/6": (6, 6), "6/3": (6, 3), "70/1": (70, 1)}


@pytest.mark.parametrize("keys", [1, 130, 700])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
def test_equals_the_equation(heads, keys):
    case = inputs(*heads, keys)
    assert_near(gpu.decode(*case), oracle(*case))
    q, k, v, _, active = case
    assert_near(gpu.decode(q, k, v, None, active), oracle(q, k, v, None, active))


@pytest.mark.parametrize("D", [32, 72, 256])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=["2/2", "4/2"])
def test_widths_and_dtypes(heads, dtype, D):
    if dtype == torch.bfloat16 and heads == (4, 2) and DEVICE == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16 as integers")
    case = inputs(*heads, 70, D, dtype)
    assert_near(gpu.decode(*case), oracle(*case), dtype)


@pytest.mark.parametrize("shape", [(B, 1), (1, 1), (B, 6), (1, 6)], ids=["left padding", "all", "own", "each head"])
@pytest.mark.parametrize("heads", [(6, 6), (6, 3)], ids=["6/6", "6/3"])
def test_masks(heads, shape):
    """Of a static cache: its end is hidden from all and was never written."""
    M = 300
    q, k, v, weights, active = inputs(*heads, M)
    seen = torch.rand(*shape, 1, M, device=DEVICE) < 0.5
    seen[..., :130] = False  # whole blocks of which nothing is seen
    seen[..., 250:] = False
    for t in (k, v):
        t[:, :, :130], t[:, :, 250:] = nan, nan
    additive = torch.randn(*shape, 1, M, device=DEVICE).masked_fill(~seen, -math.inf)
    for mask in (seen, additive, additive.bfloat16()):
        assert_near(gpu.decode(q, k, v, weights, active, mask), oracle(q, k, v, weights, active, mask))


@pytest.mark.parametrize("heads", [(6, 6), (6, 3)], ids=["6/6", "6/3"])
def test_masks_of_odd_kinds(heads):
    q, k, v, weights, active = inputs(*heads, 70)
    active[:] = True
    # The lowest number instead of -inf: a row of these is a mean over all keys, as in PyTorch.
    mask = torch.full((B, 1, 1, 70), torch.finfo(torch.float32).min, device=DEVICE)
    mask[0, ..., 5:9] = 0
    assert_near(gpu.decode(q, k, v, None, active, mask), oracle(q, k, v, None, active, mask))
    # A head that sees nothing.
    seen = torch.ones(B, 6, 1, 70, dtype=torch.bool, device=DEVICE)
    seen[1, 2] = False
    for mask in (seen, torch.zeros(seen.shape, device=DEVICE).masked_fill(~seen, -math.inf)):
        o = gpu.decode(q, k, v, None, active, mask)
        assert_near(o, oracle(q, k, v, None, active, mask))
        assert (o.view(B, 6, D)[1, 2] == 0).all()


@pytest.mark.parametrize("heads", [(6, 6), (6, 3)], ids=["6/6", "6/3"])
def test_what_is_not_read_may_be_anything(heads):
    H, G = heads
    q, k, v, _, active = inputs(H, G, 100)
    active[:] = torch.tensor([[[1, 1, 0, 0, 1, 0]], [[0, 0, 0, 0, 0, 0]]], dtype=torch.bool)
    want = gpu.decode(q, k, v, None, active)
    off = ~active.view(B, G, H // G).any(-1)
    assert off.any() and not off.all()
    q, k, v = (t.clone() for t in (q, k, v))
    q[~active[:, 0]], k[off], v[off] = nan, nan, nan
    got = gpu.decode(q, k, v, torch.where(active, 1.0, nan), active)
    assert torch.equal(got, want)
    assert (got.view(B, H, D)[~active[:, 0]] == 0).all()
    k[0, 0] = nan  # what is read is read: the test would notice
    assert gpu.decode(q, k, v, None, active).isnan().any()


@pytest.mark.parametrize("heads", [(6, 6), (6, 3)], ids=["6/6", "6/3"])
def test_reads_only_what_it_wrote(heads):
    case = inputs(*heads, 300)
    want = gpu.decode(*case)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert torch.empty(1).isnan()
        assert torch.equal(gpu.decode(*case), want)
    finally:
        torch.use_deterministic_algorithms(False)


def test_strides():
    """Queries, keys and values as projections without a cache leave them, and a last dimension that is not contiguous."""
    case = inputs(6, 3, 40)
    want = gpu.decode(*case)
    q, k, v, weights, active = case
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(gpu.decode(*turned, weights, active), want)
    across = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k, v)]
    assert torch.equal(gpu.decode(*across, weights, active), want)
    assert torch.equal(gpu.decode(q, k, v, weights.transpose(1, 2).contiguous().transpose(1, 2), active), want)


def test_no_keys_or_sequences():
    q, k, v, weights, active = inputs(6, 3, 5)
    assert (gpu.decode(q, k[:, :, :0], v[:, :, :0], weights, active) == 0).all()
    assert gpu.decode(q[:0], k[:0], v[:0], None, active[:0]).shape == (0, 1, 6 * D)


def test_splits():
    for programs in (1, 8, 32, 5000):
        for keys in (1, 63, 64, 1000, 8192):
            size = module.split_keys(programs, keys, 64, 132)
            splits = -(-keys // size)
            assert size % 64 == 0
            assert splits == 1 or programs * splits <= 4 * 132
            # Nothing but whole blocks keeps the GPU from being full.
            assert size == 64 or programs * -(-keys // (size - 64)) > 4 * 132
    assert module.split_keys(32, 8192, 64, 132) == 512


@pytest.mark.parametrize("splits", [1, 7])
def test_merges_any_number_of_splits(splits, monkeypatch):
    case = inputs(6, 3, 7 * 32)
    monkeypatch.setattr(module, "MERGED", 4)
    monkeypatch.setattr(module, "split_keys", lambda *args: 7 * 32 // splits)
    assert_near(gpu.decode(*case), oracle(*case))


def test_torch_knows_the_operator():
    for heads in ((6, 6), (6, 3)):
        q, k, v, weights, active = inputs(*heads, 40)
        mask = torch.rand(B, 1, 1, 40, device=DEVICE) < 0.5
        for w, m in ((weights, None), (None, mask)):
            torch.library.opcheck(torch.ops.moh_vision_triton.decode, (q, k, v, w, active, m))
        compiled = torch.compile(gpu.decode, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(q, k, v, weights, active, mask), gpu.decode(q, k, v, weights, active, mask))


def test_refuses_other_inputs():
    q, k, v, weights, active = inputs(6, 3, 40)
    with pytest.raises(ValueError, match="float64"):
        gpu.decode(q.double(), k.double(), v.double(), weights, active)
    with pytest.raises(ValueError, match="queries"):
        gpu.decode(q.expand(-1, -1, 2, -1), k, v, weights, active)
    with pytest.raises(ValueError, match="active"):
        gpu.decode(q, k, v, weights, active.squeeze(1))
    with pytest.raises(ValueError, match="mask"):
        gpu.decode(q, k, v, weights, active, active)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_cuda_graph():
    """A captured graph follows the heads and the mask of a static cache."""
    q, k, v, weights, active = inputs(8, 8, 5000)
    mask = torch.arange(5000, device=DEVICE).view(1, 1, 1, -1) < 100
    gpu.decode(q, k, v, weights, active, mask)  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = gpu.decode(q, k, v, weights, active, mask)
    for _ in range(3):
        active.copy_(torch.rand(active.shape) < 0.5)
        weights.copy_(torch.rand(weights.shape))
        mask.copy_(torch.rand(mask.shape) < 0.5)
        graph.replay()
        assert_near(o, oracle(q, k, v, weights, active, mask))
