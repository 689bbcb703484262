"""The task of classification: a module that computes the losses of a batch, which accelerate wraps."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention.losses import RoutedTask
from moh_vision.models.teachers import one_minus_cosine


class TokenAlignment(nn.Module):
    """The distance of a classifier's last tokens from a teacher's (Sanh 2019, L_cos), and its projector.

    The projector is no part of the model. It is linear, and tokens of equal widths need none.

    Args:
        weight: weight of the loss.
        width: width of the model's tokens.
        teacher_width: width of the teacher's tokens.
    """

    def __init__(self, weight: float, width: int, teacher_width: int):
        super().__init__()
        self.weight = weight
        self.projector: nn.Module = nn.Identity()
        if width != teacher_width:
            self.projector = nn.Linear(width, teacher_width)

    def forward(self, tokens: Tensor, teacher_tokens: Tensor) -> Tensor:
        """Return one minus the mean cosine similarity of patches.

        Args:
            tokens: [B, N, width].
            teacher_tokens: [B, N, teacher_width].
        """
        return one_minus_cosine(self.projector(tokens), teacher_tokens)


class ClassificationTask(RoutedTask):
    """Cross-entropy with class numbers or mixed targets (mixup, cutmix), and distillation.

    Args:
        model: a classifier with `forward_routed`.
        balance_weight: weight of MoH's load-balance loss.
        label_smoothing: label smoothing of the cross-entropy.
        distill: a `ClsDistillConfig`, for batches with a teacher's logits or tokens.
        alignment: for batches with a teacher's tokens.
        moa_weights: see `RoutedTask`.
    """

    def __init__(
        self,
        model: nn.Module,
        balance_weight: float,
        label_smoothing: float = 0.0,
        distill=None,
        alignment: TokenAlignment | None = None,
        **moa_weights: float,
    ):
        super().__init__(model, balance_weight, **moa_weights)
        self.label_smoothing = label_smoothing
        self.distill = distill
        self.alignment = alignment

    def forward(
        self,
        images: Tensor,
        labels: Tensor | None = None,
        teacher_logits: Tensor | None = None,
        teacher_tokens: Tensor | None = None,
    ):
        """Return the losses and batch_accuracy; in eval mode (logits [B, classes], routing statistics).

        Validation calls the task, not the model alone, so that what wraps the task in training also wraps it there.

        Args:
            images: [B, C, h, w].
            labels: [B], or mixed targets [B, classes].
            teacher_logits: [B, classes]; with them task_loss includes a kd_loss.
            teacher_tokens: [B, N, teacher_width]; with them task_loss includes a token_loss.
        """
        tokens: list[Tensor] = []
        options = {}
        if teacher_tokens is not None:
            options["tokens"] = tokens  # the model appends the tokens of its last layer
        logits, stats = self.model.forward_routed(images, **options)  # [B, classes]
        if not self.training:
            return logits, stats
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        task_loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        distill = self.distill
        terms = {}
        if teacher_logits is not None or teacher_tokens is not None:
            task_loss = distill.task_loss_weight * task_loss
        if teacher_logits is not None:
            kd_loss = distillation_loss(logits, teacher_logits, distill.temperature)
            task_loss = task_loss + distill.distill_loss_weight * kd_loss
            terms["kd_loss"] = kd_loss.detach()
        if teacher_tokens is not None:
            token_loss = self.alignment(tokens[0], teacher_tokens)
            task_loss = task_loss + self.alignment.weight * token_loss
            terms["token_loss"] = token_loss.detach()
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
