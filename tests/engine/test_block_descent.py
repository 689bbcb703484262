"""The phases of a step and the parameters that each moves, compared with Peng 2020 written out with autograd."""

import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import timm
import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from safetensors.torch import load_file

from moh_vision.attention.model_heads import routers_of
from moh_vision.classification.task import ClassificationTask
from moh_vision.common.seeds import derive_seed
from moh_vision.engine.block_descent import GATES, WEIGHTS, BlockDescent
from moh_vision.engine.config import BlockDescentConfig
from moh_vision.engine.step import SkippedSteps
from moh_vision.models.fine_tuning import train_only
from tests.support.pictures import write_folder
from tests.support.processes import on_two_ranks
from tests.support.refusals import assert_says, one_line, refuse
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

C = 24
H = 6
DEPTH = 2
VIT = dict(
    img_size=16, patch_size=4, embed_dim=C, depth=DEPTH, num_heads=H, num_classes=5, router="mae"
)


def vit(**more):
    torch.manual_seed(0)
    model = timm.create_model("moh_vit_tiny_patch16_224", **{**VIT, **more})
    with torch.no_grad():  # larger gates, so that their gradients are not lost in rounding
        for router in routers_of(model):
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
    """Record in `updated`, for each phase of a step, whether it moved weights; call `watch` after each phase."""

    def __init__(self):
        super().__init__()
        self.updated = []
        self.watch = lambda: None

    def count(self, step, agreed, *numbers):
        super().count(step, agreed, *numbers)
        self.updated.append(agreed.finite)
        self.watch()


class Training:
    """The loop of the scripts, with two micro-batches a step. Phase F uses plain SGD, so an update shows the gradient."""

    def __init__(
        self, model, which="all", optimizer=None, lr=0.1, scaler=None, clip_norm=0.0, **settings
    ):
        self.accelerator = Accelerator(cpu=True)
        self.accelerator.scaler = scaler  # accelerate makes a GradScaler only on GPUs
        self.model = model
        self.seen = []
        train_only(model, which)
        self.descent = BlockDescent(self.accelerator, model, False, BlockDescentConfig(**settings))
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
        """Do one step and return, for each of its phases, whether the phase moved weights."""
        self.skipped.updated = []
        self.skipped.watch = watch
        self.seen.clear()
        self.loop.done = step
        self.loop.step(iter(batches), epoch, count=8)
        return self.skipped.updated

    def phases(self):
        """Names of the last step's phases: "GF", "F" or "G"."""
        return "".join(self.loop.norms)


def draws_of(step, phase, rank=0):
    """Return the seeds of a phase's two micro-batches; seeds of the phase of gates have a salt."""
    salt = (1,) if phase == GATES else ()
    return [derive_seed(0, step, micro, rank, *salt) for micro in range(2)]


def phases_of(epoch):
    """Return the phases of a step with the default period of 5: gates move in every fifth epoch only."""
    return "GF" if epoch % 5 == 0 else "F"


def split(model):
    """Return (names of the gates, names of all other parameters)."""
    names = [name for name, _ in model.named_parameters()]
    gates = {name for name in names if ".router." in name}
    return gates, set(names) - gates


def changed(before, model):
    """Return the names of the parameters that differ from the snapshot `before`."""
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def snapshot(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# ---------------------------------------------------------------- the schedule


def test_gates_move_in_every_fifth_epoch_from_the_first_one():
    descents = [Training(vit(), period=period).descent for period in (5, 1)]
    names = ["".join(phase.name for phase in descents[0].phases(epoch, [])) for epoch in range(12)]
    assert names == ["GF", "F", "F", "F", "F"] * 2 + ["GF", "F"]
    # Phase F has no salt, so it draws the random numbers that a model without gates draws.
    for epoch in (0, 1):
        assert [phase.salt for phase in descents[1].phases(epoch, [])] == [(1,), ()]


# ---------------------------------------------------------------- what moves


def loss_by_hand(model, batch, mode, draw):
    for router in routers_of(model):
        router.set_mode(mode)
    torch.manual_seed(draw)
    logits = model.forward_routed(batch["images"])[0]
    return torch.nn.functional.cross_entropy(logits, batch["labels"])


def gradients_by_hand(model, batches, mode, draws, names):
    parameters = [model.get_parameter(name) for name in names]
    losses = [loss_by_hand(model, batch, mode, draw) for batch, draw in zip(batches, draws)]
    gradients = torch.autograd.grad(sum(losses) / len(losses), parameters)
    return dict(zip(names, gradients))


def assert_moved_by_hand(states, step, epoch, batches, rank=0, mean=lambda gradient: gradient):
    """Assert that each phase of a step has moved its own parameters only, by minus its learning rate times their gradient.

    states: the model before the step and after each phase. mean: reduces a gradient over processes.
    """
    gates, weights = split(states[0])
    phases = {GATES: ("soft", gates, 1.0), WEIGHTS: ("sampled", weights, 0.1)}
    for phase, model, moved in zip(phases_of(epoch), states[:-1], states[1:], strict=True):
        mode, names, lr = phases[phase]
        before = snapshot(model)
        after = snapshot(moved)
        assert changed(before, moved) == names
        model = copy.deepcopy(model).train().requires_grad_(True)
        draws = draws_of(step, phase, rank)
        for name, gradient in gradients_by_hand(model, batches, mode, draws, sorted(names)).items():
            expected = before[name] - lr * mean(gradient)
            torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-7)


