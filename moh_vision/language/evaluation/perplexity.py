"""Perplexity, exact over processes: every token counts once."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from moh_vision.attention import RoutingStats


@torch.no_grad()
def perplexity(
    losses: Callable[[dict], Tensor],
    batches: Iterable[dict],
    device,
    reduce: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """Measure the perplexity of all processes' labelled tokens.

    Args:
        losses: function of a batch on the device that returns negative log-likelihoods [B, T], aligned with the labels
            [B, T] of the batch. Labels of context and padding are -100.
        batches: this process's share of the data.
        device: where `losses` runs.
        reduce: sums a tensor over processes.

    Returns:
        dict(perplexity (inf if it overflows), loss in nats per token, tokens: their number).
    """
    total = torch.zeros(3, dtype=torch.float64)  # on the CPU: not every device has float64
    for batch in batches:
        batch = {name: value.to(device) for name, value in batch.items()}
        nll = losses(batch)[batch["labels"] != -100].cpu().double()  # [tokens]
        finite = nll.isfinite()
        total += torch.stack([nll[finite].sum(), finite.sum(), (~finite).sum()])
    loss, tokens, broken = reduce(total).tolist()
    if broken:
        raise ValueError(
            f"the loss of {int(broken)} of {int(tokens + broken)} tokens is not finite"
        )
    if not tokens:
        raise ValueError("there are no tokens to score")
    loss /= tokens
    return dict(perplexity=exp(loss), loss=loss, tokens=int(tokens))


def summary(scores: dict) -> str:
    """Return one line with the scores of `perplexity`."""
    return f"perplexity {scores['perplexity']:.2f}, loss {scores['loss']:.4f}, {scores['tokens']} tokens"


def exp(nats: float) -> float:
    """Like `math.exp`, but return inf instead of raising OverflowError."""
    if nats >= 700:
        return math.inf
    return math.exp(nats)


def routed_losses(
    model: nn.Module, accelerator, on_routing: Callable[[list[RoutingStats]], None] | None = None
) -> Callable[[dict], Tensor]:
    """Return the argument `losses` of `perplexity` for a model of ours, which is set to eval mode.

    `on_routing` is called with the statistics of every batch.
    """
    model.eval()

    def losses(batch: dict) -> Tensor:
        with accelerator.autocast():
            _, nll, stats = model.routed_loss(**batch)
        if on_routing is not None:
            on_routing(stats)
        return nll

    return losses
