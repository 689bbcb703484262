import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moh_vision
from moh_vision.language.evaluation.lm_suites import SUITES, average, suite_table
from moh_vision.models.head_load import HeadLoad
from tests.support.paths import ROOT
from tests.support.refusals import assert_says, refuse

transformers = pytest.importorskip("transformers")

from moh_vision.__main__ import main  # noqa: E402
from moh_vision.language.evaluation import lm  # noqa: E402
from moh_vision.language.evaluation.lm_model import counted, load_model, load_tokenizer  # noqa: E402
from tests.support.tiny_lm import CHOICE, GENERATE, QUESTIONS, write_model, write_task  # noqa: E402

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("routed"), budget=0.5)


def run(*arguments):
    return main(["lm", *map(str, arguments)])


def mistake(capsys, *arguments):
    capsys.readouterr()
    assert run(*arguments) == 2
    lines = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("lm: error: ")
    ]
    assert len(lines) == 1
    return lines[0].removeprefix("lm: error: ")


PRINTED = {  # by the paper
    "moh-llm": [43.9, 44.6, 45.4, 47.4, 47.8, 47.2, 47.9, 48.5, 47.5],
    "moh-llama3": [61.6, 64.0],
    "moh-llama3-stage1": [64.7, 64.8],
}


def test_the_papers_averages_are_means_of_its_columns_and_shots_its_own():
    for name, suite in SUITES.items():
        assert [*suite.averages.values()] == PRINTED[name] and [*suite.averages] == [*suite.paper]
        assert len({row.title for row in suite.rows}) == len(suite.rows)
        assert all(len(values) == len(suite.rows) for values in suite.paper.values())
    shots = {row.title: row.shots for suite in SUITES.values() for row in suite.rows}
    five = dict(MMLU=5, CEVAL=5, CMMLU=5, GSM8K=8, HellaSwag=10, BoolQ=32, NQ=32, **{"ARC-C": 25})
    assert {title: n for title, n in shots.items() if n} == five


def test_averages_and_tables(capsys):
    assert run("--list") == 0  # without a model
    out = capsys.readouterr().out
    assert all(name in out for name in SUITES) and "exact_match,strict-match" in out
    assert (
        average([50.0, 60.0, 70.0]) == 60 and average([50.0, None]) is None and average([]) is None
    )
    lines = suite_table("moh-llm", [10.0, 20.0, 30.0, 40.0, 50.0, 61.0]).splitlines()
    assert lines[0] == "moh-llm (MoH, table 4)" and len(lines) == 9
    assert lines[2].split()[:4] == ["SciQ", "0", "acc_norm", "10.00"]
    assert lines[7].split()[:7] == ["TruthfulQA", "0", "acc", "of", "mc1", "and", "mc2"]
    assert lines[8].split() == ["average", "35.17", *map(str, PRINTED["moh-llm"])]
    assert (
        suite_table("moh-llm", [10.0, None, 1.0, 1.0, 1.0, 1.0]).splitlines()[8].split()[1] == "-"
    )


def test_a_plan_has_every_task_once():
    rows = lm.plan(["moh-llama3", "moh-llama3-stage1", "arc_easy", "arc_easy"], None)
    assert len(rows) == 16 and rows[-1].tasks == ("arc_easy",) and rows[-1].shots == -1
    assert "did you mean hellaswag?" in lm.unknown_name("helaswag", ["hellaswag", "arc_easy"])


@needs_harness
def test_the_suites_tasks_and_metrics_are_in_the_harness():
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    where = "sciq piqa winogrande openbookqa logiqa truthfulqa mmlu/default ceval cmmlu gsm8k hellaswag super_glue/boolq"
    where = [*where.split(), "lambada", "nq_open", "arc"]
    root = lm_eval.tasks.__path__[0]
    manager = TaskManager(
        include_path=[f"{root}/{folder}" for folder in where], include_defaults=False
    )
    for row in {row for suite in SUITES.values() for row in suite.rows}:
        metric, _, metric_filter = row.metric.partition(",")
        for task in row.tasks:
            config = manager.task_index[task].cfg
            metrics = config.get("metric_list") or config["aggregate_metric_list"]
            assert metric in [entry["metric"] for entry in metrics], task
            filters = [entry["name"] for entry in config.get("filter_list", [])] or ["none"]
            assert metric_filter in filters, task
            if metric == "acc":  # acc_norm is taken wherever it says something else
                letters = config.get("group") in ("ceval-valid", "cmmlu")
                assert letters or "acc_norm" not in [entry["metric"] for entry in metrics], task


