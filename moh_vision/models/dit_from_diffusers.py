"""diffusers' DiT as one of ours, so that its heads can be routed. diffusers is imported when a model is built."""

import sys

import torch
from torch import nn

from moh_vision.models.dit_checkpoints import checkpoint_filter_fn


def is_diffusers_dit(model: nn.Module) -> bool:
    """Whether it is diffusers' DiTTransformer2DModel; does not import diffusers to find out."""
    module = sys.modules.get("diffusers.models.transformers.dit_transformer_2d")
    return module is not None and type(model) is module.DiTTransformer2DModel


def from_diffusers(model: nn.Module) -> nn.Module:
    """A dense `MoHDiTTransformer2DModel` with the weights and, to rounding, the outputs of diffusers' DiT.

    Raises:
        ValueError: naming the setting that ours does not have.
    """
    from moh_vision.models.dit_transformer import MoHDiTTransformer2DModel

    theirs = model.config
    for name, needed in (
        ("activation_fn", "gelu-approximate"),
        ("attention_bias", True),
        ("norm_elementwise_affine", False),
        ("norm_eps", 1e-5),
        ("dropout", 0.0),
        ("upcast_attention", False),
    ):
        if theirs[name] != needed:
            raise ValueError(f"the DiT has {name} {theirs[name]!r}; only {needed!r} can be converted")
    if model.out_channels not in (theirs.in_channels, 2 * theirs.in_channels):
        raise ValueError(
            f"the DiT has out_channels {model.out_channels}, neither in_channels {theirs.in_channels} nor twice it"
        )
    weight = model.pos_embed.proj.weight
    ours = MoHDiTTransformer2DModel(
        sample_size=theirs.sample_size,
        patch_size=theirs.patch_size,
        in_channels=theirs.in_channels,
        learn_sigma=model.out_channels == 2 * theirs.in_channels,
        num_classes=theirs.num_embeds_ada_norm,
        hidden_size=theirs.num_attention_heads * theirs.attention_head_dim,
        num_layers=theirs.num_layers,
        num_attention_heads=theirs.num_attention_heads,
        router="dense",
        compat="diffusers",
    ).to(weight.device, weight.dtype)
    with torch.no_grad():
        ours.load_state_dict(checkpoint_filter_fn(model.state_dict(), ours))
    return ours.train(model.training)
