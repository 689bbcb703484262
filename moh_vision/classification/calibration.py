"""A classifier and its images: of training for `moh_vision.analysis.search`, of validation for `budget_curve`."""

from typing import List, Tuple

from accelerate.utils import send_to_device
from torch import Tensor
from torch.nn import functional as F

from moh_vision.analysis.budget_curve import Scored
from moh_vision.analysis.search import CONVERTED, Calibration, mean_over
from moh_vision.classification.config import OpenedClsConfig
from moh_vision.classification.task import ClassificationTask
from moh_vision.classification.validate import open_model, validate
from moh_vision.data.batches import BadSamples, LabelledImages, calibration_halves, evaluation_batches
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.commands import Progress
from moh_vision.engine.run import make_accelerator
from moh_vision.models.convert import convert
from moh_vision.models.pretrained import is_dense


def open_parts(argv: List[str], command: str, split: str, option: str) -> Tuple:
    """Open the model of --checkpoint, and the images of a split as validation sees them.

    Returns (configuration, accelerator, model, what `open_model` says of the model, images, their
    unreadable samples). `option` of the `command` says how many heads run, for a message.
    """
    config = parse_config(OpenedClsConfig, argv, command)
    accelerator = make_accelerator(config.mixed_precision, config.tf32)
    model, about, source, transform = open_model(config, accelerator, split)
    if about["of_run"] and "model.head_budget" in config.given:
        raise ValueError(f"model.head_budget has no effect: {option} says how many heads run")
    images = LabelledImages(source, transform, seed=0, replace=False)
    return config, accelerator, model, about, images, BadSamples(len(source), config.data.max_bad_fraction)


def open_calibration(argv: List[str], images: int) -> Calibration:
    """Open the model of --checkpoint, converted if dense, and its cross-entropy on training images.

    The images are prepared as for validation: `images` for the search, and as many others to compare.
    """
    config, accelerator, model, about, dataset, unreadable = open_parts(argv, "search", "train", "--share")
    searched, others = calibration_halves(dataset, images, config.data.workers, unreadable)
    dense = is_dense(model)
    if dense:
        model = convert(model, CONVERTED, calibrate=[batch["images"] for batch in searched])
    model = model.to(accelerator.device).eval()

    def loss(batch: dict) -> Tensor:
        batch = send_to_device(batch, accelerator.device)
        with accelerator.autocast():
            logits, _ = model.forward_routed(batch["images"])  # [B, classes]
        return F.cross_entropy(logits.float(), batch["labels"])

    of = dict(weights=about["weights"], model=about["name"], data=config.data.root, split="train")
    of.update(images=images, converted=dense, loss="cross-entropy")
    return Calibration(model, mean_over(searched, loss), mean_over(others, loss), of)


def open_scored(argv: List[str]) -> Scored:
    """Open the model of --checkpoint, and its scores on the validation images."""
    config, accelerator, model, about, images, unreadable = open_parts(argv, "budget_curve", "val", "--shares")
    task = ClassificationTask(model.to(accelerator.device), 0.0)
    numbers = range(min(config.data.eval_batch_size, len(images.source)))
    (batch,) = send_to_device(list(evaluation_batches(images, [list(numbers)], 0, unreadable)), accelerator.device)

    def scores() -> dict:
        return validate(task, images.source, images.transform, config.data, accelerator, Progress.over)[0]

    def forward() -> None:
        with accelerator.autocast():
            model(batch["images"])

    of = dict(weights=about["weights"], model=about["name"], data=f"{config.data.root}, val split")
    return Scored(model, scores, forward, dict(of, batch_size=len(batch["images"])))
