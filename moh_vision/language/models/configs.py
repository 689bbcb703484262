"""Configurations of text models for transformers; attention is a plain dict."""

from typing import Optional

from transformers import PreTrainedConfig

from moh_vision.engine.commands import closest

# Allowed keys of an attention dict, for router and layer ("bias": of its projections).
ROUTER_KEYS = {
    "dense": (),
    "mae": ("leave_out", "mode", "dropout"),
    "moa": ("renormalise", "noisy"),
    "moh": ("gate_scale", "two_stage"),
    "query_norm": (),
}
LAYER_KEYS = {
    "dense": (),
    "mae": (),
    "moa": ("top_k", "experts", "head_dim"),
    "moh": ("head_budget",),
    "query_norm": ("head_budget",),
}


def check_attention(spec: dict, where: str) -> None:
    """Check an attention dict, such as dict(router="moa", top_k=8, experts=32, head_dim=128)."""
    if not isinstance(spec, dict) or spec.get("router") not in ROUTER_KEYS:
        raise ValueError(f"{where}: {spec!r} is not a dict with a router out of {', '.join(ROUTER_KEYS)}")
    allowed = ("bias", "executor", *LAYER_KEYS[spec["router"]], *ROUTER_KEYS[spec["router"]])
    for key in spec:
        if key != "router" and key not in allowed:
            raise ValueError(f"{where}: router {spec['router']!r} has no {key!r}, {closest(key, allowed)}")
    if spec["router"] == "moa":
        for key in ("top_k", "experts", "head_dim"):
            if type(spec.get(key)) is not int or spec[key] < 1:
                raise ValueError(
                    f"{where}: router 'moa' needs {key}, a whole number of at least 1, not {spec.get(key)!r}"
                )
        if spec["top_k"] > spec["experts"]:
            raise ValueError(f"{where}: top_k={spec['top_k']} of only {spec['experts']} experts")


class TextConfig(PreTrainedConfig):
    """Base class of the text models' configurations.

    Args:
        vocab_size: V.
        hidden_size: C.
        intermediate_size: width of the feed-forward layers.
        num_attention_heads: H, of every router but "moa", which has its experts.
        attention: of all layers, a dict of the router and its numbers:
            dict(router="dense"); dict(router="mae", leave_out=1, mode="soft" | "uniform");
            dict(router="moa", top_k, experts, head_dim); dict(router="moh" | "query_norm", head_budget=0.75).
            Each may have bias=False (projections without biases), executor, and the router's options.
        dropout: after embeddings, attention and feed-forward layers; attention_dropout: of the attention
            matrix; activation_dropout: inside the feed-forward layers.
        layer_budgets: [shared, routed] of every attention layer, as `set_head_budget` left them; None: as made.
    """

    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 37_000
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_attention_heads: int = 8
    attention: Optional[dict] = None
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    layer_budgets: Optional[list] = None
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: Optional[int] = 0
    bos_token_id: Optional[int] = 1
    eos_token_id: Optional[int] = 2

    def __post_init__(self, **kwargs):
        if self.attention is None:
            self.attention = {"router": "dense"}
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", *self.depths):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} is not a whole number of at least 1")
        if self.hidden_size % self.num_attention_heads or self.hidden_size % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not even, or no multiple of num_attention_heads={self.num_attention_heads}"
            )
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise ValueError(f"{name}={value!r} is out of range: 0 up to, but not, 1")
        for name in self.roles:
            if getattr(self, name) is not None:
                check_attention(getattr(self, name), name)
                setattr(self, name, dict(getattr(self, name)))  # not the dict of a preset
        super().__post_init__(**kwargs)

    @property
    def depths(self) -> tuple:
        """Names of the fields that hold a number of layers."""
        return ("num_hidden_layers",)

    @property
    def roles(self) -> tuple:
        """Names of the fields that hold an attention dict."""
        return ("attention",)


class TranslationConfig(TextConfig):
    """Encoder-decoder of Vaswani 2017, post-normalised.

    Args:
        target_vocab_size: of a separate target vocabulary and embedding; None: one embedding for source,
            target and output.
        encoder_layers, decoder_layers: how many.
        encoder_attention, decoder_attention, cross_attention: dicts that replace `attention`.
    """

    model_type = "moh_translation"
    attribute_map = {"num_hidden_layers": "encoder_layers"}

    target_vocab_size: Optional[int] = None
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention: Optional[dict] = None
    decoder_attention: Optional[dict] = None
    cross_attention: Optional[dict] = None
    is_encoder_decoder: bool = True
    decoder_start_token_id: Optional[int] = 1

    @property
    def depths(self) -> tuple:
        return ("encoder_layers", "decoder_layers")

    @property
    def roles(self) -> tuple:
        return ("attention", "encoder_attention", "decoder_attention", "cross_attention")

    @property
    def output_vocab_size(self) -> int:
        return self.target_vocab_size or self.vocab_size


class MaskedLMConfig(TextConfig):
    """Encoder for masked language modelling, as RoBERTa: learned positions, embedding norm, post-normalised.

    Args:
        num_hidden_layers: how many.
        max_position_embeddings: learned positions; the longest text.
        initializer_range: standard deviation of the first weights.
    """

    model_type = "moh_masked_lm"

    num_hidden_layers: int = 8
    max_position_embeddings: int = 130
    initializer_range: float = 0.02
    vocab_size: int = 50_265
    mask_token_id: Optional[int] = 4


class CausalLMConfig(TextConfig):
    """Decoder for language modelling with Baevski and Auli's adaptive input and output (2019), pre-normalised.

    Args:
        num_hidden_layers: how many.
        adaptive_cutoffs: word ids, sorted by frequency, that begin bands of narrower embeddings; empty: one
            embedding of full width, tied to an ordinary softmax.
        adaptive_factor: how many times narrower each band is than the one before.
        adaptive_dropout: inside the softmax of the narrower bands.
    """

    model_type = "moh_causal_lm"

    num_hidden_layers: int = 16
    adaptive_cutoffs: Optional[list] = None
    adaptive_factor: int = 4
    adaptive_dropout: float = 0.2

    def __post_init__(self, **kwargs):
        cutoffs = [] if self.adaptive_cutoffs is None else list(self.adaptive_cutoffs)
        if cutoffs != sorted(set(cutoffs)) or any(not 0 < c < self.vocab_size for c in cutoffs):
            raise ValueError(
                f"adaptive_cutoffs={cutoffs} are not increasing numbers between 0 and vocab_size={self.vocab_size}"
            )
        if self.hidden_size // self.adaptive_factor ** len(cutoffs) < 1:
            raise ValueError(
                f"adaptive_factor={self.adaptive_factor}: {len(cutoffs)} narrower bands leave nothing of "
                f"hidden_size={self.hidden_size}"
            )
        self.adaptive_cutoffs = cutoffs
        super().__post_init__(**kwargs)
