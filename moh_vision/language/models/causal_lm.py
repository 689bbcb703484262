"""Causal language model with adaptive softmax (Baevski and Auli 2019); dense, MAE, MoA or MoH."""

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from moh_vision.attention import RoutingStats
from moh_vision.language.models.adaptive import AdaptiveVocabulary
from moh_vision.language.models.base import TextModel
from moh_vision.language.models.blocks import (
    TextLayers,
    padding_of,
    token_positions,
    with_positions,
)
from moh_vision.language.models.cache import CACHE, CachedGeneration, TextCache
from moh_vision.language.models.configs import CausalLMConfig


class CausalLMModel(CachedGeneration, TextModel, GenerationMixin):
    """Decoder of a `CausalLMConfig`. As in the released models, no norm follows the last layer."""

    config_class = CausalLMConfig
    _input_embed_layer = "vocabulary"

    def __init__(self, config: CausalLMConfig):
        super().__init__(config)
        self.vocabulary = AdaptiveVocabulary(
            config.vocab_size,
            config.hidden_size,
            config.adaptive_cutoffs,
            config.adaptive_factor,
            config.adaptive_dropout,
        )
        self.dropout = nn.Dropout(config.dropout)
        self.layers = TextLayers(
            config,
            config.attention,
            config.num_hidden_layers,
            pool="window",
            is_causal=True,
            pre_norm=True,
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: TextCache | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        cache: TextCache | None = None,
    ) -> CausalLMOutputWithPast:
        """Predict the next word at every position; logits are log-probabilities [B, N, V].

        Args:
            input_ids: [B, N]; with a cache (see `new_cache`) only the new tokens.
            attention_mask: [B, past + N]; 1 real, 0 padding, on either side.
            labels: [B, N], as in transformers' causal models: input_ids, with -100 for no loss. `forward` shifts
                them, `routed_loss` does not.
            logits_to_keep: compute logits only for this many last tokens; 0: for all.
            cache, past_key_values: two names of one argument, see `CACHE`.
        """
        if cache is None:
            cache = past_key_values
        if use_cache and cache is None:
            cache = self.new_cache()
        hidden = self.hidden_states(input_ids, attention_mask, cache)
        loss = None
        if labels is not None:
            loss = self.mean_loss(hidden[:, :-1], labels[:, 1:])
        return CausalLMOutputWithPast(
            loss=loss,
            logits=self.log_probs(hidden[:, -logits_to_keep:]),
            **{CACHE: cache},
        )

    def hidden_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: TextCache | None = None,
        stats: list[RoutingStats] | None = None,
    ) -> Tensor:
        """Return the last layer's output [B, N, C], see `forward`."""
        past = 0 if cache is None else cache.get_seq_length()
        positions = token_positions(input_ids, attention_mask, past)
        x = self.dropout(with_positions(self.vocabulary(input_ids), positions))
        return self.layers(
            x,
            padding_of(attention_mask),
            cache=cache,
            stats=stats,
            checkpoint=self.checkpointer,
        )

    def log_probs(self, hidden: Tensor) -> Tensor:
        return self.vocabulary.log_probs(hidden)

    def token_losses(
        self, hidden: Tensor, labels: Tensor, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """Return losses as `TextModel.token_losses` does.

        An adaptive softmax takes no label smoothing, because it never computes all words.
        """
        if not self.config.adaptive_cutoffs:
            return super().token_losses(hidden, labels, label_smoothing)
        if label_smoothing:
            raise ValueError(
                f"label_smoothing={label_smoothing}: an adaptive softmax never computes all words, set it to 0"
            )
        nll = self.vocabulary.nll(hidden, labels)
        return nll, nll
