"""The task of language models: what accelerate wraps."""

from typing import Optional

from torch import Tensor, nn

from moh_vision.attention.losses import RoutedTask


class LanguageTask(RoutedTask):
    """Translation, masked and causal language models: cross-entropy of the tokens that are to be predicted.

    Label smoothing is in here because a trainer's own would rebuild the loss from the logits and lose the auxiliary
    ones.
    """

    def __init__(self, model: nn.Module, balance_weight: float, label_smoothing: float = 0.0, **moa_weights: float):
        super().__init__(model, balance_weight, **moa_weights)
        self.label_smoothing = label_smoothing
        # By which accelerate finds the layers that FSDP may gather one by one; None: it gathers the whole model.
        self._no_split_modules = getattr(model, "fsdp_layers", None)

    def forward(self, labels: Tensor, tokens: Optional[Tensor] = None, **inputs: Tensor):
        """labels [B, T], -100 where nothing is to be predicted; inputs: the model's -> losses, with nll, in nats a
        token.

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
