"""Head load: how many tokens ran each head of each layer, per class, timestep, text or task.

A routed MLP is a layer too, whose heads are groups.
"""

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from moh_vision.attention import RoutingStats
from moh_vision.attention.losses import sample_runs
from moh_vision.common.errors import reason_of
from moh_vision.common.io import write_whole

FILE = "head_load.json"  # in the folder of a run
LAYER = ("name", "heads", "shared", "routed")
PARTS = {"heads": "heads", "groups": "MLPs' groups"}  # what a layer's "heads" are, and words for it


class HeadLoad:
    """Adds up routing statistics of any routed model.

    Args:
        layers: `budget_rows(model)`, or the layers of `head_budget(model)`, whose `parts` are "heads".
        groups: by what samples are grouped -> names of the groups: dict(class=[...], timestep=[...]).

    Attributes:
        sums: float64 [groups of all kinds, columns]. The columns of a layer are H numbers of tokens that ran each
            head, then the number of all tokens.
        of: what was counted, such as model, data and split.
    """

    def __init__(self, layers: Sequence[dict], groups: dict[str, Sequence[str]]):
        self.layers = []
        for layer in layers:
            parts = layer.get("parts", "heads")
            self.layers.append({**{key: layer[key] for key in LAYER}, "parts": parts})
        self.groups = {by: [str(name) for name in names] for by, names in groups.items()}
        sizes = [len(names) for names in self.groups.values()]
        # First row of each kind of groups in `sums`, and number of columns of each layer.
        self.starts = dict(zip(self.groups, accumulate(sizes, initial=0)))
        self.widths = [layer["heads"] + 1 for layer in self.layers]
        self.sums = torch.zeros(sum(sizes), sum(self.widths), dtype=torch.float64)
        self.of: dict = {}

    def add(self, stats: Sequence[RoutingStats], *groups: int | Tensor, first: int = 0) -> None:
        """Add the statistics of a batch.

        Args:
            stats: of every layer, or of consecutive layers from `first` on.
            groups: for each kind of groups the index of the samples' group: an integer, or [B].
            first: index of the layer of the first statistics.
        """
        runs = torch.cat([sample_runs([layer])[0] for layer in stats], dim=1)  # [B, columns]
        runs = runs.cpu().double()
        start = sum(self.widths[:first])
        sums = self.sums[:, start : start + runs.shape[1]]
        for row, group in zip(self.starts.values(), groups, strict=True):
            rows = row + torch.as_tensor(group).cpu().expand(len(runs))
            sums.index_add_(0, rows, runs)

    def reduce(self, sum_over_processes: Callable[[Tensor], Tensor]) -> None:
        """Sum the counts over all processes, with an all-reduce that the caller gives."""
        self.sums = sum_over_processes(self.sums)

    def runs(self, by: str = "") -> list[Tensor]:
        """Count tokens that ran each head, and all tokens: [groups, H + 1] per layer.

        by: kind of groups; default: the first kind.
        """
        by = by or next(iter(self.groups))
        start = self.starts[by]
        return list(self.sums[start : start + len(self.groups[by])].split(self.widths, dim=1))

    def share(self, by: str = "") -> list[Tensor]:
        """Return the share of a group's tokens that ran each head: [groups, H] per layer, 0 without tokens."""
        return [runs[:, :-1] / runs[:, -1:].clamp_min(1) for runs in self.runs(by)]

    def active(self) -> list[float]:
        """Return how many heads a token runs in each layer, mean over all samples."""
        totals = (runs.sum(0) for runs in self.runs())
        return [(total[:-1].sum() / total[-1].clamp_min(1)).item() for total in totals]

    def layers_of(self, parts: str) -> list[int]:
        """Return the indices of the layers whose parts are "heads" or "groups"."""
        return [index for index, layer in enumerate(self.layers) if layer["parts"] == parts]

    def choosing(self) -> list[int]:
        """Return the indices of layers that leave heads out; in the other layers every head runs."""
        indices = []
        for index, layer in enumerate(self.layers):
            if 0 < layer["routed"] < layer["heads"] - layer["shared"]:
                indices.append(index)
        return indices

    def save(self, path: Path) -> None:
        """Write JSON: `of`, `layers`, and for each kind of groups their names, tokens per layer and counts per head.

        Counts of shared heads are left out, because all tokens run them. 1,000 classes and 400 heads, 120 of them
        shared, take 1.6 MB.
        """
        loads = {}
        for by, names in self.groups.items():
            runs = [r.long() for r in self.runs(by)]
            tokens = torch.stack([r[:, -1] for r in runs], 1)
            routed = [r[:, layer["shared"] : -1] for r, layer in zip(runs, self.layers)]
            counts = torch.cat(routed, 1)
            loads[by] = dict(groups=names, tokens=tokens.tolist(), counts=counts.tolist())
        saved = dict(of=self.of, layers=self.layers, by=loads)
        write_whole(path, json.dumps(saved, separators=(",", ":")) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that `save` wrote; raise ValueError for any other file."""
        try:
            tree = json.loads(path.read_bytes())
            load = cls(tree["layers"], {by: entry["groups"] for by, entry in tree["by"].items()})
            load.of = dict(tree["of"])
            for layer in load.layers:
                if not 0 <= layer["shared"] <= layer["shared"] + layer["routed"] <= layer["heads"]:
                    raise ValueError(f"layer {layer}")
                if layer["parts"] not in PARTS:
                    raise ValueError(f"layer {layer}: parts are {' or '.join(PARTS)}")
            if not load.groups or not load.layers or not all(load.groups.values()):
                raise ValueError("nothing was counted")
            for by, entry in tree["by"].items():
                load._fill(by, entry)
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RuntimeError,
            RecursionError,
            StopIteration,
        ) as error:
            raise ValueError(f"{path}: not a file of head loads ({reason_of(error)})") from None
        return load

    def _fill(self, by: str, entry: dict) -> None:
        """Set the sums of one kind of groups from its groups, tokens and counts in a saved file."""
        columns = [layer["heads"] - layer["shared"] for layer in self.layers]
        groups = len(entry["groups"])
        tokens = torch.tensor(entry["tokens"], dtype=torch.float64).reshape(groups, len(columns))
        counts = torch.tensor(entry["counts"], dtype=torch.float64).reshape(groups, sum(columns))
        of_layers = zip(
            self.layers,
            self.runs(by),
            tokens.split(1, 1),
            counts.split(columns, 1),
            strict=True,
        )
        for layer, runs, t, c in of_layers:  # t [groups, 1], c [groups, heads that are not shared]
            if not ((c >= 0) & (c <= t)).all() or not t.isfinite().all():
                raise ValueError(f"counts of {layer['name']} that are not between 0 and its tokens")
            runs.copy_(torch.cat([t.expand(-1, layer["shared"]), c, t], 1))
