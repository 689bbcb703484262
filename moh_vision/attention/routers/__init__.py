"""Routers: `router(x, q=None, padding_mask=None) -> Routing`. A new one is a class in a file here and a line in ROUTERS.

A router knows nothing of attention kernels. It reads tokens, and answers which heads run and with what weight. `Router`, in
base.py, lists what it says of itself; `TopKRouter`, in common.py, is the base of routers whose tokens choose their best heads.
"""

from moh_vision.attention.budget import ACTIVE_SHARE, SHARED_SHARE
from moh_vision.attention.routers.base import Router
from moh_vision.attention.routers.dense import DenseRouter
from moh_vision.attention.routers.gated import GatedRouter
from moh_vision.attention.routers.mae import MAERouter
from moh_vision.attention.routers.moa import MoARouter
from moh_vision.attention.routers.moh import MoHRouter
from moh_vision.attention.routers.query_norm import QueryNormRouter

ROUTERS: dict[str, type[Router]] = {
    "moh": MoHRouter,
    "query_norm": QueryNormRouter,
    "moa": MoARouter,
    "mae": MAERouter,
    "gated": GatedRouter,
    "dense": DenseRouter,
}


def router_class(name: str) -> type[Router]:
    """Return the class of a router by its name in ROUTERS."""
    if name not in ROUTERS:
        known = ", ".join(sorted(ROUTERS))
        raise ValueError(
            f"router {name!r} is not one of {known}; one of your own is known where its file is imported first, as by --imports FILE"
        )
    found = ROUTERS[name]
    if not issubclass(found, Router):
        raise ValueError(
            f"router {name!r}: {found.__name__} is not derived from moh_vision.attention.Router"
        )
    return found


def name_of(router: Router) -> str:
    """Return the name of a router in ROUTERS; that of its class, if it is not registered."""
    for name, registered in ROUTERS.items():
        if registered is type(router):
            return name
    return type(router).__name__


def default_budget(router: str | None) -> float | None:
    """Return the head_budget for models with this router whose user gives none.

    None: the router runs all heads and takes no head_budget; all heads count as shared. An unknown router gets the usual
    share here, because the layer is what refuses it.
    """
    if router in ROUTERS and ROUTERS[router].all_heads:
        return None
    return ACTIVE_SHARE


def is_plain(router: str | None) -> bool:
    """Return whether the name of a router is that of plain attention; an unknown name is not."""
    return router in ROUTERS and ROUTERS[router].plain_attention


def choosing_and_all() -> str:
    """Return a sentence with the names of the routers that choose heads, and of those that run all."""
    choosing = [name for name, chooser in ROUTERS.items() if not chooser.all_heads]
    all_heads = [name for name, chooser in ROUTERS.items() if chooser.all_heads]
    return f"{_listed(choosing, 'or')} choose; {_listed(all_heads, 'and')} run all and take no head_budget."


def _listed(names: list[str], last: str) -> str:
    """Join names: "a, b or c"."""
    *first, end = names
    if not first:
        return end
    return f"{', '.join(first)} {last} {end}"


def with_loss(aux_loss: str) -> list[str]:
    """Return the names of the routers that have these auxiliary losses, see `Router.aux_loss`."""
    return [name for name, chooser in ROUTERS.items() if chooser.aux_loss == aux_loss]


def shared_share(router: str | None) -> float:
    """Return the share of shared heads among the active ones for budgets that do not give it, see `resolve_budget`."""
    if router in ROUTERS:
        return ROUTERS[router].shared_share
    return SHARED_SHARE
