# SPDX-License-Identifier: Apache-2.0
"""Rows cross to every node that wants them once, and are passed on within it.

Of each chunk, the rows that ranks of another node want go to that node's gateway on the owner's
rail, the rank with the owner's index, which passes to every peer what that one wants. Owners with a
busy rail hand rows to node peers first, and busy nodes let other nodes pass rows on (`rails`).
Gradients go the same way back: a node's are summed at its gateway before they cross. Between nodes
that is the least there is for a layout: each node's union of rows, once each way.

A rank computes with its own chunk, then with those of its node, then with those of the other nodes
in rotation, so that at any step all ranks receive from different ones. Where gradients travel, half
of its node's chunks come last: while it computes with them, the gradients of the others' cross. The
ranks of a node turn to the next node together: a gateway holds what it passes on no longer than
that. Copies land for the step that needs them, and a hop is posted at most WITHIN steps earlier
within a node, and as many as a node has ranks (at least 2) between nodes: so many steps ahead a
rank holds or receives chunks for itself, and a gateway those that it passes on in this turn and in
what begins so many steps later. Gradients leave at the boundary after their step.

Where ranks see few rows of a chunk, as of packed documents, hops are posted more steps ahead and
gradients awaited as much later, as far as whole chunks would have filled the same room: steps are
uneven there, and a rank that is slow at one keeps nobody waiting who is that far from needing it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..bundles import Bundles
from ..demand import Demand
from ..rails import routes
from ..tables import RINGS, Grid, Pairs, Tables, Transfers, transfers

WITHIN = 2  # steps that a hop within a node may take, at least
NEVER = 1 << 30


class _Edges(NamedTuple):
    """Hops of copies, to peers and then to gates; gradients take them the other way.

    way; above: the node of `src`; from_owner: is it the owner that sends? crosses: does it go to
    another node's gate? peers, gates: the receivers as indices of [ways, ranks] and [ways, nodes],
    flat. through: as of `Paths._through`.
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
    """Multicast to the nodes, and gradients summed within each before they cross back."""
    if demand.wanted.joined:
        return tables_of(_Turns(demand))
    ways = Ways(demand)
    ways.loosen()
    return tables_of(ways)


def tables_of(ways: Ways) -> Tables:
    """The tables of these ways."""
    demand, steps = ways.demand, int(ways.step.max()) + 1
    parts = [ways.copies(), *([ways.gradients()] if demand.gradients else [])]
    return demand.as_tables(steps, ways.pairs(), parts, ways.paths.bundles)


