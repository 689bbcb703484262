"""A cache for `generate` that does not copy what it holds for every new token."""

from typing import Optional, Tuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):
    """One layer: `keys` and `values` are views of buffers that double when they are full.

    What transformers does to them (cropping, choosing and repeating rows) replaces the views. Those still at the start
    of their buffer are extended in place, others are copied to a new one.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.key_buffer: Optional[Tensor] = None  # [B, kv_heads, room, D]
        self.value_buffer: Optional[Tensor] = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> Tuple[Tensor, Tensor]:
        """Append key_states and value_states [B, kv_heads, N, D]; returns all so far, as views.

        Where a gradient is recorded it is transformers' own, for nothing may be written in place then.
        """
        held = (self.keys, self.values) if self.is_initialized else ()
        if torch.is_grad_enabled() and any(t.requires_grad for t in (key_states, value_states, *held)):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.key_buffer, self.keys = extended(self.key_buffer, self.keys, key_states)
        self.value_buffer, self.values = extended(self.value_buffer, self.values, value_states)
        return self.keys, self.values

    def reset(self) -> None:
        super().reset()
        self.key_buffer = self.value_buffer = None


def extended(buffer: Optional[Tensor], held: Tensor, new: Tensor) -> Tuple[Tensor, Tensor]:
    """held and new one after the other: a buffer, and what of it is filled.

    Args:
        buffer: [B, kv_heads, room, D], or None.
        held: [B, kv_heads, M, D], a view of its start or not; empty of any shape: nothing.
        new: [B, kv_heads, N, D].
    """
    length = held.shape[2] if held.numel() else 0
    end = length + new.shape[2]
    if not (
        buffer is not None
        and held.data_ptr() == buffer.data_ptr()
        and held.stride() == buffer.stride()
        and held.shape[:2] == buffer.shape[:2]
        and end <= buffer.shape[2]
        and (torch.is_inference_mode_enabled() or not buffer.is_inference())  # else it cannot be written to
    ):
        buffer = new.new_empty((*new.shape[:2], max(end, 2 * length), new.shape[3]))
        if length:
            buffer[:, :, :length] = held
    buffer[:, :, length:end] = new
    return buffer, buffer[:, :, :end]


class GrowingCache(DynamicCache):
    """transformers' DynamicCache whose layers grow by doubling, so that a token is copied about twice in all.

    DynamicCache copies all keys and values for every new token, also those of heads that are not read. This one takes up
    to twice the memory. For inference; layers with a sliding window stay transformers' own.

        model.generate(**inputs, past_key_values=GrowingCache(config=model.config))

    Args:
        *args, **kwargs: as DynamicCache's.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = GrowingLayer
        for i, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer:
                self.layers[i] = GrowingLayer()
                if layer.get_seq_length() > 0:
                    self.layers[i].update(layer.keys, layer.values)
