"""`checkpointing: true` in the scripts of images: each block is computed twice, and the weights are the same to the bit."""

import pytest
from small_runs import arguments, same, script

from moh_vision.models import dit_transformer, vit


@pytest.mark.parametrize("kind, models", [("cls", vit), ("dit", dit_transformer)])
def test_the_weights_are_the_same(tmp_path, monkeypatch, kind, models):
    plain, checkpointed = models.run_block, dict(false=[], true=[])

    def run_block(*args, checkpoint=None, **more):
        checkpointed[on].append(checkpoint is not None)
        return plain(*args, checkpoint=checkpoint, **more)

    monkeypatch.setattr(models, "run_block", run_block)
    for on in checkpointed:
        script(kind).main(arguments(kind, tmp_path / on, 2, 2, "--checkpointing", on))
    assert same(tmp_path / "false" / "model.safetensors", tmp_path / "true" / "model.safetensors")
    assert not any(checkpointed["false"]) and checkpointed["true"][:4] == [True] * 4  # of two layers, in two steps
