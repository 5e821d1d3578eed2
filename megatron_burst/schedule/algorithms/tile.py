# SPDX-License-Identifier: Apache-2.0
"""Tiles: every rank computes the queries of its row of ranks against the keys of its column.

Source: Attention2D (arXiv 2503.15758) and Mesh-Attention (arXiv 2512.20968). With b query chunks
and a key chunks per rank, a * b = G, a chunk reaches b - 1 or a - 1 ranks and not G - 1. Rows and
columns have two levels here: a chunk crosses once to each node that wants it, to the rank of its
owner's index, which hands it on within the node. Partial results go back the same way, added up in
the node before they cross.

Loses to the rings where compute hides all that they send, since a tile's last partial results have
no later pairs to hide behind, and on two nodes, or where few rows are seen, gains nothing between
nodes: the cheapest tile is then a ring in what it sends. It holds more chunks than a ring.

Decides the order of the pairs, the same for all ranks: `_order`. Everything else follows from it:
a copy lands when its first pair is due and a partial result leaves after its last. Which grid is
taken is decided in `tile_shape`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..bundles import Bundles
from ..demand import Demand
from ..tables import ALL, Pairs, Tables, Transfers, transfers
from .tile_shape import Shape, chosen, gathers_keys, wanted_by


def tables(demand: Demand, *, shape: Shape | None = None) -> Tables:
    """The tile of a shape, default: the cheapest that holds little enough (`tile_shape.chosen`).

    Neither `demand.side` nor head chunks matter.
    """
    shape = shape or chosen(demand)
    order = _order(shape, gathers_keys(demand.row_bytes))
    keys = _Family("kv", shape, demand.wanted.keys, order)
    queries = _Family("query", shape, demand.wanted.queries, order)
    copies = _chained(np.concatenate([family.first[1:, 0] for family in (queries, keys)]))
    moves = [move for family in (queries, keys) for move in family.copies(copies)]
    partial = [(queries, "out"), (queries, "dquery"), (keys, "dkv")]
    partial = [(family, name) for family, name in partial if getattr(demand.row_bytes, name)]
    sums = _returned([family.gathered[1:] for family, _ in partial], demand.grid.size)
    moves += [move for family, name in partial for move in family.returns(name, sums)]
    return demand.as_tables(demand.grid.size, _pairs(demand, order, queries, keys), moves)


def _order(shape: Shape, keys_first: bool) -> np.ndarray:
    """The step of each pair: int [query_nodes, query_ranks, key_nodes, key_ranks].

    Indices count from the rank that computes: so many nodes and ranks further back is the owner.

    One family of chunks is gathered first and stays, the other one passes by: each that arrives
    meets all that are there, its partial result leaves, and with the last one those of the first
    family are done one after another, the own ones at last. So between nodes, and so within a
    rank's own node. Half of that node's pairs come before all others, and hide the first hops
    between nodes, the other half behind all others, and hide the last. The own pair is the first,
    which no hop delays; for head chunks that run behind others `program` makes it the last.
    """
    if keys_first:
        a, b, ranks_a, ranks_b = shape
        return _order(Shape(b, a, ranks_b, ranks_a), False).transpose(2, 3, 0, 1)
    a, b, ranks_a, ranks_b = shape
    each = ranks_a * ranks_b
    early = each // 2
    j, i = np.ogrid[:ranks_b, :ranks_a]
    steps = np.empty((b, ranks_b, a, ranks_a), dtype=np.int32)
    nodes = _own_last(a, b)
    for query, key in np.ndindex(b, a):
        # What has just come in is passed on within the node: the rank's own rail brings it first.
        inner = i * ranks_b + j if key else j * ranks_a + i
        steps[query, :, key] = 1 + early + nodes[query, key] * each + inner
    own = _own_last(ranks_a, ranks_b)
    steps[0, :, 0] = 1 + np.where(own < early, own, own + (a * b - 1) * each)
    steps[0, 0, 0, 0] = 0
    return steps


def _own_last(a: int, b: int) -> np.ndarray:
    """The order over b query chunks, which are gathered, and a key chunks: [b, a], from 0 on."""
    query, key = np.ogrid[:b, :a]
    place = np.where(key == 0, query - 1, b - 1 + (key - 1) * b + (query - 1) % b)
    place[0, 0] = a * b - 1
    return place


def _chained(lands: np.ndarray) -> dict[int, int]:
    """Where each is posted that lands there: when the one before it has landed, one at a time."""
    lands = np.unique(lands)
    return dict(zip(lands.tolist(), [0, *lands[:-1].tolist()], strict=False))


def _returned(posts: list[np.ndarray], size: int) -> dict[int, int]:
    """Where each lands that is posted there: when the next is posted, the last at the end."""
    order = np.unique(np.concatenate([[], *posts])).astype(np.int64)
    ends = np.append(order[1:], np.maximum(size, order[-1:] + 1))
    return dict(zip(order.tolist(), ends.tolist(), strict=True))


class _Family:
    """Keys or queries: who gets which rows of each chunk, and when.

    there: int32 [G, nodes, ranks], from an owner the rank so many nodes and ranks further along;
    back: the owner of what that rank's chunk is to it. rows: the bit set that `there` wants. first,
    last: int [nodes, ranks], the steps of the first and last pair with such a chunk.
    """

    def __init__(self, name: str, shape: Shape, bundles: Bundles, order: np.ndarray):
        others = (0, 1) if name == "kv" else (2, 3)
        self.name, self.first, self.last = name, order.min(axis=others), order.max(axis=others)
        rank = np.arange(bundles.size, dtype=np.int32).reshape(-1, 1, 1)
        self.there, u, v = _moved(rank, shape, name, 1)
        self.back, *_ = _moved(rank, shape, name, -1)
        self.rows = bundles.bits(wanted_by(bundles, shape, name))[rank, u, v]

    @property
    def gathered(self) -> np.ndarray:
        """When a node's sum is complete: the parts of its other ranks take one step [nodes]."""
        return np.maximum(self.last[:, 0] + 1, (self.last[:, 1:] + 2).max(axis=1, initial=0))

    def copies(self, crossing: dict[int, int]) -> list[Transfers]:
        """To the rank of the owner's index in each node, and from there to others of the node.

        A copy travels beside the pairs of the one before it. crossing: by boundary where it lands.
        """
        post = np.array([crossing.get(land, 0) for land in self.first[:, 0].tolist()])
        # Posted to the second rank of a node when the first one has its copy, and so on.
        each = np.concatenate([self.first[:, :1], self.first[:, :-1]], axis=1)
        each[0] = _one_by_one(self.first[0])
        return self._hops(self.name, (post, self.first[:, 0]), (each, self.first))

    def returns(self, partial: str, crossing: dict[int, int]) -> list[Transfers]:
        """The way back, after the last pair. crossing: by boundary where it is posted."""
        post = self.gathered
        land = np.array([crossing.get(at, 0) for at in post.tolist()])
        return self._hops(partial, (post, land), (self.last + 1, self.last + 2), home=True)

    def _hops(self, family: str, between, within, home: bool = False) -> list[Transfers]:
        """between, within: where they are posted and land, each [nodes] and [nodes, ranks]."""
        gate = self.there[:, :, 0]
        node = np.bitwise_or.reduce(self.rows, axis=2)
        node[:, 0] = 0  # of the owner's own node: handed to its peers below, without crossing
        owner, u = np.nonzero(node)
        ends, times = (owner, gate[owner, u]), (at[u] for at in between)
        parts = [_transfers(family, "inter", owner, node[owner, u], ends, home, times)]
        rows = self.rows.copy()
        rows[:, :, 0] = 0  # the gate has them from the hop above
        owner, u, v = np.nonzero(rows)
        ends, times = (gate[owner, u], self.there[owner, u, v]), (at[u, v] for at in within)
        return [*parts, _transfers(family, "intra", owner, rows[owner, u, v], ends, home, times)]


