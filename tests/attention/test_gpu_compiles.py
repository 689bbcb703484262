"""Triton's kernels compile for three generations of GPUs, also where there is none: within its memory.

The interpreter runs what the compiler refuses (a method of a size that Triton made a constant because it is 1), and it has
no limit of shared memory. So this file, run as a script, calls the operators with kernels that are compiled from their
arguments as on a GPU, and not launched.
"""

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile

import pytest
import torch

# Bytes of shared memory that a program has on an A100, on small GPUs (RTX 4090, L4) and on an H100, by capability.
CARDS = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
SPILLED = 144  # bytes of a thread that may lie in memory in place of registers (Triton 3.8: 136 in one kernel)
SIX = [
    (80, 64, "bfloat16", 1024, "none"),
    (80, 128, "float32", 197, "bool"),
    (89, 72, "float16", 197, "causal"),
    (89, 256, "tf32", 197, "none"),
    (90, 64, "bfloat16", 197, "none"),
    (90, 128, "bfloat16", 1024, "float"),
]
BUDGETS = 1, 2, 16, 23


def compiled(tasks):
    """What a process without the interpreter compiles for the tasks, lists of a function below, a card, and arguments."""
    from conftest import ROOT

    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, __file__, json.dumps(tasks)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def assert_fit(kernels):
    for kernel in kernels:
        wide = kernel["task"][2:4] == [256, "float32"]
        assert kernel["spilled"] <= (320 if wide else SPILLED), kernel
        assert kernel["shared"] <= CARDS[kernel["task"][1]], kernel


def test_six_kinds_of_attention_an_elastic_budget_and_sizes_of_one():
    """A budget compiles nothing anew; Triton makes constants of sizes of one, which have no methods of tensors."""
    tasks = [("attend", *case) for case in SIX]
    tasks += [("route", 90, "bfloat16", 23, 1, routed) for routed in BUDGETS]
    kernels, of = compiled([*tasks, ("ones", 90)]), dict(attend=[], route=[], ones=[])
    for kernel in kernels:
        of[kernel["task"][0]].append(kernel)
    assert len(of["attend"]) == 3 * len(SIX)
    assert {kernel["task"][-1] for kernel in of["route"]} == set(BUDGETS)
    assert len({kernel["hash"] for kernel in of["route"]}) == len(
        {kernel["name"] for kernel in of["route"]}
    )
    assert_fit(of["attend"] + of["route"])
    assert {kernel["name"] for kernel in of["ones"]} == {
        kernel["name"] for kernel in of["attend"] + of["route"]
    }


@pytest.mark.slow  # minutes
@pytest.mark.parametrize("D", [64, 72, 128, 256])
@pytest.mark.parametrize("card", CARDS)
def test_attention_as_a_matrix(card, D):
    dtypes, masks = ["float32", "tf32", "bfloat16", "float16"], ["none", "causal", "bool", "float"]
    tasks = list(itertools.product(["attend"], [card], [D], dtypes, [197, 1024], masks))
    kernels = compiled(tasks)
    assert len(kernels) == 3 * len(tasks)
    assert_fit(kernels)


def compile_only(tasks):
    """Have Triton compile for the card of each task while it lasts, and launch nothing; print a line for every kernel."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from moh_vision.attention.kernels.gpu import blocks

    class NoDriver:
        def get_current_target(self):
            return GPUTarget("cuda", task[1], 32)

        def get_current_device(self):
            return task[1]  # kernels are kept per device

        def get_current_stream(self, device=None):
            return 0

    def compile_kernel(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        with tempfile.NamedTemporaryFile() as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        spilled = sum(int(size) for size in re.findall("(?:STACK|LOCAL):([0-9]+)", usage))
        line = dict(
            name=self.__name__,
            task=task,
            hash=kernel.hash,
            shared=kernel.metadata.shared,
            spilled=spilled,
        )
        print(json.dumps(line), flush=True)

    run = JITFunction.run
    driver.set_active(NoDriver())
    JITFunction.run = compile_kernel
    attend = importlib.import_module("moh_vision.attention.kernels.gpu.attend")
    attend.card_of = lambda device: {80: blocks.LARGE, 89: blocks.SMALL, 90: blocks.HOPPER}[task[1]]
    for task in tasks:
        yield task


def attend(D, dtype, tokens, mask, H=4, G=2):
    """Attention of views of one product, and gradients."""
    from moh_vision.attention.kernels.gpu import library as gpu

    torch.backends.cuda.matmul.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
    dtype = getattr(torch, "float32" if dtype == "tf32" else dtype)
    qkv = torch.zeros(1, tokens, (H + 2 * G) * D, dtype=dtype, requires_grad=True)
    q, k, v = (
        x.unflatten(-1, (-1, D)).transpose(1, 2) for x in qkv.split([H * D, G * D, G * D], dim=-1)
    )
    gates = torch.zeros(H, 1, tokens, requires_grad=True).permute(1, 2, 0)
    token, offsets = (
        torch.zeros(tokens * H, dtype=torch.int32),
        torch.zeros(H + 1, dtype=torch.int32),
    )
    shape, dtypes = (1, 1, tokens, tokens), dict(bool=torch.bool, float=dtype)
    given = torch.zeros(shape, dtype=dtypes[mask]) if mask in dtypes else None
    gpu.attend(q, k, v, gates, token, offsets, mask == "causal", given)[0].sum().backward()


def route(dtype, candidates, shared, routed, tokens=64, C=768):
    """A router with its gradients, and the list of what it chose."""
    from moh_vision.attention.kernels.gpu.library import OPS

    x = torch.zeros(2, tokens, C, dtype=getattr(torch, dtype), requires_grad=True)
    weight = torch.zeros(candidates + (2 if shared else 0), C, requires_grad=True)
    weights, active, *_ = OPS.route(x, weight, candidates, shared, routed, "released", None)
    weights.sum().backward()
    OPS.pairs(active, None)


def ones():
    attend(16, "float32", 1, "bool", H=1, G=1)
    route("float32", 1, 0, 1, tokens=1, C=1)


if __name__ == "__main__":
    for function, _, *arguments in compile_only(json.loads(sys.argv[1])):
        globals()[function](*arguments)
