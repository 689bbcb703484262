"""Validate a classifier: exact scores over processes, and head load.   python validate.py --checkpoint RUN

--checkpoint also takes a folder that publish or timm has saved, then with --data.root, and other weights, then also
with the model as --model.*. Installed: python -m moh_vision.classification.validate.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from moh_vision.classification.config import ValidateConfig
from moh_vision.classification.labels import SomeClasses, image_names
from moh_vision.classification.opening import open_with
from moh_vision.classification.scores import (
    class_accuracy,
    class_table,
    confusion_of,
    validate,
    write_predictions,
)
from moh_vision.classification.task import ClassificationTask
from moh_vision.common.cli import refuse_output
from moh_vision.common.errors import BUILD, BadData, user_errors
from moh_vision.common.progress import Progress
from moh_vision.common.wings import CLASSIFICATION
from moh_vision.data.first_look import say_what_is_lost
from moh_vision.engine.accelerator import finish, make_accelerator
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.logging import write_json
from moh_vision.engine.ranks import say
from moh_vision.engine.signals import StopSignals
from moh_vision.evaluation.accuracy import refuse_not_finite, summary
from moh_vision.models.weights import find_weights

NAME = "validate.py"


def report(config: ValidateConfig, accelerator) -> None:
    """Print the scores of --checkpoint on the val split of `data.root`, or on the images of --labels.

    --score-file, --head-load and --predictions name further outputs.
    """
    found = find_weights(config.checkpoint, wing=CLASSIFICATION.name, key="--checkpoint")
    opened = open_with(config, found, "val", accelerator)
    metadata = opened.metadata
    val = opened.splits["val"]
    names: list[str] = []
    if config.predictions:
        names = image_names(val)
    if config.labels:
        task = SomeClasses(opened.model, val.columns)
        split = config.labels
        shown_split = f"labels {split}"
    else:
        task = ClassificationTask(opened.model, balance_weight=0.0)
        split = "val"
        shown_split = split
    os.environ.setdefault(BUILD, "auto")  # on a CPU, build the operators if they are missing
    task = accelerator.prepare_model(task, evaluation_mode=True)
    is_main = accelerator.is_main_process
    progress = partial(Progress.over, enabled=is_main)
    images = opened.data("val")
    say_what_is_lost(f"data.root {config.data.root}", {split: images.source}, say)
    scores, load, predictions = validate(task, images, config.data, accelerator, progress)
    refuse_not_finite(scores, metadata["weights"])
    files = []
    evaluated = dict(
        model=metadata["architecture"],
        data=config.data.root,
        split=split,
        weights=str(metadata["weights"]),
    )
    # Write files before printing, which fails if the reader of a pipe has gone.
    if config.head_load and is_main:
        load.of = evaluated
        load.save(Path(config.head_load))
        files.append(f"head load: {config.head_load}")
    if config.predictions and is_main:
        write_predictions(Path(config.predictions), predictions, names, val.classes)
        mistakes = int((predictions[:, 1] != predictions[:, 2]).sum())
        files.append(
            f"predictions: {config.predictions}, {mistakes} of {len(predictions)} are wrong"
        )
    if config.score_file and is_main:
        results = dict(evaluated, img_size=metadata["img_size"], **scores)
        write_json(Path(config.score_file), results)
        files.append(f"scores: {config.score_file}")
    images = f"{metadata['img_size']} px, {config.data.root}, {shown_split}"
    say(f"{metadata['weights']} ({metadata['architecture']}, {images}): {summary(scores)}")
    if config.labels and len(val) < len(val.source):
        unlabelled = len(val.source) - len(val)
        say(f"{unlabelled} images of {len(val.source)} have no label and are left out")
    say(f"active heads per layer: {active_text(scores['active_heads'], scores['active_share'])}")
    if "active_groups" in scores:
        groups = active_text(scores["active_groups"], scores["active_groups_share"])
        say(f"active groups per MLP: {groups}")
    say(class_table(class_accuracy(confusion_of(predictions), val.classes)))
    for line in files:
        say(line)


def active_text(active: Sequence[float], share: float) -> str:
    """Write the mean number of active heads, or groups, of each layer, and their share of all."""
    numbers = ", ".join(f"{number:g}" for number in active)
    return f"{numbers} ({100 * share:.1f} % of all)"


def main(argv: list[str] | None = None) -> None:
    with StopSignals():
        with user_errors(NAME):
            config = parse_config(ValidateConfig, argv, NAME)
            refuse_output("--head-load", config.head_load)
            refuse_output("--score-file", config.score_file)
            refuse_output("--predictions", config.predictions)
            accelerator = make_accelerator(config.mixed_precision, config.tf32)
        # Each process reads images of its own, so each reports its bad data.
        with user_errors(NAME), user_errors(NAME, (BadData,), every_rank=True):
            report(config, accelerator)
        finish(accelerator)


if __name__ == "__main__":
    main()
