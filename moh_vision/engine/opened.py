"""A run that is opened again: its model, data and scores. Every wing has its own subclass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moh_vision.engine.accelerator import make_accelerator


def refuse_options(options: Sequence[str], why: str) -> None:
    """Raise ValueError, naming the first, if there are options where none has an effect."""
    names = [option for option in options if option.startswith("--")]
    if names:
        raise ValueError(f"{names[0].partition('=')[0]} has no effect: {why}")


@dataclass
class Opened:
    """What `moh_vision.open_run` returns. Data are opened when they are asked for.

    Attributes:
        config: the configuration that it was opened with.
        model: in eval mode, on the CPU until something is computed, or on the given device.
        metadata: architecture, weights (the file, as printed); of a run also arguments, classes, step, config.
        kind: "classification", "diffusion" or "text".
    """

    config: Any
    model: nn.Module
    metadata: dict[str, Any]
    splits: dict[str, Any] = field(default_factory=dict, repr=False)  # those that are open
    kind: ClassVar[str] = ""
    unit: ClassVar[str] = "images"  # what its data are counted in
    loss_name: ClassVar[str] = ""
    scored_on: ClassVar[str] = ""  # names what is scored; a format string, {c} is the configuration

    @cached_property
    def accelerator(self):
        """accelerate's Accelerator, with the precision of the configuration."""
        return make_accelerator(self.config.mixed_precision, getattr(self.config, "tf32", False))

    def data(self, split: str) -> Any:
        """Open a split, prepared as for validation."""
        raise NotImplementedError(f"{self.kind}: data")

    def halves(self, count: int) -> tuple[list[dict], list[dict]]:
        """Return batches of `count` evenly spread training samples, and as many between them."""
        raise NotImplementedError(f"{self.kind}: halves")

    def inputs(self, batch: dict) -> Any:
        """Return the model's arguments in a batch, as `calibrate` of `moh_vision.convert` takes them."""
        raise NotImplementedError(f"{self.kind}: inputs")

    def loss(self, batch: dict) -> Tensor:
        """Return the mean loss of a batch, by the model as it is."""
        raise NotImplementedError(f"{self.kind}: loss")

    @torch.no_grad()
    def mean_loss(self, batches: Sequence[dict]) -> float:
        """Return the mean loss of all samples in some batches."""
        sizes = [len(batch["images"]) for batch in batches]
        losses = [float(self.loss(batch)) for batch in batches]
        return sum(loss * size for loss, size in zip(losses, sizes)) / sum(sizes)

    def scores(self) -> dict[str, Any]:
        """Return scores of the model as it is, such as top1, fid or perplexity."""
        raise NotImplementedError(f"{self.kind}: scores")

    def forward(self) -> tuple[Callable[[], Any], int]:
        """Return one pass of a batch, to be timed, and the size of the batch."""
        raise NotImplementedError(f"{self.kind}: forward")

    def example(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return arguments of a forward of batch 1, of which only the shapes matter."""
        raise NotImplementedError(f"{self.kind}: example")
