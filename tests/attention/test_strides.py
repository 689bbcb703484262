"""Every tensor that a compiled operator takes, in every layout of memory: the results are those of a contiguous tensor.

An operator must neither read a copy whose memory is gone, nor read between and beyond the elements of a tensor. The sweep
of the C++ operators also runs under AddressSanitizer, which ends the process where one does.
"""

import itertools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moh_vision.attention import kernels
from tests.support.attend_backends import CPP, CPP16, DEVICE, OPS, TRITON, list_for_triton, on
from tests.support.paths import ROOT

B = 2
N = 5
H = 4
G = 2
C = 24
CANDIDATES = 3
# Head widths and numbers of keys. C++ reads rows of 16 where they lie, but where more than 256 of them lie apart.
SIZES = {"D=16": (16, N), "D=6": (6, N), "D=7": (7, 20), "300 keys": (16, 300)}
# Arguments that operators may refuse where their last dimension is not contiguous: lists of pairs, and rows of masks.
MAY_BE_REFUSED = "token", "offsets", "source", "mask"


def layouts(t: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a name and t, or expanded elements of t, in other layouts. What lies between and beyond the elements is NaN."""
    sizes = list(t.shape)
    whole = [slice(None)] * t.dim()
    for order in itertools.permutations(range(t.dim())):
        back = [order.index(dim) for dim in range(t.dim())]
        yield f"in memory {order}", t.permute(order).contiguous().permute(back)
    yield "offset", part_of([t.numel() + 2], slice(1, -1), t.flatten()).view(sizes)
    for dim in range(t.dim()):
        longer = sizes.copy()
        longer[dim] += 3
        yield f"part of a longer {dim}", part_of(longer, (*whole[:dim], slice(1, -2)), t)
        longer[dim] = 2 * sizes[dim]
        every_other = (*whole[:dim], slice(None, None, 2))
        yield f"every other of {dim}", part_of(longer, every_other, t)
        if t.dtype != torch.int32:  # it would be another list
            yield f"expanded in {dim}", t.narrow(dim, 0, 1).expand(sizes)


def part_of(sizes: list[int], part: slice | tuple, t: Tensor) -> Tensor:
    """Return t as a part of a tensor of other sizes."""
    fill = torch.nan if t.is_floating_point() else 99
    larger = torch.full(sizes, fill, device=t.device).to(t.dtype)
    larger[part] = t
    return larger[part]


def draw(backend, *sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=backend.dtype, device=backend.device)


def some_active() -> Tensor:
    active = torch.rand(B, N, H) < 0.6
    active[:, :, 0] = True
    return active


def products_and_attention(D: int, M: int, backend) -> dict:
    """Return the operators of pairs in float32: name -> (operator, its arguments by name)."""
    pairs = kernels.list_pairs(some_active())._asdict()
    P = len(pairs["token"])
    x, weight, bias = draw(backend, B * N, C), draw(backend, H * D, C), draw(backend, H * D)
    q, o = draw(backend, P, D), draw(backend, P, D)
    k, v = draw(backend, B, G, M, D), draw(backend, B, G, M, D)
    attention = dict(q=q, k=k, v=v, **pairs, heads=H, tokens=N)
    plain = dict(source=None, is_causal=True, mask=None)
    masked = dict(plain, is_causal=False, mask=draw(backend, B, H, N, M))
    by_source = dict(
        plain,
        k=draw(backend, 1, B * G, M, D),
        v=draw(backend, 1, B * G, M, D),
        source=torch.randint(B * G, (H * B,), dtype=torch.int32),
    )
    out, lse = OPS.attend(**attention, **plain)
    gradient = dict(attention, grad=o, o=out, lse=lse)
    outputs = dict(o=o, weights=draw(backend, B * N, H), weight=draw(backend, C, H * D))
    return {
        "project": (OPS.project, dict(x=x, weight=weight, bias=bias, **pairs, heads=H)),
        "project_backward": (
            OPS.project_backward,
            dict(grad=q, x=x, weight=weight, **pairs, heads=H),
        ),
        "attend": (OPS.attend, attention | plain),
        "attend, source": (OPS.attend, attention | by_source),
        "attend, mask": (OPS.attend, attention | masked),
        "attend_backward": (OPS.attend_backward, gradient | plain),
        "attend_backward, source": (OPS.attend_backward, gradient | by_source),
        "attend_backward, mask": (OPS.attend_backward, gradient | masked),
        "combine": (OPS.combine, dict(**outputs, bias=draw(backend, C), **pairs, heads=H)),
        "combine_backward": (OPS.combine_backward, dict(grad=x, **outputs, **pairs, heads=H)),
    }


def attention_in_place(D: int, M: int, backend) -> dict:
    """Return the operators of attention that read queries, keys and values where they lie."""
    operators = backend.operators
    if backend.path == "triton":
        token, offsets = list_for_triton(some_active(), tail=0)
    else:
        token, offsets = kernels.list_pairs(some_active())
    lists = dict(weights=torch.rand(B, N, H, device=backend.device), token=token, offsets=offsets)
    plain = dict(lists, is_causal=True, mask=None)
    masked = dict(lists, is_causal=False, mask=torch.randn(B, H, N, M, device=backend.device))
    apart = dict(
        q=draw(backend, B, H, N, D), k=draw(backend, B, G, M, D), v=draw(backend, B, G, M, D)
    )
    product = dict(product=draw(backend, B, N, (H + 2 * G) * D), heads=H, kv_heads=G)
    grad = draw(backend, B, N, H * D)
    calls = {}
    for name, given in (("attend_in_place", apart), ("attend_product", product)):
        forward = getattr(operators, name)
        backward = getattr(operators, f"{name}_backward")
        calls[name] = forward, given | plain
        o, lse = forward(**given, **plain)
        calls[f"{name}_backward"] = backward, dict(given, grad=grad, o=o, lse=lse) | plain
    calls["attend_in_place, mask"] = operators.attend_in_place, apart | masked
    backward = calls["attend_in_place_backward"]
    calls["attend_in_place_backward, mask"] = (
        operators.attend_in_place_backward,
        backward[1] | masked,
    )
    return calls


def routing(D: int, M: int, backend) -> dict:
    """Return the operators of routers. They have no head widths and keys."""
    operators = backend.operators
    shared = H - CANDIDATES
    rows = CANDIDATES + 2  # a single shared head has no row, the balance has two
    router = dict(
        x=draw(backend, B, N, C),
        weight=draw(backend, rows, C),
        candidates=CANDIDATES,
        shared=shared,
        routed=2,
        padding=torch.rand(B, N, device=backend.device) < 0.3,
    )
    if backend.path == "triton":  # the rows of the balance lie in a tensor of their own
        weight = draw(backend, CANDIDATES, C)
        router.update(gate_form="released", weight=weight, second=draw(backend, 2, C), third=None)
    else:
        router.update(kind="released")
    weights, _, router_outputs, probs = operators.route(**router)[:4]
    gradients = dict(
        dweights=torch.randn_like(weights),
        dprobs=torch.randn_like(probs),
        drows=torch.randn_like(router_outputs),
        rows=router_outputs,
    )
    calls = {
        "route": (operators.route, router),
        "route_backward": (operators.route_backward, gradients | router),
    }
    if backend.path == "cpp":  # Triton's lists have an undefined end, which would differ
        calls["pairs"] = operators.pairs, dict(active=some_active())
    return calls


def assert_no_layout_matters(calls: dict) -> None:
    for name, (operator, given) in calls.items():
        contiguous = results(operator, given)
        for argument, tensor in given.items():
            if not isinstance(tensor, Tensor):
                continue
            for layout, changed in layouts(tensor):
                case = f"{name}: {argument} {layout}, strides {changed.stride()}"
                try:
                    got = results(operator, given | {argument: changed})
                except (ValueError, RuntimeError) as error:
                    refused = argument in MAY_BE_REFUSED and changed.stride(-1) != 1
                    assert refused and "contiguous" in str(error), case
                    continue
                want = contiguous
                if "expanded" in layout:
                    want = results(operator, given | {argument: changed.contiguous()})
                # Rounding may differ: a mask whose rows are one is added once for all queries.
                for have, exactly in zip(got, want, strict=True):
                    assert torch.allclose(have, exactly, rtol=1e-2, atol=1e-4), case


def results(operator, given: dict) -> list[Tensor]:
    found = operator(**given)
    if isinstance(found, Tensor):
        found = [found]
    return [torch.nan_to_num(t.float()) for t in found]


@pytest.mark.parametrize("name", SIZES)
@on(CPP)
def test_layouts_of_what_pairs_are_computed_from(backend, name):
    assert_no_layout_matters(products_and_attention(*SIZES[name], backend))


@pytest.mark.parametrize("name", SIZES)
@on(*CPP16)
def test_layouts_of_attention_in_16_bits(backend, name):
    assert_no_layout_matters(attention_in_place(*SIZES[name], backend))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@on(CPP)
def test_layouts_of_what_routers_read(backend, dtype):
    assert_no_layout_matters(routing(0, 0, backend._replace(dtype=dtype)))


@pytest.mark.slow
@on(TRITON)
def test_layouts_of_what_triton_reads(backend):
    calls = routing(0, 0, backend)
    if DEVICE == "cuda":  # the interpreter takes 2 seconds for each of a thousand calls
        calls |= attention_in_place(16, N, backend)
    assert_no_layout_matters(calls)


@pytest.mark.slow
def test_no_layout_reads_memory_of_others(tmp_path):
    """The tests of the C++ operators, with operators that AddressSanitizer checks."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), "")
    if not compiler:
        pytest.skip("no C++ compiler is installed")
    # The sanitizer must be loaded first, and the C++ library with it, whose exceptions it sees.
    libraries = [file_of_compiler(compiler, name) for name in ("libasan.so", "libstdc++.so.6")]
    if not all(map(os.path.isfile, libraries)):
        pytest.skip(f"{compiler} has no libasan.so, or no libstdc++.so.6")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CXX": f"{compiler} -fsanitize=address",
        "MOH_VISION_CACHE": str(tmp_path),
    }
    code = "from moh_vision.attention.kernels import build; build.build()"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    environment["LD_PRELOAD"] = " ".join(libraries)
    environment["ASAN_OPTIONS"] = "detect_leaks=0"  # of what Python and torch leave at exit
    files = [f"tests/attention/test_{name}.py" for name in ("strides", "operators", "route")]
    chosen = ["-k", "cpp and not instruction_sets", "-m", "not slow"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-s", *files, *chosen],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[:6000]
    assert " passed" in done.stdout and "not built" not in done.stdout


def file_of_compiler(compiler: str, name: str) -> str:
    """Return the path of a library that a compiler links, or its name where it has none."""
    command = [*shlex.split(compiler), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
