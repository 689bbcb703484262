"""The operators in plain PyTorch. They compute all heads.

Tests compare the compiled operators with these functions, and second derivatives of the compiled operators are computed
through them. Models call some of them too, where no compiled operator can run: routers call `gate_logits` and `choose`,
executors call `pairs`, `project` and `combine`.
"""

import torch
import torch.fx
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.linear import cast_bias, in_float, without_autocast
from moh_vision.attention.routing import Pairs, Routing, RoutingStats

# fx records a call of this function and does not trace into it, because it branches on a shape, which is a proxy then.
torch.fx.wrap("select_top_k")


def pairs(active: Tensor) -> Pairs:
    """Return the list of pairs that run: active [B, N, H] -> `Pairs`."""
    B, N, _ = active.shape
    runs = active.permute(2, 0, 1)  # [H, B, N]
    offsets = F.pad(runs.sum(-1).flatten().cumsum(0), (1, 0))
    token = runs.reshape(-1).nonzero().squeeze(1) % (B * N)
    return Pairs(token.int(), offsets.int())


def heads_of(token: Tensor, offsets: Tensor, heads: int) -> Tensor:
    """Return the head of each pair: [P] int64."""
    B = (offsets.shape[0] - 1) // heads
    per_head = offsets[::B].diff()  # number of pairs of each head
    return torch.repeat_interleave(
        torch.arange(heads, device=token.device), per_head, output_size=token.shape[0]
    )


def rows_of_pairs(token: Tensor, offsets: Tensor, heads: int) -> Tensor:
    """Return the row of each pair in [T * H, D], as int64: token * H + head."""
    return token.long() * heads + heads_of(token, offsets, heads)


