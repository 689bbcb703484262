"""train_text.py as a user runs it, on text that the test writes."""

import math
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import moh_vision
from moh_vision.commands.runs import read_run
from moh_vision.language import train as train_text
from moh_vision.language.data.inputs import TranslationInputs
from moh_vision.language.data.vocabulary import Vocabulary, train_vocabulary
from moh_vision.language.evaluation.scores import average_checkpoints
from moh_vision.language.models.create import CausalLMModel, MaskedLMModel, TranslationModel
from moh_vision.models.head_load import HeadLoad
from moh_vision.models.weight_files import read_safetensors
from tests.support import refusals
from tests.support.paths import ROOT
from tests.support.refusals import refuse
from tests.support.small_runs import entries, logged, outcome, results, same
from tests.support.small_text import write_pairs, write_plain

WIDTH = "--model.kwargs.hidden_size 32 --model.kwargs.intermediate_size 64 --model.kwargs.num_attention_heads 4 "
TINY = dict(
    mt=WIDTH
    + "--model.kwargs.encoder_layers 1 --model.kwargs.decoder_layers 1 --data.source de --data.target en "
    "--data.max_tokens 200 --data.max_length 60 --generate.beam 2 --generate.max_length 4",
    mlm=WIDTH
    + "--model.kwargs.num_hidden_layers 1 --data.merges 30 --data.block 16 --optim.batch_size 8",
    clm=WIDTH
    + "--model.kwargs.num_hidden_layers 1 --data.words 0 --data.block 16 --optim.batch_size 8 --data.context 8 "
    "--model.kwargs.adaptive_cutoffs [6] --label_smoothing 0",
)
PRESETS = dict(mt="mt_mae_7", mlm="mlm_moa_2K4E16D", clm="clm_wt103_mae_7")
RATE = "--optim.lr 3e-3 --optim.warmup_steps 5".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return dict(
        mt=write_pairs(folder / "pairs"), mlm=write_plain(folder / "plain"), clm=folder / "plain"
    )


def arguments(task, data, run, steps, *more, preset=None):
    argv = TINY[task].split()
    if task == "mt" and "--data.tokenizer" not in more:
        argv += ["--data.merges", "60"]
    argv += ["--model.name", preset or PRESETS[task], "--data.root", str(data[task])]
    argv += ["--log-every", "1"]
    if "gates" not in more:  # gates alone have a rate of their own
        argv += RATE
    return [*argv, "--max-steps", str(steps), "--output", str(run), *map(str, more)]


def train(task, data, run, steps, *more, preset=None):
    train_text.main(arguments(task, data, run, steps, *more, preset=preset))
    return entries(run)


@pytest.fixture(scope="module")
def first(data, tmp_path_factory):
    """A translation model that others begin with."""
    run = tmp_path_factory.mktemp("first") / "run"
    train("mt", data, run, 3)
    return run


def test_an_elastic_run_is_saved_with_the_largest_share_and_scored_with_three(data, tmp_path):
    run = tmp_path / "run"
    lines = train("mt", data, run, 4, *"--budget_range 0.5 1".split(), preset="mt_moh_50")
    assert {e["active_share"] for e in lines if "loss" in e} >= {0.5, 1.0}
    for model in (moh_vision.load_run(run), TranslationModel.from_pretrained(run)):
        assert moh_vision.head_budget(model)["share"] == 1
    found = results(run)
    assert found["by_share"]["1"] == found["validation"] and len(found["by_share"]) == 3


