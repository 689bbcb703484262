"""Measuring the limits of `auto`: the command at tiny shapes, and what it makes of times."""

import functools
import itertools
import json

import pytest
import torch

from moh_vision.attention import HeadBudget, HeadMixtureAttention, kernels, tune
from moh_vision.attention.executors import choose, limits
from moh_vision.attention.executors.auto import table
from moh_vision.attention.routing import Call


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and a process that has read no table."""
    monkeypatch.setenv("MOH_VISION_CACHE", str(tmp_path))
    limits._found.cache_clear()
    yield tmp_path
    limits._found.cache_clear()


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(tune, "SHAPES", [(1, 8, 256), (2, 12, 256)])
    monkeypatch.setattr(tune, "VISIT", 0.0)
    monkeypatch.setattr(tune, "LEAST_ROUNDS", 1)


@pytest.fixture
def gpu(cache, tiny, monkeypatch):
    """A GPU that is none: Triton's kernels run in its interpreter, on tensors of the CPU."""
    pytest.importorskip("triton")
    monkeypatch.delenv("MOH_VISION_KERNELS", raising=False)  # off would leave them out
    monkeypatch.setattr(kernels.build, "_find", functools.cache(kernels.build._find.__wrapped__))
    for module in (limits, tune):
        monkeypatch.setattr(module, "gpu_name", lambda: "NVIDIA H100 80GB HBM3")
    cases = tune.cases_on_gpu
    monkeypatch.setattr(tune, "cases_on_gpu", lambda device: cases("cpu"))
    monkeypatch.setattr(tune, "GPU_SHAPES", [(1, 8, 256)])
    monkeypatch.setattr(tune, "DECODE_SHAPES", [(1, 16, 256)])
    monkeypatch.setitem(tune.DTYPES, "16 bits", torch.float16)  # the interpreter multiplies the bits of bfloat16
    # Interpreted kernels take their time.
    every = [*itertools.product(tune.SCOPES, ["float32"], tune.MODES), ("token", "16 bits", "forward")]
    monkeypatch.setattr(tune, "every", lambda shapes: [(*case, shapes[0]) for case in every])
    yield
    kernels.use(None)


def chosen(tokens, active, dtype=torch.float32):
    layer = HeadMixtureAttention(256, HeadBudget(4, 64, 1, active - 1), dtype=dtype).eval()
    with torch.no_grad():
        x = torch.randn(1, tokens, 256, dtype=dtype)
        return choose(layer, Call(x, layer.route(x)[0]))[0]


@pytest.mark.parametrize("pays", [True, False])
def test_what_is_measured_is_what_auto_takes(path, pays, cache, tiny, monkeypatch, capsys):
    monkeypatch.setattr(
        tune, "visit", lambda steps: [1.0 if s.share is None else s.share * (1 if pays else 2) for s in steps]
    )
    assert table() == limits.shipped() and chosen(8, 3) == "masked"
    assert tune.main(["--seconds", "0"]) == 0
    said = capsys.readouterr().out
    place = limits.table_path()
    assert place.is_relative_to(cache) and said.endswith(f"kept for auto in {place}\n")
    assert ("C++, per token, 1 x 8 x 256" in said) == (path == "cpp") and "PyTorch, per sample, 2 x 12 x 256" in said
    assert table() == limits.shipped()  # this process has its table
    limits._found.cache_clear()
    assert "1 rounds" in table()["about"] and table() == json.loads(place.read_text())
    kernels.use(path)
    assert chosen(20, 2) == ("packed" if pays else "masked") and chosen(20, 4) == "masked"


@pytest.mark.parametrize(
    "points, limit",
    [
        ([(0.5, 0.7), (0.75, 0.8), (0.9, 0.9)], 0.95),  # on to where it was not measured, up to MOST
        ([(0.5, 0.7), (0.75, 0.95), (0.9, 0.99)], 0.825),  # between the last two
        ([(0.5, 0.87), (0.75, 1.07), (0.9, 1.2)], 0.625),
        ([(0.5, 0.98), (0.75, 1.03), (0.9, 1.2)], 0.45),  # below the first by its line
        ([(0.5, 1.9), (0.75, 2.0), (0.9, 2.1)], 0.0),
        ([(0.5, 1.2), (0.75, 1.1), (0.9, 0.9)], 0.0),  # noise
        ([(0.5, 0.99), (0.75, 0.99), (0.9, 0.99)], 0.0),  # less than noise
        ([(0.5, 0.6), (0.75, 0.6), (0.9, 0.6)], 0.95),
    ],
)
def test_limit(points, limit):
    assert tune.limit(points) == pytest.approx(limit)


def test_rows_beside_what_was_measured():
    def point(ratio):
        return [(0.5, ratio), (0.75, ratio), (0.9, ratio)]

    before = limits.shipped()
    before["cpp"]["token"]["float32"]["forward"] = [[1, 10, 0.6], [1, 10**9, 0.7], [150, 5, 0.8], [2048, 7, 0.5]]
    case = [tune.Case("token", "float32", "forward", shape) for shape in ((1, 100, 64), (4, 100, 64), (1, 200, 64))]
    measured = {(case[0], "cpp"): point(1.5), (case[1], "cpp"): point(0.5), (case[2], "cpp"): point(0.5)}
    after = tune.tabulate(measured, before, "here")
    assert after["about"] == "here" and after["torch"] == before["torch"]
    assert after["cpp"]["token"]["float32"] == {
        "forward": [
            [1, 10, 0.0],  # larger calls do not pay
            [1, 10**9, 0.7],
            [90, 5760, 0.0],
            [90, 23040, 0.95],
            [180, 11520, 0.95],
            [2048, 7, 0.95],  # smaller ones do
        ],
        "training": before["cpp"]["token"]["float32"]["training"],
    }


