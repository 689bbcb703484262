"""Train a diffusion transformer.   accelerate launch train_dit.py --config configs/dit/NAME.yaml [--key value ...]

Where only the package is installed: accelerate launch -m moh_vision.diffusion.train --config dit/NAME.
The same command resumes the run; --help prints every key.
"""

from functools import partial

import torch
from accelerate.utils import send_to_device
from torch import nn

from moh_vision.common.wings import DIFFUSION
from moh_vision.data import splits
from moh_vision.data.batches import BadSamples, check_images_fit, training_loader
from moh_vision.data.decode import Decoding
from moh_vision.data.first_look import say_what_is_lost
from moh_vision.data.order import PositionSampler
from moh_vision.data.splits import DataRecord, holds_latents
from moh_vision.data.stream import open_stream
from moh_vision.diffusion.config import DitConfig
from moh_vision.diffusion.inputs import open_inputs
from moh_vision.diffusion.objectives import make_objective
from moh_vision.diffusion.previews import open_drawings
from moh_vision.diffusion.task import Alignment, DiffusionTask
from moh_vision.diffusion.teacher import DiffusionTeacher
from moh_vision.engine import published_rates
from moh_vision.engine.block_descent import BlockDescent
from moh_vision.engine.estimate import estimate_images
from moh_vision.engine.loop_start import start_loop
from moh_vision.engine.optimizers import make_optimizer
from moh_vision.engine.ranks import by_all, from_first, say
from moh_vision.engine.run_setup import RunSetup, set_up_run
from moh_vision.models.convert import share_strongest_heads
from moh_vision.models.creation import arguments_of
from moh_vision.models.frozen import FrozenRecord
from moh_vision.models.prediction import FROM_NOISE, LINEAR, Prediction
from moh_vision.models.pretrained import name_and_arguments
from moh_vision.models.set_up import check_memory, set_up_model
from moh_vision.models.teachers import Teacher, WithProjector, called


