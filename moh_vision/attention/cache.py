"""Keys and values of earlier tokens, for decoding one token after another."""

from typing import Optional, Tuple

import torch
from torch import Tensor


class KeyValueCache:
    """The keys and values of one layer, in buffers that grow by doubling: a token is copied about twice in all.

    For inference: `update` writes in place. `keys` and `values` are [B, kv_heads, length, D].
    """

    def __init__(self):
        self.length = 0
        self._keys: Optional[Tensor] = None
        self._values: Optional[Tensor] = None

    def update(self, k: Tensor, v: Tensor) -> Tuple[Tensor, Tensor]:
        """Append k and v [B, kv_heads, N, D]; returns all so far, as views."""
        end = self.length + k.shape[2]
        self._keys = self._room(self._keys, k, end)
        self._values = self._room(self._values, v, end)
        self._keys[:, :, self.length : end] = k
        self._values[:, :, self.length : end] = v
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def _room(self, buffer: Optional[Tensor], new: Tensor, end: int) -> Tensor:
        if buffer is not None and buffer.shape[2] >= end:
            return buffer
        larger = torch.empty(
            (*new.shape[:2], max(end, 2 * self.length), new.shape[3]), dtype=new.dtype, device=new.device
        )
        if buffer is not None:
            larger[:, :, : self.length] = buffer[:, :, : self.length]
        return larger
