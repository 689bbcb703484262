"""Heads chosen per sequence: what is not chosen has no queries, keys, values, attention or output there.

All sequences run the same number of heads K, so after the projections this is plain attention with K heads. The
projections are the sparse part: sequence b multiplies with the rows of its own heads. A row of weights is read where it
lies, neighbouring heads in one product; where the chosen heads are scattered the rows are copied together first. Where
all sequences chose the same heads (a DiT at one timestep) the batch is one long sequence to the products.
"""

from typing import List, Tuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.executors.masked import attend, autocast, has_head_masks, is_short
from moh_vision.attention.routing import Call

Runs = List[List[Tuple[int, int, int]]]  # for each sequence: (head, next head not in the run, place among the K)


def runs_of(heads: Tensor) -> Runs:
    """Neighbouring heads together: sorted indices [B, K] -> for each sequence [(first, end, place), ...]."""
    result = []
    for row in heads.tolist():
        runs: List[Tuple[int, int, int]] = []
        for place, h in enumerate(row):
            if runs and runs[-1][1] == h:
                runs[-1] = (runs[-1][0], h + 1, runs[-1][2])
            else:
                runs.append((h, h + 1, place))
        result.append(runs)
    return result


def alike(active: Tensor) -> bool:
    """Whether several sequences all chose the same heads, active [B, 1, H]."""
    return active.shape[0] > 1 and bool((active == active[:1]).all())


def copied(runs: Runs, K: int, width: int, dtype: torch.dtype) -> bool:
    """Whether to copy the rows of a sequence's heads together, for one product, and not multiply run by run.

    Measured on CPU (benchmarks/attention.py): in 16 bits a product has a high fixed cost, so always; in float32 where
    the model is narrow, which makes the copy small, and the runs are shorter than two heads on average.
    """
    if is_short(dtype):
        return True
    return width <= 512 and sum(len(r) for r in runs) * 2 > len(runs) * K


def summed(dtype: torch.dtype) -> torch.dtype:
    """What gradients of weights are summed in over sequences: in 16 bits, small terms would be lost one by one."""
    return torch.promote_types(dtype, torch.float32)


