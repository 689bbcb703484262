"""The operators of executors that skip heads: in C++ on a CPU, in Triton on a GPU.

    route     tokens, W_router   -> gates, and the pairs that run (in `kernels.route`, for routers)

In float32 on a CPU the executors compute queries and outputs of the pairs that run alone:

    project   tokens, W_q        -> queries of the pairs that run
    attend    queries, all K, V  -> outputs of these pairs
    combine   outputs, gates     -> y, through W_O

On a GPU, and in 16 bits on a CPU, PyTorch computes the linear layers for all heads, and between them there is one operator:

    attend_in_place   all Q, K, V, gates -> weighted outputs of the pairs that run, 0 elsewhere

A pair is a (head, sequence, token) that runs. Pairs are a sorted list (`Pairs`) without padding. `eager` has the same
operators in plain PyTorch. Letters are those of `moh_vision.attention`; T = B * N tokens, P pairs, G key-value heads.
"""

import torch
from torch import Tensor

from moh_vision.attention.kernels import eager
from moh_vision.attention.kernels.build import about as about
from moh_vision.attention.kernels.build import failed_trials as failed_trials
from moh_vision.attention.kernels.build import path, works
from moh_vision.attention.kernels.build import use as use
from moh_vision.attention.kernels.build import using as using
from moh_vision.attention.kernels.contract import DTYPES, WIDEST, call, run
from moh_vision.attention.linear import cast, is_exporting, is_traced, product_dtype
from moh_vision.attention.routing import Pairs, Routing

OPS = torch.ops.moh_vision


