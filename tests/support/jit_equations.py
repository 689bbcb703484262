"""JiT (Li and He 2025) written from the paper's equations, and weights in the layout of its released code."""

import math

import torch
from torch.nn import functional as F

C = 32
GRID = 4
HEADS = 4
DEPTH = 3
CLASSES = 5
CLASS_TOKENS = 3
START = 1  # the first block with class tokens
PATCH = 2
BOTTLENECK = 8
# Arguments of timm.create_model for a model of these sizes.
SIZES = dict(
    img_size=GRID * PATCH,
    patch_size=PATCH,
    embed_dim=C,
    depth=DEPTH,
    num_heads=HEADS,
    num_classes=CLASSES,
    patch_bottleneck=BOTTLENECK,
    class_tokens=CLASS_TOKENS,
    class_tokens_start=START,
)


def rms_norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotated(x, grid):
    """x [B, h, M + N, D]: pairs of channels as complex numbers, turned by the row in the first half and by the column in the
    second; the M tokens before the patches stay as they are."""
    prefix, x = x.split([x.shape[2] - grid**2, grid**2], 2)
    quarter = x.shape[-1] // 4
    frequencies = 10000.0 ** (-torch.arange(quarter, dtype=x.dtype) / quarter)
    rows, columns = torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij")
    angles = [positions.flatten()[:, None] * frequencies for positions in (rows, columns)]
    angles = torch.cat(angles, 1).to(x.dtype)  # [N, D / 2]
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return torch.cat([prefix, turned], 2)


def published_weights(seed=0):
    """Return random tensors under the names of the released code; the network is `net` of its training script."""
    g = torch.Generator().manual_seed(seed)
    state = {}

    def random(name, *shape, mean=0.0):
        state[f"net.{name}"] = mean + 0.2 * torch.randn(*shape, generator=g)

    def linear(name, outputs, inputs):
        random(f"{name}.weight", outputs, inputs)
        random(f"{name}.bias", outputs)

    random("pos_embed", 1, GRID**2, C)
    random("in_context_posemb", 1, CLASS_TOKENS, C)
    linear("t_embedder.mlp.0", C, 256)
    linear("t_embedder.mlp.2", C, C)
    random("y_embedder.embedding_table.weight", CLASSES + 1, C)
    random("x_embedder.proj1.weight", BOTTLENECK, 3, PATCH, PATCH)
    random("x_embedder.proj2.weight", C, BOTTLENECK, 1, 1)
    random("x_embedder.proj2.bias", C)
    hidden = int(4 * C * 2 / 3)
    for number in range(DEPTH):
        block = f"blocks.{number}"
        for norm, width in (("norm1", C), ("norm2", C)):
            random(f"{block}.{norm}.weight", width, mean=1.0)
        for norm in ("q_norm", "k_norm"):
            random(f"{block}.attn.{norm}.weight", C // HEADS, mean=1.0)
        linear(f"{block}.attn.qkv", 3 * C, C)
        linear(f"{block}.attn.proj", C, C)
        linear(f"{block}.mlp.w12", 2 * hidden, C)
        linear(f"{block}.mlp.w3", C, hidden)
        linear(f"{block}.adaLN_modulation.1", 6 * C, C)
    random("final_layer.norm_final.weight", C, mean=1.0)
    linear("final_layer.linear", PATCH**2 * 3, C)
    linear("final_layer.adaLN_modulation.1", 2 * C, C)
    return state


def predicted_image(state, z, t, labels):
    """Predict the image [B, 3, 8, 8] from z = t x + (1 - t) noise at t [B], with weights as above, in float64."""
    state = {name.removeprefix("net."): tensor.double() for name, tensor in state.items()}

    def linear(x, name):
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def modulated(x, norm, shift, scale):
        return rms_norm(x, state[f"{norm}.weight"]) * (1 + scale[:, None]) + shift[:, None]

    frequencies = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float64) / 128)
    angles = t.double()[:, None] * frequencies
    time = torch.cat([angles.cos(), angles.sin()], 1)
    time = linear(F.silu(linear(time, "t_embedder.mlp.0")), "t_embedder.mlp.2")
    label = state["y_embedder.embedding_table.weight"][labels]
    c = F.silu(time + label)
    x = F.conv2d(z.double(), state["x_embedder.proj1.weight"], stride=PATCH)
    x = F.conv2d(x, state["x_embedder.proj2.weight"], state["x_embedder.proj2.bias"])
    x = x.flatten(2).transpose(1, 2) + state["pos_embed"]
    for number in range(DEPTH):
        block = f"blocks.{number}"
        if number == START:
            x = torch.cat([label[:, None] + state["in_context_posemb"], x], 1)
        modulation = linear(c, f"{block}.adaLN_modulation.1").chunk(6, 1)
        y = modulated(x, f"{block}.norm1", *modulation[:2])
        heads = linear(y, f"{block}.attn.qkv").unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # [B, H, M + N, D] each
        q = rotated(rms_norm(q, state[f"{block}.attn.q_norm.weight"]), GRID)
        k = rotated(rms_norm(k, state[f"{block}.attn.k_norm.weight"]), GRID)
        attention = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        y = linear((attention @ v).transpose(1, 2).flatten(2), f"{block}.attn.proj")
        x = x + modulation[2][:, None] * y
        y = modulated(x, f"{block}.norm2", *modulation[3:5])
        gate, value = linear(y, f"{block}.mlp.w12").chunk(2, -1)
        x = x + modulation[5][:, None] * linear(F.silu(gate) * value, f"{block}.mlp.w3")
    modulation = linear(c, "final_layer.adaLN_modulation.1").chunk(2, 1)
    x = modulated(x[:, -(GRID**2) :], "final_layer.norm_final", *modulation)
    patches = linear(x, "final_layer.linear").view(-1, GRID, GRID, PATCH, PATCH, 3)
    return patches.permute(0, 5, 1, 3, 2, 4).reshape(-1, 3, GRID * PATCH, GRID * PATCH)
