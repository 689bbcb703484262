import pytest
import timm
import torch

import moh_vision
from tests.support.refusals import refuse
from tests.support.tiny_vit import TINY


def tiny(**kwargs):
    return timm.create_model("moh_vit_tiny_patch16_224", **{**TINY, **kwargs})


def test_registered_with_three_quarters_of_the_heads():
    names = timm.list_models("moh_vit_*")
    assert names == [f"moh_vit_{s}_patch16_224" for s in ("base", "large", "small", "tiny")]
    assert timm.list_models(module="vit") == ["moh_vit", *names]
    for name in names:
        model, theirs = (
            timm.create_model(n, device="meta") for n in (name, name.removeprefix("moh_"))
        )
        assert moh_vision.head_budget(model)["share"] == 0.75, name
        shapes = {key: value.shape for key, value in model.state_dict().items()}
        dense = {key: shape for key, shape in shapes.items() if ".router." not in key}
        assert dense == {key: value.shape for key, value in theirs.state_dict().items()}, name


def test_options():
    model = tiny(scope="sample", router_kwargs=dict(two_stage=False))
    _, stats = model.forward_routed(torch.randn(2, 3, 16, 16))
    assert stats[0].probs.shape[1] == 1
    assert model.blocks[0].attn.router.balance is None
    dense = tiny(router="dense")
    assert moh_vision.head_budget(dense)["share"] == 1.0
    assert not any(".router." in name for name, _ in dense.named_parameters())
    assert tiny(pos_embed_std=0.5).pos_embed.std() > 0.3 > tiny().pos_embed.std()
    refuse("head_bugdet", tiny, head_bugdet=0.5, error=TypeError)


IMPOSSIBLE = {
    "img_size": (dict(img_size=30), "img_size 30 multiple patch_size 4"),
    "num_heads": (dict(num_heads=5), "embed_dim 24 multiple num_heads 5"),
    "depth": (dict(depth=0), "depth 0 whole number 1"),
    "head_budget": (dict(head_budget=[(2, 2)]), "head_budget 1 layers 2"),
    "scale_attn_norm": (dict(scale_attn_norm=True), "scale_attn_norm supported heads"),
}


@pytest.mark.parametrize("options, facts", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_arguments(options, facts):
    refuse(facts, tiny, **options)