def log_likelihood(model, tokenizer, context, continuation):
    before = tokenizer(context)["input_ids"]
    ids = torch.tensor([tokenizer(context + continuation)["input_ids"]])
    with torch.no_grad():
        scores = model(ids).logits[0].log_softmax(-1)
    return sum(scores[i - 1, ids[0, i]].item() for i in range(len(before), ids.shape[1]))


@needs_harness
def test_choices_of_a_local_task_are_scored_as_by_hand(model, tmp_path, capsys):
    tasks = write_task(tmp_path / "tasks", "tiny_choice", QUESTIONS, CHOICE)
    out = tmp_path / "scores.json"
    common = ["--model", model, "--tasks", "tiny_choice", "--include-path", tasks]
    assert run(*common, "--out", out, "--batch-size", 2) == 0
    assert "acc_norm" in capsys.readouterr().out
    record = json.loads(out.read_text())

    net = transformers.AutoModelForCausalLM.from_pretrained(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    hits = dict(acc=0, acc_norm=0)
    for row in QUESTIONS:
        scores = [
            log_likelihood(net, tokenizer, f"Q: {row['q']}\nA:", f" {choice}")
            for choice in row["a"]
        ]
        normed = [score / len(choice) for score, choice in zip(scores, row["a"])]
        hits["acc"] += scores.index(max(scores)) == row["l"]
        hits["acc_norm"] += normed.index(max(normed)) == row["l"]
    (row,) = record["rows"]
    found = row["metrics"]["tiny_choice"]
    assert 0 < hits["acc"] < len(QUESTIONS)
    for metric, count in hits.items():
        assert found[f"{metric},none"] == pytest.approx(count / len(QUESTIONS))
    assert row["samples"] == dict(tiny_choice=7) and row["used_shots"] == dict(tiny_choice=0)
    assert (
        record["versions"]["lm_eval"]
        and record["model_type"] == "llama"
        and record["limit"] is None
    )
    assert len(record["weights"]["model.safetensors"]["sha256"]) == 64

    assert "exists" in mistake(capsys, *common, "--out", out)
    assert run(*common, "--out", tmp_path / "two.json", "--limit", 2, "--num-fewshot", 1) == 0
    (row,) = json.loads((tmp_path / "two.json").read_text())["rows"]
    assert row["samples"] == dict(tiny_choice=2) and row["used_shots"] == dict(tiny_choice=1)
    assert "a part of each task" in capsys.readouterr().out


def counted_by_hand(net, ids):
    """Of one text: tokens that ran each head, layer by layer, with all tokens last."""
    return [
        [*stats.counts[0].int().tolist(), ids.shape[1]]
        for stats in net.forward_routed(input_ids=ids)[1]
    ]


@pytest.mark.parametrize("source", ("routed", "clm_moh_small_50"))
def test_heads_are_counted_in_every_forward(source, request):
    """Also while text is generated, one token at a time, where nobody else asks for statistics."""
    from moh_vision.language.models.create import create_text_model

    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    if source == "routed":
        folder = request.getfixturevalue("routed")
        net = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    else:
        net = create_text_model(source, vocab_size=258, **small).eval()
    load = HeadLoad(moh_vision.head_budget(net)["layers"], {"task": ["a", "b"]})
    ids = torch.randint(2, 258, (1, 9))
    with torch.no_grad():
        with counted(net, load, 0):
            net(ids)
        with counted(net, load, 1):
            generated = net.generate(
                ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=1
            )
        net(ids)  # is not counted
        for number, want in enumerate(
            zip(counted_by_hand(net, ids), counted_by_hand(net, generated[:, :-1]))
        ):
            assert load.runs()[number].tolist() == [*want]


@needs_harness
def test_head_load_of_tasks(routed, model, tmp_path, capsys):
    tasks = tmp_path / "tasks"
    out = tmp_path / "load.json"
    write_task(tasks, "tiny_a", QUESTIONS, CHOICE)
    write_task(tasks, "tiny_b", QUESTIONS[:2], CHOICE)
    common = ["--tasks", "tiny_a,tiny_b", "--include-path", tasks, "--head-load", out]
    assert run("--model", routed, *common) == 0
    load = HeadLoad.read(out)
    assert load.groups == {"task": ["tiny_a", "tiny_b"]} and load.of["split"] == "tiny_a, tiny_b"
    tokenizer = transformers.AutoTokenizer.from_pretrained(routed)
    for group, rows in enumerate((QUESTIONS, QUESTIONS[:2])):
        texts = [f"Q: {row['q']}\nA: {choice}" for row in rows for choice in row["a"]]
        tokens = sum(len(tokenizer(text)["input_ids"]) - 1 for text in texts)
        assert all(
            runs[group, -1] == tokens and runs[group, :-1].sum() == 2 * tokens
            for runs in load.runs()
        )
    assert "exists; give another path" in mistake(capsys, "--model", routed, *common)
    common[-1] = tmp_path / "two.json"
    assert "--batch-size 8: expected 1" in mistake(
        capsys, "--model", routed, *common, "--batch-size", 8
    )
    assert "HeadMixtureAttention" in mistake(capsys, "--model", model, *common)  # a plain LLaMA


@needs_harness
def test_a_suite_takes_its_metric_and_the_mean_of_two_tasks(model, tmp_path, capsys, monkeypatch):
    from moh_vision.language.evaluation.lm_suites import Row, Suite

    tasks = tmp_path / "tasks"
    write_task(tasks, "tiny_a", QUESTIONS, CHOICE)
    write_task(tasks, "tiny_b", [dict(row, l=0) for row in QUESTIONS], CHOICE)
    rows = (
        Row("AB", 0, "acc,none", ("tiny_a", "tiny_b")),
        Row("A", 1, "acc_norm,none", ("tiny_a",)),  # the same task with other shots
    )
    monkeypatch.setitem(SUITES, "moh-tiny", Suite("nowhere", rows, dict(X=(1.0, 2.0))))
    out = tmp_path / "scores.json"
    assert run("--model", model, "--tasks", "moh-tiny", "--include-path", tasks, "--out", out) == 0
    record = json.loads(out.read_text())
    two, one = record["rows"]
    assert two["used_shots"] == dict(tiny_a=0, tiny_b=0) and one["used_shots"] == dict(tiny_a=1)
    assert (
        one["value"] == pytest.approx(100 * one["metrics"]["tiny_a"]["acc_norm,none"])
        and one["shots"] == 1
    )
    pair = [two["metrics"][name]["acc,none"] for name in ("tiny_a", "tiny_b")]
    assert pair[0] != pair[1] and two["value"] == pytest.approx(50 * sum(pair))
    assert record["suites"]["moh-tiny"]["average"] == pytest.approx(
        (one["value"] + two["value"]) / 2
    )
    assert "average" in capsys.readouterr().out


@needs_harness
def test_generated_text_is_greedy_and_compared(routed, tmp_path):
    net = transformers.AutoModelForCausalLM.from_pretrained(routed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(routed)
    rows = []
    for i, row in enumerate(QUESTIONS):
        ids = tokenizer(row["q"], return_tensors="pt")["input_ids"]
        generated = net.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=1)
        text = tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True)
        rows.append(dict(q=row["q"], t=text if i < 5 else text + "?"))
    tasks = write_task(tmp_path / "tasks", "tiny_generate", rows, GENERATE)
    out = tmp_path / "scores.json"
    command = ["--model", routed, "--tasks", "tiny_generate", "--include-path", tasks, "--out", out]
    assert (
        run(*command, "--batch-size", 3) == 0
    )  # questions of different lengths: padded on the left
    (row,) = json.loads(out.read_text())["rows"]
    assert row["metrics"]["tiny_generate"]["exact_match,none"] == pytest.approx(5 / 7)


