"""Heads chosen per token: the queries that run are packed side by side, so that attention never sees the others.

Routed (token, head) pairs are sorted by head. Their queries go into one buffer [B, L, G, D]: the queries that read the
keys of key-value head g of sequence b lie in rows [b, :, g], padded to the longest. So one fused attention call serves
all routed heads, K and V are never gathered, and where all experts share one key-value head (MoA) nothing is padded.

Two autograd functions frame that call. Both gather again in backward instead of keeping what they gathered: for
backward stay x, K, V, the packed queries and the packed outputs, where a plain gather under autograd would keep a copy
of the tokens for every head.

The products with the query and output projections have two forms. `sparse`: head by head, only the rows that run.
`dense`: one product for all rows, then a gather; it does more arithmetic, in one large call.
"""

from typing import List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.executors.causal import attend_causal
from moh_vision.attention.executors.masked import attend, autocast, has_head_masks
from moh_vision.attention.routing import Call


class Packing(NamedTuple):
    """Where the P routed (token, head) pairs lie, sorted by head; heads count from the first one packed."""

    token: Tensor  # [P] b*N + n
    head: Tensor  # [P]
    slot: Tensor  # [P] row of the packed buffer [B*L*G, D]
    per_head: List[int]  # pairs of every head
    length: int  # L
    groups: int  # G, key-value heads with packed queries


