"""Which phases a step has, and what moves in each, against Peng 2020 written out with autograd."""

import copy
import itertools
import math
from functools import partial
from types import SimpleNamespace

import pytest
import timm
import torch
from accelerate import Accelerator
from pictures import write_folder
from processes import on_two_ranks
from safetensors.torch import load_file
from small_runs import arguments, entries, logged, outcome, results, same

from moh_vision.classification import train as train_cls
from moh_vision.classification.task import ClassificationTask
from moh_vision.diffusion import train as train_dit
from moh_vision.engine.block_descent import GATES, WEIGHTS, BlockDescent, phases_of
from moh_vision.engine.config import BlockDescentConfig
from moh_vision.engine.step import Updater
from moh_vision.models.mae import mae_routers, train_only

C, H, DEPTH = 24, 6, 2
VIT = dict(img_size=16, patch_size=4, embed_dim=C, depth=DEPTH, num_heads=H, num_classes=5, router="mae")


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
    pairs = [(torch.randn(size, 3, 16, 16, **draws), torch.randint(5, (size,), **draws)) for _ in range(count)]
    return [dict(images=images, labels=labels) for images, labels in pairs]


class Training:
    """The loop of the scripts, with plain SGD in F so that an update is the gradient."""

    def __init__(self, model, which="all", optimizer=None, compile=None, **settings):
        self.accelerator = Accelerator(cpu=True)
        self.model = model
        train_only(model, which)
        self.descent = BlockDescent(self.accelerator, model, mae_routers(model), False, BlockDescentConfig(**settings))
        task = ClassificationTask(model, 0.01).train()
        if compile:
            task.compile(backend=compile)
        self.update = Updater(self.accelerator, clip_norm=0.0)
        optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        self.task, self.optimizer = self.descent.prepare(task, optimizer)
        self.seen, self.norms = [], {}

    def step(self, step, epoch, batches, watch=lambda phase: None):
        updated = []
        for phase in self.descent.phases(epoch, iter(batches)):
            losses = []
            for micro in range(len(batches)):
                batch = next(phase.batches)
                self.seen.append((phase.name, batch["images"]))
                torch.manual_seed(seed(step, micro, self.accelerator.process_index, phase.name))
                with self.accelerator.no_sync(phase.task) if micro + 1 < len(batches) else torch.enable_grad():
                    losses.append(phase.task(**batch))
                    self.accelerator.backward(losses[-1]["loss"] / len(batches))
            self.norms[phase.name], moved = phase.update(self.update, step, losses)
            updated.append(moved)
            watch(phase)
        return updated


def seed(step, micro, rank, phase):
    return 1000 * step + 10 * micro + rank + 500 * (phase == GATES)


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
    names = ["".join(phases_of(epoch, 5)) for epoch in range(12)]
    assert names == ["GF", "F", "F", "F", "F"] * 2 + ["GF", "F"]
    assert all(phases_of(epoch, 1) == (GATES, WEIGHTS) for epoch in range(3))
    salts = [phase.salt for phase in Training(vit()).descent.phases(0, [])]
    assert salts == [(1,), ()]  # F draws what a model without gates draws


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
    return dict(zip(names, torch.autograd.grad(sum(losses) / len(losses), [own[name] for name in names])))


def test_g_moves_the_gates_and_f_the_rest_each_by_its_own_gradient():
    training, batches = Training(vit()), micro_batches(1)
    gates, weights = split(training.model)
    states = [copy.deepcopy(training.model)]
    updated = training.step(3, 0, batches, lambda phase: states.append(copy.deepcopy(training.model)))
    assert updated == [True, True]
    phases = (GATES, "soft", gates, 1.0), (WEIGHTS, "sampled", weights, 0.1)
    for (phase, mode, names, lr), model, moved in zip(phases, states, states[1:]):
        before, after = snapshot(model), snapshot(moved)
        assert changed(before, moved) == names
        model = copy.deepcopy(model).train().requires_grad_(True)
        draws = [seed(3, micro, 0, phase) for micro in range(2)]
        for name, gradient in gradients_by_hand(model, batches, mode, draws, sorted(names)).items():
            torch.testing.assert_close(after[name], before[name] - lr * gradient, rtol=0, atol=1e-7)
    assert max((states[1].state_dict()[n] - states[0].state_dict()[n]).abs().max() for n in gates) > 1e-4


