"""Which phases a step has, and what moves in each, against Peng 2020 written out with autograd."""

import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import timm
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from moh_vision.classification.task import ClassificationTask
from moh_vision.common.seeds import derive_seed
from moh_vision.engine.block_descent import GATES, WEIGHTS, BlockDescent
from moh_vision.engine.config import BlockDescentConfig
from moh_vision.engine.step import SkippedSteps
from moh_vision.models.mae import mae_routers, train_only
from tests.support.pictures import write_folder
from tests.support.processes import on_two_ranks
from tests.support.refusals import refuse
from tests.support.small_loop import small_loop
from tests.support.small_runs import (
    arguments,
    entries,
    logged,
    outcome,
    results,
    same,
    script,
    whole_and_resumed,
)

C, H, DEPTH = 24, 6, 2
VIT = dict(
    img_size=16, patch_size=4, embed_dim=C, depth=DEPTH, num_heads=H, num_classes=5, router="mae"
)


def vit(**more):
    torch.manual_seed(0)
    model = timm.create_model("moh_vit_tiny_patch16_224", **{**VIT, **more})
    with torch.no_grad():  # a gate that says something, so that its gradient does too
        for router in mae_routers(model):
            if router.out is not None:
                router.out.weight.mul_(20)
    return model


def micro_batches(seed, count=2, size=4):
    draws = dict(generator=torch.Generator().manual_seed(seed))
    pairs = [
        (torch.randn(size, 3, 16, 16, **draws), torch.randint(5, (size,), **draws))
        for _ in range(count)
    ]
    return [dict(images=images, labels=labels) for images, labels in pairs]


class Recorded(SkippedSteps):
    """Remembers which phases of a step moved weights; `watch` is called after each."""

    def __init__(self):
        super().__init__()
        self.updated = []
        self.watch = lambda: None

    def count(self, step, agreed, *numbers):
        super().count(step, agreed, *numbers)
        self.updated.append(agreed.finite)
        self.watch()


class Training:
    """The loop of the scripts, of two micro-batches, with plain SGD in F so that an update is the gradient."""

    def __init__(
        self, model, which="all", optimizer=None, lr=0.1, scaler=None, clip_norm=0.0, **settings
    ):
        self.accelerator = Accelerator(cpu=True)
        self.accelerator.scaler = scaler  # accelerate makes one for a GPU alone
        self.model = model
        self.seen = []
        train_only(model, which)
        self.descent = BlockDescent(
            self.accelerator, model, mae_routers(model), False, BlockDescentConfig(**settings)
        )
        task = ClassificationTask(model, 0.01)
        optimizer = optimizer or torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], lr=0.1
        )
        self.loop = small_loop(
            self.accelerator,
            task,
            optimizer,
            self.descent,
            accumulation=2,
            clip_norm=clip_norm,
            lr=lr,
        )
        self.loop.skipped = self.skipped = Recorded()
        self.task = self.loop.task
        self.optimizer = self.loop.optimizer
        task.register_forward_pre_hook(
            lambda _, args, more: self.seen.append(more.get("images")), with_kwargs=True
        )

    def step(self, step, epoch, batches, watch=lambda: None):
        """Which phases moved weights."""
        self.skipped.updated = []
        self.skipped.watch = watch
        self.seen.clear()
        self.loop.done = step
        self.loop.step(iter(batches), epoch, count=8)
        return self.skipped.updated

    def phases(self):
        """Of the last step."""
        return "".join(self.loop.norms)


def draws_of(step, phase, rank=0):
    """Seeds of the micro-batches."""
    return [derive_seed(0, step, micro, rank, *(1,) * (phase == GATES)) for micro in range(2)]


def split(model):
    """(names of the gates, names of everything else)."""
    names = [name for name, _ in model.named_parameters()]
    gates = {name for name in names if ".router." in name}
    return gates, set(names) - gates


