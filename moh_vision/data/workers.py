"""The processes of a loader: what signals they heed, and how they end."""

import atexit
import multiprocessing
import signal


def leave_signals_to_the_parent(worker: int) -> None:
    """Ctrl-C and schedulers signal every process; the loader's go on until the training has finished its step."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def end_workers() -> None:
    """Kill the processes of loaders, at exit, when a loop that failed still holds its loader.

    multiprocessing would ask them with SIGTERM, which they ignore, and then wait for ever. They only read: nothing is
    lost.
    """
    workers = [process for process in multiprocessing.active_children() if process.daemon]
    if workers:
        # torch's handler would raise for a worker that is killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in workers:
        worker.kill()


# It runs before multiprocessing's own, which was registered when that was imported.
atexit.register(end_workers)
