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

from tests.support.covering import of_pairs

# Bytes of shared memory that a program has on an A100, on small GPUs (RTX 4090, L4) and on an H100, by capability.
CARDS = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
SPILLED = 144  # bytes of a thread that may lie in memory in place of registers (Triton 3.8: 136 in one kernel)
# By Triton 3.8, of 16 columns in bfloat16 on an H100. By 3.6, with which it was found to be the fastest, nothing.
OTHERS_SPILL = {"_route_kernel": 344}
SIX = [
    (80, 64, "bfloat16", 1024, "none"),
    (80, 128, "float32", 197, "bool"),
    (89, 72, "float16", 197, "causal"),
    (89, 256, "tf32", 197, "none"),
    (90, 64, "bfloat16", 197, "none"),
    (90, 128, "bfloat16", 1024, "float"),
]
BUDGETS = 1, 2, 16, 23
WIDTHS = 32, 48, 64, 72, 128, 256
TOKENS = 511, 1024, 4095
# Calls for rows of the table that the pairs of values leave out.
OF_ROWS = {80: [("attend", 80, 128, "bfloat16", 1024, "none")]}
ATTENTION = {"forward_kernel", "pack_kernel", "queries_kernel", "keys_kernel"}
AROUND = {
    "_route_kernel",
    "_route_backward_kernel",
    "_weight_gradient_kernel",
    "_count_kernel",
    "_list_kernel",
    "_weigh_kernel",
    "_weigh_backward_kernel",
}
OF_SEQUENCES = {
    "_plan_kernel",
    "_rows_kernel",
    "_columns_kernel",
    "_slice_rows_kernel",
    "_slice_columns_kernel",
}
# Hidden channels of a group: an eighth of those of small models and of DiT-XL, and widths that divide otherwise.
GROUP_WIDTHS = 72, 192, 288, 384, 512, 576


def compiled(tasks):
    """What a process without the interpreter compiles for the tasks, lists of a function below, a card, and arguments."""
    from tests.support.paths import ROOT

    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]  # which may have another Triton
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, __file__, json.dumps(tasks)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def assert_fit(kernels):
    for kernel in kernels:
        wide = kernel["task"][2:4] == [256, "float32"]
        allowed = 320 if wide else OTHERS_SPILL.get(kernel["name"], SPILLED)
        assert kernel["spilled"] <= allowed, kernel
        assert kernel["shared"] <= CARDS[kernel["task"][1]], kernel


def test_six_kinds_of_attention_an_elastic_budget_and_sizes_of_one():
    """A budget compiles nothing anew; Triton makes constants of sizes of one, which have no methods of tensors."""
    tasks = [("attend", *case) for case in SIX]
    tasks += [("route", 90, "bfloat16", 23, 2, routed) for routed in BUDGETS]
    tasks += [("weigh", 89, 72, "float16"), ("ones", 90)]
    kernels = compiled(tasks)
    of = dict(attend=[], route=[], weigh=[], ones=[])
    for kernel in kernels:
        of[kernel["task"][0]].append(kernel)
    assert len(of["attend"]) == len(ATTENTION) * len(SIX)
    of_budget = {budget: set() for budget in BUDGETS}
    for kernel in of["route"]:
        of_budget[kernel["task"][-1]].add(kernel["hash"])
    assert all(of_budget[budget] == of_budget[BUDGETS[0]] for budget in BUDGETS)
    # A weight in three tensors is loaded as one in one tensor.
    for name in ("_route_kernel", "_route_backward_kernel"):
        of_one, of_three = (
            [kernel["loads"] for kernel in of["route"] if kernel["name"] == name][part::2]
            for part in (0, 1)
        )
        assert of_one == of_three and all(of_one), name
    assert_fit(of["attend"] + of["route"] + of["weigh"])
    assert {kernel["name"] for kernel in of["attend"]} == ATTENTION
    assert {kernel["name"] for kernel in of["route"] + of["weigh"]} == AROUND
    assert {kernel["name"] for kernel in of["ones"]} == ATTENTION | AROUND


