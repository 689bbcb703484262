"""The batch norm of MAE's gates, against nn.BatchNorm1d, in one process and in two."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from moh_vision.attention.routers.gate_norm import GateNorm
from tests.support.processes import on_two_ranks

B = 6
N = 5
C = 7


def pair(causal=False):
    """Return our norm and torch's, with equal weights; each loads the other's state."""
    ours = GateNorm(C, causal).double()
    theirs = nn.BatchNorm1d(C).double()
    nn.init.normal_(theirs.weight)
    nn.init.normal_(theirs.bias)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def assert_same_statistics(ours, theirs):
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))


def compare(rows, all_reduce=lambda x: None):
    """What `rows` of a batch become, in a process that has these, is what batch norm makes of the batch."""
    ours, theirs = pair()
    weight = torch.randn(B, C, dtype=torch.float64)
    for step in range(3):
        x = (torch.randn(B, C, dtype=torch.float64) + step).requires_grad_()
        got = ours(x[rows].unsqueeze(1)).squeeze(1)
        want = theirs(x)
        torch.testing.assert_close(got, want[rows])
        # Of the sum of all losses, whose terms are local; and those of scale and shift as DDP would sum them.
        dx, *sums = torch.autograd.grad((got * weight[rows]).sum(), (x, ours.weight, ours.bias))
        want_dx, *want_sums = torch.autograd.grad(
            (want * weight).sum(), (x, theirs.weight, theirs.bias)
        )
        for total in sums:
            all_reduce(total)
        torch.testing.assert_close((dx[rows], *sums), (want_dx[rows], *want_sums))
    assert_same_statistics(ours, theirs)
    torch.testing.assert_close(ours.eval()(x.unsqueeze(1)).squeeze(1), theirs.eval()(x))

    # Causal: what it learns is torch's; what it normalises with is what it had learned before.
    ours, theirs = pair(causal=True)
    padding = torch.arange(N) >= torch.tensor([5, 2, 1, 4, 3, 5]).unsqueeze(1)
    for step in range(3):
        x = torch.randn(B, N, C, dtype=torch.float64) + step
        want = deepcopy(theirs).eval()(x.flatten(0, 1)).view(B, N, C)
        torch.testing.assert_close(ours(x[rows], padding[rows]), want[rows])
        theirs(x[~padding])
    assert_same_statistics(ours, theirs)


def test_as_batch_norm():
    compare(slice(None))


def test_one_sequence_has_no_batch_statistics():
    ours, _ = pair()
    ours.running_mean.normal_(), ours.running_var.uniform_(0.5, 2)
    before = deepcopy(ours)
    x = torch.randn(1, 1, C, dtype=torch.float64)
    torch.testing.assert_close(ours(x), before.eval()(x))
    assert torch.equal(ours.running_mean, before.running_mean) and torch.equal(
        ours.running_var, before.running_var
    )


def test_16_bits_are_normalised_in_float32():
    x = (torch.randn(B, N, C) + 100).bfloat16()
    norm = GateNorm(C, False).bfloat16()
    y = norm(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, nn.BatchNorm1d(C)(x.float().flatten(0, 1)).view(B, N, C))
    assert norm.running_mean.dtype == torch.bfloat16
    assert (
        nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(norm))[0] is norm
    )  # it is left alone


def rank_of_two(rank):
    torch.distributed.init_process_group("gloo")
    try:
        torch.manual_seed(0)
        compare((slice(0, 2), slice(2, B))[rank], torch.distributed.all_reduce)  # unequal shares
        ours, _ = pair()
        one = ours(
            torch.ones(1, 1, C, dtype=torch.float64)
        )  # one each, alike: no spread, yet two vectors
        torch.testing.assert_close(one[0, 0], ours.bias)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_one_batch():
    on_two_ranks(rank_of_two)
