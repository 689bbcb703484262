"""Validate a classifier: exact over processes, with the use of its heads.   python validate.py --checkpoint RUN

Also a folder that moh_vision.publish or timm has saved, with --data.root, and weights of other kinds, with the model as
--model.* too; installed: python -m moh_vision.classification.validate.
"""

import contextlib
import json
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Callable, Iterable, List, Optional, Sequence, Tuple

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from moh_vision.analysis import HeadLoad
from moh_vision.analysis.loads import FILE
from moh_vision.attention import head_budget
from moh_vision.classification.config import OpenedClsConfig, ValidateConfig
from moh_vision.classification.labels import (
    IMAGENET,
    SomeClasses,
    image_names,
    open_labelled,
    refuse_other_classifier,
)
from moh_vision.classification.prepared import prepare
from moh_vision.classification.task import ClassificationTask
from moh_vision.data.batches import BadSamples, LabelledImages, check_images_fit, evaluation_batches
from moh_vision.data.imagenet import validation_transform
from moh_vision.data.order import rank_slice
from moh_vision.data.splits import check_same_classes, open_source
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.commands import BUILD, BadData, Progress, message_of, reason_of, refuse_output, user_errors
from moh_vision.engine.io import write_csv, write_whole
from moh_vision.engine.logging import peak_memory_mib, write_json
from moh_vision.engine.ranks import say, total_over_processes
from moh_vision.engine.run import finish, index_dir, make_accelerator
from moh_vision.engine.sharding import whole_weights
from moh_vision.engine.signals import StopSignals
from moh_vision.evaluation.accuracy import evaluate, likeliest, summary
from moh_vision.models.class_names import listed
from moh_vision.models.head_budgets import set_head_budget
from moh_vision.models.pretrained import of_source
from moh_vision.models.weights import taken_for, to_validate

NAME = "validate.py"


def validate(
    task: nn.Module,
    source,
    transform: Callable,
    data,
    accelerator,
    progress: Callable[[Iterable, str], Iterable] = lambda batches, title: batches,
) -> Tuple[dict, HeadLoad, Tensor]:
    """Score a `ClassificationTask` on a split: every readable image once over all processes, none padded.

    Returns:
        scores: top1 and top5 in percent; active_heads: how many heads of each layer a token runs, on average.
        load: the use of heads by class.
        predictions: [n, 5] of the readable images in order: number in the source, class (the likeliest, if an image has
            several), predicted class, and the probabilities of both, float64.
    """
    task = accelerator.unwrap_model(task).eval()  # DistributedDataParallel would wait for ranks with fewer batches
    slices = rank_slice(len(source), accelerator.process_index, accelerator.num_processes, data.eval_batch_size)
    load = HeadLoad(head_budget(task.model)["layers"], {"class": source.classes})
    unreadable = BadSamples(len(source), data.max_bad_fraction)
    predicted: List[Tensor] = []  # [B, 4] of each batch

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

    total = total_over_processes(accelerator)
    images = LabelledImages(source, transform, seed=0, replace=False)
    batches = evaluation_batches(images, slices, data.workers, unreadable)
    since = time.monotonic()
    with whole_weights(task):
        scores = evaluate(predict, progress(batches, "validation"), accelerator.device, total)
    rate = scores["images"] / max(time.monotonic() - since, 1e-9)
    load.reduce(total)
    active = load.active()
    scores.update(
        images_per_s=round(rate, 1),
        peak_memory_mib=round(peak_memory_mib()),
        unreadable=int(total(torch.tensor(len(unreadable.seen)))),
        active_heads=[round(heads, 3) for heads in active],
        active_share=round(sum(active) / sum(layer["heads"] for layer in load.layers), 4),
    )
    read = [n for numbers in slices for n in numbers if n not in unreadable.seen]
    rows = torch.cat([torch.tensor(read).double()[:, None], torch.cat([torch.empty(0, 4).double(), *predicted])], 1)
    predictions = torch.cat(gather_object([rows]))  # [n, 5]
    return scores, load, predictions[predictions[:, 0].argsort()]


def confusion_of(predictions: Tensor) -> Tensor:
    """Return the entries of the confusion matrix that are not 0: [n, 3] class, predicted class, images."""
    pairs, images = predictions[:, 1:3].long().unique(dim=0, return_counts=True)
    return torch.cat([pairs, images[:, None]], 1)


