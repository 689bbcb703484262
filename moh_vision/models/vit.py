"""MoH-ViT: timm's VisionTransformer whose blocks hold a `HeadMixtureAttention`.

`moh_vit_*` is a plain ViT, which Jin 2024 does not report. The paper's MoH-ViT-S and -B are TransNeXts.
"""

import dataclasses
from functools import partial

from timm.layers import to_2tuple, use_fused_attn
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    get_pretrained_cfg,
    is_model,
    model_entrypoint,
)
from timm.models._input import update_model_args
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as timm_filter
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moh_vision.attention import (
    HeadMixtureAttention,
    RoutingStats,
    default_budget,
    init_routers,
    run_block,
)
from moh_vision.attention.budget import shaped
from moh_vision.models.convert import apply, route_heads
from moh_vision.models.fitting import has_routers, zero_missing_routers
from moh_vision.models.head_budgets import (
    RecordedArguments,
    new_budgets,
    run_all_heads,
    take_shared_heads,
)
from moh_vision.models.mlp_groups import (
    DEFAULT_GROUPS,
    check_plain,
    mlp_options,
    new_mlp_budgets,
    routed_mlp,
    run_mlp,
)
from moh_vision.models.timm_factory import image_cfg, register_variants

# Arguments of timm's block that are passed on to `HeadMixtureAttention`.
ATTENTION_ARGUMENTS = (
    "qkv_bias",
    "qk_norm",
    "proj_bias",
    "attn_drop",
    "proj_drop",
    "norm_layer",
    "device",
    "dtype",
)


class MoHBlock(Block):
    """timm's pre-norm block around `HeadMixtureAttention`.

    Args:
        dim: C, width of the tokens.
        num_heads: passed by timm; the attention takes its heads from the budget instead.
        budgets: the budget of every layer.
        attn_kwargs: arguments of `HeadMixtureAttention`.
        mlp_budgets: the budget of every layer's MLP groups; None: every MLP is dense.
        mlp_kwargs: arguments of `GroupMixtureMlp`.
        depth: index of the layer.
        scale_attn_norm: refused.
        attn_layer: not used.
        **kwargs: other arguments of timm's block.
    """

    def __init__(  # noqa: PLR0913
        self,
        dim,
        num_heads,
        budgets,
        attn_kwargs,
        mlp_budgets=None,
        mlp_kwargs=None,
        depth=0,
        scale_attn_norm=False,
        attn_layer=None,
        **kwargs,
    ):
        if scale_attn_norm:
            raise ValueError(
                "scale_attn_norm is not supported: a norm over all heads would mix the routed ones"
            )
        # timm's block builds an Identity as its attention, which is replaced below.
        super().__init__(dim, num_heads, attn_layer=nn.Identity, depth=depth, **kwargs)
        passed = {name: kwargs[name] for name in ATTENTION_ARGUMENTS if name in kwargs}
        self.attn = HeadMixtureAttention(dim, budgets[depth], **attn_kwargs, **passed)
        if mlp_budgets is not None:
            check_plain(self.mlp, f"blocks.{depth}.mlp")
            self.mlp = routed_mlp(self.mlp, mlp_budgets[depth], **(mlp_kwargs or {}))

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        stats: list[RoutingStats] | None = None,
    ) -> Tensor:
        """x [B, N, C] -> [B, N, C]; appends statistics of attention, then of a routed MLP, to `stats`."""
        y = self.norm1(x)  # [B, N, C]
        y, layer_stats = self.attn(y, attn_mask=attn_mask, is_causal=is_causal)
        if stats is not None:
            stats.append(layer_stats)
        x = x + self.drop_path1(self.ls1(y))
        y = run_mlp(self.mlp, self.norm2(x), stats)
        x = x + self.drop_path2(self.ls2(y))
        return x


