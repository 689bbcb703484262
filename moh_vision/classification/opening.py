"""Open a classifier: a run, a folder saved by timm or publish, or weights with a model's name."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention.routers import is_plain
from moh_vision.classification.config import EvalDataConfig, OpenedClsConfig
from moh_vision.classification.labels import IMAGENET, open_labelled, refuse_other_classifier
from moh_vision.classification.scores import validate
from moh_vision.classification.task import ClassificationTask
from moh_vision.common.errors import reason_of
from moh_vision.common.progress import Progress
from moh_vision.common.wings import CLASSIFICATION
from moh_vision.data.batches import (
    BadSamples,
    LabelledImages,
    calibration_halves,
    check_images_fit,
    evaluation_loader,
)
from moh_vision.data.decode import Decoding
from moh_vision.data.imagenet import validation_transform
from moh_vision.data.splits import (
    match_classes,
    open_source,
    refuse_idle_fraction,
    with_classes,
)
from moh_vision.engine.accelerator import make_accelerator
from moh_vision.engine.command_line import SavedConfig, parse_config
from moh_vision.engine.opened import Opened
from moh_vision.engine.ranks import say
from moh_vision.evaluation.accuracy import refuse_not_finite
from moh_vision.models.class_names import assumed_order
from moh_vision.models.creation import check_side
from moh_vision.models.fitting import advise_on_model_name
from moh_vision.models.head_budgets import set_head_budget
from moh_vision.models.weights import Form, Weights


class OpenedClassifier(Opened):
    """A classifier with an `OpenedClsConfig`; the model's pretrained_cfg tells how to prepare images."""

    kind = "classification"
    loss_name = "cross-entropy"
    scored_on = "{c.data.root}, val split"  # a format string, see `Opened`

    def data(self, split: str) -> LabelledImages:
        if split not in self.splits:
            self.splits[split] = open_images(self.config, self.weights, split, self.accelerator)
            self._match_classes(self.splits[split])
        source = self.splits[split]
        source.decoding = self.decoding
        transform = validation_transform(self.model.pretrained_cfg)
        return LabelledImages(source, transform, seed=0, replace_unreadable=False)

    @property
    def decoding(self) -> Decoding:
        """How image files become pixels: as in the classifier's training, unless options say otherwise."""
        return Decoding.of(self.config.data)

    def _match_classes(self, source) -> None:
        """Renumber the classes of `source` in the classifier's order; raise ValueError if the classes differ.

        Images with --labels keep their numbers, which are those of ImageNet.
        """
        config = self.config
        classes = self.metadata["classes"]
        named = f"--checkpoint {config.checkpoint}"
        if config.labels:
            refuse_other_classifier(self.model, classes, named, config.labels)
            return
        count = len(source.classes)
        if not classes and self.model.num_classes == count:
            classes, remark = assumed_order(config.checkpoint, source.classes)
            say(f"--checkpoint: {remark}")
        if classes:
            match_classes(classes, named, source, f"data.root {config.data.root}")
        if self.model.num_classes != count:
            raise ValueError(
                f"{named} has {self.model.num_classes} classes, data.root {config.data.root} {count}"
            )

    def _unreadable(self, images: LabelledImages) -> BadSamples:
        return BadSamples(len(images.source), self.config.data.max_bad_fraction)

    def halves(self, count: int) -> tuple[list[dict], list[dict]]:
        images = self.data("train")
        return calibration_halves(images, count, self.config.data.workers, self._unreadable(images))

    def inputs(self, batch: dict) -> Tensor:
        return batch["images"]

    def loss(self, batch: dict) -> Tensor:
        batch = send_to_device(batch, self.accelerator.device)
        with self.accelerator.autocast():
            model = self.model.to(self.accelerator.device)
            logits, _ = model.forward_routed(batch["images"])  # [B, classes]
        return F.cross_entropy(logits.float(), batch["labels"])

    def scores(self) -> dict:
        images = self.data("val")
        task = ClassificationTask(self.model.to(self.accelerator.device), balance_weight=0.0)
        scores, _, _ = validate(task, images, self.config.data, self.accelerator, Progress.over)
        refuse_not_finite(scores, self.metadata["weights"])
        return scores

    def make_forward(self) -> tuple[Callable[[], Tensor], int]:
        images = self.data("val")
        indices = range(min(self.config.data.eval_batch_size, len(images.source)))
        (batch,) = evaluation_loader(
            images, [list(indices)], workers=0, bad=self._unreadable(images)
        )
        batch = send_to_device(batch, self.accelerator.device)

        def forward() -> Tensor:
            with self.accelerator.autocast():
                return self.model(batch["images"])

        return forward, len(batch["images"])

    def example(self) -> tuple[list[Tensor], dict]:
        return [torch.zeros(1, *self.model.pretrained_cfg["input_size"])], {}


