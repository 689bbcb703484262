"""`HeadMixtureAttention`: a router and an executor around one set of projections."""

from typing import TYPE_CHECKING, Any, List, Optional, Tuple, Type

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F
from torch.types import Device

from moh_vision.attention import kernels
from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.cache import ContextCache, look_up
from moh_vision.attention.executors import EXECUTORS, announce, choose
from moh_vision.attention.executors.masked import attend, attention_matrix, autocast, product_dtype, weighted
from moh_vision.attention.executors.packed import gates_of, has_static_shapes, in_float, pairs_of, products_of_sequences
from moh_vision.attention.linear import plain
from moh_vision.attention.masks import check_length, rotate, visible, without_padding
from moh_vision.attention.routers import ROUTERS
from moh_vision.attention.routers.common import masked_mean
from moh_vision.attention.routing import Call, Pairs, Routing, RoutingStats

torch.fx.wrap("visible")  # leaves while tracing, where masks may be proxies that stand for None
torch.fx.wrap("attend")

SCOPES = ("token", "sample")
ROUTE_BY = ("query", "context")


class HeadMixtureAttention(nn.Module):
    """Multi-head attention in which a router chooses and weighs the heads.

    Args:
        dim: C, width of the tokens.
        budget: heads, their width, and how many of them are shared and routed.
        router: a name in ROUTERS.
        scope: "token": every token has its own heads; "sample": one choice per sequence, from its mean token or from the
            `condition` that the caller gives.
        executor: a name in EXECUTORS. While the layer is scripted, traced, exported or transformed by torch.func, all are
            "masked": which heads run is known only at run time. Under torch.compile "auto" and "packed" skip heads where
            C++ operators or Triton's kernels run.
        kv_heads: key-value heads, a divisor of the heads (grouped-query attention); None: one per head.
        qkv_bias, proj_bias: biases of the projections.
        qk_norm: normalise queries and keys of each head with `norm_layer(D)`.
        attn_drop, proj_drop: dropout of the attention matrix and of the output.
        router_kwargs: passed to the router, such as dict(two_stage=False); dict(group=heads // kv_heads) makes
            "query_norm" choose whole key-value heads.
        route_by: "query": the router reads x; "context": what x attends to, for cross-attention with a router that
            chooses once for a sequence (MAE with pool "sequence", which in a decoder may not pool the queries).
        fused_attn: False, as an argument or set as an attribute later: compute all heads step by step, whatever the
            executor, and call the module `attn_drop` with the softmaxed attention [B, H, N, M], where hooks such as
            those of timm.utils.AttentionExtract read it. TorchScript ignores it.
        rotary_pairs: which channels `rotary` turns: False: those half a head apart (LLaMA), True: neighbours (timm's EVA-02).

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
        route_by: str = "query",
        fused_attn: bool = True,
        rotary_pairs: bool = False,
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ):
        nn.Module.__init__(self)  # not super(): a subclass may have a second base, whose __init__ takes other arguments
        for what, value, allowed in (
            ("router", router, ROUTERS),
            ("executor", executor, EXECUTORS),
            ("scope", scope, SCOPES),
            ("route_by", route_by, ROUTE_BY),
        ):
            if value not in allowed:
                raise ValueError(f"{what} {value!r} is not one of {', '.join(sorted(allowed))}")
        kv_heads = budget.heads if kv_heads is None else kv_heads
        if kv_heads < 1 or budget.heads % kv_heads:
            raise ValueError(f"kv_heads={kv_heads} does not divide the {budget.heads} heads")
        dd = {"device": device, "dtype": dtype}
        self.dim = dim
        self.num_heads = budget.heads
        self.head_dim = budget.head_dim
        self.kv_heads = kv_heads
        self.grouped = kv_heads < budget.heads
        self.scope = scope
        self.by_context = route_by == "context"
        self.executor = executor
        self.fused_attn = fused_attn
        self.rotary_pairs = rotary_pairs
        self.attn_drop = nn.Dropout(attn_drop)
        self.qk_norm = qk_norm
        self.q_dim = budget.heads * budget.head_dim
        self.needs_query = ROUTERS[router].needs_query

        self.add_inputs(dim, qkv_bias, **dd)
        self.q_norm = norm_layer(budget.head_dim, **dd) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(budget.head_dim, **dd) if qk_norm else nn.Identity()
        self.router_kwargs = dict(router_kwargs or {})
        self.router = ROUTERS[router](dim, budget, **self.router_kwargs, **dd)
        if getattr(self.router, "group", 1) not in (1, budget.heads // kv_heads):
            raise ValueError(
                f"router_kwargs: group={self.router.group} is neither 1 nor {budget.heads // kv_heads}, the query heads of one "
                f"key-value head ({budget.heads} heads, kv_heads={kv_heads})"
            )
        if self.by_context and (self.router.reads != "sequence" or scope != "token"):
            raise ValueError(
                f"route_by 'context' needs a router that chooses once for a sequence, which {router!r} "
                f"with scope {scope!r} and {router_kwargs or 'its defaults'} does not: give mae with pool 'sequence'"
            )
        self.add_output(dim, proj_bias, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def __setstate__(self, state: dict) -> None:
        """Also of a layer of an older version, with its budget beside the router's, a number as attn_drop, no rotary_pairs."""
        budget, dropout_p = state.pop("budget", None), state.pop("attn_drop", None)
        super().__setstate__(state)
        if dropout_p is not None:
            self.attn_drop, self.fused_attn = nn.Dropout(dropout_p).train(self.training), True
        self.router.budget = budget or self.router.budget
        vars(self).setdefault("rotary_pairs", False)

    @torch.jit.unused
    @property
    def budget(self) -> HeadBudget:
        """The router's, which `set_budgets` changes."""
        return self.router.budget

    def add_inputs(self, dim: int, bias: bool, **dd: Any) -> None:
        """Make the modules that project tokens to queries, keys and values."""
        self.qkv = nn.Linear(dim, self.q_dim + 2 * self.kv_heads * self.head_dim, bias=bias, **dd)

    def add_output(self, dim: int, bias: bool, **dd: Any) -> None:
        self.proj = nn.Linear(self.q_dim, dim, bias=bias, **dd)

    @torch.jit.unused
    @property
    def projections(self) -> Tuple[nn.Module, ...]:
        """The modules whose weights `packed` reads."""
        return self.qkv, self.proj

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
        context_padding: Optional[Tensor] = None,
    ) -> Tuple[Tensor, RoutingStats]:
        """Attend.

        Args:
            x: query tokens [B, N, C].
            context: keys and values come from it, [B, M, C]; None: from x.
            attn_mask: [N, M], [H or 1, N, M] or [B or 1, H or 1, N, M], True (attend) or an additive float.
            is_causal: token n attends to 0 .. n, and to what is cached.
            padding_mask: [B, N], or [B, length + N] with a KeyValueCache, True where x or what is cached is padding:
                left out of the statistics and, in self-attention, of the keys.
            rotary: cosines and sines [N, D] or [B or 1, N, D] of the tokens' positions, for queries and keys. Channels that
                are turned together (see `rotary_pairs`) have the same angle.
            cache: in self-attention a KeyValueCache (or what looks like one) of the tokens before x; M = length + N
                then. In cross-attention a ContextCache, after whose first call context may be left out.
            condition: [B, C], what the router reads instead of the mean token; with scope "sample" only.
            context_padding: [B, M], True where the context is padding: left out of the keys, and of what a router reads
                by route_by "context".

        Returns:
            y [B, N, C] and the routing statistics.

        Raises:
            ValueError: for rotary or a KeyValueCache with a context, context_padding or route_by "context" without one,
                a cache where routing reads the whole sequence, padding of another length, or a condition where every
                token has its own heads.
        """
        N = x.shape[1]
        past, keys, crosses = 0, N, False
        if context is not None:
            keys, crosses = context.shape[1], True
        if not torch.jit.is_scripting():
            if cache is not None:
                context, context_padding, past, keys, crosses = look_up(cache, context, context_padding, N)
            check_length("padding_mask", padding_mask, past, N, x)
            check_length("context_padding", context_padding if crosses else None, 0, keys, x)
        if crosses and rotary is not None:
            raise ValueError("rotary positions are for self-attention, not with a context")
        if not crosses and (self.by_context or context_padding is not None):
            raise ValueError("route_by 'context' and context_padding are for cross-attention: give a context")
        if condition is not None and self.scope != "sample":
            raise ValueError("a condition decides for whole sequences: it needs scope 'sample'")

        padded = None if padding_mask is None else padding_mask[:, past:]  # [B, N]
        routing, queries = self.route(x, padded, condition, context, context_padding, cache)
        if context_padding is not None:
            attn_mask = without_padding(attn_mask, context_padding)
        attn_mask, is_causal = visible(attn_mask, is_causal, None if crosses else padding_mask, N, keys, past, x.device)
        dropout_p = self.attn_drop.p if self.training else 0.0
        if torch.jit.is_scripting():
            q, k, v = self.project(x, context, queries, rotary, None)
            y = self.project_out(attend(q, k, v, routing.weights, attn_mask, is_causal, dropout_p, self.grouped))
        else:
            y = self.execute(Call(x, routing, context, queries, attn_mask, is_causal, dropout_p, rotary, cache))
        return self.proj_drop(y), routing.stats

    if TYPE_CHECKING:
        __call__ = forward  # nn.Module's own says nothing of types

    @torch.jit.unused
    def execute(self, call: Call, name: Optional[str] = None) -> Tensor:
        """The output [B, N, C] of a call, by the executor of this name; None: `self.executor`, or unfused."""
        if name is None and not self.fused_attn:
            return self.unfused(call)
        name = self.executor if name is None else name
        traced = is_traced(call.x)
        if name == "auto" and not traced:
            name, reason = choose(self, call)
            announce(name, reason)
        if name == "packed" and not traced and self.skips_projections(call):
            return self.packed(call)
        q, k, v = self.project(call.x, call.context, call.q, call.rotary, call.cache)
        masks = call.attn_mask, call.is_causal, call.dropout_p
        if traced:  # its shapes may be symbols, which tell nothing
            o = attend(q, k, v, call.routing.weights, *masks, self.grouped)
        else:
            o = EXECUTORS[name](q, k, v, call.routing, *masks)
        return self.project_out(o)

    @torch.jit.unused
    def unfused(self, call: Call) -> Tensor:
        """The output [B, N, C] of a call as timm's layers compute it where `fused_attn` is False."""
        q, k, v = self.project(call.x, call.context, call.q, call.rotary, call.cache)
        if self.grouped:
            k, v = (t.repeat_interleave(self.num_heads // self.kv_heads, 1) for t in (k, v))
        attn = self.attn_drop(attention_matrix(q, k, call.attn_mask, call.is_causal))  # [B, H, N, M]
        return self.project_out(weighted(attn @ v, call.routing.weights))

    @torch.jit.unused
    def skips_projections(self, call: Call) -> bool:
        """Whether `packed` may read the weights of the projections, and knows its shapes while torch.compile traces."""
        empty = call.x.numel() == 0 or (call.context is not None and call.context.numel() == 0)
        if call.routing.active is None or empty or not all(map(plain, self.projections)):
            return False
        path = self.path_of(call)
        if path == "triton":  # narrow products pay for whole sequences alone, with the same number of heads in each
            per_head = call.attn_mask is not None and call.attn_mask.shape[1] > 1
            apart = call.routing.active.shape[1] == 1 and self.kv_heads == self.num_heads
            return apart and call.routing.pairs is not None and call.cache is None and not per_head
        return has_static_shapes(call.routing, path) or not torch.compiler.is_compiling()

    @torch.jit.unused
    def path_of(self, call: Call) -> str:
        return kernels.attend_path(call.x.device, product_dtype(call.x), self.head_dim, call.attn_mask, call.dropout_p)

    @torch.jit.unused
    def packed(self, call: Call, *positions: Any) -> Tensor:
        """The output [B, N, C] of the heads that run, and nothing computed for others. It cannot be differentiated twice.

        Heads chosen per token skip their queries, their attention and their part of the output projection; the keys and
        values of a head are needed by other tokens. Heads chosen per sequence skip their keys and values too.

        positions: handed to `attend_pairs`.
        """
        call = call._replace(x=autocast(call.x))  # once for all products
        x, routing, path = call.x, call.routing, self.path_of(call)
        if path == "triton":
            return self.packed_sequences(call)
        (B, N, C), H = x.shape, self.num_heads
        pairs, whole = pairs_of(routing, N, path), products_of_sequences(call, x, path)
        queries, *keys_values = (in_dtype(w, b, x.dtype) for w, b in self.row_blocks())
        if call.q is None:
            q = kernels.project(x.flatten(0, 1), *queries, pairs, H, whole)  # [P, D]
        else:
            q = kernels.select(call.q.transpose(1, 2), pairs, H)
        o = self.attend_pairs(call, q, pairs, whole, keys_values, *positions)  # [P, D]
        weight, bias = in_dtype(self.proj.weight, self.proj.bias, x.dtype)
        y = kernels.combine(o.to(x.dtype), gates_of(routing, B, N), weight, bias, pairs, H, whole)
        return y.view(B, N, C)

    @torch.jit.unused
    def packed_sequences(self, call: Call) -> Tensor:
        """`packed` on a GPU, where every sequence runs the same number of heads: all tensors are dense."""
        x, routing, H, D = call.x, call.routing, self.num_heads, self.head_dim
        K = routing.pairs.token.shape[0] // x.shape[0]
        heads = (
            routing.active.squeeze(1).int().sort(dim=-1, descending=True, stable=True).indices[:, :K].int()
        )  # rising
        q, *kv = (in_dtype(w, b, x.dtype) for w, b in self.row_blocks())
        context = x if call.context is None else autocast(call.context).expand(x.shape[0], -1, -1)
        if len(kv) == 1:  # both in one block: the value of head h is its head H + h
            k, v = kernels.project_heads(context, *kv[0], torch.cat([heads, heads + H], 1), D).chunk(2, 2)
        else:
            k, v = (kernels.project_heads(context, *rows, heads, D) for rows in kv)
        q = kernels.project_heads(x, *q, heads, D)  # [B, N, K, D]
        q, k = self.prepare_queries(q, call.rotary).to(v.dtype), self.prepare_keys(k, call.rotary).to(v.dtype)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, call.attn_mask, call.dropout_p, call.is_causal)
        gates = in_float(routing.weights).squeeze(1).gather(1, heads.long())
        weight, bias = in_dtype(self.proj.weight, self.proj.bias, x.dtype)
        return kernels.combine_heads(o.transpose(1, 2), gates, weight, bias, heads)

    @torch.jit.unused
    def attend_pairs(
        self, call: Call, q: Tensor, pairs: Pairs, whole: bool, keys_values: List[Tuple[Tensor, Optional[Tensor]]]
    ) -> Tensor:
        """Attention of the pairs that run.

        Args:
            call: with x in the dtype of products.
            q: the pairs' queries [P, D], before norm and rotation.
            whole: all pairs of a sequence and head run, or none, and only these need keys and values.
            keys_values: weight and bias of keys and values together, or of each.

        Returns:
            [P, D], not weighted.
        """
        x, H = call.x, self.num_heads
        B, N, _ = x.shape
        q = self.prepare_queries(q.unsqueeze(1), of_pairs(call.rotary, pairs, x)).squeeze(1)
        context = x if call.context is None else autocast(call.context).expand(B, -1, -1)
        source = None
        if whole and call.cache is None and self.kv_heads == H:
            M = context.shape[1]
            key_pairs = pairs if M == N else pairs_of(call.routing, M, self.path_of(call))
            if len(keys_values) == 1:  # both in one block
                ((w, b),) = keys_values
                keys_values = list(zip(w.chunk(2), (None, None) if b is None else b.chunk(2)))
            k, v = (kernels.project(context.flatten(0, 1), *rows, key_pairs, H, True) for rows in keys_values)
            k = self.prepare_keys(k.unsqueeze(1), of_pairs(call.rotary, key_pairs, context)).squeeze(1)
            k, v = (t.view(1, -1, M, self.head_dim) for t in (k, v))
            source = (pairs.offsets.diff() > 0).cumsum(0, dtype=torch.int32) - 1
        else:
            k, v = self.project_kv(context, call.rotary, call.cache, keys_values)
        # A norm leaves queries and keys in float32 under autocast.
        q, k = q.to(v.dtype), k.to(v.dtype)
        return kernels.attend(q, k, v, pairs, H, N, source, call.is_causal, call.attn_mask, call.dropout_p)

    def route(
        self,
        x: Tensor,
        padded: Optional[Tensor] = None,
        condition: Optional[Tensor] = None,
        context: Optional[Tensor] = None,
        context_padding: Optional[Tensor] = None,
        cache: Any = None,
    ) -> Tuple[Routing, Optional[Tensor]]:
        """The router's answer for tokens x [B, N, C], and the queries [B, H, N, D] if it had to see them.

        padded: [B, N], True at padding; the rest: see `forward`.
        """
        if not torch.jit.is_scripting():
            if cache is not None and (self.by_context or self.scope == "sample" or self.router.reads != "token"):
                return self.route_with(cache, x, padded, context, context_padding), None
        queries: Optional[Tensor] = None
        if self.by_context:
            assert context is not None
            return self.router(context, None, context_padding), queries
        if self.needs_query:
            queries = self.project_queries(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        if self.scope == "sample":
            mean_q = None if queries is None else masked_mean(queries, padded)  # [B, H, 1, D]
            read = masked_mean(x, padded) if condition is None else condition.unsqueeze(1)  # [B, 1, C]
            return self.router(read, mean_q), queries
        return self.router(x, queries, padded), queries

    @torch.jit.unused
    def route_with(
        self, cache: Any, x: Tensor, padded: Optional[Tensor], context: Optional[Tensor], padding: Optional[Tensor]
    ) -> Routing:
        """The answer of a router that reads more than the token, from what the cache keeps of earlier calls."""
        if self.by_context:
            if cache.length == 0:
                cache.routing = self.router(context, None, padding)
            return cache.routing
        if self.scope == "sample" or self.router.reads == "sequence":
            raise ValueError(
                "tokens that come one by one (a cache) cannot be routed by all of them together "
                f"(router {type(self.router).__name__}, scope {self.scope!r})"
            )
        routing, cache.router_state = self.router.resume(x, padded, cache.router_state)
        return routing

    def row_blocks(self) -> List[Tuple[Tensor, Optional[Tensor]]]:
        """The weights and biases of queries, and of keys and values, in the blocks that they lie in.

        All from one `split`, whose backward is one pass over the weight.
        """
        rows = [self.q_dim, 2 * self.kv_heads * self.head_dim]
        bias = self.qkv.bias
        biases = (None, None) if bias is None else bias.split(rows)
        return list(zip(self.qkv.weight.split(rows), biases))

    def project_rows(self, x: Tensor, first: int, last: int) -> Tensor:
        """x [.., C] -> outputs first .. last - 1 of `qkv` [.., last - first].

        Only these rows of the weight are multiplied, unless `qkv` must be called (see `plain`).
        """
        if not torch.jit.is_scripting():
            if not plain(self.qkv):
                return self.qkv(x)[..., first:last]
        bias = self.qkv.bias
        return F.linear(x, self.qkv.weight[first:last], None if bias is None else bias[first:last])

    def project_queries(self, x: Tensor) -> Tensor:
        """x [B, N, C] -> [B, N, H*D], before norm and rotation."""
        return self.project_rows(x, 0, self.q_dim)

    def project_out(self, o: Tensor) -> Tensor:
        """o [B, N, H*D] -> [B, N, C]."""
        return self.proj(o)

    def project(
        self,
        x: Tensor,
        context: Optional[Tensor],
        queries: Optional[Tensor],
        rotary: Optional[Tuple[Tensor, Tensor]],
        cache: Any,
    ) -> Tuple[Tensor, Tensor, Tensor]:
        """All heads, ready for attention: q [B, H, N, D], k and v [B, kv_heads, M, D]; `queries` if already projected."""
        crosses = context is not None
        if not torch.jit.is_scripting():
            crosses = crosses or isinstance(cache, ContextCache)
        if queries is None and not crosses:
            q, kv = self.qkv(x).split([self.q_dim, 2 * self.kv_heads * self.head_dim], dim=-1)  # one product
            k, v = self.finish_kv(kv, rotary, cache)
        else:
            k, v = self.project_kv(x if context is None else context, rotary, cache)
            q = self.project_queries(x) if queries is None else queries.transpose(1, 2).flatten(2)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))  # [B, N, H, D]
        return self.prepare_queries(q, rotary).transpose(1, 2), k, v

    def project_kv(
        self,
        tokens: Tensor,
        rotary: Optional[Tuple[Tensor, Tensor]],
        cache: Any,
        weights: Optional[List[Tuple[Tensor, Optional[Tensor]]]] = None,
    ) -> Tuple[Tensor, Tensor]:
        """tokens [B, N, C] -> k, v [B, kv_heads, M, D], with what was cached before them, or what was of a context.

        weights: of `row_blocks`, without the queries'.
        """
        if not torch.jit.is_scripting():
            if isinstance(cache, ContextCache) and cache.length > 0:
                return cache.keys, cache.values
        if weights is None:
            kv = self.project_rows(tokens, self.q_dim, self.q_dim + 2 * self.kv_heads * self.head_dim)
        else:
            kv = F.linear(tokens, weights[0][0], weights[0][1])
        return self.finish_kv(kv, rotary, cache)

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
        return q if rotary is None else rotate(q, rotary, self.rotary_pairs)

    def prepare_keys(self, k: Tensor, rotary: Optional[Tuple[Tensor, Tensor]]) -> Tensor:
        k = self.k_norm(k)
        return k if rotary is None else rotate(k, rotary, self.rotary_pairs)

    def extra_repr(self) -> str:
        b = self.budget
        heads = f"{b.active} of {b.heads} heads of width {b.head_dim} active ({b.shared} shared + {b.routed} routed)"
        return f"{heads}, scope={self.scope}" + (", route_by=context" if self.by_context else "")


