"""What each head attends to from one token of one image: the softmaxed attention, titled with the head's gate.

python -m moh_vision attention-maps RUN --image FILE --output maps.png
python -m moh_vision attention-maps RUN --image FILE --layer 3 --token 2,5 --output maps.png

RUN is as for `patches`, and comes first. --token is cls, or row and column of a patch, counted from 0 at the top left.
Maps of heads that do not run for the token are grey: what they would attend to is not part of the output.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.patches import Rectangle
from timm.utils import AttentionExtract
from torch import Tensor, nn

from moh_vision.attention import attention_layers, head_budget, token_heads
from moh_vision.commands.figures import plt
from moh_vision.commands.patches import CELL, cell_grid, draw_maps, image_options, open_image, patch_grid
from moh_vision.models.foveal_attention import AggregatedAttention

REST = "RUN"
Token = str | tuple[int, int]  # "cls", or row and column of a patch


class AttentionMaps(NamedTuple):
    """What the heads of a layer attend to from one token."""

    name: str  # of the layer
    shared: int  # the first heads, which run for every token
    attention: Tensor  # [H, rows, columns] on patches; with what class and register tokens get, each head's sum is 1
    gates: Tensor  # [H] 0 where the head does not run
    active: Tensor  # [H] bool
    token: Token


def attention_maps(model: nn.Module, image: Tensor, layer: int, token: Token | None = None) -> AttentionMaps:
    """Compute softmax(q k^T) of one token over all patches of an image [C, h, w], per head.

    Of a TransNeXt only the layers of the last stage have one attention matrix over patches. `token` None is the class
    token, or the middle patch where there is none.
    """
    model = copy.deepcopy(model)  # timm's extractor leaves its hooks
    layers = attention_layers(model)
    allowed = [i for i, attention in enumerate(layers) if not isinstance(attention, AggregatedAttention)]
    if layer not in allowed:
        raise ValueError(f"layer {layer}: expected {allowed[0]} to {allowed[-1]}")
    about = head_budget(model)["layers"][layer]
    prefix, rows, columns = patch_grid(model, about["name"], image.shape[-2:])
    has_class = getattr(model, "cls_token", None) is not None
    if token is None:
        token = "cls" if has_class else (rows // 2, columns // 2)
    patches, index = f"rows 0 to {rows - 1} and columns 0 to {columns - 1}", 0
    if token == "cls" and not has_class:
        raise ValueError(f"token cls: the model has none; expected {patches}")
    if token != "cls":
        row, column = token
        if not (0 <= row < rows and 0 <= column < columns):
            raise ValueError(f"token {row},{column}: expected {patches}")
        index = prefix + row * columns + column
    routing = token_heads(model, image[None])[layer]
    layers[layer].fused_attn = False
    extract = AttentionExtract(model, [f"{about['name']}.attn_drop"], method="hook")
    with torch.no_grad():
        (matrix,) = extract(image[None]).values()  # [1, H, N, N]
    attention = matrix[0, :, index, prefix:].unflatten(1, (rows, columns)).float()
    gates, active = routing.weights[0, index].float(), routing.active[0, index]
    return AttentionMaps(about["name"], about["shared"], attention, gates, active, token)


def draw_attention_maps(maps: AttentionMaps, seen: np.ndarray, title: str):
    """Draw the image with the token marked, and one map per head, each from 0 to its own maximum."""
    rows, columns = cell_grid(len(maps.gates))
    figure = plt.figure(figsize=(max(columns * CELL, 5.0), (CELL + 0.42) * rows + 0.65), layout="constrained")
    figure.suptitle(title, fontsize=9)
    drawn = []
    for head, (attention, gate, active) in enumerate(zip(maps.attention, maps.gates, maps.active)):
        shared, gate = " (shared)" if head < maps.shared else "", f"gate {gate:.2f}" if active else "off"
        colours, top = "inferno" if active else "gray", attention.max()
        drawn.append((attention.numpy(), top, colours, f"head {head}{shared}\n{gate}\nmax. {100 * top:.1f} %"))
    draw_maps(figure, (rows, columns), seen, drawn)
    if maps.token != "cls":
        (row, column), (height, width) = maps.token, maps.attention.shape[1:]
        for cell in figure.axes[: len(drawn) + 1]:
            corner = (column / width, 1 - (row + 1) / height)
            cell.add_patch(Rectangle(corner, 1 / width, 1 / height, fill=False, edgecolor="red", linewidth=1))
    return figure


def token_of(text: str | None) -> Token | None:
    """Return what --token means."""
    numbers = (text or "").split(",")
    if len(numbers) == 2 and all(number.isdecimal() for number in numbers):
        return int(numbers[0]), int(numbers[1])
    if text not in (None, "cls"):
        raise ValueError(f"--token {text}: expected cls, or ROW,COLUMN of a patch such as 2,5")
    return text


def options(add) -> None:
    image_options(add)
    add("--layer", type=int, metavar="N", help="attention layer from 0 (the last one)")
    add("--token", metavar="cls|ROW,COLUMN", help="that attends (cls, or the middle patch where there is none)")


def figure(options):
    token = token_of(options.token)
    opened = open_image(options, "attention-maps")
    layer = len(attention_layers(opened.model)) - 1 if options.layer is None else options.layer
    maps = attention_maps(opened.model, opened.image, layer, token)
    of = "the class token" if maps.token == "cls" else f"patch {maps.token[0]},{maps.token[1]}"
    title = f"{opened.title}\nlayer {layer}, attention of {of}"
    numbers = dict(
        opened.about,
        layer=layer,
        name=maps.name,
        token=maps.token,
        shared=maps.shared,
        gates=[gate if active else None for gate, active in zip(maps.gates.tolist(), maps.active)],
        attention=maps.attention.tolist(),
    )
    text = f": attention of {of} in {len(maps.gates)} heads of layer {layer}, weights of {opened.about['weights']}"
    return draw_attention_maps(maps, opened.seen, title), numbers, text
