"""What a training run does before its first step: configuration, accelerator, signals, folder and checkpoint.

`training_loop.TrainingLoop` then does the steps; it needs the open folder.
"""

import contextlib
import faulthandler
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator

from moh_vision.attention.executors.measurement_table import device_name
from moh_vision.common.errors import MISTAKES, BadData, lost_a_process, user_errors
from moh_vision.common.io import sha256_of
from moh_vision.engine.accelerator import finish, make_accelerator
from moh_vision.engine.attention_record import AttentionRecord, keep_settings
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.compiling import check_compilation
from moh_vision.engine.config import RunConfig
from moh_vision.engine.estimate import check_estimate, steps_needed
from moh_vision.engine.keys import changed_keys
from moh_vision.engine.logging import imports_said, record_start
from moh_vision.engine.optimizers import check_sharded
from moh_vision.engine.ranks import by_main, from_first, say
from moh_vision.engine.run_folder import OpenFolder, RunFolder
from moh_vision.engine.saver import SaveError
from moh_vision.engine.signals import StopSignals


@dataclass(frozen=True)
class Span:
    """The steps that a process has to do when it starts or resumes a run: `start`, ..., `stop` - 1.

    Args:
        start: number of steps that `checkpoint` has done; 0 for a new run.
        stop: number of steps of the whole run.
        checkpoint: the folder of the checkpoint to resume from; None for a new run.
    """

    start: int
    stop: int
    checkpoint: Path | None = None


@dataclass
class RunSetup:
    """What a run has before it trains. `set_up_run` makes one; a `train` module then calls, in this order:

        span = setup.lock_and_find_steps(steps)         lock the folder, find the checkpoint to resume from
        ...                                             make the model, open what else can fail
        folder = setup.open_folder(span, records)       from here on the run writes into the folder

    Args:
        name: name of the script, for messages.
        command: the command line, script included.
        config: the configuration.
        accelerator: accelerate's Accelerator.
        signals: notes SIGTERM and SIGINT.
        run_folder: the folder config.output.
        attention: how the run computes attention; None on a device without operators.
        setting_up: true until the folder is open. Until then a ValueError or OSError is a user's mistake: it becomes
            one line and exit code 2.
    """

    name: str
    command: list[str]
    config: RunConfig
    accelerator: Accelerator
    signals: StopSignals
    run_folder: RunFolder
    attention: AttentionRecord | None
    setting_up: bool = True

    def errors(self, kinds: tuple = MISTAKES, **options) -> contextlib.AbstractContextManager:
        """Return a `user_errors` context whose messages name this script."""
        return user_errors(self.name, kinds, resumes=True, **options)

    @property
    def micro_batch(self) -> int:
        """Number of samples in a micro-batch."""
        optim = self.config.optim
        return max(1, optim.batch_size // (optim.accumulation * self.accelerator.num_processes))

    def lock_and_find_steps(self, steps: int) -> Span:
        """Lock config.output if it holds a run; return which of the run's `steps` are left to do.

        The main process decides, and the others follow. Raises ValueError if another process writes there, if there are
        checkpoints but none is whole, if the run has already done more than `steps`, or if a process does not see the
        checkpoint that the main process has chosen.
        """
        found = self.run_folder.lock_and_find_checkpoint(steps)
        if found is None:
            return Span(0, steps)
        start, checkpoint = found
        return Span(start, steps, checkpoint)

    def sampler_arguments(self, span: Span) -> dict:
        """Return the sampler arguments that select this process's samples."""
        return dict(
            batch_size=self.config.optim.batch_size,
            accumulation=self.config.optim.accumulation,
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
            start=span.start,
            stop=steps_needed(span.stop, self.config),
        )

    def open_folder(self, span: Span, records: Sequence = (), description: str = "") -> OpenFolder:
        """Open the folder and write its records. Nothing is written before, so that a mistake leaves no files.

        A dry run prints `description` here, and writes nothing: it has now passed every check of a real run. An
        estimate writes nothing either.

        Args:
            span: what `lock_and_find_steps` returned.
            records: such as a `DataRecord` or a `FrozenRecord`; each is compared with what a resumed run saved.
            description: describes the model.
        """
        config = self.config
        folder = self.run_folder.open(
            config.tree(),
            lambda earlier: changed_keys(earlier, config, config.allow_change),
            records,
            self.attention,
            resumes=span.checkpoint is not None,
        )
        imports = {file: sha256_of(Path(file)) for file in config.imports}
        for line in from_first(lambda: imports_said(folder.path, imports)):
            say(line)
        if config.dry_run:
            say(description)
            return folder
        processes = self.accelerator.num_processes
        device = self.accelerator.device
        start = dict(
            step=span.start,
            command=shlex.join(self.command),
            device=device_name(device),
            processes=processes,
            imports=imports,
        )
        if not config.estimate:
            by_main(lambda: record_start(folder.path, **start), self.accelerator)
        noun = "processes"
        if processes == 1:
            noun = "process"
        say(f"{processes} {noun} on {device.type}")
        if self.attention:
            say(self.attention.line)
        self.setting_up = False
        return folder

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Turn errors that a user can fix into one line and an exit code; bugs keep their traceback."""
        try:
            yield
        except Exception as error:
            mistake = self.setting_up and isinstance(error, (*MISTAKES, ModuleNotFoundError))
            if mistake or isinstance(error, BadData) or lost_a_process(error):
                with self.errors():
                    raise
            if isinstance(error, (FloatingPointError, SaveError)):
                with self.errors((FloatingPointError, SaveError), code=1):
                    raise
            raise


@contextlib.contextmanager
def set_up_run(name: str, config_class: type, argv: list[str] | None = None) -> Iterator[RunSetup]:
    """Parse the command line, start the processes, and end the run after the `with` block.

    A user's mistake during the set-up, or bad data found later, gives one line and exit code 2. A loss or gradient that
    stays infinite or NaN, or saves that fail, give one line and exit code 1. A run stopped by a signal saves, and exits
    with 128 + the signal's number.

    Train in a function that the block calls: `finish` runs after the block, and needs all references to the wrapped
    task to be gone.

    Args:
        name: name of the script.
        config_class: the class of its configuration, a subclass of `RunConfig`.
        argv: the command line without the program; None: that of the process.
    """
    if argv is None:
        argv = sys.argv[1:]
    if not faulthandler.is_enabled():
        with contextlib.suppress(OSError, RuntimeError):  # no standard error, as in some notebooks
            faulthandler.enable()  # a crash in native code says where it was
    with contextlib.ExitStack() as held:
        signals = held.enter_context(StopSignals())
        with user_errors(name):
            config = parse_config(config_class, argv, name)
            accelerator = make_accelerator(config.mixed_precision, config.tf32, config.tracker)
            check_compilation(accelerator, config.compile, config.optim.accumulation)
            if accelerator.distributed_type == "FSDP":
                check_sharded(config.optim.name)
            lock = held.enter_context(contextlib.ExitStack())
            run_folder = RunFolder(
                config.output,
                config.fresh,
                accelerator,
                lock,
                dry=config.dry_run or bool(config.estimate),
                builds=not config.dry_run,
            )
            check_estimate(config, run_folder.goes_on, accelerator)
            earlier = None
            if run_folder.goes_on:
                earlier = Path(config.output)
            # Fix the operators before any model runs.
            attention = keep_settings(earlier, accelerator, held, config.allow_change)
            if attention and config.dry_run:
                say(attention.line)
        command = [name, *argv]
        setup = RunSetup(name, command, config, accelerator, signals, run_folder, attention)
        with setup.reporting():
            yield setup
        finish(accelerator, signals.stopped)
