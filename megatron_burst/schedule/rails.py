# SPDX-License-Identifier: Apache-2.0
"""Which way rows cross between nodes: the rails and the relays of a multicast.

A row crosses to every other node that wants it once, on the rail of its carrier: the ranks with the
carrier's index in their nodes. The carrier is the owner, whose rows then need no hop within the
node first, unless its rail would be busier than the busiest node has to be: what is too much goes
to rails with room. A node that would send more than that asks nodes that want the same rows to
pass them on. Decides by rows: gradients come back the same way, so that both directions are even.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .bundles import MOST, Bundles, Runs
from .tables import Grid

ROOM = 1.05  # a rail may be so much busier than the busiest node makes necessary
PARTS = 64  # no rows leave their rail that are fewer than a mean shard over this
HOT = 1.5  # an owner hands its rows to peers if it sends so many times what a rank receives
SWEEPS = 2  # over all bundles on busy rails
APART = 4  # groups of bundles of several nodes that go to one node
FANOUT = 2  # to so many nodes a node passes on what another one sent it


class Routes(NamedTuple):
    """How every bundle travels; bundles that travel on several ways are cut.

    carrier: [n] the index in its node of the ranks on whose rail a bundle crosses. parent: [n,
    nodes] from which node a node gets it; -1 for its owner's and where nobody wants it. handed:
    bool [n], do the owner's node peers get it from the carrier, too?
    """

    bundles: Bundles
    carrier: np.ndarray
    parent: np.ndarray
    handed: np.ndarray


class _Crossing(NamedTuple):
    """Columns by bundle: its owner's node and rail, its rows, which other nodes want it, bool [n,
    nodes], and to how many of them its own node sends it.
    """

    node: np.ndarray
    rail: np.ndarray
    rows: np.ndarray
    wanted: np.ndarray
    copies: np.ndarray

    @property
    def relayed(self) -> np.ndarray:
        """Which bundles do nodes pass on to others?"""
        return self.copies < self.wanted.sum(axis=1)


def routes(bundles: Bundles, grid: Grid) -> Routes:
    """The way of every bundle over this grid."""
    crossing, most = _crossing(bundles, grid)
    least = max(1, int(bundles.rows.sum() // (grid.size * PARTS)))
    handed = _handed(bundles, grid)
    shares = _shares(crossing, grid, handed, most, least)
    # Two trees for what nodes pass on: who passes on in one does not in the other.
    halves = np.where(crossing.relayed[:, None] & (shares >= 2 * least), shares // 2, 0)
    shares = np.concatenate([shares - halves, halves], axis=1)
    _limit(shares, bundles.owner, crossing.rail)
    bundles, of, part = _cut(bundles, crossing.rail, shares)
    crossing = _Crossing(*(column[of] for column in crossing))._replace(rows=bundles.rows)
    second, carrier = np.divmod(part, grid.intra)
    turn = of + carrier * grid.inter // grid.intra
    parent = _parents(crossing, grid, turn, second > 0, most)
    return Routes(bundles, carrier, parent, handed[of])


def _crossing(bundles: Bundles, grid: Grid) -> tuple[_Crossing, float]:
    """What crosses, and how many rows a rail may send or receive."""
    nodes, width = grid
    node, index = np.divmod(bundles.owner, width)
    wanted = np.logical_or.reduce(bundles.wanted.reshape(-1, nodes, width), axis=2)
    wanted[np.arange(len(node)), node] = False
    rows, count = bundles.rows, wanted.sum(axis=1)
    most = (rows @ wanted.astype(float)).max(initial=0) / width  # float: BLAS
    # Copies of a node are one of each bundle and, as far as its rails have room, all of them.
    more = np.maximum(count - 1, 0)
    once, again = (np.bincount(node, rows * each, nodes) for each in (count > 0, more))
    share = np.clip((most * width - once) / np.maximum(again, 1), 0, 1)[node]
    copies = np.minimum(count, 1 + np.floor(more * share + 1e-9).astype(int))
    sent = np.bincount(node, rows * copies, nodes).max(initial=0) / width
    return _Crossing(node, index, rows, wanted, copies), max(most, sent) * ROOM


def _handed(bundles: Bundles, grid: Grid) -> np.ndarray:
    """Bool [n]: of owners that would send much more within their node than any rank receives."""
    wanted = bundles.wanted.reshape(-1, *grid)
    home = wanted[np.arange(len(wanted)), bundles.owner // grid.intra].sum(axis=1)
    sent = np.bincount(bundles.owner, bundles.rows * home, grid.size)
    got = bundles.rows @ bundles.wanted.astype(float)
    return (sent > HOT * got.max(initial=0))[bundles.owner]


def _shares(
    crossing: _Crossing, grid: Grid, handed: np.ndarray, most: float, least: int
) -> np.ndarray:
    """int64 [n, rails]: how many rows of each bundle travel by each rail.

    To begin with all by their owner's, or by all alike where they are handed to peers anyway. Then
    each node in turn takes rows off rails with more than `most`, its largest bundles first, one
    bundle of every node at a time, and where several of these go to one node, few at a time. These
    take their parts of what is too much and of the room elsewhere.
    """
    nodes, width = grid
    node, index, rows, wanted, copies = crossing
    shares = np.zeros((len(rows), width), dtype=np.int64)
    shares[handed] = np.where(rows >= least * width, rows // width, 0)[handed, None]
    shares[np.arange(len(rows)), index] += rows - shares.sum(axis=1)
    sent, got = np.zeros((nodes, width)), wanted.T.astype(float) @ shares
    np.add.at(sent, node, shares * copies[:, None])
    for _ in range(SWEEPS):
        busy = sent[node, index] > most
        busy |= (wanted & (got.T[index] > most)).any(axis=1)
        some = np.flatnonzero(busy & (copies > 0) & (rows >= least))
        for at in _turns(some, crossing):
            own, who, to = index[at], node[at], wanted[at]
            room = (most - got) / np.maximum(to.sum(axis=0), 1)[:, None]
            room = np.where(to[:, :, None], room, np.inf).min(axis=1)
            room = np.minimum(room, (most - sent[who]) / copies[at][:, None])
            line = np.arange(len(at))
            move = np.minimum(np.ceil(-room[line, own]), shares[at, own]).astype(np.int64)
            room[line, own] = 0
            moved = _filled(move, np.maximum(room, 0).astype(np.int64), least, own)
            moved[line, own] -= moved.sum(axis=1)
            shares[at] += moved
            sent[who] += moved * copies[at][:, None]
            got += to.T.astype(float) @ moved
    return shares


def _turns(which: np.ndarray, crossing: _Crossing) -> Iterator[np.ndarray]:
    """`which`, heaviest first, in groups with at most one of each node, and of those that go to the
    same node mostly one.
    """
    node = crossing.node[which]
    order = np.lexsort((-crossing.rows[which] * crossing.copies[which], node))
    node, which = node[order], which[order]
    turn = np.arange(len(node)) - np.searchsorted(node, node)
    for number in range(turn.max(initial=-1) + 1):
        at = which[turn == number]
        to = crossing.wanted[at]
        apart = np.where(to, np.cumsum(to, axis=0) - 1, 0).max(axis=1) % APART
        for part in range(apart.max(initial=-1) + 1):
            if (apart == part).any():
                yield at[apart == part]


def _filled(move: np.ndarray, room: np.ndarray, least: int, own: np.ndarray) -> np.ndarray:
    """How many of `move` rows [i] each rail takes, [i, rails]: in proportion to its room, so that
    room is left on every rail for rows that can use only that one.
    """
    # Equal room: the next rail first, so that nodes with the same needs differ.
    width = room.shape[1]
    turned = (np.arange(width) - own[:, None]) % width
    order = np.lexsort((turned, -room), axis=1)
    room = np.take_along_axis(room, order, axis=1)
    room[np.arange(width) >= np.maximum(move // least, 1)[:, None]] = 0
    total = np.maximum(room.sum(axis=1), 1)[:, None]
    taken = np.minimum(-(-room * move[:, None] // total), room)
    taken = np.diff(np.minimum(np.cumsum(taken, axis=1), move[:, None]), axis=1, prepend=0)
    taken[taken < least] = 0
    found = np.zeros_like(room)
    np.put_along_axis(found, order, taken, axis=1)
    return found


def _limit(shares: np.ndarray, owner: np.ndarray, index: np.ndarray) -> None:
    """Leave so few shares that an owner's are not more than a bit set has bits; in place."""
    line = np.arange(len(owner))
    parts = shares > 0
    parts[line, index] = False
    left = MOST - np.bincount(owner)  # every bundle may keep a share on its own rail
    of, rail = np.nonzero(parts)
    order = np.lexsort((-shares[of, rail], owner[of]))
    of, rail = of[order], rail[order]
    number = np.arange(len(of)) - np.searchsorted(owner[of], owner[of])
    back = number >= left[owner[of]]
    np.add.at(shares, (of[back], index[of[back]]), shares[of[back], rail[back]])
    shares[of[back], rail[back]] = 0


