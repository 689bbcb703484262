"""Every family of models with every kind of router, in the hands of other tools: the meta device, export, offloading."""

import copy

import pytest
import timm
import torch
from accelerate import cpu_offload, dispatch_model
from safetensors.torch import save_file
from timm.models._manipulate import reinit_non_persistent_buffers
from torch.nn.functional import cosine_similarity

import moh_vision
from moh_vision.attention import attention_layers, load_balance_loss
from tests.support.families import FAMILIES, awake
from tests.support.refusals import refuse

VISION = ["vit", "transnext", "dit"]
# Facts of the released code: parameters, active heads, all heads.
RELEASED = {
    "transnext_micro": (12_809_304, 164, 164),
    "transnext_tiny": (28_258_960, 246, 246),
    "transnext_small": (49_741_564, 429, 429),
    "transnext_base": (89_721_496, 588, 588),
    "moh_transnext_small_80": (49_910_548, 343, 429),
    "moh_transnext_small_75": (49_910_548, 323, 429),
    "moh_transnext_base_75": (90_020_632, 441, 588),
    "moh_transnext_base_50": (90_023_512, 294, 588),
    "dit_small_patch2": (32_963_360, 72, 72),
    "dit_base_patch2": (130_512_416, 144, 144),
    "dit_large_patch2": (458_102_816, 384, 384),
    "dit_xlarge_patch2": (675_129_632, 448, 448),
    "sit_small_patch2": (32_957_200, 72, 72),
    "sit_base_patch2": (130_500_112, 144, 144),
    "sit_large_patch2": (458_086_416, 384, 384),
    "sit_xlarge_patch2": (675_111_184, 448, 448),
    "jit_base_patch16": (131_320_320, 144, 144),
    "jit_large_patch16": (459_139_808, 384, 384),
    "jit_huge_patch16": (952_842_048, 512, 512),
    "jit_base_patch32": (133_387_008, 144, 144),
    "jit_large_patch32": (461_796_320, 384, 384),
    "jit_huge_patch32": (956_383_296, 512, 512),
    "moh_jit_base_patch16_75": (131_446_272, 108, 144),
    "moh_jit_large_patch16_75": (459_565_792, 288, 384),
    "moh_dit_small_patch2_90": (32_997_152, 64, 72),
    "moh_dit_small_patch2_75": (32_998_688, 54, 72),
    "moh_dit_base_patch2_90": (130_638_368, 129, 144),
    "moh_dit_base_patch2_75": (130_638_368, 108, 144),
    "moh_dit_large_patch2_90": (458_512_416, 344, 384),
    "moh_dit_large_patch2_75": (458_528_800, 288, 384),
    "moh_dit_xlarge_patch2_90": (675_666_464, 403, 448),
    "moh_dit_xlarge_patch2_75": (675_689_504, 336, 448),
}
ROUTERS = {
    **dict.fromkeys(VISION, ["moh", "query_norm", "mae", "moa", "gated"]),
    "translation": ["moh", "query_norm", "mae_7", "moa", "moa_bias", "gated"],
    "masked": ["moa"],
    "causal": ["mae_7", "uni_mae", "moa", "gated"],
    "llama": ["moh", "query_norm"],
}
CASES = [(family, router) for family, routers in ROUTERS.items() for router in routers]


@pytest.mark.parametrize("name", RELEASED)
def test_released_sizes(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    budget = moh_vision.head_budget(model)
    assert (
        sum(p.numel() for p in model.parameters()),
        budget["active"],
        budget["heads"],
    ) == RELEASED[name]


def test_registered():
    transnext = [name for name in RELEASED if "transnext" in name]
    assert (
        timm.list_models(module="transnext") == timm.list_models("*transnext*") == sorted(transnext)
    )
    assert len(timm.list_models("*transnext*", pretrained=True)) == 8
    patches = {
        f"dit_{size}_patch{p}" for size in ("small", "base", "large", "xlarge") for p in (2, 4, 8)
    }
    assert timm.list_models(module="dit") == sorted(patches | RELEASED.keys() - set(transnext))


def tensors(output):
    return output if isinstance(output, torch.Tensor) else output[0]


def emptied(model):
    """As after `to_empty()`, with NaN for what happened to be in memory."""
    model = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(float("nan") if tensor.is_floating_point() else 0)
    return model


@pytest.mark.parametrize("family, router", [case for case in CASES if case[0] != "llama"])
def test_buffers_that_no_checkpoint_has_are_remade(family, router):
    """By timm's function, after a checkpoint filled a model that was built without memory."""
    model, inputs = FAMILIES[family](router)
    filled = emptied(model)
    filled.load_state_dict(model.state_dict())
    reinit_non_persistent_buffers(filled)
    with torch.no_grad():
        assert torch.equal(tensors(filled(*inputs)), tensors(model(*inputs)))


@pytest.mark.parametrize(
    "family, router", [case for case in CASES if case[0] in ("vit", "transnext")]
)
def test_init_weights_of_an_empty_model(family, router):
    model, inputs = FAMILIES[family](router)
    model = emptied(model)
    model.init_weights()
    assert model(*inputs).isfinite().all()


def shallow(family):
    """Return a model with MoH's router, and its inputs."""
    more = {}
    if family == "transnext":
        more = dict(depths=(1, 1, 1, 1))
    model, inputs = FAMILIES[family]("moh", **more)
    return awake(model), inputs


@pytest.mark.parametrize(
    "family", ["vit", "dit", pytest.param("transnext", marks=pytest.mark.slow)]
)
@torch.no_grad()
def test_exported(family):
    model, inputs = shallow(family)
    want = tensors(model(*inputs))
    two = tuple(x.expand(2, *x.shape[1:]).clone() for x in inputs)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, two, dynamic_shapes=tuple({0: batch} for _ in two))
    assert "autocast" not in str(program.graph)
    three = program.module()(*(x[[0, 1, 0]] for x in two))
    torch.testing.assert_close(tensors(three), want.expand(3, *want.shape[1:]))


