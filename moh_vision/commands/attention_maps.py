"""What each head attends to from one token of one image: the softmaxed attention, titled with the head's gate.

python -m moh_vision attention-maps RUN --image FILE --output maps.png
python -m moh_vision attention-maps RUN --image FILE --layer 3 --token 2,5 --output maps.png

RUN is as for `moh_vision.commands.patches`, and comes first. --token is cls, or row and column of a patch, counted from 0 at
the top left. Maps of heads that do not run for the token are grey: what they would attend to is not part of the output.
"""

from __future__ import annotations

import copy
from typing import List, NamedTuple, Optional, Tuple, Union

import numpy as np
import torch
from matplotlib.patches import Rectangle
from timm.utils import AttentionExtract
from torch import Tensor, nn

from moh_vision.attention import attention_layers, head_budget, token_heads
from moh_vision.commands.figures import check_figure, plt, write_figure
from moh_vision.commands.patches import (
    CELL,
    cell_grid,
    draw_cells,
    draw_map,
    image_parser,
    open_with_image,
    patch_grid,
)
from moh_vision.engine.commands import exit_code, say
from moh_vision.models.foveal_attention import AggregatedAttention

Token = Union[str, Tuple[int, int]]  # "cls", or row and column of a patch


class AttentionMaps(NamedTuple):
    """What the heads of a layer attend to from one token."""

    name: str  # of the layer
    shared: int  # the first heads, which run for every token
    attention: Tensor  # [H, rows, columns] on patches; with what class and register tokens get, each head's sum is 1
    gates: Tensor  # [H] 0 where the head does not run
    active: Tensor  # [H] bool
    token: Token


def attention_maps(model: nn.Module, image: Tensor, layer: int, token: Optional[Token] = None) -> AttentionMaps:
    """softmax(q k^T) of one token over all patches, per head, as timm's `AttentionExtract` reads it.

    Args:
        model: a `moh_vit_*`, a converted ViT, or a TransNeXt, of which only the layers of the last stage have one attention
            matrix over patches; in eval mode. It is not changed.
        image: [C, h, w].
        layer: number of the attention layer, from 0.
        token: "cls", or row and column of a patch; None: the class token, or the middle patch where there is none.

    Raises:
        ValueError: for a layer or a token that is not there, naming the allowed ones.
    """
    model = copy.deepcopy(model)  # timm's extractor leaves its hooks
    layers, about = attention_layers(model), head_budget(model)["layers"]
    allowed = [i for i, attention in enumerate(layers) if not isinstance(attention, AggregatedAttention)]
    if layer not in allowed:
        raise ValueError(f"layer {layer}: expected {allowed[0]} to {allowed[-1]}")
    name, shared = about[layer]["name"], about[layer]["shared"]
    prefix, rows, columns = patch_grid(model, name, image.shape[-2:])
    has_class = getattr(model, "cls_token", None) is not None
    if token is None:
        token = "cls" if has_class else (rows // 2, columns // 2)
    patches = f"rows 0 to {rows - 1} and columns 0 to {columns - 1}"
    if token == "cls":
        if not has_class:
            raise ValueError(f"token cls: the model has none; expected {patches}")
        index = 0
    else:
        row, column = token
        if not (0 <= row < rows and 0 <= column < columns):
            raise ValueError(f"token {row},{column}: expected {patches}")
        index = prefix + row * columns + column
    routing = token_heads(model, image[None])[layer]
    layers[layer].fused_attn = False
    with torch.no_grad():
        (matrix,) = AttentionExtract(model, [f"{name}.attn_drop"], method="hook")(image[None]).values()  # [1, H, N, N]
    attention = matrix[0, :, index, prefix:].unflatten(1, (rows, columns)).float()
    return AttentionMaps(name, shared, attention, routing.weights[0, index].float(), routing.active[0, index], token)


def draw_attention_maps(maps: AttentionMaps, seen: np.ndarray, title: str):
    """A matplotlib figure: the image with the token marked, and one map per head, each from 0 to its own maximum.

    Args:
        seen: [h, w, 3] image, 0 to 1.
        title: above the figure.
    """
    rows, columns = cell_grid(len(maps.gates))
    figure = plt.figure(figsize=(max(columns * CELL, 5.0), (CELL + 0.42) * rows + 0.65), layout="constrained")
    figure.suptitle(title, fontsize=9)
    cells = draw_cells(figure, rows, columns, seen)
    for head, (cell, attention, gate, active) in enumerate(zip(cells, maps.attention, maps.gates, maps.active)):
        shared, gate = " (shared)" if head < maps.shared else "", f"gate {gate:.2f}" if active else "off"
        colours, top = "inferno" if active else "gray", attention.max().item()
        draw_map(cell, seen, attention.numpy(), top, colours, f"head {head}{shared}\n{gate}\nmax. {100 * top:.1f} %")
    if maps.token != "cls":
        (row, column), (height, width) = maps.token, maps.attention.shape[1:]
        for cell in figure.axes[: len(maps.gates) + 1]:
            corner = (column / width, 1 - (row + 1) / height)
            cell.add_patch(Rectangle(corner, 1 / width, 1 / height, fill=False, edgecolor="red", linewidth=1))
    return figure


def token_of(text: Optional[str]) -> Optional[Token]:
    """What --token means.

    Raises:
        ValueError: for neither cls nor two numbers.
    """
    numbers = (text or "").split(",")
    if len(numbers) == 2 and all(number.isdecimal() for number in numbers):
        return int(numbers[0]), int(numbers[1])
    if text not in (None, "cls"):
        raise ValueError(f"--token {text}: expected cls, or ROW,COLUMN of a patch such as 2,5")
    return text


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, or 2 for a user's mistake."""
    parser = image_parser("attention_maps", __doc__)
    add = parser.add_argument
    add("--layer", type=int, metavar="N", help="attention layer from 0 (the last one)")
    add("--token", metavar="cls|ROW,COLUMN", help="that attends (cls, or the middle patch where there is none)")

    def work() -> None:
        options, rest = parser.parse_with_rest(argv, "RUN")
        check_figure("--output", options.output)
        token = token_of(options.token)
        opened = open_with_image(options.checkpoint, options.image, rest, "attention_maps")
        layer = len(attention_layers(opened.model)) - 1 if options.layer is None else options.layer
        maps = attention_maps(opened.model, opened.image, layer, token)
        of = "the class token" if maps.token == "cls" else f"patch {maps.token[0]},{maps.token[1]}"
        title = f"{opened.title()}\nlayer {layer}, attention of {of}"
        numbers = dict(
            opened.about,
            layer=layer,
            name=maps.name,
            token=maps.token,
            shared=maps.shared,
            gates=[gate if active else None for gate, active in zip(maps.gates.tolist(), maps.active)],
            attention=maps.attention.tolist(),
        )
        written = write_figure(draw_attention_maps(maps, opened.seen, title), options.output, numbers)
        heads = f"{len(maps.gates)} heads of layer {layer}"
        say(f"{written}: attention of {of} in {heads}, weights of {opened.about['weights']}")

    return exit_code("attention_maps", work)


if __name__ == "__main__":
    raise SystemExit(main())
