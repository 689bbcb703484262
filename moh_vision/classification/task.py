"""The task of classification: what accelerate wraps."""

from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention.losses import RoutedTask


class ClassificationTask(RoutedTask):
    """Cross-entropy with class numbers, or with the mixed targets of mixup and cutmix."""

    def __init__(self, model: nn.Module, balance_weight: float, label_smoothing: float = 0.0, **moa_weights: float):
        super().__init__(model, balance_weight, **moa_weights)
        self.label_smoothing = label_smoothing

    def forward(self, images: Tensor, labels: Optional[Tensor] = None):
        """images [B, C, h, w], labels [B] or targets [B, classes] -> losses, with batch_accuracy.

        In eval mode: images -> (logits [B, classes], routing statistics), so that validation too goes through what
        wraps the task.
        """
        logits, stats = self.model.forward_routed(images)  # [B, classes]
        if not self.training:
            return logits, stats
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        task_loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        dominant = labels.argmax(-1) if labels.ndim == 2 else labels
        accuracy = (logits.detach().argmax(-1) == dominant).float().mean()
        return dict(self.losses(task_loss, stats), batch_accuracy=accuracy)
