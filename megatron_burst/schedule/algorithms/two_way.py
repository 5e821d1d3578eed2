# SPDX-License-Identifier: Apache-2.0
"""Both ways round one ring: each chunk in two halves, which travel in opposite directions.

For ranks with a direct link of their own to each neighbour: each of the two links carries half of
what the one ring sends over the one link that it uses. At step t a rank meets the first half of the
chunk of the rank t before it and the second half of that of the rank t behind it; on an even ring
both halves of the farthest chunk arrive together. Gradients travel on with their rows, a step
behind, and end at their owner. Rows that cost half as many bytes one way round as the other, or
fewer, all go that way: half of them the long way would load that link more.
"""

from __future__ import annotations

import numpy as np

from ..bundles import Bundles
from ..demand import Demand
from ..tables import Tables, Transfers, transfers
from .direct import FlatRing

WAYS = (1, -1)  # to the next rank, to the one before


def tables(demand: Demand) -> Tables:
    """Two rings over all ranks, whatever the links between them."""
    halves = demand.travelling.split(len(WAYS))
    goes = _ways(demand, halves)
    ways = [OneWay(demand, halves.where(goes == way), way) for way in WAYS]
    met = (way.entries(way.wanted) for way in ways)
    pairs = demand.pairs(*map(np.concatenate, zip(*met, strict=True)))
    parts = [way.hops(family) for family in demand.sent_families for way in ways]
    return demand.as_tables(demand.grid.size, pairs, parts, halves)


class OneWay(FlatRing):
    """Hops from neighbour to neighbour, one way round."""

    def moves(self, family: str) -> np.ndarray:
        """Bool [bundle, step]: which bundles, or their gradients, go on to the next rank?

        A copy while a rank further along wants it, a gradient from the first rank on that adds.
        """
        if family != self.demand.side:
            return np.logical_or.accumulate(self.wanted, axis=1)
        later = np.flip(np.logical_or.accumulate(np.flip(self.wanted, axis=1), axis=1), axis=1)
        return np.pad(later[:, 1:], ((0, 0), (0, 1)))

    def hops(self, family: str) -> Transfers:
        """The hops to the next rank this way.

        A copy travels beside the step that computes with it. A gradient is complete only after the
        step, so it travels beside the next one; when it lands, the receiver has its own part ready.
        """
        rank, step, owner, rows = self.entries(self.moves(family))
        after, post = (rank + self.way) % self.size, step + (family != self.demand.side)
        return transfers(family, "flat", owner, rows, rank, after, post, post + 1)


def _ways(demand: Demand, halves: Bundles) -> np.ndarray:
    """Which way each half goes round, [n]."""
    size, side = demand.grid.size, demand.side
    copy, gradient = (getattr(demand.row_bytes, name) for name in (side, "d" + side))
    behind = (halves.owner[:, None] + np.arange(size)) % size
    wanted = np.take_along_axis(halves.wanted, behind, axis=1)
    # A copy goes as far as somebody wants it; the gradient from the first of these home. What is
    # the first rank one way round is the last the other way.
    first, last = wanted.argmax(axis=1), size - 1 - np.flip(wanted, axis=1).argmax(axis=1)
    ahead, back = last * copy + (size - first) * gradient, (size - first) * copy + last * gradient
    goes = np.where(halves.number % len(WAYS), WAYS[1], WAYS[0])
    goes[2 * ahead <= back] = WAYS[0]
    goes[2 * back <= ahead] = WAYS[1]
    return goes
