"""Lines and progress bars that commands print. Needs no torch."""

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sized

from tqdm import tqdm

LINE_EVERY = 60  # seconds between lines in a log
FIRST_LINE = 10  # seconds until the first


def say(text: str) -> bool:
    """Print a line above the progress bars, and flush; return False if stdout is a closed pipe, as after `| head`."""
    try:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        # Later lines, and Python's flush at exit, go nowhere instead of failing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


class Progress(contextlib.AbstractContextManager):
    """Shows the progress of a `with` block: a bar on a terminal, else a line after 10 s and then every minute.

    Args:
        title: names the work.
        total: number of steps, including `done`; None: unknown.
        unit: what a step is, in the singular.
        done: number of steps that were done before.
        enabled: whether to show anything.
        scaled: whether the bar writes 1.5M for 1,500,000.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        unit: str,
        done: int = 0,
        enabled: bool = True,
        scaled: bool = False,
    ):
        self.title = title
        self.total = total
        self.unit = unit
        self.first = done
        self.done = done
        self.started = time.monotonic()
        self.next_line = self.started + min(FIRST_LINE, LINE_EVERY)
        terminal = sys.stderr.isatty()
        self.writes_lines = enabled and not terminal
        self.bar = tqdm(
            total=total,
            initial=done,
            desc=title,
            unit=unit,
            unit_scale=scaled,
            dynamic_ncols=True,
            disable=not (enabled and terminal),
            leave=None,  # the finished bar stays on the screen, unless it is below another bar
        )

    def __exit__(self, *_) -> None:
        self.bar.close()

    @property
    def rate(self) -> float:
        """Steps per second."""
        return (self.done - self.first) / max(time.monotonic() - self.started, 1e-9)

    def add(self, count: int = 1) -> None:
        """Count `count` more steps, and print a line if one is due."""
        self.done += count
        self.bar.update(count)
        if count and self.writes_lines and time.monotonic() >= self.next_line:
            self.next_line = time.monotonic() + LINE_EVERY
            if self.total is None:
                say(f"{self.title}: {self.done} {self.unit}s")
            else:
                left = tqdm.format_interval((self.total - self.done) / self.rate)
                say(f"{self.title}: {self.done} of {self.total} {self.unit}s, {left} left")

    @classmethod
    def over(cls, things: Iterable, title: str, unit: str = "step", **options) -> Iterator:
        """Yield each of `things`, and count a step when it is done; `options` are those of `Progress`."""
        total = None
        if isinstance(things, Sized):
            total = len(things)
        with cls(title, total, unit, **options) as progress:
            for item in things:
                yield item
                progress.add()

    def note(self, text: str) -> None:
        """Show a text behind the bar."""
        self.bar.set_postfix_str(text)
