"""`SeparateHeadMixtureAttention`: queries, keys and values have modules of their own."""

from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor, nn

from moh_vision.attention.cache import ContextCache
from moh_vision.attention.layer import HeadMixtureAttention


class SeparateHeadMixtureAttention(HeadMixtureAttention):
    """`HeadMixtureAttention` with LLaMA's names, so that weights stay where they are and adapters find them.

    Parameters: q_proj.weight [H * D, C], k_proj.weight and v_proj.weight [kv_heads * D, C], o_proj.weight [C, H * D];
    router.*. The projections are called as modules wherever all heads are projected; only `packed` reads their weights.
    """

    def add_inputs(self, dim: int, bias: bool, **dd: Any) -> None:
        self.q_proj = nn.Linear(dim, self.q_dim, bias=bias, **dd)
        self.k_proj = nn.Linear(dim, self.kv_heads * self.head_dim, bias=bias, **dd)
        self.v_proj = nn.Linear(dim, self.kv_heads * self.head_dim, bias=bias, **dd)

    def add_output(self, dim: int, bias: bool, **dd: Any) -> None:
        self.o_proj = nn.Linear(self.q_dim, dim, bias=bias, **dd)

    @torch.jit.unused
    @property
    def projections(self) -> Tuple[nn.Module, ...]:
        return self.q_proj, self.k_proj, self.v_proj, self.o_proj

    @torch.jit.unused
    @property
    def proj(self) -> nn.Module:
        """The output projection, as executors call it."""
        return self.o_proj

    def row_blocks(self) -> List[Tuple[Tensor, Optional[Tensor]]]:
        return [(linear.weight, linear.bias) for linear in (self.q_proj, self.k_proj, self.v_proj)]

    def project_queries(self, x: Tensor) -> Tensor:
        return self.q_proj(x)

    def project_out(self, o: Tensor) -> Tensor:
        return self.o_proj(o)

    def project(
        self,
        x: Tensor,
        context: Optional[Tensor],
        queries: Optional[Tensor],
        rotary: Optional[Tuple[Tensor, Tensor]],
        cache: Any,
    ) -> Tuple[Tensor, Tensor, Tensor]:
        """All heads, ready for attention: q [B, H, N, D], k and v [B, kv_heads, M, D]; `queries` if already projected."""
        k, v = self.project_kv(x if context is None else context, rotary, cache)
        q = self.q_proj(x) if queries is None else queries.transpose(1, 2).flatten(2)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))  # [B, N, H, D]
        return self.prepare_queries(q, rotary).transpose(1, 2), k, v

    def project_kv(
        self,
        tokens: Tensor,
        rotary: Optional[Tuple[Tensor, Tensor]],
        cache: Any,
        weights: Optional[List[Tuple[Tensor, Optional[Tensor]]]] = None,
    ) -> Tuple[Tensor, Tensor]:
        """tokens [B, N, C] -> k, v [B, kv_heads, M, D], with what was cached before them."""
        if not torch.jit.is_scripting():
            if isinstance(cache, ContextCache) and cache.length > 0:
                return cache.keys, cache.values
        k = self.k_proj(tokens).unflatten(-1, (self.kv_heads, self.head_dim))  # [B, N, G, D]
        v = self.v_proj(tokens).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        k = self.prepare_keys(k, rotary).transpose(1, 2)
        if not torch.jit.is_scripting():
            if cache is not None:
                k, v = cache.update(k, v)
        return k, v
