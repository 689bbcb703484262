"""`project`, `attend` and `combine` in plain PyTorch: what runs where the C++ operators do not, on any device.

All take the list of pairs that run (see `Pairs`): pair p is token[p] = b * N + n, and those of segment s = h * B + b are
offsets[s] .. offsets[s + 1] - 1.
"""

import functools
from typing import List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moh_vision.attention.kernels.causal import attend_causal


class Product(NamedTuple):
    """Heads whose pairs are the same tokens: one matrix product serves them all."""

    rows: Union[slice, Tensor]  # of the tokens [T, C]
    count: int  # of these rows
    heads: List[int]
    starts: List[int]  # where the pairs of each head begin in the list


def products(token: Tensor, offsets: Tensor, heads: int, T: int) -> List[Product]:
    """Cut the list into products: heads that all tokens run, then whole sequences, else head by head."""
    edges = offsets.tolist()
    B = (len(edges) - 1) // heads
    N = T // B
    result = []
    full = [h for h in range(heads) if edges[h * B + B] - edges[h * B] == T]
    if full:
        result.append(Product(slice(0, T), T, full, [edges[h * B] for h in full]))
    partial = [h for h in range(heads) if h not in full and edges[h * B + B] > edges[h * B]]
    counts = {edges[h * B + b + 1] - edges[h * B + b] for h in partial for b in range(B)}
    if counts <= {0, N}:
        for b in range(B):
            run = [h for h in partial if edges[h * B + b + 1] > edges[h * B + b]]
            if run:
                result.append(Product(slice(b * N, b * N + N), N, run, [edges[h * B + b] for h in run]))
    else:
        for h in partial:
            begin, end = edges[h * B], edges[h * B + B]
            result.append(Product(token[begin:end], end - begin, [h], [begin]))
    return result


def rows_of(x: Tensor, product: Product) -> Tensor:
    rows = product.rows
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def of_heads(x: Tensor, heads: List[int], dim: int) -> Tensor:
    """x at these heads of dimension `dim`; a view where they are neighbours."""
    if heads[-1] - heads[0] == len(heads) - 1:
        return x.narrow(dim, heads[0], len(heads))
    return x.index_select(dim, torch.tensor(heads, device=x.device))


def read(pairs: Tensor, product: Product) -> Tensor:
    """Numbers of the pairs of a product [P, D] -> [rows, heads, D]."""
    return torch.stack([pairs[start : start + product.count] for start in product.starts], 1)


def write(pairs: Tensor, product: Product, values: Tensor) -> None:
    """The reverse of `read`: values [rows, heads, D]."""
    for i, start in enumerate(product.starts):
        pairs[start : start + product.count] = values[:, i]


def summed(dtype: torch.dtype) -> torch.dtype:
    """What gradients of weights are summed in over products: in 16 bits small terms would be lost one by one."""
    return torch.promote_types(dtype, torch.float32)


def add(total: Tensor, heads: List[int], dim: int, part: Tensor) -> None:
    total.index_add_(dim, torch.tensor(heads, device=total.device), part.to(total.dtype))


def add_rows(total: Tensor, product: Product, part: Tensor) -> None:
    if isinstance(product.rows, slice):
        total[product.rows] += part
    else:
        total.index_add_(0, product.rows, part.to(total.dtype))


def in_own_dtype(backward):
    """A backward that cannot be differentiated and computes in the dtypes of what it gets, also under autocast."""

    @once_differentiable
    @functools.wraps(backward)
    def wrapped(ctx, grad):
        with torch.autocast(grad.device.type, enabled=False):
            return backward(ctx, grad)

    return wrapped


class Project(torch.autograd.Function):
    """Queries of the pairs: x [T, C], weight [H*D, C], bias [H*D] -> [P, D]. It gathers again in backward."""

    @staticmethod
    def forward(ctx, x, weight, bias, token, offsets, heads):
        w, b = weight.unflatten(0, (heads, -1)), None if bias is None else bias.unflatten(0, (heads, -1))
        q = x.new_empty(token.shape[0], w.shape[1])
        ctx.products, ctx.heads, ctx.has_bias = products(token, offsets, heads, x.shape[0]), heads, bias is not None
        ctx.save_for_backward(x, weight)
        for product in ctx.products:
            shift = None if b is None else of_heads(b, product.heads, 0).flatten()
            out = F.linear(rows_of(x, product), of_heads(w, product.heads, 0).flatten(0, 1), shift)
            write(q, product, out.unflatten(1, (-1, w.shape[1])))
        return q

    @staticmethod
    @in_own_dtype
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        w = weight.unflatten(0, (ctx.heads, -1))
        dx, dw = torch.zeros_like(x), torch.zeros(w.shape, dtype=summed(x.dtype), device=x.device)
        db = dw.new_zeros(w.shape[:2])
        for product in ctx.products:
            dq = read(grad, product).flatten(1)  # [rows, heads * D]
            add_rows(dx, product, dq @ of_heads(w, product.heads, 0).flatten(0, 1))
            add(dw, product.heads, 0, (dq.t() @ rows_of(x, product)).unflatten(0, (-1, w.shape[1])))
            add(db, product.heads, 0, dq.sum(0, dtype=db.dtype).unflatten(0, (-1, w.shape[1])))
        dw, db = dw.flatten(0, 1).to(x.dtype), db.flatten().to(x.dtype)
        return dx, dw, db if ctx.has_bias else None, None, None, None


