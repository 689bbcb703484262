"""What a checkpoint holds: a run that resumes from it goes on with the same bits, on one process and sharded over two."""

import contextlib
import copy
import errno
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import timm
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import moh_vision
from moh_vision.attention import head_budget
from moh_vision.classification.task import ClassificationTask
from moh_vision.common.io import by_age
from moh_vision.engine.checkpoint import TrainingState
from moh_vision.engine.config import EmaConfig, ModelConfig
from moh_vision.engine.optimizers import MUON_SHARDED_FROM, make_optimizer, own_value
from moh_vision.engine.saver import Saver
from moh_vision.engine.step import clip_gradients
from moh_vision.engine.step_folders import latest_checkpoint, resume_point
from moh_vision.engine.weights import make_ema
from moh_vision.models.fitting import keep_shared_heads
from moh_vision.models.pretrained import name_and_arguments
from moh_vision.models.weight_files import read_tensors, weights_file
from moh_vision.models.weights import find_weights
from tests.support.processes import on_two_ranks
from tests.support.refusals import one_line, refuse
from tests.support.small_runs import same

NAME = "moh_vit_tiny_patch16_224"
VIT = dict(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=6, num_classes=5)


def wrap(task, traits):
    """Shard a task with FSDP2, wrap it in DDP or compile it, if its traits say so."""
    if "sharded" in traits:
        mesh = init_device_mesh("cpu", (2,))
        if "head" in traits:
            fully_shard(task.model.head, mesh=mesh)
        return fully_shard(task, mesh=mesh)
    if "ddp" in traits:
        return DistributedDataParallel(task)
    if "wrapped" in traits:
        return torch.compile(task, backend="eager")
    return task


def beginning(traits="plain", optimizer="adamw"):
    """Make the `TrainingState` that a training begins with: a task, its EMA, optimiser and scaler.

    traits: words that say what is special about the model or the training, "plain" for nothing.
    """
    torch.manual_seed(0)
    model = timm.create_model(NAME, **VIT)
    if "frozen" in traits:
        model.patch_embed.requires_grad_(False)
    if "tied" in traits:
        model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    if "channels" in traits:  # not contiguous; safetensors refuses such tensors
        model.to(memory_format=torch.channels_last)
    task = ClassificationTask(model, 0.01)
    if "unused" in traits:
        task.unused = torch.nn.Parameter(torch.ones(3))
    if "buffers" in traits:
        task.norm = torch.nn.BatchNorm2d(3)
    ema = make_ema(model, EmaConfig(decay=0.9), "cpu")
    if "compiled" in traits:
        task.compile(backend="eager")
    wrapped = wrap(task, traits)
    options = SimpleNamespace(
        name=optimizer,
        lr=1e-2,
        weight_decay=0.05,
        momentum=0.9,
        layer_decay=None,
        betas=own_value(optimizer, "betas"),
        eps=own_value(optimizer, "eps"),
    )
    scaler = None
    if "scaled" in traits:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    return TrainingState(wrapped, [make_optimizer(task, options)], ema, scaler)


