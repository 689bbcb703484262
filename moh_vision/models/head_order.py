"""Measure how much each head, and each hidden channel of an MLP, adds to the residual stream; order a model by it."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

Batch = Tensor | Sequence[Tensor] | dict  # what a model is called with


class Measured(NamedTuple):
    """A linear layer whose input is a sum of parts, and what measures them."""

    linear: nn.Module
    # Takes the input [B, N, P * D]; returns the length of what each part adds to a token, [B, N, P].
    lengths: Callable[[Tensor], Tensor]


def order_by_contribution(
    model: nn.Module,
    attentions: Sequence[nn.Module],
    mlps: Sequence[nn.Module],
    batches: Iterable[Batch],
    **options,
) -> None:
    """Sort the heads of every attention layer, and the hidden channels of every MLP, the largest contribution first.

    The first heads of a layer become its shared heads, and among equal gates (zero routers) the first routed heads
    run; so after sorting the strongest heads run. A key-value head that several query heads share moves with its
    group, the strongest group first. An MLP's groups are neighbouring channels: the first group gets the strongest
    ones. The output stays the same up to the order of summation.

    Args:
        model, attentions, batches, options: see `head_lengths`.
        mlps: MLPs with linear layers fc1 and fc2 around an activation, all of whose groups run.
    """
    measured = [of_heads(attn) for attn in attentions] + [of_channels(mlp) for mlp in mlps]
    lengths = mean_lengths(model, measured, batches, **options)
    for attn, of_each_head in zip(attentions, lengths):
        permute_heads(attn, of_each_head)
    for mlp, of_each_channel in zip(mlps, lengths[len(attentions) :]):
        permute_channels(mlp, of_each_channel)


def head_lengths(
    model: nn.Module, attentions: Sequence[nn.Module], batches: Iterable[Batch], **options
) -> list[Tensor]:
    """Measure how much each head of a dense model adds to the residual stream.

    Args:
        model: called with every batch, in eval mode.
        attentions: its attention layers, see `projections`.
        batches: tensors, tuples of arguments, or dicts. Padding ("attention_mask" 0) does not count, and
            "labels" are left out.
        options: keyword arguments of every call.

    Returns:
        For every layer [H]: the mean over tokens of |W_O^h o_h|, the length of what head h adds to a token
            (in a DiT before the gate, which scales all heads alike).
    """
    return mean_lengths(model, [of_heads(attn) for attn in attentions], batches, **options)


def of_heads(attn: nn.Module) -> Measured:
    """Return what measures the heads of an attention layer: |W_O^h o_h|."""
    out, inputs = projections(attn)
    for linear in (out, *(linear for linear, _ in inputs)):
        check_readable(linear)
    gram = output_gram(out.weight, out.in_features // attn.head_dim)
    return Measured(out, partial(output_lengths, gram=gram))


def of_channels(mlp: nn.Module) -> Measured:
    """Return what measures the hidden channels of an MLP: |h_j| times the length of column j of W2."""
    check_readable(mlp.fc1)
    check_readable(mlp.fc2)
    columns = mlp.fc2.weight.detach().float().norm(dim=0)  # [G * D]
    return Measured(mlp.fc2, lambda hidden: hidden.float().abs() * columns)


def check_readable(linear: nn.Module) -> None:
    """Refuse a layer whose weight does not say what the layer computes: pruned, quantised or under an adapter.

    Unlike `plain` it allows hooks, which change no weights: measuring uses some.
    """
    weight = linear.__dict__["_parameters"].get("weight")
    if type(linear) is not nn.Linear or type(weight) is not nn.Parameter:
        class_name = f"{type(linear).__module__}.{type(linear).__name__}"
        raise ValueError(
            f"calibrate sorts the weights of plain linear layers, and a {class_name} has other ones: convert first, and prune, "
            "quantise or add adapters afterwards"
        )


@torch.no_grad()
def mean_lengths(
    model: nn.Module, measured: Sequence[Measured], batches: Iterable[Batch], **options
) -> list[Tensor]:
    """Return the mean of each part's length over the tokens of all batches, [P] for every linear layer; see `head_lengths`."""
    totals: list[Tensor | float] = [0.0] * len(measured)
    tokens = [0.0] * len(measured)  # per layer: a class token may be in some layers only
    mask = None  # [B, N] of the present batch, 0 at padding; None: no padding

    def watch(layer: int):
        linear, lengths_of = measured[layer]

        def hook(module, args):
            lengths = lengths_of(args[0])  # [B, N, P]
            counted = mask
            if counted is None:
                counted = torch.ones_like(lengths[..., 0])
            totals[layer] += (lengths * counted.unsqueeze(-1)).sum((0, 1)).double().cpu()
            tokens[layer] += float(counted.sum())

        return linear.register_forward_pre_hook(hook)

    hooks = [watch(layer) for layer in range(len(measured))]
    mode = model.training
    try:
        model.eval()
        for batch in batches:
            mask = None
            if hasattr(batch, "items"):
                mask = batch.get("attention_mask")
                inputs = {name: value for name, value in batch.items() if name != "labels"}
                model(**inputs, **options)
            elif isinstance(batch, (tuple, list)):
                model(*batch, **options)
            elif isinstance(batch, Tensor):
                model(batch, **options)
            else:
                wanted = "a tensor (images, or a tokenizer's input_ids), or a tuple or dict of them"
                raise ValueError(f"calibrate holds {batch!r:.40}; expected batches, each {wanted}")
    finally:
        for hook in hooks:
            hook.remove()
        model.train(mode)
    if 0 in tokens:
        raise ValueError("calibrate holds no batch")
    return [(total / count).float() for total, count in zip(totals, tokens)]


