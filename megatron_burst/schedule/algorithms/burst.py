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

from functools import cached_property

import numpy as np

from ..demand import Demand
from ..tables import ALL, RINGS, Grid, Kept, Pairs, Tables, Transfers, joined


def tables(demand: Demand) -> Tables:
    """The two-level ring with gradients that overlap with compute."""
    return two_level(demand, demand.grid)


def two_level(
    demand: Demand, rings: Grid, *, within: str = "intra", blocks: bool = False
) -> Tables:
    """Rings of `rings.intra` ranks and rings across `rings.inter` of these.

    within: whose communicator carries the inner rings. blocks: do gradients land where posted?
    """
    # Which way the inner rings turn changes nothing for the outer ones, nor they for the inner.
    ahead, back = (_Path(demand, rings, way, way) for way in (1, -1))
    outer = min(ahead, back, key=lambda path: path.bytes_between).outer_way
    inner = min(ahead, back, key=lambda path: path.bytes_within).inner_way
    path = ahead if outer == inner == 1 else _Path(demand, rings, outer, inner)
    parts = [path.within(within, gradient=False, blocks=False)]
    parts += [path.between(gradient=False, blocks=False)]
    if demand.gradients:
        parts += [path.within(within, gradient=True, blocks=blocks)]
        parts += [path.between(gradient=True, blocks=blocks)]
    bundles = demand.wanted
    return Tables(
        rings.size, path.pairs(), joined(*parts), path.kept(), bundles.queries, bundles.keys
    )


