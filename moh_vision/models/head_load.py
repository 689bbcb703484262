"""Head load: how many tokens ran each head of each layer, per class, timestep, text or task."""

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from moh_vision.attention import RoutingStats
from moh_vision.attention.losses import sample_runs
from moh_vision.engine.errors import reason_of
from moh_vision.engine.io import write_whole

FILE = "head_load.json"  # in the folder of a run
LAYER = ("name", "heads", "shared", "routed")


class HeadLoad:
    """Adds up routing statistics of any routed model.

    Args:
        layers: `head_budget(model)["layers"]`.
        groups: kinds of groups and their names: dict(class=[...]), or dict(class=[...], timestep=[...]).

        `sums` are float64 [groups of all kinds, columns]: for each layer the tokens that ran each head, and all
        tokens. `of` says what was counted, such as model, data and split.
    """

    def __init__(self, layers: Sequence[dict], groups: dict[str, Sequence[str]]):
        self.layers = [{key: layer[key] for key in LAYER} for layer in layers]
        self.groups = {by: [str(name) for name in names] for by, names in groups.items()}
        self.starts = dict(
            zip(self.groups, accumulate(map(len, self.groups.values()), initial=0))
        )  # rows of sums
        self.of: dict = {}
        self.widths = [layer["heads"] + 1 for layer in self.layers]
        self.sums = torch.zeros(
            sum(map(len, self.groups.values())), sum(self.widths), dtype=torch.float64
        )

    def add(self, stats: Sequence[RoutingStats], *groups: int | Tensor, first: int = 0) -> None:
        """Add the statistics of a batch.

        Args:
            stats: of every layer, or of consecutive layers from `first` on.
            groups: for each kind of groups its number, an integer or [B].
        """
        runs = (
            torch.cat([sample_runs(layer) for layer in stats], dim=1).cpu().double()
        )  # [B, columns]
        start = sum(self.widths[:first])
        for row, group in zip(self.starts.values(), groups, strict=True):
            rows = row + torch.as_tensor(group).cpu().expand(len(runs))
            self.sums[:, start : start + runs.shape[1]].index_add_(0, rows, runs)

    def reduce(self, sum_over_processes: Callable[[Tensor], Tensor]) -> None:
        """Sum the counts over all processes."""
        self.sums = sum_over_processes(self.sums)

    def runs(self, by: str = "") -> list[Tensor]:
        """Count tokens that ran each head, and all tokens: [groups, H + 1] per layer.

        by: kind of groups; default: the first kind.
        """
        by = by or next(iter(self.groups))
        start = self.starts[by]
        return list(self.sums[start : start + len(self.groups[by])].split(self.widths, dim=1))

    def share(self, by: str = "") -> list[Tensor]:
        """Share of a group's tokens that ran each head: [groups, H] per layer, 0 without tokens."""
        return [runs[:, :-1] / runs[:, -1:].clamp_min(1) for runs in self.runs(by)]

    def active(self) -> list[float]:
        """Heads that a token runs in each layer, mean over all samples."""
        totals = (runs.sum(0) for runs in self.runs())
        return [(total[:-1].sum() / total[-1].clamp_min(1)).item() for total in totals]

    def choosing(self) -> list[int]:
        """Numbers of the layers whose tokens choose heads; elsewhere every head runs."""
        return [
            n
            for n, layer in enumerate(self.layers)
            if 0 < layer["routed"] < layer["heads"] - layer["shared"]
        ]

    def save(self, path: Path) -> None:
        """Write JSON: of, layers, and by kind of groups names, tokens (one number a layer) and counts.

        Shared heads, run by all tokens, are left out. 1,000 classes and 400 heads, 120 of them shared, take 1.6 MB.
        """
        loads = {}
        for by, names in self.groups.items():
            runs = [r.long() for r in self.runs(by)]
            loads[by] = dict(
                groups=names,
                tokens=torch.stack([r[:, -1] for r in runs], 1).tolist(),
                counts=torch.cat(
                    [r[:, layer["shared"] : -1] for r, layer in zip(runs, self.layers)], 1
                ).tolist(),
            )
        write_whole(
            path,
            json.dumps(dict(of=self.of, layers=self.layers, by=loads), separators=(",", ":"))
            + "\n",
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of `save`; refuse anything else."""
        try:
            tree = json.loads(path.read_bytes())
            load = cls(tree["layers"], {by: entry["groups"] for by, entry in tree["by"].items()})
            load.of = dict(tree["of"])
            for layer in load.layers:
                if not 0 <= layer["shared"] <= layer["shared"] + layer["routed"] <= layer["heads"]:
                    raise ValueError(f"layer {layer}")
            if not load.groups or not load.layers or not all(load.groups.values()):
                raise ValueError("nothing was counted")
            columns = [layer["heads"] - layer["shared"] for layer in load.layers]
            for by, entry in tree["by"].items():
                size = len(entry["groups"]), len(columns)
                tokens = torch.tensor(entry["tokens"], dtype=torch.float64).reshape(size)
                counts = torch.tensor(entry["counts"], dtype=torch.float64).reshape(
                    len(tokens), sum(columns)
                )
                parts = zip(
                    load.layers,
                    load.runs(by),
                    tokens.split(1, 1),
                    counts.split(columns, 1),
                    strict=True,
                )
                for layer, runs, t, c in parts:
                    if not ((c >= 0) & (c <= t)).all() or not t.isfinite().all():
                        raise ValueError(
                            f"counts of {layer['name']} that are not between 0 and its tokens"
                        )
                    runs.copy_(torch.cat([t.expand(-1, layer["shared"]), c, t], 1))
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
