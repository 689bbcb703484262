"""LLaMA's and Qwen's attention with routed heads, called as transformers calls its own."""

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from moh_vision.attention import HeadBudget, RoutingStats, SeparateHeadMixtureAttention
from moh_vision.attention.executors import Executor, Masked
from moh_vision.attention.linear import is_captured
from moh_vision.attention.routing import Call, Routing

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
# Implementations with masks that our executors read: a tensor [B or 1, H or 1, N, M], or None.
TENSOR_MASKS = ("sdpa", "eager")


class LayerCache:
    """One layer of any transformers cache, for our executors.

    Args:
        cache: of transformers.
        layer: its number.
        length: keys before the new ones, with the empty slots of a static cache.
        keep: return only so many first keys; None: all.
    """

    def __init__(self, cache, layer: int, length: int, keep: int | None = None):
        self.cache = cache
        self.layer = layer
        self.length = length
        self.keep = keep

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [B, kv_heads, N, D]; return those to attend to, [B, kv_heads, M, D]."""
        k, v = self.cache.update(k, v, self.layer)
        if self.keep is None:
            return k, v
        return k[:, :, : self.keep], v[:, :, : self.keep]


class RoutedAttention(SeparateHeadMixtureAttention):
    """A transformers attention layer with routed heads; it keeps the layer's modules.

    If all heads run, the call is transformers' own, step by step. Otherwise weights follow it, or an executor skips
    heads for many tokens at once (reading the projections' weights, so not under an adapter); with "query_norm" only
    without gradients. Decoding token by token runs all heads.

    "query_norm" reads the output of q_proj: before the rotary embedding (Jin 2024's code), and in Qwen3 before its
    norm, after which all queries of a head have nearly the same length.

    Args:
        attn: the dense layer.
        budget: its heads.
        router: "query_norm" or "moh", or "dense".
        executor: a name in `moh_vision.attention.EXECUTORS`.
        group: choose query heads by whole key-value groups.
        router_kwargs: of the router.
    """

    def __init__(
        self,
        attn: nn.Module,
        budget: HeadBudget,
        router: str,
        executor: str = "auto",
        group: bool = False,
        router_kwargs: dict | None = None,
    ):
        weight = attn.q_proj.weight
        kv_heads = budget.heads // attn.num_key_value_groups
        if group:
            router_kwargs = dict(router_kwargs or {}, group=attn.num_key_value_groups)
        super().__init__(
            attn.q_proj.in_features,
            budget,
            router=router,
            executor=executor,
            kv_heads=kv_heads,
            attn_drop=attn.attention_dropout,
            router_kwargs=router_kwargs,
            device=weight.device,
            dtype=weight.dtype,
        )
        self.qk_norm = hasattr(attn, "q_norm")
        theirs = {name: module for name, module in attn.named_children() if name in MODULES}
        # Dense order first, new modules last: optimisers number parameters.
        self._modules = {**theirs, **self._modules, **theirs}
        # The config, numbers, and the dictionaries of hooks by which transformers records attention matrices: a handle
        # removes its hook from the dictionary that it was made in. Not accelerate's `forward`.
        for name, value in vars(attn).items():
            ours = name in vars(self) or name.startswith("_") or callable(value)
            if name.startswith("_forward_") or not ours:
                setattr(self, name, value)
        self.train(attn.training)

    def add_inputs(self, dim: int, bias: bool, **dd) -> None:
        """Make none: those of the dense layer are taken."""

    add_output = add_inputs

    @property
    def is_dense(self) -> bool:
        """Return whether no head is chosen or weighed: no router, or 0/1 weights and all heads on."""
        return self.router.all_heads or (self.needs_query and self.budget.active == self.num_heads)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values=None,
        stats: list[RoutingStats] | None = None,
        padded: Tensor | None = None,
        cache=None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as transformers' layer: hidden_states [B, N, C] -> output [B, N, C], and the attention matrix if available.

        Args:
            stats: a list or similar; layer i appends its statistics when it holds i entries, so recomputation,
                as in activation checkpointing, appends nothing.
            padded: [B, N], True at padding, which is left out of the statistics.
        """
        x = hidden_states
        if cache is None:
            cache = past_key_values
        queries = None
        routing = None
        # Not only if it collects: recomputation must compute the same tensors.
        if stats is not None or not self.is_dense:
            queries, routing = self._route(x, stats, padded)
        if self.is_dense:
            routing = None
        else:
            call = Call(x, routing, q=queries, rotary=position_embeddings)
            executor = self.executor_of(call, attention_mask, cache, **kwargs)
            if executor is not None:
                return executor.combine(executor.attend(*executor.project())), None

        q, k, v = self.rotated(x, queries, position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        o, matrix = interface(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=self.attn_drop.p if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=getattr(self, "sliding_window", None),
            **kwargs,
        )  # o [B, N, H, D]
        if routing is not None:
            o = o * routing.weights.unsqueeze(-1).to(o.dtype)
        return self.o_proj(o.reshape(*x.shape[:-1], -1).contiguous()), matrix

    def _route(
        self, x: Tensor, stats: list[RoutingStats] | None, padded: Tensor | None
    ) -> tuple[Tensor | None, Routing]:
        """Return queries [B, N, H, D], where the router reads them, and the routing; append its statistics to `stats`."""
        collects = stats is not None and len(stats) == self.layer_idx
        queries = None
        router_queries = None  # as routers read them, [B, H, N, D]
        if self.needs_query:
            queries = self.project_queries(x)
            router_queries = queries.transpose(1, 2)
        learns = self.training or torch.is_grad_enabled()
        if self.needs_query and x.shape[1] == 1 and not collects and not learns:
            # One token at a time nobody asks for more than the choice.
            routing = self.router.choose(router_queries)
        else:
            routing = self.router(x, router_queries, padded)
        if collects:
            stats.append(routing.stats)
        return queries, routing

    def rotated(
        self, x: Tensor, queries: Tensor | None, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, H, N, D], k and v [B, kv_heads, N, D] of x, by transformers' functions (Qwen copies LLaMA's)."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        if queries is None:
            q = self.q_proj(x).view(shape)
        else:
            q = queries
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        return *apply_rotary_pos_emb(q, k, *rotary), v

    def executor_of(self, call: Call, mask: Tensor | None, past, **kwargs) -> Executor | None:
        """Return a call's executor, given its mask and cache; None: transformers' attention with weights."""
        if not self._is_for_executors(call, mask, **kwargs):
            return None
        implementation = self.config._attn_implementation
        N = call.x.shape[1]
        causal = kwargs.get("is_causal")
        if causal is None:
            causal = self.is_causal
        # Without a mask, "sdpa" takes many tokens as the first ones, also in a longer static cache.
        first = mask is None and N > 1 and implementation == "sdpa" and causal
        cache = None
        if past is not None:
            # A mask has as many columns as there are keys; without one a cache holds what it was given.
            if mask is None:
                before = int(past.get_seq_length(self.layer_idx))
            else:
                before = mask.shape[-1] - N
            cache = LayerCache(past, self.layer_idx, before, N if first else None)
        dropout_p = self.attn_drop.p if self.training else 0.0
        call = call._replace(attn_mask=mask, is_causal=first, dropout_p=dropout_p, cache=cache)
        executor = self.make_executor(call)
        if type(executor) is not Masked:
            return executor
        # Without a mask "sdpa" reads a key-value head again for each of its query heads; `Masked` does not.
        decodes = N == 1 and past is not None and mask is None
        if decodes and self.grouped and implementation == "sdpa":
            return executor
        return None

    def _is_for_executors(self, call: Call, mask: Tensor | None, **kwargs) -> bool:
        """Return whether our executors compute what transformers' attention would, mask included."""
        implementation = self.config._attn_implementation
        if self.executor == "masked" or implementation not in TENSOR_MASKS:
            return False
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dim() != 4:
                return False
            # Masks of "eager" are finite; the fused kernel's gradient is wrong for fully masked rows.
            if implementation == "eager" and torch.is_grad_enabled():
                return False
        if is_captured(call.x):
            return False
        if kwargs.get("cache") is not None:  # pages of transformers' continuous batching
            return False
        wants_matrix = kwargs.get("output_attentions")
        return not (wants_matrix or getattr(self.config, "output_attentions", False))


class MoHLlamaAttention(RoutedAttention, LlamaAttention):
    """A LlamaAttention, by which transformers finds layers with attention matrices."""


class MoHQwen2Attention(RoutedAttention, Qwen2Attention):
    """A Qwen2Attention, as `MoHLlamaAttention`."""


class MoHQwen3Attention(RoutedAttention, Qwen3Attention):
    """A Qwen3Attention, as `MoHLlamaAttention`."""
