"""`route`: from tokens to the heads that run, for routers of one linear layer.

It is one operator on a GPU, in Triton (see `gpu.route`), one C++ operator on a CPU where the operators are built (see
`build`), and plain PyTorch elsewhere. Logits may differ in the last bit between them, because they are summed in another
order; equal logits rank the same.
"""

from typing import List, Optional

import torch
import torch.fx
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.kernels.build import path
from moh_vision.attention.routing import Pairs, Routing, RoutingStats

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_ROWS = 256  # of a weight whose logits fit in the registers of a GPU

torch.fx.wrap("gate_logits")  # leaves while tracing
torch.fx.wrap("select_top_k")


def route(
    x: Tensor,
    weight: Tensor,
    candidates: int,
    shared: int,
    routed: int,
    kind: str,
    balanced: bool = False,
    padding_mask: Optional[Tensor] = None,
) -> Routing:
    """Choose and weigh the heads of every token.

    Args:
        x: tokens [B, N, C].
        weight: of the router [R, C]. Its rows are the E candidates, then the shared heads if there are several, then 2
            that balance both groups if they are balanced.
        candidates: E.
        shared: heads that always run; the heads are these and then the candidates.
        routed: how many candidates run.
        kind: "released" or "paper": Jin 2024, see MoHRouter, which has the equations. "renormalised": Zhang 2022, the
            probability over the detached sum of the chosen ones; only without shared heads.
        balanced: there are shared heads and candidates, and weights for the balance of both groups.
        padding_mask: [B, N], True at padding, which is left out of the statistics.

    Returns:
        The Routing, in float32 or better. The operators also list the pairs, and write gates below 1e-30 as 0:
        products with denormal numbers are slow.
    """
    if not torch.jit.is_scripting():
        operator = _operator(x, weight)
        if operator is not None:
            return _route_in_one(operator, x, weight, candidates, shared, routed, kind, padding_mask)
    return choose(gate_logits(x, weight), candidates, shared, routed, kind, balanced, padding_mask)


# ---- plain PyTorch


def choose(
    rows: Tensor,
    candidates: int,
    shared: int,
    routed: int,
    kind: str,
    balanced: bool = False,
    padding_mask: Optional[Tensor] = None,
) -> Routing:
    """`route` from the outputs of the router's linear layer, [B, N, R], in plain PyTorch."""
    rows = heads_first(rows)  # [R, B, N]
    two_groups = shared > 0 and candidates > 0
    logits = rows[:candidates]  # [E, B, N]
    probs = logits.softmax(0)
    chosen = select_top_k(logits, routed)
    selected = probs.masked_fill(~chosen, 0.0)  # probabilities of what runs

    # The factors of both groups first: on [B, N] they cost less than on all heads.
    if balanced:
        alpha = rows[-2:].softmax(0)  # [2, B, N], Jin 2024, eq. 6
    else:
        alpha = torch.full((2, 1, 1), 0.5 if two_groups else 1.0, dtype=probs.dtype, device=rows.device)
    if two_groups and kind == "released":
        alpha = 2 * alpha
    parts: List[Tensor] = []
    if shared > 0:
        factor = shared * alpha[:1] if kind == "released" else alpha[:1]
        if shared == 1:
            gate = torch.ones((1, rows.shape[1], rows.shape[2]), dtype=probs.dtype, device=rows.device)
        else:
            gate = rows[candidates:][:shared].softmax(0)  # [S, B, N]
        parts.append(gate * factor)
    if candidates > 0:
        factor = alpha[1:]
        if kind == "released":
            factor = routed * factor
            if routed < candidates:  # else the sum is 1, and rounding would spoil the identity
                # The released code also clamps the sum; it is at least 1/E, because the largest p is in it.
                factor = factor / selected.sum(0, keepdim=True)
        elif kind == "renormalised":
            selected = selected / selected.sum(0, keepdim=True).detach()
        parts.append(selected * factor)

    stats = top_k_stats(probs, chosen, logits, shared, padding_mask)
    return Routing(heads_last(torch.cat(parts)), active_heads(shared, chosen), stats)


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


