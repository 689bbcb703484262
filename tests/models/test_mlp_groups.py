"""Models whose MLPs run groups: made, converted, set to other budgets, saved and loaded."""

import copy

import pytest
import timm
import torch
from diffusers import DiTPipeline  # noqa: F401  the class of the saved pipelines
from torch import nn

import moh_vision
from moh_vision.attention import mlp_layers
from moh_vision.attention.model_heads import budget_rows
from moh_vision.models.dit_transformer import MoHDiTTransformer2DModel
from moh_vision.models.head_budgets import saved_budget, take_shared_heads
from tests.support.dense_vits import DEIT, DINOV3, SMALL, VIT, dense, images
from tests.support.official_dit import diffusers_dit
from tests.support.refusals import refuse

TINY = dict(sample_size=8, hidden_size=48, num_layers=3, num_attention_heads=4, num_classes=5)
SAMPLE = dict(scope="sample")


def dit(**options):
    torch.manual_seed(0)
    model = MoHDiTTransformer2DModel(**{**TINY, **SAMPLE, **options}).eval()
    return awake(model)


def vit(**options):
    torch.manual_seed(0)
    options = {**SMALL, **SAMPLE, **options}
    return awake(timm.create_model("moh_vit_small_patch16_224", **options).eval())


def awake(model):
    """Routers choose otherwise for every input, and adaLN's zeros are gone."""
    for module in model.modules():
        if hasattr(module, "adaLN_modulation"):
            nn.init.normal_(module.adaLN_modulation[1].weight, std=0.1)
    for name, p in model.named_parameters():
        if ".router." in name or "final_layer.linear.weight" in name:
            nn.init.normal_(p)
    return model


def noisy(batch=3, size=8):
    torch.manual_seed(1)
    latents = torch.randn(batch, 4, size, size)
    return latents, torch.tensor([10.0, 500.0, 900.0])[:batch], torch.arange(batch)


def run(model):
    with torch.no_grad():
        if isinstance(model, MoHDiTTransformer2DModel):
            return model(*noisy()).sample
        return model(seeded_images())


def seeded_images():
    torch.manual_seed(1)
    return images()


MAKERS = {"DiT": dit, "ViT": vit}
PAIRS = {"ramp": 0.5, "uniform": "uniform:0.5", "pairs": [(1, 1), (1, 2), (2, 6)]}


@pytest.mark.parametrize("form", PAIRS)
@pytest.mark.parametrize("family", MAKERS)
def test_every_form_of_a_budget(family, form):
    model = MAKERS[family](head_budget=0.75, mlp_budget=PAIRS[form])
    groups = moh_vision.head_budget(model)["mlp"]
    assert [row["heads"] for row in groups["layers"]] == [8] * 3
    assert [row["name"] for row in groups["layers"]] == [f"blocks.{n}.mlp" for n in range(3)]
    width = model.blocks[0].mlp.fc1.out_features // 8
    assert {row["head_dim"] for row in groups["layers"]} == {width}
    active = [row["active"] for row in groups["layers"]]
    want = {"ramp": 12, "uniform": 12, "pairs": 13}[form]
    assert sum(active) == groups["active"] == want
    assert (active[0] < active[2]) == (form != "uniform")
    assert run(model).isfinite().all()


@pytest.mark.parametrize("family", MAKERS)
def test_attention_and_mlps_hand_on_statistics_in_turn(family):
    model = MAKERS[family](head_budget=0.5, mlp_budget=0.5)
    inputs = noisy() if family == "DiT" else (seeded_images(),)
    _, stats = model.forward_routed(*inputs)
    names = [row["name"] for row in budget_rows(model)]
    assert names == [f"blocks.{n}.{part}" for n in range(3) for part in ("attn", "mlp")]
    assert [s.counts.shape[1] for s in stats] == [row["heads"] for row in budget_rows(model)]


@pytest.mark.parametrize("family", MAKERS)
def test_all_groups_and_no_router_are_the_dense_model(family):
    """Dense weights are taken, and give the dense output to the bit."""
    plain = MAKERS[family](router="dense")
    routed = MAKERS[family](router="dense", mlp_budget=1.0)
    if family == "ViT":
        routed.load_state_dict(plain.state_dict())
    else:
        missing = routed.load_state_dict(plain.state_dict(), strict=False).missing_keys
        assert all(".mlp.router." in name for name in missing)
        for layer in mlp_layers(routed):
            for p in layer.router.parameters():
                nn.init.zeros_(p)
    assert torch.equal(run(routed), run(plain))


