"""A stand-in for CUDA graphs on a CPU, which replays by running the work again and insists on what a graph relies on."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moh_vision.attention.trial import seconds
from moh_vision.engine.cuda_graphs import WARM_UP
from tests.support.waits import READERS


class EagerGraphs:
    """Stands in for `CudaGraphs`.

    A replay must launch the same operators on the same memory as the capture: a graph would launch those, whatever Python
    would do now. It writes its results into the same tensors. Nothing may read values while it is captured.

    Args:
        failures: for each capture an error to raise, or None; captures after the last one succeed.
        room: what `lacks_room` returns.
        off_by: added to all gradients and results of replays, as a faulty graph might.
        times: what `time` returns, one after the other and without doing the work; empty: what the work takes.

    Attributes:
        captures: number of captures that succeeded.
        replays: number of replays.
        released: whether the graphs were given up.
    """

    def __init__(self, failures=(), room="", off_by=0.0, times=()):
        self.failures = list(failures)
        self.room = room
        self.off_by = off_by
        self.times = list(times)
        self.captures = 0
        self.replays = 0
        self.released = False

    def why_not(self, device):
        return ""

    def lacks_room(self):
        return self.room

    def release(self):
        self.released = True

    def time(self, work):
        if self.times:
            return self.times.pop(0)
        return seconds(work)

    def capture(self, work):
        for _ in range(WARM_UP):
            work()
        error = self.failures.pop(0) if self.failures else None
        with Launches(forbid_reads=True) as captured:
            results = work()
            if error:
                raise error
        self.captures += 1

        def replay():
            with Launches() as launched:
                again = work()
            assert launched.operators == captured.operators, "a graph would launch other operators"
            assert launched.memory == captured.memory, "a graph would use other memory"
            with torch.no_grad():
                for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    old.copy_(new + self.off_by)
            self.replays += 1

        return replay, results


class Launches(TorchDispatchMode):
    """Record the operators within the block, and the addresses of memory that they use and that was there before.

    Args:
        forbid_reads: fail where values are read, as a capture does.
    """

    def __init__(self, forbid_reads=False):
        super().__init__()
        self.forbid_reads = forbid_reads
        self.operators = []
        self.memory = []
        self.made = {}  # storages that were made within the block, by address; kept, so that no address comes twice

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.forbid_reads and function in READERS:
            raise RuntimeError(f"{function}: operation not permitted when stream is capturing")
        tensors = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)]
        self.operators.append((str(function), [t.shape for t in tensors]))
        for t in tensors:
            if t.untyped_storage()._cdata not in self.made:
                self.memory.append(t.data_ptr())
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                outside = any(
                    storage._cdata == other.untyped_storage()._cdata
                    for other in tensors
                    if other.untyped_storage()._cdata not in self.made
                )
                if not outside:  # else a view, or the result of an operator in place
                    self.made[storage._cdata] = storage
        return result
