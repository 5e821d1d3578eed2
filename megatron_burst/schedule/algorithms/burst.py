# SPDX-License-Identifier: Apache-2.0
"""Rings: `burst` (the two-level ring), `ring` (one level) and `double_ring`.

Source: BurstEngine, section 3.1 (topology-aware ring) and Algorithms 1 and 2, with communication
started before computation. In the two-level ring, chunks move at every step within a node, and once
per outer step between nodes. Either keys and values or queries are sent, and the other tensors stay
on their rank. Gradients of the sent chunks follow one step behind and end at their owner.

This module differs from the paper in three ways. First, a rank's contribution to its own gradient
stays on the rank, and a node's contribution to its own gradients stays in the node. So copies and
gradients both make G - 1 hops on one ring of G ranks. With M nodes of L ranks, they make M (L - 1)
hops within nodes and M - 1 hops between nodes. Second, a hop carries only the rows that a later
rank of the ring uses, and is omitted if there are none. Third, rings run in the direction that
sends fewer bytes.

Steps are counted as in LoongTrain's double ring: an outer step per node, an inner step per rank of
the node.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from ..demand import Demand
from ..tables import Grid, Pairs, Tables, Transfers, transfers


def tables(demand: Demand) -> Tables:
    """Return the pairs and transfers of `burst`: the two-level ring.

    Transfers of gradients overlap with the computation of later steps.
    """
    return two_level(demand, demand.grid)


def ring(demand: Demand) -> Tables:
    """Return the pairs and transfers of `ring`: one ring over all ranks, which ignores nodes.

    This is the two-level ring with all ranks in one node. Its process group is "flat".
    """
    return two_level(demand, Grid(1, demand.grid.size), within="flat")


def double_ring(demand: Demand) -> Tables:
    """Return the pairs and transfers of `double_ring` (LoongTrain, section 4.3).

    It is the two-level ring, but ranks wait for the transfer of a gradient before the next step.
    """
    return two_level(demand, demand.grid, blocks=True)


def two_level(
    demand: Demand, rings: Grid, *, within: str = "intra", blocks: bool = False
) -> Tables:
    """Return the pairs and transfers of inner rings, and of outer rings that connect them.

    Args:
        demand: Demand of the pass.
        rings: Number of inner rings (`inter`) and number of ranks in each (`intra`).
        within: Name of the process group of the inner rings: "intra" or "flat".
        blocks: True if the transfer of a gradient must end before the next step begins. False if it
            overlaps with the next step (within nodes) or the next outer step (between nodes).
    """
    path = _Path(demand, rings)
    parts = [
        part
        for family in demand.sent_families
        for part in (path.within(family, within, blocks), path.between(family, blocks))
    ]
    return demand.as_tables(rings.size, path.pairs(), parts)


class _Path:
    """The path of every bundle (rows of one owner that the same ranks use) along the rings.

    Attributes:
        users: bool [bundle, outer step, inner step], true if the rank that has the bundle at this
            step uses it.
        hops: Axis (1 between nodes, 2 within nodes) -> two arrays: number of hops of the copy of
            each bundle, and number of hops of its gradient.
        ways: Axis -> direction of the rings: 1 to the next rank or node, -1 to the previous one.
    """

    def __init__(self, demand: Demand, rings: Grid):
        nodes, width = rings
        self.demand, self.rings = demand, rings
        self.bundles = bundles = demand.travelling
        self.ways = {1: 1, 2: 1}
        # Repeat both axes, so that the users in ring order from the owner on are a contiguous
        # window.
        twice = np.tile(bundles.users.reshape(-1, nodes, width), (1, 2, 2))
        windows = np.lib.stride_tricks.sliding_window_view(twice, (nodes, width), axis=(1, 2))
        at = np.arange(len(bundles.owner)), *np.divmod(bundles.owner, width)
        self.users = windows[at]
        self.hops = {axis: self._hops(axis) for axis in (1, 2)}
        # The directions of the inner and of the outer rings do not affect each other.
        for axis in (1, 2):
            self._choose_way(axis)

    def moves(self, axis: int, gradient: bool) -> np.ndarray:
        """Return whether each bundle is sent to the next rank or node after each step.

        A bundle is the set of an owner's rows that the same ranks use. There is one outer step per
        node, with one inner step per rank of the node. No gradient is sent within a node at inner
        step 0. The rank that has the bundle at that step collects the sum of its node and sends it
        to the next node. At outer step 0 this rank is the owner, which keeps the sum.

        Args:
            axis: 1 for sends between nodes, 2 for sends within nodes.
            gradient: True for gradients, False for copies.

        Returns:
            bool [bundle, outer step] for axis 1; bool [bundle, outer step, inner step] for axis 2.
        """
        # A copy starts at its owner, so its hops are at the first steps. A gradient ends at its
        # owner, so its hops are at the last steps, from the first rank that adds to the gradient.
        hops, length = self.hops[axis][gradient][..., None], self.rings[axis - 1]
        step = np.arange(length, dtype=hops.dtype)
        return step >= length - hops if gradient else step < hops

    def _hops(self, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of hops of copies and of gradients along an axis, as two arrays.

        A copy is sent up to the last rank or node that uses it. A gradient is sent from the first
        rank or node that adds to it. The arrays are [bundle, outer step] within nodes (axis 2) and
        [bundle] between nodes (axis 1).
        """
        users = self.users
        if axis == 1:  # loop over columns: NumPy's reductions of a short axis are far slower
            users = reduce(np.logical_or, np.moveaxis(users, 2, 0))
        # On the reversed ring, the farthest user is the first rank that adds to the gradient.
        return _farthest(users), _farthest(_turned(users, axis))

    def _choose_way(self, axis: int) -> None:
        """Reverse the direction of the rings along an axis if that sends fewer bytes."""
        sizes, side = self.demand.row_bytes, self.demand.side
        row_bytes = getattr(sizes, side), getattr(sizes, "d" + side)
        # With two ranks both directions are equal. If copies and gradients have equally many bytes
        # per row, reversing does not change the total.
        if self.rings[axis - 1] < 3 or row_bytes[0] == row_bytes[1]:
            return
        unreversed = self.users, self.hops
        bytes_unreversed = self._bytes(axis, row_bytes)
        self.users = _turned(self.users, axis)
        # On a reversed ring, copies make the hops of gradients, and gradients make the hops of
        # copies.
        inner_hops = self.hops[2] if axis == 2 else [_turned(hops, 1) for hops in self.hops[2]]
        self.hops = {1: self.hops[1], 2: inner_hops} | {axis: self.hops[axis][::-1]}
        if self._bytes(axis, row_bytes) >= bytes_unreversed:
            self.users, self.hops = unreversed
        else:
            self.ways[axis] = -1

    def _bytes(self, axis: int, row_bytes: tuple[int, int]) -> int:
        """Return the bytes of all transfers along an axis.

        Args:
            axis: 1 between nodes, 2 within nodes.
            row_bytes: Bytes per row of a copy and of a gradient.
        """
        total = 0
        for size, hops in zip(row_bytes, self.hops[axis], strict=True):
            of_bundle = hops.sum(axis=tuple(range(1, hops.ndim)), dtype=np.int64)
            total += size * int(self.bundles.rows @ of_bundle)
        return total

    def pairs(self) -> Pairs:
        """Return the pairs of all ranks."""
        owner, step, rows, rank, _ = self._entries(self.users)
        return self.demand.pairs(rank, step, owner, rows)

    def within(self, family: str, ring: str, blocks: bool) -> Transfers:
        """Return the transfers to the next rank of the node.

        A rank starts to send a copy before it computes with it, so the copy travels during the
        rank's step (BurstEngine, Algorithm 1). A gradient is complete only after the step, so it
        travels during the next step, one step behind its chunk. When it arrives, the receiver has
        computed its own contribution.

        Args:
            family: Name of the sent tensors ("kv" or "query"), or of their gradients ("dkv" or
                "dquery").
            ring: Name of the process group: "intra" or "flat".
            blocks: True if the transfer of a gradient must end before the next step begins.
        """
        gradient = family != self.demand.side
        # The partial gradients of the owner's own node stay in it: at outer step 0 the ring of the
        # node ends at the owner, so no other node adds to them.
        owner, step, rows, src, dst = self._entries(self.moves(2, gradient))
        post = step + gradient
        land = post + (not (gradient and blocks))
        return transfers(family, ring, owner, rows, src, dst, post, land)

    def between(self, family: str, blocks: bool) -> Transfers:
        """Return the transfers to the next node.

        A transfer may last a whole outer step: one inner step per rank of the node. If a node has
        several ranks, the last part of its sum of gradients needs one more transfer within the
        node. The sum is then sent during the next outer step.

        Args:
            family: Name of the sent tensors ("kv" or "query"), or of their gradients.
            blocks: True if the transfer of a gradient must end before the next step begins.
        """
        width, gradient = self.rings.intra, family != self.demand.side
        # Only the first rank of the inner ring sends to the next node, on the owner's rail. So the
        # NICs of all ranks of a node are busy, each with the chunks of its own index.
        owner, outer, rows, src, dst = self._entries(self.moves(1, gradient))
        post = outer * width + (width + (width > 1) if gradient else 0)
        land = post + (0 if gradient and blocks else width)
        return transfers(family, "inter", owner, rows, src, dst, post, land)

    def _entries(self, selected: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return one entry per owner and step that have selected bundles, as five parallel arrays.

        Args:
            selected: bool [bundle, outer step, inner step], or bool [bundle, outer step].

        Returns:
            Owner of the bundles; step, numbered over all step axes of `selected`; bit set of the
            selected bundles (one bit per bundle of the owner); rank that has the bundles at this
            step; next rank along the last axis of `selected`.
        """
        nodes, width = self.rings
        at, bits = self.bundles.sets(selected)
        steps, at = max(1, selected.size) // max(1, len(selected)), at.astype(np.int32)
        within = selected.ndim == 3
        # NumPy uses vector instructions for `//`, but not for `%` and `divmod`.
        owner = at // steps
        step = at - owner * steps
        outer = step // width if within else step
        inner = step - outer * width if within else np.zeros_like(step)
        ranks = []
        for outer_step, inner_step in ((outer, inner), (outer + 1 - within, inner + within)):
            node = owner // width + self.ways[1] * outer_step
            member = owner + self.ways[2] * inner_step
            node -= node // nodes * nodes
            member -= member // width * width
            ranks.append(node * width + member)
        return owner, step, bits, *ranks


def _turned(array: np.ndarray, axis: int) -> np.ndarray:
    """Reverse the order of steps along `axis`, as in a ring of the opposite direction.

    Step 0, at which the owner has the chunk, stays the first.
    """
    return np.roll(np.flip(array, axis), 1, axis)


def _farthest(users: np.ndarray) -> np.ndarray:
    """Return the largest index of a true entry along the last axis; 0 if no entry is true."""
    length = users.shape[-1]
    farthest = np.zeros(users.shape[:-1], dtype=np.min_scalar_type(-length - 1))
    for index in range(1, length):  # a loop over columns, as in `_Path._hops`
        np.putmask(farthest, users[..., index], index)
    return farthest
