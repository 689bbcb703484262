"""The weights of a model in training: their moving average, and gathering the shards of FSDP2."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moh_vision.engine.config import EmaConfig


def is_sharded(model: nn.Module) -> bool:
    """Return whether a process holds only its shards of the weights at present."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


@contextlib.contextmanager
def whole_weights(task: nn.Module) -> Iterator[None]:
    """Keep all weights gathered inside the `with` block, so that each process may call any module as often as it likes.

    Outside, every forward of a sharded module is a collective: a process with fewer batches would block the others
    forever. Every process enters and leaves the block. It is a no-op without FSDP, or inside another `whole_weights`.

    Args:
        task: the module that accelerate wraps, or one that holds it.
    """
    units: list[FSDPModule] = []
    if is_sharded(task):
        units += [module for module in task.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(True, recurse=False)  # as accelerate sets it


def load_whole(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load a state dict of whole tensors into a model that may be sharded; a collective.

    Missing names are allowed, because a tied weight is stored under only one of its names.
    """
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))


class ModelEma(ModelEmaV3):
    """timm's ModelEmaV3 for a model that may be sharded: the average, `module`, is whole on every process.

    Make it before accelerate shards the model. With sharded weights an update gathers one tensor at a time, which
    costs as much traffic as a forward pass, and every process needs memory for the whole average.
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
        """Set the average to the weights of `model`."""
        for average, (_, value) in zip(self.module.state_dict().values(), gathered(model)):
            average.copy_(value)


LEFT = 0.01  # a share of the first weights in an average that is smaller than this counts as none


def first_weights_left(ema: EmaConfig, steps: int) -> float:
    """Return the share that the weights of step 1 have in the EMA after `steps` steps; 0 if it is below LEFT."""
    # Only the decay schedule of ModelEmaV3 is used, but it needs a module; making this one draws no random numbers.
    unused = nn.LayerNorm(1)
    average = ModelEmaV3(unused, decay=ema.decay, use_warmup=ema.warmup)
    share = 1.0
    for step in range(2, steps + 1):  # the first update copies the weights
        share *= average.get_decay(step)
        if share < LEFT:
            return 0.0
    return share


def short_enough(ema: EmaConfig, steps: int) -> str:
    """Suggest, in words, EMA settings with which less than LEFT of the first weights is left after `steps` steps."""
    forgotten = 1 - LEFT ** (1 / max(1, steps - 1))  # 1 - decay, where decay ** (steps - 1) is LEFT
    # Round 1 - decay up at its first decimal that is not 0: the average then forgets at least as fast.
    digits = math.ceil(-math.log10(forgotten))
    decay = round(1 - math.ceil(forgotten * 10**digits) / 10**digits, digits)
    choices = [f"ema.decay {decay:g}"]
    warm = replace(ema, warmup=True)
    if not ema.warmup and not first_weights_left(warm, steps):
        choices.insert(0, "ema.warmup true")
    return " or ".join(choices)


def make_ema(model: nn.Module, ema: EmaConfig | None, device) -> ModelEma | None:
    """Move a model that is not sharded yet to `device`; return its EMA, or None if `ema` has no decay."""
    model.to(device)
    if ema is None or not ema.decay:
        return None
    return ModelEma(model, decay=ema.decay, use_warmup=ema.warmup)


def gathered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a model's state dict, gathering each tensor that FSDP shards.

    A collective: every process must exhaust the iterator.
    """
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        yield name, value
