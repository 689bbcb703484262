"""Perplexity, exact over processes: every token counts once."""

import inspect
import math
from typing import Callable, Dict, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
        raise ValueError("there are no tokens to score")
    loss /= tokens
    return dict(perplexity=math.exp(loss) if loss < 700 else math.inf, loss=loss, tokens=int(tokens))


def summary(scores: Dict) -> str:
    """One line of what `perplexity` found."""
    return f"perplexity {scores['perplexity']:.2f}, loss {scores['loss']:.4f}, {scores['tokens']} tokens"


def sliding_windows(
    ids: Tensor, context: int, stride: int, batch_size: int = 1, process: int = 0, processes: int = 1
) -> Iterator[Dict[str, Tensor]]:
    """Windows of a text for `perplexity`: every token but the first is a label once.

    Baevski and Auli 2019, section 4.3. The first window labels all it predicts; each further one is full, lies `stride` further
    and labels only what is new, so that those labels have at least context - stride + 1 tokens before them, the one they
    are predicted from included. The last ends with the text and labels what is left.

    Args:
        ids: int64 [n + 1]; the first is what comes before the text, such as bos.
        context: tokens that the model sees at a time, C.
        stride: S, 1 <= S <= C; S = C are blocks side by side, S = 1 is the dearest.
        batch_size: windows at a time.
        process, processes: which share of the batches.

    Yields:
        dict(input_ids, labels), int64 [B, C] ([1, min(C, n)] for the first window); labels are aligned with outputs and
        -100 where a window before has them.

    Raises:
        ValueError: for a stride that is none.
    """
    if not 1 <= stride <= context:
        raise ValueError(f"stride {stride}: allowed are 1 to the context, {context}")
    n = len(ids) - 1
    ends = [min(context, n), *range(context + stride, n, stride)]
    ends += [n] if ends[-1] < n else []
    rows = []
    for i, end in enumerate(ends):
        start = max(0, end - context)
        labels = ids[start + 1 : end + 1].clone()
        labels[: ends[i - 1] - start if i else 0] = -100
        rows.append((ids[start:end], labels))
    batches = [rows[:1], *(rows[i : i + batch_size] for i in range(1, len(rows), batch_size))] if n > 0 else []
    for batch in batches[process::processes]:
        inputs, labels = zip(*batch)
        yield dict(input_ids=torch.stack(inputs), labels=torch.stack(labels))


def causal_losses(model: nn.Module) -> Callable[[dict], Tensor]:
    """What `perplexity` asks of a model, for any causal language model of transformers in eval mode.

    Only positions from the first label on get logits, where the model knows `logits_to_keep`; they are read in float32.
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
    """Perplexities that tokenizers can be compared by, of the same sum of losses.

    Args:
        scores: of `perplexity`, over a whole text.
        words: of that text.
        size: its bytes.

    Returns:
        dict(word_perplexity, byte_perplexity, bits_per_byte, words, bytes).
    """
    nats = scores["loss"] * scores["tokens"]
    word = nats / words if words else math.inf
    return dict(
        word_perplexity=math.exp(word) if word < 700 else math.inf,
        byte_perplexity=math.exp(nats / size) if nats / size < 700 else math.inf,
        bits_per_byte=nats / size / math.log(2),
        words=words,
        bytes=size,
    )
