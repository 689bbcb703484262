"""Train a classifier.   accelerate launch train_cls.py --config configs/cls/NAME.yaml [--key value ...]

Where only the package is installed: accelerate launch -m moh_vision.classification.train --config cls/NAME.
The same command resumes the run; --help prints every key.
"""

import json
import math
from dataclasses import asdict
from functools import partial

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from moh_vision.attention.measure import as_it_was
from moh_vision.classification.config import ClsConfig, ClsDistillConfig
from moh_vision.classification.scores import class_accuracy, class_table, confusion_of, validate
from moh_vision.classification.task import ClassificationTask, TokenAlignment
from moh_vision.common.errors import BadData, message_of
from moh_vision.common.io import write_whole
from moh_vision.common.wings import CLASSIFICATION
from moh_vision.data import splits
from moh_vision.data.batches import (
    BadSamples,
    LabelledImages,
    check_images_fit,
    evaluation_loader,
    evenly_spread,
    training_loader,
)
from moh_vision.data.copies import warn_of_copies
from moh_vision.data.decode import Decoding
from moh_vision.data.first_look import say_what_is_lost
from moh_vision.data.imagenet import BatchMixing, classification_transforms
from moh_vision.data.order import PositionSampler
from moh_vision.data.splits import (
    DataRecord,
    open_splits,
    refuse_idle_fraction,
    refuse_other_classes,
)
from moh_vision.data.stream import open_stream
from moh_vision.engine import published_rates
from moh_vision.engine.best import BEST, Best, value_of
from moh_vision.engine.block_descent import BlockDescent
from moh_vision.engine.estimate import estimate_images
from moh_vision.engine.loop_start import start_loop
from moh_vision.engine.optimizers import make_optimizer
from moh_vision.engine.ranks import by_all, from_first, say
from moh_vision.engine.run_setup import RunSetup, set_up_run
from moh_vision.engine.training_loop import TrainingLoop
from moh_vision.evaluation.accuracy import summary
from moh_vision.models.class_names import assumed_order, indices_of
from moh_vision.models.convert import share_strongest_heads
from moh_vision.models.frozen import FrozenRecord
from moh_vision.models.head_load import FILE, HeadLoad
from moh_vision.models.pretrained import name_and_arguments
from moh_vision.models.set_up import check_memory, set_up_model
from moh_vision.models.teachers import Teacher, WithProjector, called


def open_teacher(config: ClsConfig, model: nn.Module, val, img_size: int) -> Teacher:
    """Open the teacher of distill.teacher; make it take the images of `model` and give the classes of `val`."""
    channels = val.channels
    name = config.teacher_source
    mean = model.pretrained_cfg["mean"][:channels]
    std = model.pretrained_cfg["std"][:channels]
    teacher = Teacher("distill.teacher", name, mean, std)
    if not config.distill.distill_loss_weight:
        return teacher  # of tokens alone, whatever its classes
    named = f"data.root {config.data.root}"
    if teacher.classes:
        refuse_other_classes(teacher.classes, teacher.name, val.classes, named)
    teacher.check_logits((channels, img_size, img_size), len(val.classes))
    teacher_classes = teacher.classes
    if teacher_classes is None:
        teacher_classes, remark = assumed_order(name, val.classes)
        say(f"distill.teacher: {remark}")
    if teacher_classes != val.classes:
        teacher.order = indices_of(val.classes, within=teacher_classes)
    return teacher


def open_alignment(
    weight: float, model: nn.Module, teacher: Teacher, channels: int, img_size: int
) -> TokenAlignment:
    """Return the `TokenAlignment` of a model with its teacher; refuse a teacher of another number of tokens.

    Args:
        weight: distill.token_loss_weight.
        model: the classifier.
        teacher: the teacher, which from here on gives tokens.
        channels, img_size: of the images.
    """
    dropped = getattr(getattr(model, "patch_drop", None), "prob", 0)
    if dropped:
        raise ValueError(
            f"distill.token_loss_weight {weight:g}: patch_drop_rate {dropped:g} leaves tokens out, whose teacher's would have "
            "no partner"
        )
    tokens: list[Tensor] = []
    with as_it_was(model), torch.no_grad():
        model.eval().forward_routed(torch.zeros(1, channels, img_size, img_size), tokens=tokens)
    _, patches, width = tokens[0].shape
    teacher_width = teacher.check_tokens((channels, img_size, img_size), patches)
    return TokenAlignment(weight, width, teacher_width)


