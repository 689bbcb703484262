"""Block coordinate descent: gates and experts learn in turns, as MAE's do (Peng 2020, section 3).

    G   the model mixes all experts; only the gates learn, by an SGD of their own                      algorithm 1
    F   each sequence runs one expert, drawn by its gate; all weights except those of the gates learn  algorithm 2

In every period-th epoch (fifth in the paper), beginning with epoch 0, a step has phase G and then F, on the same batch;
in other epochs it has F alone (algorithm 3). For a model without gates a step has one phase, an ordinary update.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import tee

import torch
from torch import Tensor, nn

from moh_vision.attention.model_heads import routers_of
from moh_vision.attention.routers import name_of
from moh_vision.engine.compiling import launched_backend
from moh_vision.engine.ranks import average_over_processes

# Names of phases.
GATES = "G"
WEIGHTS = "F"


@dataclass(frozen=True)
class Phase:
    """A forward and backward pass over the micro-batches of a step, and an update."""

    name: str  # GATES or WEIGHTS
    salt: tuple[int, ...]  # added to the seeds, so that each phase draws other random numbers
    task: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[dict]
    # The gates that learn in phase G; empty in F. DistributedDataParallel does not reduce their gradients.
    gates: Sequence[nn.Parameter]
    statistics: list[tuple[Tensor, Tensor]]  # (buffer, copy from before the phase) of all gates

    @property
    def clipped(self) -> bool:
        """Whether the gradients are clipped; those of phase G are not."""
        return not self.gates

    def average_gates(self) -> None:
        """Average the gates' gradients over all processes; every process calls it.

        The gates are small, so this all-reduce is cheap; DistributedDataParallel would reduce all gradients.
        """
        average_over_processes([p.grad for p in self.gates if p.grad is not None])

    def restore_statistics(self) -> None:
        """Undo what the forward passes did to the gates' batch statistics, after a skipped update."""
        for buffer, before in self.statistics:
            buffer.copy_(before)


