"""Executors: one function each, one signature (`masked` documents it), all equal to `reference`.

An executor owns the query projection, the attention and the output projection, because those are what routing
lets it skip. It knows nothing of papers.
"""

from moh_vision.attention.executors.masked import masked
from moh_vision.attention.executors.reference import reference

EXECUTORS = {
    "reference": reference,
    "masked": masked,
    "auto": masked,  # the only fast one so far
}
NEEDS_ALL_QUERIES = ("masked", "auto")  # the layer then projects Q, K and V in one matrix product

__all__ = ["EXECUTORS", "NEEDS_ALL_QUERIES", "masked", "reference"]
