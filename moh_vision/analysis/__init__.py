"""What the heads do: load per layer, class and text, descriptions, figures."""

from moh_vision.analysis.counting import count_macs
from moh_vision.analysis.describe import describe, in_short
from moh_vision.analysis.loads import HeadLoad

__all__ = ["HeadLoad", "count_macs", "describe", "in_short"]