@pytest.mark.parametrize("family", VISION)
def test_routed_and_saved(family, tmp_path):
    """`forward_routed` is the model's forward; a lowered budget comes back from what timm or diffusers save."""
    model, inputs = shallow(family)
    with torch.no_grad():
        want = tensors(model(*inputs))
        output, stats = model.forward_routed(*inputs)
        assert torch.equal(output, want)
        assert [s.counts.shape for s in stats] == [
            (1, layer.num_heads) for layer in attention_layers(model)
        ]
        layers = moh_vision.head_budget(model)["layers"]
        lower = [(b["shared"], max(b["routed"] - 1, min(b["routed"], 1))) for b in layers]
        want = tensors(moh_vision.set_head_budget(model, lower)(*inputs))
        if family == "dit":
            model.save_pretrained(tmp_path)
            again = type(model).from_pretrained(tmp_path)
        else:
            timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
            again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
        budget = moh_vision.head_budget(again)
        assert budget == moh_vision.head_budget(model) and budget["active"] < sum(
            b["active"] for b in layers
        )
        assert torch.equal(tensors(again(*inputs)), want)


def test_activation_checkpointing_changes_nothing():
    """Of ViTs: test_convert.py; of DiTs: test_moh_dit.py."""
    model, inputs = FAMILIES["transnext"]("moh")
    awake(model)
    grads = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.train().zero_grad()
        output, stats = model.forward_routed(*inputs)
        (output.square().mean() + load_balance_loss(stats)).backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    assert all(map(torch.equal, *grads))
    assert attention_layers(model)[-1].router.routed.weight.grad.norm() > 0


@pytest.mark.parametrize("family", ["vit", "dit"])
def test_moa_with_one_key_value_head(family, tmp_path):
    """Zhang 2022 in an image model: k of the heads without shared ones, all on the keys and values of one head."""
    options = dict(kv_heads=1, head_budget="uniform:0.5")
    model, inputs = FAMILIES[family]("moa", **options)
    again, _ = FAMILIES[family]("moa", **options)
    for layer in attention_layers(awake(model)):
        assert layer.qkv.weight.shape[0] == (layer.num_heads + 2) * layer.head_dim
        assert (layer.budget.shared, layer.budget.routed) == (0, layer.num_heads // 2)
    file = tmp_path / "model.safetensors"
    save_file({name: t.contiguous() for name, t in model.state_dict().items()}, file)
    moh_vision.load_checkpoint(again, file)
    with torch.no_grad():
        assert torch.equal(tensors(again(*inputs)), tensors(model(*inputs)))


@pytest.mark.parametrize("family, router", CASES)
def test_autocast(family, router):
    """Output and gradients stay near float32's; tokens whose heads are close to a tie may choose others."""
    model, inputs = FAMILIES[family](router)
    awake(model)
    outputs = []
    gradients = []
    of_routers = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = tensors(model(*inputs)).float()
            loss = output.square().mean()
        loss.backward()
        outputs.append(output.detach())
        named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        gradients.append(torch.cat([grad.flatten() for grad in named.values()]))
        routers = [grad.flatten() for name, grad in named.items() if ".router." in name]
        of_routers.append(torch.cat(routers) if routers else None)
    assert not torch.equal(*outputs)
    assert (outputs[1] - outputs[0]).norm() < 0.08 * outputs[0].norm()
    assert cosine_similarity(*gradients, dim=0) > 0.95
    if of_routers[0] is not None:  # query_norm has no parameters, uni_mae's are not trained
        assert cosine_similarity(*of_routers, dim=0) > 0.95


@pytest.mark.parametrize("family, router", CASES)
def test_offloaded_weights(family, router, tmp_path):
    model, inputs = FAMILIES[family](router)
    with torch.no_grad():
        want = tensors(model(*inputs))
        if family == "causal":
            offloaded = cpu_offload(copy.deepcopy(model), torch.device("cpu"))
            # And not wrong numbers.
            facts = "`vocabulary` offloaded softmax device_map"
            refuse(facts, offloaded, *inputs, error=RuntimeError)
            places = {
                name: "cpu" if name == "vocabulary" else "disk"
                for name, _ in model.named_children()
            }
            dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
        else:
            cpu_offload(model, torch.device("cpu"))
        torch.testing.assert_close(tensors(model(*inputs)), want)
