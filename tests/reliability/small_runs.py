"""Small training runs and what is compared of them."""

import hashlib
import json

from safetensors.torch import load_file

SMALL = dict(
    cls="--config configs/quickstart/cls.yaml --model.depth 2 --model.embed_dim 32 --optim.batch_size 8 --data.workers 0",
    dit="--config configs/quickstart/dit.yaml --model.depth 2 --model.embed_dim 32 --optim.batch_size 8 --label_drop 0.1",
)


def arguments(kind, output, steps, save_every, *more):
    every = f"--log-every 1 --max-steps {steps} --save-every {save_every} --output {output}"
    return [*SMALL[kind].split(), *every.split(), *map(str, more)]


def losses(folder, kind):
    """[(step, loss in hexadecimal)] in the order they were made, replayed steps included."""
    file = folder / f"{kind}.losses"
    rows = [line.split(" ", 1) for line in file.read_text().splitlines()] if file.exists() else []
    return [(int(step), value) for step, value in rows]


def outcome(run):
    """Hashes of all that a run ends with: tensors of weights and EMA, and every file of its newest checkpoint."""
    newest = max((run / "checkpoints").glob("step_*"), key=lambda p: int(p.name.removeprefix("step_")))
    digests = {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()) for p in newest.rglob("*") if p.is_file()}
    for name in ("model.safetensors", "ema.safetensors"):  # their metadata name the folder of the run
        digest = digests[name] = hashlib.sha256()
        for key, value in sorted(load_file(run / name).items()):
            digest.update(f"{key} {value.dtype} {list(value.shape)}".encode() + value.numpy().tobytes())
    return {name: digest.hexdigest() for name, digest in digests.items()}


def checkpoint_steps(run):
    return sorted(int(p.name.removeprefix("step_")) for p in (run / "checkpoints").glob("step_*"))


def logged(run):
    """Lines of metrics.jsonl that are of training steps."""
    return [entry for entry in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in entry]
