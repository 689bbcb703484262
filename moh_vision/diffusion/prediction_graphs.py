"""A diffusion transformer's predictions as CUDA graphs, which are captured once and replayed for all steps and images."""

from pathlib import Path

import torch
from torch import Tensor, nn

from moh_vision.attention.model_heads import model_budgets
from moh_vision.attention.trial import check_same
from moh_vision.common.errors import class_and_message
from moh_vision.diffusion.sampling import predicted
from moh_vision.engine.cuda_graphs import (
    Captured,
    CudaGraphs,
    Decision,
    equal_in_words,
    shapes_of,
    times_in_words,
    tolerance_of,
)

ROUNDS = 5  # timed predictions of each kind; the shortest counts


class PredictionGraphs:
    """Predicts as `sampling.predicted` does, by a CUDA graph if a trial of it succeeds.

    The first prediction is also made by a graph, compared and timed. There is a graph for every model, size of batch (with
    guidance both halves are one batch) and budget. The timestep is copied into the graph's memory. Whatever fails ends in
    eager predictions.

    Args:
        mode: "on" takes the graph if its results are equal, "auto" if it is also faster.
        graphs: captures.
        record: the file for the decision; None: it is not written.

    Attributes:
        decision: whether predictions run as graphs.
    """

    def __init__(self, mode: str, graphs: CudaGraphs, record: Path | None = None):
        self.mode = mode
        self.graphs = graphs
        self.decision = Decision("predictions", record)
        self.by_signature: dict[tuple, Captured[Tensor]] = {}

    @property
    def capturing(self) -> CudaGraphs | None:
        """What captures predictions, if they run as graphs or that is not decided yet."""
        if self.decision.taken is False:
            return None
        return self.graphs

    def __call__(self, model: nn.Module, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """Return a model's prediction [n, C or 2C, h, w]; the model is in eval mode, without gradients."""
        inputs = dict(x=x, t=t, labels=labels)
        if self.decision.taken is None:
            self._try(model, inputs)
        if self.decision.taken:
            graph = self._graph_of(model, inputs)
            if graph is not None:
                # A copy: the next replay overwrites what the graph has written.
                return graph(inputs).clone()
        return predicted(model, **inputs)

    def _try(self, model: nn.Module, inputs: dict) -> None:
        """Decide whether predictions run as graphs."""
        why = self.graphs.lacks_room()
        taken = False
        if not why:
            try:
                taken, why = self._trial(model, inputs)
            except Exception as error:  # whatever a driver or a compiler raises
                why = class_and_message(error)
        self._decide(taken, why)  # outside of the handler, whose traceback holds tensors

    def _trial(self, model: nn.Module, inputs: dict) -> tuple[bool, str]:
        """Compare the graph with the eager model, then time both; return whether it is taken, and why."""
        graph = self._captured(model, inputs)
        # Other values than those of the capture, which a graph that had kept them would not see.
        reversed_inputs = dict(
            x=inputs["x"].flip(0), t=inputs["t"] // 2, labels=inputs["labels"].flip(0)
        )
        equal_bits = True
        for each in (inputs, reversed_inputs):
            want = predicted(model, **each)
            got = graph(each).clone()
            try:
                check_same([want], [got], tolerance_of(want, precision(want.device)))
            except AssertionError as error:
                problem = "its predictions differ from the eager ones"
                raise RuntimeError(f"{problem}: {error}") from None
            equal_bits = equal_bits and torch.equal(want, got)
        eager_times = []
        graph_times = []
        for _ in range(ROUNDS):
            eager_times.append(self.graphs.time(lambda: predicted(model, **inputs)))
            graph_times.append(self.graphs.time(lambda: graph(inputs)))
        eager = min(eager_times)
        replayed = min(graph_times)
        times = times_in_words(f"a prediction of {len(inputs['x'])} images", eager, replayed)
        why = f"{times}; two predictions {equal_in_words(equal_bits)}"
        return self.mode == "on" or replayed < eager, why

    def _decide(self, taken: bool, why: str) -> None:
        """Note and say a decision; give the graphs up if it is against them."""
        if not taken:
            self.by_signature.clear()
            self.graphs.release()
        self.decision.decide(taken, why)

    def _graph_of(self, model: nn.Module, inputs: dict) -> Captured[Tensor] | None:
        """Return the graph for a prediction, captured at its first one; None: the capture failed."""
        graph = self.by_signature.get(signature(model, inputs))
        if graph is not None:
            return graph
        try:
            return self._captured(model, inputs)
        except Exception as error:  # whatever a driver or a compiler raises
            why = class_and_message(error)
        self._decide(False, why)
        return None

    def _captured(self, model: nn.Module, inputs: dict) -> Captured[Tensor]:
        """Capture a prediction."""
        device = inputs["x"].device.type

        def predict(inputs: dict) -> Tensor:
            # Without autocast's cache: it would keep cast weights, which the graph reads, for a time of its own.
            with torch.autocast(
                device,
                dtype=torch.get_autocast_dtype(device),
                enabled=torch.is_autocast_enabled(device),
                cache_enabled=False,
            ):
                return predicted(model, **inputs)

        graph = Captured(self.graphs, predict, inputs)
        self.by_signature[signature(model, inputs)] = graph
        return graph


def signature(model: nn.Module, inputs: dict) -> tuple:
    """Return all that the graph of a prediction depends on."""
    return id(model), shapes_of(inputs), model_budgets(model)


def precision(device: torch.device) -> str:
    """Return the present autocast as `mixed_precision` says it."""
    if torch.is_autocast_enabled(device.type):
        return str(torch.get_autocast_dtype(device.type))
    return "no"
