"""The command table: rows of small runs, whose numbers the tests read from the files of the runs."""

import json
import re
import shutil
import statistics

import pytest
import timm
import yaml

from moh_vision import load_run
from moh_vision.classification import train as train_cls
from moh_vision.commands import table
from moh_vision.commands.runs import read_runs
from moh_vision.language import train as train_text
from moh_vision.language.evaluation.lm_suites import SUITES
from moh_vision.language.models.create import list_text_presets
from tests.support import small_runs
from tests.support.refusals import assert_says


@pytest.fixture(scope="module")
def runs(trained):
    """Runs by name: three seeds of a classifier, one with half of its heads, diffusion with and without scores, and text."""
    found = {f"cls{seed}": trained("cls", 3, "--seed", seed) for seed in (0, 1, 2)}
    found |= dict(half=trained("cls", 3, "--model.head_budget", "0.5"), text=trained("text", 2))
    scored = f"--score.every 2 --score.images 70 --score.steps 2 --score.extractor {found['cls0']} --score.split val"
    return found | dict(dit=trained("dit", 2, *scored.split()), unscored=trained("dit", 1))


def cells(text):
    """Return {title: cell} for every row of a Markdown table."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert all(len(line) == len(lines[0]) for line in lines)
    return [dict(zip(lines[0], line)) for line in lines[2:]]


def configured(run, folder, **keys):
    """Copy a run and change keys of its config.yaml: of each key, the first line with that name."""
    shutil.copytree(run, folder)
    text = (folder / "config.yaml").read_text()
    for key, value in keys.items():
        text, count = re.subn(rf"\b{key}: .*", f"{key}: {value}", text, count=1)
        assert count == 1, key
    (folder / "config.yaml").write_text(text)
    return folder


def test_runs_that_differ_in_the_seed_are_one_row(runs, run_command, capsys):
    folders = [runs["cls0"], runs["half"], runs["cls1"], runs["cls2"]]
    out = run_command("table", *folders).out
    first, second = cells(out)
    top1 = [small_runs.results(runs[f"cls{seed}"])["top1"] for seed in (0, 1, 2)]
    assert first["runs"] == "3" and first["steps"] == "3"
    assert first["top-1, %"] == f"{statistics.mean(top1):.2f} ± {statistics.stdev(top1):.2f}"
    assert first["active heads, %"] == "75" and second["active heads, %"] == "50"
    assert first["model"].endswith("patch16_224, model.head_budget 0.75")
    assert "head_budget 0.5" in second["model"]
    assert second["runs"] == "1"
    assert second["top-1, %"] == f"{small_runs.results(runs['half'])['top1']:.2f}"
    assert float(second["MACs, M"]) < float(first["MACs, M"])
    # --dry-run prints the same size.
    capsys.readouterr()
    train_cls.main([*small_runs.arguments("cls", runs["cls0"], 3, 100), "--dry-run"])
    counted = capsys.readouterr().out.split("parameters:")[1].split()[0].replace(",", "")
    assert first["parameters, M"] == f"{int(counted) / 1e6:.4g}"
    # A row of one seed has no deviation over seeds, so a note says the binomial error over its images.
    p = small_runs.results(runs["half"])["top1"] / 100
    points = f"{100 * (p * (1 - p) / 355) ** 0.5:.2g}"
    note = f"355 validation images of digits; one standard error of top-1 over these images is {points} points."
    assert out.count("standard error") == 1 and note in out.splitlines()[-1]
    assert "top-5" not in out  # not shown for 10 classes
    assert "BLEU" not in out and "FID" not in out and f"{runs['cls2']} (seed 2)" in out
    names = ["three quarters", "half | 50", "other seed"]
    out = run_command("table", *folders[:3], "--names", *names).out
    models = [row["model"] for row in cells(out.replace("\\|", "/"))]
    assert models == ["three quarters", "half / 50"]
    assert f"- half | 50: {runs['half']} (seed 0)" in out


GROUPS = "--model.scope sample --model.mlp_budget 0.5".split()


def test_groups_of_mlps_have_a_column(trained, runs, run_command):
    routed = trained("cls", 3, *GROUPS)
    out = run_command("table", routed, runs["cls0"]).out
    with_groups, dense_mlps = cells(out)
    assert (with_groups["active heads, %"], with_groups["active groups, %"]) == ("75", "50")
    assert dense_mlps["active groups, %"] == "-"
    assert float(with_groups["MACs, M"]) < float(dense_mlps["MACs, M"])
    assert "an image, active heads and groups alone (" in out
    out = run_command("table", runs["cls0"]).out
    assert "group" not in out and "an image, active heads alone (" in out


def test_a_model_with_another_mlp_budget_is_not_the_papers(trained, runs, monkeypatch):
    row = dict(model="moh_vit_tiny_patch16_224", row="ViT", source="A paper", data="digits")
    monkeypatch.setattr(table, "PAPER_ROWS", [row])
    # The other arguments of these small runs are not looked at.
    monkeypatch.setattr(table, "ANOTHER_MODEL", table.ANOTHER_MODEL & {"mlp_budget"})
    sizes = table.Sizes(parameters=None, macs=None, active=None, groups=None, classes=10)
    routed, plain = read_runs([trained("cls", 3, *GROUPS), runs["cls0"]])
    assert table.paper_rows(plain, sizes) == [row]
    assert table.paper_rows(routed, sizes) == []


def test_what_tells_runs_apart(runs, tmp_path, run_command):
    """Runs share a row if they differ only in the seed and in how they log and save. Names leave defaults out."""
    slow = configured(
        runs["cls0"], tmp_path / "slow", log_every=7, save_in_background="false", seed=5
    )
    decayed = configured(runs["cls0"], tmp_path / "decayed", layer_decay=0.9)
    plain, other = cells(run_command("table", runs["cls0"], slow, decayed).out)
    assert (plain["runs"], other["runs"]) == ("2", "1") and plain["top-1, %"].endswith("± 0.00")
    assert (
        other["model"] == f"{plain['model']}, optim.layer_decay 0.9" and "," not in plain["model"]
    )
    long = configured(runs["cls0"], tmp_path / "long", max_steps=4, seed=6)
    assert "max_steps 4" in cells(run_command("table", runs["cls0"], long).out)[1]["model"]


def test_diffusion(runs, run_command, refused):
    out = run_command("table", runs["dit"]).out
    scores = [entry["scores"] for entry in small_runs.entries(runs["dit"]) if "scores" in entry][-1]
    (row,) = cells(out)  # there is no row of a paper, because none trains a model of this size
    assert row["FD"] == f"{scores['fd']:.2f}" and row["precision"] == f"{scores['precision']:.3f}"
    assert "FID" not in row and scores["label"] in out and "70 images against 355 of digits" in out
    assert f"sampler {scores['sampling']['sampler']}, steps {scores['sampling']['steps']}" in out
    error = refused("table", runs["unscored"])
    assert_says(error, f"{runs['unscored']} scores sample.py --score")


def test_steps_are_those_of_the_weights(runs, tmp_path, run_command):
    """The steps of a row are those of the scored weights, not of the last line of the log or of max_steps."""
    folder = configured(runs["dit"], tmp_path / "run", max_steps=5)
    (folder / "scores.json").write_text(json.dumps(dict(recognised=0.5, num_generated=70, step=1)))
    out = run_command("table", folder).out
    assert cells(out)[0]["steps"] == "1" and "(seed 0, 1 of 5 steps)" in out


def test_scores_of_sample_py_come_first(runs, tmp_path, run_command):
    shutil.copytree(runs["dit"], tmp_path / "run")
    drawn = dict(sampler="ddpm", steps=250, seed=3, weights_sha256="c0ffee", cfg_scale=None)
    scores = dict(fid=12.345, kid=0.001234, precision=None, label="FID-50K", sampling=drawn)
    scores |= dict(num_generated=50000, num_reference=10000)
    scores |= dict(reference="ref.npz", extractor="inception")
    (tmp_path / "run" / "scores.json").write_text(json.dumps(scores))
    out = run_command("table", tmp_path / "run").out
    (row,) = cells(out)
    assert row["FID"] == "12.35" and row["KID"] == "0.00123"
    assert "FD" not in row and "precision" not in row
    assert "FID-50K by inception; sampler ddpm, steps 250.\n" in out
    # Another seed with a different score, of other images, gets a row of its own.
    second = configured(runs["dit"], tmp_path / "other", seed=1)
    one, other = cells(run_command("table", tmp_path / "run", second).out)
    assert one["FD"] == "-" and other["FID"] == "-"


def paper_row(monkeypatch, model, **changed):
    """Change entries of a model's row in `PAPER_ROWS`."""
    rows = []
    for row in table.PAPER_ROWS:
        if row["model"] == model:
            row = row | changed
        rows.append(row)
    monkeypatch.setattr(table, "PAPER_ROWS", rows)