def write_predictions(path: Path, predictions: Tensor, names: Sequence[str], classes: Sequence[str]) -> None:
    """Write each image's name, class, predicted class and the probabilities of both as CSV."""
    rows = [("image", "class", "predicted", "probability_of_class", "probability_of_predicted")]
    for number, label, found, *probabilities in predictions.tolist():
        shown = (round(p, 6) for p in probabilities)
        rows.append((names[int(number)], classes[int(label)], classes[int(found)], *shown))
    write_csv(path, rows)


def class_accuracy(confusion: Tensor, classes: Sequence[str]) -> List[Tuple[str, Optional[float]]]:
    """Return (name, top-1 in percent) of each class in order; None for a class without images."""
    labels, predicted, images = confusion.T
    of_class = torch.zeros(len(classes), dtype=images.dtype).index_add_(0, labels, images)
    right = torch.zeros_like(of_class).index_add_(0, labels, images * (labels == predicted))
    return [(name, 100 * r / n if n else None) for name, r, n in zip(classes, right.tolist(), of_class.tolist())]


def class_table(top1: Sequence[Tuple[str, Optional[float]]], most: int = 20) -> str:
    """Return `class_accuracy` as lines; for more than `most` classes one line with the best and the worst."""
    if len(top1) > most:
        known = sorted((found, name) for name, found in top1 if found is not None)
        return f"top-1 by class: {known[0][0]:.2f} % ({known[0][1]}) to {known[-1][0]:.2f} % ({known[-1][1]})"
    wide = max(len(name) for name, _ in top1)
    rows = (f"  {name:<{wide}}  {'no images' if found is None else f'{found:6.2f} %'}" for name, found in top1)
    return "\n".join(["top-1 by class:", *rows])


def write_confusion(confusion: Tensor, classes: Sequence[str], path: Path) -> None:
    """Write `confusion_of` as JSON: dict(classes: names, counts: [class, predicted class, images])."""
    write_whole(path, json.dumps(dict(classes=list(classes), counts=confusion.tolist())) + "\n")


def write_usage(load: HeadLoad, run: Path, say: Callable[[str], None]) -> None:
    """Write the use of heads by class into a run's folder, head_load.json and head_usage.png; only say what fails."""

    def draw(path: Path) -> None:
        # Its imports take a second, which --help need not wait for.
        from moh_vision.analysis.head_load import draw_usage

        draw_usage(load, str(path))

    writers = [(FILE, load.save)]
    if any(layer["shared"] + layer["routed"] < layer["heads"] for layer in load.layers):  # else all are on everywhere
        writers.append(("head_usage.png", draw))
    for name, write in writers:
        try:
            write(run / name)
        except Exception as error:
            say(f"{run / name} could not be written: {message_of(error)}")


def open_classifier(config: OpenedClsConfig, images: int = 1, **arguments) -> Tuple[nn.Module, dict]:
    """Open the classifier of --checkpoint, in eval mode; also return what `to_validate` says of it, with img_size.

    A run, or a folder that timm or moh_vision.publish has saved, brings its model: only
    `model.head_budget` may change it. Other weights need the configuration's `model` and `arguments`.
    `images` is how many there are, for the memory they take.
    """
    path, data = config.checkpoint, config.data
    batch = min(data.eval_batch_size, images)
    check_images_fit("data.img_size", data.img_size, arguments.get("in_chans", 1), batch)
    saved = (Path(path) / "config.json").is_file()
    named = config.model.name, {**config.model.arguments(), **arguments}, {}
    name, own, cfg = _saved_by_timm(path) if saved else named
    with contextlib.nullcontext() if saved else taken_for(name):
        model, about = to_validate(path, name, own, data.img_size)
    if saved:
        plain = own.get("router") == "dense" and own.get("base")  # a ViT of timm, which is called so
        about.update(of_run=True, classes=cfg.get("label_names"), name=(plain or name).split(".")[0])
        model.pretrained_cfg = cfg
        if "data.augment" not in config.given:
            data = replace(data, augment="imagenet")  # crops as the folder says
    if about["of_run"]:
        for key in sorted(config.given):
            if key.partition(".")[0] == "model" and key != "model.head_budget":
                raise ValueError(
                    f"{key} has no effect: --checkpoint {path} brings its model, {about['name']}; "
                    "allowed is model.head_budget"
                )
        if "model.head_budget" in config.given and config.model.head_budget is not None:
            set_head_budget(model, config.model.head_budget)
    prepare(model, data, about["arguments"].get("img_size"), about["classes"])
    return model, dict(about, img_size=model.pretrained_cfg["input_size"][-1])


