"""Executors compute equation (*) in three steps, `project`, `attend`, `combine`. Each gives the results of `Reference`.

These compute all heads:

    Reference       the oracle: equation (*) as a loop over heads
    Masked          one fused attention call
    Unfused         step by step, with attention matrices that hooks can read

These skip heads:

    Sequences       for one choice per sequence, on any device: products with the weights of the heads that run
    WholeSequences  for one choice per sequence, in float32: everything by the C++ operators
    InPlace         for one choice per token or sequence: products of all heads; attention of the (head, token) pairs that
                    run, by Triton, or in 16 bits by C++
    Tokens          for one choice per token or sequence, in float32: the C++ operators skip products too

A user names one of EXECUTORS. "packed" is the first of the last four that can run a call. A layer lists them in the order of
trial (`skipping_executors`), each one says why it cannot run calls with a `Signature` (`why_not`), and `plan.plan_call` picks
one for each signature.
"""

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
]
