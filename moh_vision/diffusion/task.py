"""The task of diffusion, which accelerate wraps, and its alignment with a frozen model's features."""

from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention.losses import RoutedTask

WIDEST = 2048  # of a projector, as released


class Alignment(nn.Module):
    """REPA (Yu 2024): the loss of the tokens after a `block`, counted from 1, and its projector, no part of the model."""

    def __init__(self, block: int, weight: float, width: int, teacher_width: int):
        super().__init__()
        self.block = block
        self.weight = weight
        hidden = min(4 * width, WIDEST)
        self.projector = nn.Sequential(
            nn.Linear(width, hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
            nn.Linear(hidden, teacher_width),
        )

    def forward(self, tokens: list[Tensor], teacher_tokens: Tensor) -> Tensor:
        """Return one minus the mean cosine similarity of patches: the loss of Yu 2024 plus one."""
        projected = self.projector(tokens[self.block - 1])  # [B, N, teacher_width]
        # fp16 would square beyond its range.
        return 1 - F.cosine_similarity(projected.float(), teacher_tokens.float(), dim=-1).mean()


class DiffusionTask(RoutedTask):
    """A model and its objective.

    Args:
        model: the diffusion transformer.
        balance_weight: of the balance loss.
        diffusion: the objective, see `moh_vision.diffusion.objectives`.
        alignment: for batches with a teacher's tokens.
        moa_weights: of MoA's losses.
    """

    def __init__(
        self,
        model: nn.Module,
        balance_weight: float,
        diffusion: nn.Module,
        alignment: Alignment | None = None,
        **moa_weights: float,
    ):
        super().__init__(model, balance_weight, **moa_weights)
        self.diffusion = diffusion
        self.alignment = alignment

    def forward(
        self,
        images: Tensor,
        labels: Tensor,
        timesteps: Tensor,
        noise: Tensor,
        teacher_tokens: Tensor | None = None,
    ) -> dict:
        """Return the losses, mean mse and vb; with teacher_tokens [B, N, width] also repa_loss.

        Args:
            images, noise: [B, C, h, w].
            labels, timesteps: [B].
        """
        xt = self.diffusion.add_noise(images, noise, timesteps)  # [B, C, h, w]
        taken = {}
        if teacher_tokens is not None:
            taken["tokens"] = []  # the model appends those after each block
        # output: [B, C or 2C, h, w]
        output, stats = self.model.forward_routed(xt, timesteps, labels, **taken)
        losses = self.diffusion(output, images, xt, noise, timesteps)
        terms = {name: loss.mean() for name, loss in losses.items()}
        task_loss = terms.pop("loss")
        if teacher_tokens is not None:
            terms["repa_loss"] = self.alignment(taken["tokens"], teacher_tokens)
            task_loss = task_loss + self.alignment.weight * terms["repa_loss"]
        detached = {name: term.detach() for name, term in terms.items()}
        return dict(self.losses(task_loss, stats), **detached)
