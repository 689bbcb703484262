"""What `CudaGraphs` asks of torch.cuda, by a stand-in for it: no card is needed, and none is proved to work."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from moh_vision.engine.cuda_graphs import WARM_UP, Captured, CudaGraphs, shapes_of


class Cuda:
    """Replaces functions of torch.cuda. `order` lists what was done; `present` is the stream in force."""

    def __init__(self, monkeypatch, free=2**31):
        self.order = []
        self.present = SimpleNamespace(name="present", wait_stream=lambda other: None)
        self.states = []  # that the default generator was given
        generator = SimpleNamespace(device="cuda:0", graphsafe_set_state=self.states.append)
        fakes = dict(
            graph_pool_handle=lambda: "pool",
            current_stream=lambda: self.present,
            current_device=lambda: 0,
            set_stream=self.set_stream,
            Stream=lambda: SimpleNamespace(name="side", wait_stream=lambda other: None),
            stream=lambda stream: contextlib.nullcontext(),
            CUDAGraph=lambda: SimpleNamespace(replay=lambda: self.order.append("replay")),
            graph=self.graph,
            default_generators=[generator],
            empty_cache=lambda: self.order.append("empty"),
            max_memory_allocated=lambda: 3 * 2**30,
            memory_allocated=lambda: 2**30,
            mem_get_info=lambda: (free, 2**36),
        )
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        new_generator = SimpleNamespace(graphsafe_get_state=lambda: "new state")
        monkeypatch.setattr(torch, "Generator", lambda device: new_generator)

    def set_stream(self, stream):
        self.present = stream

    @contextlib.contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        self.present = stream
        before = self.order.copy()
        self.order.append("begin")
        yield  # as torch.cuda.graph, leave the stream in force if the block raises
        self.order.append("end")
        assert self.order[: len(before)] == before
        self.present = SimpleNamespace(name="present")


def test_work_is_warmed_up_then_captured(monkeypatch):
    cuda = Cuda(monkeypatch)

    def work():
        cuda.order.append("work")
        return 3

    replay, results = CudaGraphs().capture(work)
    assert results == 3
    replay()
    assert cuda.order == [*WARM_UP * ["work"], "begin", "work", "end", "replay"]


def test_a_failed_capture_restores_the_stream_and_the_generator(monkeypatch):
    cuda = Cuda(monkeypatch)

    def work():
        if cuda.present.name == "side":
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaGraphs().capture(work)
    assert cuda.present.name == "present"
    assert cuda.states == ["new state"]


@pytest.mark.parametrize("free, words", [(2**31, ""), (2**30, "up to 2.0 GiB more, and 1.0 GiB")])
def test_room_for_the_memory_of_a_graph(monkeypatch, free, words):
    Cuda(monkeypatch, free)
    reason = CudaGraphs().lacks_room()
    assert words in reason and bool(words) == bool(reason)


def test_inputs_are_copied_into_the_memory_of_the_capture():
    class Graphs:
        def capture(self, work):
            results = work()
            return lambda: results.copy_(work()), results

    x = torch.ones(2, 3).t()
    captured = Captured(Graphs(), lambda inputs: inputs["x"] * inputs["scale"], dict(x=x, scale=2))
    assert captured.buffers[0].stride() == x.stride()
    memory = captured.results.data_ptr()
    assert torch.equal(captured(dict(x=3 * x, scale=2)), 6 * x)
    assert captured.results.data_ptr() == memory


def test_what_a_graph_fixes_of_its_inputs():
    x = torch.ones(2, 3)
    same = [dict(x=x, n=1), dict(x=x + 1, n=1)]
    other = [
        dict(x=x[:1], n=1), dict(x=x.double(), n=1), dict(x=x, n=2), dict(x=x, n=None), dict(y=x, n=1)
    ]  # fmt: skip
    assert len({shapes_of(inputs) for inputs in same}) == 1
    assert len({shapes_of(inputs) for inputs in [same[0], *other]}) == 1 + len(other)