def test_a_row_of_a_paper_is_shown_for_the_same_size_and_data_only(runs, run_command, monkeypatch):
    """A model with the name of a paper's model, but smaller or trained on other data, cannot be compared with it."""
    assert len(cells(run_command("table", runs["text"]).out)) == 1
    name = "moh_vit_tiny_patch16_224"
    monkeypatch.setattr(table, "ANOTHER_MODEL", set())
    (run,) = cells(run_command("table", runs["cls0"]).out)
    row = dict(model=name, row="ViT", source="A paper", top1="80.0")
    row["parameters"] = run["parameters, M"]
    for data, count in (("ImageNet-1K", 1), ("digits", 2)):
        monkeypatch.setattr(table, "PAPER_ROWS", [dict(row, data=data)])
        assert len(cells(run_command("table", runs["cls0"]).out)) == count


def test_translation_beside_the_paper(runs, run_command, capsys, monkeypatch):
    parameters = sum(p.numel() for p in load_run(runs["text"]).parameters())
    paper_row(monkeypatch, "mt_mae_7", parameters=f"{parameters / 1e6:.4g}")
    out = run_command("table", runs["text"]).out
    found = small_runs.results(runs["text"])
    row, paper = cells(out)
    assert row["BLEU"] == f"{found['bleu']['soft']['tokenised_bleu']['bleu']:.2f}"
    assert row["val. perplexity"] == f"{found['validation']['perplexity']:.2f}"
    assert paper["model"] == "MAE-7 (Peng 2020, table 3; IWSLT14 DE-EN)" and paper["BLEU"] == "35.5"
    assert paper["runs"] == "paper" and paper["val. perplexity"] == "-"
    assert "BLEU of 40 pairs of val" in out
    # A tied embedding counts once, as in --dry-run.
    assert row["parameters, M"] == f"{parameters / 1e6:.4g}"
    train_text.main([*small_runs.arguments("text", runs["text"], 2, 100), "--dry-run"])
    assert f"parameters:   {parameters:,}\n" in capsys.readouterr().out


