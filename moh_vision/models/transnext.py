"""TransNeXt (Shi 2024, arXiv 2311.17132) and MoH-ViT, its routed version (Jin 2024, section 4.1).

    transnext_{micro,tiny,small,base}                        all heads, no router
    moh_transnext_small_80  _small_75  _base_75  _base_50    the paper's MoH-ViT-S and -B

Four stages form a pyramid. Stages 1 to 3 use aggregated attention, stage 4 attends to all of its
7 x 7 tokens. timm does not ship the family.
"""

import re
from collections.abc import Sequence
from functools import partial

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import (
    DropPath,
    calculate_drop_path_rates,
    get_device_dtype,
    to_2tuple,
    use_fused_attn,
)
from timm.layers.trace_utils import _assert
from timm.models import build_model_with_cfg, generate_default_cfgs
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moh_vision.attention import (
    BudgetSpec,
    HeadBudget,
    RoutingStats,
    default_budget,
    init_routers,
    run_block,
)
from moh_vision.models.foveal_attention import (
    AggregatedAttention,
    CosineAttention,
    Positions,
    position_tables,
)
from moh_vision.models.head_budgets import RecordedArguments, new_budgets, take_shared_heads
from moh_vision.models.timm_factory import image_cfg, register_variants
from moh_vision.models.weight_files import rename_routers

STAGES = 4


class ConvGLU(nn.Module):
    """MLP gated through a 3 x 3 convolution (Shi 2024, section 3.4): [B, H, W, C] -> [B, H, W, C].

    Args:
        dim: C.
        hidden: channels between the two linear layers.
        drop: dropout after the gate and after the last layer.
    """

    def __init__(self, dim: int, hidden: int, drop: float = 0.0, device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.fc1 = nn.Linear(dim, 2 * hidden, **dd)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, **dd)
        self.fc2 = nn.Linear(hidden, dim, **dd)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        x, value = self.fc1(x).chunk(2, dim=-1)  # [B, H, W, hidden]
        x = self.dwconv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.drop(self.fc2(self.drop(F.gelu(x) * value)))


class TransNeXtBlock(nn.Module):
    """Pre-norm block: attention, then ConvGLU.

    Args:
        attn: a `CosineAttention` or `AggregatedAttention`.
        dim: C, width of the tokens.
        mlp_ratio: hidden width of a plain MLP, as a multiple of C; ConvGLU has two thirds of that width, because its
            gate adds parameters.
        proj_drop: dropout of ConvGLU.
        drop_path: rate at which a residual branch is left out.
    """

    def __init__(
        self,
        attn: nn.Module,
        dim: int,
        mlp_ratio: float,
        proj_drop: float,
        drop_path: float,
        device=None,
        dtype=None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, **dd)
        self.attn = attn
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, **dd)
        self.mlp = ConvGLU(dim, int(2 * int(dim * mlp_ratio) / 3), proj_drop, **dd)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(
        self, x: Tensor, positions: Positions, stats: list[RoutingStats] | None = None
    ) -> Tensor:
        """x [B, H, W, C] -> [B, H, W, C]; appends the layer's statistics to `stats`."""
        y, layer_stats = self.attn(self.norm1(x), positions)
        if stats is not None:
            stats.append(layer_stats)
        x = x + self.drop_path1(y)
        x = x + self.drop_path2(self.mlp(self.norm2(x)))
        return x