def check_translations(run, found, report):
    """The scores, translations and gates that a translation run leaves."""
    assert set(found["bleu"]) == {"soft", "argmax", "random"}
    assert len((run / "translations.txt").read_text().splitlines()) == 40
    random = found["bleu"]["random"]["bleu"]  # five draws, as in Peng 2020, table 5
    assert len(random["draws"]) == 5 and len(set(random["draws"])) > 1
    assert random["bleu"] == pytest.approx(sum(random["draws"]) / 5) and random["std"] > 0
    entropy = found["gate_entropy"]
    parts = found["mean_gate_entropy"]
    assert parts["encoder"] == pytest.approx(entropy["encoder.layers.0.self_attn"])
    assert set(parts) == {"encoder", "decoder"}
    assert "Gates of the encoder that read the source" in report
    experts = "expert 1 leaves out head 1, expert 2 head 2, and so on."
    # Of sentences: encoder and cross-attention. Of tokens: the decoder's self-attention.
    for unit, count in (("sentences", 2), ("tokens", 1)):
        words = f"EN is the share of {unit} whose most probable expert is N; {experts}"
        assert report.count(words) == count


@pytest.mark.parametrize("task", ["mt", "mlm", "clm"])
def test_a_run_learns_and_leaves_what_it_promises(task, data, tmp_path, capsys):
    run = tmp_path / "run"
    modes = []
    if task == "mt":
        modes = ["--generate.gate_modes", "[soft, argmax, random]"]
    saves = "--eval-every 20 --save-every 20 --average 2".split()
    lines = train(task, data, run, 40, *saves, *modes)
    steps = [e for e in lines if "loss" in e]
    looks = [e["validation"] for e in lines if "validation" in e]
    assert [e["step"] for e in steps] == list(range(1, 41))
    first, last = (sum(e["nll"] for e in part) / 5 for part in (steps[:5], steps[-5:]))
    assert last < 0.8 * first and looks[1]["loss"] < looks[0]["loss"]
    assert all(e["tokens_per_s"] > 0 and e["peak_memory_mib"] > 100 for e in steps)
    if task == "mlm":  # one module
        assert steps[0]["moa_balance_loss"] == pytest.approx(1, abs=0.2)
        assert steps[0]["z_loss"] > 0
    found = results(run)
    assert found["step"] == 40 and found["averaged_steps"] == [40, 20]
    assert found["validation"]["perplexity"] == pytest.approx(math.exp(found["validation"]["loss"]))
    assert len(found["gate_entropy"]) == (3 if task == "mt" else 1)
    # 4 experts: of MAE heads left out, of MoA as they are.
    assert all(0 < entropy <= math.log(4) + 1e-4 for entropy in found["gate_entropy"].values())
    report = (run / "gates.md").read_text()
    for name, entropy in found["gate_entropy"].items():
        assert f"| {name} | {entropy:.2f} | 1.39 |" in report
    assert task != "mt" or "`_fünf`" in report
    said = capsys.readouterr().out
    parameters = sum(p.numel() for p in moh_vision.load_run(run).parameters())
    file = "val.de" if task == "mt" else "valid.txt"
    assert f"validation: {data[task]}/{file}" in said  # how data.val was found
    shown = rf"^{PRESETS[task]} with hidden_size 32, .*: {parameters:,} parameters, "
    assert len(re.findall(shown, said, re.M)) == 1
    assert ("heads active (100.0 %); MAE: 4 experts of 3 heads each\n" in said) == (task != "mlm")
    averaged = found["averaged_loss"]
    last = looks[1]["loss"]
    losses = f"{averaged:.4f} with the average of steps 20, 40, {last:.4f} with the last weights"
    assert f"validation loss: {losses}; the scores are of model.safetensors\n" in said
    assert found["validation"]["loss"] == pytest.approx(last) and last < averaged
    assert found["weights"] == "model.safetensors"
    assert "average 2: its checkpoints, save_every 20 apart, reach 20 of the 40 steps back" in said
    assert "set save_every to at most 8, or average 1\n" in said
    files, _, following = said.partition("run has ")[2].partition("\nnext\n")
    named = set(files.split(", "))
    assert {"averaged.safetensors", "tokenizer.json", "gates.md"} <= named
    assert "moh_vision gates" in following
    assert ("translations.txt" in named) == (task == "mt")
    assert ("val, as the papers count: BLEU" in said) == (task == "mt")
    assert (run / "head_load.json").exists() == (task == "mlm")  # MAE runs every head
    if task == "mlm":
        load = HeadLoad.read(run / "head_load.json")
        assert load.groups == {"text": ["val"]} and load.runs()[0][0, -1] > 0
        assert load.share()[0].sum() == pytest.approx(2)  # of 4 experts
    assert Vocabulary.load(run / "tokenizer.json").specials == (5 if task == "mlm" else 4)
    if task == "mt":
        check_translations(run, found, report)

    # The folder of a run is one of transformers' too.
    weights = load_file(run / "model.safetensors")
    model_class = dict(mt=TranslationModel, mlm=MaskedLMModel, clm=CausalLMModel)[task]
    for model in (
        model_class.from_pretrained(run).eval(),
        moh_vision.load_run(run),
        moh_vision.load_run(run / "checkpoints" / "step_40"),
    ):
        state = model.state_dict()
        assert type(model) is model_class and not model.training
        assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())


