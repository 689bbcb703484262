"""Scores against numpy written from the definitions; random extractors prove the arithmetic, not FID."""

import hashlib
import json

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from scipy.linalg import sqrtm

from moh_vision.evaluation.fidelity import Extracted, Extractor, load_statistics, score
from moh_vision.evaluation.fidelity import statistics as kept
from moh_vision.evaluation.fidelity.__main__ import main
from moh_vision.evaluation.fidelity.images import open_images
from moh_vision.evaluation.fidelity.metrics import (
    frechet_distance,
    kernel_distance,
    precision_recall,
)
from tests.support.processes import on_two_ranks
from tests.support.refusals import assert_says, one_line, refuse, refused


@pytest.fixture(autouse=True)
def tiny_command(monkeypatch):
    monkeypatch.setattr("moh_vision.evaluation.fidelity.__main__.make_extractor", lambda *_: Tiny())


class Tiny(Extractor):
    """12 features with a common offset, 20 spatial ones and 5 classes, of images resized to 8 x 8.

    Whole numbers over a power of two, which float32 holds.
    """

    name = "tiny"
    published = True
    weights_sha256 = "0" * 64

    def __init__(self, offset=0):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.weights = [torch.randint(-3, 4, (192, n), generator=g).double() for n in (12, 20, 5)]
        self.offset = offset

    def forward(self, images):
        x = torch.nn.functional.adaptive_avg_pool2d(images.double(), 8).flatten(1) - 128
        pooled, spatial, logits = (x @ weights / 2**10 for weights in self.weights)
        return Extracted(pooled + self.offset, spatial, logits)


def images(n, seed=0, shift=0):
    g = torch.Generator().manual_seed(seed)
    smooth = torch.nn.functional.interpolate(
        torch.rand(n, 3, 3, 3, generator=g), (8, 8), mode="bilinear"
    )
    return (smooth * 200 + shift).to(torch.uint8)