def open_weights(
    found: Weights,
    options: Sequence[str] = (),
    device: torch.device | None = None,
    *,
    split: str | None = None,
    command: str = "open_run",
    saved: SavedConfig | None = None,
) -> OpenedClassifier:
    """Open a classifier, see `moh_vision.opening.open_weights`; options are those of `OpenedClsConfig`."""
    argv = ["--checkpoint", found.source]
    if not found.brings_model and found.architecture:
        argv += ["--model.name", found.architecture]
    config = parse_config(OpenedClsConfig, [*argv, *options], command, saved)
    if split is not None:
        return open_with(config, found, split)
    return OpenedClassifier(found, config, *open_classifier(config, found, device=device))


def open_with(
    config: OpenedClsConfig, found: Weights, split: str, accelerator=None
) -> OpenedClassifier:
    """Open the classifier of the weights of --checkpoint; `split` is opened first, because bare weights take its classes."""
    accelerator = accelerator or make_accelerator(config.mixed_precision, config.tf32)
    source = open_images(config, found, split, accelerator)
    num_classes = len(source.classes)
    if config.labels:
        num_classes = len(IMAGENET)
    model, metadata = open_classifier(
        config, found, len(source), in_chans=source.channels, num_classes=num_classes
    )
    opened = OpenedClassifier(found, config, model, metadata, {split: source})
    opened.accelerator = accelerator
    opened._match_classes(source)
    return opened


def open_images(config: OpenedClsConfig, found: Weights, split: str, accelerator):
    """Open a split of data.root as a source, or the images of --labels."""
    if config.data.root is None:
        raise ValueError(
            f"--data.root is needed: {config.checkpoint} is no run, whose configuration says which images"
        )
    _refuse_val_fraction(config, found)
    with accelerator.main_process_first():
        if config.labels:
            source = open_labelled(config.data.root, config.labels)
        else:
            data = config.data
            source = open_source(data.root, split, val_fraction=data.val_fraction)
            source = with_classes(data.root, source)
    for remark in source.remarks:
        say(remark)
    return source


def _refuse_val_fraction(config: OpenedClsConfig, found: Weights) -> None:
    """Refuse a data.val_fraction on the command line that has no effect, or would score images that were trained on."""
    refuse_idle_fraction(config.data, config.given)
    if "data.val_fraction" not in config.given:
        return
    if config.labels:
        raise ValueError(f"data.val_fraction has no effect with labels {config.labels}")
    trained = found.config.get("data", {})
    asked = config.data.val_fraction or 0
    if trained.get("root") == config.data.root and asked > (trained.get("val_fraction") or 0):
        raise ValueError(
            f"data.val_fraction {asked:g}: {config.checkpoint} was trained with {trained.get('val_fraction')}, so that images "
            "would be for validation that it was trained on"
        )


DECODING = ("colour_space", "value_range")  # keys of `Decoding`
# Keys that set another budget in the model of a run.
BUDGETS = ("model.head_budget", "model.mlp_budget")