class BlockDescent:
    """Splits the steps of a training loop into phases.

    Parameters that do not learn in a phase have requires_grad False during it: backward skips them, and
    DistributedDataParallel expects no gradient for them. In mode "joint" gates and experts learn in one phase (NoBCD),
    and all gradients are clipped by one norm. In both modes gates learn by SGD without momentum: with momentum, the
    paper saw one expert win over all others (appendix A).

    Args:
        accelerator: accelerate's Accelerator.
        model: the model, before accelerate wraps it. Parameters that require no gradient stay frozen. Its routers say
            whether their gates learn in turns, see `moh_vision.attention.Router`.
        compiled: the key `compile`.
        settings: a `BlockDescentConfig`.
    """

    def __init__(
        self,
        accelerator,
        model: nn.Module,
        compiled: bool | str,
        settings,
    ):
        self.all_routers = routers_of(model)
        compiles = compiled or launched_backend(accelerator)
        refusing = [name_of(router) for router in self.all_routers if not router.trains_compiled]
        if compiles and refusing:
            raise ValueError(
                f"compile {compiles}: a model with router {refusing[0]} cannot be trained compiled, only without compile"
            )
        self.accelerator = accelerator
        self.period = settings.period
        self.gate_lr = settings.gate_lr
        self.routers = [router for router in self.all_routers if router.learns_in_turns]
        for router in self.all_routers:
            router.freeze_unused()
        self.gates = [p for router in self.routers for p in router.parameters()]
        gates = {id(p) for p in self.gates}
        self.weights = [p for p in model.parameters() if p.requires_grad and id(p) not in gates]
        self.trained = sum(p.numel() for p in [*self.gates, *self.weights])
        self.total = sum(p.numel() for p in model.parameters())
        self.in_turns = bool(self.gates) and settings.mode == "bcd"
        if self.in_turns:
            if accelerator.distributed_type == "FSDP":  # sharded weights cannot be frozen by phase
                raise ValueError(
                    "block_descent.mode bcd does not work with FSDP: launch with DDP, or take mode joint"
                )
            self.gate_optimizer = torch.optim.SGD(self.gates, lr=self.gate_lr)

    def prepare(self, task: nn.Module, optimizer: torch.optim.Optimizer):
        """Let accelerate prepare the task and the optimiser, then the optimiser of the gates; return the first two.

        Checkpoints save and restore `self.optimizers` in this order.
        """
        if self.gates:  # the main optimiser keeps only trained weights that are not gates
            weights = {id(p) for p in self.weights}
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) in weights]
        if self.gates and not self.in_turns:
            # `_step_gates` updates the gates. They are in a group so that the gradient scaler and FSDP know them.
            optimizer.add_param_group(dict(params=self.gates, weight_decay=0.0))
            optimizer.register_step_pre_hook(self._step_gates)
        # Freeze the gates now: DistributedDataParallel, when it is made, notes which parameters require a gradient.
        self._rest()
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
        """Yield the phases of a step, with the model prepared for each; afterwards prepare it for evaluation."""
        names = []
        if self.in_turns and (epoch % self.period == 0 or not self.weights):  # algorithm 3
            names.append(GATES)
        if self.weights or not self.in_turns:
            names.append(WEIGHTS)
        # Every phase sees the same batches, which are loaded as the first phase iterates over them.
        for name, phase_batches in zip(names, tee(batches, len(names))):
            # List the buffers anew in each phase: moving a model to another device replaces them.
            buffers = [buffer for router in self.all_routers for buffer in router.buffers()]
            statistics = [(buffer, buffer.clone()) for buffer in buffers]
            common = dict(name=name, batches=phase_batches, statistics=statistics)
            if name == GATES:
                self._switch(GATES, of_heads=False)
                bare = self.accelerator.unwrap_model(self.task)
                yield Phase(
                    salt=(1,), task=bare, optimizer=self.gate_optimizer, gates=self.gates, **common
                )
            else:
                self._switch(WEIGHTS, of_heads=True)
                yield Phase(salt=(), task=self.task, optimizer=self.optimizer, gates=(), **common)
        self._rest()

    @contextlib.contextmanager
    def drawing_experts(self) -> Iterator[None]:
        """Return a context in which the model runs as in phase F, the phase of most steps."""
        self._switch(WEIGHTS, of_heads=True)
        try:
            yield
        finally:
            self._rest()

    def results(self) -> dict[str, int]:
        """Return the number of trained parameters for results.json, or nothing for a model without gates."""
        if not self.gates:
            return {}
        return dict(trained_parameters=self.trained)

    def announce(self, log, start: int) -> None:
        """Log the number of trained parameters, at the beginning of a run."""
        if self.gates and start == 0:
            log.event(0, self.results(), f"training {self.trained:,} of {self.total:,} parameters")

    @torch.no_grad()
    def _step_gates(self, optimizer, args, kwargs) -> None:
        """Update the gates by SGD before the main optimiser's step, and zero their gradients.

        With zero gradients and no weight decay, the main optimiser leaves the gates as they are.
        """
        for p in optimizer.param_groups[-1]["params"]:
            if p.grad is not None:
                p.add_(p.grad, alpha=-self.gate_lr)
                p.grad.zero_()

    def _rest(self) -> None:
        """Freeze the gates, and let the routers run as in testing."""
        self._switch(WEIGHTS, of_heads=False)

    def _switch(self, moving: str, of_heads: bool) -> None:
        """Freeze all parameters but the `moving` ones, GATES or WEIGHTS, and let the routers take their turn.

        A no-op unless gates and experts learn in turns.
        """
        if not self.in_turns:
            return
        for parameters, name in ((self.gates, GATES), (self.weights, WEIGHTS)):
            for p in parameters:
                p.requires_grad_(name == moving)
        for router in self.routers:
            router.take_turn(of_heads)
