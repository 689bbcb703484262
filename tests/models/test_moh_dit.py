import warnings

import pytest
import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import moh_vision
from moh_vision.attention import load_balance_loss
from tests.support.refusals import assert_says, refuse
from tests.support.tiny_dit import TINY, awake

MOH = "moh_dit_small_patch2_75"
SMALL = dict(TINY, head_budget=[(1, 2), (2, 2)])


def tiny(name=MOH, **kwargs):
    sizes = SMALL if name.startswith("moh") else TINY
    return timm.create_model(name, **{**sizes, **kwargs})


def inputs(batch=3):
    return (
        torch.randn(batch, 3, 8, 8),
        torch.tensor([0, 500, 999])[:batch],
        torch.tensor([0, 4, 5])[:batch],
    )


def test_forward_contract():
    x, t, y = inputs()
    model = tiny()
    tokens = torch.randn(2, 16, 32)
    assert not model(x, t, y).sample.any()
    # A new block is the identity.
    assert torch.equal(model.blocks[0](tokens, torch.randn(2, 32)), tokens)
    sample = awake(model)(x, t, y).sample
    assert sample.shape == (3, 6, 8, 8)
    assert torch.equal(model(x, t, y, return_dict=False)[0], sample)
    assert model(x, torch.tensor(7), y).sample.shape == sample.shape  # one timestep for all
    assert not torch.equal(model(x, t, torch.tensor([1, 1, 1])).sample, sample)
    assert not torch.equal(model(x, t * 0, y).sample, sample)
    assert tiny(learn_sigma=False)(x, t, y).sample.shape == (3, 3, 8, 8)


def test_a_bottleneck_is_a_linear_map_and_an_image_becomes_its_velocity():
    ours = awake(
        tiny(learn_sigma=False, patch_bottleneck=5, prediction=dict(path="linear", predict="x"))
    )
    plain = tiny(learn_sigma=False)
    weights = ours.state_dict()
    narrow = weights["x_embedder.proj.weight"]
    wide = weights.pop("x_widen.weight")
    assert narrow.shape == (5, 3, 2, 2)
    assert wide.shape == (32, 5)
    assert "x_embedder.proj.bias" not in weights
    weights["x_embedder.proj.weight"] = torch.einsum("ck,kipq->cipq", wide, narrow)
    weights["x_embedder.proj.bias"] = weights.pop("x_widen.bias")
    plain.load_state_dict(weights)
    x, t, y = inputs()
    velocity = (x - plain(x, t, y).sample) / torch.tensor([0.05, 0.5, 0.999]).view(3, 1, 1, 1)
    torch.testing.assert_close(ours(x, t, y).sample, velocity, rtol=1e-4, atol=1e-4)
    half = ours.bfloat16()(x.bfloat16(), t, y).sample
    assert half.dtype == torch.float32  # a division by t needs its digits


DIT = "dit_small_patch2"
XLARGE = "moh_dit_xlarge_patch2_90"
IMPOSSIBLE = [
    (MOH, dict(depth=3), f"{MOH} depth head_budget"),
    (XLARGE, dict(num_heads=4, depth=2), f"{XLARGE} depth num_heads head_budget"),
    (DIT, dict(img_size=9), "img_size 9 multiple patch_size 2"),
    (DIT, dict(embed_dim=100), "embed_dim 100 multiple num_heads 6"),
    (DIT, dict(embed_dim=30, num_heads=5), "embed_dim 30 multiple 4"),
    (DIT, dict(TINY, prediction=dict(path="linear")), "noise linear learn_sigma False"),
    (
        DIT,
        dict(TINY, prediction=dict(predict="image")),
        "prediction.predict 'image' velocity x noise",
    ),
    (DIT, dict(TINY, compat="kohya"), "compat 'kohya' official diffusers sit jit"),
    (MOH, dict(SMALL, scope="sample", route_by="class"), "route_by 'class' condition timestep"),
    (MOH, dict(SMALL, route_by="timestep"), "route_by 'timestep' scope 'sample' token"),
]


@pytest.mark.parametrize("name, options, facts", IMPOSSIBLE, ids=[row[2] for row in IMPOSSIBLE])
def test_impossible_arguments(name, options, facts):
    refuse(facts, timm.create_model, name, **options)


def test_budgets_and_routers_by_name():
    with torch.device("meta"):
        budget = moh_vision.head_budget(timm.create_model(XLARGE, head_budget=0.5))
    assert budget["share"] == 0.5
    assert {layer["heads"] for layer in budget["layers"]} == {8, 16, 24}
    assert moh_vision.head_budget(tiny("dit_small_patch2", router="moh"))["share"] == 0.75
    assert moh_vision.head_budget(tiny(router="dense", head_budget=None))["share"] == 1.0
    refuse("nonsense", tiny, "dit_small_patch2", router_kwargs=dict(nonsense=1), error=TypeError)
    facts = "dit_small_patch2 pretrained=False checkpoint_path=FILE"
    refuse(facts, timm.create_model, "dit_small_patch2", pretrained=True, error=RuntimeError)


