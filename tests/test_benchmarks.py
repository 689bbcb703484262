"""Every benchmark runs at its smallest size and writes what it promises; people look at its times, not tests."""

import importlib
import json
import shlex
import sys

import pytest
import torch
from conftest import ROOT

from moh_vision.attention import HeadMixtureAttention, resolve_budget
from moh_vision.attention.kernels import use

TINY = dict(img_size=32, depth=1, embed_dim=24, num_heads=12)
SIZES = dict(vit_small=TINY, converted=TINY, dit_small=dict(img_size=8, embed_dim=48), transnext=dict(img_size=32))
ONNX = [
    dict(kw, img_size=32, depth=1)
    for kw in (dict(router="dense"), dict(head_budget="uniform:0.5"), dict(head_budget="uniform:0.5", scope="sample"))
]
GPU = "--device cpu --quick --seed 0 --compile-seconds 0 --parts 'layer vit_base token bfloat16' races "
# file: (what is smaller in it, options, a part of the report)
BENCHMARKS = {
    "attention": (
        dict(ROUNDS=(1, 1), TOKENS=256, MOA_TOKENS=(16,), MAE_TOKENS=(16,), MOA={"8K64E256D": (2, 16, 64)}),
        "--threads 1 --path torch --shapes vit_small one_image 8K64E256D mae_f_step",
        "cases",
    ),
    "models": (
        dict(ROUNDS=(1, 1), STEPS=2, GUIDED_STEPS=1, SIZES=SIZES),
        "--path torch --threads 1 --batches 2 --dtypes float32 bfloat16 --parts vit_small dit_small sampling converted",
        "cases",
    ),
    "checkpoint": ({}, "--rounds 2 --depth 1 --folder .", "written"),
    "loader": (dict(BATCH=4), "--images 12 --seconds 0 --workers 0", "rows"),
    "gpu": ({}, GPU + "peaks 'numerics token' prefill 'step vit_base eager'", "tables"),
    "export": (
        dict(SIZE=[3, 32, 32], BATCHES=(1,), ROUNDS=(1, 1), CASES=dict(zip(("dense", "fixed", "image"), ONNX))),
        None,
        None,
    ),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(name, options, smaller) -> (exit code, report); neither threads nor a choice of operators are left behind."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()

    def main(name, options, smaller=()):
        module = importlib.import_module(name)
        for key, value in dict(smaller).items():
            monkeypatch.setattr(module, key, value)
        argv = ["--output", "report.json", *shlex.split(options)] if options else []
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *argv])
        code = module.main() or 0
        return code, json.loads((tmp_path / "report.json").read_text()) if options else None

    yield main
    torch.set_num_threads(threads)
    use(None)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "export")) for n in BENCHMARKS])
def test_benchmark_runs(name, run, monkeypatch, capsys):
    smaller, options, part = BENCHMARKS[name]
    if name == "export":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'export')")
    if name == "attention":
        small = {"vit_small": (2, 2, 17, 384, 6), "one_image": (1, 1, 16, 384, 6)}
        shape = importlib.import_module(name).Shape
        smaller = {**smaller, "SHAPES": {each: shape(*sizes) for each, sizes in small.items()}}
    code, report = run(name, options, smaller)
    printed = capsys.readouterr().out
    assert code == 0 and ("| onnxruntime | image |" in printed if name == "export" else report[part])
    if report:
        assert {"cpu", "torch", "date"} <= report["machine"].keys() and len(report["load_before"]) == 3
        assert run(name, "--table")[0] == 0 and capsys.readouterr().out.strip()
    if name == "gpu":
        assert report["errors"] == {} and all(row["error"] <= row["allowed"] for row in report["numerics"])
        row = report["tables"][0]["rows"]["packed 0.75 token"]
        assert row["ratio"] > 0 and row["to_masked"]["median"] > 0 and row["roofline"] > 0


