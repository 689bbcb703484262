"""What decides the bits of attention beside the weights: the operators' path, and the table of `auto`.

A training run keeps both from its start to its end, see `engine/attention_record.py`.
"""

from moh_vision.attention.executors.measured import off, processor, use_table
from moh_vision.attention.kernels.build import PATHS, about, path, use
from moh_vision.attention.measure import collect, measured_table

__all__ = [
    "PATHS",
    "about",
    "collect",
    "measured_table",
    "off",
    "path",
    "processor",
    "use",
    "use_table",
]
