"""The transformer of a small pipeline, its predictions, and images drawn with a pipeline."""

import torch

from moh_vision.models.dit_transformer import MoHDiTTransformer2DModel
from tests.support.tiny_vae import no_longer_zero

LABELS = torch.tensor([1, 2])
WITH_HEADS = {  # who chooses heads -> arguments of the transformer
    "per token": dict(head_budget=0.75),
    "per image": dict(head_budget=0.75, scope="sample"),
    "per timestep, and groups": dict(
        head_budget=0.75, scope="sample", route_by="timestep", mlp_budget=0.5
    ),
}


def transformer(channels=4, classes=7, **more):
    torch.manual_seed(1)
    sizes = dict(
        sample_size=4, hidden_size=32, num_layers=2, num_attention_heads=4, head_budget=0.75
    )
    sizes.update(more)
    model = MoHDiTTransformer2DModel(in_channels=channels, num_classes=classes, **sizes)
    return no_longer_zero(model, 0.1).eval()


def predict(model, time=500):
    """Return a model's prediction of one input, with gradients off."""
    size = model.config.sample_size
    x = torch.randn(2, 4, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(x.to(model.dtype), torch.tensor([time] * 2), LABELS).sample


def seeded(*seeds):
    return [torch.Generator().manual_seed(s) for s in seeds]


def draw(pipe, labels, *seeds, steps=4, **more):
    """Return the images that a pipeline draws, one for each label and seed."""
    more = {"output_type": "pt", "guidance_scale": 1.5, **more}
    return pipe(labels, num_inference_steps=steps, generator=seeded(*seeds), **more).images
