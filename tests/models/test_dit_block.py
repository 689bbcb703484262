"""The block of JiT and LightningDiT: RMSNorm, SwiGLU, rotary positions in 2-D and qk-norm in a DiT, dense and routed."""

import math

import pytest
import timm
import torch
from torch.nn import functional as F

import moh_vision
from moh_vision.attention import head_budget
from moh_vision.models.counts import count_macs, least_activations
from moh_vision.models.describe import full_name
from moh_vision.models.dit_transformer import MoHDiTTransformer2DModel
from tests.support.jit_equations import rms_norm, rotated
from tests.support.refusals import refuse
from tests.support.tiny_dit import TINY, awake

BLOCK = dict(norm_layer="rmsnorm", swiglu_mlp=True, use_rot_pos_emb=True, qk_norm=True)
CLASS_TOKENS = dict(class_tokens=3, class_tokens_start=1)
ROUTED = dict(head_budget=[(1, 2), (2, 1)])
ARGUMENTS = {name: {name: value} for name, value in BLOCK.items()}
ARGUMENTS["all four"] = BLOCK
ARGUMENTS["class tokens"] = CLASS_TOKENS
ARGUMENTS["all five"] = BLOCK | CLASS_TOKENS


def dit(**options):
    torch.manual_seed(0)
    model = awake(timm.create_model("dit_small_patch2", **{**TINY, **options})).eval()
    for name, p in model.named_parameters():
        if name.endswith("norm.weight") or ".norm" in name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return model


def inputs():
    torch.manual_seed(1)
    return torch.randn(3, 3, 8, 8), torch.tensor([10, 500, 999]), torch.tensor([0, 4, 5])


# ---------------------------------------------------------------- the equations, written from the papers


def block_by_hand(block, x, c, grid, dropout=0.0):
    modulation = F.linear(F.silu(c), *block.adaLN_modulation[1].parameters())
    shift1, scale1, gate1, shift2, scale2, gate2 = modulation[:, None].chunk(6, -1)
    attn = block.attn
    y = rms_norm(x, block.norm1.weight) * (1 + scale1) + shift1
    heads = F.linear(y, attn.qkv.weight, attn.qkv.bias).unflatten(-1, (3, attn.num_heads, -1))
    q, k, v = heads.permute(2, 0, 3, 1, 4)  # [B, h, N, D] each
    q = rotated(rms_norm(q, attn.q_norm.weight), grid)
    k = rotated(rms_norm(k, attn.k_norm.weight), grid)
    weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
    y = F.linear((weights @ v).transpose(1, 2).flatten(2), attn.proj.weight, attn.proj.bias)
    x = x + gate1 * F.dropout(y, dropout)
    mlp = block.mlp
    y = rms_norm(x, block.norm2.weight) * (1 + scale2) + shift2
    gate = F.linear(y, mlp.fc1_g.weight, mlp.fc1_g.bias)
    y = F.silu(gate) * F.linear(y, mlp.fc1_x.weight, mlp.fc1_x.bias)
    y = F.dropout(y, dropout)
    return x + gate2 * F.linear(y, mlp.fc2.weight, mlp.fc2.bias)


@torch.no_grad()
def test_a_block_is_the_papers_equations():
    model = dit(**BLOCK).double()
    torch.manual_seed(1)
    x = torch.randn(3, 16, 32, dtype=torch.float64)
    c = torch.randn(3, 32, dtype=torch.float64)
    block = model.blocks[1]
    rotary = (model.rotary_cos, model.rotary_sin)
    # RMSNorm is computed in float32.
    want = block_by_hand(block, x, c, 4)
    torch.testing.assert_close(block(x, c, rotary=rotary), want, rtol=1e-5, atol=1e-5)


MLPS = {
    "SwiGLU": dict(BLOCK),
    "Mlp": dict(),
    "routed": dict(scope="sample", head_budget=0.75, mlp_budget=0.5),
}


@pytest.mark.parametrize("mlp", MLPS)
@pytest.mark.parametrize("depth, middle", [(4, [1, 2]), (6, [1, 2]), (9, [2, 3, 4, 5])])
def test_dropout_of_the_middle_half_of_the_blocks(mlp, depth, middle, tmp_path):
    """JiT: blocks from a quarter of the depth, rounded down, to three of them; nothing behind the MLP."""
    model = dit(**MLPS[mlp], depth=depth, middle_dropout=0.2)
    model.save_pretrained(tmp_path)
    for found in (model, type(model).from_pretrained(tmp_path)):
        for number, block in enumerate(found.blocks):
            dropouts = [
                block.attn.proj_drop,
                block.attn.attn_drop,
                block.mlp.drop1,
                block.mlp.drop2,
            ]
            rate = 0.2 if number in middle else 0.0
            assert [dropout.p for dropout in dropouts] == [rate, 0, rate, 0], number


