"""Pictures of a diffusion model while it trains."""

from pathlib import Path
from typing import Callable

import torch
from torch import Tensor, nn

from moh_vision.analysis.figures import draw_image_grid
from moh_vision.diffusion.sampling import Guidance, make_scheduler, sample_images, to_uint8


class Previews:
    """Samples of the same noise and labels, whatever the step and the number of processes.

    Args:
        config: a `PreviewConfig`.
        num_classes: of the model; image i has class i modulo it.
        clip: whether predictions are clipped to [-1, 1], as for pixels.
        decode: what the model samples [B, C, h, w] -> images [B, 1 or 3, height, width] in [-1, 1]; None: the same.
        batch_size: images at a time.
    """

    def __init__(self, config, num_classes: int, clip: bool, decode: Callable[[Tensor], Tensor] = None, batch_size=32):
        self.config, self.num_classes, self.clip = config, num_classes, clip
        self.decode, self.batch_size = decode or (lambda x: x), batch_size

    def due(self, step: int, last: int) -> bool:
        """Whether pictures are drawn after `step` steps; if at all, then also after the last one."""
        return bool(self.config.every) and (step % self.config.every == 0 or step == last)

    def draw(self, model: nn.Module, path: Path, write: bool) -> Tensor:
        """Sample, and write a PNG grid if `write`; every process may call it, and with FSDP must.

        The mode of the model is as before afterwards, and no global random number is drawn.

        Returns:
            images [N, 1 or 3, height, width] uint8, on the CPU.
        """
        c, device = self.config, next(model.parameters()).device
        mode = model.training
        labels = torch.arange(c.images) % self.num_classes
        shape = (model.config.in_channels, model.config.sample_size, model.config.sample_size)
        scheduler = make_scheduler(c.sampler, c.steps, model.config.learn_sigma, self.clip)
        images = []
        try:
            model.eval()
            for first in range(0, c.images, self.batch_size):
                batch = labels[first : first + self.batch_size].to(device)
                seeds = range(c.seed + first, c.seed + first + len(batch))

                def predict(x, t, y):
                    return model(x, t, y).sample

                x = sample_images(predict, scheduler, batch, shape, seeds, self.num_classes, Guidance(c.cfg_scale))
                images.append(to_uint8(self.decode(x)).cpu())
        finally:
            model.train(mode)
        images = torch.cat(images)
        if write:
            draw_image_grid(images, min(c.columns, c.images), str(path))
        return images
