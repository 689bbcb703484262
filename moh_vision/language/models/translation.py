"""Encoder-decoder for translation (Vaswani 2017) with dense, MAE, MoA or MoH attention."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.models.bart.modeling_bart import shift_tokens_right
from transformers.utils import can_return_tuple

from moh_vision.attention import RoutingStats
from moh_vision.language.models.adaptive import log_softmax
from moh_vision.language.models.base import TextModel
from moh_vision.language.models.blocks import (
    TextLayers,
    padding_of,
    token_positions,
    with_positions,
)
from moh_vision.language.models.cache import CACHE, CachedGeneration, TextCache
from moh_vision.language.models.configs import TranslationConfig


class Stack(nn.Module):
    """An embedding and its layers; the decoder is one. `options` are those of `TextLayers`."""

    def __init__(
        self, config: TranslationConfig, words: int, attention: dict | None, depth: int, **options
    ):
        super().__init__()
        self.embedding = nn.Embedding(words, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = TextLayers(config, attention or config.attention, depth, **options)

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        cache: TextCache | None = None,
        stats: list[RoutingStats] | None = None,
        checkpoint=None,
    ) -> Tensor:
        """Return the last layer's output [B, N, C].

        Args:
            ids: [B, N].
            mask: [B, past + N]; 1 real, 0 padding.
            context: [B, M, C], the encoder's output.
            context_mask: [B, M], as `mask`.
            cache: of the earlier tokens; the layers append the new tokens to it.
            stats: list to which the layers append their attention statistics.
            checkpoint: see `run_block`.
        """
        past = 0 if cache is None else cache.get_seq_length()
        positions = token_positions(ids, mask, past)
        x = self.dropout(with_positions(self.embedding(ids), positions))
        return self.layers(
            x, padding_of(mask), context, padding_of(context_mask), cache, stats, checkpoint
        )


class Encoder(Stack):
    main_input_name = "input_ids"  # read by `generate`

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        stats=None,
        checkpoint=None,
        **_: Any,
    ) -> BaseModelOutput:
        """Return last_hidden_state [B, M, C] of input_ids and attention_mask [B, M].

        `generate` passes further arguments, which have no effect.
        """
        x = super().forward(input_ids, attention_mask, stats=stats, checkpoint=checkpoint)
        return BaseModelOutput(last_hidden_state=x)


class TranslationModel(CachedGeneration, TextModel, GenerationMixin):
    """Model of a `TranslationConfig`. One embedding serves source, target and output, or the source has
    its own."""

    config_class = TranslationConfig

    def __init__(self, config: TranslationConfig):
        super().__init__(config)
        words = config.target_vocab_size or config.vocab_size
        self.encoder = Encoder(
            config,
            config.vocab_size,
            config.encoder_attention,
            config.encoder_layers,
            pool="sequence",
        )
        self.decoder = Stack(
            config,
            words,
            config.decoder_attention,
            config.decoder_layers,
            pool="running",
            cross=config.cross_attention or config.attention,
            is_causal=True,
        )
        self.output = nn.Linear(config.hidden_size, words, bias=False)
        if config.target_vocab_size:
            self._tied_weights_keys = {"output.weight": "decoder.embedding.weight"}
        else:
            self._tied_weights_keys = {
                "output.weight": "encoder.embedding.weight",
                "decoder.embedding.weight": "encoder.embedding.weight",
            }
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.embedding

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shift labels y1 .. yn eos [B, N], with -100 or padding after, to bos y1 .. yn."""
        return shift_tokens_right(
            labels, self.config.pad_token_id, self.config.decoder_start_token_id
        )

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict:
        """Prepare inputs as transformers does; without a cache, add a mask that keeps every generated token."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        # Without mask and cache, `hidden_states` would take a generated pad_token_id for padding.
        if inputs.get(CACHE) is None and inputs.get("decoder_attention_mask") is None:
            inputs["decoder_attention_mask"] = torch.ones_like(inputs["decoder_input_ids"])
        return inputs

    @can_return_tuple
    def forward(  # noqa: PLR0913
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        past_key_values: TextCache | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        cache: TextCache | None = None,
    ) -> Seq2SeqLMOutput:
        """Predict the next word of the target at every position; logits are log-probabilities [B, N, V].

        Args:
            input_ids, attention_mask: source [B, M]; 1 real, 0 padding. Or encoder_outputs of an earlier call.
            decoder_input_ids: target so far [B, N]; with a cache (see `new_cache`) only the new tokens. None: made from
                labels.
            decoder_attention_mask: 1 real, 0 padding. None: without a cache, pad_token_id is padding.
            labels: [B, N] aligned with the outputs, -100: no loss.
            logits_to_keep: compute logits only for this many last tokens; 0: for all.
            cache, past_key_values: two names of one argument, see `CACHE`.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("translation needs decoder_input_ids, or labels to shift")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if cache is None:
            cache = past_key_values
        if use_cache and cache is None:
            cache = self.new_cache()
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, checkpoint=self.checkpointer)
        hidden = self.hidden_states(
            None, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs, cache
        )
        return Seq2SeqLMOutput(
            loss=self.mean_loss(hidden, labels),
            logits=self.log_probs(hidden[:, -logits_to_keep:]),
            **{CACHE: cache},
            encoder_last_hidden_state=encoder_outputs[0],
        )

    def hidden_states(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        cache: TextCache | None = None,
        stats: list[RoutingStats] | None = None,
    ) -> Tensor:
        """Return the decoder's output [B, N, C], see `forward`."""
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, stats, self.checkpointer)
        if decoder_attention_mask is None and cache is None:
            decoder_attention_mask = decoder_input_ids != self.config.pad_token_id
        return self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs[0],
            attention_mask,
            cache,
            stats,
            self.checkpointer,
        )

    def log_probs(self, hidden: Tensor) -> Tensor:
        return log_softmax(self.output(hidden))
