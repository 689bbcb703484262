"""`varlen` with a plain loop in the place of PyTorch's function, which needs a GPU."""

import importlib
import inspect
import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from moh_vision.attention import kernels
from moh_vision.attention.executors.masked import masked
from moh_vision.attention.routing import Pairs, Routing

module = importlib.import_module("moh_vision.attention.executors.varlen")
B, N, M, H, D = 2, 5, 7, 6, 4


def loop(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **unused):
    """What varlen_attn says of itself; rows of no sequence, and their gradients, are not numbers."""
    assert query.shape[1] == key.shape[1] == value.shape[1] == 1 and not unused
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q.shape == cu_seq_k.shape
    assert cu_seq_k[-1] == len(key) == len(value)
    q, k = cu_seq_q.tolist(), cu_seq_k.tolist()
    outputs = []
    for s in range(len(q) - 1):
        rows, keys = query[q[s] : q[s + 1], 0], slice(k[s], k[s + 1])
        assert len(rows) <= max_q and k[s + 1] - k[s] <= max_k
        scores = rows @ key[keys, 0].t() / math.sqrt(query.shape[2])
        outputs.append(scores.softmax(1) @ value[keys, 0])
    return torch.cat([*outputs, query[q[-1] :, 0] * torch.nan]).unsqueeze(1)


@pytest.fixture
def calls(monkeypatch):
    """The loop takes every input; the shapes of the queries of its calls."""
    seen = []

    def spy(query, *args, **kwargs):
        seen.append(tuple(query.shape))
        return loop(query, *args, **kwargs)

    monkeypatch.setattr(module, "varlen_attn", spy)
    monkeypatch.setattr(module, "fits", lambda q, k, v: True)
    return seen


def inputs(kv_heads=H, tokens=N, choices=N):
    """Queries, keys and values as views of one product; gates of `choices` (N or 1) for each sequence."""
    q = torch.randn(B, tokens, 3, H, D, dtype=torch.float64)[:, :, 0].transpose(1, 2)
    k, v = torch.randn(B, M, 2, kv_heads, D, dtype=torch.float64).transpose(1, 3).unbind(2)
    active = torch.rand(B, choices, H) < 0.5
    active[..., 1], active[..., 2], active[0, :, 3] = True, False, False  # all tokens, none, no token of a sequence
    weights = torch.randn(B, choices, H, dtype=torch.float64) * active
    return [t.requires_grad_() for t in (q, k, v, weights)], active


def oracle(q, k, v, weights, active):
    rows = []
    for b in range(B):
        for n in range(q.shape[2]):
            for h in range(H):
                c, g = min(n, active.shape[1] - 1), h // (H // k.shape[1])
                gate = active[b, c, h].double() if weights is None else weights[b, c, h]
                scores = k[b, g] @ q[b, h, n] / math.sqrt(D)
                rows.append(gate * scores.softmax(0) @ v[b, g] if active[b, c, h] else 0 * v[b, g, 0])
    return torch.stack(rows).view(B, -1, H * D)


def longer(pairs, rest):
    """The list as a GPU makes it: room for more pairs, with anything in it."""
    return Pairs(torch.cat([pairs.token, pairs.token.new_tensor(rest)]), pairs.offsets)


REST = {"no list": None, "list": [], "longer list": [2**30, -5, 0, 2**31 - 1]}


@pytest.mark.parametrize("rest", REST.values(), ids=REST.keys())
@pytest.mark.parametrize("choices", [N, 1], ids=["token", "sample"])
@pytest.mark.parametrize("kv_heads", [H, 2, 1])
def test_equals_the_equation_with_every_gradient(kv_heads, choices, rest, calls):
    tensors, active = inputs(kv_heads, choices=choices)
    pairs = None if rest is None else longer(kernels.list_pairs(active), rest)
    got = module.varlen(*tensors[:3], Routing(tensors[3], active, None, pairs))
    room = active.numel() if rest is None else int(active.sum()) + len(rest)
    assert calls == [(room * (N if choices == 1 else 1), 1, D)]
    want = oracle(*tensors, active)
    grad = torch.randn_like(want)
    got_grads, want_grads = (list(torch.autograd.grad(o, tensors, grad, materialize_grads=True)) for o in (got, want))
    for a, b in zip([got, *got_grads], [want, *want_grads]):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert (got.view(B, N, H, D)[~active.expand(B, N, H)] == 0).all()


def test_heads_that_count_as_one(calls):
    (q, k, v, _), active = inputs()
    got = module.varlen(q, k, v, Routing(None, active, None))
    torch.testing.assert_close(got, oracle(q, k, v, None, active))