class Paths:
    """The paths of all rows, with a line for each way: rows of one owner that travel alike.

    All passes in which this side travels share one object.

    owner, node: of the rows. home: bool [ways, nodes], is it the owner's node? gate: [ways, nodes],
    who gets the rows for a node; of the owner's node the owner, or the peer that carries them.
    parent: [ways, nodes], from which node's gate a gate gets them. depth: [ways, nodes], after how
    many hops. use: int64 [ways, ranks], which rows a rank computes with. peer: bool [ways, ranks],
    is it no gate? served: bool [ways, ranks], does it get them from a gate, or is it one? Else it
    is a node peer of the owner. of_pairs: int64 [owner, rank], which rows a rank computes with in
    all. hops: of all rows to their users.
    """

    def __init__(self, travelling: Bundles, grid: Grid):
        self.grid = grid
        nodes, width = grid
        found = routes(travelling, grid)
        self.bundles = bundles = found.bundles
        first, parent = _alike(bundles.owner, found.carrier, found.parent)
        rail = found.carrier[first][:, None]
        self.owner = bundles.owner[first].astype(np.int32)
        self.node = self.owner // width
        self.home = np.arange(nodes) == self.node[:, None]
        self.parent = np.where(parent < 0, self.node[:, None], parent)
        self.gate = (np.arange(nodes) * width + rail).astype(np.int32)
        self.depth = self._depth()
        bits = bundles.wanted * np.left_shift(np.int64(1), bundles.number)[:, None]
        self.use = _groups(np.bitwise_or, bits, first)
        ranks = np.arange(grid.size)
        self.peer = ranks % width != rail
        direct = self.home & ~found.handed[first][:, None]
        self.served = ~(self.of_ranks(direct) & self.peer)
        self.of_pairs = self.by_owner(self.use)
        self.hops = self._edges(self.use)

    def _depth(self) -> np.ndarray:
        here = np.zeros(self.gate.shape, dtype=np.int32)
        here[self.home] = self.gate[self.home] != self.owner
        while True:
            after = np.where(self.home, here, np.take_along_axis(here, self.parent, axis=1) + 1)
            if (after == here).all():
                return here
            here = after

    def _edges(self, use: np.ndarray) -> _Edges:
        """Along which hops these rows reach their users."""
        through = self._through(use)
        way, dst, peers = _where((use != 0) & self.peer)
        node = dst // self.grid.intra
        src = np.where(self.served.reshape(-1)[peers], self.gate[way, node], self.owner[way])
        crosses = np.zeros(len(way), dtype=bool)
        to_peers = way, node, use.reshape(-1)[peers], src == self.owner[way], src, dst, crosses
        way, node, gates = _where((through != 0) & (self.depth > 0))
        near, above = self.home[way, node], self.parent[way, node]
        src = np.where(near, self.owner[way], self.gate[way, above])
        dst, from_owner = self.gate[way, node], src == self.owner[way]
        to_gates = way, above, through.reshape(-1)[gates], from_owner, src, dst, ~near
        way, above, rows, from_owner, src, dst, crosses = (
            np.concatenate(both) for both in zip(to_peers, to_gates, strict=True)
        )
        return _Edges(way, above, rows, from_owner, src, dst, crosses, peers, gates, through)

    def _through(self, use: np.ndarray) -> np.ndarray:
        """[ways, nodes]: of these rows, those that the gate needs for itself or passes on."""
        through = np.bitwise_or.reduce(self.by_node(use * self.served), axis=2)
        for way, node, above in self.levels(through):
            np.bitwise_or.at(through, (way, above), through[way, node])
        return through

    def levels(self, through: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Way, node and the node before of all gates through which something goes: the farthest
        first. Read anew at each level.
        """
        for depth in range(int(self.depth.max(initial=0)), 0, -1):
            way, node, _ = _where((self.depth == depth) & (through != 0) & ~self.home)
            yield way, node, self.parent[way, node]

    def by_node(self, of_ranks: np.ndarray) -> np.ndarray:
        return of_ranks.reshape(-1, *self.grid)

    def of_ranks(self, of_nodes: np.ndarray) -> np.ndarray:
        return np.repeat(of_nodes, self.grid.intra, axis=1)

    def by_owner(self, of_ways: np.ndarray, unite: np.ufunc = np.bitwise_or) -> np.ndarray:
        """int64 [owner, rank]: rows of all ways, [ways, ranks]; or what else is united."""
        found = np.zeros((self.grid.size, self.grid.size), dtype=np.int64)
        owners, first = np.unique(self.owner, return_index=True)
        found[owners] = _groups(unite, of_ways, first)
        return found


class Ways:
    """The times at which the rows of one pass travel on their paths.

    paths: shared by the passes of one side. step: [owner, rank], when a rank computes with a chunk.
    within, between: how many steps a hop within a node, and one between nodes, may take.
    """

    def __init__(self, demand: Demand):
        common, key = demand.wanted.common, (Paths, demand.side, demand.grid)
        if key not in common:
            common[key] = Paths(demand.travelling, demand.grid)
        self.paths: Paths = common[key]
        self.demand = demand
        self.within, self.between = WITHIN, max(WITHIN, self.paths.grid.intra)
        self.step = self._steps()

    def _steps(self) -> np.ndarray:
        paths = self.paths
        step = self._in_turn()
        # Not before the rows can be there: every hop ends at a boundary of its own.
        hops = np.where(paths.served, paths.of_ranks(paths.depth) + paths.peer, 1)
        least = paths.by_owner(np.where(paths.use != 0, hops, 0), np.maximum)
        return np.maximum(step, least, dtype=np.int32, casting="unsafe")

    def _in_turn(self) -> np.ndarray:
        """int32 [owner, rank]: nodes in rotation, the own one first, or half of it first and half
        last; within the turn of a node its ranks in rotation, without gaps.
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
        """Let hops take as many steps as there is room for."""
        paths = self.paths
        if self.demand.all_want_all:
            return
        hops, step = paths.hops, self.step[paths.owner]
        first = paths.by_node(np.where(paths.use != 0, step, step.max())).min(axis=2)
        at = np.concatenate([step.reshape(-1)[hops.peers], first.reshape(-1)[hops.gates]])
        rows = paths.bundles.rows_of(paths.owner[hops.way], hops.rows)
        chunks = WITHIN + 1 + (min(paths.grid) > 1)  # as where all want all: a gateway one besides
        self.within = self.demand.ahead((hops.dst, at, hops.src, rows), chunks, WITHIN)
        self.between = max(self.between, self.within)

    def pairs(self) -> Pairs:
        """What is computed."""
        paths = self.paths
        owner, rank, at = _where(paths.of_pairs)
        step, of_pair = self.step.reshape(-1)[at], paths.of_pairs.reshape(-1)[at]
        return self.demand.pairs(rank, step, owner, of_pair, own=self.step.diagonal())

    def copies(self) -> Transfers:
        """They land when they are needed: for a step, or to be passed on in time."""
        paths = self.paths
        hops, step = paths.hops, self.step[paths.owner]
        # When a gate needs the rows: for its own step, and to serve peers.
        needs = (paths.use != 0) & paths.served
        land = paths.by_node(np.where(needs, step - self.within * paths.peer, NEVER)).min(axis=2)
        land = np.maximum(land, paths.depth)
        # From the farthest gates inwards: each gate needs the rows as much earlier as the hop from
        # it to the next one takes.
        for way, node, above in paths.levels(hops.through):
            np.minimum.at(land, (way, above), land[way, node] - self.between)
            land = np.maximum(land, paths.depth)
        by = np.concatenate([step.reshape(-1)[hops.peers], land.reshape(-1)[hops.gates]])
        there = np.where(hops.from_owner, 0, land[hops.way, hops.above])
        post = np.maximum(there, by - self._takes(hops))
        return self._transfers(False, hops, hops.src, hops.dst, post, by)

    def gradients(self) -> Transfers:
        """The same ways back. They leave when the last contribution to them is there."""
        paths = self.paths
        hops, step = paths.hops, self.step[paths.owner]
        adds = (paths.use != 0) & paths.served
        done = paths.by_node(np.where(adds, step + 1 + self.within * paths.peer, 0)).max(axis=2)
        # A gate's sum is complete when the last of its own ranks and of the gates behind it is in.
        for way, node, above in paths.levels(hops.through):
            np.maximum.at(done, (way, above), done[way, node] + self.between)
        post = np.concatenate([step.reshape(-1)[hops.peers] + 1, done.reshape(-1)[hops.gates]])
        return self._transfers(True, hops, hops.dst, hops.src, post, post + self._takes(hops))

    def _takes(self, hops: _Edges) -> np.ndarray:
        """For how many steps each hop is under way."""
        return np.where(hops.crosses, self.between, self.within).astype(np.int32)

    def _transfers(self, gradient, hops: _Edges, src, dst, post, land) -> Transfers:
        paths = self.paths
        family, owner = "d" * gradient + self.demand.side, paths.owner[hops.way]
        moved = transfers(family, "intra", owner, hops.rows, src, dst, post, land)
        inter = np.int8(RINGS.index("inter"))
        return moved._replace(ring=np.where(moved.between(paths.grid), inter, moved.ring))


class _Turns(Ways):
    """Where the pairs of a step are one call: all chunks of a node at one step, every second one.

    A hop takes two steps, so that it lies beside the turn before: what a rank computes with comes
    from its gateway in that turn, and to the gateway in the one before. So a rank holds the chunks
    of two nodes, and as a gateway one of a third; of its own gradients of keys as many.
    """

    def __init__(self, demand: Demand):
        super().__init__(demand)
        self.between = WITHIN

    def _in_turn(self) -> np.ndarray:
        paths = self.paths
        node = np.arange(paths.grid.size, dtype=np.int32) // paths.grid.intra
        return 1 + WITHIN * ((node - node[:, None]) % paths.grid.inter)


def _alike(
    owner: np.ndarray, carrier: np.ndarray, parent: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The first of each run of bundles that travel alike, and their trees: [runs, nodes], -1 for
    the owner's node and where nobody wants the rows.

    Where the owner's node sends to all others, which of them want a bundle makes no difference.
    """
    star = (parent == parent.max(axis=1, initial=-1)[:, None]) | (parent < 0)
    tree = np.where(star.all(axis=1)[:, None], -1, parent)
    key = np.column_stack([owner, carrier, tree])
    first = np.flatnonzero(np.r_[True, (key[1:] != key[:-1]).any(axis=1)][: len(key)])
    return first, tree[first]


def _where(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lines, columns and flat indices of what is not 0 in a table."""
    at = np.flatnonzero(chosen).astype(np.int32)
    return *np.divmod(at, np.int32(chosen.shape[1])), at


def _groups(unite: np.ufunc, lines: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The lines of each group as one; `first`: where each begins."""
    found = lines[first]
    length = np.diff(np.r_[first, len(lines)])
    for later in range(1, int(length.max(initial=0))):  # few; faster than reduceat over lines
        some = np.flatnonzero(length > later)
        found[some] = unite(found[some], lines[first[some] + later])
    return found
