"""Which heads each patch of an image runs: a map of gates per head, for layers of a classifier.

python -m moh_vision patches RUN --image FILE --output heads.png

RUN comes first: a classifier's run, or weights with --model.NAME; then options of validate.py.
The figure shows the image as the model sees it, and each head coloured by its gate, dark if not run.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moh_vision.attention import head_budget, token_heads
from moh_vision.commands.command import Drawn
from moh_vision.commands.figures import plt
from moh_vision.commands.head_load import shortened
from moh_vision.commands.predict import class_names
from moh_vision.common.io import composed, run_of
from moh_vision.data.decode import decode_image
from moh_vision.data.imagenet import validation_transform
from moh_vision.engine.opened import Opened
from moh_vision.models.transnext import TransNeXt, stage_sizes
from moh_vision.models.weights import find_weights
from moh_vision.opening import open_weights, wing_of

REST = "RUN"
MOST_COLUMNS = 9  # most maps in a row
CELL = 1.25  # side of a map in inches
UNIT = (0, 1, 0, 1)  # one extent for the image and the maps, which have different resolutions


def as_seen(image: Tensor, cfg: dict) -> np.ndarray:
    """Undo the normalisation of an image [C, h, w]; return [h, w, 3] with values from 0 to 1, for display."""
    mean, std = (torch.tensor(cfg[key]).view(-1, 1, 1) for key in ("mean", "std"))
    return (image * std + mean).clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0).numpy()


def classified(opened: Opened, image: Tensor, file: str) -> tuple[dict, str]:
    """Classify an image; return what the JSON says of it, and the figure's title.

    If the name of the image's folder is that of a class, this is taken for the true class.
    """
    model = opened.model
    metadata = opened.metadata
    names = class_names(metadata["classes"], model.num_classes)
    folder = composed(Path(file).absolute().parent.name)
    run = Path(metadata["weights"])
    if opened.weights.brings_model:
        run = run_of(metadata["weights"]).resolve()
    with torch.no_grad():
        probability, predicted = model(image[None])[0].softmax(-1).max(-1)
    numbers = dict(
        run=run.name,
        weights=metadata["weights"],
        model=metadata["architecture"],
        image=file,
        img_size=metadata["img_size"],
        predicted=names[predicted],
        probability=probability.item(),
        true=dict(zip(metadata["classes"] or (), names)).get(folder),
    )
    share = head_budget(model)["share"]
    title = f"{run.name}, {100 * share:.3g} % of the heads: {Path(file).name}\n"
    title += f"predicted class {shortened(numbers['predicted'])} ({100 * probability:.1f} %)"
    if numbers["true"] is not None:
        title += f", true class {shortened(numbers['true'])}"
    return numbers, title.replace("$", r"\$")  # "$" would start a formula


class PatchHeads(NamedTuple):
    """The heads of one layer over an image's patches."""

    name: str  # the layer's name
    shared: int  # number of shared heads, which come first
    active: Tensor  # [H, rows, columns] bool, whether the head runs
    gates: Tensor  # [H, rows, columns] float, 0 where the head does not run


def patch_grid(model: nn.Module, layer: str, size: tuple[int, int]) -> tuple[int, int, int]:
    """Return three numbers of a layer: its class and register tokens, its rows of patches and its columns.

    size: height and width of the image.
    """
    if isinstance(model, TransNeXt):
        return (0, *stage_sizes(size)[int(layer.split(".")[1])])
    return (model.num_prefix_tokens, *model.patch_embed.dynamic_feat_size(size))


def patch_heads(model: nn.Module, image: Tensor) -> list[PatchHeads]:
    """Find the heads and gates of each patch of an image [C, h, w] in every layer."""
    layers = []
    budgets = head_budget(model)["layers"]
    for layer, routing in zip(budgets, token_heads(model, image[None]), strict=True):
        prefix, *grid = patch_grid(model, layer["name"], image.shape[-2:])
        active = routing.active[0, prefix:].T.unflatten(1, grid)  # [H, rows, columns]
        gates = routing.weights[0, prefix:].T.unflatten(1, grid)
        layers.append(PatchHeads(layer["name"], layer["shared"], active, gates.float()))
    return layers


