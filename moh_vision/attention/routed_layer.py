"""`RoutedLayer`: what attention and the MLP of groups have in common."""

from functools import cached_property
from typing import Any

from torch import nn

from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.executors import Executor
from moh_vision.attention.executors.plan import Plan, Plans, plan_call
from moh_vision.attention.routers.base import Router
from moh_vision.attention.routing import Call, RoutingForm


class RoutedLayer(nn.Module):
    """A layer whose router chooses and weighs its parts, and whose executors leave out what was not chosen.

    The parts are heads of attention or groups of an MLP's hidden channels. Routers, budgets and executors call both heads.

    Attributes:
        dim: C, width of the tokens.
        num_heads, head_dim: H parts, each D wide.
        kv_heads: G, key-value heads; H in an MLP.
        q_dim: H * D.
        router: chooses the parts.
        scope: "token" or "sample".
        executor: a name in EXECUTORS, or a class.
        qk_norm: whether queries and keys are normalised.
        fused_attn: False: `unfused_executor` takes every call.
    """

    dim: int
    num_heads: int
    head_dim: int
    kv_heads: int
    q_dim: int
    router: Router
    scope: str
    executor: str | type[Executor]
    qk_norm = False
    fused_attn = True

    # Tried in this order by the executors "auto" and "packed", see `plan_call`.
    skipping_executors: tuple[type[Executor], ...]
    all_heads_executor: type[Executor]  # "masked", and wherever nothing is skipped
    unfused_executor: type[Executor]  # where `fused_attn` is False
    reference_executor: type[Executor]  # "reference", the oracle of the tests
    # A word for options of a subclass that change the time of a call; measurements are looked up by it, see `signature.words`.
    variant = ""

    @property
    def budget(self) -> HeadBudget:
        """The budget of the router, which `set_budgets` changes."""
        return self.router.budget

    @property
    def chooses_once(self) -> bool:
        """Whether all tokens of a sequence share one choice."""
        return self.scope == "sample" or self.router.choice == "sequence"

    @cached_property
    def plans(self) -> Plans:
        """How calls are computed, by signature; see `plan_call`."""
        return Plans()

    def plan(self, call: Call, form: RoutingForm | None = None) -> Plan:
        """Return how a call is computed; `form` is that of its routing, if it is not yet routed."""
        return plan_call(self, call, form)

    def make_executor(self, call: Call, *more: Any) -> Executor:
        """Return the executor of a call.

        Args:
            call: the call, after routing.
            *more: further arguments of the layer's executors.
        """
        plan = call.plan
        if plan is None:
            plan = self.plan(call)
        return plan.executor(self, call, plan.prepared, *more)

    def joint_weight(self) -> nn.Parameter | None:
        """Return the weight by which one product gives queries, keys and values; None: there is none that may be read."""
        return None


def routed_layers(model: nn.Module) -> list[RoutedLayer]:
    """Return every routed layer of a model, attention and MLPs, in the order of `model.modules()`."""
    return [module for module in model.modules() if isinstance(module, RoutedLayer)]