def train(setup: RunSetup) -> None:  # noqa: C901, PLR0915
    """Train a diffusion transformer, from the opened run to its last step."""
    config = setup.config
    accelerator = setup.accelerator
    data_config = config.data
    batch_size = config.optim.batch_size

    # ---------------------------------------------------------------- data: images, latents, or images that a VAE encodes
    # The main process alone looks whether an earlier run is in the folder.
    name, arguments = from_first(lambda: name_and_arguments(config, "diffusion", config.fresh))
    root = data_config.root
    img_size = data_config.img_size
    if not data_config.exact_order and holds_latents(root):
        raise ValueError(f"data.root {root}: latents, which data.exact_order false does not read")
    with accelerator.main_process_first():
        stream = open_stream(data_config, config.given, accelerator)
        inputs = open_inputs(
            root,
            config.vae,
            img_size,
            data_config.augment,
            accelerator.device,
            stream,
            decoding=Decoding.of(data_config),
        )
    source = inputs.source
    # Stored latents say how their images were read. The configuration that is saved with the run says it too.
    data_config.colour_space = source.decoding.colour_space
    data_config.value_range = source.decoding.value_range
    classes = source.classes
    check_images_fit("data.img_size", img_size, inputs.colours or 1, setup.micro_batch)
    warmup_steps, settled = config.settle_steps(len(source))
    say(splits.in_short(root, source, config.max_steps, batch_size))
    if settled:
        say(settled)
    say_what_is_lost(f"data.root {root}", dict(train=source), say)

    # ---------------------------------------------------------------- steps to do; objective and model
    span = setup.lock_and_find_steps(config.max_steps)
    prediction = Prediction.of(arguments_of(name, arguments).get("prediction"))
    config.objective_class.complete(config, prediction)
    objective = make_objective(config.tree())
    refuse_other_prediction(name, arguments, config, objective.prediction)
    decided = dict(img_size=inputs.img_size, in_chans=inputs.channels, num_classes=len(classes))
    decided["learn_sigma"] = objective.learn_sigma
    decided["prediction"] = objective.prediction.tree()
    config.model.refuse_other(**decided)
    arguments |= decided
    # Every process reads the first weights or the checkpoint's shared heads; if one cannot, all end.
    model_setup = by_all(
        lambda: set_up_model(config, "diffusion", name, arguments, classes, span.checkpoint, say)
    )
    check_memory(config, model_setup, accelerator.device, setup.micro_batch, say)
    model = model_setup.model
    encoder = None  # of clean images, for REPA
    alignment = None
    trained = model
    if config.repa.teacher:
        with accelerator.main_process_first():
            encoder, alignment = open_encoder(config, model, inputs)
        trained = WithProjector(model, alignment)
    teacher = None  # of predictions
    if config.teacher_source:
        with accelerator.main_process_first():
            teacher = DiffusionTeacher(
                config.teacher_source, model, classes, config.label_drop, inputs.space, say
            )
    descent = BlockDescent(accelerator, trained, config.compile, config.block_descent)

    # ---------------------------------------------------------------- previews, order, calibration
    drawings = open_drawings(setup, inputs, model)
    sampler = PositionSampler(
        source.shard_sizes,
        group=data_config.shuffle_shards,
        seed=config.seed,
        **setup.sampler_arguments(span),
    )
    unreadable = BadSamples(len(source), data_config.max_bad_fraction)
    if config.calibrate_images and not span.checkpoint and not config.dry_run:
        calibration = inputs.calibration_batches(
            objective, config.calibrate_images, unreadable, accelerator
        )
        share_strongest_heads(model, calibration)
    frozen = {}
    if encoder:
        frozen["repa.teacher"] = (config.repa.teacher, encoder.sha256)
    if teacher:
        frozen["distill.teacher"] = (config.teacher_source, teacher.sha256)
    if inputs.space:
        frozen["vae"] = (inputs.space.name, inputs.space.sha256)
    data_record = DataRecord(root, config.allow_change, train=source)

    # ---------------------------------------------------------------- open the folder, which is first written here
    records = [data_record, FrozenRecord(config.allow_change, frozen)]
    folder = setup.open_folder(span, records, model_setup.description)
    if config.dry_run:  # nothing was written
        if inputs.space:
            say(inputs.describe_vae())
        return

    # ---------------------------------------------------------------- task and optimiser
    task = DiffusionTask(
        model,
        config.balance_weight,
        objective,
        alignment,
        config.distill,
        **config.moa_weights(),
    )
    optimizer = make_optimizer(trained, config.optim)
    for frozen_model in (encoder, teacher):
        if frozen_model:
            frozen_model.to(accelerator.device)
    vae = None
    if inputs.space:
        vae = vars(inputs.space)
    metadata = dict(
        architecture=name,
        arguments=model_setup.arguments,
        classes=classes,
        vae=vae,
    )

    # ---------------------------------------------------------------- the loop
    def on_device(batch: dict) -> dict:
        """Move a batch to the device, encode images if there is a VAE, and add what the frozen models say of them."""
        times = loop.log.times
        batch = send_to_device(batch, accelerator.device, non_blocking=True)
        images = batch["images"]
        batch = inputs.encode(batch, accelerator.autocast())
        if not (encoder or teacher):
            return batch
        times.mark("data")
        targets = {}
        with accelerator.autocast():
            if encoder:
                targets["teacher_tokens"] = encoder.tokens(images)  # [B, N, D]
            if teacher:
                noised = (batch[name] for name in ("images", "noise", "timesteps"))
                xt = objective.add_noise(*noised)
                targets["teacher_output"] = teacher(xt, batch["timesteps"], batch["labels"])
        times.mark("teacher")
        return batch | targets

    def passes_of_frozen(_) -> list[tuple]:
        """Return [(frozen model, function that calls it as for a micro-batch)], for `TrainingLoop.passes_beside`."""
        zeros = partial(torch.zeros, device=accelerator.device)
        count = setup.micro_batch
        passes = []
        if encoder:
            clean = zeros(count, inputs.colours, encoder.size, encoder.size)
            passes.append((encoder, partial(called, accelerator.autocast, encoder.tokens, clean)))
        if teacher:
            xt = zeros(count, inputs.channels, inputs.img_size, inputs.img_size)
            numbers = zeros(count, dtype=torch.long)  # timesteps and labels
            predict = partial(called, accelerator.autocast, teacher, xt, numbers, numbers)
            passes.append((teacher, predict))
        return passes

    images = inputs.dataset(config.seed, objective.draw, config.label_drop)
    with start_loop(
        setup,
        span,
        folder,
        descent,
        task,
        optimizer,
        metadata,
        title="diffusion",
        schedule=dict(warmup_steps=warmup_steps),
        ema=config.ema,
        elastic=model_setup.elastic,
        unreadable=unreadable,
        passes_beside=[
            passes_of_frozen,
            *(drawn.passes for drawn in drawings if 0 < drawn.config.every <= span.stop),
        ],
    ) as loop:
        loader = training_loader(
            images, sampler, data_config.workers, unreadable, prepare=on_device
        )
        batches = iter(loader)
        if config.estimate:
            estimate_images(loop, sampler, batches, model_setup.macs, published_rates.DIFFUSION)
            return
        for step in loop.steps():
            loop.step(batches, epoch=step * batch_size // len(source), count=batch_size)
            if loop.step_is_logged():
                values = loop.averages()
                line = f"loss {values['loss']:.4f}, mse {values['mse']:.4f}"
                failed = {f"failed_{drawn.config.section}s": drawn.failed for drawn in drawings}
                loop.metrics(values, line, **failed)
            loop.save()
            for drawn in drawings:
                if loop.due(drawn.config.every, at_end=True):
                    drawn_model = loop.ema.module if loop.ema else loop.model
                    drawn.draw(drawn_model, loop)


def open_encoder(config: DitConfig, model: nn.Module, inputs) -> tuple[Teacher, Alignment]:
    """Open the teacher of `repa.teacher`, set to one patch per token of `model`; also return the `Alignment`."""
    repa = config.repa
    depth = len(model.blocks)
    if inputs.colours is None:
        stored = f"data.root {config.data.root} holds stored latents; give the images, and vae"
        raise ValueError(f"repa.teacher {repa.teacher} needs images: {stored}")
    if repa.block > depth:
        raise ValueError(
            f"repa.block {repa.block} is out of range: 1 to {depth}, the blocks of the model"
        )
    half = [0.5] * inputs.colours  # mean and std of images whose values are normalised to -1 .. 1
    teacher = Teacher("repa.teacher", repa.teacher, half, half)
    teacher_width = teacher.match_grid(model.config.sample_size // model.config.patch_size)
    return teacher, Alignment(repa.block, repa.weight, model.config.hidden_size, teacher_width)


def refuse_other_prediction(
    name: str, arguments: dict, config: DitConfig, prediction: Prediction
) -> None:
    """Refuse to train a model of SiT's or JiT's with another prediction than its own."""
    compat = arguments_of(name, arguments).get("compat")
    if compat not in FROM_NOISE:
        return
    family, predict = FROM_NOISE[compat]
    if (prediction.path, prediction.predict) == (LINEAR, predict):
        return
    model = config.model.pretrained or name
    raise ValueError(
        f"objective {config.objective}, which predicts {prediction}: {model} is a {family}, which takes objective flow "
        f"with flow.predict {predict}"
    )


def main(argv: list[str] | None = None) -> None:
    with set_up_run(DIFFUSION.script, DitConfig, argv) as setup:
        train(setup)


if __name__ == "__main__":
    main()
