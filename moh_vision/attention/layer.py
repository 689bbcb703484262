"""`HeadMixtureAttention`: a router and an executor around one set of projections.

Layout: projected queries, keys and values are [B, tokens, heads, D] until they are normalised and rotated. Attention itself
and routers read [B, heads, tokens, D].
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.fx
from torch import Tensor, nn
from torch.types import Device

from moh_vision.attention import kernels
from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.cache import ContextCache
from moh_vision.attention.executors import (
    EXECUTORS,
    InPlace,
    Masked,
    Reference,
    Sequences,
    Tokens,
    Unfused,
    WholeSequences,
)
from moh_vision.attention.kernels.route import (
    PROJECT_AND_ROUTE,
    ROUTE_SEQUENCES_AND_ATTEND,
    ProductAttention,
    project_and_route,
)
from moh_vision.attention.linear import (
    does_nothing,
    linear_rows,
    present_mode,
    unhooked,
    weight_of,
)
from moh_vision.attention.masks import check_length, rotate, visible
from moh_vision.attention.routed_layer import RoutedLayer
from moh_vision.attention.routers import router_class
from moh_vision.attention.routers.common import masked_mean, read_of_sequences, route_sequences
from moh_vision.attention.routing import Call, Routing, RoutingStats

torch.fx.wrap("visible")  # a leaf while fx traces: masks may then be proxies that stand for None

SCOPES = ("token", "sample")
ROUTE_BY = ("query", "context")


class Attended(NamedTuple):
    """The tokens that x attends to in one call."""

    crosses: bool  # True: tokens of a context; False: x itself, and the cached tokens before x
    context: Tensor | None  # [B, M, C] if it has yet to be projected to keys and values, else None
    padding: Tensor | None  # [B, M], True at padding of the context
    past: int  # number of cached tokens before x; 0 with a context
    keys: int  # M, number of keys, cached ones included


class HeadMixtureAttention(RoutedLayer):
    """Multi-head attention in which a router chooses and weighs the heads.

    Args:
        dim: C, width of the tokens.
        budget: heads, their width, and how many of them are shared and routed.
        router: a name in ROUTERS.
        scope: "token": every token has its own heads; "sample": one choice per sequence, from its mean token or from the
            `condition` that the caller gives.
        executor: a name in EXECUTORS. While the layer is traced, exported or transformed by torch.func, "auto" and "packed"
            mean "masked", because which heads run is known only at run time.
        kv_heads: key-value heads, a divisor of the heads (grouped-query attention); None: one per head.
        qkv_bias, proj_bias: biases of the projections.
        qk_norm: normalise queries and keys of each head with `norm_layer(D)`.
        attn_drop, proj_drop: dropout of the attention matrix and of the output.
        router_kwargs: passed to the router, such as dict(two_stage=False); dict(group=heads // kv_heads) makes
            "query_norm" choose whole key-value heads.
        route_by: "query": the router reads x; "context": the router reads the context. The latter is for cross-attention
            with a router that chooses once for a sequence: MAE with pool "sequence", which in a decoder must not pool x,
            because the mean of x would contain later tokens.
        fused_attn: False: compute all heads step by step, whatever the executor, and pass the softmaxed attention
            [B, H, N, M] through the module `attn_drop`, where hooks such as those of timm.utils.AttentionExtract read
            it. The attribute may be set later.
        rotary_pairs: which channels `rotary` turns together. False: channels half a head apart (LLaMA); True:
            neighbouring channels (timm's EVA-02).

    Parameters: qkv.weight [(H + 2 * kv_heads) * D, C], rows grouped q | k | v and by head inside each; proj.weight
    [C, H * D] (both as in timm and DiT); router.*.
    """

    skipping_executors = (WholeSequences, Sequences, InPlace, Tokens)
    all_heads_executor = Masked
    unfused_executor = Unfused
    reference_executor = Reference

    def __init__(  # noqa: PLR0913
        self,
        dim: int,
        budget: HeadBudget,
        router: str = "moh",
        scope: str = "token",
        executor: str = "auto",
        kv_heads: int | None = None,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] = nn.LayerNorm,
        router_kwargs: dict | None = None,
        route_by: str = "query",
        fused_attn: bool = True,
        rotary_pairs: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        # Not super(): a subclass may have a second base, whose __init__ takes other arguments.
        nn.Module.__init__(self)
        _refuse_unknown(executor=executor, scope=scope, route_by=route_by)
        chooser = router_class(router)
        if scope not in chooser.scopes:
            allowed = " or ".join(map(repr, chooser.scopes))
            raise ValueError(f"scope {scope!r}: router {router!r} takes {allowed}")
        if kv_heads is None:
            kv_heads = budget.heads
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
        self.needs_query = chooser.needs_query

        self.add_inputs(dim, qkv_bias, **dd)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if qk_norm:
            self.q_norm = norm_layer(budget.head_dim, **dd)
            self.k_norm = norm_layer(budget.head_dim, **dd)
        self.router_kwargs = dict(router_kwargs or {})
        self.router = chooser(dim, budget, **self.router_kwargs, **dd)
        if self.router.group not in (1, budget.heads // kv_heads):
            raise ValueError(
                f"router_kwargs: group={self.router.group} is neither 1 nor {budget.heads // kv_heads}, the query heads of one "
                f"key-value head ({budget.heads} heads, kv_heads={kv_heads})"
            )
        if self.by_context and (self.router.choice != "sequence" or scope != "token"):
            raise ValueError(
                f"route_by 'context' needs a router that chooses once for a sequence, which {router!r} "
                f"with scope {scope!r} and {router_kwargs or 'its defaults'} does not: give mae with pool 'sequence'"
            )
        self.add_output(dim, proj_bias, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    @property
    def rows(self) -> list[int]:
        """Return the numbers of outputs of the projections to queries, to keys and to values."""
        keys = self.kv_heads * self.head_dim
        return [self.q_dim, keys, keys]

    def add_inputs(self, dim: int, bias: bool, **dd: Any) -> None:
        """Make the modules that project tokens to queries, keys and values."""
        self.qkv = nn.Linear(dim, sum(self.rows), bias=bias, **dd)

    def add_output(self, dim: int, bias: bool, **dd: Any) -> None:
        """Make the module that projects the outputs of the heads to the width of the tokens."""
        self.proj = nn.Linear(self.q_dim, dim, bias=bias, **dd)

    @property
    def projections(self) -> tuple[nn.Module, ...]:
        """Return the modules whose weights are read by executors that skip heads."""
        modules = self._modules  # see `route_by_operator`
        return modules["qkv"], modules["proj"]

    def forward(  # noqa: PLR0913
        self,
        x: Tensor,
        context: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        padding_mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: Any = None,
        condition: Tensor | None = None,
        context_padding: Tensor | None = None,
    ) -> tuple[Tensor, RoutingStats]:
        """Attend from x to x itself or to a context, with the heads that the router chooses.

        Args:
            x: query tokens [B, N, C].
            context: keys and values come from it, [B, M, C]; None: from x.
            attn_mask: [N, M], [H or 1, N, M] or [B or 1, H or 1, N, M], True (attend) or an additive float.
            is_causal: token n attends to tokens 0 .. n and to the cached tokens, and is routed by these alone: refused where
                a choice is made from the whole sequence, see `routes_by_all`.
            padding_mask: [B, N], or [B, length + N] with a KeyValueCache, True where a token of x or a cached token is
                padding. Padding is left out of the statistics and, in self-attention, of the keys.
            rotary: cosines and sines [N, D] or [B or 1, N, D] of the tokens' positions, for queries and keys. Channels that
                are turned together (see `rotary_pairs`) have the same angle.
            cache: in self-attention a KeyValueCache of the tokens before x, or an object with the same attributes; then
                M = length + N. In cross-attention a ContextCache; after its first call, context may be left out.
            condition: [B, C], which the router reads instead of the mean token; with scope "sample" only. [C]: one choice
                for all sequences, whose statistics are repeated B times.
            context_padding: [B, M], True where the context is padding. Padding is left out of the keys and, with route_by
                "context", of what the router reads.

        Returns:
            y [B, N, C] and the routing statistics.

        Raises:
            ValueError: for rotary or a KeyValueCache together with a context; for context_padding or route_by "context"
                without a context; for is_causal or a cache where routing reads the whole sequence; for padding of another
                length; and for a condition where every token has its own heads.
        """
        attended = self.find_attended(x, context, context_padding, cache)
        self.check(x, padding_mask, rotary, condition, attended, is_causal)
        key_padding = attended.padding if attended.crosses else padding_mask
        mask, causal = visible(
            attn_mask,
            is_causal,
            key_padding,
            attended.crosses,
            x.shape[1],
            attended.keys,
            attended.past,
            x.device,
        )
        padded = None  # [B, N], the padding of x without that of cached tokens
        if padding_mask is not None:
            padded = padding_mask[:, attended.past :]

        dropout_p = self.attn_drop.p if self.training else 0.0
        call = Call(
            x,
            None,
            attended.context,
            None,
            mask,
            causal,
            dropout_p,
            rotary,
            cache,
            mode=present_mode(x),
        )
        if not attended.crosses and cache is None:
            call = self.route_by_operator(call, padded, condition)
        if call.routing is None:
            routing, q = self.route(x, padded, condition, attended.context, attended.padding, cache)
            call = call._replace(routing=routing, q=q)
        executor = self.make_executor(call)
        o = executor.attend(*executor.project())
        y = executor.combine(o)
        drop = self._modules["proj_drop"]
        if call.mode != "eager" or not does_nothing(drop):
            y = drop(y)
        return y, call.routing.stats

    if TYPE_CHECKING:
        __call__ = forward  # nn.Module's own says nothing of types

    def find_attended(
        self, x: Tensor, context: Tensor | None, context_padding: Tensor | None, cache: Any
    ) -> Attended:
        """Return what x [B, N, C] attends to: a context, or itself and the cached tokens. Arguments: see `forward`."""
        if isinstance(cache, ContextCache):
            # `take` returns None where the cache already has the keys and values.
            context = cache.take(x, context, context_padding)
            keys = cache.length if context is None else context.shape[1]
            return Attended(crosses=True, context=context, padding=cache.padding, past=0, keys=keys)
        if context is None:
            past = 0 if cache is None else cache.length
            keys = past + x.shape[1]
            return Attended(
                crosses=False, context=None, padding=context_padding, past=past, keys=keys
            )
        if cache is not None:
            raise ValueError(
                "a KeyValueCache is for self-attention, not with a context: give a ContextCache"
            )
        keys = context.shape[1]
        return Attended(crosses=True, context=context, padding=context_padding, past=0, keys=keys)

    def check(
        self,
        x: Tensor,
        padding_mask: Tensor | None,
        rotary: Any,
        condition: Tensor | None,
        attended: Attended,
        is_causal: bool,
    ) -> None:
        """Refuse arguments of `forward` that do not go together.

        Args:
            x, padding_mask, rotary, condition, is_causal: see `forward`.
            attended: what x attends to.
        """
        check_length("padding_mask", padding_mask, attended.past, x.shape[1], x)
        if attended.crosses:
            if rotary is not None:
                raise ValueError("rotary positions are for self-attention, not with a context")
        elif self.by_context or attended.padding is not None:
            raise ValueError(
                "route_by 'context' and context_padding are for cross-attention: give a context"
            )
        check_length("context_padding", attended.padding, 0, attended.keys, x)
        if condition is not None and self.scope != "sample":
            raise ValueError("a condition decides for whole sequences: it needs scope 'sample'")
        if is_causal and self.routes_by_all(condition):
            raise ValueError(
                "is_causal: a choice made from the whole sequence would tell a token of later ones "
                f"(router {type(self.router).__name__}, scope {self.scope!r}): give scope 'token', and mae a pool "
                "'running' or 'window'"
            )

    def routes_by_all(self, condition: Tensor | None) -> bool:
        """Return whether the choice for a token depends on all tokens of its sequence, or of the context.

        condition: see `forward`. A router that reads queries reads their mean beside it.
        """
        if self.scope == "sample":
            return condition is None or self.needs_query
        return self.router.reads == "sequence"

    def route(
        self,
        x: Tensor,
        padded: Tensor | None = None,
        condition: Tensor | None = None,
        context: Tensor | None = None,
        context_padding: Tensor | None = None,
        cache: Any = None,
    ) -> tuple[Routing, Tensor | None]:
        """Call the router for tokens x [B, N, C].

        Args:
            x, condition, context, context_padding, cache: see `forward`.
            padded: [B, N], True at padding.

        Returns:
            The router's answer, and the queries [B, N, H, D] if the router read them.
        """
        if self.by_context:
            if cache is not None and cache.length > 0:
                return cache.routing, None
            routing = self.router(context, None, context_padding)
            if cache is not None:
                # `Cache.reorder` picks rows of the batch, which a list of pairs does not have.
                routing = routing._replace(pairs=None)
                cache.routing = routing
            return routing, None
        if cache is not None and self.routes_by_all(condition):
            raise ValueError(
                "tokens that come one by one (a cache) cannot be routed by all of them together "
                f"(router {type(self.router).__name__}, scope {self.scope!r})"
            )
        if cache is not None and self.router.reads == "earlier":
            routing, cache.router_state = self.router.resume(x, padded, cache.router_state)
            return routing, None
        q = None
        router_q = None  # q as routers read it, [B, H, N, D]
        if self.needs_query:
            q = self.project_queries(x)
            router_q = q.transpose(1, 2)
        if self.scope == "token":
            return self.router(x, router_q, padded), q
        if router_q is None:
            return route_sequences(self.router, x, condition, padded), q
        if condition is not None and condition.dim() == 1:
            # One condition for all sequences is repeated: each sequence has its own queries.
            condition = condition.expand(x.shape[0], -1)
        mean_q = masked_mean(router_q, padded)  # [B, H, 1, D]
        return route_sequences(self.router, x, condition, padded, mean_q), q

    def route_by_operator(
        self, call: Call, padded: Tensor | None, condition: Tensor | None
    ) -> Call:
        """Route and project the tokens of a call by one operator, which also attends if the call's plan allows it.

        The operator needs a router that is one linear layer for every token and has no hooks; see also `plan.operator_of`.

        Args:
            call: self-attention without a cache, not yet routed.
            padded: [B, N], True at padding.
            condition: see `forward`.

        Returns:
            The call with its routing and `product` or `attended`; if no operator can do it, as it was or with its plan.
        """
        x = call.x
        if call.mode == "traced" or kernels.path(x.device.type) != "triton":
            return call
        if condition is not None and condition.dim() == 1:  # one choice for all sequences
            return call
        # Read from the dictionary: nn.Module's own lookup of attributes takes ten times as long, and a GPU waits for it.
        modules = self._modules
        router = modules["router"]
        if not router.routes_linearly or not unhooked(router):
            return call
        gates = router.as_linear(x)
        if gates is None:
            return call
        form = gates.form()
        if self.scope == "sample":
            form = form._replace(choice="sequence")
        plan = self.plan(call, form)
        if not plan.operator:
            return call._replace(plan=plan)  # it holds when the router has been called too
        attention = None
        read = None
        if plan.operator != PROJECT_AND_ROUTE:
            attention = ProductAttention(self.kv_heads, call.is_causal, call.attn_mask)
        if plan.operator == ROUTE_SEQUENCES_AND_ATTEND:
            read = read_of_sequences(x, condition, padded)
            padded = None  # the mean token is no padding
            dtypes = (read.dtype, plan.dtype, form.linear)
            if read.dtype != x.dtype and not kernels.routes(x.device, *dtypes):
                return call._replace(plan=plan)
        projection = modules["qkv"]._parameters
        weights = (projection["weight"], projection["bias"])
        inputs = (x, *weights, plan.dtype, gates, padded, attention, read)
        routing, result = project_and_route(*inputs)
        if attention is None:
            return call._replace(routing=routing, plan=plan, product=result)
        return call._replace(routing=routing, plan=plan, attended=result)

    # ---- projections of tokens, by head; `SeparateHeadMixtureAttention` overrides them

    def joint_weight(self) -> nn.Parameter | None:
        """Return `qkv.weight`, by which one product gives queries, keys and values; None: it may not be read."""
        return weight_of(self._modules["qkv"])

    def weights(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight and bias of queries ([H*D, C], [H*D]), of keys and of values ([G*D, C], [G*D] each).

        One `split` makes all three weights, so that backward writes the gradient of `qkv.weight` in one pass.
        """
        weights = self.qkv.weight.split(self.rows)
        biases = (None, None, None)
        if self.qkv.bias is not None:
            biases = self.qkv.bias.split(self.rows)
        return list(zip(weights, biases))

    def project_all(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Project the tokens x of a call [B, N, C] to q [B, N, H, D], k and v [B, N, G, D]."""
        product = call.product
        if product is None:
            product = self.qkv(call.x)
        heads = [self.num_heads, self.kv_heads, self.kv_heads]
        # Three names, because fx cannot trace `*` of a proxy. The function, because Tensor.split takes three times as long.
        q, k, v = torch.split_with_sizes(self.by_head(product), heads, -2)
        return q, k, v

    def project_queries(self, x: Tensor) -> Tensor:
        """Project x [B, N, C] to queries [B, N, H, D]."""
        return self.by_head(linear_rows(self.qkv, x, 0, self.q_dim))

    def project_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Project x [B, M, C] to keys and values [B, M, G, D]."""
        product = linear_rows(self.qkv, x, self.q_dim, sum(self.rows))
        k, v = product.split(self.rows[1:], -1)
        return self.by_head(k), self.by_head(v)

    def by_head(self, t: Tensor) -> Tensor:
        """Split the outputs of a projection by head: [.., h * D] -> [.., h, D]."""
        return torch.unflatten(t, -1, (-1, self.head_dim))

    # ---- normalised and rotated queries and keys, in the layout of attention

    def project(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, H, N, D], k and v [B, G, M, D] of all heads, ready for attention."""
        crosses = call.context is not None or isinstance(call.cache, ContextCache)
        k = v = None
        if call.q is not None:
            q = call.q  # [B, N, H, D]
        elif crosses:
            q = self.project_queries(call.x)
        else:
            q, k, v = self.project_all(call)
        q = self.prepare_queries(q, call.rotary).transpose(1, 2)
        if isinstance(call.cache, ContextCache) and call.cache.length > 0:
            return q, call.cache.keys, call.cache.values
        if k is None:
            context = call.x if call.context is None else call.context
            k, v = self.project_keys_values(context)
        k, v = self.prepare_keys_values(k, v, call)
        return q, k, v

    def prepare_keys_values(self, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Normalise and rotate keys; append keys and values to the cache, if there is one.

        Args:
            k, v: those of the tokens of this call, as projected, [B, tokens, G, D].
            call: has the rotation and the cache.

        Returns:
            Keys and values of all tokens, cached ones included, [B, G, M, D].
        """
        k = self.prepare_keys(k, call.rotary).transpose(1, 2)
        v = v.transpose(1, 2)
        if call.cache is None:
            return k, v
        return call.cache.update(k, v)

    def prepare_queries(self, q: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Normalise and rotate queries [B, N, h, D]; h may be any of the heads."""
        norm = self._modules["q_norm"]
        if not does_nothing(norm):
            q = norm(q)
        if rotary is None:
            return q
        return rotate(q, rotary, self.rotary_pairs)

    def prepare_keys(self, k: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Normalise and rotate keys [B, M, g, D]; g may be any of the key-value heads."""
        norm = self._modules["k_norm"]
        if not does_nothing(norm):
            k = norm(k)
        if rotary is None:
            return k
        return rotate(k, rotary, self.rotary_pairs)

    def extra_repr(self) -> str:
        b = self.budget
        heads = f"{b.active} of {b.heads} heads of width {b.head_dim} active ({b.shared} shared + {b.routed} routed)"
        text = f"{heads}, scope={self.scope}"
        if self.by_context:
            text += ", route_by=context"
        return text


def _refuse_unknown(**given: str) -> None:
    allowed = dict(executor=EXECUTORS, scope=SCOPES, route_by=ROUTE_BY)
    for name, value in given.items():
        if value not in allowed[name]:
            known = ", ".join(sorted(allowed[name]))
            raise ValueError(f"{name} {value!r} is not one of {known}")