@needs_harness
def test_data_that_cannot_be_had(model, tmp_path, capsys):
    tasks = write_task(tmp_path / "tasks", "tiny_gone", [], CHOICE, data=tmp_path / "nowhere.jsonl")
    text = mistake(capsys, "--model", model, "--tasks", "tiny_gone", "--include-path", tasks)
    assert (
        text.startswith("task tiny_gone: its data set (json) cannot be loaded: ")
        and "nowhere.jsonl" in text
    )


@needs_harness
@pytest.mark.slow
def test_names_and_data_sets_of_the_harness_itself(model, capsys, monkeypatch):
    """It reads 14,000 files first."""
    import datasets
    import huggingface_hub

    for settings in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(settings, "HF_HUB_OFFLINE", True)
    text = mistake(capsys, "--model", model, "--tasks", "helaswag")
    assert text == "--tasks: no suite or task is named helaswag; did you mean hellaswag?"
    text = mistake(capsys, "--model", model, "--tasks", "moh-llm")
    assert text.startswith("task sciq: its data set (allenai/sciq) cannot be loaded: ")


@needs_harness
@pytest.mark.slow
def test_processes_share_questions(model, tmp_path):
    tasks = write_task(tmp_path / "tasks", "tiny_choice", QUESTIONS, CHOICE)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
    ]
    environment = dict(os.environ, ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="")
    command = [
        "--model",
        model,
        "--tasks",
        "tiny_choice",
        "--include-path",
        tasks,
        "--num-fewshot",
        "1",
        "--out",
    ]
    outs = [str(tmp_path / f"{processes}.json") for processes in (1, 2)]
    assert run(*command, outs[0]) == 0
    subprocess.run(
        [*launch, "moh_vision", "lm", *command, outs[1]], check=True, cwd=ROOT, env=environment
    )
    records = [json.loads(Path(out).read_text()) for out in outs]
    assert [record["processes"] for record in records] == [1, 2]
    rows = [record["rows"][0] for record in records]
    assert all(row["samples"] == dict(tiny_choice=7) for row in rows)
    for key in ("acc,none", "acc_norm,none"):
        one, two = (row["metrics"]["tiny_choice"][key] for row in rows)
        assert one == pytest.approx(two)


