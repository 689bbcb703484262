"""The two attentions of TransNeXt (Shi 2024, arXiv 2311.17132), with head weights from a router.

Both are cosine attention with a learned temperature per head, an embedding added to the normalised query, logits that
grow with the logarithm of the number of keys, and a bias that an MLP computes from relative coordinates. Both skip the
heads that do not run where that was measured to pay, see `skips_heads`.
"""

import math
from functools import lru_cache
from typing import NamedTuple, Optional, Tuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention import HeadBudget, HeadMixtureAttention, Routing, RoutingStats, kernels
from moh_vision.attention.executors.masked import attention_matrix, product_dtype
from moh_vision.attention.layer import is_captured
from moh_vision.attention.linear import plain
from moh_vision.attention.routing import Call, Pairs

WINDOW = 9  # neighbours of a token, itself included: 3 x 3, row by row
HIDDEN = 512  # width of the MLP behind the position bias
# By whether gradients are asked for: the numbers in the queries of heads that do not run from which these heads are skipped.
# With fewer the lists cost more than they save. Measured with torch 2.15 on 2 EPYC cores (AVX-512), one thread: layers of 6
# to 32 heads with 38 to 92 % of them active, 49 to 784 tokens, batch 1 to 8.
SMALLEST_SAVING = {False: 18_000, True: 35_000}


class Positions(NamedTuple):
    """What attention must know of an H x W map whose N = H * W queries see P pooled keys."""

    length: Tensor  # [N] logarithm of the number of keys of a query
    outside: Tensor  # [9, N] True where a neighbour lies outside the map; [0, N] without a local window
    coordinates: Tensor  # [U, 2] the different relative coordinates, scaled logarithmically
    index: Tensor  # [P * N] which of them belongs to a key and query