@pytest.mark.parametrize("active", [False, True])
def test_no_head_and_all_heads(active, calls):
    tensors, _ = inputs()
    table = torch.full((B, N, H), active)
    got = module.varlen(*tensors[:3], Routing(tensors[3], table, None))
    want = oracle(*tensors, table)
    torch.testing.assert_close(got, want)
    for a, b in zip(
        torch.autograd.grad(got.sum(), tensors), torch.autograd.grad(want.sum(), tensors, allow_unused=True)
    ):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


def test_the_list_has_room_for_all_pairs():
    active = torch.rand(3, 4, 5) < 0.5
    token, offsets = module.list_pairs(active)
    want = kernels.list_pairs(active)
    assert len(token) == active.numel() and token.dtype == offsets.dtype == torch.int32
    assert torch.equal(offsets, want.offsets) and torch.equal(token[: offsets[-1]], want.token)


def test_compiles_in_one_graph(calls, monkeypatch):
    tensors, active = inputs(2)

    def run(q, k, v, weights, active):
        return module.varlen(q, k, v, Routing(weights, active, None))

    # Without the loop, which goes by values.
    monkeypatch.setattr(module, "varlen_attn", lambda query, key, *args: query * key.sum())
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(*tensors, active)
    want = run(*tensors, active)
    torch.testing.assert_close(got, want)
    grads = (torch.autograd.grad(o.sum(), tensors, allow_unused=True) for o in (got, want))
    for a, b in zip(*grads):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


OTHER_CALLS = {
    "mask": dict(attn_mask=torch.rand(1, 1, N, M) < 0.8),
    "causal": dict(is_causal=True),
    "dropout": dict(dropout_p=0.5),
}


@pytest.mark.parametrize("call", OTHER_CALLS.values(), ids=OTHER_CALLS.keys())
def test_other_calls_are_masked(call, calls):
    (q, k, v, weights), active = inputs()
    routing = Routing(weights, active, None)
    torch.manual_seed(1)
    got = module.varlen(q, k, v, routing, **call)
    torch.manual_seed(1)
    assert torch.equal(got, masked(q, k, v, routing, **call)) and not calls


def test_all_heads_and_other_inputs_are_masked(calls, monkeypatch):
    (q, k, v, weights), active = inputs()
    routing = Routing(None, None, None)
    assert torch.equal(module.varlen(q, k, v, routing), masked(q, k, v, routing)) and not calls
    monkeypatch.setattr(module, "fits", lambda q, k, v: False)
    routing = Routing(weights, active, None)
    assert torch.equal(module.varlen(q, k, v, routing), masked(q, k, v, routing)) and not calls


def test_inputs_that_flash_attention_takes(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def fits(device="cuda", dtype=torch.bfloat16, heads=H, keys=M, width=72, key_dtype=None, sequences=B):
        with FakeTensorMode():
            q = torch.empty(sequences, heads, N, width, dtype=dtype, device=device)
            k = torch.empty(sequences, heads, keys, width, dtype=key_dtype or dtype, device=device)
            return module.fits(q, k, k)

    assert fits() and fits(dtype=torch.float16) and fits(width=256)
    assert not fits("cpu") and not fits(dtype=torch.float32) and not fits(key_dtype=torch.float16)
    assert not fits(width=20) and not fits(width=264) and not fits(keys=0) and not fits(sequences=0)
    assert fits(sequences=4095, heads=16) and not fits(sequences=4096, heads=16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert not fits()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert not fits()


def test_pytorch_takes_the_arguments_in_this_order():
    parameters = inspect.signature(importlib.import_module("torch.nn.attention.varlen").varlen_attn).parameters
    assert list(parameters)[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv_heads", [H, 2])
def test_flash_attention(kv_heads):
    q, k, v = (torch.randn(B, h, n, 72) for h, n in ((H, 200), (kv_heads, 130), (kv_heads, 130)))
    tensors = [t.cuda().bfloat16().requires_grad_() for t in (q, k, v)]
    active = torch.rand(B, 200, H, device="cuda") < 0.5
    active[..., 1], active[..., 2], active[0, :, 3] = True, False, False
    weights = (torch.rand(B, 200, H, device="cuda") * active).requires_grad_()
    routing = Routing(weights, active, None, longer(kernels.list_pairs(active), [2**30, -5]))
    got, want = module.varlen(*tensors, routing), masked(*tensors, routing)
    grad = torch.randn_like(want)
    results = [[o, *torch.autograd.grad(o, [*tensors, weights], grad)] for o in (got, want)]
    results[1][-1] = results[1][-1] * active  # here gates of heads that are off have a gradient, which routers drop
    for a, b in zip(*results):
        assert (a - b).norm() <= 2e-2 * b.norm()
