"""Rows cross to every node that wants them once, and are passed on within it.

Of each chunk, the rows that ranks of another node want go to that node's gateway on the owner's
rail, the rank with the owner's index, which passes to every peer what that one wants. Owners with a
busy rail hand rows to node peers first, and busy nodes let other nodes pass rows on (`rails`).
Gradients go the same way back: a node's are summed at its gateway before they cross. Between nodes
that is the least there is for a layout: each node's union of rows, once each way.

A rank computes with its own chunk, then with those of its node, then with those of the other nodes
in rotation, so that at any step all ranks receive from different ones. The ranks of a node turn to
the next node together, a gateway needs to hold what it passes on no longer than that. Copies arrive
for the step that computes with them, WITHIN steps after they were posted within a node and as many
as a node has ranks between nodes: a rank holds or receives at most that many chunks for itself, and
of those that it passes on the ones of two nodes. Gradients leave at the boundary after their step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..demand import Demand
from ..rails import routes
from ..tables import ALL, RINGS, Kept, Pairs, Tables, Transfers, joined

WITHIN = 1  # steps that a hop within a node may take
NEVER = 1 << 30


class _Edges(NamedTuple):
    """Hops of copies, to peers and then to gates; gradients take them the other way.

    way; above: the node of `src`; from_owner: is it the owner that sends? takes: for how many steps
    a hop is under way. peers, gates: indices [way, node, rank of the node] and [way, node] of the
    receivers. through: as of `_Ways._through`.
    """

    way: np.ndarray
    above: np.ndarray
    rows: np.ndarray
    from_owner: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    takes: np.ndarray
    peers: tuple[np.ndarray, ...]
    gates: tuple[np.ndarray, ...]
    through: np.ndarray


def tables(demand: Demand) -> Tables:
    """Multicast to the nodes, and gradients summed within each before they cross back."""
    ways = _Ways(demand)
    parts = [ways.copies()]
    if demand.gradients:
        parts += [ways.gradients()]
    queries, keys = demand.wanted.queries, demand.wanted.keys
    if demand.side == "kv":
        keys = ways.bundles
    else:
        queries = ways.bundles
    steps = int(ways.step.max()) + 1
    return Tables(steps, ways.pairs(), joined(*parts), ways.kept(), queries, keys)


class _Ways:
    """The ways of all rows: a line per way, that is for rows of one owner that travel alike.

    owner, node: of the rows. home: bool [ways, nodes], is it the owner's node? direct: and does the
    owner send to its peers there itself, the gates of other nodes aside? gate: [ways, nodes], who
    gets the rows for a node; of the owner's node the owner, or the peer that carries them.
    parent: [ways, nodes], from which node's gate a gate gets them. depth: [ways, nodes], after how
    many hops. use: [ways, nodes, ranks of a node], which rows a rank computes with. peer: of that
    shape, bool, is it no gate? step: [owner, rank], when a rank computes with a chunk.
    """

    def __init__(self, demand: Demand):
        self.demand, self.grid = demand, demand.grid
        nodes, width = self.grid
        found = routes(demand.travelling, self.grid)
        self.bundles = bundles = found.bundles
        self.between = max(2, width)  # steps that a hop between nodes may take
        first, parent = _alike(bundles.owner, found.carrier, found.parent)
        handed = found.handed[first]
        self.owner, rail = bundles.owner[first], found.carrier[first]
        self.node = self.owner // width
        self.home = np.arange(nodes) == self.node[:, None]
        self.direct = self.home & ~handed[:, None]
        self.parent = np.where(parent < 0, self.node[:, None], parent)
        self.gate = np.arange(nodes) * width + rail[:, None]
        self.depth = self._depth()
        bits = bundles.wanted * np.left_shift(np.int64(1), bundles.number)[:, None]
        self.use = _or_groups(bits, first).reshape(-1, nodes, width)
        self.peer = np.broadcast_to((np.arange(width) != rail[:, None])[:, None], self.use.shape)
        self.step = self._steps()

    def _depth(self) -> np.ndarray:
        here = np.zeros(self.gate.shape, dtype=np.int64)
        here[self.home] = self.gate[self.home] != self.owner
        while True:
            after = np.where(self.home, here, np.take_along_axis(here, self.parent, axis=1) + 1)
            if (after == here).all():
                return here
            here = after

    def _steps(self) -> np.ndarray:
        """Nodes in rotation; within the turn of a node its ranks in rotation, without gaps."""
        nodes, width = self.grid
        node, member, turn, place = np.ogrid[:nodes, :width, :nodes, :width]
        owner = (node - turn) % nodes * width + (member - place) % width
        rank = np.broadcast_to(node * width + member, owner.shape)
        used = self.demand.used(owner, rank)
        before = np.cumsum(used, axis=3) - used
        length = used.sum(axis=3).max(axis=1)
        begin = (np.cumsum(length, axis=1) - length)[:, None, :, None]
        step = np.zeros((self.grid.size, self.grid.size), dtype=np.int64)
        step[owner, rank] = np.where(used, begin + before, 0)
        # Not before the rows can be there: every hop ends at a boundary of its own.
        hops = np.where(self.direct[:, :, None] & self.peer, 1, self.depth[:, :, None] + self.peer)
        hops = np.where(self.use != 0, hops, 0).reshape(-1, self.grid.size)
        np.maximum.at(step, self.owner, hops)
        return step

    def pairs(self) -> Pairs:
        """What is computed."""
        rows = self._by_owner(self.use)
        owner, rank = np.nonzero(rows)
        own = np.flatnonzero(self.demand.visible.diagonal())
        return self.demand.pairs(
            np.concatenate([own, rank]),
            np.concatenate([self.step[own, own], self.step[owner, rank]]),
            np.concatenate([own, owner]),
            np.concatenate([np.full(len(own), ALL), rows[owner, rank]]),
        )

    def kept(self) -> Kept:
        """In the order of the steps; without what a gate receives because it passes it on."""
        rows = np.where(self.peer, self.use, self.use & ~self._through(self.sent)[:, :, None])
        rows = self._by_owner(np.where(self.from_forward, rows, 0))
        owner, rank = np.nonzero(rows)
        order = np.lexsort((rank, self.step[owner, rank]))
        owner, rank = owner[order], rank[order]
        return Kept(rank, owner, rows[owner, rank])

    @cached_property
    def from_forward(self) -> np.ndarray:
        """bool, as `use`: did the rank keep the chunk? The chunks of others it computes with last."""
        size, kept = self.grid.size, self.demand.kept
        if not kept:
            return np.broadcast_to(np.False_, self.use.shape)
        others = self._by_owner(self.use) != 0
        order = np.argsort(np.where(others, self.step, -1), axis=0, kind="stable")
        last = np.zeros_like(others)
        np.put_along_axis(last, order[max(0, size - kept) :], True, axis=0)
        return (others & last)[self.owner].reshape(self.use.shape)

    @property
    def sent(self) -> np.ndarray:
        """`use` without what ranks kept from forward."""
        return np.where(self.from_forward, 0, self.use)

    def copies(self) -> Transfers:
        """They land when they are needed: for a step, or to be passed on in time."""
        use, edges = self.sent, self._edges(self.sent)
        step = self.step[self.owner].reshape(use.shape)
        # When a gate needs the rows: before its own step, and before those of peers that it serves.
        needs = (use != 0) & ~(self.direct[:, :, None] & self.peer)
        land = np.where(needs, step - WITHIN * self.peer, NEVER).min(axis=2)
        land = np.maximum(land, self.depth)
        for way, node, above in self._levels(edges.through):
            np.minimum.at(land, (way, above), land[way, node] - self.between)
            land = np.maximum(land, self.depth)
        peers, gates = edges.peers, edges.gates
        by = np.concatenate([step[peers], land[gates]])
        land = np.where(self.depth > 0, land, 0)  # owners have their rows
        since = np.where(edges.from_owner, 0, land[edges.way, edges.above])
        post = np.maximum(since, by - edges.takes)
        return self._transfers(False, edges, edges.src, edges.dst, post, by)

    def gradients(self) -> Transfers:
        """The same ways back. They leave when the last contribution to them is there."""
        edges = self._edges(self.use)
        step = self.step[self.owner].reshape(self.use.shape)
        adds = (self.use != 0) & ~(self.direct[:, :, None] & self.peer)
        done = np.where(adds, step + 1 + WITHIN * self.peer, 0).max(axis=2)
        for way, node, above in self._levels(edges.through):
            np.maximum.at(done, (way, above), done[way, node] + self.between)
        post = np.concatenate([step[edges.peers] + 1, done[edges.gates]])
        return self._transfers(True, edges, edges.dst, edges.src, post, post + edges.takes)

    def _edges(self, use: np.ndarray) -> _Edges:
        """Along which hops these rows reach their users."""
        through = self._through(use)
        way, node, member = peers = np.nonzero((use != 0) & self.peer)
        near = self.direct[way, node]
        src = np.where(near, self.owner[way], self.gate[way, node])
        takes, dst = np.full(len(way), WITHIN), node * self.grid.intra + member
        to_peers = way, node, use[peers], near, src, dst, takes
        way, node = gates = np.nonzero((through != 0) & (self.depth > 0))
        near, above = self.home[way, node], self.parent[way, node]
        src = np.where(near, self.owner[way], self.gate[way, above])
        takes = np.where(near, WITHIN, self.between)
        from_owner = src == self.owner[way]
        to_gates = way, above, through[gates], from_owner, src, self.gate[gates], takes
        columns = (np.concatenate(both) for both in zip(to_peers, to_gates, strict=True))
        return _Edges(*columns, peers, gates, through)

    def _through(self, use: np.ndarray) -> np.ndarray:
        """[ways, nodes]: of these rows, those that the gate needs for itself or passes on."""
        serves = ~(self.direct[:, :, None] & self.peer)
        through = np.bitwise_or.reduce(np.where(serves, use, 0), axis=2)
        for way, node, above in self._levels(through):
            np.bitwise_or.at(through, (way, above), through[way, node])
        return through

    def _levels(self, through: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Way, node and the node before of all gates through which something goes: the farthest
        first. Read anew at each level."""
        for depth in range(int(self.depth.max(initial=0)), 0, -1):
            way, node = np.nonzero((self.depth == depth) & (through != 0) & ~self.home)
            yield way, node, self.parent[way, node]

    def _by_owner(self, rows: np.ndarray) -> np.ndarray:
        """int64 [owner, rank]: rows of all ways, [ways, nodes, ranks of a node]."""
        found = np.zeros((self.grid.size, self.grid.size), dtype=np.int64)
        owners, first = np.unique(self.owner, return_index=True)
        found[owners] = _or_groups(rows.reshape(-1, self.grid.size), first)
        return found

    def _transfers(self, gradient, edges: _Edges, src, dst, post, land) -> Transfers:
        between = src // self.grid.intra != dst // self.grid.intra
        ring = np.where(between, RINGS.index("inter"), RINGS.index("intra")).astype(np.int8)
        family = np.full(len(src), self.demand.family(gradient), dtype=np.int8)
        return Transfers(family, self.owner[edges.way], edges.rows, src, dst, ring, post, land)


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


def _or_groups(bits: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The union of each group of lines; `first`: where each begins."""
    return np.bitwise_or.reduceat(bits, first, axis=0) if len(first) else bits
