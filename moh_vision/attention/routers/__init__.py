"""Routers: `router(x, q=None, padding_mask=None) -> Routing`. A new one is a class in a file here and a line in ROUTERS.

A router knows nothing of attention kernels; it looks at tokens and says which heads run and with what weight.
    x             tokens [B, N, C]
    q             queries [B, H, N, D] as projected, where the router has `needs_query`
    padding_mask  [B, N], True at padding, which is left out of statistics (and of pooling)
"""

from typing import Callable, Dict

from torch import nn

from moh_vision.attention.routers.dense import DenseRouter
from moh_vision.attention.routers.moh import MoHRouter

ROUTERS: Dict[str, Callable[..., nn.Module]] = {
    "moh": MoHRouter,
    "dense": DenseRouter,
}
