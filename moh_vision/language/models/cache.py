"""The cache for transformers' `generate`, made of the attention layers' caches."""

import inspect

from torch import Tensor
from transformers import Cache, GenerationMixin

from moh_vision.attention import ContextCache, KeyValueCache

# Name of the cache argument in transformers: "cache" from 5.24 on, "past_key_values" before. Our models take both.
CACHE = "cache"
if CACHE not in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters:
    CACHE = "past_key_values"


class DecoderLayerCache:
    """Cache of a decoder layer: keys, values and the gate's running state; for cross-attention the source's keys and
    values."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.self_attention = KeyValueCache()
        self.cross_attention = ContextCache()

    def get_seq_length(self) -> int:
        return self.self_attention.length

    def get_max_length(self) -> int:
        return -1  # no limit

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; `tokens_to_remove` is negative, as in transformers."""
        self.self_attention.crop(self.self_attention.length + tokens_to_remove)

    def reorder_cache(self, rows: Tensor) -> None:
        self.self_attention.reorder(rows)
        self.cross_attention.reorder(rows)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.self_attention.repeat(repeats)
        self.cross_attention.repeat(repeats)


class TextCache(Cache):
    """One `DecoderLayerCache` per decoder layer.

    transformers' caches keep only keys and values; when beams are reordered, the state of MAE's gate must be reordered
    too.
    """

    def __init__(self, layers: int):
        super().__init__(layers=[DecoderLayerCache() for _ in range(layers)])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.layers[layer_idx].get_seq_length()


class CachedGeneration:
    """Mixin that starts `generate` with a `TextCache`; it comes before PreTrainedModel."""

    def new_cache(self) -> TextCache:
        """Return an empty cache, for forward."""
        return TextCache(getattr(self.config, self.config.depths[-1]))

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, *args, **kwargs
    ) -> None:
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={implementation!r}: this model has its own cache, leave it out"
            )
        if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE] = self.new_cache()
