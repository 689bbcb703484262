"""`score` computes all scores of generated images in one pass of the extractor; `table` formats them as text."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.types import Device

from moh_vision.data.decode import AS_STORED, Decoding
from moh_vision.evaluation.fidelity.extractors import Extractor, make_extractor
from moh_vision.evaluation.fidelity.images import open_images
from moh_vision.evaluation.fidelity.metrics import (
    frechet_distance,
    kernel_distance,
    precision_recall,
)
from moh_vision.evaluation.fidelity.reference import (
    Reference,
    on_all,
    rank_and_world,
    statistics_of,
)
from moh_vision.evaluation.fidelity.statistics import Statistics

ImageSource = str | Path | Tensor | Iterable[Tensor]
LOSSY = ("JPEG", "WEBP")  # formats that may change pixels
# Names of the scores if the extractor is not Inception with its published weights.
OTHER_NAMES = dict(
    fid="fd",
    sfid="spatial_fd",
    inception_score="class_score",
    inception_score_std="class_score_std",
    kid="kernel_distance",
)
TITLES = dict(
    fid="FID",
    fd="FD",
    sfid="sFID",
    spatial_fd="spatial FD",
    inception_score="inception score",
    class_score="class score",
    kid="KID",
    kernel_distance="kernel distance",
    precision="precision",
    recall="recall",
)


def score(
    generated: ImageSource,
    reference: ImageSource | Statistics | Reference,
    *,
    extractor: str | nn.Module = "inception",
    inception_weights: str | Path | None = None,
    batch_size: int = 64,
    device: Device = None,
    allow_biased: bool = False,
    decoding: Decoding = AS_STORED,
) -> dict:
    """Compute FID, sFID, inception score, KID, precision and recall of generated images against a reference.

    With torch.distributed, the processes share the batches, and all get the same result as one, up to rounding.

    Args:
        generated: folder of images, .npz with arr_0 (uint8 NHWC), uint8 tensor [N, 3, H, W] or iterator of those.
        reference: the same; or ADM's .npz of mu, sigma, mu_s, sigma_s (with arr_0, also precision and recall); a file
            of `Statistics.save`, `Statistics`, or a `Reference`, which is read once.
        extractor: "inception", "timm:NAME", or a module from uint8 images [B, 3, H, W] to features [B, F]; see
            `make_extractor`.
        inception_weights: path of torch-fidelity's file; None: fetched once.
        batch_size: images at a time on each process.
        device: where the extractor runs; None: a GPU if there is one.
        allow_biased: accept no more images than features, where a Frechet distance is far too large; the label is then
            FID@N.
        decoding: how files in folders become pixels; the default reads them as torch-fidelity and ADM do.

    Returns:
        dict(fid, sfid, inception_score, inception_score_std, kid, precision, recall, num_generated, num_reference,
        extractor, weights_sha256, label, missing, notes, reference_sha256: of the reference's file). Scores that could
        not be computed are None, and `missing` says why; `notes` are lines on the limits of the scores. Without
        Inception's published weights the scores have other keys (`OTHER_NAMES`), because they are not FID; `label` is
        "FID", "FID@N", "FD-NAME" or "FD-NAME@N".
    """
    network = make_extractor(extractor, inception_weights).eval()
    if not device:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if not isinstance(reference, Reference):
        reference = Reference(reference, decoding)
    images = open_images(generated, "generated", decoding)
    dims = None
    if images.count:  # known, so the images are no iterator, which can be read only once
        with torch.no_grad():
            dims = network.to(device)(next(images.batches(2))[1].to(device)).pooled.shape[1]
    reference.check(network, dims, images.count, allow_biased, images.channels)
    real = reference.read(network, batch_size, device)
    keep_features = real.features is not None  # KID, precision and recall need those of both sets
    fake = statistics_of(images, network, batch_size, device, "generated", keep_features)
    notes = list(getattr(images, "remarks", ()))
    if reference.images is not None:
        notes += getattr(reference.images, "remarks", ())

    def compare() -> dict | None:
        rank, _ = rank_and_world()
        if rank != 0:
            return None
        reference.check(network, len(fake.pooled[0]), fake.count, allow_biased)
        return _result(fake, reference, network, device, notes)

    return on_all(compare)[0]  # the first process compares, and all return its result


def _result(
    fake: Statistics,
    reference: Reference,
    network: Extractor,
    device: torch.device,
    notes: list[str],
) -> dict:
    """Return the result of `score`.

    Args:
        fake: statistics of the generated images.
        reference: what they are compared with; it was read.
        network: the extractor of both.
        device: where distances between features are computed.
        notes: lines for the user so far; more are appended.
    """
    real = reference.statistics
    values, missing = _compare(fake, real, network, device)
    if fake.classes is not None:
        title = TITLES["inception_score" if network.published else "class_score"]
        notes += [f"{title}: {note}" for note in fake.classes.notes]
    if real.size and tuple(real.size) != fake.size:
        height, width = fake.size
        real_height, real_width = real.size
        notes.append(
            f"the generated images have {width} x {height} pixels, "
            f"those of {real.source} {real_width} x {real_height}"
        )
    notes += _compression(fake, real)
    label = "FID"
    if not network.published:
        label = f"FD-{network.name}"
        values = {OTHER_NAMES.get(name, name): value for name, value in values.items()}
        missing = {OTHER_NAMES.get(name, name): reason for name, reason in missing.items()}
    fewest = min(fake.count, real.count or fake.count)
    if fewest <= len(fake.pooled[0]):
        label = f"{label}@{fewest}"
    return dict(
        values,
        num_generated=fake.count,
        num_reference=real.count,
        extractor=network.name,
        weights_sha256=network.weights_sha256,
        label=label,
        missing=missing,
        notes=notes,
        reference_sha256=reference.sha256,
    )


def _compare(
    fake: Statistics, real: Statistics, network: Extractor, device: torch.device
) -> tuple[dict, dict]:
    """Return the scores by name, None for missing ones, and the reasons why scores are missing, by name."""
    values = dict.fromkeys(
        ("fid", "sfid", "inception_score", "inception_score_std", "kid", "precision", "recall")
    )
    missing = {}
    values["fid"] = frechet_distance(*fake.pooled, *real.pooled)
    if fake.spatial is None:
        missing["sfid"] = f"{network.name} has no spatial features"
    elif real.spatial is None:
        missing["sfid"] = f"{real.source} has none"
    else:
        values["sfid"] = frechet_distance(*fake.spatial, *real.spatial)
    if fake.classes is None:
        missing["inception_score"] = f"{network.name} gives no class probabilities"
    else:
        values["inception_score"], values["inception_score_std"] = fake.classes.result()
    if real.features is None:
        reason = f"{real.source} holds statistics only, no images (arr_0)"
        missing.update(kid=reason, precision=reason, recall=reason)
    else:
        values["kid"] = kernel_distance(fake.features, real.features)
        values["precision"], values["recall"] = precision_recall(
            fake.features, real.features, device
        )
    return values, missing


def _compression(fake: Statistics, real: Statistics) -> list[str]:
    """Return a note if the sets differ in file formats and at least one format is lossy."""
    fake_formats = set(fake.formats or ())
    real_formats = set(real.formats or ())
    if fake_formats == real_formats or not (fake_formats | real_formats) & set(LOSSY):
        return []
    found = []
    if fake_formats:
        found.append(f"the generated images are {_counted(fake.formats)}")
    if real_formats:
        subject = f"those of {real.source}"
        if not fake_formats:
            subject += " are"
        found.append(f"{subject} {_counted(real.formats)}")
    return [
        f"{', '.join(found)}; the scores see compression as a difference between the sets: PNG has none"
    ]


def _counted(formats: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in formats.items())


def table(result: dict, generated: str, reference: str) -> str:
    """Format the result of `score`: a line for each score, or why it is missing, and notes."""
    num_generated = result["num_generated"]
    num_reference = result["num_reference"]
    sets = f"{num_generated} images of {generated} against {num_reference} of {reference}"
    if num_reference is None:
        sets = f"{num_generated} images of {generated} against an unknown number of {reference}"
    if result["reference_sha256"]:
        sets += f" (sha256 {result['reference_sha256'][:12]})"
    weights = result["weights_sha256"] or "unknown"
    lines = [
        sets,
        f"{result['extractor']}, weights sha256 {weights[:12]}, label {result['label']}",
    ]
    few = f"@{min(num_generated, num_reference or num_generated)}"
    is_biased = result["label"].endswith(few)
    for name, title in TITLES.items():
        if name not in result:
            continue
        if is_biased and name in ("fid", "fd"):
            title += few
        lines.append(f"{title:24}{_number(name, result)}")
    return "\n".join([*lines, *(f"note: {note}" for note in result["notes"])])


def _number(name: str, result: dict) -> str:
    """Format one score of the result, or the reason why it is missing."""
    value = result[name]
    if value is None:
        return f"-   ({result['missing'].get(name, 'not computed')})"
    if name in ("inception_score", "class_score"):
        return f"{value:.3f} +- {result[name + '_std']:.3f}"
    if name in ("kid", "kernel_distance"):
        return f"{value:z.5f}"
    return f"{value:z.4f}"  # z: no minus before a rounded 0
