"""--cache of sample.py: a cache of diffusers while images are drawn."""

import json

import numpy as np
import pytest
import torch
from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig

from moh_vision.common.seeds import derive_seed
from moh_vision.diffusion import sample
from moh_vision.diffusion.config import SampleConfig
from moh_vision.diffusion.loading import find_checkpoint, open_pipeline
from moh_vision.diffusion.sampling import to_uint8
from moh_vision.engine.command_line import parse_config
from tests.support.refusals import assert_says, refused

DRAW = ["--num-images", "4", "--steps", "8", "--sampler", "ddim", "--cfg-scale", "1.5"]
CONFIGS = {
    "taylorseer:2": TaylorSeerCacheConfig(
        cache_interval=2, cache_identifiers=[r"blocks\.\d+"], taylor_factors_dtype=torch.float32
    ),
    "first_block:0.5": FirstBlockCacheConfig(threshold=0.5),
}


@pytest.fixture
def run(trained):
    return trained("dit", 6, "--optim.lr", "0.1")


def drawn(run, out, *options):
    """Draw images with sample.py, [N, h, w, C] in uint8."""
    argv = ["--checkpoint", run, "--out", out, *DRAW, *options]
    sample.main(list(map(str, argv)))
    return np.load(out)["arr_0"]


@pytest.mark.parametrize("cache", CONFIGS)
def test_images_are_those_of_a_pipeline_with_the_cache(run, tmp_path, cache):
    images = drawn(run, tmp_path / "cached.npz", "--cache", cache)
    assert not np.array_equal(images, drawn(run, tmp_path / "plain.npz"))
    argv = ["--checkpoint", run, "--grid", "none.png", *DRAW]
    config = parse_config(SampleConfig, list(map(str, argv)), "sample.py")
    pipe, _ = open_pipeline(config, find_checkpoint(config))
    pipe.transformer.enable_cache(CONFIGS[cache])
    generators = [torch.Generator().manual_seed(derive_seed(0, i)) for i in range(4)]
    options = dict(guidance_scale=1.5, num_inference_steps=8, output_type="latent")
    latents = pipe([0, 1, 2, 3], generator=generators, **options).images
    other = to_uint8(pipe.decode(latents)).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(images, other)


def test_a_curve_over_caches_leaves_none_behind(run, trained, tmp_path, run_command):
    options = ["--score", "digits", "--extractor", trained("cls", 6), "--num-images", "40"]
    options += ["--batch-size", "20", "--sampler", "ddim", "--steps", "8", "--noises", "1"]
    figure = tmp_path / "curve.png"
    over = ["--over", "cache", "none", "taylorseer:2", "first_block:0.5"]
    code, _, _ = run_command("sampling-curve", run, *over, "--output", figure, *options)
    assert code == 0
    [line] = json.loads(figure.with_suffix(".json").read_text())["lines"]
    plain, *cached = [value for [value] in line["scores"]["frechet_distance"]]
    assert plain not in cached and len(set(cached)) == 2
    alone = tmp_path / "scores.json"
    argv = ["--checkpoint", run, *options[:-2], "--score-file", alone]
    sample.main(list(map(str, argv)))
    assert json.loads(alone.read_text())["frechet_distance"] == pytest.approx(plain, rel=1e-6)
    assert json.loads(alone.read_text())["sampling"]["cache"] == "none"


def test_words_of_a_sampling_name_its_cache():
    config = SampleConfig(checkpoint="run", out="x", cache="taylorseer:2")
    assert config.sampling_in_words.endswith(", cache taylorseer:2")


MISTAKES = {
    ("--cache", "taylor:2"): "cache 'taylor:2' none taylorseer:N first_block:T",
    ("--cache", "taylorseer:1"): "cache 'taylorseer:1' 2 or more",
    ("--cache", "first_block"): "cache 'first_block' above 0",
    ("--cache", "taylorseer:2", "--head-load", "h.json"): "cache taylorseer:2 head_load h.json",
    ("--cache", "taylorseer:2", "--cuda-graph", "auto"): "cache taylorseer:2 cuda_graph auto",
}


@pytest.mark.parametrize("options", MISTAKES, ids=lambda options: " ".join(options))
def test_a_cache_that_cannot_work_is_refused_first(run, tmp_path, capsys, options, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["--checkpoint", run, "--out", "x.npz", "--num-images", 4, *options]
    assert_says(refused(capsys, sample.main, *argv), MISTAKES[options])
    assert not list(tmp_path.glob("x*"))


def test_a_sampler_of_unequal_steps_is_refused_with_taylorseer(trained, tmp_path, capsys):
    run = trained("dit", 2, "--objective", "flow")
    argv = ["--checkpoint", run, "--out", tmp_path / "x.npz", "--num-images", 4]
    said = refused(capsys, sample.main, *argv, "--cache", "taylorseer:2", "--sampler", "heun")
    assert_says(said, "cache taylorseer:2 FlowMatchHeunDiscreteScheduler")
    assert not list(tmp_path.iterdir())
