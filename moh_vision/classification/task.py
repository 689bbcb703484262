"""The task of classification: a module that computes the losses of a batch, which accelerate wraps."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention.losses import RoutedTask


class ClassificationTask(RoutedTask):
    """Cross-entropy with class numbers or mixed targets (mixup, cutmix), and distillation.

    Args:
        model: a classifier with `forward_routed`.
        balance_weight: weight of MoH's load-balance loss.
        label_smoothing: label smoothing of the cross-entropy.
        distill: a `DistillConfig`, for batches with a teacher's logits.
        moa_weights: see `RoutedTask`.
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
        self.label_smoothing = label_smoothing
        self.distill = distill

    def forward(
        self, images: Tensor, labels: Tensor | None = None, teacher_logits: Tensor | None = None
    ):
        """Return the losses and batch_accuracy; in eval mode (logits [B, classes], routing statistics).

        Validation calls the task, not the model alone, so that what wraps the task in training also wraps it there.

        Args:
            images: [B, C, h, w].
            labels: [B], or mixed targets [B, classes].
            teacher_logits: [B, classes]; with them task_loss includes a kd_loss.
        """
        logits, stats = self.model.forward_routed(images)  # [B, classes]
        if not self.training:
            return logits, stats
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        task_loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        terms = {}
        if teacher_logits is not None:
            distill = self.distill
            kd_loss = distillation_loss(logits, teacher_logits, distill.temperature)
            task_loss = distill.task_loss_weight * task_loss + distill.distill_loss_weight * kd_loss
            terms = dict(kd_loss=kd_loss.detach())
        dominant = labels
        if labels.ndim == 2:  # mixed targets: take the class with the largest share
            dominant = labels.argmax(-1)
        accuracy = (logits.detach().argmax(-1) == dominant).float().mean()
        return dict(self.losses(task_loss, stats), batch_accuracy=accuracy, **terms)


def distillation_loss(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Return the KL divergence of the student's softmax from the teacher's, times temperature ** 2.

    Hinton 2015, section 2. timm's `LogitDistillationTask` computes the same loss, but its call of the student does not
    return routing statistics.
    """
    student = F.log_softmax(logits / temperature, -1)
    teacher = F.log_softmax(teacher_logits.to(logits.dtype) / temperature, -1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2
