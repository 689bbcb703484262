"""Elastic budgets: train one set of weights at many shares of active heads, to serve them all. No paper has it.

Each step runs one share. Of four steps, in an order drawn from the seed, one runs the smallest share, one the largest,
and two run shares in between. The sandwich rule (Yu and Huang 2019) runs all four on each batch, four times as long.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from random import Random

from torch import nn

from moh_vision.attention import HeadBudget, routed_budgets, running
from moh_vision.attention.budget import parse_share
from moh_vision.engine.seeds import Stream, derive_seed
from moh_vision.models.head_budgets import set_head_budget

SHARES = 5  # evenly from the smallest to the largest; few, because torch.compile compiles each
CYCLE = 4  # steps


class ElasticBudget:
    """The shares of active heads that a model is trained at, and the share of each step.

    Shared heads and all weights stay, as with `set_head_budget`. The model starts at the largest share.

    Args:
        model: any model whose layers all route heads.
        ends: smallest and largest share for `set_head_budget`: 0.5, "ramp:0.5" or "uniform:0.5"; both
            ramps, both uniform, or both numbers, which keep the shape of the model's budget.
        seed: of the run. Seed and step give the share: equal on all processes, and after a resume.

    Attributes:
        budgets: share, as `set_head_budget` takes it -> one `HeadBudget` per layer; the smallest first.
    """

    def __init__(self, model: nn.Module, ends: Sequence[float | str], seed: int):
        self.seed = seed
        self.budgets: dict[str, list[HeadBudget]] = {}
        try:
            kind, low, high = _parse_ends(ends)
            for number in range(SHARES):
                share = f"{low + (high - low) * number / (SHARES - 1):g}"
                share = f"{kind}:{share}" if kind else share
                self.budgets[share] = list(routed_budgets(model, share))
            self.smallest, *self.between, self.largest = self.budgets
            set_head_budget(model, self.largest)
            if self.active_share(self.smallest) == self.active_share(self.largest):
                raise ValueError("both ends run equally many heads; take them further apart")
        except ValueError as error:
            # `set_head_budget` advises a replacement for a share, which is no end of a range.
            reason, advice, _ = str(error).removeprefix("head_budget ").partition("; give ")
            advice = (
                advice
                and "; model.head_budget says how many heads are shared: give the smallest share there"
            )
            raise ValueError(f"budget_range {list(ends)}: {reason}{advice}") from None

    def __str__(self) -> str:
        low, high = (100 * self.active_share(share) for share in (self.smallest, self.largest))
        return (
            f"elastic: trained at {low:.1f} to {high:.1f} % of the heads, saved with {high:.1f} %"
        )

    def active_share(self, share: str) -> float:
        """Active heads over all heads, rounded to whole heads."""
        budgets = self.budgets[share]
        return round(sum(b.active for b in budgets) / sum(b.heads for b in budgets), 4)

    def share_of(self, step: int) -> str:
        """The share of a step, counted from 0."""
        random = Random(derive_seed(self.seed, step // CYCLE, Stream.BUDGETS))
        cycle = [self.smallest, self.largest, *random.choices(self.between, k=CYCLE - 2)]
        # In a drawn order: else every 20th step, which is logged, would have the same share.
        random.shuffle(cycle)
        return cycle[step % CYCLE]

    def running(self, model: nn.Module, share: str) -> AbstractContextManager[None]:
        """Run a model, or a copy of it, at a share for a while."""
        return running(model, self.budgets[share])

    def by_share(
        self, model: nn.Module, score: Callable[[], dict], at_largest: dict
    ) -> dict[str, dict]:
        """Score a model at the smallest, the middle and the largest share.

        Args:
            score: scores the model as it is.
            at_largest: its result for the largest share.
        """
        scores = {}
        for share in (self.smallest, self.between[len(self.between) // 2]):
            with self.running(model, share):
                scores[share] = score()
        return {**scores, self.largest: at_largest}


def elastic_budget(model: nn.Module, config) -> ElasticBudget | None:
    """Return the `ElasticBudget` of a run (`RunConfig` with budget_range and seed), or None."""
    return ElasticBudget(model, config.budget_range, config.seed) if config.budget_range else None


def _parse_ends(ends) -> tuple[str, float, float]:
    """Shape ("" for numbers), smallest and largest share."""
    numbers = [":" not in str(end) for end in ends]
    try:
        (kind, low, shared), (other, high, also_shared) = map(parse_share, ends)
    except ValueError:
        kind, other, low, high, shared, also_shared = "", "", 0, 0, None, None
    if (
        not low < high
        or kind != other
        or len(set(numbers)) != 1
        or (shared, also_shared) != (None, None)
    ):
        raise ValueError(
            "expected two shares above 0 and up to 1, the smallest first, such as [0.5, 1.0] or [uniform:0.5, uniform:1.0]"
        )
    return "" if numbers[0] else kind, low, high