class Combine(torch.autograd.Function):
    """Weighted outputs of the pairs through W_O: o [P, D], weights [T, H], weight [C, H*D], bias [C] -> [T, C]."""

    @staticmethod
    def forward(ctx, o, weights, weight, bias, token, offsets, heads):
        w, T = weight.unflatten(1, (heads, -1)), weights.shape[0]
        ctx.products, ctx.heads, ctx.has_bias = products(token, offsets, heads, T), heads, bias is not None
        ctx.save_for_backward(o, weights, weight)
        y = torch.zeros(T, weight.shape[0], dtype=summed(o.dtype), device=o.device)
        if bias is not None:
            y += bias
        for product in ctx.products:
            z = read(o, product) * gates_of(weights, product, o)
            add_rows(y, product, z.flatten(1) @ of_heads(w, product.heads, 1).flatten(1).t())
        return y.to(o.dtype)

    @staticmethod
    @in_own_dtype
    def backward(ctx, dy):
        o, weights, weight = ctx.saved_tensors
        w = weight.unflatten(1, (ctx.heads, -1))
        do, dweights = torch.empty_like(o), torch.zeros_like(weights)
        dw = torch.zeros(w.shape, dtype=summed(o.dtype), device=o.device)
        for product in ctx.products:
            dyr, out, gates = rows_of(dy, product), read(o, product), gates_of(weights, product, o)
            dz = (dyr @ of_heads(w, product.heads, 1).flatten(1)).view_as(out)  # [rows, heads, D]
            write(do, product, dz * gates)
            dgates = (dz.to(dweights.dtype) * out).sum(-1)  # [rows, heads]
            if isinstance(product.rows, slice):
                dweights[product.rows].index_copy_(1, torch.tensor(product.heads, device=o.device), dgates)
            else:
                dweights[:, product.heads[0]].index_copy_(0, product.rows.long(), dgates[:, 0])
            add(dw, product.heads, 1, (dyr.t() @ (out * gates).flatten(1)).unflatten(1, (-1, w.shape[2])))
        return do, dweights, dw.flatten(1).to(o.dtype), dy.sum(0) if ctx.has_bias else None, None, None, None


def gates_of(weights: Tensor, product: Product, like: Tensor) -> Tensor:
    """Weights [T, H] of a product's pairs, [rows, heads, 1] in the outputs' dtype."""
    return of_heads(rows_of(weights, product), product.heads, 1).unsqueeze(-1).to(like.dtype)


