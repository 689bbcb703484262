"""Time on the host of launching the kernels of one layer, by Triton's own launcher and directly. Needs no GPU.

    python benchmarks/launch_time.py        # about 20 seconds on an idle core

The driver of a GPU is replaced by one that compiles and launches nothing. What is left of a launch is how a compiled kernel
is found for the arguments, and how they are handed on; what CUDA itself needs for a launch, and moving arguments into it, is
left out.
"""

import os

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

from functools import partial

import torch
from timing import about_machine, cell, interleaved, machine, markdown, to_base
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ROUNDS = 1000
# A layer of a ViT-B in bfloat16: half of its heads run, 40 % of them shared.
BATCH, TOKENS, HEADS, HEAD_DIM, SHARED, ROUTED = 2, 197, 12, 64, 2, 4


class NoDriver:
    """A driver of an H100 that is not there."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 7


def without_a_gpu(launch):
    """Let Triton call `launch(name of a kernel, arguments)` in place of compiling and launching kernels.

    The fifth of the arguments is (name, what Triton compiles the kernel for).
    """

    class NotCompiled(CompiledKernel):
        def __init__(self, name, key):
            self.name = name
            self.function = (name, key)
            self.packed_metadata = "metadata"
            self.module = "module"
            self.src = None
            self._run = lambda *arguments: launch(name, arguments)

        def __del__(self):
            pass

    def compile_kernel(self, key, signature, device, *rest):
        compiled = NotCompiled(self.__name__, str(key))
        self.device_caches[device][0][key] = compiled
        return compiled

    driver.set_active(NoDriver())
    JITFunction._do_compile = compile_kernel


def recorded_launches():
    """Return the launches of forward and of backward of a layer: {name: [function without arguments, ...]}."""
    from moh_vision.attention.kernels.gpu import launch as launcher

    launch = launcher.launch
    found = []

    def record(*args, **kwargs):
        found.append(partial(launch, *args, **kwargs))
        launch(*args, **kwargs)

    launcher.launch = record  # before the files that import it
    from moh_vision.attention.kernels.gpu import attend, blocks, route_attend

    attend.card_of = lambda device: blocks.HOPPER
    width = HEADS * HEAD_DIM
    candidates = HEADS - SHARED
    x = torch.randn(BATCH, TOKENS, width).bfloat16()
    weight = torch.randn(3 * width, width).bfloat16()
    router = [torch.randn(rows, width).bfloat16() for rows in (candidates, SHARED, 2)]
    settings = (candidates, SHARED, ROUTED, "released", None, HEADS, False, None)
    inputs = (x, weight, None, router[0], *settings, *router[1:])
    o, weights, _, rows, _, _, *saved = route_attend.forward(x, *inputs)
    forward = list(found)
    found.clear()
    route_attend.backward(o, None, None, None, (o, weights, rows, *saved), *inputs)
    return dict(forward=forward, backward=found)


def main():
    torch.set_num_threads(1)
    without_a_gpu(lambda name, arguments: None)
    launches = recorded_launches()
    from moh_vision.attention.kernels.gpu import launch as launcher

    def run(ones, directly):
        launcher.KEEPS = directly
        for one in ones:
            one()

    rows = []
    for name, ones in launches.items():
        ways = {"by Triton": partial(run, ones, False), "directly": partial(run, ones, True)}
        found = to_base(interleaved(ways, ROUNDS, warm_up=20))
        for way, figures in found.items():
            microseconds = 1e3 * figures["milliseconds"] / len(ones)
            ratio = cell(figures["ratio"], figures["quartiles"])
            rows.append([f"{name}, {len(ones)} kernels", way, f"{microseconds:.1f}", ratio])
    print(about_machine(dict(machine=machine())))
    print(markdown(["", "launched", "us a launch", "over Triton's"], rows), end="")


if __name__ == "__main__":
    main()
