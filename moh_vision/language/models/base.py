"""Base class of text models: initialisation, statistics, loss per token, loading."""

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from moh_vision.attention import (
    HeadMixtureAttention,
    Router,
    RoutingStats,
    attention_layers,
    set_budgets,
)
from moh_vision.attention.budget import shape_of
from moh_vision.attention.model_heads import heads_at
from moh_vision.language.models.blocks import ExpertAttention
from moh_vision.language.models.configs import attention_budget

MODELS: dict[type[PreTrainedConfig], type[PreTrainedModel]] = {}  # by their config classes


def register(auto: type, *models: type[PreTrainedModel]) -> None:
    """Make models known to AutoConfig and to one of transformers' auto classes."""
    for model in models:
        MODELS[model.config_class] = model
        AutoConfig.register(model.config_class.model_type, model.config_class)
        auto.register(model.config_class, model)


class RoutedLoss:
    """Mixin with the outputs and losses of a language model.

    Subclasses implement `states_and_stats`, `log_probs` and `token_losses`.
    """

    def forward_routed(self, **inputs) -> tuple[Tensor, list[RoutingStats]]:
        """Return logits [B, N, V], and the statistics of all attention layers in the order of `modules()`."""
        hidden, stats = self.states_and_stats(**inputs)
        return self.log_probs(hidden), stats

    def routed_loss(
        self,
        labels: Tensor,
        label_smoothing: float = 0.0,
        where: Tensor | None = None,
        **inputs,
    ) -> tuple[Tensor, Tensor, list[RoutingStats]]:
        """Return losses per token; a task averages them and adds the routers' losses.

        Args:
            labels: [B, N] aligned with the outputs (no shift); at -100 neither loss nor logits are computed.
            label_smoothing: s; loss = (1 - s) * (-log p of the label) + s * (mean of -log p over the
                vocabulary).
            where: what `labelled` returns for these labels, [T]; None: it is called here, which waits for the device.

        Returns:
            (loss [B, N], -log p of the labels [B, N], statistics): float32, 0 where there is no label.
        """
        hidden, stats = self.states_and_stats(**inputs)
        if where is None:
            where = labelled(labels)
        words = labels.flatten()[where]
        loss, nll = self.token_losses(hidden.flatten(0, 1)[where], words, label_smoothing)  # [T]
        zeros = loss.new_zeros(labels.numel())
        losses = [zeros.index_put((where,), each).view_as(labels) for each in (loss, nll)]
        return *losses, stats


def labelled(labels: Tensor) -> Tensor:
    """Return which of the flattened labels are not -100: their indices [T]."""
    return (labels.flatten() != -100).nonzero().squeeze(1)


class TextModel(RoutedLoss, PreTrainedModel):
    """A transformers model whose attention is `HeadMixtureAttention`.

    Subclasses implement `hidden_states(stats=None, **inputs)`, which returns the last layer's output, and `log_probs`.
    """

    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _supports_sdpa = True
    _no_split_modules = ["TextLayer"]
    # Initialise linear layers as fairseq did for the papers' models; False: normal with deviation initializer_range.
    xavier = True

    def get_output_embeddings(self) -> nn.Module | None:
        return getattr(self, "output", None)

    def post_init(self) -> None:
        super().post_init()
        if self.config.layer_budgets is not None:
            set_budgets(attention_layers(self), heads_at(self, self.config.layer_budgets))

    @property
    def head_budget_shape(self) -> str | None:
        """Return how a share of heads is spread over the layers, "ramp" or "uniform"; None: it is not known."""
        return self.config.head_budget_shape or shape_of(attention_budget(self.config.attention))

    def states_and_stats(self, **inputs) -> tuple[Tensor, list[RoutingStats]]:
        stats: list[RoutingStats] = []
        return self.hidden_states(stats=stats, **inputs), stats

    def token_losses(
        self, hidden: Tensor, labels: Tensor, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """Return smoothed and plain losses [T] of hidden [T, C] and labels [T]."""
        log_probs = self.log_probs(hidden)  # [T, V]
        nll = -log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        if label_smoothing == 0:
            return nll, nll
        return (1 - label_smoothing) * nll - label_smoothing * log_probs.mean(-1), nll

    def mean_loss(self, hidden: Tensor, labels: Tensor | None) -> Tensor | None:
        """Return the mean of -log p over the labels, for `forward(labels=...)`; None without labels."""
        if labels is None:
            return None
        where = (labels != -100).nonzero(as_tuple=True)
        _, nll = self.token_losses(hidden[where], labels[where], 0.0)
        return nll.mean()

    @property
    def checkpointer(self):
        """Return the activation checkpointing function for `run_block`; None: keep activations."""
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func
        return None

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Initialise every module, also those without direct parameters, which transformers would skip.

        Loaded weights stay as they are, because the functions of `init` skip them.
        """
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise one module. transformers calls this for children before their parents."""
        if isinstance(module, (nn.Linear, nn.Embedding)) and not self.xavier:
            super()._init_weights(module)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, Router):
            module.init_text_weights()
            module.init_non_persistent_buffers()
        elif isinstance(module, HeadMixtureAttention):
            if isinstance(module, ExpertAttention) and module.head_bias is not None:
                init.zeros_(module.head_bias)
            if self.xavier:
                self._init_attention(module)
        else:
            super()._init_weights(module)

    def _init_attention(self, attention: HeadMixtureAttention) -> None:
        """Initialise projections by Xavier: the matrix is that of all queries in a multi-head layer, and [C, D] of one
        expert in a layer of experts (Zhang 2022). Queries (but of experts), keys and values have gain 1 / sqrt(2)."""
        dim = attention.qkv.in_features
        # Squares of the bounds of uniform distributions.
        q_squared = 3 / (dim + attention.q_dim)
        out_squared = 6 / (dim + attention.q_dim)
        if isinstance(attention, ExpertAttention):
            q_squared = 6 / (dim + attention.head_dim)
            out_squared = 6 / (dim + attention.head_dim)
        kv_squared = 3 / (dim + attention.kv_heads * attention.head_dim)
        init.uniform_(attention.proj.weight, -(out_squared**0.5), out_squared**0.5)
        # The parts of a split lack the flag by which `init` skips loaded weights.
        if not getattr(attention.qkv.weight, "_is_hf_initialized", False):
            q, kv = attention.qkv.weight.split(
                [attention.q_dim, attention.qkv.out_features - attention.q_dim]
            )
            init.uniform_(q, -(q_squared**0.5), q_squared**0.5)
            init.uniform_(kv, -(kv_squared**0.5), kv_squared**0.5)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        *args,
        output_loading_info=False,
        ignore_mismatched_sizes=False,
        **kwargs,
    ):
        """Load a saved model as transformers does; raise ValueError if a shape is not the one of the config."""
        kwargs.update(output_loading_info=True, ignore_mismatched_sizes=True)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        if info["mismatched_keys"] and not ignore_mismatched_sizes:
            source = pretrained_model_name_or_path
            name, saved, wanted = min(info["mismatched_keys"])
            if "embedding" in name and saved[0] != wanted[0]:
                raise ValueError(
                    f"{source}: the checkpoint has {saved[0]} words in {name}, the model is to have {wanted[0]}: "
                    "use the tokenizer it was trained with"
                )
            raise ValueError(
                f"{source}: {name} has shape {list(saved)} in the checkpoint, {list(wanted)} in the model"
            )
        if output_loading_info:
            return model, info
        return model
