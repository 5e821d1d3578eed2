"""Which way rows cross between nodes: the rails and the relays of a multicast.

A row crosses to every other node that wants it once, on the rail of its carrier: the ranks with the
carrier's index in their nodes. The carrier is the owner, whose rows then need no hop within the
node first, unless its rail would be busier than the busiest node has to be: what is too much goes
to rails with room. A node that would send more than that asks nodes that want the same rows to
pass them on. Decides by rows: gradients come back the same way, so that both directions are even.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .bundles import MOST, Bundles, Runs
from .tables import Grid

ROOM = 1.05  # a rail may be so much busier than the busiest node makes necessary
PARTS = 64  # no rows leave their rail that are fewer than a mean shard over this
SWEEPS = 3  # over all bundles on busy rails
FANOUT = 2  # to so many nodes a node passes on what another one sent it


class Routes(NamedTuple):
    """How every bundle travels; bundles that were spread over rails are cut.

    carrier: [n] the index in its node of the ranks on whose rail a bundle crosses. parent: [n,
    nodes] from which node a node gets it; -1 for its owner's and where nobody wants it.
    """

    bundles: Bundles
    carrier: np.ndarray
    parent: np.ndarray


class _Crossing(NamedTuple):
    """Columns by bundle: its owner's node and index, its rows, which other nodes want it, bool [n,
    nodes], and to how many of them its own node sends it."""

    node: np.ndarray
    index: np.ndarray
    rows: np.ndarray
    wanted: np.ndarray
    copies: np.ndarray


def routes(bundles: Bundles, grid: Grid) -> Routes:
    """The way of every bundle over this grid."""
    crossing, most = _crossing(bundles, grid)
    least = max(1, int(bundles.rows.sum() // (grid.size * PARTS)))
    shares = _shares(crossing, grid, most, least)
    _limit(shares, bundles.owner, crossing.index)
    bundles, of, carrier = _cut(bundles, crossing.index, shares)
    crossing = _Crossing(*(column[of] for column in crossing))._replace(rows=bundles.rows)
    return Routes(bundles, carrier, _parents(crossing, grid, most))


def _crossing(bundles: Bundles, grid: Grid) -> tuple[_Crossing, float]:
    """What crosses, and how many rows the busiest rail has to send or receive at least."""
    nodes, width = grid
    node, index = np.divmod(bundles.owner, width)
    wanted = bundles.wanted.reshape(-1, nodes, width).any(axis=2)
    wanted[np.arange(len(node)), node] = False
    rows, count = bundles.rows, wanted.sum(axis=1)
    most = (rows @ wanted).max(initial=0) / width
    # Copies of a node are one of each bundle and, as far as its rails have room, all of them.
    once, more = (
        np.bincount(node, rows * each, nodes) for each in (count > 0, np.maximum(count - 1, 0))
    )
    share = np.clip((most * width - once) / np.maximum(more, 1), 0, 1)[node]
    copies = np.minimum(count, 1 + np.floor(np.maximum(count - 1, 0) * share + 1e-9).astype(int))
    sent = np.bincount(node, rows * copies, nodes).max(initial=0) / width
    return _Crossing(node, index, rows, wanted, copies), max(most, sent) * ROOM


def _shares(crossing: _Crossing, grid: Grid, most: float, least: int) -> np.ndarray:
    """int64 [n, rails]: how many rows of each bundle cross on each rail.

    All on their owner's, to begin with. Then each node in turn takes rows off rails with more than
    `most`, its largest bundles first, one bundle of every node at a time. Where several nodes do so
    for the same rail at once, each takes its part of what is too much and of the room elsewhere.
    """
    nodes, width = grid
    node, index, rows, wanted, copies = crossing
    shares = np.zeros((len(rows), width), dtype=np.int64)
    shares[np.arange(len(rows)), index] = rows
    sent, got = np.zeros((nodes, width)), np.zeros((nodes, width))
    np.add.at(sent, (node, index), rows * copies)
    for rail in range(width):
        of = index == rail
        got[:, rail] = rows[of] @ wanted[of]
    for _ in range(SWEEPS):
        busy = sent[node, index] > most
        busy |= (wanted & (got.T[index] > most)).any(axis=1)
        some = np.flatnonzero(busy & (copies > 0) & (rows >= least))
        for at in _turns(some, node[some], rows[some] * copies[some]):
            own, who, to = index[at], node[at], wanted[at]
            left = most - sent[who]
            left /= copies[at][:, None]
            room = (most - got) / np.maximum(to.sum(axis=0), 1)[:, None]
            room = np.minimum(left, np.where(to[:, :, None], room, np.inf).min(axis=1))
            line = np.arange(len(at))
            move = np.minimum(np.ceil(-room[line, own]), shares[at, own]).astype(np.int64)
            room[line, own] = 0
            moved = _filled(move, np.maximum(room, 0).astype(np.int64), least, own)
            moved[line, own] -= moved.sum(axis=1)
            shares[at] += moved
            sent[who] += moved * copies[at][:, None]
            got += np.einsum("ij,ik->jk", to.astype(float), moved.astype(float))
    return shares


def _turns(which: np.ndarray, node: np.ndarray, weight: np.ndarray) -> list[np.ndarray]:
    """`which`, heaviest first, in groups with at most one of each node."""
    order = np.lexsort((-weight, node))
    node = node[order]
    turn = np.arange(len(node)) - np.searchsorted(node, node)
    by_turn = np.argsort(turn, kind="stable")
    return np.split(which[order][by_turn], np.cumsum(np.bincount(turn))[:-1]) if len(which) else []


def _filled(move: np.ndarray, room: np.ndarray, least: int, own: np.ndarray) -> np.ndarray:
    """How many of `move` rows [i] each rail takes: those with most room first; [i, rails]."""
    # Equal room: the next rail first, so that nodes with the same needs differ.
    width = room.shape[1]
    turned = (np.arange(width) - own[:, None]) % width
    order = np.lexsort((turned, -room), axis=1)
    room = np.take_along_axis(room, order, axis=1)
    before = np.cumsum(room, axis=1) - room
    taken = np.clip(move[:, None] - before, 0, room)
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
    """The shares as bundles of their own, of each the bundle that it was cut from, and its rail.

    An owner's are numbered rail by rail, its own first: what travels together lies together.
    """
    of, rail = np.nonzero(shares)
    stop = np.cumsum(shares[of, rail])  # among all rows, bundle by bundle
    runs, begin = bundles.runs, np.cumsum(bundles.runs.rows) - bundles.runs.rows
    edges = np.unique(np.concatenate([begin, stop[:-1], stop[-1:]]))
    run = np.searchsorted(begin, edges[:-1], side="right") - 1
    part = np.searchsorted(stop, edges[:-1], side="right")
    owner = bundles.owner[of]
    turned = (rail - index[of]) % shares.shape[1]
    order = np.lexsort((bundles.number[of], turned, owner))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    of, rail, owner = of[order], rail[order], owner[order]
    number = np.arange(len(owner)) - np.searchsorted(owner, owner)
    first, part = runs.first[run] + edges[:-1] - begin[run], place[part]
    by_part = np.lexsort((first, part))
    cut = Runs(part[by_part], first[by_part], np.diff(edges)[by_part])
    return Bundles(owner, number, bundles.wanted[of], cut), of, rail


def _parents(crossing: _Crossing, grid: Grid, most: float) -> np.ndarray:
    """[n, nodes]: which node sends a bundle to a node; -1: none.

    The owner's node sends it to as many as `copies` says. These pass it on along trees, which begin
    at another node for every bundle, so that all pass on alike; nodes that send much as it is come
    last and pass on nothing.
    """
    nodes = grid.inter
    node, _, rows, wanted, copies = crossing
    parent = np.where(wanted, node[:, None], -1)
    some = np.flatnonzero(copies < wanted.sum(axis=1))
    if not len(some):
        return parent
    full = np.bincount(node, rows * copies, nodes) >= most * grid.intra / ROOM
    of = node[some]  # owners in ascending order, so nodes are
    turn = (np.arange(len(some)) - np.searchsorted(of, of)) * nodes // np.bincount(of)[of]
    there = np.arange(nodes)
    key = (there - node[some, None] - 1 - turn[:, None]) % nodes
    key = key + nodes * full + 2 * nodes * ~wanted[some]
    order = np.argsort(key, axis=1)
    position = np.arange(nodes) - copies[some, None]
    above = np.take_along_axis(order, np.maximum(position // FANOUT, 0), axis=1)
    above = np.where(position < 0, node[some, None], above)
    found = np.empty_like(order)
    np.put_along_axis(found, order, above, axis=1)
    parent[some] = np.where(wanted[some], found, -1)
    return parent