def test_seeds_that_patience_ends_after_other_steps_are_one_row(runs, tmp_path, run_command):
    for seed, step in ((0, 1200), (1, 900)):
        folder = tmp_path / f"seed{seed}"
        configured(runs["text"], folder, seed=seed, patience=3, eval_every=1)
        results = small_runs.results(folder) | dict(step=step)
        (folder / "results.json").write_text(json.dumps(results))
    (row,) = cells(run_command("table", tmp_path / "seed0", tmp_path / "seed1").out)
    assert row["runs"] == "2" and row["steps"] == "900 to 1,200"


def test_suites(tmp_path, run_command, refused):
    """The scores of a suite are shown for a folder with a configuration and scores.json, but without weights."""
    data = dict(root="text", val="val")
    model = dict(name="clm_moh_small_75")
    config = dict(kind="text", seed=0, model=model, data=data, generate=dict(beam=5))
    suite = SUITES["moh-llm"]
    values = [10.0 + i for i in range(len(suite.rows))]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    record = dict(suites={"moh-llm": dict(average=12.5, values=values)}, limit=20)
    (tmp_path / "scores.json").write_text(json.dumps(record))
    out = run_command("table", tmp_path).out
    row, paper = cells(out)
    assert [row[task.title] for task in suite.rows] == [f"{v:.2f}" for v in values]
    assert row["average of moh-llm"] == "12.50" and row["parameters, M"] == "-"
    assert paper["model"].startswith("MoH-LLM-S (Jin 2024, table 4") and paper["SciQ"] == "64.7"
    assert paper["average of moh-llm"] == "44.6" and "moh-llm, --limit 20" in out
    (tmp_path / "scores2.json").write_text(json.dumps(record))
    assert_says(refused("table", tmp_path), f"{tmp_path}/scores2.json {tmp_path}/scores.json")


def test_rows_of_the_papers():
    """Each row names a model that exists, and its sizes and scores are positive numbers."""
    numbers = {*table.SIZES, *table.COLUMNS}
    names = list_text_presets()
    for row in table.PAPER_ROWS:
        model = row["model"]
        assert timm.is_model(model) or model in names or model == "clm_pretrained", model
        known = {"model", "row", "source", "data", "steps", "pair", "suite", *numbers}
        assert set(row) <= known, row
        assert row.get("suite") or numbers & set(row), row
        for key in numbers & set(row):
            assert float(row[key].replace(",", "")) > 0
        if "suite" in row:
            assert row["suite"][1] in SUITES[row["suite"][0]].paper
