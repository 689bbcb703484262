"""The moving average of the weights: timm's, also where FSDP shards them."""

from __future__ import annotations

from typing import Iterator, Optional, Tuple

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moh_vision.engine.sharding import is_sharded


class ModelEma(ModelEmaV3):
    """timm's ModelEmaV3, whose `module` stays whole on every process with sharded weights.

    Make it before accelerate shards the model. An update then gathers one tensor at a time: the traffic of one
    more forward pass, and memory for the model.
    """

    def apply_update_(self, model: nn.Module, decay: float) -> None:
        if not is_sharded(model):
            return super().apply_update_(model, decay)
        for average, (_, value) in zip(self.module.state_dict().values(), gathered(model)):
            if average.is_floating_point():
                average.lerp_(value.to(average.dtype), 1 - decay)
            else:
                average.copy_(value)

    @torch.no_grad()
    def set(self, model: nn.Module) -> None:
        """Start again from the weights of `model`."""
        for average, (_, value) in zip(self.module.state_dict().values(), gathered(model)):
            average.copy_(value)


def make_ema(model: nn.Module, decay: float, warmup: bool, device) -> Optional[ModelEma]:
    """Make the average of a model, not sharded yet, moved to `device`; None for a decay of 0."""
    model.to(device)
    return ModelEma(model, decay=decay, use_warmup=warmup) if decay else None


def gathered(model: nn.Module) -> Iterator[Tuple[str, Tensor]]:
    """Yield names and tensors of a state dict, FSDP's shards whole; for every process together."""
    for name, value in model.state_dict().items():
        yield name, value.full_tensor() if isinstance(value, DTensor) else value