def changed(before, model):
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def snapshot(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# ---------------------------------------------------------------- the schedule


def test_gates_move_in_every_fifth_epoch_from_the_first_one():
    descents = [Training(vit(), period=period).descent for period in (5, 1)]
    names = ["".join(phase.name for phase in descents[0].phases(epoch, [])) for epoch in range(12)]
    assert names == ["GF", "F", "F", "F", "F"] * 2 + ["GF", "F"]
    # F draws what a model without gates draws.
    assert [[phase.salt for phase in descents[1].phases(epoch, [])] for epoch in (0, 1)] == [
        [(1,), ()]
    ] * 2


# ---------------------------------------------------------------- what moves


def loss_by_hand(model, batch, mode, draw):
    for router in mae_routers(model):
        router.set_mode(mode)
    torch.manual_seed(draw)
    logits = model.forward_routed(batch["images"])[0]
    return torch.nn.functional.cross_entropy(logits, batch["labels"])


def gradients_by_hand(model, batches, mode, draws, names):
    own = dict(model.named_parameters())
    losses = [loss_by_hand(model, batch, mode, draw) for batch, draw in zip(batches, draws)]
    return dict(
        zip(names, torch.autograd.grad(sum(losses) / len(losses), [own[name] for name in names]))
    )


def assert_moved_by_hand(states, step, epoch, batches, rank=0, mean=lambda gradient: gradient):
    """From each state to the next one a phase moved its own parameters alone, by their gradients."""
    gates, weights = split(states[0])
    phases = {GATES: ("soft", gates, 1.0), WEIGHTS: ("sampled", weights, 0.1)}
    for phase, model, moved in zip(
        "GF" if epoch % 5 == 0 else "F", states[:-1], states[1:], strict=True
    ):
        mode, names, lr = phases[phase]
        before, after = snapshot(model), snapshot(moved)
        assert changed(before, moved) == names
        model = copy.deepcopy(model).train().requires_grad_(True)
        for name, gradient in gradients_by_hand(
            model, batches, mode, draws_of(step, phase, rank), sorted(names)
        ).items():
            torch.testing.assert_close(
                after[name], before[name] - lr * mean(gradient), rtol=0, atol=1e-7
            )


def test_g_moves_the_gates_and_f_the_rest_each_by_its_own_gradient():
    training, batches = Training(vit()), micro_batches(1)
    states = [copy.deepcopy(training.model)]
    assert training.step(3, 0, batches, lambda: states.append(copy.deepcopy(training.model))) == [
        True,
        True,
    ]
    assert_moved_by_hand(states, 3, 0, batches)
    gates, _ = split(training.model)
    assert (
        max((states[1].state_dict()[n] - states[0].state_dict()[n]).abs().max() for n in gates)
        > 1e-4
    )


def test_the_batch_is_fetched_once_as_it_is_needed_and_later_epochs_have_f_alone():
    training, fetched, counts = Training(vit()), [], []
    training.task.register_forward_pre_hook(lambda *_: counts.append(len(fetched)))

    def stream():
        for number in itertools.count():
            fetched.append(number)
            yield micro_batches(number, 1)[0]

    source = stream()
    for step, epoch in enumerate([0, 1, 4, 5]):
        before = snapshot(training.model)
        training.step(step, epoch, source)
        assert training.phases() == ("GF" if epoch % 5 == 0 else "F")
        assert changed(before, training.model) == set().union(
            *split(training.model)[epoch % 5 > 0 :]
        )
        assert len(training.seen) == 2 * len(training.phases())
        assert all(one is other for one, other in zip(training.seen, training.seen[2:]))
    assert fetched == list(range(8)) and counts == [1, 2, 2, 2, 3, 4, 5, 6, 7, 8, 8, 8]


def test_between_steps_the_model_is_as_it_is_evaluated():
    training, x = Training(vit()), torch.randn(2, 3, 16, 16)
    for epoch in (0, 1):
        training.step(epoch, epoch, micro_batches(epoch))
        assert {router.mode for router in mae_routers(training.model)} == {"soft"}
        training.task.eval()
        with torch.no_grad():
            logits, stats = training.task(x)
        reference = copy.deepcopy(training.model)
        for router in mae_routers(reference):
            router.set_mode("soft")
        torch.testing.assert_close(logits, reference(x), rtol=0, atol=0)
        assert all((entry.counts == 1).all() for entry in stats)  # every head of every sequence
    # Batch statistics are taken in both phases.
    assert [int(router.norm.num_batches_tracked) for router in mae_routers(training.model)] == [
        6
    ] * DEPTH


def test_joint_training_moves_the_gates_by_sgd_and_the_rest_by_adam():
    """Peng 2020, appendix A: NoBCD's gates too learn by SGD with a fixed rate, without momentum or weight decay."""
    model = vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    training = Training(model, optimizer=optimizer, lr=0.01, mode="joint", gate_lr=0.25)
    gates, weights = split(model)
    for step in range(2):  # the second step would show a momentum
        before, batches = copy.deepcopy(model), micro_batches(step)
        assert (
            training.step(step, 0, batches) == [True]
            and training.phases() == "F"
            and len(training.seen) == 2
        )
        assert changed(snapshot(before), model) == gates | weights
        draws = draws_of(step, WEIGHTS)
        gradients = gradients_by_hand(
            copy.deepcopy(before).train(), batches, "soft", draws, sorted(gates)
        )
        for name, gradient in gradients.items():
            moved = model.get_parameter(name) - before.get_parameter(name)
            torch.testing.assert_close(moved, -0.25 * gradient, rtol=1e-4, atol=1e-7)


UNIFORM = dict(router_kwargs=dict(mode="uniform"))


@pytest.mark.parametrize("options", [dict(router="moh", head_budget=0.5), UNIFORM])
def test_a_model_without_gates_has_one_plain_phase(options):
    torch.manual_seed(0)
    model = timm.create_model("moh_vit_tiny_patch16_224", **{**VIT, **options})
    training, batches = Training(model), micro_batches(0)
    twin = copy.deepcopy(model).train()
    assert training.step(0, 0, batches) == [True]
    optimizer, task = (
        torch.optim.SGD(twin.parameters(), lr=0.1),
        ClassificationTask(twin, 0.01).train(),
    )
    for draw, batch in zip(draws_of(0, WEIGHTS), batches):
        torch.manual_seed(draw)
        (task(**batch)["loss"] / 2).backward()
    optimizer.step()
    assert same(model, twin)
    assert training.descent.results() == {}
    refuse(
        "train_only gates: the model has no gates of MAE; .* router mae with mode soft",
        train_only,
        model,
        "gates",
    )


def test_fsdp_is_refused_in_turns_only():
    sharded = SimpleNamespace(distributed_type="FSDP")
    with pytest.raises(
        ValueError,
        match="block_descent.mode bcd does not work with FSDP: .* DDP, or take mode joint",
    ):
        BlockDescent(sharded, model := vit(), mae_routers(model), False, BlockDescentConfig())
    BlockDescent(sharded, model, mae_routers(model), False, BlockDescentConfig(mode="joint"))


# ---------------------------------------------------------------- fine-tuning sets


GATE = (
    C * 256 + 256 + 256 * H + H + 2 * C
)  # two linear layers and the batch norm (Peng 2020, appendix A)


@pytest.mark.parametrize(
    "which, count", [("gates", DEPTH * GATE), ("gates_and_outputs", DEPTH * (GATE + C * C))]
)
def test_fine_tuning_sets(which, count):
    model = vit()
    training = Training(model, which)
    gates, weights = split(model)
    outputs = {f"blocks.{layer}.attn.proj.weight" for layer in range(DEPTH)}
    assert training.descent.trained == count
    for epoch, expected in (
        (0, "G" if which == "gates" else "GF"),
        (1, "G" if which == "gates" else "F"),
    ):
        before = snapshot(model)
        training.step(epoch, epoch, micro_batches(epoch))
        assert training.phases() == expected
        moved = (gates if "G" in expected else set()) | (outputs if "F" in expected else set())
        assert changed(before, model) == moved


# ---------------------------------------------------------------- safety


@pytest.mark.parametrize("mode", ["bcd", "joint"])
def test_a_gradient_scaler_serves_both_phases(mode, monkeypatch):
    """As with fp16: what moves steps through one scaler, which divides what it multiplied, and skips an overflow."""
    plain = Training(vit(), mode=mode)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled = Training(vit(), mode=mode, scaler=scaler)
    every = [True, True] if mode == "bcd" else [True]
    for step in range(2):
        assert plain.step(step, 0, micro_batches(step)) == every
    scaled.accelerator.native_amp = True
    monkeypatch.setattr(scaled.accelerator.state, "_mixed_precision", "fp16")
    for step in range(2):
        assert scaled.step(step, 0, micro_batches(step)) == every
    torch.testing.assert_close(
        scaled.model.state_dict(), plain.model.state_dict(), rtol=1e-5, atol=1e-6
    )
    assert scaler.state_dict()["_growth_tracker"] == 2 * len(every)  # good phases
    before = snapshot(scaled.model)
    gates, weights = split(scaled.model)
    for name, parameter in scaled.model.named_parameters():
        if name in weights:
            parameter.register_hook(lambda gradient: gradient * math.inf)
    moved = [True, False] if mode == "bcd" else [False]  # in phase G the weights have no gradient
    assert scaled.step(2, 0, micro_batches(2)) == moved
    assert scaler.get_scale() == 512.0
    assert changed(before, scaled.model) == (gates if mode == "bcd" else set())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_batch_changes_nothing_not_even_batch_norm(value):
    training = Training(vit())
    training.step(0, 0, micro_batches(0))
    before, batches = snapshot(training.model), micro_batches(1)
    batches[0]["images"][0, 0, 0, 0] = value
    assert training.step(1, 0, batches) == [False, False]
    assert same(training.model, before)
    assert training.skipped.total == training.skipped.in_a_row == 1  # one step, though two phases
    assert training.step(2, 0, micro_batches(2)) == [True, True]
    assert training.skipped.in_a_row == 0 and training.skipped.total == 1


def test_gates_that_alone_are_not_finite_end_the_run_too():
    """A good F phase of the same step does not make up for them, a step without G phase does."""
    training = Training(vit())
    bias = mae_routers(training.model)[0].out.bias.requires_grad_(True)
    bias.register_hook(lambda gradient: gradient * math.nan)
    for step in range(9):
        assert training.step(step, 0, micro_batches(step)) == [False, True]
    assert training.skipped.in_a_row == 9
    training.step(9, 1, micro_batches(9))
    assert training.skipped.in_a_row == 0
    for step in range(10, 19):
        training.step(step, 5, micro_batches(step))
    with pytest.raises(
        FloatingPointError, match="step 19: 10 steps in a row .*lr 1\\); the last one with both was"
    ):
        training.step(19, 5, micro_batches(19))


def test_the_models_clipping_is_not_the_gates():
    training = Training(vit(), clip_norm=1e-6)
    before = snapshot(training.model)
    training.step(0, 0, micro_batches(0))
    gates, weights = split(training.model)
    after = training.model.state_dict()
    moved = [
        math.sqrt(sum((after[n] - before[n]).square().sum().item() for n in names))
        for names in (gates, weights)
    ]
    assert moved[0] == pytest.approx(training.loop.norms[GATES], rel=1e-3) and moved[0] > 1e-3
    assert moved[1] < 1e-6


# ---------------------------------------------------------------- the scripts


MAE = (
    "--model.router mae --model.head_budget null --model.embed_dim 16 --data.augment none --data.img_size 8 "
    "--optim.accumulation 2 --optim.schedule constant --optim.warmup_steps 0 --block_descent.period 2 "
    "--keep-checkpoints 9"
).split()


def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path):
    """Weights, batch statistics, EMA and both optimisers."""
    root = write_folder(tmp_path / "d", train=8)  # two steps an epoch: 0, 1, 4 and 5 have a G phase
    _, run = whole_and_resumed("cls", tmp_path, [3, 6], *MAE, "--data.root", root)
    _, gates = outcome(run)["optimizers"]
    assert [gates["plain"][f"1/group0/{key}"] for key in ("lr", "momentum", "weight_decay")] == [
        1,
        0,
        0,
    ]
    lines = logged(run)
    assert [e["step"] for e in lines if "gate_grad_norm" in e] == [1, 2, 5, 6] and len(lines) == 6
    # From step 3 to 4 the gates stand still but for their batch statistics, from 4 to 6 they do not.
    states = [load_file(run / f"checkpoints/step_{step}/model.safetensors") for step in (3, 6)]
    gates = [name for name in states[0] if ".router." in name]
    assert gates and all(not torch.equal(states[0][name], states[1][name]) for name in gates)
    assert entries(run)[0] == dict(step=0, trained_parameters=results(run)["trained_parameters"])


