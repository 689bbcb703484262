"""The benchmark runs and writes what it promises. Its times are looked at by people, not by tests."""

import json
import sys
import time

import pytest
import torch

from moh_vision.attention import HeadMixtureAttention, resolve_budget
from moh_vision.attention.kernels import use


def run_main(benchmark):
    """Its main(), which leaves neither threads nor a choice of operators behind."""
    threads = torch.get_num_threads()
    try:
        benchmark.main()
    finally:
        torch.set_num_threads(threads)
        use(None)


@pytest.fixture
def small_layers(monkeypatch):
    """benchmarks/attention.py with layers small enough for a test, once a case.

    Where a processor has no bfloat16 of its own, products in it take hundreds of times as long.
    """
    import attention as benchmark

    monkeypatch.setattr(benchmark, "ROUNDS", (1, 1))
    monkeypatch.setattr(benchmark, "TOKENS", 256)
    monkeypatch.setattr(benchmark, "MOA_TOKENS", (16,))
    monkeypatch.setitem(benchmark.MOA, "8K64E256D", (2, 16, 64))
    monkeypatch.setattr(benchmark, "MAE_TOKENS", (16,))
    monkeypatch.setitem(benchmark.SHAPES, "vit_small", benchmark.Shape(2, 2, 17, 384, 6))
    monkeypatch.setitem(benchmark.SHAPES, "one_image", benchmark.Shape(1, 1, 16, 384, 6))
    return benchmark