def test_one_timestep_is_one_choice_of_heads_and_groups():
    model = dit(head_budget=0.5, mlp_budget=0.5, route_by="timestep")
    latents, _, labels = noisy()
    choices = []
    for layer in routed_modules(model):
        layer.router.register_forward_hook(
            lambda _, args, routing: choices.append(routing.active.shape[:2])
        )
    with torch.no_grad():
        one = model(latents, torch.tensor(500), labels).sample
        assert set(choices) == {(1, 1)} and len(choices) == 6
        choices.clear()
        each = model(latents, torch.full((3,), 500), labels).sample
        assert set(choices) == {(3, 1)}
    torch.testing.assert_close(one, each, rtol=0, atol=1e-5)


def routed_modules(model):
    return [model.get_submodule(row["name"]) for row in budget_rows(model)]


@pytest.mark.parametrize("family", MAKERS)
def test_checkpointing_changes_no_gradient(family):
    results = []
    for checkpointing in (False, True):
        model = MAKERS[family](head_budget=0.5, mlp_budget=0.5).train()
        if checkpointing and family == "DiT":
            model.enable_gradient_checkpointing()
        elif checkpointing:
            model.set_grad_checkpointing()
        inputs = noisy() if family == "DiT" else (seeded_images(),)
        output, stats = model.forward_routed(*inputs)
        loss = output.square().mean() + moh_vision.attention.load_balance_loss(stats)
        loss.backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_set_head_budget_sets_groups_alone_heads_alone_or_both():
    model = dit(head_budget="uniform:0.75", mlp_budget="uniform:0.75")
    before = run(model)

    def shares():
        budget = moh_vision.head_budget(model)
        return budget["share"], budget["mlp"]["share"]

    assert shares() == (0.75, 0.75)
    moh_vision.set_head_budget(model, mlp=0.5)  # the shape stays
    assert shares() == (0.75, 0.5)
    assert [row["active"] for row in moh_vision.head_budget(model)["mlp"]["layers"]] == [4] * 3
    assert model.config.mlp_budget == saved_budget(model)["mlp_budget"]
    moh_vision.set_head_budget(model, 1.0)
    assert shares() == (1, 0.5)
    assert not torch.allclose(run(model), before)
    moh_vision.set_head_budget(model, 0.75, mlp=0.75)
    assert torch.equal(run(model), before)


def test_one_routed_group_is_told(caplog):
    """Its renormalised weight is constant, as that of one routed head."""
    model = vit(head_budget=1.0, mlp_budget=[(1, 2), (2, 2), (3, 2)])
    caplog.clear()
    moh_vision.set_head_budget(model, mlp=[(1, 1), (2, 2), (3, 2)])
    told = "one routed group in MLPs [0]: only the balance loss trains those routers"
    assert caplog.messages == [told]


def test_a_wrong_budget_of_groups_leaves_the_heads_as_they_were():
    model = dit(head_budget=0.75, mlp_budget=0.75)
    before = saved_budget(model)
    refuse("mlp_budget 2 0 1 'ramp:0.75' groups", moh_vision.set_head_budget, model, 1.0, mlp=2)
    assert saved_budget(model) == before


CONVERTED = {
    "timm's ViT": lambda: dense(VIT),
    "a distilled DeiT": lambda: dense(DEIT),
    "DINOv3": lambda: dense(DINOV3),
    "our dense ViT": lambda: vit(router="dense", scope="token"),
    "our dense DiT": lambda: dit(router="dense", scope="token"),
    "diffusers' DiT": lambda: diffusers_dit(),
}


def output(model):
    """What a model of CONVERTED gives."""
    with torch.no_grad():
        if hasattr(model, "config") and hasattr(model.config, "sample_size"):
            torch.manual_seed(1)
            size = model.config.sample_size
            latents = torch.randn(2, model.config.in_channels, size, size)
            out = model(latents, torch.tensor([10, 900]), class_labels=torch.tensor([0, 1]))
            return out.sample
        return model(seeded_images())


@pytest.mark.parametrize("name", CONVERTED)
def test_converted_with_all_groups_is_the_dense_model(name):
    model = CONVERTED[name]().eval()
    want = output(model)
    routed = moh_vision.convert(copy.deepcopy(model), scope="sample", mlp_budget=1.0)
    torch.testing.assert_close(output(routed), want, rtol=0, atol=2e-5)
    assert moh_vision.head_budget(routed)["mlp"]["share"] == 1
    moh_vision.set_head_budget(routed, 0.5, mlp=0.5)
    assert moh_vision.head_budget(routed)["mlp"]["share"] == 0.5
    assert [row["active"] for row in moh_vision.head_budget(routed)["mlp"]["layers"]] == (
        [4] * len(routed.blocks)
    )
    assert not torch.allclose(output(routed), want, atol=1e-3)


