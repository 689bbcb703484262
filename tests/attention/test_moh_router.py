"""The MoH router against the formulas of the paper and of the released code, written out with numpy for one token."""

import numpy as np
import pytest
import torch

from moh_vision.attention import HeadBudget
from moh_vision.attention.routers.moh import MoHRouter

C = 16


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def expected_weights(router, x, heads, shared, routed, released, two_stage):
    """Jin 2024 eq. 5 and 6 for one token, or the released code's scales."""
    get = lambda layer: layer.weight.detach().double().numpy() @ x  # noqa: E731
    w = np.zeros(heads)
    alpha = np.array([0.5, 0.5])
    if shared and shared < heads:
        if two_stage:
            alpha = softmax(get(router.balance))
    else:
        alpha = np.array([0.5, 0.5]) if released else np.array([1.0, 1.0])  # nothing to balance
    if shared:
        s = softmax(get(router.shared)) if shared > 1 else np.ones(1)
        w[:shared] = 2 * alpha[0] * shared * s if released else alpha[0] * s
    if shared < heads:
        p = softmax(get(router.routed))
        top = np.argsort(-p)[:routed]
        w[shared + top] = 2 * alpha[1] * routed * p[top] / p[top].sum() if released else alpha[1] * p[top]
    return w


@pytest.mark.parametrize("shared, routed", [(2, 2), (2, 4), (0, 3), (0, 6), (1, 2), (1, 5), (6, 0), (5, 1)])
@pytest.mark.parametrize("gate_scale", ["released", "paper"])
@pytest.mark.parametrize("two_stage", [True, False])
def test_weights_follow_the_formulas(shared, routed, gate_scale, two_stage):
    router = MoHRouter(C, HeadBudget(6, 8, shared, routed), gate_scale, two_stage).double()
    for p in router.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(2, 5, C, dtype=torch.float64)
    routing = router(x)
    for b in range(2):
        for n in range(5):
            want = expected_weights(router, x[b, n].numpy(), 6, shared, routed, gate_scale == "released", two_stage)
            np.testing.assert_allclose(routing.weights[b, n].detach().numpy(), want, atol=1e-12)
            assert np.array_equal(routing.active[b, n].numpy(), want > 0)
    assert routing.weights.count_nonzero(-1).unique().tolist() == [shared + routed]


@pytest.mark.parametrize(
    "shared, routed, names",
    [(0, 3, {"routed"}), (1, 3, {"routed", "balance"}), (2, 3, {"shared", "routed", "balance"}), (6, 0, {"shared"})],
)
def test_only_the_needed_linears_exist(shared, routed, names):
    router = MoHRouter(C, HeadBudget(6, 8, shared, routed))
    assert {n.removesuffix(".weight") for n, _ in router.named_parameters()} == names
    one_stage = MoHRouter(C, HeadBudget(6, 8, shared, routed), two_stage=False)
    assert {n.removesuffix(".weight") for n, _ in one_stage.named_parameters()} == names - {"balance"}


def test_single_head_needs_no_router():
    router = MoHRouter(C, HeadBudget(1, 8, 1, 0))
    assert not list(router.parameters())
    assert torch.equal(router(torch.randn(2, 3, C)).weights, torch.ones(2, 3, 1))


def test_statistics():
    router = MoHRouter(C, HeadBudget(6, 8, 2, 3))
    x = torch.randn(2, 7, C)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    stats = router(x, padding_mask=padding).stats
    assert stats.probs.shape == stats.logits.shape == (2, 7, 4)
    assert stats.counts[:, :2].tolist() == [[7, 7], [4, 4]]
    assert stats.counts[:, 2:].sum(1).tolist() == [7 * 3, 4 * 3]
    assert stats.probs[1, 4:].abs().max() == 0 and torch.allclose(stats.probs.sum((1, 2)), torch.tensor([7.0, 4.0]))
    assert not stats.counts.requires_grad and stats.probs.requires_grad
    cut = router(x[1:, :4]).stats
    assert torch.equal(cut.counts[0], stats.counts[1])


@pytest.mark.parametrize(
    "dtype, wanted", [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_routing_is_computed_in_float32_or_better(dtype, wanted):
    router = MoHRouter(C, HeadBudget(6, 8, 2, 2)).to(dtype)
    routing = router(torch.randn(1, 3, C, dtype=dtype))
    assert routing.weights.dtype == routing.stats.logits.dtype == wanted


def test_autocast_does_not_change_routing():
    router = MoHRouter(C, HeadBudget(6, 8, 2, 2))
    x = torch.randn(2, 50, C)
    plain = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(router(x).weights, plain.weights)


def test_one_routed_head_gets_no_gradient_from_its_weight():
    """k * p / p = 1: only the balance loss reaches the router then."""
    router = MoHRouter(C, HeadBudget(6, 8, 2, 1))
    routing = router(torch.randn(2, 9, C))
    (routing.weights * torch.randn(6)).sum().backward(retain_graph=True)
    assert router.routed.weight.grad.norm() < 1e-6
    routing.stats.probs.square().sum().backward()
    assert router.routed.weight.grad.norm() > 1e-6


def test_bad_options():
    with pytest.raises(ValueError, match="gate_scale 'half' is not one of released, paper"):
        MoHRouter(C, HeadBudget(6, 8, 2, 2), gate_scale="half")
