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
# Every case of the released gates: all shared; none shared; one shared; several, all routed.
MIXED = [[2, 0], [0, 2], [1, 2], [4, 2]]


def small(name="moh_transnext_base_50", **kwargs):
    return timm.create_model(
        name, **{**SMALL, "head_budget": MIXED if name.startswith("moh") else None, **kwargs}
    )


def official_names(model):
    """A state dict with the published names: what the filter has to undo."""
    result = {}
    for name, tensor in model.state_dict().items():
        part = name.split(".")
        if part[0] == "stages":
            i = int(part[1]) + 1
            rest = ".".join(part[3:])
            name = {"downsample": f"patch_embed{i}.", "blocks": f"block{i}.", "norm": f"norm{i}."}[
                part[2]
            ] + rest
        name = name.replace("mlp.dwconv.", "mlp.dwconv.dwconv.")
        for ours, theirs in (("routed", "wg"), ("balance", "wg_0"), ("shared", "wg_1")):
            name = name.replace(f"attn.router.{ours}.", f"attn.{theirs}.")
        if ".attn.qkv." in name and not name.startswith("block4"):
            C = tensor.shape[0] // 3
            result[name.replace("qkv", "q")] = tensor[:C]
            result[name.replace("qkv", "kv")] = tensor[C:]
        else:
            result[name] = tensor
    return result


def scramble(model):
    """Weights large enough that every part of the formula shows in the output."""
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        p.data += torch.randn_like(p) * (0.3 if "router" in name or p.dim() == 1 else 0.1)
    return model.eval()
