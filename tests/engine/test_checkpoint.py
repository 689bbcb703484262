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

from moh_vision.attention import head_budget
from moh_vision.classification.task import ClassificationTask
from moh_vision.common.io import by_age
from moh_vision.engine.checkpoint import TrainingState
from moh_vision.engine.config import EmaConfig, ModelConfig
from moh_vision.engine.optimizers import make_optimizer, own_value
from moh_vision.engine.saver import Saver
from moh_vision.engine.step import clip_gradients
from moh_vision.engine.step_folders import latest_checkpoint, resume_point
from moh_vision.engine.weights import make_ema
from moh_vision.models.pretrained import described
from moh_vision.models.weight_files import read_tensors, weights_file
from moh_vision.models.weights import keep_shared_heads, to_validate
from tests.support.processes import on_two_ranks
from tests.support.refusals import one_line, refuse
from tests.support.small_runs import same

NAME = "moh_vit_tiny_patch16_224"
VIT = dict(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=6, num_classes=5)


def beginning(kind="plain", optimizer="adamw"):
    """A task as training has it, of a model of some kind, with EMA, optimiser and scaler; as a `TrainingState`."""
    torch.manual_seed(0)
    model = timm.create_model(NAME, **VIT)
    if "frozen" in kind:
        model.patch_embed.requires_grad_(False)
    if "tied" in kind:
        model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    if "channels" in kind:  # safetensors refuses tensors that are not contiguous
        model.to(memory_format=torch.channels_last)
    task = ClassificationTask(model, 0.01)
    if "unused" in kind:
        task.unused = torch.nn.Parameter(torch.ones(3))
    if "buffers" in kind:
        task.norm = torch.nn.BatchNorm2d(3)
    ema = make_ema(model, EmaConfig(decay=0.9), "cpu")
    if "compiled" in kind:
        task.compile(backend="eager")
    mesh = init_device_mesh("cpu", (2,)) if "sharded" in kind else None
    if "head" in kind:
        fully_shard(model.head, mesh=mesh)
    wrapped = (
        fully_shard(task, mesh=mesh)
        if mesh
        else DistributedDataParallel(task)
        if "ddp" in kind
        else task
    )
    if "wrapped" in kind:
        wrapped = torch.compile(task, backend="eager")
    common = dict(name=optimizer, lr=1e-2, weight_decay=0.05, momentum=0.9, layer_decay=None)
    options = SimpleNamespace(
        **common, **{name: own_value(optimizer, name) for name in ("betas", "eps")}
    )
    scaler = (
        torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        if "scaled" in kind
        else None
    )
    return TrainingState(wrapped, [make_optimizer(task, options)], ema, scaler)


def train(state, steps):
    task = getattr(state.task, "module", getattr(state.task, "_orig_mod", state.task))
    rank = dist.get_rank() if dist.is_initialized() else 0
    (optimizer,), norms = state.optimizers, []
    accelerator = SimpleNamespace(clip_grad_norm_=torch.nn.utils.clip_grad_norm_)
    for step in steps:
        generator = torch.Generator().manual_seed(2 * step + rank)
        images = torch.randn(4, 3, 16, 16, generator=generator)
        images = task.norm(images) if hasattr(task, "norm") else images
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
    """All that a state holds; of sharded tensors this process's rows."""
    found = {
        **state.task.state_dict(),
        **{f"ema.{k}": v for k, v in state.ema.module.state_dict().items()},
    }
    whole = state.optimizers[0].state_dict()
    found |= {
        (index, key): value for index, own in whole["state"].items() for key, value in own.items()
    }
    groups = [{k: v for k, v in group.items() if k != "lr"} for group in whole["param_groups"]]
    local = {k: v.to_local() if isinstance(v, DTensor) else v for k, v in found.items()}
    return copy.deepcopy((local, groups, state.scaler and state.scaler.state_dict()))


def assert_same(one, other):
    assert one[0].keys() == other[0].keys() and one[1:] == other[1:]
    for name, value in one[0].items():
        same = (
            torch.equal(value, other[0][name])
            if isinstance(value, torch.Tensor)
            else value == other[0][name]
        )
        assert same and type(value) is type(other[0][name]), name


def stopped_and_resumed(run, kind, optimizer):
    """Three steps, a save amid which training goes on, and again from the checkpoint: the bits of six steps."""
    whole, first, again = (beginning(kind, optimizer) for _ in range(3))
    train(whole, range(6))
    train(first, range(3))
    saver = Saver(PartialState(), run, first, keep=1)
    saver.save(
        3, dict(architecture=NAME, arguments=VIT, config=dict(model=dict(pretrained="gone")))
    )
    train(first, range(3, 6))
    saver.finish(last=True)
    assert_same(bits(whole), bits(first))
    again.restore(latest_checkpoint(run, pytest.fail)[1], pytest.fail)
    train(again, range(3, 6))
    assert_same(bits(whole), bits(again))


OPTIMIZERS = "muon lion sgd nesterov lamb nadamw adafactor adopt laprop cadamw mars radam".split()
KINDS = ["frozen", "unused", "buffers", "tied", "channels", "compiled", "wrapped", "scaled"]


