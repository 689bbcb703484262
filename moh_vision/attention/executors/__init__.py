"""Executors: functions of one `Call` (see `routing`), all equal to `reference`.

A call holds the layer, for its projections, and the routing; an executor owns everything that routing lets it skip:
queries, keys, values, attention and the output projection. It knows nothing of papers.
"""

from moh_vision.attention.executors.auto import auto, choose
from moh_vision.attention.executors.decode import attend_chosen, decode
from moh_vision.attention.executors.masked import masked
from moh_vision.attention.executors.packed import packed
from moh_vision.attention.executors.reference import reference

EXECUTORS = {
    "reference": reference,
    "masked": masked,
    "packed": packed,
    "decode": decode,
    "auto": auto,
}

__all__ = ["EXECUTORS", "attend_chosen", "auto", "choose", "decode", "masked", "packed", "reference"]