def test_the_better_of_the_average_and_the_last_weights_is_opened(data, tmp_path, capsys):
    """The average wins where the learning rate is too high at the end, and is what opens and publishes the run."""
    run = tmp_path / "run"
    few = "--save-every 1 --average 6 --keep-checkpoints 6 --optim.schedule constant --optim.lr 0.05".split()
    train("clm", data, run, 40, *few)
    found = results(run)
    said = capsys.readouterr().out
    assert "average 6: its checkpoints" not in said  # 5 of 40 steps back
    assert found["weights"] == "averaged.safetensors"
    assert found["averaged_loss"] < found["last_loss"]
    assert found["validation"]["loss"] == pytest.approx(found["averaged_loss"])
    opened = moh_vision.open_run(run)
    assert opened.metadata["weights"] == str(run / "averaged.safetensors")
    assert opened.scores()["loss"] == pytest.approx(found["averaged_loss"], rel=1e-4)
    assert moh_vision.open_run(run, "model").metadata["weights"] == str(run / "model.safetensors")


def test_with_patience_an_average_is_scored_only_if_it_is_the_best(data, tmp_path, capsys):
    worse = "--optim.schedule constant --optim.warmup_steps 0 --optim.lr 1".split()
    often = "--eval-every 1 --patience 2 --save-every 1 --average 2".split()
    run = tmp_path / "run"
    train("clm", data, run, 9, *often, *worse)
    found = results(run)
    said = capsys.readouterr().out
    assert found["weights"] == "best.safetensors" and found["best_step"] < found["step"]
    assert found["validation"]["loss"] == pytest.approx(found["best_loss"])
    words = f"{found['best_loss']:.4f} with those of step {found['best_step']}; the scores are"
    assert words in said


def test_the_mean_of_the_newest_whole_checkpoints(data, tmp_path):
    run = tmp_path / "run"
    train("mt", data, run, 4, "--save-every", 1, "--keep-checkpoints", 4)
    files = [run / "checkpoints" / f"step_{step}" / "model.safetensors" for step in (4, 3, 2)]
    saved = [read_safetensors(file)[0] for file in files]
    mean, steps = average_checkpoints(run, 3)
    assert steps == [4, 3, 2] and mean.keys() == saved[0].keys()
    # These two are tied: they stand there once.
    stored = load_file(run / "model.safetensors").keys()
    assert not {"output.weight", "decoder.embedding.weight"} & stored
    for name, tensor in mean.items():
        if tensor.is_floating_point():
            expected = sum(weights[name].double() for weights in saved) / 3
        else:  # counts of the gates' batch norms: the newest
            expected = saved[0][name]
        torch.testing.assert_close(tensor, expected.to(tensor.dtype), rtol=1e-6, atol=1e-7)
    files[0].write_bytes(files[0].read_bytes()[:-1])  # damaged ones are passed over
    assert average_checkpoints(run, 2)[1] == [3, 2] and average_checkpoints(run, 9)[1] == [3, 2, 1]
    refuse(f"{tmp_path}/none/checkpoints whole", lambda: average_checkpoints(tmp_path / "none", 2))


