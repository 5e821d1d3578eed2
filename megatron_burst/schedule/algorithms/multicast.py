# SPDX-License-Identifier: Apache-2.0
"""Multicast: rows cross once to every node that uses them, and are relayed within the node.

Rows that ranks of another node use are sent to that node's gateway: the rank with the same index in
its node as the owner. The gateway sends every peer the rows that the peer uses. If too many rows
would cross on an owner's rail (the ranks with its index in their nodes), the owner first sends rows
to other ranks of its node, which send them on. For busy nodes, other nodes relay rows (`rails`).
Gradients take the same routes back: a node's gradients are summed at its gateway before they cross.
Traffic between nodes is minimal for a given layout: every row that a node uses crosses to this node
once, and one gradient of the row crosses back.

A rank computes with its own chunk, then with the chunks of its node, then with the chunks of the
other nodes in rotation. So at any step all ranks receive from different ranks. If gradients are
sent, half of the chunks of the rank's node come last. While the rank computes with these last
chunks, the gradients of all other chunks cross. All ranks of a node begin with the chunks of the
next node at the same step, so a gateway holds relayed rows no longer than one turn (the steps with
the chunks of one node).

Copies land at the step that uses them. A hop within a node is posted at most WITHIN steps earlier.
A hop between nodes is posted at most as many steps earlier as a node has ranks (at least 2). During
that time a rank holds the chunks that it uses. A gateway also holds the chunks that it relays in
this turn, and in the turn that begins when these hops end. Gradients are posted at the boundary
after their step.

If ranks use few rows of a chunk, as with packed documents, hops of copies and of gradients may take
more steps, within the memory that whole chunks would need. Ranks then have unequal work at a step,
and a rank that is slow at one step does not delay ranks that need its rows only later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..bundles import Bundles
from ..demand import Demand
from ..rails import routes
from ..tables import RINGS, Grid, Pairs, Tables, Transfers, transfers

WITHIN = 2  # number of steps that a hop within a node may take, before `loosen`
NEVER = 1 << 30


class _CopyHops(NamedTuple):
    """All transfers of copies as parallel arrays: transfers to peers, then transfers to gates.

    A gate is the rank that receives rows for its node and relays them. Peers are all other ranks.
    Gradients take the same routes back.

    Attributes:
        way: Route of the rows, an index into the arrays [ways, ...] of `MulticastPaths`.
        above: Node whose gate sends, if the owner does not send.
        rows: Bit set of the rows: one bit per bundle of the owner.
        from_owner: True if the owner sends.
        src: Rank that sends.
        dst: Rank that receives.
        crosses: True if the receiver is in another node.
        peers: Flat index into arrays [ways, ranks] of the receiver, for each transfer to a peer.
        gates: Flat index into arrays [ways, nodes] of the receiver, for each transfer to a gate.
        through: int64 [ways, nodes], bit set of the rows that a gate uses or relays.
    """

    way: np.ndarray
    above: np.ndarray
    rows: np.ndarray
    from_owner: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    crosses: np.ndarray
    peers: np.ndarray
    gates: np.ndarray
    through: np.ndarray


def tables(demand: Demand) -> Tables:
    """Return the pairs and transfers of algorithm `multicast`."""
    if demand.visibility.joined:
        return tables_of(_JoinedTiming(demand))
    timing = MulticastTiming(demand)
    timing.loosen()
    return tables_of(timing)


def tables_of(timing: MulticastTiming) -> Tables:
    """Return the pairs and transfers of a pass with the routes and times of `timing`."""
    demand, steps = timing.demand, int(timing.step.max()) + 1
    parts = [timing.copies(), *([timing.gradients()] if demand.gradients else [])]
    return demand.as_tables(steps, timing.pairs(), parts, timing.paths.bundles)


class MulticastPaths:
    """Routes of all rows: rows of one owner on the same rail and tree of nodes share a route.

    The axis `ways` has one entry per route. All passes that send the same side (keys and values, or
    queries) share one object.

    Attributes:
        owner: [ways], owner of the rows.
        node: [ways], owner's node.
        home: bool [ways, nodes], true for the owner's node.
        gate: [ways, nodes], rank that receives the rows for a node. In the owner's node, it is the
            rank that sends the rows to other nodes: the owner, or a peer.
        parent: [ways, nodes], node whose gate sends the rows to a node's gate.
        depth: [ways, nodes], number of transfers from the owner to the gate.
        use: int64 [ways, ranks], bit set of the rows with which a rank computes (one bit per bundle
            of the owner).
        peer: bool [ways, ranks], true for ranks that are not a gate.
        served: bool [ways, ranks], true for gates and for ranks that receive from a gate. The other
            ranks are node peers of the owner and receive from the owner.
        of_pairs: int64 [owner, rank], bit set of all rows with which a rank computes.
        hops: Transfers of all rows from owners to the ranks that use them.
    """

    def __init__(self, travelling: Bundles, grid: Grid):
        self.grid = grid
        nodes, width = grid
        chosen = routes(travelling, grid)
        self.bundles = bundles = chosen.bundles
        first, parent = _runs_of_equal_hops(bundles.owner, chosen.carrier, chosen.parent)
        rail = chosen.carrier[first][:, None]
        self.owner = bundles.owner[first].astype(np.int32)
        self.node = self.owner // width
        self.home = np.arange(nodes) == self.node[:, None]
        self.parent = np.where(parent < 0, self.node[:, None], parent)
        self.gate = (np.arange(nodes) * width + rail).astype(np.int32)
        self.depth = self._depth()
        bits = bundles.users * np.left_shift(np.int64(1), bundles.number)[:, None]
        self.use = _groups(np.bitwise_or, bits, first)
        ranks = np.arange(grid.size)
        self.peer = ranks % width != rail
        direct = self.home & ~chosen.handed[first][:, None]
        self.served = ~(self.of_ranks(direct) & self.peer)
        self.of_pairs = self.by_owner(self.use)
        self.hops = self._edges(self.use)

    def _depth(self) -> np.ndarray:
        depth = np.zeros(self.gate.shape, dtype=np.int32)
        depth[self.home] = self.gate[self.home] != self.owner
        while True:
            next_depth = np.where(
                self.home, depth, np.take_along_axis(depth, self.parent, axis=1) + 1
            )
            if (next_depth == depth).all():
                return depth
            depth = next_depth

    def _edges(self, use: np.ndarray) -> _CopyHops:
        """Return the transfers of rows from owners to the ranks that use them.

        Args:
            use: int64 [ways, ranks], bit set of the rows with which a rank computes.
        """
        through = self._through(use)
        way, dst, peers = _nonzero((use != 0) & self.peer)
        node = dst // self.grid.intra
        src = np.where(self.served.reshape(-1)[peers], self.gate[way, node], self.owner[way])
        crosses = np.zeros(len(way), dtype=bool)
        to_peers = way, node, use.reshape(-1)[peers], src == self.owner[way], src, dst, crosses
        way, node, gates = _nonzero((through != 0) & (self.depth > 0))
        near, above = self.home[way, node], self.parent[way, node]
        src = np.where(near, self.owner[way], self.gate[way, above])
        dst, from_owner = self.gate[way, node], src == self.owner[way]
        to_gates = way, above, through.reshape(-1)[gates], from_owner, src, dst, ~near
        way, above, rows, from_owner, src, dst, crosses = (
            np.concatenate(columns) for columns in zip(to_peers, to_gates, strict=True)
        )
        return _CopyHops(way, above, rows, from_owner, src, dst, crosses, peers, gates, through)

    def _through(self, use: np.ndarray) -> np.ndarray:
        """Return bit sets of the rows that each gate uses or relays, int64 [ways, nodes]."""
        through = np.bitwise_or.reduce(self.by_node(use * self.served), axis=2)
        for way, node, above in self.levels(through):
            np.bitwise_or.at(through, (way, above), through[way, node])
        return through

    def levels(self, through: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield the gates that receive rows, level by level of the trees, the farthest level first.

        Each item has three parallel arrays: route (index of the axis `ways`), node of the gate, and
        node whose gate sends to it. The caller may change `through` between levels.

        Args:
            through: int64 [ways, nodes], bit set of the rows that a gate uses or relays.
        """
        for depth in range(int(self.depth.max(initial=0)), 0, -1):
            way, node, _ = _nonzero((self.depth == depth) & (through != 0) & ~self.home)
            yield way, node, self.parent[way, node]

    def by_node(self, of_ranks: np.ndarray) -> np.ndarray:
        return of_ranks.reshape(-1, *self.grid)

    def of_ranks(self, of_nodes: np.ndarray) -> np.ndarray:
        return np.repeat(of_nodes, self.grid.intra, axis=1)

    def by_owner(self, of_ways: np.ndarray, unite: np.ufunc = np.bitwise_or) -> np.ndarray:
        """Combine the values of all routes of each owner; return int64 [owner, rank].

        Args:
            of_ways: [ways, ranks].
            unite: Function that combines the values of two routes.
        """
        united = np.zeros((self.grid.size, self.grid.size), dtype=np.int64)
        owners, first = np.unique(self.owner, return_index=True)
        united[owners] = _groups(unite, of_ways, first)
        return united