class RoutedViT:
    """Base class of our versions of timm's ViTs: how they load weights and run their blocks."""

    _model_args = RecordedArguments()

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """Load as torch does; if `strict`, add the routers that a plain ViT lacks (see `zero_missing_routers`)."""
        if strict:
            state_dict = zero_missing_routers(state_dict, self)
        return super().load_state_dict(state_dict, strict, assign)

    def run_blocks(
        self, x: Tensor, *block_args, tokens: list[Tensor] | None = None
    ) -> tuple[Tensor, list[RoutingStats]]:
        """Run blocks and classifier: tokens [B, N, C] -> logits [B, num_classes] and statistics of every layer.

        Args:
            block_args: further arguments of every block.
            tokens: see `MoHVisionTransformer.forward_routed`.
        """
        stats: list[RoutingStats] = []
        checkpoint_fn = None
        if self.grad_checkpointing:
            checkpoint_fn = partial(checkpoint, use_reentrant=False)
        for block in self.blocks:
            x = run_block(block, x, *block_args, stats=stats, checkpoint=checkpoint_fn)
        x = self.norm(x)
        if tokens is not None:
            tokens.append(x[:, self.num_prefix_tokens :])
        return self.forward_head(x), stats


class MoHVisionTransformer(RoutedViT, VisionTransformer):
    """A ViT with a budget of attention heads per layer.

    Args:
        head_budget: see `moh_vision.attention.resolve_budget`; None: 0.75 if the router can leave heads out,
            else all heads (`default_budget`).
        head_budget_shape: "ramp" or "uniform": how a head_budget that is a number, now or later, is spread over the
            layers. None: as head_budget says, else a ramp. The shape is saved beside the (shared, routed) pairs,
            from which it cannot be told.
        router: name in `moh_vision.attention.ROUTERS`.
        scope: "token" or "sample".
        executor: name in `moh_vision.attention.EXECUTORS`.
        router_kwargs: options of the router, such as dict(gate_scale="paper").
        kv_heads: key-value heads, a divisor of num_heads; 1: one for all heads (Zhang 2022); None: one per head.
        mlp_budget: share of the MLP's groups that run, in any form of head_budget; None: every MLP is dense. It needs
            scope "sample": groups are chosen by an image's mean token, as heads are.
        mlp_budget_shape: as head_budget_shape.
        mlp_groups: groups of each MLP, a divisor of its hidden width.
        pos_embed_std: initial std of the position table. With timm's 0.02 a model learns slowly from patches of a
            few pixels (8 x 8 digits, 400 steps: 86 % accuracy instead of 97 %).
        **kwargs: other arguments of timm's VisionTransformer, except block_fn, attn_layer and scale_attn_norm.
    """

    checkpoint_filter = staticmethod(timm_filter)  # used by `load_checkpoint`

    def __init__(  # noqa: PLR0913
        self,
        img_size=224,
        patch_size=16,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        head_budget=None,
        head_budget_shape: str | None = None,
        router: str = "moh",
        scope: str = "token",
        executor: str = "auto",
        router_kwargs: dict | None = None,
        kv_heads: int | None = None,
        mlp_budget=None,
        mlp_budget_shape: str | None = None,
        mlp_groups: int = DEFAULT_GROUPS,
        pos_embed_std: float = 0.02,
        dynamic_img_pad: bool = False,
        **kwargs,
    ):
        for name in ("block_fn", "attn_layer"):
            if name in kwargs:
                raise ValueError(f"{name} is not supported: the blocks are what makes this model")
        for name, size in (("embed_dim", embed_dim), ("depth", depth), ("num_heads", num_heads)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} {size!r} must be a whole number of at least 1")
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        if not dynamic_img_pad:
            check_image_size(img_size, patch_size)
        budgets = new_budgets(
            self,
            head_budget,
            head_budget_shape,
            router,
            [num_heads] * depth,
            [embed_dim // num_heads] * depth,
        )
        mlp_budgets = new_mlp_budgets(
            self,
            mlp_budget,
            mlp_budget_shape,
            mlp_groups,
            [int(embed_dim * kwargs.get("mlp_ratio", 4.0))] * depth,
            scope,
        )
        self.pos_embed_std = pos_embed_std
        attn_kwargs = dict(
            router=router,
            scope=scope,
            executor=executor,
            router_kwargs=router_kwargs,
            kv_heads=kv_heads,
            fused_attn=use_fused_attn(),
        )
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            dynamic_img_pad=dynamic_img_pad,
            block_fn=partial(
                MoHBlock,
                budgets=budgets,
                attn_kwargs=attn_kwargs,
                mlp_budgets=mlp_budgets,
                mlp_kwargs=mlp_options(executor, router, router_kwargs),
            ),
            **kwargs,
        )

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialise as timm does, then the routers, and the position table with `pos_embed_std`."""
        super().init_weights(mode, needs_reset)
        init_routers(self)
        if self.pos_embed is not None and self.pos_embed_std != 0.02:
            nn.init.trunc_normal_(self.pos_embed, std=self.pos_embed_std)

    def forward_routed(
        self, x: Tensor, tokens: list[Tensor] | None = None
    ) -> tuple[Tensor, list[RoutingStats]]:
        """Images [B, in_chans, height, width] -> logits [B, num_classes] and statistics of every layer.

        tokens: a list to which the patches' tokens [B, N, C] after the final norm are appended, or None.
        """
        x = self._pos_embed(self.patch_embed(x))  # [B, N, C]
        return self.run_blocks(self.norm_pre(self.patch_drop(x)), tokens=tokens)


def check_image_size(img_size, patch_size) -> None:
    """Raise ValueError unless `img_size` (a number or a pair) is cut into whole patches."""
    sizes = to_2tuple(img_size)
    patches = to_2tuple(patch_size)
    if any(p < 1 for p in patches):
        raise ValueError(f"patch_size {patch_size} must be at least 1")
    if any(s < p or s % p for s, p in zip(sizes, patches)):
        raise ValueError(f"img_size {img_size} is not a multiple of patch_size {patch_size}")


def checkpoint_filter_fn(
    state_dict: dict[str, Tensor], model: nn.Module, keep_budget: bool = True
) -> dict[str, Tensor]:
    """Translate a published ViT's weights with timm's filter, then `zero_missing_routers`.

    From weights with routers the model takes the number of shared heads. Weights without routers were trained
    with all heads: the model then runs all heads, unless keep_budget.
    """
    state_dict = model.checkpoint_filter(state_dict, model)
    take_shared_heads(model, state_dict)
    if not keep_budget and not has_routers(state_dict):
        run_all_heads(model)
    return zero_missing_routers(state_dict, model)


# Preprocessing and weights of timm's ViTs: the paper trained no plain ViTs.
_cfg = partial(
    image_cfg,
    pool_size=None,
    crop_pct=0.9,
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    first_conv="patch_embed.proj",
)
RECIPES = dict(tiny="augreg", small="augreg", base="augreg2", large="augreg")
TIMM_NAMES = [f"vit_{size}_patch16_224.{recipe}_in21k_ft_in1k" for size, recipe in RECIPES.items()]
default_cfgs = generate_default_cfgs(
    # timm saves a ViT that `moh_vision.convert` has converted as "moh_vit".
    {
        **{f"moh_{name}": _cfg(hf_hub_id=f"timm/{name}") for name in TIMM_NAMES},
        "moh_vit.untrained": _cfg(),
    }
)


class MoHVisionTransformerDistilled(MoHVisionTransformer, VisionTransformerDistilled):
    """timm's distilled DeiT, made by `moh_vision.convert`: a second class token with its own classifier."""