def _cut(
    bundles: Bundles, index: np.ndarray, shares: np.ndarray
) -> tuple[Bundles, np.ndarray, np.ndarray]:
    """The shares as bundles of their own, of each the bundle that it was cut from and its column.

    An owner's are numbered column by column, its own first: what travels together lies together.
    """
    of, column = np.nonzero(shares)
    stop = np.cumsum(shares[of, column])  # among all rows, bundle by bundle
    runs, begin = bundles.runs, np.cumsum(bundles.runs.rows) - bundles.runs.rows
    edges = np.unique(np.concatenate([begin, stop[:-1], stop[-1:]]))
    run = np.searchsorted(begin, edges[:-1], side="right") - 1
    part = np.searchsorted(stop, edges[:-1], side="right")
    owner = bundles.owner[of]
    turned = (column - index[of]) % shares.shape[1]
    order = np.lexsort((bundles.number[of], turned, owner))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    of, column, owner = of[order], column[order], owner[order]
    number = np.arange(len(owner)) - np.searchsorted(owner, owner)
    first, part = runs.first[run] + edges[:-1] - begin[run], place[part]
    by_part = np.lexsort((first, part))
    cut = Runs(part[by_part], first[by_part], np.diff(edges)[by_part])
    return Bundles(owner, number, bundles.wanted[of], cut), of, column


