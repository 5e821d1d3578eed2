"""One ring over all ranks: where every chunk is at every step, for algorithms that go round it."""

from __future__ import annotations

import numpy as np

from ..bundles import Bundles
from ..demand import Demand
from ..tables import Kept, Transfers, transfers

Entries = tuple[np.ndarray, np.ndarray, np.ndarray]


class FlatRing:
    """One way round: arrays [owner, step], and of what the ranks want [bundle, step].

    way: 1: at step t a chunk is with the rank t behind its owner, -1: with the one t before it.
    bundles: those that go this way.
    """

    def __init__(self, demand: Demand, bundles: Bundles, way: int = 1):
        self.size = demand.grid.size
        steps = np.arange(self.size, dtype=np.int32)
        self.demand, self.bundles = demand, bundles
        self.here = (steps[:, None] + way * steps) % self.size
        self.wanted = np.take_along_axis(bundles.wanted, self.here[bundles.owner], axis=1)
        # A kept chunk is still computed with, so its gradient travels, but it need not be sent.
        self.from_forward = steps >= self.size - demand.kept

    @property
    def met(self) -> tuple[np.ndarray, ...]:
        """Rank, step, owner and rows of what is computed; a rank's own chunk aside."""
        owner, step, rows = self.entries(self.wanted)
        return self.here[owner, step], step, owner, rows

    @property
    def kept(self) -> Kept:
        """What forward kept."""
        owner, step, rows = self.entries(self.wanted & self.from_forward)
        return Kept(self.here[owner, step], owner, rows)

    def moves(self, family: str) -> np.ndarray:
        """bool [bundle, step]: which bundles, or their gradients, go on to the next rank?

        A copy while a rank further along wants it, a gradient from the first rank on that adds.
        """
        if family != self.demand.side:
            return np.logical_or.accumulate(self.wanted, axis=1)
        sent = np.flip(self.wanted & ~self.from_forward, axis=1)
        later = np.flip(np.logical_or.accumulate(sent, axis=1), axis=1)
        return np.pad(later[:, 1:], ((0, 0), (0, 1)))

    def hops(self, family: str) -> Transfers:
        """The hops to the next rank this way.

        A copy travels beside the step that computes with it. A gradient is complete only after the
        step, so it travels beside the next one; when it lands, the receiver has its own part ready.
        """
        owner, step, rows = self.entries(self.moves(family))
        src, dst = (x[owner, step] for x in (self.here, np.roll(self.here, -1, axis=1)))
        post = step + (family != self.demand.side)
        return transfers(family, "flat", owner, rows, src, dst, post, post + 1)

    def entries(self, which: np.ndarray) -> Entries:
        """Owner, step and rows, where an owner has any of these bundles."""
        bits = self.bundles.bits(which)
        at = np.flatnonzero(bits)
        owner, step = np.divmod(at.astype(np.int32), bits.shape[1])
        return owner, step, bits.reshape(-1)[at]