def targets_of(teacher: Teacher, distill: ClsDistillConfig, images: Tensor) -> dict[str, Tensor]:
    """Return what a teacher says of images [B, C, h, w], as arguments of `ClassificationTask.forward`."""
    if not distill.token_loss_weight:
        return dict(teacher_logits=teacher(images))  # [B, classes]
    if not distill.distill_loss_weight:
        return dict(teacher_tokens=teacher.tokens(images))  # [B, N, teacher_width]
    logits, tokens = teacher.logits_and_tokens(images)
    return dict(teacher_logits=logits, teacher_tokens=tokens)


def train(setup: RunSetup) -> None:  # noqa: C901, PLR0915
    config = setup.config
    accelerator = setup.accelerator
    data = config.data

    # ---------------------------------------------------------------- data
    # The main process alone looks whether an earlier run is in the folder.
    name, arguments = from_first(lambda: name_and_arguments(config, "classification", config.fresh))
    refuse_idle_fraction(data, config.given)
    with accelerator.main_process_first():
        decoding = Decoding.of(data)
        source, val = open_splits(
            data.root, open_stream(data, config.given, accelerator), data.val_fraction
        )
        source.decoding = decoding
        val.decoding = decoding
    record = DataRecord(data.root, config.allow_change, train=source, val=val)
    config.check_micro_batch(accelerator.num_processes)
    batch_size = config.optim.batch_size
    warmup_of_auto, settled = config.settle_steps(len(source))
    stop, cosine_steps, warmup_steps = config.steps(len(source))
    warmup_steps = warmup_steps or warmup_of_auto
    say(splits.in_short(data.root, source, stop, batch_size, val))
    if settled:
        say(settled)
    if stop < cosine_steps:
        say(
            f"max_steps {stop} ends before the schedule of optim.epochs {config.optim.epochs:g}, {cosine_steps} steps, and the "
            "learning rate stays high: with --optim.epochs null it falls until max_steps"
        )
    if accelerator.is_main_process:
        warn_of_copies(f"data.root {data.root}", source, val, say)
    say_what_is_lost(f"data.root {data.root}", dict(train=source, val=val), say)
    check_images_fit("data.img_size", data.img_size, source.channels, setup.micro_batch)

    # ---------------------------------------------------------------- steps to do; model and teacher
    span = setup.lock_and_find_steps(stop)
    from_data = dict(in_chans=source.channels, num_classes=len(source.classes))
    if data.img_size or source.img_size:
        from_data["img_size"] = data.img_size or source.img_size
    config.model.refuse_other(**from_data)
    arguments |= from_data
    # Every process reads the first weights or the checkpoint's shared heads; if one cannot, all end.
    model_setup = by_all(
        lambda: set_up_model(
            config, "classification", name, arguments, source.classes, span.checkpoint, say
        )
    )
    check_memory(config, model_setup, accelerator.device, setup.micro_batch, say)
    model = model_setup.model
    img_size = model_setup.arguments["img_size"]
    teacher = None
    alignment = None
    trained = model
    frozen = {}
    token_weight = config.distill.token_loss_weight
    if config.teacher_source:
        with accelerator.main_process_first():
            teacher = open_teacher(config, model, val, img_size)
        frozen["distill.teacher"] = (config.teacher_source, teacher.sha256)
    if teacher and token_weight:
        alignment = open_alignment(token_weight, model, teacher, source.channels, img_size)
        trained = WithProjector(model, alignment)
    descent = BlockDescent(accelerator, trained, config.compile, config.block_descent)
    sampler = PositionSampler(
        source.shard_sizes,
        group=data.shuffle_shards,
        seed=config.seed,
        repeats=data.repeats,
        **setup.sampler_arguments(span),  # batch_size, accumulation, rank, world, start, stop
    )
    to_tensor, val_to_tensor = classification_transforms(
        data, model.pretrained_cfg, img_size, source.channels
    )
    if config.calibrate_images and not span.checkpoint and not config.dry_run:
        slices = evenly_spread(len(source), config.calibrate_images)
        calibration = LabelledImages(source, val_to_tensor, config.seed)
        calibration_batches = evaluation_loader(calibration, slices, workers=0)
        share_strongest_heads(model, (batch["images"] for batch in calibration_batches))

    # ---------------------------------------------------------------- open the folder, which is first written here
    records = [record, FrozenRecord(config.allow_change, frozen)]
    folder = setup.open_folder(span, records, model_setup.description)
    if config.dry_run:  # nothing was written
        return

    # ---------------------------------------------------------------- task, optimiser, schedule
    memory_format = torch.preserve_format
    if config.channels_last:
        memory_format = torch.channels_last
    task = ClassificationTask(
        model.to(memory_format=memory_format),
        config.balance_weight,
        config.label_smoothing,
        config.distill,
        alignment,
        **config.moa_weights(),
    )
    if teacher:
        teacher.to(accelerator.device, memory_format=memory_format)
    schedule = dict(warmup_steps=warmup_steps, max_steps=cosine_steps, as_timm=True)
    unreadable = BadSamples(len(source), data.max_bad_fraction)
    best = None
    if config.eval_every:  # else there is a single validation, at the end
        best = Best("top1")

    # ---------------------------------------------------------------- the loop
    def on_device(batch: dict) -> dict:
        batch = send_to_device(batch, accelerator.device, non_blocking=True)
        batch["images"] = batch["images"].to(memory_format=memory_format)
        if teacher:
            times = loop.log.times
            times.mark("data")
            with accelerator.autocast():
                batch |= targets_of(teacher, config.distill, batch["images"])
            times.mark("teacher")
        return batch

    def passes_of_teacher(_) -> list[tuple]:
        """Return [(teacher, function that calls it as for a micro-batch)], for `TrainingLoop.passes_beside`."""
        if not teacher:
            return []
        shape = (setup.micro_batch, source.channels, img_size, img_size)
        zeros = torch.zeros(shape, device=accelerator.device)
        call = partial(targets_of, teacher, config.distill)
        return [(teacher, partial(called, accelerator.autocast, call, zeros))]

    mixing = None
    if config.mix.on:
        mixing = BatchMixing(config.seed, len(source.classes), **asdict(config.mix))
    images = LabelledImages(source, to_tensor, config.seed)
    metadata = dict(architecture=name, arguments=model_setup.arguments, classes=source.classes)
    with start_loop(
        setup,
        span,
        folder,
        descent,
        task,
        make_optimizer(trained, config.optim),
        metadata,
        title="classification",
        schedule=schedule,
        ema=config.ema,
        elastic=model_setup.elastic,
        best=best,
        unreadable=unreadable,
        passes_beside=[passes_of_teacher],
    ) as loop:
        evaluation = Evaluation(
            loop, LabelledImages(val, val_to_tensor, seed=0, replace_unreadable=False)
        )
        loader = training_loader(images, sampler, data.workers, unreadable, mixing, on_device)
        batches = iter(loader)
        if config.estimate:
            estimate_images(
                loop, sampler, batches, model_setup.macs, published_rates.CLASSIFICATION
            )
            return
        for step in loop.steps():
            loop.step(batches, epoch=step * batch_size // len(source), count=batch_size)
            if loop.step_is_logged():
                values = loop.averages()
                accuracy = f"acc {100 * values['batch_accuracy']:.0f} %"
                loop.metrics(values, f"loss {values['loss']:.4f}, {accuracy}")
            # Validate before saving, so that the checkpoint of this step has the scores. The last step is left to `finish`.
            if loop.due(config.eval_every) and loop.done < span.stop:
                evaluation.judge()
            loop.save()
        if not loop.stopped:
            evaluation.finish(name)


# Scores that results.json has of the worse weights, and at each share of heads. Few classes give no top5.
SCORES = ("top1", "top5", "loss")


class Evaluation:
    """Validates a run: its EMA weights if it has any, else its model; after the last step both."""

    def __init__(self, loop: TrainingLoop, images: LabelledImages):
        self.loop = loop
        self.images = images
        if loop.ema:
            self.select_weights("ema")
        else:
            self.select_weights("model")

    def select_weights(self, weights: str) -> None:
        """Select the weights, "ema" or "model", that are validated from now on."""
        self.weights = weights
        if weights == "ema":
            self.model = self.loop.ema.module
            self.task = ClassificationTask(self.model, balance_weight=0.0)
        else:
            self.model = self.loop.model
            self.task = self.loop.task

    def validate(self) -> tuple[dict, HeadLoad, torch.Tensor]:
        """Score the weights that `select_weights` chose, see `scores.validate`."""
        loop = self.loop
        data = loop.config.data
        with loop.setup.errors((BadData,), every_rank=True):
            return validate(self.task, self.images, data, loop.accelerator, loop.log.progress)

    def judge(self) -> tuple[dict, HeadLoad, torch.Tensor]:
        """Validate; log the scores, and keep the weights if they are the best so far."""
        validated = self.validate()
        self.log_and_keep_best(validated[0])
        return validated

    def judge_better(self) -> tuple[tuple[dict, HeadLoad, torch.Tensor], dict]:
        """Validate the EMA and the last weights, and select the better ones.

        Returns:
            validated: as `validate`, of the better weights.
            worse: some scores of the worse weights, under their key in results.json.
        """
        loop = self.loop
        averaged = self.validate()
        self.select_weights("model")
        last = self.validate()
        by_weights = dict(ema=averaged, model=last)
        better = "ema"
        worse = "model"
        top1 = {name: value_of(scores, "top1") for name, (scores, *_) in by_weights.items()}
        if math.isnan(top1["ema"]) or top1["model"] > top1["ema"]:
            better = "model"
            worse = "ema"
        self.select_weights(better)
        self.log_and_keep_best(by_weights[better][0])
        worse_scores = by_weights[worse][0]
        named = dict(ema=loop.ema_name, model="the last weights")
        loop.log.say(
            f"{named[worse]}: {summary(worse_scores)}; results.json and the commands that open the run "
            f"take {better}.safetensors"
        )
        kept = {key: worse_scores[key] for key in SCORES if key in worse_scores}
        return by_weights[better], {f"{worse}_weights": kept}

    def log_and_keep_best(self, scores: dict) -> None:
        """Log the scores, and keep the weights if they are the best so far."""
        loop = self.loop
        if loop.best:
            loop.judge(scores, self.model)
        show = f"validation after {loop.done} steps: {summary(scores)}"
        if self.weights == "ema":
            show = f"{show} ({loop.ema_name})"
        loop.event({"validation": scores, "weights": self.weights}, show)

    def finish(self, name: str) -> None:
        """Validate the last weights, and the EMA if there is one; write results.json, confusion.json and head_load.json."""
        loop = self.loop
        classes = self.images.source.classes
        worse: dict = {}
        if loop.ema:
            (scores, load, predictions), worse = self.judge_better()
        else:
            scores, load, predictions = self.judge()
        if loop.elastic:
            scores["by_share"], load_at_smallest = self.score_shares(scores)
            # `load` is of the largest share. If all heads run there, no router chooses, and the load tells nothing.
            if not load.choosing():
                load = load_at_smallest
        confusion = confusion_of(predictions)
        scores["top1_by_class"] = class_accuracy(confusion, classes)
        best: dict = {}
        if loop.best:
            best = loop.best.results()
        loop.write_results(dict(scores, weights=self.weights, **worse, **best))
        loop.log.say(class_table(scores["top1_by_class"]))
        if best:
            said = f"top-1 {best['best_top1']:.2f} % after {best['best_step']} steps"
            loop.log.say(f"best of the validations: {said}, {loop.folder / BEST}")
        if not loop.accelerator.is_main_process:
            return
        # counts: rows [class, predicted class, number of images].
        counted = dict(classes=list(classes), counts=confusion.tolist())
        write_whole(loop.folder / "confusion.json", json.dumps(counted) + "\n")
        load.of = dict(
            model=name,
            data=loop.config.data.root,
            split="val",
            weights=self.weights,
            step=loop.done,
        )
        try:
            if load.choosing():
                load.save(loop.folder / FILE)
        except OSError as error:
            loop.log.say(f"{loop.folder / FILE} could not be written: {message_of(error)}")

    def score_shares(self, scores: dict) -> tuple[dict, HeadLoad]:
        """Score an elastic model at its smallest, middle and largest share, and print the scores.

        Args:
            scores: scores at the largest share, which are known already.

        Returns:
            by_share: some scores at each share, for results.json.
            load: the head load at the smallest share.
        """
        loop = self.loop
        loads = []  # at the smallest share, then at the middle one

        def score() -> dict:
            share_scores, load, _ = self.validate()
            loads.append(load)
            return share_scores

        scores_by_share = loop.elastic.by_share(self.model, score, scores)
        loop.log.say(
            "\n".join(
                f"with a share of {share}: {summary(s)}" for share, s in scores_by_share.items()
            )
        )
        shares = ("active_share", "active_groups_share")
        kept = [name for name in (*SCORES, *shares) if name in scores]
        table = {
            share: {name: share_scores[name] for name in kept}
            for share, share_scores in scores_by_share.items()
        }
        return table, loads[0]


def main(argv: list[str] | None = None) -> None:
    with set_up_run(CLASSIFICATION.script, ClsConfig, argv) as setup:
        train(setup)


if __name__ == "__main__":
    main()