def native(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether C++ runs `project`, `attend` and `combine` for tensors of a dtype on a device."""
    return dtype == torch.float32 and _in_cpp(device)


def _in_cpp(device: torch.device) -> bool:
    """Return whether the C++ operators run on a device.

    An exported model does not call them, because it may run where they are not built.
    """
    return device.type == "cpu" and path() == "cpp" and not is_exporting()


@torch.compiler.assume_constant_result  # torch.compile cannot trace an operator that returns no tensor
def _has_products(dtype: torch.dtype) -> bool:
    """Return whether torch has matrix products of a 16-bit dtype (brgemm) for this processor, which the operators call."""
    return OPS.brgemm_available(dtype)


def attend_path(
    device: torch.device, dtype: torch.dtype, head_dim: int, only_torch: bool = False
) -> str:
    """Return the path whose operator computes attention for pairs: "cpp", "triton", or "torch" if no operator can.

    Args:
        device, dtype: device and dtype of the products.
        head_dim: D.
        only_torch: whether the call has dropout or wants a gradient of its mask, which neither operator has.
    """
    if not only_torch:
        if native(device, dtype):
            return "cpp"
        if dtype in (torch.bfloat16, torch.float16) and _in_cpp(device) and _has_products(dtype):
            return "cpp"
        fits = dtype in DTYPES and head_dim <= WIDEST
        if path(device.type) == "triton" and fits and works("pairs", device):
            return "triton"
    return "torch"


def routes(device: torch.device, *dtypes: torch.dtype | None) -> bool:
    """Return whether the Triton operators that project and route work on a device.

    dtypes: of what the router reads, of the product, and of the router's weight.
    """
    return all(dtype in DTYPES for dtype in dtypes) and works("project_and_route", device, *dtypes)


def list_pairs(active: Tensor) -> Pairs:
    """Return the list of pairs that run: active [B, N, H] -> `Pairs`."""
    if active.device.type == "cpu" and path() == "cpp" and not torch.compiler.is_compiling():
        return Pairs(*OPS.pairs(active))
    return eager.pairs(active)


def attend_in_place(
    q: Tensor, k: Tensor, v: Tensor, routing: Routing, is_causal: bool, mask: Tensor | None
) -> Tensor:
    """Compute attention for the pairs that run, and store the weighted outputs where the output projection reads them.

    Triton does it, or C++ in 16 bits. Tensors may have any strides, so views of a larger product are not copied.

    Args:
        q: [B, H, N, D].
        k, v: [B, G, M, D].
        routing: weights and active heads, with the list of pairs if there is one.
        is_causal, mask: see `attend`.

    Returns:
        Outputs [B, N, H*D], 0 where a head is off.
    """
    B, _, N, _ = q.shape
    pairs = pairs_of(routing, B, N)
    gates = _for_sequences(cast(routing.weights, torch.float32), B)
    if path(q.device.type) == "triton":
        from moh_vision.attention.kernels.gpu import library as gpu  # imports Triton

        return gpu.attend(q, k, v, gates, *pairs, is_causal, mask)[0]
    mask = _with_rows(mask, k.shape[2])
    return run("moh_vision::attend_in_place", q, k, v, gates, *pairs, is_causal, mask)[0]


def attend_product(
    product: Tensor,
    heads: int,
    kv_heads: int,
    routing: Routing,
    is_causal: bool,
    mask: Tensor | None,
) -> Tensor:
    """Do as `attend_in_place` with queries, keys and values that are one tensor, whose gradient is one tensor too.

    Args:
        product: [B, N, (H + 2 * G) * D], grouped q | k | v, and by head in each group.
        heads, kv_heads: H and G.
        routing, is_causal, mask: see `attend_in_place`.
    """
    B, N, _ = product.shape
    pairs = pairs_of(routing, B, N)
    gates = _for_sequences(cast(routing.weights, torch.float32), B)
    if path(product.device.type) == "triton":
        from moh_vision.attention.kernels.gpu import library as gpu  # imports Triton

        return gpu.attend_product(product, heads, kv_heads, gates, *pairs, is_causal, mask)[0]
    mask = _with_rows(mask, N)
    inputs = (product, heads, kv_heads, gates, *pairs, is_causal, mask)
    return run("moh_vision::attend_product", *inputs)[0]


def _for_sequences(x: Tensor, batch: int) -> Tensor:
    """Repeat x [1, ..] for `batch` sequences, without a copy; x [batch, ..] stays the same tensor."""
    if x.shape[0] == batch:
        return x
    return x.expand(batch, -1, -1)


def pairs_of(routing: Routing, batch: int, tokens: int) -> Pairs:
    """Return the pairs of a routing for `batch` sequences of `tokens` tokens; list them if the router has not."""
    if routing.pairs is not None and routing.active.shape[:2] == (batch, tokens):
        return routing.pairs
    active = routing.active
    if active.shape[:2] != (batch, tokens):
        active = active.expand(batch, tokens, -1)
    if path(active.device.type) == "triton":
        return Pairs(*call("moh_vision_triton::pairs", active, routing.count))
    return list_pairs(active)


def _with_rows(mask: Tensor | None, keys: int) -> Tensor | None:
    """Return a mask as C++ reads it: bool or float32, with contiguous rows of M = `keys` elements."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        mask = mask.float()
    mask = mask.expand(-1, -1, -1, keys)
    if mask.stride(-1) != 1:
        mask = mask.clone(memory_format=torch.contiguous_format)
    return mask


def fills_tiles(tokens: int) -> bool:
    """Return whether `tokens` tokens nearly fill the tiles of `project_heads`, which have 128 tokens each.

    197 tokens, for example, do not fill two tiles. There, on an H100 with half of the heads active, products of all heads
    were faster.
    """
    return -(-tokens // 128) * 128 <= 1.15 * tokens


def plan_heads(
    active: Tensor, weights: Tensor, count: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Prepare the products below, and slices of weights, for the heads that each sequence runs.

    Args:
        active, weights: [B, 1, H].
        count: K.
        head_dim: D.

    Returns:
        The heads that run [B, K], and two tensors that only the functions below read.
    """
    return call("moh_vision_triton::plan", active, weights, count, head_dim)


def project_heads(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute queries, keys and gated values, [B, N, K, D] each, of the heads that each sequence runs.

    Args:
        x: [B, N, C].
        weight: [3 * H * D, C], grouped q | k | v, and by head in each group.
        bias: [3 * H * D] or None.
        plan: see `plan_heads`.
    """
    return call("moh_vision_triton::project_heads", x, weight, bias, *plan)


def project_groups(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Compute the hidden channels [B, N, K, D] of the groups of an MLP that each sequence runs.

    Args:
        x: [B, N, C].
        weight: [H * D, C].
        bias: [H * D] or None.
        plan: see `plan_heads`.
    """
    heads, _, index = plan
    return call("moh_vision_triton::project_groups", x, weight, bias, heads, index)


def combine_heads(
    o: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: tuple[Tensor, Tensor, Tensor],
    weighed: bool,
) -> Tensor:
    """Project the outputs of the heads, or the hidden channels of the groups, that each sequence runs.

    Args:
        o: [B, N, K, D].
        weight: [C, H * D].
        bias: [C] or None.
        plan: see `plan_heads`.
        weighed: whether o is already multiplied by the gates, as after `project_heads`; else it is multiplied here.

    Returns:
        [B, N, C].
    """
    _, gates, index = plan
    if weighed:
        gates = None
    return call("moh_vision_triton::combine_heads", o, weight, bias, gates, index)


def slice_rows(
    weight: Tensor,
    bias: Tensor | None,
    plan: tuple[Tensor, Tensor, Tensor],
    parts: int,
    x: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return the rows of a weight and a bias for the heads that all sequences run, [parts * K * D, C] and [parts * K * D].

    Args:
        weight, bias: [parts * H * D, C], and [parts * H * D] or None, of all heads, in the dtype of x or in another one.
        plan: see `plan_heads`, of one sequence.
        parts: 3 for queries, keys and values, else 1.
        x: tokens, whose dtype the results have.
    """
    _, _, index = plan
    weight = _as_tried(weight, x)
    if bias is not None:
        bias = _as_tried(bias, x)
    sliced, sliced_bias = call("moh_vision_triton::slice_rows", weight, bias, index, parts, x)
    if bias is None:
        return sliced, None
    return sliced, sliced_bias


def slice_columns(weight: Tensor, plan: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    """Return the columns of a weight [C, H * D] for the heads that all sequences run, times their gates: [C, K * D].

    plan, x: see `slice_rows`.
    """
    _, gates, index = plan
    return call("moh_vision_triton::slice_columns", _as_tried(weight, x), gates, index, x)


def _as_tried(weight: Tensor, x: Tensor) -> Tensor:
    """Return a weight in a dtype with which kernels are tried for tokens x: that of x, or float32."""
    if weight.dtype == x.dtype:
        return weight
    return cast(weight, torch.float32)


def weigh(o: Tensor, weights: Tensor) -> Tensor | None:
    """Multiply outputs of all heads by weights: o [B, H, N, D], weights [B, N or 1, H] -> [B, N, H*D].

    Return None if no operator can do it.
    """
    if is_traced(o) or path(o.device.type) != "triton" or o.dtype not in DTYPES:
        return None
    if not works("weigh", o.device, o.dtype, weights.dtype):
        return None
    return run("moh_vision_triton::weigh", o, _for_sequences(weights, o.shape[0]))


def select(q: Tensor, pairs: Pairs, heads: int) -> Tensor:
    """Select the queries of the pairs from the queries of all heads: q [B, N, H, D] -> [P, D]."""
    return q.reshape(-1, q.shape[-1]).index_select(0, eager.rows_of_pairs(*pairs, heads))


def project(x: Tensor, weight: Tensor, bias: Tensor | None, pairs: Pairs, heads: int) -> Tensor:
    """Project tokens to the queries of the pairs.

    Args:
        x: [T, C].
        weight, bias: W_q [H*D, C], and [H*D] or None, of all heads.
        pairs: the pairs that run.
        heads: H.

    Returns:
        Queries [P, D].
    """
    if native(x.device, product_dtype(x)):
        return run("moh_vision::project", x, weight, bias, *pairs, heads)
    return eager.project(x, weight, bias, *pairs, heads)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairs: Pairs,
    heads: int,
    tokens: int,
    is_causal: bool = False,
    mask: Tensor | None = None,
    source: Tensor | None = None,
) -> Tensor:
    """Compute attention of each pair to all keys of its sequence and head, in C++ and float32.

    Scores are divided by sqrt(D).

    Args:
        q: queries of the pairs [P, D].
        k, v: [B, G, M, D], G a divisor of H; or [1, X, M, D], if `source` says which of the X each pair reads.
        pairs: the pairs that run; pair p is token `pairs.token[p] % N` of its sequence.
        heads, tokens: H and N.
        is_causal: a query at token n sees keys 0 .. n.
        mask: [B or 1, H or 1, N or 1, M], True (attend) or an additive float.
        source: int32 [H * B], for each segment of pairs (a head and a sequence) the index along X that it reads. Not
            read for a segment without pairs, where it may be -1.

    Returns:
        Outputs [P, D], not multiplied by gates; 0 where a query sees no key.
    """
    mask = _with_rows(mask, k.shape[2])
    inputs = (q, k, v, *pairs, heads, tokens, source, is_causal, mask)
    return run("moh_vision::attend", *inputs)[0]


def attend_all(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None) -> Tensor:
    """Compute attention in C++ for all tokens of all heads given: q [B, K, N, D], k and v [B, K, M, D] -> [B, K, N, D]."""
    B, K, N, D = q.shape
    M = k.shape[2]
    # In the list of pairs there is one segment of N pairs for each head and sequence.
    offsets = torch.arange(0, K * B * N + 1, N, dtype=torch.int32)
    if q.dtype != torch.float32:
        token = torch.arange(B * N, dtype=torch.int32).repeat(K)
        mask = _with_rows(mask, M)
        inputs = (q, k, v, None, token, offsets, is_causal, mask)
        o = run("moh_vision::attend_in_place", *inputs)[0]
        return o.view(B, N, K, D).transpose(1, 2)
    # To the operator these are the heads of one sequence.
    S = B * K
    token = torch.arange(N, dtype=torch.int32).repeat(S)
    if mask is not None and mask.shape[:2] != (1, 1):
        mask = mask.expand(B, K, -1, -1).flatten(0, 1).unsqueeze(0)
    k = k.reshape(1, S, M, D)
    v = v.reshape(1, S, M, D)
    o = attend(q.reshape(-1, D), k, v, Pairs(token, offsets), S, N, is_causal, mask)
    return o.view(q.shape)


def combine(
    o: Tensor, weights: Tensor, weight: Tensor, bias: Tensor | None, pairs: Pairs, heads: int
) -> Tensor:
    """Multiply the outputs of the pairs by their gates and by their heads' columns of W_O, and sum them for each token.

    Args:
        o: outputs of the pairs [P, D].
        weights: gates [T, H], in float32 or wider.
        weight, bias: W_O [C, H*D], and [C] or None.
        pairs: the pairs that run.
        heads: H.

    Returns:
        y [T, C].
    """
    if native(o.device, product_dtype(o)):
        return run("moh_vision::combine", o, weights, weight, bias, *pairs, heads)
    return eager.combine(o, weights, weight, bias, *pairs, heads)
