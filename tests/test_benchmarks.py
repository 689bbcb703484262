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
HALF = dict(img_size=32, depth=1, head_budget="uniform:0.5")
ONNX = dict(dense=dict(img_size=32, depth=1, router="dense"), fixed=HALF, image=dict(HALF, scope="sample"))
GPU = "--device cpu --quick --seed 0 --compile-seconds 0 --parts 'layer vit_base token bfloat16' races "
# file: (what is smaller in it, options)
BENCHMARKS = {
    "attention": (
        dict(ROUNDS=(1, 1), TOKENS=256, MOA_TOKENS=(16,), MAE_TOKENS=(16,), MOA={"8K64E256D": (2, 16, 64)}),
        "--threads 1 --path torch --shapes vit_small one_image 8K64E256D mae_f_step",
    ),
    "models": (
        dict(ROUNDS=(1, 1), STEPS=2, GUIDED_STEPS=1, SIZES=SIZES),
        "--path torch --threads 1 --batches 2 --dtypes float32 bfloat16 --parts vit_small dit_small sampling converted",
    ),
    "checkpoint": ({}, "--rounds 2 --depth 1 --folder ."),
    "loader": (dict(BATCH=4), "--images 12 --seconds 0 --workers 0"),
    "gpu": ({}, GPU + "peaks 'numerics token' prefill 'step vit_base eager'"),
    "export": (dict(SIZE=[3, 32, 32], BATCHES=(1,), ROUNDS=(1, 1), CASES=ONNX), None),
}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(name, options) -> (what it returns, printed, its report); no threads nor choice of operators stay behind."""
    monkeypatch.chdir(tmp_path)
    threads, report = torch.get_num_threads(), tmp_path / "report.json"

    def main(name, options):
        argv = ["--output", str(report), *shlex.split(options)] if options else []
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *argv])
        code = importlib.import_module(name).main() or 0
        return code, capsys.readouterr(), json.loads(report.read_text()) if options else None

    yield main
    torch.set_num_threads(threads)
    use(None)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "export")) for n in BENCHMARKS])
def test_benchmark_runs(name, run, monkeypatch):
    smaller, options = BENCHMARKS[name]
    if name == "export":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'export')")
    module = importlib.import_module(name)
    for key, value in smaller.items():
        monkeypatch.setattr(module, key, value)
    if name == "attention":
        vit, image = (module.SHAPES[each] for each in ("vit_small", "one_image"))
        few = dict(vit_small=vit._replace(batch=2, samples=2, tokens=17), one_image=image._replace(tokens=16))
        monkeypatch.setattr(module, "SHAPES", few)
    code, printed, report = run(name, options)
    assert code == 0 and (report or "| onnxruntime | image |" in printed.out)
    if report:
        assert {"cpu", "torch", "date"} <= report["machine"].keys() and len(report["load_before"]) == 3
        code, printed, _ = run(name, "--table")
        assert code == 0 and len(printed.out.splitlines()) > 2 * (name != "gpu")
    if name == "gpu":
        assert report["errors"] == {} and all(row["error"] <= row["allowed"] for row in report["numerics"])
        row = report["tables"][0]["rows"]["packed 0.75 token"]
        assert row["ratio"] > 0 and row["to_masked"]["median"] > 0 and row["roofline"] > 0


@pytest.mark.parametrize("name", ("attention", "models", "checkpoint", "loader", "gpu"))
def test_tables_of_the_page_are_those_of_the_results(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--table"])
    assert not importlib.import_module(name).main()
    assert capsys.readouterr().out.strip() in (ROOT / "docs/results/speed.md").read_text(encoding="utf-8")


def test_the_gpu_benchmark_finds_and_survives_failures(run, monkeypatch):
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
    code, (_, error), report = run("gpu", GPU + "'numerics token 64 bfloat16 0.5'")
    assert code == 1 and error.count("\n") == 1
    assert error.startswith("gpu: error: masked, token 64, bfloat16, share 0.5: ")
    assert report["errors"]["races vit_base"] == "ZeroDivisionError: division by zero"
    tables = report["tables"]
    assert "ZeroDivision" in tables[0]["rows"].pop("packed 0.75 token")["error"]
    assert "masked 0.75 token" not in tables[0]["rows"]
    monkeypatch.setattr(HeadMixtureAttention, "choose", choose)
    _, _, report = run("gpu", GPU + "--add")
    assert report["errors"] == {} and len(report["races"]) == 2 and len(report["tables"]) == len(tables)


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
    grads = (torch.autograd.grad(y, inputs, dy) for y in (released, ours))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", ["dit_small", "transnext"])
def test_the_released_models_are_ours(part, monkeypatch):
    import models as benchmark

    monkeypatch.setattr(benchmark, "SIZES", SIZES)
    made = benchmark.PARTS[part][0]()
    given = benchmark.arguments(made["released"], 2, 32)
    models = [made[name].eval() for name in ("token 0.75", "released")]
    for layer, other in zip(*map(benchmark.routed, models)):
        benchmark.draw_router(layer.router)
        getattr(other.router, "router", other.router).load_state_dict(layer.router.state_dict())
    with torch.no_grad():
        ours, released = (getattr(output, "sample", output) for output in (model(*given) for model in models))
    torch.testing.assert_close(released, ours, rtol=1e-4, atol=1e-4)
