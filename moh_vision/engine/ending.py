"""What a run prints at its end: the files that it made, and commands to go on with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import List

FILES = {  # in the order of the table; docs/reference/checkpoints.md describes them
    "results.json": "scores",
    "scores.json": "scores of samples",
    "model.safetensors": "weights",
    "ema.safetensors": "their moving average",
    "best.safetensors": "weights of the best validation",
    "weights": "weights kept on the way",
    "checkpoints": "what the same command goes on from",
    "previews": "samples drawn while training",
    "confusion.json": "counts by true and predicted class",
    "head_usage.png": "heads by layer and class",
    "head_load.json": "the same as numbers",
    "metrics.jsonl": "losses and speed",
    "config.yaml": "every key",
}
REPORT = "python -m moh_vision.analysis.report {run} --output report.html"
NEXT = {  # by script
    "train_cls.py": (
        "python -m moh_vision.classification.validate --checkpoint {run}",
        "python -m moh_vision.classification.predict --checkpoint {run} IMAGES",
        REPORT,
    ),
    "train_dit.py": (
        "python -m moh_vision.diffusion.sample --checkpoint {run} --num-images 100 --grid grid.png",
        REPORT,
    ),
    "train_text.py": (REPORT, "python -m moh_vision.analysis.table {run}"),
}


def ending(script: str, run: Path) -> List[str]:
    """Lines of the table: files of the run that are there, and what to type next.

    Args:
        script: such as train_cls.py.
        run: the folder.
    """
    made = [f"  {name:18} {what}" for name, what in FILES.items() if (run / name).exists()]
    following = [f"  {command.format(run=shlex.quote(str(run)))}" for command in NEXT.get(script, ())]
    return [f"{run} has", *made, "next", *following]
