"""LLaMA-style models small enough for tests, and a slow second implementation that shares no code with the package."""

import torch
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

WORDS = 40
DEPTH = 2
HEADS = 8
GROUPS = 4
SIZES = dict(vocab_size=WORDS, hidden_size=32, intermediate_size=24, num_hidden_layers=DEPTH)
SIZES.update(num_attention_heads=HEADS, num_key_value_heads=GROUPS, max_position_embeddings=64)
SIZES.update(pad_token_id=0, bos_token_id=1, eos_token_id=None)
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(head_dim=6)),  # other than hidden_size / heads
}


def dense(family="llama", dtype=torch.float32, seed=0, attention="sdpa", **overrides):
    """Return a transformers model whose weights are so large that its heads differ."""
    torch.manual_seed(seed)
    config, model, fields = FAMILIES[family]
    model = model(config(**{**SIZES, **fields, **overrides})).to(dtype).eval()
    model.set_attn_implementation(attention)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(std=0.25)
            else:
                p.normal_(1.0 if "norm" in name else 0.0, std=0.2)
    return model


def words(rows=2, length=9, seed=1):
    """Return random tokens [rows, length], none of them special."""
    return torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(rows=2, length=9, padding=3):
    """Return tokens whose last row begins with padding, and their attention mask, as arguments of a model."""
    ids = words(rows, length)
    mask = torch.ones(rows, length, dtype=torch.long)
    ids[-1, :padding] = 0
    mask[-1, :padding] = 0
    return dict(input_ids=ids, attention_mask=mask)


def norm_of(x, weight, eps):
    """Return the RMS norm of x over its last dimension."""
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(x, position, theta):
    """Apply rotary positions to a query or key [D]: D / 2 complex numbers, each turned by its own angle."""
    half = len(x) // 2
    angles = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag])


def slow(model, ids, gates):
    """Return the logits [N, V] of one sequence of tokens [N], computed for one token and one head at a time.

    gates(layer, queries) returns the weights [H] of the heads, given a token's queries [H, D] as projected.
    """
    c = model.config
    w = dict(model.named_parameters())
    H = c.num_attention_heads
    G = c.num_key_value_heads
    D = c.head_dim
    theta = c.rope_parameters["rope_theta"]
    x = w["model.embed_tokens.weight"][ids]  # [N, C]
    for i in range(c.num_hidden_layers):
        at = f"model.layers.{i}."

        def linear(y, name, at=at):
            return F.linear(y, w[f"{at}{name}.weight"], w.get(f"{at}{name}.bias"))

        y = norm_of(x, w[at + "input_layernorm.weight"], c.rms_norm_eps)
        raw = linear(y, "self_attn.q_proj").view(-1, H, D)
        k, v = (linear(y, f"self_attn.{p}_proj").view(-1, G, D) for p in "kv")
        q = raw
        if at + "self_attn.q_norm.weight" in w:
            q, k = (
                norm_of(t, w[f"{at}self_attn.{n}_norm.weight"], c.rms_norm_eps)
                for t, n in ((q, "q"), (k, "k"))
            )
        rows = []
        for n in range(len(ids)):
            weights = gates(i, raw[n])
            heads = []
            for h in range(H):
                g = h // (H // G)
                query = turned(q[n, h], n, theta)
                scores = (
                    torch.stack([query @ turned(k[m, g], m, theta) for m in range(n + 1)]) / D**0.5
                )
                heads.append(weights[h] * (scores.softmax(0) @ v[: n + 1, g]))
            rows.append(torch.cat(heads))
        x = x + linear(torch.stack(rows), "self_attn.o_proj")
        y = norm_of(x, w[at + "post_attention_layernorm.weight"], c.rms_norm_eps)
        x = x + linear(
            F.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj"), "mlp.down_proj"
        )
    return F.linear(norm_of(x, w["model.norm.weight"], c.rms_norm_eps), w["lm_head.weight"])


def by_norm(pairs, straight_through=False):
    """Return `gates` for `slow`: 1 for shared heads and for the routed heads with the longest queries (Jin 2024, eq. 9).

    pairs: (shared heads, active routed heads) of each layer. straight_through: with the gradient of eq. 10.
    """

    def gates(layer, queries):
        shared, routed = pairs[layer]
        norms = queries[shared:].pow(2).sum(-1).sqrt()
        p = (norms / norms.std()).softmax(0)
        hard = torch.zeros_like(p)
        hard[norms.detach().topk(routed).indices] = 1
        if straight_through:
            hard = hard + (p - p.detach())
        return torch.cat([torch.ones(shared, dtype=p.dtype), hard])

    return gates
