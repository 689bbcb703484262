"""What routers share: logits in float32, and the statistics of a top-k choice."""

from typing import Optional, Tuple

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention.routing import RoutingStats

torch.fx.wrap("gate_logits")  # a leaf while tracing


class FloatLinear(torch.autograd.Function):
    """x W^T of 16-bit tokens in float32, which keeps the tokens for backward as they came and not as float32."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight):
        return F.linear(x.float(), weight.float())

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):  # backward may be called under it
            dx = grad @ weight.float()
            dweight = grad.flatten(0, -2).t() @ x.flatten(0, -2).float()
        return dx.to(x.dtype), dweight.to(weight.dtype)


def gate_logits(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """x W^T + b in float32 or better, also under autocast: rounding must not decide which head wins."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if torch.jit.is_scripting() or x.is_meta:  # neither knows autocast
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    with torch.autocast(x.device.type, enabled=False):
        if x.dtype != dtype and bias is None and not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            return FloatLinear.apply(x, weight)
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


class GateLinear(nn.Linear):
    """A router's linear layer. Its outputs are in float32 or better.

    Dynamic quantisation replaces layers of the class nn.Linear alone, so routers stay as they are.
    """

    def forward(self, x: Tensor) -> Tensor:
        return gate_logits(x, self.weight, self.bias)


def heads_first(logits: Tensor) -> Tensor:
    """[B, N, E] -> [E, B, N], in float32 or better and contiguous.

    A head's numbers lie side by side, so that what follows (a softmax over four heads, say) is vectorised over tokens:
    on a CPU several times faster than with heads last, and routing must not cost what it is there to save.
    """
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).permute(2, 0, 1).contiguous()


def no_logits(x: Tensor) -> Tensor:
    """[B, N, 0], for a layer that routes nothing."""
    return torch.zeros((x.shape[0], x.shape[1], 0), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def select_top_k(scores: Tensor, k: int) -> Tensor:
    """Which are the k largest of each token: scores [E, B, N] -> bool [E, B, N].

    Among equal scores the lower index wins, so that a new router (all zeros) chooses the same on every device.
    """
    E = scores.shape[0]
    scores = scores.detach()
    if E > 32:
        order = scores.permute(1, 2, 0).argsort(dim=-1, descending=True, stable=True)[..., :k]
        none = torch.zeros((scores.shape[1], scores.shape[2], E), dtype=torch.bool, device=scores.device)
        return none.scatter(-1, order, torch.ones_like(order, dtype=torch.bool)).permute(2, 0, 1)
    # Few candidates: count by how many each is beaten, which takes half the time of sorting short rows. A candidate is
    # beaten by a later one that is larger, and by an earlier one unless that is smaller.
    index = torch.arange(E, device=scores.device)
    later = (index > index.unsqueeze(1)).view(E, E, 1, 1)
    larger = (scores.unsqueeze(0) > scores.unsqueeze(1)) & later  # [i, j, B, N]: j comes later than i and is larger
    beaten_by = larger.sum(1) + index.view(E, 1, 1) - larger.sum(0)  # [E, B, N]
    return beaten_by < k


def top_k_stats(
    probs: Tensor, selected: Tensor, logits: Tensor, num_shared: int, padding_mask: Optional[Tensor]
) -> RoutingStats:
    """RoutingStats of shared heads followed by candidates, without padding.

    probs, logits [E, B, N]; selected the same, 0 and 1; padding_mask [B, N], True at padding.
    """
    _, B, N = probs.shape
    if padding_mask is None:
        tokens = torch.full((1, B), N, dtype=selected.dtype, device=probs.device)
    else:
        real = (~padding_mask).to(selected.dtype)  # [B, N]
        probs, selected = probs * real, selected * real
        tokens = real.sum(1).unsqueeze(0)  # [1, B]
    counts = torch.cat([tokens.expand(num_shared, B), selected.sum(-1)]).t()  # [B, H]
    return RoutingStats(heads_last(probs), counts.detach(), heads_last(logits))


def heads_last(x: Tensor) -> Tensor:
    """[E, B, N] -> [B, N, E], as everything outside the routers has it; a view."""
    return x.permute(1, 2, 0)


def active_heads(num_shared: int, selected: Tensor) -> Tensor:
    """selected [E, B, N] -> which heads run for which token [B, N, H], the shared ones for all."""
    always = torch.ones((num_shared, selected.shape[1], selected.shape[2]), dtype=torch.bool, device=selected.device)
    return heads_last(torch.cat([always, selected]))


def masked_mean(x: Tensor, padding_mask: Optional[Tensor]) -> Tensor:
    """Mean over the unpadded tokens: x [B, .., N, C], padding_mask [B, N] (True at padding) -> [B, .., 1, C]."""
    if padding_mask is None:
        return x.mean(-2, keepdim=True)
    real = (~padding_mask).unsqueeze(-1).to(x.dtype)  # [B, N, 1]
    if x.dim() == 4:
        real = real.unsqueeze(1)  # [B, 1, N, 1], for all heads
    return (x * real).sum(-2, keepdim=True) / real.sum(-2, keepdim=True).clamp_min(1)


def causal_mean(
    x: Tensor, window: int, padding_mask: Optional[Tensor], state: Optional[Tuple[Tensor, Tensor]]
) -> Tuple[Tensor, Tuple[Tensor, Tensor]]:
    """Mean of every token and those before it, without padding, in float32 or better.

    Args:
        x: [B, N, C].
        window: how many positions the mean reaches over, this token's with them; 0: all.
        padding_mask: [B, N], True at padding.
        state: what an earlier call returned for the tokens before x: vectors [B, T, C] and how many tokens each of
            them stands for [B, T, 1]. Without a window that is one, their sum; else the last window - 1, 0 at padding.

    Returns:
        the means [B, N, C], and the state after x.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if padding_mask is None:
        real = torch.ones((x.shape[0], x.shape[1], 1), dtype=x.dtype, device=x.device)
    else:
        real = (~padding_mask).unsqueeze(-1).to(x.dtype)
        x = x * real
    past = 0
    if state is not None:
        past = state[0].shape[1]
        x, real = torch.cat([state[0], x], dim=1), torch.cat([state[1], real], dim=1)
    total, count = x.cumsum(1), real.cumsum(1)
    if window == 0:
        state = (total[:, -1:], count[:, -1:])
    else:
        keep = max(x.shape[1] - (window - 1), 0)
        state = (x[:, keep:], real[:, keep:])
        if x.shape[1] > window:
            total = torch.cat([total[:, :window], total[:, window:] - total[:, :-window]], dim=1)
            count = torch.cat([count[:, :window], count[:, window:] - count[:, :-window]], dim=1)
    return (total / count.clamp_min(1))[:, past:], state
