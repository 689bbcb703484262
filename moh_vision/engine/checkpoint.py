"""Save and restore the state of a training run as tensors and plain values: nothing is pickled.

A tensor that FSDP2 shards is never gathered: every process writes the rows that it holds, and reads the rows that it
needs.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moh_vision.common.errors import reason_of
from moh_vision.common.io import WRAPPED, TensorFiles, write_tensors
from moh_vision.engine.step_folders import RECORD
from moh_vision.engine.weights import ModelEma, gathered

# Names of files, without their ending.
WEIGHTS = "model"
# Tensors that are trained with the model but never exported, such as REPA's projector.
AUXILIARY = "beside"
OPTIMIZER = "optimizer"
EMA = "ema"
FILES = (WEIGHTS, AUXILIARY, OPTIMIZER, EMA)

MODEL = "model."  # prefix of the model's tensors in the task's state dict


class Snapshot(NamedTuple):
    """A copy of a run's state in main memory, which training does not change any more."""

    files: dict[str, dict[str, Tensor]]  # file -> name -> tensor; what this process writes
    plain: dict[str, Any]  # values for JSON


@dataclass(frozen=True)
class TrainingState:
    """State that a run resumes from; every process calls every method.

    Args:
        task: the task, wrapped by accelerate or not: the attribute `model`, and all else that is trained.
        optimizers: in the order in which they are saved.
        ema: the average of the model's weights, or None.
        scaler: the gradient scaler of fp16, or None.
    """

    task: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    ema: ModelEma | None = None
    scaler: torch.amp.GradScaler | None = None

    def snapshot(self) -> Snapshot:
        """Copy the state to main memory, from a GPU to pinned memory.

        Each process copies its shards; the main process alone copies tensors that are not sharded.
        """
        weights = {WRAPPED.sub("", name): tensor for name, tensor in _once(self.task).items()}
        files: dict[str, dict] = {WEIGHTS: {}, AUXILIARY: {}, OPTIMIZER: {}}
        for name, tensor in weights.items():
            if name.startswith(MODEL):
                files[WEIGHTS][name.removeprefix(MODEL)] = tensor
            else:
                files[AUXILIARY][name] = tensor
        optimizers = []
        for number, optimizer in enumerate(self.optimizers):
            flat = _flat_state(optimizer, f"{number}/")
            files[OPTIMIZER] |= {
                name: value for name, value in flat.items() if isinstance(value, Tensor)
            }
            plain = _plain_values(flat)
            optimizers.append(dict(parameters=self._parameters(optimizer), plain=plain))
        sharded = any(isinstance(tensor, DTensor) for tensor in weights.values())
        if sharded:
            files = {
                f"{name}-{PartialState().process_index:05}": tensors
                for name, tensors in files.items()
            }
        if self.ema:
            files[EMA] = _once(self.ema.module)
        taken = {}
        for file, tensors in files.items():
            copies = {name: _local_copy(tensor) for name, tensor in tensors.items()}
            written = {name: copy for name, copy in copies.items() if copy is not None}
            if written:
                taken[file] = written
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # copies to pinned memory are asynchronous
        scaler = None
        if self.scaler:
            scaler = self.scaler.state_dict()
        return Snapshot(taken, dict(optimizers=optimizers, scaler=scaler))

    def check_options(self, name: str) -> None:
        """Raise ValueError, naming the optimiser as `name`, if one of its options cannot be stored as JSON."""
        for optimizer in self.optimizers:
            for path, value in _plain_values(_flat_state(optimizer, "")).items():
                try:
                    json.dumps(value)
                except (TypeError, ValueError):
                    option = path.rpartition("/")[2]
                    problem = f"its option {option} is {value!r}, a {type(value).__name__}"
                    raise ValueError(f"optim.name {name!r} cannot be saved: {problem}") from None

    def restore(self, folder: Path, say: Callable[[str], None] = print) -> None:
        """Load a checkpoint that any number of processes wrote.

        Raise ValueError for the checkpoint of another model, or of other optimisers.
        """
        record = json.loads((folder / RECORD).read_text())
        try:
            files = {name: TensorFiles(folder / f"{name}.safetensors") for name in FILES}
            stored = {MODEL + name: (files[WEIGHTS], name) for name in files[WEIGHTS].shapes}
            stored |= {name: (files[AUXILIARY], name) for name in files[AUXILIARY].shapes}
            _load(self.task, stored)
            for number, (optimizer, saved) in enumerate(
                zip(self.optimizers, record["optimizers"], strict=True)
            ):
                if saved["parameters"] != self._parameters(optimizer):
                    raise ValueError(
                        f"optimiser {number} has other parameters, or the same in another order"
                    )
                optimizer.load_state_dict(
                    _optimizer_state(optimizer, files[OPTIMIZER], f"{number}/", saved["plain"])
                )
            if self.scaler and record["scaler"]:
                self.scaler.load_state_dict(record["scaler"])
            if self.ema and files[EMA].shapes:
                _load(self.ema.module, {name: (files[EMA], name) for name in files[EMA].shapes})
            elif self.ema:
                say(f"{folder} has no EMA; it starts from the weights of that step")
                self.ema.set(getattr(self.task, "module", self.task).model)
        except torch.OutOfMemoryError:  # a RuntimeError too, but not the checkpoint's fault
            raise
        except (
            RuntimeError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            SafetensorError,
        ) as error:
            checkpoint = f"{folder}, of moh_vision {record.get('version')}"
            problem = f"cannot be loaded into this model ({reason_of(error)})"
            raise ValueError(f"{checkpoint}, {problem}") from error

    def _parameters(self, optimizer) -> list[str]:
        """Return the names of an optimiser's parameters, in its order."""
        names = {p: WRAPPED.sub("", name) for name, p in self.task.named_parameters()}
        return [names[p] for group in optimizer.param_groups for p in group["params"]]


