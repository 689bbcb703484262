"""Every benchmark runs at its smallest size and writes what it promises; people look at its times, not tests."""

import json
import os
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from moh_vision.attention import HeadMixtureAttention
from moh_vision.attention.kernels import use
from moh_vision.classification.config import ClsConfig
from moh_vision.engine.command_line import parse_config
from tests.support.benchmarks import benchmark
from tests.support.paths import ROOT

TINY = dict(img_size=32, depth=1, embed_dim=24, num_heads=12)
SIZES = dict(
    vit_small=TINY,
    converted=TINY,
    dit_small=dict(img_size=8, embed_dim=48),
    dit_base=dict(img_size=8, embed_dim=48),
    transnext=dict(img_size=32),
)
HALF = dict(img_size=32, depth=1, head_budget="uniform:0.5")
ONNX = dict(
    dense=dict(img_size=32, depth=1, router="dense"), fixed=HALF, image=dict(HALF, scope="sample")
)
MOA = dict(TOKENS=256, MOA_TOKENS=(16,), MAE_TOKENS=(16,), MOA={"8K64E256D": (2, 16, 64)})
GPU = "--device cpu --quick --seed 0 --compile-seconds 0 --parts "
# file: (what is smaller in it, options)
BENCHMARKS = {
    "attention": (
        MOA,
        "--threads 1 --path torch --shapes vit_small one_image 8K64E256D mae_f_step",
    ),
    "models": (
        dict(STEPS=2, GUIDED_STEPS=1, SHARES=(0.75,), SIZES=SIZES),
        "--path torch --threads 1 --batches 2 --dtypes bfloat16 --parts vit_small sampling converted groups_small_train",
    ),
    "checkpoint": ({}, "--rounds 2 --depth 1 --folder ."),
    "loader": (dict(BATCH=4), "--images 12 --seconds 0 --workers 0"),
    "gpu": (
        {},
        GPU
        + "profile peaks 'numerics token 64 bfloat16 0.5' 'numerics token 64 float' 'numerics token 64 tf32 0.5' "
        "'numerics groups of a sample 72' prefill 'layer vit_base token bfloat16' 'layer dit_xlarge_mlp' races "
        "'sampling dit_xlarge' 'step vit_base eager'",
    ),
    "export": (dict(SIZE=[3, 32, 32], BATCHES=(1,), CASES=ONNX), ""),
}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(name, options) -> (exit code, printed); no threads nor choice of operators stay behind."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()

    def main(name, options):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *shlex.split(options)])
        return benchmark(name).main() or 0, capsys.readouterr()

    yield main
    torch.set_num_threads(threads)
    use(None)


