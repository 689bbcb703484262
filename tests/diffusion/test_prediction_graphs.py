"""Sampling by graphs gives the images of eager sampling to the bit. A stand-in for CUDA graphs replays on the CPU."""

import json

import numpy as np
import pytest
import torch

from moh_vision.diffusion import MoHDiTPipeline, make_scheduler
from moh_vision.diffusion.image_parts import ImageParts
from moh_vision.diffusion.prediction_graphs import ROUNDS, PredictionGraphs
from tests.support.eager_graphs import EagerGraphs
from tests.support.pipelines import draw, transformer
from tests.support.sampling import call, run_of

OF_TRIAL = 2 + ROUNDS  # replays: two are compared


def pipeline(sampler="ddim"):
    model = transformer()
    return MoHDiTPipeline(model, make_scheduler(sampler, 4, model.config.learn_sigma, clip=False))


def images_of(graphs=None, labels=(1, 2, 3), **more):
    return draw(pipeline(), list(labels), *labels, graphs=graphs, output_type="latent", **more)


def test_the_images_are_those_of_eager_sampling_to_the_bit(capsys):
    stand_in = EagerGraphs()
    graphs = PredictionGraphs("on", stand_in)
    # Guidance in two of the four steps: batches of 6 there, of 3 elsewhere.
    options = dict(guidance_interval=(0.2, 0.6))
    assert torch.equal(images_of(graphs, **options), images_of(**options))
    assert stand_in.captures == 2
    assert stand_in.replays == OF_TRIAL + 4
    said = capsys.readouterr().out
    assert said.count("CUDA graph") == 1
    assert "CUDA graph: taken, " in said and "two predictions equal to the bit" in said


def test_graphs_are_kept_for_the_next_images():
    stand_in = EagerGraphs()
    graphs = PredictionGraphs("on", stand_in)
    pipe = pipeline()
    for labels in ((1, 2, 3), (4, 5, 6), (0, 1)):
        drawn = draw(pipe, list(labels), *labels, graphs=graphs, output_type="latent")
        assert torch.equal(drawn, images_of(labels=labels))
    assert stand_in.captures == 2  # of six images and of four
    assert stand_in.replays == OF_TRIAL + 12


def test_a_weak_model_has_a_graph_of_its_own():
    stand_in = EagerGraphs()
    weak = dict(guide="heads:0.5", guide_scale=1.5)
    drawn = images_of(PredictionGraphs("on", stand_in), **weak)
    assert torch.equal(drawn, images_of(**weak))
    assert stand_in.captures == 2 and stand_in.replays == OF_TRIAL + 8


def test_casts_of_autocast_are_in_the_graph():
    """A cache of cast weights that was filled before the capture would be gone at a replay."""
    drawn = []
    for graphs in (None, PredictionGraphs("on", EagerGraphs())):
        pipe = pipeline()
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                drawn.append(draw(pipe, [1, 2], 1, 2, graphs=graphs, output_type="latent"))
    assert all(torch.equal(images, drawn[0]) for images in drawn)


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
# Case -> (the stand-in, what the line says, number of lines).
FAILURES = {
    "no memory": (dict(failures=[OUT_OF_MEMORY]), "OutOfMemoryError: CUDA out of memory", 1),
    "no room": (dict(room="it needs up to 9.0 GiB more"), "it needs up to 9.0 GiB more", 1),
    "other results": (dict(off_by=0.25), "its predictions differ from the eager ones", 1),
    "a later capture": (dict(failures=[None, OUT_OF_MEMORY]), "CUDA out of memory", 2),
}


@pytest.mark.parametrize("stand_in, words, lines", FAILURES.values(), ids=FAILURES)
def test_what_fails_ends_in_eager_predictions(stand_in, words, lines, capsys, tmp_path):
    stand_in = EagerGraphs(**stand_in)
    graphs = PredictionGraphs("on", stand_in, tmp_path / "cuda_graph.json")
    options = dict(guidance_interval=(0.2, 0.6))
    assert torch.equal(images_of(graphs, **options), images_of(**options))
    said = [line for line in capsys.readouterr().out.splitlines() if "CUDA graph" in line]
    assert len(said) == lines and words in said[-1]
    assert said[-1].startswith("CUDA graph: not taken, predictions run eagerly: ")
    assert stand_in.released and not graphs.by_signature
    assert json.loads((tmp_path / "cuda_graph.json").read_text())["taken"] is False


def test_auto_leaves_a_slower_graph(capsys):
    stand_in = EagerGraphs(times=[1.0, 2.0] * ROUNDS)
    assert torch.equal(images_of(PredictionGraphs("auto", stand_in)), images_of())
    assert "not taken, predictions run eagerly: 2000.0 ms a prediction of 6 images, 2.00 of" in (
        capsys.readouterr().out
    )
    assert stand_in.replays == 2  # compared, and never timed nor used


# ---------------------------------------------------------------- sample.py


def drawn(run, *more):
    call(run, "--sampler", "ddim", "--out", run / "drawn.npz", "--overwrite", *more)
    with np.load(run / "drawn.npz") as archive:
        return archive["arr_0"]


def test_sampling_goes_on_as_it_began(tmp_path, capsys, monkeypatch, eager_graphs):
    made = eager_graphs()
    run = run_of(tmp_path, 3, pixels=True)
    want = drawn(run)
    assert np.array_equal(drawn(run, "--cuda-graph", "on"), want)
    assert made[0].captures == 2  # batches of 3 and 2 images
    add = ImageParts.add

    def stop(self, *batch):
        add(self, *batch)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ImageParts, "add", stop)
        drawn(run, "--cuda-graph", "on")
    capsys.readouterr()
    assert np.array_equal(drawn(run, "--cuda-graph", "on"), want)
    said = capsys.readouterr().out
    assert said.count("CUDA graph") == 1 and "CUDA graph: taken, as they began; deleting" in said
    assert made[-1].replays == 4


# Case -> (further options, why predictions are not captured).
REASONS = {
    "counted heads": (
        ["--head-load", "{run}/load.json"],
        "--head-load looks at the heads of every prediction",
    ),
    "a CPU": ([], "it needs a CUDA device, not cpu"),
}


@pytest.mark.parametrize("case", REASONS)
def test_sampling_says_why_once(tmp_path, capsys, eager_graphs, case):
    if case != "a CPU":
        eager_graphs()
    run = run_of(tmp_path, 3, pixels=True)
    more, reason = REASONS[case]
    drawn(run, "--cuda-graph", "auto", *[option.format(run=run) for option in more])
    said = capsys.readouterr().out
    assert said.count("CUDA graph") == 1
    assert f"CUDA graph: not taken, predictions run eagerly: {reason}" in said


@pytest.mark.parametrize("taken", [True, False])
def test_attention_is_measured_in_the_mode_that_runs(
    tmp_path, skipping_takes, long_drawing, eager_graphs, taken
):
    """Once more, after the first batch, if the graph is not taken."""
    measured = skipping_takes(0.99)  # all heads are computed
    long_drawing()
    made = eager_graphs(room="" if taken else "there is no room")
    run = run_of(tmp_path, 3, pixels=True, heads=(0, 1), routing=dict(scope="sample"))
    drawn(run, "--cuda-graph", "on")
    in_graphs = [call.graphs is made[0] for call in measured]
    assert in_graphs == ([True] if taken else [True, False])
