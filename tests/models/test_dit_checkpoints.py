"""Official files give the official outputs, written again from paper and key table; DiT turned into MoH."""

import math

import pytest
import timm
import torch
from diffusers import DiTTransformer2DModel
from refusals import refuse
from safetensors.torch import save_file
from test_moh_dit import awake
from torch.nn import functional as F

import moh_vision
from moh_vision.models.weight_files import NAMES

GRID, C, D, CLASSES = 4, 32, 8, 5
HEADS = [2, 4, 6]
BUDGET = [(2, 0), (2, 1), (3, 2)]
SHAPE = dict(img_size=8, in_chans=4, num_classes=CLASSES, embed_dim=C, depth=3)
MOH = dict(SHAPE, num_heads=HEADS, head_dim=D, head_budget=BUDGET)
DENSE = dict(SHAPE, num_heads=4)
NOISE = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(1))
INPUT = (NOISE, torch.tensor([0, 417, 999]), torch.tensor([0, 3, 5]))


def sincos():
    """2-D sine-cosine positions as MAE and DiT have them: half of the width for each axis, the column first."""
    omega = 10000.0 ** -(torch.arange(C // 4, dtype=torch.float64) / (C / 4))
    rows = []
    for i in range(GRID):
        for j in range(GRID):
            axes = [torch.cat([(p * omega).sin(), (p * omega).cos()]) for p in (j, i)]
            rows.append(torch.cat(axes))
    return torch.stack(rows).float().unsqueeze(0)


def official_weights(heads, head_dim, routed=None, seed=0):
    """Random tensors under the official names (facts: key table of MoH-DiT); `routed`: (shared, routed) per layer."""
    g = torch.Generator().manual_seed(seed)

    def r(*shape):
        return torch.randn(*shape, generator=g) * 0.2

    state = {
        "pos_embed": sincos(),
        "x_embedder.proj.weight": r(C, 4, 2, 2),
        "x_embedder.proj.bias": r(C),
    }
    state |= {"t_embedder.mlp.0.weight": r(C, 256), "t_embedder.mlp.0.bias": r(C)}
    state |= {"t_embedder.mlp.2.weight": r(C, C), "t_embedder.mlp.2.bias": r(C)}
    state["y_embedder.embedding_table.weight"] = r(CLASSES + 1, C)
    for i, h in enumerate(heads):
        shapes = {
            "attn.qkv": (3 * h * head_dim, C),
            "attn.proj": (C, h * head_dim),
            "adaLN_modulation.1": (6 * C, C),
        }
        shapes |= {"mlp.fc1": (4 * C, C), "mlp.fc2": (C, 4 * C)}
        for name, shape in shapes.items():
            state |= {
                f"blocks.{i}.{name}.weight": r(*shape),
                f"blocks.{i}.{name}.bias": r(shape[0]),
            }
        if routed:
            shared, k = routed[i]
            state[f"blocks.{i}.attn.wg_1.weight"] = 3 * r(shared, C)
            if k:
                state[f"blocks.{i}.attn.wg.weight"] = 3 * r(h - shared, C)
                state[f"blocks.{i}.attn.wg_0.weight"] = 3 * r(2, C)
    state |= {"final_layer.linear.weight": r(32, C), "final_layer.linear.bias": r(32)}
    state |= {
        "final_layer.adaLN_modulation.1.weight": r(2 * C, C),
        "final_layer.adaLN_modulation.1.bias": r(2 * C),
    }
    return state


def official_gates(x, state, prefix, shared, routed):
    """Head weights [B, N, H] of the released MoH code."""

    def probs(name):
        return (x @ state[f"{prefix}{name}.weight"].T).softmax(-1)

    if routed == 0:
        return probs("wg_1") * shared
    top = probs("wg").topk(routed, -1)
    weights = top.values / top.values.sum(-1, keepdim=True) * routed
    gates = torch.zeros_like(probs("wg")).scatter(-1, top.indices, weights)
    if shared == 0:
        return gates
    own = probs("wg_1") * shared if shared > 1 else torch.ones_like(x[..., :1])
    both = probs("wg_0") * 2
    return torch.cat([both[..., :1] * own, both[..., 1:] * gates], -1)


def official_forward(state, heads, head_dim, routed=None, dtype=torch.float64):
    """DiT with adaLN-Zero (Peebles 2023, section 3), in another form than the model's: float64, loops, einsum."""
    s = {name: tensor.to(dtype) for name, tensor in state.items()}
    x, t, y = INPUT[0].to(dtype), INPUT[1], INPUT[2]

    def linear(x, name):
        return x @ s[f"{name}.weight"].T + s[f"{name}.bias"]

    def norm(x):
        return (x - x.mean(-1, keepdim=True)) / (
            x.var(-1, unbiased=False, keepdim=True) + 1e-6
        ).sqrt()

    patches = x.view(3, 4, GRID, 2, GRID, 2).permute(0, 2, 4, 1, 3, 5).reshape(3, GRID * GRID, 16)
    x = (
        patches @ s["x_embedder.proj.weight"].view(C, 16).T
        + s["x_embedder.proj.bias"]
        + s["pos_embed"]
    )
    # As the official code: frequencies in float32.
    angles = (
        t[:, None].float() * torch.exp(-math.log(10000) * torch.arange(128).float() / 128)
    ).to(dtype)
    features = torch.cat([angles.cos(), angles.sin()], -1)
    c = linear(F.silu(linear(features, "t_embedder.mlp.0")), "t_embedder.mlp.2")
    c = c + s["y_embedder.embedding_table.weight"][y]
    for i, h in enumerate(heads):
        m = linear(F.silu(c), f"blocks.{i}.adaLN_modulation.1").view(3, 6, 1, C)
        z = norm(x) * (1 + m[:, 1]) + m[:, 0]
        q, k, v = linear(z, f"blocks.{i}.attn.qkv").view(3, -1, 3, h, head_dim).unbind(2)
        a = torch.einsum("bnhd,bmhd->bhnm", q, k) / math.sqrt(head_dim)
        o = torch.einsum("bhnm,bmhd->bnhd", a.softmax(-1), v)
        if routed:
            o = o * official_gates(z, s, f"blocks.{i}.attn.", *routed[i]).unsqueeze(-1)
        x = x + m[:, 2] * linear(o.flatten(2), f"blocks.{i}.attn.proj")
        z = linear(norm(x) * (1 + m[:, 4]) + m[:, 3], f"blocks.{i}.mlp.fc1")
        z = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        x = x + m[:, 5] * linear(z, f"blocks.{i}.mlp.fc2")
    shift, scale = linear(F.silu(c), "final_layer.adaLN_modulation.1").chunk(2, -1)
    x = linear(
        norm(x) * (1 + scale[:, None]) + shift[:, None], "final_layer.linear"
    )  # [B, N, 2 * 2 * 8]
    x = x.view(3, GRID, GRID, 2, 2, 8).permute(0, 5, 1, 3, 2, 4)
    return x.reshape(3, 8, 8, 8)


CASES = {
    "moh": ("moh_dit_small_patch2_75", MOH, dict(heads=HEADS, head_dim=D, routed=BUDGET)),
    "dense": ("dit_small_patch2", DENSE, dict(heads=[4] * 3, head_dim=8)),
    "zero routers": (
        "moh_dit_small_patch2_75",
        dict(DENSE, head_budget=[(2, 2)] * 3),
        dict(heads=[4] * 3, head_dim=8),
    ),
}


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


def diffusers_dit(**sizes):
    """diffusers' DiT, whose blocks embed alike, as with the official weights."""
    torch.manual_seed(0)
    sizes = dict(num_attention_heads=4, attention_head_dim=8, sample_size=8) | sizes
    model = DiTTransformer2DModel(**sizes).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    emb = model.transformer_blocks[0].norm1.emb.state_dict()
    for block in model.transformer_blocks:
        block.norm1.emb.load_state_dict(emb)
    return model


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
    want, outputs = output(theirs), {}
    for compat in ("diffusers", "official"):
        model = timm.create_model("dit_small_patch2", compat=compat, **DENSE)
        outputs[compat] = output(moh_vision.load_checkpoint(model, tmp_path).eval())
    torch.testing.assert_close(outputs["diffusers"], want, atol=1e-5, rtol=1e-5)
    assert torch.allclose(
        outputs["official"][0], want[0], atol=1e-3
    )  # at t = 0 only an epsilon differs
    assert (outputs["official"] - want)[2].abs().max() > 1e-3


def test_a_diffusers_model_with_embeddings_of_its_own_in_every_block_is_refused(theirs, tmp_path):
    state = {k: v.clone() for k, v in theirs.state_dict().items()}
    state["transformer_blocks.2.norm1.emb.class_embedder.embedding_table.weight"] += 1
    save_file(state, tmp_path / "own.safetensors")
    words = "own.safetensors: transformer_blocks.2.*differs from that of other blocks"
    model = timm.create_model("dit_small_patch2", compat="diffusers", **DENSE)
    refuse(words, moh_vision.load_checkpoint, model, tmp_path / "own.safetensors")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.t_embedder.freq_shift == 1 and again.blocks[0].norm2.eps == 1e-5


@pytest.mark.parametrize("scope", ["token", "sample"])
@pytest.mark.parametrize("router", ["moh", "query_norm"])
def test_all_heads_give_the_dense_output(router, scope, tmp_path):
    model = awake(timm.create_model("dit_small_patch2", **DENSE)).eval()
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
