"""Open a classifier: a run, a folder saved by timm or publish, or weights with a model's name."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

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
from moh_vision.common.io import RUN_CONFIG, run_of
from moh_vision.common.progress import Progress
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
from moh_vision.models.class_names import assumed_order, listed
from moh_vision.models.head_budgets import set_head_budget
from moh_vision.models.pretrained import of_source
from moh_vision.models.weight_files import weights_file
from moh_vision.models.weights import advise_on_model_name, to_validate


class OpenedClassifier(Opened):
    """A classifier with an `OpenedClsConfig`; the model's pretrained_cfg tells how to prepare images."""

    kind = "classification"
    loss_name = "cross-entropy"
    scored_on = "{c.data.root}, val split"  # a format string, see `Opened`

    def data(self, split: str) -> LabelledImages:
        if split not in self.splits:
            self.splits[split] = open_images(self.config, split, self.accelerator)
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


def open_run(
    path: str,
    weights: str | None = None,
    device: torch.device | None = None,
    options: Sequence[str] = (),
    *,
    name: str | None = None,
    split: str | None = None,
    command: str = "open_run",
    saved: SavedConfig | None = None,
) -> OpenedClassifier:
    """Open a classifier, see `moh_vision.open_run`; options are those of `OpenedClsConfig`."""
    # A folder of publish or timm is opened by its own path and not by a file in it, because its config.json is read too.
    ema_of_run = weights == "ema" and (run_of(path) / RUN_CONFIG).is_file()
    file = path
    if weights == "model" or ema_of_run:
        file = str(weights_file(path, weights))
    argv = ["--checkpoint", file]
    if name:
        argv += ["--model.name", name]
    opened = open_with(parse_config(OpenedClsConfig, [*argv, *options], command, saved), split)
    opened.model.to(device or "cpu")
    return opened


def open_with(
    config: OpenedClsConfig, split: str | None = None, accelerator=None
) -> OpenedClassifier:
    """Open the classifier of --checkpoint; `split` is opened first, because bare weights take its classes."""
    if split is None:
        return OpenedClassifier(config, *open_classifier(config))
    accelerator = accelerator or make_accelerator(config.mixed_precision, config.tf32)
    source = open_images(config, split, accelerator)
    num_classes = len(source.classes)
    if config.labels:
        num_classes = len(IMAGENET)
    model, metadata = open_classifier(
        config, len(source), in_chans=source.channels, num_classes=num_classes
    )
    opened = OpenedClassifier(config, model, metadata, {split: source})
    opened.accelerator = accelerator
    opened._match_classes(source)
    return opened


def open_images(config: OpenedClsConfig, split: str, accelerator):
    """Open a split of data.root as a source, or the images of --labels."""
    if config.data.root is None:
        raise ValueError(
            f"--data.root is needed: {config.checkpoint} is no run, whose configuration says which images"
        )
    _refuse_val_fraction(config)
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


def _refuse_val_fraction(config: OpenedClsConfig) -> None:
    """Refuse a data.val_fraction on the command line that has no effect, or would score images that were trained on."""
    refuse_idle_fraction(config.data, config.given)
    if "data.val_fraction" not in config.given:
        return
    if config.labels:
        raise ValueError(f"data.val_fraction has no effect with labels {config.labels}")
    trained = parse_config(OpenedClsConfig, ["--checkpoint", config.checkpoint], "open_run").data
    asked = config.data.val_fraction or 0
    if trained.root == config.data.root and asked > (trained.val_fraction or 0):
        raise ValueError(
            f"data.val_fraction {asked:g}: {config.checkpoint} was trained with {trained.val_fraction}, so that images would be "
            "for validation that it was trained on"
        )


DECODING = ("colour_space", "value_range")  # keys of `Decoding`
# Keys that set another budget in the model of a run.
BUDGETS = ("model.head_budget", "model.mlp_budget")


def open_classifier(
    config: OpenedClsConfig, images: int = 1, **arguments
) -> tuple[nn.Module, dict]:
    """Open the classifier of --checkpoint, in eval mode; also return metadata as `to_validate` does, with img_size.

    A run, or a folder saved by timm or publish, brings its model: only the keys in BUDGETS may change it. Other weights
    need the configuration's `model` and `arguments`. `images` is the number of images, which limits a batch's size.
    """
    path = config.checkpoint
    data = config.data
    batch = min(data.eval_batch_size, images)
    check_images_fit("data.img_size", data.img_size, arguments.get("in_chans", 1), batch)
    by_timm = (Path(path) / "config.json").is_file() and not (Path(path) / RUN_CONFIG).is_file()
    if by_timm:
        name, saved_arguments, cfg = _saved_by_timm(path)
        model, metadata = to_validate(path, name, saved_arguments, data.img_size)
        if is_plain(saved_arguments.get("router")):
            # The model is created as moh_vit. Messages show the name of timm's model, as the folder does.
            name = saved_arguments.get("base") or name
        metadata.update(brings_model=True, architecture=name.split(".")[0])
        metadata["classes"] = cfg["label_names"] or metadata["classes"]
        data = _decoded_as_saved(data, config.given, path)
        model.pretrained_cfg = cfg
        if "data.augment" not in config.given:
            # "imagenet" takes crop_pct and crop_mode from pretrained_cfg, see `EvalDataConfig.eval_options`.
            data = replace(data, augment="imagenet")
    else:
        name = config.model.name
        with advise_on_model_name(name):
            asked_arguments = {**config.model.arguments(), **arguments}
            model, metadata = to_validate(path, name, asked_arguments, data.img_size)
    if metadata["brings_model"]:
        for key in sorted(config.given):
            if key.partition(".")[0] == "model" and key not in BUDGETS:
                raise ValueError(
                    f"{key} has no effect: --checkpoint {path} brings its model, {metadata['architecture']}; "
                    f"allowed are {' and '.join(BUDGETS)}"
                )
        heads, groups = (
            getattr(config.model, key.partition(".")[2]) if key in config.given else None
            for key in BUDGETS
        )
        if heads is not None or groups is not None:
            set_head_budget(model, heads, mlp=groups)
        if not by_timm:
            data = data_as_trained(data, config.given, metadata)
    # `OpenedClassifier` reads images as the configuration says.
    for key in DECODING:
        setattr(config.data, key, getattr(data, key))
    prepare(model, data, metadata["arguments"].get("img_size"), metadata["classes"])
    return model, dict(metadata, img_size=model.pretrained_cfg["input_size"][-1])


def _saved_by_timm(folder: str) -> tuple[str, dict, dict]:
    """Return (name, arguments, pretrained_cfg) from a folder of `timm.models.save_for_hf` or `moh_vision.publish`."""
    try:
        name, arguments, cfg = of_source(folder, "classification")
        label_names = listed(cfg.get("label_names"), "label_names")
        return name, arguments, {**cfg, "label_names": label_names}
    except Exception as error:  # foreign files may hold anything
        reason = reason_of(error)
        if isinstance(error, KeyError):
            reason = f"no {error} in it"
        raise ValueError(
            f"--checkpoint {folder}: its config.json is of no classifier that is taken ({reason})"
        ) from None


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
