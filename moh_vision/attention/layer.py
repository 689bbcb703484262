"""`HeadMixtureAttention`: a router and an executor around one set of projections."""

from typing import Optional, Tuple, Type

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.executors import EXECUTORS, NEEDS_ALL_QUERIES, masked
from moh_vision.attention.executors.masked import Projections
from moh_vision.attention.routers import ROUTERS
from moh_vision.attention.routers.common import masked_mean
from moh_vision.attention.routing import RoutingStats

SCOPES = ("token", "sample")


class HeadMixtureAttention(nn.Module):
    """Multi-head attention in which a router chooses and weighs the heads.

    Args:
        dim: C, width of the tokens.
        budget: heads, their width, and how many of them are shared and routed.
        router: a name in ROUTERS.
        scope: "token": every token has its own heads; "sample": one choice per sequence, from its mean token.
        executor: a name in EXECUTORS.
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
        self.scope = scope
        self.executor = executor
        self.attn_drop = attn_drop
        self.q_dim = budget.heads * budget.head_dim
        self.fuse_queries = executor in NEEDS_ALL_QUERIES or qk_norm or ROUTERS[router].needs_query

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
    ) -> Tuple[Tensor, RoutingStats]:
        """Attend.

        Args:
            x: query tokens [B, N, C].
            context: keys and values come from it, [B, M, C]; None: from x.
            attn_mask: [.., N, M], True (attend) or an additive float.
            is_causal: token n attends to 0 .. n.
            padding_mask: [B, N], True where x is padding: left out of the statistics and, in self-attention, of the keys.
                (Padding of a context goes into attn_mask.)

        Returns:
            y [B, N, C] and the routing statistics.
        """
        q: Optional[Tensor] = None
        qkv_bias = self.qkv.bias
        q_bias = None if qkv_bias is None else qkv_bias[: self.q_dim]
        kv_bias = None if qkv_bias is None else qkv_bias[self.q_dim :]
        projections = Projections(self.qkv.weight[: self.q_dim], q_bias, self.proj.weight, self.proj.bias)
        if self.fuse_queries and context is None:
            q, kv = self.qkv(x).split([self.q_dim, 2 * self.kv_heads * self.head_dim], dim=-1)
        else:
            kv = F.linear(x if context is None else context, self.qkv.weight[self.q_dim :], kv_bias)
            if self.fuse_queries:
                q = F.linear(x, projections.q_weight, q_bias)
        kv = kv.unflatten(-1, (2, self.kv_heads, self.head_dim)).permute(2, 0, 3, 1, 4)  # [2, B, G, M, D]
        k, v = self.k_norm(kv[0]), kv[1]
        if q is not None:
            q = q.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # [B, H, N, D]

        if self.scope == "sample":
            mean_q = None if q is None else masked_mean(q, padding_mask)  # [B, H, 1, D]
            routing = self.router(masked_mean(x, padding_mask), mean_q)
        else:
            routing = self.router(x, q, padding_mask)
        if q is not None:
            q = self.q_norm(q)
        if padding_mask is not None and context is None:
            attn_mask, is_causal = with_padding(attn_mask, is_causal, padding_mask), False
        dropout_p = self.attn_drop if self.training else 0.0
        if torch.jit.is_scripting():
            y = masked(x, k, v, routing, projections, q, attn_mask, is_causal, dropout_p)
        else:
            y = EXECUTORS[self.executor](x, k, v, routing, projections, q, attn_mask, is_causal, dropout_p)
        return self.proj_drop(y), routing.stats

    def extra_repr(self) -> str:
        b = self.budget
        return f"{b.active} of {b.heads} heads of width {b.head_dim} active ({b.shared} shared + {b.routed} routed), scope={self.scope}"


def with_padding(attn_mask: Optional[Tensor], is_causal: bool, padding_mask: Tensor) -> Tensor:
    """One mask [B, 1, N, N] for self-attention that hides padded keys; a token always sees itself, so no row is empty."""
    N = padding_mask.shape[1]
    itself = torch.eye(N, dtype=torch.bool, device=padding_mask.device)
    visible = ~padding_mask[:, None, None, :] | itself  # [B, 1, N, N]
    if is_causal:
        visible = visible & torch.ones(N, N, dtype=torch.bool, device=padding_mask.device).tril()
    if attn_mask is None:
        return visible
    if attn_mask.dtype == torch.bool:
        return (attn_mask & visible) | itself
    return attn_mask.masked_fill(~visible, float("-inf"))


def head_budget(model: nn.Module) -> dict:
    """The heads of every `HeadMixtureAttention` in a model, in order.

    Returns:
        dict(layers=[dict(name, heads, head_dim, shared, routed, active), ...], active, heads, share): the last three
        are head-weighted totals, the figure that the papers quote.

    Raises:
        ValueError: if the model has no such layer.
    """
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, HeadMixtureAttention):
            b = module.budget
            layers.append(
                dict(name=name, heads=b.heads, head_dim=b.head_dim, shared=b.shared, routed=b.routed, active=b.active)
            )
    if not layers:
        raise ValueError(f"{type(model).__name__} has no HeadMixtureAttention layer")
    active, heads = sum(layer["active"] for layer in layers), sum(layer["heads"] for layer in layers)
    return dict(layers=layers, active=active, heads=heads, share=active / heads)
