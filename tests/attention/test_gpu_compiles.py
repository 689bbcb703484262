"""Triton's kernels compile for an H100, also where there is none.

The interpreter runs what the compiler refuses (a method of a size that Triton made a constant because it is 1), and it has
no limit of shared memory. So this file, run as a script, calls the operators with kernels that are compiled from their
arguments as on a GPU, and not launched.
"""

import os
import subprocess
import sys

import pytest
import torch

SHARED_MEMORY = 227 * 1024  # bytes, of a program on an H100


def test_kernels_compile():
    from conftest import ROOT

    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, __file__]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    assert len(set(result.stdout.split())) > 10, result.stdout


def compile_only():
    """Have Triton compile for an H100 and launch nothing; print the names of the kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class NoDriver:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

    run = JITFunction.run

    def compile_kernel(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        print(self.__name__, flush=True)
        assert kernel.metadata.shared <= SHARED_MEMORY, f"{self.__name__}: {kernel.metadata.shared} bytes"

    driver.set_active(NoDriver())
    JITFunction.run = compile_kernel


def differentiate(tensors):
    for x in tensors:
        if x.requires_grad:
            x.sum().backward()


def call_all(B, N, H, G, D, C, K, dtype, mask):
    """Call every operator: K of H heads run, C is the width of the tokens."""
    from moh_vision.attention.kernels import gpu

    OPS = torch.ops.moh_vision_triton

    def tensor(*shape, dtype=dtype):
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    token, offsets = torch.zeros(B * N * K, dtype=torch.int32), torch.zeros(H * B + 1, dtype=torch.int32)
    gates = tensor(H, B, N, dtype=torch.float32).permute(1, 2, 0)
    q, k, v = (
        x.unflatten(-1, (-1, D)).transpose(1, 2)
        for x in tensor(B, N, (H + 2 * G) * D).split([H * D, G * D, G * D], dim=-1)
    )
    differentiate(gpu.attend(q, k, v, gates, token, offsets, is_causal=True))
    differentiate(gpu.attend(q, k, v, None, token, offsets, mask=mask))

    x = tensor(B, N, C)
    shared = min(1, H - 1)
    router = tensor(H - shared + (2 if shared else 0), C)  # one shared head has no row, two groups have one each
    differentiate(OPS.route(x, router, H - shared, shared, K - shared, "released", None)[:1])
    OPS.pairs(torch.zeros(B, N, H, dtype=torch.bool))

    heads = torch.zeros(B, K, dtype=torch.int32)
    differentiate([gpu.project_heads(x, tensor(H * D, C), tensor(H * D), heads, D)])
    gates = tensor(B, K, dtype=torch.float32)
    differentiate([gpu.combine_heads(tensor(B, N, K, D), gates, tensor(C, H * D), tensor(C), heads)])

    with torch.no_grad():
        gpu.decode(q[:, :, :1], k, v, None, torch.ones(B, 1, H, dtype=torch.bool))


def main():
    compile_only()
    call_all(2, 130, 4, 2, 72, 64, 3, torch.bfloat16, torch.zeros(1, 1, 130, 130))
    call_all(1, 1, 1, 1, 64, 64, 1, torch.float32, torch.zeros(1, 1, 1, 1, dtype=torch.bool))


if __name__ == "__main__":
    main()
