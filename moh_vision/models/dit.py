"""DiT, MoH-DiT, SiT and JiT in timm's registry: Peebles and Xie 2023; Jin 2024, section 4.2, tables 2 and 3; Ma 2024; Li and
He 2025.

The model's class is imported only when a model is built, because importing diffusers takes seconds.
Heads per layer are from the released MoH-DiT code. Its L and XL models have 8 heads in the first
layers, 16 in the middle and 24 in the last, in total as many as the dense model. The paper does not
mention it.

`sit_*` has the layers of `dit_*` and the time of SiT's released weights (`compat`). Their files have the same
layout as the DiT's and do not say which of the two they are: the name does. `jit_*` has the time of JiT's.
"""

from huggingface_hub import hf_hub_download
from timm.models import generate_default_cfgs, resolve_pretrained_cfg
from timm.models._hub import download_cached_file

from moh_vision.attention import default_budget
from moh_vision.models.prediction import LINEAR
from moh_vision.models.timm_factory import register_variants
from moh_vision.models.weights import load_checkpoint

SIZES = {
    "small": dict(embed_dim=384, depth=12, num_heads=6),
    "base": dict(embed_dim=768, depth=12, num_heads=12),
    "large": dict(embed_dim=1024, depth=24, num_heads=16),
    "xlarge": dict(embed_dim=1152, depth=28, num_heads=16),
}
LARGE = dict(SIZES["large"], num_heads=[8] * 8 + [16] * 8 + [24] * 8, head_dim=64)
XLARGE = dict(SIZES["xlarge"], num_heads=[8] * 9 + [16] * 10 + [24] * 9, head_dim=72)

DENSE = {
    f"dit_{size}_patch{patch}": dict(arguments, patch_size=patch)
    for size, arguments in SIZES.items()
    for patch in (2, 4, 8)
}
SIT = {
    f"sit_{size}_patch2": dict(
        arguments,
        patch_size=2,
        compat="sit",
        prediction=dict(path=LINEAR, predict="velocity"),
        learn_sigma=False,
    )
    for size, arguments in SIZES.items()
}
JIT_BLOCK = dict(
    norm_layer="rmsnorm", swiglu_mlp=True, use_rot_pos_emb=True, qk_norm=True, class_tokens=32
)
JIT_SIZES = {
    "base": dict(SIZES["base"], patch_bottleneck=128, class_tokens_start=4),
    "large": dict(SIZES["large"], patch_bottleneck=128, class_tokens_start=8),
    "huge": dict(
        embed_dim=1280, depth=32, num_heads=16, patch_bottleneck=256, class_tokens_start=10
    ),
}
# Side of a patch -> side of the images, and standard deviation of the noise.
JIT_PATCHES = {16: (256, 1.0), 32: (512, 2.0)}
JIT = {
    f"jit_{size}_patch{patch}": dict(
        arguments,
        patch_size=patch,
        compat="jit",
        prediction=dict(path=LINEAR, predict="x", noise_scale=noise_scale),
        learn_sigma=False,
        **JIT_BLOCK,
    )
    for size, arguments in JIT_SIZES.items()
    for patch, (_, noise_scale) in JIT_PATCHES.items()
}
VARIANTS = {
    **DENSE,
    **SIT,
    **JIT,
    # head_budget: (shared heads, routed heads that run) of every layer
    "moh_dit_small_patch2_90": dict(SIZES["small"], head_budget=[(3, 2)] * 8 + [(6, 0)] * 4),
    "moh_dit_small_patch2_75": dict(
        SIZES["small"], head_budget=[(2, 1)] * 2 + [(3, 1)] * 4 + [(3, 2)] * 4 + [(6, 0)] * 2
    ),
    "moh_dit_base_patch2_90": dict(
        SIZES["base"], head_budget=[(6, 4)] * 5 + [(7, 4)] * 5 + [(12, 0)] * 2
    ),
    "moh_dit_base_patch2_75": dict(
        SIZES["base"], head_budget=[(4, 2)] * 2 + [(6, 3)] * 8 + [(12, 0)] * 2
    ),
    "moh_dit_large_patch2_90": dict(
        LARGE,
        head_budget=[(8, 0)] * 8 + [(16, 0)] * 8 + [(16, 3)] * 8,
    ),
    "moh_dit_large_patch2_75": dict(
        LARGE,
        head_budget=[(8, 0)] * 8 + [(8, 4)] * 8 + [(12, 4)] * 8,
    ),
    "moh_dit_xlarge_patch2_90": dict(
        XLARGE,
        head_budget=[(8, 0)] * 9 + [(16, 0)] * 10 + [(16, 3)] * 9,
    ),
    "moh_dit_xlarge_patch2_75": dict(
        XLARGE,
        head_budget=[(8, 0)] * 9 + [(10, 2)] * 10 + [(14, 2)] * 9,
    ),
}
# JiT with the heads of MoH-DiT, a model of neither paper.
MOH_JIT = {
    f"moh_jit_{size}_patch16_75": {
        **JIT[f"jit_{size}_patch16"],
        **VARIANTS[f"moh_dit_{size}_patch2_75"],
        "patch_size": 16,
    }
    for size in ("base", "large")
}
VARIANTS.update(MOH_JIT)


def _cfg(size: int = 32, **kwargs) -> dict:
    """Config for SD VAE latents; `size`: latent side, image side / 8."""
    common = dict(num_classes=1000, input_size=(4, size, size), mean=(0.0,) * 4, std=(1.0,) * 4)
    return dict(common, license="apache-2.0", **kwargs)


