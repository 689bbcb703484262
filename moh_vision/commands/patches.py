"""Which heads each patch of an image runs, and with what gate: one small map per head, for some layers of a classifier.

python -m moh_vision patches RUN --image FILE --output heads.png

RUN comes first: a run of a classifier, or weights with --model.NAME as validate.py takes them; other options of validate.py
are taken too. The figure shows the image as the model sees it, and for each head where it runs, coloured by its gate; it
is dark where the head does not run. NAME.json beside the figure has all gates as numbers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from torch import Tensor, nn

from moh_vision.attention import head_budget, token_heads
from moh_vision.commands.figures import check_figure, plt, write_figure
from moh_vision.commands.head_load import shortened
from moh_vision.commands.search import kind_of
from moh_vision.engine.commands import Parser, exit_code, say
from moh_vision.models.transnext import TransNeXt, stage_sizes

MOST_COLUMNS = 9  # cells side by side
CELL = 1.25  # inches
UNIT = (0, 1, 0, 1)  # where images and maps of any resolution lie


class OneImage(NamedTuple):
    """A classifier and one image, opened for a figure."""

    model: nn.Module  # in eval mode
    image: Tensor  # [C, h, w] as the model takes it
    seen: np.ndarray  # [h, w, 3] the same to look at, 0 to 1
    about: dict  # run, weights, model, image, img_size; predicted class, its probability, true class or None

    def title(self) -> str:
        """Two lines about a figure: run, active heads and image; what the model takes it for, and what it is."""
        a, share = self.about, head_budget(self.model)["share"]
        predicted = f"predicted class {shortened(a['predicted'])} ({100 * a['probability']:.1f} %)"
        true = f", true class {shortened(a['true'])}" if a["true"] is not None else ""
        title = f"{a['run']}, {100 * share:.3g} % of the heads: {Path(a['image']).name}\n{predicted}{true}"
        return title.replace("$", r"\$")  # no formulas


class PatchHeads(NamedTuple):
    """The heads of one layer over the patches of one image, rows x columns of them."""

    name: str  # of the layer
    shared: int  # the first heads, which run for every patch
    active: Tensor  # [H, rows, columns] bool
    gates: Tensor  # [H, rows, columns] weights; 0 where the head does not run


def patch_grid(model: nn.Module, layer: str, size: Tuple[int, int]) -> Tuple[int, int, int]:
    """Class and register tokens before the patches, and rows and columns of the patches, in a layer.

    Args:
        model: a `moh_vit_*`, a converted ViT, or a TransNeXt, whose stages have grids of their own.
        layer: its name.
        size: height and width of the image.
    """
    if isinstance(model, TransNeXt):
        return (0, *stage_sizes(size)[int(layer.split(".")[1])])
    return (model.num_prefix_tokens, *model.patch_embed.dynamic_feat_size(size))


def patch_heads(model: nn.Module, image: Tensor) -> List[PatchHeads]:
    """Which heads each patch runs in every layer, and with what gate. Class and register tokens are left out.

    Args:
        model: see `patch_grid`; in eval mode.
        image: [C, h, w].
    """
    found = []
    for layer, routing in zip(head_budget(model)["layers"], token_heads(model, image[None]), strict=True):
        prefix, *grid = patch_grid(model, layer["name"], image.shape[-2:])
        active, gates = (t[0, prefix:].T.unflatten(1, grid) for t in (routing.active, routing.weights))
        found.append(PatchHeads(layer["name"], layer["shared"], active, gates.float()))
    return found


def cell_grid(heads: int) -> Tuple[int, int]:
    """(rows, columns) of cells for an image and one map per head."""
    rows = math.ceil((heads + 1) / MOST_COLUMNS)
    return rows, math.ceil((heads + 1) / rows)


def draw_cells(figure, rows: int, columns: int, seen: np.ndarray) -> list:
    """Divide a figure into cells without axes, show the image in the first, and return the others."""
    first, *others = figure.subplots(rows, columns, squeeze=False).flat
    for cell in (first, *others):
        cell.set_axis_off()
    first.imshow(seen, extent=UNIT)
    first.set_title("image", fontsize=7)
    return others


def draw_map(cell, seen: np.ndarray, values: np.ndarray, top: float, colours, title: str):
    """Show values [rows, columns], 0 to `top`, over the grey image; returns what a colour bar needs."""
    cell.imshow(seen.mean(-1), cmap="gray", vmin=0, vmax=1, extent=UNIT)
    cell.set_title(title, fontsize=7)
    return cell.imshow(values, cmap=colours, vmin=0, vmax=top, extent=UNIT, alpha=0.75, interpolation="nearest")


def draw_patch_heads(layers: Sequence[Tuple[int, PatchHeads]], seen: np.ndarray, title: str):
    """A matplotlib figure: for each (number, heads) the image and one map per head.

    Args:
        seen: [h, w, 3] image, 0 to 1.
        title: above the figure.
    """
    grids = [cell_grid(len(heads.active)) for _, heads in layers]
    sizes = [0.45 + (CELL + 0.2) * rows for rows, _ in grids]
    columns = max(columns for _, columns in grids)
    figure = plt.figure(figsize=(max(columns * CELL + 0.9, 5.0), sum(sizes) + 0.45), layout="constrained")
    figure.suptitle(title, fontsize=9)
    colours = plt.get_cmap("viridis").with_extremes(bad=(0, 0, 0, 0.75))
    parts = figure.subfigures(len(layers), 1, height_ratios=sizes, squeeze=False)[:, 0]
    for part, (number, heads), (rows, _) in zip(parts, layers, grids):
        run = heads.active.sum(0).float().mean().item()
        part.suptitle(
            f"layer {number}: {run:g} of {len(heads.active)} heads run for each patch, {heads.shared} of them shared",
            fontsize=8,
        )
        cells, top = draw_cells(part, rows, columns, seen), heads.gates.max().item()
        for head, (cell, active, gates) in enumerate(zip(cells, heads.active, heads.gates)):
            share = "shared" if head < heads.shared else f"{100 * active.float().mean():.0f} %"
            shown = np.ma.masked_where(~active.numpy(), gates.numpy())
            drawn = draw_map(cell, seen, shown, top, colours, f"head {head}: {share}")
        bar = part.colorbar(drawn, ax=part.axes, shrink=0.8)
        bar.set_label("gate", size=8)
        bar.ax.tick_params(labelsize=7)
    return figure


def chosen_layers(layers: Optional[Sequence[int]], found: Sequence[PatchHeads]) -> List[int]:
    """The numbers of --layer, or those of a middle and the last layer of those that leave heads out, if any do.

    Raises:
        ValueError: for a layer that is not there.
    """
    for number in layers or ():
        if not 0 <= number < len(found):
            raise ValueError(f"--layer {number}: expected 0 to {len(found) - 1}")
    telling = [number for number, heads in enumerate(found) if not heads.active.all()] or range(len(found))
    return list(layers or sorted({telling[(len(telling) - 1) // 2], telling[-1]}))


def open_with_image(checkpoint: str, image: str, rest: Sequence[str], command: str) -> OneImage:
    """The classifier of RUN and the image of --image; `rest` are options of validate.py.

    Raises:
        ValueError, OSError: in one line.
    """
    kind = kind_of(checkpoint, rest)
    opener = registered("image", kind)
    if opener is None:
        raise ValueError(f"{checkpoint} is a {kind} model; expected a classifier, whose tokens are patches of an image")
    return opener(["--checkpoint", checkpoint, *rest], image, command)


def image_parser(command: str, description: str) -> Parser:
    """The options of a command that looks at one image: RUN, --image and --output."""
    parser = Parser(f"python -m moh_vision.analysis.{command}", description)
    add = parser.add_argument
    add(
        "checkpoint",
        metavar="RUN",
        help="run, its checkpoint, folder of timm, or weights for --model.NAME; it comes first",
    )
    add("--image", required=True, metavar="FILE", help="the image")
    add("--output", required=True, type=Path, metavar="FILE", help="figure, .png or .svg; its numbers are beside it")
    return parser


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, or 2 for a user's mistake."""
    parser = image_parser("patches", __doc__)
    parser.add_argument(
        "--layer",
        type=int,
        nargs="+",
        metavar="N",
        help="layers from 0 (a middle and the last one of those that leave heads out)",
    )

    def work() -> None:
        options, rest = parser.parse_with_rest(argv, "RUN")
        check_figure("--output", options.output)
        opened = open_with_image(options.checkpoint, options.image, rest, "patches")
        found = patch_heads(opened.model, opened.image)
        if all((heads.gates == 1).all() for heads in found):
            raise ValueError(
                f"{options.checkpoint}: every patch runs every head with gate 1, so there is nothing to draw"
            )
        layers = [(number, found[number]) for number in chosen_layers(options.layer, found)]
        figure = draw_patch_heads(layers, opened.seen, opened.title())
        numbers = [
            dict(
                layer=number,
                name=heads.name,
                shared=heads.shared,
                share_of_patches=heads.active.double().mean((1, 2)).tolist(),
                gates=np.where(heads.active.numpy(), heads.gates.double().numpy(), None).tolist(),
            )
            for number, heads in layers
        ]
        written = write_figure(figure, options.output, dict(opened.about, layers=numbers))
        say(f"{written}: heads of {len(layers)} of {len(found)} layers, weights of {opened.about['weights']}")

    return exit_code("patches", work)


if __name__ == "__main__":
    raise SystemExit(main())
