"""A language model and its text: of training for `moh_vision.analysis.search`, of validation for `budget_curve`."""

from pathlib import Path
from typing import List, Sequence, Tuple

from accelerate.utils import send_to_device
from torch import Tensor, nn

from moh_vision.analysis.budget_curve import Scored
from moh_vision.analysis.search import CONVERTED, Calibration, LossOf
from moh_vision.attention import HeadMixtureAttention
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.commands import Progress
from moh_vision.engine.io import run_of
from moh_vision.engine.run import index_dir, make_accelerator
from moh_vision.language.config import LanguageConfig
from moh_vision.language.data.inputs import INPUTS, TextInputs
from moh_vision.language.data.loader import load_batches
from moh_vision.language.evaluation.perplexity import causal_losses, perplexity
from moh_vision.language.models.build import task_for
from moh_vision.language.task import LanguageTask
from moh_vision.models.convert import convert
from moh_vision.models.weight_files import weights_file
from moh_vision.models.weights import load_run


def open_parts(argv: List[str], command: str, training: bool) -> Tuple[LanguageConfig, Path, nn.Module, TextInputs]:
    """Return the configuration of the run --checkpoint, the file of its weights, its model, and its text. `argv` also
    has options of `data` and precision. `training` asks for a causal model and its training text.
    """
    _, path, *options = argv
    file = weights_file(path)
    folder = run_of(file)
    config = parse_config(LanguageConfig, ["--config", str(folder / "config.yaml"), *options], command)
    for key in sorted(config.given):
        if key.partition(".")[0] not in ("data", "mixed_precision", "tf32"):
            raise ValueError(
                f"{key} has no effect: {path} brings its model; allowed are data.*, mixed_precision and tf32"
            )
    if training and task_for(config.model) != "clm":
        raise ValueError(f"{path}: of language models causal ones are searched")
    cache = str(Path(index_dir(str(folder)), "text"))
    text = INPUTS[task_for(config.model)](config.data, cache, config.seed, str(folder), training=training)
    return config, file, load_run(file), text


def open_scored(argv: List[str]) -> Scored:
    """Return the model of the run --checkpoint, and its perplexity on the validation text."""
    config, file, model, text = open_parts(argv, "budget_curve", training=False)
    accelerator = make_accelerator(config.mixed_precision, config.tf32)
    task = LanguageTask(model.to(accelerator.device), 0.0).eval()
    batches = list(text.eval_batches(text.val, 0, 1))
    first = send_to_device(batches[0], accelerator.device)

    def losses(batch: dict) -> Tensor:
        with accelerator.autocast():
            return task(**batch)[0]

    def scores() -> dict:
        return perplexity(losses, Progress.over(batches, "scoring"), accelerator.device, lambda total: total)

    of = dict(weights=str(file), model=config.model.name, data=f"{config.data.root}, {config.data.val}")
    return Scored(model, scores, lambda: losses(first), dict(of, batch_size=len(first["labels"])))


def open_calibration(argv: List[str], count: int) -> Calibration:
    """Return the model of the run --checkpoint, converted if it is dense, and its loss in nats per token on `count`
    blocks of training text, evenly spread. As many other blocks between them are there to compare.
    """
    config, file, model, text = open_parts(argv, "search", training=True)
    total = len(text.train)
    if 2 * count > total:
        raise ValueError(
            f"--images {count}: these and as many others are needed, {config.data.train} has {total} blocks"
        )
    numbers = [(0, i * total // (2 * count)) for i in range(2 * count)]  # position, number of the block
    size = config.data.eval_batch_size
    searched, others = (
        list(load_batches(text.train, [half[start : start + size] for start in range(0, count, size)]))
        for half in (numbers[::2], numbers[1::2])
    )
    dense = all(m.router.all_heads for m in model.modules() if isinstance(m, HeadMixtureAttention))
    if dense:
        model = convert(model, CONVERTED, calibrate=[batch["input_ids"] for batch in searched])
    accelerator = make_accelerator(config.mixed_precision, config.tf32)
    model = model.to(accelerator.device).eval()

    def mean_over(batches: Sequence[dict]) -> LossOf:
        def loss_of(model) -> float:
            with accelerator.autocast():
                return perplexity(causal_losses(model), batches, accelerator.device, lambda total: total)["loss"]

        return loss_of

    of = dict(weights=str(file), model=config.model.name, data=config.data.root, split=config.data.train)
    of.update(blocks=count, converted=dense, loss="nats per token")
    return Calibration(model, mean_over(searched), mean_over(others), of)
