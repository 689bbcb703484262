"""The diffusion task, which accelerate wraps, distillation, and REPA's alignment with a frozen teacher's features."""

import torch
from torch import Tensor, nn

from moh_vision.attention.losses import RoutedTask
from moh_vision.models.teachers import one_minus_cosine

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
        """Return one minus the mean cosine similarity of patches.

        Args:
            tokens: outputs of the model's blocks, [B, N, width] each.
            teacher_tokens: [B, N, teacher_width].
        """
        projected = self.projector(tokens[self.block - 1])  # [B, N, teacher_width]
        return one_minus_cosine(projected, teacher_tokens)


class DiffusionTask(RoutedTask):
    """Computes the losses of a batch: of a diffusion objective, of routing and, if wanted, of distillation and REPA.

    Args:
        model: the diffusion transformer.
        balance_weight: weight of the balance loss.
        diffusion: the objective, see `moh_vision.diffusion.objectives`.
        alignment: needed for batches with a teacher's tokens.
        distill: a `DistillConfig`, needed for batches with a teacher's prediction.
        moa_weights: weights of MoA's losses.
    """

    def __init__(
        self,
        model: nn.Module,
        balance_weight: float,
        diffusion: nn.Module,
        alignment: Alignment | None = None,
        distill=None,
        **moa_weights: float,
    ):
        super().__init__(model, balance_weight, **moa_weights)
        self.diffusion = diffusion
        self.alignment = alignment
        self.distill = distill

    def forward(
        self,
        images: Tensor,
        labels: Tensor,
        timesteps: Tensor,
        noise: Tensor,
        teacher_tokens: Tensor | None = None,
        teacher_output: Tensor | None = None,
    ) -> dict:
        """Return the losses, and the means of mse and vb; with teacher_tokens also repa_loss, with teacher_output kd_loss.

        Args:
            images, noise: [B, C, h, w].
            labels, timesteps: [B].
            teacher_tokens: [B, N, teacher_width].
            teacher_output: what the teacher predicts at the same x_t, timesteps and labels, [B, C, h, w].
        """
        xt = self.diffusion.add_noise(images, noise, timesteps)  # [B, C, h, w]
        options = {}
        if teacher_tokens is not None:
            options["tokens"] = []  # the model appends each block's output tokens
        # output: [B, C or 2C, h, w]
        output, stats = self.model.forward_routed(xt, timesteps, labels, **options)
        losses = self.diffusion(output, images, xt, noise, timesteps)
        if teacher_output is not None:
            losses = self._distilled(losses, output, teacher_output, timesteps)
        terms = {name: loss.mean() for name, loss in losses.items()}
        task_loss = terms.pop("loss")
        if teacher_tokens is not None:
            terms["repa_loss"] = self.alignment(options["tokens"], teacher_tokens)
            task_loss = task_loss + self.alignment.weight * terms["repa_loss"]
        detached = {name: term.detach() for name, term in terms.items()}
        return dict(self.losses(task_loss, stats), **detached)

    def _distilled(
        self, losses: dict[str, Tensor], output: Tensor, teacher_output: Tensor, t: Tensor
    ) -> dict[str, Tensor]:
        """Return the losses [B] of a batch with a teacher: "loss" is mixed, and "kd_loss" is new.

            loss = task_loss_weight * L_task + distill_loss_weight * L_kd + vb
            L_kd = w(t) * mean (prediction - teacher's prediction) ** 2

        L_task and L_kd are L_Task and L_OutKD of BK-SDM (Kim 2023, section 3.2). Both have the objective's weight w(t). vb,
        the loss of a learnt variance, stays as it is; the teacher's variance is not used.

        Args:
            losses: of the objective, [B] each.
            output: [B, C or 2C, h, w].
            teacher_output: [B, C, h, w].
            t: [B].
        """
        predicted = output[:, : teacher_output.shape[1]]
        predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
        error = (predicted - teacher_output.to(predicted.dtype)).square().flatten(1).mean(1)  # [B]
        kd_loss = self.diffusion.weighted(error, t)
        of_variance = losses.get("vb", torch.zeros_like(kd_loss))
        of_prediction = losses["loss"] - of_variance
        distill = self.distill
        loss = distill.task_loss_weight * of_prediction + distill.distill_loss_weight * kd_loss
        return dict(losses, loss=loss + of_variance, kd_loss=kd_loss)
