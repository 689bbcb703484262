"""A small model of every family, by name, with its inputs."""

import timm
import torch

import moh_vision
from tests.support import llama_tiny, small_transnext, text_tiny, tiny_dit, tiny_vit

IMAGES = torch.linspace(-1, 1, 3 * 64 * 64).sin().view(1, 3, 64, 64)


def vision(name, options, *inputs):
    def make(router, **kwargs):
        budget = None if router == "mae" else 0.75
        return timm.create_model(
            name, **{**options, "router": router, "head_budget": budget, **kwargs}
        ).eval(), inputs

    return make


def text(preset, *inputs):
    return lambda router, **kwargs: (
        text_tiny.tiny(preset, router, dtype=torch.float32, **kwargs),
        inputs,
    )


def llama(router):
    return moh_vision.convert(llama_tiny.dense(), head_budget="uniform:0.5", router=router), (
        llama_tiny.words(),
    )


WORDS = text_tiny.words(2, 6)
LATENTS = IMAGES[..., :8, :8], torch.tensor([3]), torch.tensor([1])
FAMILIES = {  # name -> makes a model and its inputs
    "vit": vision("moh_vit_tiny_patch16_224", tiny_vit.TINY, IMAGES[..., :16, :16]),
    "transnext": vision("moh_transnext_base_50", small_transnext.SMALL, IMAGES),
    "dit": vision("moh_dit_small_patch2_75", tiny_dit.TINY, *LATENTS),
    "translation": text("mt_transformer_base", WORDS, None, WORDS),
    "masked": text("mlm_base", WORDS),
    "causal": text("clm_wt103_base", WORDS),
    "llama": llama,
}


@torch.no_grad()
def awake(model, std=0.1):
    """MoA's gates and a DiT's output start at zero."""
    for weight in model.parameters():
        weight += std * torch.randn_like(weight)
    return model
