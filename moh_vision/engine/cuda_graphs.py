"""CUDA graphs: work whose launches are recorded once and then replayed together, without Python in between.

A graph reads and writes the same memory at every replay. `Captured` keeps the buffers that a function's inputs are copied
into, and the results that it writes. `step_graph` captures training steps, `diffusion.prediction_graphs` sampling.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from moh_vision.attention.trial import ROUGH, TOLERANCE, seconds
from moh_vision.common.io import write_whole
from moh_vision.engine.ranks import say

T = TypeVar("T")

RECORD = "cuda_graph.json"  # of a decision

WARM_UP = 2  # runs on the capturing stream before a capture, in which libraries make their handles and choose kernels


class CudaGraphs:
    """Captures work on the present CUDA device. All graphs share a pool of memory, because one runs at a time.

    Tests replace this class by one that replays eagerly on a CPU.
    """

    def __init__(self):
        self._pool = None

    def why_not(self, device: torch.device) -> str:
        """Return why nothing can be captured on a device, or ""."""
        if device.type != "cuda":
            return f"it needs a CUDA device, not {device.type}"
        return ""

    def lacks_room(self) -> str:
        """Return why there is no room for the pool of a graph, or "".

        The eager run keeps its own memory. The pool needs about as much as steps so far have needed beyond what is
        allocated now.
        """
        torch.cuda.empty_cache()
        needed = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        free, _ = torch.cuda.mem_get_info()
        if needed > free:
            return (
                f"it needs up to {needed / 2**30:.1f} GiB more, and {free / 2**30:.1f} GiB are free"
            )
        return ""

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Return a function that does `work` again, and the results, which it overwrites.

        Random numbers: a capture registers the default generator (PyTorch's notes on CUDA semantics, "CUDA Graphs"): its
        seed and offset are inputs of the graph. So torch.manual_seed before a replay gives what it gives an eager run.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        before = torch.cuda.current_stream()
        stream = torch.cuda.Stream()
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                # Not kept: a graph of autograd that outlives the warm-up would tie the capture to another stream.
                work()
        before.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        tried_before = kernels_tried()
        try:
            # "thread_local": a thread that writes a checkpoint or pins memory may call CUDA meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ):
                results = work()
        except Exception:
            # torch.cuda.graph leaves its stream in force and the default generator in the state of a capture, in which it
            # draws nothing ("Offset increment outside graph capture").
            torch.cuda.set_stream(before)
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            new = torch.Generator(device=generator.device)
            generator.graphsafe_set_state(new.graphsafe_get_state())
            raise
        if kernels_tried() != tried_before:
            raise RuntimeError("a Triton kernel was asked for that has not been tried yet")
        return graph.replay, results

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds that work takes on the device."""
        return seconds(work)

    def release(self) -> None:
        """Give the memory of graphs back that nobody holds any more."""
        self._pool = None
        torch.cuda.empty_cache()


def kernels_tried() -> int:
    """Return how often a Triton kernel has been compared with PyTorch, or could not be compared yet."""
    if not torch.cuda.is_available():
        return 0
    try:
        from moh_vision.attention.kernels.gpu import check  # imports Triton
    except ImportError:
        return 0
    return check.tries()


class Captured(Generic[T]):
    """A function of tensors as a graph. A call copies its inputs, replays the graph, and returns what that has written.

    Args:
        graphs: a `CudaGraphs`.
        function: takes a dict of inputs. It may read no other tensor whose memory changes.
        inputs: what it is captured with; later ones have the same `shapes_of`.

    Attributes:
        results: what the function returned. Every call overwrites the tensors.
    """

    def __init__(self, graphs: CudaGraphs, function: Callable[[dict], T], inputs: dict):
        leaves, structure = tree_flatten(inputs)
        leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.buffers = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        static = tree_unflatten(leaves, structure)
        self.replay, self.results = graphs.capture(lambda: function(static))

    def __call__(self, inputs: dict) -> T:
        values = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.copy_(value, non_blocking=True)
        self.replay()
        return self.results


class Decision:
    """Whether work runs as CUDA graphs.

    Args:
        what: the work, in the plural, for messages.
        record: the file for the decision; None: it is not written.

    Attributes:
        taken: None until it is decided.
    """

    def __init__(self, what: str, record: Path | None):
        self.what = what
        self.record = record
        self.taken: bool | None = None

    def decide(self, taken: bool, why: str) -> None:
        """Note a decision, tell the user, and write the record."""
        self.taken = taken
        say(in_words(self.what, taken, why))
        if self.record is not None:
            write_whole(self.record, json.dumps(dict(taken=taken, why=why)) + "\n")

    def follow(self, record: Path, otherwise: str) -> None:
        """Take the decision of earlier work that is resumed, if there is one.

        Args:
            record: its file.
            otherwise: says how the graph is tried again, for the message.
        """
        if not record.exists():
            return
        try:
            taken = json.loads(record.read_text("utf-8"))["taken"]
            if not isinstance(taken, bool):
                raise TypeError("taken is true or false")
        except (ValueError, KeyError, TypeError) as error:
            problem = f"not a record of a CUDA graph that can be read ({error!r})"
            raise ValueError(f"{record}: {problem}; delete it to try the graph again") from None
        self.taken = taken
        say(in_words(self.what, taken, f"as they began; {otherwise} tries it again"))


def in_words(what: str, taken: bool, why: str) -> str:
    """Return a decision on one line, see `Decision`."""
    if taken:
        return f"CUDA graph: taken, {why}"
    return f"CUDA graph: not taken, {what} run eagerly: {why}"


def times_in_words(what: str, eager: float, replayed: float) -> str:
    """Return the seconds of an eager run and of a replay in words; `what` is what they are of."""
    ratio = replayed / eager
    return f"{1000 * replayed:.1f} ms {what}, {ratio:.2f} of the eager {1000 * eager:.1f} ms"


def equal_in_words(equal_bits: bool) -> str:
    """Return how nearly results are equal, in words."""
    if equal_bits:
        return "equal to the bit"
    return "equal within rounding"


def shapes_of(inputs: dict) -> tuple:
    """Return all that a graph fixes of its inputs: shapes and dtypes of tensors, and other values themselves."""
    leaves, structure = tree_flatten(inputs)
    parts: list[Any] = [str(structure)]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            parts.append((leaf.shape, leaf.dtype, leaf.device))
        else:
            parts.append(leaf)
    return tuple(parts)


def tolerance_of(result: Tensor, mixed_precision: str) -> float:
    """Return by how much results of a graph may differ from eager ones, relative to the largest element.

    The same kernels in the same order give equal bits. What PyTorch chooses anew for a graph may sum in another order: this
    is the bound for rounding with which `moh_vision.measure` compares executors.
    """
    on_gpu = result.device.type == "cuda"
    if mixed_precision != "no" or (on_gpu and torch.backends.cuda.matmul.allow_tf32):
        return ROUGH
    return TOLERANCE.get(result.dtype, ROUGH)
