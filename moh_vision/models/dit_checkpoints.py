"""Weights of other DiTs -> the names of ours: official DiT and MoH-DiT, and diffusers' DiT."""

import re
from typing import Dict

import torch
from torch import Tensor, nn

from moh_vision.models.weight_files import rename_routers

EMBEDDERS = {
    "timestep_embedder.linear_1": "t_embedder.mlp.0",
    "timestep_embedder.linear_2": "t_embedder.mlp.2",
    "class_embedder.embedding_table": "y_embedder.embedding_table",
}
OUTSIDE = {
    "pos_embed.proj": "x_embedder.proj",
    "proj_out_1": "final_layer.adaLN_modulation.1",
    "proj_out_2": "final_layer.linear",
}
IN_BLOCK = {
    "norm1.linear": "adaLN_modulation.1",
    "attn1.to_out.0": "attn.proj",
    "ff.net.0.proj": "mlp.fc1",
    "ff.net.2": "mlp.fc2",
}


def checkpoint_filter_fn(state_dict: Dict[str, Tensor], model: nn.Module) -> Dict[str, Tensor]:
    """Official names are ours, but for MoH's routers; diffusers' are translated; ours pass through.

    Raises:
        ValueError: for a DiT of diffusers whose blocks embed timesteps or classes differently: ours has one embedding.
    """
    if any(name.startswith("transformer_blocks.") for name in state_dict):
        return _from_diffusers(state_dict, model)
    return rename_routers(state_dict)


def _from_diffusers(state_dict: Dict[str, Tensor], model: nn.Module) -> Dict[str, Tensor]:
    result = {"pos_embed": model.state_dict()["pos_embed"]}  # the same table, which diffusers does not save
    parts: Dict[str, Dict[str, Tensor]] = {}  # of our fused qkv
    for name, tensor in state_dict.items():
        module, _, kind = name.rpartition(".")  # weight or bias
        block = re.match(r"transformer_blocks\.(\d+)\.(.+)", module)
        if block is None:
            result[f"{OUTSIDE.get(module, module)}.{kind}"] = tensor
            continue
        layer, inside = block.groups()
        embedder = EMBEDDERS.get(inside.removeprefix("norm1.emb."))
        if embedder is not None:  # every block has its own copy
            shared = result.setdefault(f"{embedder}.{kind}", tensor)
            if not torch.equal(shared, tensor):
                raise ValueError(
                    f"{name} differs from that of other blocks: this DiT was trained with an embedding per block"
                )
        elif inside in ("attn1.to_q", "attn1.to_k", "attn1.to_v"):
            parts.setdefault(f"blocks.{layer}.attn.qkv.{kind}", {})[inside[-1]] = tensor
        else:
            result[f"blocks.{layer}.{IN_BLOCK.get(inside, inside)}.{kind}"] = tensor
    for name, qkv in parts.items():
        if len(qkv) == 3:  # else the loader says that it is missing
            result[name] = torch.cat([qkv[letter] for letter in "qkv"])
    return result
