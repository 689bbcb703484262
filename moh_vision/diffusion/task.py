"""The task of diffusion: what accelerate wraps."""

from typing import Dict

from torch import Tensor, nn

from moh_vision.attention.losses import RoutedTask


class DiffusionTask(RoutedTask):
    """A model and its objective; `diffusion` is one of `moh_vision.diffusion.objectives`."""

    def __init__(self, model: nn.Module, balance_weight: float, diffusion: nn.Module, **moa_weights: float):
        super().__init__(model, balance_weight, **moa_weights)
        self.diffusion = diffusion

    def forward(self, images: Tensor, labels: Tensor, timesteps: Tensor, noise: Tensor) -> Dict:
        """images x_0, noise [B, C, h, w]; labels, timesteps [B] -> losses, with the mean mse and vb."""
        xt = self.diffusion.add_noise(images, noise, timesteps)  # [B, C, h, w]
        output, stats = self.model.forward_routed(xt, timesteps, labels)  # [B, C or 2C, h, w]
        terms = {name: value.mean() for name, value in self.diffusion(output, images, xt, noise, timesteps).items()}
        task_loss = terms.pop("loss")
        return dict(self.losses(task_loss, stats), **{name: value.detach() for name, value in terms.items()})
