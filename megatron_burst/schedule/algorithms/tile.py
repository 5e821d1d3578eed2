# SPDX-License-Identifier: Apache-2.0
"""Tile: in a grid of ranks, a rank computes with the queries of its row and keys of its column.

Source: Attention2D (arXiv 2503.15758) and Mesh-Attention (arXiv 2512.20968). If each of G ranks
computes with `b` query chunks and `a` key chunks (a * b = G), a query chunk is sent to b - 1 ranks
and a key chunk to a - 1 ranks, instead of G - 1 ranks. In this module, rows and columns have two
levels: nodes, and ranks within nodes. A chunk is sent once to each other node that uses it. The
receiver is the rank with the owner's index in that node, and it relays the chunk within the node.
Partial results take the same route back and are summed in the node before they are sent to the
owner's node.

A tile is slower than a ring if computation hides all hops of the ring, because no later pairs hide
a tile's last partial results. Between two nodes, or if few rows are used, a tile sends no fewer
bytes than a ring. A rank holds more chunks in a tile than in a ring.

This module decides the order of the pairs, which is the same for all ranks (`_order`). All times
follow from this order: a copy lands before the first pair that uses it, and a partial result is
sent after the last pair that adds to it. `tile_shape` chooses the numbers of chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..bundles import Bundles
from ..demand import Demand
from ..tables import ALL, Pairs, Tables, Transfers, transfers
from .tile_shape import Shape, chosen, gathers_keys, users_by_place


def tables(demand: Demand, *, shape: Shape | None = None) -> Tables:
    """Return the pairs and transfers of algorithm `tile`, which do not depend on `demand.side`."""
    shape = shape or chosen(demand)
    order = _order(shape, gathers_keys(demand.row_bytes))
    keys = _TileFamily("kv", shape, demand.visibility.keys, order)
    queries = _TileFamily("query", shape, demand.visibility.queries, order)
    copies = _chained(np.concatenate([family.first[1:, 0] for family in (queries, keys)]))
    moves = [move for family in (queries, keys) for move in family.copies(copies)]
    partial = [(queries, "out"), (queries, "dquery"), (keys, "dkv")]
    partial = [(family, name) for family, name in partial if getattr(demand.row_bytes, name)]
    sums = _returned([family.gathered[1:] for family, _ in partial], demand.grid.size)
    moves += [move for family, name in partial for move in family.returns(name, sums)]
    return demand.as_tables(demand.grid.size, _pairs(demand, order, queries, keys), moves)


def _order(shape: Shape, keys_first: bool) -> np.ndarray:
    """Return the step of each pair: int [query_nodes, query_ranks, key_nodes, key_ranks].

    The first two indices are the distance, in nodes and in ranks, from the owner of the queries to
    the rank that computes the pair. The last two are the distance from the owner of the keys.

    Chunks of one family (keys or queries) are gathered first and stay on the rank. Chunks of the
    other family arrive one by one. When such a chunk arrives, the rank computes its pairs with all
    gathered chunks, and then sends the partial result of the chunk. With the last arriving chunk,
    the gathered chunks are finished one after another, the rank's own last. This is the order
    between nodes, and also within a rank's own node. Half of the pairs of the own node are computed
    before the pairs of other nodes, and hide the first transfers between nodes. The other half are
    computed after the pairs of other nodes, and hide the last transfers. The pair of the rank's own
    chunks is the first, because no transfer delays it. For later head chunks, `program` moves this
    pair to the end.

    Args:
        shape: Shape of the tile.
        keys_first: True if keys are gathered, False if queries are gathered.
    """
    if keys_first:
        a, b, ranks_a, ranks_b = shape
        return _order(Shape(b, a, ranks_b, ranks_a), False).transpose(2, 3, 0, 1)
    a, b, ranks_a, ranks_b = shape
    pairs_of_node = ranks_a * ranks_b
    early = pairs_of_node // 2
    j, i = np.ogrid[:ranks_b, :ranks_a]
    steps = np.empty((b, ranks_b, a, ranks_a), dtype=np.int32)
    nodes = _own_last(a, b)
    for query, key in np.ndindex(b, a):
        # Chunks that have just arrived are relayed within the node, so the chunks on the rank's own
        # rail are the first.
        inner = i * ranks_b + j if key else j * ranks_a + i
        steps[query, :, key] = 1 + early + nodes[query, key] * pairs_of_node + inner
    own = _own_last(ranks_a, ranks_b)
    steps[0, :, 0] = 1 + np.where(own < early, own, own + (a * b - 1) * pairs_of_node)
    steps[0, 0, 0, 0] = 0
    return steps


def _own_last(a: int, b: int) -> np.ndarray:
    """Return the order in which a rank computes its pairs of chunks, its own pair last.

    Args:
        a: Number of key chunks.
        b: Number of query chunks.

    Returns:
        int [b, a], number of each pair in the order.
    """
    query, key = np.ogrid[:b, :a]
    place = np.where(key == 0, query - 1, b - 1 + (key - 1) * b + (query - 1) % b)
    place[0, 0] = a * b - 1
    return place


def _chained(lands: np.ndarray) -> dict[int, int]:
    """Return when each transfer between nodes starts, so that transfers follow one another.

    Boundary t is the moment before step t.

    Args:
        lands: Boundaries at which transfers end, in any order.

    Returns:
        Boundary of the end -> boundary of the start: the end of the previous transfer, or 0.
    """
    lands = np.unique(lands)
    return dict(zip(lands.tolist(), [0, *lands[:-1].tolist()], strict=False))


def _returned(posts: list[np.ndarray], size: int) -> dict[int, int]:
    """Return when each transfer of partial results between nodes ends.

    A transfer ends when the next one starts. The last transfer ends after all steps.

    Args:
        posts: Boundaries at which transfers start, one array per family of partial results.
        size: Number of steps.

    Returns:
        Boundary of the start -> boundary of the end.
    """
    order = np.unique(np.concatenate([[], *posts])).astype(np.int64)
    ends = np.append(order[1:], np.maximum(size, order[-1:] + 1))
    return dict(zip(order.tolist(), ends.tolist(), strict=True))


class _TileFamily:
    """Keys or queries: the ranks that receive rows of each chunk, and the steps that use them.

    The axes [nodes, ranks] are distances from an owner to a receiver, along the column (keys) or
    row (queries).

    Attributes:
        receivers: int32 [G, nodes, ranks], receiver at each distance from an owner.
        back: int32 [G, nodes, ranks], owner of the chunk that a rank receives from each distance.
        rows: int64 [G, nodes, ranks], bit set of an owner's rows that a receiver uses (one bit per
            bundle of the owner).
        first: int [nodes, ranks], step of the first pair with a chunk from each distance.
        last: int [nodes, ranks], step of the last pair with a chunk from each distance.
    """

    def __init__(self, name: str, shape: Shape, bundles: Bundles, order: np.ndarray):
        other_axes = (0, 1) if name == "kv" else (2, 3)
        self.name, self.first, self.last = (
            name,
            order.min(axis=other_axes),
            order.max(axis=other_axes),
        )
        rank = np.arange(bundles.size, dtype=np.int32).reshape(-1, 1, 1)
        self.receivers, u, v = _moved(rank, shape, name, 1)
        self.back, *_ = _moved(rank, shape, name, -1)
        self.rows = bundles.bits(users_by_place(bundles, shape, name))[rank, u, v]

    @property
    def gathered(self) -> np.ndarray:
        """Step before which the sum of partial results of each node is complete, [nodes].

        The gate of a node (its rank with the owner's index) collects the sum. The partial results
        of the node's other ranks need one step to reach the gate.
        """
        return np.maximum(self.last[:, 0] + 1, (self.last[:, 1:] + 2).max(axis=1, initial=0))

    def copies(self, crossing: dict[int, int]) -> list[Transfers]:
        """Return the transfers of copies: from owners to gates, and from gates to other ranks.

        The gate of a node is its rank with the owner's index. It relays the copy within the node. A
        copy travels while ranks compute the pairs of the previous copy.

        Args:
            crossing: Result of `_chained`: boundary at which a transfer between nodes ends ->
                boundary at which it starts.
        """
        post = np.array([crossing.get(land, 0) for land in self.first[:, 0].tolist()])
        # The copy to the second rank of a node is posted when the first rank has its copy, etc.
        posts = np.concatenate([self.first[:, :1], self.first[:, :-1]], axis=1)
        posts[0] = _one_by_one(self.first[0])
        return self._hops(self.name, (post, self.first[:, 0]), (posts, self.first))

    def returns(self, partial: str, crossing: dict[int, int]) -> list[Transfers]:
        """Return the transfers of partial results. Each starts after the last pair that adds to it.

        Args:
            partial: Family of the partial results: "out", "dquery" or "dkv".
            crossing: Result of `_returned`: boundary at which a transfer between nodes starts ->
                boundary at which it ends.
        """
        post = self.gathered
        land = np.array([crossing.get(at, 0) for at in post.tolist()])
        return self._hops(partial, (post, land), (self.last + 1, self.last + 2), home=True)

    def _hops(self, family: str, between, within, home: bool = False) -> list[Transfers]:
        """Return two tables: the transfers between nodes, and the transfers within nodes.

        A transfer starts at its post boundary and ends at its landing boundary. Boundary t is the
        moment before step t.

        Args:
            family: Tensors that are sent, a name in `tables.FAMILIES`.
            between: Post and landing boundaries of transfers between nodes, two arrays [nodes].
            within: Post and landing boundaries of transfers within nodes, two arrays [nodes,
                ranks].
            home: True for partial results, which receivers send back to owners.
        """
        gate = self.receivers[:, :, 0]
        node = np.bitwise_or.reduce(self.rows, axis=2)
        node[:, 0] = 0  # rows for the owner's own node do not cross; they are sent below
        owner, u = np.nonzero(node)
        ends, times = (owner, gate[owner, u]), (boundaries[u] for boundaries in between)
        parts = [_transfers(family, "inter", owner, node[owner, u], ends, home, times)]
        rows = self.rows.copy()
        rows[:, :, 0] = 0  # the gate receives its rows on the hop above
        owner, u, v = np.nonzero(rows)
        ends, times = (
            (gate[owner, u], self.receivers[owner, u, v]),
            (boundaries[u, v] for boundaries in within),
        )
        return [*parts, _transfers(family, "intra", owner, rows[owner, u, v], ends, home, times)]


class _TilePosition(NamedTuple):
    """Ranks, and their coordinates (node, rank in the node) along the column or row of the tile."""

    rank: np.ndarray
    node: np.ndarray
    member: np.ndarray


def _moved(rank: np.ndarray, shape: Shape, name: str, way: int) -> _TilePosition:
    """Return the ranks at each distance from `rank` in its column (keys) or row (queries).

    Args:
        rank: Ranks [G, 1, 1].
        shape: Shape of the tile.
        name: "kv" for the column, "query" for the row.
        way: 1 to go forward, -1 to go backward.
    """
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
    return _TilePosition(moved.astype(np.int32), *((row, i) if name == "kv" else (column, j)))


def _one_by_one(lands: np.ndarray) -> np.ndarray:
    """Return the boundaries at which transfers start, if each starts when the previous one ends.

    Args:
        lands: Boundaries at which transfers end. Entry 0 is not a transfer.

    Returns:
        Array of the same shape; 0 for the transfer that ends first, and in entry 0.
    """
    posts = np.zeros_like(lands)
    order = 1 + np.argsort(lands[1:], kind="stable")
    posts[order[1:]] = lands[order[:-1]]
    return posts


def _transfers(family, ring, owner, rows, ends, home, times) -> Transfers:
    return transfers(family, ring, owner, rows, *(reversed(ends) if home else ends), *times)


def _pairs(demand: Demand, order: np.ndarray, queries: _TileFamily, keys: _TileFamily) -> Pairs:
    """Return the table of all visible pairs, with the query rows and key rows of each pair."""
    visibility, size = demand.visibility, demand.grid.size
    q, k = queries.back.reshape(size, -1, 1), keys.back.reshape(size, 1, -1)
    at = np.flatnonzero(demand.visible[q, k])
    rank, tile = np.divmod(at.astype(np.int32), size)
    y, x = np.divmod(tile, keys.back[0].size)
    q, k = q[rank, y, 0], k[rank, 0, x]
    query_rows = np.where(q == rank, ALL, visibility.queries.bits(visibility.queries.users)[q, k])
    key_rows = np.where(k == rank, ALL, visibility.keys.bits(visibility.keys.users)[k, q])
    return Pairs(rank, order.reshape(-1)[tile], q, k, query_rows, key_rows)
