"""`Router`: the contract of all routers. What anybody asks of a router stands here, with a default.

A class attribute is a fact of all routers of a class, known before one is made; a constructor may set it for one router, as
MAE's does with `reads`. A method does what a layer, a model or a script wants done.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from moh_vision.attention.budget import SHARED_SHARE, HeadBudget
from moh_vision.attention.kernels.route import LinearRouter
from moh_vision.attention.routing import Routing

GIVEN_BY_LAYERS = ("self", "dim", "budget", "device", "dtype")  # arguments of every constructor


class Router(nn.Module):
    """Says which heads run and with what weight: `router(x, q=None, padding_mask=None) -> Routing`.

    A subclass has a constructor `(dim, budget, ..., device=None, dtype=None)` and a `forward`. All else has a default: of a
    router whose tokens choose by themselves, and that nothing but its layer knows how to use.

    Args:
        budget: heads of the layer. `set_budgets` may give another one later, which `fits`.
    """

    # ---- what it reads and who chooses; the layer refuses calls that do not go with it

    # What the choice for a token depends on. "token": this token. "earlier": this token and those before it; the router
    # then has `resume`. "sequence": all tokens; a causal layer and a layer with a cache refuse it.
    reads: str = "token"
    # Who chooses. "token": each token has its own heads, whatever it reads. "sequence": all tokens share one choice.
    choice: str = "token"
    # The scopes that a layer may have. With "sample" the router is called with one vector [B, 1, C] or [1, 1, C].
    scopes: Sequence[str] = ("token", "sample")
    # Whether it reads queries: the layer then projects the queries of all heads before it calls the router.
    needs_query: bool = False
    # Number of neighbouring heads that are chosen together.
    group: int = 1

    # ---- its budget

    # Whether any head may run for any token, so that no budget may leave heads out.
    all_heads: bool = False
    # Whether it is plain attention: every head runs for every token with weight 1, in training too.
    plain_attention: bool = False
    # Whether every token runs just as many heads as the budget says, so that heads can be gathered in an export.
    counted: bool = False
    # Share of shared heads among the active ones, for budgets that do not give it; 0: it has no shared heads.
    shared_share: float = SHARED_SHARE

    # ---- its training

    # The auxiliary losses: those of "moh", of "moa" (`moh_vision.attention.losses`), or "" for none.
    aux_loss: str = ""
    # Whether a model with it can be trained compiled.
    trains_compiled: bool = True

    # ---- its options

    # Options that follow from the layer, which users do not give; see `options_reading` and `group`.
    layer_options: Sequence[str] = ()
    # Other ways to use its gates in testing, and the present one; "soft" is how they are trained. See `set_mode`.
    modes: Sequence[str] = ()
    mode: str = "soft"

    # Whether `as_linear` describes `forward`. It does not where a subclass has replaced `forward` alone.
    routes_linearly: bool = False

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        owner = next(base for base in cls.__mro__ if "forward" in vars(base))
        cls.routes_linearly = "as_linear" in vars(owner)

    def __init__(self, budget: HeadBudget):
        super().__init__()
        self.budget = budget

    # ---- calls

    def forward(
        self, x: Tensor, q: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Routing:
        """Route tokens.

        Args:
            x: tokens [B, N, C].
            q: queries [B, H, N, D] as projected, if the router has `needs_query`.
            padding_mask: [B, N], True at padding, which is left out of statistics and of what is read beside the token.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def resume(self, x: Tensor, padding_mask: Tensor | None, state: Any) -> tuple[Routing, Any]:
        """Route tokens that come after an earlier call, for routers that read "earlier".

        Args:
            x, padding_mask: see `forward`.
            state: what the earlier call returned: tensors [B, ..]; None before the first token.

        Returns:
            The routing, and the state after x.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no state between calls")

    def choose(self, x: Tensor, q: Tensor | None, padding_mask: Tensor | None) -> Routing:
        """Route as `forward` does, for decoding: the routing needs no gradient, and its statistics are read by nobody."""
        return self(x, q, padding_mask)

    def as_linear(self, x: Tensor) -> LinearRouter | None:
        """Return the router as one linear layer with tokens x [.., C] as input, for operators that route.

        None: the router does more than one linear layer does, or its modules must be called.
        """
        return None

    def macs(self) -> int:
        """Return the multiply-accumulates of one choice in testing: one for each number in a matrix."""
        return sum(p.numel() for p in self.parameters() if p.dim() > 1)

    # ---- how it starts

    def init_weights(self) -> None:
        """Set the weights of a new router as its paper does. Models call this after initialising their linear layers.

        By default linear layers stay as the model has initialised them.
        """

    def init_text_weights(self) -> None:
        """Do `init_weights` in a text model, whose linear layers are initialised as in the papers on text."""
        self.init_weights()

    def init_non_persistent_buffers(self) -> None:
        """Compute buffers that checkpoints do not have. timm's `reinit_non_persistent_buffers(model)` calls this too."""

    @classmethod
    def can_become_dense(cls) -> bool:
        """Return whether routers of the class can start as plain attention: whether they have a `become_dense`."""
        return cls.become_dense is not Router.become_dense

    def become_dense(self) -> None:
        """Set the weights so that the layer is plain attention while all heads run, for the conversion of a dense model."""
        raise NotImplementedError(f"{type(self).__name__} cannot start as plain attention")

    def gates_are_one(self) -> bool:
        """Return whether every head now runs for every token with weight 1, in training too."""
        return self.plain_attention

    # ---- other budgets

    def fits(self, budget: HeadBudget) -> bool:
        """Return whether the router can go on with this budget; if not, a new, untrained one takes its place."""
        return budget.shared == self.budget.shared

    def shared_in(self, state_dict: dict[str, Tensor]) -> int | None:
        """Return the number of shared heads of the router that these weights are of; None: they do not say.

        state_dict: weights of a model's router in this layer, under the names that they have in the router; {}: it has none.
        """
        return None

    def why_not_keep(self) -> str:
        """Return why heads cannot leave for good, as a phrase that begins with "its"; "" if they can."""
        return "its router does not say what becomes of its weights"

    def kept_weights(self, candidates: Tensor) -> dict[str, Tensor]:
        """Return the state dict of a router that has only these candidates, indices [K], and the shared heads.

        Called where `why_not_keep` has no objection. A token that had chosen exactly these must get the same gates.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot lose heads")

    # ---- training

    @classmethod
    def learns_in_turns_with(cls, options: dict[str, Any]) -> bool:
        """Return whether a router that is made with these options `learns_in_turns`."""
        return False

    @property
    def learns_in_turns(self) -> bool:
        """Whether the gates learn in turns with the heads, see `moh_vision.engine.block_descent`."""
        return False

    def take_turn(self, of_heads: bool) -> None:
        """Prepare for a phase in which the heads learn; else for one in which the gates learn, and for testing."""

    def freeze_unused(self) -> None:
        """Let parameters that get no gradient as the router is used now require none."""

    def run_alone(self) -> None:
        """Wait for no other process from now on, because this one alone calls the router."""

    def set_mode(self, mode: str) -> None:
        """Use the gates in another way, one of `modes`."""
        raise ValueError(f"mode {mode!r}: {type(self).__name__} has no modes")

    # ---- what tables say

    def only_balance_trains(self) -> bool:
        """Return whether the gates do not depend on the token, so that only the balance loss trains the router."""
        return False

    def note(self) -> str:
        """Return what a table of budgets does not show of it, "" if nothing. The summary of a model ends at the first ";"."""
        return ""

    def gate_size(self) -> tuple[int, int] | None:
        """Return (E, k) of its gate: a distribution over E experts, of which a token is attributed to the k likeliest.

        None: it has no gate whose `RoutingStats.probs` are worth a table.
        """
        if self.budget.routed == 0:
            return None
        return self.budget.candidates, self.budget.routed

    def gate_columns(self, unit: str, budgets: Sequence[HeadBudget]) -> str:
        """Explain the columns E1, E2, ... of a table of gates in a sentence or two.

        Args:
            unit: who has a gate: "token", or what a sequence is called.
            budgets: those of the table's layers with such a router.
        """
        routed = _span([budget.routed for budget in budgets])
        shared = _span([budget.shared for budget in budgets])
        columns = "EN is the share of choices that fell on expert N"
        if self.counted:
            columns += f"; every {unit} chooses {routed}"
        columns += "."
        if shared != "0":
            columns += f" The first {shared} heads are shared: they always run, and E1 is the next."
        return columns

    # ---- what models may make of a class

    @classmethod
    def options(cls) -> list[str]:
        """Return the names of the options that users may give: the constructor's, without those that the layer gives."""
        names = inspect.signature(cls).parameters
        return [name for name in names if name not in (*GIVEN_BY_LAYERS, *cls.layer_options)]

    @classmethod
    def options_reading(cls, tokens: str) -> dict[str, Any]:
        """Return the options with which a choice reads these tokens of a text and no others.

        By default none: a router that reads one token alone needs none, and one that reads more has no choice; the model
        then refuses it where later tokens must not be read.

        Args:
            tokens: "sequence": all; "running": those so far; "window": the last ones so far.
        """
        return {}

    @classmethod
    def shared_of_text(cls, active: int, heads: int) -> int | None:
        """Return how many heads of a LLaMA-style layer are shared if its budget does not say; None: `shared_share` of the active.

        Both counts are of heads, or of the groups that are chosen together.
        """
        return None

    @classmethod
    def chooses_from_a_vector(cls) -> bool:
        """Return whether a vector is all that a choice needs, as for the groups of an MLP: no queries and no other tokens."""
        return "sample" in cls.scopes and cls.reads == "token" and not cls.needs_query


def _span(numbers: Sequence[int]) -> str:
    """Return the smallest and the largest of some numbers, "2 to 5", or the only one."""
    return " to ".join(map(str, sorted({min(numbers), max(numbers)})))
