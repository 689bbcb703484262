"""The DiT of Peebles and Xie 2023, dense or with MoH attention, as a diffusers model.

Saved pipelines refer to this module by its path: do not move it. Parameters have the official DiT's names.
diffusers' DiT differs from the official one in two numbers: its timestep frequencies are spaced one step
too wide, and the norm before the MLP has another epsilon. The default fits official weights;
`compat="diffusers"` takes diffusers' two numbers. `compat="sit"` fits the weights of SiT (Ma 2024): the same
network, which reads another time and predicts the opposite velocity. `compat="jit"` fits those of JiT (Li and He
2025), which read that time, too. Outside the model nothing differs.
"""

import math
import os
import warnings
from collections.abc import Sequence
from functools import partial, wraps
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.hooks import HookRegistry
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.cache_utils import CacheMixin
from diffusers.models.embeddings import get_2d_sincos_pos_embed, get_timestep_embedding
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from timm.layers import (
    Mlp,
    PatchEmbed,
    RmsNormFp32,
    SwiGLU,
    build_rotary_pos_embed,
    use_fused_attn,
)
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention import (
    GroupMixtureMlp,
    HeadBudget,
    HeadMixtureAttention,
    RoutingStats,
    init_routers,
    run_block,
)
from moh_vision.attention.executors import Sequences
from moh_vision.attention.executors.groups import GroupsOfSequences
from moh_vision.attention.linear import is_around, is_captured
from moh_vision.attention.routed_layer import RoutedLayer
from moh_vision.models.convert import route_heads
from moh_vision.models.dit_caches import (
    BROADCAST,
    broadcast_attention,
    caches_blocks,
    why_no_cache,
)
from moh_vision.models.dit_weights import checkpoint_filter_fn, settings_of
from moh_vision.models.head_budgets import new_budgets
from moh_vision.models.mlp_groups import DEFAULT_GROUPS, mlp_options, new_mlp_budgets, run_mlp
from moh_vision.models.prediction import FROM_NOISE, LINEAR, Prediction, time_from_noise

FREQUENCIES = 256  # width of the sinusoidal timestep features
# norm_layer -> the classes of the norms of tokens, and of queries and keys, which have learnt weights
NORMS = {
    "layernorm": (partial(nn.LayerNorm, elementwise_affine=False), nn.LayerNorm),
    "rmsnorm": (RmsNormFp32, RmsNormFp32),
}
COMPAT = ("official", "diffusers", *FROM_NOISE)
ROUTE_BY = ("condition", "timestep")


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Shift and scale x [B, N, C] by shift and scale [B, C], as adaLN does."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    """Embed timesteps [B] as [B, C]: sinusoids (cosines first), cast to `dtype`, then an MLP."""

    def __init__(self, dim: int, freq_shift: int = 0):
        super().__init__()
        # The lowest frequency is 10000 ** (-(half - 1) / (half - freq_shift)), half = FREQUENCIES / 2.
        self.freq_shift = freq_shift
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, timestep: Tensor, dtype: torch.dtype) -> Tensor:
        shift = self.freq_shift
        features = get_timestep_embedding(
            timestep, FREQUENCIES, flip_sin_to_cos=True, downscale_freq_shift=shift
        )
        return self.mlp(features.to(dtype))


class LabelEmbedder(nn.Module):
    """Embed class labels [B] as [B, C]; label num_classes, the last row of the table, means "no class"."""

    def __init__(self, num_classes: int, dim: int):
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, dim)

    def forward(self, labels: Tensor) -> Tensor:
        try:
            return self.embedding_table(labels)
        except IndexError:  # raised on a CPU only: on a GPU the kernel fails with an assertion
            null = self.embedding_table.num_embeddings - 1
            raise ValueError(
                f"class_labels {labels.min()} to {labels.max()}: expected 0 to {null}, where {null} is no class"
            ) from None


def make_norm(norm_layer: str, dim: int, eps: float = 1e-6) -> nn.Module:
    """Make a norm of tokens of width `dim`; for `norm_layer` see `MoHDiTTransformer2DModel`."""
    of_tokens, _ = NORMS[norm_layer]
    return of_tokens(dim, eps=eps)


def init_as_one_matrix(*weights: Tensor) -> None:
    """Fill weights [rows, C] by Xavier's rule for the matrix of all their rows, which JiT and LightningDiT hold as one."""
    with torch.no_grad():
        whole = torch.cat(weights)
        nn.init.xavier_uniform_(whole)
        for weight, rows in zip(weights, whole.split([len(weight) for weight in weights])):
            weight.copy_(rows)


