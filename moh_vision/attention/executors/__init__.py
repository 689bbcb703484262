"""Executors do the work of equation (*) in three steps, `project`, `attend`, `combine`, and all equal `Reference`.

    Reference       the oracle: equation (*) as a loop over heads
    Masked          all heads, by one fused call
    Unfused         all heads, with attention matrices that hooks can read
    Sequences       whole heads of every sequence, on any device: products with the weights of these heads alone
    WholeSequences  the same in float32, all by the C++ operators
    InPlace         the pairs of heads and tokens that run: attention alone, by Triton, or in 16 bits by C++
    Tokens          the same in float32 by the C++ operators: products too

A user names one of EXECUTORS. "packed" is whichever of the last four takes a call; a layer lists them in the order of
trial, each says itself why it cannot (`why_not`), and `choice.select_executor` picks.
"""

from moh_vision.attention.executors.choice import select_executor
from moh_vision.attention.executors.executor import Executor
from moh_vision.attention.executors.in_place import InPlace
from moh_vision.attention.executors.masked import Masked, Unfused
from moh_vision.attention.executors.reference import Reference
from moh_vision.attention.executors.sequences import Sequences
from moh_vision.attention.executors.tokens import Tokens
from moh_vision.attention.executors.whole_sequences import WholeSequences

EXECUTORS = ("auto", "masked", "packed", "reference")

__all__ = [
    "EXECUTORS",
    "Executor",
    "InPlace",
    "Masked",
    "Reference",
    "Sequences",
    "Tokens",
    "Unfused",
    "WholeSequences",
    "select_executor",
]
