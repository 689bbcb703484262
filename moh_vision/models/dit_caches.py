"""Which of diffusers' caches of a sampling fit a `MoHDiTTransformer2DModel`, and why the others are refused.

A cache puts hooks around blocks or layers, which return in some steps what they returned, or what follows from what they
returned, in earlier steps. diffusers looks for what it can put a hook around; where it finds nothing it says nothing.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import diffusers
from diffusers.hooks import HookRegistry
from diffusers.hooks.pyramid_attention_broadcast import (
    _PYRAMID_ATTENTION_BROADCAST_HOOK,
    PyramidAttentionBroadcastHook,
)
from torch import nn

from moh_vision.attention.routed_layer import RoutedLayer
from moh_vision.attention.routers.base import Router

FIRST_BLOCK = "FirstBlockCacheConfig"
TAYLOR = "TaylorSeerCacheConfig"
BROADCAST = "PyramidAttentionBroadcastConfig"
FITTING = (FIRST_BLOCK, TAYLOR, BROADCAST)
WHOLE_BLOCKS = r"cache_identifiers=[r'blocks\.\d+']"


def why_no_cache(model: nn.Module, config: Any) -> str | None:
    """Return why a cache would fail or give wrong images with a model; None if it works.

    Args:
        model: a `MoHDiTTransformer2DModel`.
        config: an argument of diffusers' `enable_cache`. Known by the name of its class, because older versions lack some.
    """
    name = type(config).__name__
    if name == FIRST_BLOCK:
        return why_no_first_block_cache(model)
    if name == TAYLOR:
        return why_no_taylor_cache(model, config)
    if name == BROADCAST:
        return why_no_broadcast(config)
    return (
        f"{name} does not fit {type(model).__name__}, in whose layers it finds nothing to cache or counts steps wrongly: "
        f"expected {' or '.join(FITTING)}"
    )


def why_no_first_block_cache(model: nn.Module) -> str | None:
    """Return why diffusers cannot reuse the change of the tokens between the first block and the last one."""
    blocks = len(model.blocks)
    if blocks < 2:
        return f"{FIRST_BLOCK} needs 2 blocks or more, the model has {blocks}"
    tokens = model.config.class_tokens
    start = model.config.class_tokens_start
    if tokens and start > 0:
        return (
            f"{FIRST_BLOCK} needs as many tokens in the first block as in the last: the model adds {tokens} class_tokens "
            f"before block {start}; {TAYLOR}({WHOLE_BLOCKS}) works, in sample.py --cache taylorseer:3"
        )
    return None


def why_no_taylor_cache(model: nn.Module, config: Any) -> str | None:
    """Return why diffusers cannot extrapolate the outputs of what `config` names."""
    if config.use_lite_mode:
        return (
            f"{TAYLOR} with use_lite_mode True would set all blocks to 0, because it predicts a layer proj_out, which the "
            f"model lacks: give {WHOLE_BLOCKS}"
        )
    if not config.cache_identifiers:
        return (
            f"{TAYLOR} without cache_identifiers takes attention, whose output has routing statistics beside it: "
            f"give {WHOLE_BLOCKS}"
        )
    predicted = matched(model, config.cache_identifiers)
    skipped = matched(model, config.skip_predict_identifiers or [])
    if not predicted:
        return f"cache_identifiers {config.cache_identifiers} match no module: give {WHOLE_BLOCKS}"
    for module_name, module in {**predicted, **skipped}.items():
        if isinstance(module, (RoutedLayer, Router)):
            return (
                f"{TAYLOR}: the output of {module_name} has routing beside its tokens, which cannot be predicted: "
                f"give {WHOLE_BLOCKS}"
            )
    last = f"blocks.{len(model.blocks) - 1}"
    if skipped and (last not in predicted or last in skipped):
        return (
            f"skip_predict_identifiers {config.skip_predict_identifiers} set outputs to 0: the last block, {last}, must be "
            "among the cache_identifiers alone"
        )
    return None


def why_no_broadcast(config: Any) -> str | None:
    """Return why attention would never be reused."""
    other_ranges = (
        config.temporal_attention_block_skip_range,
        config.cross_attention_block_skip_range,
    )
    if config.spatial_attention_block_skip_range is None and other_ranges != (None, None):
        return (
            f"{BROADCAST}: all attention of a DiT is spatial, and spatial_attention_block_skip_range is None: "
            "give 2 or more"
        )
    return None


def broadcast_attention(model: nn.Module, config: Any) -> None:
    """Put the hooks of Pyramid Attention Broadcast around a model's attention layers, as it asks of layers of other classes.

    Args:
        model: a `MoHDiTTransformer2DModel`, for which diffusers' `enable_cache` has checked and completed `config`.
        config: a PyramidAttentionBroadcastConfig.
    """
    for number, block in enumerate(model.blocks):
        name = f"blocks.{number}.attn"
        if not any(re.search(part, name) for part in config.spatial_attention_block_identifiers):
            continue
        hook = PyramidAttentionBroadcastHook(
            config.spatial_attention_timestep_skip_range,
            config.spatial_attention_block_skip_range,
            config.current_timestep_callback,
        )
        registry = HookRegistry.check_if_exists_or_initialize(block.attn)
        registry.register_hook(hook, _PYRAMID_ATTENTION_BROADCAST_HOOK)


def matched(model: nn.Module, patterns: list[str]) -> dict[str, nn.Module]:
    """Return the modules whose whole names match one of some patterns, as TaylorSeer looks for them."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(re.fullmatch(pattern, name) for pattern in patterns)
    }


@contextlib.contextmanager
def cached(model: nn.Module, cache: tuple[str, float] | None) -> Iterator[None]:
    """Let a model sample with a cache of diffusers inside a `with` block.

    Args:
        model: a `MoHDiTTransformer2DModel`.
        cache: ("taylorseer", steps from one pass through the blocks to the next), ("first_block", threshold), or None.

    Raises:
        ValueError: the cache does not fit the model.
    """
    if cache is None:
        yield
        return
    name, number = cache
    if name == "taylorseer":
        config = diffusers.TaylorSeerCacheConfig(
            cache_interval=number,
            cache_identifiers=[r"blocks\.\d+"],
            taylor_factors_dtype=model.dtype,  # left out, differences of steps are in bfloat16
        )
    else:
        config = diffusers.FirstBlockCacheConfig(threshold=number)
    model.enable_cache(config)
    try:
        yield
    finally:
        model.disable_cache()


def caches_blocks(model: nn.Module) -> bool:
    """Return whether a cache may stand in for blocks of a model, which then leave no routing statistics."""
    if model.is_cache_enabled:
        return True
    for block in model.blocks:
        registry = block.__dict__.get("_diffusers_hook")  # quicker than nn.Module's own lookup
        if registry is not None and any(hook._is_stateful for hook in registry.hooks.values()):
            return True
    return False