@pytest.mark.parametrize(
    "kind, optimizer", [("plain", o) for o in OPTIMIZERS] + [(kind, "adamw") for kind in KINDS]
)
def test_resumed_to_the_bit(tmp_path, kind, optimizer):
    PartialState(cpu=True)
    stopped_and_resumed(tmp_path, kind, optimizer)


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def on_a_rank(rank, folder, cases):
    dist.init_process_group("gloo")
    PartialState(cpu=True)
    for case in cases:
        stopped_and_resumed(folder / case, *case.split(":"))
    one, two = (beginning(kind, "sgd") for kind in ("ddp", "sharded"))  # sharding changes no number
    assert train(one, range(3)) == pytest.approx(train(two, range(3)), rel=1e-4)
    averages = (dict(state.ema.module.state_dict()) for state in (one, two))
    torch.testing.assert_close(*averages, rtol=1e-4, atol=1e-5)
    with one_line("cannot be loaded into this model"):
        beginning("ddp frozen").restore(folder / "sharded:adamw" / "checkpoints" / "step_3")
    two = beginning("sharded head")  # they go on from one's checkpoint
    two.restore(folder / "alone" / "checkpoints" / "step_3")
    run = folder / "two"
    saver = Saver(PartialState(), run, two, keep=1)
    saver.save(1, {}, last=True)
    assert (run / "model.safetensors").exists()
    saver.save(2, {})
    saver.wait()
    # That of step 1 is old; the parts of step 2 are found.
    assert not (run / "model.safetensors").exists() and read_tensors(
        weights_file(str(run), "model")
    )
    saver.save(3, {}, last=True)
    with (
        mock.patch("moh_vision.engine.saver.save_tensors", full)
        if rank
        else contextlib.nullcontext()
    ):
        saver.save(4, {})
        saver.wait()
    assert "No space left" in saver.problem and [s for s, _ in by_age(run / "checkpoints")] == [3]
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    """Under FSDP2 each writes its own rows; one process reads them. What fails on one of them is known to both."""
    PartialState(cpu=True)
    stopped_and_resumed(tmp_path / "alone", "plain", "adamw")
    on_two_ranks(
        on_a_rank, tmp_path, ["ddp frozen:lion", "sharded:adamw", "sharded tied head frozen:muon"]
    )
    folder = tmp_path / "sharded:adamw" / "checkpoints" / "step_3"
    names = {path.name for path in folder.iterdir()}
    assert {
        f"{name}-0000{rank}.safetensors" for name in ("model", "optimizer") for rank in (0, 1)
    } < names
    weights = read_tensors(weights_file(str(folder), "model"))
    rows = [load_file(folder / f"model-0000{rank}.safetensors")["norm.weight"] for rank in (0, 1)]
    assert len(rows[0]) == len(rows[1]) == 12 and torch.equal(
        torch.cat(rows), weights["norm.weight"]
    )
    one = beginning()
    one.restore(folder)
    assert all(
        torch.equal(value, weights[name]) for name, value in one.task.model.state_dict().items()
    )
    assert all(own["exp_avg"].any() for own in one.optimizers[0].state_dict()["state"].values())
    (folder / "ema.safetensors").unlink()
    opened, about = to_validate(str(folder), "", {})
    assert about["of_run"] and same(opened.state_dict(), weights)
    other = timm.create_model(NAME, **VIT, head_budget="uniform:0.75")
    before = head_budget(other)
    keep_shared_heads(other, folder)  # of a resumed run
    now, trained = (head_budget(model)["layers"][1]["shared"] for model in (other, opened))
    assert now == trained == 3 != before["layers"][1]["shared"]
    resumed = SimpleNamespace(
        model=ModelConfig(name="pretrained", pretrained="gone"), output=folder.parents[1]
    )
    assert described(resumed, "classification", fresh=False) == (
        NAME,
        VIT,
    )  # without the pre-trained model
    # The last save of a sharded run puts its weights together.
    assert not (tmp_path / "sharded:adamw" / "model.safetensors").exists()
    alone, two = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "two"))
    assert alone.keys() == two.keys() and all(torch.equal(alone[name], two[name]) for name in alone)


@pytest.fixture
def trained(tmp_path):
    """A run that was saved after two steps, and its state."""
    Accelerator(cpu=True)
    state = beginning()
    train(state, range(2))
    save(tmp_path, 2, state)
    return tmp_path, state


def save(run, step, state, keep=2):
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
    save(run, 8, TrainingState(state.task, state.optimizers))
    save(run, 9, TrainingState(state.task, state.optimizers), keep=3)
    assert not (run / "ema.safetensors").exists() and (run / "old_ema.safetensors").exists()
    said = []
    state.ema.module.head.weight.data.fill_(torch.nan)  # what it was does not matter
    state.restore(run / "checkpoints" / "step_8", said.append)
    assert "has no EMA" in said[0] and torch.equal(
        state.ema.module.head.weight, state.task.model.head.weight
    )
    scaler = torch.amp.GradScaler("cpu")
    TrainingState(state.task, state.optimizers, scaler=scaler).restore(
        run / "checkpoints" / "step_8"
    )


def test_a_finished_run_is_resumed_at_its_end_and_one_that_is_past_it_refused(trained, tmp_path):
    run = trained[0]
    for max_steps in (2, 3):
        assert resume_point(run, max_steps, fresh=False) == (2, run / "checkpoints" / "step_2")
    assert resume_point(run, 1, fresh=True) is None and latest_checkpoint(tmp_path / "none") is None
    refuse("--max-steps 1: .* has already done 2 steps", resume_point, run, 1, fresh=False)


def test_checkpoints_of_other_models_are_refused_in_one_line(trained):
    run, state = trained
    folder = run / "checkpoints" / "step_2"
    state.task.model.head = torch.nn.Linear(24, 6)  # as after a change of the model's code
    refuse(
        "step_2, of moh_vision 0.1.0, cannot be loaded into this model .*size mismatch",
        state.restore,
        folder,
    )
    refuse(
        "cannot be loaded into this model .optimiser 0 has other parameters",
        beginning("frozen").restore,
        folder,
    )
