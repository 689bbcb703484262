"""Small models of every family by name, with their inputs."""

import timm
import torch

import moh_vision
from moh_vision.attention import default_budget
from tests.support import llama_tiny, small_transnext, text_tiny, tiny_dit, tiny_vit

IMAGES = torch.linspace(-1, 1, 3 * 64 * 64).sin().view(1, 3, 64, 64)


# Each of the following returns make(router, **kwargs), which returns a model and the inputs of its forward.


def vision(name, options, *inputs):
    def make(router, **kwargs):
        budget = default_budget(router)
        arguments = {**options, "router": router, "head_budget": budget, **kwargs}
        return timm.create_model(name, **arguments).eval(), inputs

    return make


def text(preset, *inputs):
    def make(router, **kwargs):
        return text_tiny.tiny(preset, router, dtype=torch.float32, **kwargs), inputs

    return make


def llama(router):
    """Return a converted LLaMA and its inputs."""
    model = moh_vision.convert(llama_tiny.dense(), head_budget="uniform:0.5", router=router)
    return model, (llama_tiny.words(),)


WORDS = text_tiny.words(2, 6)
LATENTS = IMAGES[..., :8, :8], torch.tensor([3]), torch.tensor([1])
FAMILIES = {  # name -> make(router, **kwargs)
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
    """Add noise to all parameters: MoA's gates and the output of a DiT start at zero and would hide errors."""
    for weight in model.parameters():
        weight += std * torch.randn_like(weight)
    return model
