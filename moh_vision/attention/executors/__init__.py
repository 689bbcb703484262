"""Executors: one function each, one signature (`masked` documents it), all equal to `reference`.

An executor is given the layer, for its projections, and the routing, and owns everything that routing lets it skip:
queries, keys, values, attention and the output projection. It knows nothing of papers.
"""

from moh_vision.attention.executors.auto import auto, choose
from moh_vision.attention.executors.masked import masked
from moh_vision.attention.executors.packed import packed
from moh_vision.attention.executors.reference import reference

EXECUTORS = {
    "reference": reference,
    "masked": masked,
    "packed": packed,
    "auto": auto,
}

__all__ = ["EXECUTORS", "auto", "choose", "masked", "packed", "reference"]
