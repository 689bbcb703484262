"""Processes that start quickly: they are forked from a server that has imported the slow modules already."""

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback

import torch

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["sklearn.datasets", "moh_vision.classification.train", "moh_vision.diffusion.train", "moh_vision.diffusion.sample",
     "moh_vision.language.train"]
)  # fmt: skip


def on_two_ranks(function, *args):
    """Call `function(rank, *args)` in two processes with the environment that torchrun sets; raise if one fails."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    torch.multiprocessing.start_processes(
        _on_a_rank, (dict(os.environ), port, function, args), nprocs=2, start_method="forkserver"
    )


def _on_a_rank(rank, environment, port, function, args):
    _alone(environment)
    # A crash says where it was, on descriptor 2: pytest's sys.stderr has another.
    faulthandler.enable(file=2)
    # As torchrun does; without it accelerate warns, on standard error, that it sets the number itself.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    function(rank, *args)


class Command:
    """`main(argv)` in a process of its own, on the CPU; what it prints goes to the file `log`."""

    def __init__(self, main, argv, log):
        self.log = log
        self.process = FORKS.Process(
            target=_run, args=(dict(os.environ), main, [str(a) for a in argv], str(log))
        )
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        """Return the exit code, minus the signal that killed the process, or None while it runs."""
        return self.process.exitcode

    def kill(self):
        """Kill the process if it still runs, and wait for its end."""
        self.process.kill()
        self.process.join()

    def until(self, condition, within=120):
        """Wait until `condition()` is true; return False if the process ends before that.

        A test fails here if neither happens within so many seconds.
        """
        deadline = time.monotonic() + within
        while not condition():
            if self.poll() is not None:
                return False
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGABRT)  # faulthandler writes the stacks
                self.process.join(5)
                raise AssertionError(f"not there within {within} s\n{self.said()[-6000:]}")
            time.sleep(0.005)
        return True

    def wait(self, within=120):
        """Wait for the end of the process and return its exit code."""
        self.until(lambda: self.poll() is not None, within)
        return self.poll()

    def said(self):
        """Return all that the process has printed."""
        return self.log.read_text()


def _alone(environment):
    """Set up a fork of the server so that it uses no thread or process of the server's, in the environment of its test."""
    # The server has that of the test which first needed it.
    os.environ.clear()
    os.environ.update(environment)
    # The fork has none of the server's threads, but would wait for those of its thread pool.
    torch.set_num_threads(1)
    # Loaders fork their workers from this process, not from the server.
    multiprocessing.set_start_method("fork", force=True)


def _run(environment, main, argv, log):
    _alone(environment)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    # The fork server ignores SIGINT; a new process would not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    faulthandler.enable(file=2)
    code = 1
    try:
        main(argv)
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fork(work):
    """Call `work` in a fork of this process and return the fork's id; it exits with 0, or with 99 after an exception."""
    child = os.fork()
    if child:
        return child
    try:
        # The fork has none of its parent's threads, but would wait for those of its thread pool.
        torch.set_num_threads(1)
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(99)


def wait(child, seconds=60):
    """Wait for a child process and return its exit code, or minus the signal that ended it.

    A child that still runs after so many seconds is killed and fails the test.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"still running after {seconds} s")


def hold(enter, *arguments):
    """Fork a process that enters the context manager `enter(*arguments)` and stays inside; return its id."""
    read, write = os.pipe()

    def work():
        with enter(*arguments):
            os.write(write, b"held")
            time.sleep(60)

    child = fork(work)
    os.read(read, 4)
    return child
