"""The result of `score` as text."""

from __future__ import annotations

TITLES = dict(
    fid="FID", sfid="sFID", inception_score="inception score", kid="KID", precision="precision", recall="recall",
    fd="FD", spatial_fd="spatial FD", class_score="class score", kernel_distance="kernel distance",
)  # fmt: skip


def table(result: dict, generated: str, reference: str) -> str:
    """One line a number, with what it is of, and why one is missing."""
    count = result["num_reference"]
    lines = [
        f"{result['num_generated']} images of {generated} against {'an unknown number' if count is None else count} of {reference}",
        f"{result['extractor']}, weights sha256 {(result['weights_sha256'] or 'unknown')[:12]}, label {result['label']}",
    ]
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
        first = result["label"] if name in ("fid", "fd") else title
        lines.append(f"{first:24}{text}")
    return "\n".join(lines)
