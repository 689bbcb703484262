import pytest
import torch

from moh_vision.attention import HeadBudget, load_balance_loss, moa_balance_loss, router_z_loss
from moh_vision.attention.routers.dense import DenseRouter
from moh_vision.attention.routers.moa import MoARouter
from moh_vision.attention.routers.moh import MoHRouter


def test_is_equation_7_scaled_by_the_candidates():
    router = MoHRouter(16, HeadBudget(8, 4, 2, 3))
    x = torch.randn(3, 5, 16)
    routing = router(x)
    p = (x.flatten(0, 1) @ router.routed.weight.T).softmax(-1)  # [T, E]
    f = torch.zeros_like(p).scatter(1, p.topk(3, 1).indices, 1.0).mean(0)
    torch.testing.assert_close(load_balance_loss([routing.stats]), 6 * (f * p.mean(0)).sum())


def test_layers_are_averaged_and_those_without_routing_left_out():
    a, b = (MoHRouter(16, HeadBudget(8, 4, 2, 3)) for _ in range(2))
    dense = DenseRouter(16, HeadBudget(8, 4, 8, 0))
    x = torch.randn(3, 5, 16)
    la, lb = (load_balance_loss([r(x).stats]) for r in (a, b))
    torch.testing.assert_close(load_balance_loss([a(x).stats, dense(x).stats, b(x).stats]), (la + lb) / 2)
    only_dense = load_balance_loss([dense(x).stats])
    assert only_dense.item() == 0 and not only_dense.requires_grad


def test_two_processes_with_counts_summed_equal_one_batch():
    router = MoHRouter(16, HeadBudget(8, 4, 2, 3)).double()
    x = torch.randn(4, 5, 16, dtype=torch.float64)

    def gradient(loss):
        return torch.autograd.grad(loss, router.routed.weight)[0]

    parts = [router(half).stats for half in x.chunk(2)]
    sent = []
    for part in parts:
        load_balance_loss([part], lambda t: sent.append(t) or t)
    total = sent[0] + sent[1]
    losses = [load_balance_loss([part], lambda t: total) for part in parts]
    whole = load_balance_loss([router(x).stats])
    torch.testing.assert_close((losses[0] + losses[1]) / 2, whole)
    torch.testing.assert_close((gradient(losses[0]) + gradient(losses[1])) / 2, gradient(whole))
    assert not total.requires_grad


@pytest.mark.parametrize("loss", [load_balance_loss, moa_balance_loss, router_z_loss])
def test_padding_does_not_count(loss):
    router = MoARouter(16, HeadBudget(8, 4, 0, 3))
    torch.nn.init.normal_(router.gate.weight)
    x = torch.randn(2, 6, 16)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[:, 4:] = True
    padded, short = router(x, padding_mask=padding), router(x[:, :4])
    torch.testing.assert_close(loss([padded.stats]), loss([short.stats]))
