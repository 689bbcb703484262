"""A small TransNeXt, and its weights in the official layout."""

import timm
import torch

SMALL = dict(
    img_size=64,
    embed_dims=(12, 24, 24, 48),
    num_heads=(2, 4, 4, 8),
    depths=(1, 2, 1, 2),
    num_classes=5,
)
# One budget for each stage, and for each formula of the released gates: all heads are shared; none is; one is; several
# are, and all routed heads run.
MIXED = [[2, 0], [0, 2], [1, 2], [4, 2]]


def small(name="moh_transnext_base_50", **kwargs):
    """Return a small model by name; those of MoH have the budgets `MIXED`."""
    budget = MIXED if name.startswith("moh") else None
    return timm.create_model(name, **{**SMALL, "head_budget": budget, **kwargs})


def official_names(model):
    """Return the state dict of a model under the published names, as `load_checkpoint` gets it."""
    result = {}
    for name, tensor in model.state_dict().items():
        part = name.split(".")
        if part[0] == "stages":  # stages.I.PART.REST
            i = int(part[1]) + 1
            official = {"downsample": "patch_embed", "blocks": "block", "norm": "norm"}[part[2]]
            name = f"{official}{i}." + ".".join(part[3:])
        name = name.replace("mlp.dwconv.", "mlp.dwconv.dwconv.")
        for ours, theirs in (("routed", "wg"), ("balance", "wg_0"), ("shared", "wg_1")):
            name = name.replace(f"attn.router.{ours}.", f"attn.{theirs}.")
        # All stages but the last have two projections in place of one.
        if ".attn.qkv." in name and not name.startswith("block4"):
            C = tensor.shape[0] // 3
            result[name.replace("qkv", "q")] = tensor[:C]
            result[name.replace("qkv", "kv")] = tensor[C:]
        else:
            result[name] = tensor
    return result


def scramble(model):
    """Add noise to all weights, large enough that every term of the gates shows in the output."""
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        p.data += torch.randn_like(p) * (0.3 if "router" in name or p.dim() == 1 else 0.1)
    return model.eval()
