"""The task of diffusion: what accelerate wraps."""

from typing import Dict, List, Optional

from torch import Tensor, nn

from moh_vision.attention.losses import RoutedTask


class DiffusionTask(RoutedTask):
    """A model and its objective.

    Args:
        diffusion: one of `moh_vision.diffusion.objectives`.
        alignment: an `Alignment`, for batches with a teacher's tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        balance_weight: float,
        diffusion: nn.Module,
        alignment: Optional[nn.Module] = None,
        **moa_weights: float,
    ):
        super().__init__(model, balance_weight, **moa_weights)
        self.diffusion, self.alignment = diffusion, alignment

    def forward(
        self,
        images: Tensor,
        labels: Tensor,
        timesteps: Tensor,
        noise: Tensor,
        teacher_tokens: Optional[Tensor] = None,
    ) -> Dict:
        """images x_0, noise [B, C, h, w]; labels, timesteps [B] -> losses, with the mean mse and vb.

        With teacher_tokens [B, N, width] also repa_loss, which is a part of task_loss times its weight.
        """
        xt = self.diffusion.add_noise(images, noise, timesteps)  # [B, C, h, w]
        tokens: List[Tensor] = []
        taken = {} if teacher_tokens is None else dict(tokens=tokens)
        output, stats = self.model.forward_routed(xt, timesteps, labels, **taken)  # [B, C or 2C, h, w]
        terms = {name: value.mean() for name, value in self.diffusion(output, images, xt, noise, timesteps).items()}
        task_loss = terms.pop("loss")
        if teacher_tokens is not None:
            terms["repa_loss"] = self.alignment(tokens, teacher_tokens)
            task_loss = task_loss + self.alignment.weight * terms["repa_loss"]
        return dict(self.losses(task_loss, stats), **{name: value.detach() for name, value in terms.items()})
