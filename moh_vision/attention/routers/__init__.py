"""Routers: `router(x, q=None, padding_mask=None) -> Routing`. A new one is a class in a file here and a line in ROUTERS.

A router knows nothing of attention kernels; it looks at tokens and says which heads run and with what weight.
    x             tokens [B, N, C]
    q             queries [B, H, N, D] as projected, where the router has `needs_query`
    padding_mask  [B, N], True at padding, which is left out of statistics (and of pooling)

A router says five things of itself (`TopKRouter` says all of them where each token chooses its best heads):
    budget        the HeadBudget that it was made with, or that `set_budgets` gave it since
    needs_query   whether it looks at queries; the layer then projects them for all heads first
    reads         "token": a token is routed by itself alone; "earlier": by itself and the tokens before it, and
                  `resume(x, padding_mask, state) -> (Routing, state)` goes on where an earlier call ended, the state
                  being tensors [B, ..] or, before the first token, None; "sequence": one choice from all tokens
    all_heads     whether any head may run for any token, so that a budget that leaves heads out makes no sense
    aux_loss      whose auxiliary losses it is trained with: "moh", "moa", or "" for none
and one whose heads may be shared a sixth:
    shared_share  share of shared heads among the active ones where a budget does not say
"""

from torch import nn

from moh_vision.attention.budget import ACTIVE_SHARE, SHARED_SHARE
from moh_vision.attention.routers.dense import DenseRouter
from moh_vision.attention.routers.mae import MAERouter
from moh_vision.attention.routers.moa import MoARouter
from moh_vision.attention.routers.moh import MoHRouter
from moh_vision.attention.routers.query_norm import QueryNormRouter

ROUTERS: dict[str, type[nn.Module]] = {
    "moh": MoHRouter,
    "query_norm": QueryNormRouter,
    "moa": MoARouter,
    "mae": MAERouter,
    "dense": DenseRouter,
}


def default_budget(router: str | None) -> float | None:
    """Return the head_budget of a model with this router where none is given.

    None: the router runs all heads, takes no head_budget, and all heads count as shared. A router that is not known
    has the share of the others; the layer refuses it.
    """
    if router in ROUTERS and ROUTERS[router].all_heads:
        return None
    return ACTIVE_SHARE


def shared_share(router: str | None) -> float:
    """Return the share of shared heads among the active ones where a budget does not say it, for `resolve_budget`."""
    return getattr(ROUTERS.get(router), "shared_share", SHARED_SHARE)
