"""moh_vision: attention heads as experts. Importing it registers the models with timm."""

import moh_vision.models  # noqa: F401  registers
from moh_vision.attention import head_budget

__version__ = "0.1.0"
__all__ = ["head_budget"]
