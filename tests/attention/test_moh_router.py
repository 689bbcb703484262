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
    "heads, shared, routed, names",
    [
        (6, 0, 3, {"routed"}),
        (6, 1, 3, {"routed", "balance"}),
        (6, 2, 3, {"shared", "routed", "balance"}),
        (6, 6, 0, {"shared"}),
        (1, 1, 0, set()),
    ],
)
def test_only_the_needed_linears_exist(heads, shared, routed, names):
    router = MoHRouter(C, HeadBudget(heads, 8, shared, routed))
    assert {n.removesuffix(".weight") for n, _ in router.named_parameters()} == names
    one_stage = MoHRouter(C, HeadBudget(heads, 8, shared, routed), two_stage=False)
    assert {n.removesuffix(".weight") for n, _ in one_stage.named_parameters()} == names - {"balance"}


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
