"""Block coordinate descent: MAE's gates and experts learn in turns (Peng 2020, section 3).

    G   the model mixes all experts; only the gates move, by their own SGD       algorithm 1
    F   a sequence runs one expert drawn from its gate; all but the gates moves  algorithm 2

Every fifth epoch from epoch 0 on has G before F, the others only F (algorithm 3), on the same batch. A model
without gates has one phase a step, which is a plain loop's.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import tee

import torch
from torch import Tensor, nn

from moh_vision.engine.ranks import average_over_processes

# Names of phases.
GATES = "G"
WEIGHTS = "F"


@dataclass(frozen=True)
class Phase:
    """A forward and backward pass over the micro-batches of a step, and an update."""

    name: str  # GATES or WEIGHTS
    salt: tuple[int, ...]  # of the seeds: each phase draws its own random numbers
    task: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[dict]
    gates: Sequence[nn.Parameter]  # those that move here, unseen by DistributedDataParallel
    statistics: list[tuple[Tensor, Tensor]]  # buffers of all gates, and earlier copies of them

    @property
    def clipped(self) -> bool:
        """Whether the gradients are clipped; gates learn by their own SGD, without."""
        return not self.gates

    def average_gates(self) -> None:
        """Average the gates' gradients over all processes; every process calls it.

        An exact all-reduce of few numbers: DistributedDataParallel would send all weights.
        """
        average_over_processes([p.grad for p in self.gates if p.grad is not None])

    def restore_statistics(self) -> None:
        """Undo what the forward passes of an update that is skipped did to batch statistics."""
        for buffer, before in self.statistics:
            buffer.copy_(before)


class BlockDescent:
    """Leads a training loop through its phases.

    What does not move in a phase requires no gradient: it costs nothing, and DistributedDataParallel waits for none. In
    mode "joint" gates and experts learn at once (NoBCD), and their gradient is clipped as a whole. In both modes gates
    learn by SGD without momentum: with it, the paper saw one expert win over all others (appendix A).

    Args:
        accelerator: accelerate's Accelerator.
        model: the model, before accelerate wraps it. Weights that need no gradient stay as they are.
        routers: the `MAERouter`s of the model, in any mode.
        compiled: whether the run compiles the model.
        settings: a `BlockDescentConfig`.
    """

    def __init__(
        self, accelerator, model: nn.Module, routers: list[nn.Module], compiled: bool, settings
    ):
        # The inductor of torch 2.15, unlike other backends, gives the loss no gradient.
        if compiled and routers:
            raise ValueError(
                "compile True: a model with MAE's gates cannot be trained compiled, only without compile"
            )
        self.accelerator = accelerator
        self.period = settings.period
        self.gate_lr = settings.gate_lr
        self.all_routers = routers
        self.routers = [router for router in routers if router.mode == "soft"]
        for router in routers:
            if router.mode != "soft":  # its gate is not used
                router.requires_grad_(False)
        self.gates = [p for router in self.routers for p in router.parameters()]
        gates = {id(p) for p in self.gates}
        self.weights = [p for p in model.parameters() if p.requires_grad and id(p) not in gates]
        self.trained = sum(p.numel() for p in [*self.gates, *self.weights])
        self.total = sum(p.numel() for p in model.parameters())
        self.in_turns = bool(self.gates) and settings.mode == "bcd"
        if self.in_turns:
            if accelerator.distributed_type == "FSDP":  # its weights cannot be frozen by phase
                raise ValueError(
                    "block_descent.mode bcd does not work with FSDP: launch with DDP, or take mode joint"
                )
            self.gate_optimizer = torch.optim.SGD(self.gates, lr=self.gate_lr)

    def prepare(self, task: nn.Module, optimizer: torch.optim.Optimizer):
        """Let accelerate prepare both, and after them the optimiser of the gates.

        `optimizers` are saved and restored in this order.
        """
        if self.gates:  # the optimiser keeps what it moves: not the gates, and nothing frozen
            weights = {id(p) for p in self.weights}
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) in weights]
        if self.gates and not self.in_turns:  # a group for the gradient scaler and FSDP
            optimizer.add_param_group(dict(params=self.gates, weight_decay=0.0))
            optimizer.register_step_pre_hook(self._step_gates)
        self._switch(WEIGHTS, "soft")  # before DistributedDataParallel looks for gradients
        if self.weights or not self.in_turns:
            self.task, self.optimizer = self.accelerator.prepare(task, optimizer)
        else:  # DistributedDataParallel refuses a model without trainable weights
            self.task = self.accelerator.prepare_model(task, evaluation_mode=True)
            self.optimizer = self.accelerator.prepare(optimizer)
        self.optimizers = [self.optimizer]
        if self.in_turns:
            self.gate_optimizer = self.accelerator.prepare(self.gate_optimizer)
            self.optimizers.append(self.gate_optimizer)
        return self.task, self.optimizer

    def phases(self, epoch: int, batches: Iterable[dict]) -> Iterator[Phase]:
        """Enter the phases of a step one after the other, then leave the model as it is evaluated."""
        names = []
        if self.in_turns and (epoch % self.period == 0 or not self.weights):  # algorithm 3
            names.append(GATES)
        if self.weights or not self.in_turns:
            names.append(WEIGHTS)
        # Every phase sees the same batches; they are loaded when the first phase asks.
        for name, phase_batches in zip(names, tee(batches, len(names))):
            # Listed anew in each step: a model that moves to another device gets new buffers.
            buffers = [buffer for router in self.all_routers for buffer in router.buffers()]
            statistics = [(buffer, buffer.clone()) for buffer in buffers]
            common = dict(name=name, batches=phase_batches, statistics=statistics)
            if name == GATES:
                self._switch(GATES, "soft")
                bare = self.accelerator.unwrap_model(self.task)
                yield Phase(
                    salt=(1,), task=bare, optimizer=self.gate_optimizer, gates=self.gates, **common
                )
            else:
                self._switch(WEIGHTS, "sampled")
                yield Phase(salt=(), task=self.task, optimizer=self.optimizer, gates=(), **common)
        self._switch(WEIGHTS, "soft")

    @contextlib.contextmanager
    def drawing_experts(self) -> Iterator[None]:
        """Let the model run as in F, which most steps do."""
        self._switch(WEIGHTS, "sampled")
        try:
            yield
        finally:
            self._switch(WEIGHTS, "soft")

    def results(self) -> dict[str, int]:
        """Return how many parameters are trained, for results.json; empty for a model without gates."""
        if not self.gates:
            return {}
        return dict(trained_parameters=self.trained)

    def announce(self, log, start: int) -> None:
        """Log the number of trained parameters, at the beginning of a run."""
        if self.gates and start == 0:
            log.event(0, self.results(), f"training {self.trained:,} of {self.total:,} parameters")

    @torch.no_grad()
    def _step_gates(self, optimizer, args, kwargs) -> None:
        """Move the gates by SGD. The main optimiser then sees zero gradients, which move nothing."""
        for p in optimizer.param_groups[-1]["params"]:
            if p.grad is not None:
                p.add_(p.grad, alpha=-self.gate_lr)
                p.grad.zero_()

    def _switch(self, moving: str, mode: str) -> None:
        """Freeze what does not move in a phase, and set the gates' mode; not if all moves at once."""
        if not self.in_turns:
            return
        for parameters, name in ((self.gates, GATES), (self.weights, WEIGHTS)):
            for p in parameters:
                p.requires_grad_(name == moving)
        for router in self.routers:
            router.set_mode(mode)