def pack(active: Tensor, first: int, shared: int, kv_heads: int) -> Packing:
    """Sort the pairs: active [B, N, H] -> Packing of heads first .. H - 1, the shared ones among them left out."""
    B, N, H = active.shape
    size = H // kv_heads  # query heads of one key-value head
    runs = active.permute(2, 0, 1)[first:]  # [R, B, N]
    if shared > first:
        runs = runs.clone()
        runs[: shared - first] = False
    R = runs.shape[0]
    count = runs.sum(-1)  # [R, B]
    grouped = count.reshape(R // size, size, B)
    in_group = grouped.cumsum(1)  # pairs of this head and those before it in its group
    length, groups = int(in_group[:, -1].max()), R // size
    # Pair number p, of segment (head, b), goes to row p - start + (pairs before it in the group) of buffer [b, :, g].
    start = count.flatten().cumsum(0) - count.flatten()
    before = (in_group - grouped).flatten()
    b = torch.arange(B, device=active.device).repeat(R)
    g = (torch.arange(R, device=active.device) // size).repeat_interleave(B)
    offset = (b * length + before - start) * groups + g  # [R*B]
    pair = runs.reshape(-1).nonzero().squeeze(1)  # [P] (head*B + b)*N + n
    slot = offset.index_select(0, pair // N) + torch.arange(len(pair), device=active.device) * groups
    return Packing(pair % (B * N), pair // (B * N), slot, count.sum(1).tolist(), length, groups)


class ProjectRows(torch.autograd.Function):
    """Queries of the packed pairs: x [B*N, C], weight [R*D, C], bias [R*D] -> [rows, D], rows = B*L*G."""

    @staticmethod
    def forward(ctx, x, weight, bias, token, head, slot, per_head, rows, sparse):
        ctx.save_for_backward(x, weight, token, head, slot)
        ctx.per_head, ctx.sparse = per_head, sparse
        R = len(per_head)
        D = weight.shape[0] // R
        if not sparse:
            source = token.new_zeros(rows).index_copy_(0, slot, token * R + head)  # padding repeats row 0
            return F.linear(x, weight, bias).view(-1, D).index_select(0, source)
        packed = x.new_zeros(rows, D)
        for h, (w, t, s) in enumerate(zip(weight.split(D), token.split(per_head), slot.split(per_head))):
            if len(t):
                xh = x.index_select(0, t)
                q = xh @ w.t() if bias is None else torch.addmm(bias[h * D : (h + 1) * D], xh, w.t())
                packed.index_copy_(0, s, q)
        return packed

    @staticmethod
    def backward(ctx, grad):
        x, weight, token, head, slot = ctx.saved_tensors
        per_head, R = ctx.per_head, len(ctx.per_head)
        D = weight.shape[0] // R
        dq = grad.index_select(0, slot)  # [P, D]
        if not ctx.sparse:
            dq = dq.new_zeros(x.shape[0] * R, D).index_copy_(0, token * R + head, dq).view(-1, R * D)
            dx, dw, db = dq @ weight, dq.t() @ x, dq.sum(0)
        else:
            dx, dw, db = torch.zeros_like(x), torch.zeros_like(weight), x.new_zeros(R * D)
            for h, (d, t) in enumerate(zip(dq.split(per_head), token.split(per_head))):
                if len(t):
                    rows = slice(h * D, (h + 1) * D)
                    dx.index_add_(0, t, d @ weight[rows])
                    dw[rows] = d.t() @ x.index_select(0, t)
                    db[rows] = d.sum(0)
        return dx, dw, db if ctx.needs_input_grad[2] else None, None, None, None, None, None, None


class GatherRows(torch.autograd.Function):
    """Queries of the packed pairs out of those of all heads: q [B*N*R, D] -> [rows, D]."""

    @staticmethod
    def forward(ctx, q, token, head, slot, heads, rows):
        ctx.save_for_backward(token, head, slot)
        ctx.heads, ctx.shape = heads, q.shape
        source = token.new_zeros(rows).index_copy_(0, slot, token * heads + head)
        return q.index_select(0, source)

    @staticmethod
    def backward(ctx, grad):
        token, head, slot = ctx.saved_tensors
        dq = grad.new_zeros(ctx.shape).index_copy_(0, token * ctx.heads + head, grad.index_select(0, slot))
        return dq, None, None, None, None, None


class CombineRows(torch.autograd.Function):
    """Weigh the packed outputs and project them: the routed part of y.

    y [B*N, C] is added to in place; o [rows, D]; weights [B*N, R]; weight [C, R*D].
    """

    @staticmethod
    def forward(ctx, y, o, weights, weight, token, head, slot, per_head, sparse):
        R = len(per_head)
        D = weight.shape[1] // R
        ctx.save_for_backward(o, weights, weight, token, head, slot)
        ctx.per_head, ctx.sparse = per_head, sparse
        ctx.mark_dirty(y)
        z = o.index_select(0, slot) * weights.view(-1).index_select(0, token * R + head).unsqueeze(1)  # [P, D]
        if not sparse:
            z = z.new_zeros(y.shape[0] * R, D).index_copy_(0, token * R + head, z).view(-1, R * D)
            return y.addmm_(z, weight.t())
        for h, (zh, t) in enumerate(zip(z.split(per_head), token.split(per_head))):
            if len(t):
                y.index_add_(0, t, zh @ weight[:, h * D : (h + 1) * D].t())
        return y

    @staticmethod
    def backward(ctx, dy):
        o, weights, weight, token, head, slot = ctx.saved_tensors
        per_head, R = ctx.per_head, len(ctx.per_head)
        D = weight.shape[1] // R
        where = token * R + head
        o_pairs = o.index_select(0, slot)  # [P, D]
        w = weights.view(-1).index_select(0, where).unsqueeze(1)  # [P, 1]
        z = o_pairs * w
        if not ctx.sparse:
            dz = (dy @ weight).view(-1, D).index_select(0, where)  # [P, D]
            full = z.new_zeros(dy.shape[0] * R, D).index_copy_(0, where, z).view(-1, R * D)
            dweight = dy.t() @ full
        else:
            dweight, parts = torch.zeros_like(weight), []
            for h, (zh, t) in enumerate(zip(z.split(per_head), token.split(per_head))):
                columns = slice(h * D, (h + 1) * D)
                dyh = dy.index_select(0, t)
                parts.append(dyh @ weight[:, columns])
                dweight[:, columns] = dyh.t() @ zh
            dz = torch.cat(parts)
        do = torch.zeros_like(o).index_copy_(0, slot, dz * w)
        dw = torch.zeros_like(weights)
        dw.view(-1).index_copy_(0, where, (dz * o_pairs).sum(1))
        return dy, do, dw, dweight, None, None, None, None, None


def by_token(call: Call, sparse: bool) -> Tensor:
    """`packed` where every token has its own heads; `sparse`: the form of the products."""
    layer, x, routing, context, q, attn_mask, is_causal, dropout_p, rotary, cache = call
    B, N, C = x.shape
    H, G, D, S = layer.num_heads, layer.kv_heads, layer.head_dim, layer.budget.shared
    size = H // G  # query heads of one key-value head
    first = S // size * size  # packed are all key-value heads that a routed head reads
    R = H - first

    def cut(weight: Optional[Tensor], dim: int = 0) -> Tuple[Optional[Tensor], Optional[Tensor]]:
        """A weight's part for the shared heads and for those that are packed; `split` costs one pass in backward."""
        if weight is None:
            return None, None
        if first == S:
            return weight.split([S * D, R * D], dim)
        return weight.narrow(dim, 0, S * D), weight.narrow(dim, first * D, R * D)

    x = autocast(x)
    q_weight, q_bias, _ = layer.row_blocks(together=False)[0]
    k, v = layer.project_kv(x if context is None else context, rotary, cache)  # [B, G, M, D]
    weights = routing.weights.to(x.dtype).expand(B, N, H)
    shared_out, packed_out = cut(layer.proj.weight, 1)  # [C, S*D], [C, R*D]
    if q is not None or rotary is not None or layer.qk_norm:  # needed, or simplest, for all heads at once
        q = F.linear(x, q_weight, q_bias).unflatten(-1, (H, D)) if q is None else q.transpose(1, 2)
        q = layer.prepare_queries(q, rotary)  # [B, N, H, D]

    if S > 0:
        if q is None:
            (w, _), (b, _) = cut(q_weight), cut(q_bias)
            shared_q = F.linear(x, w, b).unflatten(-1, (S, D))  # [B, N, S, D]
        else:
            shared_q = q[:, :, :S]
        read = slice(0, S // size) if S % size == 0 else torch.arange(S, device=x.device) // size
        z = attend(
            shared_q.transpose(1, 2),
            k[:, read],
            v[:, read],
            weights[..., :S],
            attn_mask[:, :S] if has_head_masks(attn_mask) else attn_mask,
            is_causal,
            dropout_p,
            grouped=size > 1 and S % size == 0,
        )
        y = F.linear(z.flatten(0, 1), shared_out, layer.proj.bias)  # [B*N, C]
    elif layer.proj.bias is not None:
        y = layer.proj.bias.to(x.dtype).expand(B * N, C).clone()
    else:
        y = x.new_zeros(B * N, C)

    packing = pack(routing.active.expand(B, N, H), first, S, G) if R > 0 else None
    if packing is not None and packing.length > 0:
        token, head, slot, per_head, L, groups = packing
        rows = B * L * groups
        in_blocks = by_blocks(call)
        if in_blocks:  # nothing is padded: the pairs lie as they are sorted
            rows = len(slot)
            slot = torch.arange(rows, device=slot.device)
        if q is None:
            (_, w), (_, b) = cut(q_weight), cut(q_bias)
            w, b = w.to(x.dtype), None if b is None else b.to(x.dtype)
            q = ProjectRows.apply(x.flatten(0, 1), w, b, token, head, slot, per_head, rows, sparse)
        else:
            q = GatherRows.apply(q[:, :, first:].reshape(-1, D), token, head, slot, R, rows)
        if in_blocks:
            counts = torch.bincount(head * B + token // N, minlength=R * B).tolist()
            segments = [(i % B, (first + i // B) // size, count) for i, count in enumerate(counts)]
            o = attend_causal(q, k, v, token % N, segments)  # [P, D]
        else:
            o = F.scaled_dot_product_attention(
                q.view(B, L, groups, D).transpose(1, 2),
                k[:, first // size :],
                v[:, first // size :],
                attn_mask=packed_mask(attn_mask, is_causal, packing, (B, H, N, k.shape[2]), first),
                dropout_p=dropout_p,
            )  # [B, G', L, D]
            o = o.transpose(1, 2).reshape(rows, D)
        y = CombineRows.apply(
            y,
            o.to(y.dtype),  # under autocast a norm leaves queries in float32
            weights[..., first:].flatten(0, 1).contiguous(),
            packed_out.to(y.dtype),
            token,
            head,
            slot,
            per_head,
            sparse,
        )
    return y.view(B, N, C)


def by_blocks(call: Call) -> bool:
    """Whether `attend_causal` takes the packed queries: it has no gradient, no dropout and no other mask."""
    free = call.attn_mask is None and call.context is None and call.dropout_p == 0
    return call.is_causal and free and not torch.is_grad_enabled() and call.x.device.type == "cpu"


def packed_mask(
    attn_mask: Optional[Tensor], is_causal: bool, packing: Packing, shape: Tuple[int, int, int, int], first: int
) -> Optional[Tensor]:
    """What each packed query may see, [B, G', L, M]; shape is (B, H, N, M)."""
    if attn_mask is None and not is_causal:
        return None
    B, H, N, M = shape
    rows = B * packing.length * packing.groups
    # Padding repeats the first pair: any row will do that sees a key.
    pair = packing.slot.new_zeros(rows).index_copy_(
        0, packing.slot, torch.arange(len(packing.slot), device=packing.slot.device)
    )
    token = packing.token.index_select(0, pair)
    n = token % N
    if attn_mask is None:
        mask = n.unsqueeze(1) >= torch.arange(M, device=n.device)  # [rows, M]
    else:
        mask = attn_mask.expand(B, H if has_head_masks(attn_mask) else 1, N, M)
        h = packing.head.index_select(0, pair) + first if has_head_masks(attn_mask) else torch.zeros_like(n)
        mask = mask[token // N, h, n]
    return mask.view(B, packing.length, packing.groups, M).transpose(1, 2)
