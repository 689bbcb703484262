"""What routers share: logits in float32, and the statistics of a top-k choice."""

from typing import Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.routing import RoutingStats


def gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in float32 or better, also under autocast: rounding must not decide which head wins."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if torch.jit.is_scripting() or x.is_meta:  # neither knows autocast
        return F.linear(x.to(dtype), weight.to(dtype))
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(dtype), weight.to(dtype))


def no_logits(x: Tensor) -> Tensor:
    """[B, N, 0], for a layer that routes nothing."""
    return torch.zeros((x.shape[0], x.shape[1], 0), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def select_top_k(scores: Tensor, k: int) -> Tuple[Tensor, Tensor]:
    """The k largest of [B, N, E]: their indices [B, N, k], largest first, and a 0/1 mask [B, N, E].

    Among equal scores the lower index wins, so that a new router (all zeros) chooses the same on every device.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    chosen = order[..., :k]
    return chosen, torch.zeros_like(scores).scatter(-1, chosen, 1.0)


def top_k_stats(
    probs: Tensor, selected: Tensor, logits: Tensor, num_shared: int, padding_mask: Optional[Tensor]
) -> RoutingStats:
    """RoutingStats of shared heads followed by candidates, without padding.

    probs, selected, logits [B, N, E]; padding_mask [B, N], True at padding.
    """
    B, N, _ = probs.shape
    if padding_mask is None:
        tokens = torch.full((B, 1), N, dtype=selected.dtype, device=probs.device)
    else:
        real = (~padding_mask).unsqueeze(-1).to(selected.dtype)  # [B, N, 1]
        probs, selected = probs * real, selected * real
        tokens = real.sum(1)  # [B, 1]
    counts = torch.cat([tokens.expand(-1, num_shared), selected.sum(1)], dim=-1)  # [B, H]
    return RoutingStats(probs, counts.detach(), logits)


def active_heads(num_shared: int, chosen: Tensor) -> Tensor:
    """Indices [B, N, K] of the heads that run: the shared ones, then `chosen` [B, N, k] among the candidates."""
    shared = torch.arange(num_shared, device=chosen.device).expand(chosen.shape[0], chosen.shape[1], -1)
    return torch.cat([shared, chosen + num_shared], dim=-1)
