# SPDX-License-Identifier: Apache-2.0
"""Two rings in opposite directions: each chunk is sent in two halves, one per direction.

The algorithm is for ranks with a separate direct link to each neighbour. Each link then carries
half the bytes that a single ring sends over one link. At step t, rank r has the first half of the
chunk of rank r - t, and the second half of the chunk of rank r + t. If the number of ranks is even,
both halves of the farthest chunk arrive at the same step. Gradients follow their rows one step
later and end at their owner. If the opposite direction sends at most half as many bytes of a half,
this half is sent in the opposite direction.
"""

from __future__ import annotations

import numpy as np

from ..bundles import Bundles
from ..demand import Demand
from ..tables import Tables, Transfers, transfers
from .direct import FlatRing

WAYS = (1, -1)  # to the next rank, to the previous rank


def tables(demand: Demand) -> Tables:
    """Return the pairs and transfers of `two_way`: two rings over all ranks, which ignore nodes."""
    halves = demand.travelling.split(len(WAYS))
    way_of_half = _ways(demand, halves)
    ways = [OneWay(demand, halves.where(way_of_half == way), way) for way in WAYS]
    entries = (way.entries(way.users) for way in ways)
    pairs = demand.pairs(*map(np.concatenate, zip(*entries, strict=True)))
    parts = [way.hops(family) for family in demand.sent_families for way in ways]
    return demand.as_tables(demand.grid.size, pairs, parts, halves)


class OneWay(FlatRing):
    """A ring over all ranks in one direction, and its transfers from neighbour to neighbour."""

    def moves(self, family: str) -> np.ndarray:
        """Return whether each bundle is sent to the next rank after each step.

        A bundle is the set of an owner's rows that the same ranks use. A copy is sent to the next
        rank if that rank or a later one uses it. A gradient is sent from the first rank that
        contributes to it.

        Args:
            family: Name of the sent tensors ("kv" or "query"), or of their gradients.

        Returns:
            bool [bundle, step].
        """
        if family != self.demand.side:
            return np.logical_or.accumulate(self.users, axis=1)
        later = np.flip(np.logical_or.accumulate(np.flip(self.users, axis=1), axis=1), axis=1)
        return np.pad(later[:, 1:], ((0, 0), (0, 1)))

    def hops(self, family: str) -> Transfers:
        """Return the transfers to the next rank in this direction.

        A copy travels to the next rank while this rank computes with it. A gradient is complete
        only after the step, so it travels during the next step. When it arrives, the receiver has
        computed its own contribution.

        Args:
            family: Name of the sent tensors ("kv" or "query"), or of their gradients.
        """
        rank, step, owner, rows = self.entries(self.moves(family))
        after, post = (rank + self.way) % self.size, step + (family != self.demand.side)
        return transfers(family, "flat", owner, rows, rank, after, post, post + 1)


def _ways(demand: Demand, halves: Bundles) -> np.ndarray:
    """Return the direction in which each half of a bundle is sent: 1 or -1, int [n]."""
    size, side = demand.grid.size, demand.side
    copy, gradient = (getattr(demand.row_bytes, name) for name in (side, "d" + side))
    behind = (halves.owner[:, None] + np.arange(size)) % size
    users = np.take_along_axis(halves.users, behind, axis=1)
    # A copy is sent to its last user, and the gradient from the first user to the owner. The first
    # user in one direction is the last one in the other direction.
    first, last = users.argmax(axis=1), size - 1 - np.flip(users, axis=1).argmax(axis=1)
    ahead, back = last * copy + (size - first) * gradient, (size - first) * copy + last * gradient
    ways = np.where(halves.number % len(WAYS), WAYS[1], WAYS[0])
    ways[2 * ahead <= back] = WAYS[0]
    ways[2 * back <= ahead] = WAYS[1]
    return ways
