"""The transformer of a small pipeline, and images drawn with a pipeline."""

import torch

from moh_vision.models.dit_transformer import MoHDiTTransformer2DModel
from tests.support.tiny_vae import no_longer_zero


def transformer(channels=4, classes=7, **more):
    torch.manual_seed(1)
    sizes = dict(
        sample_size=4, hidden_size=32, num_layers=2, num_attention_heads=4, head_budget=0.75
    )
    sizes.update(more)
    model = MoHDiTTransformer2DModel(in_channels=channels, num_classes=classes, **sizes)
    return no_longer_zero(model, 0.1).eval()


def seeded(*seeds):
    return [torch.Generator().manual_seed(s) for s in seeds]


def draw(pipe, labels, *seeds, steps=4, **more):
    """Return the images that a pipeline draws, one for each label and seed."""
    more = {"output_type": "pt", "guidance_scale": 1.5, **more}
    return pipe(labels, num_inference_steps=steps, generator=seeded(*seeds), **more).images
