"""The pipeline around a tiny transformer with random weights, on pixels and on the latents of a tiny VAE."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, HeunDiscreteScheduler

from moh_vision import set_head_budget
from moh_vision.attention import head_budget
from moh_vision.diffusion import (
    FlowMatchingLoss,
    Guidance,
    MoHDiTPipeline,
    make_scheduler,
    sample_images,
)
from moh_vision.diffusion.config import PreviewConfig
from moh_vision.diffusion.previews import Previews
from moh_vision.diffusion.sampling import to_uint8
from moh_vision.models.head_load import HeadLoad
from tests.support.pipelines import draw, seeded, transformer
from tests.support.refusals import refuse
from tests.support.tiny_vae import coarse_vae, tiny_vae


def pipeline(with_vae=False, **more):
    """A pipeline on the latents of a tiny VAE, or on pixels."""
    if with_vae:
        channels = 4
        vae = tiny_vae(2, scaling_factor=0.3, shift_factor=0.1)
    else:
        channels = 3
        vae = None
    scheduler = make_scheduler("ddpm", 250, True, clip=not with_vae)
    return MoHDiTPipeline(transformer(channels), scheduler, vae, **more)


@pytest.mark.parametrize("more", [{}, dict(scope="sample")])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_it_is_the_loop_of_sample_images_with_a_weak_model_of_fewer_heads_too(scale, more):
    """In bits, also without a class; and the model has its own heads afterwards, whatever stops the pass."""
    pipe = MoHDiTPipeline(transformer(3, **more), make_scheduler("ddpm", 6, True, clip=True))
    budget_before = head_budget(pipe.transformer)
    weak = set_head_budget(transformer(3, **more), 0.5)
    options = dict(
        guidance_scale=scale,
        guide_channels=2,
        guidance_interval=(0.1, 0.8),
        steps=6,
        output_type="latent",
    )
    guide = dict(guide="heads:0.5", guide_scale=1.5)
    few = draw(pipe, [3, 4], 8, 9, **guide, **options)
    assert torch.equal(few, draw(pipe, [3, 4], 8, 9, guide=weak, guide_scale=1.5, **options))

    def by_hand(*which, guide_scale=1.5):
        return sample_images(
            lambda x, t, y: pipe.transformer(x, t, y).sample,
            pipe.scheduler,
            torch.tensor([3, 4]),
            (3, 4, 4),
            [8, 9],
            7,
            Guidance(scale, *which, guide_scale),
            weak=lambda x, t, y: weak(x, t, y).sample,
        )

    plain = draw(pipe, [3, 4], 8, 9, **options)
    assert torch.equal(few, by_hand(2, (0.1, 0.8))) and not torch.equal(few, plain)
    assert torch.equal(plain, by_hand(2, (0.1, 0.8), guide_scale=1.0))
    inputs = SimpleNamespace(source=SimpleNamespace(classes=list("abcdefg")), space=None)
    asked = dict(every=1, sampler="ddpm", steps=6, cfg_scale=scale, seed=5, **guide)
    for interval in ((0.0, 1.0), (0.1, 0.8)):
        config = PreviewConfig(**asked, cfg_interval=interval)
        previews = Previews(config, inputs, pipe.transformer)
        preview = previews.sample(pipe.transformer, range(3, 5))
        assert torch.equal(preview, to_uint8(by_hand(None, interval)))
        assert ("between 0.1 and 0.8" in config.guidance) == (interval[0] > 0)
    if scale == 1:  # 7 is no class
        assert not torch.equal(
            draw(pipe, [7], 8, **guide, **options), draw(pipe, [7], 8, **options)
        )
    calls = []

    def stop(module, inputs):
        calls.append(len(inputs[0]))
        if len(calls) == 2:
            raise KeyboardInterrupt

    pipe.transformer.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        draw(pipe, [3, 4], 8, 9, **guide, **dict(options, guidance_interval=None))
    assert head_budget(pipe.transformer) == budget_before


@pytest.mark.parametrize(
    "with_vae, size, channels",
    [pytest.param(False, 4, 3, id="pixels"), pytest.param(True, 8, 4, id="latents")],
)
def test_output_types(with_vae, size, channels):
    pipe = pipeline(with_vae)
    outputs = {
        name: draw(pipe, [1, 2], 5, 6, output_type=name) for name in ("pt", "np", "pil", "latent")
    }
    assert outputs["pt"].shape == (2, 3, size, size)
    assert 0 <= outputs["pt"].min() and outputs["pt"].max() <= 1
    assert np.array_equal(outputs["np"], outputs["pt"].permute(0, 2, 3, 1).numpy())
    pixels = torch.stack([torch.tensor(np.array(i)).permute(2, 0, 1) for i in outputs["pil"]]).int()
    difference = pixels - to_uint8(pipe.decode(outputs["latent"])).int()
    assert difference.abs().max() <= 1  # rounding of a tie
    assert outputs["latent"].shape == (2, channels, 4, 4)
    if with_vae:
        decoded = pipe.vae.decode(outputs["latent"] / 0.3 + 0.1).sample
        assert torch.equal(outputs["pt"], (decoded / 2 + 0.5).clamp(0, 1))
    options = dict(num_inference_steps=4, output_type="pt", guidance_scale=1.5)
    single = pipe(1, generator=seeded(5), return_dict=False, **options)
    assert isinstance(single, tuple)
    torch.testing.assert_close(single[0], outputs["pt"][:1])


def test_latents_begin_the_loop():
    """The noise that generators would draw gives their images, also where the scheduler scales it; other shapes are refused."""
    pipe = pipeline()
    for scheduler in (DDIMScheduler, HeunDiscreteScheduler):  # without noise of the steps
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
        noise = torch.stack([torch.randn((3, 4, 4), generator=g) for g in seeded(5, 6)])
        assert torch.equal(draw(pipe, [1, 2], 7, 8, latents=noise), draw(pipe, [1, 2], 5, 6))
    assert pipe.scheduler.init_noise_sigma > 10
    for other in (noise[:1], noise.long(), noise.tolist()):
        facts = f"latents {getattr(other, 'dtype', 'list')} floating-point [2, 3, 4, 4]"
        refuse(facts, draw, pipe, [1, 2], 7, 8, latents=other)


def test_one_generator_gives_image_i_its_own_noise():
    pipe = pipeline()

    def run(labels, generator):
        return pipe(labels, num_inference_steps=4, generator=generator, output_type="pt").images

    three = run([0, 1, 2], seeded(3)[0])
    (generator,) = seeded(3)
    torch.testing.assert_close(run([0, 1], seeded(3)[0]), three[:2])
    assert torch.equal(run([0, 5, 6], seeded(3)[0])[0], three[0])
    assert torch.equal(run([0, 1, 2], generator), three)
    assert not torch.equal(run([0, 1, 2], generator), three)  # the next images are others
    torch.manual_seed(11)
    unseeded = run([4], None)
    assert not torch.equal(run([4], None), unseeded)
    torch.manual_seed(11)
    assert torch.equal(run([4], None), unseeded)


def test_round_trip(tmp_path):
    """Of pixels, and of flows and their schedulers: tests of sample.py and of flow matching."""
    pipe = pipeline(True, id2label={i: f"class {i}" for i in range(7)}, label_drop=0.1)
    set_head_budget(pipe.transformer, 0.5)
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    names = dict(scheduler=["diffusers", "DDPMScheduler"], vae=["diffusers", "AutoencoderKL"])
    names["transformer"] = ["moh_vision.models.dit_transformer", "MoHDiTTransformer2DModel"]
    assert index.items() >= dict(names, _class_name="MoHDiTPipeline").items()
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".bin", ".pt", ".pkl")]
    again = MoHDiTPipeline.from_pretrained(tmp_path)
    assert head_budget(again.transformer) == head_budget(pipe.transformer)
    assert again.labels == pipe.labels == {f"class {i}": i for i in range(7)}
    assert again.config.label_drop == 0.1
    trained = dict(variance_type="learned_range", clip_sample=False)
    assert again.scheduler.config.items() >= trained.items()
    assert torch.equal(draw(again, [0, 6], 1, 2), draw(pipe, [0, 6], 1, 2))


@pytest.mark.slow  # imports everything again
def test_a_fresh_process_needs_only_the_class(tmp_path):
    """Also of a scheduler of ours. Importing the package alone does not take the seconds of diffusers' pipelines."""
    scheduler = make_scheduler("sde", 4, False, False, shift=2.0)
    flow = dict(learn_sigma=False, prediction=FlowMatchingLoss(shift=2.0).prediction)
    pipe = MoHDiTPipeline(transformer(4, **flow), scheduler, tiny_vae(2))
    pipe.save_pretrained(tmp_path)
    draw(pipe, [2], 4, output_type="np").tofile(tmp_path / "want")
    code = (
        "import sys, torch, moh_vision, moh_vision.diffusion\n"
        "assert not [m for m in sys.modules if m.startswith('diffusers.pipelines')]\n"
        "from moh_vision.diffusion import MoHDiTPipeline\n"
        f"pipe = MoHDiTPipeline.from_pretrained({str(tmp_path)!r})\n"
        "g = [torch.Generator().manual_seed(4)]\n"
        "out = pipe([2], num_inference_steps=4, generator=g, guidance_scale=1.5, output_type='np').images\n"
        f"out.tofile({str(tmp_path / 'got')!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    got, want = (np.fromfile(tmp_path / name, dtype=np.float32) for name in ("got", "want"))
    # Not to the bit: the process has other threads and settings.
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_callback_and_routing():
    pipe = pipeline()
    calls = []
    load = HeadLoad(
        head_budget(pipe.transformer)["layers"], {"class": range(8), "step": range(1000)}
    )

    def note(in_pipe, step, t, inputs):
        calls.append((in_pipe is pipe, step, int(t), list(inputs)))

    draw(pipe, [0, 0], 1, 2, steps=5, on_routing=load.add, callback_on_step_end=note)
    assert [call[:2] for call in calls] == [(True, step) for step in range(5)]
    assert calls[-1][2:] == (0, ["latents"])

    def replace(in_pipe, step, t, inputs):
        return {"latents": torch.ones(1, 3, 4, 4)}

    assert (draw(pipe, [0], 1, output_type="latent", callback_on_step_end=replace) == 1).all()
    share = load.share()[0]  # [classes + 1, heads]
    assert share[0].sum() > 0 and share[7].sum() > 0
    timesteps = sorted(call[2] for call in calls)
    assert load.runs("step")[0][:, -1].nonzero().flatten().tolist() == timesteps


def test_half_precision_runs_the_loop_in_float32():
    pipe = pipeline(True)
    want = draw(pipe, [1], 5)
    pipe.to(dtype=torch.bfloat16)
    dtypes = set()

    def note(in_pipe, step, t, inputs):
        dtypes.add(inputs["latents"].dtype)

    got = draw(pipe, [1], 5, callback_on_step_end=note)
    assert dtypes == {torch.float32}
    assert (got - want).abs().max() < 0.1


MISTAKES = [
    pytest.param([8], {}, "class_labels [8] 0 7", id="class 8"),
    pytest.param([-1], {}, "class_labels [-1] 0 7", id="class -1"),
    pytest.param([], {}, "class_labels [] numbers names", id="no labels"),
    pytest.param([0.5], {}, "class_labels [0.5] numbers names", id="class 0.5"),
    pytest.param(
        [7], {}, "class_labels 7 guidance_scale 4 guidance_scale=1", id="guided without a class"
    ),
    pytest.param(
        [0], dict(output_type="jpg"), "output_type 'jpg' pil np pt latent", id="output type"
    ),
    pytest.param(
        [0],
        dict(guide_channels="most"),
        "guidance channels 'most' 1 all",
        id="guided channels",
    ),
    pytest.param(["a"], {}, "class_labels ['a'] names numbers", id="a name without names"),
    pytest.param(
        [0],
        dict(guide="heads:0.5"),
        "guide_scale 1 with guide weak model scale",
        id="a weak model without a scale",
    ),
    pytest.param(
        [0],
        dict(guide_scale=2.0),
        "guide_scale 2 without guide weak model scale 1",
        id="a scale without a weak model",
    ),
    pytest.param(
        [0],
        dict(guide="half", guide_scale=2.0),
        "guide 'half' model heads:SHARE",
        id="a weak model of another form",
    ),
    pytest.param(
        [0],
        dict(guide="heads:0.75", guide_scale=2.0),
        "guide heads:0.75 6 heads smaller",
        id="a weak model of as many heads",
    ),
    pytest.param(
        [0],
        dict(guide="heads:0.2", guide_scale=2.0),
        "guide head_budget 4 of 8 smallest 0.5",
        id="a weak model of too few heads",
    ),
    pytest.param(
        [0],
        dict(guide=transformer(4), guide_scale=2.0),
        "guide in_channels 4 3",
        id="a weak model of other channels",
    ),
    pytest.param(
        [0],
        dict(guide=transformer(3, 9), guide_scale=2.0),
        "guide num_classes 9 7",
        id="a weak model of other classes",
    ),
    pytest.param(
        [0],
        dict(guide=tiny_vae(2), guide_scale=2.0),
        "guide AutoencoderKL HeadMixtureAttention moh_vision.convert",
        id="a weak model without heads",
    ),
    pytest.param(
        [0, 1],
        dict(generator=seeded(1)),
        "generator 1 2 images",
        id="one generator for two images",
    ),
    pytest.param(
        [0],
        dict(callback_on_step_end_tensor_inputs=["prompt"]),
        "callback_on_step_end_tensor_inputs ['prompt'] 'latents'",
        id="an input of the callback",
    ),
]


@pytest.mark.parametrize("labels, more, facts", MISTAKES)
def test_mistakes(labels, more, facts):
    refuse(facts, lambda: pipeline()(labels, **more))


@pytest.mark.parametrize("part, where", [("transformer", "step 1 of 4"), ("vae", "after decoding")])
def test_images_that_are_not_finite_are_refused(part, where):
    pipe = pipeline(with_vae=True)
    torch.nn.init.constant_(list(getattr(pipe, part).parameters())[-1], float("nan"))
    facts = f"{where} 2 images NaN infinity"
    refuse(facts, draw, pipe, [1, 2], 5, 6, error=FloatingPointError)


def test_guidance_without_dropped_labels_is_refused():
    pipe = pipeline(label_drop=0.0)
    refuse("guidance_scale 1.5 label_drop 0 guidance_scale=1", draw, pipe, [0], 1)
    draw(pipe, [7], 1, guidance_scale=1.0)  # no class, no guidance


def test_parts_that_do_not_fit_are_refused():
    ddpm = DDPMScheduler()
    refuse("VAE 4 channels transformer 3", MoHDiTPipeline, transformer(3), ddpm, tiny_vae(2))
    facts = "transformer AutoencoderKL DiT moh_vision diffusers"
    refuse(facts, MoHDiTPipeline, tiny_vae(2), ddpm)
    # Training refuses one without the other too.
    for key, missing in (("latents_mean", "latents_std"), ("latents_std", "latents_mean")):
        half = tiny_vae(2, **{key: [0.1] * 4})
        refuse(f"VAE {missing} None list 4", MoHDiTPipeline, transformer(4), ddpm, half)
    plain = MoHDiTPipeline(
        transformer(4, learn_sigma=False), make_scheduler("ddpm", 10, True, False)
    )
    refuse("4 channels VAE output_type 'latent'", plain, [0])
    facts = "scheduler variance_type learned_range learned variance"
    refuse(facts, plain, [0], output_type="latent")


def test_a_vae_of_another_downsampling_is_refused(tmp_path):
    """Its channels fit, its images would be of another size: as a part that is replaced, now or in a saved pipeline."""
    pipe = pipeline(with_vae=True)
    pipe.save_pretrained(tmp_path)
    facts = "VAE 4 pixels transformer 2"
    refuse(facts, MoHDiTPipeline.from_pretrained, tmp_path, vae=coarse_vae())
    pipe.vae = coarse_vae()
    refuse(facts, draw, pipe, [0], 1)
    pipe.vae = tiny_vae(3)
    assert draw(pipe, [0], 1).shape == (1, 3, 8, 8)


def test_class_names():
    pipe = pipeline(id2label={0: "tench, Tinca tinca", 1: "crane"})
    assert pipe.get_label_ids(["crane", "tench, Tinca tinca"]) == [1, 0]
    assert pipe.get_label_ids("crane") == [1]
    assert pipe.get_label_ids(["1", "crane"]) == [1, 1]
    for labels in ("crain", ["crain", 0]):
        refuse("class_labels crain 7 crane 0 6", pipe, labels)
    assert torch.equal(draw(pipe, ["crane", "tench, Tinca tinca"], 1, 2), draw(pipe, [1, 0], 1, 2))
    assert torch.equal(draw(pipe, ["crane", 0, "crane"], 1, 2, 3), draw(pipe, [1, 0, 1], 1, 2, 3))
    every_channel = draw(pipe, "crane", 1, guide_channels="all")
    assert torch.equal(every_channel, draw(pipe, 1, 1, guide_channels=None))
