"""What a wing adds to the ground floor: functions and data by kind and name, imported when they are first asked for."""

import importlib
from typing import Any, Dict, Optional, Tuple

_TARGETS: Dict[Tuple[str, str], str] = {}


def register(kind: str, name: str, target: str) -> None:
    """Add a function, as "module:function", under a name; data likewise.

    Args:
        kind: "converter": what `moh_vision.convert` calls with its arguments, by the qualified name of a model's class or
            base class; "run": what `moh_vision.load_run` calls with a file, by a key of its metadata; "calibration":
            what `moh_vision.analysis.search` calls to open a "classifier", "diffusion" or "text" model and its data;
            "gates": what `moh_vision.analysis.gates` calls to read the gates of a run on its data; "scores": what
            `moh_vision.analysis.budget_curve` calls to open a run, and what scores it; "counter": what
            `moh_vision.analysis.macs.count` calls for a preset that is no image model; "suites": the `SUITES` whose
            scores `moh_vision.analysis.table` reads; "pairs": what `moh_vision.analysis.report` calls to read the
            sentences that were translated; "prepared": what `moh_vision.load_run` calls with a "classifier" and the
            metadata of its file; "image": what `moh_vision.analysis.patches` calls to open a "classifier" and one
            image.
    """
    _TARGETS[kind, name] = target


def registered(kind: str, name: str) -> Optional[Any]:
    """What was added under that kind and name, or None."""
    target = _TARGETS.get((kind, name))
    if target is None:
        return None
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)
