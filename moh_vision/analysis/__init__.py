"""What the heads do: load per layer, class and text, descriptions, figures."""

from moh_vision.analysis.describe import describe
from moh_vision.analysis.loads import HeadLoad

__all__ = ["HeadLoad", "describe"]
