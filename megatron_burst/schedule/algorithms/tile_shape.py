# SPDX-License-Identifier: Apache-2.0
"""The shape of a tile: the numbers of query chunks and key chunks with which a rank computes.

The shape is chosen by the bytes that ranks would send and the memory that a rank would need. Bytes
between nodes are compared first, because links between nodes are several times slower. Bytes within
nodes are compared second, because many shapes send the same bytes between nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..bundles import Bundles
from ..demand import Demand, RowBytes
from ..tables import Grid
from ..topology import divisors

HOLDS = 32  # largest memory of a tile, as a multiple of a rank's own chunks


class Shape(NamedTuple):
    """A grid of nodes, and a grid of ranks within each node: columns for keys, rows for queries.

    Node (I, J) has the number I * query_nodes + J. Rank (i, j) of a node has the index i *
    query_ranks + j. A rank computes with the queries of all ranks that have the same I and i, and
    with the keys of all ranks that have the same J and j.
    """

    key_nodes: int
    query_nodes: int
    key_ranks: int
    query_ranks: int

    @property
    def keys(self) -> int:
        """Number of key chunks with which a rank computes."""
        return self.key_nodes * self.key_ranks

    @property
    def queries(self) -> int:
        """Number of query chunks with which a rank computes."""
        return self.query_nodes * self.query_ranks


def shapes(grid: Grid) -> list[Shape]:
    """Return all shapes of a grid.

    A shape with one query chunk or one key chunk sends the same bytes as a ring.
    """
    return [
        Shape(grid.inter // across, across, grid.intra // within, within)
        for across in divisors(grid.inter)
        for within in divisors(grid.intra)
    ]


def memory(shape: Shape, row_bytes: RowBytes, rows: int = 1) -> int:
    """Return the largest number of bytes of the chunks that a rank holds, its own chunks included.

    In backward, a rank holds chunks of (K, V, dK, dV) and chunks of (Q, dO, delta, lse, dQ). In
    forward, it holds (K, V) and (Q, O). `chunks_held` returns the numbers of chunks.

    One family, keys or queries, is gathered (`gathers_keys`): its chunks stay on the rank. Chunks
    of the other family are released node by node. So of the other family, a rank holds only the
    chunks of its own node and of one other node, and the next chunk that crosses. If all chunks of
    the other family are from one node, gathered chunks are also released node by node. Partial
    results in flight for other ranks are not counted.

    Args:
        shape: The shape.
        row_bytes: Bytes of a row of each family (keys, queries, their gradients, partial outputs).
        rows: Number of rows of a chunk.
    """
    kv, query, dkv, dquery, out = row_bytes
    keys, queries = chunks_held(shape, row_bytes)
    return rows * (keys * (kv + dkv) + queries * (query + dquery + out))


def gathers_keys(row_bytes: RowBytes) -> bool:
    """Return True if keys are gathered and stay on the rank; False if queries are gathered.

    The family with fewer bytes per row is gathered, because less computation overlaps with its
    transfers. A gathered chunk is received while the rank computes the pair of the previous
    gathered chunk. A chunk that is not gathered is received while the rank computes the pairs of
    the previous chunk with all gathered chunks.
    """
    return row_bytes.kv < row_bytes.query


def chunks_held(shape: Shape, row_bytes: RowBytes) -> tuple[int, int]:
    """Return the largest numbers of key chunks and query chunks on a rank, its own included."""
    keys = min(shape.keys, 2 * shape.key_ranks + 1)
    queries = min(shape.queries, 2 * shape.query_ranks + 1)
    if gathers_keys(row_bytes):
        return (shape.keys, queries) if shape.query_nodes > 1 else (keys, shape.queries)
    return (keys, shape.queries) if shape.key_nodes > 1 else (shape.keys, queries)


def chosen(demand: Demand) -> Shape:
    """Return the shape with the fewest bytes between nodes; of these, the fewest within nodes.

    Only shapes that need at most `HOLDS` times the memory of a rank's own chunks are compared. If
    there are none, the shapes that need the least memory are compared.
    """
    candidates = shapes(demand.grid)
    memory_of = [memory(shape, demand.row_bytes) for shape in candidates]
    most = max(HOLDS * sum(demand.row_bytes), min(memory_of))
    allowed = [
        shape for shape, bytes_held in zip(candidates, memory_of, strict=True) if bytes_held <= most
    ]
    between = _bytes_between(demand, {shape[:2] for shape in allowed})
    # If node grids send the same bytes, use the grid whose tile needs the least memory.
    nodes = min(allowed, key=lambda s: (between[s[:2]], memory(s, demand.row_bytes)))[:2]
    within = _bytes_within(demand, [shape for shape in allowed if shape[:2] == nodes])
    return min(within, key=lambda shape: (within[shape], memory(shape, demand.row_bytes)))


def _bytes_between(demand: Demand, nodes: set[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Return the bytes of a pass between nodes, for each (key_nodes, query_nodes) in `nodes`."""
    inter, intra = demand.grid
    total = dict.fromkeys(nodes, 0)
    for family, bundles, row_bytes in _families(demand):
        home = bundles.owner // intra
        by_node = bundles.users.reshape(-1, inter, intra).any(axis=2)
        for keys, queries in nodes:
            grid = by_node.reshape(-1, keys, queries)
            if family == "kv":
                users, own = np.logical_or.reduce(grid, axis=2), home // queries
            else:
                users, own = np.logical_or.reduce(grid, axis=1), home % queries
            total[keys, queries] += row_bytes * _rows_elsewhere(bundles, users, own)
    return total


