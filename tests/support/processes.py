"""Processes that start in a moment: forks of a server that has imported what takes seconds to import."""

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
    """Call `function(rank, *args)` in two processes that have the environment of torchrun's; a failure is raised here."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    torch.multiprocessing.start_processes(
        _on_a_rank, (port, function, args), nprocs=2, start_method="forkserver"
    )


def _on_a_rank(rank, port, function, args):
    _alone()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    function(rank, *args)


class Command:
    """`main(argv)` in a process of its own, on the CPU; what it prints goes to the file `log`."""

    def __init__(self, main, argv, log):
        self.log = log
        self.process = FORKS.Process(target=_run, args=(main, [str(a) for a in argv], str(log)))
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        """Exit code, or minus the signal that killed it; None while it runs."""
        return self.process.exitcode

    def kill(self):
        """SIGKILL, if it still runs."""
        self.process.kill()
        self.process.join()

    def until(self, condition, within=120):
        """Wait for `condition` while it runs; False if it ended first. One that takes too long fails the test."""
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
        """Exit code of a run that ends in time."""
        self.until(lambda: self.poll() is not None, within)
        return self.poll()

    def said(self):
        return self.log.read_text()


def _alone():
    torch.set_num_threads(
        1
    )  # the threads of the server's pool are not in the fork, which would wait for them
    multiprocessing.set_start_method(
        "fork", force=True
    )  # of loaders: they are no forks of the server


def _run(main, argv, log):
    _alone()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        signal.signal(number, handler)
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
    """Start `work` in a copy of this process and return its id; it exits with 0, or 99 after an exception."""
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(
            1
        )  # the threads of the parent's pool are not in the fork, which would wait for them
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(99)


def wait(child, seconds=60):
    """Exit code of a child, minus the signal that ended it; one that hangs is killed and fails the test."""
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
    """Pid of a fork that is inside a context manager, `enter(*arguments)`, until it is killed."""
    read, write = os.pipe()

    def work():
        with enter(*arguments):
            os.write(write, b"held")
            time.sleep(60)

    child = fork(work)
    os.read(read, 4)
    return child
