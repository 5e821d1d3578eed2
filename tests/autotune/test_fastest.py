"""What a search takes without simulating all: the same as by simulating all."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megatron_burst import Rates, layout, masks
from megatron_burst.autotune import select
from megatron_burst.autotune.candidates import (
    AlgorithmOnGrid,
    FixedSettings,
    Workload,
    grids,
)
from megatron_burst.autotune.host_time import HostTime
from megatron_burst.autotune.places import Nodes
from megatron_burst.schedule.sizes import Sizes

CASES = 10


def drawn(seed):
    """A workload, its grids, rates and what is fixed: bound by links or by pairs."""
    pick = random.Random(seed)
    ranks = pick.choice([1, 2, 4, 4, 4, 8])
    intra = pick.choice([n for n in (1, 2, 4, 8) if n <= ranks])
    tokens, heads = 64 * pick.choice([1, 4, 16]), pick.choice([4, 8])
    grads = pick.choice([(True, True, True), (True, True, True), (False, False, False)])
    sizes = Sizes(
        tokens, pick.choice([1, 2]), heads, pick.choice([1, 2, 4]), 64, 64, 2, 4, 4, grads
    )
    seq = tokens * ranks
    cuts = sorted(pick.sample(range(1, seq), 3))
    kind = pick.choice(["causal", "causal", "window", "documents", "none"])
    mask = {
        "causal": masks.Causal(),
        "window": masks.Window(seq // 3, 0),
        "documents": masks.Documents([0, *cuts, seq]) & masks.Causal(),
        "none": masks.Full(),
    }[kind]
    name = pick.choice(["zigzag", "striped", "contiguous"])
    work = Workload(sizes, mask, layout.make(name, cp_size=ranks))
    if pick.random() < 0.2:
        work = Workload(sizes, mask, work.layout, chunks=2)
    elif pick.random() < 0.2:
        work = Workload(sizes, mask, work.layout, attended=seq // 8, latent=True)
    nodes = pick.choice([None, Nodes(2 * intra, intra, 2)])
    rates = Rates(
        intra=10 ** pick.uniform(9, 12), inter=10 ** pick.uniform(8, 11),
        latency=pick.choice([0, 1e-5]), compute=10 ** pick.uniform(10, 13),
        launch=pick.choice([0, 1e-5]), half_rows=pick.choice([0, 100]),
        slowdown=pick.choice([0, 0.1]), nic=pick.choice([None, 1e10]), start=pick.choice([0, 1e-5]),
        adding=pick.choice([float("inf"), 1e12]),
        exchange=0.8, exchange_start=pick.choice([0, 1e-4]), memory=1e12,
        host=pick.choice([None, HostTime()]),
    )  # fmt: skip
    fixed = FixedSettings(
        pick.choice([None] * 4 + ["ring"]),
        "kv" if work.attended else pick.choice([None, None, "query"]),
        1 if work.attended else pick.choice([None, None, 1]),
    )
    return work, grids(ranks, intra, sizes), rates, fixed, nodes


def test_the_candidate_taken_is_that_of_all(monkeypatch):
    """Of ties the simplest, also where it is found after others have been passed over; and none is
    faster than its bound."""
    every, simulated = AlgorithmOnGrid.by_chunks, []

    def counted(self):
        for made in every(self):
            bound = max(self.at_least, self.busy)
            simulated.extend((bound, one.seconds) for one in made)
            yield made

    monkeypatch.setattr(AlgorithmOnGrid, "by_chunks", counted)
    counts, tight = [0, 0], []
    for seed in range(CASES):
        work, topologies, rates, fixed, nodes = drawn(seed)
        how = rates, fixed, nodes
        actual = select.best(work, topologies, *how)
        counts[0] += len(simulated)
        assert all(bound <= seconds for bound, seconds in simulated), seed
        tight += [bound / seconds for bound, seconds in simulated]
        simulated.clear()
        assert select.fastest(work, topologies, *how) == actual.taken, seed
        counts[1] += len(simulated)
        simulated.clear()
    assert max(tight) > 0.999  # where one rank computes alone, it is what that takes
    assert counts[1] < 0.7 * counts[0]


def test_rates_too_small_to_compare_are_refused():
    work, topologies, *_ = drawn(1)
    slow = Rates(1e9, 1e9, compute=1e-305)
    with np.errstate(over="ignore"), pytest.raises(ValueError, match="rates: too small"):
        select.fastest(work, topologies, slow)
