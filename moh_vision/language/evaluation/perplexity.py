"""Perplexity, exact over processes: every token counts once."""

import inspect
import math
from typing import Callable, Dict, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@torch.no_grad()
def perplexity(
    losses: Callable[[dict], Tensor], batches: Iterable[dict], device, reduce: Callable[[Tensor], Tensor]
) -> Dict[str, float]:
    """exp of the mean negative log-likelihood of the labelled tokens.

    Labels alone decide which tokens count: context in overlapping windows, like padding, has
    label -100.

    Args:
        losses: batch on the device -> negative log-likelihood in nats [B, T], aligned with labels; for our
            models `lambda batch: model.routed_loss(**batch)[1]`, in eval mode.
        batches: dicts of tensors with labels [B, T], -100 where nothing counts; this process's share.
        device: where to compute.
        reduce: sums a tensor over processes.

    Returns:
        dict(perplexity (inf if it overflows), loss in nats per token, tokens).
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
        raise ValueError("there are no tokens to score")
    loss /= tokens
    return dict(perplexity=exp(loss), loss=loss, tokens=int(tokens))


def summary(scores: Dict) -> str:
    """One line of what `perplexity` found."""
    return f"perplexity {scores['perplexity']:.2f}, loss {scores['loss']:.4f}, {scores['tokens']} tokens"


def exp(nats: float) -> float:
    """e to this power, inf where it is too large for a float."""
    return math.exp(nats) if nats < 700 else math.inf


def causal_losses(model: nn.Module) -> Callable[[dict], Tensor]:
    """Make `losses` of `perplexity` for any causal model of transformers in eval mode.

    Logits are float32, and computed from the first label on if the model knows `logits_to_keep`.
    """
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def losses(batch: dict) -> Tensor:
        ids, labels = batch["input_ids"], batch["labels"]  # [B, T] each
        kept = labels.shape[1] - int((labels != -100).any(0).int().argmax())
        options = dict(logits_to_keep=kept) if keeps else {}
        logits = model(input_ids=ids, use_cache=False, **options).logits[:, -kept:]  # [B, kept, V]
        nll = torch.zeros(labels.shape, device=logits.device)
        for row, scores in enumerate(logits):  # a float32 copy of a whole batch may not fit
            nll[row, -kept:] = F.cross_entropy(scores.float(), labels[row, -kept:], reduction="none")
        return nll

    return losses


def per_unit(scores: Dict, words: int, size: int) -> Dict[str, float]:
    """Return tokenizer-independent perplexities and bits_per_byte, from `perplexity` scores of a whole text
    with these words and bytes (`size`).
    """
    nats = scores["loss"] * scores["tokens"]
    return dict(
        word_perplexity=exp(nats / words) if words else math.inf,
        byte_perplexity=exp(nats / size),
        bits_per_byte=nats / size / math.log(2),
        words=words,
        bytes=size,
    )