def in_dtype(weight: Tensor, bias: Optional[Tensor], dtype: torch.dtype) -> Tuple[Tensor, Optional[Tensor]]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def of_pairs(rotary: Optional[Tuple[Tensor, Tensor]], pairs: Pairs, x: Tensor) -> Optional[Tuple[Tensor, Tensor]]:
    """Cosines and sines of the pairs' tokens, [P, D] each, of those of x [B, N, C]."""
    if rotary is None:
        return None
    B, N, _ = x.shape
    cos, sin = (t.expand(B, N, t.shape[-1]).flatten(0, 1).index_select(0, pairs.token) for t in rotary)
    return cos, sin


def is_captured(x: Tensor) -> bool:
    """Whether the call is traced, compiled, exported, transformed by torch.func, or computes nothing.

    Then values must not decide which heads run.
    """
    return torch.compiler.is_compiling() or is_traced(x)


def is_traced(x: Tensor) -> bool:
    """As `is_captured`, but for torch.compile, under which the operators stay what they are."""
    # A subclass of Tensor stands for something else: an fx proxy, a fake tensor, a shard.
    special = type(x) not in (Tensor, nn.Parameter)
    traced = special or x.is_meta or torch.jit.is_tracing() or torch.compiler.is_exporting()
    return traced or torch._C._are_functorch_transforms_active()
