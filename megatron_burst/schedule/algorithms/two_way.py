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
from ..tables import ALL, RINGS, Kept, Tables, Transfers, joined

WAYS = (1, -1)  # to the next rank, to the one before


def tables(demand: Demand) -> Tables:
    """Two rings over all ranks, whatever the links between them."""
    halves = demand.travelling.split(len(WAYS))
    goes = _ways(demand, halves)
    ways = [_Way(demand, halves.where(goes == way), way) for way in WAYS]
    own = np.flatnonzero(demand.visible.diagonal())
    met = [(own, np.zeros_like(own), own, np.full(len(own), ALL)), *(way.met for way in ways)]
    pairs = demand.pairs(*map(np.concatenate, zip(*met, strict=True)))
    kept = Kept(*map(np.concatenate, zip(*(way.kept for way in ways), strict=True)))
    parts = [way.transfers(gradient=False) for way in ways]
    if demand.gradients:
        parts += [way.transfers(gradient=True) for way in ways]
    wanted, by_keys = demand.wanted, demand.side == "kv"
    queries, keys = (wanted.queries, halves) if by_keys else (halves, wanted.keys)
    return Tables(demand.grid.size, pairs, joined(*parts), kept, queries, keys)


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


class _Way:
    """One way round, for the bundles that go this way: arrays [bundle, step], and with each owner's
    bundles as a bit set [owner, step]."""

    def __init__(self, demand: Demand, bundles: Bundles, way: int):
        steps = np.arange(demand.grid.size, dtype=np.int32)
        self.demand, self.bundles = demand, bundles
        self.here = (steps[:, None] + way * steps) % len(steps)
        self.next = np.roll(self.here, -1, axis=1)
        self.wanted = np.take_along_axis(bundles.wanted, self.here[bundles.owner], axis=1)
        # A kept chunk is still computed with, so its gradient travels, but it need not be sent.
        self.from_forward = steps >= len(steps) - demand.kept

    @property
    def met(self) -> tuple[np.ndarray, ...]:
        """Rank, step, owner and rows of what is computed; a rank's own chunk aside."""
        owner, step, rows = self._entries(self.wanted)
        return self.here[owner, step], step, owner, rows

    @property
    def kept(self) -> Kept:
        """What forward kept."""
        owner, step, rows = self._entries(self.wanted & self.from_forward)
        return Kept(self.here[owner, step], owner, rows)

    def transfers(self, *, gradient: bool) -> Transfers:
        """The hops to the next rank this way.

        A chunk travels beside the step that computes with it, while a rank further along wants it.
        A gradient is complete only after the step, so it travels beside the next one, from the
        first rank on that added to it.
        """
        if gradient:
            moves = np.logical_or.accumulate(self.wanted, axis=1)
        else:
            sent = np.flip(self.wanted & ~self.from_forward, axis=1)
            moves = np.flip(np.logical_or.accumulate(sent, axis=1), axis=1)
            moves = np.pad(moves[:, 1:], ((0, 0), (0, 1)))
        owner, step, rows = self._entries(moves)
        family, ring = self.demand.family(gradient), RINGS.index("flat")
        same = (np.full(len(owner), code, dtype=np.int8) for code in (family, ring))
        src, dst, post = self.here[owner, step], self.next[owner, step], step + gradient
        return Transfers(next(same), owner, rows, src, dst, next(same), post, post + 1)

    def _entries(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Owner, step and rows, where an owner has any of these."""
        bits = self.bundles.bits(which)
        at = np.flatnonzero(bits)
        owner, step = np.divmod(at.astype(np.int32), bits.shape[1])
        return owner, step, bits.reshape(-1)[at]