def test_fine_tuning_a_run(tmp_path, capsys):
    small = [*MAE, "--data.root", write_folder(tmp_path / "d", train=8)]
    train = script("cls").main
    train(arguments("cls", tmp_path / "one", 1, 1, *small))
    more = ["--init-from", str(tmp_path / "one"), "--train_only", "gates_and_outputs"]
    train(arguments("cls", tmp_path / "two", 2, 1, *small, *more))
    ends = (tmp_path / "one/checkpoints/step_1", tmp_path / "two/checkpoints/step_2")
    before, after = (load_file(folder / "model.safetensors") for folder in ends)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {
        name for name in before if ".router." in name or name.endswith("attn.proj.weight")
    }
    count = 2 * (16 * 256 + 256 + 256 * 8 + 8 + 2 * 16 + 16 * 16)
    assert results(tmp_path / "two")["trained_parameters"] == count
    assert f"training {count:,} of" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        train(arguments("cls", tmp_path / "three", 1, 1, "--train_only", "gates"))
    left_out, error = capsys.readouterr().err.splitlines()
    assert (
        "cls.yaml, without effect here: optim.lr 0.003 (needs train_only other than gates"
        in left_out
    )
    words = "train_only gates: the model has no gates of MAE; it needs router mae with mode soft"
    assert error == f"train_cls.py: error: {words}" and not (tmp_path / "three").exists()


