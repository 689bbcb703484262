"""What a layer keeps between calls, for decoding one token after another."""

from typing import Any

import torch
from torch import Tensor

from moh_vision.attention.routing import Routing, RoutingStats


class KeyValueCache:
    """The keys and values of one layer, in buffers that grow by doubling: a token is copied about twice in all.

    For inference: `update` writes in place. `length` tokens are kept. `router_state` is what a router that reads
    earlier tokens needs of them (MAE with a causal pool): tensors [B, ..], which the layer sets; None for others.
    """

    def __init__(self):
        self.length = 0
        self.router_state: tuple[Tensor, ...] | None = None
        self._keys: Tensor | None = None  # [B, kv_heads, room for length tokens, D]
        self._values: Tensor | None = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [B, kv_heads, N, D]; returns all so far, as views.

        Raises:
            ValueError: for another batch size or dtype than that of the tokens kept. An empty cache takes anything.
        """
        kept = self._keys
        if kept is not None and (kept.shape[0], kept.dtype) != (k.shape[0], k.dtype):
            raise ValueError(
                f"this KeyValueCache keeps a batch of {kept.shape[0]} in {kept.dtype}, not of {k.shape[0]} in {k.dtype}: "
                "crop it to 0 tokens, or take a new one"
            )
        end = self.length + k.shape[2]
        self._keys = self._room(self._keys, k, end)
        self._values = self._room(self._values, v, end)
        self._keys[:, :, self.length : end] = k
        self._values[:, :, self.length : end] = v
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def reorder(self, indices: Tensor) -> None:
        """Keep rows `indices` [B'] of the batch, in that order; a row may come several times or not at all."""
        if self._keys is not None:
            self._keys, self._values = self._keys.index_select(0, indices), self._values.index_select(0, indices)
        if self.router_state is not None:
            self.router_state = tuple(t.index_select(0, indices) for t in self.router_state)

    def repeat(self, times: int) -> None:
        """Repeat every row of the batch `times` times, copies side by side: beams of one sequence."""
        if self._keys is not None:
            self.reorder(copies(self._keys, times))

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens.

        Raises:
            ValueError: for more tokens than there are; and where a router keeps a state, which cannot go back (a sum or
                a window has no memory of what it was), unless nothing or everything is forgotten.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"crop to {length} tokens is out of range: 0 to {self.length} are kept")
        if self.router_state is not None and 0 < length < self.length:
            raise ValueError(
                f"crop to {length} of {self.length} tokens: the running state of this layer's router cannot go back"
            )
        self.length = length
        if length == 0:
            self.router_state = self._keys = self._values = None

    def _room(self, buffer: Tensor | None, new: Tensor, end: int) -> Tensor:
        if buffer is not None and buffer.shape[2] >= end:
            return buffer
        larger = torch.empty(
            (*new.shape[:2], max(end, 2 * self.length), new.shape[3]), dtype=new.dtype, device=new.device
        )
        if buffer is not None:
            larger[:, :, : self.length] = buffer[:, :, : self.length]
        return larger


class ContextCache:
    """The keys and values of a context, projected once, for a layer that attends to it step after step.

    The first call with this cache needs the context; it keeps keys, values and the context's padding, and in evaluation
    the heads chosen from the context, an expert drawn at random with them. Later calls need neither context nor
    context_padding, and ignore them. `length` is M of the context, 0 before the first call.
    """

    def __init__(self):
        self.length = 0
        self.keys: Tensor | None = None  # [B, kv_heads, M, D]
        self.values: Tensor | None = None
        self.padding: Tensor | None = None  # [B, M]
        self.routing: Routing | None = None  # from the context, see HeadMixtureAttention's route_by
        self.router_state: tuple[Tensor, ...] | None = None  # as in KeyValueCache, of the query tokens

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep k and v [B, kv_heads, M, D]."""
        self.keys, self.values, self.length = k.contiguous(), v.contiguous(), k.shape[2]
        return self.keys, self.values

    def reorder(self, indices: Tensor) -> None:
        """Keep rows `indices` [B'] of the batch, in that order; a row may come several times or not at all."""
        if self.keys is not None:
            self.keys, self.values = self.keys.index_select(0, indices), self.values.index_select(0, indices)
        if self.padding is not None:
            self.padding = self.padding.index_select(0, indices)
        if self.router_state is not None:
            self.router_state = tuple(t.index_select(0, indices) for t in self.router_state)
        if self.routing is not None:
            weights, active, stats, count, _ = self.routing
            weights, active = (None if t is None else t.index_select(0, indices) for t in (weights, active))
            self.routing = Routing(weights, active, RoutingStats(*(t.index_select(0, indices) for t in stats)), count)

    def repeat(self, times: int) -> None:
        """Repeat every row of the batch `times` times, copies side by side: beams of one sequence."""
        if self.keys is not None:
            self.reorder(copies(self.keys, times))


def look_up(
    cache: Any, x: Tensor, context: Tensor | None, padding: Tensor | None
) -> tuple[Tensor | None, Tensor | None, int, int, bool]:
    """Find what a call attends to; arguments are those of `HeadMixtureAttention.forward`.

    Returns:
        context, None if it need not be projected; its padding; how many tokens are cached; how many keys there will be;
        whether it is cross-attention.

    Raises:
        ValueError: for a cache of the other kind of attention or of another batch, or a context missing.
    """
    if cache is None:
        return context, padding, 0, (x if context is None else context).shape[1], context is not None
    if not isinstance(cache, ContextCache):
        if context is not None:
            raise ValueError("a KeyValueCache is for self-attention, not with a context: give a ContextCache")
        return None, padding, cache.length, cache.length + x.shape[1], False
    if cache.length > 0:
        kept = cache.keys.shape[0]
        if kept not in (1, x.shape[0]):
            raise ValueError(f"this ContextCache keeps a batch of {kept}, not of {x.shape[0]}: take a new one")
        return None, cache.padding, 0, cache.length, True
    if context is None:
        raise ValueError("the first call with a ContextCache needs the context")
    cache.padding = padding
    return context, padding, 0, context.shape[1], True


def copies(rows: Tensor, times: int) -> Tensor:
    """0, 0, .., 1, 1, .. for rows [B, ..]."""
    return torch.arange(rows.shape[0], device=rows.device).repeat_interleave(times)
