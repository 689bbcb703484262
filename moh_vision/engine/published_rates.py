"""Training speeds that others published, by which `--estimate` says what a run would take on their cards."""

from collections.abc import Sequence
from typing import NamedTuple


class PublishedRate(NamedTuple):
    """How fast a model was trained elsewhere.

    Attributes:
        model: its name.
        macs: multiply-accumulates of one forward of one image.
        cards: on which it was trained.
        images: training images a second, on all cards together.
        setting: the precision, and what else decides about the speed.
        source: who measured it, and where it stands.
    """

    model: str
    macs: float
    cards: str
    images: float
    setting: str
    source: str


CLASSIFICATION = (
    PublishedRate("ViT-S/16", 4.6e9, "1 RTX 3090", 1058, "AMP", "timm's results, torch 1.12"),
    PublishedRate("ViT-B/16", 17.6e9, "1 RTX 3090", 393, "AMP", "timm's results, torch 1.12"),
)
# DiT-XL/2 at 256 pixels; issue 22 gives 0.81 steps of 256 images a second, fast-DiT 0.84 of 128, OpenDiT 1.3 of 1,024.
DIFFUSION = (
    PublishedRate(
        "DiT-XL/2", 118.6e9, "8 A100", 207, "TF32, with the VAE", "facebookresearch/DiT, issue 22"
    ),
    PublishedRate(
        "DiT-XL/2", 118.6e9, "1 A100", 108, "fp16, latents, checkpointing", "fast-DiT, README"
    ),
    PublishedRate("DiT-XL/2", 118.6e9, "8 H800", 1331, "latents", "OpenDiT, its page on speed"),
)
LEAST_HOURS = 0.1  # nobody rents a card for less, and small models do not reach these rates


def rows_of_rates(
    rates: Sequence[PublishedRate], images: int, macs: int
) -> list[tuple[str, str, str]]:
    """Return rows for the table of `--estimate`: hours of a run that does as many MACs a second as a published one.

    A rate at which the run takes less than LEAST_HOURS has no row.

    Args:
        rates: the published speeds.
        images: training images of the whole run, repeated ones each time.
        macs: multiply-accumulates of one forward of one image, without those of teachers.
    """
    rows = []
    for rate in rates:
        hours = images * macs / (rate.images * rate.macs) / 3600
        if hours < LEAST_HOURS:
            continue
        said = f"by MACs, if as fast as {rate.model}: {rate.images:,} img/s, {rate.setting} ({rate.source})"
        # Three digits, such as 4,520: more would be made up.
        rows.append((f"  {rate.cards}", f"{float(f'{hours:.3g}'):,g} h", said))
    return rows