# Of one form with "gpu", which nobody can run again who has no card.
SLOW = ("attention", "models", "export")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in BENCHMARKS],
)
def test_a_benchmark_runs_and_its_table_is_on_the_page(name, run, tmp_path, monkeypatch):
    smaller, options = BENCHMARKS[name]
    module = benchmark(name)
    report = tmp_path / "report.json"
    for key, value in dict(smaller, ROUNDS=(1, 1)).items():
        monkeypatch.setattr(module, key, value, raising=key != "ROUNDS")
    if name == "attention":
        few = {
            n: module.SHAPES[n]._replace(batch=2, samples=2, tokens=17)
            for n in ("vit_small", "one_image")
        }
        monkeypatch.setattr(module, "SHAPES", few)
    if name == "gpu":
        monkeypatch.setattr(benchmark("gpu_profile"), "STEPS", 1)
    if name == "export":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'export')")
        assert "| onnxruntime | image |" in run(name, options)[1].out
        return
    assert run(name, f"--output {report} {options}")[0] == 0
    found = json.loads(report.read_text())
    assert {"cpu", "torch", "date"} <= found["machine"].keys() and len(found["load_before"]) == 3
    assert run(name, f"--output {report} --table")[1].out
    if name == "gpu":
        assert found["errors"] == {} and all(
            row["error"] <= row["allowed"] for row in found["numerics"]
        )
        assert found["tables"][0]["rows"]["packed 0.75 token"]["roofline"] > 0
        timed = {
            name
            for table in found["tables"]
            for name, row in table["rows"].items()
            if "milliseconds" in row
        }
        profile = found["profile"]["eager"]
        assert list(profile["steps"]) == ["dense", "masked", "packed"]
        assert set(profile["empty_launch_us"]) == {"torch operator", "triton kernel"}
        assert set(profile["router_ms"]) == {"float32", "bfloat16"}
        # On a CPU AdamW asks for its step, of which it has one for each parameter.
        (place,) = profile["steps"]["packed"]["waits"]
        assert place.startswith("aten::_local_scalar_dense: torch/optim/optimizer.py")
        assert timed > {
            "packed 0.75 one",
            "packed 0.5 timestep with groups",
            "packed 0.5 sample with groups",
        }
    monkeypatch.undo()  # the page has the tables of the results that are kept
    assert run(name, "--table")[1].out.strip() in (ROOT / "docs/results/speed.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.slow
def test_the_time_of_an_export_is_over_that_of_the_dense_twin(run, monkeypatch):
    monkeypatch.setattr(benchmark("export_seconds"), "ROUNDS", 1)
    monkeypatch.setattr(benchmark("export_seconds"), "FAMILIES", ("vit_base",))
    assert "| vit_base | " in run("export_seconds", "")[1].out


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, rows",
    [
        ("host_time", ["| timm's Attention | ", "| auto, per token | "]),
        (
            "launch_time",
            ["| forward, 4 kernels | by Triton | ", "| backward, 5 kernels | directly | "],
        ),
    ],
)
def test_time_on_the_host(name, rows):
    """A process of its own: the benchmarks replace Triton's interpreter, or a GPU's driver, by nothing."""
    pytest.importorskip("triton")
    script = f"import {name}; {name}.ROUNDS = 2; {name}.main()"
    environment = dict(
        os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    assert all(row in result.stdout for row in rows), result.stdout


def test_the_gpu_benchmark_names_a_wrong_executor(run, tmp_path, monkeypatch):
    make_executor = HeadMixtureAttention.make_executor

    def damaged(layer, call):
        executor = make_executor(layer, call)
        combine = executor.combine
        factor = 1.1 if layer.executor == "masked" else 1.0
        executor.combine = lambda o: factor * combine(o)
        return executor

    monkeypatch.setattr(HeadMixtureAttention, "make_executor", damaged)
    code, printed = run(
        "gpu", f"--output {tmp_path / 'report.json'} {GPU} 'numerics token 64 bfloat16 0.5'"
    )
    assert code == 1 and printed.err.startswith(
        "gpu: error: masked, token 64, bfloat16, share 0.5: "
    )


def test_busy_time_counts_what_overlaps_once():
    spans = [(5, 9), (0, 4), (1, 2), (3, 6)]
    events = [SimpleNamespace(time_range=SimpleNamespace(start=a, end=b)) for a, b in spans]
    assert benchmark("gpu_profile").busy(events) == 9


def test_a_wait_is_placed_by_the_nearest_event_with_python():
    outer = SimpleNamespace(
        name="aten::item", stack=["<built-in x>", "a.py(1): f"], cpu_parent=None
    )
    inner = SimpleNamespace(name="cudaStreamSynchronize", stack=[], cpu_parent=outer)
    where = benchmark("gpu_profile").where
    assert where(inner) == "a.py(1): f"
    outer.stack = []
    assert where(inner) == "no Python, in aten::item"


def test_density_counts_what_it_names(tmp_path):
    """Packed statements, tricks and conditional expressions; swaps, shapes and repeated lists are none."""
    density = benchmark("density")
    (tmp_path / "dense.py").write_text(
        'a, b = 1, f()\ntext = "s" * (a > 1) + "t" * (not b) + "u" * bool(b)\nc = 1 if a else 2\n'
    )
    (tmp_path / "plain.py").write_text(
        '"""A docstring, 1 if 2 else 3."""\n'
        "# a, b = 1, 2\n"
        "a, b = b, a\n"
        "(B, N), (M, C) = x.shape, y.shape\n"
        "c, d = f()\n"
        'row = [0] * len(c) + ["-"] * d\n'
    )
    dense = density.count([tmp_path / "dense.py"])
    assert (dense["packed"], dense["tricks"], dense["cond"], dense["code"]) == (1, 3, 1, 3)
    plain = density.count([tmp_path / "plain.py"])
    assert (plain["packed"], plain["tricks"], plain["cond"], plain["code"]) == (0, 0, 0, 4)
    assert [line.split()[0] for line in density.table([tmp_path])] == ["lines", str(tmp_path)]


@pytest.mark.parametrize("part", ["dit_small", "transnext"])
def test_the_released_models_are_ours(part, monkeypatch):
    script = benchmark("models")
    monkeypatch.setattr(script, "SIZES", SIZES)
    models = script.PARTS[part][0]()
    given = script.arguments(models["released"], 2, 32)
    models = [models[name].eval() for name in ("token 0.75", "released")]
    for layer, other in zip(*map(script.routed_layers, models)):
        script.draw_router(layer.router)
        getattr(other.router, "router", other.router).load_state_dict(layer.router.state_dict())
    with torch.no_grad():
        ours, released = (
            getattr(output, "sample", output) for output in (model(*given) for model in models)
        )
    torch.testing.assert_close(released, ours, rtol=1e-4, atol=1e-4)


def test_groups_have_a_table_with_their_goals():
    """One for the models with groups, below that of heads; and a line says whether the goal is reached."""
    script = benchmark("models")
    common = dict(mode="denoise", batch=8, dtype="float32")
    groups = {"dense": dict(ratio=1.0), "timestep 0.5 with groups": dict(ratio=0.7)}
    cases = [
        dict(
            common, part="sampling", times={"dense": dict(ratio=1.0), "token 0.5": dict(ratio=0.9)}
        ),
        dict(common, part="groups_base", times=groups),
    ]
    machine = dict(cores=2, cpu="C", isa="I", torch="2", date="D")
    about, heads, with_groups = script.tables(dict(machine=machine, cases=cases)).split("\n\n")
    assert about.startswith("2 cores")
    assert "groups" not in heads
    assert with_groups.splitlines()[2] == "| groups_base, denoise | 8 | float32 | 0.70 | 0.62 |"
    assert script.verdict("groups_base", "timestep 0.5 with groups", 0.7) == ", goal 0.62 missed"
    assert script.verdict("groups_base", "timestep 0.5 with groups", 0.62) == ", goal 0.62 reached"
    assert script.verdict("groups_base", "timestep 0.5", 0.7) == ""


@pytest.mark.parametrize(
    "part, read", [("groups_small", "timestep"), ("groups_base_train", "condition")]
)
def test_half_of_the_heads_and_groups(part, read, monkeypatch):
    script = benchmark("models")
    monkeypatch.setattr(script, "SIZES", SIZES)
    models = script.PARTS[part][0]()
    heads = models[f"{read} 0.5"]
    both = models[f"{read} 0.5 with groups"]
    assert (len(script.routed_layers(both)), len(script.routed_layers(heads))) == (24, 12)
    assert script.share(both) == script.share(heads) == 0.5
    assert script.bound(both, 8) < script.bound(heads, 8) < 1


@pytest.fixture
def study(tmp_path, monkeypatch):
    """(script, runs of digits in a folder, options of the commands that it gave); no command runs."""
    script = benchmark("conversion_quality")
    given = []
    monkeypatch.setattr(
        script, "call", lambda name, options: given.append([str(o) for o in options])
    )
    digits = script.STUDIES["digits"]._replace(steps=1200)
    classifier = tmp_path / "classifier"
    classifier.mkdir()
    (classifier / "results.json").touch()
    (classifier / "model.safetensors").write_text("weights")
    sizes = dict(narrow=dict(options="--model.embed_dim 88", steps=2000))
    entry = dict(scores={}, times={}, opponents=sizes)
    return script, script.Runs(digits, "digits", tmp_path, entry), given


@pytest.mark.parametrize(
    "model, steps, option",
    [
        ("dense", 1200, "dit_small_patch2"),
        ("plain", 120, "--model.convert"),
        ("teacher", 120, "--distill.teacher"),
        ("20 % of the steps", 240, "--distill.teacher"),
        ("narrow", 2000, "--model.embed_dim"),
    ],
)
def test_the_study_does_not_repeat_what_is_finished(model, steps, option, study):
    script, runs, given = study
    runs.train(model, 2)
    [options] = given
    assert option in options
    assert options[options.index("--max-steps") + 1] == str(steps)
    run = runs.run_of(model, 2)
    (run / f"checkpoints/step_{steps}").mkdir(parents=True)
    runs.train(model, 2)
    assert len(given) == 2  # without weights it is not finished
    (run / "model.safetensors").touch()
    (run / "metrics.jsonl").write_text('{"mse": 0.5}\n')
    curve = f"curve_{script.sha256_of(runs.classifier())[:8]}"
    (run / f"{curve}.png").touch()
    scores = dict(frechet_distance=[[3.0], [2.0]], recognised=[[80.0], [90.0]])
    (run / f"{curve}.json").write_text(json.dumps(dict(lines=[dict(scores=scores)])))
    for _ in range(2):
        runs.train_and_score(model, 2)
    assert len(given) == 2
    found = runs.entry["scores"][model]["2"]
    assert found == dict(frechet_distance=[3.0, 2.0], recognised=[80.0, 90.0], mse=0.5)


def test_scores_of_another_classifier_are_refused(study):
    script, runs, _ = study
    script.refuse_scores_of_another(runs.classifier(), runs.entry)
    runs.entry["scores"]["plain"] = {"0": {}}
    script.refuse_scores_of_another(runs.classifier(), runs.entry)
    (runs.classifier() / "model.safetensors").write_text("others")
    with pytest.raises(SystemExit, match="another file"):
        script.refuse_scores_of_another(runs.classifier(), runs.entry)


def test_scores_of_other_sizes_are_refused(study):
    script, runs, _ = study
    del runs.entry["opponents"]
    script.refuse_other_sizes(runs.study, runs.entry)
    runs.entry["scores"]["plain"] = {"0": {}}
    script.refuse_other_sizes(runs.study, runs.entry)
    with pytest.raises(SystemExit, match="'steps': 1200"):
        script.refuse_other_sizes(runs.study._replace(steps=100), runs.entry)


def test_the_table_of_the_study(study):
    script, runs, _ = study
    steps = script.STUDIES["digits"].sampling_steps
    by_seed = {
        "0": dict(frechet_distance=[2.0] * len(steps), recognised=[90.0] * len(steps)),
        "1": dict(frechet_distance=[4.0] * len(steps), recognised=[70.0] * len(steps)),
    }
    entry = dict(
        opponents=runs.entry["opponents"],
        steps=dict(narrow=2000, dense=1200, teacher=120),
        times=dict(narrow=dict(milliseconds=2.0, ratio=0.5), plain=dict(ratio=0.5)),
        scores=dict(narrow=by_seed),
        machine=dict(cores=2, cpu="C", isa="I", torch="2", date="D"),
    )
    lines = script.tables(dict(studies={"digits": entry})).splitlines()
    assert lines[0] == "2 cores of C (I), torch 2, D."
    distances = " | ".join(["3.00 ± 1.41"] * len(steps))
    assert (
        lines[-1]
        == f"| narrow (embed_dim 88) | 2 | 2000 | 1000 | 0.50 | {distances} | 80.0 ± 14.1 |"
    )
    # A third of a step for each pass of the teacher.
    assert script.compute_of("teacher", entry) == 1200 + 60 + 40


def test_the_picture_of_the_study(study, tmp_path):
    script, runs, _ = study
    steps = len(script.STUDIES["digits"].sampling_steps)
    scores = dict(frechet_distance=[2.0] * steps, recognised=[90.0] * steps)
    entry = dict(
        times=dict(dense=dict(milliseconds=2.0, ratio=1.0)), scores=dict(dense={"0": scores})
    )
    script.picture(dict(studies={"digits": entry}), tmp_path / "curve.svg")
    assert "ms an image" in (tmp_path / "curve.svg").read_text()


@pytest.fixture
def vits(tmp_path, monkeypatch):
    """(script, study with times and no scores, options of the commands that it gave); no command runs."""
    script = benchmark("vit_quality")
    given = []

    def trained(_, options):
        words = [str(word) for word in options]
        given.append(words)
        run = script.Path(words[words.index("--output") + 1])
        run.mkdir()
        (run / "results.json").write_text('{"top1": 50.0}')

    monkeypatch.setattr(script, "call", trained)
    times = {name: dict(ratio=0.5, macs=10**7) for name in ("dense", *script.CONVERSIONS)}
    times[script.FEWER] = dict(ratio=0.25, macs=10**7)
    report = dict(times=times, fewer_layers=3, top1={})
    return script, script.Study("shards", tmp_path, report), given


def test_vits_are_trained_once_the_dense_one_first(vits):
    script, study, given = vits
    models = ["half of heads, teacher", "fewer layers"]
    for _ in range(2):
        study.train_all(models, [4], 1)
    dense, half, fewer = given
    # The compute of 1953 dense steps and 195 of the conversion with its teacher.
    assert [words[words.index("--max-steps") + 1] for words in given] == ["1953", "195", "8462"]
    source = dense[dense.index("--output") + 1]
    assert half[half.index("--model.pretrained") + 1] == source
    assert half[half.index("--distill.teacher") + 1] == source
    assert fewer[fewer.index("--model.depth") + 1] == "3"
    assert "--distill.teacher" not in fewer
    for words in given:
        steps = int(words[words.index("--max-steps") + 1])
        config = parse_config(ClsConfig, words, "train_cls.py")
        assert config.steps(50_000)[:2] == (steps, steps)  # the learning rate falls to its end
    assert study.report["top1"] == {model: {"4": 50.0} for model in ["dense", *models]}


def test_the_table_of_the_vits(vits):
    script, study, _ = vits
    study.report["top1"]["fewer layers"] = {"0": 50.0, "1": 52.0}
    study.report["machine"] = dict(cores=2, cpu="C", isa="I", torch="2", date="D")
    row = script.table(study.report).splitlines()[-1]
    assert row == "| fewer layers (3) | 2 | 8462 | 10.0 | 0.25 | 51.00 ± 1.41 |"
