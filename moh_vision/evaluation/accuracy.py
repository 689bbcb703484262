"""Accuracy and loss, exact over processes: every sample counts once, none is padded."""

from typing import Callable, Dict, Iterable

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.no_grad()
def evaluate(
    predict: Callable[[Tensor, Tensor], Tensor], batches: Iterable[dict], device, reduce: Callable[[Tensor], Tensor]
) -> Dict[str, float]:
    """Top-1, top-5 and cross-entropy.

    Args:
        predict: (images [B, C, h, w], labels [B]) -> logits [B, classes]; most models ignore the labels.
        batches: dicts with images and labels, this process's share.
        device: where to compute.
        reduce: sums a tensor over processes.

    Returns:
        dict(top1, top5, loss, images): the first two in percent.
    """
    totals = torch.zeros(4, dtype=torch.float64)  # on the CPU: not every device has float64
    for batch in batches:
        labels = batch["labels"].to(device)
        logits = predict(batch["images"].to(device), labels).float()
        best = logits.topk(min(5, logits.shape[-1]), dim=-1).indices  # [B, 5]
        hit = best == labels[:, None]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        totals += torch.tensor([hit[:, 0].sum().item(), hit.sum().item(), loss.item(), len(labels)])
    top1, top5, loss, images = reduce(totals).tolist()
    if not images:
        raise ValueError("there are no images to evaluate")
    return dict(top1=100 * top1 / images, top5=100 * top5 / images, loss=loss / images, images=int(images))


def summary(scores: Dict) -> str:
    """One line of what validation found."""
    bad = f", {scores['unreadable']} unreadable ones left out" if scores["unreadable"] else ""
    return (
        f"top-1 {scores['top1']:.2f} %, top-5 {scores['top5']:.2f} %, loss {scores['loss']:.4f}, "
        f"{scores['images']} images{bad}, {scores['images_per_s']:.0f} img/s, peak {scores['peak_memory_mib']} MiB"
    )
