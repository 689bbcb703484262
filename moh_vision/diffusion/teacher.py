"""A frozen diffusion model whose prediction another one learns, such as the dense model of a conversion."""

from collections.abc import Callable

import timm
import torch
from torch import Tensor, nn

from moh_vision.common.errors import reason_of
from moh_vision.common.wings import DIFFUSION
from moh_vision.data.splits import refuse_other_classes
from moh_vision.diffusion.latents.vae import LatentSpace, sha256_of
from moh_vision.diffusion.loading import open_model
from moh_vision.diffusion.sampling import refuse_other_inputs
from moh_vision.models.class_names import assumed_order, indices_of
from moh_vision.models.frozen import digest_of
from moh_vision.models.weight_files import refuse_not_finite
from moh_vision.models.weights import Form, Weights, find_weights

KEY = "distill.teacher"


class DiffusionTeacher(nn.Module):
    """A frozen diffusion model in eval mode, which predicts at the x_t, timesteps and labels of the trained model.

    A teacher is not a submodule of the trained model, so that it is neither wrapped nor saved with it. Labels that are
    dropped for guidance are "no class" for it, too.

    Args:
        source: a run, a checkpoint or file of it, the folder of a pipeline, or the name of published weights.
        model: the model that learns. Both predict the same quantity: `to_velocity` bounds its divisors, so that an image
            and a velocity do not follow from each other exactly.
        classes: class names of the data, in order.
        label_drop: share of labels that are dropped.
        space: the VAE of the data's latents; None: pixels.
        say: prints a line.

    Attributes:
        sha256: SHA-256 of the weights.
    """

    def __init__(
        self,
        source: str,
        model: nn.Module,
        classes: list[str],
        label_drop: float,
        space: LatentSpace | None,
        say: Callable[[str], None],
    ):
        super().__init__()
        self.name = f"{KEY} {source}"
        found = find_weights(source, wing=DIFFUSION.name, key=KEY)
        is_published = found.form == Form.NAME
        if is_published and not timm.is_model_pretrained(source):
            raise ValueError(f"{self.name}: no weights of this model are published")
        self.teacher, metadata = open_model(found)
        try:
            refuse_not_finite("its weights", self.teacher.state_dict())
            must_agree = []
            if not is_published:  # published weights do not name their VAE
                must_agree.append(
                    ("VAE", sha256_of(metadata["vae"]), sha256_of(space and vars(space)))
                )
            refuse_other_inputs(self.teacher, model, "model", "predict", must_agree)
        except (ValueError, OSError) as error:
            raise ValueError(f"{self.name}: {reason_of(error)}") from None
        if classes and label_drop and metadata["label_drop"] == 0:
            raise ValueError(
                f'{self.name} was trained with label_drop 0: it knows no label "no class", by which label_drop '
                f"{label_drop:g} replaces labels"
            )
        self.teacher.requires_grad_(False).eval()
        self.sha256 = digest_of(self.teacher.state_dict())
        rows = self._rows_of(classes, found, say)
        self.register_buffer("rows", torch.tensor([*rows, len(rows)]))  # of its label table
        say(f"{KEY}: weights of {metadata['weights']}")

    def _rows_of(self, classes: list[str], found: Weights, say: Callable[[str], None]) -> list[int]:
        """Return for each class of the data its row in the teacher's label table; refuse a teacher of other classes."""
        if not classes:
            return []
        names = found.classes
        if names is None:
            names, remark = assumed_order(found.source, classes)
            say(f"{KEY}: {remark}")
        refuse_other_classes(names, self.name, classes, self.name, "the training images")
        return indices_of(classes, within=names)

    @torch.no_grad()
    def forward(self, xt: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        """Return the prediction [B, C, h, w], without a variance.

        Args:
            xt: noisy images [B, C, h, w].
            timesteps, labels: [B], as the model that learns gets them.
        """
        output, _ = self.teacher.forward_routed(xt, timesteps, self.rows[labels])
        return output[:, : xt.shape[1]]
