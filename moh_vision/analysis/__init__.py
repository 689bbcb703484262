"""What the heads do: load per layer and class, descriptions, figures."""

from moh_vision.analysis.describe import describe
from moh_vision.analysis.head_load import HeadLoad

__all__ = ["HeadLoad", "describe"]