def export_weights(
    module: nn.Module, path: Path, metadata: dict[str, object], write: bool = True
) -> None:
    """Write a module's weights and, as JSON, `metadata` to one safetensors file, whole or not at all.

    With FSDP every process calls it, because shards are gathered tensor by tensor; `write` is true on one process.
    """
    tied = _tied(module)
    tensors = {}
    for name, value in gathered(module):
        if write and name not in tied:
            tensors[name] = value.detach().contiguous().cpu()
    if write:
        write_tensors(path, tensors, metadata)


def _tied(module: nn.Module) -> dict[str, str]:
    """Map every further name of a tied parameter to its first name, under which alone it is stored.

    transformers also stores a tied parameter once.
    """
    first: dict[nn.Parameter, str] = {}
    tied = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in first:
            tied[name] = first[parameter]
        else:
            first[parameter] = name
    return tied


def _once(module: nn.Module) -> dict[str, Tensor]:
    """Return a state dict that has tied tensors under their first name only."""
    tied = _tied(module)
    return {name: tensor for name, tensor in module.state_dict().items() if name not in tied}


def _shard(tensor: DTensor) -> tuple[int, int, bool]:
    """Return the index of this process's shard, the number of shards, and whether this process writes the shard.

    With HSDP several processes hold the same shard; the first of them writes it.
    """
    mesh = tensor.device_mesh
    dimensions = list(zip(mesh.get_coordinate(), mesh.shape, tensor.placements))
    # FSDP2 shards dimension 0, the rows, over one dimension of the mesh.
    ((index, count),) = [
        (coordinate, size)
        for coordinate, size, placement in dimensions
        if placement.is_shard(dim=0)
    ]
    replicas = [coordinate for coordinate, _, placement in dimensions if placement.is_replicate()]
    return index, count, not any(replicas)


def _local_copy(tensor: Tensor) -> Tensor | None:
    """Copy the part of a tensor that this process writes to main memory; return None if it writes no part."""
    if isinstance(tensor, DTensor):
        _, _, writes = _shard(tensor)
        local = tensor.to_local()
    else:
        writes = PartialState().is_main_process
        local = tensor
    if not writes:
        return None
    copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
    return copy.copy_(local.detach(), non_blocking=True)


def _load(module: nn.Module, stored: dict[str, tuple[TensorFiles, str]]) -> None:
    """Load a module's tensors from files; raise RuntimeError for a tensor that is missing or that the module lacks.

    Args:
        module: the module, wrapped or not.
        stored: file, and name in the file, by name in the unwrapped module.
    """
    tied = _tied(module)
    state = {}
    read = set()
    for name, now in module.state_dict().items():
        first = WRAPPED.sub("", tied.get(name, name))
        if first in stored:
            file, stored_name = stored[first]
            state[name] = _read(file, stored_name, now)
            read.add(first)
    # load_state_dict refuses these, and its message names them.
    unexpected = {name: torch.empty(0) for name in stored.keys() - read}
    module.load_state_dict(state | unexpected)


def _read(file: TensorFiles, name: str, like: Tensor) -> Tensor:
    """Read a tensor; if `like` is sharded and has the same shape, read this process's rows and shard it alike."""
    shape = file.shapes[name]
    if not isinstance(like, DTensor) or like.shape != shape:
        return file.read(name)
    index, count, _ = _shard(like)
    rows_per_shard = -(-shape[0] // count)  # rounded up
    start = min(index * rows_per_shard, shape[0])
    stop = min((index + 1) * rows_per_shard, shape[0])
    rows = file.rows(name, start, stop).to(like.device)
    return DTensor.from_local(
        rows,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _flat_state(optimizer: torch.optim.Optimizer, prefix: str) -> dict[str, Any]:
    """Flatten an optimiser's state dict.

    A parameter's state has names PREFIX + "INDEX/KEY", the options of a group have names PREFIX + "groupN/KEY".
    """
    state = optimizer.state_dict()
    groups = {f"group{i}": group for i, group in enumerate(state["param_groups"])}
    return {
        f"{prefix}{index}/{key}": value
        for index, values in [*state["state"].items(), *groups.items()]
        for key, value in values.items()
    }


def _plain_values(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a `_flat_state` that are not tensors, for JSON; a torch.dtype becomes its name."""
    plain = {}
    for name, value in flat.items():
        if isinstance(value, torch.dtype):
            plain[name] = str(value).removeprefix("torch.")
        elif not isinstance(value, Tensor):
            plain[name] = value
    return plain


def _from_json(value: Any, like: Any) -> Any:
    """Convert a checkpoint's plain value to the type of `like`, the optimiser's present value."""
    if isinstance(like, tuple):  # such as betas
        return tuple(value)
    if isinstance(like, torch.dtype):
        return getattr(torch, value)
    return value


def _optimizer_state(optimizer, file: TensorFiles, prefix: str, plain: dict[str, Any]) -> dict:
    """Build an optimiser's state dict from the tensors of a file and from `plain` values; undoes `_flat_state`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    parts: dict[str, dict] = defaultdict(dict)
    for name in file.shapes:
        if not name.startswith(prefix):
            continue
        _, index, key = name.split("/", 2)
        if index.startswith("group"):
            parts[index][key] = file.read(name)
        else:
            parts[index][key] = _read(file, name, parameters[int(index)])
    for name, value in plain.items():
        _, index, key = name.split("/", 2)
        parts[index][key] = _from_json(value, optimizer.param_groups[0].get(key))
    groups = [parts.pop(f"group{i}") for i in range(len(optimizer.param_groups))]
    state = {int(index): values for index, values in parts.items()}
    return dict(state=state, param_groups=groups)
