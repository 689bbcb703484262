"""Heads chosen once for a sequence: gather the weights of its heads, and multiply it by these alone."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention import kernels
from moh_vision.attention.executors.masked import Masked, attend
from moh_vision.attention.linear import product_dtype
from moh_vision.attention.routing import Call


class Sequences(Masked):
    """Whole heads are left out, their keys and values too. Products are plain PyTorch, on any device.

    Every sequence runs the same number K of heads. Where some run fewer, heads of weight 0 fill up. Sequences that all
    chose the same heads are one: the weights are gathered once, for one product of all tokens.
    """

    def __init__(self, layer: nn.Module, call: Call):
        active = call.routing.active.squeeze(1)  # [B, H]
        H = active.shape[1]
        K = call.routing.count or int(active.sum(1).max())
        rank = active.int() * H - torch.arange(
            H, device=active.device
        )  # those that run first, in rising order
        self.heads = rank.topk(K).indices  # [B, K]
        self.rows = self.heads[:1] if alike(active) else self.heads  # [S, K], S = 1 or B
        super().__init__(
            layer, call._replace(x=call.x.to(product_dtype(call.x)))
        )  # once for all products

    def project(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, K, N, D], k and v [B, K, M, D]."""
        layer, call = self.layer, self.call
        context = (
            call.x
            if call.context is None
            else call.context.to(call.x.dtype).expand(call.x.shape[0], -1, -1)
        )
        queries, keys, values = layer.weights()
        q, k, v = (
            self.linear(call.x, *queries),
            self.linear(context, *keys),
            self.linear(context, *values),
        )
        q, k = (
            layer.prepare_queries(q, call.rotary).to(v.dtype),
            layer.prepare_keys(k, call.rotary).to(v.dtype),
        )
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [B, M, C] -> [B, M, K, D], with weight [H*D, C] and bias [H*D] of all heads."""
        (B, M, C), (S, K), H = x.shape, self.rows.shape, self.layer.num_heads
        y = GatheredLinear.apply(
            x.reshape(S, -1, C), weight.to(x.dtype).view(H, -1, C), self.rows, 0
        )
        if bias is not None:
            y = y + bias.to(x.dtype).view(H, -1)[self.rows].view(S, 1, -1)
        return y.view(B, M, K, -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, K, N, D]"""
        call, mask = self.call, self.call.attn_mask
        if mask is not None and mask.shape[1] > 1:  # of every head
            mask = mask.expand(q.shape[0], -1, -1, -1)
            mask = mask.gather(1, self.heads[:, :, None, None].expand(-1, -1, *mask.shape[2:]))
        # In bfloat16, on a processor with such products, the operator takes half of PyTorch's time for 4,096 tokens.
        if kernels.attend_path(q.device, q.dtype, q.shape[-1], mask, call.dropout_p) == "cpp":
            return kernels.attend_all(q, k, v, call.is_causal, mask)
        return attend(q, k, v, mask, call.is_causal, call.dropout_p)

    def combine(self, o: Tensor) -> Tensor:
        (B, K, N, D), weight, bias = o.shape, self.layer.proj.weight, self.layer.proj.bias
        gates = self.call.routing.weights.squeeze(1).gather(1, self.heads)  # [B, K]
        o = (o * gates[:, :, None, None].to(o.dtype)).transpose(1, 2)  # [B, N, K, D]
        C, S = weight.shape[0], self.rows.shape[0]
        y = GatheredLinear.apply(
            o.reshape(S, -1, K * D), weight.to(o.dtype).view(C, -1, D), self.rows, 1
        )
        y = y.view(B, N, C)
        return y if bias is None else y + bias.to(y.dtype)


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
    def backward(ctx, grad):  # of operations that autograd differentiates again
        x, weight, rows = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            dx = torch.bmm(grad, gather(weight, rows, ctx.dim))
            parts = torch.bmm(grad.mT, x)  # [S, O, I]
            # A product with 0 and 1 adds the sequences up: in float32 also in 16 bits, and in the same order every time.
            H, D = weight.shape[ctx.dim], weight.shape[ctx.dim + 1]
            which = F.one_hot(rows.flatten(), H).to(parts.dtype).t()  # [H, S * K]
            if ctx.dim == 0:
                return dx, (which @ parts.reshape(rows.numel(), -1)).view_as(weight), None, None
            parts = (
                parts.unflatten(2, (-1, D)).transpose(1, 2).reshape(rows.numel(), -1)
            )  # [S * K, C * D]
            return dx, (which @ parts).view(H, -1, D).transpose(0, 1), None, None


def gather(weight: Tensor, rows: Tensor, dim: int) -> Tensor:
    """The weights of heads `rows` [S, K], as [S, O, I]: see `GatheredLinear`."""
    S = rows.shape[0]
    chosen = weight.index_select(dim, rows.flatten())  # [S * K, D, C] or [C, S * K, D]
    return (
        chosen.view(S, -1, chosen.shape[2])
        if dim == 0
        else chosen.view(chosen.shape[0], S, -1).transpose(0, 1)
    )


def alike(active: Tensor) -> bool:
    """Whether all sequences chose the same heads, active [B, H]; False where the answer would have to be waited for."""
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    return active.shape[0] == 1 or (
        active.device.type == "cpu" and bool((active == active[:1]).all())
    )
