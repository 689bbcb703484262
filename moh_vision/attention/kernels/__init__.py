"""The operators under the executors: Triton on a GPU, compiled C++ on a CPU where it is built, plain PyTorch where not.

    route     tokens, W_router   -> gates, and the pairs that run (in `kernels.route`, for routers)
    project   tokens, W_q        -> queries of the pairs that run
    attend    queries, all K, V  -> their outputs
    combine   outputs, gates     -> y, through W_O

A pair is a (head, sequence, token) that runs; they come as a sorted list (`Pairs`), never padded. Letters as in
`moh_vision.attention`; T = B * N tokens, P pairs.
"""

from typing import Optional

import torch
from torch import Tensor

from moh_vision.attention.kernels import eager
from moh_vision.attention.kernels.build import about, path, use
from moh_vision.attention.routing import Pairs

__all__ = [
    "about",
    "attend",
    "attend_path",
    "attend_placed",
    "combine",
    "list_pairs",
    "native",
    "path",
    "project",
    "select",
    "spread",
    "use",
]

OPS = torch.ops.moh_vision
SHORT_OR_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256  # head width of Triton's kernels


def native(device: torch.device, dtype: torch.dtype, operator: str = "project") -> bool:
    """Whether C++ runs `operator` for such tensors; of those in 16 bits only "attend", where the processor has products."""
    if device.type != "cpu" or path() != "cpp":
        return False
    if dtype in (torch.bfloat16, torch.float16):
        return operator == "attend" and _has_products(dtype)
    return dtype == torch.float32


@torch.compiler.assume_constant_result  # torch.compile cannot trace an operator that returns no tensor
def _has_products(dtype: torch.dtype) -> bool:
    return OPS.brgemm_available(dtype)


def attend_path(
    device: torch.device, dtype: torch.dtype, head_dim: int, mask: Optional[Tensor] = None, dropout_p: float = 0.0
) -> str:
    """The path that `attend` takes. Only plain PyTorch has dropout, and a gradient of a mask."""
    learned = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    if dropout_p == 0 and not learned:
        if native(device, dtype, "attend"):
            return "cpp"
        if path(device.type) == "triton" and dtype in SHORT_OR_SINGLE and head_dim <= WIDEST:
            return "triton"
    return "torch"


def list_pairs(active: Tensor, has_tail: bool = False) -> Pairs:
    """What runs, active [B, N, H].

    has_tail: whether Triton makes the list, without waiting for the device: `token` has room for all pairs, and what
        follows the last of them is undefined.
    """
    if has_tail:
        from moh_vision.attention.kernels import gpu  # imports Triton

        return Pairs(*gpu.pairs(active))
    if active.device.type == "cpu" and path() == "cpp" and not torch.compiler.is_compiling():
        return Pairs(*OPS.pairs(active))
    return Pairs(*eager.pairs(active))


def spread(pairs: Pairs, tokens: int) -> Pairs:
    """Pairs of sequences (one token each) -> those of all their tokens."""
    every = torch.arange(tokens, dtype=torch.int32, device=pairs.token.device)
    return Pairs((pairs.token.unsqueeze(1) * tokens + every).flatten(), pairs.offsets * tokens)


def select(q: Tensor, pairs: Pairs, heads: int) -> Tensor:
    """The queries of the pairs out of those of all heads: q [B, N, H, D] -> [P, D]."""
    return eager.Select.apply(q.reshape(-1, q.shape[-1]), eager.places(*pairs, heads))


def attend_placed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    pairs: Pairs,
    is_causal: bool = False,
    mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """`attend` out of the queries of all heads, weighted and put in place: one kernel in Triton.

    Args:
        q: [B, H, N, D].
        weights: [B, N or 1, H], in float32 or better.
        others: see `attend`.

    Returns:
        [B, N, H*D], 0 where a head is off.
    """
    B, H, N, D = q.shape
    if attend_path(q.device, q.dtype, D, mask, dropout_p) == "triton":
        from moh_vision.attention.kernels import gpu  # imports Triton

        return gpu.attend(q, k, v, weights, *pairs, is_causal, mask)[0]
    where = eager.places(*pairs, H)  # [P]
    o = eager.Select.apply(q.transpose(1, 2).reshape(B * N * H, D), where)
    o = attend(o, k, v, pairs, H, N, None, is_causal, mask, dropout_p)
    gates = weights.expand(B, N, H).reshape(-1).index_select(0, where).unsqueeze(1)
    return eager.Place.apply(o * gates.to(o.dtype), where, B * N * H).view(B, N, H * D)


