"""timm's own tests of its models, run on ours.

timm ships them in its source distribution, which `make` fetches beside the virtual environment. Only `list_models` is
swapped while they are loaded. A shallow model of each family runs in `make test`, the others as they are in `make test-slow`,
where MoH TransNeXt is pruned too: that takes half a minute, and a dense TransNeXt has the same method. timm's two tests of
TorchScript are left out: torch.jit is deprecated, and the attention core does not support it.
"""

import fnmatch
import importlib.util
import sys
import tarfile
from pathlib import Path

import pytest
import timm
from timm import list_models

import moh_vision  # noqa: F401  registers the models

# What is run on a list of models; the rest tests single models of timm's by name.
CONTRACT = [
    "test_model_forward",
    "test_model_backward",
    "test_model_default_cfgs",
    "test_model_default_cfgs_non_std",
    "test_model_forward_features",
    "test_model_forward_intermediates_features",
    "test_model_forward_intermediates",
    "test_prune_intermediate_layers_contract",
    "test_model_forward_fx",
    "test_model_backward_fx",
]
# The smallest of each family, and what makes them shallow.
SMALLEST = {
    "moh_vit_tiny_patch16_224": dict(depth=4),
    "transnext_micro": dict(depths=[1, 1, 3, 1]),
    "moh_transnext_small_75": dict(depths=[1, 1, 3, 1], head_budget=[[3, 0], [6, 0], [3, 6], [4, 12]]),
}
PRUNED = ("moh_vit_tiny_patch16_224", "transnext_micro")
TOKENS = "moh_vit*"  # whose features are tokens: "non-standard" in timm's terms, as its own vit_*

SOURCE = sorted(Path(sys.prefix).glob(f"timm-sdist/timm-{timm.__version__}.tar.gz"))


def ours(filter="", module="", pretrained=False, exclude_filters="", include_tags=False, **kwargs):
    """timm.list_models for our families: which of them each of timm's filters means."""
    names = [*list_models(module="vit"), *list_models(module="transnext")]
    if pretrained or isinstance(filter, str) and filter:
        return []  # single models of timm's
    if "vit_*" in filter:
        names = fnmatch.filter(names, TOKENS)
    if "vit_*" in exclude_filters:
        names = [name for name in names if not fnmatch.fnmatch(name, TOKENS)]
    return names


def load():
    """timm's test module; `list_models` is swapped only while it is imported, and the smallest models are shallow."""
    with tarfile.open(SOURCE[0]) as archive:
        code = archive.extractfile(f"timm-{timm.__version__}/tests/test_models.py").read()
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("timm_test_models", loader=None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timm, "list_models", ours)
        exec(compile(code, f"{SOURCE[0]}:test_models.py", "exec"), module.__dict__)
    module.create_model = lambda name, **kwargs: timm.create_model(name, **SMALLEST.get(name, {}), **kwargs)
    return module


def marked(function):
    """All but the smallest models are slow; timm's own marks are for its own machines."""
    marks = []
    for mark in function.pytestmark:
        if mark.name == "parametrize":
            names, values = mark.args
            if names == "model_name":
                fast = PRUNED if "prune" in function.__name__ else SMALLEST
                values = [pytest.param(v, marks=[] if v in fast else [pytest.mark.slow]) for v in values]
            marks.append(pytest.mark.parametrize(names, values).mark)
    function.pytestmark = marks
    return function


if SOURCE:
    _timm = load()
    cfg_device = _timm.cfg_device
    globals().update({name: marked(getattr(_timm, name)) for name in CONTRACT})


@pytest.mark.skipif(
    not SOURCE, reason=f"timm {timm.__version__}'s source distribution is not in {sys.prefix}/timm-sdist"
)
def test_all_of_them_run_on_all_of_our_models():
    everything = set(ours())
    tokens = set(fnmatch.filter(everything, TOKENS))
    assert len(everything) == 13
    wanted = dict.fromkeys(CONTRACT, everything) | {"test_model_default_cfgs_non_std": tokens}
    wanted |= dict.fromkeys(("test_model_default_cfgs", "test_model_forward_features"), everything - tokens)
    for name, models in wanted.items():
        (values,) = [m.args[1] for m in globals()[name].pytestmark if m.args and m.args[0] == "model_name"]
        assert {value.values[0] for value in values} == models, name
