"""The two attentions of TransNeXt (Shi 2024, arXiv 2311.17132), with head weights from a router.

Both are cosine attention with a learned temperature per head, an embedding added to the unit query, logits
scaled by the log of the number of keys, and a position bias from an MLP. Where it is faster, both skip the
heads that do not run; see `CosinePairs.why_not`.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention import HeadBudget, HeadMixtureAttention, RoutingStats, kernels
from moh_vision.attention.executors import Masked, Tokens
from moh_vision.attention.executors.reasons import has_products, hidden_weights
from moh_vision.attention.executors.reference import attention_matrix
from moh_vision.attention.executors.signature import Signature
from moh_vision.attention.routing import Call

WINDOW = 9  # neighbours of a token, itself included: 3 x 3, row by row
HIDDEN = 512  # hidden width of the MLP that computes the position bias


class Positions(NamedTuple):
    """Geometry of an H x W map whose N = H * W queries see P pooled keys."""

    length: Tensor  # [N] log of the number of keys that a query sees
    outside: Tensor  # [N, 9] True: the neighbour is outside the map; [N, 0] without a local window
    coordinates: Tensor  # [U, 2] distinct relative coordinates, log-scaled
    index: Tensor  # [P * N] index into `coordinates` of each (key, query)


@lru_cache(maxsize=64)
def position_tables(
    size: tuple[int, int], pooled: tuple[int, int], pretrain: tuple[int, int], local: bool
) -> tuple[np.ndarray, ...]:
    """Compute the arrays of `Positions`.

    Args:
        size: (H, W) of the queries.
        pooled: (H, W) of the keys, adaptively pooled from the map; equal to `size` without pooling.
        pretrain: (H, W) of the map in pretraining, the unit of distances.
        local: whether queries also see their 3 x 3 neighbours.
    """
    H, W = size
    values = []  # per side: distinct offsets of a query from a key
    indices = []  # per side [keys, queries]: index into `values`
    for queries, keys, pretrain_side in zip(size, pooled, pretrain):
        position = np.arange(queries, dtype=np.float32)
        centres = []
        for j in range(keys):
            # Adaptive pooling averages from floor(j * q / k) to ceil((j + 1) * q / k).
            first = j * queries // keys
            end = -(-(j + 1) * queries // keys)
            centres.append(position[first:end].mean())
        offset = position[None, :] - np.array(centres, dtype=np.float32)[:, None]  # [keys, queries]
        unique, inverse = np.unique(offset, return_inverse=True)
        values.append(unique / max(pretrain_side - 1, 1) * 8)
        indices.append(inverse.reshape(offset.shape))
    grid = np.stack(np.meshgrid(*values, indexing="ij"), -1).reshape(-1, 2)  # [U, 2]
    coordinates = np.sign(grid) * np.log2(np.abs(grid) + 1) / np.log2(8)
    rows = indices[0][:, None, :, None]
    columns = indices[1][None, :, None, :]
    index = rows * len(values[1]) + columns  # [ph, pw, H, W]

    count = np.full(H * W, pooled[0] * pooled[1])
    outside = np.zeros((H * W, 0), dtype=bool)
    if local:
        row, column = np.divmod(np.arange(H * W), W)
        neighbours = []
        for i in range(WINDOW):
            near_row = row + i // 3 - 1
            near_column = column + i % 3 - 1
            outside_rows = (near_row < 0) | (near_row >= H)
            neighbours.append(outside_rows | (near_column < 0) | (near_column >= W))
        outside = np.stack(neighbours, 1)  # [N, 9]
        count = count + (~outside).sum(1)
    return (
        np.log(count).astype(np.float32),
        outside,
        coordinates.astype(np.float32),
        index.reshape(-1),
    )


def unit(x: Tensor, dim: int) -> Tensor:
    """Return x / |x|, computed in float32 or better: in 16 bits the sum of squares overflows or loses small terms."""
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=dim).to(x.dtype)


class CosineHeads(Masked):
    """Executor that computes all heads of a `CosineAttention`; size: (H, W) of the map, N = H * W."""

    def __init__(
        self,
        layer: nn.Module,
        call: Call,
        prepared: Any,
        positions: Positions,
        size: tuple[int, int],
    ):
        super().__init__(layer, call, prepared)
        self.positions = positions
        self.size = size

    def project(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return unit queries, unit keys and values, each [B, h, N, D]."""
        q, k, v = self.layer.unit_qkv(self.call)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer = self.layer
        q = layer.scaled(q, self.positions.length)
        bias = layer.position_bias(self.positions).transpose(1, 2)  # [h, N, N]
        bias = bias.unsqueeze(0).to(q.dtype)  # [1, h, N, N]
        if layer.fused_attn:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, dropout_p=self.call.dropout_p, scale=1.0
            )
        return layer.attn_drop(attention_matrix(q, k, bias, scale=1.0)) @ v