def test_groups_of_sequences():
    """The widest groups on every card, without a constant for the number of groups that run."""
    cases = [(80, 576, "tf32"), (89, 576, "float16"), (90, 576, "bfloat16"), (90, 72, "float32")]
    tasks = [("of_groups", *case, K) for case in cases for K in (3, 5)]
    kernels = compiled(tasks)
    assert {kernel["name"] for kernel in kernels} == OF_SEQUENCES
    assert_fit(kernels)
    for case in cases:
        hashes = [
            {kernel["hash"] for kernel in kernels if kernel["task"][1:] == [*case, K]}
            for K in (3, 5)
        ]
        # In 16 bits weights are sliced in their dtype, and in float32.
        assert len(hashes[0]) == len(OF_SEQUENCES) + 2 * case[2].endswith("16")
        assert hashes[0] == hashes[1]


def test_every_row_of_the_table_is_compiled():
    """By the matrix of calls below, on some card."""
    blocks = pytest.importorskip("moh_vision.attention.kernels.gpu.blocks")
    reached = set()
    for _, card, D, dtype, tokens, mask in itertools.chain(*map(matrix, CARDS)):
        numbers = "16 bits" if dtype.endswith("16") else dtype
        masked = mask in ("bool", "float")
        reached.add(blocks.row_of(numbers, blocks_card(card), D, masked, tokens))
    assert reached == set(blocks.TABLE)


@pytest.mark.slow  # minutes
@pytest.mark.parametrize("card", CARDS)
def test_attention_as_a_matrix(card):
    tasks = matrix(card)
    kernels = compiled(tasks)
    assert len(kernels) == len(ATTENTION) * len(tasks)
    assert_fit(kernels)


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
def test_routers_and_products_with_gates_as_a_matrix(card):
    dtypes = ["float32", "tf32", "bfloat16", "float16"]
    routers = [(10, 2, 4), (23, 1, 5), (64, 0, 8), (128, 0, 8), (200, 0, 5)]
    tasks = [("route", card, dtype, *router) for dtype in dtypes for router in routers]
    tasks += itertools.product(["weigh"], [card], [16, 72, 128, 256], dtypes)
    tasks += itertools.product(["of_sequences"], [card], [64, 72, 128], dtypes)
    tasks += itertools.product(["of_groups"], [card], GROUP_WIDTHS, dtypes)
    kernels = compiled(tasks)
    assert_fit(kernels)
    assert {kernel["name"] for kernel in kernels} == AROUND | OF_SEQUENCES


def matrix(card):
    """Calls of attention on a card, with each pair of values. The last block of keys is full for some numbers of tokens.

    All calls, of which these are a ninth, take hours to compile.
    """
    numbers = ["float32", "tf32", "bfloat16", "float16"]
    masks = ["none", "causal", "bool", "float"]
    calls = of_pairs(itertools.product(["attend"], [card], WIDTHS, numbers, TOKENS, masks))
    return calls + OF_ROWS.get(card, [])


def blocks_card(capability):
    from moh_vision.attention.kernels.gpu import blocks

    return {80: blocks.LARGE, 89: blocks.SMALL, 90: blocks.HOPPER}[capability]