def test_a_converted_model_keeps_the_modules_of_its_mlps():
    model = dense(VIT)
    kept = model.blocks[0].mlp.fc1, model.blocks[0].mlp.fc2
    routed = moh_vision.convert(model, 0.5, scope="sample", mlp_budget=0.5)
    assert (routed.blocks[0].mlp.fc1, routed.blocks[0].mlp.fc2) == kept


@pytest.mark.parametrize("family", MAKERS)
def test_saved_and_loaded(family, tmp_path):
    """With the present budgets, by diffusers or timm."""
    model = MAKERS[family](head_budget=0.75, mlp_budget=0.75, mlp_groups=6)
    moh_vision.set_head_budget(model, 0.75, mlp=0.5)
    if family == "DiT":
        model.save_pretrained(tmp_path)
        loaded = MoHDiTTransformer2DModel.from_pretrained(tmp_path)
    else:
        timm.models.save_for_hf(model, tmp_path, model_args=model._model_args)
        loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    loaded.eval()
    assert saved_budget(loaded) == saved_budget(model)
    assert torch.equal(run(loaded), run(model))
    moh_vision.set_head_budget(loaded, mlp=1.0)
    assert moh_vision.head_budget(loaded)["mlp"]["share"] == 1


@pytest.mark.parametrize("family", MAKERS)
def test_weights_whose_shared_groups_are_too_many_for_the_budget(family):
    """The refusal counts groups, under the name of their budget."""
    trained = MAKERS[family](head_budget=0.5, mlp_budget=[(6, 1)] * 3)
    model = MAKERS[family](head_budget=0.5, mlp_budget="uniform:0.25")
    facts = "mlp_budget 'uniform:0.25' layer 0 2 of 8 groups 6 shared smallest 0.875"
    refuse(facts, take_shared_heads, model, trained.state_dict())


REFUSED = {
    "per token": (
        dict(scope="token", mlp_budget=0.5),
        "mlp_budget 0.5 scope 'sample' 'token'",
    ),
    "a share that is none": (dict(mlp_budget=1.5), "mlp_budget 1.5 0 1 'ramp:0.75'"),
    "pairs of another depth": (dict(mlp_budget=[(1, 1)]), "mlp_budget 1 layers 3"),
    "too many groups": (
        dict(mlp_budget=[(1, 9)] * 3),
        "mlp_budget layer 0 shared=1 routed=9 10 8",
    ),
    "no group": (
        dict(mlp_budget="uniform:0.01"),
        "mlp_budget 'uniform:0.01' layer 0 8 groups 1 smallest 0.125",
    ),
    "no shape": (
        dict(mlp_budget=0.5, mlp_budget_shape="steep"),
        "mlp_budget_shape 'steep' ramp uniform",
    ),
    "groups that do not divide": (
        dict(mlp_budget=0.5, mlp_groups=7),
        "mlp_groups 7 divides width 192",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("family", MAKERS)
def test_what_makes_no_model(family, case):
    options, facts = REFUSED[case]
    refuse(facts, MAKERS[family], **{"head_budget": 0.5, **options})


def test_what_cannot_be_converted():
    swiglu = timm.create_model(
        "vit_base_patch14_dinov2", mlp_layer=timm.layers.SwiGLUPacked, **SMALL
    )
    before = [type(block.mlp) for block in swiglu.blocks]
    facts = "mlp_budget blocks.0.mlp GluMlp linear"
    refuse(facts, moh_vision.convert, swiglu, scope="sample", mlp_budget=0.5)
    assert [type(block.mlp) for block in swiglu.blocks] == before
    facts = "mlp_budget 0.5 scope 'sample' 'token'"
    refuse(facts, moh_vision.convert, dense(VIT), mlp_budget=0.5)
    routed = dit(mlp_budget=0.5, router="dense")
    facts = "routed MLPs already set_head_budget(model, mlp"
    refuse(facts, moh_vision.convert, routed, scope="sample", mlp_budget=0.5)
    facts = "mlp_budget 0.5 MLPs MoHDiTTransformer2DModel dense moh_vision.convert"
    refuse(facts, moh_vision.set_head_budget, dit(head_budget=0.5), mlp=0.5)
