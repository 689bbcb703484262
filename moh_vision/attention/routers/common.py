"""What routers share: logits in float32, and the statistics of a top-k choice."""

from typing import Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.routing import RoutingStats


def gate_logits(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """x W^T + b in float32 or better, also under autocast: rounding must not decide which head wins."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, weight = x.to(dtype), weight.to(dtype)
    if bias is not None:
        bias = bias.to(dtype)
    if torch.jit.is_scripting() or x.is_meta:  # neither knows autocast
        return F.linear(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, weight, bias)


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


def masked_mean(x: Tensor, padding_mask: Optional[Tensor]) -> Tensor:
    """Mean over the unpadded tokens: x [B, .., N, C], padding_mask [B, N] (True at padding) -> [B, .., 1, C]."""
    if padding_mask is None:
        return x.mean(-2, keepdim=True)
    real = (~padding_mask).unsqueeze(-1).to(x.dtype)  # [B, N, 1]
    if x.dim() == 4:
        real = real.unsqueeze(1)  # [B, 1, N, 1], for all heads
    return (x * real).sum(-2, keepdim=True) / real.sum(-2, keepdim=True).clamp_min(1)


def windowed_mean(x: Tensor, window: int, padding_mask: Optional[Tensor]) -> Tensor:
    """Mean of a token and the up to window - 1 before it, without padding: x [B, N, C] -> [B, N, C]."""
    if padding_mask is None:
        real = torch.ones((x.shape[0], x.shape[1], 1), dtype=x.dtype, device=x.device)
    else:
        real = (~padding_mask).unsqueeze(-1).to(x.dtype)
    total, count = (x * real).cumsum(1), real.cumsum(1)
    if x.shape[1] > window:
        total = torch.cat([total[:, :window], total[:, window:] - total[:, :-window]], dim=1)
        count = torch.cat([count[:, :window], count[:, window:] - count[:, :-window]], dim=1)
    return total / count.clamp_min(1)