def scatter(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return a tensor [count, D] with `values` [P, D] in the rows `rows`, and 0 elsewhere."""
    return values.new_zeros(count, values.shape[1]).index_copy(0, rows, values)


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, token: Tensor, offsets: Tensor, heads: int
) -> Tensor:
    """See `kernels.project`."""
    queries = F.linear(x, weight, bias).view(x.shape[0] * heads, -1)
    return queries.index_select(0, rows_of_pairs(token, offsets, heads))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token: Tensor,
    offsets: Tensor,
    heads: int,
    tokens: int,
    source: Tensor | None = None,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """See `kernels.attend`."""
    B = (offsets.shape[0] - 1) // heads
    if source is not None:  # [1, X, M, D] to [B, H, M, D]
        # A segment without pairs may have source -1, which index_select refuses. It reads nothing, so any keys will do.
        k, v = (
            t[0].index_select(0, source.clamp_min(0)).unflatten(0, (heads, B)).transpose(0, 1)
            for t in (k, v)
        )
    rows = rows_of_pairs(token, offsets, heads)
    full = scatter(q, rows, B * tokens * heads).view(B, tokens, heads, -1).transpose(1, 2)
    o = F.scaled_dot_product_attention(
        full, k, v, mask, 0.0, is_causal, enable_gqa=k.shape[1] < heads
    )
    return o.transpose(1, 2).reshape(B * tokens * heads, -1).index_select(0, rows)


def combine(
    o: Tensor,
    weights: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token: Tensor,
    offsets: Tensor,
    heads: int,
) -> Tensor:
    """See `kernels.combine`."""
    rows = rows_of_pairs(token, offsets, heads)
    gates = weights.flatten().index_select(0, rows).unsqueeze(1)
    full = scatter(o * gates.to(o.dtype), rows, weights.numel())
    return F.linear(full.view(weights.shape[0], -1), weight, bias)


# ---- route


def choose(
    router_outputs: Tensor,
    candidates: int,
    shared: int,
    routed: int,
    gate_form: str,
    balanced: bool = False,
    padding_mask: Tensor | None = None,
) -> Routing:
    """Choose and weigh heads from the outputs of the router's linear layer; see `kernels.route.route`.

    Args:
        router_outputs: outputs of the layer, [B, N, R].
        candidates, shared, routed, gate_form, balanced: see `kernels.route.LinearRouter`.
        padding_mask: [B, N], True at padding.
    """
    router_outputs = heads_first(router_outputs)  # [R, B, N]
    two_groups = shared > 0 and candidates > 0
    logits = router_outputs[:candidates]  # [E, B, N]
    probs = logits.softmax(0)
    chosen = select_top_k(logits, routed)
    selected = probs.masked_fill(~chosen, 0.0)  # probabilities of the chosen candidates

    # Combine a group's factors on [B, N] before they meet the heads: H times less work.
    if balanced:
        alpha = router_outputs[-2:].softmax(0)  # [2, B, N], Jin 2024, eq. 6
    else:
        share = 0.5 if two_groups else 1.0
        alpha = torch.full((2, 1, 1), share, dtype=probs.dtype, device=router_outputs.device)
    if two_groups and gate_form == "released":
        alpha = 2 * alpha  # so that two groups of equal share have factors of 1
    parts: list[Tensor] = []
    if shared > 0:
        factor = alpha[:1]
        if gate_form == "released":
            factor = shared * factor
        if shared == 1:  # the softmax of one logit is 1, so the router has no output for this head
            _, B, N = router_outputs.shape
            gate = torch.ones((1, B, N), dtype=probs.dtype, device=router_outputs.device)
        else:
            gate = router_outputs[candidates : candidates + shared].softmax(0)  # [S, B, N]
        parts.append(gate * factor)
    if candidates > 0:
        factor = alpha[1:]
        if gate_form == "released":
            factor = routed * factor
            if routed == 1 < candidates:
                # p / p, but with a gradient of exactly 0. That of the quotient is rounding, which Adam would scale to whole steps.
                selected = chosen + 0 * selected
            elif routed < candidates:
                # The released code clamps this sum, without effect: the sum includes the largest p, which is at least 1/E.
                factor = factor / selected.sum(0, keepdim=True)
            # If all candidates run, the sum is 1 but for rounding. Undivided, gates of equal logits are exactly 1.
        elif gate_form == "renormalised":
            # Zhang 2022 detaches the sum: for the gradient it is a constant.
            selected = selected / selected.sum(0, keepdim=True).detach()
        parts.append(selected * factor)

    stats = top_k_stats(probs, chosen, logits, shared, padding_mask)
    weights = heads_last(torch.cat(parts))
    return Routing(weights, active_heads(shared, chosen), stats, shared + routed)


def is_balanced(weight: Tensor, candidates: int, shared: int) -> bool:
    """Return whether the router's weight [R, C] has the two further rows that balance shared and routed heads."""
    rows = candidates
    if shared > 1:  # a single shared head has no row
        rows += shared
    return weight.shape[0] > rows


class FloatLinear(torch.autograd.Function):
    """Compute x W^T of 16-bit tokens in float32, but save the tokens in 16 bits for backward, in half the memory."""

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
        # The caller of backward may have enabled autocast.
        with without_autocast(x):
            dx = grad @ weight.float()
            dweight = grad.flatten(0, -2).t() @ x.flatten(0, -2).float()
        return dx.to(x.dtype), dweight.to(weight.dtype)


def gate_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b in float32 or wider, also under autocast, because rounding must not decide which head wins."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    # A compiler chooses itself what it saves for backward, and a traced graph cannot contain a function in Python.
    captured = torch.compiler.is_compiling() or torch.jit.is_tracing()
    with without_autocast(x):
        if x.dtype != dtype and bias is None and not captured:
            return FloatLinear.apply(x, weight)
        return F.linear(x.to(dtype), weight.to(dtype), cast_bias(bias, dtype))


def heads_first(logits: Tensor) -> Tensor:
    """Move heads to the front, [B, N, E] -> [E, B, N], in float32 or wider and contiguous.

    Operations on the result, such as a softmax over four heads, are vectorised over tokens. On a CPU this is several times
    faster than with heads last.
    """
    return in_float(logits).permute(2, 0, 1).contiguous()


def heads_last(x: Tensor) -> Tensor:
    """Move heads to the end, [E, B, N] -> [B, N, E], the order outside the routers; returns a view."""
    return x.permute(1, 2, 0)


def select_top_k(scores: Tensor, k: int) -> Tensor:
    """Mark the k largest scores of each token: scores [E, B, N] -> bool [E, B, N], True exactly k times per token.

    Among equal scores the lower index wins, so a new router, whose scores are all 0, chooses the same heads on every
    device. NaN counts as -inf.
    """
    if k == 0 or k == scores.shape[0]:
        return torch.full(scores.shape, k > 0, dtype=torch.bool, device=scores.device)
    inf = float("inf")
    # This changes NaN only: without `posinf` and `neginf` the infinities would become finite.
    scores = torch.nan_to_num(scores.detach(), nan=-inf, posinf=inf, neginf=-inf)
    # Which of equal scores topk returns is undefined, but the value of the k-th largest score is not.
    kth = scores.topk(k, dim=0)[0][-1:]  # [1, B, N]
    larger = scores > kth
    equal = scores == kth
    # The number of equal scores that are chosen.
    left = k - larger.sum(0, keepdim=True, dtype=torch.int32)
    return larger | (equal & (equal.cumsum(0, dtype=torch.int32) <= left))


def active_heads(num_shared: int, chosen: Tensor) -> Tensor:
    """Return which heads run, [B, N, H]: the shared heads always, and then the `chosen` candidates [E, B, N]."""
    always = torch.ones(
        (num_shared, chosen.shape[1], chosen.shape[2]), dtype=torch.bool, device=chosen.device
    )
    return heads_last(torch.cat([always, chosen]))


def top_k_stats(
    probs: Tensor, chosen: Tensor, logits: Tensor, num_shared: int, padding_mask: Tensor | None
) -> RoutingStats:
    """Return the RoutingStats of shared heads followed by candidates; padding is left out.

    Args:
        probs, logits: probabilities and logits of the candidates [E, B, N].
        chosen: which candidates run [E, B, N], bool.
        num_shared: number of shared heads.
        padding_mask: [B, N], True at padding.
    """
    _, B, N = probs.shape
    if padding_mask is None:
        tokens = torch.full((1, B), N, dtype=probs.dtype, device=probs.device)
    else:
        tokens = (~padding_mask).sum(1).unsqueeze(0).to(probs.dtype)  # [1, B]
        probs = probs.masked_fill(padding_mask, 0.0)
        chosen = chosen & ~padding_mask
    counts = torch.cat([tokens.expand(num_shared, B), chosen.sum(-1).to(probs.dtype)]).t()  # [B, H]
    return RoutingStats(heads_last(probs), counts, heads_last(logits))