def convert_vit(model: nn.Module, *options) -> nn.Module:
    """Convert timm's VisionTransformer or distilled DeiT, or our dense ViT; see `moh_vision.convert`."""
    model_classes = {
        VisionTransformer: MoHVisionTransformer,
        VisionTransformerDistilled: MoHVisionTransformerDistilled,
    }
    model_class = model_classes.get(type(model))  # None: the class is ours already
    route_heads(model, *options)
    if model_class is not None:
        become(model, model_class, MoHBlock)
        model.pos_embed_std = 0.02
    return model


def become(model: nn.Module, model_class: type, block_class: type) -> nn.Module:
    """Make a converted timm model and its blocks objects of our classes, in place.

    In what timm saves with the model, its name becomes "moh_vit", and its timm name the argument `base`.
    """
    # Setting __class__ keeps the objects and their hooks.
    model.__class__ = model_class
    for block in model.blocks:
        block.__class__ = block_class
    cfg = getattr(model, "pretrained_cfg", None)
    if cfg:  # the model is from timm's factory, and can be built again by its saved name
        update_model_args(model, base=cfg["architecture"])
        model.pretrained_cfg = model.default_cfg = dict(cfg, architecture="moh_vit")
    return model


def _converted(  # noqa: PLR0913
    base: str,
    head_budget=None,
    head_budget_shape=None,
    router="moh",
    scope="token",
    executor="auto",
    router_kwargs=None,
    mlp_budget=None,
    mlp_budget_shape=None,
    mlp_groups=DEFAULT_GROUPS,
    **kwargs,
):
    """Build timm's ViT `base` and convert it.

    Args:
        base: name in timm's registry.
        head_budget, router, scope, executor, router_kwargs: see `convert`, but a head_budget of None stands
            for `default_budget`.
        head_budget_shape, mlp_budget, mlp_budget_shape, mlp_groups: see `MoHVisionTransformer`.
        **kwargs: arguments of `base`.
    """
    if head_budget is None:
        head_budget = default_budget(router)
    model = model_entrypoint(base)(**kwargs)
    head_budget = shaped(head_budget, head_budget_shape)
    calibrate = None
    group = False
    of_heads = (head_budget, router, scope, executor, router_kwargs, calibrate, group)
    model = apply(model, of_heads, shaped(mlp_budget, mlp_budget_shape), mlp_groups)
    if head_budget_shape is not None:
        model.head_budget_shape = head_budget_shape
    if mlp_budget_shape is not None:
        model.mlp_budget_shape = mlp_budget_shape
    return model