def make_mlp(
    dim: int,
    hidden: int,
    swiglu: bool,
    budget: HeadBudget | None,
    mlp_kwargs: dict,
    dropout: float = 0.0,
) -> nn.Module:
    """Make the MLP of a block.

    Args:
        dim: C, width of the tokens.
        hidden: width of the hidden channels; a SwiGLU has 2 / 3 of them.
        swiglu: make a SwiGLU.
        budget: groups of the MLP; None: it is dense.
        mlp_kwargs: arguments of `GroupMixtureMlp`.
        dropout: of the hidden channels; the output has none.
    """
    drop = (dropout, 0.0)
    if swiglu:
        return SwiGLU(dim, hidden * 2 // 3, drop=drop)
    act_layer = partial(nn.GELU, approximate="tanh")
    if budget is None:
        return Mlp(dim, hidden, act_layer=act_layer, drop=drop)
    return GroupMixtureMlp(dim, budget, act_layer=act_layer, drop=drop, **mlp_kwargs)


def middle_blocks(depth: int) -> range:
    """Return the indices of the blocks that have JiT's dropout: those of the middle half."""
    quarter = depth // 4
    return range(quarter, 3 * quarter)


def rotary_of_grid(
    grid: int, widths: Sequence[int], class_tokens: int = 0
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [M + N, D] of M class tokens, which are not turned, and of grid x grid patches, row by row.

    Args:
        grid: patches of a row, and of a column; for their angles see `MoHDiTTransformer2DModel`.
        widths: D, the width of a head, of every layer.
        class_tokens: M.
    """
    width = widths[0]
    if width % 4 or set(widths) != {width}:
        raise ValueError(
            f"use_rot_pos_emb needs heads of one width, a multiple of 4, in all layers, not {sorted(set(widths))}"
        )
    sin, cos = build_rotary_pos_embed([grid, grid], dim=width, in_pixels=False)  # [N, D] each
    before = [0, 0, class_tokens, 0]
    return F.pad(cos, before, value=1.0), F.pad(sin, before)


class DiTBlock(nn.Module):
    """Attention and MLP, each normalised, shifted, scaled and gated by the condition (adaLN-Zero).

    Args:
        dim: C, width of the tokens.
        attn: attention.
        mlp: the MLP, see `make_mlp`.
        norm1, norm2: norms before attention and before the MLP, see `make_norm`.
    """

    def __init__(
        self,
        dim: int,
        attn: HeadMixtureAttention,
        mlp: nn.Module,
        norm1: nn.Module,
        norm2: nn.Module,
    ):
        super().__init__()
        self.norm1 = norm1
        self.attn = attn
        self.norm2 = norm2
        self.mlp = mlp
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(
        self,
        hidden_states: Tensor,
        c: Tensor,
        route_by: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        stats: list[RoutingStats] | None = None,
    ) -> Tensor:
        """Tokens [B, N, C], condition c [B, C] -> [B, N, C]; appends statistics of attention, then of a routed MLP, to `stats`.

        Args:
            hidden_states: the tokens, by the name under which diffusers' caches look for them.
            route_by: what the routers read. [B, C]: the tokens of an image share one choice of heads and groups; [C]: all
                images share one; None: the router reads the tokens, and each token has its own heads.
            rotary: cosines and sines [N, D] of the positions; None: queries and keys are not rotated.
        """
        x = hidden_states
        modulation = self.adaLN_modulation(c)  # [B, 6 * C]
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.chunk(6, dim=1)  # [B, C] each
        y = modulate(self.norm1(x), shift1, scale1)  # [B, N, C]
        y, layer_stats = self.attn(y, rotary=rotary, condition=route_by)
        if stats is not None:
            stats.append(layer_stats)
        x = x + gate1.unsqueeze(1) * y
        y = modulate(self.norm2(x), shift2, scale2)
        x = x + gate2.unsqueeze(1) * run_mlp(self.mlp, y, stats, route_by)
        return x


# diffusers' caches ask this registry what a block returns. Its own `register` imports all of diffusers' transformers, which
# takes seconds, so the entry is made here; a cache that looks something up still imports them.
BLOCK_METADATA = TransformerBlockMetadata(return_hidden_states_index=0)
BLOCK_METADATA._cls = DiTBlock
TransformerBlockRegistry._registry[DiTBlock] = BLOCK_METADATA


class FinalLayer(nn.Module):
    """Map tokens [B, N, C] to patches [B, N, patch_dim], after a norm that the condition [B, C] modulates."""

    def __init__(self, dim: int, patch_dim: int, norm: nn.Module):
        super().__init__()
        self.norm_final = norm
        self.linear = nn.Linear(dim, patch_dim)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)  # [B, C] each
        return self.linear(modulate(self.norm_final(x), shift, scale))  # [B, N, patch_dim]


class MoHDiTTransformer2DModel(ModelMixin, ConfigMixin, CacheMixin, PeftAdapterMixin):
    """A class-conditional diffusion transformer with a budget of attention heads per layer.

    Args:
        sample_size: side of the square latents or images.
        patch_size: side of a patch.
        in_channels: channels of the latents or images.
        learn_sigma: also predict the variance (twice the output channels).
        num_classes: classes; label num_classes means "no class".
        hidden_size: C, width of the tokens.
        num_layers: depth.
        num_attention_heads: H, one number or one per layer.
        attention_head_dim: D; None: hidden_size / H, where H must divide hidden_size.
        mlp_ratio: hidden width of the MLP, as a multiple of C.
        head_budget, head_budget_shape: see `moh_vision.models.vit.MoHVisionTransformer`.
        router: name in `moh_vision.attention.ROUTERS`; None: "moh" with a head_budget, else "dense".
        scope: "token": each token has its own heads (Jin 2024); "sample": all tokens of an image run the
            same heads, and the other heads cost nothing, not even keys and values.
        route_by: what routers with scope "sample" read: "condition", the embedding of timestep and class,
            or "timestep", that of the timestep alone: then all images of a sampling step run the same
            heads. Both are normalised to mean 0 and variance 1, as tokens are.
        executor: name in `moh_vision.attention.EXECUTORS`.
        router_kwargs: options of the router.
        qk_norm: normalise queries and keys of each head, with learnt weights, by `norm_layer`.
        norm_layer: "layernorm", without weights (DiT); "rmsnorm": with learnt weights (JiT, Li and He 2025; LightningDiT,
            Yao 2025), computed in float32.
        swiglu_mlp: W_2 (SiLU(W_g x) * W_1 x) for the MLP (Shazeer 2020), with 2 / 3 of the hidden width, and so as many
            parameters.
        use_rot_pos_emb: rotate queries and keys by the row and the column of their patch, beside the absolute positions.
            The first half of a head's channels has the angles row * 10000^(-2 i / (D / 2)), neighbouring channels 2 i
            and 2 i + 1 together; the second half those of the column.
        class_tokens: M, tokens of the class that stand before the patches in the last blocks (Li and He 2025): each is the
            embedding of the class plus a learnt position. The class also modulates all blocks, as in DiT.
        class_tokens_start: index of the first block that has them; JiT-B: 4, JiT-L: 8, JiT-H: 10.
        middle_dropout: dropout of the outputs of attention and of the MLP's hidden channels, while training, in the middle
            half of the blocks (Li and He 2025; JiT-H: 0.2).
        kv_heads: key-value heads, a divisor of each layer's heads; 1: one for all heads (Zhang 2022);
            None: one per head.
        mlp_budget, mlp_budget_shape, mlp_groups: see `moh_vision.models.vit.MoHVisionTransformer`; groups are chosen by
            what `route_by` says, as heads are.
        compat: "official", "diffusers" for the timestep frequencies and epsilon of diffusers, or "sit" or "jit" for
            weights of SiT or JiT: the network reads the time 1 - timestep / 1000, from 0 (noise) to 1 (image). SiT's
            predicts x_0 - eps, which the model negates. Both need a prediction on the linear path, of the "velocity" in
            SiT and of "x" in JiT, and learn_sigma False.
        patch_bottleneck: width of a linear map between a patch and its token (Li and He 2025); None: no such map.
        prediction: what the model predicts, a `Prediction` or a mapping of its arguments; None: the noise of DDPM. Where
            the last layer predicts something else than the model's output, `Prediction.to_output` computes the output.
        out_channels: follows from learn_sigma; stored for diffusers' pipelines.
    """

    checkpoint_filter = staticmethod(checkpoint_filter_fn)  # used by `load_checkpoint`
    _supports_gradient_checkpointing = True
    _no_split_modules = ["DiTBlock"]
    _repeated_blocks = ["DiTBlock"]
    # What diffusers' DiT keeps too, and routers, whose choices change with small errors. Weights of bfloat16 and wider stay.
    _skip_layerwise_casting_patterns = [
        "x_embedder",
        "x_widen",
        "t_embedder",
        "y_embedder",
        "norm",
        "adaLN_modulation",
        "router",
    ]

    @register_to_config
    def __init__(  # noqa: PLR0913
        self,
        sample_size: int = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        learn_sigma: bool = True,
        num_classes: int = 1000,
        hidden_size: int = 1152,
        num_layers: int = 28,
        num_attention_heads: int | Sequence[int] = 16,
        attention_head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        head_budget=None,
        head_budget_shape: str | None = None,
        router: str | None = None,
        scope: str = "token",
        route_by: str = "condition",
        executor: str = "auto",
        router_kwargs: dict | None = None,
        qk_norm: bool = False,
        norm_layer: str = "layernorm",
        swiglu_mlp: bool = False,
        use_rot_pos_emb: bool = False,
        class_tokens: int = 0,
        class_tokens_start: int = 4,
        middle_dropout: float = 0.0,
        kv_heads: int | None = None,
        mlp_budget=None,
        mlp_budget_shape: str | None = None,
        mlp_groups: int = DEFAULT_GROUPS,
        compat: str = "official",
        patch_bottleneck: int | None = None,
        prediction: Prediction | dict | None = None,
        out_channels: int | None = None,
    ):
        super().__init__()
        self.prediction = Prediction.of(prediction)
        self.register_to_config(prediction=self.prediction.tree())
        check_arguments(self.config, self.prediction)
        if not router:
            router = "dense" if head_budget is None else "moh"
        heads, widths = layer_heads(
            num_layers, num_attention_heads, attention_head_dim, hidden_size
        )
        budgets = new_budgets(self, head_budget, head_budget_shape, router, heads, widths)
        hidden = int(hidden_size * mlp_ratio)
        mlp_budgets = new_mlp_budgets(
            self, mlp_budget, mlp_budget_shape, mlp_groups, [hidden] * num_layers, scope
        )
        attn_kwargs = dict(
            router=router,
            scope=scope,
            executor=executor,
            router_kwargs=router_kwargs,
            qk_norm=qk_norm,
            norm_layer=NORMS[norm_layer][1],
            kv_heads=kv_heads,
            fused_attn=use_fused_attn(),
            rotary_pairs=True,
        )
        mlp_kwargs = mlp_options(executor, router, router_kwargs)
        self.out_channels = in_channels
        if learn_sigma:  # the variance has as many channels
            self.out_channels = 2 * in_channels
        self.register_to_config(out_channels=self.out_channels)
        self.gradient_checkpointing = False
        self.num_classes = num_classes

        narrow = patch_bottleneck or hidden_size
        self.x_embedder = PatchEmbed(
            sample_size, patch_size, in_channels, narrow, bias=not patch_bottleneck
        )
        self.x_widen = nn.Linear(narrow, hidden_size) if patch_bottleneck else nn.Identity()
        if compat == "diffusers":
            freq_shift = 1
            mlp_norm_eps = 1e-5
        else:
            freq_shift = 0
            mlp_norm_eps = 1e-6
        self.t_embedder = TimestepEmbedder(hidden_size, freq_shift)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size)
        grid = sample_size // patch_size
        # The official model counts positions 0, 1, 2, ...; so does diffusers with base_size=grid.
        pos_embed = get_2d_sincos_pos_embed(hidden_size, grid, base_size=grid, output_type="pt")
        pos_embed = pos_embed.float().unsqueeze(0)  # [1, N, C]
        self.pos_embed = nn.Parameter(pos_embed, requires_grad=False)
        if class_tokens:
            self.class_positions = nn.Parameter(torch.empty(1, class_tokens, hidden_size))
        cos = None
        sin = None
        if use_rot_pos_emb:
            cos, sin = rotary_of_grid(grid, widths, class_tokens)
        self.register_buffer("rotary_cos", cos, persistent=False)  # [M + N, D]
        self.register_buffer("rotary_sin", sin, persistent=False)
        self.blocks = nn.ModuleList()
        for number, budget in enumerate(budgets):
            dropout = middle_dropout if number in middle_blocks(num_layers) else 0.0
            of_mlp = mlp_budgets[number] if mlp_budgets else None
            attn = HeadMixtureAttention(hidden_size, budget, proj_drop=dropout, **attn_kwargs)
            mlp = make_mlp(hidden_size, hidden, swiglu_mlp, of_mlp, mlp_kwargs, dropout)
            norm1 = make_norm(norm_layer, hidden_size)
            norm2 = make_norm(norm_layer, hidden_size, mlp_norm_eps)
            self.blocks.append(DiTBlock(hidden_size, attn, mlp, norm1, norm2))
        norm = make_norm(norm_layer, hidden_size)
        self.final_layer = FinalLayer(hidden_size, patch_size**2 * self.out_channels, norm)
        self.initialize_weights()

    def initialize_weights(self) -> None:
        """Initialise as in the paper: Xavier-uniform linear layers (routers too), zero adaLN and output layers.

        With zero adaLN layers every block starts as the identity.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks:
            if isinstance(block.mlp, SwiGLU):
                init_as_one_matrix(block.mlp.fc1_g.weight, block.mlp.fc1_x.weight)
        init_routers(self)
        # Initialise the patch kernel [C, channels, p, p] as one matrix; flatten returns a view of the kernel.
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.flatten(1))
        if self.x_embedder.proj.bias is not None:
            nn.init.zeros_(self.x_embedder.proj.bias)
        for weight in (
            self.y_embedder.embedding_table.weight,
            self.t_embedder.mlp[0].weight,
            self.t_embedder.mlp[2].weight,
        ):
            nn.init.normal_(weight, std=0.02)
        if self.config.class_tokens:
            nn.init.normal_(self.class_positions, std=0.02)
        modulations = (module.adaLN_modulation[1] for module in (self.final_layer, *self.blocks))
        for linear in (self.final_layer.linear, *modulations):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward_routed(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        class_labels: Tensor,
        tokens: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[RoutingStats]]:
        """Compute `forward`; return the sample tensor and the routing statistics of every layer.

        tokens: a list to which the patches' tokens [B, N, C] after every block are appended, or None.
        """
        if self.has_cache:
            raise ValueError(
                "a cache is enabled: blocks that it skips have no routing statistics; call disable_cache() before forward_routed"
            )
        return self._predict(hidden_states, timestep, class_labels, tokens)

    def _predict(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        class_labels: Tensor,
        tokens: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[RoutingStats]]:
        """Compute `forward_routed`; blocks that a cache skips leave no statistics."""
        self._check_inputs(hidden_states, timestep)
        x = self.x_widen(self.x_embedder(hidden_states)) + self.pos_embed  # [B, N, C]
        time = timestep
        if self.config.compat in FROM_NOISE:
            time = time_from_noise(timestep)
        t = self.t_embedder(time.expand(x.shape[0]), x.dtype)  # [B, C]
        y = self.y_embedder(class_labels)  # [B, C]
        c = t + y
        route_by = self._routing_condition(t, c, timestep)  # [B, C], [C] or None
        N = x.shape[1]
        checkpoint = None
        if self.gradient_checkpointing and torch.is_grad_enabled():
            checkpoint = self._gradient_checkpointing_func
        stats: list[RoutingStats] = []
        for number, block in enumerate(self.blocks):
            if self.config.class_tokens and number == self.config.class_tokens_start:
                x = torch.cat([y.unsqueeze(1) + self.class_positions, x], 1)  # [B, M + N, C]
            rotary = self._rotary_of(x)
            x = run_block(block, x, c, route_by, rotary, stats=stats, checkpoint=checkpoint)
            if tokens is not None:
                tokens.append(x[:, -N:])
        x = self.final_layer(x[:, -N:], c)  # [B, N, p * p * out_channels]
        output = self._unpatchify(x)  # [B, out_channels, size, size]
        if self.config.compat == "sit":
            output = -output  # SiT's velocity runs from noise to image, ours from image to noise
        return self.prediction.to_output(output, hidden_states, timestep), stats

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        class_labels: Tensor,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict the noise, and with learn_sigma its variance; or the velocity of a flow: `prediction.output`.

        Args:
            hidden_states: noisy latents [B, in_channels, size, size].
            timestep: [B] or a scalar tensor, integers or floats from 0 (clean) to 1000 (noise). On a CPU,
                floats whose maximum is between 0 and 1 give a warning.
            class_labels: [B], 0 .. num_classes; num_classes means "no class".
            return_dict: return an object with `.sample`, or a tuple.

        Returns:
            Sample [B, out_channels, size, size]; with learn_sigma the second half of its channels interpolates
            the variance between its bounds.
        """
        sample, _ = self._predict(hidden_states, timestep, class_labels)
        if not return_dict:
            return (sample,)
        return Transformer2DModelOutput(sample=sample)

    @property
    def has_cache(self) -> bool:
        """Whether a cache is enabled, or one of diffusers' functions has put one around the blocks."""
        return caches_blocks(self)

    def enable_cache(self, config: Any) -> None:
        """Reuse what earlier steps of a sampling computed, see diffusers' `CacheMixin`.

        config: a FirstBlockCacheConfig, a PyramidAttentionBroadcastConfig, or a TaylorSeerCacheConfig of whole blocks or
            dense MLPs. Others are refused.
        """
        problem = why_no_cache(self, config)
        if problem:
            raise ValueError(problem)
        super().enable_cache(config)
        if type(config).__name__ == BROADCAST:
            broadcast_attention(self, config)
        # diffusers before 0.42 goes on with the list of hooks that it made when the model first sampled.
        HookRegistry.check_if_exists_or_initialize(self)._child_registries_cache = None

    def enable_layerwise_casting(
        self,
        storage_dtype: torch.dtype = torch.float8_e4m3fn,
        compute_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        """Keep weights of linear layers in few bits between their calls, see diffusers' `ModelMixin`.

        Args:
            storage_dtype: of the weights between calls.
            compute_dtype: of the products; None: the model's. What is not stored in few bits is cast to it too, once:
                a layer takes no tokens of another dtype than its own.
            **options: see diffusers.
        """
        if compute_dtype is not None and compute_dtype != self.dtype:
            nn.Module.to(self, compute_dtype)  # diffusers' own `to` warns of casts
        super().enable_layerwise_casting(storage_dtype, compute_dtype, **options)

    def adapted_layers(self) -> dict[str, nn.Module]:
        """Return the layers that peft has put around others, by name."""
        return {name: module for name, module in self.named_modules() if is_around(module)}

    def refuse_adapters(self, asked: str) -> None:
        """Raise ValueError if the model has adapters. `asked` says what does not work with them, and why."""
        name = next(iter(self.adapted_layers()), None)
        if name:
            raise ValueError(
                f"{asked}; {name} has an adapter: save_lora_adapter() saves adapters, fuse_lora() and then unload_lora() make "
                "those of LoRA part of the weights"
            )

    def add_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Add an adapter, see diffusers' `PeftAdapterMixin`. It takes the model's mode: peft makes it with dropout on."""
        self._check_takes_adapters()
        super().add_adapter(*args, **kwargs)
        self._set_mode_of_adapters()

    def load_lora_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Load an adapter, see diffusers' `PeftAdapterMixin`. It takes the model's mode, as in `add_adapter`."""
        self._check_takes_adapters()
        super().load_lora_adapter(*args, **kwargs)
        self._set_mode_of_adapters()

    def _check_takes_adapters(self) -> None:
        """Raise ValueError for a model in which an adapter would fail, or be read past."""
        for name, parameter in self.named_parameters():
            if parameter.is_floating_point() and parameter.dtype.itemsize == 1:
                raise ValueError(
                    f"{name} is kept in {parameter.dtype}, in which no adapter computes: add adapters before "
                    "enable_layerwise_casting"
                )
        for name, module in self.named_modules():
            gathered = (Sequences, GroupsOfSequences)
            if isinstance(module, RoutedLayer) and module.executor in gathered:
                raise ValueError(
                    f"{name} reads its weights since gather_heads: add adapters to a model as it was before"
                )

    def _set_mode_of_adapters(self) -> None:
        for layer in self.adapted_layers().values():
            layer.train(self.training)

    # With its signature: a pipeline passes on the arguments that are named there.
    @wraps(ModelMixin.save_pretrained)
    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        # diffusers would save weights that no model can read.
        self.refuse_adapters("save_pretrained: weights have other names under an adapter")
        super().save_pretrained(save_directory, *args, **kwargs)

    def _check_inputs(self, hidden_states: Tensor, timestep: Tensor) -> None:
        """Raise ValueError for inputs of another size; warn of timesteps that seem to go from 0 to 1."""
        size = self.config.sample_size
        channels = self.config.in_channels
        if tuple(hidden_states.shape[1:]) != (channels, size, size):
            raise ValueError(
                f"hidden_states {tuple(hidden_states.shape)}: expected [batch, {channels}, {size}, {size}], as the model was built"
            )
        # Reading a value from a GPU would synchronise every forward, so only timesteps on a CPU are checked.
        readable = timestep.device.type == "cpu" and not is_captured(timestep)
        if readable and timestep.is_floating_point() and 0 < timestep.max() < 1:
            # Not an error: the last timestep of a sampler with fractional timesteps may be below 1.
            warnings.warn(
                f"timestep {timestep.max():g}: timesteps go from 0 to 999, not from 0 to 1",
                stacklevel=4,
            )

    def _rotary_of(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines of the tokens x [B, N or M + N, C], or None without rotary positions."""
        if self.rotary_cos is None:
            return None
        tokens = x.shape[1]
        return self.rotary_cos[-tokens:], self.rotary_sin[-tokens:]

    def _routing_condition(self, t: Tensor, c: Tensor, timestep: Tensor) -> Tensor | None:
        """Return what the routers read instead of tokens, [B, C] or [C]; None with scope "token".

        Args:
            t: embedded timesteps [B, C].
            c: sum of embedded timesteps and classes [B, C].
            timestep: [B] or a scalar tensor, as given to `forward`.
        """
        if self.config.scope != "sample":
            return None
        condition = c
        if self.config.route_by == "timestep":
            condition = t
            if timestep.numel() == 1:  # all images have this timestep: one choice of heads
                condition = t[0]
        return F.layer_norm(condition, c.shape[1:])

    def _unpatchify(self, x: Tensor) -> Tensor:
        """Join patches [B, N, p * p * c] to images [B, c, g * p, g * p]."""
        p = self.config.patch_size
        g = math.isqrt(x.shape[1])
        x = x.unflatten(1, (g, g))
        x = x.unflatten(-1, (p, p, self.out_channels))  # [B, g, g, p, p, c]
        x = x.permute(0, 5, 1, 3, 2, 4)  # [B, c, g, p, g, p]
        return x.reshape(x.shape[0], self.out_channels, g * p, g * p)


def check_arguments(config, prediction: Prediction) -> None:
    """Raise ValueError for arguments of `MoHDiTTransformer2DModel` from which no model can be built."""
    size = config.sample_size
    patch = config.patch_size
    if patch < 1 or size < patch or size % patch:
        raise ValueError(f"img_size {size} is not a multiple of patch_size {patch}")
    if config.hidden_size % 4:
        raise ValueError(
            f"embed_dim {config.hidden_size} is not a multiple of 4, which 2-D sine-cosine positions need"
        )
    for name, value, allowed in (
        ("compat", config.compat, COMPAT),
        ("route_by", config.route_by, ROUTE_BY),
        ("norm_layer", config.norm_layer, tuple(NORMS)),
    ):
        if value not in allowed:
            raise ValueError(f"{name} {value!r} is not one of {', '.join(allowed)}")
    check_blocks(config)
    check_prediction(config, prediction)
    if config.scope != "sample" and config.route_by != "condition":
        raise ValueError(
            f"route_by {config.route_by!r} needs scope 'sample': with scope {config.scope!r} routers read the tokens"
        )


def check_blocks(config) -> None:
    """Raise ValueError for arguments of the blocks that are out of range or do not go together."""
    for name in ("qk_norm", "swiglu_mlp", "use_rot_pos_emb"):
        if not isinstance(config[name], bool):
            raise ValueError(f"{name} {config[name]!r} is neither true nor false")
    for name in ("class_tokens", "class_tokens_start"):
        if type(config[name]) is not int or config[name] < 0:
            raise ValueError(f"{name} {config[name]!r} is no whole number of 0 or more")
    if config.class_tokens and config.class_tokens_start >= config.num_layers:
        raise ValueError(
            f"class_tokens_start {config.class_tokens_start}: the blocks are 0 to {config.num_layers - 1}"
        )
    dropout = config.middle_dropout
    if not is_number(dropout) or not 0 <= dropout < 1:
        raise ValueError(f"middle_dropout {dropout!r} is out of range: at least 0, below 1")
    if dropout and not middle_blocks(config.num_layers):
        raise ValueError(
            f"middle_dropout {dropout} has no effect: {config.num_layers} blocks have no middle half"
        )
    if config.swiglu_mlp and config.mlp_budget is not None:
        raise ValueError(
            f"mlp_budget {config.mlp_budget!r}: groups are of two linear layers around an activation, not of a SwiGLU; "
            "swiglu_mlp false has them"
        )


def check_prediction(config, prediction: Prediction) -> None:
    """Raise ValueError if what the network predicts does not go together with its variance or its origin."""
    if prediction.output != "noise" and config.learn_sigma:
        raise ValueError(
            f"a prediction of {prediction} needs learn_sigma False: the output is the {prediction.output}, which has no "
            "variance"
        )
    if config.compat in FROM_NOISE:
        _, needed = FROM_NOISE[config.compat]
        found = (prediction.path, prediction.predict)
        if found != (LINEAR, needed) or config.learn_sigma:
            raise ValueError(
                f"compat {config.compat!r} needs a prediction of {needed} on path {LINEAR} and learn_sigma False, not "
                f"{prediction} and {config.learn_sigma}: train it with objective flow and flow.predict {needed}"
            )


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float; True and False are no numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def layer_heads(
    depth: int, heads: int | Sequence[int], head_dim: int | None, hidden_size: int
) -> tuple[list[int], list[int]]:
    """Return the number of heads and the width of a head in every layer."""
    if isinstance(heads, int):
        per_layer = [heads] * depth
    else:
        per_layer = list(heads)
    if len(per_layer) != depth:
        raise ValueError(f"num_heads lists {len(per_layer)} layers, depth is {depth}")
    if depth < 1 or min(per_layer) < 1:
        raise ValueError(f"depth {depth} and num_heads {heads}: both must be at least 1")
    if head_dim is not None:
        return per_layer, [head_dim] * depth
    for layer, h in enumerate(per_layer):
        if hidden_size % h:
            raise ValueError(
                f"embed_dim {hidden_size} is not a multiple of num_heads {h} (layer {layer})"
            )
    return per_layer, [hidden_size // h for h in per_layer]


def from_diffusers(model: nn.Module) -> nn.Module:
    """Copy diffusers' DiT into a dense `MoHDiTTransformer2DModel`; outputs are equal to rounding."""
    weight = model.pos_embed.proj.weight
    ours = MoHDiTTransformer2DModel(**settings_of(model)).to(weight.device, weight.dtype)
    with torch.no_grad():
        ours.load_state_dict(checkpoint_filter_fn(model.state_dict(), ours))
    return ours.train(model.training)


def convert_diffusers(model: nn.Module, *options) -> MoHDiTTransformer2DModel:
    """`moh_vision.convert` for diffusers' DiT."""
    return route_heads(from_diffusers(model), *options)