def project_heads(x: Tensor, weight: Tensor, bias: Optional[Tensor], heads: Tensor, head_dim: int) -> Tensor:
    """Project every sequence to the heads that it runs, the same number K in each.

    Args:
        x: tokens [B, M, C].
        weight, bias: of all heads, [H*D, C] and [H*D] or None. Several projections of the same tokens may be stacked:
            with the weights of q, k and v on top of each other their heads are h, H + h and 2 H + h.
        heads: [B, K] int32, which heads run, none twice in a sequence.
        head_dim: D.

    Returns:
        [B, M, K, D].
    """
    if path(x.device.type) == "triton" and x.dtype in SHORT_OR_SINGLE:
        from moh_vision.attention.kernels import gpu  # imports Triton

        return gpu.project_heads(x, weight, bias, heads, head_dim)
    return eager.project_heads(x, weight, bias, heads, head_dim)


def project(x: Tensor, weight: Tensor, bias: Optional[Tensor], pairs: Pairs, heads: int, whole: bool) -> Tensor:
    """Project tokens to the queries, keys or values of the pairs.

    Args:
        x: tokens [T, C].
        weight, bias: of all heads, [H*D, C] and [H*D] or None.
        whole: all pairs of a sequence and head run, or none.

    Returns:
        [P, D].
    """
    if native(x.device, x.dtype):
        return OPS.project(x, weight, bias, *pairs, heads)
    return eager.project(x, weight, bias, *pairs, heads, whole)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairs: Pairs,
    heads: int,
    tokens: int,
    source: Optional[Tensor] = None,
    is_causal: bool = False,
    mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention of the pairs to all keys of their sequence and head; scores are divided by sqrt(D).

    Args:
        q: [P, D].
        k, v: [B, G, M, D], G a divisor of H; with `source` of any sequences and heads, [1, X, M, D].
        tokens: N; pair p is token token[p] % N of its sequence.
        source: int32 [H * B], which of the X a segment of pairs reads.
        is_causal: a query at token n sees keys 0 .. n.
        mask: [B or 1, H or 1, N or 1, M], True (attend) or an additive float.
        dropout_p: of the attention matrix.

    Returns:
        [P, D], not weighted; 0 where a query sees no key.
    """
    if attend_path(q.device, q.dtype, q.shape[1], mask, dropout_p) != "cpp":
        return eager.attend(q, k, v, *pairs, heads, tokens, source, is_causal, mask, dropout_p)
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask.float()
        mask = mask.expand(-1, -1, -1, k.shape[2])
        mask = mask if mask.stride(-1) == 1 else mask.clone(memory_format=torch.contiguous_format)
    return OPS.attend(q, k, v, *pairs, heads, tokens, source, is_causal, mask)[0]


def combine(
    o: Tensor, weights: Tensor, weight: Tensor, bias: Optional[Tensor], pairs: Pairs, heads: int, whole: bool
) -> Tensor:
    """Weigh the outputs of the pairs, send each through its head's part of W_O and add them up for every token.

    Args:
        o: [P, D].
        weights: [T, H], in float32 or better.
        weight, bias: W_O [C, H*D] and [C] or None.
        whole: see `project`.

    Returns:
        [T, C].
    """
    if native(o.device, o.dtype):
        return OPS.combine(o, weights, weight, bias, *pairs, heads)
    return eager.combine(o, weights, weight, bias, *pairs, heads, whole)


def combine_heads(o: Tensor, gates: Tensor, weight: Tensor, bias: Optional[Tensor], heads: Tensor) -> Tensor:
    """Weigh the heads of every sequence, send each through its part of W_O and add them up.

    Args:
        o: outputs of the heads that run [B, N, K, D].
        gates: their weights [B, K], in float32 or better.
        weight, bias: W_O [C, H*D] and [C] or None.
        heads: [B, K] int32, which heads run, none twice in a sequence.

    Returns:
        [B, N, C].
    """
    if path(o.device.type) == "triton" and o.dtype in SHORT_OR_SINGLE:
        from moh_vision.attention.kernels import gpu  # imports Triton

        return gpu.combine_heads(o, gates, weight, bias, heads)
    return eager.combine_heads(o, gates, weight, bias, heads)
