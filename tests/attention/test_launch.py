"""`gpu.launch` launches the kernel that Triton would launch, with the same arguments.

This file, run as a script, lets Triton launch without a GPU: in place of a compiled kernel there is what Triton compiles it
for, and launches are recorded.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.support.benchmarks import benchmark

B, N, H, D, C = 2, 40, 4, 16, 64


def test_the_kernel_and_the_arguments_are_those_of_triton():
    """Over operators, dtypes, sizes and alignments: each call goes through Triton once, and then directly."""
    from tests.support.paths import ROOT

    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
    )
    command = [sys.executable, __file__]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout)
    assert report["different"] == []
    assert report["through_triton_again"] == 0
    # Forward and backward of routing, of attention and of products with gates, the list, and five of whole sequences.
    assert len(report["kernels"]) == 16
    assert report["compiled"] > 2 * len(report["kernels"])  # for dtypes, alignments, sizes of one


# ---- the script


def at_address(x, offset):
    """A copy of a tensor whose first element lies `offset` elements behind a multiple of 64 bytes."""
    memory = torch.empty(x.numel() + 64, dtype=x.dtype)
    skipped = -memory.data_ptr() % 64 // x.element_size() + offset
    copy = memory[skipped : skipped + x.numel()].view(x.shape)
    return copy.copy_(x)


def operators(dtype, batch, tokens, offset):
    """Call every operator that launches kernels, forward and backward."""
    from moh_vision.attention.kernels import eager
    from moh_vision.attention.kernels.gpu import (
        attend,
        attend_backward,
        pairs,
        route,
        sequences,
        weigh,
    )

    def draw(*shape):
        return at_address(torch.randn(shape).to(dtype), offset)

    x = draw(batch, tokens, C)
    parts = [at_address(torch.randn(rows, C), offset) for rows in (2, 2, 2)]
    router = (2, 2, 1, "released", None, *parts[1:])
    weights, active, rows, probs, _ = route.forward(x, parts[0], *router)
    route.backward(weights, probs, None, rows, x, parts[0], *router)
    pairs.pairs(active, 3)
    choice = torch.rand(batch, tokens, H) < 0.5
    listed = eager.pairs(choice)
    product = draw(batch, tokens, 3 * H * D)
    for is_causal in (False, True):
        inputs = (H, H, weights, *listed, is_causal, None)
        o, lse = attend.forward_of_product(product, *inputs)
        attend_backward.backward_of_product(draw(*o.shape), product, o, lse, *inputs)
    o = draw(batch, tokens, H, D).transpose(1, 2)
    weigh.backward(weigh.forward(o, weights), o, weights)
    plan = sequences.plan(choice[:, :1], weights[:, :1], 2, D)
    q, _, _ = sequences.project(x, draw(3 * H * D, C), None, *plan)
    sequences.combine(q, draw(C, H * D), None, plan[1], plan[2])
    weight = at_address(torch.randn(3 * H * D, C), offset)
    sequences.slice_rows(weight, weight[:, 0], plan[2][:1], 3, x)
    sequences.slice_columns(draw(C, H * D), plan[1][:1], plan[2][:1], x)


def described(arguments):
    """The arguments of a launch without the addresses of tensors, which are new at every call."""
    described_ones = []
    for value in arguments:
        if isinstance(value, torch.Tensor):
            value = (str(value.dtype), tuple(value.shape), value.stride(), value.data_ptr() % 16)
        elif hasattr(value, "block_shape"):
            base = value.base
            value = (str(base.dtype), tuple(value.shape), tuple(value.strides), value.block_shape)
        elif type(value).__name__ == "LazyDict":  # for hooks of profilers
            value = "LazyDict"
        described_ones.append(value)
    return described_ones


def main():
    launched = []
    benchmark("launch_time").without_a_gpu(lambda *one: launched.append(one))
    from triton.runtime.jit import JITFunction

    from moh_vision.attention.kernels.gpu import attend, blocks
    from moh_vision.attention.kernels.gpu import launch as launcher

    attend.card_of = lambda device: blocks.HOPPER
    through_triton = [0]
    run = JITFunction.run

    def counted(self, *args, **kwargs):
        through_triton[0] += 1
        return run(self, *args, **kwargs)

    JITFunction.run = counted
    calls = []
    for dtype in (torch.float32, torch.bfloat16):
        for batch, tokens, offset in ((B, N, 0), (B, N, 1), (1, N, 0), (B, 1, 0), (3, 33, 8)):
            calls.append((dtype, batch, tokens, offset))

    def record():
        launched.clear()
        for call in calls:
            torch.manual_seed(0)
            operators(*call)
        return [(name, described(arguments)) for name, arguments in launched]

    launcher.KEEPS = False
    by_triton = record()
    launcher.KEEPS = True
    both_ways = record()
    before = through_triton[0]
    direct = record()
    again = through_triton[0] - before
    different = []
    for first, second, third in zip(by_triton, both_ways, direct, strict=True):
        if not first == second == third:
            different.append(first[0])

    report = dict(
        different=different,
        through_triton_again=again,
        kernels=sorted({name for name, _ in by_triton}),
        compiled=len({arguments[4] for _, arguments in by_triton}),
    )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
