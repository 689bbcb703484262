"""Elastic budgets: train one set of weights at several shares of active heads, to be run at any of them.

Each step runs one share. Of four steps, in an order drawn from the seed, one runs the smallest share, one the largest,
and two run shares in between. The sandwich rule (Yu and Huang 2019) runs four shares on each batch, which makes a step
four times as long. No paper has elastic budgets of heads.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from random import Random

from torch import Tensor, nn

from moh_vision.attention import ModelBudgets, budgets_at, running
from moh_vision.attention.budget import GROUPS, BudgetError, parse_share
from moh_vision.common.seeds import Stream, derive_seed
from moh_vision.models.counts import count_macs
from moh_vision.models.head_budgets import set_share

SHARES = 5  # evenly spaced from smallest to largest; few, because torch.compile compiles a graph for each
CYCLE = 4  # steps in which the smallest and the largest share each run once


class ElasticBudget:
    """The shares of active heads that a model is trained at, and the share of each step.

    Shared heads and all weights stay, as with `set_head_budget`. Groups of routed MLPs run at the same share. The model starts
    at the largest share.

    Args:
        model: any model whose layers all route heads.
        ends: smallest and largest share for `set_head_budget`: 0.5, "ramp:0.5" or "uniform:0.5"; both
            ramps, both uniform, or both numbers, which keep the shape of the model's budget.
        seed: seed of the run. A step's share depends on seed and step alone, so that all processes run the same
            share, and a resumed run the same as before.

    Attributes:
        budgets: share, as `set_head_budget` takes it -> the budgets of the model's layers; the smallest first.
    """

    def __init__(self, model: nn.Module, ends: Sequence[float | str], seed: int):
        self.seed = seed
        self.budgets: dict[str, ModelBudgets] = {}
        try:
            shape, low, high = _parse_ends(ends)
            for number in range(SHARES):
                share = f"{low + (high - low) * number / (SHARES - 1):g}"
                if shape:
                    share = f"{shape}:{share}"
                self.budgets[share] = budgets_at(model, share)
            self.smallest, *self.between, self.largest = self.budgets
            set_share(model, self.largest)
            if self.active_share(self.smallest) == self.active_share(self.largest):
                parts = self.budgets[self.largest].parts
                raise ValueError(f"both ends run equally many {parts}; take them further apart")
        except BudgetError as error:
            reason = error.reason
            parts = error.parts
            if parts == GROUPS:
                reason = f"{parts.argument} {reason}"
            # The error's own advice is for a single share, and does not fit the ends of a range.
            if error.advice:
                reason += f"; model.{parts.argument} says how many {parts.many} are shared: give the smallest share there"
            raise ValueError(f"budget_range {list(ends)}: {reason}") from None
        except ValueError as error:
            raise ValueError(f"budget_range {list(ends)}: {error}") from None

    def __str__(self) -> str:
        low = 100 * self.active_share(self.smallest)
        high = 100 * self.active_share(self.largest)
        parts = self.budgets[self.largest].parts
        return (
            f"elastic: trained at {low:.1f} to {high:.1f} % of the {parts}, saved with {high:.1f} %"
        )

    @property
    def scored(self) -> tuple[str, str, str]:
        """Return the shares that `by_share` scores: the smallest, the middle and the largest."""
        return self.smallest, self.between[len(self.between) // 2], self.largest

    def active_share(self, share: str) -> float:
        """Return the fraction of heads that are active at a share, after its rounding to whole heads.

        In a model that runs all its heads it is the fraction of the MLPs' groups.
        """
        return round(self.budgets[share].share, 4)

    def share_of(self, step: int) -> str:
        """Return the share of a step, counted from 0."""
        random = Random(derive_seed(self.seed, step // CYCLE, Stream.BUDGETS))
        cycle = [self.smallest, self.largest, *random.choices(self.between, k=CYCLE - 2)]
        # In a fixed order every 20th step, which is logged, would run the same share.
        random.shuffle(cycle)
        return cycle[step % CYCLE]

    def running(self, model: nn.Module, share: str) -> AbstractContextManager[None]:
        """Return a context manager, inside which a model, or a copy of it, runs at a share."""
        return running(model, self.budgets[share])

    def by_share(
        self, model: nn.Module, score: Callable[[], dict], at_largest: dict
    ) -> dict[str, dict]:
        """Score a model at the shares `scored`.

        Args:
            model: the model, or a copy of it.
            score: returns the scores of the model at its present budget.
            at_largest: scores at the largest share, which are known already.
        """
        scores = {}
        for share in self.scored[:-1]:
            with self.running(model, share):
                scores[share] = score()
        return {**scores, self.largest: at_largest}


def elastic_budget(model: nn.Module, config) -> ElasticBudget | None:
    """Return the `ElasticBudget` of a run (`RunConfig` with budget_range and seed), or None."""
    if not config.budget_range:
        return None
    return ElasticBudget(model, config.budget_range, config.seed)


def mean_macs(
    model: nn.Module, elastic: ElasticBudget | None, *inputs: Tensor, **named: Tensor
) -> int:
    """Return the MACs of the active heads, the routers and all else in one forward of batch 1.

    An elastic model is counted at its middle share, near which the steps' shares have their mean.

    Args:
        model: on any device.
        elastic: its elastic budget, or None.
        inputs, named: arguments of its forward; only their shapes matter.
    """
    if elastic is None:
        return count_macs(model, *inputs, **named).ideal
    _, middle, _ = elastic.scored
    with elastic.running(model, middle):
        return count_macs(model, *inputs, **named).ideal


def with_elastic(description: str, elastic: ElasticBudget | None, separator: str) -> str:
    """Add the text of an elastic budget to the description of a model; None adds nothing."""
    if elastic is None:
        return description
    return f"{description}{separator}{elastic}"


def _parse_ends(ends) -> tuple[str, float, float]:
    """Return shape ("" if the ends are numbers), smallest and largest share."""
    expected = "expected two shares above 0 and up to 1, the smallest first, such as [0.5, 1.0] or [uniform:0.5, uniform:1.0]"
    try:
        smallest, largest = map(parse_share, ends)
    except ValueError:
        raise ValueError(expected) from None
    plain = [":" not in str(end) for end in ends]
    same_form = plain[0] == plain[1] and smallest.shape == largest.shape
    says_shared = smallest.shared is not None or largest.shared is not None
    if not same_form or says_shared or not smallest.active < largest.active:
        raise ValueError(expected)
    if plain[0]:
        return "", smallest.active, largest.active
    return smallest.shape, smallest.active, largest.active
