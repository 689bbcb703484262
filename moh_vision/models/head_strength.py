"""How much a head adds to the residual stream."""

from typing import Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn


class Batch(NamedTuple):
    """One call of a model, and which tokens of it count."""

    args: Tuple = ()
    kwargs: dict = {}
    real: Optional[Tensor] = None  # [B, N], 0 at padding; None: all


@torch.no_grad()
def mean_lengths(
    model: nn.Module, projections: Sequence[Tuple[nn.Linear, int]], batches: Iterable[Batch]
) -> List[Tensor]:
    """How much each head of a dense model adds to the residual stream, on average over tokens.

    Args:
        model: called with every batch, in eval mode.
        projections: (output projection, heads) of every attention layer.

    Returns:
        for every layer [H]: the mean of |W_O^h o_h| over the tokens that count.

    Raises:
        ValueError: if there is no batch.
    """
    totals = [torch.zeros(heads, dtype=torch.float64) for _, heads in projections]
    tokens = [0.0] * len(projections)  # of one layer and another: a class token may be there in some only
    batch = Batch()

    def watch(layer: int):
        proj, heads = projections[layer]
        gram = output_gram(proj.weight, heads)

        def hook(module, args):
            length = output_lengths(args[0], gram)  # [B, N, H]
            if batch.real is not None:
                length = length * batch.real.unsqueeze(-1)
            totals[layer].add_(length.sum((0, 1)).double().cpu())
            tokens[layer] += float(length[..., 0].numel() if batch.real is None else batch.real.sum())

        return proj.register_forward_pre_hook(hook)

    hooks = [watch(layer) for layer in range(len(projections))]
    mode = model.training
    try:
        model.eval()
        for batch in batches:
            model(*batch.args, **batch.kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(mode)
    if 0 in tokens:
        raise ValueError("calibrate holds no batch")
    return [(total / count).float() for total, count in zip(totals, tokens)]


def output_gram(weight: Tensor, heads: int) -> Tensor:
    """W^T W of every head's part of an output projection, weight [C, H * D] -> [H, D, D], in float32."""
    w = weight.float().unflatten(1, (heads, -1))  # [C, H, D]
    return torch.einsum("chd,che->hde", w, w)


def output_lengths(o: Tensor, gram: Tensor) -> Tensor:
    """|W_O^h o_h| for every token and head, o [B, N, H * D], gram [H, D, D] -> [B, N, H].

    |W o|^2 = o^T (W^T W) o, without the width of the model in memory for every head.
    """
    o = o.float().unflatten(-1, gram.shape[:2])  # [B, N, H, D]
    return torch.einsum("bnhd,hde,bnhe->bnh", o, gram, o).clamp_min(0).sqrt()
