"""Trajectories in micro-batches, against all cuts of a short list."""

import itertools
import random

import numpy as np
import pytest

from megatron_burst.packing import Work
from megatron_burst.plugins.rl.trajectories import cut_trajectories
from megatron_burst.plugins.rl.trees import neighbours


def distinct(trajectories):
    """Return the distinct prefixes, and the keys that each sees."""
    prefixes = {tuple(t[: n + 1]) for t in trajectories for n in range(len(t))}
    return len(prefixes), sum(map(len, prefixes))


def load(trajectories, work):
    rows, pairs = distinct(trajectories)
    return work.token * rows + pairs


def drawn(seed):
    draw = random.Random(seed)
    return [[draw.randrange(2) for _ in range(draw.randrange(9))] for _ in range(7)]


@pytest.mark.parametrize("seed", range(20))
def test_the_busiest_has_the_least_work_of_all_ways_to_cut(seed):
    arguments, work = drawn(seed), Work(token=3)
    order, shared = neighbours(arguments)
    assert sorted(order) == list(range(7))
    for i, (a, b) in enumerate(itertools.pairwise(order)):
        common = 0
        while arguments[a][: common + 1] == arguments[b][: common + 1] and common < len(
            arguments[a]
        ):
            common += 1
        assert shared[i + 1] == common
    lengths = [len(arguments[i]) for i in order]
    (runs,) = np.array(
        cut_trajectories(lengths, shared, work, ranks=1, multiple=3), dtype=object
    ).tolist()
    assert [i for run in runs for i in run] == list(range(7))

    def busiest(cuts):
        parts = [range(a, b) for a, b in itertools.pairwise((0, *cuts, 7))]
        return max(load([arguments[order[i]] for i in part], work) for part in parts)

    best = min(busiest(cuts) for cuts in itertools.combinations_with_replacement(range(8), 2))
    assert max(load([arguments[order[i]] for i in run], work) for run in runs) == best


def test_as_few_as_the_capacity_allows_and_as_many_on_every_rank():
    lengths, shared = [6, 6, 6, 6, 9, 2], [0, 5, 5, 5, 0, 1]
    runs = cut_trajectories(lengths, shared, Work(), ranks=2, capacity=9, multiple=2)
    assert [len(each) for each in runs] == [2, 2]
    actual = sorted((run.start, run.stop) for each in runs for run in each)
    assert [run for run in actual if run[0] < run[1]] == [(0, 4), (4, 5), (5, 6)]
    assert len(cut_trajectories(lengths, shared, Work(), ranks=2)[0]) == 1
    with pytest.raises(ValueError, match="max_tokens 8 is smaller than"):
        cut_trajectories(lengths, shared, Work(), ranks=2, capacity=8)


def test_nothing_at_all():
    assert cut_trajectories([], [], Work(), ranks=2) == [[range(0)], [range(0)]]