def test_attention_benchmark(small_layers, tmp_path, monkeypatch, capsys):
    output = tmp_path / "result.json"
    shapes = ["vit_small", "one_image", "8K64E256D", "mae_f_step"]
    argv = ["attention.py", "--threads", "1", "--path", "torch", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", [*argv, "--shapes", *shapes])
    run_main(small_layers)
    report = json.loads(output.read_text())
    assert {"cpu", "isa", "cores", "torch", "date"} <= report["machine"].keys() and len(report["load_before"]) == 3
    assert report["path"] == "torch"
    assert {case["shape"] for case in report["cases"]} == set(shapes)
    for case in report["cases"]:
        assert 0 < case["bound"] and case["picked"] in ("Tokens", "WholeSequences", "Sequences", "Masked")
        assert {"dense", "packed", "auto"} <= case["times"].keys() and case["times"]["dense"]["ratio"] == 1.0
        many = case["shape"] == "8K64E256D"  # experts: computing every one is left out
        assert ("masked" in case["times"]) != many and ("auto_to_best" in case) != many
        assert ("released" in case["times"]) == (case["shape"] in small_layers.SHAPES)
        if case["mode"] == "train":
            saved = case["saved_bytes_per_token"]
            assert saved["packed"] > 0
            if case.get("share") == 0.5:
                assert saved["packed"] <= saved["masked"]
    per_token = [case for case in report["cases"] if case["shape"] == "vit_small" and case["scope"] == "token"]
    assert [case["share"] for case in per_token] == [0.5, 0.5, 0.75, 0.75] * 2  # with 6 heads 0.9 is 0.75
    assert {"router" in case["times"] for case in per_token if case["mode"] == "forward"} == {True}
    assert {case["mode"] for case in report["cases"] if case["shape"] == "one_image"} == {"forward"}
    assert output.with_suffix(".png").stat().st_size > 10_000
    assert "vit_small 2x17 3/6 token" in capsys.readouterr().out

    monkeypatch.setattr(sys, "argv", ["attention.py", "--table", "--output", str(output)])
    small_layers.main()
    printed = capsys.readouterr().out
    assert "| vit_small, token, 2 x 17 | 3/5 of 6 |" in printed and "| mae_f_step 8 x 16 |" in printed
    assert "## Router alone" in printed and "## Kept for backward" in printed


def test_goals_of_the_attention_benchmark():
    import attention as benchmark

    case = dict(shape="vit_small", batch=8, tokens=197, heads=6, active=3, share=0.5, scope="token", bound=0.7)
    case.update(dtype="float32", mode="forward", threads=2, picked="Tokens")
    assert benchmark.limit(case) == 0.74
    assert benchmark.limit(dict(case, scope="alike", dtype="bfloat16", mode="train")) == 0.5 + 0.15
    assert benchmark.limit(dict(case, scope="sample", share=0.75, active=5)) == 5 / 6 + 0.12
    assert benchmark.limit(dict(case, share=0.6)) is None
    assert benchmark.limit(dict(case, shape="8K64E256D", bound=2.0)) == 2.6
    for every in (case, dict(case, share=0.75, active=5, dtype="bfloat16")):  # each has a goal in both modes
        for shape in benchmark.BATCHES:
            for scope in benchmark.SCOPES:
                for mode in benchmark.MODES:
                    assert benchmark.limit(dict(every, shape=shape, scope=scope, mode=mode)) is not None

    def report(low, milliseconds):
        row = dict(ratio=0.8, quartiles=[low, 0.9], milliseconds=1.0, milliseconds_quartiles=[milliseconds, 1.2])
        best = dict(median=0.9, quartiles=[1.03, 1.1])
        saved = dict(dense=100, masked=120, packed=81, auto=82)
        return dict(cases=[dict(case, times=dict(dense=row, auto=row), auto_to_best=best, saved_bytes_per_token=saved)])

    text = benchmark.goal_table(report(0.74, 0.36))
    assert "| token | 1 of 1 |  |" in text and "| bytes kept for backward | 1 of 1 |  |" in text
    assert "masked and released | 1 of 1 |" in text  # 1.05 without the operators, 1.02 with them
    assert "1.03 (goal 1.02)" in benchmark.goal_table(dict(report(0.74, 0.36), path="cpp"))
    text = benchmark.goal_table(report(0.741, 0.36))
    assert "| token | 0 of 1 | vit_small, token, 8 x 197, 3/6: 0.74 (goal 0.74) |" in text


@pytest.mark.parametrize("scope", ("token", "sample"))
@pytest.mark.parametrize("share", (0.5, 0.75, 1.0))
@pytest.mark.parametrize("heads", (6, 12))
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


def test_interleaved_times():
    import timing

    calls, begun = [], []
    times = timing.interleaved(
        {name: lambda name=name: calls.append(name) for name in "abc"}, 20, warm_up=2, before=begun.append
    )
    assert list(times) == ["a", "b", "c"] and all(len(seconds) == 20 for seconds in times.values())
    assert begun == list(range(-2, 20))
    rounds = ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert len(set(rounds)) == 6 and {"".join(sorted(r)) for r in rounds} == {"abc"}  # every order comes up
    calls.clear()
    timing.interleaved({"a": lambda: time.sleep(0.02) or calls.append("a")}, (3, 50), seconds=0.01, warm_up=2)
    assert len(calls) == 1 + 3  # slow: one round to warm up, and the least that count


def test_spread_and_verdict():
    import timing

    assert timing.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == dict(median=3.0, quartiles=[2.0, 4.0])
    rows = timing.to_first({"dense": torch.tensor([2.0, 4.0]).double(), "auto": torch.tensor([1.0, 2.0]).double()})
    assert rows["auto"]["ratio"] == 0.5 and rows["auto"]["milliseconds"] == 1500.0 and rows["dense"]["ratio"] == 1.0
    assert timing.cell(0.75, [0.7, 0.8], 0.7).endswith("goal 0.70 met")
    assert timing.cell(0.75, [0.701, 0.8], 0.7).endswith("goal 0.70 **missed**")


def test_model_benchmark(tmp_path, monkeypatch, capsys):
    import models as benchmark

    monkeypatch.setattr(benchmark, "ROUNDS", (1, 1))
    monkeypatch.setattr(benchmark, "STEPS", 2)
    monkeypatch.setattr(benchmark, "GUIDED_STEPS", 1)
    tiny = dict(img_size=32, depth=1, embed_dim=24, num_heads=12)
    monkeypatch.setattr(
        benchmark,
        "SIZES",
        dict(vit_small=tiny, vit_base=tiny, converted=tiny, dit_small=dict(img_size=8, embed_dim=48)),
    )
    output = tmp_path / "result.json"
    argv = ["models.py", "--path", "torch", "--output", str(output), "--dtypes", "float32", "bfloat16"]
    small = [part for part in benchmark.PARTS if part not in ("transnext", "dit_base")]
    monkeypatch.setattr(sys, "argv", [*argv, "--batches", "2", "--threads", "1", "--parts", *small])
    run_main(benchmark)
    report = json.loads(output.read_text())
    assert report["path"] == "torch" and "isa" in report["machine"]
    measured = [(case["part"], case["mode"]) for case in report["cases"] if case["dtype"] == "float32"]
    assert measured == [(part, mode) for part in small for mode in benchmark.PARTS[part][1]]
    for case in report["cases"]:
        rows = case["times"]
        assert rows["dense"]["ratio"] == rows["dense"]["share"] == rows["dense"]["bound"] == 1.0
        assert 0 < rows["token 0.5"]["bound"] < rows["token 0.75"]["bound"] <= 1
        assert rows["token 0.5"]["share"] == 0.5
        if case["part"] == "sampling":
            assert rows["timestep 0.5"]["bound"] < rows["token 0.5"]["bound"]
    monkeypatch.setattr(sys, "argv", ["models.py", "--table", "--output", str(output)])
    capsys.readouterr()
    benchmark.main()
    assert "| condition 0.5 | timestep 0.75 | " in capsys.readouterr().out


@pytest.mark.parametrize("part", ["dit_small", "transnext"])
def test_the_released_models_are_ours(part, monkeypatch):
    import models as benchmark

    size = dict(img_size=32) if part == "transnext" else dict(img_size=8)
    monkeypatch.setitem(benchmark.SIZES, part, size)
    torch.manual_seed(0)
    models = benchmark.PARTS[part][0]()
    given = benchmark.arguments(models["released"], 2, 32)
    ours, released = (models[name].eval() for name in ("token 0.75", "released"))
    for layer, other in zip(benchmark.routed(ours), benchmark.routed(released)):
        benchmark.draw_router(layer.router)
        getattr(other.router, "router", other.router).load_state_dict(layer.router.state_dict())
    with torch.no_grad():
        want, got = ours(*given), released(*given)
    if part == "dit_small":
        want, got = want.sample, got.sample
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_checkpoint_benchmark(tmp_path, monkeypatch, capsys):
    import checkpoint as benchmark

    argv = ["checkpoint.py", "--rounds", "2", "--depth", "1", "--folder", str(tmp_path), "--output"]
    monkeypatch.setattr(sys, "argv", [*argv, str(tmp_path / "result.json")])
    benchmark.main()
    report = json.loads((tmp_path / "result.json").read_text())
    assert {"machine", "sha256_mb_per_s", "load_before"} <= report.keys()
    for name in benchmark.NAMES:
        assert report["state_mb"] and report[name]["seconds"]["median"] > 0 and report[name]["to copy"]["median"] > 0
    assert report["stall"]["seconds"]["median"] <= report["written"]["seconds"]["median"]
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
    assert "MB of state" in capsys.readouterr().out


def test_mae_benchmark(tmp_path, monkeypatch, capsys):
    import mae_steps as benchmark

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


def test_llm_speed_benchmark(tmp_path, monkeypatch, capsys):
    import llm_speed as benchmark

    output = tmp_path / "result.json"
    sizes = ["--prompt", "12", "--tokens", "2", "--rounds", "2", "--width", "32", "--heads", "16", "--head-dim", "4"]
    sizes += ["--mlp", "16", "--vocabulary", "20", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["llm_speed.py", *sizes])
    run_main(benchmark)
    report = json.loads(output.read_text())
    assert report["prompt"] == 12 and "cpu" in report["machine"]
    cases = report["cases"]
    assert len(cases) == 2 * (1 + 2) * (1 + 2 * 2)  # kinds; prefill and decoding with two caches; models
    for case in cases:
        assert case["tokens_per_second"] > 0 and case["speed_to_dense"]["median"] > 0
        assert case["share_of_heads"] == case["share"]
        if case["executor"] == "dense":
            assert case["speed_to_dense"] == dict(median=1.0, quartiles=[1.0, 1.0])
    assert "decode   dynamic  whole groups" in capsys.readouterr().out


def test_loader_benchmark(tmp_path, monkeypatch, capsys):
    import loader as benchmark

    monkeypatch.setattr(benchmark, "BATCH", 4)
    argv = f"loader.py --images 12 --seconds 0 --workers 0 --output {tmp_path}/a.json --page {tmp_path}/a.md".split()
    monkeypatch.setattr(sys, "argv", argv)
    run_main(benchmark)
    report = json.loads((tmp_path / "a.json").read_text())
    assert [row["loader"] for row in report["rows"]] == [
        "ours, folder", "ours, shards", "ours, stream", "timm", "timm, prefetcher", "webdataset"
    ]  # fmt: skip
    assert all(row["images_per_second"]["median"] > 0 and row["workers"] == 0 for row in report["rows"])
    best = {row["best"] for row in report["rows"]}
    assert len(best) == 1 and best <= {"timm", "timm, prefetcher", "webdataset"}
    assert "| ours, folder | " in (tmp_path / "a.md").read_text() and report["rounds"] == 1


@pytest.fixture
def gpu_benchmark(tmp_path, monkeypatch):
    """Run benchmarks/gpu.py, as small as possible, on the CPU: (exit code, report)."""
    import gpu
    import gpu_times

    cases = {
        "token": gpu.QUICK_CASES["token 64"]._replace(tokens=9, heads=6, width=8),
        "sample": gpu.QUICK_CASES["sample 64"]._replace(tokens=9, heads=6, width=8),
        "grouped": gpu.QUICK_CASES["grouped causal 128"]._replace(tokens=9, width=8),
        "keys": gpu.QUICK_CASES["keys masked 64"]._replace(tokens=9, heads=6, width=8),
    }
    monkeypatch.setattr(gpu, "QUICK_CASES", cases)
    monkeypatch.setattr(gpu, "QUICK_SHAPES", {"vit_base": gpu_times.Shape(2, 9, 8, 8)})

    def run(*options):
        out = tmp_path / "gpu.json"
        argv = ["gpu.py", "--device", "cpu", "--quick", "--seed", "0", "--compile-seconds", "0", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", [*argv, *options])
        return gpu.main(), json.loads(out.read_text())

    run.module = gpu
    return run


def test_gpu_benchmark_without_a_gpu_and_without_diffusers(gpu_benchmark, monkeypatch, capsys):
    from moh_vision.attention import EXECUTORS

    monkeypatch.setitem(sys.modules, "diffusers", None)
    code, report = gpu_benchmark()
    assert code == 0 and report["errors"] == {}
    assert {"cpu", "torch", "date"} <= report["machine"].keys() and report["versions"]["timm"]
    rows = report["numerics"]
    assert all(row["error"] <= row["allowed"] and row["differs"] == [] for row in rows)
    dtypes, cases = gpu_benchmark.module.DTYPES, gpu_benchmark.module.QUICK_CASES
    layers = {(row["dtype"], row["case"], row["executor"]) for row in rows if row["executor"] in EXECUTORS}
    assert layers == {(d, c, e) for d in dtypes for c in cases for e in set(EXECUTORS) - {"reference"}}
    assert {row["case"] for row in rows if row["executor"] == "released"} == {"token", "sample"}
    assert {row["dtype"] for row in rows if row["executor"] == "router"} == set(dtypes) - {"float64"}
    assert all(row["tokens_routed_otherwise"] == 0 for row in report["routers"])
    assert [row["differs"] for row in report["races"]] == [[]] and report["peaks"]["copy"] > 0
    found = [(t["part"], t["shape"], t["scope"], t["dtype"], t["mode"]) for t in report["tables"]]
    assert found == [
        *(("layer", "vit_base", "token", "bfloat16", mode) for mode in ("forward", "train")),
        ("prefill", "llama_8b", "token", "bfloat16", "forward"),
        *(("layer", "vit_base", "sample", "bfloat16", mode) for mode in ("forward", "train")),
        *(("block", "vit_base", "both", "bfloat16", mode) for mode in ("forward", "train")),
        ("step", "vit_base", "both", "bfloat16", "train"),
        *(("layer", "vit_base", "token", "tf32", mode) for mode in ("forward", "train")),
    ]
    for table in report["tables"]:
        rows = table["rows"]
        assert rows[table["fastest_dense"]]["to_dense"] == dict(median=1.0, quartiles=[1.0, 1.0])
        bad = {name for name, row in rows.items() if "error" in row}
        assert bad <= {"dense flash", "dense cudnn", "dense efficient"}  # recorded, and the others are timed
        if table["part"] == "layer":
            names = {f"{name} 0.75 {table['scope']}" for name in ("released", "masked", "packed")}
            assert {"dense", "dense cudnn"} | names <= rows.keys() and "backend" in rows["dense cudnn"]["error"]
            assert all(rows[name]["microseconds"]["median"] > 0 and rows[name]["roofline"] > 0 for name in names)
            assert rows[f"packed 0.75 {table['scope']}"]["to_masked"]["median"] > 0
            assert ("saved_bytes" in rows["dense"]) == (table["mode"] == "train")
    assert {goal["verdict"] for goal in report["goals"]} == {"not measured"}  # goals are for a card
    assert "sampling eager: diffusers is not installed" in report["skipped"]
    assert "step vit_base compiled" in report["skipped"] and "peaks" in report["seconds"]
    assert "layer vit_base token bfloat16 train eager 2 9 8 8" in capsys.readouterr().out


def test_gpu_benchmark_with_an_executor_that_is_wrong(gpu_benchmark, monkeypatch, capsys):
    from moh_vision.attention import HeadMixtureAttention

    choose = HeadMixtureAttention.choose

    def wrong(layer, call):
        heads = choose(layer, call)
        if layer.executor == "packed":
            heads.project = lambda: 1 / 0
        elif layer.executor == "masked":
            combine = heads.combine
            heads.combine = lambda o: 1.1 * combine(o)
        return heads

    monkeypatch.setattr(HeadMixtureAttention, "choose", wrong)
    code, report = gpu_benchmark("--parts", "numerics token bfloat16", "layer vit_base token bfloat16 forward")
    assert code == 1
    raised = {row["raised"] for row in report["numerics"] if row["executor"] == "packed"}
    assert raised == {"ZeroDivisionError: division by zero"}
    (table,) = report["tables"]
    assert "masked 0.75 token" not in table["rows"]  # wrong: not timed
    assert table["rows"]["packed 0.75 token"]["error"] == "ZeroDivisionError: division by zero"
    assert table["rows"]["released 0.75 token"]["microseconds"]["median"] > 0
    error = capsys.readouterr().err
    assert error.startswith("gpu: error: masked, token, bfloat16, share 0.5: ") and error.count("\n") == 1


def test_gpu_benchmark_checks_tritons_kernels(gpu_benchmark):
    """In Triton's interpreter, which has no attention in bfloat16."""
    pytest.importorskip("triton")
    use("triton")
    try:
        code, report = gpu_benchmark(
            "--parts", *(f"numerics {case} float32 0.5" for case in ("token", "sample", "one"))
        )
    finally:
        use(None)
    rows = [row for row in report["numerics"] if row["executor"] in ("packed", "router")]
    assert code == 0 and {row["case"] for row in rows} == {"token", "sample"}
    assert all(row["error"] <= row["allowed"] and row["differs"] == [] for row in rows)
    assert all(row["list_is_right"] for row in report["routers"])


@pytest.mark.slow
def test_gpu_benchmark_compiles(gpu_benchmark, monkeypatch):
    import gpu_times

    monkeypatch.setattr(gpu_times, "COMPILER", "eager")
    parts = ["step", "sampling", "layer vit_base token bfloat16"]
    _, report = gpu_benchmark("--compile-seconds", "600", "--parts", *parts)
    assert report["errors"] == {} and report["skipped"] == []
    compiled = [table for table in report["tables"] if table["form"] == "compiled"]
    assert [(t["part"], t["shape"]) for t in compiled] == [
        ("step", "vit_base"), ("step", "dit_xlarge"), ("layer", "vit_base"), ("layer", "vit_base")
    ]  # fmt: skip
    for table in compiled:
        assert not any("error" in row for row in table["rows"].values())


def test_goals_of_the_gpu_benchmark(tmp_path, monkeypatch, capsys):
    import gpu
    import gpu_goals

    def table(form, rows, **about):
        about = dict(part="layer", shape="n1024", scope="token", dtype="bfloat16", mode="train", form=form) | about
        return dict(about, rows=rows)

    def ratio(low, **more):
        return dict(to_dense=dict(median=low + 0.01, quartiles=[low, low + 0.02]), **more)

    tables = [
        table("eager", {"packed 0.5 token": ratio(0.9)}),
        table("graph", {"packed 0.5 token": ratio(0.82), "packed 0.75 token": ratio(0.93)}),
        table("compiled", {"packed 0.75 token": ratio(0.1)}, shape="n4096"),
        table("eager", {"packed 0.75 token": ratio(0.1)}, part="step", shape="vit_base"),
        table("compiled", {"packed 0.5 sample": ratio(0.89)}, part="step", shape="vit_base", scope="both"),
    ]
    report = dict(card={}, quick=False, tables=tables)
    keys = ("part", "shape", "scope", "share", "mode")
    verdicts = {tuple(row[key] for key in keys): row["verdict"] for row in gpu_goals.judged(report)}
    measured = {what: found for what, found in verdicts.items() if found != "not measured"}
    assert measured == {
        ("layer", "n1024", "token", 0.5, "train"): "met",
        ("layer", "n1024", "token", 0.75, "train"): "missed",
        ("step", "vit_base", "sample", 0.5, "train"): "met",
    }
    assert "| 0.82 | packed 0.83 [0.82 0.84] | met |" in gpu_goals.goal_table(report)
    for other in ({}, dict(report, quick=True)):
        assert {row["verdict"] for row in gpu_goals.judged(other)} == {"not measured"}

    monkeypatch.setattr(sys, "argv", ["gpu.py", "--table"])  # what the docs show is what is in the results
    assert gpu.main() == 0
    shown = (gpu.HERE.parent / "docs/results/speed_gpu.md").read_text()
    assert capsys.readouterr().out in shown


def test_parts_of_a_gpu_run(tmp_path, monkeypatch):
    """A part that fails, takes too long or comes too late is recorded, with what it had reported before."""
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

    run.lost = True  # the device answers no more: what is left is for another process
    run.part("never", lambda run: 1 / 0)
    other = Run("cpu", tmp_path / "run.json", 9.0, 9.0, True)
    other.resume()
    assert other.report == report and "never" not in report["seconds"]
    assert (other.deadline, other.compile_seconds) == (run.deadline, run.compile_seconds)


def test_a_gpu_run_that_goes_on(gpu_benchmark, capsys):
    """With --add what is in the report stays, and what it lacks is measured."""
    _, first = gpu_benchmark("--parts", "peaks", "races", "step", "--minutes", "0")
    steps = [f"step {family} {form}" for form in ("compiled", "eager") for family in ("vit_base", "dit_xlarge")]
    assert first["skipped"] == ["peaks", "races vit_base", *steps]
    _, second = gpu_benchmark("--parts", "peaks", "--add")
    assert second["skipped"] == [] and second["peaks"] and second["races"] == []
    _, third = gpu_benchmark("--parts", "peaks", "races", "--add")
    assert third["peaks"] == second["peaks"] and len(third["races"]) == 1
    with pytest.raises(SystemExit):
        gpu_benchmark("--add", "--out", "nowhere.json")
    assert "nowhere.json" in capsys.readouterr().err


def test_a_gpu_run_whose_device_is_lost(gpu_benchmark, monkeypatch):
    """A new process does what is left, and not again what lost the device."""
    gpu, commands = gpu_benchmark.module, []

    def part(run, name, *args, **kwargs):
        run.report["seconds"][name], run.report["errors"][name], run.lost = 1.0, "illegal address", True
        run.write()

    def execute(program, command):
        commands.append(command)
        raise SystemExit

    monkeypatch.setattr(gpu.os, "execv", execute)
    with monkeypatch.context() as patch:
        patch.setattr(gpu.Run, "part", part)
        with pytest.raises(SystemExit):
            gpu_benchmark("--parts", "peaks", "races")
    ((program, file, *options),) = commands
    assert program == sys.executable and file.endswith("gpu.py") and options[-1] == "--resume"
    _, report = gpu_benchmark(*options)
    assert report["errors"] == {"peaks": "illegal address"} and report["peaks"] == {} and len(report["races"]) == 1


def test_a_table_of_a_gpu_run_that_time_ends(tmp_path):
    """What is ready when time runs out is measured, if there is something to compare."""
    from device_run import OutOfTime, Run

    def late():
        raise OutOfTime

    run = Run("cpu", tmp_path / "run.json", 1.0, 0.2, True)
    table = run.table(
        dict(form="eager"), {"dense": lambda: int, "packed 1": lambda: int, "late": late, "never": late}, {}
    )
    assert table["rows"]["late"] == table["rows"]["never"] == dict(error="no time was left")
    assert table["rows"]["packed 1"]["to_dense"]["median"] > 0
    with pytest.raises(OutOfTime):
        run.table(dict(form="eager"), {"dense": lambda: int, "late": late}, {})


@pytest.mark.slow
def test_export_benchmark(monkeypatch, capsys):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'export')")
    import export as benchmark

    for name, value in dict(SIZE=[3, 32, 32], BATCHES=(1,), ROUNDS=(1, 1)).items():
        monkeypatch.setattr(benchmark, name, value)
    for case, arguments in benchmark.CASES.items():
        monkeypatch.setitem(benchmark.CASES, case, dict(arguments, img_size=32, depth=1))
    run_main(benchmark)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 1 ")]
    found = [(runtime, heads) for _, runtime, heads, *_ in rows]
    onnx = [("onnxruntime", case) for case in benchmark.CASES]
    assert found == [("PyTorch", case) for case in benchmark.CASES if "masked" not in case] + onnx