class _Path:
    """Where every bundle is at every step: arrays [bundle, outer, inner], and with each owner's
    bundles as a bit set [owner, outer, inner].

    outer_way, inner_way: 1 where chunks go to the next node and rank, -1 to the one before.
    """

    def __init__(self, demand: Demand, rings: Grid, outer_way: int, inner_way: int):
        nodes, width = rings
        self.demand, self.rings = demand, rings
        self.outer_way, self.inner_way = outer_way, inner_way
        self.bundles = bundles = demand.travelling
        owner, outer, inner = (x.astype(np.int32) for x in np.ogrid[: rings.size, :nodes, :width])
        node, member = owner // width + outer_way * outer, owner % width + inner_way * inner
        self.here = node % nodes * width + member % width
        here = self.here[bundles.owner]
        self.wanted = np.take_along_axis(
            bundles.wanted, here.reshape(len(here), -1), axis=1
        ).reshape(here.shape)
        # A kept chunk is still computed with, so its gradient travels, but it need not be sent.
        self.from_forward = outer * width + inner >= rings.size - demand.kept

    @cached_property
    def moves_within(self) -> np.ndarray:
        """Which bundles go on within a node after a step? While a rank further along wants them."""
        return _later(self.wanted & ~self.from_forward, axis=2)

    @cached_property
    def moves_between(self) -> np.ndarray:
        """Which go on to the next node? bool [bundle, outer]."""
        return _later((self.wanted & ~self.from_forward).any(axis=2), axis=1)

    @cached_property
    def gradients_within(self) -> np.ndarray:
        """Whose gradients go on within a node? From the first rank on that added to them.

        Inner step 0 adds to the sum that this rank gathers for its node (at outer step 0: for
        itself), so it sends nothing within the node; the node's sum then crosses to the next one.
        """
        moves = np.logical_or.accumulate(self.wanted[:, :, 1:], axis=2)
        return _beside_false(moves, before=1)

    @cached_property
    def gradients_between(self) -> np.ndarray:
        """Whose gradients go on to the next node? bool [bundle, outer]."""
        moves = np.logical_or.accumulate(self.wanted[:, 1:].any(axis=2), axis=1)
        return _beside_false(moves, before=1)

    @property
    def bytes_within(self) -> int:
        """Of all hops within nodes."""
        return self._bytes(self.moves_within, self.gradients_within)

    @property
    def bytes_between(self) -> int:
        """Of all hops between nodes."""
        return self._bytes(self.moves_between, self.gradients_between)

    def pairs(self) -> Pairs:
        """What is computed."""
        owner, step, at, rows = self._entries(self.bundles.bits(self.wanted))
        own = np.flatnonzero(self.demand.visible.diagonal()).astype(np.int32)
        there = np.concatenate([own, self.here.reshape(-1)[at]])
        step = np.concatenate([np.zeros_like(own), step])
        rows = np.concatenate([np.full(len(own), ALL), rows])
        return self.demand.pairs(there, step, np.concatenate([own, owner]), rows)

    def kept(self) -> Kept:
        """In the order of the steps."""
        bits = self.bundles.bits(self.wanted & self.from_forward)
        owner, step, at, rows = self._entries(bits)
        order = np.argsort(step, kind="stable")
        return Kept(self.here.reshape(-1)[at][order], owner[order], rows[order])

    def within(self, ring: str, gradient: bool, blocks: bool) -> Transfers:
        """The hops to the next rank of the node.

        An activation is posted before the step that computes with it: the copy to the next rank
        travels while this rank computes (BurstEngine Algorithm 1). A gradient is complete only
        after the step, so it travels beside the next one, a step behind its chunk; when it lands,
        the receiver has its own part ready.
        """
        moves = self.gradients_within if gradient else self.moves_within
        owner, step, at, rows = self._entries(self.bundles.bits(moves))
        src, dst = (x.reshape(-1)[at] for x in (self.here, np.roll(self.here, -1, axis=2)))
        post = step + gradient
        return self._transfers(owner, rows, src, dst, ring, gradient, post, post + (not blocks))

    def between(self, gradient: bool, blocks: bool) -> Transfers:
        """The hops to the next node.

        A whole outer step to cross the slow link: it hides behind `width` pairs. The last part of a
        node's sum takes one hop more within the node, if there are any; the sum then crosses during
        the next outer step.
        """
        width, first = self.rings.intra, self.here[:, :, 0]
        moves = self.gradients_between if gradient else self.moves_between
        owner, outer, at, rows = self._entries(self.bundles.bits(moves))
        src, dst = (x.reshape(-1)[at] for x in (first, np.roll(first, -1, axis=1)))
        post = outer * width + (width + (width > 1) if gradient else 0)
        land = post + (0 if blocks else width)
        return self._transfers(owner, rows, src, dst, "inter", gradient, post, land)

    def _bytes(self, moves: np.ndarray, gradients: np.ndarray) -> int:
        each = self.demand.row_bytes, self.demand.side
        copy, gradient = (getattr(each[0], "d" * d + each[1]) for d in (False, True))
        rows = self.bundles.rows.reshape(-1, *(1,) * (moves.ndim - 1))
        return int((rows * moves).sum() * copy + (rows * gradients).sum() * gradient)

    def _entries(self, bits: np.ndarray) -> tuple[np.ndarray, ...]:
        """Of the sets [owner, ...] that are not empty: owner, index in the rest, index in all, and
        the set."""
        at = np.flatnonzero(bits)
        owner, rest = np.divmod(at.astype(np.int32), bits[0].size)
        return owner, rest, at, bits.reshape(-1)[at]

    def _transfers(self, owner, rows, src, dst, ring, gradient, post, land) -> Transfers:
        family, ring = self.demand.family(gradient), RINGS.index(ring)
        same = (np.full(len(owner), code, dtype=np.int8) for code in (family, ring))
        return Transfers(next(same), owner, rows, src, dst, next(same), post, land)


def _later(wanted: np.ndarray, axis: int) -> np.ndarray:
    """Is anything wanted at a later index of `axis`?"""
    later = np.flip(np.logical_or.accumulate(np.flip(wanted, axis), axis), axis)
    return _beside_false(np.delete(later, 0, axis), before=0)


def _beside_false(moves: np.ndarray, before: int) -> np.ndarray:
    """`moves` with one more False along its last axis: before the others, or behind them."""
    return np.pad(moves, [(0, 0)] * (moves.ndim - 1) + [(before, 1 - before)])