def opened(folder, released=False):
    return load_model(
        str(folder), "auto", torch.device("cpu"), load_tokenizer(str(folder)), released
    )


def test_the_released_layout_is_read_with_its_routing_or_not_at_all(model, tmp_path):
    folder = tmp_path / "released"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    refuse(f"--model {folder} auto_map --moh-llama3", opened, folder)
    assert opened(folder, released=True)[1]["moh"]["head_budget"] == [[2, 1], [2, 1]]


def test_mistakes_are_one_line(model, tmp_path, capsys, monkeypatch):
    ask = ["--model", model, "--tasks", "moh-llm"]
    for arguments, facts in (
        ([], "--tasks --list"),
        (["--tasks", "moh-llm"], "--model missing"),
        (["--modle", model], "--modle --model"),
        ([*ask, "--batch-size", 0], "--batch-size 0 1 auto"),
        ([*ask, "--limit", 1.5], "--limit 1.5 number 0 1"),
        ([*ask, "--num-fewshot", -1], "--num-fewshot -1 0"),
        ([*ask, "--num-fewshot", 2], "--num-fewshot 2 moh-llm tasks"),
        (["--model", model, "--tasks", ","], f"--tasks {' '.join(SUITES)} tasks commas"),
        (["--model", model, "--tasks", "moh-lama3"], "--tasks moh-lama3 moh-llama3"),
        ([*ask, "--include-path", tmp_path / "no"], f"--include-path {tmp_path}/no folder"),
        (["--model", tmp_path / "no", *ask[2:]], f"--model --tokenizer {tmp_path}/no folder"),
        (["--model", model, "--tasks", "moh-llm", "--out", tmp_path / "a" / "b"], f"--out {tmp_path}/a/b folder"),
    ):  # fmt: skip
        assert_says(mistake(capsys, *arguments), facts)
    error = mistake(capsys, "--model", tmp_path, *ask[2:])
    assert_says(error, f"{tmp_path} tokenizer_config.json")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert_says(mistake(capsys, *ask), "lm_eval 'moh_vision[lm]'")


def test_models_that_do_not_fit(tmp_path):
    silent = write_model(tmp_path / "silent", eos=False)
    small = write_model(tmp_path / "small", vocab=100)
    refuse(f"{silent} eos_token bos_token", opened, silent)
    refuse(f"--model {small} 100 258", opened, small)
    (tmp_path / "small" / "model.safetensors").write_bytes(b"nothing")
    refuse(f"--model {small} header", opened, small)
    (tmp_path / "small" / "config.json").unlink()
    refuse(f"--model {small} config.json", opened, small)