def compile_only(tasks):
    """Have Triton compile for the card of each task while it lasts, and launch nothing; print a line for every kernel."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

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
            loads=kernel.asm["ptx"].count(", 0x10,"),  # of 16 bytes into shared memory
        )
        print(json.dumps(line), flush=True)

    run = JITFunction.run
    driver.set_active(NoDriver())
    JITFunction.run = compile_kernel
    attend = importlib.import_module("moh_vision.attention.kernels.gpu.attend")
    attend.card_of = lambda device: blocks_card(task[1])
    for task in tasks:
        yield task


def products_in(dtype):
    """The dtype, and how PyTorch multiplies from now on: "tf32" is both."""
    torch.backends.cuda.matmul.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
    return getattr(torch, "float32" if dtype == "tf32" else dtype)


def attend(D, dtype, tokens, mask, H=4, G=2):
    """Attention of views of one product, and gradients."""
    from moh_vision.attention.kernels.gpu import library as gpu

    dtype = products_in(dtype)
    product = torch.zeros(1, tokens, (H + 2 * G) * D, dtype=dtype, requires_grad=True)
    gates = torch.zeros(H, 1, tokens, requires_grad=True).permute(1, 2, 0)
    token = torch.zeros(tokens * H, dtype=torch.int32)
    offsets = torch.zeros(H + 1, dtype=torch.int32)
    shape = 1, 1, tokens, tokens
    dtypes = dict(bool=torch.bool, float=dtype)
    given = torch.zeros(shape, dtype=dtypes[mask]) if mask in dtypes else None
    rest = gates, token, offsets, mask == "causal", given
    gpu.attend_product(product, H, G, *rest)[0].sum().backward()


def route(dtype, candidates, shared, routed, tokens=64, C=768):
    """A router with its gradients, and the list of what it chose."""
    from moh_vision.attention.kernels.gpu.library import OPS

    dtype = products_in(dtype)
    x = torch.zeros(2, tokens, C, dtype=dtype, requires_grad=True)
    rows = candidates + (shared if shared > 1 else 0) + (2 if shared else 0)
    parts = [candidates]
    if shared:  # the rows of a router's layers, each in its own tensor
        parts = [candidates, *([shared] if shared > 1 else []), 2]
    for weight_dtype in {dtype, torch.float32}:
        weight = torch.zeros(rows, C, dtype=weight_dtype, requires_grad=True)
        for split in dict.fromkeys([(rows,), tuple(parts)]):
            tensors = (*weight.split(split), None, None)[:3]
            first, second, third = tensors
            settings = (candidates, shared, routed, "released", None)
            weights, active, *_ = OPS.route(x, first, *settings, second, third)
            weights.sum().backward()
    OPS.pairs(active, None)


def weigh(D, dtype, tokens=64, H=4):
    from moh_vision.attention.kernels.gpu.library import OPS

    o = torch.zeros(1, H, tokens, D, dtype=products_in(dtype), requires_grad=True)
    OPS.weigh(o, torch.zeros(1, tokens, H, requires_grad=True)).sum().backward()


def of_sequences(D, dtype, H=6, K=3, tokens=200):
    """Products with the weights of the heads that each sequence runs."""
    from moh_vision.attention.kernels.gpu.library import OPS

    dtype = products_in(dtype)
    active = torch.zeros(2, 1, H, dtype=torch.bool)
    plan = OPS.plan(active, torch.zeros(2, 1, H), K, D)
    x = torch.zeros(2, tokens, H * D, dtype=dtype)
    weight = torch.zeros(3 * H * D, H * D).to(dtype)
    OPS.project_heads(x, weight, weight[:, 0].contiguous(), *plan)
    o = torch.zeros(2, tokens, K, D, dtype=dtype)
    OPS.combine_heads(o, weight[: H * D], None, None, plan[2])


def of_groups(D, dtype, K=3, G=8, C=1152, tokens=200):
    """Products with the weights of the groups of an MLP that each sequence runs."""
    from moh_vision.attention.kernels.gpu.library import OPS

    dtype = products_in(dtype)
    active = torch.zeros(2, 1, G, dtype=torch.bool)
    heads, gates, index = OPS.plan(active, torch.zeros(2, 1, G), K, D)
    x = torch.zeros(2, tokens, C, dtype=dtype)
    weight = torch.zeros(G * D, C).to(dtype)
    hidden = OPS.project_groups(x, weight, weight[:, 0].contiguous(), heads, index)
    OPS.combine_heads(hidden, weight.t().contiguous(), weight[0], gates, index)
    for weight_dtype in {dtype, torch.float32}:
        of_one = weight.to(weight_dtype)
        OPS.slice_rows(of_one, of_one[:, 0].contiguous(), index[:1], 1, x)
        OPS.slice_columns(of_one.t().contiguous(), gates[:1], index[:1], x)


def ones():
    attend(16, "float32", 1, "bool", H=1, G=1)
    route("float32", 1, 0, 1, tokens=1, C=1)
    weigh(1, "float32", tokens=1, H=1)


if __name__ == "__main__":
    for function, _, *arguments in compile_only(json.loads(sys.argv[1])):
        globals()[function](*arguments)
