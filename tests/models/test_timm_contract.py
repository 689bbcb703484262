"""timm's own tests of its models, run on ours.

timm ships them in its source distribution, which `make` fetches beside the virtual environment. A shallow model of each
family runs in `make test`, the others as they are in `make test-slow`. Of each family one model is pruned, because timm makes
the model anew for each of its blocks: nine minutes of ViT-L alone, whose method is that of the smallest. timm's two tests
of TorchScript are left out: torch.jit is deprecated, and the attention core does not support it.
"""

import importlib.util
import sys
import tarfile
from pathlib import Path

import pytest
import timm

import moh_vision  # noqa: F401  registers the models

VITS = timm.list_models(module="vit")
PYRAMIDS = timm.list_models(module="transnext")
ALL = [*VITS, *PYRAMIDS]
PRUNED = ["moh_vit_tiny_patch16_224", "transnext_micro", "moh_transnext_small_75"]
# What is run on a list of models; the rest tests single models of timm's by name. Features of ViTs are tokens, which timm
# tests apart ("non-standard").
CONTRACT = {
    "test_model_forward": ALL,
    "test_model_backward": ALL,
    "test_model_default_cfgs": PYRAMIDS,
    "test_model_default_cfgs_non_std": VITS,
    "test_model_forward_features": PYRAMIDS,
    "test_model_forward_intermediates_features": ALL,
    "test_model_forward_intermediates": ALL,
    "test_prune_intermediate_layers_contract": PRUNED,
    "test_model_forward_fx": ALL,
    "test_model_backward_fx": ALL,
}
# The smallest of each family, and what makes them shallow.
SMALLEST = {
    "moh_vit_tiny_patch16_224": dict(depth=4),
    "transnext_micro": dict(
        depths=[1, 1, 3, 1], embed_dims=[12, 24, 48, 96], num_heads=[1, 2, 4, 8]
    ),
    "moh_transnext_small_75": dict(
        depths=[1, 1, 3, 1],
        embed_dims=[12, 24, 48, 96],
        num_heads=[1, 2, 4, 8],
        head_budget=[[1, 0], [2, 0], [1, 2], [2, 4]],
    ),
}
SOURCE = sorted(Path(sys.prefix).glob(f"timm-sdist/timm-{timm.__version__}.tar.gz"))


def load():
    """Import timm's test module, with shallow models in place of the smallest ones."""
    with tarfile.open(SOURCE[0]) as archive:
        code = archive.extractfile(f"timm-{timm.__version__}/tests/test_models.py").read()
    spec = importlib.util.spec_from_loader("timm_test_models", loader=None)
    module = importlib.util.module_from_spec(spec)
    exec(compile(code, f"{SOURCE[0]}:test_models.py", "exec"), module.__dict__)

    def create_model(name, **kwargs):
        return timm.create_model(name, **SMALLEST.get(name, {}), **kwargs)

    module.create_model = create_model
    return module


def marked(function, models):
    """Parametrize a test of timm's with our models, of which all but the smallest are slow.

    timm's own marks are for its own machines.
    """
    marks = []
    for mark in function.pytestmark:
        if mark.name == "parametrize":
            names, values = mark.args
            if names == "model_name":
                fast = SMALLEST
                if (
                    models == PRUNED
                ):  # a dense TransNeXt has the method of a routed one, which takes half a minute
                    fast = PRUNED[:2]
                elif models == PYRAMIDS:  # routed heads alone: the dense one has the same methods
                    fast = ["moh_transnext_small_75"]
                values = [
                    name if name in fast else pytest.param(name, marks=pytest.mark.slow)
                    for name in models
                ]
            marks.append(pytest.mark.parametrize(names, values).mark)
    function.pytestmark = marks
    return function


if SOURCE:
    _timm = load()
    cfg_device = _timm.cfg_device
    globals().update(
        {name: marked(getattr(_timm, name), models) for name, models in CONTRACT.items()}
    )
else:

    @pytest.mark.skip(
        f"timm {timm.__version__}'s source distribution is not in {sys.prefix}/timm-sdist"
    )
    def test_models_of_ours():
        """See `CONTRACT`."""