@pytest.mark.parametrize("route_by", ["condition", "timestep"])
def test_sample_scope_decides_from_the_condition(route_by):
    model = awake(tiny(scope="sample", route_by=route_by)).eval()
    x = torch.randn(4, 3, 8, 8)
    t = torch.tensor([3, 3, 900, 900])
    y = torch.tensor([0, 4, 0, 4])
    with torch.no_grad():
        _, stats = model.forward_routed(x, t, y)
        _, other = model.forward_routed(torch.randn_like(x), t, y)
    # The image has no say.
    for one, another in zip(stats, other, strict=True):
        assert torch.equal(one.counts, another.counts)
    probs = stats[0].probs  # [B, 1, E]
    assert probs.shape == (4, 1, 3)
    assert not torch.allclose(probs[0], probs[2])
    assert torch.equal(probs[0], probs[1]) == (route_by == "timestep")


@pytest.mark.parametrize("route_by", ["condition", "timestep"])
@pytest.mark.parametrize("timesteps", [[5, 5, 5], [0, 500, 999]])
def test_sample_scope_runs_what_it_chose(route_by, timesteps):
    results = []
    x, _, y = inputs()
    for executor in ("reference", "packed", "masked"):
        torch.manual_seed(0)
        model = awake(tiny(scope="sample", route_by=route_by, executor=executor))
        if executor == "packed":
            model.enable_gradient_checkpointing()
        output, stats = model.forward_routed(x, torch.tensor(timesteps), y)
        loss = output.square().mean() + load_balance_loss(stats)
        learned = [p for p in model.parameters() if p.requires_grad]
        results.append([output.detach(), *torch.autograd.grad(loss, learned)])
    for result in results[1:]:
        torch.testing.assert_close(result[0], results[0][0], atol=1e-5, rtol=1e-5)
        for got, want in zip(result[1:], results[0][1:], strict=True):
            torch.testing.assert_close(
                got, want, atol=1e-6 + 1e-5 * want.abs().max().item(), rtol=1e-4
            )
    assert all(g.norm() > 0 for g in results[0][1:])


@pytest.mark.parametrize("executor", ["masked", "packed"])
def test_one_timestep_for_all_images_is_one_choice_of_heads(executor):
    """Outputs, statistics and gradients are those of the timestep that is repeated; weights are sliced once."""
    results = []
    taken = []
    x, _, y = inputs()
    for timestep in (torch.tensor(500), torch.tensor([500]), torch.full((len(x),), 500)):
        torch.manual_seed(0)
        model = awake(tiny(scope="sample", route_by="timestep", executor=executor))
        layer = model.blocks[0].attn
        make_executor = layer.make_executor

        def keep(call, make_executor=make_executor):
            executor = make_executor(call)
            taken.append(type(getattr(executor, "products", executor)).__name__)
            return executor

        layer.make_executor = keep
        output, stats = model.forward_routed(x, timestep, y)
        assert stats[0].counts.shape[0] == len(x)
        loss = output.square().mean() + load_balance_loss(stats)
        learned = [p for p in model.parameters() if p.requires_grad]
        results.append([output.detach(), *torch.autograd.grad(loss, learned)])
    for result in results[:2]:
        for got, want in zip(result, results[2], strict=True):
            torch.testing.assert_close(
                got, want, atol=1e-6 + 1e-5 * want.abs().max().item(), rtol=1e-4
            )
    if executor == "packed":
        assert taken[:2] == ["SlicedProducts", "SlicedProducts"] and taken[2] != "SlicedProducts"


def test_inputs_out_of_range():
    model = tiny()
    x, t, labels = inputs()
    facts = "hidden_states (3, 3, 6, 6) [batch, 3, 8, 8]"
    refuse(facts, model, x[..., :6, :6], t, labels)
    refuse("class_labels 0 6 5", model, x, t, torch.tensor([0, 6, 0]))
    tokens = torch.zeros(1, 4, 32)
    condition = torch.zeros(1, 32)
    refuse("condition scope 'sample'", model.blocks[0].attn, tokens, condition=condition)
    with pytest.warns(UserWarning) as warned:
        model(x, torch.tensor(0.5), labels)
    assert_says(str(warned[0].message), "timestep 0.5 0 999 1")
    with warnings.catch_warnings(action="error"):
        for fine in (0.0, 1.0, 978.6):
            model(x, torch.tensor(fine), labels)


def test_floating_timesteps_without_values():
    """Under torch.func and fake tensors no value of a timestep may be read."""
    model = awake(tiny()).eval()
    x, t, labels = inputs()

    def sample(x, t, label):
        return model(x[None], t[None], label[None]).sample[0]

    samples = torch.func.vmap(sample)(x, t.float(), labels)
    torch.testing.assert_close(samples, model(x, t, labels).sample)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert model(*map(fake.from_tensor, (x, t.float(), labels))).sample.shape == (3, 6, 8, 8)
