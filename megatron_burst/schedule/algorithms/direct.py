# SPDX-License-Identifier: Apache-2.0
"""Direct transfers: owners send chunks to the ranks that use them, which send gradients back.

Rank r computes with the chunk of rank r - t at step t, as on one ring. If few ranks use each chunk
(masks with documents or windows), direct transfers send fewer bytes than a ring. If many ranks use
each chunk, direct transfers send more bytes over slow links than a ring, which uses fast links for
most hops.
"""

from __future__ import annotations

import numpy as np

from ..bundles import Bundles
from ..demand import Demand
from ..tables import Tables, transfers


def all_gather(demand: Demand) -> Tables:
    """Return the pairs and transfers of `all_gather`: all chunks are sent at the start.

    Before the first step, an owner starts to send its chunk to all ranks that use it. It waits for
    gradients at the end. So ranks need equal work only in total and not at each step, which suits
    packed documents. A rank holds all chunks that it uses and, at the end, all received gradients
    of its own chunk.
    """
    return tables(demand, ahead=demand.grid.size, at_end=True)


def tables(demand: Demand, *, ahead: int | None = None, at_end: bool = False) -> Tables:
    """Return the pairs and transfers of a pass without rings.

    Owners send chunks directly to the ranks that use them.

    Args:
        demand: Demand of the pass.
        ahead: Number of steps between the sending of a chunk and its use. Default: one step, so
            that a rank holds at most two received chunks. If ranks use few rows, the default is
            `Demand.ahead`: more steps, with at most the memory of two whole chunks.
        at_end: True if ranks wait for all gradients after the last step.
    """
    ring = FlatRing(demand, demand.travelling)
    rank, step, owner, rows = ring.entries(ring.users)
    own = None
    if at_end and demand.visibility.joined:  # one kernel call for all pairs, after all copies
        step, own = np.ones_like(step), np.ones(ring.size, dtype=step.dtype)
    if ahead is None:
        ahead = demand.ahead((rank, step, owner, ring.bundles.rows_of(owner, rows)), 2, 1)
    post = np.maximum(step - ahead, 0)
    # A copy that is posted a few steps ahead travels during the pairs of those steps. Copies are
    # not all posted at the start, so that a rank holds few chunks.
    copies = (owner, rows, owner, rank, post, step)
    copy, *gradient = demand.sent_families
    parts = [transfers(copy, "flat", *copies)]
    for family in gradient:  # a gradient is complete after its step
        land = np.full_like(step, ring.size + 1)
        if not at_end:
            np.minimum(step + 1 + ahead, land, out=land)
        parts += [transfers(family, "flat", owner, rows, rank, owner, step + 1, land)]
    return demand.as_tables(ring.size, demand.pairs(rank, step, owner, rows, own), parts)


class FlatRing:
    """One ring over all ranks in one direction: which rank has which bundle at which step.

    Attributes:
        way: 1 if a chunk is on rank owner + t at step t, -1 if it is on rank owner - t.
        bundles: Bundles (rows of one owner that the same ranks use) that are sent in this
            direction.
        users: bool [bundle, step], true if the rank that has the bundle at this step uses it.
    """

    def __init__(self, demand: Demand, bundles: Bundles, way: int = 1):
        self.size, self.way = demand.grid.size, way
        self.demand, self.bundles = demand, bundles
        # Repeat the ranks, so that the users in ring order from the owner on are a contiguous
        # window.
        twice = np.tile(bundles.users[:, ::way], (1, 2))
        first = bundles.owner if way == 1 else self.size - 1 - bundles.owner
        windows = np.lib.stride_tricks.sliding_window_view(twice, self.size, axis=1)
        self.users = windows[np.arange(len(first)), first]

    def entries(self, selected: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return one entry per owner and step that have selected bundles, as four parallel arrays.

        Args:
            selected: bool [bundle, step].

        Returns:
            Rank that has the bundles at this step; step; owner; bit set of the selected bundles
            (one bit per bundle of the owner).
        """
        index, rows = self.bundles.sets(selected)
        owner, step = np.divmod(index.astype(np.int32), self.size)
        return (owner + self.way * step) % self.size, step, owner, rows
