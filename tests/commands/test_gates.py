"""The command gates: entropy and load of MAE's gates, and scores with the most probable or a random expert."""

import json
import math
import shutil
from statistics import mean, stdev

import numpy as np
import pytest
from PIL import Image

from moh_vision.commands.gates import draw_gate_entropy
from tests.support.refusals import assert_says
from tests.support.small_runs import pairs, results


def test_entropy_figure():
    first = "encoder.layers.0.self_attn"
    second = "decoder.layers.0.cross_attn"

    def run(name, *layers):
        """Return a run as draw_gate_entropy takes it; a layer is (name, experts, entropy)."""
        keys = ("name", "experts", "entropy")
        return dict(name=name, layers=[dict(zip(keys, layer)) for layer in layers])

    mae = [run("MAE-7", (first, 8, nats), (second, 8, 1.8)) for nats in (1.9, 1.7)]
    nobcd = run("NoBCD", (second, 8, 2.05), (first, 4, 2.0))
    figure = draw_gate_entropy(dict(split="val", runs=[*mae, nobcd]))
    axes = figure.axes[0]
    mae, other, *uniform = axes.get_lines()
    assert list(mae.get_ydata()) == pytest.approx([1.8, 1.8])
    # Points are in the order of the axis, encoder first, and not in that of the run's layers.
    assert list(other.get_ydata()) == [2.0, 2.05]
    (band,) = axes.collections  # the spread of two seeds; the model with one seed has no band
    (outline,) = band.get_paths()
    assert np.ptp(outline.vertices[:, 1]) == pytest.approx(2 * stdev([1.9, 1.7]))
    assert [t.get_text() for t in axes.get_xticklabels()] == ["encoder 0 self", "decoder 0 cross"]
    labels = {t.get_text() for t in axes.get_legend().get_texts()}
    assert labels == {"MAE-7", "NoBCD", "uniform (ln 4 = 1.39)", "uniform (ln 8 = 2.08)"}
    assert [line.get_ydata()[0] for line in uniform] == [math.log(4), math.log(8)]


@pytest.fixture(scope="module")
def runs(trained):
    """Runs of MAE with two seeds, which score three modes of their gates, and of a model without gates."""
    modes = ["--data.test", "test", "--generate.gate_modes", "[soft, argmax, random]"]
    dense = ["--data.test", "test", "--model.name", "mt_transformer_base"]
    options_of = dict(mae0=modes, mae1=[*modes, "--seed", 1], dense=dense)
    return {name: trained("text", 4, *options) for name, options in options_of.items()}


def test_the_command_repeats_what_the_runs_have_measured(runs, tmp_path, run_command, hours_pass):
    hours_pass()
    output = tmp_path / "gates.svg"
    folders = [runs[name] for name in ("mae0", "dense", "mae1")]
    code, out, _ = run_command("gates", *folders, "--output", output)
    assert code == 0 and "gates: 1 of 2 steps, " in out
    assert "</svg>" in output.read_text()
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("|")][:4]
    mae, dense = (dict(zip(rows[0], row)) for row in rows[2:])
    of_runs = [results(runs[name]) for name in ("mae0", "mae1")]
    for part in ("encoder", "decoder"):
        values = [found["mean_gate_entropy"][part] for found in of_runs]
        middle, spread = map(float, mae[f"entropy, {part}"].split(" ± "))
        assert middle == pytest.approx(mean(values), abs=0.0051)
        assert spread == pytest.approx(stdev(values), abs=0.0051)
        assert dense[f"entropy, {part}"] == "-"
    assert mae["runs"] == "2"
    assert mae["uniform"] == f"{math.log(4):.2f}"
    assert dense["most probable expert"] == "-"
    scores = [
        [found["bleu"][mode]["tokenised_bleu"] for mode in ("soft", "argmax", "random")]
        for found in of_runs
    ]
    drops = [argmax["bleu"] - soft["bleu"] for soft, argmax, _ in scores]
    assert mae["most probable expert, change"] == f"{mean(drops):.2f} ± {stdev(drops):.2f}"
    stds = [stdev(random["draws"]) for *_, random in scores]
    assert mae["random expert, std of draws"] == f"{mean(stds):.2f} ± {stdev(stds):.2f}"
    report = (runs["mae1"] / "gates.md").read_text().partition("\n\n")[2]
    assert f"## mt_mae_7, seed 1\n\n{report}" in out  # the report that the run wrote at its end
    found = json.loads(output.with_suffix(".json").read_text())["runs"]
    assert [run["run"] for run in found] == [str(runs[name]) for name in ("mae0", "mae1", "dense")]
    assert found[2]["layers"] == []
    for run, told in zip(found, of_runs):
        entropies = {layer["name"]: layer["entropy"] for layer in run["layers"]}
        assert entropies == pytest.approx(told["gate_entropy"], abs=6e-5)
        assert all(sum(layer["load"]) == pytest.approx(1) for layer in run["layers"])


def test_the_command_reads_the_split_that_is_asked_for_and_no_training_text(
    runs, tmp_path, run_command, refused
):
    text = tmp_path / "text"
    run = tmp_path / "run"
    shutil.copytree(pairs(), text)
    shutil.copytree(runs["mae0"], run)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(pairs(), str(text)))
    for side in text.glob("train.*"):
        side.unlink()
    found = {}
    for split in ("val", "test"):
        options = ["--split", split, "--output", tmp_path / f"{split}.png"]
        assert run_command("gates", run, *options).code == 0
        (told,) = json.loads((tmp_path / f"{split}.json").read_text())["runs"]
        found[split] = told["layers"]
    assert found["val"][0]["load"] != found["test"][0]["load"]
    new = ["--output", tmp_path / "gates.png"]
    assert_says(refused("gates", runs["dense"], *new), f"{runs['dense']} none gate")
    image = np.asarray(Image.open(tmp_path / "val.png").convert("RGB"))
    assert min(image.shape[:2]) > 200 and image.std() > 10
    # The run has measured its validation split at its end, with the same result.
    assert found["val"] == json.loads((run / "gates.json").read_text())["layers"]
