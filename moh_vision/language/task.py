"""The task of language models: model and losses in one module, which accelerate wraps."""

from torch import Tensor, nn

from moh_vision.attention.losses import RoutedTask


class LanguageTask(RoutedTask):
    """Cross-entropy of the tokens to predict, for translation, masked and causal language models.

    Labels are smoothed here, because the label smoothing of a trainer would drop the auxiliary losses.
    """

    def __init__(
        self,
        model: nn.Module,
        balance_weight: float,
        label_smoothing: float = 0.0,
        **moa_weights: float,
    ):
        super().__init__(model, balance_weight, **moa_weights)
        self.label_smoothing = label_smoothing
        # For accelerate: layers that FSDP may gather one by one; None: the whole model.
        self._no_split_modules = getattr(model, "fsdp_layers", None)

    def forward(self, labels: Tensor, tokens: Tensor | None = None, **inputs: Tensor):
        """Return a dict of the batch's losses, with nll in nats per token.

        Args:
            labels: [B, T]; -100: no loss.
            tokens: divisor of the summed losses; None: the number of labels in this batch. With (labels of the step) /
                (micro-batches of the step), the mean over micro-batches is the loss of one large batch.
            **inputs: of the model.
        """
        # loss and nll: [B, T]
        loss, nll, stats = self.model.routed_loss(
            labels, label_smoothing=self.label_smoothing, **inputs
        )
        if tokens is None:
            tokens = (labels != -100).sum().clamp_min(1)
        return dict(self.losses(loss.sum() / tokens, stats), nll=nll.detach().sum() / tokens)
