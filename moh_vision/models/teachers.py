"""Frozen models that a run learns from."""

from collections.abc import Sequence

import torch
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
        source: a timm model with pretrained weights (NAME, hf-hub:OWNER/NAME or local-dir:FOLDER), or a
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
        try:
            model = found.build()
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
        logits = self.teacher(self.normalised(images))
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


def _channels_of(model: nn.Module) -> int:
    """Return how many channels the images of a model have: those of its first convolution, or 3 if it has none."""
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    first = next(convolutions, None)
    if first is None:
        return 3
    return first.in_channels
