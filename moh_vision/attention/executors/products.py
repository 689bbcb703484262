"""Products of tokens with the weights of the heads that each sequence runs: four classes, of which an executor picks one.

Each is constructed for one call, and has `heads` [B or 1, K] (indices of the heads that it computes), `project` for queries,
keys and values, `linear`, one product with the rows of these heads, and `combine`. The heads of a `GroupMixtureMlp` are
groups of hidden channels.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention import kernels
from moh_vision.attention.executors.reasons import has_triton_products
from moh_vision.attention.executors.signature import Signature
from moh_vision.attention.linear import cast_bias, in_float, without_autocast
from moh_vision.attention.routing import Call, Routing


def most_heads(routing: Routing) -> int:
    """Return K, the largest number of heads that a sequence runs.

    At least 1: where nobody runs a head, one of weight 0 is computed, because PyTorch cannot divide 0 columns by heads.
    """
    return routing.count or max(1, int(routing.active.sum(-1).max()))


def heads_that_run(call: Call) -> Tensor:
    """Return K heads for each sequence, as indices [B or 1, K]: its active heads in rising order, then others to fill up."""
    active = call.routing.active.squeeze(1)  # [B or 1, H]
    H = active.shape[1]
    K = most_heads(call.routing)
    # Every active head ranks above every inactive one, and among either a lower index above a higher one.
    rank = active.int() * H - torch.arange(H, device=active.device)
    return rank.topk(K).indices


def plan_heads(layer: nn.Module, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """Return what Triton's kernels read of the heads that each sequence runs, see `kernels.plan_heads`."""
    gates = in_float(routing.weights)
    return kernels.plan_heads(routing.active, gates, most_heads(routing), layer.head_dim)


