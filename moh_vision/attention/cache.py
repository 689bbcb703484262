"""Caches of keys and values, which a layer keeps between calls to decode one token after another."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from moh_vision.attention.routing import Routing


class Cache:
    """Keys and values of one layer.

    `length` is the number of tokens whose keys and values are kept. `router_state` belongs to routers that read earlier
    tokens (MAE with a causal pool): tensors [B, ..] that sum up those tokens, set by the layer; None for other routers.
    """

    by_row = ("keys", "values", "router_state")  # tensors with one row for each sequence

    def __init__(self):
        self.length = 0
        self.keys: Tensor | None = None  # [B, kv_heads, at least `length`, D]
        self.values: Tensor | None = None
        self.router_state: tuple[Tensor, ...] | None = None

    def reorder(self, indices: Tensor) -> None:
        """Replace the batch by its rows `indices` [B'], in that order; a row may be repeated or dropped."""

        def chosen(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.index_select(0, indices)

        for name in self.by_row:
            setattr(self, name, tree_map(chosen, getattr(self, name)))

    def repeat(self, times: int) -> None:
        """Repeat every row of the batch `times` times, copies next to each other, as the beams of a beam search."""
        if self.keys is not None:
            rows = torch.arange(self.keys.shape[0], device=self.keys.device)
            self.reorder(rows.repeat_interleave(times))


class KeyValueCache(Cache):
    """Keys and values of the tokens so far, for inference (`update` writes in place, so there are no gradients).

    The buffers double when they are full, so that on average a token is copied about twice.
    """

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [B, kv_heads, N, D]; return keys and values of all tokens so far, as views.

        Raises:
            ValueError: for another batch size or dtype than the cache has. An empty cache takes any.
        """
        kept = self.keys
        if kept is not None and (kept.shape[0], kept.dtype) != (k.shape[0], k.dtype):
            raise ValueError(
                f"this KeyValueCache keeps a batch of {kept.shape[0]} in {kept.dtype}, not of {k.shape[0]} in {k.dtype}: "
                "crop it to 0 tokens, or take a new one"
            )
        end = self.length + k.shape[2]
        self.keys = self._room(self.keys, k, end)
        self.values = self._room(self.values, v, end)
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens.

        Raises:
            ValueError: for more tokens than there are. Also if the router has a state and `length` is neither 0 nor the
                present length: a state is a sum or a window, from which earlier states cannot be restored.
        """
        if not 0 <= length <= self.length:
            raise ValueError(
                f"crop to {length} tokens is out of range: 0 to {self.length} are kept"
            )
        if self.router_state is not None and 0 < length < self.length:
            raise ValueError(
                f"crop to {length} of {self.length} tokens: the running state of this layer's router cannot go back"
            )
        self.length = length
        if length == 0:
            self.keys = None
            self.values = None
            self.router_state = None

    def _room(self, buffer: Tensor | None, new: Tensor, end: int) -> Tensor:
        """Return a buffer with room for `end` tokens: `buffer`, or a larger copy with the sizes and dtype of `new`."""
        if buffer is not None and buffer.shape[2] >= end:
            return buffer
        larger = torch.empty(
            (*new.shape[:2], max(end, 2 * self.length), new.shape[3]),
            dtype=new.dtype,
            device=new.device,
        )
        if buffer is not None:
            larger[:, :, : self.length] = buffer[:, :, : self.length]
        return larger


class ContextCache(Cache):
    """Keys and values of a context, projected once, for a layer that attends to the same context in every decoding step.

    The first call with this cache needs the context. It keeps the keys, the values and the context's padding and, with
    route_by "context", the heads that the router chose (among them an expert that was drawn at random). Later calls need
    neither context nor context_padding, and ignore them.
    """

    by_row = (*Cache.by_row, "padding", "routing")

    def __init__(self):
        super().__init__()
        self.padding: Tensor | None = None  # [B, M]
        self.routing: Routing | None = None  # from the context, see HeadMixtureAttention's route_by

    def take(self, x: Tensor, context: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """Check that the cache fits a call with x [B, N, C], and keep the padding if this is the first call.

        Returns:
            The context in the first call, whose keys and values have yet to be projected; None in later calls.
        """
        if self.length == 0:
            if context is None:
                raise ValueError("the first call with a ContextCache needs the context")
            self.padding = padding
            return context
        kept = self.keys.shape[0]
        if kept not in (1, x.shape[0]):
            raise ValueError(
                f"this ContextCache keeps a batch of {kept}, not of {x.shape[0]}: take a new one"
            )
        return None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep k and v [B, kv_heads, M, D]."""
        self.keys = k.contiguous()
        self.values = v.contiguous()
        self.length = k.shape[2]
        return self.keys, self.values
