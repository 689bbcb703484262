"""Which model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple, Union

from moh_vision.config.checks import check


@dataclass
class ModelConfig:
    """The model; what is left out keeps the registered model's own value.

    Args:
        name: model name in timm's registry.
        head_budget: share of active heads such as 0.75, "ramp:0.75" or "uniform:0.75"; also with the share of shared
            heads among them, such as "uniform:0.75:0.4"; or a list with one [shared, routed] per layer.
        router: who chooses the heads.
        scope: "token" or "sample".
        executor: how attention is computed.
        router_kwargs: options of the router, such as {gate_scale: paper}.
        embed_dim: width.
        depth: layers.
        num_heads: heads per layer.
        patch_size: side of a patch.
        kwargs: further arguments of the model.
    """

    name: str = "moh_vit_small_patch16_224"
    head_budget: Optional[Union[float, str, List[Tuple[int, int]]]] = None
    router: Optional[str] = None
    scope: Optional[str] = None
    executor: Optional[str] = None
    router_kwargs: Optional[Dict[str, Any]] = None
    embed_dim: Optional[int] = None
    depth: Optional[int] = None
    num_heads: Optional[int] = None
    patch_size: Optional[int] = None
    kwargs: Optional[Dict[str, Any]] = None

    def __post_init__(self):
        for name in ("embed_dim", "depth", "num_heads", "patch_size"):
            value = getattr(self, name)
            check(f"model.{name}", value, value is None or value >= 1, "at least 1")
        budget = self.head_budget
        if isinstance(budget, list):  # shares are the model's to refuse
            fine = len(budget) > 0 and all(number >= 0 for pair in budget for number in pair)
            check("model.head_budget", budget, fine, "one [shared, routed] per layer, each 0 or more")

    def arguments(self) -> dict:
        """Keyword arguments for timm.create_model, without what was left out."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("name", "kwargs")}
        return {**{k: v for k, v in own.items() if v is not None}, **(self.kwargs or {})}
