"""Train a classifier.   accelerate launch train_cls.py --config configs/cls/NAME.yaml [--key value ...]

Installed: accelerate launch -m moh_vision.classification.train --config cls/NAME. The same command run again resumes;
--help prints every key.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import List, Optional, Tuple

import torch
from accelerate.utils import send_to_device
from torch import nn

from moh_vision.attention import settings
from moh_vision.classification import validate as validation
from moh_vision.classification.best import Best
from moh_vision.classification.config import ClsConfig
from moh_vision.classification.task import ClassificationTask
from moh_vision.data import splits
from moh_vision.data.batches import BadSamples, LabelledImages, calibration_batches, check_images_fit, training_batches
from moh_vision.data.imagenet import BatchMixing, classification_transforms
from moh_vision.data.order import StepBatches
from moh_vision.data.splits import DataRecord, check_same_classes, open_splits
from moh_vision.data.stream import open_stream
from moh_vision.engine.commands import BadData
from moh_vision.engine.optimizers import make_optimizer
from moh_vision.engine.ranks import say
from moh_vision.engine.run import Run
from moh_vision.evaluation.accuracy import summary
from moh_vision.models.convert import share_strongest_heads
from moh_vision.models.describe import describe, in_short
from moh_vision.models.elastic import elastic_budget
from moh_vision.models.head_budgets import budget_pairs
from moh_vision.models.head_load import HeadLoad
from moh_vision.models.mae import mae_routers, train_only
from moh_vision.models.pretrained import described, load_source
from moh_vision.models.teachers import Teacher
from moh_vision.models.weights import check_side, create, keep_shared_heads

NAME = "train_cls.py"


def new_model(config: ClsConfig, source, name: str, arguments: dict) -> Tuple[nn.Module, dict]:
    """Return a model for the classes and the size of these images, and its arguments."""
    decided = dict(in_chans=source.channels, num_classes=len(source.classes))
    if config.data.img_size or source.img_size:
        decided["img_size"] = config.data.img_size or source.img_size
    arguments = {**arguments, **config.model.decided(**decided)}
    model = create(name, "classifier", **arguments)
    check_side(model, arguments.get("img_size"))
    arguments.setdefault("img_size", model.pretrained_cfg["input_size"][-1])
    return model, arguments


def open_teacher(config: ClsConfig, model: nn.Module, val, img_size: int) -> Teacher:
    """Open the teacher of distill.teacher for images as `model` takes them. `val` has the classes of the data."""
    channels, source = val.channels, config.distill.teacher
    mean, std = (model.pretrained_cfg[name][:channels] for name in ("mean", "std"))  # as `classification_transforms`
    teacher = Teacher("distill.teacher", source, mean, std)
    if teacher.classes:
        check_same_classes(teacher.classes, teacher.name, val, config.data.root)
    teacher.check_logits((channels, img_size, img_size), len(val.classes))
    return teacher


def train(run: Run) -> None:
    config, accelerator = run.config, run.accelerator
    d, o = config.data, config.optim

    # ---------------------------------------------------------------- data
    name, arguments = described(config, "classifier", config.fresh)
    with accelerator.main_process_first():
        source, val = open_splits(d.root, run.index_dir, open_stream(d, config.given, accelerator))
    record = DataRecord(d.root, config.allow_change, train=source, val=val)
    config.check_micro_batch(accelerator.num_processes)
    stop, cosine_steps, warmup_steps = config.steps(len(source))
    say(splits.in_short(d.root, source, stop, o.batch_size, val))

    # ---------------------------------------------------------------- model
    check_images_fit("data.img_size", d.img_size, source.channels, run.micro_batch)
    torch.manual_seed(config.seed)
    model, arguments = new_model(config, source, name, arguments)
    img_size = arguments["img_size"]
    checkpoint = run.take_up(stop)
    if checkpoint:
        keep_shared_heads(model, checkpoint)
    elif config.init_from or not config.dry_run:  # weights of model.pretrained fit, and may have to be fetched
        load_source(model, config, source.classes, say)
    if config.dry_run:
        elastic_budget(model, config)  # the largest share is shown
        return say(describe(name, model, torch.zeros(1, source.channels, img_size, img_size)))
    train_only(model, config.train_only)
    model.set_grad_checkpointing(config.checkpointing)
    elastic = elastic_budget(model, config)
    if elastic:
        arguments["head_budget"] = budget_pairs(model)
    say(in_short(name, model))
    run.take_model(model, mae_routers(model), elastic)
    order = dict(group=d.shuffle_shards, seed=config.seed, repeats=d.repeats)
    batches = StepBatches(source.shard_sizes, **order, **run.portion())
    to_tensor, val_to_tensor = classification_transforms(d, model.pretrained_cfg, img_size, source.channels)
    if config.calibrate_images and not checkpoint:
        share_strongest_heads(model, calibration_batches(source, val_to_tensor, config.calibrate_images))
    teacher = None
    if config.distill.teacher:
        with accelerator.main_process_first():
            teacher = open_teacher(config, model, val, img_size)
    run.open(record)
    with run.errors():
        best = Best(run.folder)

    # ---------------------------------------------------------------- task, optimiser, schedule
    form = torch.channels_last if config.channels_last else torch.preserve_format
    task = ClassificationTask(
        model.to(memory_format=form), config.balance_weight, config.label_smoothing, config.distill,
        **config.moa_weights(),
    )  # fmt: skip
    teacher = teacher and teacher.to(accelerator.device, memory_format=form)
    optimizer = make_optimizer(model, o)
    schedule = dict(warmup_steps=warmup_steps, max_steps=cosine_steps, as_timm=True)
    unreadable = BadSamples(len(source), d.max_bad_fraction)
    metadata = dict(architecture=name, arguments=arguments, classes=source.classes)
    options = dict(schedule=schedule, ema=config.ema, unreadable=unreadable)
    run.prepare(task, optimizer, metadata, title="classification", **options)

    def validate() -> Tuple[dict, HeadLoad, torch.Tensor]:
        """Validate the EMA weights where there are any, else the model."""
        judged = ClassificationTask(run.ema.module, 0.0) if run.ema else run.task
        with run.errors((BadData,), every_rank=True):
            return validation.validate(judged, val, val_to_tensor, d, accelerator, run.log.progress)

    def evaluate() -> Tuple[dict, HeadLoad, torch.Tensor]:
        scores, load, predictions = validate()
        show = f"validation after {run.done} steps: {summary(scores)}" + (" (EMA)" if run.ema else "")
        run.event({"validation": scores, "weights": weights}, show)
        if config.eval_every:  # else the only validation is that of model.safetensors
            judged = run.ema.module if run.ema else run.model
            problem = best(run.done, scores["top1"], judged, run.metadata, accelerator.is_main_process)
            if problem:
                run.log.say(problem)
        return scores, load, validation.confusion_of(predictions)

    # ---------------------------------------------------------------- the loop
    def on_device(batch: dict) -> dict:
        batch = send_to_device(batch, accelerator.device, non_blocking=True)
        batch["images"] = batch["images"].to(memory_format=form)
        if teacher:
            with accelerator.autocast():
                batch["teacher_logits"] = teacher(batch["images"])  # [B, classes]
        return batch

    mixing = BatchMixing(config.seed, len(source.classes), **asdict(config.mix)) if config.mix.on else None
    dataset = LabelledImages(source, to_tensor, config.seed)
    stream = map(on_device, training_batches(dataset, batches, d.workers, unreadable, mixing))
    weights = "ema" if run.ema else "model"
    for step in run.steps():
        run.step(stream, epoch=step * o.batch_size // len(source), count=o.batch_size)
        if run.logs():
            v = run.averages()
            run.metrics(v, f"loss {v['loss']:.4f}, acc {100 * v['batch_accuracy']:.0f} %")
        # Before the save, so that a run that goes on from there has its validation.
        if run.due(config.eval_every) and run.done < run.stop:
            evaluate()
        run.save()
    if not run.stopped:
        scores, load, confusion = evaluate()
        if elastic:
            found = elastic.by_share(run.ema.module if run.ema else run.model, lambda: validate()[0], scores)
            run.log.say("\n".join(f"with a share of {share}: {summary(found[share])}" for share in found))
            scores["by_share"] = {
                share: {k: found[share][k] for k in ("top1", "top5", "loss", "active_share")} for share in found
            }
        scores["top1_by_class"] = validation.class_accuracy(confusion, val.classes)
        run.write_results(dict(scores, weights=weights, **best.about()))
        run.log.say(validation.class_table(scores["top1_by_class"]))
        if best.step:
            run.log.say(f"best of the validations: top-1 {best.top1:.2f} % after {best.step} steps, {best.file}")
        if accelerator.is_main_process:
            validation.write_confusion(confusion, val.classes, run.folder / "confusion.json")
            load.of = dict(model=name, data=d.root, split="val", weights=weights, step=run.done)
            validation.write_usage(load, run.folder, run.log.say)


def main(argv: Optional[List[str]] = None) -> None:
    with Run(NAME, ClsConfig, argv, settings) as run:
        train(run)


if __name__ == "__main__":
    main()
