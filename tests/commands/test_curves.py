"""The command curves: learning curves, and scores over a key. The tests write the logs, so that every value is known."""

import json
from statistics import mean, stdev

import pytest
import yaml

from moh_vision.commands.curves import read_curves
from moh_vision.commands.figures import Line, draw_lines


def write_run(folder, *, seed=0, model="mt_mae_7", epoch=20, losses=(), dev=(), bleu=None, **data):
    """Write the files of a run and return its folder.

    losses: of training, logged every 10 steps. dev: of validation, every 20 steps. epoch: steps of an epoch. bleu: score
    of the finished run. data: keys of the section `data`.
    """
    folder.mkdir()
    config = dict(
        kind="text" if model.startswith("mt_") else "diffusion",
        seed=seed,
        model=dict(name=model),
        data=dict(root="text", val="val", **data),
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [{"step": 0, "trained_parameters": 3}]
    # Curves draw `nll`: with smoothed labels `loss` cannot be compared with the loss of validation.
    for i, loss in enumerate(losses):
        lines.append({"step": 10 * i + 1, "loss": 99.0, "nll": loss, "epoch": 10 * i // epoch})
    lines += [{"step": 20 * (i + 1), "validation": {"loss": loss}} for i, loss in enumerate(dev)]
    last = {"step": 10 * len(losses) + 1, "epoch": 10 * len(losses) // epoch}
    lines.append({**last, "loss": None, "nll": None})  # a skipped step
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if bleu is not None:
        scores = dict(soft=dict(tokenised_bleu=dict(bleu=bleu), bleu=dict(bleu=bleu)))
        results = dict(
            step=100 + seed,
            bleu=scores,
            bleu_pairs=9,
            bleu_split="val",
            validation=dict(perplexity=9.0),
        )
        (folder / "results.json").write_text(json.dumps(results))
    return folder


def lines_of(file):
    """Return {name: line} of a figure's .json."""
    return {line.pop("name"): line for line in json.loads(file.read_text())["lines"]}


def test_seeds_are_one_line_over_epochs(tmp_path, run_command):
    runs = [
        write_run(tmp_path / "a", losses=[5, 4, 3, 2, 1], dev=[4.5, 2.5]),
        write_run(tmp_path / "b", losses=[5, 4, 3.5, 2], dev=[4.25], seed=1),
        write_run(tmp_path / "c", model="mt_nobcd", losses=[6, 5, 4], dev=[5]),
    ]
    assert run_command("curves", *runs, "--output", tmp_path / "curves.png")[0] == 0
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    told = json.loads((tmp_path / "curves.json").read_text())
    lines = lines_of(tmp_path / "curves.json")
    assert told["x"] == "epochs" and told["y"] == "loss, nats per token"
    assert len(lines) == 4 and {"mt_nobcd, training", "mt_nobcd, validation"} < set(lines)
    train = lines["mt_mae_7, training"]
    dev = lines["mt_mae_7, validation"]
    # The log has every tenth step, so the ends of epochs are known to 10 steps; the middle of these is taken.
    unit = mean([mean([31, 40]) / 2, mean([31, 40]) / 2])
    assert train["x"] == pytest.approx([step / unit for step in (1, 11, 21, 31, 41)])
    assert train["mean"] == pytest.approx([5, 4, 3.25, 2, 1]) and train["runs"] == [2, 2, 2, 2, 1]
    assert train["std"][2] == pytest.approx(stdev([3, 3.5])) and train["std"][4] is None
    assert dev["x"] == pytest.approx([20 / unit, 40 / unit])
    assert dev["mean"] == pytest.approx([4.375, 2.5])


def test_an_epoch_is_found_to_the_step_where_every_step_is_logged(tmp_path):
    entries = [{"step": step + 1, "loss": 1.0, "epoch": step // 7} for step in range(30)]
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    (tmp_path / "metrics.jsonl").write_text(text)
    found, steps = read_curves(tmp_path / "metrics.jsonl")
    assert steps == 7 and found["validation"] == [] and found["training"][-1] == (30, 1.0)


def test_a_run_in_its_first_epoch_is_drawn_over_steps(tmp_path, run_command):
    run = write_run(tmp_path / "a", losses=[5, 4, 3.5], epoch=1000, dev=[4.5])
    options = ["--window", 2, "--names", "MAE", "--output", tmp_path / "curves.svg"]
    assert run_command("curves", run, *options)[0] == 0
    assert json.loads((tmp_path / "curves.json").read_text())["x"] == "steps"
    lines = lines_of(tmp_path / "curves.json")
    assert lines["MAE, training"]["x"] == [1, 11, 21]
    assert lines["MAE, training"]["mean"] == [5, 4.5, 3.75]
    assert lines["MAE, validation"]["mean"] == [4.5]


def test_scores_over_a_share_of_the_data(tmp_path, run_command):
    """A figure as figure 2 of Peng 2020. Its runs may have stopped early, at different steps."""
    # (data.merges, data.share) -> scores of runs with different seeds
    bleu = {(1, 0.05): [10, 12], (1, 1.0): [31, 30], (2, 0.05): [20, 21], (2, 1.0): [30]}
    runs = [
        write_run(
            tmp_path / f"{merges}_{share}_{seed}", seed=seed, share=share, merges=merges, bleu=score
        )
        for (merges, share), scores in bleu.items()
        for seed, score in enumerate(scores)
    ]
    options = ["--over", "data.share", "--output", tmp_path / "share.png"]
    assert run_command("curves", *runs, *options).code == 0
    assert json.loads((tmp_path / "share.json").read_text())["y"] == "BLEU"
    lines = lines_of(tmp_path / "share.json")
    assert set(lines) == {"mt_mae_7, data.merges 1", "mt_mae_7, data.merges 2"}
    std = [pytest.approx(stdev([10, 12])), pytest.approx(stdev([31, 30]))]
    assert lines["mt_mae_7, data.merges 1"] == dict(
        x=[0.05, 1.0], mean=[11, 30.5], std=std, runs=[2, 2]
    )
    assert lines["mt_mae_7, data.merges 2"]["std"][1] is None


def test_the_log_of_a_configuration_is_drawn_beside_a_run(tmp_path, run_command):
    run = write_run(tmp_path / "a", model="moh_vit_tiny_patch16_224", losses=[2.5, 2.0])
    for name in ("quickstart/cls", "configs/quickstart/cls.yaml"):
        options = ["--beside", name, "--output", tmp_path / "curves.png"]
        assert run_command("curves", run, *options).code == 0
        lines = lines_of(tmp_path / "curves.json")
        assert lines["moh_vit_tiny_patch16_224, training"]["mean"] == [2.5, 2.0]
        shipped = lines[f"{name} as shipped, training"]
        assert shipped["x"][:3] == [1, 11, 21] and shipped["x"][-1] == 600
        assert 2 < shipped["mean"][0] < 3
        assert lines[f"{name} as shipped, validation"]["x"] == [600]
        for file in tmp_path.glob("curves.*"):
            file.unlink()


def test_losses_of_several_objectives_in_one_axis_say_so(tmp_path, run_command):
    runs = []
    for seed, objective in enumerate(("noise", "flow", "noise")):
        run = write_run(
            tmp_path / str(seed), model="moh_dit_small_patch2_75", seed=seed, losses=[3, 2]
        )
        about = dict(
            yaml.safe_load((run / "config.yaml").read_text()), objective=objective, learn_sigma=True
        )
        (run / "config.yaml").write_text(yaml.safe_dump(about))
        runs.append(run)
    labels = {"losses of noise and flow (no common scale)": runs[:2], "loss": runs[::2]}
    for number, (y, several) in enumerate(labels.items()):
        assert run_command("curves", *several, "--output", tmp_path / f"{number}.png").code == 0
        assert json.loads((tmp_path / f"{number}.json").read_text())["y"] == y


def test_a_legend_of_many_or_long_names_stands_below():
    for names, inside in (
        (map(str, range(12)), True),
        (map(str, range(13)), False),
        (["x" * 45], False),
    ):
        figure = draw_lines([Line(name, {1.0: [1.0]}) for name in names], "x", "y")
        assert (figure.axes[0].get_legend() is not None) == inside == (not figure.legends)