def heads_first(logits: Tensor) -> Tensor:
    """[B, N, E] -> [E, B, N], in float32 or better and contiguous.

    A head's numbers lie side by side, so that what follows (a softmax over four heads, say) is vectorised over tokens:
    on a CPU several times faster than with heads last, and routing must not cost what it is there to save.
    """
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).permute(2, 0, 1).contiguous()


def heads_last(x: Tensor) -> Tensor:
    """[E, B, N] -> [B, N, E], as everything outside the routers has it; a view."""
    return x.permute(1, 2, 0)


def select_top_k(scores: Tensor, k: int) -> Tensor:
    """Which are the k largest of each token: scores [E, B, N] -> bool [E, B, N], True exactly k times a token.

    Among equal scores the lower index wins, so that a new router (all zeros) chooses the same on every device. NaN counts
    as -inf.
    """
    if k == 0 or k == scores.shape[0]:
        return torch.full(scores.shape, k > 0, dtype=torch.bool, device=scores.device)
    lowest = -float("inf")
    scores = torch.nan_to_num(scores.detach(), nan=lowest, posinf=-lowest, neginf=lowest)
    # What topk chooses among equal scores is not defined, but the k-th largest score is.
    kth = scores.topk(k, dim=0)[0][-1:]  # [1, B, N]
    larger, equal = scores > kth, scores == kth
    left = k - larger.sum(0, keepdim=True, dtype=torch.int32)  # for the first of the equal ones
    return larger | (equal & (equal.cumsum(0, dtype=torch.int32) <= left))


def active_heads(num_shared: int, chosen: Tensor) -> Tensor:
    """chosen [E, B, N] -> which heads run for which token [B, N, H], the shared ones for all."""
    always = torch.ones((num_shared, chosen.shape[1], chosen.shape[2]), dtype=torch.bool, device=chosen.device)
    return heads_last(torch.cat([always, chosen]))


def top_k_stats(
    probs: Tensor, chosen: Tensor, logits: Tensor, num_shared: int, padding_mask: Optional[Tensor]
) -> RoutingStats:
    """RoutingStats of shared heads followed by candidates, without padding.

    probs, logits [E, B, N]; chosen the same, bool; padding_mask [B, N], True at padding.
    """
    _, B, N = probs.shape
    if padding_mask is None:
        tokens = torch.full((1, B), N, dtype=probs.dtype, device=probs.device)
    else:
        tokens = (~padding_mask).sum(1).unsqueeze(0).to(probs.dtype)  # [1, B]
        probs, chosen = probs.masked_fill(padding_mask, 0.0), chosen & ~padding_mask
    counts = torch.cat([tokens.expand(num_shared, B), chosen.sum(-1).to(probs.dtype)]).t()  # [B, H]
    return RoutingStats(heads_last(probs), counts, heads_last(logits))


# ---- C++ and Triton


def _operator(x: Tensor, weight: Tensor):
    """The operator that routes x, None where there is none. Not while TorchScript traces or a model is exported."""
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        return None
    if not torch.compiler.is_compiling():
        # A subclass of Tensor stands for something else: an fx proxy, a fake tensor, a shard.
        if type(x) not in (Tensor, torch.nn.Parameter) or torch._C._are_functorch_transforms_active():
            return None
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        return None
    where = path(x.device.type)
    if where == "cpp":
        return torch.ops.moh_vision.route
    if where == "triton" and weight.shape[0] <= MOST_ROWS:
        return torch.ops.moh_vision_triton.route
    return None


def _route_in_one(operator, x, weight, candidates, shared, routed, kind, padding_mask) -> Routing:
    weights, active, rows, probs, counts, token, offsets = operator(
        x, weight, candidates, shared, routed, kind, padding_mask
    )
    stats = RoutingStats(probs, counts, rows[..., :candidates])
    return Routing(weights, active, stats, Pairs(token, offsets))
