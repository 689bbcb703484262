"""A diffusion model and its training images for `moh_vision.analysis.search`."""

from typing import List

from accelerate.utils import send_to_device
from torch import Tensor

from moh_vision.analysis.search import Calibration, mean_over
from moh_vision.attention import attention_layers
from moh_vision.data.batches import BadSamples, calibration_halves
from moh_vision.diffusion.config import DitConfig
from moh_vision.diffusion.inputs import open_inputs
from moh_vision.diffusion.objectives import NUM_TIMESTEPS, HybridLoss
from moh_vision.diffusion.task import DiffusionTask
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.run import index_dir, make_accelerator
from moh_vision.models.convert import convert
from moh_vision.models.weights import from_run


def open_calibration(argv: List[str], images: int) -> Calibration:
    """The model of the run --checkpoint, converted if it is dense, and its diffusion loss on training images.

    Image i always has the timestep and the noise that (0, i) draws; no label is dropped, no image mirrored.

    Args:
        argv: --checkpoint and options of `data` and precision.
        images: how many; as many others are there to compare.

    Raises:
        ValueError, FileNotFoundError: in one line.
        UnreadableImage: beyond data.max_bad_fraction.
    """
    config, flags = parse_config(DitConfig, argv, "search", to_validate=True)
    for key in sorted(flags.given):
        if key.partition(".")[0] == "model":
            raise ValueError(f"{key} has no effect: a diffusion run, {flags.checkpoint}, brings its model")
    accelerator = make_accelerator(config.mixed_precision, config.tf32)
    d = config.data
    model, about = from_run(flags.checkpoint, "diffusion")
    inputs = open_inputs(d.root, config.vae, d.img_size, "none", index_dir(config.output), accelerator.device)
    sizes = [about["arguments"][key] for key in ("img_size", "in_chans", "num_classes")]
    given = [inputs.img_size, inputs.channels, len(inputs.source.classes)]
    if sizes != given:
        raise ValueError(
            f"data.root {d.root} has side, channels and classes {given}, the model of {flags.checkpoint} takes {sizes}"
        )
    unreadable = BadSamples(len(inputs.source), d.max_bad_fraction)
    halves = calibration_halves(inputs.dataset(0, NUM_TIMESTEPS, 0.0), images, d.workers, unreadable)
    device = accelerator.device
    searched, others = (
        [send_to_device(inputs.encode(send_to_device(batch, device), accelerator.autocast()), "cpu") for batch in half]
        for half in halves
    )
    objective = HybridLoss()
    dense = all(layer.router.all_heads for layer in attention_layers(model))
    if dense:
        noisy = [
            (objective.add_noise(b["images"], b["noise"], b["timesteps"]), b["timesteps"], b["labels"])
            for b in searched
        ]
        model = convert(model, calibrate=noisy)
    task = DiffusionTask(model, 0.0, objective).to(device).eval()

    def loss(batch: dict) -> Tensor:
        with accelerator.autocast():
            return task(**send_to_device(batch, device))["task_loss"]

    of = dict(weights=about["weights"], model=about["architecture"], data=d.root, split="train")
    of.update(images=images, converted=dense, loss="diffusion loss at fixed timesteps and noise")
    return Calibration(model, mean_over(searched, loss), mean_over(others, loss), of)