# ---------------------------------------------------------------- two processes


def mean_of_two(gradient):
    torch.distributed.all_reduce(gradient)
    return gradient / 2


def train_with_another(rank):
    """Both phases against the mean over both processes' micro-batches, each with its own draws, by hand."""
    torch.distributed.init_process_group("gloo")
    training = Training(vit())
    assert type(training.task).__name__ == "DistributedDataParallel"
    for step, epoch in enumerate((0, 1, 5)):
        states = [copy.deepcopy(training.model)]
        batches = micro_batches(10 * step + rank)

        def keep_state(states=states):
            states.append(copy.deepcopy(training.model))

        assert all(training.step(step, epoch, batches, keep_state))
        # Both compute their half at the same time, because the gates' batch norm is that of both.
        assert_moved_by_hand(states, step, epoch, batches, rank, mean_of_two)
    # One process meets a bad batch: both skip both phases, batch statistics included.
    before, batch = snapshot(training.model), micro_batches(99)
    batch[1]["images"][0, 0, 0, 0] = math.nan if rank == 1 else 0.0
    assert training.step(4, 0, batch) == [False, False] and training.skipped.total == 1
    assert same(training.model, before)
    for value in training.model.state_dict().values():  # batch statistics are those of all
        other = [torch.empty_like(value) for _ in range(2)]
        torch.distributed.all_gather(other, value.contiguous())
        assert torch.equal(*other)
    for mode in ("joint", "uniform"):  # no gate waits for a gradient that does not come
        model = vit(router_kwargs=dict(mode="uniform")) if mode == "uniform" else vit()
        training = Training(model, mode="joint" if mode == "joint" else "bcd")
        assert [training.step(step, 0, micro_batches(step)) for step in range(2)] == [
            [True],
            [True],
        ]
    training = Training(vit(), "gates")
    assert [training.step(step, 0, micro_batches(step)) for step in range(2)] == [[True], [True]]
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes():
    on_two_ranks(train_with_another)