def draw_patch_heads(layers: Sequence[tuple[int, PatchHeads]], seen: np.ndarray, title: str):
    """Draw a panel per layer, with the image and one map per head.

    Args:
        layers: (number, heads) of each layer.
        seen: the image, see `as_seen`.
        title: title of the figure.
    """
    cells = [len(heads.active) + 1 for _, heads in layers]  # the heads and the image
    rows = [math.ceil(count / MOST_COLUMNS) for count in cells]
    columns = [math.ceil(count / row_count) for count, row_count in zip(cells, rows)]
    heights = [0.45 + (CELL + 0.2) * row_count for row_count in rows]
    size = (max(max(columns) * CELL + 0.9, 5.0), sum(heights) + 0.45)
    figure = plt.figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=9)
    colours = plt.get_cmap("viridis").with_extremes(bad=(0, 0, 0, 0.75))
    panels = figure.subfigures(len(layers), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel, (number, heads), row_count, column_count in zip(panels, layers, rows, columns):
        run = f"{heads.active.sum(0).float().mean():g} of {len(heads.active)} heads run for each patch"
        panel.suptitle(f"layer {number}: {run}, {heads.shared} of them shared", fontsize=8)
        first, *maps = panel.subplots(row_count, column_count, squeeze=False).flat
        for cell in (first, *maps):
            cell.set_axis_off()
        first.imshow(seen, extent=UNIT)
        first.set_title("image", fontsize=7)
        top = heads.gates.max()
        for head, (cell, active, gates) in enumerate(zip(maps, heads.active, heads.gates)):
            share = f"{100 * active.float().mean():.0f} %"
            if head < heads.shared:
                share = "shared"
            cell.set_title(f"head {head}: {share}", fontsize=7)
            cell.imshow(seen.mean(-1), cmap="gray", vmin=0, vmax=1, extent=UNIT)
            values = np.ma.masked_where(~active.numpy(), gates.numpy())
            look = dict(cmap=colours, vmin=0, vmax=top, alpha=0.75, interpolation="nearest")
            drawn = cell.imshow(values, extent=UNIT, **look)
        bar = panel.colorbar(drawn, ax=panel.axes, shrink=0.8)
        bar.set_label("gate", size=8)
        bar.ax.tick_params(labelsize=7)
    return figure


def chosen_layers(layers: Sequence[int] | None, all_layers: Sequence[PatchHeads]) -> list[int]:
    """Return the layers to draw: those of --layer, or a middle one and the last of the layers that leave heads out.

    If no layer leaves heads out, all layers are candidates.
    """
    for number in layers or ():
        if not 0 <= number < len(all_layers):
            raise ValueError(f"--layer {number}: expected 0 to {len(all_layers) - 1}")
    if layers:
        return list(layers)
    choosing = [number for number, heads in enumerate(all_layers) if not heads.active.all()]
    choosing = choosing or range(len(all_layers))
    middle = choosing[(len(choosing) - 1) // 2]
    return sorted({middle, choosing[-1]})


def options(add) -> None:
    add(
        "run",
        metavar="RUN",
        help="run, its checkpoint, folder of timm, or weights for --model.NAME; it comes first",
    )
    add("--image", required=True, metavar="FILE", help="the image")
    add(
        "--layer",
        type=int,
        nargs="+",
        metavar="N",
        help="layers from 0 (a middle and the last one of those that leave heads out)",
    )


def figure(options) -> Drawn:
    found = find_weights(options.run, key="RUN")
    wing = wing_of(found, options.rest)
    if wing != "classification":
        raise ValueError(
            f"{options.run} is a {wing} model; expected a classifier, whose tokens are patches of an image"
        )
    opened = open_weights(found, options.rest, command="patches")
    picture = decode_image(Path(options.image).read_bytes(), options.image, opened.decoding)
    cfg = opened.model.pretrained_cfg
    image = validation_transform(cfg)(picture)  # [C, h, w]
    numbers, title = classified(opened, image, options.image)
    all_layers = patch_heads(opened.model, image)
    if all((heads.gates == 1).all() for heads in all_layers):
        raise ValueError(
            f"{options.run}: every patch runs every head with gate 1, so there is nothing to draw"
        )
    layers = [(number, all_layers[number]) for number in chosen_layers(options.layer, all_layers)]
    numbers["layers"] = [
        dict(
            layer=number,
            name=heads.name,
            shared=heads.shared,
            share_of_patches=heads.active.double().mean((1, 2)).tolist(),
            gates=np.where(heads.active.numpy(), heads.gates.double().numpy(), None).tolist(),
        )
        for number, heads in layers
    ]
    text = f": heads of {len(layers)} of {len(all_layers)} layers, weights of {numbers['weights']}"
    return Drawn(draw_patch_heads(layers, as_seen(image, cfg), title), numbers, text)
