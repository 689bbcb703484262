"""The result of `score` as text."""

from __future__ import annotations

TITLES = dict(
    fid="FID", fd="FD", sfid="sFID", spatial_fd="spatial FD", inception_score="inception score", class_score="class score",
    kid="KID", kernel_distance="kernel distance", precision="precision", recall="recall",
)  # fmt: skip


def table(result: dict, generated: str, reference: str) -> str:
    """Format a line per number, reasons for missing ones, and notes."""
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