def _parents(
    crossing: _Crossing, grid: Grid, turn: np.ndarray, second: np.ndarray, most: float
) -> np.ndarray:
    """[n, nodes]: which node sends a bundle to a node; -1: none.

    The owner's node sends it to as many as `copies` says. These pass it on along trees, which begin
    `turn` nodes farther on, and run the other way round for `second` halves, so that all pass on
    alike; nodes that send much as it is come last and pass on nothing.
    """
    nodes = grid.inter
    node, _, rows, wanted, copies = crossing
    parent = np.where(wanted, node[:, None], -1)
    some = np.flatnonzero(crossing.relayed)
    if not len(some):
        return parent
    full = np.bincount(node, rows * copies, nodes) >= most * grid.intra / ROOM
    there = np.arange(nodes)
    key = (there - node[some, None] - 1 - turn[some, None]) % nodes
    key = np.where(second[some, None], nodes - 1 - key, key)
    key = key + nodes * full + 2 * nodes * ~wanted[some]
    order = np.argsort(key, axis=1)
    position = np.arange(nodes) - copies[some, None]
    above = np.take_along_axis(order, np.maximum(position // FANOUT, 0), axis=1)
    above = np.where(position < 0, node[some, None], above)
    found = np.empty_like(order)
    np.put_along_axis(found, order, above, axis=1)
    parent[some] = np.where(wanted[some], found, -1)
    return parent
