"""Perplexity, exact over processes: every token counts once."""

import math
from typing import Callable, Dict, Iterable

import torch
from torch import Tensor


@torch.no_grad()
def perplexity(
    losses: Callable[[dict], Tensor], batches: Iterable[dict], device, reduce: Callable[[Tensor], Tensor]
) -> Dict[str, float]:
    """exp of the mean negative log-likelihood of the tokens that have a label.

    Which tokens count is said by the labels alone: the windows of a language model overlap, and what is context only
    has the label -100 there, as padding has.

    Args:
        losses: a batch on the device -> negative log-likelihood in nats [B, T], aligned with its labels; of a model of
            ours `lambda batch: model.routed_loss(**batch)[1]`, in eval mode.
        batches: dicts of tensors with labels [B, T], -100 where nothing counts; this process's share.
        device: where to compute.
        reduce: sums a tensor over processes.

    Returns:
        dict(perplexity, loss in nats per token, tokens). The perplexity is inf where the loss is too large for it.

    Raises:
        ValueError: if no token has a label, or the loss of some is not finite: on every process.
    """
    total = torch.zeros(3, dtype=torch.float64)  # on the CPU: not every device has float64
    for batch in batches:
        batch = {name: value.to(device) for name, value in batch.items()}
        nll = losses(batch)[batch["labels"] != -100].cpu().double()  # [tokens]
        finite = nll.isfinite()
        total += torch.stack([nll[finite].sum(), finite.sum(), (~finite).sum()])
    loss, tokens, broken = reduce(total).tolist()
    if broken:
        raise ValueError(f"the loss of {int(broken)} of {int(tokens + broken)} tokens is not finite")
    if not tokens:
        raise ValueError("there are no tokens to judge by")
    loss /= tokens
    return dict(perplexity=math.exp(loss) if loss < 700 else math.inf, loss=loss, tokens=int(tokens))


def summary(scores: Dict) -> str:
    """One line of what `perplexity` found."""
    return f"perplexity {scores['perplexity']:.2f}, loss {scores['loss']:.4f}, {scores['tokens']} tokens"