def test_g_moves_the_gates_and_f_the_rest_each_by_its_own_gradient():
    training = Training(vit())
    batches = micro_batches(1)
    states = [copy.deepcopy(training.model)]

    def keep_state():
        states.append(copy.deepcopy(training.model))

    assert training.step(3, 0, batches, keep_state) == [True, True]
    assert_moved_by_hand(states, 3, 0, batches)
    gates, _ = split(training.model)
    before = states[0].state_dict()
    after = states[1].state_dict()
    assert max((after[name] - before[name]).abs().max() for name in gates) > 1e-4


def test_both_phases_use_one_batch_which_is_fetched_when_it_is_needed():
    training = Training(vit())
    fetched = []
    counts = []  # for each forward, how many micro-batches have been fetched by then
    training.task.register_forward_pre_hook(lambda *_: counts.append(len(fetched)))

    def stream():
        for number in itertools.count():
            fetched.append(number)
            yield micro_batches(number, 1)[0]

    source = stream()
    for step, epoch in enumerate([0, 1, 4, 5]):
        before = snapshot(training.model)
        training.step(step, epoch, source)
        assert training.phases() == phases_of(epoch)
        gates, weights = split(training.model)
        expected = weights
        if "G" in training.phases():
            expected = gates | weights
        assert changed(before, training.model) == expected
        assert len(training.seen) == 2 * len(training.phases())
        # The second phase gets the same image tensors as the first.
        assert all(one is other for one, other in zip(training.seen, training.seen[2:]))
    assert fetched == list(range(8)) and counts == [1, 2, 2, 2, 3, 4, 5, 6, 7, 8, 8, 8]


def test_between_steps_the_model_is_as_it_is_evaluated():
    training = Training(vit())
    x = torch.randn(2, 3, 16, 16)
    for epoch in (0, 1):
        training.step(epoch, epoch, micro_batches(epoch))
        assert {router.mode for router in routers_of(training.model)} == {"soft"}
        training.task.eval()
        with torch.no_grad():
            logits, stats = training.task(x)
        reference = copy.deepcopy(training.model)
        for router in routers_of(reference):
            router.set_mode("soft")
        torch.testing.assert_close(logits, reference(x), rtol=0, atol=0)
        assert all((entry.counts == 1).all() for entry in stats)  # every head of every sequence
    # Both phases update the running statistics of the gates' batch norm: 3 phases of 2 micro-batches.
    tracked = [int(router.norm.num_batches_tracked) for router in routers_of(training.model)]
    assert tracked == [6] * DEPTH


def test_joint_training_moves_the_gates_by_sgd_and_the_rest_by_adam():
    """Gates of NoBCD also learn by SGD at a fixed rate, without momentum or weight decay (Peng 2020, appendix A)."""
    model = vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    training = Training(model, optimizer=optimizer, lr=0.01, mode="joint", gate_lr=0.25)
    gates, weights = split(model)
    for step in range(2):  # a momentum would show in the second step
        before = copy.deepcopy(model)
        batches = micro_batches(step)
        assert training.step(step, 0, batches) == [True]
        assert training.phases() == "F" and len(training.seen) == 2
        assert changed(snapshot(before), model) == gates | weights
        draws = draws_of(step, WEIGHTS)
        gradients = gradients_by_hand(
            copy.deepcopy(before).train(), batches, "soft", draws, sorted(gates)
        )
        for name, gradient in gradients.items():
            moved = model.get_parameter(name) - before.get_parameter(name)
            torch.testing.assert_close(moved, -0.25 * gradient, rtol=1e-4, atol=1e-7)


UNIFORM = dict(router_kwargs=dict(mode="uniform"))


