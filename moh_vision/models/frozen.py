"""A record of the weights of models that a run uses but does not train, such as a teacher."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from moh_vision.common.errors import reason_of
from moh_vision.common.io import write_whole

RECORD = "frozen.json"


def digest_of(tensors: Mapping[str, Tensor], about: str = "") -> str:
    """Return the SHA-256 of the text `about`, then of tensors with their names, types and shapes."""
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        tensor = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


class FrozenRecord:
    """Hashes of the weights of a run's frozen models, in RUN/frozen.json: a resumed run must find the same weights.

    Args:
        allowed: configuration keys that may change, from --allow-change.
        models: key that names a model, such as "distill.teacher" -> (its name, SHA-256 of its weights).
    """

    def __init__(self, allowed: Collection[str], models: dict[str, tuple[str, str]]):
        self.allowed = allowed
        self.models = models

    def check(self, run: Path, say: Callable[[str], None]) -> None:
        """Compare with the record in a run's folder; raise ValueError for a change, or `say` it if it is allowed."""
        file = run / RECORD
        if not file.exists():  # the run was killed before it wrote one
            return
        try:
            recorded = json.loads(file.read_text("utf-8"))
            changed = [key for key, (_, sha) in self.models.items() if recorded.get(key) != sha]
        except Exception as error:  # a file that is no mapping may raise any exception
            raise ValueError(
                f"{file}: not a record of frozen models that can be read ({reason_of(error)}); --fresh moves the run "
                "aside and starts over"
            ) from None
        for key in changed:
            name, sha = self.models[key]
            problem = f"{key} {name}: other weights than those that {run} began with"
            if key not in self.allowed:
                in_record = str(recorded.get(key))[:12]
                raise ValueError(
                    f"{problem} (sha256 {sha[:12]}, in {file.name} {in_record}). "
                    f"Bring them back, or accept the change: --allow-change {key}"
                )
            say(f"{problem}; accepted")

    def save(self, run: Path) -> None:
        """Write the record into a run's folder."""
        digests = {key: sha for key, (_, sha) in self.models.items()}
        if digests:
            write_whole(run / RECORD, json.dumps(digests) + "\n")