def _create(variant: str, pretrained: bool, args: dict, **kwargs) -> MoHVisionTransformer:
    """A ViT of any shape; without arguments ViT-B/16.

    Args:
        pretrained: load the configuration's weights, or those of `base`.
        base: name of a ViT in timm's registry, such as "vit_small_patch14_reg4_dinov2". The model takes the
            settings of that ViT: patch size, width, registers, pooling, norms. `convert` records `base`.
    """
    model_cls = MoHVisionTransformer
    base = None
    if variant == "moh_vit":
        base = kwargs.pop("base", None)
    if base is not None:
        if not is_model(base):
            raise ValueError(f"base {base!r} is not a model in timm's registry")
        base_cfg = dataclasses.replace(get_pretrained_cfg(base), architecture="moh_vit")
        kwargs["pretrained_cfg"] = kwargs.get("pretrained_cfg") or base_cfg
        model_cls = partial(_converted, base.split(".")[0])
    # Dense weights must not replace a budget that the caller gave, or that the router cannot change.
    runs_all_heads = default_budget(kwargs.get("router")) is None
    keep_budget = kwargs.get("head_budget") is not None or runs_all_heads
    return build_model_with_cfg(
        model_cls,
        variant,
        pretrained,
        pretrained_filter_fn=partial(checkpoint_filter_fn, keep_budget=keep_budget),
        feature_cfg=dict(out_indices=kwargs.pop("out_indices", 3), feature_cls="getter"),
        **dict(args, **kwargs),
    )


def _variant(width: int, depth: int, heads: int) -> tuple[str, dict]:
    """Return the docstring and the arguments of a ViT with patches of 16 x 16 pixels."""
    description = f"Width {width}, {depth} layers, {heads} heads."
    return description, dict(patch_size=16, embed_dim=width, depth=depth, num_heads=heads)


VARIANTS = {
    "moh_vit": (_create.__doc__, {}),
    "moh_vit_tiny_patch16_224": _variant(192, 12, 3),
    "moh_vit_small_patch16_224": _variant(384, 12, 6),
    "moh_vit_base_patch16_224": _variant(768, 12, 12),
    "moh_vit_large_patch16_224": _variant(1024, 24, 16),
}
register_variants(__name__, _create, VARIANTS)
