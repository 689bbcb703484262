"""What `moh_vision.open_run` returns: a run's model, data and scores. Every wing has a subclass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moh_vision.common.cli import with_value
from moh_vision.engine.accelerator import make_accelerator


def refuse_options(options: Sequence[str], why: str) -> None:
    """Raise ValueError if there are options where none has an effect; the message names the first, and says `why`."""
    if options:
        raise ValueError(f"{with_value(options)} has no effect: {why}")


@dataclass
class Opened:
    """An opened run. Its data are opened on first use.

    Attributes:
        weights: what `find_weights` has found of the path.
        config: the configuration with which the run was opened.
        model: the model in eval mode, on the device given to `open_run`; without one, on the CPU until `loss`, `scores` or
            `make_forward` moves it.
        metadata: architecture, and weights (the file, as printed); for a run also arguments, classes, step, config.
        splits: splits of the data that have been opened, by name.
        kind: "classification", "diffusion" or "text".
        unit: the unit in which the wing's data are counted, in the plural.
        loss_name: name of the wing's loss.
        scored_on: a format string that names the data that `scores` uses; {c} is the configuration.
    """

    weights: Any = field(repr=False)
    config: Any
    model: nn.Module
    metadata: dict[str, Any]
    splits: dict[str, Any] = field(default_factory=dict, repr=False)
    kind: ClassVar[str] = ""
    unit: ClassVar[str] = "images"
    loss_name: ClassVar[str] = ""
    scored_on: ClassVar[str] = ""

    @cached_property
    def accelerator(self):
        """accelerate's Accelerator, with the precision of the configuration."""
        return make_accelerator(self.config.mixed_precision, getattr(self.config, "tf32", False))

    def data(self, split: str) -> Any:
        """Open a split, prepared as for validation."""
        raise NotImplementedError(f"{self.kind}: data")

    def halves(self, count: int) -> tuple[list[dict], list[dict]]:
        """Return two lists of batches: `count` training samples, evenly spread, and `count` other ones between them."""
        raise NotImplementedError(f"{self.kind}: halves")

    def inputs(self, batch: dict) -> Any:
        """Return the model's arguments from a batch, in the form that `calibrate` of `moh_vision.convert` takes."""
        raise NotImplementedError(f"{self.kind}: inputs")

    def loss(self, batch: dict) -> Tensor:
        """Return the model's mean loss over the samples of a batch."""
        raise NotImplementedError(f"{self.kind}: loss")

    @torch.no_grad()
    def mean_loss(self, batches: Sequence[dict]) -> float:
        """Return the model's mean loss over all samples of `batches`."""
        sizes = [len(batch["images"]) for batch in batches]
        losses = [float(self.loss(batch)) for batch in batches]
        return sum(loss * size for loss, size in zip(losses, sizes)) / sum(sizes)

    def scores(self) -> dict[str, Any]:
        """Return scores of the model, such as top1, fid or perplexity, with its present weights and head budget."""
        raise NotImplementedError(f"{self.kind}: scores")

    def make_forward(self) -> tuple[Callable[[], Any], int]:
        """Return a function that does one forward pass, for timing, and the batch size of the pass."""
        raise NotImplementedError(f"{self.kind}: make_forward")

    def passes_beside(self) -> list[tuple[nn.Module, Callable[[], Any]]]:
        """Return [(networks, function that runs them on a batch)] of the networks that `scores` runs beside the model."""
        return []

    def example(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return positional and keyword arguments for a forward with batch size 1; only their shapes matter."""
        raise NotImplementedError(f"{self.kind}: example")
