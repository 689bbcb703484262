"""The task of classification: what accelerate wraps."""

from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention.losses import RoutedTask


class ClassificationTask(RoutedTask):
    """Cross-entropy with class numbers, or with the mixed targets of mixup and cutmix; and distillation.

    Args:
        distill: a `DistillConfig`, for batches with a teacher's logits.
    """

    def __init__(
        self,
        model: nn.Module,
        balance_weight: float,
        label_smoothing: float = 0.0,
        distill=None,
        **moa_weights: float,
    ):
        super().__init__(model, balance_weight, **moa_weights)
        self.label_smoothing, self.distill = label_smoothing, distill

    def forward(self, images: Tensor, labels: Optional[Tensor] = None, teacher_logits: Optional[Tensor] = None):
        """images [B, C, h, w], labels [B] or targets [B, classes] -> losses, with batch_accuracy.

        With teacher_logits [B, classes] also kd_loss, which is a part of task_loss.

        In eval mode: images -> (logits [B, classes], routing statistics), so that validation too goes through what
        wraps the task.
        """
        logits, stats = self.model.forward_routed(images)  # [B, classes]
        if not self.training:
            return logits, stats
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        task_loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        terms = {}
        if teacher_logits is not None:
            kd_loss = distillation_loss(logits, teacher_logits, self.distill.temperature)
            task_loss = self.distill.task_loss_weight * task_loss + self.distill.distill_loss_weight * kd_loss
            terms = dict(kd_loss=kd_loss.detach())
        dominant = labels.argmax(-1) if labels.ndim == 2 else labels
        accuracy = (logits.detach().argmax(-1) == dominant).float().mean()
        return dict(self.losses(task_loss, stats), batch_accuracy=accuracy, **terms)


def distillation_loss(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """KL divergence of the student's softmax from the teacher's, times the squared temperature (Hinton 2015, section 2).

    timm's `LogitDistillationTask` has the same loss, but calls the student itself, without its routing statistics.

    Args:
        logits, teacher_logits: [B, classes].
        temperature: divides both.

    Returns:
        a scalar, the mean over the batch.
    """
    student, teacher = (F.log_softmax(x.to(logits.dtype) / temperature, -1) for x in (logits, teacher_logits))
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2
