"""Optimisers by timm's names: what they are given, which weights muon takes, and that a stopped run goes on to the bit."""

import copy
import io

import pytest
import timm
import torch
from refusals import refuse

import moh_vision  # noqa: F401
from moh_vision.classification.config import ClsConfig
from moh_vision.engine.config import OptimConfig
from moh_vision.engine.optimizers import check_sharded, make_optimizer, names
from moh_vision.engine.step import set_learning_rate
from moh_vision.language import create_text_model


def test_names():
    assert {"nadamw", "lion", "muon", "adamuon"} <= set(names()) and check_sharded("muon") is None
    refuse(
        "optim.name 'adamuon' does not work with FSDP: launch with DDP", check_sharded, "adamuon"
    )
    # kron: its random numbers are not in its state
    for name, words in dict(
        adamww="did you mean .*adamw", AdamW="did you mean adamw", kron=""
    ).items():
        refuse(
            f"optim.name '{name}' is not one of timm's optimisers.*{words}", OptimConfig, name=name
        )


def test_what_is_left_out_is_the_optimisers_own():
    assert len(names()) > 60
    given = {
        name: ClsConfig(optim=OptimConfig(name=name)).optim
        for name in ("adamw", "lion", "sgd", "muon", "adan")
    }
    found = {name: (c.betas, c.eps, c.momentum) for name, c in given.items()}
    assert found["adamw"] == ((0.9, 0.999), 1e-8, None)  # as every run before had it
    assert found["lion"] == ((0.9, 0.99), None, None) and found["sgd"] == (None, None, 0.9)
    assert found["muon"] == ((0.9, 0.95), 1e-7, 0.95) and found["adan"] == (None, 1e-8, None)
    group = make_optimizer(
        torch.nn.Linear(2, 2), OptimConfig(name="lion", betas=(0.8, 0.9), lr=0.3)
    ).param_groups[0]
    assert (group["betas"], group["lr"]) == ((0.8, 0.9), 0.3)


MODELS = {
    "ViT": lambda: timm.create_model("moh_vit_tiny_patch16_224", depth=2, img_size=32),
    "TransNeXt": lambda: timm.create_model(
        "moh_transnext_small_80", embed_dims=(24, 48, 96, 192), depths=(1, 1, 1, 1)
    ),
    "DiT": lambda: timm.create_model("dit_small_patch2", depth=2),
    "translation": lambda: create_text_model(
        "mt_mae_7", vocab_size=50, hidden_size=64, intermediate_size=64
    ),
}


@pytest.mark.parametrize("family", MODELS)
def test_muon_takes_the_matrices_of_the_layers(family):
    model = MODELS[family]()
    optimizer = make_optimizer(model, OptimConfig(name="muon"))
    called = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    own = {
        called[id(p)]
        for g in optimizer.param_groups
        if not g.get("use_fallback")
        for p in g["params"]
    }
    assert len(called) == sum(len(g["params"]) for g in optimizer.param_groups)
    others = (".router.", "embed", "head.", "final_layer", "relative_pos", "cpb_", "bias")
    assert own and not [name for name in own if any(word in name for word in others)]
    assert {
        n for n in called.values() if n.endswith(("attn.qkv.weight", "attn.proj.weight"))
    } <= own


def test_every_optimiser_goes_on_to_the_bit_from_its_state():
    """What a checkpoint needs of them; and no gradient of zero moves a weight, as MAE's gates need in joint training."""
    start = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    data = torch.randn(4, 16, 6)

    def steps(name, model, those, state=None):
        optimizer = make_optimizer(model, OptimConfig(name=name, weight_decay=0.0))
        if state:
            optimizer.load_state_dict(torch.load(state, weights_only=True))
        for number in those:
            set_learning_rate(optimizer, 1e-3 * (number + 1))
            model(data[number]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    for name in names():
        whole, parts, still = (copy.deepcopy(start) for _ in range(3))
        steps(name, whole, range(4))
        state = io.BytesIO()
        torch.save(steps(name, parts, (0, 1)).state_dict(), state)
        state.seek(0)
        steps(name, parts, (2, 3), state)
        for ours, theirs, first in zip(
            parts.parameters(), whole.parameters(), start.parameters(), strict=True
        ):
            assert torch.equal(ours, theirs) and not torch.equal(ours, first), name
        optimizer = make_optimizer(still, OptimConfig(name=name, weight_decay=0.0))
        for p in still.parameters():
            p.data.add_(1)
            p.grad = torch.zeros_like(p)
            before = p.clone()
            optimizer.step()
            assert torch.equal(p, before), name
