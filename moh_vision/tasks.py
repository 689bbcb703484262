"""One module a task: a batch goes in, a dict of losses comes out. This is what accelerate wraps.

The auxiliary losses are computed here from values that the model returns, so they are right under activation
checkpointing, accumulation and several models in a process.
"""

from typing import Dict, List, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention import (
    HeadMixtureAttention,
    RoutingStats,
    head_runs,
    load_balance_loss,
    moa_balance_loss,
    router_z_loss,
)


class RoutedTask(nn.Module):
    """Holds a model with head routing and adds its routers' auxiliary losses to that of the task.

    Args:
        model: its HeadMixtureAttention layers hand on their statistics in the order of `model.modules()`.
        balance_weight: of MoH's load-balance loss (Jin 2024, eq. 7 times E, averaged over the layers, as released).
        moa_balance_weight, z_weight: of MoA's L_a and L_z, summed over its modules (Zhang 2022, eq. 17). The paper's
            weights, which belong to a loss that is a mean over tokens.
    """

    def __init__(
        self, model: nn.Module, balance_weight: float, moa_balance_weight: float = 0.01, z_weight: float = 0.001
    ):
        super().__init__()
        self.model = model
        self.balance_weight, self.moa_balance_weight, self.z_weight = balance_weight, moa_balance_weight, z_weight
        layers = [m for m in model.modules() if isinstance(m, HeadMixtureAttention)]
        self.aux_losses = [layer.router.aux_loss for layer in layers]  # in the order of the statistics

    def losses(self, task_loss: Tensor, stats: List[RoutingStats]) -> Dict:
        """task_loss, a scalar, and the statistics of all layers -> the losses of a micro-batch.

        Returns:
            dict(loss, task_loss, balance_loss, head_runs); with MoA layers also moa_balance_loss and z_loss. Only the
            loss has a gradient. head_runs is what `moh_vision.attention.head_runs` returns.
        """
        moh, moa = (
            [s for s, of in zip(stats, self.aux_losses, strict=True) if of == paper] for paper in ("moh", "moa")
        )
        terms = dict(balance_loss=load_balance_loss(moh, sum_over_processes) if moh else task_loss.new_zeros(()))
        auxiliary = self.balance_weight * terms["balance_loss"]
        if moa:
            terms.update(moa_balance_loss=moa_balance_loss(moa, sum_over_processes), z_loss=router_z_loss(moa))
            auxiliary = (
                auxiliary + self.moa_balance_weight * terms["moa_balance_loss"] + self.z_weight * terms["z_loss"]
            )
        loss = task_loss + auxiliary
        return dict(
            loss=loss,
            task_loss=task_loss.detach(),
            **{name: value.detach() for name, value in terms.items()},
            head_runs=head_runs(stats),
        )


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


class DiffusionTask(RoutedTask):
    """Noise prediction; `diffusion` is a `moh_vision.diffusion.HybridLoss`."""

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


class LanguageTask(RoutedTask):
    """Translation, masked and causal language models: cross-entropy of the tokens that are to be predicted.

    Label smoothing is in here because a trainer's own would rebuild the loss from the logits and lose the auxiliary ones.
    """

    def __init__(self, model: nn.Module, balance_weight: float, label_smoothing: float = 0.0, **moa_weights: float):
        super().__init__(model, balance_weight, **moa_weights)
        self.label_smoothing = label_smoothing
        # By which accelerate finds the layers that FSDP may gather one by one; None: it gathers the whole model.
        self._no_split_modules = getattr(model, "fsdp_layers", None)

    def forward(self, labels: Tensor, tokens: Optional[Tensor] = None, **inputs: Tensor):
        """labels [B, T], -100 where nothing is to be predicted; inputs: the model's -> losses, with nll, in nats a token.

        Args:
            tokens: what the sum over the labels is divided by. With all labels of the step over its micro-batches, the
                mean of the micro-batches' losses is that of the one big batch; None: the labels that are here.

        In eval mode: (nll [B, T], routing statistics).
        """
        smoothing = self.label_smoothing if self.training else 0.0
        loss, nll, stats = self.model.routed_loss(labels, label_smoothing=smoothing, **inputs)  # [B, T]
        if not self.training:
            return nll, stats
        if tokens is None:
            tokens = (labels != -100).sum().clamp_min(1)
        return dict(self.losses(loss.sum() / tokens, stats), nll=(nll.detach().sum() / tokens))


def sum_over_processes(counts: Tensor) -> Tensor:
    """All-reduce without a gradient; the tensor itself where there is one process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        counts = counts.clone()
        torch.distributed.all_reduce(counts)
    return counts
