"""A dense DiT turned into MoH."""

import pytest
import timm
import torch
from refusals import refuse
from test_dit_checkpoints import DENSE, INPUT, theirs  # noqa: F401  a fixture

import moh_vision
from moh_vision.models.head_order import head_lengths


def dense(**kwargs):
    torch.manual_seed(0)
    model = timm.create_model("dit_small_patch2", **DENSE, **kwargs).eval()
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.2)
    return model


@torch.no_grad()
def output(model):
    return model(*INPUT).sample


@pytest.mark.parametrize("scope", ["token", "sample"])
@pytest.mark.parametrize("router", ["moh", "query_norm"])
def test_all_heads_give_the_dense_output(router, scope, tmp_path):
    model = dense()
    want, parameters = output(model), {id(p) for p in model.parameters()}
    assert moh_vision.convert(model, router=router, scope=scope) is model
    assert torch.equal(output(model), want)
    assert parameters <= {id(p) for p in model.parameters()}
    moh_vision.set_head_budget(model, 0.5)
    assert moh_vision.head_budget(model)["share"] == 0.5 and not torch.allclose(output(model), want)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert (again.config.router, again.config.scope) == (router, scope)
    assert moh_vision.head_budget(again) == moh_vision.head_budget(model)
    assert torch.equal(output(again), output(model))


def test_the_strongest_heads_are_shared():
    model = dense()
    want = output(model)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.proj.weight[:, 16:24] *= 3  # head 2
    strong = output(model)
    moh_vision.convert(model, calibrate=[INPUT, INPUT])
    torch.testing.assert_close(output(model), strong, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(strong, want)
    shares = head_lengths(model, [block.attn for block in model.blocks], [INPUT])
    assert len(shares) == 3 and shares[0].shape == (4,)
    norms = [block.attn.proj.weight.unflatten(1, (4, 8)).norm(dim=(0, 2)) for block in model.blocks]
    assert all(n.argmax() == 0 for n in norms)


def test_diffusers_own_dit(theirs):  # noqa: F811
    with torch.no_grad():
        want = theirs(*INPUT).sample
    model = moh_vision.convert(theirs, head_budget=[(1, 3)] * 3)
    assert type(model).__name__ == "MoHDiTTransformer2DModel" and model is not theirs
    torch.testing.assert_close(output(model), want, atol=1e-5, rtol=1e-5)
    moh_vision.set_head_budget(model, [(1, 2)] * 3)
    assert moh_vision.head_budget(model)["share"] == 0.75


def test_what_cannot_be_converted():
    model = timm.create_model("moh_dit_small_patch2_75", **DENSE, head_budget=[(2, 1)] * 3)
    refuse("has routed heads already", lambda: moh_vision.convert(model))
    with pytest.raises(ValueError, match="the attention of TransNeXt is built with its router"):
        moh_vision.convert(timm.create_model("transnext_micro"))
    from diffusers import DiTTransformer2DModel

    odd = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, num_layers=1, sample_size=4, num_embeds_ada_norm=3,
        norm_num_groups=4, out_channels=8, activation_fn="geglu",
    )  # fmt: skip
    refuse("the DiT has activation_fn 'geglu'; only 'gelu-approximate'", lambda: moh_vision.convert(odd))