def test_the_batch_is_fetched_once_and_later_epochs_have_f_alone():
    training, fetched = Training(vit()), []

    def stream():
        for number in itertools.count():
            fetched.append(number)
            yield micro_batches(number, 1)[0]

    source = stream()
    for step, epoch in enumerate([0, 1, 4, 5]):
        before, state = snapshot(training.model), len(training.seen)
        training.step(step, epoch, list(itertools.islice(source, 2)))
        names = [name for name, _ in training.seen[state:]]
        assert names == (["G", "G", "F", "F"] if epoch % 5 == 0 else ["F", "F"])
        assert changed(before, training.model) == set().union(*split(training.model)[epoch % 5 > 0 :])
        if epoch % 5 == 0:
            (_, a), (_, b), (_, c), (_, d) = training.seen[state:]
            assert a is c and b is d
    assert fetched == list(range(8))


def test_micro_batches_are_taken_one_by_one():
    """A step of many micro-batches does not wait for all of them, nor keep them where nothing asks for them again."""
    taken, training = [], Training(vit())
    for epoch, counts in ((0, [1, 2, 2, 2]), (1, [1, 2])):
        taken.clear()
        found = []
        for phase in training.descent.phases(epoch, (taken.append(b) or b for b in micro_batches(0))):
            for _ in range(2):
                next(phase.batches)
                found.append(len(taken))
        assert found == counts


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
        training.task.train()


def test_batch_statistics_are_taken_in_both_phases():
    training = Training(vit())
    training.step(0, 0, micro_batches(0))
    training.step(1, 1, micro_batches(1))
    assert [int(router.norm.num_batches_tracked) for router in mae_routers(training.model)] == [6] * DEPTH


def test_joint_training_moves_the_gates_by_sgd_and_the_rest_by_adam():
    """Peng 2020, appendix A: NoBCD's gates too learn by SGD with a fixed rate, without momentum or weight decay."""
    model = vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    training = Training(model, optimizer=optimizer, mode="joint", gate_lr=0.25)
    gates, weights = split(model)
    for step in range(2):  # the second step would show a momentum
        before, batches = copy.deepcopy(model), micro_batches(step)
        training.seen.clear()
        assert training.step(step, 0, batches) == [True] and [name for name, _ in training.seen] == ["F", "F"]
        assert changed(snapshot(before), model) == gates | weights
        draws = [seed(step, micro, 0, WEIGHTS) for micro in range(2)]
        gradients = gradients_by_hand(copy.deepcopy(before).train(), batches, "soft", draws, sorted(gates))
        for name, gradient in gradients.items():
            moved = model.get_parameter(name) - before.get_parameter(name)
            torch.testing.assert_close(moved, -0.25 * gradient, rtol=1e-4, atol=1e-7)


def test_uniform_experts_have_one_phase_and_train_everything():
    model = vit(router_kwargs=dict(mode="uniform"))
    training = Training(model)
    before = snapshot(model)
    assert training.step(0, 0, micro_batches(0)) == [True]
    gates, weights = split(model)
    assert not gates and changed(before, model) == weights
    assert {router.mode for router in mae_routers(model)} == {"uniform"}


def test_a_model_without_gates_has_one_plain_phase():
    torch.manual_seed(0)
    model = timm.create_model("moh_vit_tiny_patch16_224", **{**VIT, "router": "moh", "head_budget": 0.5})
    training, batches = Training(model), micro_batches(0)
    twin = copy.deepcopy(model).train()
    training.step(0, 0, batches)
    optimizer, task = torch.optim.SGD(twin.parameters(), lr=0.1), ClassificationTask(twin, 0.01).train()
    for micro, batch in enumerate(batches):
        torch.manual_seed(seed(0, micro, 0, WEIGHTS))
        (task(**batch)["loss"] / 2).backward()
    optimizer.step()
    assert same(model, twin)
    assert training.descent.about() == {}
    with pytest.raises(ValueError, match="train_only gates: the model has no gates of MAE; it needs router mae"):
        train_only(model, "gates")
    with pytest.raises(ValueError, match="train_only gates_and_outputs: .* mode soft"):
        train_only(vit(router_kwargs=dict(mode="uniform")), "gates_and_outputs")


