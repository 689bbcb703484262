"""Compare all Triton kernels with PyTorch in float64 on this machine's GPU, and print a report; see `kernels.__main__`."""

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch
import triton

from moh_vision.attention.kernels import eager
from moh_vision.attention.kernels.contract import attend_product_oracle
from moh_vision.attention.kernels.gpu import check
from moh_vision.attention.kernels.gpu.library import OPS
from moh_vision.common.errors import class_and_message

B = 2  # sequences
H = 4  # heads
G = 2  # key-value heads
WIDTHS = (32, 64, 72, 128)  # head widths
# Call of attention -> number of tokens, which is no multiple of a block of keys: the last block is partly empty.
CALLS = {"no mask": 600, "causal": 197, "a bool mask": 197}
SHORT = dict(bfloat16=torch.bfloat16, float16=torch.float16)
FLOAT = dict(float32=torch.float32)
DEVICE = "cuda"

Compare = Callable[[], check.Difference]


def lines() -> Iterator[str]:
    """Yield a line about the GPU and its software, and then one for every kernel and dtype.

    Kernels are compiled by several threads. With 8 threads this takes about a minute.
    """
    yield about()
    device = torch.device(DEVICE)
    workers = 1  # Triton's interpreter is not thread-safe
    if device.type == "cuda":
        workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        yield from _lines_of(pool, [("pairs", "any", [partial(check.compare, "pairs", device)])])
        for precision, dtypes in (("ieee", SHORT | FLOAT), ("tf32", dict(tf32=torch.float32))):
            with float32_products(precision):
                for dtype_name, dtype in dtypes.items():
                    yield from _lines_of(pool, comparisons(device, dtype_name, dtype))


def about() -> str:
    """Return the name and capability of the GPU, and the versions of torch, Triton and CUDA."""
    major, minor = torch.cuda.get_device_capability()
    software = f"torch {torch.__version__}, triton {triton.__version__}, CUDA {torch.version.cuda}"
    return f"{torch.cuda.get_device_name()}, capability {major}.{minor}, {software}"


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Return a context in which PyTorch multiplies float32 in `precision`, "ieee" or "tf32"."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _lines_of(
    pool: ThreadPoolExecutor, kernels: list[tuple[str, str, list[Compare]]]
) -> Iterator[str]:
    """Run comparisons and yield a line for each kernel, about its worst comparison.

    kernels: (name of the kernel, name of the dtype, comparisons) of each.
    """
    running = [
        (kernel, dtype_name, [pool.submit(_verdict, compare) for compare in compares])
        for kernel, dtype_name, compares in kernels
    ]
    for kernel, dtype_name, futures in running:
        _, text = max(future.result() for future in futures)  # the worst
        yield f"{kernel:<18} {dtype_name:<9} {text}"


def comparisons(
    device: torch.device, dtype_name: str, dtype: torch.dtype
) -> list[tuple[str, str, list[Compare]]]:
    """Return (name of the kernel, `dtype_name`, comparisons) for every kernel that makes products in `dtype`."""
    full = torch.float32
    calls = {
        "route": [(dtype, dtype), (dtype, full)],
        "project_and_route": [(dtype, dtype, dtype), (full, dtype, full)],
        "weigh": [(dtype, full)],
        "slice": [(dtype,)],
    }
    kernels = [
        (kernel, dtype_name, [partial(check.compare, kernel, device, *call) for call in set(tried)])
        for kernel, tried in calls.items()
    ]
    for width in WIDTHS:
        compares = [partial(attention, device, dtype, width, call) for call in CALLS]
        kernels.append((f"attend, D = {width}", dtype_name, compares))
    return kernels


def attention(device: torch.device, dtype: torch.dtype, width: int, call: str) -> check.Difference:
    """Compare attention with PyTorch, forward and backward; half of the (head, token) pairs run."""
    N = CALLS[call]
    drawn = torch.Generator().manual_seed(0)
    product = torch.randn(B, N, (H + 2 * G) * width, generator=drawn).to(device, dtype)
    do = torch.randn(B, N, H * width, generator=drawn).to(device, dtype)
    gates = torch.rand(B, N, H, generator=drawn)
    pairs = eager.pairs(torch.rand(B, N, H, generator=drawn) < 0.5)
    mask = None
    if call == "a bool mask":
        mask = (torch.rand(B, 1, N, N, generator=drawn) < 0.8) | torch.eye(N, dtype=torch.bool)
    is_causal = call == "causal"
    on_device = [x.to(device) for x in (gates, *pairs)]
    if mask is None:
        inputs = (H, G, *on_device, is_causal, None)
    else:
        inputs = (H, G, *on_device, is_causal, mask.to(device))
    o, lse = OPS.attend_product(product, *inputs)
    dproduct, dgates = OPS.attend_product_backward(do, product, o, lse, *inputs)

    leaves = [x.cpu().double().requires_grad_() for x in (product, gates)]
    (want,) = attend_product_oracle(leaves[0], H, G, leaves[1], *pairs, is_causal, mask)
    exact_grads = torch.autograd.grad(want, leaves, do.cpu().double())
    dproduct_want, dgates_want = exact_grads
    compared = [
        (f"outputs ({call})", o, want),
        (f"gradients of the product ({call})", dproduct, dproduct_want),
        (f"gradients of gates ({call})", dgates, dgates_want),
    ]
    return check.largest(compared, dtype)


def _verdict(compare: Compare) -> tuple[float, str]:
    """Run a comparison; return how large the difference is, infinite after an error, and a text about it."""
    try:
        difference = compare()
    except Exception as error:  # whatever a compiler or a driver throws
        return float("inf"), f"error: {class_and_message(error)}"
    if difference.is_rounding:
        return difference.size, f"may run, at most {difference.size:.0e} off"
    size = difference.size
    if math.isnan(size):  # NaN counts as much as an error
        size = float("inf")
    return size, f"differs: {difference}"
