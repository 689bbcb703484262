"""`torch.fx.symbolic_trace` of a model with a routed layer: the graph reads the weights that it has when it runs."""

import copy

import pytest
import torch
from torch import nn

from moh_vision.attention import HeadBudget, HeadMixtureAttention

C = 24
OPTIONS = {
    "moh": dict(),
    "moh, one shared head": dict(budget=(1, 2)),
    "moh, sample scope": dict(scope="sample"),
    "moh, qk-norm": dict(qk_norm=True),
    "moa": dict(router="moa", budget=(0, 2), kv_heads=1),
    "mae": dict(router="mae", budget=(6, 0)),
    "query_norm": dict(router="query_norm"),
    "gated": dict(router="gated", budget=(6, 0)),
}


class Model(nn.Module):
    def __init__(self, budget=(2, 2), **options):
        super().__init__()
        self.attn = HeadMixtureAttention(C, HeadBudget(6, 4, *budget), **options)

    def forward(self, x):
        return self.attn(x)[0]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_graph_has_the_weights_of_its_modules(name):
    model = Model(**OPTIONS[name]).eval()
    graph = torch.fx.symbolic_trace(model)
    x = torch.randn(2, 5, C, requires_grad=True)
    other = copy.deepcopy(model)
    for p in other.parameters():
        nn.init.normal_(p, std=0.5)
    graph.load_state_dict(other.state_dict(), strict=False)  # but counts of batches
    leaves = [x, *other.parameters()]
    want = torch.autograd.grad(other(x).square().sum(), leaves, allow_unused=True)
    y = graph(x)
    torch.testing.assert_close(y, other(x), rtol=1e-4, atol=1e-4)
    of_graph = [x, *(graph.get_parameter(key) for key, _ in other.named_parameters())]
    got = torch.autograd.grad(y.square().sum(), of_graph, allow_unused=True)
    largest = max(grad.abs().max().item() for grad in want if grad is not None)
    for have, exactly in zip(got, want, strict=True):
        assert (have is None) == (exactly is None)
        if exactly is not None:
            torch.testing.assert_close(have, exactly, rtol=1e-3, atol=1e-5 * largest)
