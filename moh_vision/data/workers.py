"""The processes of a loader: what signals they heed, and how they end."""

import atexit
import multiprocessing
import signal


def leave_signals_to_the_parent(worker: int) -> None:
    """Ignore SIGINT and SIGTERM in a worker process of a loader.

    Ctrl-C and schedulers signal every process of a job, but the training needs its workers until its step is finished.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def end_workers() -> None:
    """Kill the workers that are alive at exit, because a loop that failed still holds its loader.

    multiprocessing would send SIGTERM, which workers ignore, and then wait forever. Workers only read, so nothing is
    lost.
    """
    workers = [process for process in multiprocessing.active_children() if process.daemon]
    if workers and hasattr(signal, "SIGCHLD"):  # Windows has no such signal
        # torch's handler would raise for a worker that is killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in workers:
        worker.kill()


# atexit calls functions in reverse order: this one before multiprocessing's, which its import registered.
atexit.register(end_workers)