@torch.no_grad()
def test_dropout_is_behind_attention_and_between_the_products_of_the_mlp():
    model = dit(**BLOCK, depth=4, middle_dropout=0.2).double()
    x = torch.randn(3, 16, 32, dtype=torch.float64)
    c = torch.randn(3, 32, dtype=torch.float64)
    block = model.blocks[1].train()
    rotary = (model.rotary_cos, model.rotary_sin)
    torch.manual_seed(2)
    found = block(x, c, rotary=rotary)
    torch.manual_seed(2)
    want = block_by_hand(block, x, c, 4, dropout=0.2)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    same = block_by_hand(block, x, c, 4)
    torch.testing.assert_close(block.eval()(x, c, rotary=rotary), same, rtol=1e-5, atol=1e-5)
    converted = moh_vision.convert(model, router="moh").blocks[1]
    assert (converted.attn.proj_drop.p, converted.mlp.drop1.p) == (0.2, 0.2)


@torch.no_grad()
def test_class_tokens_stand_before_the_patches_from_their_block_on():
    """JiT: the class's embedding, repeated, plus learnt positions; left out before the last layer."""
    model = dit(**BLOCK, **CLASS_TOKENS, learn_sigma=False).double()
    images, timesteps, labels = inputs()
    images = images.double()
    c_class = model.y_embedder.embedding_table.weight[labels]
    c = model.t_embedder(timesteps, torch.float64) + c_class
    x = model.x_embedder(images) + model.pos_embed
    x = block_by_hand(model.blocks[0], x, c, 4)
    in_context = torch.stack([c_class + position for position in model.class_positions[0]], 1)
    x = block_by_hand(model.blocks[1], torch.cat([in_context, x], 1), c, 4)
    patches = model.final_layer(x[:, 3:], c)  # [3, 16, 2 * 2 * 3]
    want = patches.view(3, 4, 4, 2, 2, 3).permute(0, 5, 1, 3, 2, 4).reshape(3, 3, 8, 8)
    tokens = []
    sample, _ = model.forward_routed(images, timesteps, labels, tokens)
    torch.testing.assert_close(sample, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tokens[1], x[:, 3:], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_last_layer_has_the_norm_of_the_blocks():
    last = dit(**BLOCK).double().final_layer
    torch.manual_seed(1)
    x = torch.randn(3, 16, 32, dtype=torch.float64)
    c = torch.randn(3, 32, dtype=torch.float64)
    modulation = F.linear(F.silu(c), *last.adaLN_modulation[1].parameters())
    shift, scale = modulation[:, None].chunk(2, -1)
    want = last.linear(rms_norm(x, last.norm_final.weight) * (1 + scale) + shift)
    torch.testing.assert_close(last(x, c), want, rtol=1e-5, atol=1e-5)


def test_a_swiglu_starts_as_one_matrix():
    """JiT and LightningDiT hold W_g and W_1 [h, C] each as one [2 h, C], and Xavier's bound is that of the whole."""
    torch.manual_seed(0)
    C = 96
    model = timm.create_model("dit_small_patch2", **TINY | dict(embed_dim=C), **BLOCK)
    bound = math.sqrt(6 / (C + 2 * 256))
    for block in model.blocks:
        halves = [block.mlp.fc1_g.weight, block.mlp.fc1_x.weight]
        assert [list(half.shape) for half in halves] == [[256, C]] * 2
        assert not torch.equal(*halves)
        for half in halves:
            assert 0.99 * bound < half.abs().max() <= bound
            assert half.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
        assert block.mlp.fc2.weight.abs().max() <= math.sqrt(6 / (C + 256))


@torch.no_grad()
def test_scores_depend_on_the_offsets_of_rows_and_columns():
    model = dit(use_rot_pos_emb=True)
    cos, sin = model.rotary_cos, model.rotary_sin  # [16, 8], patches of 4 rows of 4
    torch.manual_seed(2)
    q, k = torch.randn(2, 8)

    def turned(x, patch):
        pairs = torch.stack([-x[1::2], x[::2]], -1).flatten()
        return x * cos[patch] + pairs * sin[patch]

    def score(at, other):
        return turned(q, 4 * at[0] + at[1]) @ turned(k, 4 * other[0] + other[1])

    same_offset = [score((0, 0), (1, 2)), score((1, 1), (2, 3)), score((2, 0), (3, 2))]
    torch.testing.assert_close(torch.stack(same_offset), same_offset[0].expand(3))
    assert abs(score((0, 0), (2, 1)) - same_offset[0]) > 1e-3


def test_a_new_block_is_the_identity():
    model = timm.create_model("dit_small_patch2", **TINY, **BLOCK)
    x = torch.randn(2, 16, 32)
    rotary = (model.rotary_cos, model.rotary_sin)
    assert torch.equal(model.blocks[0](x, torch.randn(2, 32), rotary=rotary), x)
    assert not model(*inputs()).sample.any()


# A paper's model -> ours, its arguments, its count of parameters in millions.
LIGHTNING = dict(BLOCK, in_chans=32, img_size=16, patch_size=1, qk_norm=False, learn_sigma=False)
COUNTS = {
    "JiT-B/16": ("jit_base_patch16", {}, 131),
    "JiT-L/16": ("jit_large_patch16", {}, 459),
    "JiT-H/16": ("jit_huge_patch16", {}, 953),
    "JiT-B/32": ("jit_base_patch32", {}, 133),
    "LightningDiT-XL/1": ("dit_xlarge_patch2", LIGHTNING, 675),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_the_papers(name):
    variant, arguments, millions = COUNTS[name]
    with torch.device("meta"):
        model = timm.create_model(variant, **arguments)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert round(count / 1e6) == millions


@pytest.mark.parametrize("size", ["base", "large"])
def test_a_jit_with_the_heads_of_moh_dit(size):
    with torch.device("meta"):
        routed = timm.create_model(f"moh_jit_{size}_patch16_75")
        dense = timm.create_model(f"jit_{size}_patch16")
        dit = timm.create_model(f"moh_dit_{size}_patch2_75")
    assert head_budget(routed)["layers"] == head_budget(dit)["layers"]
    routers = {name for name in routed.state_dict() if ".router." in name}
    assert routed.state_dict().keys() - routers == dense.state_dict().keys()
    for key in ("compat", "prediction", "class_tokens_start", "patch_bottleneck", "patch_size"):
        assert routed.config[key] == dense.config[key]


def test_macs_of_a_swiglu_are_those_of_its_three_products():
    model = dit(**BLOCK)
    plain = count_macs(dit(), *inputs_of_one()).ideal
    C, hidden = 32, 4 * 32 * 2 // 3
    difference = 2 * 16 * (3 * C * hidden - 2 * C * 4 * C)  # 2 layers, 16 tokens
    assert count_macs(model, *inputs_of_one()).ideal - plain == difference


def test_macs_of_class_tokens_are_those_of_longer_sequences():
    model = dit(**CLASS_TOKENS)
    plain = count_macs(dit(), *inputs_of_one())
    longer = count_macs(model, *inputs_of_one())
    assert [layer.queries for layer in longer.attention] == [16, 19]
    C = 32
    linears = 3 * (4 * C * C + 2 * C * 4 * C)  # of 3 tokens in one layer: attention, MLP
    assert longer.ideal - plain.ideal == linears + 2 * (19 * 19 - 16 * 16) * C


def test_a_swiglu_keeps_its_input_once_and_a_norm_its_input():
    x = inputs_of_one()
    plain = least_activations(dit(), *x)
    assert least_activations(dit(norm_layer="rmsnorm"), *x) == plain
    # 2 layers, 16 tokens; hidden channels before the activation, and before the last linear layer.
    difference = 2 * 16 * 2 * (4 * 32 - 4 * 32 * 2 // 3)
    assert plain - least_activations(dit(swiglu_mlp=True), *x) == difference


KEPT = {"DiT": {}, "JiT": ARGUMENTS["all five"], "MoH-JiT": ARGUMENTS["all five"] | ROUTED}


@pytest.mark.parametrize("options", KEPT.values(), ids=KEPT)
def test_autograd_keeps_no_less_than_the_bound(options):
    model = dit(**options)
    weights = {p.data_ptr() for p in model.parameters()}
    kept = []  # the tensors stay alive, so no two have one address

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(*inputs_of_one())
    sizes = {tensor.data_ptr(): tensor.numel() for tensor in kept}
    saved = sum(size for address, size in sizes.items() if address not in weights)
    assert 0 < least_activations(model, *inputs_of_one()) <= saved


def test_a_models_name_says_its_block():
    arguments = dict(BLOCK, qk_norm=False, embed_dim=32, class_tokens=4)
    shown = full_name("dit_small_patch2", arguments)
    block = "norm_layer rmsnorm, swiglu_mlp, use_rot_pos_emb"
    assert shown == f"dit_small_patch2 with embed_dim 32, class_tokens 4, {block}"


def inputs_of_one():
    x, t, y = inputs()
    return x[:1], t[:1], y[:1]


SCOPES = {
    "token": {},
    "sample": dict(scope="sample"),
    "by timestep": dict(scope="sample", route_by="timestep"),
}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_skipped_heads_change_nothing(argument, scope):
    """Values and gradients of the executors that skip heads equal the reference's."""
    results = []
    x, t, y = inputs()
    if scope == "by timestep":
        t = torch.tensor(500)
    for executor in ("reference", "packed"):
        model = dit(**ROUTED, **ARGUMENTS[argument], **SCOPES[scope], executor=executor)
        sample = model(x, t, y).sample
        sample.square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([sample.detach(), *gradients])
    for skipped, oracle in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(skipped, oracle, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_converted_at_all_heads_is_the_dense_model(argument, tmp_path):
    model = dit(**ARGUMENTS[argument])
    want = model(*inputs()).sample
    moh_vision.convert(model, head_budget=0.5, calibrate=[inputs()])
    assert not torch.equal(model(*inputs()).sample, want)
    moh_vision.set_head_budget(model, 1.0)
    torch.testing.assert_close(model(*inputs()).sample, want, rtol=1e-4, atol=1e-5)
    # Saved and loaded, rotary positions included, which are in no file.
    model.save_pretrained(tmp_path)
    again = MoHDiTTransformer2DModel.from_pretrained(tmp_path).eval()
    assert torch.equal(again(*inputs()).sample, model(*inputs()).sample)


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**20])
def test_qk_norm_bounds_the_scores_however_large_the_projection(scale):
    """RMSNorm gives q and k a length of at most sqrt(D) times their largest weight, which rotation keeps."""
    layer = dit(**BLOCK).blocks[0].attn
    layer.qkv.weight.mul_(scale)
    layer.qkv.bias.mul_(scale)
    normalised = {}
    for name in ("q_norm", "k_norm"):

        def keep(module, args, output, name=name):
            normalised[name] = output.float().transpose(1, 2)  # [B, H, N, D]

        getattr(layer, name).register_forward_hook(keep)
    x = torch.randn(3, 16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x)
    assert y.isfinite().all()
    D = layer.head_dim
    scores = normalised["q_norm"] @ normalised["k_norm"].mT / math.sqrt(D)
    bound = math.sqrt(D) * layer.q_norm.weight.abs().max() * layer.k_norm.weight.abs().max()
    rounding = 1 + 2**-6  # q and k are bfloat16, which has 8 bits
    assert 0.1 * bound < scores.abs().max() <= rounding * bound


WRONG = {
    "an unknown norm": (
        dict(norm_layer="batchnorm"),
        "norm_layer 'batchnorm' layernorm rmsnorm",
    ),
    "a text for a switch": (dict(qk_norm="false"), "qk_norm 'false' true false"),
    "a head's width": (
        dict(use_rot_pos_emb=True, head_dim=6),
        "use_rot_pos_emb width multiple 4 [6]",
    ),
    "groups of a SwiGLU": (
        dict(swiglu_mlp=True, scope="sample", router="moh", head_budget=0.5, mlp_budget=0.5),
        "mlp_budget 0.5 linear SwiGLU swiglu_mlp false",
    ),
    "class tokens in no block": (
        dict(class_tokens=2, class_tokens_start=2),
        "class_tokens_start 2 0 1",
    ),
    "a number of class tokens": (
        dict(class_tokens=True),
        "class_tokens True whole number 0",
    ),
    "a dropout of all": (
        dict(middle_dropout=1.0),
        "middle_dropout 1.0 0 1",
    ),
    "a text for a dropout": (
        dict(middle_dropout="0.2"),
        "middle_dropout '0.2' 0 1",
    ),
    "dropout in no block": (
        dict(middle_dropout=0.2, depth=3),
        "middle_dropout 0.2 3 blocks middle half",
    ),
    "a list of norms": (
        dict(norm_layer=["rmsnorm"]),
        "norm_layer ['rmsnorm'] layernorm rmsnorm",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_makes_no_model(case):
    arguments, facts = WRONG[case]
    refuse(facts, dit, **arguments)


def test_a_converted_swiglu_has_no_groups():
    facts = "mlp_budget blocks.0.mlp SwiGLU linear"
    refuse(facts, moh_vision.convert, dit(**BLOCK), scope="sample", mlp_budget=0.5)