@pytest.mark.parametrize(
    "options", [dict(router="moh", head_budget=0.5), UNIFORM], ids=["moh", "uniform mae"]
)
def test_a_model_without_gates_has_one_plain_phase(options):
    torch.manual_seed(0)
    model = timm.create_model("moh_vit_tiny_patch16_224", **{**VIT, **options})
    training = Training(model)
    batches = micro_batches(0)
    twin = copy.deepcopy(model).train()
    assert training.step(0, 0, batches) == [True]
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    task = ClassificationTask(twin, 0.01).train()
    for draw, batch in zip(draws_of(0, WEIGHTS), batches):
        torch.manual_seed(draw)
        (task(**batch)["loss"] / 2).backward()
    optimizer.step()
    assert same(model, twin)
    assert training.descent.results() == {}
    refuse("train_only gates MAE mae soft", train_only, model, "gates")


def test_fsdp_is_refused_for_mode_bcd_only():
    state = SimpleNamespace(dynamo_plugin=TorchDynamoPlugin(backend="no"))
    sharded = SimpleNamespace(distributed_type="FSDP", state=state)
    model = vit()
    with one_line("block_descent.mode bcd FSDP DDP joint"):
        BlockDescent(sharded, model, False, BlockDescentConfig())
    BlockDescent(sharded, model, False, BlockDescentConfig(mode="joint"))


# ---------------------------------------------------------------- fine-tuning sets


# Parameters of a gate: two linear layers and the batch norm (Peng 2020, appendix A).
GATE = C * 256 + 256 + 256 * H + H + 2 * C


@pytest.mark.parametrize(
    "which, phases, count",
    [
        ("gates", ["G", "G"], DEPTH * GATE),
        ("gates_and_outputs", ["GF", "F"], DEPTH * (GATE + C * C)),
    ],
    ids=["gates", "gates_and_outputs"],
)
def test_fine_tuning_sets(which, phases, count):
    """`phases` are those of epochs 0 and 1; `count` is the number of trained parameters."""
    model = vit()
    training = Training(model, which)
    gates, weights = split(model)
    outputs = {f"blocks.{layer}.attn.proj.weight" for layer in range(DEPTH)}
    assert training.descent.trained == count
    moved = {"G": gates, "F": outputs, "GF": gates | outputs}
    for epoch, expected in enumerate(phases):
        before = snapshot(model)
        training.step(epoch, epoch, micro_batches(epoch))
        assert training.phases() == expected
        assert changed(before, model) == moved[expected]


# ---------------------------------------------------------------- safety


@pytest.mark.parametrize(
    "mode, every, overflowed",
    [
        # The gradients of the weights overflow. Phase G does not compute them, so it moves the gates.
        ("bcd", [True, True], [True, False]),
        ("joint", [True], [False]),
    ],
    ids=["bcd", "joint"],
)
def test_a_gradient_scaler_serves_both_phases(mode, every, overflowed, monkeypatch):
    """With fp16 both phases use one GradScaler: updates are as without it, and an overflow skips the phase.

    every, overflowed: for each phase of a good and of an overflowing step, whether it moves parameters.
    """
    plain = Training(vit(), mode=mode)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled = Training(vit(), mode=mode, scaler=scaler)
    for step in range(2):
        assert plain.step(step, 0, micro_batches(step)) == every
    scaled.accelerator.native_amp = True
    monkeypatch.setattr(scaled.accelerator.state, "_mixed_precision", "fp16")
    for step in range(2):
        assert scaled.step(step, 0, micro_batches(step)) == every
    torch.testing.assert_close(
        scaled.model.state_dict(), plain.model.state_dict(), rtol=1e-5, atol=1e-6
    )
    # All phases of both steps were good.
    assert scaler.state_dict()["_growth_tracker"] == 2 * len(every)
    before = snapshot(scaled.model)
    gates, weights = split(scaled.model)
    for name, parameter in scaled.model.named_parameters():
        if name in weights:
            parameter.register_hook(lambda gradient: gradient * math.inf)
    assert scaled.step(2, 0, micro_batches(2)) == overflowed
    assert scaler.get_scale() == 512.0
    assert changed(before, scaled.model) == (gates if mode == "bcd" else set())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_batch_changes_nothing_not_even_batch_norm(value):
    training = Training(vit())
    training.step(0, 0, micro_batches(0))
    before = snapshot(training.model)
    batches = micro_batches(1)
    batches[0]["images"][0, 0, 0, 0] = value
    assert training.step(1, 0, batches) == [False, False]
    assert same(training.model, before)
    # Two skipped phases are one skipped step.
    assert training.skipped.total == training.skipped.in_a_row == 1
    assert training.step(2, 0, micro_batches(2)) == [True, True]
    assert training.skipped.in_a_row == 0 and training.skipped.total == 1


