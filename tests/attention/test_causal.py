"""MAE's gates in a decoder, where no token may learn of a later one; of other routers: test_cache.py."""

from copy import deepcopy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support import layers
from tests.support.layers import ROUTERS, C, H

B, N = 2, 9
MAE = ["mae running", "mae window"]
PADDING = torch.arange(N) >= torch.tensor([[7], [5]])
# A prompt and an answer, each padded.
HOLES = torch.tensor([[1, 1, 0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0, 1]]).bool()


def build(**options):
    return layers.build(dtype=torch.float64, **options)


def means(x, padding, window):
    """What a causal gate reads, token by token."""
    n = torch.arange(x.shape[1])
    seen = (n <= n[:, None]) & (n > n[:, None] - window) & ~padding[:, None]  # [B, N, N]
    return seen.double() @ x / seen.sum(2, keepdim=True).clamp(min=1)


@pytest.mark.parametrize("name", MAE)
@pytest.mark.parametrize("training", [False, True])
def test_the_gate_of_a_token(name, training):
    """Its formula, with running statistics, and where these go in training."""
    layer = build(**ROUTERS[name]).train(training)
    router = layer.router
    x = torch.randn(B, N, C, dtype=torch.float64)
    norm = deepcopy(router.norm)
    routing = router(x, None, HOLES)
    pooled = means(x, HOLES, router.window or N)
    normed = (pooled - norm.running_mean) / (
        norm.running_var + 1e-5
    ).sqrt() * norm.weight + norm.bias
    hidden = torch.tanh(normed @ router.hidden.weight.T + router.hidden.bias)
    g = (hidden @ router.out.weight.T + router.out.bias).softmax(-1)  # [B, N, experts]
    for j in range(H):  # expert j leaves head j out
        torch.testing.assert_close(
            routing.weights[~HOLES][:, j], (H / (H - 1) * (1 - g[..., j]))[~HOLES]
        )
    torch.testing.assert_close(routing.stats.probs, g * ~HOLES.unsqueeze(-1))
    assert routing.stats.counts.tolist() == [[6] * H, [5] * H]

    real = pooled[~HOLES]  # [11, C]
    share = 0.1 if training else 0.0
    torch.testing.assert_close(
        router.norm.running_mean, (1 - share) * norm.running_mean + share * real.mean(0)
    )
    torch.testing.assert_close(
        router.norm.running_var, (1 - share) * norm.running_var + share * real.var(0)
    )


@pytest.mark.parametrize("name", MAE)
def test_every_token_draws_its_own_expert(name):
    layer = build(**ROUTERS[name]).train()
    layer.router.set_mode("random")
    routing = layer.router(
        torch.randn(200, N, C, dtype=torch.float64), None, PADDING[1:].expand(200, -1)
    )
    left_out = (routing.weights == 0).double()
    assert left_out.sum(-1).unique().tolist() == [1]
    assert (left_out[:, 0] != left_out[:, 1]).any(-1).double().mean() > 0.7  # 5/6 of the sequences
    assert routing.stats.counts.sum(1).unique().tolist() == [5 * (H - 1)]
    assert (routing.stats.probs[:, 5:] == 0).all() and not routing.stats.probs.requires_grad


@pytest.mark.parametrize("pool", ["running", "window", "sequence"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_repeats_the_forward_exactly(pool, reentrant):
    """The running statistics have moved on by then; they must move once, and the repetition use those of before."""
    x = torch.randn(B, N, C, dtype=torch.float64)
    plain = build(budget=(6, 0), router="mae", router_kwargs=dict(pool=pool, dropout=0.0)).train()
    kept = deepcopy(plain)

    def forward(layer, x):
        return layer(x, is_causal=True, padding_mask=PADDING)[0]

    for scale in (1, 3, 1):
        plain.zero_grad(), kept.zero_grad()
        inputs = [(scale * x).requires_grad_() for _ in range(2)]
        forward(plain, inputs[0]).square().sum().backward()
        checkpoint(forward, kept, inputs[1], use_reentrant=reentrant).square().sum().backward()
        grads = [
            [x.grad, *(p.grad for p in layer.parameters())]
            for x, layer in zip(inputs, (plain, kept))
        ]
        assert all(map(torch.equal, *grads))
    assert all(map(torch.equal, plain.buffers(), kept.buffers()))
    assert plain.router.norm.num_batches_tracked == 3
