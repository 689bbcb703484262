"""Every ViT in timm's registry that `convert` takes is saved and loaded by timm."""

import json

import pytest
import timm
import torch
from timm.models import deit, eva, vision_transformer, vision_transformer_hybrid

import moh_vision
from moh_vision.models.convert import TAKEN
from tests.support.refusals import refuse

SIZES = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio")


class Arguments(Exception):
    """What an entrypoint hands to timm's builder."""


PLAIN = (vision_transformer, deit, vision_transformer_hybrid)


def entrypoints(monkeypatch, modules=PLAIN):
    """Yield (name, arguments) of every model in these modules of timm whose class `convert` takes."""

    def build(model_cls, variant, *args, **kwargs):
        raise Arguments(model_cls, kwargs)

    with monkeypatch.context() as patch:
        for module in modules:
            patch.setattr(module, "build_model_with_cfg", build)
        for module in modules:
            for name in timm.list_models(module=module.__name__.split(".")[-1]):
                try:
                    timm.models.model_entrypoint(name)()
                except Arguments as found:
                    model_class, arguments = found.args
                    if model_class in TAKEN:
                        yield name, arguments


def comes_back(name, folder, **kwargs):
    """Convert timm's model `name`, save and load it; False if `convert` refuses it."""
    torch.manual_seed(0)
    model = timm.create_model(name, depth=1, num_classes=3, **kwargs).eval()
    try:
        moh_vision.convert(model, head_budget=0.7)
    except ValueError:
        return False
    for p in model.parameters():
        if p.ndim == 1:  # LayerScale starts near 0, biases at 0
            torch.nn.init.uniform_(p)
    timm.models.save_for_hf(model, folder, safe_serialization=True)
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert moh_vision.head_budget(again) == moh_vision.head_budget(model), name
    x = torch.randn(1, *timm.models.get_model_input_config(model)["input_size"])
    with torch.no_grad():
        assert torch.equal(again(x), model(x)), name
    return True


def check(names, tmp_path):
    return [name for name, kwargs in names if comes_back(name, tmp_path / name, **kwargs)]


def small(args):
    """Arguments for few patches; a convolutional stem needs larger images than patches do."""
    options = dict(img_size=2 * args.get("patch_size", 16))
    if "embed_layer" in args:
        options["img_size"] = 128
    if "num_kv_heads" in args:  # one number for the one layer
        options["num_kv_heads"] = (min(args["num_kv_heads"]),)
    return options


def narrow(args):
    return dict(small(args), embed_dim=16 * args["num_heads"])


def architecture(args):
    """Return a text that is the same for models which differ in their sizes alone."""
    options = {key: str(value) for key, value in args.items() if key not in SIZES}
    if "embed_layer" in options:
        options["embed_layer"] = "embed_layer"
    return json.dumps(options, sort_keys=True)


def test_one_of_each_architecture(tmp_path, monkeypatch):
    models = {}
    for name, args in entrypoints(monkeypatch):
        models.setdefault(architecture(args), []).append((args["embed_dim"], name, args))
    calls = []
    for alike in models.values():
        _, name, args = min(alike, key=lambda model: model[:2])  # the smallest
        calls.append((name, small(args) if "embed_layer" in args else narrow(args)))
    saved = check(calls, tmp_path)
    assert len(saved) >= 35
    assert "vit_small_patch14_reg4_dinov2" in saved
    assert "vit_base_patch16_siglip_224" in saved
    assert "deit3_small_patch16_224" in saved


@pytest.mark.slow
@pytest.mark.parametrize(
    "modules, size, least", [(PLAIN, small, 150), ([eva], narrow, 55)], ids=["plain", "rotary"]
)
def test_all(modules, size, least, tmp_path, monkeypatch):
    calls = [(name, size(args)) for name, args in entrypoints(monkeypatch, modules)]
    assert len(check(calls, tmp_path)) >= least


def test_from_a_name():
    """`base` alone makes a model of that shape, with timm's own defaults; it can be named on a command line."""
    options = dict(num_classes=7, device="meta")
    name = "vit_small_patch14_reg4_dinov2"
    theirs = timm.create_model(name, **options)
    model = timm.create_model("moh_vit", base=name, **options)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    dense = {key: shape for key, shape in shapes.items() if ".router." not in key}
    assert dense == {key: value.shape for key, value in theirs.state_dict().items()}
    assert moh_vision.head_budget(model)["active"] == 12 * 5
    assert model.pretrained_cfg["architecture"] == "moh_vit"
    refuse("base 'vit_gone' timm", timm.create_model, "moh_vit", base="vit_gone")
