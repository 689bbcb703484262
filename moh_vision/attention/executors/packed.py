"""Only the heads that run, in plain PyTorch."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor, nn

from moh_vision.attention.executors.masked import masked
from moh_vision.attention.executors.samples import by_sample
from moh_vision.attention.executors.tokens import by_token
from moh_vision.attention.routing import Routing


def packed(
    layer: nn.Module,
    x: Tensor,
    routing: Routing,
    context: Optional[Tensor] = None,
    q: Optional[Tensor] = None,
    attn_mask: Optional[Tensor] = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    rotary: Optional[Tuple[Tensor, Tensor]] = None,
    cache: Any = None,
    sparse: Optional[bool] = None,
) -> Tensor:
    """See `masked` for the arguments.

    Args:
        sparse: the form of the projections where heads are chosen per token (see `tokens`); None: by dtype and share.
    """
    active = routing.active
    if active is None:
        return masked(layer, x, routing, context, q, attn_mask, is_causal, dropout_p, rotary, cache)
    if active.shape[1] == 1 and cache is None:
        count = active.sum(-1)
        if bool((count == count[0]).all()) and bool(count[0] > 0):
            return by_sample(layer, x, routing, context, q, attn_mask, is_causal, dropout_p, rotary)
    if sparse is None:
        # Measured (benchmarks/attention.py): narrow products cost little in float32 and much in 16 bits.
        short = torch.is_autocast_enabled(x.device.type) or x.dtype not in (torch.float32, torch.float64)
        sparse = layer.budget.routed <= (0.2 if short else 0.6) * layer.budget.candidates
    return by_token(layer, x, routing, context, q, attn_mask, is_causal, dropout_p, rotary, cache, sparse)
