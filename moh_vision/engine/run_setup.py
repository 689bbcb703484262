"""The first half of a training run: configuration, accelerator, signals, and the folder with its checkpoint.

The second half is `training_loop.TrainingLoop`, which needs the open folder.
"""

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator

from moh_vision.attention.executors.measurement_table import device_name
from moh_vision.common.errors import MISTAKES, BadData, lost_a_process, user_errors
from moh_vision.engine.accelerator import finish, make_accelerator
from moh_vision.engine.attention_record import AttentionRecord, keep_settings
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.config import RunConfig
from moh_vision.engine.keys import changed_keys
from moh_vision.engine.logging import record_start
from moh_vision.engine.optimizers import check_sharded
from moh_vision.engine.ranks import by_main, say
from moh_vision.engine.run_folder import OpenFolder, RunFolder
from moh_vision.engine.saver import SaveError
from moh_vision.engine.signals import StopSignals


@dataclass(frozen=True)
class Span:
    """The steps that this start of a run does: those from `start` to `stop`.

    Args:
        start: steps that `checkpoint` has done; 0 for a new run.
        stop: steps of the whole run.
        checkpoint: the folder to go on from; None for a new run.
    """

    start: int
    stop: int
    checkpoint: Path | None = None


@dataclass
class RunSetup:
    """What a run has before it trains. `set_up_run` makes one; a `train` module then calls, in this order:

        span = setup.find_checkpoint(steps)             lock the folder, find the checkpoint to go on from
        ...                                             make the model, open what else can fail
        folder = setup.open_folder(span, records)       from here on the folder is the run's

    Args:
        name: name of the script, for messages.
        command: the command line, script included.
        config: the configuration.
        accelerator: accelerate's Accelerator.
        signals: takes note of SIGTERM and SIGINT.
        run_folder: the folder config.output.
        attention: how the run computes attention; None on a device without operators.
        setting_up: until the folder is open, a ValueError or OSError is a user's mistake: one line, exit code 2.
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
        """Return `user_errors` for this script."""
        return user_errors(self.name, kinds, resumes=True, **options)

    @property
    def micro_batch(self) -> int:
        """Samples that a process reads at once."""
        optim = self.config.optim
        return max(1, optim.batch_size // (optim.accumulation * self.accelerator.num_processes))

    def find_checkpoint(self, steps: int) -> Span:
        """Lock config.output if it holds a run; return which of the run's `steps` are left to do.

        Raises ValueError if another process writes there, if no checkpoint is whole, or if more steps are done.
        """
        found = self.run_folder.find_checkpoint(steps)
        if found is None:
            return Span(0, steps)
        start, checkpoint = found
        return Span(start, steps, checkpoint)

    def portion(self, span: Span) -> dict:
        """Return arguments of a sampler that say which samples this process takes."""
        return dict(
            batch_size=self.config.optim.batch_size,
            accumulation=self.config.optim.accumulation,
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
            start=span.start,
            stop=span.stop,
        )

    def open_folder(self, span: Span, records: Sequence = (), description: str = "") -> OpenFolder:
        """Open the folder and write its records; mistakes that were found before have left nothing.

        A dry run has then met all that the run would refuse: it prints the model's `description`, and writes nothing.

        Args:
            span: what `find_checkpoint` returned.
            records: a `DataRecord`, a `FrozenRecord`; a run that goes on is compared with them.
            description: of the model.
        """
        config = self.config
        folder = self.run_folder.open(
            config.tree(),
            lambda earlier: changed_keys(earlier, config, config.allow_change),
            records,
            self.attention,
            resumes=span.checkpoint is not None,
        )
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
        )
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
        """Turn what a user can mend into one line and an exit code; faults of ours keep their traceback."""
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

    A user's mistake during the set-up, and bad data found later, are one line and exit code 2; a loss that stays
    infinite, or saves that fail, one line and exit code 1. A run stopped by a signal saves, and exits with 128 +
    the signal's number.

    The block's function must have returned when the block ends: `finish` needs the wrapped task to be gone.

    Args:
        name: name of the script.
        config_class: the class of its configuration, a `RunConfig`.
        argv: the command line without the program; None: that of the process.
    """
    if argv is None:
        argv = sys.argv[1:]
    with contextlib.ExitStack() as held:
        signals = held.enter_context(StopSignals())
        with user_errors(name):
            config = parse_config(config_class, argv, name)
            accelerator = make_accelerator(config.mixed_precision, config.tf32, config.tracker)
            if accelerator.distributed_type == "FSDP":
                check_sharded(config.optim.name)
            lock = held.enter_context(contextlib.ExitStack())
            run_folder = RunFolder(
                config.output, config.fresh, accelerator, lock, dry=config.dry_run
            )
            earlier = None
            if run_folder.goes_on:
                earlier = Path(config.output)
            # Before any model runs.
            attention = keep_settings(earlier, accelerator, held, config.allow_change)
            if attention and config.dry_run:
                say(attention.line)
        command = [name, *argv]
        setup = RunSetup(name, command, config, accelerator, signals, run_folder, attention)
        with setup.reporting():
            yield setup
        finish(accelerator, signals.stopped)
