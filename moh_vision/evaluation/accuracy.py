"""Accuracy and loss, exact over processes: every sample counts once."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from moh_vision.common.errors import BadData


@torch.no_grad()
def evaluate(
    predict: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    batches: Iterable[dict],
    device,
    reduce: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """Measure top-1 and top-5 accuracy and the loss of a classifier, over all processes.

    Args:
        predict: turns images [B, C, h, w] and the labels of a batch into logits [B, classes] and labels [B], see
            `likeliest`.
        batches: dicts of images and labels; this process's share of the data.
        device: where `predict` runs.
        reduce: sums a tensor over processes.

    Returns:
        dict(top1 and, of more than 5 classes, top5, both in percent; loss: mean cross-entropy; images: their number;
        not_finite: the number of images whose logits are not finite, if there are any. These count as wrong).
    """
    totals = torch.zeros(6, dtype=torch.float64)  # on the CPU: not every device has float64
    for batch in batches:
        logits, labels = predict(batch["images"].to(device), batch["labels"].to(device))
        logits = logits.float()
        classes = logits.shape[-1]
        best = logits.topk(min(5, classes), dim=-1).indices  # [B, 5]
        finite = logits.isfinite().all(-1, keepdim=True)  # [B, 1]
        hit = (best == labels[:, None]) & finite
        loss = F.cross_entropy(logits, labels, reduction="sum")
        with_top5 = len(labels) if classes > 5 else 0  # number of images
        counts = [hit[:, 0].sum().item(), hit.sum().item(), loss.item(), len(labels), with_top5]
        counts.append(len(labels) - finite.sum().item())
        totals += torch.tensor(counts)
    top1, top5, loss, images, with_top5, not_finite = reduce(totals).tolist()
    if not images:
        raise ValueError("there are no images to evaluate")
    scores = dict(top1=100 * top1 / images)
    if with_top5:  # left out for 5 classes or fewer, where it is always 100 %
        scores["top5"] = 100 * top5 / images
    if not_finite:
        scores["not_finite"] = int(not_finite)
    return dict(scores, loss=loss / images, images=int(images))


def refuse_not_finite(scores: dict, model: object) -> None:
    """Raise BadData if the logits of some images are not finite, so that the scores of `evaluate` are no numbers."""
    if "not_finite" in scores:
        raise BadData(f"{model}: {not_finite_said(scores)}")


def not_finite_said(scores: dict) -> str:
    """Return the end of a message: how many images have logits that are not finite."""
    return f"the logits of {scores['not_finite']} of {scores['images']} images are NaN or infinite"


def likeliest(logits: Tensor, labels: Tensor) -> Tensor:
    """Return, for each image, the one of its labels that has the highest logit, [B].

    Any of an image's labels is among the top k classes if and only if this one is.

    Args:
        logits: [B, classes].
        labels: [B] or, where several are right, [B, L].
    """
    labels = labels.view(len(labels), -1)  # [B, L]
    best = logits.gather(1, labels).argmax(1, keepdim=True)  # [B, 1]
    return labels.gather(1, best)[:, 0]


def summary(scores: dict) -> str:
    """Format the scores of a validation as one line."""
    parts = [f"top-1 {scores['top1']:.2f} %"]
    if "top5" in scores:
        parts.append(f"top-5 {scores['top5']:.2f} %")
    parts.append(f"loss {scores['loss']:.4f}")
    parts.append(f"{scores['images']} images")
    if scores["unreadable"]:
        parts.append(f"{scores['unreadable']} unreadable ones left out")
    if "not_finite" in scores:
        parts.append(not_finite_said(scores))
    parts.append(f"{scores['images_per_s']:.0f} img/s")
    parts.append(f"peak {scores['peak_memory_mib']} MiB")
    return ", ".join(parts)
