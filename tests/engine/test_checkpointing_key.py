"""`checkpointing: true` in the scripts of images: each block is computed twice, and the weights are the same to the bit."""

import pytest
import torch
from safetensors.torch import load_file
from small_runs import arguments

from moh_vision.classification import train as train_cls
from moh_vision.diffusion import train as train_dit
from moh_vision.models import dit_transformer, vit


@pytest.mark.parametrize("kind, script, models", [("cls", train_cls, vit), ("dit", train_dit, dit_transformer)])
def test_the_weights_are_the_same(tmp_path, monkeypatch, kind, script, models):
    weights, found = [], []
    plain = models.run_block

    def run_block(*args, checkpoint=None, **more):
        found[-1].append(checkpoint is not None)
        return plain(*args, checkpoint=checkpoint, **more)

    monkeypatch.setattr(models, "run_block", run_block)
    for on in ("false", "true"):
        found.append([])
        script.main(
            arguments(kind, tmp_path / on, 2, 2, "--checkpointing", on, "--data.workers", 0, "--data.root", "digits")
        )
        weights.append(load_file(tmp_path / on / "model.safetensors"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not any(found[0]) and found[1][:4] == [True] * 4  # of two layers, in two steps
