"""Train a diffusion transformer.   accelerate launch train_dit.py --config configs/dit/NAME.yaml [--key value ...]

Where only the package is installed: accelerate launch -m moh_vision.diffusion.train --config dit/NAME.
The same command resumes the run; --help prints every key.
"""

import json
from pathlib import Path

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
from moh_vision.engine.block_descent import BlockDescent
from moh_vision.engine.estimate import estimate_images
from moh_vision.engine.loop_start import start_loop
from moh_vision.engine.optimizers import make_optimizer
from moh_vision.engine.ranks import by_all, from_first, say
from moh_vision.engine.run_setup import RunSetup, set_up_run
from moh_vision.models.convert import share_strongest_heads
from moh_vision.models.dit import arguments_of
from moh_vision.models.dit_weights import is_jits, patch_of_jit
from moh_vision.models.frozen import FrozenRecord
from moh_vision.models.prediction import FROM_NOISE, LINEAR, Prediction
from moh_vision.models.pretrained import name_and_arguments
from moh_vision.models.set_up import check_memory, set_up_model
from moh_vision.models.teachers import Teacher
from moh_vision.models.weight_files import read_metadata, shapes_in, weights_file


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
    if not span.checkpoint:
        say_other_training(config, model)
    teacher = None
    alignment = None
    if config.repa.teacher:
        with accelerator.main_process_first():
            teacher, alignment = open_teacher(config, model, inputs)
    # REPA's projector is trained with the model. Checkpoints contain it, files of weights do not.
    trained = model
    if alignment:
        trained = nn.ModuleList([model, alignment])
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
    if teacher:
        frozen["repa.teacher"] = (config.repa.teacher, teacher.sha256)
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
    task = DiffusionTask(model, config.balance_weight, objective, alignment, **config.moa_weights())
    optimizer = make_optimizer(trained, config.optim)
    if teacher:
        teacher = teacher.to(accelerator.device)
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
        """Move a batch to the device, add the teacher's tokens, and encode images if there is a VAE."""
        batch = send_to_device(batch, accelerator.device, non_blocking=True)
        targets = {}
        if teacher:
            with accelerator.autocast():
                targets["teacher_tokens"] = teacher.tokens(batch["images"])  # [B, N, D]
        return inputs.encode(batch, accelerator.autocast()) | targets

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
        drawings=[drawn.passes for drawn in drawings if 0 < drawn.config.every <= span.stop],
    ) as loop:
        loader = training_loader(
            images, sampler, data_config.workers, unreadable, prepare=on_device
        )
        batches = iter(loader)
        if config.estimate:
            estimate_images(loop, sampler, batches, model_setup.macs)
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


def open_teacher(config: DitConfig, model: nn.Module, inputs) -> tuple[Teacher, Alignment]:
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


def say_other_training(config: DitConfig, model: nn.Module) -> None:
    """Tell the user if the run begins from weights of another training, which their shapes do not show."""
    origin = config.model.pretrained or config.init_from
    if not origin:
        return
    trained, arguments = training_of(origin)
    now = prediction_said(model.prediction, model.config.compat)
    if trained is not None:
        before = prediction_said(trained, arguments.get("compat", "official"))
    elif model.config.compat == "sit":
        before = now  # a file of SiT's does not say what it is: it is taken for what the model is
    else:
        before = str(Prediction())  # other files that say nothing are of DiTs
    if before != now:
        say(f"{origin} was trained to predict {before}, this run predicts {now}")
    # Argument -> its value where the weights do not say it. DiT and SiT have no rotary positions.
    unseen = {"use_rot_pos_emb": False}
    if model.config.class_tokens:
        unseen["class_tokens_start"] = model.config.class_tokens_start
    for key, otherwise in unseen.items():
        before = str(arguments.get(key, otherwise)).lower()
        now = str(model.config[key]).lower()
        if before != now:
            say(f"{origin} was trained with {key} {before}, this run with {now} (model.kwargs)")


def training_of(source: str) -> tuple[Prediction | None, dict]:
    """Return what weights for `init_from` predict, None for files that do not say it, and the arguments of their model."""
    path = Path(source)
    if not path.exists():  # the name of a registered model
        return said_by(arguments_of(source, {}))
    if (path / "model_index.json").is_file():  # a pipeline, ours or diffusers'
        return said_by(json.loads((path / "transformer" / "config.json").read_text()))
    settings = path / "config.json"
    if settings.is_file():  # what save_pretrained wrote
        return said_by(json.loads(settings.read_text()))
    file = weights_file(source)
    if file.suffix == ".safetensors":
        metadata = read_metadata(file)
        arguments = metadata.get("arguments")
        if isinstance(arguments, dict):
            return said_by(arguments_of(str(metadata.get("architecture")), arguments))
    shapes = shapes_in(file)
    if is_jits(shapes):
        arguments = arguments_of(f"jit_base_patch{patch_of_jit(shapes)}", {})
        if not arguments:  # none of JiT's own sizes
            arguments = arguments_of("jit_base_patch16", {})
        del arguments["class_tokens_start"]  # other sizes have another one, which no file says
        return said_by(arguments)
    return None, {}


def said_by(arguments: dict) -> tuple[Prediction, dict]:
    """Return what a model with these arguments predicts, and the arguments."""
    return Prediction.of(arguments.get("prediction")), arguments


def prediction_said(prediction: Prediction, compat: str) -> str:
    """Return a prediction as text, with what distinguishes it from one in our time and of N(0, 1).

    Args:
        prediction: the model's.
        compat: the model's.
    """
    details = []
    if compat in FROM_NOISE:
        family, _ = FROM_NOISE[compat]
        details.append(f"in {family}'s time")
    if prediction.noise_scale != 1:
        details.append(f"noise_scale {prediction.noise_scale:g}")
    if not details:
        return str(prediction)
    return f"{prediction} ({', '.join(details)})"


def main(argv: list[str] | None = None) -> None:
    with set_up_run(DIFFUSION.script, DitConfig, argv) as setup:
        train(setup)


if __name__ == "__main__":
    main()
