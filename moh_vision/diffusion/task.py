"""The diffusion task, which accelerate wraps, and REPA's alignment with a frozen teacher's features."""

from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention.losses import RoutedTask

WIDEST = 2048  # hidden width of the projector, at most; 2048 in REPA's released code


class Alignment(nn.Module):
    """REPA's alignment loss and its projector, which is not part of the model (Yu 2024).

    Args:
        block: the block whose output tokens are aligned, counted from 1.
        weight: weight of the loss.
        width: width of the model's tokens.
        teacher_width: width of the teacher's tokens.
    """

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
        """Return one minus the mean cosine similarity of patches: the loss of Yu 2024, plus one.

        Args:
            tokens: outputs of the model's blocks, [B, N, width] each.
            teacher_tokens: [B, N, teacher_width].
        """
        projected = self.projector(tokens[self.block - 1])  # [B, N, teacher_width]
        # In float32, because the squares could overflow in fp16.
        return 1 - F.cosine_similarity(projected.float(), teacher_tokens.float(), dim=-1).mean()


class DiffusionTask(RoutedTask):
    """Computes the losses of a batch: of a diffusion objective, of routing and, if wanted, of REPA.

    Args:
        model: the diffusion transformer.
        balance_weight: weight of the balance loss.
        diffusion: the objective, see `moh_vision.diffusion.objectives`.
        alignment: needed for batches with a teacher's tokens.
        moa_weights: weights of MoA's losses.
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
        """Return the losses, and the means of mse and vb; with teacher_tokens also repa_loss.

        Args:
            images, noise: [B, C, h, w].
            labels, timesteps: [B].
            teacher_tokens: [B, N, teacher_width].
        """
        xt = self.diffusion.add_noise(images, noise, timesteps)  # [B, C, h, w]
        options = {}
        if teacher_tokens is not None:
            options["tokens"] = []  # the model appends each block's output tokens
        # output: [B, C or 2C, h, w]
        output, stats = self.model.forward_routed(xt, timesteps, labels, **options)
        losses = self.diffusion(output, images, xt, noise, timesteps)
        terms = {name: loss.mean() for name, loss in losses.items()}
        task_loss = terms.pop("loss")
        if teacher_tokens is not None:
            terms["repa_loss"] = self.alignment(options["tokens"], teacher_tokens)
            task_loss = task_loss + self.alignment.weight * terms["repa_loss"]
        detached = {name: term.detach() for name, term in terms.items()}
        return dict(self.losses(task_loss, stats), **detached)
