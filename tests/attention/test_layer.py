import pytest
import torch
from torch.nn import functional as F

from moh_vision.attention import HeadBudget, HeadMixtureAttention, head_budget

B, N, M, C = 2, 7, 9, 24
BUDGETS = [(2, 2), (0, 3), (1, 2), (6, 0), (2, 4)]
OPTIONAL = "context attn_mask padding_mask rotary cache condition context_padding"


def layer(shared=2, routed=2, **kwargs):
    return HeadMixtureAttention(C, HeadBudget(6, 4, shared, routed), **kwargs)


def test_dense_is_multi_head_attention():
    """Against torch's own module."""
    ours = layer(6, 0, router="dense")
    theirs = torch.nn.MultiheadAttention(C, 6, batch_first=True)
    state = {"in_proj_weight": ours.qkv.weight, "in_proj_bias": ours.qkv.bias}
    theirs.load_state_dict({**state, "out_proj.weight": ours.proj.weight, "out_proj.bias": ours.proj.bias})
    x = torch.randn(B, N, C)
    torch.testing.assert_close(ours(x)[0], theirs(x, x, x, need_weights=False)[0], rtol=1e-5, atol=1e-6)


def test_inactive_heads_do_not_matter():
    """A token's output does not depend on the output projection of a head that is off for it."""
    module = layer(2, 1)
    x = torch.randn(1, N, C)
    y, stats = module(x)
    off = (module.router(x).weights[0, 0] == 0).nonzero()[0].item()
    with torch.no_grad():
        module.proj.weight[:, off * 4 : (off + 1) * 4] += 10
    assert torch.equal(module(x)[0][0, 0], y[0, 0])
    assert not torch.equal(module(x)[0], y)


def test_sample_scope_chooses_once_per_sequence():
    module = layer(2, 2, scope="sample")
    _, stats = module(torch.randn(B, N, C))
    assert stats.probs.shape == (B, 1, 4)
    assert stats.counts.sum(1).tolist() == [4, 4]


def test_bfloat16_in_and_out():
    module = layer().to(torch.bfloat16)
    y, stats = module(torch.randn(B, N, C, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16 and stats.probs.dtype == torch.float32


@pytest.mark.parametrize("shared, routed", BUDGETS)
def test_traced_and_compiled(shared, routed):
    module = layer(shared, routed).eval()
    x = torch.randn(B, N, C)
    y, stats = module(x)
    for other in (
        torch.fx.symbolic_trace(module, concrete_args=dict.fromkeys(OPTIONAL.split()) | dict(is_causal=False)),
        torch.compile(module, fullgraph=True, backend="aot_eager"),
    ):
        y2, stats2 = other(x)
        torch.testing.assert_close(y2, y)
        torch.testing.assert_close(tuple(stats2), tuple(stats))


def test_head_budget_report():
    report = head_budget(torch.nn.Sequential(layer(2, 2), layer(6, 0)))
    assert (report["active"], report["heads"], report["share"]) == (10, 12, 10 / 12)
    assert report["layers"][0] == dict(name="0", heads=6, head_dim=4, shared=2, routed=2, active=4)
    with pytest.raises(ValueError, match="Linear has no HeadMixtureAttention layer; moh_vision.convert"):
        head_budget(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    "kwargs, words",
    [
        (dict(router="mho"), "router 'mho' is not one of dense, mae, moa, moh, query_norm"),
        (dict(executor="fast"), "executor 'fast' is not one of"),
        (dict(scope="image"), "scope 'image' is not one of sample, token"),
        (dict(kv_heads=4), "kv_heads=4 does not divide the 6 heads"),
    ],
)
def test_bad_arguments(kwargs, words):
    with pytest.raises(ValueError, match=words):
        layer(**kwargs)


def test_reference_against_plain_softmax():
    """The oracle itself, for one head, in three lines."""
    module = HeadMixtureAttention(C, HeadBudget(1, 8, 1, 0), router="dense", executor="reference").double()
    x = torch.randn(1, N, C, dtype=torch.float64)
    q, k, v = F.linear(x[0], module.qkv.weight, module.qkv.bias).split(8, dim=-1)
    want = F.linear((q @ k.T / 8**0.5).softmax(-1) @ v, module.proj.weight, module.proj.bias)
    torch.testing.assert_close(module(x)[0][0], want)