def test_a_gpu_is_measured_too(gpu, cache, monkeypatch, capsys):
    monkeypatch.setattr(tune, "visit", lambda steps: [1.0 if s.share is None else s.share for s in steps])
    kernels.use("triton")
    assert choose_token()[0] == "masked" and "tune" in choose_token()[1]  # nothing was measured on it
    limits._found.cache_clear()
    assert tune.main(["--seconds", "0", "--device", "cuda"]) == 0
    place = limits.table_path()
    assert place.name.endswith("-NVIDIA-H100-80GB-HBM3.json") and place != limits.table_path(gpu=None)
    said = capsys.readouterr().out
    assert "Triton, per sample, 1 x 8 x 256" in said and "Triton, decode, 1 x 16 x 256" in said
    limits._found.cache_clear()
    found = table()
    rows = found["triton"]
    assert rows["token"]["float32"] == dict.fromkeys(("forward", "training"), [[7, 1843, 0.95]])
    assert rows["decode"]["float32"] == dict(forward=[[14, 3686, 0.95]], training=[])
    assert found["varlen"]["token"]["16 bits"]["forward"] == [[7, 1843, 0.95]]
    assert rows["token"]["16 bits"]["training"] == [] and rows["decode"]["16 bits"]["forward"] != []
    assert {path: found[path] for path in ("cpp", "torch")} == {p: limits.shipped()[p] for p in ("cpp", "torch")}
    assert found["about"].startswith(limits.shipped()["about"].split("; ")[0] + "; NVIDIA H100")
    kernels.use("triton")
    assert choose_token()[0] == "packed"

    # Measuring the processor again keeps the GPU's rows; without the GPU they are not seen.
    kernels.use(None)
    assert tune.main(["--seconds", "0", "--device", "cpu"]) == 0
    limits._found.cache_clear()
    assert table()["triton"] == rows and table()["about"].count(";") == 1
    monkeypatch.setattr(limits, "gpu_name", lambda: None)
    limits._found.cache_clear()
    assert table() == limits.shipped()


def choose_token():
    layer = HeadMixtureAttention(256, HeadBudget(4, 64, 1, 1)).eval()
    with torch.no_grad():
        x = torch.randn(1, 20, 256)
        return choose(layer, Call(x, layer.route(x)[0]))


def test_kernels_that_fail_on_a_gpu_get_no_limits(gpu, cache, monkeypatch, capsys):
    from moh_vision.attention.kernels import gpu as triton_kernels

    monkeypatch.setattr(tune, "visit", lambda steps: [1.0 if s.share is None else s.share for s in steps])
    right = triton_kernels.attend
    monkeypatch.setattr(triton_kernels, "attend", lambda *args: [1.1 * t for t in right(*args)])
    monkeypatch.setattr(triton_kernels, "combine_heads", lambda *args: 1 / 0)
    assert tune.main(["--seconds", "0", "--device", "cuda"]) == 0
    said = capsys.readouterr().out
    assert "Triton, token, float32: no limits, forward of (1, 8, 256): it differs from masked by " in said
    assert "Triton, sample, float32: no limits, forward of (1, 8, 256): division by zero" in said
    limits._found.cache_clear()
    rows = table()["triton"]
    assert rows["decode"]["float32"]["forward"] != [] and rows["token"]["float32"]["forward"] == []

    monkeypatch.setattr(triton_kernels, "decode", lambda q, *args: float("nan") * q.flatten(1).unsqueeze(1))
    assert tune.main(["--seconds", "0", "--device", "cuda"]) == 0
    assert "differs from masked by nan" in capsys.readouterr().out
    limits._found.cache_clear()
    assert "triton" not in table()  # nothing was measured


def test_a_table_measured_without_a_gpu_counts_beside_one(cache, monkeypatch):
    place = limits.table_path(gpu=None)
    place.parent.mkdir(parents=True)
    old = dict(limits.shipped(), about="measured before there were kernels for a GPU")
    place.write_text(json.dumps(old))
    monkeypatch.setattr(limits, "gpu_name", lambda: "NVIDIA H200")
    assert table() == old and limits.rows("triton", "token", True, False) == ()


def test_a_gpu_that_is_not_there(cache, monkeypatch, capsys):
    assert tune.main(["--device", "cuda"]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err


def test_a_gpu_without_triton(gpu):
    kernels.use("torch")
    try:
        cases, failures = tune.cases_on_gpu("cpu")
        assert {step.path for steps in cases.values() for step in steps} == {"varlen"} and not failures
    finally:
        kernels.use(None)


def test_the_file_has_a_row_a_line():
    text = tune.text_of(limits.shipped())
    assert json.loads(text) == limits.shipped() and "     [1, 25000, 0.6],\n" in text