def oracle(generated, reference, extractor, split):
    p1, s1, l1 = (np.asarray(part, dtype=np.float64) for part in extractor(generated))
    p2, s2, _ = (np.asarray(part, dtype=np.float64) for part in extractor(reference))

    def frechet(x, y):
        c1 = np.cov(x.T)
        c2 = np.cov(y.T)
        return float(
            ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(c1 + c2 - 2 * sqrtm(c1 @ c2).real)
        )

    p = np.exp(l1 - l1.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    splits = []
    for i in range(0, len(p), split):
        part = p[i : i + split]
        splits.append(np.exp((part * (np.log(part) - np.log(part.mean(0)))).sum(1).mean()))

    def distances(x, y):
        return np.sqrt(((x[:, None] - y[None]) ** 2).sum(-1))

    def covered(points, centres):
        radius = np.sort(distances(centres, centres), 1)[:, 3]
        return (distances(points, centres) <= radius).any(1).mean()

    return dict(
        fid=frechet(p1, p2),
        sfid=frechet(s1, s2),
        inception_score=np.mean(splits),
        inception_score_std=np.std(splits),
        precision=covered(p1, p2),
        recall=covered(p2, p1),
    )


@pytest.mark.parametrize("batch_size, split", [(7, 50), (64, 5000)])
def test_every_number_is_that_of_its_definition(monkeypatch, batch_size, split):
    """Splits of the inception score are in file order, and nothing else depends on it."""
    monkeypatch.setattr(kept, "ROWS", 50)  # several updates of the moments
    monkeypatch.setattr(kept, "SPLIT", split)
    a = images(120, 0)
    b = images(90, 1, shift=20)
    result = score(a, b, extractor=Tiny(), batch_size=batch_size)
    for name, want in oracle(a, b, Tiny(), split).items():
        assert result[name] == pytest.approx(want, rel=1e-5, abs=1e-6), name
    other = score(a[torch.randperm(120)], b, extractor=Tiny(), batch_size=batch_size)
    same_splits = other["inception_score"] == pytest.approx(result["inception_score"], rel=1e-9)
    assert same_splits is (split > 120)
    for name in ("fid", "sfid", "precision", "recall"):
        assert other[name] == pytest.approx(result[name], abs=1e-6)
    assert 0 < result["precision"] < 1 and result["inception_score"] > 1.001
    assert (result["num_generated"], result["num_reference"], result["label"]) == (120, 90, "FID")
    assert result["missing"] == {} and result["weights_sha256"] == "0" * 64


def test_a_short_last_split_of_the_inception_score_is_said(tmp_path, capsys):
    """A few images have few classes: at 5,001 of them the mean over splits falls."""
    many = images(5001)
    reference = str(adms_file(tmp_path))
    whole, more = (score(many[:n], reference, extractor=Tiny()) for n in (5000, 5001))
    assert whole["notes"] == [] and more["inception_score"] < whole["inception_score"]
    (note,) = more["notes"]
    assert_says(note, "inception score 2 splits 1 of 5000 images lower")
    np.savez(tmp_path / "a.npz", arr_0=many.permute(0, 2, 3, 1).numpy())
    assert main([str(tmp_path / "a.npz"), reference]) == 0
    assert f"note: {note}\n" in capsys.readouterr().out
    assert score(many[:4999], reference, extractor=Tiny())["notes"] == []


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_precision_and_recall_in_chunks(chunk):
    a = torch.randn(40, 3)
    b = torch.randn(30, 3) * 0.5
    assert precision_recall(a, b, chunk=chunk) == precision_recall(a, b)
    near = torch.randn(20, 2)
    far = torch.randn(20, 2) + 100
    assert precision_recall(near, far) == (0.0, 0.0)
    refuse("precision recall generated 3", lambda: precision_recall(a[:3], b))


def exact_precision(points, centres):
    """Return the share of points within a ball around a centre, from the differences of the coordinates."""

    def squared(x, y):
        return (x.double()[:, None] - y.double()).square().sum(-1)

    radii = squared(centres, centres).sort(1).values[:, 3]
    return (squared(points, centres) <= radii).any(1).double().mean().item()


@pytest.mark.parametrize("size", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("offset", [0, 10])
def test_precision_and_recall_of_near_points(size, offset):
    """Balls are far smaller than what the product of two matrices in float32 resolves."""
    torch.manual_seed(0)
    middles = torch.rand(20, 1, 128)
    reference = (middles + size * torch.randn(20, 5, 128)).flatten(0, 1) + offset
    generated = (middles + 1.05 * size * torch.randn(20, 5, 128)).flatten(0, 1) + offset
    found = precision_recall(generated, reference)
    expected = exact_precision(generated, reference), exact_precision(reference, generated)
    assert found == expected and 0.3 < expected[0] < 0.95


@pytest.mark.parametrize("copies", [4, 5, 6, 7])
@pytest.mark.parametrize("features", [3, 64, 200])
def test_scores_of_the_same_images(copies, features):
    """Each image is in the set several times, so that radii are 0; the generated set has another order."""
    torch.manual_seed(0)
    images = torch.rand(8, features) * 3
    reference = images.repeat(copies, 1)
    generated = reference[torch.randperm(len(reference))]
    assert precision_recall(generated, reference) == (1.0, 1.0)
    assert precision_recall(generated, reference, chunk=7) == (1.0, 1.0)
    moved = generated.clone()
    moved[::2] += 1e-3
    assert precision_recall(moved, reference)[0] == 0.5

    eps = torch.finfo(torch.float64).eps
    moments = []
    for x in (generated, reference):
        found = kept.Moments(features)
        found.add(x)
        moments += found.result()
    # An eigenvalue of C C that is 0 is found up to F eps |C|^2. Twice the roots of all of them are summed.
    norm = torch.linalg.matrix_norm(moments[1], 2).item()
    bound = 2 * features * norm * (features * eps) ** 0.5
    assert frechet_distance(*moments) == pytest.approx(0, abs=bound)

    kernel = (reference.double() @ reference.double().T / features + 1) ** 3
    n = len(kernel)
    different = (kernel.sum() - kernel.trace()) / (n * (n - 1))
    expected = 2 / n * (different - kernel.trace() / n)
    tolerance = 8 * n * features * eps * kernel.max().item()
    found = kernel_distance(generated, reference)
    assert found == pytest.approx(expected.item(), abs=tolerance) and found < 0


EXPECTED = dict(
    fid=4.7141721713383,
    sfid=11.6046563716175,
    inception_score=1.8621569321379,
    precision=229 / 240,
    recall=103 / 160,
)


# With a larger offset the kernel distance has no digits left, whatever it is computed in.
@pytest.mark.parametrize(
    "offset, kid", [(0, 1.47181819412974), (16, 32742.5990532365), (1024, None)]
)
def test_scores_of_fixed_inputs(offset, kid):
    """As they were when this was written, on any machine: whoever rewrites a metric is held to its numbers."""
    seeds = ((240, 1), (160, 2))
    coarse = (
        torch.randint(0, 256, (n, 3, 4, 4), generator=torch.Generator().manual_seed(s))
        for n, s in seeds
    )
    generated, reference = (x.repeat_interleave(2, 2).repeat_interleave(2, 3) for x in coarse)
    generated = (generated // 8 * 7 + 40).clamp(max=255)
    result = score(generated.byte(), reference.byte(), extractor=Tiny(offset), batch_size=64)
    expected = dict(EXPECTED)
    if kid:
        expected["kid"] = kid
    for name, want in expected.items():
        assert result[name] == pytest.approx(want, rel=1e-9, abs=0), name


class Colours(Extractor):
    """Features and 3 classes of the mean of each channel."""

    name = "colours"
    published = True
    weights_sha256 = "1" * 64

    def forward(self, images):
        means = images.double().mean((2, 3)) / 255
        return Extracted(means, None, 12 * means)


def test_images_in_the_order_of_their_classes_are_said(tmp_path, monkeypatch, capsys):
    """Splits of one class each have a score of 1."""
    monkeypatch.setattr(kept, "SPLIT", 30)
    x = torch.zeros(90, 3, 8, 8, dtype=torch.uint8)
    for number in range(90):
        x[number, number // 30] = 200 + number % 30
    mixed = x[torch.randperm(90, generator=torch.Generator().manual_seed(0))]
    in_order, shuffled = (score(some, x, extractor=Colours()) for some in (x, mixed))
    assert in_order["inception_score"] < 1.01 and shuffled["inception_score"] > 2.6
    assert shuffled["notes"] == score(mixed[:30], x, extractor=Colours())["notes"] == []
    (note,) = in_order["notes"]
    assert note.startswith("inception score: the images are not in mixed order: its splits of 30")
    assert float(note.split()[-7]) > 2.6  # of all images as one split
    monkeypatch.setattr(
        "moh_vision.evaluation.fidelity.__main__.make_extractor", lambda *_: Colours()
    )
    for name, first in zip("abc", (0, 30, 60)):
        write_folder(tmp_path / "set" / name, x[first : first + 30])
    assert main([str(tmp_path / "set"), str(tmp_path / "set")]) == 0
    assert f"note: {note}\n" in capsys.readouterr().out


def write_folder(folder, x):
    folder.mkdir(parents=True)
    for i, image in enumerate(x):
        Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()).save(folder / f"{i:05}.png")
    return folder


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("channels", [1, 3])
def test_all_sources_give_the_same_numbers(tmp_path, save, channels):
    """Grey images are scored as RGB; processes share the batches without overlap."""
    given = images(50)[:, :channels]
    sources = sources_of(given, tmp_path, save)
    x = given.expand(-1, 3, -1, -1)
    want = score(x, x, extractor=Tiny(), batch_size=8)
    reference = x
    for source in (*sources, iter(x.split(8))):
        result = score(source, reference, extractor=Tiny(), batch_size=8)
        assert result | dict(reference_sha256=None) == want
        reference = sources[1]
    for source in (*sources, x):
        seen = {}
        for rank in range(3):
            seen |= {first: batch for first, batch in open_images(source, "x").batches(8, rank, 3)}
        assert sorted(seen) == [*range(0, 50, 8)]
        assert torch.equal(torch.cat([seen[k] for k in sorted(seen)]), x)


def adms_file(folder, name="stats", parts=("mu", "sigma"), **arrays):
    """A file with statistics of 80 images by `Tiny`."""
    pooled, spatial, _ = (features.numpy() for features in Tiny()(images(80, 1)))
    stats = dict(
        mu=pooled.mean(0), sigma=np.cov(pooled.T), mu_s=spatial.mean(0), sigma_s=np.cov(spatial.T)
    )
    np.savez(folder / f"{name}.npz", **{part: stats[part] for part in parts}, **arrays)
    return folder / f"{name}.npz"


def test_adms_reference_files(tmp_path):
    """Archives that are none: tests/reliability/test_malformed_weights.py."""
    a = images(60)
    b = images(80, 1)
    tiny = Tiny()
    both = ("mu", "sigma", "mu_s", "sigma_s")
    want = score(a, b, extractor=tiny)
    some = score(a, b[:40], extractor=tiny)
    with_images = adms_file(tmp_path, "full", both, arr_0=b[:40].permute(0, 2, 3, 1).numpy())
    full = score(a, with_images, extractor=tiny)
    only = score(a, adms_file(tmp_path, "stats", both), extractor=tiny)
    for name in ("fid", "sfid"):
        assert full[name] == pytest.approx(want[name], rel=1e-5)
        assert only[name] == pytest.approx(want[name], rel=1e-5)
    assert (full["precision"], full["recall"]) == (some["precision"], some["recall"])
    assert only["precision"] is None
    assert_says(only["missing"]["precision"], "stats.npz statistics images (arr_0)")
    assert only["num_reference"] is None and only["inception_score"] == want["inception_score"]
    short = score(a, adms_file(tmp_path, "short"), extractor=tiny)
    assert short["sfid"] is None
    assert_says(short["missing"]["sfid"], "short.npz none")
    np.savez(tmp_path / "x.npz", mu=np.zeros(13), sigma=np.eye(13))
    refuse(f"{tmp_path}/x.npz 13 tiny 12", score, a, tmp_path / "x.npz", extractor=tiny)


def test_saved_statistics(tmp_path, capsys):
    a = images(60)
    b = write_folder(tmp_path / "b", images(50, 1))
    file = tmp_path / "b.saved.npz"
    assert main([str(b), "--save-statistics", str(file)]) == 0
    sha = hashlib.sha256(file.read_bytes()).hexdigest()  # a folder has none
    assert score(a, file, extractor=Tiny()) == score(a, b, extractor=Tiny()) | dict(
        reference_sha256=sha
    )
    saved = load_statistics(file)
    assert saved.count == 50 and str(b) in saved.source
    assert (saved.extractor, saved.weights_sha256) == ("tiny", "0" * 64)
    other = Tiny()
    other.weights_sha256 = "1" * 64
    refuse(
        f"{file} tiny sha256 {12 * '0'} {12 * '1'}",
        score,
        a,
        file,
        extractor=other,
    )
    assert main([str(b), "--save-statistics", str(file)]) == 2
    assert_says(capsys.readouterr().err, f"{file} exists")


def test_too_few_images_are_refused_or_labelled():
    refuse(
        "generated 10 12 tiny allow_biased --allow-biased",
        lambda: score(images(10), images(60, 1), extractor=Tiny()),
    )
    refuse(
        "reference 12 tiny allow_biased --allow-biased",
        lambda: score(images(60), images(12, 1), extractor=Tiny()),
    )
    assert (
        score(images(10), images(60, 1), extractor=Tiny(), allow_biased=True)["label"] == "FID@10"
    )


def test_only_the_published_inception_is_called_fid(tmp_path):
    class Features(torch.nn.Module):
        def forward(self, x):
            return Tiny()(x).pooled

    result = score(images(60), images(60, 1), extractor=Features())
    assert (
        result["label"] == "FD-Features" and "fid" not in result and "inception_score" not in result
    )
    assert result["fd"] == pytest.approx(
        score(images(60), images(60, 1), extractor=Tiny())["fid"], rel=1e-6
    )
    assert result["spatial_fd"] is None and "no spatial features" in result["missing"]["spatial_fd"]
    refuse(
        f"{tmp_path}/stats.npz weights Inception Features",
        score,
        images(60),
        adms_file(tmp_path),
        extractor=Features(),
    )


def sources_of(x, folder, save=np.savez):
    """A folder and a file of the same images."""
    save(folder / "x.npz", arr_0=x.permute(0, 2, 3, 1).numpy(), arr_1=np.zeros(50))
    return write_folder(folder / "x", x), folder / "x.npz"


def test_grey_images_are_not_compared_with_coloured_ones(tmp_path, capsys):
    colour = write_folder(tmp_path / "colour", images(30))
    tiny = Tiny()
    seen = []
    tiny.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    grey_folder, grey_file = sources_of(images(30)[:, :1], tmp_path)
    for grey in (grey_folder, grey_file):
        for generated, modes, reference in (
            (grey, ("grey", "colour"), colour),
            (colour, ("colour", "grey"), grey),
        ):
            with one_line() as refusal:
                score(generated, reference, extractor=tiny, batch_size=8)
            before, after = str(refusal.value).split(str(reference))
            assert_says(before, f"generated {modes[0]}")
            assert_says(after, modes[1])
    assert sum(seen) <= 8  # the number of features is asked for, no more
    statistics = str(tmp_path / "grey.saved.npz")
    assert main([str(grey_folder), "--save-statistics", statistics]) == 0
    assert main([str(colour), statistics]) == 2
    assert_says(capsys.readouterr().err, f"generated colour {statistics} grey")
    assert main([str(grey_file), "digits"]) == 0  # they are grey
    assert main([str(colour), "digits"]) == 2
    assert_says(capsys.readouterr().err, "generated colour digits val grey")


def test_images_of_another_size_are_said(tmp_path, capsys):
    """Extractors resize them, so they can be scored; saved statistics know their size too."""
    small = images(40)
    large = images(40, 1).repeat_interleave(2, 2)
    folder = write_folder(tmp_path / "small", small)
    file = tmp_path / "large.npz"
    np.savez(file, arr_0=large.permute(0, 2, 3, 1).numpy())
    statistics = tmp_path / "large.saved.npz"
    assert main([str(file), "--save-statistics", str(statistics)]) == 0
    for source, reference, name in (
        (folder, file, file),
        (iter([small]), large, "reference"),
        (small, statistics, f"{statistics} ({file})"),
    ):
        (note,) = score(source, reference, extractor=Tiny())["notes"]
        of_generated, of_reference = note.rsplit(str(name), 1)
        assert_says(of_generated, "generated 8 x 8 pixels")
        assert_says(of_reference, "8 x 16")
    assert score(large, statistics, extractor=Tiny())["notes"] == []
    assert main([str(folder), str(file)]) == 0
    assert_says(capsys.readouterr().out, f"note: generated 8 x 8 pixels {file} 16")


def test_compression_of_one_set_alone_is_said(tmp_path, capsys):
    """JPEG's blocks are part of every score: of generated images, and of references that are compared with PNG."""
    x = images(40)
    y = images(40, 1)
    folders = {name: write_folder(tmp_path / name, x) for name in ("png", "jpeg", "both")}
    for name, count in (("jpeg", 40), ("both", 10)):
        for file in sorted(folders[name].iterdir())[:count]:
            Image.open(file).save(file.with_suffix(".jpg"))
            file.unlink()

    def notes(generated, reference):
        return score(generated, reference, extractor=Tiny())["notes"]

    files = dict(png="40 PNG", jpeg="40 JPEG", both="10 JPEG, 30 PNG")
    for one, other in (("jpeg", "png"), ("png", "both"), ("both", "jpeg")):
        (note,) = notes(folders[one], folders[other])
        of_generated, of_reference = note.split(str(folders[other]))
        assert files[one] in of_generated and files[other] in of_reference
    (note,) = notes(folders["jpeg"], y)
    assert_says(note, "generated 40 JPEG")
    assert notes(folders["png"], folders["png"]) == notes(folders["png"], y) == []
    assert notes(folders["jpeg"], folders["jpeg"]) == []
    assert main([str(folders["jpeg"]), str(folders["png"])]) == 0
    assert_says(capsys.readouterr().out, "note: generated 40 JPEG")
    saved = tmp_path / "saved.npz"
    assert main([str(folders["jpeg"]), "--save-statistics", str(saved)]) == 0
    (note,) = notes(folders["png"], saved)
    assert_says(note, "40 JPEG")


def test_a_rotation_noted_in_exif_is_applied(tmp_path):
    """As in data sets: the folder of a camera's files is what a data set of them is."""
    x = torch.cat([images(30), images(30, 1)], 3)  # 16 x 8 pixels
    sizes = set()
    folder = tmp_path / "photos"
    folder.mkdir()
    for i, image in enumerate(x.permute(0, 2, 3, 1).numpy()):
        exif = Image.Exif()
        exif[0x0112] = 1
        if i % 2:
            image = np.rot90(image)
            exif[0x0112] = 6  # to be turned clockwise
        raw = Image.fromarray(image)
        suffix = ("png", "webp", "jpg")[i // 2 % 3]
        raw.save(folder / f"{i:05}.{suffix}", exif=exif, lossless=True)
        sizes.add(raw.size)
    assert len(sizes) == 2
    seen = torch.cat([batch for _, batch in open_images(folder, "x").batches(8)])
    files = [
        np.asarray(ImageOps.exif_transpose(Image.open(file))) for file in sorted(folder.iterdir())
    ]
    assert (seen.permute(0, 2, 3, 1).numpy() == np.stack(files)).all()
    assert torch.equal(seen[:4], x[:4])
    Image.fromarray(x[0].permute(1, 2, 0).numpy()).save(folder / "9.png", exif=exif)
    refuse(f"{folder}/9.png 8 16 00000.png", lambda: open_images(folder, "x"))


def test_bad_files_in_a_folder(tmp_path):
    """Unreadable ones: tests/reliability/test_bad_images.py."""
    folder = write_folder(tmp_path / "bad", images(30))
    Image.new("RGB", (9, 8)).save(folder / "00020.png")
    refuse(f"{folder}/00020.png 9 8 00000.png", lambda: open_images(folder, "x"))


def test_images_in_the_folders_of_a_folder(tmp_path):
    """They are read at any depth, beside those of the folder itself."""
    for name, part in dict(cat=images(20), dog=images(20, 1)).items():
        write_folder(tmp_path / "both" / name, part)
    together = torch.cat([images(20), images(20, 1)])
    generated = images(30, 2)
    options = dict(extractor=Tiny(), batch_size=8)
    found = score(generated, tmp_path / "both", **options)["fid"]
    assert found == pytest.approx(score(generated, together, **options)["fid"], rel=1e-9)
    next((tmp_path / "both" / "cat").iterdir()).rename(tmp_path / "both" / "one.png")
    assert open_images(tmp_path / "both", "x").count == 40
    (tmp_path / "empty" / "deeper").mkdir(parents=True)
    refuse(
        f"{tmp_path}/empty images .jpg .png .tiff folders shards",
        lambda: open_images(tmp_path / "empty", "x"),
    )


@pytest.mark.parametrize(
    "source, expected, facts",
    [
        pytest.param(
            torch.zeros(4, 3, 8, 8), ValueError, "generated 0 torch.float32 uint8 3", id="float32"
        ),
        pytest.param(
            torch.zeros(4, 1, 8, 8, dtype=torch.uint8),
            ValueError,
            "generated 0 4 1 8 uint8 3",
            id="one channel",
        ),
        pytest.param(
            iter([images(4), images(4)[..., :7, :7]]),
            ValueError,
            "generated 1 7 8",
            id="two sizes",
        ),
        pytest.param(iter([]), ValueError, "generated 0 images 1", id="nothing"),
        pytest.param("nowhere", FileNotFoundError, "nowhere folder .npz", id="no such folder"),
    ],
)
def test_bad_sources(source, expected, facts):
    refuse(facts, score, source, images(30), extractor=Tiny(), error=expected)


def test_features_that_are_not_finite_are_named():
    class Broken(torch.nn.Module):
        def forward(self, x):
            features = torch.ones(len(x), 3)
            features[1, 2] = float("nan")
            return features

    refuse(
        "features 1 finite extractor",
        lambda: score(images(8), images(8), extractor=Broken()),
    )


def test_the_command(tmp_path, hours_pass, capsys):
    a = write_folder(tmp_path / "a", images(60))
    b = write_folder(tmp_path / "b", images(60, 1))
    hours_pass()
    out = tmp_path / "scores.json"
    assert main([str(a), str(b), "--out", str(out), "--batch-size", "16"]) == 0
    text = capsys.readouterr().out
    result = json.loads(out.read_text())
    want = score(images(60), images(60, 1), extractor=Tiny(), batch_size=16)
    assert "generated: 16 of 60 images, " in text
    assert "reference: 60 of 60 images, 00:00 left\n" in text
    assert f"{want['fid']:.4f}" in text and "FID " in text and "60 images" in text
    assert {k: result[k] for k in want} == want and result["generated"] == str(a)
    for argv, facts in (
        ([str(a), str(b), "--out", str(out)], f"--out {out} exists"),
        ([str(a)], "REFERENCE --save-statistics"),
        ([str(a), str(tmp_path / "bb")], f"REFERENCE {tmp_path}/bb {b}?"),
        ([str(a), str(b), "--size", "1000000"], "--size 1000000 64 715,256 GiB"),
        ([str(a), str(tmp_path / "c")], f"REFERENCE {tmp_path}/c"),
        ([str(a), str(b), "--batch-size", "0"], "--batch-size 0 1"),
        ([str(a), str(b), "--size", "0"], "--size 0 1"),
        ([str(a), "--save-statistics", "s.npz", "--out", "x"], "--out x --save-statistics s.npz"),
        (
            [str(a), "--save-statistics", "s.npz", "--allow-biased"],
            "--allow-biased --save-statistics s.npz",
        ),
    ):
        assert_says(refused(capsys, main, *argv), facts)


def test_data_sets_are_cropped_to_the_size_of_the_other_images(tmp_path, capsys):
    """As sample.py --score reads them; the train split as GENERATED and the val split as REFERENCE unless it is told."""
    wide = torch.randint(0, 256, (80, 8, 12, 3), dtype=torch.uint8)
    crops = {}
    for split, part in zip(("train", "val"), wide.split(40)):
        write_folder(tmp_path / "data" / split / "cat", part.permute(0, 3, 1, 2))
        crops[split] = part[:, :, 2:10].permute(0, 3, 1, 2)
    data = str(tmp_path / "data")
    folder = str(write_folder(tmp_path / "a", images(60)))
    of_train = f"{data}, train split"
    cases = (
        ([data, folder], of_train, (crops["train"], images(60))),
        ([folder, data], folder, (images(60), crops["val"])),
        ([folder, data, "--reference-split", "train"], folder, (images(60), crops["train"])),
        ([data, data, "--size", "8"], of_train, (crops["train"], crops["val"])),
    )
    for number, (argv, generated, pair) in enumerate(cases):
        out = tmp_path / f"{number}.json"
        assert main([*argv, "--out", str(out), "--batch-size", "16"]) == 0
        want = score(*pair, extractor=Tiny(), batch_size=16)
        result = json.loads(out.read_text())
        assert {k: result[k] for k in want} == want
        assert result["generated"] == generated
    said = capsys.readouterr().out
    assert f"40 images of {data}, train split against 40 of {data}, val split" in said
    statistics = str(tmp_path / "s.npz")
    assert main([data, "--save-statistics", statistics, "--size", "8"]) == 0
    assert main([folder, statistics]) == 0
    for argv, facts in (
        ([data, data], f"{data} train --size PIXELS 12 8"),
        ([data, statistics], f"{data} train --size PIXELS 12 8"),
        ([folder, folder, "--size", "8"], "--size 8 data set"),
        ([folder, folder, "--reference-split", "val"], f"REFERENCE {folder} split val train"),
    ):
        assert_says(refused(capsys, main, *argv), facts)


def raise_key_error(images):
    raise KeyError("sizes")


def score_on_a_rank(rank, folder):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    result = score(folder / "a", folder / "b", extractor=Tiny(), batch_size=8)
    (folder / f"{rank}.json").write_text(json.dumps(result))
    try:
        score(folder / "a", images(5), extractor=Tiny())
    except ValueError as error:
        (folder / f"{rank}.txt").write_text(str(error))
    for name in ("forward", "to"):
        broken = Tiny()
        if rank == 1:
            setattr(broken, name, raise_key_error)
        try:  # one process fails; the other learns of it instead of waiting
            score(iter([images(40)]), images(40), extractor=broken, batch_size=8)
        except RuntimeError as error:
            (folder / f"{rank}.{name}").write_text(str(error))
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_give_the_result_of_one(tmp_path):
    write_folder(tmp_path / "a", images(61))
    write_folder(tmp_path / "b", images(50, 1))
    on_two_ranks(score_on_a_rank, tmp_path)
    want = score(tmp_path / "a", tmp_path / "b", extractor=Tiny(), batch_size=8)
    for rank in range(2):
        got = json.loads((tmp_path / f"{rank}.json").read_text())
        assert got.keys() == want.keys()
        for name, value in want.items():
            if isinstance(value, float):
                value = pytest.approx(value, rel=1e-6)
            assert got[name] == value, name
        assert "5 reference images for 12 features" in (tmp_path / f"{rank}.txt").read_text()
        for name in ("forward", "to"):
            assert (tmp_path / f"{rank}.{name}").read_text() == "KeyError: 'sizes'"
