"""The order of samples is a function of seed and epoch, and processes and micro-batches divide it."""

import numpy as np
import pytest

from moh_vision.common.seeds import Stream, derive_seed
from moh_vision.data.order import PositionSampler, epoch_order, rank_slice
from tests.support.refusals import refuse


def batches(**kwargs):
    defaults = dict(shard_sizes=[10, 7, 13], group=2, seed=3, batch_size=8, accumulation=1)
    defaults.update(rank=0, world=1, start=0, stop=12)
    return PositionSampler(**{**defaults, **kwargs})


def flat(lists):
    return [item for items in lists for item in items]


def test_every_epoch_is_a_permutation_and_they_differ():
    orders = [epoch_order(0, epoch, (10, 7, 13), 2) for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(30))
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], epoch_order(1, 0, (10, 7, 13), 2))


def test_a_group_of_shards_is_finished_before_the_next():
    sizes = (5,) * 6
    order = epoch_order(0, 0, sizes, 2)
    shards = [set((order[i : i + 10] // 5).tolist()) for i in range(0, 30, 10)]
    assert [len(s) for s in shards] == [2, 2, 2] and set.union(*shards) == set(range(6))
    shards_of_group = [s // 5 for s in order[:10]]
    assert shards_of_group != sorted(shards_of_group), "not mixed within the group"


@pytest.mark.parametrize("world, accumulation", [(2, 1), (4, 1), (1, 2), (2, 2), (2, 4)])
def test_ranks_and_accumulation_share_the_same_steps(world, accumulation):
    whole = list(batches())
    parts = [list(batches(rank=r, world=world, accumulation=accumulation)) for r in range(world)]
    assert len(batches(world=world, accumulation=accumulation, start=7)) == 5 * accumulation
    for step in range(12):
        micro = [
            parts[r][step * accumulation + m] for m in range(accumulation) for r in range(world)
        ]
        assert flat(micro) == whole[step]


def test_indivisible_batch_is_refused():
    refuse("optim.batch_size 8 accumulation 3 processes 1", batches, accumulation=3)
    refuse("shard_sizes 0 1", batches, shard_sizes=[])


def test_evaluation_sees_each_sample_once():
    slices = [rank_slice(23, r, 3, 4) for r in range(3)]
    assert sorted(flat(flat(slices))) == list(range(23))
    assert max(len(b) for b in flat(slices)) == 4


def test_seeds_never_change():
    """Other seeds would change published results, and the random numbers of runs that resume."""
    assert (derive_seed(0), derive_seed(3, 4)) == (893442142816765029, 6807787904548242825)
    assert {stream.name: derive_seed(7, 5, stream) for stream in Stream} == dict(
        DIFFUSION=6885511475808760356, MIXING=2228076497174741660, POSTERIOR=1786161574248634213,
        BUDGETS=4444310048442877540, SHARDS=1176082175543961464,
        SUBSET=7246179595110459965, LENGTHS=1315386587016911170, MASKS=7863431363232004698,
        ROUNDS=5310650293824304437, BLOCKS=3789904323145937496,
    )  # fmt: skip


@pytest.mark.parametrize("batch_size", [9, 8, 30, 64])
def test_repeated_augmentation(batch_size):
    """An epoch, of as many positions as there are samples, shows a third of the samples, three copies of each.

    Copies are close to each other: within a batch, or in neighbouring ones.
    """
    items = flat(batches(repeats=3, batch_size=batch_size, stop=90 * 8 // batch_size))
    assert [p for p, _ in items] == list(range(len(items)))
    in_order = sorted(items, key=lambda item: position_side_by_side(item[0], batch_size, 3))
    for epoch in range(3):
        order = epoch_order(3, epoch, (10, 7, 13), 2)
        shown = [i for _, i in in_order[epoch * 30 : epoch * 30 + 30]]
        assert shown == [i for i in order[:10] for _ in range(3)]


def position_side_by_side(position, batch_size, repeats):
    """Return the index of a position in an order in which the copies of a sample are neighbours."""
    step, slot = divmod(position, batch_size)
    slots = [s for copy in range(repeats) for s in range(copy, batch_size, repeats)]
    return step * batch_size + slots[slot]


def test_copies_lie_in_different_micro_batches():
    steps = list(batches(repeats=3, batch_size=12, accumulation=3, stop=2))
    for step in range(2):
        micro = [[i for _, i in steps[step * 3 + m]] for m in range(3)]
        assert micro[0] == micro[1] == micro[2] and len(set(micro[0])) == 4
    whole = list(batches(repeats=3, batch_size=12, stop=2))
    assert [
        flat(steps[:3]),
        flat(steps[3:]),
    ] == whole  # accumulation does not change the samples of a step