def _bytes_within(demand: Demand, candidates: list[Shape]) -> dict[Shape, int]:
    """Return the bytes of a pass within nodes, for each shape."""
    if len(candidates) == 1:
        return {candidates[0]: 0}  # nothing to compare with
    total = dict.fromkeys(candidates, 0)
    for family, bundles, row_bytes in _families(demand):
        index = bundles.owner % demand.grid.intra
        for shape in candidates:
            users = users_by_place(bundles, shape, family)
            own = index // shape.query_ranks if family == "kv" else index % shape.query_ranks
            for node in range(users.shape[1]):
                total[shape] += row_bytes * _rows_elsewhere(bundles, users[:, node], own)
    return total


def _families(demand: Demand) -> list[tuple[str, Bundles, int]]:
    """Return (name, bundles, bytes of a row and of its results) for keys and for queries.

    A bundle is a group of rows of one owner that the same ranks use.
    """
    kv, query, dkv, dquery, out = demand.row_bytes
    visibility = demand.visibility
    return [("kv", visibility.keys, kv + dkv), ("query", visibility.queries, query + dquery + out)]


def _rows_elsewhere(bundles: Bundles, users: np.ndarray, own: np.ndarray) -> int:
    """Return the number of rows that are sent if each bundle is sent to all ranks that use it.

    Args:
        bundles: Groups of rows that the same ranks use.
        users: bool [n, receivers], true if a receiver uses the bundle.
        own: int [n], index of the owner on the axis of receivers; the owner receives nothing.
    """
    receivers = users.sum(axis=1) - users[np.arange(len(own)), own]
    return int((bundles.rows * receivers).sum())


def users_by_place(bundles: Bundles, shape: Shape, family: str) -> np.ndarray:
    """Return which ranks of the owner's column (keys) or row (queries) need each bundle.

    A rank needs keys if some query with which it computes sees them. It needs queries if they see
    some key with which it computes.

    Returns:
        bool [n, key_nodes, key_ranks] for keys, [n, query_nodes, query_ranks] for queries.
    """
    keys, queries, key_ranks, query_ranks = shape
    by_node = bundles.users.reshape(-1, keys, queries, key_ranks * query_ranks)
    by_node = by_node.any(axis=2 if family == "kv" else 1)
    by_rank = by_node.reshape(*by_node.shape[:2], key_ranks, query_ranks)
    return np.logical_or.reduce(by_rank, axis=3 if family == "kv" else 2)
