"""`GroupMixtureMlp`: a router and an executor around one MLP, whose hidden channels form groups."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.types import Device

from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.executors import EXECUTORS
from moh_vision.attention.executors.groups import (
    AllGroups,
    GroupPairs,
    GroupsOfSequences,
    ReferenceGroups,
)
from moh_vision.attention.routed_layer import RoutedLayer
from moh_vision.attention.routers import ROUTERS, router_class
from moh_vision.attention.routers.common import route_sequences
from moh_vision.attention.routing import Call, Routing, RoutingStats

PER_TOKEN = (
    "groups of an MLP are chosen for whole sequences: with a choice for every token each row of the products would have "
    "another weight, which takes longer than all groups; give scope 'sample'"
)


class GroupMixtureMlp(RoutedLayer):
    """A transformer's MLP in which a router chooses and weighs groups of hidden channels, once for a sequence.

        y = b_2 + sum over groups g of w_g(c) * W2_g act(W1_g x + b1_g)

    This is equation (*) of the heads (see `moh_vision.attention`) without attention: group g is the hidden channels
    g * D .. (g + 1) * D - 1, and w_g comes from the routers of attention. DyDiT (Zhao 2024, arXiv 2410.03456) chooses groups
    of the MLP by timestep. With every group active and the router's weights zero it is the dense MLP.

    Args:
        dim: C, width of the tokens.
        budget: groups and their width D, as heads and `head_dim`; how many of them are shared and routed.
        router: "moh", "moa" or "dense": a router that reads one vector and no queries.
        scope: "sample": one choice for a sequence, from the `condition` that the caller gives, else from the mean token.
            "token" is refused.
        executor: a name in EXECUTORS.
        act_layer: the activation.
        bias: whether both linear layers have one.
        drop: dropout of the hidden channels and of the output; two numbers, as in timm's Mlp, or one for both.
        router_kwargs: options of the router.

    Parameters: fc1.weight [G * D, C], fc1.bias, fc2.weight [C, G * D] and fc2.bias, as in timm's Mlp; router.*.
    """

    skipping_executors = (GroupPairs, GroupsOfSequences)
    all_heads_executor = unfused_executor = AllGroups
    reference_executor = ReferenceGroups

    def __init__(  # noqa: PLR0913
        self,
        dim: int,
        budget: HeadBudget,
        router: str = "moh",
        scope: str = "sample",
        executor: str = "auto",
        act_layer: Callable[[], nn.Module] = nn.GELU,
        bias: bool = True,
        drop: float | tuple[float, float] = 0.0,
        router_kwargs: dict | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if scope != "sample":
            raise ValueError(f"scope {scope!r}: {PER_TOKEN}")
        if executor not in EXECUTORS:
            raise ValueError(f"executor {executor!r} is not one of {', '.join(sorted(EXECUTORS))}")
        chooser = router_class(router)
        if not chooser.chooses_from_a_vector():
            allowed = [name for name, cls in ROUTERS.items() if cls.chooses_from_a_vector()]
            raise ValueError(
                f"router {router!r} cannot choose groups of an MLP: give one of {', '.join(allowed)}"
            )
        dd = {"device": device, "dtype": dtype}
        self.dim = dim
        self.num_heads = budget.heads
        self.kv_heads = budget.heads
        self.head_dim = budget.head_dim
        self.q_dim = budget.heads * budget.head_dim
        self.scope = scope
        self.executor = executor
        self.fc1 = nn.Linear(dim, self.q_dim, bias=bias, **dd)
        self.act = act_layer()
        hidden_drop, output_drop = drop if isinstance(drop, tuple) else (drop, drop)
        self.drop1 = nn.Dropout(hidden_drop)
        self.fc2 = nn.Linear(self.q_dim, dim, bias=bias, **dd)
        self.drop2 = nn.Dropout(output_drop)
        self.router_kwargs = dict(router_kwargs or {})
        self.router = chooser(dim, budget, **self.router_kwargs, **dd)

    @property
    def projections(self) -> tuple[nn.Module, ...]:
        """The modules whose weights are read by executors that skip groups."""
        return self.fc1, self.fc2

    def forward(
        self, x: Tensor, condition: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, RoutingStats]:
        """Apply the MLP to every token.

        Args:
            x: tokens [B, N, C].
            condition: [B, C], what the router reads instead of the mean token. [C]: one choice for all sequences, whose
                statistics count as those of B.
            padding_mask: [B, N], True at padding, which is left out of the mean token.

        Returns:
            y [B, N, C] and the routing statistics.
        """
        routing = self.route(x, condition, padding_mask)
        executor = self.make_executor(Call(x, routing))
        hidden = executor.project()
        hidden = self.drop1(self.act(hidden))
        y = executor.combine(hidden)
        return self.drop2(y), routing.stats

    if TYPE_CHECKING:
        __call__ = forward  # nn.Module's own says nothing of types

    def route(
        self, x: Tensor, condition: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Routing:
        """Call the router for sequences x [B, N, C]; see `forward`."""
        return route_sequences(self.router, x, condition, padding_mask)

    def extra_repr(self) -> str:
        b = self.budget
        return f"{b.active} of {b.heads} groups of width {b.head_dim} active ({b.shared} shared + {b.routed} routed)"
