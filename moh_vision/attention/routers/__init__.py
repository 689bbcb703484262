"""Routers: `router(x, q=None, padding_mask=None) -> Routing`. A new one is a class in a file here and a line in ROUTERS.

A router knows nothing of attention kernels. It reads tokens, and answers which heads run and with what weight.
    x             tokens [B, N, C]
    q             queries [B, H, N, D] as projected, if the router has `needs_query`
    padding_mask  [B, N], True at padding, which is left out of statistics (and of pooling)

A router has five attributes. `TopKRouter`, the base of routers whose tokens choose their best heads, has values for all:
    budget        the HeadBudget of the constructor, or the one that `set_budgets` set later
    needs_query   whether it reads queries; the layer then projects the queries of all heads before it calls the router
    reads         what a choice depends on. "token": one token. "sequence": all tokens, which get one choice; a causal layer
                  refuses it. "earlier": a token and those before it; such a router has
                  `resume(x, padding_mask, state) -> (Routing, state)`, which continues after an earlier call. The state
                  is None before the first token, then tensors [B, ..]
    all_heads     whether any head may run for any token, so that no budget may leave heads out
    aux_loss      the auxiliary losses for its training: those of "moh", of "moa", or "" for none
Routers that can have shared heads have a sixth:
    shared_share  share of shared heads among the active ones, for budgets that do not give it
"""

from torch import nn

from moh_vision.attention.budget import ACTIVE_SHARE, SHARED_SHARE
from moh_vision.attention.routers.dense import DenseRouter
from moh_vision.attention.routers.gated import GatedRouter
from moh_vision.attention.routers.mae import MAERouter
from moh_vision.attention.routers.moa import MoARouter
from moh_vision.attention.routers.moh import MoHRouter
from moh_vision.attention.routers.query_norm import QueryNormRouter

ROUTERS: dict[str, type[nn.Module]] = {
    "moh": MoHRouter,
    "query_norm": QueryNormRouter,
    "moa": MoARouter,
    "mae": MAERouter,
    "gated": GatedRouter,
    "dense": DenseRouter,
}


def default_budget(router: str | None) -> float | None:
    """Return the head_budget for models with this router whose user gives none.

    None: the router runs all heads and takes no head_budget; all heads count as shared. An unknown router gets the usual
    share here, because the layer is what refuses it.
    """
    if router in ROUTERS and ROUTERS[router].all_heads:
        return None
    return ACTIVE_SHARE


def shared_share(router: str | None) -> float:
    """Return the share of shared heads among the active ones for budgets that do not give it, see `resolve_budget`."""
    return getattr(ROUTERS.get(router), "shared_share", SHARED_SHARE)