class ProjectSamples(torch.autograd.Function):
    """Project each sequence to its own heads: x [B, N, C], weight [P, H, D, C], bias [P, H, D] -> [B, N, P, K*D].

    P = 1 for queries, 3 for queries, keys and values at once; heads [B, K] are sorted.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, heads, runs):
        B, N, C = x.shape
        P, H, D, _ = weight.shape
        K = heads.shape[1]
        ctx.save_for_backward(x, weight, heads)
        ctx.runs, ctx.has_bias = runs, bias is not None
        out = x.new_empty(B, N, P, K * D)
        if bias is None:
            bias = x.new_zeros(1).expand(P, H, D)
        if copied(runs, K, C, x.dtype):
            for b, h in enumerate(heads):
                w, c = weight.index_select(1, h).view(-1, C), bias.index_select(1, h).view(-1)
                torch.addmm(c, x[b], w.t(), out=out[b].view(N, -1))
            return out
        for b, row in enumerate(runs):
            for h, end, place in row:
                for p in range(P):
                    c, w = bias[p, h:end].reshape(-1), weight[p, h:end].flatten(0, 1)
                    torch.addmm(c, x[b], w.t(), out=out[b, :, p, place * D : (place + end - h) * D])
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, heads = ctx.saved_tensors
        P, _, D, C = weight.shape
        grad = grad.contiguous()
        dx, dweight = torch.empty_like(x), torch.zeros(weight.shape, dtype=summed(x.dtype), device=x.device)
        dbias = None
        if ctx.has_bias:
            d = grad.sum(1, dtype=dweight.dtype)
            d = d.view(-1, P, heads.shape[1], D).transpose(0, 1).flatten(1, 2)  # [P, B*K, D]
            dbias = dweight.new_zeros(weight.shape[:3]).index_add_(1, heads.flatten(), d).to(x.dtype)
        if copied(ctx.runs, heads.shape[1], C, x.dtype):
            for b, h in enumerate(heads):
                g = grad[b].flatten(1)  # [N, P*K*D]
                dx[b] = g @ weight.index_select(1, h).view(-1, C)
                dweight.index_add_(1, h, (g.t() @ x[b]).view(P, -1, D, C).to(dweight.dtype))
            return dx, dweight.to(x.dtype), dbias, None, None
        dx.zero_()
        for b, row in enumerate(ctx.runs):
            for h, end, place in row:
                for p in range(P):
                    g = grad[b, :, p, place * D : (place + end - h) * D]  # [N, run*D]
                    dx[b].addmm_(g, weight[p, h:end].flatten(0, 1))
                    dweight[p, h:end].flatten(0, 1).addmm_(g.t(), x[b])
        return dx, dweight, dbias, None, None


class CombineSamples(torch.autograd.Function):
    """Each sequence's heads through their own columns: z [B, N, K*D], weight [C, H*D], bias [C] -> y [B, N, C]."""

    @staticmethod
    def forward(ctx, z, weight, bias, heads, runs, D):
        B, N, KD = z.shape
        ctx.save_for_backward(z, weight)
        ctx.runs, ctx.D, ctx.has_bias = runs, D, bias is not None
        y = z.new_empty(B, N, weight.shape[0])
        if bias is None:
            bias = z.new_zeros(weight.shape[0])
        if copied(runs, KD // D, weight.shape[0], z.dtype):
            by_head = weight.unflatten(1, (-1, D))
            for b, h in enumerate(heads):
                torch.addmm(bias, z[b], by_head.index_select(1, h).flatten(1).t(), out=y[b])
            return y
        for b, row in enumerate(runs):
            for i, (h, end, place) in enumerate(row):
                zh, w = z[b, :, place * D : (place + end - h) * D], weight[:, h * D : end * D].t()
                if i == 0:
                    torch.addmm(bias, zh, w, out=y[b])
                else:
                    y[b].addmm_(zh, w)
        return y

    @staticmethod
    def backward(ctx, dy):
        z, weight = ctx.saved_tensors
        D = ctx.D
        dz, dweight = torch.empty_like(z), torch.zeros(weight.shape, dtype=summed(z.dtype), device=z.device)
        for b, row in enumerate(ctx.runs):
            for h, end, place in row:
                columns, places = slice(h * D, end * D), slice(place * D, (place + end - h) * D)
                dz[b, :, places] = dy[b] @ weight[:, columns]
                if dweight.dtype == z.dtype:
                    dweight[:, columns].addmm_(dy[b].t(), z[b, :, places])
                else:
                    dweight[:, columns] += dy[b].t() @ z[b, :, places]
        return dz, dweight.to(z.dtype), dy.sum((0, 1)) if ctx.has_bias else None, None, None, None


def by_sample(call: Call) -> Tensor:
    """`packed` where all tokens of a sequence have the same heads, equally many in each; without a cache."""
    layer, x, routing, context, q, attn_mask, is_causal, dropout_p, rotary, _ = call
    B, N, C = x.shape
    H, G, D = layer.num_heads, layer.kv_heads, layer.head_dim
    x, context = autocast(x), None if context is None else autocast(context)
    heads = routing.active[:, 0].nonzero()[:, 1].view(B, -1)  # [B, K]
    K = heads.shape[1]
    groups = heads[:1] if alike(routing.active) else heads  # one choice for each run of tokens: [1 or B, K]
    runs = runs_of(groups)
    weights = routing.weights.gather(-1, heads.unsqueeze(1))  # [B, 1, K]

    def project(tokens: Tensor, blocks: list) -> List[Tensor]:
        """Queries, keys or values [B, N, K, D] of every part of every block of weights."""
        result: List[Tensor] = []
        for weight, bias, parts in blocks:
            weight = weight.to(x.dtype).view(parts, H, D, C)
            bias = None if bias is None else bias.to(x.dtype).view(parts, H, D)
            rows = ProjectSamples.apply(tokens.reshape(len(groups), -1, C), weight, bias, groups, runs)
            result.extend(rows.view(*tokens.shape[:2], parts, K, D).unbind(2))
        return result

    chosen = torch.arange(B, device=x.device).unsqueeze(1), heads
    together = q is None and context is None and G == H
    blocks = layer.row_blocks(together)
    if together:
        q, k, v = project(x, blocks)
    else:
        q = project(x, blocks[:1])[0] if q is None else q[chosen].transpose(1, 2)
        tokens = x if context is None else context
        if G == H:
            k, v = project(tokens, blocks[1:])
        else:
            read: List[Tensor] = []
            for weight, bias, parts in blocks[1:]:
                kv = F.linear(tokens, weight, bias).unflatten(-1, (parts, G, D)).transpose(1, 3)  # [B, G, parts, M, D]
                read.extend(kv[chosen[0], heads * G // H].transpose(1, 3).unbind(2))  # [B, M, K, D]
            k, v = read
    q, k = layer.prepare_queries(q, rotary), layer.prepare_keys(k, rotary)
    if has_head_masks(attn_mask):
        attn_mask = attn_mask.expand(B, -1, -1, -1)[chosen]
    z = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), weights, attn_mask, is_causal, dropout_p)
    bias = None if layer.proj.bias is None else layer.proj.bias.to(z.dtype)
    rows = z.reshape(len(groups), -1, K * D)
    return CombineSamples.apply(rows, layer.proj.weight.to(z.dtype), bias, groups, runs, D).view(B, N, -1)
