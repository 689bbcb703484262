"""Official files give the official outputs, written again from paper and key table; DiT turned into MoH."""

import pytest
import timm
import torch
from safetensors.torch import save_file

import moh_vision
from moh_vision.models.weight_files import NAMES
from tests.support.official_dit import CLASSES, DENSE, INPUT, diffusers_dit, sincos
from tests.support.refusals import refuse
from tests.support.tiny_dit import awake


@torch.no_grad()
def output(model):
    return model(*INPUT).sample


def test_names_and_positions_are_official():
    torch.testing.assert_close(timm.create_model("dit_small_patch2", **DENSE).pos_embed, sincos())
    with torch.device("meta"):
        names = set(timm.create_model("moh_dit_xlarge_patch2_90").state_dict())
        sizes = [
            timm.create_model(f"dit_xlarge_patch2{tag}").config.sample_size
            for tag in ("", ".in1k_512")
        ]
    assert sizes == [32, 64]
    for official, ours in NAMES.items():
        names = {name.replace(f"router.{ours}.", f"{official}.") for name in names}
    assert len(names) == 338
    assert "blocks.0.attn.wg_1.weight" in names and "blocks.0.attn.wg.weight" not in names
    assert {f"blocks.27.attn.{wg}.weight" for wg in ("wg", "wg_0", "wg_1")} <= names
    cfg = timm.get_pretrained_cfg("dit_xlarge_patch2.in1k_512")
    assert cfg.url.endswith("DiT-XL-2-512x512.pt") and cfg.input_size == (4, 64, 64)
    assert (
        timm.get_pretrained_cfg("moh_dit_xlarge_patch2_90").hf_hub_id == "Chat-UniVi/MoH-DiT-XL-90"
    )


@pytest.fixture(scope="module")
def theirs():
    return diffusers_dit(
        in_channels=4, out_channels=8, num_layers=3, num_embeds_ada_norm=CLASSES, norm_num_groups=4
    )


@pytest.mark.parametrize("folder", ["model", "pipeline", "bin"])
def test_diffusers_weights_give_diffusers_outputs_if_asked(theirs, tmp_path, folder):
    if folder == "bin":
        torch.save(theirs.state_dict(), tmp_path / "diffusion_pytorch_model.bin")
    else:
        theirs.save_pretrained(tmp_path / "transformer" if folder == "pipeline" else tmp_path)
    want = output(theirs)
    outputs = {}
    for compat in ("diffusers", "official"):
        model = timm.create_model("dit_small_patch2", compat=compat, **DENSE)
        outputs[compat] = output(moh_vision.load_checkpoint(model, tmp_path).eval())
    torch.testing.assert_close(outputs["diffusers"], want, atol=1e-5, rtol=1e-5)
    # At t = 0 only an epsilon differs.
    assert torch.allclose(outputs["official"][0], want[0], atol=1e-3)
    assert (outputs["official"] - want)[2].abs().max() > 1e-3


def test_a_diffusers_model_with_embeddings_of_its_own_in_every_block_is_refused(theirs, tmp_path):
    state = {k: v.clone() for k, v in theirs.state_dict().items()}
    state["transformer_blocks.2.norm1.emb.class_embedder.embedding_table.weight"] += 1
    save_file(state, tmp_path / "own.safetensors")
    table = "transformer_blocks.2.norm1.emb.class_embedder.embedding_table.weight"
    facts = f"{tmp_path}/own.safetensors {table} block"
    model = timm.create_model("dit_small_patch2", compat="diffusers", **DENSE)
    refuse(facts, moh_vision.load_checkpoint, model, tmp_path / "own.safetensors")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.t_embedder.freq_shift == 1 and again.blocks[0].norm2.eps == 1e-5


@pytest.mark.parametrize("scope", ["token", "sample"])
@pytest.mark.parametrize("router", ["moh", "query_norm"])
def test_all_heads_give_the_dense_output(router, scope, tmp_path):
    model = awake(timm.create_model("dit_small_patch2", **DENSE)).eval()
    want = output(model)
    parameters = {id(p) for p in model.parameters()}
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
