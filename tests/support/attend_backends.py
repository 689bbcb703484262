"""One function, `attend`, for all back ends that tests/attention compares, and the same equation as a loop.

Inputs: queries [B, H, N, D], keys and values [B, G, M, D], gates [B, N or 1, H] or None, and active [B, N, H], which is
true where a head runs. Outputs: o [B, N, H, D], 0 where a head does not run, and lse [P], the log-sum-exp of the scores of
each pair, in the order of the list of pairs.
"""

import contextlib
import math
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moh_vision.attention import kernels
from moh_vision.attention.kernels import build, eager
from tests.support.interpreter import speed_up

try:
    from moh_vision.attention.kernels.gpu import library as gpu
except ImportError:  # Triton is not installed
    gpu = None

OPS = torch.ops.moh_vision
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton's kernels run


class Backend(NamedTuple):
    """A path of operators and the type of its tensors."""

    path: str
    dtype: torch.dtype = torch.float32

    @property
    def tolerance(self) -> float:
        """Largest allowed difference, relative to the largest element."""
        return 2e-5 if self.dtype == torch.float32 else 2e-2

    @property
    def device(self) -> str:
        return DEVICE if self.path == "triton" else "cpu"

    @property
    def operators(self):
        return torch.ops.moh_vision_triton if self.path == "triton" else OPS

    def why_no_case(self) -> str | None:
        """Return why this back end cannot run here, whatever is built or installed, or None if it can.

        tests/conftest.py leaves its tests out. Of what is not built or not installed tests are skipped, which is news.
        """
        if self.path == "triton" and self.dtype == torch.bfloat16 and DEVICE == "cpu" and gpu:
            return "Triton's interpreter multiplies bfloat16 as integers"
        if self.path == "cpp" and self.dtype != torch.float32 and build.load():
            if not OPS.brgemm_available(self.dtype):
                return "this processor has no instructions for such matrices"
        return None

    @contextlib.contextmanager
    def running(self):
        """Choose this back end, or skip the test if the back end is not built or not installed."""
        if self.path == "triton":
            if gpu is None:
                pytest.skip("Triton is not installed")
            speed_up()
        if self.path == "cpp" and not build.load():
            pytest.skip(f"the C++ operators are not built: {build.COMMAND}")
        kernels.use(self.path)
        yield self
        kernels.use(None)

    def __str__(self):
        return f"{self.path} {str(self.dtype).removeprefix('torch.')}"


EAGER, CPP, TRITON = (Backend(path) for path in ("torch", "cpp", "triton"))
CPP16 = Backend("cpp", torch.bfloat16), Backend("cpp", torch.float16)
TRITON16 = Backend("triton", torch.bfloat16), Backend("triton", torch.float16)
IN_PLACE = TRITON, *CPP16  # back ends with the operators `attend_in_place` and `attend_product`


class Launched(TorchDispatchMode):
    """Record which operators of Triton a block calls, but not the calls of other threads, such as trial runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "moh_vision_triton":
            self.names.append(operator._opname)
        return operator(*args, **(kwargs or {}))


@contextlib.contextmanager
def threads(count):
    """Set the number of PyTorch's threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on(*backends):
    """Parametrize a test by back ends."""
    return pytest.mark.parametrize("backend", backends, ids=str, indirect=True)


def list_for_triton(active, tail=5):
    """Return the list of pairs on Triton's device, followed by `tail` invalid indices, which kernels must not read."""
    pairs = kernels.list_pairs(active)
    token = torch.cat([pairs.token, torch.full((tail,), 2**31 - 1, dtype=torch.int32)])
    return token.to(DEVICE), pairs.offsets.to(DEVICE)