class _Place(NamedTuple):
    """Ranks, and the coordinates in which they differ from the rank they are counted from."""

    rank: np.ndarray
    node: np.ndarray
    member: np.ndarray


def _moved(rank: np.ndarray, shape: Shape, name: str, way: int) -> _Place:
    """The ranks so many nodes and ranks from `rank` on, along columns for keys, else along rows."""
    a, b, ranks_a, ranks_b = shape
    node, index = np.divmod(rank, ranks_a * ranks_b)
    (row, column), (i, j) = np.divmod(node, b), np.divmod(index, ranks_b)
    if name == "kv":
        _, u, v = np.ogrid[:1, :a, :ranks_a]
        row, i = (row + way * u) % a, (i + way * v) % ranks_a
    else:
        _, u, v = np.ogrid[:1, :b, :ranks_b]
        column, j = (column + way * u) % b, (j + way * v) % ranks_b
    moved = (row * b + column) * (ranks_a * ranks_b) + i * ranks_b + j
    return _Place(moved.astype(np.int32), *((row, i) if name == "kv" else (column, j)))


def _one_by_one(lands: np.ndarray) -> np.ndarray:
    """Where what lands there is posted: when the one before it has landed; [0] is nobody's."""
    posts = np.zeros_like(lands)
    order = 1 + np.argsort(lands[1:], kind="stable")
    posts[order[1:]] = lands[order[:-1]]
    return posts


def _transfers(family, ring, owner, rows, ends, home, times) -> Transfers:
    return transfers(family, ring, owner, rows, *(reversed(ends) if home else ends), *times)


def _pairs(demand: Demand, order: np.ndarray, queries: _Family, keys: _Family) -> Pairs:
    """All that see something; the row sets are those of the two chunks by themselves."""
    wanted, size = demand.wanted, demand.grid.size
    q, k = queries.back.reshape(size, -1, 1), keys.back.reshape(size, 1, -1)
    at = np.flatnonzero(demand.visible[q, k])
    rank, tile = np.divmod(at.astype(np.int32), size)
    y, x = np.divmod(tile, keys.back[0].size)
    q, k = q[rank, y, 0], k[rank, 0, x]
    query_rows = np.where(q == rank, ALL, wanted.queries.bits(wanted.queries.wanted)[q, k])
    key_rows = np.where(k == rank, ALL, wanted.keys.bits(wanted.keys.wanted)[k, q])
    return Pairs(rank, order.reshape(-1)[tile], q, k, query_rows, key_rows)
