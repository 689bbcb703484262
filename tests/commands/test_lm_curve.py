"""Scores of the weights that a run has kept, over tokens. The harness' suites are stood in for: it may not be installed."""

import json
import shutil
from statistics import mean, stdev

import pytest
from processes import on_two_ranks
from small_runs import plain

from moh_vision.__main__ import main
from moh_vision.language.evaluation import lm
from moh_vision.language.evaluation.lm_suites import SUITES


@pytest.fixture(scope="module")
def runs(trained, tmp_path_factory):
    """Copies of two runs that differ in the seed: the command writes into them."""
    folder = tmp_path_factory.mktemp("curve")
    for seed in (0, 1):
        shutil.copytree(trained("clm", 4, "--keep-weights-every", 2, "--seed", seed), folder / f"run{seed}")
    return folder


def test_perplexity_of_every_kept_step(runs, tmp_path, run_command):
    output = tmp_path / "curve.png"
    ask = ["--perplexity", f"{plain()}/valid.txt", "--context", 8]
    folders = [runs / "run0", runs / "run1"]
    assert run_command("lm-curve", *folders, *ask, "--output", output).code == 0
    assert output.read_bytes()[:4] == b"\x89PNG"
    (line,) = json.loads(output.with_suffix(".json").read_text())["scores"]["perplexity"]
    assert line["x"] == [2 * 4 * 16, 4 * 4 * 16] and line["runs"] == [2, 2]
    files = [[next((run / "weights" / f"step_{step}").glob("lm-*.json")) for run in folders] for step in (2, 4)]
    alone = [[json.loads(file.read_text())["perplexity"] for file in of_step] for of_step in files]
    again = ["--model", files[1][1].parent, *ask, "--out", tmp_path / "lm.json"]
    assert run_command("lm", *again).code == 0
    assert json.loads((tmp_path / "lm.json").read_text())["perplexity"] == alone[1][1]
    assert line["mean"] == pytest.approx([mean(v) for v in alone]) and line["mean"][1] < line["mean"][0]
    assert line["std"] == pytest.approx([stdev(v) for v in alone])
    # The last weights kept are the run's last ones, and what is scored already is not scored again.
    last = runs / "run0" / "weights" / "step_4" / "model.safetensors"
    assert last.stat().st_size > 1000 and (last.parent / "tokenizer.json").is_file()
    code, out, _ = run_command("lm-curve", *folders, *ask, "--output", tmp_path / "again.png")
    assert code == 0 and "step_" not in out
    assert (tmp_path / "again.json").read_text() == output.with_suffix(".json").read_text()


def on_a_rank(rank, argv):
    assert main(["lm-curve", *argv]) == 0


def test_two_processes_share_every_kept_step(runs, tmp_path):
    run, output = tmp_path / "run", tmp_path / "curve.png"
    shutil.copytree(runs / "run0", run, ignore=shutil.ignore_patterns("lm-*.json"))
    ask = [run, "--perplexity", f"{plain()}/valid.txt", "--context", 7, "--output", output]
    on_two_ranks(on_a_rank, [str(a) for a in ask])
    records = [json.loads(file.read_text()) for file in sorted(run.glob("weights/step_*/lm-*.json"))]
    assert [record["processes"] for record in records] == [2, 2]
    (line,) = json.loads(output.with_suffix(".json").read_text())["scores"]["perplexity"]
    assert line["mean"] == [record["perplexity"] for record in records]


def test_the_average_and_the_tasks_of_a_suite(runs, tmp_path, run_command, monkeypatch):
    rows = len(SUITES["moh-llm"].rows)
    calls = []

    def score(options, accelerator):
        calls.append((options.tasks, options.limit))
        step = int(options.model.rpartition("_")[2])
        values = [step + row for row in range(rows)]
        record = dict(suites={"moh-llm": dict(average=mean(values), values=values)})
        with open(options.out, "w") as file:
            json.dump(record, file)

    monkeypatch.setattr(lm, "score", score)
    output = tmp_path / "curve.svg"
    argv = [runs / "run0", "--tasks", "moh-llm", "--limit", 5, "--output", output]
    assert run_command("lm-curve", *argv)[0] == 0
    assert calls == [("moh-llm", 5)] * 2
    scores = json.loads(output.with_suffix(".json").read_text())["scores"]
    assert scores["average of moh-llm"][0]["mean"] == [2 + (rows - 1) / 2, 4 + (rows - 1) / 2]
    assert scores["moh-llm: PIQA"][0]["mean"] == [3, 5] and len(scores) == rows + 1
    output.unlink()
    output.with_suffix(".json").unlink()
    argv[4] = 6  # other options are other scores
    assert run_command("lm-curve", *argv)[0] == 0 and len(calls) == 4
