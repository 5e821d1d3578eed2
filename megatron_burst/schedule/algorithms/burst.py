"""The two-level ring: within a node chunks go round at every step, between nodes once per round.

Source: BurstEngine section 3.1 (topology-aware ring) and Algorithms 1 and 2, with communication
started before computation. One family of chunks travels and the other stays; gradients of the
travelling family travel one step behind it and end at their owner. Other than in the paper, what a
rank adds to its own gradient stays on it, and what a node adds to its own stays in it: activations
and gradients both make G - 1 hops on one ring, or M (L - 1) within and M - 1 between M nodes of L
ranks. Hops that no rank further along needs are left out.

Steps are counted as LoongTrain's double ring has them: an outer step per node, an inner step per
rank of the node.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..demand import Demand
from ..tables import RINGS, Grid, Kept, Pairs, Tables, Transfers, joined


def tables(demand: Demand) -> Tables:
    """The two-level ring with gradients that overlap with compute."""
    return two_level(demand, demand.grid)


def two_level(
    demand: Demand, rings: Grid, *, within: str = "intra", blocks: bool = False
) -> Tables:
    """Rings of `rings.intra` ranks and rings across `rings.inter` of these.

    within: whose communicator carries the inner rings. blocks: do gradients land where posted?
    """
    path = _Path(demand, rings)
    moves = _moves(path, demand)
    parts = [
        path.within(moves.within, within, gradient=False, blocks=False),
        path.between(moves.between, gradient=False, blocks=False),
        path.within(moves.gradient_within, within, gradient=True, blocks=blocks),
        path.between(moves.gradient_between, gradient=True, blocks=blocks),
    ]
    return Tables(rings.size, path.pairs(), joined(*parts), path.kept())


class _Path:
    """Where the chunk of every owner is at every step: the arrays [owner, outer, inner]."""

    def __init__(self, demand: Demand, rings: Grid):
        nodes, width = rings
        self.demand, self.rings = demand, rings
        owner, outer, inner = (x.astype(np.int32) for x in np.ogrid[: rings.size, :nodes, :width])
        self.here = (owner // width + outer) % nodes * width + (owner % width + inner) % width
        self.used = demand.used(owner, self.here)
        # A kept chunk is still computed with, so its gradient travels, but it need not be sent.
        self.from_forward = outer * width + inner >= rings.size - demand.kept

    def pairs(self) -> Pairs:
        """What is computed."""
        owner, step, at = self._rows(self.used)
        return self.demand.pairs(self.here.reshape(-1)[at], step, owner)

    def kept(self) -> Kept:
        """In the order of the steps."""
        owner, step, at = self._rows(self.used & self.from_forward)
        order = np.argsort(step, kind="stable")
        return Kept(self.here.reshape(-1)[at][order], owner[order])

    def within(self, moves: np.ndarray, ring: str, gradient: bool, blocks: bool) -> Transfers:
        """The hops to the next rank of the node; moves: bool [owner, outer, inner].

        An activation is posted before the step that computes with it: the copy to the next rank
        travels while this rank computes (BurstEngine Algorithm 1). A gradient is complete only
        after the step, so it travels beside the next one, a step behind its chunk; when it lands,
        the receiver has its own part ready.
        """
        owner, step, at = self._rows(moves)
        src, dst = (x.reshape(-1)[at] for x in (self.here, np.roll(self.here, -1, axis=2)))
        post = step + gradient
        return self._transfers(owner, src, dst, ring, gradient, post, post + (not blocks))

    def between(self, moves: np.ndarray, gradient: bool, blocks: bool) -> Transfers:
        """The hops to the next node; moves: bool [owner, outer].

        A whole outer step to cross the slow link: it hides behind `width` pairs. The last part of a
        node's sum takes one hop more within the node, if there are any; the sum then crosses during
        the next outer step.
        """
        width, first = self.rings.intra, self.here[:, :, 0]
        owner, outer, at = self._rows(moves)
        src, dst = (x.reshape(-1)[at] for x in (first, np.roll(first, -1, axis=1)))
        post = outer * width + (width + (width > 1) if gradient else 0)
        land = post + (0 if blocks else width)
        return self._transfers(owner, src, dst, "inter", gradient, post, land)

    def _rows(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the True entries of [owner, ...]: owner, index in the rest, index in all."""
        at = np.flatnonzero(which)
        owner, rest = np.divmod(at.astype(np.int32), which[0].size)
        return owner, rest, at

    def _transfers(self, owner, src, dst, ring, gradient, post, land) -> Transfers:
        family, ring = self.demand.family(gradient), RINGS.index(ring)
        same = (np.full(len(owner), code, dtype=np.int8) for code in (family, ring))
        return Transfers(next(same), owner, src, dst, next(same), post, land)


class _Moves(NamedTuple):
    """Does the chunk of an owner move on after a step? bool [owner, outer, inner] within nodes,
    [owner, outer] between nodes."""

    within: np.ndarray
    between: np.ndarray
    gradient_within: np.ndarray
    gradient_between: np.ndarray


def _moves(path: _Path, demand: Demand) -> _Moves:
    used, fetched = path.used, path.used & ~path.from_forward
    by_node, fetched_by_node = (np.logical_or.reduce(x, 2) for x in (used, fetched))
    # An activation moves while a rank further along has a use for it ...
    later, later_nodes = _from_the_end(fetched, 2), _from_the_end(fetched_by_node, 1)
    # ... and a gradient from the first rank that added to it. Inner step 0 adds to the sum that
    # this rank gathers for its node (at outer step 0: for itself), so it sends nothing within the
    # node; the node's sum then crosses to the next node.
    so_far = np.logical_or.accumulate(used[:, :, 1:], 2) & demand.gradients
    so_far_nodes = np.logical_or.accumulate(by_node[:, 1:], 1) & demand.gradients
    return _Moves(
        within=_with_false(later[:, :, 1:], before=0),
        between=_with_false(later_nodes[:, 1:], before=0),
        gradient_within=_with_false(so_far, before=1),
        gradient_between=_with_false(so_far_nodes, before=1),
    )


def _from_the_end(used: np.ndarray, axis: int) -> np.ndarray:
    """Is anything used at this index of `axis` or at a later one?"""
    return np.flip(np.logical_or.accumulate(np.flip(used, axis), axis), axis)


def _with_false(moves: np.ndarray, before: int) -> np.ndarray:
    """`moves` with one more False along its last axis: before the others, or behind them."""
    return np.pad(moves, [(0, 0)] * (moves.ndim - 1) + [(before, 1 - before)])