class SlicedProducts:
    """For one choice that serves all sequences: plain products of all tokens with the rows of the weight for these heads.

    Gates are multiplied into the weight of the output, since (g o) W = o (g W) for gate g.
    """

    def __init__(self, layer: nn.Module, call: Call):
        self.layer = layer
        self.call = call
        self.heads = heads_that_run(call)  # [1, K]

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [B, N, C] and context [B, M, C], which may be x, to q [B, N, K, D], k and v [B, M, K, D]."""
        parts = [self.slice(*weight_and_bias, x.dtype) for weight_and_bias in self.layer.weights()]
        if context is x:  # self-attention: one product for all three
            weights, biases = zip(*parts)
            bias = None
            if biases[0] is not None:
                bias = torch.cat(biases)
            results = F.linear(x, torch.cat(weights), bias).chunk(3, -1)
        else:
            results = [
                F.linear(tokens, *part) for tokens, part in zip((x, context, context), parts)
            ]
        q, k, v = (result.unflatten(-1, (self.heads.shape[1], -1)) for result in results)
        return q, k, v

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Project x [B, N, C] to [B, N, K, D], with weight [H*D, C] and bias [H*D] of all heads."""
        y = F.linear(x, *self.slice(weight, bias, x.dtype))
        return y.unflatten(-1, (self.heads.shape[1], -1))

    def slice(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Return the rows of a weight and a bias that belong to the heads, [K*D, C] and [K*D].

        Args:
            weight, bias: [H*D, C], and [H*D] or None, of all heads.
            dtype: of the result.
        """
        H = self.layer.num_heads
        heads = self.heads.flatten()
        weight = weight.unflatten(0, (H, -1)).index_select(0, heads)  # [K, D, C]
        if bias is not None:
            bias = bias.unflatten(0, (H, -1)).index_select(0, heads)  # [K, D]
            bias = bias.flatten().to(dtype)
        return weight.flatten(0, 1).to(dtype), bias

    def combine(self, o: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Weigh and project o [B, N, K, D] to y [B, N, C], with weight [C, H*D] of all heads and bias [C]."""
        heads = self.heads.flatten()
        gates = self.call.routing.weights.flatten().index_select(0, heads)  # [K]
        weight = weight.unflatten(1, (self.layer.num_heads, -1)).index_select(1, heads)  # [C, K, D]
        weight = (weight * gates[:, None]).flatten(1)
        return F.linear(o.flatten(2), weight.to(o.dtype), bias)


class KernelSlicedProducts(SlicedProducts):
    """`SlicedProducts` on a GPU, without gradients: one kernel a weight, where PyTorch has an operator for every step.

    See `kernels.slice_rows` and `kernels.slice_columns`.
    """

    def __init__(self, layer: nn.Module, call: Call):
        self.layer = layer
        self.call = call
        self.plan = plan_heads(layer, call.routing)
        self.heads = self.plan[0]  # [1, K]

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [B, N, C] and context [B, M, C], which may be x, to q [B, N, K, D], k and v [B, M, K, D]."""
        if context is not x or self.layer.joint_weight() is None:
            return super().project(x, context)
        qkv = self.layer.qkv
        weight, bias = kernels.slice_rows(qkv.weight, qkv.bias, self.plan, 3, x)
        q, k, v = F.linear(x, weight, bias).unflatten(-1, (3, self.heads.shape[1], -1)).unbind(-3)
        return q, k, v

    def slice(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """See `SlicedProducts.slice`."""
        like = self.call.x
        if like.dtype != dtype:
            like = like.new_empty(0, dtype=dtype)
        return kernels.slice_rows(weight, bias, self.plan, 1, like)

    def combine(self, o: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Weigh and project o [B, N, K, D] to y [B, N, C], with weight [C, H*D] of all heads and bias [C]."""
        return F.linear(o.flatten(2), kernels.slice_columns(weight, self.plan, o), bias)


class LookedUpProducts:
    """For a GPU, without gradients: Triton kernels read a sequence's rows from the weight of all heads, without a copy.

    See `kernels.project_heads`, `kernels.project_groups` and `kernels.combine_heads`.
    """

    def __init__(self, layer: nn.Module, call: Call):
        self.layer = layer
        self.call = call
        self.plan = plan_heads(layer, call.routing)
        self.heads = self.plan[0]  # [B, K]
        self.weighed = False  # whether `project` multiplied the gates into the values, so that `combine` must not

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [B, N, C], where `context` must be the tensor x itself, to q, k and gated v [B, N, K, D]."""
        self.weighed = True
        qkv = self.layer.qkv
        bias = cast_bias(qkv.bias, x.dtype)
        return kernels.project_heads(x, qkv.weight.to(x.dtype), bias, self.plan)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Project x [B, N, C] to [B, N, K, D], with weight [H*D, C] and bias [H*D] of all heads."""
        return kernels.project_groups(x, weight.to(x.dtype), cast_bias(bias, x.dtype), self.plan)

    def combine(self, o: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Project o [B, N, K, D] to y [B, N, C], and weigh it unless the values were weighed."""
        return kernels.combine_heads(o, weight.to(o.dtype), bias, self.plan, self.weighed)


class GatheredProducts:
    """For any device: PyTorch gathers the weights of each sequence's heads, and multiplies batch by batch.

    If all sequences chose the same heads, the weights are gathered once, and one product takes the tokens of all sequences.
    """

    def __init__(self, layer: nn.Module, call: Call):
        self.layer = layer
        self.call = call
        self.heads = heads_that_run(call)  # [B, K]
        # [S, K], the heads of each gathered weight; S = 1 if all sequences share one weight, else B.
        self.rows = self.heads
        if alike(call.routing.active.squeeze(1)):
            self.rows = self.heads[:1]

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [B, N, C] and context [B, M, C], which may be x, to q [B, N, K, D], k and v [B, M, K, D]."""
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
        """Weigh and project o [B, N, K, D] to y [B, N, C], with weight [C, H*D] of all heads and bias [C]."""
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
    """Multiplies x [S, T, I] by the weights of the heads `rows` [S, K] of each sequence: [S, T, O].

    dim is the dimension of the heads in weight: 0 for weight [H, D, C] (then I = C, O = K * D), 1 for weight [C, H, D] (then
    I = K * D, O = C). Forward does not keep the gathered weights, to save memory; backward gathers them again.
    """

    @staticmethod
    def forward(ctx, x, weight, rows, dim):
        ctx.save_for_backward(x, weight, rows)
        ctx.dim = dim
        return torch.bmm(x, gather(weight, rows, dim).mT)

    @staticmethod
    def backward(ctx, grad):  # consists of differentiable operations, for gradients of gradients
        x, weight, rows = ctx.saved_tensors
        with without_autocast(x):
            dx = torch.bmm(grad, gather(weight, rows, ctx.dim))
            parts = torch.bmm(grad.mT, x)  # [S, O, I], the gradient of the gathered weights
            # Sum the gradients of each head over sequences by a product with a matrix of 0 and 1: it accumulates in float32
            # also for 16-bit tensors, and always in the same order.
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


Products = SlicedProducts | LookedUpProducts | GatheredProducts


def products_of(signature: Signature, not_looked_up: str) -> type[Products]:
    """Return the class of the products of calls with a signature.

    Args:
        signature: of the calls.
        not_looked_up: why `LookedUpProducts` cannot run them; "" where they can.
    """
    if signature.one_weight():
        s = signature
        if has_triton_products(s) and kernels.works("slice", s.device, s.dtype):
            return KernelSlicedProducts
        return SlicedProducts
    if not not_looked_up:
        return LookedUpProducts
    return GatheredProducts


def alike(active: Tensor) -> bool:
    """Return whether all sequences chose the same heads, active [B, H]; False on a GPU, where asking would synchronise."""
    if torch.compiler.is_compiling():  # or exporting
        return False
    if active.shape[0] == 1:
        return True
    return active.device.type == "cpu" and bool((active == active[:1]).all())