def test_gates_that_alone_are_not_finite_end_the_run_too():
    """A good phase F does not reset the count of a step whose phase G is skipped; a good step without phase G does."""
    training = Training(vit())
    bias = routers_of(training.model)[0].out.bias.requires_grad_(True)
    bias.register_hook(lambda gradient: gradient * math.nan)
    for step in range(9):
        assert training.step(step, 0, micro_batches(step)) == [False, True]
    assert training.skipped.in_a_row == 9
    training.step(9, 1, micro_batches(9))
    assert training.skipped.in_a_row == 0
    for step in range(10, 19):
        training.step(step, 5, micro_batches(step))
    with one_line("19 10 nan lr 1 9", FloatingPointError):
        training.step(19, 5, micro_batches(19))


def test_the_models_clipping_is_not_the_gates():
    training = Training(vit(), clip_norm=1e-6)
    before = snapshot(training.model)
    training.step(0, 0, micro_batches(0))
    gates, weights = split(training.model)
    after = training.model.state_dict()

    def norm_of_update(names):
        return math.sqrt(sum((after[n] - before[n]).square().sum().item() for n in names))

    assert norm_of_update(gates) == pytest.approx(training.loop.norms[GATES], rel=1e-3)
    assert norm_of_update(gates) > 1e-3
    assert norm_of_update(weights) < 1e-6


# ---------------------------------------------------------------- the scripts


MAE = (
    "--model.router mae --model.head_budget null --model.embed_dim 16 --data.augment none --data.img_size 8 "
    "--optim.accumulation 2 --optim.schedule constant --optim.warmup_steps 0 --block_descent.period 2 "
    "--keep-checkpoints 9"
).split()


def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path):
    """Bits of weights, batch statistics, EMA and both optimisers are compared."""
    # An epoch is two steps, so steps 1, 2, 5 and 6 have a phase G.
    root = write_folder(tmp_path / "d", train=8)
    _, run = whole_and_resumed("cls", tmp_path, [3, 6], *MAE, "--data.root", root)
    _, gates = outcome(run)["optimizers"]
    settings = [gates["plain"][f"1/group0/{key}"] for key in ("lr", "momentum", "weight_decay")]
    assert settings == [1, 0, 0]
    lines = logged(run)
    assert [e["step"] for e in lines if "gate_grad_norm" in e] == [1, 2, 5, 6] and len(lines) == 6
    # Steps 5 and 6 have moved every gate since the checkpoint of step 3.
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
    assert_says(left_out, "cls.yaml optim.lr 0.003 train_only gates")
    assert_says(error, "train_cls.py error: train_only gates MAE mae soft")
    assert not (tmp_path / "three").exists()


# ---------------------------------------------------------------- two processes


def mean_of_two(gradient):
    torch.distributed.all_reduce(gradient)
    return gradient / 2


def train_with_another(rank):
    """Compare both phases with gradients by hand, averaged over the micro-batches of both processes.

    Each process has random numbers of its own.
    """
    torch.distributed.init_process_group("gloo")
    training = Training(vit())
    assert type(training.task).__name__ == "DistributedDataParallel"
    for step, epoch in enumerate((0, 1, 5)):
        states = [copy.deepcopy(training.model)]
        batches = micro_batches(10 * step + rank)

        def keep_state(states=states):
            states.append(copy.deepcopy(training.model))

        assert all(training.step(step, epoch, batches, keep_state))
        # All processes must call this together: the gates' batch norm reduces over them.
        assert_moved_by_hand(states, step, epoch, batches, rank, mean_of_two)
    # If one process has a bad batch, both skip both phases and restore the batch statistics.
    before = snapshot(training.model)
    batches = micro_batches(99)
    batches[1]["images"][0, 0, 0, 0] = math.nan if rank == 1 else 0.0
    assert training.step(4, 0, batches) == [False, False] and training.skipped.total == 1
    assert same(training.model, before)
    # Both processes have the same parameters and batch statistics.
    for value in training.model.state_dict().values():
        of_both = [torch.empty_like(value) for _ in range(2)]
        torch.distributed.all_gather(of_both, value.contiguous())
        assert torch.equal(*of_both)
    # DDP must not wait for the gradient of a parameter that a phase does not use.
    for model, which, mode in (
        (vit(), "all", "joint"),
        (vit(**UNIFORM), "all", "bcd"),
        (vit(), "gates", "bcd"),
    ):
        training = Training(model, which, mode=mode)
        moved = [training.step(step, 0, micro_batches(step)) for step in range(2)]
        assert moved == [[True], [True]]
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes():
    on_two_ranks(train_with_another)
