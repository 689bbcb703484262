"""What a diffusion run draws while it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional

from moh_vision.config.checks import check


@dataclass
class DrawConfig:
    """How samples are drawn while a diffusion model trains: always of the same noise and labels, with the EMA if any.

    Args:
        every: steps between them; 0: never.
        images: how many; image i has class i modulo the number of classes.
        sampler: as in sample.py.
        steps: denoising steps.
        cfg_scale: classifier-free guidance; 1: none.
        seed: of the noise.
    """

    every: int = 0
    images: int = 40
    sampler: Literal["ddpm", "ddim", "dpm-solver++"] = "ddim"
    steps: int = 50
    cfg_scale: float = 1.5
    seed: int = 0

    section = "preview"

    def __post_init__(self):
        check(f"{self.section}.every", self.every, self.every >= 0, "0 or more")
        check(f"{self.section}.images", self.images, self.images >= 1, "at least 1")
        check(f"{self.section}.steps", self.steps, 1 <= self.steps <= 1000, "1 to 1000")
        check(f"{self.section}.cfg_scale", self.cfg_scale, self.cfg_scale >= 0, "0 or more")
        check(f"{self.section}.seed", self.seed, 0 <= self.seed < 2**63, "0 to 2**63 - 1")


@dataclass
class PreviewConfig(DrawConfig):
    """Pictures: OUTPUT/previews/step_N.png.

    Args:
        columns: images a row.
    """

    columns: int = 10

    def __post_init__(self):
        super().__post_init__()
        check("preview.columns", self.columns, self.columns >= 1, "at least 1")


@dataclass
class ScoreConfig(DrawConfig):
    """Fidelity scores while training, into metrics.jsonl; see docs/fidelity.md.

    Args:
        reference: what samples are compared with, as `score` of sample.py; left out: data.root.
        split: split of a data set: "train" (the default) or "val".
        extractor: "inception", "timm:NAME", or a classification run.
        inception_weights: torch-fidelity's .pth file; left out: fetched once.
        allow_biased: also with no more images than features, labelled FID@N.
    """

    images: int = 5000
    cfg_scale: float = 1.0
    reference: Optional[str] = None
    split: Optional[Literal["train", "val"]] = None
    extractor: str = "inception"
    inception_weights: Optional[str] = None
    allow_biased: bool = False

    section = "score"

    def scoring(self, root: str) -> dict:
        """Keyword arguments of `sample_scores.make_judge`; `root` is the reference if none is given."""
        return dict(
            key="score.reference", reference=self.reference or root, split=self.split, default_split="train",
            extractor=self.extractor, inception_weights=self.inception_weights, allow_biased=self.allow_biased,
            num_images=self.images,
        )  # fmt: skip
