"""`score`: all numbers of generated images in one pass of the extractor; and `table`, the result as text."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.types import Device

from moh_vision.evaluation.fidelity.extractors import Extractor, make_extractor
from moh_vision.evaluation.fidelity.images import open_images
from moh_vision.evaluation.fidelity.metrics import (
    frechet_distance,
    kernel_distance,
    precision_recall,
)
from moh_vision.evaluation.fidelity.reference import Reference, on_all, place, statistics_of
from moh_vision.evaluation.fidelity.statistics import Statistics

ImageSource = str | Path | Tensor | Iterable[Tensor]
LOSSY = ("JPEG", "WEBP")  # formats that may change pixels
# Names of the numbers without Inception's published weights.
OTHER_NAMES = dict(
    fid="fd", sfid="spatial_fd", inception_score="class_score", inception_score_std="class_score_std", kid="kernel_distance"
)  # fmt: skip
TITLES = dict(
    fid="FID", fd="FD", sfid="sFID", spatial_fd="spatial FD", inception_score="inception score", class_score="class score",
    kid="KID", kernel_distance="kernel distance", precision="precision", recall="recall",
)  # fmt: skip


def score(
    generated: ImageSource,
    reference: ImageSource | Statistics | Reference,
    *,
    extractor: str | nn.Module = "inception",
    inception_weights: str | Path | None = None,
    batch_size: int = 64,
    device: Device = None,
    allow_biased: bool = False,
) -> dict:
    """FID, sFID, inception score, KID, precision and recall of generated images against a reference.

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
        allow_biased: also with no more images than features, where a Frechet distance is far too large; the
            label is then FID@N.

    Returns:
        dict(fid, sfid, inception_score, inception_score_std, kid, precision, recall, num_generated, num_reference,
        extractor, weights_sha256, label, missing, notes, reference_sha256: of its file). Unavailable numbers are None,
        and `missing` says why; `notes` are lines on the numbers' limits. Without Inception's published weights the
        numbers have other keys (`OTHER_NAMES`), because they are not FID; `label` is "FID", "FID@N", "FD-NAME"
        or "FD-NAME@N".
    """
    network = make_extractor(extractor, inception_weights).eval()
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not isinstance(reference, Reference):
        reference = Reference(reference)
    images = open_images(generated, "generated")
    dims = None
    if images.count:  # an iterator can be read once
        with torch.no_grad():
            dims = network.to(device)(next(images.batches(2))[1].to(device)).pooled.shape[1]
    reference.check(network, dims, images.count, allow_biased, images.channels)
    real = reference.read(network, batch_size, device)
    compared = real.features is not None  # else no score needs features themselves
    fake = statistics_of(images, network, batch_size, device, "generated", compared)
    notes = list(getattr(images, "remarks", ()))
    if reference.images is not None:
        notes += getattr(reference.images, "remarks", ())
    how = fake, reference, network, device, allow_biased, notes
    return on_all(lambda: _numbers(*how) if place()[0] == 0 else None)[0]


def _numbers(
    fake: Statistics,
    reference: Reference,
    network: Extractor,
    device: torch.device,
    allow_biased: bool,
    notes: list[str],
) -> dict:
    real, dims = reference.statistics, len(fake.pooled[0])
    reference.check(network, dims, fake.count, allow_biased)
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
        title = TITLES["inception_score" if network.published else "class_score"]
        notes += [f"{title}: {note}" for note in fake.classes.notes]
    if real.features is None:
        why = f"{real.source} holds statistics only, no images (arr_0)"
        missing.update(kid=why, precision=why, recall=why)
    else:
        values["kid"] = kernel_distance(fake.features, real.features)
        values["precision"], values["recall"] = precision_recall(
            fake.features, real.features, device
        )
    if real.size and tuple(real.size) != fake.size:
        one, two = ("{1} x {0}".format(*size) for size in (fake.size, real.size))
        notes.append(f"the generated images have {one} pixels, those of {real.source} {two}")
    notes += _compression(fake, real)
    label = "FID"
    if not network.published:
        label = f"FD-{network.name}"
        values, missing = (
            {OTHER_NAMES.get(k, k): v for k, v in numbers.items()} for numbers in (values, missing)
        )
    fewest = min(fake.count, real.count or fake.count)
    label = label if fewest > dims else f"{label}@{fewest}"
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


def _compression(fake: Statistics, real: Statistics) -> list[str]:
    """Return a note if one of the sets alone may be compressed."""
    made, compared = (set(one.formats or ()) for one in (fake, real))
    if not {*made, *compared} & set(LOSSY) or made == compared:
        return []
    found = []
    if made:
        found.append(f"the generated images are {_counted(fake.formats)}")
    if compared:
        found.append(f"those of {real.source} {'' if made else 'are '}{_counted(real.formats)}")
    return [
        f"{', '.join(found)}; the scores see compression as a difference between the sets: PNG has none"
    ]


def _counted(formats: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in formats.items())


def table(result: dict, generated: str, reference: str) -> str:
    """Format the result of `score`: a line per number, reasons for missing ones, and notes."""
    count, label, sha256 = (result[name] for name in ("num_reference", "label", "reference_sha256"))
    lines = [
        f"{result['num_generated']} images of {generated} against {'an unknown number' if count is None else count} of {reference}"
        + (f" (sha256 {sha256[:12]})" if sha256 else ""),
        f"{result['extractor']}, weights sha256 {(result['weights_sha256'] or 'unknown')[:12]}, label {label}",
    ]
    few = f"@{min(result['num_generated'], count or result['num_generated'])}"
    biased = few if label.endswith(few) else ""
    for name, title in TITLES.items():
        if name not in result:
            continue
        value = result[name]
        if value is None:
            text = f"-   ({result['missing'].get(name, 'not computed')})"
        elif name in ("inception_score", "class_score"):
            text = f"{value:.3f} +- {result[name + '_std']:.3f}"
        else:
            text = f"{value:.5f}" if name in ("kid", "kernel_distance") else f"{value:.4f}"
        first = title + biased if name in ("fid", "fd") else title
        lines.append(f"{first:24}{text}")
    return "\n".join([*lines, *(f"note: {note}" for note in result["notes"])])