@lru_cache(maxsize=64)
def position_tables(
    size: Tuple[int, int], pooled: Tuple[int, int], pretrain: Tuple[int, int], local: bool
) -> Tuple[np.ndarray, ...]:
    """The arrays of `Positions`.

    Args:
        size: (H, W) of the queries.
        pooled: size of the keys, adaptively pooled from the map; `size` where they are not pooled.
        pretrain: size of the map in pretraining, in whose units distances are measured.
        local: whether queries also see their 3 x 3 neighbours.
    """
    H, W = size
    values, inverse = [], []
    for queries, keys, unit in zip(size, pooled, pretrain):
        where = np.arange(queries, dtype=np.float32)
        # Adaptive pooling averages from floor(j * q / k) to ceil((j + 1) * q / k).
        centres = [where[j * queries // keys : -(-(j + 1) * queries // keys)].mean() for j in range(keys)]
        offset = where[None, :] - np.array(centres, dtype=np.float32)[:, None]  # [keys, queries]
        unique, place = np.unique(offset, return_inverse=True)
        values.append(unique / max(unit - 1, 1) * 8)
        inverse.append(place.reshape(offset.shape))
    grid = np.stack(np.meshgrid(*values, indexing="ij"), -1).reshape(-1, 2)
    coordinates = np.sign(grid) * np.log2(np.abs(grid) + 1) / np.log2(8)
    index = inverse[0][:, None, :, None] * len(values[1]) + inverse[1][None, :, None, :]  # [ph, pw, H, W]

    count = np.full(H * W, pooled[0] * pooled[1])
    outside = np.zeros((0, H * W), dtype=bool)
    if local:
        row, column = np.divmod(np.arange(H * W), W)
        steps = [(i // 3 - 1, i % 3 - 1) for i in range(WINDOW)]
        outside = np.stack(
            [(row + i < 0) | (row + i >= H) | (column + j < 0) | (column + j >= W) for i, j in steps]
        )  # [9, N]
        count = count + (~outside).sum(0)
    return np.log(count).astype(np.float32), outside, coordinates.astype(np.float32), index.reshape(-1)


def unit(x: Tensor, dim: int) -> Tensor:
    """x / |x|, in float32 or better: in 16 bits the sum of squares overflows or loses its small terms."""
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=dim).to(x.dtype)


class CosineAttention(HeadMixtureAttention):
    """Attention over all tokens of a map (Shi 2024, eq. 12): [B, H, W, C] -> [B, H, W, C].

    Parameters beside those of `HeadMixtureAttention`: temperature [h, 1, 1], query_embedding [h, 1, D], cpb_fc1 and
    cpb_fc2 (the position MLP).

    Args:
        executor: "packed" and "auto" skip heads where that can be done and where it pays; any other name computes all.
    """

    def __init__(
        self, dim: int, budget: HeadBudget, router: str, scope: str, router_kwargs: Optional[dict], executor: str = "auto",
        qkv_bias: bool = True, attn_drop: float = 0.0, proj_drop: float = 0.0, fused_attn: bool = True,
        device=None, dtype=None,
    ):  # fmt: skip
        dd = {"device": device, "dtype": dtype}
        super().__init__(
            dim, budget, router, scope, executor, qkv_bias=qkv_bias,
            attn_drop=attn_drop, proj_drop=proj_drop, router_kwargs=router_kwargs, fused_attn=fused_attn, **dd,
        )  # fmt: skip
        h, D = budget.heads, budget.head_dim
        self.temperature = nn.Parameter(torch.empty(h, 1, 1, **dd))
        self.query_embedding = nn.Parameter(torch.empty(h, 1, D, **dd))
        self.cpb_fc1 = nn.Linear(2, HIDDEN, **dd)
        self.cpb_fc2 = nn.Linear(HIDDEN, h, **dd)
        self.init_scales()

    def init_scales(self) -> None:
        """Temperature such that softplus gives 1 / 0.24."""
        nn.init.constant_(self.temperature, math.log(math.expm1(1 / 0.24)))
        nn.init.trunc_normal_(self.query_embedding, std=0.02)

    def position_bias(self, positions: Positions) -> Tensor:
        """[h, P, N]"""
        bias = self.cpb_fc2(F.relu(self.cpb_fc1(positions.coordinates.to(self.temperature.dtype))))  # [U, h]
        N = positions.length.shape[0]
        return bias.t().index_select(1, positions.index).view(self.num_heads, -1, N)

    def query_scale(self, length: Tensor) -> Tensor:
        """What queries are multiplied by, length [N] -> [h, N, 1]."""
        return F.softplus(self.temperature) * length.unsqueeze(-1)

    def scaled(self, q: Tensor, length: Tensor) -> Tensor:
        """Unit queries [B, h, N, D] as they meet the keys; length [N]."""
        return (q + self.query_embedding) * self.query_scale(length.to(q.dtype))

    def unit_qkv(self, x: Tensor, queries: Optional[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
        """x [B, N, C] -> unit queries, unit keys, values, each [B, N, h, D]; queries [B, h, N, D] if already projected."""
        if queries is None:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        else:
            kv = self.project_rows(x, self.q_dim, 3 * self.q_dim)
            k, v = kv.unflatten(-1, (2, self.num_heads, self.head_dim)).unbind(2)
            q = queries.transpose(1, 2)
        return unit(q, -1), unit(k, -1), v

    def forward(self, x: Tensor, positions: Positions) -> Tuple[Tensor, RoutingStats]:
        B, H, W, C = x.shape
        tokens = x.flatten(1, 2)  # [B, N, C]
        routing, queries = self.route(tokens)
        if not torch.jit.is_scripting():
            if self.skips_heads(tokens, routing):
                return self.proj_drop(self.packed_map(x, positions, routing, queries)), routing.stats
        q, k, v = self.unit_qkv(tokens, queries)  # [B, N, h, D]
        q = self.scaled(q.transpose(1, 2), positions.length)  # [B, h, N, D]
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        bias = self.position_bias(positions).transpose(1, 2).unsqueeze(0).to(q.dtype)  # [1, h, N, N]
        if self.fused_attn:
            dropout_p = self.attn_drop.p if self.training else 0.0
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=1.0)
        else:
            o = self.attn_drop(attention_matrix(q, k, bias, scale=1.0)) @ v
        o = o.transpose(1, 2)  # [B, N, h, D]
        weights = routing.weights  # a variable: TorchScript would not see in an attribute that it is not None
        if weights is not None:
            o = o * weights.unsqueeze(-1).to(o.dtype)
        return self.proj_drop(self.proj(o.reshape(B, H, W, C))), routing.stats

    @torch.jit.unused
    def skips_heads(self, x: Tensor, routing: Routing) -> bool:
        """Whether to call `packed`: with executor "packed" where it can run, with "auto" where that was measured to pay.

        x: tokens [B, N, C].
        """
        if self.executor not in ("auto", "packed") or is_captured(x) or routing.active is None or x.numel() == 0:
            return False
        if not self.fused_attn or not all(map(plain, self.projections)):
            return False
        if self.executor == "packed":  # Triton's kernels do not know this attention
            return kernels.path(x.device.type) != "triton"
        skipped = x.shape[0] * x.shape[1] * self.head_dim * (self.num_heads - self.budget.active)
        train = self.training or torch.is_grad_enabled()
        return skipped >= SMALLEST_SAVING[train] and kernels.native(x.device, product_dtype(x))

    @torch.jit.unused
    def packed_map(self, x: Tensor, positions: Positions, routing: Routing, queries: Optional[Tensor]) -> Tensor:
        """`packed` for a map x [B, H, W, C] -> [B, H, W, C]; queries [B, h, N, D] if already projected."""
        dropout_p = self.attn_drop.p if self.training else 0.0
        call = Call(x.flatten(1, 2), routing, q=queries, dropout_p=dropout_p)
        return self.packed(call, positions, x.shape[1:3]).view(x.shape)

    def scaled_pairs(self, q: Tensor, head: Tensor, n: Tensor, length: Tensor) -> Tensor:
        """As `scaled`, for the unit queries of pairs [P, D], of which each is head[p] at token n[p] of its map."""
        scale = self.query_scale(length).flatten(0, 1).index_select(0, head * length.shape[0] + n)  # [P, 1]
        return ((q + self.query_embedding.squeeze(1).index_select(0, head)) * scale).to(q.dtype)

    @torch.jit.unused
    def attend_pairs(
        self,
        call: Call,
        q: Tensor,
        pairs: Pairs,
        whole: bool,
        keys_values: list,
        positions: Positions,
        size: Tuple[int, int],
    ) -> Tensor:
        """See `HeadMixtureAttention.attend_pairs`; keys and values of all heads are computed in any case.

        While training the position bias needs a gradient, which the C++ operator does not give: PyTorch attends then.
        """
        q, k, v = self.unit_pairs(call, q, keys_values)
        N = k.shape[1]
        # `attend` divides scores by sqrt(D); this attention does not.
        q = self.scaled_pairs(
            q, kernels.eager.heads_of(*pairs, self.num_heads), pairs.token % N, positions.length
        ) * math.sqrt(self.head_dim)
        mask = self.position_bias(positions).transpose(1, 2).unsqueeze(0).to(q.dtype)  # [1, h, N, N]
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        return kernels.attend(q, k, v, pairs, self.num_heads, N, mask=mask, dropout_p=call.dropout_p)

    def unit_pairs(self, call: Call, q: Tensor, keys_values: list) -> Tuple[Tensor, Tensor, Tensor]:
        """Unit queries of the pairs [P, D], and unit keys and values of all [B, N, h, D]."""
        ((weight, bias),) = keys_values
        kv = F.linear(call.x, weight, bias).unflatten(-1, (2, self.num_heads, self.head_dim))
        return unit(q, -1), unit(kv[:, :, 0], -1), kv[:, :, 1]


class AggregatedAttention(CosineAttention):
    """Attention of a token to its 3 x 3 neighbours and to a pooled map, under one softmax (Shi 2024, eq. 3 to 8).

    Neighbours also count by weights that depend on the query alone (learnable_tokens, learnable_bias). The window is
    read by shifting the map nine times, never copied nine-fold: on a CPU four to nine times as fast as unfolding it.

    Parameters beside those of `CosineAttention`: relative_pos_bias_local [h, 9], learnable_tokens [h, D, 9],
    learnable_bias [h, 1, 9], sr (1 x 1 convolution before pooling), norm.

    Args:
        pool: how many tokens of a side become one.
    """

    def __init__(self, dim: int, budget: HeadBudget, pool: int, device=None, dtype=None, **kwargs):
        dd = {"device": device, "dtype": dtype}
        super().__init__(dim, budget, **kwargs, **dd)
        h, D = budget.heads, budget.head_dim
        self.pool = pool
        self.window = WINDOW  # a constant for TorchScript
        self.sr = nn.Conv2d(dim, dim, 1, **dd)
        self.norm = nn.LayerNorm(dim, **dd)  # eps 1e-5, unlike the norms of the blocks
        self.relative_pos_bias_local = nn.Parameter(torch.empty(h, WINDOW, **dd))
        self.learnable_tokens = nn.Parameter(torch.empty(h, D, WINDOW, **dd))
        self.learnable_bias = nn.Parameter(torch.empty(h, 1, WINDOW, **dd))
        self.init_local()

    def init_local(self) -> None:
        nn.init.trunc_normal_(self.relative_pos_bias_local, std=0.0004)
        nn.init.trunc_normal_(self.learnable_tokens, std=0.02)
        nn.init.zeros_(self.learnable_bias)

    def pooled(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """x [B, H, W, C] -> unit keys and values [B, P, h, D]."""
        _, H, W, _ = x.shape
        x = F.gelu(self.sr(x.permute(0, 3, 1, 2)))  # [B, C, H, W]
        x = F.adaptive_avg_pool2d(x, (max(H // self.pool, 1), max(W // self.pool, 1)))
        kv = self.project_rows(self.norm(x.flatten(2).transpose(1, 2)), self.q_dim, 3 * self.q_dim)  # [B, P, 2 * C]
        k, v = kv.unflatten(-1, (2, self.num_heads, self.head_dim)).unbind(2)
        return unit(k, -1), v

    def padded(self, x: Tensor, H: int, W: int) -> Tensor:
        """[B, N, h, D] -> [B, h, D, H + 2, W + 2], zeros around."""
        x = x.permute(0, 2, 3, 1).flatten(1, 2).unflatten(-1, (H, W))
        return F.pad(x, (1, 1, 1, 1)).unflatten(1, (self.num_heads, self.head_dim))

    def forward(self, x: Tensor, positions: Positions) -> Tuple[Tensor, RoutingStats]:
        B, H, W, C = x.shape
        tokens = x.flatten(1, 2)
        routing, queries = self.route(tokens)
        if not torch.jit.is_scripting():
            if self.skips_heads(tokens, routing):
                return self.proj_drop(self.packed_map(x, positions, routing, queries)), routing.stats
        q, k, v = self.unit_qkv(tokens, queries)  # [B, N, h, D]
        k, v = self.padded(k, H, W), self.padded(v, H, W)  # [B, h, D, H + 2, W + 2]
        q = q.transpose(1, 2)  # [B, h, N, D]
        scaled = self.scaled(q, positions.length)

        # Positions last, so that sums over a head's 24 channels and the softmax over keys are vectorised over them.
        local = scaled.transpose(2, 3).reshape(B, self.num_heads, self.head_dim, H, W)
        scores = []
        for i in range(self.window):
            top, left = i // 3, i % 3
            scores.append((local * k[..., top : top + H, left : left + W]).sum(2))  # [B, h, H, W]
        near = torch.stack(scores, 2).flatten(3) + self.relative_pos_bias_local.unsqueeze(-1)  # [B, h, 9, N]
        near = near.masked_fill(positions.outside, float("-inf"))
        k_pool, v_pool = self.pooled(x)  # [B, P, h, D]
        far = k_pool.transpose(1, 2) @ scaled.transpose(2, 3)  # [B, h, P, N]
        far = far + self.position_bias(positions).to(far.dtype)

        attn = torch.cat([near, far], 2).softmax(2)
        attn = self.attn_drop(attn)
        near, far = attn[:, :, : self.window], attn[:, :, self.window :]
        near = near + self.learnable_tokens.transpose(1, 2) @ q.transpose(2, 3)  # [B, h, 9, N]
        near = (near + self.learnable_bias.transpose(1, 2)).unflatten(-1, (H, W)).unsqueeze(3)  # [B, h, 9, 1, H, W]
        o = (v_pool.permute(0, 2, 3, 1) @ far).unflatten(-1, (H, W))  # [B, h, D, H, W]
        for i in range(self.window):
            top, left = i // 3, i % 3
            o = torch.addcmul(o, near[:, :, i], v[..., top : top + H, left : left + W])
        o = o.permute(0, 3, 4, 1, 2)  # [B, H, W, h, D]
        weights = routing.weights
        if weights is not None:
            o = o * weights.unsqueeze(-1).to(o.dtype).unflatten(1, (H, W) if weights.shape[1] > 1 else (1, 1))
        return self.proj_drop(self.proj(o.reshape(B, H, W, C))), routing.stats

    @torch.jit.unused
    def skips_heads(self, x: Tensor, routing: Routing) -> bool:
        """As in `CosineAttention`; only where C++ runs, and without gradients: `attend_pairs` needs the sums of `attend`."""
        if not super().skips_heads(x, routing) or self.training or torch.is_grad_enabled():
            return False
        return kernels.native(x.device, product_dtype(x))

    @torch.jit.unused
    def attend_pairs(
        self,
        call: Call,
        q: Tensor,
        pairs: Pairs,
        whole: bool,
        keys_values: list,
        positions: Positions,
        size: Tuple[int, int],
    ) -> Tensor:
        """As in `CosineAttention`. Pooled keys and neighbours are apart, and share one softmax through the sums of both."""
        H, W = size
        q, k, v = self.unit_pairs(call, q, keys_values)
        B, N, h, D = k.shape
        head, n = kernels.eager.heads_of(*pairs, self.num_heads), pairs.token % N
        scaled = self.scaled_pairs(q, head, n, positions.length)
        k_pool, v_pool = (t.transpose(1, 2) for t in self.pooled(call.x.unflatten(1, size)))  # [B, h, P, D]
        bias = self.position_bias(positions).transpose(1, 2).unsqueeze(0).contiguous()  # [1, h, N, P]
        # `attend` divides scores by sqrt(D); this attention does not.
        enlarged = scaled * math.sqrt(D)
        far, far_sum = kernels.OPS.attend(enlarged, k_pool, v_pool, *pairs, h, N, None, False, bias)  # [P, D], log [P]

        # Neighbours lie at fixed distances from a pair in maps with zeros around them, as rows of D numbers.
        k, v = (F.pad(t.reshape(B, H, W, h * D), (0, 0, 1, 1, 1, 1)).view(-1, D) for t in (k, v))
        sequence, row, column = pairs.token // N, n // W, n % W
        first = ((sequence * (H + 2) + row) * (W + 2) + column) * h + head
        places = [first + (i // 3 * (W + 2) + i % 3) * h for i in range(self.window)]
        near = torch.stack([(scaled * k.index_select(0, place)).sum(1) for place in places])  # [9, P]
        near = near + self.relative_pos_bias_local.t().index_select(1, head)
        near = near.masked_fill(positions.outside.index_select(1, n), float("-inf"))

        total = torch.logaddexp(near.logsumexp(0), far_sum)
        o = far * (far_sum - total).exp().unsqueeze(1)
        by_head = q.split(pairs.offsets[::B].diff().tolist())
        near = (near - total).exp() + self.learnable_bias.squeeze(1).t().index_select(1, head)
        near = near + torch.cat([rows @ tokens for rows, tokens in zip(by_head, self.learnable_tokens)]).t()
        for weights, place in zip(near, places):
            o.addcmul_(weights.unsqueeze(1), v.index_select(0, place))
        return o
