"""Open a language model: a run, or a folder that publish or save_pretrained wrote."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from moh_vision.common.io import RUN_CONFIG, run_of
from moh_vision.common.progress import Progress
from moh_vision.engine.command_line import SavedConfig, parse_config
from moh_vision.engine.opened import Opened, refuse_options
from moh_vision.language.config import WORDS, LanguageConfig
from moh_vision.language.data.batches import load_batches
from moh_vision.language.data.inputs import INPUTS, TextInputs, tokenizer_of
from moh_vision.language.data.tokens import cache_beside
from moh_vision.language.evaluation.perplexity import perplexity, routed_losses
from moh_vision.language.models.weights import build_text, task_for
from moh_vision.models.weights import Form, Weights


class OpenedText(Opened):
    """An opened language model. `config` is the `LanguageConfig` of its run; None: a model that no run wrote."""

    kind = "text"
    unit = "blocks"
    loss_name = "nats per token"
    scored_on = "{c.data.root}, {c.data.val}"  # a format string, see `Opened`

    def text(self, training: bool = False) -> TextInputs:
        """Return the text of the run, opened once; with `training` it includes the training split."""
        if self.config is None:
            raise ValueError(
                f"{self.metadata['weights']}: of no run, whose configuration says where its text is"
            )
        if training not in self.splits:
            config = self.config
            folder = str(run_of(self.metadata["weights"]))
            inputs_class = INPUTS[task_for(config.model)]
            tokenizer = tokenizer_of(config, folder)
            cache = cache_beside(folder)
            self.splits[training] = inputs_class(
                config.data, cache, config.seed, tokenizer, training
            )
        return self.splits[training]

    def data(self, split: str):
        return getattr(self.text(training=split == "train"), split)

    def halves(self, count: int) -> tuple[list[dict], list[dict]]:
        if self.config and task_for(self.config.model) != "clm":
            raise ValueError(
                f"{run_of(self.metadata['weights'])}: of language models causal ones are searched"
            )
        train = self.data("train")
        total = len(train)
        if 2 * count > total:
            raise ValueError(
                f"--images {count}: these and as many others are needed, {self.config.data.train} has {total} blocks"
            )
        # Pairs (position, index of the block), evenly spread. The position has no effect on a causal block, so it is 0.
        samples = [(0, i * total // (2 * count)) for i in range(2 * count)]
        return self._batches(train, samples[::2]), self._batches(train, samples[1::2])

    def _batches(self, blocks, samples: Sequence[tuple[int, int]]) -> list[dict]:
        """Load samples in batches of data.eval_batch_size."""
        size = self.config.data.eval_batch_size
        starts = range(0, len(samples), size)
        return list(load_batches(blocks, [samples[start : start + size] for start in starts]))

    def inputs(self, batch: dict) -> Tensor:
        return batch["input_ids"]

    def loss(self, batch: dict) -> Tensor:
        return torch.tensor(self.mean_loss([batch]))

    def mean_loss(self, batches: Sequence[dict]) -> float:
        return self._perplexity(batches)["loss"]

    @cached_property
    def _validation(self) -> list[dict]:
        text = self.text()
        return list(text.eval_batches(text.val, rank=0, world=1))

    def _losses(self) -> Callable[[dict], Tensor]:
        return routed_losses(self.model.to(self.accelerator.device), self.accelerator)

    def _perplexity(self, batches: Iterable[dict]) -> dict:
        # `perplexity` takes a function that sums over processes. Here is only one.
        return perplexity(self._losses(), batches, self.accelerator.device, lambda total: total)

    def scores(self) -> dict:
        return self._perplexity(Progress.over(self._validation, "scoring"))

    def make_forward(self) -> tuple[Callable[[], Tensor], int]:
        first = send_to_device(self._validation[0], self.accelerator.device)
        return partial(self._losses(), first), len(first["labels"])

    def example(self) -> tuple[list[Tensor], dict]:
        translates = hasattr(self.model, "encoder")
        length = WORDS
        if not translates and self.config is not None:
            length = self.config.data.block
        ids = torch.zeros(1, length, dtype=torch.long)
        if translates:
            return [ids], dict(decoder_input_ids=ids)
        return [ids], {}


def open_weights(
    found: Weights,
    options: Sequence[str] = (),
    device: torch.device | None = None,
    *,
    command: str = "open_run",
    saved: SavedConfig | None = None,
) -> OpenedText:
    """Open a language model, see `moh_vision.opening.open_weights`; `options` may set keys of data and precision."""
    metadata = dict(found.metadata, architecture=found.architecture, weights=str(found.file))
    if found.form == Form.TRANSFORMERS:
        metadata["weights"] = found.source
    if found.run is None:
        refuse_options(options, f"{found.source} is of no run, whose data they would change")
        return OpenedText(found, None, build_text(found, device), metadata)
    arguments = ["--config", str(found.run / RUN_CONFIG), *options]
    config = parse_config(LanguageConfig, arguments, command, saved)
    for key in sorted(config.given):
        if key.partition(".")[0] not in ("data", "mixed_precision", "tf32"):
            raise ValueError(
                f"{key} has no effect: {found.source} brings its model; allowed are data.*, mixed_precision and tf32"
            )
    return OpenedText(found, config, build_text(found, device), metadata)
