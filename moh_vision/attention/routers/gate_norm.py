"""`GateNorm`: the batch norm before MAE's gates. It is synchronised over processes, and can be causal."""

import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from moh_vision.attention.linear import in_float
from moh_vision.attention.routers.common import real_tokens

torch.fx.wrap("moments")  # leaves while fx traces
torch.fx.wrap("normalise")
torch.fx.wrap("recomputing")


class GateNorm(_NormBase):
    """Batch norm with the parameters and buffers of nn.BatchNorm1d, for pooled vectors [B, P, C].

    Batch statistics are all-reduced over processes if torch.distributed is initialised. nn.SyncBatchNorm does so on a GPU
    only; its `convert_sync_batchnorm` leaves this class as it is.

    Args:
        dim: C.
        causal: True: P counts tokens, and the output for one token must not depend on later tokens, as it would through
            batch statistics. Training therefore normalises with the running statistics from before this forward, and
            then updates them with the unpadded vectors, without a gradient. False: training normalises with the batch
            statistics, as usual; if all processes together have a single vector, whose variance is 0, with the running
            ones.
    """

    def __init__(self, dim: int, causal: bool, device=None, dtype=None):
        super().__init__(dim, device=device, dtype=dtype)
        self.causal = causal
        # False: no all-reduce, because this process alone runs the layer (see `trial.copied`).
        self.over_processes = True
        # Statistics that the last causal training forward used; activation checkpointing repeats it with the same.
        self.register_buffer("taken_mean", torch.zeros_like(self.running_mean), persistent=False)
        self.register_buffer("taken_var", torch.ones_like(self.running_var), persistent=False)

    def init_weights(self) -> None:
        """Set parameters and buffers to those of a new norm."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        for name, buffer in self.named_buffers():
            nn.init.constant_(buffer, float(name.endswith("var")))

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Normalise x [B, P, C], in float32 or better; padding_mask [B, P] is True at padding."""
        if not self.training:
            return normalise(
                x, self.running_mean, self.running_var, self.weight, self.bias, self.eps
            )
        if self.causal:
            mean, var, n = moments(x.detach(), padding_mask, self.over_processes)
        else:
            mean, var, n = moments(x, padding_mask, self.over_processes)
        again = recomputing()  # then no statistics are updated a second time
        if self.causal:
            if not again:
                self.taken_mean.copy_(self.running_mean)
                self.taken_var.copy_(self.running_var)
            # Clones, because autograd keeps these tensors for backward, and the next forward overwrites the buffers.
            y = normalise(
                x, self.taken_mean.clone(), self.taken_var.clone(), self.weight, self.bias, self.eps
            )
        else:
            # n is 1 where all processes together have one vector.
            mean = torch.where(n > 1, mean, self.running_mean.to(mean.dtype))
            var = torch.where(n > 1, var, self.running_var.to(var.dtype))
            y = normalise(x, mean, var, self.weight, self.bias, self.eps)
        if not again:
            step = self.momentum * (n > 1).to(mean.dtype)  # 0: one vector updates nothing
            unbiased = var.detach() * n / (n - 1).clamp_min(1)
            mean_step = step * (mean.detach() - self.running_mean)
            var_step = step * (unbiased - self.running_var)
            self.running_mean.add_(mean_step.to(self.running_mean.dtype))
            self.running_var.add_(var_step.to(self.running_var.dtype))
            self.num_batches_tracked.add_(1)
        return y


def normalise(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias, in float32 or better.

    Args:
        x: [B, P, C].
        mean, var, weight, bias: [C].
        eps: added to the variance.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    scale = weight.to(dtype) * (var.to(dtype) + eps).rsqrt()
    return (x.to(dtype) - mean.to(dtype)) * scale + bias.to(dtype)


def moments(
    x: Tensor, padding_mask: Tensor | None, over_processes: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean [C], biased variance [C] and number [] of the unpadded vectors of x [B, P, C], over all processes.

    The variance takes a second pass over x, because the mean square minus the squared mean would lose it to rounding.
    """
    x = in_float(x)
    real = real_tokens(x, padding_mask)
    sums = torch.cat([(x * real).sum((0, 1)), real.sum((0, 1))])  # [C + 1]
    total = summed(sums, over_processes)
    n = total[-1].detach()
    mean = total[:-1] / n.clamp_min(1)
    squares = ((x - mean).square() * real).sum((0, 1))  # [C]
    var = summed(squares, over_processes) / n.clamp_min(1)
    return mean, var, n


class AllReduce(torch.autograd.Function):
    """All-reduce (sum). Backward all-reduces the gradient too, because the loss of every process depends on each input."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return AllReduce.apply(grad)


def summed(x: Tensor, over_processes: bool) -> Tensor:
    """Return the sum of x over processes if `over_processes` and there are several; else x itself."""
    if not over_processes or not dist.is_available() or not dist.is_initialized():
        return x
    if dist.get_world_size() == 1:
        return x
    return AllReduce.apply(x)


def recomputing() -> bool:
    """Return whether this forward runs inside a backward, where activation checkpointing repeats an earlier forward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