def test_fsdp_is_refused_in_turns_only():
    sharded = SimpleNamespace(distributed_type="FSDP")
    with pytest.raises(ValueError, match="block_descent.mode bcd does not work with FSDP: .* DDP, or take mode joint"):
        BlockDescent(sharded, model := vit(), mae_routers(model), False, BlockDescentConfig())
    BlockDescent(sharded, model, mae_routers(model), False, BlockDescentConfig(mode="joint"))


# ---------------------------------------------------------------- fine-tuning sets


GATE = C * 256 + 256 + 256 * H + H + 2 * C  # two linear layers and the batch norm (Peng 2020, appendix A)


@pytest.mark.parametrize("which, count", [("gates", DEPTH * GATE), ("gates_and_outputs", DEPTH * (GATE + C * C))])
def test_fine_tuning_sets(which, count):
    model = vit()
    training = Training(model, which)
    gates, weights = split(model)
    outputs = {f"blocks.{layer}.attn.proj.weight" for layer in range(DEPTH)}
    assert training.descent.trained == count
    events = []
    training.descent.announce(SimpleNamespace(event=lambda *args: events.append(args)), 0)
    assert events[0][:2] == (0, dict(trained_parameters=count)) and f"training {count:,} of" in events[0][2]
    for epoch, expected in ((0, "G" if which == "gates" else "GF"), (1, "G" if which == "gates" else "F")):
        before, seen = snapshot(model), len(training.seen)
        training.step(epoch, epoch, micro_batches(epoch, 1))
        assert "".join(name for name, _ in training.seen[seen:]) == expected
        moved = (gates if "G" in expected else set()) | (outputs if "F" in expected else set())
        assert changed(before, model) == moved


def test_the_papers_counts():
    """Peng 2020, table 7: FTG 2M, FTG+ 7M of transformer-base's 18 attentions (2.42M and 7.14M with batch norm)."""
    gate = 512 * 256 + 256 + 256 * 8 + 8 + 2 * 512
    kwargs = dict(VIT, embed_dim=512, num_heads=8, depth=18, mlp_ratio=0.125)
    with torch.device("meta"):
        model = timm.create_model("moh_vit_tiny_patch16_224", **kwargs)
    for which, count in (("gates", 18 * gate), ("gates_and_outputs", 18 * (gate + 512 * 512))):
        train_only(model.requires_grad_(True), which)
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == count
    assert round(18 * gate / 1e6, 2) == 2.42 and round(count / 1e6, 2) == 7.14


# ---------------------------------------------------------------- safety


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_batch_changes_nothing_not_even_batch_norm(value):
    training = Training(vit(), optimizer=None)
    training.step(0, 0, micro_batches(0))
    before, batches = snapshot(training.model), micro_batches(1)
    batches[0]["images"][0, 0, 0, 0] = value
    assert training.step(1, 0, batches) == [False, False]
    assert same(training.model, before)
    assert training.update.skipped == training.update.in_a_row == 1  # one step, though two phases
    assert training.step(2, 0, micro_batches(2)) == [True, True]
    assert training.update.in_a_row == 0 and training.update.skipped == 1


def test_gates_that_alone_are_not_finite_end_the_run_too():
    """A good F phase of the same step does not make up for them, a step without G phase does."""
    training = Training(vit())
    bias = mae_routers(training.model)[0].out.bias.requires_grad_(True)
    bias.register_hook(lambda gradient: gradient * math.nan)
    for step in range(9):
        assert training.step(step, 0, micro_batches(step, 1)) == [False, True]
    assert training.update.in_a_row == 9
    training.step(9, 1, micro_batches(9, 1))
    assert training.update.in_a_row == 0
    for step in range(10, 19):
        training.step(step, 5, micro_batches(step, 1))
    with pytest.raises(FloatingPointError, match="step 19: 10 steps in a row .*lr 1\\); the last one with both was"):
        training.step(19, 5, micro_batches(19, 1))


def test_the_models_clipping_is_not_the_gates():
    training = Training(vit())
    training.update.clip_norm = 1e-6
    before = snapshot(training.model)
    training.step(0, 0, micro_batches(0))
    gates, weights = split(training.model)
    after = training.model.state_dict()
    moved = [math.sqrt(sum((after[n] - before[n]).square().sum().item() for n in names)) for names in (gates, weights)]
    assert moved[0] == pytest.approx(training.norms[GATES], rel=1e-3) and moved[0] > 1e-3
    assert moved[1] < 1e-6