def _of_pixels(patch: int) -> dict:
    """Config for the images of a JiT with patches of this side, from -1 to 1."""
    side, _ = JIT_PATCHES[patch]
    return dict(_cfg(), input_size=(3, side, side), mean=(0.5,) * 3, std=(0.5,) * 3)


def _published(pixels: int) -> dict:
    """Config of the official DiT-XL/2 for images of `pixels` x `pixels`."""
    file = f"DiT-XL-2-{pixels}x{pixels}.pt"
    return dict(
        _cfg(pixels // 8, url=f"https://dl.fbaipublicfiles.com/DiT/models/{file}"),
        license="cc-by-nc-4.0",
    )


PUBLISHED = {
    "dit_xlarge_patch2.in1k_256": _published(256),
    "dit_xlarge_patch2.in1k_512": _published(512),
    # The address is from SiT's released download.py. The license is the one of that repository.
    "sit_xlarge_patch2.in1k_256": dict(
        _cfg(
            url="https://www.dl.dropboxusercontent.com/scl/fi/as9oeomcbub47de5g4be0/SiT-XL-2-256.pt"
            "?rlkey=uxzxmpicu46coq3msb17b9ofa&dl=0"
        ),
        license="mit",
    ),
    # The file name is from the published instructions; it was never checked against the hub.
    "moh_dit_xlarge_patch2_90.in1k_256": _cfg(
        hf_hub_id="Chat-UniVi/MoH-DiT-XL-90", hf_hub_filename="MoH-DiT-XL-90.pt"
    ),
}
NAMED = {name.split(".")[0] for name in PUBLISHED}
UNTRAINED = {}
for _name in VARIANTS:
    if _name in (*JIT, *MOH_JIT):
        UNTRAINED[f"{_name}.untrained"] = _of_pixels(VARIANTS[_name]["patch_size"])
    elif _name not in NAMED:
        UNTRAINED[f"{_name}.untrained"] = _cfg()
default_cfgs = generate_default_cfgs({**PUBLISHED, **UNTRAINED})


def _create_dit(  # noqa: PLR0913
    variant: str,
    pretrained: bool,
    args: dict,
    pretrained_cfg=None,
    pretrained_cfg_overlay: dict | None = None,
    cache_dir=None,
    img_size: int | None = None,
    in_chans: int | None = None,
    num_classes: int = 1000,
    **overrides,
):
    """Build a variant.

    Args:
        pretrained: load the weights that the configuration names as file, url or hf_hub_id.
        args: arguments of the variant, under timm's names.
        pretrained_cfg, pretrained_cfg_overlay, cache_dir: see `timm.create_model`.
        img_size: side of the latents or images; None: as in the configuration.
        in_chans: channels of the latents or images; None: as in the configuration.
        num_classes: number of classes, not counting "no class".
        overrides: arguments of `MoHDiTTransformer2DModel`; embed_dim, depth, num_heads and head_dim by timm's names.
    """
    from moh_vision.models.dit_transformer import MoHDiTTransformer2DModel  # imports diffusers

    cfg = resolve_pretrained_cfg(
        variant, pretrained_cfg=pretrained_cfg, pretrained_cfg_overlay=pretrained_cfg_overlay
    )
    if pretrained and not (cfg.file or cfg.url or cfg.hf_hub_id):
        raise RuntimeError(
            f"No pretrained weights are named for {variant}. Use pretrained=False, or checkpoint_path=FILE."
        )
    args = dict(args)
    reshaped = sorted({"depth", "num_heads"} & set(overrides))
    dense = default_budget(overrides.get("router")) is None  # all heads run
    takes_variants_budget = "head_budget" in args and "head_budget" not in overrides and not dense
    if reshaped and takes_variants_budget:
        raise ValueError(
            f"{variant} has its own heads per layer: with {' and '.join(reshaped)} also give head_budget"
        )
    if "num_heads" in overrides and "head_dim" not in overrides:
        args["head_dim"] = None  # the variant's head_dim belongs to the variant's num_heads
    if dense:
        args.pop("head_budget", None)
    args.update(overrides)
    model = MoHDiTTransformer2DModel(
        sample_size=img_size or cfg.input_size[-1],
        in_channels=in_chans or cfg.input_size[0],
        num_classes=num_classes,
        hidden_size=args.pop("embed_dim"),
        num_layers=args.pop("depth"),
        num_attention_heads=args.pop("num_heads"),
        attention_head_dim=args.pop("head_dim", None),
        **args,
    )
    model.pretrained_cfg = model.default_cfg = cfg.to_dict()
    if pretrained:
        load_checkpoint(model, _weights(cfg, cache_dir))
    return model


def _weights(cfg, cache_dir) -> str:
    """Return the path of a configuration's file, downloaded if needed."""
    if cfg.file:
        return cfg.file
    if cfg.hf_hub_id:
        return hf_hub_download(cfg.hf_hub_id, cfg.hf_hub_filename, cache_dir=cache_dir)
    return download_cached_file(cfg.url, progress=True, cache_dir=cache_dir)


ABOUT = "A DiT, SiT or JiT; see `moh_vision.models.dit_transformer.MoHDiTTransformer2DModel`."
register_variants(__name__, _create_dit, {name: (ABOUT, args) for name, args in VARIANTS.items()})
