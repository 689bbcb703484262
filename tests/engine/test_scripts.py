"""The scripts as a user runs them, on the quickstart's configurations made small."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from pictures import write_folder
from PIL import Image
from processes import Command
from refusals import refused
from safetensors.torch import load_file
from small_runs import entries, logged, results, same

from moh_vision.classification import train as train_cls
from moh_vision.classification import validate
from moh_vision.data.sources import Digits
from moh_vision.diffusion import sample
from moh_vision.diffusion import train as train_dit
from moh_vision.diffusion.config import PreviewConfig
from moh_vision.diffusion.image_parts import ImageParts
from moh_vision.diffusion.objectives import HybridLoss
from moh_vision.diffusion.previews import Previews
from moh_vision.engine.checkpoint import export_weights
from moh_vision.engine.step_folders import damage
from moh_vision.models.head_load import HeadLoad
from moh_vision.models.weights import from_run

SMALL = "--optim.batch_size 16 --optim.warmup_steps 0 --log-every 1 --model.depth 2 --save-every 4".split()
STEPS = 30
RECIPE = (
    "--data.augment imagenet --data.auto_augment rand-m9-mstd0.5-inc1 --data.erase_prob 0.25 "
    "--data.repeats 3 --mix.mixup 0.8 --mix.cutmix 1 --label_smoothing 0.1 --optim.layer_decay 0.9"
).split()
MORE = {
    "cls": ["--model.kwargs", "{drop_rate: 0.1, drop_path_rate: 0.1, pos_embed_std: 0.5}", *RECIPE],
    "dit": ["--optim.accumulation", "2", "--mixed_precision", "bf16"],
}


def arguments(kind, output, *more):
    argv = ["--config", f"configs/quickstart/{kind}.yaml", "--output", str(output), "--max-steps", str(STEPS)]
    return [*argv, *SMALL, *MORE[kind], *more]


def start(kind, output, *more):
    main = dict(cls=train_cls, dit=train_dit)[kind].main
    return Command(main, arguments(kind, output, *more), output.with_suffix(".log"))


def finish(command):
    assert command.wait(300) == 0, command.said()
    return command.said()


def kill_after(steps, processes):
    """SIGKILL each run once it has logged so many steps. processes: folder of the run -> process."""
    alive, deadline = dict(processes), time.monotonic() + 120
    while alive and time.monotonic() < deadline:
        for run, process in list(alive.items()):
            file = run / "metrics.jsonl"
            if process.poll() is not None:
                del alive[run]
            elif file.exists() and file.read_text().count("\n") >= steps:
                process.kill()
        time.sleep(0.005)
    for process in processes.values():
        assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each training undisturbed, and killed between checkpoints and started again by the same command.

    The first is started as a user does, the others are forks of a process that has imported everything. The killed one first has a loader process, then none: that may not matter either.
    """
    folder = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "train_cls.py", *arguments("cls", folder / "cls")]
    how = dict(cwd=ROOT, env=dict(os.environ, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true"), timeout=300)
    dit, cls = start("dit", folder / "dit"), subprocess.run(command, **how, capture_output=True, text=True)
    assert cls.returncode == 0, cls.stderr
    printed = dict(cls=cls.stdout, dit=finish(dit))
    kill_after(11, {folder / f"{k}2": start(k, folder / f"{k}2", "--data.workers", "1") for k in MORE})
    again = {kind: start(kind, folder / f"{kind}2", "--data.workers", "0") for kind in MORE}
    return folder, printed, {kind: finish(process) for kind, process in again.items()}


@pytest.mark.parametrize("kind", ["cls", "dit"])
def test_training_writes_what_it_promises(runs, kind):
    folder, printed, _ = runs
    run = folder / kind
    promised = {"config.yaml", "metrics.jsonl", "model.safetensors", "ema.safetensors", "checkpoints"}
    assert promised <= {p.name for p in run.iterdir()}
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_28", "step_30"]
    steps = logged(run)
    assert [e["step"] for e in steps] == list(range(1, STEPS + 1))
    for e in steps:
        assert e["loss"] == pytest.approx(e["task_loss"] + 0.01 * e["balance_loss"], abs=1e-4)
        assert 0 < e["balance_share"] < 0.5
        assert e["balance_share"] == pytest.approx(0.01 * e["balance_loss"] / e["loss"], abs=1e-5)
        assert e["images_per_s"] > 0 and e["peak_memory_mib"] > 100 and e["skipped"] == 0
        active = sum(sum(layer) for layer in e["head_usage"])
        assert active == pytest.approx(12, abs=0.02)  # 75 % of 2 layers x 8 heads
    assert "img/s, peak" in printed[kind]


@pytest.mark.parametrize("kind", ["cls", "dit"])
def test_killed_and_run_again_gives_the_same_bits(runs, kind):
    folder, _, resumed = runs
    assert "resuming" in resumed[kind]
    for name in ("model.safetensors", "ema.safetensors"):
        assert same(folder / kind / name, folder / f"{kind}2" / name)
    losses = [[e["loss"] for e in logged(folder / name)] for name in (kind, f"{kind}2")]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS


def test_validation_is_reported(runs):
    run = runs[0] / "cls"
    found = results(run)
    assert found["images"] == 355 and 0 <= found["top1"] <= found["top5"] <= 100


def test_a_changed_configuration_is_refused(runs, capsys):
    config = ROOT / "configs" / "quickstart" / "cls.yaml"
    argv = ["--config", config, "--output", runs[0] / "cls", *SMALL, "--optim.lr", "0.5"]
    error = refused(capsys, train_cls.main, *argv)
    assert "another configuration" in error and "optim.lr: 0.003 -> 0.5" in error and "--allow-change" in error
    config = runs[0] / "cls" / "config.yaml"
    before, argv = config.read_text(), ["--config", config, "--model.depth", 3, "--allow-change", "model.depth"]
    assert "cannot be loaded into this model" in refused(capsys, train_cls.main, *argv)
    assert config.read_text() == before, "the run's own command still goes on"


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--model.head_budget", "1.5"], "head_budget 1.5 is not understood"),
        (["--model.head_bugdet", "0.5"], "unknown key 'model.head_bugdet', did you mean 'model.head_budget'?"),
        (["--data.root", "/no/where"], "data.root /no/where: no such folder"),
        (["--data.img_size", "1000000"], "data.img_size 1000000: a batch of 128 such images takes 476,837 GiB, this"),
        (["--model.embed_dim", "30000000", "--model.head_budget", "1"], "cannot be made: "),
        (["--data.img_size", "9"], "img_size 9 is not a multiple of patch_size 2"),
        (["--model.name", "moh_vit_smal"], "'moh_vit_smal' is not a registered model, did you mean moh_vit_"),
        (["--model.name", "resnet18"], "resnet18"),
        (["--model.kwargs", "{headz: 3}"], "headz"),
        (["--optim.batch_size", "7", "--optim.accumulation", "2"], "batch_size 7 is not a multiple of accumulation 2"),
        (["--init-from", "moh_vit"], "init_from moh_vit: No pretrained weights"),
        (["--calibrate_images", "8"], "calibrate_images 8 needs init_from"),
        (["--model.name", "moh_dit_small_patch2_75", "--model.kwargs", "null"], "is a diffusion model, a classifier"),
        (["--seed", str(2**63)], "is out of range: at least 0 and at most 9223372036854775807"),
        (["--init-from", "/no/where"], "init_from /no/where: neither a run"),
        (["--config", "/no/where.yaml"], "--config /no/where.yaml: no such file"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(tmp_path, capsys, argv, words):
    config = ROOT / "configs" / "quickstart" / "cls.yaml"
    error = refused(capsys, train_cls.main, "--config", config, "--output", tmp_path / "run", *argv)
    assert words in error
    assert not list(tmp_path.iterdir())


def test_a_model_without_routing_is_refused(tmp_path, capsys):
    argv = "--model.name vit_tiny_patch16_224 --data.img_size 16 --output".split()
    assert "'vit_tiny_patch16_224' has no head routing" in refused(capsys, train_cls.main, *argv, tmp_path / "run")


@pytest.mark.parametrize(
    "main, name, words",
    [
        (train_dit.main, "DiT-S/2", "is not a registered model, did you mean dit_small_patch2?"),
        (
            train_dit.main,
            "moh_vit_tiny_patch16_224",
            "is a classifier model, a diffusion model is needed, did you mean",
        ),
        (
            train_cls.main,
            "dit_small_patch2",
            "is a diffusion model, a classifier model is needed, did you mean moh_vit_",
        ),
        (train_cls.main, "vit_small_patch16_224", "has no head routing; a dense ViT is moh_vit_*"),
    ],
)
def test_names_of_other_models_are_refused_with_names_that_fit(main, name, words, capsys):
    assert f"model.name '{name}' {words}" in refused(capsys, main, "--model.name", name, "--data.root", "digits")


def test_diffusion_mistakes(tmp_path, capsys):
    config, root = ROOT / "configs" / "quickstart" / "dit.yaml", write_folder(tmp_path / "images")
    error = refused(capsys, train_dit.main, "--config", config, "--output", tmp_path / "run", "--data.root", root)
    assert f"data.img_size is needed for {root}" in error
    wrong = ["--model.name", "moh_vit_tiny_patch16_224", "--model.kwargs", "{patch_size: 2}"]
    error = refused(capsys, train_dit.main, "--output", tmp_path / "run", *wrong)
    assert "learn_sigma" in error or "a diffusion model is needed" in error


@pytest.mark.parametrize("main, config", [(train_cls.main, "cls"), (train_dit.main, "dit")])
def test_dry_run_prints_and_stops(tmp_path, capsys, main, config):
    main(f"--config {ROOT}/configs/quickstart/{config}.yaml --output {tmp_path}/run --dry-run".split())
    out = capsys.readouterr().out
    assert "active heads: 24 of 32 (75.0 %)" in out and "parameters:" in out and "MACs:" in out
    assert not (tmp_path / "run").exists()


def test_sampling_writes_grid_images_and_scores(runs, tmp_path, capsys):
    folder = runs[0]

    def run(out, *more):
        args = f"--checkpoint {folder}/dit --num-images 70 --sampler ddim --steps 4 --cfg-scale 1.5 --batch-size 35 --out {out}".split()
        sample.main([*args, *more])
        return capsys.readouterr().out

    out = run(
        tmp_path / "a.npz", "--grid", str(tmp_path / "grid.png"), "--head-load", str(tmp_path / "load.json"), "--score", "digits",
        "--extractor", str(folder / "cls"),
    )  # fmt: skip
    assert "recognised as the class asked for" in out and "not Inception, not FID" in out
    first = np.load(tmp_path / "a.npz")
    assert first["arr_0"].shape == (70, 8, 8, 1) and first["arr_0"].dtype == np.uint8
    assert first["arr_1"].tolist() == [i % 10 for i in range(70)]
    grid_of(tmp_path / "grid.png", columns=7, rows=10)
    assert HeadLoad.read(tmp_path / "load.json").choosing()
    scores = json.loads((folder / "dit" / "scores.json").read_text())
    assert 0 <= scores["recognised"] <= 1 and scores["frechet_distance"] > 0 and scores["num_reference"] == 355

    run(tmp_path / "b.npz")
    assert np.array_equal(np.load(tmp_path / "b.npz")["arr_0"], first["arr_0"])
    run(tmp_path / "c.npz", "--seed", "1")
    assert not np.array_equal(np.load(tmp_path / "c.npz")["arr_0"], first["arr_0"])
    run(tmp_path / "folder", "--weights", "model")
    assert len(list((tmp_path / "folder").glob("*.png"))) == 70
    assert "exists; give another path, or --overwrite" in refused(capsys, lambda argv: run(*argv), tmp_path / "folder")


def test_scores_are_not_overwritten_and_a_folder_is_emptied(runs, tmp_path, capsys):
    argv = f"--checkpoint {runs[0]}/dit --sampler ddim --steps 2 --out {tmp_path}/out --overwrite true --num-images".split()
    sample.main([*argv, "5"])
    sample.main([*argv, "2"])
    assert len(list((tmp_path / "out").iterdir())) == 2
    scored = [*argv[:6], *f"--score-file {tmp_path}/s.json --score digits --extractor {runs[0]}/cls".split()]
    sample.main(scored)
    assert "s.json exists; give another path" in refused(capsys, sample.main, *scored)


def grid_of(path, columns, rows):
    with Image.open(path) as grid:
        assert grid.height == rows * 50 + 2
        assert 0 < grid.width - (columns * 50 + 2) < 40, "the names of the classes"


def test_a_grid_of_twelve_classes_has_one_class_a_row(tmp_path):
    from moh_vision.engine.checkpoint import export_weights
    from moh_vision.models.weights import create

    arguments = dict(img_size=8, in_chans=3, num_classes=12, embed_dim=16, depth=1, num_heads=2, head_budget=1.0)
    name = "moh_dit_small_patch2_75"
    about = dict(
        architecture=name,
        arguments=arguments,
        classes=[str(c) for c in range(12)],
        config=dict(kind="diffusion", label_drop=0),
    )
    export_weights(create(name, "diffusion", **arguments), tmp_path / "model.safetensors", about)
    argv = f"--checkpoint {tmp_path} --sampler ddim --steps 1 --num-images 30 --grid {tmp_path}/grid.png".split()
    sample.main(argv)
    grid_of(tmp_path / "grid.png", columns=2, rows=10)  # two of each of the first ten classes
    with pytest.raises(SystemExit):
        sample.main([*argv, "--overwrite", "true", "--cfg-scale", "2"])  # trained without dropping labels


def test_sampling_mistakes(runs, tmp_path, capsys):
    folder, drawn = runs[0], ["--grid", tmp_path / "never.png", "--checkpoint"]
    assert "no such file" in refused(capsys, sample.main, *drawn, tmp_path / "nothing.safetensors")
    assert "holds no ema.safetensors or model.safetensors" in refused(capsys, sample.main, *drawn, tmp_path)
    error = refused(capsys, sample.main, *drawn, folder / "cls")
    assert "is of a classifier model, moh_vit_tiny_patch16_224, of train_cls.py; give a run of train_dit.py" in error
    error = refused(capsys, sample.main, *drawn, folder / "ditt")
    assert f"--checkpoint {folder}/ditt: no such file or folder, did you mean {folder}/dit?" in error
    assert "loading" not in capsys.readouterr().out
    text = dict(architecture="mt_transformer_base", arguments={}, vocabularies=["a", "a"])
    export_weights(torch.nn.Linear(2, 2), tmp_path / "text" / "model.safetensors", text)
    for name in ("config.json", "config.yaml"):
        (tmp_path / "text" / name).write_text("{}")
    error = refused(capsys, sample.main, *drawn, tmp_path / "text")
    assert "is of a text model, mt_transformer_base, of train_text.py; give a run of train_dit.py" in error
    (tmp_path / "taken").write_text("precious")
    checkpoint = ["--checkpoint", folder / "dit"]
    taken = ["--out", tmp_path / "taken", "--overwrite", "true"]
    assert "is a file, expected a folder" in refused(capsys, sample.main, *checkpoint, *taken)
    assert "a path that ends in .png" in refused(capsys, sample.main, *checkpoint, "--grid", tmp_path / "grid")
    assert (tmp_path / "taken").read_text() == "precious"
    (tmp_path / "torn.safetensors").write_bytes((folder / "dit" / "ema.safetensors").read_bytes()[:1000])
    assert "not a readable .safetensors" in refused(capsys, sample.main, *drawn, tmp_path / "torn.safetensors")


def test_init_from_a_run_remakes_the_head_and_names_it(runs, tmp_path, capsys):
    from moh_vision.models.weights import create, from_run, init_from

    source, about = from_run(str(runs[0] / "cls"), "classifier")

    def other(**changes):
        return create(about["architecture"], "classifier", **{**about["arguments"], **changes})

    model = other(num_classes=7, img_size=12)
    init_from(model, str(runs[0] / "cls"))
    out = capsys.readouterr().out
    assert "head.weight is made anew, [10, 64] -> [7, 64]" in out
    assert torch.equal(model.blocks[1].mlp.fc1.weight, source.blocks[1].mlp.fc1.weight)
    assert model.pos_embed.shape == (1, 37, 64) and model(torch.zeros(1, 1, 12, 12)).shape == (1, 7)

    with pytest.raises(ValueError, match="does not fit .* are unexpected .*router"):
        init_from(other(head_budget=None, router="dense"), str(runs[0] / "cls"))
    with pytest.raises(ValueError, match="has shape .*, the model needs"):
        init_from(other(embed_dim=128), str(runs[0] / "cls"))


@pytest.mark.parametrize("main, kind", [(train_cls.main, "cls"), (train_dit.main, "dit")])
def test_a_dry_run_loads_the_weights_that_the_run_starts_from(runs, tmp_path, capsys, main, kind):
    given = (
        f"--config={ROOT}/configs/quickstart/{kind}.yaml --output={tmp_path}/run --dry-run --init-from {runs[0]}/{kind}"
    )
    main([*given.split(), "--model.depth=2", "--data.img_size=16"])
    out = capsys.readouterr().out
    assert 0 < out.index("init_from: pos_embed is ") < out.index("active heads: 12 of 16")
    assert f"init_from: weights of {runs[0]}/{kind}/ema.safetensors\n" in out
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main([*given.split(), "--model.depth=2", "--data.img_size=16", "--model.embed_dim=32"])
    out, error = capsys.readouterr()
    assert " has shape [" in error and ", the model needs [" in error and error.count("\n") == 1
    assert "init_from" not in out and not (tmp_path / "run").exists()


def test_checkpoints_are_sampled_validated_and_started_from(runs, tmp_path, capsys):
    cls, dit = (runs[0] / kind / "checkpoints" / "step_28" for kind in ("cls", "dit"))
    argv = f"--checkpoint {dit} --num-images 10 --sampler ddim --steps 2 --score digits --extractor {cls}".split()
    sample.main(argv)
    assert (runs[0] / "dit" / "scores_step_28.json").exists() and damage(dit, 28) is None
    capsys.readouterr()
    validate.main(["--checkpoint", str(cls)])
    assert f"{cls / 'ema.safetensors'} (moh_vit" in capsys.readouterr().out
    small = ["--config", str(ROOT / "configs" / "quickstart" / "cls.yaml"), *SMALL, *MORE["cls"], "--max-steps", "1"]
    train_cls.main([*small, "--output", str(tmp_path / "run"), "--init-from", str(cls)])
    assert (tmp_path / "run" / "results.json").exists()
    empty = tmp_path / "run" / "checkpoints" / "step_1"
    (empty / "model.safetensors").unlink()
    (empty / "ema.safetensors").unlink()
    error = refused(capsys, sample.main, "--checkpoint", empty, "--grid", tmp_path / "never.png")
    assert f"{empty} holds no ema.safetensors or model.safetensors; a run writes them at its checkpoints" in error


@pytest.mark.slow
def test_two_processes_train_the_same_model(tmp_path):
    """float32, 5 steps: the data are the same, the sums are ordered differently."""
    for kind in ("cls", "dit"):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29533"]
        args = [f"train_{kind}.py", "--config", f"configs/quickstart/{kind}.yaml", "--max-steps", "5", *SMALL]
        env = dict(os.environ, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true")
        how = dict(cwd=ROOT, env=env, check=True, timeout=300)
        subprocess.run([*torchrun, *args, "--output", str(tmp_path / f"{kind}2")], **how)
        subprocess.run([sys.executable, *args, "--output", str(tmp_path / kind)], **how)
        one, two = (load_file(tmp_path / k / "model.safetensors") for k in (kind, f"{kind}2"))
        for name in one:
            torch.testing.assert_close(two[name], one[name], rtol=0, atol=2e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cls", "dit"])
def test_cifar10_loss_falls_in_200_steps(cifar10, tmp_path, kind):
    subprocess.run(
        [sys.executable, f"train_{kind}.py", "--config", f"configs/{kind}/cifar10_small_cpu.yaml", "--data.root", cifar10, "--output", str(tmp_path / "run")],
        cwd=ROOT, check=True, timeout=900,
    )  # fmt: skip
    losses = [e["task_loss"] for e in logged(tmp_path / "run")]
    assert np.mean(losses[-3:]) < 0.85 * losses[0]


def test_previews_draw_the_same_noise_and_change_nothing(tmp_path, capsys):
    """Weights are those of a run without; the last picture is drawn again, to the bit, from the exported weights."""
    schedule = ["--optim.schedule", "cosine", "--optim.warmup_steps", "0"]
    common = ["--config", "configs/quickstart/dit.yaml", "--max-steps", "4", *SMALL, *schedule]
    drawn = ["--preview.every", "2", "--preview.images", "12", "--preview.columns", "6", "--preview.steps", "3"]
    train_dit.main([*common, "--output", str(tmp_path / "plain")])
    train_dit.main([*common, "--output", str(tmp_path / "drawn"), *drawn])
    for name in ("model", "ema"):
        assert same(*(tmp_path / run / f"{name}.safetensors" for run in ("plain", "drawn")))
    pictures = [np.asarray(Image.open(tmp_path / "drawn" / "previews" / f"step_{n}.png")) for n in (2, 4)]
    assert pictures[0].shape == pictures[1].shape and (pictures[0] != pictures[1]).any()

    model, _ = from_run(str(tmp_path / "drawn"), "diffusion")
    config = PreviewConfig(every=1, images=12, columns=6, steps=3)
    logged = []
    log = SimpleNamespace(enabled=True, say=logged.append, pictures=lambda *what: logged.append(what), pause=int)
    run = SimpleNamespace(log=log, done=4, ema=None, folder=tmp_path / "again")
    again, inputs = run.folder / "previews" / "step_4.png", SimpleNamespace(source=Digits("train"), space=None)
    previews = Previews(config, inputs, model, HybridLoss())
    previews.draw(model, run)
    (step, _, images), said = logged
    assert said == f"preview (ddim, 3 steps, guidance 1.5): {again}"
    assert step == 4 and images.shape == (12, 1, 8, 8) and images.dtype == torch.uint8
    assert (np.asarray(Image.open(again)) == pictures[1]).all()
    # Pictures are no part of what a run is: others resume it.
    more = "--max-steps 5 --preview.every 5 --preview.steps 1 --preview.classes 7 2 --preview.images 7".split()
    capsys.readouterr()
    train_dit.main([*common, "--output", str(tmp_path / "drawn"), *more])
    rate = "max_steps 4 -> 5: the learning rate at step 4 goes from 0 to 0.000191\n"  # 1e-3 (1 + cos(4 pi / 5)) of the peak
    assert rate in (out := capsys.readouterr().out)
    assert "digits: 1442 training images of 10 classes; 5 steps of " in out and "\n1 process on cpu\n" in out
    assert f"preview (ddim, 1 steps, guidance 1.5, EMA): {tmp_path / 'drawn'}" in out
    with Image.open(tmp_path / "drawn" / "previews" / "step_5.png") as picture:
        assert picture.height == 2 * 50 + 2 and 3 * 50 + 2 < picture.width < 4 * 50  # one class a row, with its name
    config.columns, config.images = None, 20  # ten classes, which is what has rows without `classes`, too
    previews.draw(model, run)
    with Image.open(again) as picture:
        assert picture.height == 10 * 50 + 2 and 2 * 50 + 2 < picture.width < 3 * 50
    previews.names, previews.classes = ["all"], torch.zeros(1, dtype=torch.long)
    previews.draw(model, run)
    with Image.open(again) as picture:  # one class is no strip of all images
        assert picture.size == (10 * 50 + 2, 2 * 50 + 2)


def test_previews_that_fail_are_counted_and_training_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("moh_vision.diffusion.previews.sample_images", lambda *_: torch.full((1, 1, 8, 8), math.nan))
    monkeypatch.setattr("moh_vision.diffusion.previews.make_scorer", lambda *_, **__: None)  # there is nothing to score
    output = tmp_path / "run"
    argv = "--max-steps 3 --log-every 1 --preview.every 1 --score.every 3"
    train_dit.main(["--config", "configs/quickstart/dit.yaml", *argv.split(), *SMALL, "--output", str(output)])
    assert [e["failed_previews"] for e in logged(output) if "loss" in e] == [0, 1, 2]
    assert entries(output)[-1]["scores"] == dict(error="after decoding: 1 of 1 images hold NaN or infinity")
    said = capsys.readouterr().out
    assert said.count("could not be drawn: after decoding: 1 of 1 images hold NaN") == 3
    assert (output / "ema.safetensors").exists() and not (output / ".scoring").exists()


def test_pictures_of_a_run_shorter_than_every_are_drawn_where_asked_for(tmp_path, capsys, monkeypatch):
    """A trial of a few steps with a configuration for millions is not followed by minutes of sampling; long ones are announced."""
    argv = ["--config", "configs/quickstart/dit.yaml", *SMALL, "--preview.images", "40", "--preview.steps", "3"]
    every = "--max-steps 3 --preview.every 4 --score.every 4 --score.reference nowhere".split()
    train_dit.main([*argv, *every, "--output", str(tmp_path / "short")])
    said = capsys.readouterr().out
    assert (
        "preview.every 4: none in 3 steps; --preview.every 3 asks for it\n" in said
        and "score.every 4: none in 3" in said
    )
    assert not (tmp_path / "short" / "previews").exists() and not any(
        "scores" in e for e in entries(tmp_path / "short")
    )
    monkeypatch.setattr("moh_vision.diffusion.previews.LONG", 0)
    train_dit.main([*argv, "--max-steps", "3", "--preview.every", "2", "--output", str(tmp_path / "long")])
    said = capsys.readouterr().out
    assert [p.name for p in sorted((tmp_path / "long" / "previews").iterdir())] == ["step_2.png", "step_3.png"]
    first, second = [line for line in said.splitlines() if line.startswith("preview")][:2]
    assert first == "preview: 40 images in 3 steps each take about 00:00" and second.endswith(
        "long/previews/step_2.png"
    )


@pytest.mark.parametrize("section", ["preview", "score"])
def test_steps_that_a_sampler_cannot_take_are_refused_before_training(tmp_path, capsys, section):
    argv = ["--output", tmp_path / "run", f"--{section}.every", "5", f"--{section}.steps", "600"]
    error = refused(capsys, train_dit.main, "--config", "configs/quickstart/dit.yaml", *argv)
    assert f"{section}.steps 600: the steps of DDIMScheduler would begin at" in error
    assert not list(tmp_path.iterdir())


def test_classes_of_previews_exist(tmp_path, capsys):
    argv = ["--config", "configs/quickstart/dit.yaml", "--output", tmp_path / "run", "--preview.every", "5"]
    assert "preview.classes 12: no such class; there are 10" in refused(
        capsys, train_dit.main, *argv, "--preview.classes", "12"
    )
    assert not list(tmp_path.iterdir())


def test_guided_previews_need_dropped_labels(tmp_path, capsys):
    argv = ["--output", tmp_path / "run", "--preview.every", "5", "--label_drop", "0"]
    assert "preview.cfg_scale 1.5 needs label_drop above 0" in refused(capsys, train_dit.main, *argv)


def test_scores_while_training(tmp_path, runs, capsys):
    """In the features of the classifier of the other runs; the weights are those of a run without scores."""
    cls = runs[0] / "cls"
    common = ["--config", "configs/quickstart/dit.yaml", "--max-steps", "4", *SMALL]
    argv = f"--score.every 2 --score.images 70 --score.steps 2 --score.extractor {cls} --score.split val".split()
    train_dit.main([*common, "--output", str(tmp_path / "plain")])
    train_dit.main([*common, "--output", str(tmp_path / "run"), *argv])
    assert "scores after 4 steps" in capsys.readouterr().out
    scores = [line["scores"] for line in entries(tmp_path / "run") if "scores" in line]
    assert len(scores) == 2 and scores[0]["fd"] != scores[1]["fd"] and scores[0]["num_generated"] == 70
    assert scores[0]["num_reference"] == 355 and scores[0]["label"].startswith("FD-moh_vit_tiny")
    assert not list((tmp_path / "run").glob(".samples-*"))
    assert same(tmp_path / "plain" / "ema.safetensors", tmp_path / "run" / "ema.safetensors")
    # Too few for the features, and other mistakes: before a step is made.
    for more, words in {
        "--score.images 20": "20 generated images for 64 features",
        "--score.reference nowhere": "score.reference nowhere: no such file or folder",
        f"--score.reference {tmp_path}": f"score.reference {tmp_path} is no data set, so a split (val) has no effect",
        "--score.extractor timm:vit": "extractor 'timm:vit': timm has no model",
        "--score.inception_weights x": "inception_weights x has no effect with extractor",
    }.items():
        assert words in refused(capsys, train_dit.main, *common, "--output", tmp_path / "none", *argv, *more.split())
    assert not (tmp_path / "none").exists()


def test_a_score_that_fails_does_not_end_the_training(tmp_path, capsys, monkeypatch):
    """It is said and counted; samples that a killed score left are not taken for those of other weights."""
    run, drawn = tmp_path / "run", []

    def scorer(parts, *_):
        drawn.append(parts.images([0]))
        if len(drawn) == 1:
            raise RuntimeError("out of memory")
        return {}, ""

    monkeypatch.setattr("moh_vision.diffusion.previews.make_scorer", lambda *_, **__: scorer)
    argv = ["--config", "configs/quickstart/dit.yaml", *SMALL, "--output", str(run)]
    argv += "--score.every 1 --score.steps 2 --score.images 3 --score.reference digits --max-steps".split()
    train_dit.main([*argv, "2"])
    assert "no scores: out of memory" in capsys.readouterr().out
    assert [e["failed_scores"] for e in logged(run) if "loss" in e] == [0, 1]
    ImageParts(run / ".scoring", 3, 32, dict(step=3)).add(0, torch.zeros(3, 1, 8, 8, dtype=torch.uint8))
    train_dit.main([*argv, "3"])
    assert len(drawn) == 3 and drawn[2].float().std() > 1 and not (run / ".scoring").exists()