def projections(attn: nn.Module) -> tuple[nn.Linear, list[tuple[nn.Linear, list[int]]]]:
    """Return an attention's output projection, and [(input projection, [rows of each part, ...]), ...].

    The parts are queries, keys and values, in this order.
    """
    if hasattr(attn, "qkv"):
        queries = attn.proj.in_features
        keys = (attn.qkv.out_features - queries) // 2
        return attn.proj, [(attn.qkv, [queries, keys, keys])]
    inputs = (attn.q_proj, attn.k_proj, attn.v_proj)
    return attn.o_proj, [(linear, [linear.out_features]) for linear in inputs]


@torch.no_grad()
def permute_heads(attn: nn.Module, lengths: Tensor) -> None:
    """Sort a layer's heads in place by `lengths` [H], the largest first.

    Groups of query heads that share a key-value head are sorted by their sum, then the heads in each group.
    """
    out, inputs = projections(attn)
    D = attn.head_dim
    _, parts = inputs[-1]
    values = parts[-1]  # number of rows of the values, the last part
    by_group = lengths.view(values // D, -1)  # [G, query heads of a key-value head]
    groups = by_group.sum(1).argsort(descending=True, stable=True)
    inside = by_group[groups].argsort(dim=1, descending=True, stable=True)
    heads = (groups.unsqueeze(1) * by_group.shape[1] + inside).flatten()

    def channels(order: Tensor) -> Tensor:
        """Return the indices of the channels of heads in this order."""
        return (order.unsqueeze(1) * D + torch.arange(D)).flatten().to(out.weight.device)

    for linear, parts in inputs:
        ordered = []
        for rows in torch.arange(linear.out_features, device=out.weight.device).split(parts):
            # Queries have D rows for each head, keys and values for each group. Of size 1, groups are heads.
            order = heads if len(rows) == out.in_features else groups
            ordered.append(rows[channels(order)])
        rows = torch.cat(ordered)
        linear.weight.copy_(linear.weight[rows])
        if linear.bias is not None:
            linear.bias.copy_(linear.bias[rows])
    out.weight.copy_(out.weight[:, channels(heads)])


@torch.no_grad()
def permute_channels(mlp: nn.Module, lengths: Tensor) -> None:
    """Sort an MLP's hidden channels in place by `lengths` [G * D], the largest first."""
    order = lengths.argsort(descending=True, stable=True).to(mlp.fc1.weight.device)
    mlp.fc1.weight.copy_(mlp.fc1.weight[order])
    if mlp.fc1.bias is not None:
        mlp.fc1.bias.copy_(mlp.fc1.bias[order])
    mlp.fc2.weight.copy_(mlp.fc2.weight[:, order])


def output_gram(weight: Tensor, heads: int) -> Tensor:
    """Return W^T W of each head's output projection, weight [C, H * D] -> [H, D, D], in float32."""
    w = weight.float().unflatten(1, (heads, -1))  # [C, H, D]
    return torch.einsum("chd,che->hde", w, w)


def output_lengths(o: Tensor, gram: Tensor) -> Tensor:
    """Return |W_O^h o_h| of every token and head: o [B, N, H * D], gram [H, D, D] -> [B, N, H].

    It is computed by |W o|^2 = o^T (W^T W) o, which needs no tensor of C elements for every token and head.
    """
    o = o.float().unflatten(-1, gram.shape[:2])  # [B, N, H, D]
    return torch.einsum("bnhd,hde,bnhe->bnh", o, gram, o).clamp_min(0).sqrt()