def train(state, steps):
    """Train the steps with these indices and return the norms of their gradients."""
    task = getattr(state.task, "module", getattr(state.task, "_orig_mod", state.task))
    rank = dist.get_rank() if dist.is_initialized() else 0
    (optimizer,) = state.optimizers
    norms = []
    accelerator = SimpleNamespace(clip_grad_norm_=torch.nn.utils.clip_grad_norm_)
    for step in steps:
        generator = torch.Generator().manual_seed(2 * step + rank)
        images = torch.randn(4, 3, 16, 16, generator=generator)
        if hasattr(task, "norm"):
            images = task.norm(images)
        losses = state.task(images, torch.randint(0, 5, (4,), generator=generator))
        if state.scaler:
            state.scaler.scale(losses["loss"]).backward()
            state.scaler.step(optimizer)
            state.scaler.update()
            optimizer.zero_grad(set_to_none=True)
        else:
            losses["loss"].backward()
            norms.append(clip_gradients(accelerator, state.task.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        state.ema.update(task.model, step + 1)
    return norms


def bits(state):
    """Return a copy of all that a state holds; of a sharded tensor, the rows of this process."""
    optimizer = state.optimizers[0].state_dict()
    found = dict(state.task.state_dict())
    for name, value in state.ema.module.state_dict().items():
        found[f"ema.{name}"] = value
    for index, buffers in optimizer["state"].items():
        for name, value in buffers.items():
            found[index, name] = value
    for name, value in found.items():
        if isinstance(value, DTensor):
            found[name] = value.to_local()
    groups = [
        {key: value for key, value in group.items() if key != "lr"}
        for group in optimizer["param_groups"]
    ]
    return copy.deepcopy((found, groups, state.scaler and state.scaler.state_dict()))


def assert_same(one, other):
    """Assert that two results of `bits` are equal, types included."""
    assert one[0].keys() == other[0].keys() and one[1:] == other[1:]
    for name, value in one[0].items():
        expected = other[0][name]
        assert type(value) is type(expected), name
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, expected), name
        else:
            assert value == expected, name


def stopped_and_resumed(run, traits, optimizer):
    """Assert that six steps at once, six steps with a save after the third, and a resumed run end with the same bits.

    Training goes on while the save writes its files.
    """
    whole, first, again = (beginning(traits, optimizer) for _ in range(3))
    train(whole, range(6))
    train(first, range(3))
    saver = Saver(PartialState(), run, first, keep=1)
    config = dict(model=dict(pretrained="gone"))
    saver.save(3, dict(architecture=NAME, arguments=VIT, config=config))
    train(first, range(3, 6))
    saver.finish(last=True)
    assert_same(bits(whole), bits(first))
    again.restore(latest_checkpoint(run, pytest.fail)[1], pytest.fail)
    train(again, range(3, 6))
    assert_same(bits(whole), bits(again))


OPTIMIZERS = "muon lion sgd nesterov lamb nadamw adafactor adopt laprop cadamw mars radam".split()
TRAITS = ["frozen", "unused", "buffers", "tied", "channels", "compiled", "wrapped", "scaled"]


@pytest.mark.parametrize(
    "traits, optimizer",
    [("plain", optimizer) for optimizer in OPTIMIZERS] + [(trait, "adamw") for trait in TRAITS],
)
def test_resumed_to_the_bit(tmp_path, traits, optimizer):
    PartialState(cpu=True)
    stopped_and_resumed(tmp_path, traits, optimizer)


def full(*_):
    """Raise the error of a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


def on_a_rank(rank, folder, cases):
    dist.init_process_group("gloo")
    PartialState(cpu=True)
    for case in cases:
        stopped_and_resumed(folder / case, *case.split(":"))
    # Sharding changes neither gradients nor averages, up to rounding.
    replicated = beginning("ddp", "sgd")
    sharded = beginning("sharded", "sgd")
    assert train(replicated, range(3)) == pytest.approx(train(sharded, range(3)), rel=1e-4)
    averages = (dict(state.ema.module.state_dict()) for state in (replicated, sharded))
    torch.testing.assert_close(*averages, rtol=1e-4, atol=1e-5)
    with one_line("step_3 cannot loaded"):
        beginning("ddp frozen").restore(folder / "sharded:adamw" / "checkpoints" / "step_3")
    # Two processes resume from the checkpoint of one process.
    state = beginning("sharded head")
    state.restore(folder / "alone" / "checkpoints" / "step_3")
    run = folder / "two"
    saver = Saver(PartialState(), run, state, keep=1)
    saver.save(1, {}, last=True)
    assert (run / "model.safetensors").exists()
    saver.save(2, {})
    saver.wait()
    # The file of the whole weights, of step 1, is out of date and deleted; the sharded weights of step 2 are found.
    assert not (run / "model.safetensors").exists()
    assert read_tensors(weights_file(str(run), "model"))
    saver.save(3, {}, last=True)
    # If the save of the second process fails, both learn of it, and step 4 is no checkpoint.
    with contextlib.ExitStack() as stack:
        if rank:
            stack.enter_context(mock.patch("moh_vision.engine.saver.save_tensors", full))
        saver.save(4, {})
        saver.wait()
    assert "No space left" in saver.problem
    assert [step for step, _ in by_age(run / "checkpoints")] == [3]
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    """Under FSDP2 each process writes its own rows, and a single process can read the checkpoint."""
    PartialState(cpu=True)
    stopped_and_resumed(tmp_path / "alone", "plain", "adamw")
    orthogonal = "muon" if torch.__version__ >= MUON_SHARDED_FROM else "lion"
    cases = ["ddp frozen:lion", "sharded:adamw", f"sharded tied head frozen:{orthogonal}"]
    on_two_ranks(on_a_rank, tmp_path, cases)
    folder = tmp_path / "sharded:adamw" / "checkpoints" / "step_3"
    names = {path.name for path in folder.iterdir()}
    files = ("model", "optimizer")
    assert {f"{name}-0000{rank}.safetensors" for name in files for rank in (0, 1)} < names
    weights = read_tensors(weights_file(str(folder), "model"))
    rows = [load_file(folder / f"model-0000{rank}.safetensors")["norm.weight"] for rank in (0, 1)]
    assert len(rows[0]) == len(rows[1]) == 12
    assert torch.equal(torch.cat(rows), weights["norm.weight"])
    one = beginning()
    one.restore(folder)
    assert same(one.task.model.state_dict(), weights)
    moments = one.optimizers[0].state_dict()["state"].values()
    assert all(buffers["exp_avg"].any() for buffers in moments)
    (folder / "ema.safetensors").unlink()
    found = find_weights(folder)
    opened = found.build()
    assert found.brings_model and same(opened.state_dict(), weights)
    # A resumed run keeps its shared heads.
    other = timm.create_model(NAME, **VIT, head_budget="uniform:0.75")
    before = head_budget(other)
    keep_shared_heads(other, folder)
    now, trained = (head_budget(model)["layers"][1]["shared"] for model in (other, opened))
    assert now == trained == 3 != before["layers"][1]["shared"]
    # A resumed run does not need the pre-trained model that it began with.
    resumed = SimpleNamespace(
        model=ModelConfig(name="pretrained", pretrained="gone"), output=folder.parents[1]
    )
    assert name_and_arguments(resumed, "classification", fresh=False) == (NAME, VIT)
    # Only the last save of a sharded run writes the whole weights, model.safetensors.
    assert not (tmp_path / "sharded:adamw" / "model.safetensors").exists()
    assert same(*(tmp_path / name / "model.safetensors" for name in ("alone", "two")))


@pytest.fixture
def trained(tmp_path):
    """Train two steps and save; return the folder of the run and its `TrainingState`."""
    Accelerator(cpu=True)
    state = beginning()
    train(state, range(2))
    save(tmp_path, 2, state)
    return tmp_path, state


def save(run, step, state, keep=2):
    """Save a step as the last one of a run."""
    Saver(PartialState(), run, state, keep).save(step, {"architecture": "linear"}, last=True)


def test_the_first_save_says_what_it_took_and_later_ones_are_silent(tmp_path, capsys):
    saver = Saver(PartialState(), tmp_path, beginning(), keep=9)
    with mock.patch("moh_vision.engine.saver.save_tensors", full):
        saver.save(1, {})
        saver.wait()
    said = capsys.readouterr().out
    assert "step 1 could not be saved" in said and "first save" not in said
    for step in (2, 3):
        saver.save(step, {})
        saver.finish()
    line = capsys.readouterr().out
    folder = tmp_path / "checkpoints" / "step_2"
    size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
    pattern = rf"first save: {re.escape(str(folder))}, {size:.1f} MiB in \d+\.\d s\n"
    assert size > 0.1 and re.fullmatch(pattern, line)


def test_ema_and_scaler_switched_on_and_off(trained):
    run, state = trained
    # Without an EMA: the file that a run with EMA left is renamed, so that nobody takes it for current weights.
    save(run, 8, TrainingState(state.task, state.optimizers))
    save(run, 9, TrainingState(state.task, state.optimizers), keep=3)
    assert not (run / "ema.safetensors").exists() and (run / "old_ema.safetensors").exists()
    said = []
    state.ema.module.head.weight.data.fill_(torch.nan)  # restore must replace these
    state.restore(run / "checkpoints" / "step_8", said.append)
    assert "has no EMA" in said[0]
    assert torch.equal(state.ema.module.head.weight, state.task.model.head.weight)
    scaled = TrainingState(state.task, state.optimizers, scaler=torch.amp.GradScaler("cpu"))
    scaled.restore(run / "checkpoints" / "step_8")


def test_a_finished_run_is_resumed_at_its_end_and_one_that_is_past_it_refused(trained, tmp_path):
    run = trained[0]
    for max_steps in (2, 3):
        assert resume_point(run, max_steps, fresh=False) == (2, run / "checkpoints" / "step_2")
    assert resume_point(run, 1, fresh=True) is None and latest_checkpoint(tmp_path / "none") is None
    refuse(f"--max-steps 1 {run} 2", resume_point, run, 1, fresh=False)


def test_checkpoints_of_other_models_are_refused_in_one_line(trained):
    run, state = trained
    folder = run / "checkpoints" / "step_2"
    state.task.model.head = torch.nn.Linear(24, 6)  # as if the code of the model had changed
    facts = f"{folder} {moh_vision.__version__} model.head.weight 5 6"
    refuse(facts, state.restore, folder)
    refuse(f"{folder} optimiser 0", beginning("frozen").restore, folder)
