"""timm's `Eva` (DINOv3, EVA-02, other ViTs with rotary positions) with routed heads, made by
`moh_vision.convert`."""

from timm.models.eva import Eva, EvaBlock
from timm.models.eva import checkpoint_filter_fn as timm_filter
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention import RoutingStats, init_routers
from moh_vision.models.convert import join_projections, route_heads
from moh_vision.models.mlp_groups import run_mlp
from moh_vision.models.vit import RoutedViT, become


class MoHEvaBlock(EvaBlock):
    """timm's pre-norm block around `HeadMixtureAttention`."""

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        stats: list[RoutingStats] | None = None,
    ) -> Tensor:
        """x [B, N, C] -> [B, N, C]; appends the layers' statistics to `stats`. Other arguments: as timm's."""
        rotary = None if rope is None else rotary_of_all_tokens(rope, x.shape[1])
        y = self.norm1(x)  # [B, N, C]
        y, layer_stats = self.attn(y, attn_mask=attn_mask, is_causal=is_causal, rotary=rotary)
        if stats is not None:
            stats.append(layer_stats)
        if self.gamma_1 is not None:
            y = self.gamma_1 * y
        x = x + self.drop_path1(y)
        y = run_mlp(self.mlp, self.norm2(x), stats)
        if self.gamma_2 is not None:
            y = self.gamma_2 * y
        return x + self.drop_path2(y)


class MoHEva(RoutedViT, Eva):
    """timm's Eva with a head budget per layer; queries, keys and values have one projection."""

    @staticmethod
    def checkpoint_filter(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Translate the layouts of timm and of `save_for_hf`."""
        return join_projections(timm_filter(state_dict, model))

    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialise as timm does, then the routers."""
        super().init_weights(needs_reset)
        init_routers(self)

    def forward_routed(
        self, x: Tensor, tokens: list[Tensor] | None = None
    ) -> tuple[Tensor, list[RoutingStats]]:
        """Images [B, in_chans, height, width] -> logits [B, num_classes] and statistics of every layer.

        tokens: see `MoHVisionTransformer.forward_routed`.
        """
        x, rope = self._pos_embed(self.patch_embed(x))
        return self.run_blocks(self.norm_pre(x), rope, tokens=tokens)


def rotary_of_all_tokens(rope: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each [B or 1, N, D], of N tokens; the prefix (class token, registers) gets angle 0.

    Args:
        rope: sines, then cosines of the patches, [patches, 2 * D], or after patch drop [B, 1, patches, 2 * D].
        tokens: N, prefix included.
    """
    patches = rope.shape[-2]
    width = rope.shape[-1]
    sin, cos = rope.reshape(-1, patches, width).chunk(2, -1)
    prefix = [0, 0, tokens - patches, 0]
    return F.pad(cos, prefix, value=1.0), F.pad(sin, prefix)


def convert_eva(model: nn.Module, *options) -> nn.Module:
    """Convert timm's Eva, or our dense `MoHEva`; see `moh_vision.convert`."""
    is_timms = type(model) is Eva
    route_heads(model, *options)
    if is_timms:
        become(model, MoHEva, MoHEvaBlock)
    return model
