"""moh_vision: attention heads as experts. Importing it registers the models with timm."""

import moh_vision.language  # noqa: F401  registers its converter
import moh_vision.models  # noqa: F401  registers
from moh_vision.attention import head_budget
from moh_vision.attention.measure import measure
from moh_vision.engine.io import __version__
from moh_vision.models.convert import convert
from moh_vision.models.head_budgets import set_head_budget
from moh_vision.models.registry import register
from moh_vision.models.weights import load_checkpoint, load_run

register("calibration", "classifier", "moh_vision.classification.calibration:open_calibration")
register("prepared", "classifier", "moh_vision.classification.prepared:prepared_as_trained")
register("image", "classifier", "moh_vision.classification.one_image:open_image")
register("calibration", "diffusion", "moh_vision.diffusion.calibration:open_calibration")
register("scores", "classifier", "moh_vision.classification.calibration:open_scored")
register("scores", "diffusion", "moh_vision.diffusion.calibration:open_scored")

__all__ = ["__version__", "convert", "head_budget", "load_checkpoint", "load_run", "measure", "set_head_budget"]