def _saved_by_timm(folder: str) -> Tuple[str, dict, dict]:
    """Return `of_source` of a folder that `timm.models.save_for_hf` wrote, as `moh_vision.publish` does."""
    try:
        name, arguments, cfg = of_source(folder, "classifier")
        names = listed(cfg.get("label_names"), "label_names")
        return name, arguments, {**cfg, "label_names": names, "crop_mode": cfg.get("crop_mode") or "center"}
    except Exception as error:  # files of others may hold anything
        reason = f"no {error} in it" if isinstance(error, KeyError) else reason_of(error)
        raise ValueError(
            f"--checkpoint {folder}: its config.json is of no classifier that is taken ({reason})"
        ) from None


def open_model(config: OpenedClsConfig, accelerator, split: str) -> Tuple[nn.Module, dict, object, Callable]:
    """Open the classifier of --checkpoint, and one split of `data.root`, or the images of --labels.

    Returns (model, what `open_classifier` says of the model, source, transform without randomness).
    """
    with accelerator.main_process_first():
        if config.labels:
            source = open_labelled(config.data.root, config.labels, index_dir(config.output))
        else:
            source = open_source(config.data.root, split, index_dir(config.output))
    classes = IMAGENET if config.labels else source.classes
    model, about = open_classifier(config, len(source), in_chans=source.channels, num_classes=len(classes))
    named = f"--checkpoint {config.checkpoint}"
    if config.labels:
        refuse_other_classifier(model, about["classes"], named, config.labels)
    else:
        check_same_classes(about["classes"] or source.classes, named, source, config.data.root)
        if model.num_classes != len(classes):
            raise ValueError(f"{named} has {model.num_classes} classes, data.root {config.data.root} {len(classes)}")
    return model, about, source, validation_transform(model.pretrained_cfg)


def report(config: ValidateConfig, accelerator) -> None:
    """Print the scores of --checkpoint on the val split of `data.root`, or on the images of --labels.

    --score-file, --head-load and --predictions name files that are written too.
    """
    model, about, val, transform = open_model(config, accelerator, "val")
    names = image_names(config.data.root, val) if config.predictions else []
    task = SomeClasses(model, val.columns) if config.labels else ClassificationTask(model, 0.0)
    os.environ.setdefault(BUILD, "auto")
    task = accelerator.prepare_model(task, evaluation_mode=True)
    main = accelerator.is_main_process
    progress = partial(Progress.over, enabled=main)
    scores, load, predictions = validate(task, val, transform, config.data, accelerator, progress)
    split, files = config.labels or "val", []
    of = dict(model=about["name"], data=config.data.root, split=split, weights=str(about["weights"]))
    # Before anything is printed: who reads it may have gone.
    if config.head_load and main:
        load.of = of
        load.save(Path(config.head_load))
        files.append(f"head load: {config.head_load}")
    if config.predictions and main:
        write_predictions(Path(config.predictions), predictions, names, val.classes)
        wrong = int((predictions[:, 1] != predictions[:, 2]).sum())
        files.append(f"predictions: {config.predictions}, {wrong} of {len(predictions)} are wrong")
    if config.score_file and main:
        write_json(Path(config.score_file), dict(of, img_size=about["img_size"], **scores))
        files.append(f"scores: {config.score_file}")
    model_and_size = f"{about['name']}, {about['img_size']} px{f', labels {split}' if config.labels else ''}"
    say(f"{about['weights']} ({model_and_size}): {summary(scores)}")
    if config.labels and len(val) < len(val.source):
        left = len(val.source) - len(val)
        say(f"{left} images of {len(val.source)} have no label and are left out")
    heads = ", ".join(f"{a:g}" for a in scores["active_heads"])
    say(f"active heads per layer: {heads} ({100 * scores['active_share']:.1f} % of all)")
    say(class_table(class_accuracy(confusion_of(predictions), val.classes)))
    for line in files:
        say(line)


def main(argv: Optional[List[str]] = None) -> None:
    with StopSignals():
        with user_errors(NAME):
            config = parse_config(ValidateConfig, argv, NAME)
            refuse_output("--head-load", config.head_load)
            refuse_output("--score-file", config.score_file)
            refuse_output("--predictions", config.predictions)
            accelerator = make_accelerator(config.mixed_precision, config.tf32)
        with user_errors(NAME), user_errors(NAME, (BadData,), every_rank=True):
            report(config, accelerator)
        finish(accelerator)


if __name__ == "__main__":
    main()
