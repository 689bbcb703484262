"""Write the log that ships with a configuration, configs/*/*.jsonl, from a finished run on a CPU:

MOH_VISION_MEASURE=off OMP_NUM_THREADS=1 python train_cls.py --config configs/quickstart/cls.yaml --log_every 10 --output RUN
python tests/golden/reference_logs.py RUN quickstart/cls
"""

import json
import sys
from pathlib import Path

from moh_vision.commands.publish import without_paths

CONFIGS = Path(__file__).parents[2] / "configs"
# Keys of metrics.jsonl that a log leaves out: they say nothing of the losses, or depend on the machine.
LEFT_OUT = {
    "head_usage",
    "skipped",
    "unreadable",
    "images_per_s",
    "tokens_per_s",
    "peak_memory_mib",
    "top1_by_class",
}


def kept(row: dict) -> dict:
    """Return an entry of metrics.jsonl without the keys that a log leaves out, at any depth."""
    row = {k: v for k, v in row.items() if k not in LEFT_OUT and not k.startswith("failed_")}
    return {k: kept(v) if isinstance(v, dict) else v for k, v in row.items()}


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(run: Path, name: str) -> None:
    start = lines_of(run / "environment.jsonl")[0]  # a resumed run has further lines
    about = {key: start[key] for key in ("date", "device", "commit", "versions")}
    rows = [
        dict(step=0, command=without_paths(start["command"]), **about),
        *map(kept, lines_of(run / "metrics.jsonl")),
    ]
    (CONFIGS / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