def test_a_gradient_scaler_serves_both_phases():
    """As with fp16: both optimisers step through one scaler, which divides what it multiplied and halves at an overflow."""
    plain, scaled = Training(vit()), Training(vit())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled.accelerator.scaler, scaled.accelerator.native_amp = scaler, True
    scaled.accelerator.state._mixed_precision = "fp16"
    try:
        for optimizer in (scaled.descent.gate_optimizer, scaled.optimizer):
            optimizer.scaler = scaler
            optimizer._accelerate_step_called = False
            optimizer._optimizer_original_step_method = optimizer.optimizer.step
            optimizer._optimizer_patched_step_method = patched(optimizer)
        for step in range(2):
            batches = micro_batches(step)
            assert scaled.step(step, 0, batches) == [True, True]
            scaled.accelerator.scaler = None
            scaled.accelerator.native_amp = False
            plain.step(step, 0, batches)
            scaled.accelerator.scaler, scaled.accelerator.native_amp = scaler, True
        torch.testing.assert_close(scaled.model.state_dict(), plain.model.state_dict(), rtol=1e-5, atol=1e-6)
        assert scaler.state_dict()["_growth_tracker"] == 4  # two good phases in each of two steps
    finally:
        scaled.accelerator.state._mixed_precision = "no"


def patched(optimizer):
    from accelerate.optimizer import patch_optimizer_step

    return patch_optimizer_step(optimizer, optimizer.optimizer.step)


# ---------------------------------------------------------------- the scripts


SCRIPTS = dict(cls=train_cls, dit=train_dit)
MAE = (
    "--model.router mae --model.head_budget null --model.embed_dim 16 --data.augment none --data.img_size 8 "
    "--optim.accumulation 2 --optim.schedule constant --optim.warmup_steps 0 --block_descent.period 2 "
    "--keep-checkpoints 9"
).split()


@pytest.mark.parametrize("kind", ["cls", "dit"])
def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path, kind):
    """Weights, batch statistics, EMA and both optimisers."""
    root = write_folder(tmp_path / "d", train=8)  # two steps an epoch: 0, 1, 4 and 5 have a G phase
    ends = {}
    for name, parts in (("whole", [6]), ("parts", [3, 6])):
        for steps in parts:
            SCRIPTS[kind].main(arguments(kind, tmp_path / name, steps, 3, *MAE, "--data.root", root))
        ends[name] = outcome(tmp_path / name)
    assert ends["whole"] == ends["parts"]
    _, gates = ends["whole"]["optimizers"]
    assert [gates["plain"][f"1/group0/{key}"] for key in ("lr", "momentum", "weight_decay")] == [1, 0, 0]
    lines = logged(tmp_path / "parts")
    assert [e["step"] for e in lines if "gate_grad_norm" in e] == [1, 2, 5, 6] and len(lines) == 6
    # From step 3 to 4 the gates stand still but for their batch statistics, from 4 to 6 they do not.
    states = [load_file(tmp_path / "parts" / f"checkpoints/step_{step}/model.safetensors") for step in (3, 6)]
    gates = [name for name in states[0] if ".router." in name]
    assert gates and all(not torch.equal(states[0][name], states[1][name]) for name in gates)
    if kind == "cls":
        trained = results(tmp_path / "parts")["trained_parameters"]
        assert entries(tmp_path / "parts")[0] == dict(step=0, trained_parameters=trained)


def test_a_run_of_a_model_without_gates_saves_one_optimiser_and_says_nothing_of_gates(tmp_path):
    train_cls.main(arguments("cls", tmp_path, 2, 1))
    names = {path.name for path in (tmp_path / "checkpoints" / "step_2").iterdir()}
    assert names == {"model.safetensors", "ema.safetensors", "optimizer.safetensors", "step.json"}
    assert not any("gate" in key or "trained" in key for entry in logged(tmp_path) for key in entry)
    assert "trained_parameters" not in results(tmp_path)