class Select(torch.autograd.Function):
    """Rows `index` of x [R, D], no row twice; the gradient is put back without adding."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy_(0, index, grad), None


class Place(torch.autograd.Function):
    """The reverse of `Select`: rows of x to rows `index` of [rows, D], where the others are 0."""

    @staticmethod
    def forward(ctx, x, index, rows):
        ctx.save_for_backward(index)
        return x.new_zeros(rows, x.shape[1]).index_copy_(0, index, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class CombineDense(torch.autograd.Function):
    """As `Combine`, in one product for all tokens and heads. Backward places the outputs again and keeps them packed."""

    @staticmethod
    def forward(ctx, o, weights, weight, bias, where):
        ctx.save_for_backward(o, weights, weight, where)
        ctx.has_bias = bias is not None
        return F.linear(CombineDense.gated(o, weights, where)[1], weight, bias)

    @staticmethod
    def gated(o, weights, where):
        gates = weights.view(-1).index_select(0, where).unsqueeze(1)  # [P, 1]
        full = o.new_zeros(weights.numel(), o.shape[1]).index_copy_(0, where, o * gates.to(o.dtype))
        return gates, full.view(weights.shape[0], -1)  # [T, H*D]

    @staticmethod
    @in_own_dtype
    def backward(ctx, dy):
        o, weights, weight, where = ctx.saved_tensors
        gates, full = CombineDense.gated(o, weights, where)
        dz = (dy @ weight).view(-1, o.shape[1]).index_select(0, where)  # [P, D]
        dgates = (dz.to(weights.dtype) * o).sum(1)
        dweights = weights.new_zeros(weights.numel()).index_copy_(0, where, dgates).view_as(weights)
        return dz * gates.to(o.dtype), dweights, dy.t() @ full, dy.sum(0) if ctx.has_bias else None, None


def heads_of(token: Tensor, offsets: Tensor, heads: int) -> Tensor:
    """The head of every pair [P], int64."""
    per_head = offsets[:: (offsets.shape[0] - 1) // heads].diff()
    return torch.repeat_interleave(torch.arange(heads, device=token.device), per_head, output_size=token.shape[0])


def places(token: Tensor, offsets: Tensor, heads: int) -> Tensor:
    """Where each pair lies in [T, H], as int64: token * H + head."""
    return token.long() * heads + heads_of(token, offsets, heads)


def dense_pays(x: Tensor, pairs: int, heads: int) -> bool:
    """Whether one product for all heads and a gather take less time than one for each head.

    Measured on a CPU by benchmarks/attention.py: narrow products cost little in float32 and much in 16 bits.
    """
    if torch.compiler.is_compiling():  # the other form has shapes that depend on the choice
        return True
    share = pairs / (x.shape[0] * heads)
    return share > (0.2 if x.element_size() == 2 else 0.6)


def project(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], token: Tensor, offsets: Tensor, heads: int, whole: bool
) -> Tensor:
    """`kernels.project` in PyTorch. Whole sequences (`whole`) are never worth a product for all heads."""
    if whole or not dense_pays(x, token.shape[0], heads):
        return Project.apply(x, weight, bias, token, offsets, heads)
    every = F.linear(x, weight, bias).view(x.shape[0] * heads, -1)
    return Select.apply(every, places(token, offsets, heads))


def combine(
    o: Tensor,
    weights: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    token: Tensor,
    offsets: Tensor,
    heads: int,
    whole: bool,
) -> Tensor:
    """`kernels.combine` in PyTorch; `whole` as in `project`."""
    if whole or not dense_pays(o.new_empty(weights.shape[0], 0), token.shape[0], heads):
        return Combine.apply(o, weights, weight, bias, token, offsets, heads)
    return CombineDense.apply(o, weights, weight, bias, places(token, offsets, heads))


def project_heads(x: Tensor, weight: Tensor, bias: Optional[Tensor], heads: Tensor, head_dim: int) -> Tensor:
    """`kernels.project_heads` in PyTorch."""
    chosen = weight.unflatten(0, (-1, head_dim))[heads.long()].flatten(1, 2)  # [B, K*D, C]
    out = (x @ chosen.transpose(1, 2)).unflatten(2, (-1, head_dim))
    return out if bias is None else out + bias.unflatten(0, (-1, head_dim))[heads.long()].unsqueeze(1)


def combine_heads(o: Tensor, gates: Tensor, weight: Tensor, bias: Optional[Tensor], heads: Tensor) -> Tensor:
    """`kernels.combine_heads` in PyTorch."""
    chosen = weight.unflatten(1, (-1, o.shape[3])).permute(1, 2, 0)[heads.long()].flatten(1, 2)  # [B, K*D, C]
    out = (o * gates[:, None, :, None]).to(o.dtype).flatten(2) @ chosen
    return out if bias is None else out + bias


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token: Tensor,
    offsets: Tensor,
    heads: int,
    tokens: int,
    source: Optional[Tensor] = None,
    is_causal: bool = False,
    mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """`kernels.attend` in PyTorch. With `source` all pairs of a segment run or none, and k and v are of those that run, in order."""
    B, D, N = (offsets.shape[0] - 1) // heads, q.shape[1], tokens
    if source is not None:  # whole sequences with keys of their own
        runs = offsets.diff() > 0
        if mask is not None:
            mask = mask.expand(B, heads, -1, -1).transpose(0, 1)[runs.view(heads, B)].unsqueeze(1)  # [X, 1, N, M]
        k, v = k.transpose(0, 1), v.transpose(0, 1)  # [X, 1, M, D]
        o = F.scaled_dot_product_attention(q.view(-1, 1, N, D), k, v, mask, dropout_p, is_causal)
        return o.view(-1, D)
    edges, size = offsets.tolist(), heads // k.shape[1]
    outputs = []
    # The first heads, which all tokens run.
    full = next((h for h in range(heads) if edges[h * B + B] != (h + 1) * B * N), heads)
    if full > 0:
        groups = torch.arange(full, device=q.device) // size
        if full % size == 0:
            kf, vf, grouped = k[:, : full // size], v[:, : full // size], size > 1
        else:
            kf, vf, grouped = k[:, groups], v[:, groups], False
        o = F.scaled_dot_product_attention(
            q[: full * B * N].view(full, B, N, D).transpose(0, 1),
            kf,
            vf,
            mask if mask is None or mask.shape[1] == 1 else mask[:, :full],
            dropout_p,
            is_causal,
            enable_gqa=grouped,
        )  # [B, full, N, D]
        outputs.append(o.transpose(0, 1).reshape(-1, D))
    first = full * B * N
    if edges[-1] > first:
        if is_causal and dropout_p == 0 and not torch.is_grad_enabled() and q.device.type == "cpu":
            segments = [(s % B, s // B // size, edges[s + 1] - edges[s]) for s in range(full * B, heads * B)]
            outputs.append(attend_causal(q[first:], k, v, token[first:].long() % N, segments))
        else:
            outputs.append(attend_padded(q, k, v, token, offsets, full, N, is_causal, mask, dropout_p))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0] if outputs else torch.zeros_like(q)


def attend_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token: Tensor,
    offsets: Tensor,
    full: int,
    N: int,
    is_causal: bool,
    mask: Optional[Tensor],
    dropout_p: float,
) -> Tensor:
    """`attend` for the pairs of heads full .. H - 1, side by side in a buffer [B, L, G, D].

    The queries that read key-value head g of sequence b lie in rows [b, :, g], padded to the longest. So one fused
    call serves all heads, and where they share one key-value head (MoA) nothing is padded.
    """
    (B, G, M, D), device = k.shape, q.device
    counts = offsets.diff().view(-1, B).long()  # [H, B]
    counts = torch.cat([torch.zeros_like(counts[:full]), counts[full:]])
    size = counts.shape[0] // G
    skipped = full // size  # key-value heads that no packed query reads
    in_group = counts.view(G, size, B)[skipped:]
    up_to = in_group.cumsum(1)
    length, groups = int(up_to[:, -1].max()), G - skipped
    # torch's attention on a CPU takes large blocks of queries from these lengths on, which is worth a little padding.
    length = next((most for least, most in ((177, 192), (705, 768)) if least <= length <= min(most, N)), length)
    # Pair p of segment (h, b) goes to the row after those of earlier heads of its group.
    begin = (up_to - in_group).flatten(0, 1) - counts[skipped * size :].flatten().cumsum(0).view(-1, B)
    begin += counts[skipped * size :]  # [heads, B]: row of the first pair minus its place in the list
    b = torch.arange(B, device=device)
    g = torch.arange(in_group.shape[0] * size, device=device) // size
    base = (b * length + begin) * groups + g.unsqueeze(1)
    repeats = counts[skipped * size :].flatten()
    first = int(offsets[full * B])
    P = q.shape[0] - first
    segment = torch.repeat_interleave(torch.arange(repeats.shape[0], device=device), repeats, output_size=P)
    slot = base.flatten().index_select(0, segment) + torch.arange(P, device=device) * groups

    rows = B * length * groups
    buffer = Place.apply(q[first:], slot, rows).view(B, length, groups, D).transpose(1, 2)
    if is_causal or mask is not None:
        pair = slot.new_zeros(rows).index_copy_(0, slot, torch.arange(P, device=device))  # padding repeats the first
        n = (token[first:].long() % N).index_select(0, pair)
        if is_causal:
            mask = n.unsqueeze(1) >= torch.arange(M, device=device)  # [rows, M]
        else:
            seg = segment.index_select(0, pair)
            h = seg // B + skipped * size if mask.shape[1] > 1 else torch.zeros_like(seg)
            mask = mask.expand(B, -1, N, M)[seg % B, h, n]
        mask = mask.view(B, length, groups, M).transpose(1, 2)
    o = F.scaled_dot_product_attention(buffer, k[:, skipped:], v[:, skipped:], mask, dropout_p)
    return Select.apply(o.transpose(1, 2).reshape(rows, D), slot)


def pairs(active: Tensor) -> Tuple[Tensor, Tensor]:
    """The list of what runs, active [B, N, H] -> token [P], offsets [H * B + 1], both int32."""
    B, N, _ = active.shape
    runs = active.permute(2, 0, 1)  # [H, B, N]
    offsets = F.pad(runs.sum(-1).flatten().cumsum(0), (1, 0))
    token = runs.reshape(-1).nonzero().squeeze(1) % (B * N)
    return token.int(), offsets.int()
