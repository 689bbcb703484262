"""Executors do the work of equation (*) in three steps, `project`, `attend`, `combine`, and all equal `Reference`.

    Masked          all heads, by one fused call
    Sequences       whole heads of every sequence, on any device: products with the weights of these heads alone
    WholeSequences  the same in float32, all by the C++ operators
    Tokens          the pairs of heads and tokens that run, by the C++ operators
    OnGpu           the same by Triton: attention alone
    Unfused, Reference   all heads, step by step

A user names one of EXECUTORS. "packed" is whichever of the four that skip heads takes a call, see `choose`.
"""

from moh_vision.attention.executors.choice import choose
from moh_vision.attention.executors.masked import Masked

EXECUTORS = ("auto", "masked", "packed", "reference")

__all__ = ["EXECUTORS", "Masked", "choose"]
