# SPDX-License-Identifier: Apache-2.0
"""From each owner straight to the ranks that use its chunk, and gradients straight back.

Rank r meets the chunk of r - t at step t, as on one ring. What saves bytes where a mask leaves each
chunk few readers (documents, windows) costs them where a ring would have used the fast links.
"""

from __future__ import annotations

import numpy as np

from ..bundles import Bundles
from ..demand import Demand
from ..tables import Tables, transfers


def all_gather(demand: Demand) -> Tables:
    """Every chunk to every rank that uses it, all started at once: no hop waits for another.

    Sends are posted before the first step, and gradients are awaited at the end; a rank holds all
    chunks that it uses, and in the end all gradients of its own. So ranks need not be equally far:
    where documents leave one rank more to compute at a step than another, neither waits for it, as
    long as all have as much in total.
    """
    return tables(demand, ahead=demand.grid.size, at_end=True)


def tables(demand: Demand, *, ahead: int | None = None, at_end: bool = False) -> Tables:
    """Chunks are sent `ahead` steps before their use, and so long a gradient may take, too. None:
    one step, so that a rank holds two travelling chunks at most; more where ranks see so few rows
    that these take no more room. at_end: ranks wait for gradients after the last step.
    """
    ring = FlatRing(demand, demand.travelling)
    rank, step, owner, rows = ring.entries(ring.wanted)
    own = None
    if at_end and demand.wanted.joined:  # all pairs are one call, behind all copies
        step, own = np.ones_like(step), np.ones(ring.size, dtype=step.dtype)
    if ahead is None:
        ahead = demand.ahead((rank, step, owner, ring.bundles.rows_of(owner, rows)), 2, 1)
    post = np.maximum(step - ahead, 0)
    # Posted a few steps ahead, a copy travels beside the pairs of those steps; not all at once, so
    # that a rank holds few chunks.
    copies = (owner, rows, owner, rank, post, step)
    copy, *gradient = demand.sent_families
    parts = [transfers(copy, "flat", *copies)]
    for family in gradient:  # complete after its step
        land = np.full_like(step, ring.size + 1)
        if not at_end:
            np.minimum(step + 1 + ahead, land, out=land)
        parts += [transfers(family, "flat", owner, rows, rank, owner, step + 1, land)]
    return demand.as_tables(ring.size, demand.pairs(rank, step, owner, rows, own), parts)


class FlatRing:
    """One way round; of what the ranks want: bool [bundle, step].

    way: 1: at step t a chunk is on rank owner + t; -1: on rank owner - t.
    bundles: those that go this way.
    """

    def __init__(self, demand: Demand, bundles: Bundles, way: int = 1):
        self.size, self.way = demand.grid.size, way
        self.demand, self.bundles = demand, bundles
        # Twice round: what is met on the way from an owner is then a window of it.
        twice = np.tile(bundles.wanted[:, ::way], (1, 2))
        first = bundles.owner if way == 1 else self.size - 1 - bundles.owner
        windows = np.lib.stride_tricks.sliding_window_view(twice, self.size, axis=1)
        self.wanted = windows[np.arange(len(first)), first]

    def entries(self, which: np.ndarray) -> tuple[np.ndarray, ...]:
        """Rank, step, owner and rows, wherever some of these bundles of an owner are."""
        at, rows = self.bundles.sets(which)
        owner, step = np.divmod(at.astype(np.int32), self.size)
        return (owner + self.way * step) % self.size, step, owner, rows
