import pytest
import torch
from accelerate import Accelerator
from torch import nn

from moh_vision.engine.checkpoint import TrainingState
from moh_vision.engine.saver import Saver
from moh_vision.language.evaluation.scores import average_checkpoints


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight


class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Tied()


def saved(run, steps, keep=9):
    """A run that saved weights of its own at each step; returns them."""
    accelerator, values = Accelerator(cpu=True), {}
    task = accelerator.prepare(Task())
    for step in steps:
        with torch.no_grad():
            for p in task.parameters():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(step)))
        task.model.norm.num_batches_tracked.fill_(step)
        values[step] = {k: v.clone() for k, v in task.model.state_dict().items()}
        Saver(accelerator, run, TrainingState(task, []), keep).save(step, {}, last=True)
    return values


def test_the_mean_of_the_newest(tmp_path):
    values = saved(tmp_path, (2, 4, 6, 8))
    mean, steps = average_checkpoints(tmp_path, 3)
    assert steps == [8, 6, 4]
    for name, tensor in mean.items():
        expected = values[8][name]
        if tensor.is_floating_point():
            expected = (values[4][name].double() + values[6][name].double() + values[8][name].double()) / 3
        torch.testing.assert_close(tensor, expected.to(tensor.dtype), rtol=1e-6, atol=1e-7)
    model = Tied()
    absent = model.load_state_dict(mean, strict=False)
    assert not absent.unexpected_keys and set(absent.missing_keys) <= {"out.weight", "embed.weight"}
    assert len(absent.missing_keys) <= 1 and model.out.weight is model.embed.weight


def test_damaged_ones_are_passed_over(tmp_path):
    saved(tmp_path, (1, 2, 3))
    file = tmp_path / "checkpoints" / "step_3" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert average_checkpoints(tmp_path, 2)[1] == [2, 1]
    assert average_checkpoints(tmp_path, 9)[1] == [2, 1]
    with pytest.raises(ValueError, match="no whole checkpoint to average"):
        average_checkpoints(tmp_path / "none", 2)


def test_tied_weights_are_exported_once(tmp_path):
    from safetensors.torch import load_file

    saved(tmp_path, (1,))
    assert set(load_file(tmp_path / "model.safetensors")) == set(Tied().state_dict()) - {"out.weight"}