@pytest.mark.parametrize("name", ("attention", "models", "checkpoint", "loader", "gpu"))
def test_tables_of_the_page_are_those_of_the_results(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--table"])
    assert not importlib.import_module(name).main()
    assert capsys.readouterr().out.strip() in (ROOT / "docs/results/speed.md").read_text(encoding="utf-8")


def test_the_gpu_benchmark_finds_and_survives_failures(run, monkeypatch, capsys):
    """An executor that is wrong is told and not timed; what is skipped or fails is told, and --add makes up for it."""
    choose = HeadMixtureAttention.choose

    def wrong(layer, call):
        heads = choose(layer, call)
        combine = heads.combine
        if layer.executor == "packed":
            heads.project = lambda: 1 / 0
        elif layer.executor == "masked":
            heads.combine = lambda o: 1.1 * combine(o)
        return heads

    monkeypatch.setattr(HeadMixtureAttention, "choose", wrong)
    code, report = run("gpu", GPU + "'numerics token 64 bfloat16 0.5'")
    error = capsys.readouterr().err
    assert (
        code == 1 and error.startswith("gpu: error: masked, token 64, bfloat16, share 0.5: ") and error.count("\n") == 1
    )
    assert report["errors"]["races vit_base"] == "ZeroDivisionError: division by zero"
    table = report["tables"][0]
    assert "masked 0.75 token" not in table["rows"] and "ZeroDivision" in table["rows"]["packed 0.75 token"]["error"]
    monkeypatch.setattr(HeadMixtureAttention, "choose", choose)
    tables = len(report["tables"])
    code, report = run("gpu", GPU + "--add")
    assert report["errors"] == {} and len(report["races"]) == 2 and len(report["tables"]) == tables


def test_goals_of_the_gpu_benchmark():
    import gpu

    about = dict(part="layer", shape="n1024", dtype="bfloat16", mode="train", base="dense flash")
    row = dict(ratio=0.83, quartiles=[0.82, 0.84], to_masked=dict(median=0.5, quartiles=[0.5, 0.5]))
    graph = dict(
        about, form="graph", rows={"packed 0.5 token": row, "packed 0.75 token": dict(row, quartiles=[0.93, 0.95])}
    )
    others = [dict(graph, form="eager"), dict(graph, shape="n4096", base="masked 0.5"), dict(graph, part="step")]
    shown = gpu.goal_table(dict(card={}, quick=False, tables=[graph, *others]))
    assert "| layer | n1024 | token | 0.5 | train | dense | 0.82 | 0.83 [0.82 0.84] | met |" in shown
    assert "| 0.92 | 0.83 [0.93 0.95] | missed |" in shown and shown.endswith("51 of 53 goals are not measured.\n")
    assert gpu.goal_table(dict(card={}, quick=True, tables=[graph])).startswith("53 of 53 goals")


@pytest.mark.parametrize("scope", ("token", "sample"))
@pytest.mark.parametrize("heads, share", ((6, 0.5), (12, 0.75), (6, 1.0)))
def test_released_attention_is_ours(heads, share, scope):
    """The contestant `released` computes what our layer computes, gradients included."""
    import attention as benchmark

    budget = resolve_budget(f"uniform:{share}", 1, heads, 16)[0]
    layer = HeadMixtureAttention(16 * heads, budget, scope=scope, executor="masked")
    benchmark.draw_router(layer.router, 9 if scope == "sample" else 1)
    x = torch.randn(2, 9, 16 * heads, requires_grad=True)
    ours, released = layer(x)[0], benchmark.Released(layer)(x)
    torch.testing.assert_close(released, ours, rtol=1e-5, atol=1e-5)
    dy, inputs = torch.randn_like(ours), [x, *layer.parameters()]
    for got, want in zip(torch.autograd.grad(released, inputs, dy), torch.autograd.grad(ours, inputs, dy)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", ["dit_small", "transnext"])
def test_the_released_models_are_ours(part, monkeypatch):
    import models as benchmark

    monkeypatch.setattr(benchmark, "SIZES", SIZES)
    models = benchmark.PARTS[part][0]()
    given = benchmark.arguments(models["released"], 2, 32)
    ours, released = (models[name].eval() for name in ("token 0.75", "released"))
    for layer, other in zip(benchmark.routed(ours), benchmark.routed(released)):
        benchmark.draw_router(layer.router)
        getattr(other.router, "router", other.router).load_state_dict(layer.router.state_dict())
    with torch.no_grad():
        want, got = (
            model(*given, return_dict=False)[0] if part == "dit_small" else model(*given) for model in (ours, released)
        )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
