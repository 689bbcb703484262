"""Translate the weights of diffusers' DiT, of SiT and of JiT, and the configuration of diffusers' DiT, into ours."""

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from moh_vision.models.weight_files import rename_routers

# Module names in diffusers' DiT -> ours: of the embedders, of other modules outside blocks, and inside a block.
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

JITS_KERNEL = "x_embedder.proj1.weight"  # the patch kernel's name ends so, in files of JiT alone
# Module names in JiT -> ours: outside blocks, and of a block's SwiGLU, whose first linear layer JiT makes in one with the gate.
IN_JIT = {
    "x_embedder.proj1": "x_embedder.proj",
    "x_embedder.proj2": "x_widen",
}
SWIGLU_IN_JIT = {"w12": ("fc1_g", "fc1_x"), "w3": ("fc2",)}


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Translate names of diffusers' DiT, of JiT and of MoH's published routers; official and our names pass through.

    For a model with compat="sit" also leave out the channels that SiT's released code computes and drops.
    """
    if any(name.startswith("transformer_blocks.") for name in state_dict):
        state = _from_diffusers(state_dict, model)
    elif is_jits(state_dict):
        state = _from_jit(state_dict)
    else:
        state = rename_routers(state_dict)
    if model.config.compat == "sit":
        state = _velocity_alone(state, model)
    return state


def _velocity_alone(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Keep the first half of a last layer's output channels, the velocity; a layer of one half stays as it is."""
    state = dict(state)
    channels = model.out_channels
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        needed = len(model.state_dict()[name])  # p * p * channels rows, the channel counts fastest
        if name in state and len(state[name]) == 2 * needed:
            by_channel = state[name].unflatten(0, (-1, 2 * channels))  # [p * p, 2 * channels, ...]
            state[name] = by_channel[:, :channels].flatten(0, 1)
    return state


def is_jits(names: Iterable[str]) -> bool:
    """Return whether tensors with these names are in the layout of JiT's released code."""
    return any(name.endswith(JITS_KERNEL) for name in names)


def patch_of_jit(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the side of a patch of weights in the layout of JiT's released code, from the shapes of their tensors."""
    kernel = next(shape for name, shape in shapes.items() if name.endswith(JITS_KERNEL))
    return kernel[-1]  # [C, in, p, p]


def _from_jit(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Translate the names of JiT's released code, whose network is `net` in its training script's checkpoints."""
    result = {}
    for full_name, tensor in state_dict.items():
        name = full_name.removeprefix("net.")
        module, _, parameter = name.rpartition(".")  # parameter: weight or bias
        parent, _, part = module.rpartition(".")
        if name == "in_context_posemb":
            result["class_positions"] = tensor
        elif parameter in ("freqs_cos", "freqs_sin"):
            continue  # cosines and sines of the rotary positions, which follow from the sizes
        elif module in IN_JIT:
            kernel = tensor
            if module == "x_embedder.proj2" and tensor.ndim == 4:  # a 1 x 1 convolution
                kernel = tensor.flatten(1)
            result[f"{IN_JIT[module]}.{parameter}"] = kernel
        elif parent.endswith(".mlp") and part in SWIGLU_IN_JIT:
            ours = SWIGLU_IN_JIT[part]
            for own_part, rows in zip(ours, tensor.chunk(len(ours))):
                result[f"{parent}.{own_part}.{parameter}"] = rows
        else:
            result[name] = tensor
    return result


def _from_diffusers(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    # diffusers has the same position table, but does not save it.
    result = {"pos_embed": model.state_dict()["pos_embed"]}
    parts: dict[str, dict[str, Tensor]] = {}  # name of our fused qkv -> its q, k and v
    for name, tensor in state_dict.items():
        module, _, parameter = name.rpartition(".")  # parameter: weight or bias
        block = re.match(r"transformer_blocks\.(\d+)\.(.+)", module)
        if block is None:
            result[f"{OUTSIDE.get(module, module)}.{parameter}"] = tensor
            continue
        layer, inside = block.groups()
        embedder = EMBEDDERS.get(inside.removeprefix("norm1.emb."))
        if embedder is not None:  # diffusers has a copy in every block, our model has one
            shared = result.setdefault(f"{embedder}.{parameter}", tensor)
            if not torch.equal(shared, tensor):
                raise ValueError(
                    f"{name} differs from that of other blocks: this DiT was trained with an embedding per block"
                )
        elif inside in ("attn1.to_q", "attn1.to_k", "attn1.to_v"):
            qkv = parts.setdefault(f"blocks.{layer}.attn.qkv.{parameter}", {})
            qkv[inside[-1]] = tensor
        else:
            result[f"blocks.{layer}.{IN_BLOCK.get(inside, inside)}.{parameter}"] = tensor
    for name, qkv in parts.items():
        if len(qkv) == 3:  # loading reports an incomplete qkv as missing
            result[name] = torch.cat([qkv[letter] for letter in "qkv"])
    return result


def settings_of(model: nn.Module) -> dict:
    """Return the constructor arguments of our dense model that equals a DiT of diffusers."""
    config = model.config
    for name, needed in (
        ("activation_fn", "gelu-approximate"),
        ("attention_bias", True),
        ("norm_elementwise_affine", False),
        ("norm_eps", 1e-5),
        ("dropout", 0.0),
        ("upcast_attention", False),
    ):
        if config[name] != needed:
            raise ValueError(
                f"the DiT has {name} {config[name]!r}; only {needed!r} can be converted"
            )
    if model.out_channels not in (config.in_channels, 2 * config.in_channels):
        raise ValueError(
            f"the DiT has out_channels {model.out_channels}, neither in_channels {config.in_channels} nor twice it"
        )
    return dict(
        sample_size=config.sample_size,
        patch_size=config.patch_size,
        in_channels=config.in_channels,
        learn_sigma=model.out_channels == 2 * config.in_channels,
        num_classes=config.num_embeds_ada_norm,
        hidden_size=config.num_attention_heads * config.attention_head_dim,
        num_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        router="dense",
        compat="diffusers",
    )