def open_classifier(
    config: OpenedClsConfig, found: Weights, images: int = 1, device: Any = None, **arguments
) -> tuple[nn.Module, dict]:
    """Open the classifier of weights, in eval mode; also return its metadata.

    A run, or a folder saved by timm or publish, brings its model: only the keys in BUDGETS may change it. Other weights
    need the configuration's `model` and `arguments`. `images` is the number of images, which limits a batch's size.

    The metadata have architecture, arguments, classes (or None), weights (the file, as printed) and img_size; of a run also
    what it has written.
    """
    path = config.checkpoint
    data = config.data
    changes = {}
    if data.img_size:
        changes["img_size"] = data.img_size
    batch = min(data.eval_batch_size, images)
    check_images_fit("data.img_size", data.img_size, arguments.get("in_chans", 1), batch)
    if found.brings_model:
        found.refuse_other(CLASSIFICATION.name)
        found = found.with_routing()
        refuse_idle_model_keys(config, found)
        model = found.build(device, **changes)
    else:
        name = config.model.name
        with advise_on_model_name(name):
            found = found.named(name, {**config.model.arguments(), **arguments}, "--model.name")
            model = found.build(device, **changes)
    check_side(model, data.img_size)
    metadata = dict(
        found.metadata,
        architecture=shown_name(found),
        arguments={**found.arguments, **changes},
        classes=found.classes,
        weights=found.said,
    )
    if found.form == Form.TIMM:
        metadata["classes"] = found.pretrained_cfg["label_names"] or metadata["classes"]
        data = _decoded_as_saved(data, config.given, path)
        model.pretrained_cfg = found.pretrained_cfg
        if "data.augment" not in config.given:
            # "imagenet" takes crop_pct and crop_mode from pretrained_cfg, see `EvalDataConfig.eval_options`.
            data = replace(data, augment="imagenet")
    elif found.brings_model:
        data = data_as_trained(data, config.given, metadata)
    asked = {key: None for key in BUDGETS}
    for key in BUDGETS:
        if found.brings_model and key in config.given:
            asked[key] = getattr(config.model, key.partition(".")[2])
    heads, groups = asked.values()
    if heads is not None or groups is not None:
        set_head_budget(model, heads, mlp=groups)
    # `OpenedClassifier` reads images as the configuration says.
    for key in DECODING:
        setattr(config.data, key, getattr(data, key))
    prepare(model, data, metadata["arguments"].get("img_size"), metadata["classes"])
    return model, dict(metadata, img_size=model.pretrained_cfg["input_size"][-1])


def refuse_idle_model_keys(config: OpenedClsConfig, found: Weights) -> None:
    """Refuse keys of the model beside weights that bring theirs, except for its budgets."""
    for key in sorted(config.given):
        if key.partition(".")[0] == "model" and key not in BUDGETS:
            raise ValueError(
                f"{key} has no effect: --checkpoint {config.checkpoint} brings its model, {shown_name(found)}; "
                f"allowed are {' and '.join(BUDGETS)}"
            )


def shown_name(found: Weights) -> str:
    """Return the model's name for messages: a dense ViT of timm's, which is created as moh_vit, has timm's name."""
    name = found.architecture
    if found.form == Form.TIMM and is_plain(found.arguments.get("router")):
        name = found.arguments.get("base") or name
    if found.form == Form.TIMM:
        return name.split(".")[0]
    return name


def _decoded_as_saved(data: EvalDataConfig, given: Collection[str], folder: str) -> EvalDataConfig:
    """Return `data` with the decoding that publish wrote into a folder's config.json, except for `given` keys."""
    saved = json.loads((Path(folder) / "config.json").read_text("utf-8")).get("decoding", {})
    try:
        return replace(
            data,
            **{key: saved[key] for key in DECODING if key in saved and f"data.{key}" not in given},
        )
    except (TypeError, ValueError) as error:  # foreign files may hold anything
        raise ValueError(
            f"--checkpoint {folder}: decoding in its config.json is not ours ({reason_of(error)})"
        ) from None


def data_as_trained(data: EvalDataConfig, given: Collection[str], metadata: dict) -> EvalDataConfig:
    """Return `data` with the image preparation of the weights' training, except for `given` keys."""
    try:
        saved = metadata.get("config", {}).get("data", {})
        keys = [
            key
            for key in ("augment", "crop_pct", "crop_mode", *DECODING)
            if key in saved and f"data.{key}" not in given
        ]
        return replace(data, **{key: saved[key] for key in keys})
    except (TypeError, ValueError, AttributeError) as error:  # foreign files may hold anything
        raise ValueError(
            f"{metadata['weights']}: data in its metadata are not those of a run ({reason_of(error)})"
        ) from None


def prepare(
    model: nn.Module, data: EvalDataConfig, img_size: int | None, classes: Sequence[str] | None
) -> None:
    """Update the model's pretrained_cfg to how validation prepares images, for `validation_transform`.

    If `img_size` or `classes` is None, that entry stays as it is.
    """
    cfg = dict(model.pretrained_cfg)
    channels = model.in_chans
    size = cfg["input_size"][1:]
    if img_size:
        size = (img_size, img_size)
    options = data.eval_options(cfg)
    cfg.update(num_classes=model.num_classes, input_size=(channels, *size), **options)
    cfg["mean"] = tuple(cfg["mean"][:channels])
    cfg["std"] = tuple(cfg["std"][:channels])
    cfg.setdefault("label_names", None)
    if classes is not None:
        cfg["label_names"] = list(classes)
    model.pretrained_cfg = cfg
    model.default_cfg = cfg
