"""Only the heads that run, through PyTorch's attention of sequences of different lengths, on a GPU."""

from typing import Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from moh_vision.attention import kernels
from moh_vision.attention.executors.masked import masked
from moh_vision.attention.routing import Pairs, Routing

WIDEST = 256  # head width of flash attention
SEQUENCES = 65535  # of flash attention: they are a dimension of its CUDA grid


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    routing: Routing,
    attn_mask: Optional[Tensor] = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention of the heads that run, by flash attention. It cannot be differentiated twice.

    To `varlen_attn` every (head, sequence) is a sequence of one head: its queries are the tokens that run the head, its
    keys are all of the sequence. So queries are gathered, outputs are scattered, and keys and values are copied, for every
    query head where several share them. No shape depends on which heads run, and nothing waits for the GPU.

    It is `masked` with a mask, causally, with dropout, where all heads run, and for inputs that flash attention does not
    take: see `fits`.
    """
    (B, H, N, D), (_, G, M, _) = q.shape, k.shape
    active = routing.active
    if active is None or attn_mask is not None or is_causal or dropout_p > 0 or not fits(q, k, v):
        return masked(q, k, v, routing, attn_mask, is_causal, dropout_p)
    pairs = routing.pairs if routing.pairs is not None else list_pairs(active)
    if active.shape[1] == 1:
        pairs = kernels.spread(pairs, N)
    where = places(pairs, B * N, H)
    # Head after head, as the pairs.
    k, v = (x.transpose(0, 1).unsqueeze(1).expand(G, H // G, B, M, D).reshape(H * B * M, 1, D) for x in (k, v))
    keys = torch.arange(H * B + 1, dtype=torch.int32, device=q.device) * M
    rows = Take.apply(q, where).unsqueeze(1)  # [P, 1, D]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # later versions may prefer cuDNN, untried with empty sequences
        o = varlen_attn(rows, k, v, pairs.offsets, keys, N, M)
    gates = None if routing.weights is None else routing.weights.expand(B, N, H).reshape(-1)
    return Put.apply(o.squeeze(1), gates, where, B * N * H).view(B, N, H * D)


def varlen_attn(*args) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn, whose import takes seconds: it brings PyTorch's compiler."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(*args)


@torch.compiler.assume_constant_result
def has_flash_attention(device: torch.device) -> bool:
    """Whether PyTorch was built with flash attention and the GPU is an Ampere or later."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether flash attention takes q [B, H, N, D], k and v [B, G, M, D].

    It needs a GPU (see `has_flash_attention`), bfloat16 or float16, D a multiple of 8 up to 256, and fewer than 65536
    sequences times heads.
    """
    B, H, _, D = q.shape
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k.dtype == v.dtype
        and D % 8 == 0
        and D <= WIDEST
        and B * H <= SEQUENCES
        and q.numel() > 0
        and k.numel() > 0
        and has_flash_attention(q.device)
    )


def list_pairs(active: Tensor) -> Pairs:
    """`kernels.list_pairs` of active [B, N, H] with room for all pairs: what follows the last that runs means nothing."""
    B, N, H = active.shape
    runs = active.permute(2, 0, 1).flatten()  # [H * B * N]
    every = torch.arange(len(runs), device=runs.device)
    slot = torch.where(runs, runs.cumsum(0) - 1, len(runs))
    token = torch.zeros(len(runs) + 1, dtype=torch.int32, device=runs.device)
    token.index_copy_(0, slot, (every % (B * N)).int())
    offsets = F.pad(runs.view(H * B, N).sum(1).cumsum(0), (1, 0)).int()
    return Pairs(token[:-1], offsets)


def places(pairs: Pairs, tokens: int, heads: int) -> Tensor:
    """Where each pair lies in [T, H]: token * H + head, and T * H for what follows the last pair. int64 [P].

    The last pair is known on the device only. What follows it is read from some row and written to a row T * H beyond
    the others, which nobody reads.
    """
    token, offsets = pairs
    pair = torch.arange(len(token), dtype=torch.int32, device=token.device)
    segment = torch.searchsorted(offsets, pair, right=True) - 1  # head * B + b
    head = segment // ((len(offsets) - 1) // heads)
    return torch.where(pair < offsets[-1], token.long() * heads + head, tokens * heads)


class Take(torch.autograd.Function):
    """The queries of the pairs, out of q [B, H, N, D]: [P, D]. where: see `places`."""

    @staticmethod
    def forward(ctx, q, where):
        ctx.save_for_backward(where)
        ctx.shape = B, H, N, D = q.shape
        row = where.clamp(max=B * N * H - 1)
        token = row // H
        return q[token // N, row % H, token % N]  # without a copy of q, a view of a product with keys and values

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        B, H, N, D = ctx.shape
        dq = grad.new_zeros(B * N * H + 1, D).index_copy_(0, ctx.saved_tensors[0], grad)
        return dq[:-1].view(B, N, H, D).transpose(1, 2), None


class Put(torch.autograd.Function):
    """Outputs of the pairs o [P, D], times gates [rows] or None, at their places in [rows, D]; 0 elsewhere."""

    @staticmethod
    def forward(ctx, o, gates, where, rows):
        ctx.save_for_backward(o, gates, where)
        ctx.rows = rows
        return o.new_zeros(rows + 1, o.shape[1]).index_copy_(0, where, Put.gated(o, gates, where, rows))[:-1]

    @staticmethod
    def gated(o, gates, where, rows):
        if gates is None:
            return o
        return o * gates.index_select(0, where.clamp(max=rows - 1)).unsqueeze(1).to(o.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        o, gates, where = ctx.saved_tensors
        do = grad.index_select(0, where.clamp(max=ctx.rows - 1))
        dgates = None
        if gates is not None:
            of_pairs = (do.to(gates.dtype) * o).sum(1).to(gates.dtype)
            dgates = gates.new_zeros(ctx.rows + 1).index_copy_(0, where, of_pairs)[:-1]
        return Put.gated(do, gates, where, ctx.rows), dgates, None, None