class Downsample(nn.Module):
    """Overlapping strided convolution, then norm: [B, C', H', W'] -> [B, H, W, C]."""

    def __init__(self, in_chans: int, dim: int, kernel: int, stride: int, device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.proj = nn.Conv2d(in_chans, dim, kernel, stride, padding=kernel // 2, **dd)
        self.norm = nn.LayerNorm(dim, **dd)  # eps 1e-5, unlike the blocks' norms

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class TransNeXtStage(nn.Module):
    """Downsampling, blocks of one size, norm: [B, C', H', W'] -> [B, C, H, W].

    Args:
        downsample: the layer before the blocks.
        blocks: blocks of width C.
        dim: C, width of the tokens.
        size: (H, W) of the maps that position tables are built for.
        pretrain: (H, W) of this stage's maps in pretraining.
        pool: pooling factor of each side; 1: the blocks attend to all tokens.
        dynamic: accept maps of other sizes, and build their tables in each forward.
    """

    def __init__(  # noqa: PLR0913
        self,
        downsample: Downsample,
        blocks: list[TransNeXtBlock],
        dim: int,
        size: tuple[int, int],
        pretrain: tuple[int, int],
        pool: int,
        dynamic: bool,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(dim, eps=1e-6, device=device, dtype=dtype)
        self.pretrain = pretrain
        self.pool = pool
        self.dynamic = dynamic
        self.grad_checkpointing = False
        self.set_size(size, device)

    def init_non_persistent_buffers(self) -> None:
        """Build the tables again, on the weights' device, for timm's `reinit_non_persistent_buffers`."""
        self.set_size(self.size, self.norm.weight.device)

    def set_size(self, size: tuple[int, int], device=None) -> None:
        """Build the tables for maps of size (H, W)."""
        self.size = size
        # Not persistent: tables follow from the sizes, and official checkpoints have none.
        for name, table in self.tables(size[0], size[1], device)._asdict().items():
            self.register_buffer(name, table, persistent=False)

    def tables(self, H: int, W: int, device: torch.device | None) -> Positions:
        """Return the tables for maps of size (H, W), on torch's default device if `device` is None."""
        device = device or torch.get_default_device()
        pooled = (max(H // self.pool, 1), max(W // self.pool, 1))
        arrays = position_tables((H, W), pooled, self.pretrain, self.pool > 1)
        return Positions(*(torch.as_tensor(array).to(device) for array in arrays))

    def positions(self, x: Tensor) -> Positions:
        """Return the positions of a map x [B, H, W, C]."""
        H = x.shape[1]
        W = x.shape[2]
        if self.dynamic:
            if H != self.size[0] or W != self.size[1]:
                return self.tables(H, W, x.device)
        else:
            advice = "does not match img_size; see set_input_size, dynamic_img_size"
            _assert(H == self.size[0], f"input height {advice}")
            _assert(W == self.size[1], f"input width {advice}")
        return Positions(self.length, self.outside, self.coordinates, self.index)

    def forward(self, x: Tensor, stats: list[RoutingStats] | None = None) -> Tensor:
        x = self.downsample(x)  # [B, H, W, C]
        positions = self.positions(x)
        checkpoint_fn = None
        if self.grad_checkpointing:
            checkpoint_fn = partial(checkpoint, use_reentrant=False)
        for block in self.blocks:
            x = run_block(block, x, positions, stats=stats, checkpoint=checkpoint_fn)
        return self.norm(x).permute(0, 3, 1, 2)


# Patterns in official names -> ours.
RENAMED = (
    (r"^module\.", ""),  # DataParallel
    (r"^patch_embed(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.downsample."),
    (r"^block(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.blocks."),
    (r"^norm(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.norm."),
    (r"\.dwconv\.dwconv\.", ".dwconv."),
)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Translate official TransNeXt and MoH-ViT names; ours pass through.

    Official aggregated attention has separate projections q and kv, here joined into qkv.
    """
    result = {}
    for name, tensor in rename_routers(state_dict.get("model", state_dict)).items():
        for pattern, replacement in RENAMED:
            name = re.sub(pattern, replacement, name)
        result[name] = tensor
    for name in [n for n in result if ".attn.q." in n]:
        kv = name.replace(".attn.q.", ".attn.kv.")
        if kv in result:
            qkv = torch.cat([result.pop(name), result.pop(kv)])
            result[name.replace(".attn.q.", ".attn.qkv.")] = qkv
    return result


class TransNeXt(nn.Module):
    """A pyramid of cosine attention with local windows, optionally with routed heads.

    Args:
        img_size: height and width of the images, a number or a pair; sizes the position tables.
        pretrain_size: image size that the weights were trained at, the unit of relative positions.
        in_chans: channels of the images.
        num_classes: outputs of the classifier; 0: none.
        global_pool: "avg" or "" (no pooling).
        embed_dims, num_heads, depths, mlp_ratios: per stage; heads are embed_dim / num_heads wide.
        pools: per stage, the pooling factor of each side of the map that keys are made of; 1: no pooling and
            no window.
        head_budget: see `moh_vision.attention.resolve_budget`; or a list of one (shared, routed) pair per
            stage. None: all heads.
        head_budget_shape: see `moh_vision.models.vit.MoHVisionTransformer`.
        router: name in `moh_vision.attention.ROUTERS`.
        scope: "token" or "sample".
        executor: see `CosineAttention`.
        router_kwargs: options of the router.
        qkv_bias: whether the projections of queries, keys and values have a bias.
        dynamic_img_size: take images of any size.
        drop_rate, proj_drop_rate, attn_drop_rate, drop_path_rate: dropout before the classifier, after
            projections, of attention, and of residual branches (rising with depth).
    """

    _model_args = RecordedArguments()
    checkpoint_filter = staticmethod(checkpoint_filter_fn)  # used by `load_checkpoint`

    def __init__(  # noqa: PLR0913
        self,
        img_size: int | tuple[int, int] = 224,
        pretrain_size: int = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dims: Sequence[int] = (48, 96, 192, 384),
        num_heads: Sequence[int] = (2, 4, 8, 16),
        depths: Sequence[int] = (2, 2, 15, 2),
        mlp_ratios: Sequence[float] = (8, 8, 4, 4),
        pools: Sequence[int] = (8, 4, 2, 1),
        head_budget=None,
        head_budget_shape: str | None = None,
        router: str = "dense",
        scope: str = "token",
        executor: str = "auto",
        router_kwargs: dict | None = None,
        qkv_bias: bool = True,
        dynamic_img_size: bool = False,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        check_stages(
            embed_dims=embed_dims,
            num_heads=num_heads,
            depths=depths,
            mlp_ratios=mlp_ratios,
            pools=pools,
        )
        check_pool(global_pool)
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = global_pool
        self.grad_checkpointing = False
        widths = [dim // heads for dim, heads in zip(embed_dims, num_heads)]
        budgets = new_budgets(
            self,
            layer_spec(head_budget, num_heads, depths),
            head_budget_shape,
            router,
            by_layer(num_heads, depths),
            by_layer(widths, depths),
        )
        remaining = iter(budgets)
        attn_kwargs = dict(
            router=router,
            scope=scope,
            executor=executor,
            router_kwargs=router_kwargs,
            qkv_bias=qkv_bias,
            attn_drop=attn_drop_rate,
            proj_drop=proj_drop_rate,
            fused_attn=use_fused_attn(),
        )
        sizes = stage_sizes(img_size)
        pretrain_sizes = stage_sizes(pretrain_size)
        drop_paths = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)

        self.feature_info = []
        stages = []
        for i, dim in enumerate(embed_dims):
            if i == 0:
                downsample = Downsample(in_chans, dim, 7, 4, **dd)
            else:
                downsample = Downsample(embed_dims[i - 1], dim, 3, 2, **dd)
            blocks = []
            for j in range(depths[i]):
                budget = next(remaining)
                attn = make_attention(dim, budget, pools[i], **attn_kwargs, **dd)
                blocks.append(
                    TransNeXtBlock(attn, dim, mlp_ratios[i], proj_drop_rate, drop_paths[i][j], **dd)
                )
            stages.append(
                TransNeXtStage(
                    downsample,
                    blocks,
                    dim,
                    sizes[i],
                    pretrain_sizes[i],
                    pools[i],
                    dynamic_img_size,
                    **dd,
                )
            )
            self.feature_info.append(dict(num_chs=dim, reduction=4 * 2**i, module=f"stages.{i}"))
        self.stages = nn.Sequential(*stages)
        self.num_features = self.head_hidden_size = embed_dims[-1]
        self.head_drop = nn.Dropout(drop_rate)
        self.head = classifier(self.num_features, num_classes, **dd)
        self.init_weights(needs_reset=False)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialise linear layers with a truncated normal of std 0.02, and convolutions by fan-out.

        needs_reset: also reset norms and position tables, which are right already in a new model.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Conv2d):
                area = module.kernel_size[0] * module.kernel_size[1]
                fan_out = area * module.out_channels // module.groups
                nn.init.normal_(module.weight, std=(2 / fan_out) ** 0.5)
            elif needs_reset and hasattr(module, "reset_parameters"):
                module.reset_parameters()
            elif needs_reset and isinstance(module, TransNeXtStage):
                module.init_non_persistent_buffers()
            if isinstance(module, CosineAttention):
                module.init_scales()
            if isinstance(module, AggregatedAttention):
                module.init_local()
            if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
                nn.init.zeros_(module.bias)
        init_routers(self)

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """Load as torch does; official checkpoints fit too."""
        return super().load_state_dict(checkpoint_filter_fn(state_dict, self), strict, assign)

    def no_weight_decay(self) -> set:
        """Return names of parameters that scale attention or encode positions, as published; routers are decayed."""
        spared = ("query_embedding", "relative_pos_bias_local", "cpb_", "temperature")
        return {name for name, _ in self.named_parameters() if any(word in name for word in spared)}

    def group_matcher(self, coarse: bool = False) -> dict:
        """Return patterns that group parameters by layer, for layer-wise learning rates."""
        if coarse:
            return dict(stem=r"^stages\.0\.downsample", blocks=r"^stages\.(\d+)")
        blocks = [
            (r"^stages\.(\d+)\.downsample", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^stages\.(\d+)\.norm", (999,)),
        ]
        return dict(stem=r"^stages\.0\.downsample", blocks=blocks)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in backward instead of keeping their activations."""
        self.grad_checkpointing = enable
        for stage in self.stages:
            stage.grad_checkpointing = enable

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Build all tables for another image size; the weights stay."""
        for stage, size in zip(self.stages, stage_sizes(img_size)):
            stage.set_size(size, stage.length.device)
        update_model_input_size(self, to_2tuple(img_size))

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Make a new classifier; `global_pool` None keeps the pooling."""
        if global_pool is not None:
            check_pool(global_pool)
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head = classifier(self.num_features, num_classes, **get_device_dtype(self))
        self.head.train(self.training)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the final features and the outputs of some stages, each [B, C, H, W].

        Args:
            x: images [B, in_chans, height, width].
            indices: n for the last n stages, a list of stages, or None: all.
            norm: changes nothing, because every stage ends in a norm.
            stop_early: skip the stages after the last index.
            output_fmt: only "NCHW".
            intermediates_only: return only the list of stages' outputs.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt {output_fmt!r} is not supported: only 'NCHW'")
        take, last = feature_take_indices(len(self.stages), indices)
        intermediates = []
        stages = self.stages
        if stop_early:
            stages = stages[: last + 1]
        for i, stage in enumerate(stages):
            x = stage(x)
            if i in take:
                intermediates.append(x)
        if intermediates_only:
            return intermediates
        return x, intermediates

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages after the last index, and the classifier (`prune_head`); return the stages' indices."""
        take, last = feature_take_indices(len(self.stages), indices)
        cut = last < len(self.stages) - 1
        self.stages = self.stages[: last + 1]
        if cut:
            self.num_features = self.head_hidden_size = self.feature_info[last]["num_chs"]
        if prune_head or cut:
            self.reset_classifier(0, "")
        return take

    def forward_features(self, x: Tensor) -> Tensor:
        """Images [B, in_chans, height, width] -> [B, num_features, height / 32, width / 32]."""
        return self.stages(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.global_pool:
            x = x.mean((2, 3))
        x = self.head_drop(x)
        if pre_logits:
            return x
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_routed(
        self, x: Tensor, tokens: list[Tensor] | None = None
    ) -> tuple[Tensor, list[RoutingStats]]:
        """Images [B, in_chans, height, width] -> logits [B, num_classes] and statistics of every layer.

        tokens: a list to which the last stage's tokens [B, N, C] are appended, or None.
        """
        stats: list[RoutingStats] = []
        for stage in self.stages:
            x = stage(x, stats)
        if tokens is not None:
            tokens.append(x.flatten(2).transpose(1, 2))
        return self.forward_head(x), stats


def make_attention(dim: int, budget: HeadBudget, pool: int, **kwargs) -> CosineAttention:
    """Make a block's attention: over a window and pooled keys if `pool` is above 1, else over all tokens."""
    if pool > 1:
        return AggregatedAttention(dim, budget, pool, **kwargs)
    return CosineAttention(dim, budget, **kwargs)


def classifier(width: int, num_classes: int, device=None, dtype=None) -> nn.Module:
    """Make the last layer; without classes it returns its input."""
    if num_classes < 1:
        return nn.Identity()
    return nn.Linear(width, num_classes, device=device, dtype=dtype)


def check_stages(**per_stage: Sequence) -> None:
    """Refuse arguments of `TransNeXt` that do not have one entry per stage, or heads that do not fit the width."""
    for name, values in per_stage.items():
        if len(values) != STAGES:
            raise ValueError(f"{name} {tuple(values)} must have {STAGES} entries, one per stage")
    heads_of_stages = zip(per_stage["embed_dims"], per_stage["num_heads"])
    for stage, (dim, heads) in enumerate(heads_of_stages):
        if dim % heads:
            raise ValueError(
                f"stage {stage}: embed_dim {dim} is not a multiple of num_heads {heads}"
            )


def check_pool(global_pool: str) -> None:
    """Refuse a pooling that `TransNeXt` does not have."""
    if global_pool not in ("avg", ""):
        raise ValueError(f"global_pool {global_pool!r} is not one of 'avg', ''")


def stage_sizes(img_size: int | tuple[int, int]) -> list[tuple[int, int]]:
    """Return (H, W) of the four stages' maps: the convolutions round up."""
    H, W = to_2tuple(img_size)
    if H < 1 or W < 1:
        raise ValueError(f"img_size {img_size} must be at least 1")
    return [(-(-H // r), -(-W // r)) for r in (4, 8, 16, 32)]


def by_layer(values: Sequence, depths: Sequence[int]) -> list:
    """Repeat the value of each stage for each of its layers."""
    return [value for value, depth in zip(values, depths) for _ in range(depth)]


def layer_spec(spec: BudgetSpec | None, heads: Sequence[int], depths: Sequence[int]) -> BudgetSpec:
    """Return a head_budget as `resolve_budget` takes it.

    Args:
        spec: what `resolve_budget` takes; or a list of one (shared, routed) pair per stage; None: with any router,
            all heads run and count as shared.
        heads: number of heads of every stage.
        depths: number of layers of every stage.
    """
    if spec is None:
        spec = [(count, 0) for count in heads]
    if isinstance(spec, (list, tuple)) and len(spec) == STAGES:
        return by_layer(spec, depths)
    return spec


def pretrained_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Translate weights that timm loads with `checkpoint_filter_fn`; the model takes their shared heads."""
    state_dict = checkpoint_filter_fn(state_dict, model)
    take_shared_heads(model, state_dict)
    return state_dict


_cfg = partial(
    image_cfg,
    pool_size=(7, 7),
    crop_pct=0.875,
    mean=IMAGENET_DEFAULT_MEAN,
    std=IMAGENET_DEFAULT_STD,
    first_conv="stages.0.downsample.proj",
)
MICRO = dict(embed_dims=(48, 96, 192, 384), num_heads=(2, 4, 8, 16), depths=(2, 2, 15, 2))
TINY = dict(embed_dims=(72, 144, 288, 576), num_heads=(3, 6, 12, 24), depths=(2, 2, 15, 2))
SMALL = dict(embed_dims=(72, 144, 288, 576), num_heads=(3, 6, 12, 24), depths=(5, 5, 22, 5))
BASE = dict(embed_dims=(96, 192, 384, 768), num_heads=(4, 8, 16, 32), depths=(5, 5, 23, 5))


VARIANTS = {
    "transnext_micro": ("12.8 M parameters, 82.5 % top-1 on ImageNet (Shi 2024).", MICRO),
    "transnext_tiny": ("28.3 M parameters, 84.0 % top-1 on ImageNet (Shi 2024).", TINY),
    "transnext_small": ("49.7 M parameters, 84.7 % top-1 on ImageNet (Shi 2024).", SMALL),
    "transnext_base": ("89.7 M parameters, 84.8 % top-1 on ImageNet (Shi 2024).", BASE),
    "moh_transnext_small_80": (
        "MoH-ViT-S, 80 % of the heads active: 84.7 % top-1 on ImageNet (Jin 2024, table 1).",
        dict(SMALL, router="moh", head_budget=[[3, 0], [6, 0], [3, 6], [8, 12]]),
    ),
    "moh_transnext_small_75": (
        "MoH-ViT-S, 75 % of the heads active: 84.6 % top-1 on ImageNet (Jin 2024, table 1).",
        dict(SMALL, router="moh", head_budget=[[3, 0], [6, 0], [3, 6], [4, 12]]),
    ),
    "moh_transnext_base_75": (
        "MoH-ViT-B, 75 % of the heads active: 84.9 % top-1 on ImageNet (Jin 2024, table 1).",
        dict(BASE, router="moh", head_budget=[[4, 0], [8, 0], [4, 8], [5, 16]]),
    ),
    "moh_transnext_base_50": (
        "MoH-ViT-B, 50 % of the heads active: 84.7 % top-1 on ImageNet (Jin 2024, table 1).",
        dict(BASE, router="moh", head_budget=[[2, 2], [2, 4], [2, 6], [4, 8]]),
    ),
}


def _published(name: str) -> dict:
    """Return the timm configuration of a variant, with the file of its published weights."""
    if name.startswith("moh_"):
        # Names from the published instructions, never checked against the hub.
        *_, size, share = name.split("_")
        repository = f"Chat-UniVi/MoH-ViT-{size[0].upper()}-{share}"
        file = f"{name}.pth"
    else:
        repository = f"DaiShiResearch/{name.replace('_', '-')}-224-1k"
        file = f"{name}_224_1k.pth"
    return _cfg(hf_hub_id=repository, hf_hub_filename=file)


default_cfgs = generate_default_cfgs({f"{name}.in1k": _published(name) for name in VARIANTS})


def _create(variant: str, pretrained: bool, args: dict, **kwargs) -> TransNeXt:
    """Build a variant; `args` are the variant's arguments, `kwargs` the caller's."""
    # A router that runs all heads takes no head_budget.
    if default_budget(kwargs.get("router")) is None:
        args = {name: value for name, value in args.items() if name != "head_budget"}
    out_indices = kwargs.pop("out_indices", tuple(range(STAGES)))
    return build_model_with_cfg(
        TransNeXt,
        variant,
        pretrained,
        pretrained_filter_fn=pretrained_filter_fn,
        feature_cfg=dict(out_indices=out_indices, flatten_sequential=True),
        **dict(args, **kwargs),
    )


register_variants(__name__, _create, VARIANTS)
