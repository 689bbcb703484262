"""What decides the bits of attention beside the weights: the operators' path, and the table of `auto`.

A training run keeps both from its start to its end, see `engine/attention_record.py`.
"""

from moh_vision.attention.executors.auto import table, use_table
from moh_vision.attention.executors.limits import processor
from moh_vision.attention.kernels.build import PATHS, about, path, use

__all__ = ["PATHS", "about", "path", "processor", "table", "use", "use_table"]
