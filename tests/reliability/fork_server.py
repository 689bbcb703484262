"""Training runs as forked children of a process that has imported everything, so that a start costs no five seconds.

Run as a program it reads one JSON request a line and answers each with one line; `ForkServer` is the other end.

    {"start": "cls", "argv": [...], "log": FILE, "losses": FILE, "slow_save": 0}   -> {"pid": 123}
    {"poll": 123}                                          -> {"status": 0, or -9 for SIGKILL, or null while it runs}

A child runs the real script's main(). Only what is needed to look at it is added: each step's loss, as a hexadecimal
number, is appended to `losses` by one write, which a kill cannot tear.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class ForkServer:
    """The other end; children are killed with os.kill."""

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=dict(os.environ, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true"),
        )  # fmt: skip
        self.logs = {}
        return self

    def __exit__(self, *error):
        self.process.stdin.close()
        self.process.wait(30)

    def start(self, kind, argv, folder, slow_save=0.0):
        """The pid of a new run; its output goes to folder/KIND.log, its losses to folder/KIND.losses."""
        request = dict(start=kind, argv=[str(a) for a in argv], slow_save=slow_save)
        files = {name: str(folder / f"{kind}.{name}") for name in ("log", "losses")}
        pid = self._ask({**request, **files})["pid"]
        self.logs[pid] = folder / f"{kind}.log"
        return pid

    def poll(self, pid):
        """Exit code of a run, or minus the signal that killed it; None while it runs."""
        return self._ask(dict(poll=pid))["status"]

    def wait(self, pid, within=120):
        """Exit code of a run that ends in time. One that does not writes where it is, and fails the test."""
        deadline = time.monotonic() + within
        while (status := self.poll(pid)) is None:
            if time.monotonic() > deadline:
                self.fail(pid, f"the run did not end within {within} s")
            time.sleep(0.005)
        return status

    def until(self, pid, condition, within=120):
        """Wait for `condition` while the run goes on; False if it ended first."""
        deadline = time.monotonic() + within
        while not condition():
            if self.poll(pid) is not None:
                return False
            if time.monotonic() > deadline:
                self.fail(pid, f"the run did not get there within {within} s")
            time.sleep(0.005)
        return True

    def fail(self, pid, why):
        if self.poll(pid) is None:
            os.kill(pid, signal.SIGABRT)  # faulthandler writes the stacks
            time.sleep(1)
        raise AssertionError(f"{why}\n{self.logs[pid].read_text()[-6000:]}")

    def _ask(self, request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the server of forks ended with {self.process.wait(30)}"
        return json.loads(answer)


def child(request, scripts):
    import torch

    from moh_vision.engine import run
    from moh_vision.engine.logging import RunLog
    from moh_vision.engine.saver import Saver

    torch.set_num_threads(1)
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, handler)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=2)
    losses = os.open(request["losses"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    script = scripts[request["start"]]
    average, metrics, save, exact = run.average_over_step, RunLog.metrics, Saver.save, []

    def recorded_average(accelerator, values):
        exact[:] = [float(v["loss"].detach()).hex() for v in values]
        return average(accelerator, values)

    def recorded_metrics(self, step, values, show):
        os.write(losses, f"{step} {' '.join(exact)}\n".encode())
        metrics(self, step, values, show)

    def slow_save(*args, **kwargs):
        time.sleep(request["slow_save"])
        return save(*args, **kwargs)

    run.average_over_step, RunLog.metrics = recorded_average, recorded_metrics
    if request["slow_save"]:
        Saver.save = slow_save
    script.main(request["argv"])


def serve():
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    import sklearn.datasets  # noqa: F401  of the quickstart's data; the scripts import it late

    from moh_vision.classification import train as train_cls
    from moh_vision.diffusion import train as train_dit
    from moh_vision.language import train as train_text

    ended = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid = request["poll"]
            if pid not in ended and (found := os.waitpid(pid, os.WNOHANG))[0]:
                ended[pid] = os.waitstatus_to_exitcode(found[1])
            print(json.dumps(dict(status=ended.get(pid))), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child(request, dict(cls=train_cls, dit=train_dit, text=train_text))
                code = 0
            except SystemExit as stop:
                code = stop.code or 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(json.dumps(dict(pid=pid)), flush=True)


if __name__ == "__main__":
    serve()
