"""Optimisers by timm's names: their defaults, the weights that muon takes, and resuming with the same bits."""

import copy

import pytest
import timm
import torch
from accelerate import PartialState
from torch.torch_version import TorchVersion

import moh_vision  # noqa: F401
from moh_vision.classification import train as train_cls
from moh_vision.classification.config import ClsConfig
from moh_vision.engine.checkpoint import TrainingState
from moh_vision.engine.config import OptimConfig
from moh_vision.engine.optimizers import check_sharded, make_optimizer, names
from moh_vision.engine.saver import Saver
from moh_vision.engine.step import set_learning_rate
from moh_vision.engine.step_folders import latest_checkpoint
from moh_vision.language import create_text_model
from tests.support.refusals import assert_says, refuse, refused
from tests.support.small_runs import arguments, same


def test_muon_is_refused_with_fsdp_where_torch_cannot_shard_it(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.0+cpu"))
    refuse("optim.name 'muon' FSDP torch 2.14 2.10.0+cpu DDP", check_sharded, "muon")
    assert check_sharded("lion") is None
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.0"))
    assert check_sharded("muon") is None


def test_names():
    assert {"nadamw", "lion", "muon", "adamuon"} <= set(names())
    refuse("optim.name 'adamuon' FSDP DDP", check_sharded, "adamuon")
    # kron is left out: its state lacks its random numbers, so a run could not resume with the same bits.
    suggestions = dict(adamww="adamw", AdamW="adamw", kron="")
    for name, suggested in suggestions.items():
        refuse(f"optim.name '{name}' timm's {suggested}", OptimConfig, name=name)


# Name -> default (betas, eps, momentum); None where the optimiser has no such argument.
DEFAULTS = dict(
    adamw=((0.9, 0.999), 1e-8, None),
    lion=((0.9, 0.99), None, None),
    sgd=(None, None, 0.9),
    muon=((0.9, 0.95), 1e-7, 0.95),
    adan=(None, 1e-8, None),
)


def test_what_is_left_out_is_the_optimisers_own():
    assert len(names()) > 60
    for name, expected in DEFAULTS.items():
        optim = ClsConfig(optim=OptimConfig(name=name)).optim
        assert (optim.betas, optim.eps, optim.momentum) == expected
    optim = OptimConfig(name="lion", betas=(0.8, 0.9), lr=0.3)
    group = make_optimizer(torch.nn.Linear(2, 2), optim).param_groups[0]
    assert (group["betas"], group["lr"]) == ((0.8, 0.9), 0.3)


def small_vit():
    return timm.create_model("moh_vit_tiny_patch16_224", depth=2, img_size=32)


def small_transnext():
    sizes = dict(embed_dims=(24, 48, 96, 192), depths=(1, 1, 1, 1))
    return timm.create_model("moh_transnext_small_80", **sizes)


def small_dit():
    return timm.create_model("dit_small_patch2", depth=2)


def small_translation_model():
    return create_text_model("mt_mae_7", vocab_size=50, hidden_size=64, intermediate_size=64)


MODELS = {
    "ViT": small_vit,
    "TransNeXt": small_transnext,
    "DiT": small_dit,
    "translation": small_translation_model,
}
# A parameter with one of these in its name is no matrix of a layer; muon updates it by its fallback, AdamW.
NOT_MATRICES = (".router.", "embed", "head.", "final_layer", "relative_pos", "cpb_", "bias")


@pytest.mark.parametrize("family", MODELS)
def test_muon_takes_the_matrices_of_the_layers(family):
    model = MODELS[family]()
    optimizer = make_optimizer(model, OptimConfig(name="muon"))
    groups = optimizer.param_groups
    names_of = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    assert len(names_of) == sum(len(group["params"]) for group in groups)
    taken = {
        names_of[id(parameter)]
        for group in groups
        if not group.get("use_fallback")
        for parameter in group["params"]
    }
    assert taken
    assert not [name for name in taken if any(word in name for word in NOT_MATRICES)]
    matrices = ("attn.qkv.weight", "attn.proj.weight")
    assert {name for name in names_of.values() if name.endswith(matrices)} <= taken


def test_every_optimiser_goes_on_to_the_bit_from_its_checkpoint(tmp_path):
    """Also, with a gradient of zero no optimiser moves a weight: in joint training of MAE the gates rely on that."""
    PartialState(cpu=True)
    start = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    data = torch.randn(4, 16, 6)

    def steps(name, model, numbers, run, resumes=False):
        """Train the steps with these indices, save, and return the state of the optimiser."""
        optimizer = make_optimizer(model, OptimConfig(name=name, weight_decay=0.0))
        state = TrainingState(model, [optimizer])
        state.check_options(name)
        if resumes:
            state.restore(latest_checkpoint(run, pytest.fail)[1])
        for number in numbers:
            set_learning_rate(optimizer, 1e-3 * (number + 1))
            model(data[number]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        Saver(PartialState(), run, state, keep=1).save(numbers[-1] + 1, {}, last=True)
        return optimizer.state_dict()

    for name in names():
        whole, parts, still = (copy.deepcopy(start) for _ in range(3))
        expected = steps(name, whole, range(4), tmp_path / name / "whole")
        steps(name, parts, (0, 1), tmp_path / name / "parts")
        again = copy.deepcopy(start)
        found = steps(name, again, (2, 3), tmp_path / name / "parts", resumes=True)
        assert same(again, whole) and not same(again, start), name
        assert found["param_groups"] == expected["param_groups"], name
        assert _bits(found["state"]) == _bits(expected["state"]), name
        optimizer = make_optimizer(still, OptimConfig(name=name, weight_decay=0.0))
        for p in still.parameters():
            p.data.add_(1)
            p.grad = torch.zeros_like(p)
            before = p.clone()
            optimizer.step()
            assert torch.equal(p, before), name


def _bits(state):
    """Return the state of an optimiser with tensors as (dtype, list), so that == compares them."""
    found = {}
    for index, values in state.items():
        for key, value in values.items():
            if torch.is_tensor(value):
                value = (value.dtype, value.tolist())
            found[index, key] = value
    return found


def test_a_state_that_cannot_be_saved_is_refused_before_step_0(tmp_path, capsys, monkeypatch):
    """An option that no checkpoint can hold is noticed before any training is lost."""

    def with_odd_option(model, optim, undecayed=None):
        optimizer = make_optimizer(model, optim, undecayed)
        optimizer.param_groups[0]["odd"] = object()
        return optimizer

    monkeypatch.setattr("moh_vision.classification.train.make_optimizer", with_odd_option)
    error = refused(capsys, train_cls.main, *arguments("cls", tmp_path / "run", 2, 1))
    assert_says(error, "optim.name 'adamw' saved odd")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