def test_fine_tuning_a_run(tmp_path, capsys):
    small = [*MAE, "--data.root", write_folder(tmp_path / "d", train=8)]
    train_cls.main(arguments("cls", tmp_path / "one", 1, 1, *small))
    more = ["--init-from", str(tmp_path / "one"), "--train_only", "gates_and_outputs"]
    train_cls.main(arguments("cls", tmp_path / "two", 2, 1, *small, *more))
    ends = (tmp_path / "one/checkpoints/step_1", tmp_path / "two/checkpoints/step_2")
    before, after = (load_file(folder / "model.safetensors") for folder in ends)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".router." in name or name.endswith("attn.proj.weight")}
    assert results(tmp_path / "two")["trained_parameters"] == 2 * (16 * 256 + 256 + 256 * 8 + 8 + 2 * 16 + 16 * 16)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        train_cls.main(arguments("cls", tmp_path / "three", 1, 1, "--train_only", "gates"))
    left_out, error = capsys.readouterr().err.splitlines()
    assert "cls.yaml, without effect here: optim.lr 0.003 (needs train_only other than gates" in left_out
    words = "train_only gates: the model has no gates of MAE; it needs router mae with mode soft"
    assert error == f"train_cls.py: error: {words}" and not (tmp_path / "three").exists()


# ---------------------------------------------------------------- two processes, compiled


def remember(states, model, phase):
    states.append(copy.deepcopy(model))


def train_with_another(rank):
    """Both phases against the mean over both processes' micro-batches, each with its own draws, by hand."""
    torch.distributed.init_process_group("gloo")
    training = Training(vit())
    assert type(training.task).__name__ == "DistributedDataParallel"
    gates, weights = split(training.model)
    for step, epoch in enumerate((0, 1, 5)):
        states = [copy.deepcopy(training.model)]
        batches = [micro_batches(10 * step + r) for r in range(2)]
        assert all(training.step(step, epoch, batches[rank], partial(remember, states, training.model)))
        phases = phases_of(epoch, 5)
        assert len(states) == 1 + len(phases)
        for phase, model, after in zip(phases, states, states[1:]):
            own, others = (sorted(gates), weights) if phase == GATES else (sorted(weights), gates)
            before, moved = snapshot(model), snapshot(after)
            assert all(torch.equal(before[name], moved[name]) for name in others)
            model.train().requires_grad_(True)
            draws = [seed(step, micro, rank, phase) for micro in range(2)]
            mode, lr = ("soft", 1.0) if phase == GATES else ("sampled", 0.1)
            # Both compute their half at the same time, because the gates' batch norm is that of both.
            for name, gradient in gradients_by_hand(model, batches[rank], mode, draws, own).items():
                torch.distributed.all_reduce(gradient)
                gradient /= 2
                torch.testing.assert_close(moved[name], before[name] - lr * gradient, rtol=0, atol=1e-6)
    # One process meets a bad batch: both skip both phases, batch statistics included.
    before, batch = snapshot(training.model), micro_batches(99)
    batch[1]["images"][0, 0, 0, 0] = math.nan if rank == 1 else 0.0
    assert training.step(4, 0, batch) == [False, False] and training.update.skipped == 1
    assert same(training.model, before)
    for value in training.model.state_dict().values():  # batch statistics are those of all
        other = [torch.empty_like(value) for _ in range(2)]
        torch.distributed.all_gather(other, value.contiguous())
        assert torch.equal(*other)
    for mode in ("joint", "uniform"):  # no gate waits for a gradient that does not come
        model = vit(router_kwargs=dict(mode="uniform")) if mode == "uniform" else vit()
        training = Training(model, mode="joint" if mode == "joint" else "bcd")
        assert [training.step(step, 0, micro_batches(step)) for step in range(2)] == [[True], [True]]
    training = Training(vit(), "gates")
    assert [training.step(step, 0, micro_batches(step)) for step in range(2)] == [[True], [True]]
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes():
    on_two_ranks(train_with_another)


@pytest.mark.slow
def test_compiled():
    """Every phase has a graph of its own, and the same numbers."""
    plain, compiled = Training(vit()), Training(vit(), compile="aot_eager")
    for step, epoch in enumerate((0, 1, 0)):
        for training in (plain, compiled):
            assert all(training.step(step, epoch, micro_batches(step)))
    torch.testing.assert_close(compiled.model.state_dict(), plain.model.state_dict(), rtol=1e-4, atol=1e-5)
