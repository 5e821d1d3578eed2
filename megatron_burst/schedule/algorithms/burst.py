# SPDX-License-Identifier: Apache-2.0
"""The two-level ring: within a node chunks go round at every step, between nodes once per round.

Source: BurstEngine section 3.1 (topology-aware ring) and Algorithms 1 and 2, with communication
started before computation. One family of chunks travels and the other stays; gradients of the
travelling family travel one step behind it and end at their owner. Other than in the paper, what a
rank adds to its own gradient stays on it, and what a node adds to its own stays in it: activations
and gradients both make G - 1 hops on one ring, or M (L - 1) within and M - 1 between M nodes of L
ranks. A hop carries the rows that a rank further along needs, and is left out where there are none;
rings go round the way that sends fewer bytes.

Steps are counted as LoongTrain's double ring has them: an outer step per node, an inner step per
rank of the node.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from ..demand import Demand
from ..tables import Grid, Pairs, Tables, Transfers, transfers


def tables(demand: Demand) -> Tables:
    """The two-level ring with gradients that overlap with compute."""
    return two_level(demand, demand.grid)


def ring(demand: Demand) -> Tables:
    """One ring over all ranks, whatever the links between them: the two-level ring of a single
    node, on a communicator of its own.
    """
    return two_level(demand, Grid(1, demand.grid.size), within="flat")


def double_ring(demand: Demand) -> Tables:
    """LoongTrain's double ring (section 4.3): its gradients land where they are posted."""
    return two_level(demand, demand.grid, blocks=True)


def two_level(
    demand: Demand, rings: Grid, *, within: str = "intra", blocks: bool = False
) -> Tables:
    """Rings of `rings.intra` ranks and rings across `rings.inter` of these.

    within: whose communicator carries the inner rings. blocks: do gradients land where posted?
    """
    path = _Path(demand, rings)
    parts = [
        part
        for family in demand.sent_families
        for part in (path.within(family, within, blocks), path.between(family, blocks))
    ]
    return demand.as_tables(rings.size, path.pairs(), parts)


