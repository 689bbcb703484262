"""Weights of DiTs in the layouts of the official code and of diffusers, and a DiT written from the papers' equations."""

import math

import torch
from diffusers import DiTTransformer2DModel
from torch.nn import functional as F

GRID = 4
C = 32
D = 8
CLASSES = 5
HEADS = [2, 4, 6]
BUDGET = [(2, 0), (2, 1), (3, 2)]
SHAPE = dict(img_size=8, in_chans=4, num_classes=CLASSES, embed_dim=C, depth=3)
MOH = dict(SHAPE, num_heads=HEADS, head_dim=D, head_budget=BUDGET)
DENSE = dict(SHAPE, num_heads=4)
NOISE = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(1))
INPUT = (NOISE, torch.tensor([0, 417, 999]), torch.tensor([0, 3, 5]))


def sincos():
    """Return 2-D sine-cosine positions [1, GRID * GRID, C] as in DiT: the column in the first half, the row in the second."""
    omega = 10000.0 ** -(torch.arange(C // 4, dtype=torch.float64) / (C / 4))
    rows = []
    for i in range(GRID):
        for j in range(GRID):
            # The column comes first, then the row.
            axes = [torch.cat([(p * omega).sin(), (p * omega).cos()]) for p in (j, i)]
            rows.append(torch.cat(axes))
    return torch.stack(rows).float().unsqueeze(0)


def official_weights(heads, head_dim, routed=None, seed=0):
    """Return a state dict of random tensors under the official names.

    heads: of each layer. routed: (shared heads, active routed heads) of each layer; None: a dense DiT.
    """
    g = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=g) * 0.2

    state = {
        "pos_embed": sincos(),
        "x_embedder.proj.weight": random(C, 4, 2, 2),
        "x_embedder.proj.bias": random(C),
    }
    state |= {"t_embedder.mlp.0.weight": random(C, 256), "t_embedder.mlp.0.bias": random(C)}
    state |= {"t_embedder.mlp.2.weight": random(C, C), "t_embedder.mlp.2.bias": random(C)}
    state["y_embedder.embedding_table.weight"] = random(CLASSES + 1, C)  # the last row: no class
    for i, h in enumerate(heads):
        shapes = {
            "attn.qkv": (3 * h * head_dim, C),
            "attn.proj": (C, h * head_dim),
            "adaLN_modulation.1": (6 * C, C),
        }
        shapes |= {"mlp.fc1": (4 * C, C), "mlp.fc2": (C, 4 * C)}
        for name, shape in shapes.items():
            state |= {
                f"blocks.{i}.{name}.weight": random(*shape),
                f"blocks.{i}.{name}.bias": random(shape[0]),
            }
        if routed:
            shared, k = routed[i]
            # The routers of shared heads, of routed heads, and of the balance between the two.
            state[f"blocks.{i}.attn.wg_1.weight"] = 3 * random(shared, C)
            if k:
                state[f"blocks.{i}.attn.wg.weight"] = 3 * random(h - shared, C)
                state[f"blocks.{i}.attn.wg_0.weight"] = 3 * random(2, C)
    state |= {"final_layer.linear.weight": random(32, C), "final_layer.linear.bias": random(32)}
    state |= {
        "final_layer.adaLN_modulation.1.weight": random(2 * C, C),
        "final_layer.adaLN_modulation.1.bias": random(2 * C),
    }
    return state


def official_gates(x, state, prefix, shared, routed):
    """Return the weights [B, N, H] of the heads as the released MoH code computes them."""

    def probs(name):
        return (x @ state[f"{prefix}{name}.weight"].T).softmax(-1)

    if routed == 0:
        return probs("wg_1") * shared
    top = probs("wg").topk(routed, -1)
    weights = top.values / top.values.sum(-1, keepdim=True) * routed
    gates = torch.zeros_like(probs("wg")).scatter(-1, top.indices, weights)
    if shared == 0:
        return gates
    shared_gates = probs("wg_1") * shared if shared > 1 else torch.ones_like(x[..., :1])
    both = probs("wg_0") * 2
    return torch.cat([both[..., :1] * shared_gates, both[..., 1:] * gates], -1)


def official_forward(state, heads, head_dim, routed=None, dtype=torch.float64, inputs=INPUT):
    """Return the output [B, 8, 8, 8] of a DiT with adaLN-Zero (Peebles 2023, section 3).

    It shares no code with the package's model: float64, a loop over blocks, einsum.

    inputs: latents [B, 4, 8, 8], timesteps [B] and classes [B].
    """
    s = {name: tensor.to(dtype) for name, tensor in state.items()}
    x = inputs[0].to(dtype)
    t = inputs[1]
    y = inputs[2]
    B = len(x)

    def linear(x, name):
        return x @ s[f"{name}.weight"].T + s[f"{name}.bias"]

    def norm(x):
        variance = x.var(-1, unbiased=False, keepdim=True)
        return (x - x.mean(-1, keepdim=True)) / (variance + 1e-6).sqrt()

    patches = x.view(B, 4, GRID, 2, GRID, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, GRID * GRID, 16)
    x = (
        patches @ s["x_embedder.proj.weight"].view(C, 16).T
        + s["x_embedder.proj.bias"]
        + s["pos_embed"]
    )
    # The official code computes frequencies in float32.
    frequencies = torch.exp(-math.log(10000) * torch.arange(128).float() / 128)
    angles = (t[:, None].float() * frequencies).to(dtype)
    features = torch.cat([angles.cos(), angles.sin()], -1)
    c = linear(F.silu(linear(features, "t_embedder.mlp.0")), "t_embedder.mlp.2")
    c = c + s["y_embedder.embedding_table.weight"][y]
    for i, h in enumerate(heads):
        m = linear(F.silu(c), f"blocks.{i}.adaLN_modulation.1").view(B, 6, 1, C)
        z = norm(x) * (1 + m[:, 1]) + m[:, 0]
        q, k, v = linear(z, f"blocks.{i}.attn.qkv").view(B, -1, 3, h, head_dim).unbind(2)
        a = torch.einsum("bnhd,bmhd->bhnm", q, k) / math.sqrt(head_dim)
        o = torch.einsum("bhnm,bmhd->bnhd", a.softmax(-1), v)
        if routed:
            o = o * official_gates(z, s, f"blocks.{i}.attn.", *routed[i]).unsqueeze(-1)
        x = x + m[:, 2] * linear(o.flatten(2), f"blocks.{i}.attn.proj")
        z = linear(norm(x) * (1 + m[:, 4]) + m[:, 3], f"blocks.{i}.mlp.fc1")
        z = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        x = x + m[:, 5] * linear(z, f"blocks.{i}.mlp.fc2")
    shift, scale = linear(F.silu(c), "final_layer.adaLN_modulation.1").chunk(2, -1)
    z = norm(x) * (1 + scale[:, None]) + shift[:, None]
    x = linear(z, "final_layer.linear")  # [B, N, 2 * 2 * 8]
    x = x.view(B, GRID, GRID, 2, 2, 8).permute(0, 5, 1, 3, 2, 4)
    return x.reshape(B, 8, 8, 8)


# Case -> (name of the model, its arguments, arguments of `official_weights`).
CASES = {
    "moh": ("moh_dit_small_patch2_75", MOH, dict(heads=HEADS, head_dim=D, routed=BUDGET)),
    "dense": ("dit_small_patch2", DENSE, dict(heads=[4] * 3, head_dim=8)),
    "zero routers": (
        "moh_dit_small_patch2_75",
        dict(DENSE, head_budget=[(2, 2)] * 3),
        dict(heads=[4] * 3, head_dim=8),
    ),
}


def diffusers_dit(**sizes):
    """Return diffusers' DiT with random weights, in which all blocks have the same embedding of timestep and class.

    Converted official weights have only one such embedding too.
    """
    torch.manual_seed(0)
    sizes = dict(num_attention_heads=4, attention_head_dim=8, sample_size=8) | sizes
    model = DiTTransformer2DModel(**sizes).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    emb = model.transformer_blocks[0].norm1.emb.state_dict()
    for block in model.transformer_blocks:
        block.norm1.emb.load_state_dict(emb)
    return model