class MulticastTiming:
    """The times of one pass: when pairs are computed, and when transfers start and end.

    Attributes:
        paths: Routes of the rows, shared by all passes that send the same tensors.
        step: [owner, rank], step at which a rank computes with a chunk.
        within: Largest number of steps that a transfer within a node lasts.
        between: Largest number of steps that a transfer between nodes lasts.
    """

    def __init__(self, demand: Demand):
        common, key = demand.visibility.common, (MulticastPaths, demand.side, demand.grid)
        if key not in common:
            common[key] = MulticastPaths(demand.travelling, demand.grid)
        self.paths: MulticastPaths = common[key]
        self.demand = demand
        self.within, self.between = WITHIN, max(WITHIN, self.paths.grid.intra)
        self.step = self._steps()

    def _steps(self) -> np.ndarray:
        paths = self.paths
        step = self._in_turn()
        # No pair is computed before its rows arrive: each hop takes at least one boundary.
        hops = np.where(paths.served, paths.of_ranks(paths.depth) + paths.peer, 1)
        least = paths.by_owner(np.where(paths.use != 0, hops, 0), np.maximum)
        return np.maximum(step, least, dtype=np.int32, casting="unsafe")

    def _in_turn(self) -> np.ndarray:
        """Return the step of each pair, int32 [owner, rank], as if transfers needed no time.

        A rank computes with the chunks of one node after another, in rotation. The chunks of its
        own node are first. If gradients are sent, half of these chunks are last instead. The chunks
        of one node also follow in rotation, without empty steps.
        """
        paths = self.paths
        nodes, width = paths.grid
        node, member, turn, place = np.ogrid[:nodes, :width, : nodes + 1, :width]
        owner = (node - turn) % nodes * width + (member - place) % width
        rank = np.broadcast_to(node * width + member, owner.shape)
        first = place < (-(-width // 2) if self.demand.gradients else width)
        used = self.demand.used(owner, rank) & np.where(turn % nodes, True, (turn > 0) != first)
        before = np.cumsum(used, axis=3, dtype=np.int32) - used
        length = used.sum(axis=3, dtype=np.int32).max(axis=1)
        begin = (np.cumsum(length, axis=1, dtype=np.int32) - length)[:, None, :, None]
        step = np.zeros((paths.grid.size, paths.grid.size), dtype=np.int32)
        step[owner[used], rank[used]] = (begin + before)[used]
        return step

    def loosen(self) -> None:
        """Let transfers last more steps if ranks use few rows, as far as the memory allows."""
        paths = self.paths
        if self.demand.all_use_all:
            return
        hops, step = paths.hops, self.step[paths.owner]
        first = paths.by_node(np.where(paths.use != 0, step, step.max())).min(axis=2)
        at = np.concatenate([step.reshape(-1)[hops.peers], first.reshape(-1)[hops.gates]])
        rows = paths.bundles.rows_of(paths.owner[hops.way], hops.rows)
        # The limit is the number of chunks if all ranks use all rows. A gateway then has one more.
        chunks = WITHIN + 1 + (min(paths.grid) > 1)
        self.within = self.demand.ahead((hops.dst, at, hops.src, rows), chunks, WITHIN)
        self.between = max(self.between, self.within)

    def pairs(self) -> Pairs:
        """Return the pairs of all ranks."""
        paths = self.paths
        owner, rank, at = _nonzero(paths.of_pairs)
        step, of_pair = self.step.reshape(-1)[at], paths.of_pairs.reshape(-1)[at]
        return self.demand.pairs(rank, step, owner, of_pair, own=self.step.diagonal())

    def copies(self) -> Transfers:
        """Return the transfers of copies. Each ends when a pair or a relay needs the rows."""
        paths = self.paths
        hops, step = paths.hops, self.step[paths.owner]
        # A gate needs the rows for its own step, and to serve peers.
        needs = (paths.use != 0) & paths.served
        land = paths.by_node(np.where(needs, step - self.within * paths.peer, NEVER)).min(axis=2)
        land = np.maximum(land, paths.depth)
        # From the farthest gates inwards: a gate needs the rows early enough for its hop to the
        # next gate.
        for way, node, above in paths.levels(hops.through):
            np.minimum.at(land, (way, above), land[way, node] - self.between)
            land = np.maximum(land, paths.depth)
        by = np.concatenate([step.reshape(-1)[hops.peers], land.reshape(-1)[hops.gates]])
        available = np.where(hops.from_owner, 0, land[hops.way, hops.above])
        post = np.maximum(available, by - self._takes(hops))
        return self._transfers(False, hops, hops.src, hops.dst, post, by)

    def gradients(self) -> Transfers:
        """Return the transfers of gradients. Each starts after the last contribution to the sum."""
        paths = self.paths
        hops, step = paths.hops, self.step[paths.owner]
        adds = (paths.use != 0) & paths.served
        done = paths.by_node(np.where(adds, step + 1 + self.within * paths.peer, 0)).max(axis=2)
        # A gate's sum is complete when its own ranks and the gates behind it have contributed.
        for way, node, above in paths.levels(hops.through):
            np.maximum.at(done, (way, above), done[way, node] + self.between)
        post = np.concatenate([step.reshape(-1)[hops.peers] + 1, done.reshape(-1)[hops.gates]])
        return self._transfers(True, hops, hops.dst, hops.src, post, post + self._takes(hops))

    def _takes(self, hops: _CopyHops) -> np.ndarray:
        """Return the number of steps that each transfer may last."""
        return np.where(hops.crosses, self.between, self.within).astype(np.int32)

    def _transfers(self, gradient, hops: _CopyHops, src, dst, post, land) -> Transfers:
        paths = self.paths
        family, owner = "d" * gradient + self.demand.side, paths.owner[hops.way]
        moved = transfers(family, "intra", owner, hops.rows, src, dst, post, land)
        inter = np.int8(RINGS.index("inter"))
        return moved._replace(ring=np.where(moved.between(paths.grid), inter, moved.ring))


class _JoinedTiming(MulticastTiming):
    """Times of a pass in which one kernel call computes with all chunks of a node.

    There is a call at every second step; these two steps are a turn. A transfer lasts two steps, so
    it runs while the rank computes with the previous node's chunks. A rank receives from its
    gateway one turn before it computes, and the gateway receives two turns before. So a rank holds
    the chunks of two nodes, and a gateway also one chunk of a third node. In backward, a rank also
    holds the gradients of as many chunks.
    """

    def __init__(self, demand: Demand):
        super().__init__(demand)
        self.between = WITHIN

    def _in_turn(self) -> np.ndarray:
        paths = self.paths
        node = np.arange(paths.grid.size, dtype=np.int32) // paths.grid.intra
        return 1 + WITHIN * ((node - node[:, None]) % paths.grid.inter)


def _runs_of_equal_hops(
    owner: np.ndarray, carrier: np.ndarray, parent: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Group adjacent bundles of an owner that take the same route between nodes.

    Args:
        owner: [n], rank that owns each bundle (rows that the same ranks use).
        carrier: [n], rail of each bundle, as in `rails.Routes`.
        parent: [n, nodes], node that sends each bundle to each node, as in `rails.Routes`.

    Returns:
        Index of the first bundle of each group; int [groups, nodes], the node that sends to each
        node, or -1. If the owner's node sends to all target nodes directly, all entries of a group
        are -1, so bundles with different target nodes can be in one group.
    """
    from_home = (parent == parent.max(axis=1, initial=-1)[:, None]) | (parent < 0)
    tree = np.where(from_home.all(axis=1)[:, None], -1, parent)
    key = np.column_stack([owner, carrier, tree])
    first = np.flatnonzero(np.r_[True, (key[1:] != key[:-1]).any(axis=1)][: len(key)])
    return first, tree[first]


def _nonzero(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return row, column and flat index of each nonzero entry of a 2D array."""
    at = np.flatnonzero(chosen).astype(np.int32)
    return *np.divmod(at, np.int32(chosen.shape[1])), at


def _groups(unite: np.ufunc, lines: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Combine each group of rows of `lines` into one row with the function `unite`.

    Args:
        unite: Function that combines two arrays of rows.
        lines: [n, ...], sorted by group.
        first: Index of the first row of each group.
    """
    united = lines[first]
    length = np.diff(np.r_[first, len(lines)])
    for later in range(1, int(length.max(initial=0))):  # few iterations; faster than reduceat
        longer = np.flatnonzero(length > later)
        united[longer] = unite(united[longer], lines[first[longer] + later])
    return united
