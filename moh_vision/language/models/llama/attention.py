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
# Attention implementations whose masks our executors can read: a tensor [B or 1, H or 1, N, M], or None.
TENSOR_MASKS = ("sdpa", "eager")


class LayerCache:
    """Adapter that gives executors one layer of a transformers cache.

    Args:
        cache: any cache of transformers.
        layer: index of the layer.
        length: number of keys before the new ones, empty slots of a static cache included.
        keep: return only this many first keys; None: all.
    """

    def __init__(self, cache, layer: int, length: int, keep: int | None = None):
        self.cache = cache
        self.layer = layer
        self.length = length
        self.keep = keep

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [B, kv_heads, N, D]; return the keys and values to attend to, [B, kv_heads, M, D]."""
        k, v = self.cache.update(k, v, self.layer)
        if self.keep is None:
            return k, v
        return k[:, :, : self.keep], v[:, :, : self.keep]


class RoutedAttention(SeparateHeadMixtureAttention):
    """A transformers attention layer with routed heads; it keeps the layer's modules.

    If all heads run, a call does what transformers' layer does, step by step. Otherwise either transformers' attention
    runs all heads and the layer multiplies their outputs by the routing weights, or an executor skips heads. Executors
    skip heads only for many tokens at once, with "query_norm" only without gradients, and not under an adapter, because
    they read the weights of the projections. Decoding token by token runs all heads.

    "query_norm" reads the output of q_proj: before the rotary embedding (Jin 2024's code), and in Qwen3 before its
    norm, after which all queries of a head have nearly the same length.

    Args:
        attn: the dense layer.
        budget: how many of its heads are shared and how many routed ones run.
        router: a name in `moh_vision.attention.ROUTERS`, of a router that reads one token.
        executor: a name in `moh_vision.attention.EXECUTORS`.
        group: choose query heads by whole key-value groups.
        router_kwargs: arguments of the router.
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
        # Keep the order of the dense layer's modules and put new ones last, because the state of an optimiser refers to
        # parameters by index. The first `theirs` sets the order; the last one wins over our modules of the same name.
        self._modules = {**theirs, **self._modules, **theirs}
        # Take over the config, numbers and dictionaries of forward hooks, but not a `forward` that accelerate has set.
        # transformers records attention matrices by hooks, and a handle removes its hook from the dictionary in which
        # the hook was registered.
        for name, value in vars(attn).items():
            skipped = name in vars(self) or name.startswith("_") or callable(value)
            if name.startswith("_forward_") or not skipped:
                setattr(self, name, value)
        self.train(attn.training)

    def add_inputs(self, dim: int, bias: bool, **dd) -> None:
        """Add no projections: the layer uses those of the dense layer."""

    add_output = add_inputs

    @property
    def is_dense(self) -> bool:
        """Return whether every head has weight 1."""
        return self.router.gates_are_one()

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
        """Attend as transformers' layer does: hidden_states [B, N, C] -> output [B, N, C].

        The second value is the attention matrix, or None if it was not computed.

        Args:
            stats: a list or similar. Layer i appends its statistics only if there are i entries, so a recomputation, as
                in activation checkpointing, appends nothing.
            padded: [B, N], True at padding, which is left out of the statistics.
        """
        x = hidden_states
        if cache is None:
            cache = past_key_values
        queries = None
        routing = None
        # With `stats`, route even if the call appends nothing: a recomputation must compute the same tensors.
        if stats is not None or not self.is_dense:
            queries, routing = self._route(x, stats, padded)
        if self.is_dense:
            routing = None  # it was computed for the statistics alone
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
        """Return queries [B, N, H, D] and the routing; append the routing's statistics to `stats`.

        The queries are None if the router does not read them.
        """
        collects = stats is not None and len(stats) == self.layer_idx
        queries = None
        router_queries = None  # as routers read them, [B, H, N, D]
        if self.needs_query:
            queries = self.project_queries(x)
            router_queries = queries.transpose(1, 2)
        learns = self.training or torch.is_grad_enabled()
        decodes = x.shape[1] == 1 and not collects and not learns
        if decodes:
            routing = self.router.choose(x, router_queries, padded)
        else:
            routing = self.router(x, router_queries, padded)
        if collects:
            stats.append(routing.stats)
        return queries, routing

    def rotated(
        self, x: Tensor, queries: Tensor | None, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, H, N, D], k and v [B, kv_heads, N, D] of x, with rotary embeddings of q and k.

        LLaMA's function serves Qwen too, whose own is a copy.
        """
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
        """Return the executor of a call with this mask and cache; None: transformers' attention, times the weights."""
        if not self._is_for_executors(call, mask, **kwargs):
            return None
        implementation = self.config._attn_implementation
        N = call.x.shape[1]
        causal = kwargs.get("is_causal")
        if causal is None:
            causal = self.is_causal
        # Without a mask, transformers' "sdpa" takes several tokens for the start of a text, even if a static cache has
        # more slots.
        starts = mask is None and N > 1 and implementation == "sdpa" and causal
        cache = None
        if past is not None:
            # A mask has a column for every slot of the cache. Without a mask, the tokens in the cache count.
            if mask is None:
                before = int(past.get_seq_length(self.layer_idx))
            else:
                before = mask.shape[-1] - N
            cache = LayerCache(past, self.layer_idx, before, N if starts else None)
        dropout_p = self.attn_drop.p if self.training else 0.0
        call = call._replace(attn_mask=mask, is_causal=starts, dropout_p=dropout_p, cache=cache)
        executor = self.make_executor(call)
        if type(executor) is not Masked:
            return executor
        # Without a mask, "sdpa" reads a key-value head once for each of its query heads, `Masked` only once.
        decodes = N == 1 and past is not None and mask is None
        if decodes and self.grouped and implementation == "sdpa":
            return executor
        return None

    def _is_for_executors(self, call: Call, mask: Tensor | None, **kwargs) -> bool:
        """Return whether our executors compute the same as transformers' attention for a call with this mask."""
        implementation = self.config._attn_implementation
        if self.executor == "masked" or implementation not in TENSOR_MASKS:
            return False
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dim() != 4:
                return False
            # "eager" masks by a finite number. For rows that are masked as a whole, the gradient of the fused kernel
            # would then be wrong.
            if implementation == "eager" and torch.is_grad_enabled():
                return False
        if is_captured(call.x):
            return False
        if kwargs.get("cache") is not None:  # pages of transformers' continuous batching
            return False
        wants_matrix = kwargs.get("output_attentions")
        return not (wants_matrix or getattr(self.config, "output_attentions", False))


class MoHLlamaAttention(RoutedAttention, LlamaAttention):
    """A subclass of LlamaAttention: by that class transformers finds the layers whose attention matrices it records."""


class MoHQwen2Attention(RoutedAttention, Qwen2Attention):
    """A subclass of Qwen2Attention, see `MoHLlamaAttention`."""


class MoHQwen3Attention(RoutedAttention, Qwen3Attention):
    """A subclass of Qwen3Attention, see `MoHLlamaAttention`."""
