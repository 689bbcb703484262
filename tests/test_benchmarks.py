"""The benchmark runs and writes what it promises. Its times are looked at by people, not by tests."""

import importlib.util
import json
import sys
import time

import pytest
import torch
from conftest import ROOT


def test_attention_benchmark(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("benchmark_attention", ROOT / "benchmarks" / "attention.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    monkeypatch.setattr(benchmark, "ROUNDS", (1, 1))
    # Small: where a processor has no bfloat16 of its own, products in it take hundreds of times as long.
    monkeypatch.setattr(benchmark, "TOKENS", 256)
    monkeypatch.setattr(benchmark, "MOA_TOKENS", (16,))
    monkeypatch.setitem(benchmark.MOA, "8K64E256D", (2, 16, 64))
    monkeypatch.setattr(benchmark, "MAE_TOKENS", (16,))
    monkeypatch.setitem(benchmark.SHAPES, "vit_small", (2, 17, 384, 6))
    output = tmp_path / "result.json"
    shapes = ["vit_small", "8K64E256D", "mae_f_step"]
    monkeypatch.setattr(sys, "argv", ["attention.py", "--threads", "2", "--output", str(output), "--shapes", *shapes])
    benchmark.main()
    report = json.loads(output.read_text())
    assert {"cpu", "cores", "torch", "date"} <= report["machine"].keys() and len(report["load_before"]) == 3
    assert {case["shape"] for case in report["cases"]} == set(shapes)
    for case in report["cases"]:
        assert 0 < case["bound"] and case["picked"] in ("packed", "masked")
        assert {"dense", "masked", "packed", "auto"} <= case["times"].keys()
        assert case["times"]["dense"]["ratio"] == 1.0
        if case["mode"] == "train":
            saved = case["saved_bytes_per_token"]
            assert 0 < saved["packed"] < saved["masked"]
    assert output.with_suffix(".png").stat().st_size > 10_000
    assert "vit_small 2x17 3/6 token" in capsys.readouterr().out


def test_checkpoint_benchmark(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # for `attention`, which tells the machine
    spec = importlib.util.spec_from_file_location("benchmark_checkpoint", ROOT / "benchmarks" / "checkpoint.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    argv = ["checkpoint.py", "--rounds", "2", "--depth", "1", "--folder", str(tmp_path), "--output"]
    monkeypatch.setattr(sys, "argv", [*argv, str(tmp_path / "result.json")])
    benchmark.main()
    report = json.loads((tmp_path / "result.json").read_text())
    assert {"machine", "sha256_mb_per_s", "load_before"} <= report.keys()
    assert 0 < report["weights_for_users_mb"] < report["state_mb"]
    for name in ("copy", "copy all", "checkpoint", "save"):
        assert report[name]["seconds"]["median"] > 0 and report[name]["to copy"]["median"] > 0
    assert report["checkpoint"]["seconds"]["median"] <= report["save"]["seconds"]["median"]
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
    assert "MB of state" in capsys.readouterr().out


def test_mae_benchmark(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # for `attention`, which tells the machine
    spec = importlib.util.spec_from_file_location("benchmark_mae", ROOT / "benchmarks" / "mae_steps.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    small = dict(hidden_size=32, intermediate_size=32, encoder_layers=1, decoder_layers=1)
    monkeypatch.setattr(benchmark, "SMALL", small)
    output = tmp_path / "result.json"
    sizes = ["--rounds", "2", "--words", "50", "--sentences", "4", "--tokens", "5", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["mae_steps.py", *sizes])
    benchmark.main()
    report = json.loads(output.read_text())
    assert set(report["to dense"]) == {*benchmark.STEPS, "MAE-7, five epochs"}
    assert report["to dense"]["dense"] == dict(median=1.0, quartiles=[1.0, 1.0])
    assert all(ratio["median"] > 0 for ratio in report["to dense"].values())
    assert "MAE-7, five epochs" in capsys.readouterr().out


def test_decode_benchmark(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # for `attention`, which tells the machine
    spec = importlib.util.spec_from_file_location("benchmark_decode", ROOT / "benchmarks" / "decode.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    output, threads = tmp_path / "result.json", torch.get_num_threads()
    sizes = ["--keys", "32", "--rounds", "2", "--megabytes", "1", "--threads", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["decode.py", *sizes])
    try:
        benchmark.main()
    finally:
        torch.set_num_threads(threads)
    cases = json.loads(output.read_text())["cases"]
    assert len(cases) == 3 * 3 * 2 * 2
    for case in cases:
        assert case["dense_milliseconds"] > 0 and case["ratio"]["chosen"]["median"] > 0
        if case["kind"] == "grouped":  # a key-value head of four is seldom left out, and no goal is set
            assert case["read"] >= case["share"] and "goal" not in case
        else:
            assert case["read"] == case["share"] and ("goal" in case) == (case["share"] < 1)
    assert "whole groups  bfloat16" in capsys.readouterr().out


def test_heads_of_the_decode_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import decode

    for share in (0.5, 0.75, 1.0):
        for group in (1, 4):
            active = decode.draw(5, share, group)
            assert active.shape == (5, 1, 32) and active.sum(-1).flatten().tolist() == [32 * share] * 5
            assert active[..., : int(16 * share)].all()
            assert torch.equal(active[..., ::group].repeat_interleave(group, -1), active)
            assert share == 1 or not (active == active[:1]).all()


def test_llm_speed_benchmark(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # for `attention`, which tells the machine
    spec = importlib.util.spec_from_file_location("benchmark_llm_speed", ROOT / "benchmarks" / "llm_speed.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    output, threads = tmp_path / "result.json", torch.get_num_threads()
    sizes = ["--prompt", "12", "--tokens", "2", "--rounds", "2", "--width", "32", "--heads", "16", "--head-dim", "4"]
    sizes += ["--mlp", "16", "--vocabulary", "20", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["llm_speed.py", *sizes])
    try:
        benchmark.main()
    finally:
        torch.set_num_threads(threads)
    report = json.loads(output.read_text())
    assert report["prompt"] == 12 and "cpu" in report["machine"]
    cases = report["cases"]
    assert len(cases) == 2 * (1 + 3) * (1 + 2 * 2)  # kinds; prefill and decoding with three caches; models
    for case in cases:
        assert case["tokens_per_second"] > 0 and case["speed_to_dense"]["median"] > 0
        assert case["share_of_heads"] == case["share"]
        if case["executor"] == "dense":
            assert case["speed_to_dense"] == dict(median=1.0, quartiles=[1.0, 1.0])
    assert "decode   growing  whole groups" in capsys.readouterr().out


@pytest.fixture
def gpu_benchmark(tmp_path, monkeypatch):
    """Run benchmarks/gpu.py, as small as possible, on the CPU: (exit code, report)."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu

    monkeypatch.setattr(gpu, "QUICK", {"vit_small": (2, 9, 6, 8, False)})
    monkeypatch.setattr(gpu, "MODELS", {name: gpu.MODELS[name] for name in ("vit", "dit")})

    def run(*options):
        out = tmp_path / "gpu.json"
        argv = ["gpu.py", "--device", "cpu", "--quick", "--seed", "0", "--compile-seconds", "0", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", [*argv, *options])
        return gpu.main(), json.loads(out.read_text())

    run.module = gpu
    return run


def test_gpu_benchmark_without_a_gpu_and_without_diffusers(gpu_benchmark, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    code, report = gpu_benchmark()
    assert code == 0 and report["errors"] == {}
    assert {"cpu", "torch", "date"} <= report["machine"].keys() and report["versions"]["timm"]
    checked = {(row["dtype"], row["executor"]) for row in report["numerics"] if row["error"] <= row["allowed"]}
    dtypes, executors = gpu_benchmark.module.DTYPES, {"masked", "packed", "decode", "auto"}
    assert checked == {(d, e) for d in dtypes for e in executors} | {("float64", "released")}
    assert len(report["routers"]) == len(dtypes) - 1 and report["peaks"]["copy"] > 0
    measured = [(dtype, mode) for dtype in ("bfloat16", "tf32") for mode in ("forward", "train")]
    assert [(t["dtype"], t["mode"]) for t in report["layers"]] == measured
    for table in report["layers"]:
        rows = table["rows"]
        assert {"dense", "dense cudnn", "released 0.75", "masked 0.75", "packed 0.75", "auto 0.75"} <= rows.keys()
        assert rows[table["fastest_dense"]]["to_dense"] == dict(median=1.0, quartiles=[1.0, 1.0])
        assert "backend" in rows["dense cudnn"]["error"]  # there is none on a CPU: recorded, and the others are timed
        for name in ("released 0.75", "packed 0.75"):
            assert rows[name]["microseconds"]["median"] > 0 and rows[name]["roofline"] > 0
    assert {name for table in report["models"] for name in table["rows"]} == {
        "dense", "masked 0.75", "packed 0.75", "auto 0.75"
    }  # fmt: skip
    assert "dit step: diffusers is not installed" in report["skipped"]
    assert "vit step compiled" in report["skipped"]
    assert "vit_small 2 9 6 8 bfloat16 train eager" in capsys.readouterr().out


def test_gpu_benchmark_times_nothing_after_a_wrong_result(gpu_benchmark, monkeypatch, capsys):
    masked = gpu_benchmark.module.EXECUTORS["masked"]
    monkeypatch.setitem(gpu_benchmark.module.EXECUTORS, "masked", lambda call: 1.001 * masked(call))
    monkeypatch.setitem(gpu_benchmark.module.EXECUTORS, "packed", lambda call: 1 / 0)
    code, report = gpu_benchmark()
    assert code == 1 and report["layers"] == report["models"] == []
    raised = {row["raised"] for row in report["numerics"] if row["executor"] == "packed"}
    assert raised == {"ZeroDivisionError: division by zero"}
    error = capsys.readouterr().err
    assert error.startswith("gpu: error: masked, vit_small, float64, share 0.75: ") and error.count("\n") == 1


@pytest.mark.slow
def test_gpu_benchmark_compiles(gpu_benchmark, monkeypatch):
    monkeypatch.setattr(gpu_benchmark.module, "COMPILER", "eager")
    _, report = gpu_benchmark("--compile-seconds", "600")
    assert report["errors"] == {} and report["skipped"] == []
    compiled = [table for key in ("layers", "models") for table in report[key] if table["form"] == "compiled"]
    assert [table.get("family") or table["mode"] for table in compiled] == ["forward", "train", "vit", "dit"]
    for table in compiled:
        assert not any("error" in row for row in table["rows"].values())


def test_parts_of_a_gpu_run(tmp_path, monkeypatch):
    """A part that fails, takes too long or comes too late is recorded, with what it had reported before."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from device_run import Run

    run = Run("cpu", tmp_path / "run.json", 1.0, 0.2, True, done=[])

    def endless(run):
        run.report["done"].append("a first row")
        while True:
            time.sleep(0.01)

    run.part("good", lambda run, name: run.report["done"].append(name), "good")
    run.part("bad", lambda run: 1 / 0)
    run.part("endless", endless, compiles=True)
    run.part("late", endless, compiles=True)
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["done"] == ["good", "a first row"]
    assert report["errors"] == {"bad": "ZeroDivisionError: division by zero"}
    assert report["skipped"] == ["endless: stopped after 0 s", "late"]