class CosinePairs(Tokens):
    """Executor that computes a `CosineAttention` for the pairs of a head and a token that runs it.

    Keys and values are computed for all heads.
    """

    def __init__(
        self,
        layer: nn.Module,
        call: Call,
        prepared: Any,
        positions: Positions,
        size: tuple[int, int],
    ):
        super().__init__(layer, call, prepared)
        self.positions = positions
        self.size = size
        self.head = kernels.eager.heads_of(*self.pairs, layer.num_heads)  # [P]
        self.n = self.pairs.token % call.x.shape[1]  # [P] position of the token in its map

    @staticmethod
    def why_not(signature: Signature) -> str:
        s = signature
        if s.trains() or s.mode == "compiled" or not has_products(s):
            return "heads are skipped by the operators in C++, in inference that is not compiled"
        if s.all_heads or 0 in (s.batch, s.tokens) or hidden_weights(s):
            return "every head may run, there are no tokens, or the projections carry hooks"
        return ""

    def project(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return unit queries of the pairs [P, D], and unit keys and values of all heads [B, N, h, D]."""
        layer = self.layer
        of_queries, of_keys, of_values = layer.weights()
        k = layer.by_head(F.linear(self.call.x, *of_keys))
        v = layer.by_head(F.linear(self.call.x, *of_values))
        return unit(self.queries(*of_queries), -1), unit(k, -1), v

    def scaled(self, q: Tensor) -> Tensor:
        """Scale unit queries of the pairs [P, D], as the layer's `scaled` does."""
        length = self.positions.length
        embedding = self.layer.query_embedding.squeeze(1)  # [h, D]
        scale = self.layer.query_scale(length).flatten(0, 1)  # [h * N, 1]
        scale = scale.index_select(0, self.head * len(length) + self.n)  # [P, 1]
        return ((q + embedding.index_select(0, self.head)) * scale).to(q.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # This attention does not divide scores by sqrt(D); the operator does, so multiply by it first.
        q = self.scaled(q) * math.sqrt(q.shape[1])
        mask = self.layer.position_bias(self.positions).transpose(1, 2).unsqueeze(0)  # [1, h, N, N]
        k = k.transpose(1, 2)  # [B, h, N, D]
        v = v.transpose(1, 2)
        return kernels.attend(q, k, v, self.pairs, self.layer.num_heads, k.shape[2], mask=mask)


class AggregatedHeads(CosineHeads):
    """Executor that computes all heads of an `AggregatedAttention`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer = self.layer
        positions = self.positions
        H, W = self.size
        k = layer.padded(k, H, W)  # [B, h, D, H + 2, W + 2]
        v = layer.padded(v, H, W)
        scaled = layer.scaled(q, positions.length)  # [B, h, N, D]

        # Positions are the last dimension: sums over channels and the softmax over keys vectorise along it.
        local = scaled.transpose(2, 3).unflatten(3, (H, W))  # [B, h, D, H, W]
        scores = []
        for i in range(WINDOW):
            top, left = divmod(i, 3)
            scores.append((local * k[..., top : top + H, left : left + W]).sum(2))  # [B, h, H, W]
        near = torch.stack(scores, 2).flatten(3)  # [B, h, 9, N]
        near = near + layer.relative_pos_bias_local.unsqueeze(-1)
        near = near.masked_fill(positions.outside.t(), float("-inf"))
        k_pool, v_pool = layer.pooled(self.call.x.unflatten(1, (H, W)))  # [B, P, h, D]
        far = k_pool.transpose(1, 2) @ scaled.transpose(2, 3)  # [B, h, P, N]
        far = far + layer.position_bias(positions).to(far.dtype)

        attn = layer.attn_drop(torch.cat([near, far], 2).softmax(2))
        near = attn[:, :, :WINDOW]
        far = attn[:, :, WINDOW:]
        near = near + layer.learnable_tokens.transpose(1, 2) @ q.transpose(2, 3)  # [B, h, 9, N]
        near = near + layer.learnable_bias.transpose(1, 2)
        near = near.unflatten(-1, (H, W)).unsqueeze(3)  # [B, h, 9, 1, H, W]
        o = (v_pool.permute(0, 2, 3, 1) @ far).unflatten(-1, (H, W))  # [B, h, D, H, W]
        for i in range(WINDOW):
            top, left = divmod(i, 3)
            o = torch.addcmul(o, near[:, :, i], v[..., top : top + H, left : left + W])
        return o.flatten(3).transpose(2, 3)  # [B, h, N, D]


class AggregatedPairs(CosinePairs):
    """Executor that computes an `AggregatedAttention` for the pairs of a head and a token that runs it.

    Pooled keys and neighbours are attended to separately; the sums of their exponentials, as logarithms, are
    then combined into one softmax.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer = self.layer
        positions = self.positions
        pairs = self.pairs
        head = self.head
        n = self.n
        B, N, h, D = k.shape
        H, W = self.size
        scaled = self.scaled(q)  # [P, D]
        k_pool, v_pool = layer.pooled(self.call.x.unflatten(1, (H, W)))
        k_pool = k_pool.transpose(1, 2)  # [B, h, pooled keys, D]
        v_pool = v_pool.transpose(1, 2)
        bias = layer.position_bias(positions).transpose(1, 2)  # [h, N, pooled keys]
        bias = bias.unsqueeze(0).contiguous()  # [1, h, N, pooled keys]
        # This attention does not divide scores by sqrt(D); the operator does, so multiply by it first.
        enlarged = scaled * math.sqrt(D)
        # far [P, D]; far_sum [P] is the logarithm of the sum that the softmax divides by.
        far, far_sum = kernels.OPS.attend(enlarged, k_pool, v_pool, *pairs, h, N, None, False, bias)

        def padded_rows(t: Tensor) -> Tensor:
            """Pad maps [B, N, h, D] by a border of zeros: [B * (H + 2) * (W + 2) * h, D]."""
            return F.pad(t.reshape(B, H, W, h * D), (0, 0, 1, 1, 1, 1)).view(-1, D)

        k = padded_rows(k)
        v = padded_rows(v)
        # In these rows each neighbour has a fixed offset from the first (upper left) neighbour of its pair.
        sequence = pairs.token // N
        row = n // W
        column = n % W
        first = ((sequence * (H + 2) + row) * (W + 2) + column) * h + head  # [P]
        neighbours = [first + (i // 3 * (W + 2) + i % 3) * h for i in range(WINDOW)]  # [P] each
        scores = [(scaled * k.index_select(0, rows)).sum(1) for rows in neighbours]
        near = torch.stack(scores)  # [9, P]
        near = near + layer.relative_pos_bias_local.t().index_select(1, head)
        near = near.masked_fill(positions.outside.index_select(0, n).t(), float("-inf"))

        # [P], the logarithm of the denominator of the joint softmax.
        total = torch.logaddexp(near.logsumexp(0), far_sum)
        o = far * (far_sum - total).exp().unsqueeze(1)
        by_head = q.split(pairs.offsets[::B].diff().tolist())  # pairs are sorted by head
        near = (near - total).exp() + layer.learnable_bias.squeeze(1).t().index_select(1, head)
        from_query = [queries @ tokens for queries, tokens in zip(by_head, layer.learnable_tokens)]
        near = near + torch.cat(from_query).t()
        for weights, rows in zip(near, neighbours):
            o.addcmul_(weights.unsqueeze(1), v.index_select(0, rows))
        return o


class CosineAttention(HeadMixtureAttention):
    """Attention over all tokens of a map (Shi 2024, eq. 12): [B, H, W, C] -> [B, H, W, C].

    Parameters beside those of `HeadMixtureAttention`: temperature [h, 1, 1], query_embedding [h, 1, D],
    cpb_fc1 and cpb_fc2 (the position MLP).

    Args:
        executor: "packed" and "auto" skip heads where possible and faster; with any other name all heads are computed.
        **kwargs: other arguments of `HeadMixtureAttention`, except kv_heads and qk_norm.
    """

    skipping_executors = (CosinePairs,)
    all_heads_executor = unfused_executor = reference_executor = CosineHeads

    def __init__(self, dim: int, budget: HeadBudget, device=None, dtype=None, **kwargs):
        dd = {"device": device, "dtype": dtype}
        super().__init__(dim, budget, **kwargs, **dd)
        h = budget.heads
        D = budget.head_dim
        self.temperature = nn.Parameter(torch.empty(h, 1, 1, **dd))
        self.query_embedding = nn.Parameter(torch.empty(h, 1, D, **dd))
        self.cpb_fc1 = nn.Linear(2, HIDDEN, **dd)
        self.cpb_fc2 = nn.Linear(HIDDEN, h, **dd)
        self.init_scales()

    def init_scales(self) -> None:
        """Initialise the temperature, whose softplus is 1 / 0.24, and the query embedding."""
        nn.init.constant_(self.temperature, math.log(math.expm1(1 / 0.24)))
        nn.init.trunc_normal_(self.query_embedding, std=0.02)

    def position_bias(self, positions: Positions) -> Tensor:
        """Return the bias of every key and query, [h, P, N]."""
        coordinates = positions.coordinates.to(self.temperature.dtype)  # [U, 2]
        bias = self.cpb_fc2(F.relu(self.cpb_fc1(coordinates)))  # [U, h]
        N = positions.length.shape[0]
        return bias.t().index_select(1, positions.index).view(self.num_heads, -1, N)

    def query_scale(self, length: Tensor) -> Tensor:
        """Return the scale of the queries: length [N] -> [h, N, 1]."""
        return F.softplus(self.temperature) * length.unsqueeze(-1)

    def scaled(self, q: Tensor, length: Tensor) -> Tensor:
        """Add the query embedding to unit queries [B, h, N, D] and scale them; length: [N]."""
        return (q + self.query_embedding) * self.query_scale(length.to(q.dtype))

    def unit_qkv(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return unit queries, unit keys and values, each [B, N, h, D], of a call's tokens [B, N, C]."""
        if call.q is None:
            q, k, v = self.project_all(call)
        else:
            q = call.q
            k, v = self.project_keys_values(call.x)
        return unit(q, -1), unit(k, -1), v

    def forward(self, x: Tensor, positions: Positions) -> tuple[Tensor, RoutingStats]:
        tokens = x.flatten(1, 2)  # [B, N, C]
        routing, q = self.route(tokens)
        call = Call(tokens, routing, q=q, dropout_p=self.attn_drop.p if self.training else 0.0)
        executor = self.make_executor(call, positions, x.shape[1:3])
        y = executor.combine(executor.attend(*executor.project()))  # [B, N, C]
        return self.proj_drop(y.view(x.shape)), routing.stats


class AggregatedAttention(CosineAttention):
    """Attention of a token to its 3 x 3 neighbours and a pooled map, under one softmax (Shi 2024, eq. 3 to 8).

    Neighbours also get weights from the query alone (learnable_tokens, learnable_bias). The window is computed
    as nine shifts of the map: on a CPU this is four to nine times as fast as unfolding it into nine copies.

    Parameters beside those of `CosineAttention`: relative_pos_bias_local [h, 9], learnable_tokens [h, D, 9],
    learnable_bias [h, 1, 9], sr (1 x 1 convolution before pooling), norm.

    Args:
        pool: pooling factor of each side of a map.
    """

    skipping_executors = (AggregatedPairs,)
    all_heads_executor = unfused_executor = reference_executor = AggregatedHeads

    def __init__(self, dim: int, budget: HeadBudget, pool: int, device=None, dtype=None, **kwargs):
        dd = {"device": device, "dtype": dtype}
        super().__init__(dim, budget, **kwargs, **dd)
        h = budget.heads
        D = budget.head_dim
        self.pool = pool
        self.variant = f"pool {pool}"
        self.sr = nn.Conv2d(dim, dim, 1, **dd)
        self.norm = nn.LayerNorm(dim, **dd)  # eps 1e-5, unlike the blocks' norms
        self.relative_pos_bias_local = nn.Parameter(torch.empty(h, WINDOW, **dd))
        self.learnable_tokens = nn.Parameter(torch.empty(h, D, WINDOW, **dd))
        self.learnable_bias = nn.Parameter(torch.empty(h, 1, WINDOW, **dd))
        self.init_local()

    def init_local(self) -> None:
        """Initialise the weights of the window."""
        nn.init.trunc_normal_(self.relative_pos_bias_local, std=0.0004)
        nn.init.trunc_normal_(self.learnable_tokens, std=0.02)
        nn.init.zeros_(self.learnable_bias)

    def pooled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, H, W, C] -> unit keys and values [B, P, h, D]."""
        _, H, W, _ = x.shape
        x = F.gelu(self.sr(x.permute(0, 3, 1, 2)))  # [B, C, H, W]
        x = F.adaptive_avg_pool2d(x, (max(H // self.pool, 1), max(W // self.pool, 1)))
        tokens = self.norm(x.flatten(2).transpose(1, 2))  # [B, P, C]
        k, v = self.project_keys_values(tokens)
        return unit(k, -1), v

    def padded(self, x: Tensor, H: int, W: int) -> Tensor:
        """Put tokens into a map with a border of zeros: [B, h, N, D] -> [B, h, D, H + 2, W + 2]."""
        x = x.transpose(2, 3).flatten(1, 2).unflatten(-1, (H, W))
        return F.pad(x, (1, 1, 1, 1)).unflatten(1, (self.num_heads, self.head_dim))