class _Path:
    """Where every bundle is at every step: arrays [bundle, outer, inner].

    Rings go round the way that sends fewer bytes: to the next rank or node, or to the one before.
    ways: 1 or -1, by axis.
    """

    def __init__(self, demand: Demand, rings: Grid):
        nodes, width = rings
        self.demand, self.rings = demand, rings
        self.bundles = bundles = demand.travelling
        self.ways = {1: 1, 2: 1}
        # Twice round in both directions: who is how far ahead of its owner is then a window of it.
        twice = np.tile(bundles.wanted.reshape(-1, nodes, width), (1, 2, 2))
        windows = np.lib.stride_tricks.sliding_window_view(twice, (nodes, width), axis=(1, 2))
        at = np.arange(len(bundles.owner)), *np.divmod(bundles.owner, width)
        self.wanted = windows[at]
        self.hops = {axis: self._hops(axis) for axis in (1, 2)}
        # Which way the inner rings turn changes nothing for the outer ones, nor they for the inner.
        for axis in (1, 2):
            self._choose_way(axis)

    def moves(self, axis: int, gradient: bool) -> np.ndarray:
        """Which bundles, or their gradients, go on after a step, within nodes (axis 2) or between
        them? bool [bundle, outer, inner] or [bundle, outer].

        Inner step 0 adds to the sum that this rank gathers for its node (at outer step 0: for
        itself), so it sends nothing within the node; the node's sum then crosses to the next one.
        """
        # A copy sets out from its owner, so it makes its hops at the first steps; a gradient ends
        # at its owner, so it makes them at the last ones, from the first rank on that adds to it.
        hops, length = self.hops[axis][gradient][..., None], self.rings[axis - 1]
        step = np.arange(length, dtype=hops.dtype)
        return step >= length - hops if gradient else step < hops

    def _hops(self, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """How many hops copies and gradients make along an axis: to the last rank, or node, that
        wants them, and from the first on that adds to them.
        """
        wanted = self.wanted
        if axis == 1:  # by columns: NumPy's reductions of a short axis take far longer
            wanted = reduce(np.logical_or, np.moveaxis(wanted, 2, 0))
        # Turned, the ring counts from its end: the farthest rank is the first one that adds.
        return _farthest(wanted), _farthest(_turned(wanted, axis))

    def _choose_way(self, axis: int) -> None:
        """Turn the rings along an axis if that sends fewer bytes."""
        sizes, side = self.demand.row_bytes, self.demand.side
        each = getattr(sizes, side), getattr(sizes, "d" + side)
        # Two ranks have one way; and where copies and gradients are as large, turning swaps them.
        if self.rings[axis - 1] < 3 or each[0] == each[1]:
            return
        before = self.wanted, self.hops
        there = self._bytes(axis, each)
        self.wanted = _turned(self.wanted, axis)
        # Copies make the hops that gradients made the other way, and gradients those of copies.
        other = self.hops[2] if axis == 2 else [_turned(x, 1) for x in self.hops[2]]
        self.hops = {1: self.hops[1], 2: other} | {axis: self.hops[axis][::-1]}
        if self._bytes(axis, each) >= there:
            self.wanted, self.hops = before
        else:
            self.ways[axis] = -1

    def _bytes(self, axis: int, each: tuple[int, int]) -> int:
        """Bytes of all hops along an axis. each: bytes per row of a copy, and of a gradient."""
        total = 0
        for size, hops in zip(each, self.hops[axis], strict=True):
            of_bundle = hops.sum(axis=tuple(range(1, hops.ndim)), dtype=np.int64)
            total += size * int(self.bundles.rows @ of_bundle)
        return total

    def pairs(self) -> Pairs:
        """What is computed."""
        owner, step, rows, rank, _ = self._entries(self.wanted)
        return self.demand.pairs(rank, step, owner, rows)

    def within(self, family: str, ring: str, blocks: bool) -> Transfers:
        """The hops to the next rank of the node. blocks: do gradients land where posted?

        An activation is posted before the step that computes with it: the copy to the next rank
        travels while this rank computes (BurstEngine Algorithm 1). A gradient is complete only
        after the step, so it travels beside the next one, a step behind its chunk; when it lands,
        the receiver has its own part ready.
        """
        gradient = family != self.demand.side
        # The partial gradients of the owner's own node stay in it: at outer step 0 the ring of the
        # node ends at the owner, so nothing of them has to come home from another node.
        owner, step, rows, src, dst = self._entries(self.moves(2, gradient))
        post = step + gradient
        land = post + (not (gradient and blocks))
        return transfers(family, ring, owner, rows, src, dst, post, land)

    def between(self, family: str, blocks: bool) -> Transfers:
        """The hops to the next node.

        A whole outer step to cross the slow link: it hides behind `width` pairs. The last part of a
        node's sum takes one hop more within the node, if there are any; the sum then crosses during
        the next outer step.
        """
        width, gradient = self.rings.intra, family != self.demand.side
        # Only the first rank of the inner ring crosses, on the owner's rail: the NICs of all ranks
        # of a node carry something at once, each the chunks of its own index.
        owner, outer, rows, src, dst = self._entries(self.moves(1, gradient))
        post = outer * width + (width + (width > 1) if gradient else 0)
        land = post + (0 if gradient and blocks else width)
        return transfers(family, "inter", owner, rows, src, dst, post, land)

    def _entries(self, which: np.ndarray) -> tuple[np.ndarray, ...]:
        """The sets [owner, outer, inner] or [owner, outer] of bundles that are not empty, as
        columns: owner, index in the rest, the set, who has it, and who is next on the last axis.
        """
        nodes, width = self.rings
        at, bits = self.bundles.sets(which)
        owner, rest = np.divmod(at.astype(np.int32), max(1, which.size) // max(1, len(which)))
        within = which.ndim == 3
        outer, inner = np.divmod(rest, width) if within else (rest, np.zeros_like(rest))
        ranks = (
            (owner // width + self.ways[1] * node) % nodes * width
            + (owner + self.ways[2] * member) % width
            for node, member in ((outer, inner), (outer + 1 - within, inner + within))
        )
        return owner, rest, bits, *ranks


def _turned(x: np.ndarray, axis: int) -> np.ndarray:
    """The same ring the other way round, from the same rank on."""
    return np.roll(np.flip(x, axis), 1, axis)


def _farthest(wanted: np.ndarray) -> np.ndarray:
    """The last index of the last axis at which something is wanted, 0 if none is."""
    length = wanted.shape[-1]
    found = np.zeros(wanted.shape[:-1], dtype=np.min_scalar_type(-length - 1))
    for index in range(1, length):  # as above, by columns
        np.putmask(found, wanted[..., index], index)
    return found
