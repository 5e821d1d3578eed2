# SPDX-License-Identifier: Apache-2.0
"""Routes of rows between nodes in a multicast: rails and relay nodes.

A rail is the set of ranks with the same index in their nodes. A row crosses once to every other
node that uses it, on the rail of its carrier (the rank of the owner's node that sends the row to
other nodes). The carrier is normally the owner, because the row then needs no earlier hop within
the node. The busiest node requires a certain load of each rail. If a rail would have a larger load,
the excess moves to rails with free capacity. If a node cannot send a copy to every target node
within this load, target nodes relay the rows. Loads are counted in rows. Gradients take the same
routes back, so both directions are balanced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .bundles import MOST, Bundles, Runs
from .tables import Grid

ROOM = 1.05  # largest load of a rail, relative to the load that the busiest node requires
PARTS = 64  # rows move to another rail only in parts of at least a mean shard / PARTS
HOT = 1.5  # a carrier replaces an owner that sends more than HOT times what any rank receives
SWEEPS = 2  # number of sweeps over all bundles on busy rails
GROUPS = 4  # bundles with the same target node move to other rails in this many groups
FANOUT = 2  # number of receivers of a node that relays


class Routes(NamedTuple):
    """The route of every bundle (rows of one owner that the same ranks use) between nodes.

    Attributes:
        bundles: The bundles. A bundle with several routes is split into several bundles.
        carrier: [n], rail on which the bundle crosses to other nodes: the index of the rail's ranks
            in their nodes.
        parent: [n, nodes], node that sends the bundle to each node; -1 for the owner's node and for
            nodes that do not use the bundle.
        handed: bool [n], true if other ranks of the owner's node also receive the bundle from the
            carrier and not from the owner.
    """

    bundles: Bundles
    carrier: np.ndarray
    parent: np.ndarray
    handed: np.ndarray


class _Crossing(NamedTuple):
    """Sizes and target nodes of all bundles (rows of one owner that the same ranks use).

    Attributes:
        node: [n], owner's node.
        rail: [n], owner's rail: the index of the owner in its node.
        rows: [n], number of rows.
        targets: bool [n, nodes], other nodes that use the bundle.
        copies: [n], number of nodes to which the owner's node sends the bundle; these nodes relay
            it to other target nodes.
    """

    node: np.ndarray
    rail: np.ndarray
    rows: np.ndarray
    targets: np.ndarray
    copies: np.ndarray

    @property
    def relayed(self) -> np.ndarray:
        """Bool [n], true for bundles that target nodes relay to other target nodes."""
        return self.copies < self.targets.sum(axis=1)


def routes(bundles: Bundles, grid: Grid) -> Routes:
    """Return the route of every bundle (rows that the same ranks use) between nodes."""
    crossing, most = _crossing(bundles, grid)
    least = max(1, int(bundles.rows.sum() // (grid.size * PARTS)))
    handed = _handed(bundles, grid)
    shares = _shares(crossing, grid, handed, most, least)
    # Relayed rows use two trees: a node that relays in one tree does not relay in the other.
    halves = np.where(crossing.relayed[:, None] & (shares >= 2 * least), shares // 2, 0)
    shares = np.concatenate([shares - halves, halves], axis=1)
    _limit(shares, bundles.owner, crossing.rail)
    bundles, source, part = _cut(bundles, crossing.rail, shares)
    crossing = _Crossing(*(column[source] for column in crossing))._replace(rows=bundles.rows)
    second, carrier = np.divmod(part, grid.intra)
    turn = source + carrier * grid.inter // grid.intra
    parent = _parents(crossing, grid, turn, second > 0, most)
    return Routes(bundles, carrier, parent, handed[source])


def _crossing(bundles: Bundles, grid: Grid) -> tuple[_Crossing, float]:
    """Return the target nodes of all bundles, and the number of rows that a rail may send."""
    nodes, width = grid
    node, index = np.divmod(bundles.owner, width)
    targets = np.logical_or.reduce(bundles.users.reshape(-1, nodes, width), axis=2)
    targets[np.arange(len(node)), node] = False
    rows, count = bundles.rows, targets.sum(axis=1)
    most = (rows @ targets.astype(float)).max(initial=0) / width  # float, for BLAS
    # A node sends one copy of each bundle, and more copies if its rails have free capacity.
    further = np.maximum(count - 1, 0)
    first_rows, further_rows = (
        np.bincount(node, rows * copies_of_bundle, nodes)
        for copies_of_bundle in (count > 0, further)
    )
    share = np.clip((most * width - first_rows) / np.maximum(further_rows, 1), 0, 1)[node]
    copies = np.minimum(count, 1 + np.floor(further * share + 1e-9).astype(int))
    sent = np.bincount(node, rows * copies, nodes).max(initial=0) / width
    return _Crossing(node, index, rows, targets, copies), max(most, sent) * ROOM


def _handed(bundles: Bundles, grid: Grid) -> np.ndarray:
    """Return the field `handed` of `Routes`: whether a bundle's carrier replaces its owner.

    The carrier then sends the bundle to the other ranks of the owner's node. The field is true if
    the owner would otherwise send many more rows within its node than any rank receives.
    """
    users = bundles.users.reshape(-1, *grid)
    home = users[np.arange(len(users)), bundles.owner // grid.intra].sum(axis=1)
    sent = np.bincount(bundles.owner, bundles.rows * home, grid.size)
    received = bundles.rows @ bundles.users.astype(float)
    return (sent > HOT * received.max(initial=0))[bundles.owner]


def _shares(
    crossing: _Crossing, grid: Grid, handed: np.ndarray, most: float, least: int
) -> np.ndarray:
    """Divide the rows of each bundle among the rails that send them between nodes.

    Initially all rows of a bundle are on its owner's rail. If the entry of the bundle in `handed`
    (`Routes.handed`) is true, its rows are spread over all rails instead. Rows then move from rails
    with more than `most` rows to rails with free capacity, at least `least` rows at a time. The
    function `_turns` determines the order in which bundles move. The result, int64 [bundles,
    rails], has the number of rows of each bundle on each rail.
    """
    nodes, width = grid
    node, index, rows, targets, copies = crossing
    shares = np.zeros((len(rows), width), dtype=np.int64)
    shares[handed] = np.where(rows >= least * width, rows // width, 0)[handed, None]
    shares[np.arange(len(rows)), index] += rows - shares.sum(axis=1)
    sent, received = np.zeros((nodes, width)), targets.T.astype(float) @ shares
    np.add.at(sent, node, shares * copies[:, None])
    for _ in range(SWEEPS):
        busy = sent[node, index] > most
        busy |= (targets & (received.T[index] > most)).any(axis=1)
        movable = np.flatnonzero(busy & (copies > 0) & (rows >= least))
        for at in _turns(movable, crossing):
            own_rail, source_node, target_nodes = index[at], node[at], targets[at]
            room = (most - received) / np.maximum(target_nodes.sum(axis=0), 1)[:, None]
            room = np.where(target_nodes[:, :, None], room, np.inf).min(axis=1)
            room = np.minimum(room, (most - sent[source_node]) / copies[at][:, None])
            line = np.arange(len(at))
            move = np.minimum(np.ceil(-room[line, own_rail]), shares[at, own_rail]).astype(np.int64)
            room[line, own_rail] = 0
            moved = _filled(move, np.maximum(room, 0).astype(np.int64), least, own_rail)
            moved[line, own_rail] -= moved.sum(axis=1)
            shares[at] += moved
            sent[source_node] += moved * copies[at][:, None]
            received += target_nodes.T.astype(float) @ moved
    return shares


def _turns(selected: np.ndarray, crossing: _Crossing) -> Iterator[np.ndarray]:
    """Yield groups of bundles (rows that the same ranks use) that move to other rails together.

    A group has at most one bundle per source node. The bundles of a source node follow in
    descending order of the rows to send. Bundles of different source nodes with the same target
    node are divided among at most `GROUPS` groups.

    Args:
        selected: Indices of the bundles that may move.
        crossing: Target nodes of all bundles.
    """
    node = crossing.node[selected]
    order = np.lexsort((-crossing.rows[selected] * crossing.copies[selected], node))
    node, selected = node[order], selected[order]
    turn = np.arange(len(node)) - np.searchsorted(node, node)
    for number in range(turn.max(initial=-1) + 1):
        at = selected[turn == number]
        target_nodes = crossing.targets[at]
        group = np.where(target_nodes, np.cumsum(target_nodes, axis=0) - 1, 0).max(axis=1) % GROUPS
        for part in range(group.max(initial=-1) + 1):
            if (group == part).any():
                yield at[group == part]


def _filled(move: np.ndarray, room: np.ndarray, least: int, own: np.ndarray) -> np.ndarray:
    """Divide rows that must leave a rail among other rails, in proportion to their free capacity.

    So every rail keeps some capacity for rows that can use only this rail.

    Args:
        move: [i], number of rows of each bundle that must move.
        room: [i, rails], free capacity of each rail, in rows.
        least: Smallest number of rows that a rail gets, if it gets any.
        own: [i], the owner's rail.

    Returns:
        [i, rails], number of rows that each rail gets.
    """
    # If capacities are equal, rails follow their order from `own` on, so nodes with the same needs
    # use different rails.
    width = room.shape[1]
    turned = (np.arange(width) - own[:, None]) % width
    order = np.lexsort((turned, -room), axis=1)
    room = np.take_along_axis(room, order, axis=1)
    room[np.arange(width) >= np.maximum(move // least, 1)[:, None]] = 0
    total = np.maximum(room.sum(axis=1), 1)[:, None]
    taken = np.minimum(-(-room * move[:, None] // total), room)
    taken = np.diff(np.minimum(np.cumsum(taken, axis=1), move[:, None]), axis=1, prepend=0)
    taken[taken < least] = 0
    rows_of_rail = np.zeros_like(room)
    np.put_along_axis(rows_of_rail, order, taken, axis=1)
    return rows_of_rail


def _limit(shares: np.ndarray, owner: np.ndarray, index: np.ndarray) -> None:
    """Change `shares` so that each owner gets at most `MOST` bundles.

    Each share becomes a bundle. The smallest shares move back to the owner's rail.

    Args:
        shares: Number of rows of each bundle on each rail, [n, rails].
        owner: [n], owner of each bundle.
        index: [n], owner's rail.
    """
    line = np.arange(len(owner))
    parts = shares > 0
    parts[line, index] = False
    left = MOST - np.bincount(owner)  # every bundle may keep a share on its own rail
    bundle, rail = np.nonzero(parts)
    order = np.lexsort((-shares[bundle, rail], owner[bundle]))
    bundle, rail = bundle[order], rail[order]
    number = np.arange(len(bundle)) - np.searchsorted(owner[bundle], owner[bundle])
    back = number >= left[owner[bundle]]
    np.add.at(shares, (bundle[back], index[bundle[back]]), shares[bundle[back], rail[back]])
    shares[bundle[back], rail[back]] = 0


def _cut(
    bundles: Bundles, index: np.ndarray, shares: np.ndarray
) -> tuple[Bundles, np.ndarray, np.ndarray]:
    """Split each bundle into one bundle per rail that sends some of its rows.

    The new bundles of an owner are numbered column by column, beginning with the owner's rail, so
    that rows that are sent together are adjacent.

    Args:
        bundles: Bundles before the split.
        index: [n], owner's rail.
        shares: Number of rows of each bundle in each column, [n, columns]. A column is a rail, or a
            rail in one of two trees.

    Returns:
        The new bundles; for each new bundle, the index of its original bundle, and its column.
    """
    source, column = np.nonzero(shares)
    stop = np.cumsum(shares[source, column])  # among all rows, bundle by bundle
    runs, begin = bundles.runs, np.cumsum(bundles.runs.rows) - bundles.runs.rows
    edges = np.unique(np.concatenate([begin, stop[:-1], stop[-1:]]))
    run = np.searchsorted(begin, edges[:-1], side="right") - 1
    part = np.searchsorted(stop, edges[:-1], side="right")
    owner = bundles.owner[source]
    turned = (column - index[source]) % shares.shape[1]
    order = np.lexsort((bundles.number[source], turned, owner))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    source, column, owner = source[order], column[order], owner[order]
    number = np.arange(len(owner)) - np.searchsorted(owner, owner)
    first, part = runs.first[run] + edges[:-1] - begin[run], place[part]
    by_part = np.lexsort((first, part))
    cut = Runs(part[by_part], first[by_part], np.diff(edges)[by_part])
    return Bundles(owner, number, bundles.users[source], cut), source, column


def _parents(
    crossing: _Crossing, grid: Grid, turn: np.ndarray, second: np.ndarray, most: float
) -> np.ndarray:
    """Return which node sends each bundle to each node: [n, nodes]; -1 for none.

    The owner's node sends the bundle to `copies` nodes, which relay it along trees. Trees contain
    the nodes in order, beginning `turn` nodes after the owner's node, or in reverse order if
    `second` is true. So all nodes relay equally. Nodes that already send many rows are last in the
    order and relay nothing.
    """
    nodes = grid.inter
    node, _, rows, targets, copies = crossing
    parent = np.where(targets, node[:, None], -1)
    relayed = np.flatnonzero(crossing.relayed)
    if not len(relayed):
        return parent
    full = np.bincount(node, rows * copies, nodes) >= most * grid.intra / ROOM
    all_nodes = np.arange(nodes)
    key = (all_nodes - node[relayed, None] - 1 - turn[relayed, None]) % nodes
    key = np.where(second[relayed, None], nodes - 1 - key, key)
    key = key + nodes * full + 2 * nodes * ~targets[relayed]
    order = np.argsort(key, axis=1)
    position = np.arange(nodes) - copies[relayed, None]
    above = np.take_along_axis(order, np.maximum(position // FANOUT, 0), axis=1)
    above = np.where(position < 0, node[relayed, None], above)
    parents = np.empty_like(order)
    np.put_along_axis(parents, order, above, axis=1)
    parent[relayed] = np.where(targets[relayed], parents, -1)
    return parent
