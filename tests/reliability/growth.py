"""What a piece of work costs in time and memory, measured in a fork."""

import json
import os
import select
import signal
import time
import traceback

import torch

HANGS = 120  # seconds


def cost(work) -> dict:
    """dict(seconds, mib: by which the peak of resident memory grew, result: what work() returned, as JSON)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # the threads of the parent's pool are not in the fork, which would wait for them
            before, since = _resident(), time.monotonic()
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # the peak starts anew
            result = work()
            found = dict(seconds=time.monotonic() - since, mib=(_resident("VmHWM") - before) / 1024, result=result)
            os.write(writer, json.dumps(found).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    if not select.select([reader], [], [], HANGS)[0]:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reader, "rb") as file:
        text = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return json.loads(text)


def _resident(key: str = "VmRSS") -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key + ":"))
