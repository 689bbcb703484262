"""Folders of diffusion and classification runs with random weights, and calls of sample.py."""

from types import MappingProxyType

import torch

import moh_vision
from moh_vision.common.seeds import derive_seed
from moh_vision.diffusion import MoHDiTPipeline, make_scheduler, sample
from moh_vision.engine.checkpoint import export_weights
from moh_vision.models.creation import create
from tests.support import refusals
from tests.support.tiny_vae import no_longer_zero

NAME = "moh_dit_small_patch2_75"
JUDGE = "moh_vit_tiny_patch16_224"
JUDGE_SIZES = dict(embed_dim=8, depth=1, num_heads=2, head_budget=[(1, 1)])


def run_of(  # noqa: PLR0913
    folder,
    channels,
    label_drop=0.1,
    pixels=False,
    heads=(1, 1),
    scale=0.2,
    routing=MappingProxyType({}),
    **more,
):
    """Write the ema.safetensors of a diffusion run with random weights, and return `folder`.

    pixels: whether the run is of pixels and not of latents. scale: of the weights. routing: further arguments of the model.
    more: further metadata of the weights.
    """
    torch.manual_seed(4)
    sizes = dict(img_size=4, embed_dim=16, depth=1, num_heads=2, head_budget=[heads])
    arguments = dict(sizes, in_chans=channels, num_classes=3, **routing)
    model = no_longer_zero(create(NAME, "diffusion", **arguments), scale)
    config = dict(kind="diffusion", label_drop=label_drop, vae="none" if pixels else "some")
    about = dict(architecture=NAME, arguments=arguments, classes=["a", "b", "c"], config=config)
    export_weights(model, folder / "ema.safetensors", {**about, **more})
    return folder


def call(run, *more):
    """Call sample.py for 5 images of a run."""
    argv = f"--checkpoint {run} --num-images 5 --batch-size 3 --steps 4 --cfg-scale 2".split()
    sample.main([*argv, *map(str, more)])


def refused(capsys, run, *more):
    """Return the error with which sample.py refuses its arguments."""
    return refusals.refused(
        capsys, lambda argv: call(run, *argv), "--grid", run / "never.png", *more
    )


def by_pipeline(pipe, labels, steps=4, **more):
    """Return three images [3, H, W, channels] in 0 .. 255, drawn from the noise that sample.py uses for images 0, 1, 2."""
    generators = [torch.Generator().manual_seed(derive_seed(0, i)) for i in range(3)]
    options = dict(num_inference_steps=steps, generator=generators, output_type="np", **more)
    return 255 * pipe(labels, 2.0, **options).images


def exported(folder, name, classes, **arguments):
    """Return a new classifier, after saving it to model.safetensors as a run does."""
    model = create(name, "classification", num_classes=len(classes), **arguments)
    about = dict(architecture=name, classes=classes, config={})
    about["arguments"] = dict(arguments, num_classes=len(classes))
    export_weights(model, folder / "model.safetensors", about)
    return model


def classifier_in(folder):
    """Write the model.safetensors of a classification run with random weights and the classes x and y."""
    folder.mkdir()
    torch.manual_seed(6)
    exported(folder, JUDGE, ["x", "y"], img_size=4, patch_size=2, in_chans=3, **JUDGE_SIZES)
    return folder


def draws_the_same_when_converted(model):
    """Check that a dense model of a flow, converted, draws its images with all heads, and others with half of them."""

    def images():
        pipe = MoHDiTPipeline(model, make_scheduler("heun", 4, False, False))
        draw = dict(num_inference_steps=4, guidance_scale=2.0, output_type="latent")
        return pipe([0, 3], generator=torch.Generator().manual_seed(0), **draw).images

    want = images()
    assert moh_vision.convert(model, router="moh") is model
    assert torch.equal(images(), want)
    moh_vision.set_head_budget(model, 0.5)
    assert (images() - want).abs().max() > 1e-3
