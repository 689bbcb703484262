"""Validate a classifier: scores over all processes and by class, predictions, and head load."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from moh_vision.attention.model_heads import budget_rows
from moh_vision.common.io import write_csv
from moh_vision.data.batches import BadSamples, LabelledImages, evaluation_loader
from moh_vision.data.order import rank_slice
from moh_vision.engine.logging import peak_memory_mib
from moh_vision.engine.ranks import total
from moh_vision.engine.weights import whole_weights
from moh_vision.evaluation.accuracy import evaluate, likeliest
from moh_vision.models.head_load import HeadLoad


def validate(
    task: nn.Module,
    images: LabelledImages,
    data,
    accelerator,
    progress: Callable[[Iterable, str], Iterable],
) -> tuple[dict, HeadLoad, Tensor]:
    """Score a `ClassificationTask` on a split. Over all processes, every readable image counts once.

    Args:
        task: the model with its losses, wrapped by accelerate or not.
        images: the split.
        data: an `EvalDataConfig`.
        accelerator: accelerate's Accelerator.
        progress: wraps an iterable of batches in a progress bar with a title.

    Returns:
        scores: those of `evaluate`, and more; active_heads: for each attention layer, the mean number of heads that run for
            a token; active_share: these over all heads. A model with routed MLPs has active_groups and
            active_groups_share too.
        load: head load by class.
        predictions: float64 [n, 5], a row for each readable image in order: index in the source, class (the likeliest
            one if several are right), predicted class, and the probabilities of these two classes.
    """
    source = images.source
    # Unwrapped: ranks may have different numbers of batches, and DDP would wait for a rank that has no more.
    task = accelerator.unwrap_model(task).eval()
    slices = rank_slice(
        len(source), accelerator.process_index, accelerator.num_processes, data.eval_batch_size
    )
    load = HeadLoad(budget_rows(task.model), {"class": source.classes})
    unreadable = BadSamples(len(source), data.max_bad_fraction)
    predicted: list[Tensor] = []  # [B, 4] of each batch

    @torch.no_grad()
    def predict(images, labels):
        with accelerator.autocast():
            logits, stats = task(images)
        labels = likeliest(logits, labels)
        load.add(stats, labels)
        classes = torch.stack([labels, logits.argmax(-1)], 1)  # [B, 2]
        probabilities = logits.float().softmax(-1).gather(1, classes)
        predicted.append(torch.cat([classes.cpu().double(), probabilities.cpu().double()], 1))
        return logits, labels

    batches = evaluation_loader(images, slices, data.workers, unreadable)
    since = time.monotonic()
    with whole_weights(task):
        scores = evaluate(predict, progress(batches, "validation"), accelerator.device, total)
    rate = scores["images"] / max(time.monotonic() - since, 1e-9)
    load.reduce(total)
    scores.update(
        images_per_s=round(rate, 1),
        peak_memory_mib=round(peak_memory_mib()),
        unreadable=int(total(torch.tensor(len(unreadable.seen)))),
    )
    active, share = mean_active(load, "heads")
    scores.update(active_heads=active, active_share=share)
    if load.layers_of("groups"):
        active, share = mean_active(load, "groups")
        scores.update(active_groups=active, active_groups_share=share)
    readable = [i for indices in slices for i in indices if i not in unreadable.seen]
    indices = torch.tensor(readable).double()[:, None]  # [n, 1]
    empty = torch.empty(0, 4).double()  # a process may have no images
    rows = torch.cat([indices, torch.cat([empty, *predicted])], 1)
    predictions = torch.cat(gather_object([rows]))  # [n, 5]
    return scores, load, predictions[predictions[:, 0].argsort()]


def mean_active(load: HeadLoad, parts: str) -> tuple[list[float], float]:
    """Return how many "heads" or "groups" a token runs in each layer that has them, and their share of all."""
    layers = load.layers_of(parts)
    mean = load.active()
    active = [mean[layer] for layer in layers]
    share = sum(active) / sum(load.layers[layer]["heads"] for layer in layers)
    return [round(number, 3) for number in active], round(share, 4)


def confusion_of(predictions: Tensor) -> Tensor:
    """Return the confusion matrix's non-zero entries: [n, 3] class, predicted class, images."""
    pairs, images = predictions[:, 1:3].long().unique(dim=0, return_counts=True)
    return torch.cat([pairs, images[:, None]], 1)


def write_predictions(
    path: Path, predictions: Tensor, names: Sequence[str], classes: Sequence[str]
) -> None:
    """Write each image's name, class, predicted class and both probabilities as CSV."""
    rows = [("image", "class", "predicted", "probability_of_class", "probability_of_predicted")]
    for number, label, predicted, *probabilities in predictions.tolist():
        rounded = [round(probability, 6) for probability in probabilities]
        rows.append((names[int(number)], classes[int(label)], classes[int(predicted)], *rounded))
    write_csv(path, rows)


def class_accuracy(confusion: Tensor, classes: Sequence[str]) -> list[tuple[str, float | None]]:
    """Return (name, top-1 in percent) of each class; None for a class without images."""
    labels, predicted, images = confusion.T
    count = torch.zeros(len(classes), dtype=images.dtype).index_add_(0, labels, images)
    hits = images.where(labels == predicted, 0)
    right = torch.zeros_like(count).index_add_(0, labels, hits)

    def percent(right: int, count: int) -> float | None:
        if count == 0:
            return None
        return 100 * right / count

    return list(zip(classes, map(percent, right.tolist(), count.tolist())))


def class_table(top1: Sequence[tuple[str, float | None]], most: int = 20) -> str:
    """Format `class_accuracy` as a table or, for more than `most` classes, as one line: the worst and the best."""
    if len(top1) > most:
        known = sorted((share, name) for name, share in top1 if share is not None)
        worst, worst_name = known[0]
        best, best_name = known[-1]
        return f"top-1 by class: {worst:.2f} % ({worst_name}) to {best:.2f} % ({best_name})"
    width = max(len(name) for name, _ in top1)
    lines = ["top-1 by class:"]
    for name, share in top1:
        shown = "no images"
        if share is not None:
            shown = f"{share:6.2f} %"
        lines.append(f"  {name:<{width}}  {shown}")
    return "\n".join(lines)
