"""Training runs as forked children of a process that has imported everything, so that a start costs no five seconds.

Run as a program it reads one JSON request a line and answers each with one line; `ForkServer` is the other end.

    {"start": "cls", "argv": [...], "log": FILE, "losses": FILE, "slow_save": 0}   -> {"pid": 123}
    {"wait": 123}                                                                 -> {"status": 0, or -9 for SIGKILL}

A child runs the real script's main(). Only what is needed to look at it is added: each step's loss, as a hexadecimal
number, is appended to `losses` by one write, which a kill cannot tear.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class ForkServer:
    """The other end; children are killed with os.kill."""

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=dict(os.environ, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true"),
        )  # fmt: skip
        return self

    def __exit__(self, *error):
        self.process.stdin.close()
        self.process.wait(30)

    def start(self, kind, argv, folder, slow_save=0.0):
        """The pid of a new run; its output goes to folder/KIND.log, its losses to folder/KIND.losses."""
        request = dict(start=kind, argv=[str(a) for a in argv], slow_save=slow_save)
        files = {name: str(folder / f"{kind}.{name}") for name in ("log", "losses")}
        return self._ask({**request, **files})["pid"]

    def wait(self, pid):
        """Exit code of a run, or minus the signal that killed it."""
        return self._ask(dict(wait=pid))["status"]

    def _ask(self, request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def child(request, scripts):
    import time

    import torch

    from moh_vision.engine.logging import RunLog
    from moh_vision.engine.saver import Saver

    torch.set_num_threads(1)
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, handler)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    losses = os.open(request["losses"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    script = scripts[request["start"]]
    average, metrics, save, exact = script.average_over_step, RunLog.metrics, Saver.save, []

    def recorded_average(accelerator, values):
        exact[:] = [float(v["loss"].detach()).hex() for v in values]
        return average(accelerator, values)

    def recorded_metrics(self, step, values, show):
        os.write(losses, f"{step} {' '.join(exact)}\n".encode())
        metrics(self, step, values, show)

    def slow_save(*args, **kwargs):
        time.sleep(request["slow_save"])
        return save(*args, **kwargs)

    script.average_over_step, RunLog.metrics = recorded_average, recorded_metrics
    if request["slow_save"]:
        Saver.save = slow_save
    script.main(request["argv"])


def serve():
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    import train_cls
    import train_dit

    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            status = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
            print(json.dumps(dict(status=status)), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child(request, dict(cls=train_cls, dit=train_dit))
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
