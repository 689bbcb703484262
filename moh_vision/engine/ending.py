"""What a run prints at its end: the files that it made, and commands to go on with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import List, Optional

FILES = {  # in the order of the table; docs/reference/checkpoints.md describes them
    "results.json": "scores",
    "scores.json": "scores of samples",
    "model.safetensors": "last weights",
    "ema.safetensors": "their moving average",
    "best.safetensors": "weights of the best validation",
    "averaged.safetensors": "mean of the last checkpoints' weights, which was scored",
    "tokenizer.json": "vocabulary",
    "translations.txt": "of the pairs that BLEU is of",
    "gates.md": "entropy and load of the gates, and their tokens",
    "gate_load.png": "the load as a figure",
    "weights": "weights kept on the way",
    "checkpoints": "what the same command goes on from",
    "previews": "samples drawn while training",
    "confusion.json": "counts by true and predicted class",
    "head_usage.png": "heads by layer and class",
    "head_load.json": "which heads ran, as numbers",
    "metrics.jsonl": "losses and speed",
    "config.yaml": "every key",
}
REPORT = "python -m moh_vision.analysis.report {run} --output report.html"
GATES = "python -m moh_vision.analysis.gates {run} --output gates.png"  # of a model that has gates
FEW_STEPS = dict(noise=" --sampler dpm-solver++ --steps 20", flow=" --sampler heun --steps 20")  # by objective
NEXT = {  # by script
    "train_cls.py": (
        "python -m moh_vision.classification.validate --checkpoint {run}",
        "python -m moh_vision.classification.predict --checkpoint {run} IMAGES",
        REPORT,
    ),
    "train_dit.py": (
        "python -m moh_vision.diffusion.sample --checkpoint {run} --num-images 100{few_steps} --grid grid.png",
        REPORT,
    ),
    "train_text.py": (
        "python -m moh_vision.publish {run} --output FOLDER",
        REPORT,
        "python -m moh_vision.analysis.table {run}",
        GATES,
    ),
}


def ending(script: str, run: Path, objective: Optional[str] = None) -> List[str]:
    """Lines of the table: files of the run that are there, and what to type next.

    Args:
        script: such as train_cls.py.
        run: the folder.
        objective: of a diffusion run on a CPU, where the default's 250 steps would take minutes; None: any other run.
    """
    made = [f"  {name:20} {what}" for name, what in FILES.items() if (run / name).exists()]
    commands = [c for c in NEXT.get(script, ()) if c != GATES or (run / "gates.md").exists()]
    names = dict(run=shlex.quote(str(run)), few_steps=FEW_STEPS.get(objective, ""))
    following = [f"  {command.format(**names)}" for command in commands]
    return [f"{run} has", *made, "next", *following]
