"""What is not finite is no number: a step changes nothing and is counted, a validation is not the best, a score is refused."""

import contextlib
import itertools
import math

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

import moh_vision
from moh_vision.__main__ import main
from moh_vision.classification import train as train_cls
from moh_vision.classification import validate
from moh_vision.classification.task import ClassificationTask
from moh_vision.common.io import TensorFiles, write_tensors
from moh_vision.diffusion import sample
from moh_vision.diffusion import train as train_dit
from moh_vision.language.evaluation.lm_model import load_model, load_tokenizer
from tests.support.pictures import gradient
from tests.support.refusals import assert_says, one_line, refused
from tests.support.small_loop import small_loop
from tests.support.small_runs import arguments, entries, logged, results, same, script


def test_a_bad_batch_changes_nothing(tmp_path, monkeypatch):
    batches = script("dit").training_loader

    def poisoned(*args, **kwargs):
        for step, batch in enumerate(batches(*args, **kwargs)):
            if step in (2, 3):
                batch["images"][0, 0, 0, 0] = math.nan if step == 2 else math.inf
            yield batch

    monkeypatch.setattr(script("dit"), "training_loader", poisoned)
    script("dit").main(arguments("dit", tmp_path, 6, 1, "--keep-checkpoints", 9))
    for name in ("model", "ema", "optimizer"):
        before, after_bad_steps, after_good_step = (
            load_file(tmp_path / f"checkpoints/step_{step}/{name}.safetensors")
            for step in (2, 4, 5)
        )
        assert same(before, after_bad_steps), name
        assert not same(after_bad_steps, after_good_step), name
    entries = logged(tmp_path)
    assert [entry["skipped"] for entry in entries] == [0, 0, 1, 2, 2, 2]
    assert [entry["step"] for entry in entries if entry["loss"] is None] == [3, 4]
    assert len(entries) == 6


