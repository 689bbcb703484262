"""Parts of text models: positions, layers, and attention from a config's dict."""

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from moh_vision.attention import (
    HeadBudget,
    HeadMixtureAttention,
    RoutingStats,
    resolve_budget,
    run_block,
)
from moh_vision.attention.executors import Executor
from moh_vision.attention.routers import router_class
from moh_vision.attention.routing import Call
from moh_vision.language.models.configs import TextConfig, attention_budget, is_of_experts


def with_positions(x: Tensor, positions: Tensor) -> Tensor:
    """Return embedded words [B, N, C] times sqrt(C), plus sinusoids of positions [B or 1, N] as in tensor2tensor and
    fairseq: sin(p / 10000^(i / (C / 2 - 1))) for i = 0 .. C / 2 - 1, then the cosines. The first token is at position 0.
    """
    dim = x.shape[-1]
    step = math.log(10_000) / max(dim // 2 - 1, 1)
    rates = torch.exp(torch.arange(dim // 2, device=positions.device) * -step)
    angles = positions.unsqueeze(-1).float() * rates
    return x * dim**0.5 + torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.dtype)


def token_positions(ids: Tensor, attention_mask: Tensor | None, past: int = 0) -> Tensor:
    """Return the position of each token among the real tokens of its text.

    ids [B, N], attention_mask [B, past + N] -> [B or 1, N].
    """
    if attention_mask is None:
        return torch.arange(past, past + ids.shape[1], device=ids.device).unsqueeze(0)
    return (attention_mask.long().cumsum(1) - 1).clamp_min(0)[:, past:]


def padding_of(attention_mask: Tensor | None) -> Tensor | None:
    """Turn transformers' mask (1 real, 0 padding) into the mask of `moh_vision.attention` (True at padding)."""
    if attention_mask is None:
        return None
    return attention_mask == 0


def build_attention(
    spec: dict, config: TextConfig, layers: int, pool: str, crosses: bool = False
) -> list[HeadMixtureAttention]:
    """Return the attention layers of a stack.

    Args:
        spec: an attention dict, see `TextConfig`.
        config: of the model.
        layers: their number.
        pool: which tokens a choice may read, see `Router.options_reading`; with "sequence" all, later ones too.
        crosses: whether the layers attend to another text. A router that chooses once for a sequence then reads that text.
            The tokens of the layers' own text must not read later ones.
    """
    router = spec["router"]
    chooser = router_class(router)
    dim = config.hidden_size
    heads = config.num_attention_heads
    router_kwargs = {key: spec[key] for key in chooser.options() if key in spec}
    router_kwargs.update(chooser.options_reading(pool))
    layer_kwargs = dict(executor=spec.get("executor", "auto"), attn_drop=config.attention_dropout)
    if crosses and chooser.choice == "sequence":
        layer_kwargs["route_by"] = "context"
    bias = spec.get("bias", True)
    attention_class = HeadMixtureAttention
    if is_of_experts(spec):
        attention_class = ExpertAttention
        budgets = [HeadBudget(spec["experts"], spec["head_dim"], 0, spec["top_k"])] * layers
    elif chooser.all_heads:
        budgets = [HeadBudget(heads, dim // heads, heads, 0)] * layers
    else:
        share = chooser.shared_share
        budgets = resolve_budget(
            attention_budget(spec), layers, heads, dim // heads, shared_share=share
        )
    attentions = [
        attention_class(
            dim,
            budget,
            router,
            qkv_bias=bias,
            proj_bias=bias,
            router_kwargs=router_kwargs,
            **layer_kwargs,
        )
        for budget in budgets
    ]
    causal = crosses or pool != "sequence"
    for attention in attentions:
        if causal and not attention.by_context and attention.routes_by_all(None):
            raise ValueError(
                f"router {router!r} reads all tokens of a sequence: in a decoder it would tell a token of later ones"
            )
    return attentions


class ExpertAttention(HeadMixtureAttention):
    """Attention whose heads are experts of any number and width, with one key-value head for all of them (Zhang 2022).

    With `proj_bias` every expert has its own output bias; the expert's weight scales its output, bias included.

    Parameters: those of HeadMixtureAttention without proj.bias, and with `proj_bias` head_bias [E, C].
    """

    def __init__(self, dim: int, budget: HeadBudget, router: str, proj_bias: bool = True, **kwargs):
        super().__init__(dim, budget, router, kv_heads=1, proj_bias=False, **kwargs)
        self.head_bias = None
        if proj_bias:
            self.head_bias = nn.Parameter(torch.zeros(budget.heads, dim))

    def make_executor(self, call: Call, *more: Any) -> Executor:
        executor = super().make_executor(call, *more)
        if self.head_bias is None:
            return executor
        combine = executor.combine

        def with_biases(o: Tensor) -> Tensor:
            y = combine(o)
            return y + call.routing.weights.to(y.dtype) @ self.head_bias.to(y.dtype)  # [B, N, C]

        executor.combine = with_biases
        return executor


class TextLayer(nn.Module):
    """Self-attention, optional cross-attention and feed-forward, each with a residual sum.

    Args:
        self_attn, cross_attn: from `build_attention`.
        is_causal: a token attends only to itself and the tokens before it.
        pre_norm: normalise before each part (Baevski and Auli 2019), not after the sum (Vaswani 2017).
        activation: "relu" or "gelu".
    """

    def __init__(
        self,
        config: TextConfig,
        self_attn: HeadMixtureAttention,
        cross_attn: HeadMixtureAttention | None = None,
        is_causal: bool = False,
        pre_norm: bool = False,
        activation: str = "relu",
    ):
        super().__init__()
        self.is_causal = is_causal
        self.pre_norm = pre_norm
        self.self_attn = self_attn
        self.self_norm = nn.LayerNorm(config.hidden_size)
        self.cross_attn = cross_attn
        self.cross_norm = None
        if cross_attn is not None:
            self.cross_norm = nn.LayerNorm(config.hidden_size)
        self.ffn = nn.Sequential(
            OrderedDict(
                inner=nn.Linear(config.hidden_size, config.intermediate_size),
                activation=ACT2FN[activation],
                dropout=nn.Dropout(config.activation_dropout),
                outer=nn.Linear(config.intermediate_size, config.hidden_size),
            )
        )
        self.ffn_norm = nn.LayerNorm(config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_padding: Tensor | None = None,
        cache=None,
        stats: list[RoutingStats] | None = None,
    ) -> Tensor:
        """Return x [B, N, C] after the layer.

        Args:
            x: [B, N, C].
            padding_mask: [B, N], or [B, past + N] with a cache; True at padding.
            context: [B, M, C], what cross-attention reads.
            context_padding: [B, M], True at padding.
            cache: a DecoderLayerCache.
            stats: list to which the layer appends its attention statistics.
        """
        x = self.around(
            x,
            self.self_norm,
            self.self_attn,
            stats,
            padding_mask=padding_mask,
            is_causal=self.is_causal,
            cache=None if cache is None else cache.self_attention,
        )
        if self.cross_attn is not None:
            if padding_mask is not None:
                padding_mask = padding_mask[:, -x.shape[1] :]  # without the tokens in the cache
            x = self.around(
                x,
                self.cross_norm,
                self.cross_attn,
                stats,
                context=context,
                context_padding=context_padding,
                padding_mask=padding_mask,
                cache=None if cache is None else cache.cross_attention,
            )
        return self.around(x, self.ffn_norm, self.ffn)

    def around(
        self, x: Tensor, norm: nn.Module, layer: nn.Module, stats: list | None = None, **inputs
    ) -> Tensor:
        """Return the residual sum of a part, normalised before the part or after the sum.

        The part is attention, which also returns statistics, or feed-forward; `inputs` go to attention.
        """
        residual = x
        if self.pre_norm:
            x = norm(x)
        x = layer(x, **inputs)
        if isinstance(x, tuple):
            x, routing = x
            if stats is not None:
                stats.append(routing)
        x = residual + self.dropout(x)
        if not self.pre_norm:
            x = norm(x)
        return x


class TextLayers(nn.ModuleList):
    """A stack of `TextLayer`.

    Args:
        config: of the model.
        spec: attention dict of self-attention.
        depth: number of layers.
        pool: see `build_attention`.
        cross: attention dict of cross-attention; None: the layers have none.
        **options: of `TextLayer`.
    """

    def __init__(
        self,
        config: TextConfig,
        spec: dict,
        depth: int,
        pool: str,
        cross: dict | None = None,
        **options,
    ):
        attention = [build_attention(spec, config, depth, pool)]
        if cross is not None:
            attention.append(build_attention(cross, config, depth, pool="sequence", crosses=True))
        super().__init__(TextLayer(config, *layer, **options) for layer in zip(*attention))

    def forward(
        self,
        x: Tensor,
        padding=None,
        context=None,
        context_padding=None,
        cache=None,
        stats=None,
        checkpoint=None,
    ) -> Tensor:
        """Return x [B, N, C] after all layers.

        Args:
            x: [B, N, C].
            padding, context, context_padding, stats: see `TextLayer`.
            cache: a TextCache.
            checkpoint: see `run_block`.
        """
        for index, layer in enumerate(self):
            layer_cache = None if cache is None else cache.layers[index]
            x = run_block(
                layer,
                x,
                padding,
                context,
                context_padding,
                layer_cache,
                stats=stats,
                checkpoint=checkpoint,
            )
        return x