def attend(backend, q, k, v, gates, active, is_causal=False, mask=None, source=None):  # noqa: PLR0913
    """Return o and lse of a back end; lse is None in plain PyTorch."""
    B, H, N, D = q.shape
    if backend.path == "triton":
        on_device = [x if x is None else x.to(DEVICE) for x in (q, k, v, gates, mask)]
        token, offsets = list_for_triton(active)
        o, lse = gpu.attend(*on_device[:4], token, offsets, is_causal, on_device[4])
        return o.cpu().unflatten(2, (H, D)), lse[: offsets[-1]].cpu()
    pairs = kernels.list_pairs(active)
    if backend in CPP16:
        o, lse = OPS.attend_in_place(q, k, v, gates, *pairs, is_causal, mask)
        return o.unflatten(2, (H, D)), lse
    rows = kernels.select(q.transpose(1, 2), pairs, H)
    if backend.path == "cpp":
        o, lse = OPS.attend(rows, k, v, *pairs, H, N, source, is_causal, mask)
    else:
        o = eager.attend(rows, k, v, *pairs, H, N, source, is_causal, mask)
        lse = None
    index = eager.rows_of_pairs(*pairs, H)  # row of each pair in [B * N * H, D]
    if gates is not None:
        o = o * gates.expand(B, N, H).reshape(-1, 1)[index].to(o.dtype)
    return eager.scatter(o, index, B * N * H).view(B, N, H, D), lse


def attend_in_a_loop(q, k, v, gates, active, is_causal=False, mask=None, source=None):
    """Return o and lse by the equation of attention, for one head of one sequence at a time."""
    (B, H, N, D), (G, M) = q.shape, k.shape[1:3]
    outputs = []
    sums = []
    for h in range(H):
        for b in range(B):
            # Which keys and values this head reads, as an index over the first two dimensions of k and v.
            read = b * G + h * G // H if source is None else int(source[h * B + b])
            key = k.flatten(0, 1)[read]  # [M, D]
            value = v.flatten(0, 1)[read]  # [M, D]
            n = active[b, :, h].nonzero().squeeze(1)  # tokens for which the head runs
            scores = q[b, h, n] @ key.t() / math.sqrt(D)  # [len(n), M]
            if mask is not None:
                rows = mask.expand(B, H, N, M)[b, h, n]
                if rows.dtype == torch.bool:
                    scores = scores.masked_fill(~rows, -math.inf)
                else:
                    scores = scores + rows.double()
            if is_causal:
                scores = scores.masked_fill(torch.arange(M) > n.unsqueeze(1), -math.inf)
            blind = scores.isneginf().all(1, keepdim=True)  # tokens that see no key have output 0
            o = scores.masked_fill(blind, 0).softmax(1).masked_fill(blind, 0) @ value
            if gates is not None:
                o = o * gates.expand(B, N, H)[b, n, h].unsqueeze(1)
            outputs.append(q.new_zeros(N, D).index_put((n,), o))
            sums.append(scores.detach().logsumexp(1))
    return torch.stack(outputs).view(H, B, N, D).permute(1, 2, 0, 3), torch.cat(sums)


@contextlib.contextmanager
def fresh_memory_is_nan():
    """Within the block torch.empty returns NaN, so that an element that a kernel does not write is noticed.

    Freed memory is filled with NaN too, for kernels that get their memory from the allocator directly.
    """
    for size in (2**10, 2**14, 2**18, 2**20, 2**22):
        for _ in range(4):
            torch.full((size,), math.nan)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def outputs_and_gradients(backend, q, k, v, gates, active, do, **options):
    """Return name -> tensor: o, lse, and the gradients dq, dk, dv and dgates, for the gradient `do` of o."""
    tensors = dict(q=q, k=k, v=v, gates=gates)
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if x is not None}
    with fresh_memory_is_nan():
        o, lse = attend(backend, **{**tensors, **leaves}, active=active, **options)
    with fresh_memory_is_nan():
        grads = torch.autograd.grad(o, list(leaves.values()), do)
    return dict(o=o, lse=lse) | {f"d{name}": grad for name, grad in zip(leaves, grads)}
