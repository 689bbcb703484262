"""moh_vision: attention heads as experts. Importing it registers the models with timm."""

from typing import TYPE_CHECKING

import moh_vision.language  # noqa: F401  adds its converter
from moh_vision.attention import head_budget
from moh_vision.attention.measure import measure
from moh_vision.common.io import __version__
from moh_vision.models.convert import convert
from moh_vision.models.head_budgets import set_head_budget
from moh_vision.models.weights import load_checkpoint

if TYPE_CHECKING:
    from moh_vision.opening import load_run, open_run

__all__ = [
    "__version__",
    "convert",
    "head_budget",
    "load_checkpoint",
    "load_run",
    "measure",
    "open_run",
    "set_head_budget",
]


def __getattr__(name: str):
    if name in ("load_run", "open_run"):  # imports accelerate
        from moh_vision import opening

        return getattr(opening, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
