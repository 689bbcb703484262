"""Products of tokens with the weights of the heads that each sequence runs: three classes.

An object of each is made for one call, and has `heads` [B or 1, K], `project` for queries, keys and values, and `combine`.
Two of them also have `linear`, one product by the rows of the heads. A layer's heads may be groups of an MLP.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention import kernels
from moh_vision.attention.linear import cast_bias, in_float
from moh_vision.attention.routing import Call


def heads_that_run(call: Call) -> Tensor:
    """Return the heads of each sequence, those that run first and in rising order: [B or 1, K]."""
    active = call.routing.active.squeeze(1)  # [B or 1, H]
    H = active.shape[1]
    K = call.routing.count or int(active.sum(1).max())
    rank = active.int() * H - torch.arange(H, device=active.device)
    return rank.topk(K).indices


class SlicedProducts:
    """One choice for all sequences [1, 1, H]: plain products of all tokens by a smaller weight.

    The gate of a head is a factor of its columns of the output weight: (g o) W = o (g W).
    """

    def __init__(self, layer: nn.Module, call: Call):
        self.layer = layer
        self.call = call
        self.heads = heads_that_run(call)  # [1, K]

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [B, N, C] and context [B, M, C], which may be x, to q [B, N, K, D], k and v [B, M, K, D]."""
        parts = [self.slice(*weight_and_bias, x.dtype) for weight_and_bias in self.layer.weights()]
        if context is not x:
            results = [
                F.linear(tokens, *part) for tokens, part in zip((x, context, context), parts)
            ]
        else:
            weights, biases = zip(*parts)
            bias = None
            if biases[0] is not None:
                bias = torch.cat(biases)
            results = F.linear(x, torch.cat(weights), bias).chunk(3, -1)
        q, k, v = (result.unflatten(-1, (self.heads.shape[1], -1)) for result in results)
        return q, k, v

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Project x [B, N, C] to [B, N, K, D], with weight [H*D, C] and bias [H*D] of all heads."""
        y = F.linear(x, *self.slice(weight, bias, x.dtype))
        return y.unflatten(-1, (self.heads.shape[1], -1))

    def slice(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Return rows of a weight [H*D, C] and a bias, those of the heads: [K*D, C] and [K*D]."""
        H = self.layer.num_heads
        heads = self.heads.flatten()
        weight = weight.unflatten(0, (H, -1)).index_select(0, heads)  # [K, D, C]
        if bias is not None:
            bias = bias.unflatten(0, (H, -1)).index_select(0, heads)  # [K, D]
            bias = bias.flatten().to(dtype)
        return weight.flatten(0, 1).to(dtype), bias

    def combine(self, o: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Weigh and project o [B, N, K, D] to [B, N, C], with weight [C, H*D] of all heads and bias [C]."""
        heads = self.heads.flatten()
        gates = self.call.routing.weights.flatten().index_select(0, heads)  # [K]
        weight = weight.unflatten(1, (self.layer.num_heads, -1)).index_select(1, heads)  # [C, K, D]
        weight = (weight * gates[:, None]).flatten(1)
        return F.linear(o.flatten(2), weight.to(o.dtype), bias)


class LookedUpProducts:
    """On a GPU, without gradients: tiles of the products look up the rows of the weight, see `kernels.project_heads`."""

    def __init__(self, layer: nn.Module, call: Call):
        self.layer = layer
        self.call = call
        routing = call.routing
        count = routing.count or int(routing.active.sum(-1).max())
        gates = in_float(routing.weights)
        self.plan = kernels.plan_heads(routing.active, gates, count, layer.head_dim)
        self.heads = self.plan[0]  # [B, K]

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.layer.qkv
        bias = cast_bias(qkv.bias, x.dtype)
        return kernels.project_heads(x, qkv.weight.to(x.dtype), bias, self.plan)

    def combine(self, o: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Project o [B, N, K, D], which the gates of the values weigh, to [B, N, C]."""
        return kernels.combine_heads(o, weight.to(o.dtype), bias, self.plan)


def why_not_looked_up(layer: nn.Module, call: Call) -> str:
    """Return why products that look up the heads of a sequence are no use on a GPU; "" where they are."""
    if not kernels.looks_up_heads(call.x):
        return "no Triton kernel projects such numbers, or gradients are recorded, which other products do faster"
    if call.context is not None or not layer.projects_at_once():
        return "queries, keys and values are not one product"
    if not kernels.fills_tiles(call.x.shape[1]):
        return "tiles of 128 tokens would be half empty, and products of all heads are faster"
    return ""


class GatheredProducts:
    """Products of PyTorch, on any device: each sequence's weights are gathered.

    Sequences that all chose the same heads are one: the weights are gathered once, for one product of all tokens.
    """

    def __init__(self, layer: nn.Module, call: Call):
        self.layer = layer
        self.call = call
        self.heads = heads_that_run(call)  # [B, K]
        self.rows = self.heads  # [S, K], S = 1 or B
        if alike(call.routing.active.squeeze(1)):
            self.rows = self.heads[:1]

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = self.layer.weights()
        return self.linear(x, *queries), self.linear(context, *keys), self.linear(context, *values)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Project x [B, M, C] to [B, M, K, D], with weight [H*D, C] and bias [H*D] of all heads."""
        B, M, C = x.shape
        S, K = self.rows.shape
        H = self.layer.num_heads
        weight = weight.to(x.dtype).view(H, -1, C)
        y = GatheredLinear.apply(x.reshape(S, -1, C), weight, self.rows, 0)
        if bias is not None:
            y = y + bias.to(x.dtype).view(H, -1)[self.rows].view(S, 1, -1)
        return y.view(B, M, K, -1)

    def combine(self, o: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Weigh and project o [B, N, K, D] to [B, N, C], with weight [C, H*D] of all heads and bias [C]."""
        B, N, K, D = o.shape
        S = self.rows.shape[0]
        C = weight.shape[0]
        gates = self.call.routing.weights.squeeze(1).gather(1, self.heads)  # [B, K]
        o = o * gates[:, None, :, None].to(o.dtype)
        weight = weight.to(o.dtype).view(C, -1, D)
        y = GatheredLinear.apply(o.reshape(S, -1, K * D), weight, self.rows, 1).view(B, N, C)
        if bias is None:
            return y
        return y + bias


class GatheredLinear(torch.autograd.Function):
    """x [S, T, I] times the weights of each sequence's heads -> [S, T, O]. Backward gathers them again, and keeps none.

    weight: [H, D, C] (dim 0: O = K * D, I = C) or [C, H, D] (dim 1: O = C, I = K * D); rows [S, K]: the heads.
    """

    @staticmethod
    def forward(ctx, x, weight, rows, dim):
        ctx.save_for_backward(x, weight, rows)
        ctx.dim = dim
        return torch.bmm(x, gather(weight, rows, dim).mT)

    @staticmethod
    def backward(ctx, grad):  # consists of operations that autograd differentiates again
        x, weight, rows = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            dx = torch.bmm(grad, gather(weight, rows, ctx.dim))
            parts = torch.bmm(grad.mT, x)  # [S, O, I]
            # A product with 0 and 1 adds the sequences up: in float32 also in 16 bits, and in the same order every time.
            H = weight.shape[ctx.dim]
            D = weight.shape[ctx.dim + 1]
            which = F.one_hot(rows.flatten(), H).to(parts.dtype).t()  # [H, S * K]
            if ctx.dim == 0:
                parts = parts.reshape(rows.numel(), -1)  # [S * K, D * C]
                dweight = (which @ parts).view_as(weight)
            else:
                parts = parts.unflatten(2, (-1, D)).transpose(1, 2)  # [S, K, C, D]
                parts = parts.reshape(rows.numel(), -1)  # [S * K, C * D]
                dweight = (which @ parts).view(H, -1, D).transpose(0, 1)
            return dx, dweight, None, None


def gather(weight: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Return the weights of heads `rows` [S, K], as [S, O, I]: see `GatheredLinear`."""
    S = rows.shape[0]
    chosen = weight.index_select(dim, rows.flatten())  # [S * K, D, C] or [C, S * K, D]
    if dim == 0:
        return chosen.view(S, -1, chosen.shape[2])
    return chosen.view(chosen.shape[0], S, -1).transpose(0, 1)


def alike(active: Tensor) -> bool:
    """Return whether all sequences chose the same heads, active [B, H]; False where that takes waiting for a device."""
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    if active.shape[0] == 1:
        return True
    return active.device.type == "cpu" and bool((active == active[:1]).all())
