"""Executors: functions from queries, keys and values of all heads to their weighted outputs, all equal to `reference`.

    executor(q [B, H, N, D], k [B, G, M, D], v, routing, attn_mask=None, is_causal=False, dropout_p=0.0) -> o [B, N, H * D]

The layer projects before and after. Where "packed" can leave out projections too the layer does so itself, see
`HeadMixtureAttention.packed`.
"""

from typing import Callable, Dict, Optional

from torch import Tensor

from moh_vision.attention.executors.auto import announce, choose
from moh_vision.attention.executors.decode import attend_chosen, decode
from moh_vision.attention.executors.masked import masked
from moh_vision.attention.executors.packed import packed
from moh_vision.attention.executors.reference import reference
from moh_vision.attention.executors.varlen import varlen

EXECUTORS: Dict[str, Optional[Callable[..., Tensor]]] = {
    "reference": reference,
    "masked": masked,
    "packed": packed,
    "varlen": varlen,
    "decode": decode,
    "auto": None,  # one of the others, which `choose` names for every call
}

__all__ = ["EXECUTORS", "announce", "attend_chosen", "choose", "decode", "masked", "packed", "reference", "varlen"]
