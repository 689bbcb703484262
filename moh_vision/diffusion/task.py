"""The task of diffusion: what accelerate wraps."""

from torch import Tensor, nn

from moh_vision.attention.losses import RoutedTask


class DiffusionTask(RoutedTask):
    """A model and its objective. `alignment` is for batches with a teacher's tokens."""

    def __init__(
        self,
        model: nn.Module,
        balance_weight: float,
        diffusion: nn.Module,
        alignment: nn.Module | None = None,
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
        teacher_tokens: Tensor | None = None,
    ) -> dict:
        """Return the losses, mean mse and vb; with teacher_tokens [B, N, width] also repa_loss."""
        xt = self.diffusion.add_noise(images, noise, timesteps)  # [B, C, h, w]
        taken = {} if teacher_tokens is None else dict(tokens=[])
        output, stats = self.model.forward_routed(xt, timesteps, labels, **taken)  # [B, C or 2C, ...]
        terms = {name: value.mean() for name, value in self.diffusion(output, images, xt, noise, timesteps).items()}
        task_loss = terms.pop("loss")
        if teacher_tokens is not None:
            terms["repa_loss"] = self.alignment(taken["tokens"], teacher_tokens)
            task_loss = task_loss + self.alignment.weight * terms["repa_loss"]
        return dict(self.losses(task_loss, stats), **{name: value.detach() for name, value in terms.items()})
