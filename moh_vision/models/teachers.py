"""Frozen models that a run learns from, and what is trained beside the model to reach them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from timm.models import group_parameters
from timm.task import DistillationTeacher
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.common.errors import reason_of
from moh_vision.common.wings import CLASSIFICATION
from moh_vision.models.frozen import digest_of
from moh_vision.models.weight_files import refuse_not_finite
from moh_vision.models.weights import find_weights


class Teacher(nn.Module):
    """A frozen model in eval mode; timm's `DistillationTeacher` normalises images for it.

    A teacher is not a submodule of the trained model, so that it is neither wrapped nor saved with it.

    Args:
        key: configuration key, for messages.
        source: a timm model with pretrained weights (NAME, hf-hub:OWNER/NAME, local-dir:FOLDER or FOLDER), or a
            classification run. A teacher of RGB images sees grey ones as RGB images of three equal channels.
        mean, std: normalisation of the images, per channel.

    Attributes:
        classes: class names in order; None if only their number is known.
        order: for each class of the data the index of its logit; None: the data have the teacher's order.
        sha256: SHA-256 of the weights and of the normalisation that the teacher expects.
    """

    def __init__(self, key: str, source: str, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.name = f"{key} {source}"
        self.order: list[int] | None = None
        self.size: int | None = None  # side of the images that `tokens` takes
        found = find_weights(source, wing=CLASSIFICATION.name, key=key)
        model = found.build()
        try:
            self.classes = found.classes
            refuse_not_finite("its weights", model.state_dict())
            self.teacher = DistillationTeacher(model).requires_grad_(False).eval()
            normalisation = {name: getattr(self.teacher, name) for name in ("mean_kd", "std_kd")}
            self.sha256 = digest_of({**model.state_dict(), **normalisation})
        except Exception as error:  # files of others may hold anything
            raise ValueError(f"{self.name}: {reason_of(error)}") from None
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1))
            # A teacher of grey images was trained with the first channel's mean and std.
            per_channel = getattr(self.teacher, f"{name}_kd")
            setattr(self.teacher, f"{name}_kd", per_channel[:, : _channels_of(model)])

    def normalised(self, images: Tensor) -> Tensor:
        """Renormalise images [B, C, h, w] from `mean` and `std` to the teacher's own; grey ones become three channels for RGB.

        Each of the three has its own mean and std, which a kernel summed over its channels could not have.
        """
        return self.teacher.normalize_input(images, self.mean, self.std)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """images [B, C, h, w] -> logits [B, classes]."""
        return self._in_order(self.teacher(self.normalised(images)))

    def _in_order(self, logits: Tensor) -> Tensor:
        """Put logits [B, classes] into the order of the data's classes."""
        if self.order is None:
            return logits
        return logits[:, self.order]

    def check_logits(self, shape: Sequence[int], classes: int) -> None:
        """Raise ValueError unless the teacher takes images of shape [C, h, w] and has this many classes."""
        try:
            got = tuple(self(torch.zeros(1, *shape)).shape)
        except Exception as error:  # models fail in many ways
            raise ValueError(
                f"{self.name} cannot take images of {list(shape)}: {reason_of(error)}"
            ) from None
        if got != (1, classes):
            raise ValueError(f"{self.name} has {got[-1]} classes, the data {classes}")

    def match_grid(self, grid: int) -> int:
        """Resize images so that `tokens` gives grid x grid patches; return a token's width."""
        model = self.teacher.model
        channels = self.mean.shape[1]
        try:
            self.size = grid * model.feature_info[-1]["reduction"]
            if hasattr(model, "set_input_size"):  # resizes the position table, as a new parameter
                model.set_input_size(img_size=(self.size, self.size))
            self.requires_grad_(False)
            _, patches, width = self.tokens(torch.zeros(1, channels, self.size, self.size)).shape
        except Exception as error:  # models fail in many ways
            reason = f"{type(error).__name__}: {reason_of(error)}"
            raise ValueError(
                f"{self.name} gives no features of {grid} x {grid} patches: {reason}"
            ) from None
        if patches != grid**2:
            raise ValueError(
                f"{self.name} gives features of {patches} patches, the model has {grid} x {grid} tokens"
            )
        return width

    @torch.no_grad()
    def tokens(self, images: Tensor) -> Tensor:
        """images [B, C, h, w] -> patch features of the last layer [B, N, width], after the model's final norm."""
        if images.shape[-1] != self.size:
            images = F.interpolate(images, (self.size, self.size), mode="bicubic", antialias=True)
        options = dict(indices=1, norm=True, intermediates_only=True)
        images = self.normalised(images)
        model = self.teacher.model
        features = model.forward_intermediates(images, **options)[0]  # [B, width, g, g]
        return features.flatten(2).transpose(1, 2)

    @torch.no_grad()
    def logits_and_tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """images [B, C, h, w] -> what `forward` and `tokens` return, [B, classes] and [B, N, width], by one forward."""
        model = self.teacher.model
        images = self.normalised(images)
        last, (features,) = model.forward_intermediates(images, indices=1, norm=True)
        return self._in_order(model.forward_head(last)), features.flatten(2).transpose(1, 2)

    def check_tokens(self, shape: Sequence[int], patches: int) -> int:
        """Return the width of `tokens`; raise ValueError unless images of shape [C, h, w] give this many."""
        self.size = shape[-1]
        images = torch.zeros(1, *shape)
        try:
            logits, tokens = self.logits_and_tokens(images)
            same = torch.allclose(logits, self(images), atol=1e-4)
        except Exception as error:  # models fail in many ways
            reason = f"{type(error).__name__}: {reason_of(error)}"
            raise ValueError(
                f"{self.name} gives no tokens of images of {list(shape)}: {reason}"
            ) from None
        if not same:
            raise ValueError(f"{self.name} gives other logits where its tokens are asked for too")
        if tokens.shape[1] != patches:
            raise ValueError(
                f"{self.name} gives {tokens.shape[1]} tokens of images of {list(shape)}, the model {patches}"
            )
        return tokens.shape[-1]


