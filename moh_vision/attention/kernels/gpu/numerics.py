"""All of Triton's kernels against PyTorch in float64, on the GPU at hand: lines for a report, see `kernels.__main__`."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch
import triton

from moh_vision.attention.kernels import eager
from moh_vision.attention.kernels.gpu import check
from moh_vision.attention.kernels.gpu.library import OPS, _attend_product_oracle

B, H, G = 2, 4, 2
WIDTHS = 32, 64, 72, 128
# How attention is called, with as many tokens: the last block of keys is a part of one.
CALLS = {"no mask": 600, "causal": 197, "a bool mask": 197}
SHORT = dict(bfloat16=torch.bfloat16, float16=torch.float16)
FLOAT = dict(float32=torch.float32)
DEVICE = "cuda"

Compare = Callable[[], check.Difference]


def lines() -> Iterator[str]:
    """A line that says what computes, and then one for every kernel and kind of numbers.

    Kernels are compiled by several threads: about a minute, with 8 of them.
    """
    yield about()
    device = torch.device(DEVICE)
    # Triton's interpreter cannot run twice at once.
    workers = min(8, os.cpu_count() or 1) if device.type == "cuda" else 1
    with ThreadPoolExecutor(workers) as pool:
        yield from _lines_of(pool, [("pairs", "any", [partial(check.compare, "pairs", device)])])
        for precision, dtypes in (("ieee", SHORT | FLOAT), ("tf32", dict(tf32=torch.float32))):
            with float32_products(precision):
                for numbers, dtype in dtypes.items():
                    yield from _lines_of(pool, comparisons(device, numbers, dtype))


def about() -> str:
    major, minor = torch.cuda.get_device_capability()
    software = f"torch {torch.__version__}, triton {triton.__version__}, CUDA {torch.version.cuda}"
    return f"{torch.cuda.get_device_name()}, capability {major}.{minor}, {software}"


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """How PyTorch multiplies float32: "ieee" or "tf32"."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _lines_of(
    pool: ThreadPoolExecutor, kernels: list[tuple[str, str, list[Compare]]]
) -> Iterator[str]:
    """kernels: name, kind of numbers, and comparisons."""
    found = [
        (kernel, numbers, [pool.submit(_said, compare) for compare in compares])
        for kernel, numbers, compares in kernels
    ]
    for kernel, numbers, futures in found:
        _, text = max(future.result() for future in futures)  # the worst
        yield f"{kernel:<18} {numbers:<9} {text}"


def comparisons(
    device: torch.device, numbers: str, dtype: torch.dtype
) -> list[tuple[str, str, list[Compare]]]:
    """Every kernel with products of a dtype, and its comparisons with PyTorch."""
    full = torch.float32
    calls = {
        "route": [(dtype, dtype), (dtype, full)],
        "project_and_route": [(dtype, dtype, dtype), (full, dtype, full)],
        "weigh": [(dtype, full)],
    }
    kernels = [
        (kernel, numbers, [partial(check.compare, kernel, device, *call) for call in set(every)])
        for kernel, every in calls.items()
    ]
    for width in WIDTHS:
        compares = [partial(attention, device, dtype, width, call) for call in CALLS]
        kernels.append((f"attend, D = {width}", numbers, compares))
    return kernels


def attention(device: torch.device, dtype: torch.dtype, width: int, call: str) -> check.Difference:
    """Attention of half of the pairs, forward and backward."""
    N = CALLS[call]
    drawn = torch.Generator().manual_seed(0)
    product = torch.randn(B, N, (H + 2 * G) * width, generator=drawn).to(device, dtype)
    do = torch.randn(B, N, H * width, generator=drawn).to(device, dtype)
    gates = torch.rand(B, N, H, generator=drawn)
    pairs = eager.pairs(torch.rand(B, N, H, generator=drawn) < 0.5)
    mask = None
    if call == "a bool mask":
        mask = (torch.rand(B, 1, N, N, generator=drawn) < 0.8) | torch.eye(N, dtype=torch.bool)
    rest = gates, *pairs, call == "causal", mask
    on_device = [x.to(device) if isinstance(x, torch.Tensor) else x for x in rest]
    o, lse = OPS.attend_product(product, H, G, *on_device)
    dproduct, dgates = OPS.attend_product_backward(do, product, o, lse, H, G, *on_device)

    leaves = [x.cpu().double().requires_grad_() for x in (product, gates)]
    (want,) = _attend_product_oracle(leaves[0], H, G, leaves[1], *rest[1:])
    exact_grads = torch.autograd.grad(want, leaves, do.cpu().double())
    names = "outputs", "gradients of the product", "gradients of gates"
    compared = zip(names, (o, dproduct, dgates), (want, *exact_grads))
    return check.largest(((f"{name} ({call})", *both) for name, *both in compared), dtype)


def _said(compare: Compare) -> tuple[float, str]:
    """How bad an answer is, and the answer."""
    try:
        difference = compare()
    except Exception as error:  # whatever a compiler or a driver throws
        return float("inf"), f"error: {check.one_line(error)}"
    if difference.is_rounding:
        return difference.size, f"may run, at most {difference.size:.0e} off"
    # NaN is as bad as an error.
    size = difference.size if difference.size == difference.size else float("inf")
    return size, f"differs: {difference}"