@pytest.mark.parametrize("task", ["mt", "mlm", pytest.param("clm", marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(task, data, tmp_path):
    # Stopped between two saves: that checkpoint is none of those that are averaged.
    options = "--optim.accumulation 2 --eval-every 3 --save-every 3 --average 3".split()
    options += ["--keep-checkpoints", 3]
    train(task, data, tmp_path / "whole", 8, *options)
    train(task, data, tmp_path / "run", 5, *options)
    train(task, data, tmp_path / "run", 8, *options)
    for weights in ("model.safetensors", "averaged.safetensors"):
        assert same(tmp_path / "whole" / weights, tmp_path / "run" / weights)
    assert results(tmp_path / "run")["averaged_steps"] == [8, 6, 3]
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "run")
    logs = [logged(tmp_path / name) for name in ("whole", "run")]
    for entry in (*logs[0], *logs[1]):
        del entry["tokens_per_s"], entry["peak_memory_mib"]
    assert logs[0] == logs[1]


def test_a_stop_while_scoring_is_told_and_translating_shows_how_far_it_is(
    tmp_path, monkeypatch, hours_pass, capfd
):
    hours_pass()
    folder = write_pairs(tmp_path / "pairs")
    run = tmp_path / "run"
    for file in (folder / "train.de", folder / "val.de"):
        file.write_text(file.read_text().title())
    options = "--data.lowercase=true --data.source=en --data.target=de".split()
    argv = ["mt", dict(mt=folder), run, 2, *options]

    def stop(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(TranslationModel, "generate", stop)
        train(*argv)
    assert ended.value.code == 143 and not (run / "results.json").exists()
    error = capfd.readouterr().err
    assert "SIGTERM: stopped after all 2 steps, which are saved; the same command goes on" in error
    train(*argv)
    said = capfd.readouterr().out
    assert "val, sacreBLEU's default, lower-cased data: BLEU" in said and "case:mixed" in said
    assert "BLEU of 40 pairs of val, lower-cased data" in read_run(run).scored_on
    assert "val: translating 40 sentences\n" in said and "translating: 1 of 1 steps, " in said
    assert results(run)["step"] == 2
    text = moh_vision.open_run(run).text()
    lines = (folder / "val.de").read_text().splitlines()
    assert text.references("val", text.val) == [line.lower() for line in lines] != lines


def test_stops_early_and_stays_stopped(data, tmp_path, capsys):
    # A rate at which float32 has the same losses for ever.
    options = "--eval-every 2 --patience 2 --optim.lr 1e-12 --optim.warmup_lr 0".split()
    train("clm", data, tmp_path / "run", 60, *options, preset="clm_wt103_base")
    found = results(tmp_path / "run")
    assert found["step"] == 6 and found["best_step"] == 2 and found["weights"] == "best.safetensors"
    assert (tmp_path / "run" / "best.safetensors").exists()
    assert "without a lower loss" in capsys.readouterr().out
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    train("clm", data, tmp_path / "run", 60, *options, preset="clm_wt103_base")
    assert results(tmp_path / "run")["step"] == found["step"]
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


def test_fine_tuning_sets_and_the_runs_vocabulary(first, tmp_path):
    other = write_pairs(tmp_path / "other", train=60, val=10, test=5, seed=5)
    before = load_file(first / "model.safetensors")
    for which in ("gates", "gates_and_outputs"):
        run = tmp_path / which
        train("mt", dict(mt=other), run, 2, "--init-from", first, "--train_only", which)
        assert (run / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()
        after = load_file(run / "model.safetensors")
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        allowed = {name for name in after if ".router." in name}
        if which == "gates_and_outputs":
            allowed |= {name for name in after if name.endswith("proj.weight")}
        assert changed and changed <= allowed
        assert any(".router." in name for name in changed)
        buffers = ("running", "tracked")
        learned = [name for name in allowed if not any(word in name for word in buffers)]
        assert results(run)["trained_parameters"] == sum(after[name].numel() for name in learned)


def test_a_line_says_if_weights_begin_with_other_heads(data, first, tmp_path, capsys):
    """Plain attention has no weight whose shape says the number of heads."""
    dense = dict(preset="mt_transformer_base")
    train("mt", data, tmp_path / "source", 1, **dense)
    heads = "--model.kwargs.num_attention_heads"
    for name, count in (("same", 4), ("other", 2)):
        capsys.readouterr()
        train(
            "mt",
            data,
            tmp_path / name,
            1,
            "--init-from",
            tmp_path / "source",
            heads,
            count,
            **dense,
        )
        said = f"init_from: {tmp_path}/source was trained with 4 heads, this model has 2"
        assert (said in capsys.readouterr().out) == (count == 2)


def test_without_a_step_what_is_loaded_is_scored(data, first, tmp_path, capsys):
    """NOFT of Peng 2020, table 7."""
    run = tmp_path / "run"
    for _ in range(2):  # the same command goes on, with nothing to do
        train("mt", data, run, 0, "--init-from", first)
        found = results(run)
        before = results(first)
        assert found["step"] == 0
        assert found["bleu"] == before["bleu"]
        assert found["validation"] == before["validation"]
        assert same(run / "model.safetensors", first / "model.safetensors")
        assert "trained_parameters" not in found
    assert (run / "translations.txt").read_text() == (first / "translations.txt").read_text()
    opened = moh_vision.open_run(run)
    batches = opened.text().eval_batches(opened.data("val"), 0, 1)
    assert opened.mean_loss(batches) == pytest.approx(found["validation"]["loss"])
    error = refusals.refused(capsys, train_text.main, *arguments("mt", data, tmp_path / "other", 0))
    refusals.assert_says(error, "max_steps 0 init_from model.pretrained")
    assert not (tmp_path / "other").exists()


def test_mistakes(data, first, tmp_path, capsys):
    def assert_refused(facts, task, *more, preset=None):
        argv = arguments(task, data, tmp_path / "run", 2, *more, preset=preset)
        error = refusals.refused(capsys, train_text.main, *argv)
        assert error.startswith("train_text.py: error: ") and not (tmp_path / "run").exists()
        refusals.assert_says(error, facts)

    for preset, facts in (
        ("mt_mae_77", "'mt_mae_77' mt_mae_7"),
        ("vit_base", "model.name 'vit_base' mt_ mlm_ clm_"),
        ("mt_nobcd", "model.name mt_nobcd block_descent.mode joint"),
    ):
        assert_refused(facts, "mt", preset=preset)
    assert_refused("label_smoothing 0.1 adaptive 0", "clm", "--label_smoothing", 0.1)
    facts = f"data.root {data['mt']} test.fr test.de"
    assert_refused(facts, "mt", "--data.target", "fr", "--data.train", "test")
    assert_refused("data.max_length 500 data.max_tokens 200", "mt", "--data.max_length", "500")
    assert_refused("average 5 keep_checkpoints 2", "mt", "--average", "5")
    dense = "mt_transformer_base"
    assert_refused("train_only gates MAE mae soft", "mt", "--train_only", "gates", preset=dense)
    other = train_vocabulary(["a b"], 40)
    other.save(tmp_path / "other" / "tokenizer.json", TranslationInputs.form)
    other_vocabulary = ["--init-from", first, "--data.tokenizer", tmp_path / "other"]
    assert_refused(f"init_from {first} vocabulary data.tokenizer", "mt", *other_vocabulary)
    modes = ["--generate.gate_modes", "[soft, argmax]"]
    assert_refused("generate.gate_modes argmax MAE [soft]", "mt", *modes, preset=dense)
    facts = "generate.gate_modes argmax uniform random"
    assert_refused(facts, "mt", *modes, preset="mt_uni_mae_7")
    assert_refused("compile True mae", "mt", "--compile", "true")
    for task, option, facts in (
        ("clm", "--data.train=valid", f"data.val val {data['clm']}/valid.txt data.train valid"),
        ("mt", "--data.test=train", f"data.test train {data['mt']}/train.de data.train"),
    ):
        assert_refused(facts, task, option)
    assert_refused("model.kwargs vocab_size 99 320", "mt", "--model.kwargs.vocab_size", 99)


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, preset, option",
    [
        ("mt", "mt_mae_7", "--mixed_precision=bf16"),
        ("mlm", "mlm_moa_2K4E16D", "--mixed_precision=bf16"),
        ("clm", "clm_wt103_mae_7", "--mixed_precision=bf16"),
        ("mt", "mt_moh_75", "--compile=true"),
        ("mt", "mt_moh_75", "--compile=blocks"),
        ("mlm", "mlm_moa_2K4E16D", "--compile=true"),
    ],
)
def test_bfloat16_and_compiled_runs_learn_alike(task, preset, option, data, tmp_path):
    losses = []
    for name, more in (("plain", []), ("other", [option])):
        # With a process of its own, because accelerate's precision is that of the first Accelerator.
        more = ["--model.kwargs.dropout", 0, *more]
        argv = arguments(task, data, tmp_path / name, 30, *more, preset=preset)
        command = [sys.executable, ROOT / "train_text.py", *argv]
        subprocess.run(command, check=True, capture_output=True, text=True)
        losses.append([line["nll"] for line in logged(tmp_path / name)])
    assert losses[1][0] == pytest.approx(losses[0][0], rel=0.02) and losses[1] != losses[0]
    assert sum(losses[1][-5:]) == pytest.approx(sum(losses[0][-5:]), rel=0.15)
    assert sum(losses[1][-5:]) < 0.85 * sum(losses[1][:5])


def test_a_run_goes_on_with_its_own_text_and_vocabulary_or_not_at_all(tmp_path, capsys):
    folder = write_pairs(tmp_path / "pairs")
    run = tmp_path / "run"
    train("mt", dict(mt=folder), run, 2)
    before = {
        name: (run / name).read_bytes() for name in ("tokenizer.json", "config.json", "text.json")
    }
    write_pairs(folder, seed=4)

    def refused(*more):
        argv = arguments("mt", dict(mt=folder), run, 4, *more)
        error = refusals.refused(capsys, train_text.main, *argv)
        assert {name: (run / name).read_bytes() for name in before} == before
        return error

    refusals.assert_says(refused(), f"data.root {folder} train {run} --fresh")
    write_pairs(folder)
    more = ["--optim.accumulation", 2, "--allow-change", "optim.accumulation"]
    refusals.assert_says(refused(*more), f"{run} micro-batches 1 optim.accumulation 2")
    train("mt", dict(mt=folder), run, 4, "--generate.batch_size", 16)  # how it is scored may change
    assert results(run)["step"] == 4


@pytest.mark.parametrize(
    "preset, mixing",
    [
        ("mt_moa_2K4E16D", None),
        ("mt_mae_6", "the soft gate mixes"),
        ("mt_uni_mae_6", "an even mixture takes"),
    ],
)
def test_dry_run(preset, mixing, data, tmp_path, capsys):
    train_text.main([*arguments("mt", data, tmp_path / "run", 2, preset=preset), "--dry-run"])
    out = capsys.readouterr().out
    assert "parameters:" in out and not (tmp_path / "run").exists()
    if mixing:
        line = f"MAE: 6 experts of 2 heads each; {mixing} all of them, so every head runs\n"
        assert out.count(line) == 1
    else:
        assert "active heads: 6 of 12" in out and "MAE" not in out