def test_a_huge_learning_rate_ends_the_run(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        more = ("--optim.lr", "1e20", "--optim.warmup_steps", "0", "--optim.schedule", "constant")
        script("dit").main(arguments("dit", tmp_path, 100, 1, *more))
    error = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1
    assert_says(error, "10 steps finite norm lr 1e+20")
    state = load_file(tmp_path / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in state.values())


class Given(torch.nn.Module):
    """A task whose loss, and whose every gradient, are given by the batch."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(2, 1)
        for p in self.model.parameters():
            p.register_hook(lambda gradient: torch.full_like(gradient, self.gradient))

    def forward(self, loss, gradient):
        self.gradient = gradient
        zero = sum((0 * p).sum() for p in self.model.parameters())
        return dict(loss=zero + loss)


@pytest.mark.parametrize("loss, gradient", [(math.nan, 1.0), (1.0, math.inf)])
def test_a_loss_or_a_gradient_alone_that_is_not_finite_changes_nothing(loss, gradient):
    """A loss can overflow in a detached term, with a finite gradient. A good step begins a new count."""
    accelerator = Accelerator(cpu=True)
    task = Given()
    optimizer = torch.optim.AdamW(task.parameters(), lr=0.1)
    loop = small_loop(accelerator, task, optimizer, clip_norm=1.0)
    weight = task.model.weight
    before = weight.detach().clone()

    def step(loss, gradient):
        loop.step(iter([dict(loss=loss, gradient=gradient)]), epoch=0, count=1)

    for number in range(1, 10):
        step(loss, gradient)
        assert loop.skipped.total == loop.skipped.in_a_row == number
    assert torch.equal(weight, before) and weight.grad is None
    step(1.0, 1.0)
    assert loop.skipped.in_a_row == 0 and not torch.equal(weight, before)
    for _ in range(10, 19):
        step(loss, gradient)
    with one_line("step 19 10 steps finite lr 0.1", FloatingPointError):
        step(loss, gradient)


def test_skipped_updates_are_said_at_the_end_of_an_epoch(monkeypatch):
    task = Given()
    loop = small_loop(Accelerator(cpu=True), task, torch.optim.SGD(task.parameters(), lr=0.1))
    said = []
    monkeypatch.setattr(loop.log, "say", said.append, raising=False)
    for epoch, loss in ((0, 1.0), (0, math.nan), (1, 1.0), (2, 1.0), (2, math.nan), (3, 1.0)):
        loop.step(iter([dict(loss=loss, gradient=1.0)]), epoch=epoch, count=1)
    words = "updates skipped so far, whose loss or gradient was not finite"
    assert said == [f"epoch 1: 1 {words}", f"epoch 3: 2 {words}"]


def test_a_gradient_scalers_first_skips_do_not_count():
    """float16 training begins with a loss scale that overflows; only from a scale of 1 down is the model to blame."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    accelerator = Accelerator(cpu=True)
    task = Given()
    accelerator.scaler = scaler  # accelerate makes a GradScaler only on GPUs
    loop = small_loop(accelerator, task, torch.optim.SGD(task.parameters(), lr=0.1))
    batch = dict(loss=1.0, gradient=math.inf)
    for _ in range(16):  # down to a scale of 1
        loop.step(iter([batch]), epoch=0, count=1)
    assert scaler.get_scale() == 1
    assert loop.skipped.total == loop.skipped.in_a_row == 0
    with one_line("step 25", FloatingPointError):
        for _ in range(16, 30):
            loop.step(iter([batch]), epoch=0, count=1)


def validated(folder, monkeypatch, broken, *more):
    """Train a classifier for 3 steps with a validation after each; `broken` ones have logits that are NaN."""
    forward = ClassificationTask.forward
    scored = train_cls.validate
    count = []

    def counted(*args):
        count.append(1)
        return scored(*args)

    def poisoned(task, *args, **named):
        found = forward(task, *args, **named)
        if not task.training and len(count) in broken:
            return found[0] * math.nan, found[1]
        return found

    monkeypatch.setattr(train_cls, "validate", counted)
    monkeypatch.setattr(ClassificationTask, "forward", poisoned)
    train_cls.main(arguments("cls", folder, 3, 3, "--eval_every", 1, *more))


def test_a_validation_that_is_not_finite_is_never_the_best(tmp_path, monkeypatch, capsys):
    """All of its images were of class 0, with a tenth of them right."""
    validated(tmp_path, monkeypatch, {1, 3}, "--ema.decay", 0)
    scores = [entry["validation"] for entry in entries(tmp_path) if "validation" in entry]
    assert [one.get("not_finite", 0) for one in scores] == [355, 0, 355]
    assert [one["loss"] is None for one in scores] == [True, False, True]
    assert scores[0]["top1"] == scores[2]["top1"] == 0
    assert TensorFiles(tmp_path / "best.safetensors").metadata["step"] == 2
    assert results(tmp_path)["best_step"] == 2
    out = capsys.readouterr().out
    assert out.count("the logits of 355 of 355 images are NaN or infinite") == 2
    assert "results.json: null stands for a number that is not finite: loss" in out


@pytest.mark.parametrize("broken, better", [(4, "ema"), (3, "model")])
def test_weights_that_are_not_finite_are_not_the_better_ones(tmp_path, monkeypatch, broken, better):
    """The EMA is validated after every step, and the last weights after it in the end."""
    validated(tmp_path, monkeypatch, {broken}, "--ema.decay", 0.5)
    assert results(tmp_path)["weights"] == better


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a run of each wing, by its name, trained for a step."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("cls", "dit", "clm")}
    for name, folder in folders.items():
        more = ("--ema.decay", 0) if name == "cls" else ()
        script(name).main(arguments(name, folder, 1, 1, *more))
    return folders


@contextlib.contextmanager
def poisoned(run, value=math.nan, wanted=("weight",)):
    """Put a value into one number of each tensor whose name ends with a wanted one, in all weights of a run."""
    before = {file: file.read_bytes() for file in run.glob("[me]*.safetensors")}
    try:
        for file in before:
            opened = TensorFiles(file)
            tensors = {name: opened.read(name).clone() for name in opened.shapes}
            for name in tensors:
                if name.endswith(wanted):
                    tensors[name].view(-1)[-1] = value
            write_tensors(file, tensors, opened.metadata)
        yield
    finally:
        for file, data in before.items():
            file.write_bytes(data)


# Wing -> commands that open RUN; OUT is a new file.
COMMANDS = dict(
    cls=(
        (validate.main, "--checkpoint RUN"),
        (main, "predict RUN IMAGE"),
        (main, "search RUN --share 0.9 --output OUT.yaml"),
        (main, "budget-curve RUN --output OUT.png"),
        (main, "publish RUN --output OUT"),
        (main, "export RUN --format torch-export --output OUT.pt2"),
        (
            train_cls.main,
            "--config quickstart/cls --model.embed_dim 32 --model.depth 2 --init_from RUN --output OUT",
        ),
        (train_cls.main, "--config quickstart/cls --distill.teacher RUN --output OUT"),
    ),
    dit=(
        (sample.main, "--checkpoint RUN --num-images 1 --out OUT.npz"),
        (main, "publish RUN --output OUT"),
        (train_dit.main, "--config quickstart/dit --distill.teacher RUN --output OUT"),
    ),
    clm=((main, "publish RUN --output OUT"),),
)
LONG = [(math.inf, "cls")]  # the other wings are tried with infinity, and a classifier with NaN


@pytest.mark.parametrize(
    "value, name",
    [
        pytest.param(value, name, marks=pytest.mark.slow if (value, name) in LONG else ())
        for value, name in itertools.product((math.nan, math.inf), COMMANDS)
    ],
)
def test_weights_that_are_not_finite_are_refused(name, value, runs, tmp_path, capsys):
    """By every command, with the file and the first tensor."""
    run = runs[name]
    gradient().save(tmp_path / "image.png")
    with poisoned(run, value):
        for call, words in COMMANDS[name]:
            words = words.replace("RUN", str(run)).replace("OUT", str(tmp_path / "new"))
            argv = words.replace("IMAGE", str(tmp_path / "image.png")).split()
            said = refused(capsys, call, *argv)
            assert_says(said, f"{run} tensors NaN infinity first")
            assert [path.name for path in tmp_path.iterdir()] == ["image.png"], words


def test_a_language_model_of_a_folder_that_is_not_finite_is_refused(runs):
    """The benchmarks of language models would take the first answer for the likeliest."""
    folder = str(runs["clm"])
    tokenizer = load_tokenizer(folder)
    with poisoned(runs["clm"]), one_line(f"--model {folder} tensors NaN infinity"):
        load_model(folder, "float32", torch.device("cpu"), tokenizer)


def test_logits_that_are_not_finite_are_refused(runs, tmp_path, capsys):
    """Weights that are finite can overflow too."""
    run = runs["cls"]
    gradient().save(tmp_path / "image.png")
    with poisoned(run, 3e38, ("head.bias", "head.weight", "norm.weight")):
        said = refused(capsys, validate.main, "--checkpoint", run, "--score_file", tmp_path / "s")
        facts = f"{run}/model.safetensors logits 355 images NaN infinite"
        assert_says(said, facts)
        assert not (tmp_path / "s").exists()
        with one_line(facts):
            moh_vision.open_run(str(run)).scores()
        assert main(["predict", str(run), str(tmp_path / "image.png")]) == 2
        said = capsys.readouterr()
        assert_says(said.err, f"{tmp_path}/image.png logits NaN infinite")
        assert "%" not in said.out