def called(autocast: Callable[[], AbstractContextManager], call: Callable, *inputs: Tensor) -> Any:
    """Return `call(*inputs)` under autocast, as a run calls its frozen models."""
    with autocast():
        return call(*inputs)


def one_minus_cosine(tokens: Tensor, teacher_tokens: Tensor) -> Tensor:
    """Return one minus the mean cosine similarity of tokens [B, N, width] with a teacher's.

    The loss of REPA (Yu 2024), plus one, and of DistilBERT's hidden states (Sanh 2019, L_cos).
    """
    # In float32, because the squares could overflow in fp16.
    return 1 - F.cosine_similarity(tokens.float(), teacher_tokens.float(), dim=-1).mean()


class WithProjector(nn.Module):
    """A model, and the projector that is trained with it: what the optimiser of a run with a teacher sees.

    Checkpoints contain the projector, files of weights do not.

    Args:
        model: the model.
        projector: a module whose output is compared with a teacher's features.
    """

    def __init__(self, model: nn.Module, projector: nn.Module):
        super().__init__()
        self.model = model
        self.projector = projector

    def no_weight_decay(self) -> set[str]:
        """Return the names of the model's parameters without weight decay, as timm asks a model."""
        if not hasattr(self.model, "no_weight_decay"):
            return set()
        return {f"model.{name}" for name in self.model.no_weight_decay()}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """Return a function from a parameter's name to its layer, as timm asks a model: the projector is of the last one."""
        layers = group_parameters(self.model, self.model.group_matcher(coarse), reverse=True)
        last = max(layers.values())

        def layer_of(name: str) -> int:
            return layers.get(name.removeprefix("model."), last)

        return layer_of


def _channels_of(model: nn.Module) -> int:
    """Return how many channels the images of a model have: those of its first convolution, or 3 if it has none."""
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    first = next(convolutions, None)
    if first is None:
        return 3
    return first.in_channels
