"""`HeadMixtureAttention`: a router and an executor around one set of projections."""

from typing import Any, Optional, Tuple, Type

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.executors import EXECUTORS
from moh_vision.attention.executors.masked import attend, masked
from moh_vision.attention.masks import rotate, visible
from moh_vision.attention.routers import ROUTERS
from moh_vision.attention.routers.common import masked_mean
from moh_vision.attention.routing import Call, Routing, RoutingStats

SCOPES = ("token", "sample")
CHOOSES = ("packed", "auto")  # executors whose work depends on the routing


class HeadMixtureAttention(nn.Module):
    """Multi-head attention in which a router chooses and weighs the heads.

    Args:
        dim: C, width of the tokens.
        budget: heads, their width, and how many of them are shared and routed.
        router: a name in ROUTERS.
        scope: "token": every token has its own heads; "sample": one choice per sequence, from its mean token or from the
            `condition` that the caller gives.
        executor: a name in EXECUTORS. While the layer is scripted, traced, compiled or exported, "packed" and "auto"
            are "masked": which heads run is known only at run time.
        kv_heads: key-value heads, a divisor of the heads (grouped-query attention); None: one per head.
        qkv_bias, proj_bias: biases of the projections.
        qk_norm: normalise queries and keys of each head with `norm_layer(D)`.
        attn_drop, proj_drop: dropout of the attention matrix and of the output.
        router_kwargs: passed to the router, such as dict(two_stage=False).

    Parameters: qkv.weight [(H + 2 * kv_heads) * D, C], rows grouped q | k | v and by head inside each; proj.weight
    [C, H * D] (both as in timm and DiT); router.*.
    """

    def __init__(
        self,
        dim: int,
        budget: HeadBudget,
        router: str = "moh",
        scope: str = "token",
        executor: str = "auto",
        kv_heads: Optional[int] = None,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Type[nn.Module] = nn.LayerNorm,
        router_kwargs: Optional[dict] = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        for what, value, allowed in (
            ("router", router, ROUTERS),
            ("executor", executor, EXECUTORS),
            ("scope", scope, SCOPES),
        ):
            if value not in allowed:
                raise ValueError(f"{what} {value!r} is not one of {', '.join(sorted(allowed))}")
        kv_heads = budget.heads if kv_heads is None else kv_heads
        if kv_heads < 1 or budget.heads % kv_heads:
            raise ValueError(f"kv_heads={kv_heads} does not divide the {budget.heads} heads")
        dd = {"device": device, "dtype": dtype}
        self.budget = budget
        self.num_heads = budget.heads
        self.head_dim = budget.head_dim
        self.kv_heads = kv_heads
        self.grouped = kv_heads < budget.heads
        self.scope = scope
        self.executor = executor
        self.attn_drop = attn_drop
        self.qk_norm = qk_norm
        self.q_dim = budget.heads * budget.head_dim
        self.needs_query = ROUTERS[router].needs_query

        self.qkv = nn.Linear(dim, self.q_dim + 2 * kv_heads * budget.head_dim, bias=qkv_bias, **dd)
        self.q_norm = norm_layer(budget.head_dim, **dd) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(budget.head_dim, **dd) if qk_norm else nn.Identity()
        self.router = ROUTERS[router](dim, budget, **(router_kwargs or {}), **dd)
        self.proj = nn.Linear(self.q_dim, dim, bias=proj_bias, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self,
        x: Tensor,
        context: Optional[Tensor] = None,
        attn_mask: Optional[Tensor] = None,
        is_causal: bool = False,
        padding_mask: Optional[Tensor] = None,
        rotary: Optional[Tuple[Tensor, Tensor]] = None,
        cache: Any = None,
        condition: Optional[Tensor] = None,
    ) -> Tuple[Tensor, RoutingStats]:
        """Attend.

        Args:
            x: query tokens [B, N, C].
            context: keys and values come from it, [B, M, C]; None: from x.
            attn_mask: [N, M], [H or 1, N, M] or [B or 1, H or 1, N, M], True (attend) or an additive float.
            is_causal: token n attends to 0 .. n, and to what is cached.
            padding_mask: [B, N], or [B, length + N] with a cache, True where x or what is cached is padding: left out
                of the statistics and, in self-attention, of the keys. (Padding of a context goes into attn_mask.)
            rotary: cosines and sines [N, D] or [B, N, D] of the tokens' positions, for queries and keys, in LLaMA's
                layout: the second half of a head's channels repeats the angles of the first.
            cache: keys and values of earlier tokens, such as a KeyValueCache: its `length` says how many,
                `update(k, v)` takes those of x [B, kv_heads, N, D] and returns all. M = length + N then.
            condition: [B, C], what the router reads instead of the mean token; with scope "sample" only.

        Returns:
            y [B, N, C] and the routing statistics.

        Raises:
            ValueError: for rotary or cache with a context, a cache where routing reads more than the token, a
                padding_mask of another length, or a condition where every token has its own heads.
        """
        N = x.shape[1]
        past = 0
        if not torch.jit.is_scripting():
            if cache is not None:
                past = self.cached(cache)
                if context is not None:
                    raise ValueError("a cache is for self-attention, not with a context")
            if padding_mask is not None and type(x) is Tensor and padding_mask.shape[1] != past + N:
                raise ValueError(
                    f"padding_mask has {padding_mask.shape[1]} columns, not {past + N}: {past} cached tokens and {N} new ones"
                )
        if context is not None and rotary is not None:
            raise ValueError("rotary positions are for self-attention, not with a context")
        if condition is not None and self.scope != "sample":
            raise ValueError("a condition decides for whole sequences: it needs scope 'sample'")

        padded = None if padding_mask is None else padding_mask[:, past:]  # [B, N]
        routing, queries = self.route(x, padded, condition)
        keys = past + N if context is None else context.shape[1]
        attn_mask, is_causal = visible(
            attn_mask, is_causal, padding_mask if context is None else None, N, keys, past, x.device
        )
        dropout_p = self.attn_drop if self.training else 0.0
        if torch.jit.is_scripting():
            q, k, v = self.project(x, context, queries, rotary, None)
            y = self.proj(attend(q, k, v, routing.weights, attn_mask, is_causal, dropout_p, self.grouped))
        else:
            execute = EXECUTORS[self.executor]
            if self.executor in CHOOSES and is_captured(x):
                execute = masked
            y = execute(Call(self, x, routing, context, queries, attn_mask, is_causal, dropout_p, rotary, cache))
        return self.proj_drop(y), routing.stats

    def route(
        self, x: Tensor, padded: Optional[Tensor] = None, condition: Optional[Tensor] = None
    ) -> Tuple[Routing, Optional[Tensor]]:
        """The router's answer for tokens x [B, N, C], and the queries [B, H, N, D] if it had to see them.

        padded: [B, N], True at padding; condition: see `forward`.
        """
        queries: Optional[Tensor] = None
        if self.needs_query:
            q_weight, _, q_bias, _ = self.split_qkv()
            queries = F.linear(x, q_weight, q_bias).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        if self.scope == "sample":
            mean_q = None if queries is None else masked_mean(queries, padded)  # [B, H, 1, D]
            read = masked_mean(x, padded) if condition is None else condition.unsqueeze(1)  # [B, 1, C]
            return self.router(read, mean_q), queries
        return self.router(x, queries, padded), queries

    def split_qkv(self) -> Tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:
        """Weight and bias of the queries, and of keys and values together."""
        rows = [self.q_dim, 2 * self.kv_heads * self.head_dim]
        q_weight, kv_weight = self.qkv.weight.split(rows)
        if self.qkv.bias is None:
            return q_weight, kv_weight, None, None
        q_bias, kv_bias = self.qkv.bias.split(rows)
        return q_weight, kv_weight, q_bias, kv_bias

    def project(
        self,
        x: Tensor,
        context: Optional[Tensor],
        queries: Optional[Tensor],
        rotary: Optional[Tuple[Tensor, Tensor]],
        cache: Any,
    ) -> Tuple[Tensor, Tensor, Tensor]:
        """All heads, ready for attention: q [B, H, N, D], k and v [B, kv_heads, M, D]; `queries` if already projected."""
        if queries is None and context is None:
            q, kv = self.qkv(x).split([self.q_dim, 2 * self.kv_heads * self.head_dim], dim=-1)  # one product
            k, v = self.finish_kv(kv, rotary, cache)
        else:
            q_weight, kv_weight, q_bias, kv_bias = self.split_qkv()
            k, v = self.project_kv(x if context is None else context, kv_weight, kv_bias, rotary, cache)
            q = F.linear(x, q_weight, q_bias) if queries is None else queries.transpose(1, 2).flatten(2)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))  # [B, N, H, D]
        return self.prepare_queries(q, rotary).transpose(1, 2), k, v

    def project_kv(
        self,
        tokens: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        rotary: Optional[Tuple[Tensor, Tensor]],
        cache: Any,
    ) -> Tuple[Tensor, Tensor]:
        """tokens [B, N, C] -> k, v [B, kv_heads, M, D], with what was cached before them."""
        return self.finish_kv(F.linear(tokens, weight, bias), rotary, cache)

    def finish_kv(self, kv: Tensor, rotary: Optional[Tuple[Tensor, Tensor]], cache: Any) -> Tuple[Tensor, Tensor]:
        kv = kv.unflatten(-1, (2, self.kv_heads, self.head_dim))  # [B, N, 2, G, D]
        k, v = self.prepare_keys(kv[:, :, 0], rotary).transpose(1, 2), kv[:, :, 1].transpose(1, 2)
        if not torch.jit.is_scripting():
            if cache is not None:
                k, v = cache.update(k, v)
        return k, v

    def prepare_queries(self, q: Tensor, rotary: Optional[Tuple[Tensor, Tensor]]) -> Tensor:
        """Norm and rotation of any heads [B, N, h, D]."""
        q = self.q_norm(q)
        return q if rotary is None else rotate(q, rotary)

    def prepare_keys(self, k: Tensor, rotary: Optional[Tuple[Tensor, Tensor]]) -> Tensor:
        k = self.k_norm(k)
        return k if rotary is None else rotate(k, rotary)

    @torch.jit.unused
    def cached(self, cache: Any) -> int:
        if self.scope == "sample" or not self.router.sees_one_token:
            raise ValueError(
                "a cache keeps keys and values only, and this layer's routing also reads earlier tokens "
                f"(router {type(self.router).__name__}, scope {self.scope!r})"
            )
        return cache.length

    def extra_repr(self) -> str:
        b = self.budget
        return f"{b.active} of {b.heads} heads of width {b.head_dim} active ({b.shared} shared + {b.routed} routed), scope={self.scope}"


def is_captured(x: Tensor) -> bool:
    """Whether the call is being traced, compiled or exported, or computes nothing: then shapes must not decide."""
    # A subclass of Tensor stands for something else: an fx proxy, a fake tensor, a shard.
    special = type(x) not in (Tensor, nn.Parameter)
    return special or x.is_meta or torch.jit.is_tracing() or torch.compiler.is_compiling()
