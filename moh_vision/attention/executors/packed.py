"""Only the heads that run, in plain PyTorch."""

from typing import Optional

from torch import Tensor

from moh_vision.attention.executors.masked import autocast, is_short, masked
from moh_vision.attention.executors.samples import by_sample
from moh_vision.attention.executors.tokens import by_token
from moh_vision.attention.linear import plain
from moh_vision.attention.routing import Call


def packed(call: Call, sparse: Optional[bool] = None) -> Tensor:
    """Compute what runs and nothing else. It can be differentiated twice wherever torch's attention can.

    It reads the weights of layer.projections; where these carry hooks or are not plain linear layers (an adapter,
    pruning, offloading), it is `masked`, which calls them.

    Args:
        sparse: the form of the projections where heads are chosen per token (see `tokens`); None: by dtype and share.
    """
    layer, x, active = call.layer, call.x, call.routing.active
    if active is None or x.numel() == 0 or not all(map(plain, layer.projections)):
        return masked(call)
    if active.shape[1] == 1 and call.cache is None:
        count = active.sum(-1)
        if bool((count == count[0]).all()) and bool(count[0] > 0):
            return by_sample(call)
    if sparse is None:
        # Measured (benchmarks/attention.py): narrow products cost little in float32 and much in 16 bits.
        share = 0.2 if is_short(autocast(x[:1]).dtype) else 0.6
        sparse = layer.budget.routed <= share * layer.budget.candidates
    return by_token(call, sparse)
