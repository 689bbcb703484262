"""The Inception of FID, with random weights in torch-fidelity's file layout: they prove the wiring, not scores."""

import hashlib
import json
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from moh_vision.evaluation.fidelity import Inception, TimmExtractor, make_extractor, score
from moh_vision.evaluation.fidelity.__main__ import main as command
from moh_vision.evaluation.fidelity.extractors import PUBLISHED
from tests.support.benchmarks import benchmark
from tests.support.refusals import assert_says, refuse


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A file of the published one's layout: 23.9 million parameters."""
    file = tmp_path_factory.mktemp("inception") / "random.pth"
    benchmark("random_inception").write_random_inception(file)
    return file


def images(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    smooth = nn.functional.interpolate(
        torch.rand(n, 3, 4, 4, generator=g), (32, 32), mode="bilinear"
    )
    return (smooth * 255).to(torch.uint8)


def test_one_pass_gives_all_features(weights):
    inception = Inception(weights)
    seen = {}

    def keep(module, arguments, output):
        seen["conv"] = output

    inception.network.Mixed_6d.branch1x1.conv.register_forward_hook(keep)
    out = inception(images(3))
    assert out.pooled.shape == (3, 2048)
    assert out.spatial.shape == (3, 2023)
    assert out.logits.shape == (3, 1008)
    torch.testing.assert_close(
        out.logits, out.pooled @ inception.network.fc.weight.T
    )  # without the bias
    maps = torch.relu(inception.network.Mixed_6d.branch1x1.bn(seen["conv"]))  # [3, 192, 17, 17]
    want = [maps[1, c, i, j].item() for i in (0, 16) for j in (0, 16) for c in range(7)]
    got = [
        out.spatial[1, (17 * i + j) * 7 + c].item()
        for i in (0, 16)
        for j in (0, 16)
        for c in range(7)
    ]
    assert got == pytest.approx(want, rel=1e-5) and max(want) > 0
    # Unknown weights are never called FID.
    assert not inception.published and inception.name == "Inception with unknown weights random.pth"
    assert inception.weights_sha256 == hashlib.sha256(weights.read_bytes()).hexdigest()


def test_weights_that_cannot_be_used(weights, tmp_path):
    file = tmp_path / "w.pth"
    refuse(f"inception_weights {file} {PUBLISHED}", Inception, file, error=FileNotFoundError)
    facts = f"{file} Inception torch-fidelity"
    file.write_bytes(weights.read_bytes()[:1000])
    refuse(facts, Inception, file)
    of_another_network = nn.Linear(2, 2).state_dict()
    with_an_object = {"x": tmp_path}  # unpickling would build a path
    for content in (of_another_network, with_an_object):
        torch.save(content, file)
        refuse(facts, Inception, file)


def test_weights_that_cannot_be_fetched_say_where_to_put_them(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(
        torch.hub, "download_url_to_file", mock.Mock(side_effect=OSError("no network"))
    )
    put_there = f"{tmp_path}/hub/checkpoints/{PUBLISHED}"
    facts = f"{put_there} no network --inception-weights FILE --extractor RUN"
    refuse(facts, make_extractor, "inception", error=FileNotFoundError)


@pytest.mark.parametrize(
    "extractor, allowed",
    [
        pytest.param("inceptoin", "inception timm:NAME run module", id="misspelt"),
        pytest.param("timm:resnet51x", "timm resnet51x", id="a model that timm lacks"),
    ],
)
def test_unknown_extractors(extractor, allowed):
    refuse(f"extractor {extractor} {allowed}", make_extractor, extractor)


def test_a_timm_model_is_named():
    model = timm.create_model("resnet10t", num_classes=4)
    result = score(
        images(8), images(8, 1), extractor=TimmExtractor(model, "resnet10t"), allow_biased=True
    )
    assert result["label"] == "FD-resnet10t@8"
    assert result["fd"] > 0
    assert len(result["weights_sha256"]) == 64
    again = score(
        images(8), images(8), extractor=TimmExtractor(model, "resnet10t"), allow_biased=True
    )
    assert abs(again["fd"]) < 1e-3
    network = TimmExtractor(model, "x")
    x = images(8)
    resized = nn.functional.interpolate(
        x / 255, network.size, mode=network.interpolation, antialias=True
    ).clamp(0, 1)
    with torch.no_grad():
        torch.testing.assert_close(network(x).logits, model((resized - network.mean) / network.std))
    assert 1 < result["class_score"] < 4


def test_a_folder_of_timms_is_an_extractor(tmp_path, capsys):
    """With the preprocessing in its config.json, at its own size or at another; statistics of one are not the other's."""
    sizes = dict(img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=0)
    model = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    preprocessing = dict(
        mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), interpolation="bilinear", input_size=(3, 32, 32)
    )
    folder = tmp_path / "vit"
    file = tmp_path / "b.saved.npz"
    model.pretrained_cfg = {**model.pretrained_cfg, **preprocessing}
    timm.models.save_for_hf(model, folder, model_args=sizes, safe_serialization=True)
    x = images(30)[:, :, :24, :24]
    mean, std = (torch.tensor(preprocessing[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
    network = make_extractor(f"timm:local-dir:{folder}")
    resized = nn.functional.interpolate(x / 255, (32, 32), mode="bilinear", antialias=True)
    with torch.no_grad():
        torch.testing.assert_close(network(x).pooled, model((resized - mean) / std))
    assert network.name == f"vit_tiny_patch16_224 of {folder}"
    for name, seed in (("a", 1), ("b", 2)):
        np.savez(tmp_path / f"{name}.npz", arr_0=images(30, seed).permute(0, 2, 3, 1).numpy())
    saved, generated, scores_file = (
        str(path) for path in (file, tmp_path / "a.npz", tmp_path / "s.json")
    )
    small = ["--extractor", f"timm:local-dir:{folder}"]
    large = ["--extractor", f"timm:local-dir:{folder}@64"]
    assert command([str(tmp_path / "b.npz"), "--save-statistics", saved, *large]) == 0
    assert command([generated, saved, *large, "--out", scores_file]) == 0
    scores = json.loads((tmp_path / "s.json").read_text())
    assert scores["label"] == f"FD-vit_tiny_patch16_224 of {folder}@64" and scores["fd"] > 0
    assert scores["versions"]["torch"] == torch.__version__.split("+")[0]
    assert "torch-fidelity" in scores["versions"]
    assert command([generated, saved, *small]) == 2
    assert_says(capsys.readouterr().err, f"{saved} vit_tiny_patch16_224 {folder}@64 {folder}")
    (folder / "model.safetensors").write_bytes(b"torn")
    refuse(
        f"extractor timm:local-dir:{folder} header",
        lambda: make_extractor(f"timm:local-dir:{folder}"),
    )
    facts = f"extractor timm:local-dir:{tmp_path} config.json"
    refuse(facts, make_extractor, f"timm:local-dir:{tmp_path}")


def test_a_network_for_any_size_takes_no_size(tmp_path):
    timm.models.save_for_hf(timm.create_model("resnet10t"), tmp_path, safe_serialization=True)
    facts = f"extractor timm:local-dir:{tmp_path}@64 ResNet size"
    refuse(facts, make_extractor, f"timm:local-dir:{tmp_path}@64")


@pytest.mark.slow
def test_the_numbers_are_torch_fidelitys(weights, tmp_path):
    from torch_fidelity import calculate_metrics

    for name, seed in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        for i, image in enumerate(images(30, seed)):
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / name / f"{i:03}.png")
    theirs = calculate_metrics(
        input1=str(tmp_path / "a"),
        input2=str(tmp_path / "b"),
        cuda=False,
        fid=True,
        isc=True,
        kid=True,
        prc=True,
        feature_extractor="inception-v3-compat",
        feature_extractor_weights_path=str(weights),
        samples_shuffle=False,
        isc_splits=1,
        kid_subset_size=30,
        verbose=False,
        cache=False,
    )
    ours = score(tmp_path / "a", tmp_path / "b", inception_weights=weights, allow_biased=True)
    their_names = dict(
        fd="frechet_inception_distance",
        class_score="inception_score_mean",
        precision="precision",
        recall="recall",
        kernel_distance="kernel_inception_distance_mean",
    )
    for name, key in their_names.items():
        assert ours[name] == pytest.approx(theirs[key], rel=1e-4, abs=1e-4), name
    assert np.isfinite(ours["spatial_fd"]) and ours["label"].endswith("@30")
