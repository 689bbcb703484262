"""Masked language model: RoBERTa-like (Zhang 2022, section 5.2); dense, MAE, MoA or MoH."""

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils import can_return_tuple

from moh_vision.attention import RoutingStats
from moh_vision.language.models.adaptive import log_softmax
from moh_vision.language.models.base import TextModel
from moh_vision.language.models.blocks import TextLayers, padding_of, token_positions
from moh_vision.language.models.configs import MaskedLMConfig


class MaskedLMModel(TextModel):
    """Encoder of a `MaskedLMConfig`. The output shares the embedding's weights and has its own bias."""

    config_class = MaskedLMConfig
    _tied_weights_keys = {"output.weight": "embedding.weight"}
    _input_embed_layer = "embedding"
    xavier = False  # initialised as RoBERTa

    def __init__(self, config: MaskedLMConfig):
        super().__init__(config)
        dim = config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, dim)
        self.positions = nn.Embedding(config.max_position_embeddings, dim)
        self.embedding_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = TextLayers(
            config, config.attention, config.num_hidden_layers, pool="sequence", activation="gelu"
        )
        self.head = nn.Linear(dim, dim)
        self.head_norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, config.vocab_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> MaskedLMOutput:
        """Predict the masked words; logits are log-probabilities [B, N, V]. input_ids, attention_mask (1 real, 0 padding)
        and labels (-100: no loss): [B, N]."""
        hidden = self.hidden_states(input_ids, attention_mask)
        return MaskedLMOutput(loss=self.mean_loss(hidden, labels), logits=self.log_probs(hidden))

    def hidden_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        stats: list[RoutingStats] | None = None,
    ) -> Tensor:
        """Return the last layer's output [B, N, C]."""
        if input_ids.shape[1] > self.positions.num_embeddings:
            raise ValueError(
                f"a text of {input_ids.shape[1]} tokens is too long: max_position_embeddings={self.positions.num_embeddings}"
            )
        x = self.embedding(input_ids) + self.positions(token_positions(input_ids, attention_mask))
        x = self.dropout(self.embedding_norm(x))
        return self.layers(x, padding_of(attention_mask), stats=stats, checkpoint=self.checkpointer)

    def log_probs(self, hidden: Tensor) -> Tensor:
        return log_softmax(self.output(self.head_norm(F.gelu(self.head(hidden)))))
