# SPDX-License-Identifier: Apache-2.0
"""The shape of a tile: how many query chunks and key chunks meet on a rank, chosen by bytes.

Decides which of all grids a pass takes, from the rows that would travel and what a rank would hold.
Bytes between nodes come first and those within nodes second: a link between nodes is several times
slower, and of shapes that send the same over it, which are many, the second decides.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..bundles import Bundles
from ..demand import Demand, RowBytes
from ..tables import Grid
from ..topology import divisors

HOLDS = 32  # times the memory of a rank's own chunks: what a tile may hold by default


class Shape(NamedTuple):
    """A grid of nodes, and a grid of ranks within each: columns meet keys, rows meet queries.

    Node (I, J) = I * query_nodes + J, rank (i, j) of a node = i * query_ranks + j. The queries of
    the ranks of equal I and i meet the keys of the ranks of equal J and j.
    """

    key_nodes: int
    query_nodes: int
    key_ranks: int
    query_ranks: int

    @property
    def keys(self) -> int:
        """How many key chunks a rank computes with."""
        return self.key_nodes * self.key_ranks

    @property
    def queries(self) -> int:
        """How many query chunks a rank computes with."""
        return self.query_nodes * self.query_ranks


def shapes(grid: Grid) -> list[Shape]:
    """All there are; those with one query chunk or one key chunk are rings in what they send."""
    return [
        Shape(grid.inter // across, across, grid.intra // within, within)
        for across in divisors(grid.inter)
        for within in divisors(grid.intra)
    ]


def memory(shape: Shape, row_bytes: RowBytes, rows: int = 1) -> int:
    """Bytes that a rank holds at most, of whole chunks with so many rows, its own included.

    At most `keys` x (K, V, dK, dV) and `queries` x (Q, dO, D, lse, dQ), or O for the last four in
    forward. Of the family that is not gathered (`gathers_keys`) fewer: what comes from other nodes
    is released group by group, and so is the gathered one where all of the other are of one node. A
    group is a node's; besides it a rank holds its own node's, and the next that crosses. Not
    counted: partial results of others while they travel.
    """
    kv, query, dkv, dquery, out = row_bytes
    keys, queries = chunks_held(shape, row_bytes)
    return rows * (keys * (kv + dkv) + queries * (query + dquery + out))


def gathers_keys(row_bytes: RowBytes) -> bool:
    """Are the keys of the column gathered first, and stay, while queries pass by?

    The family of the smaller copies is: each of its chunks arrives beside few pairs, those of one
    node's chunks, and one of the other family beside those with all that were gathered.
    """
    return row_bytes.kv < row_bytes.query


def chunks_held(shape: Shape, row_bytes: RowBytes) -> tuple[int, int]:
    """How many key chunks and query chunks a rank holds at most, its own included."""
    keys = min(shape.keys, 2 * shape.key_ranks + 1)
    queries = min(shape.queries, 2 * shape.query_ranks + 1)
    if gathers_keys(row_bytes):
        return (shape.keys, queries) if shape.query_nodes > 1 else (keys, shape.queries)
    return (keys, shape.queries) if shape.key_nodes > 1 else (shape.keys, queries)


def chosen(demand: Demand) -> Shape:
    """The shape that sends the fewest bytes between nodes, and of these the fewest within.

    Of those that hold at most `HOLDS` times what a row of a rank's own chunks takes; or, where none
    holds so little, of those that hold least.
    """
    found = shapes(demand.grid)
    need = [memory(shape, demand.row_bytes) for shape in found]
    most = max(HOLDS * sum(demand.row_bytes), min(need))
    allowed = [shape for shape, each in zip(found, need, strict=True) if each <= most]
    between = _bytes_between(demand, {shape[:2] for shape in allowed})
    # Of node grids that send the same, the one on which a tile holds least.
    nodes = min(allowed, key=lambda s: (between[s[:2]], memory(s, demand.row_bytes)))[:2]
    within = _bytes_within(demand, [shape for shape in allowed if shape[:2] == nodes])
    return min(within, key=lambda shape: (within[shape], memory(shape, demand.row_bytes)))


def _bytes_between(demand: Demand, nodes: set[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Bytes of both families and of their partial results, by (key_nodes, query_nodes)."""
    inter, intra = demand.grid
    total = dict.fromkeys(nodes, 0)
    for family, bundles, each in _families(demand):
        home = bundles.owner // intra
        by_node = bundles.wanted.reshape(-1, inter, intra).any(axis=2)
        for keys, queries in nodes:
            grid = by_node.reshape(-1, keys, queries)
            if family == "kv":
                wants, own = np.logical_or.reduce(grid, axis=2), home // queries
            else:
                wants, own = np.logical_or.reduce(grid, axis=1), home % queries
            total[keys, queries] += each * _rows_elsewhere(bundles, wants, own)
    return total


def _bytes_within(demand: Demand, found: list[Shape]) -> dict[Shape, int]:
    """Bytes of both families and of their partial results, by shape."""
    if len(found) == 1:
        return {found[0]: 0}  # nothing to compare with
    total = dict.fromkeys(found, 0)
    for family, bundles, each in _families(demand):
        index = bundles.owner % demand.grid.intra
        for shape in found:
            wants = wanted_by(bundles, shape, family)
            own = index // shape.query_ranks if family == "kv" else index % shape.query_ranks
            for node in range(wants.shape[1]):
                total[shape] += each * _rows_elsewhere(bundles, wants[:, node], own)
    return total


def _families(demand: Demand) -> list[tuple[str, Bundles, int]]:
    """Each family that is copied: its name, its bundles, and the bytes of a row that travel as a
    copy and as a partial result.
    """
    kv, query, dkv, dquery, out = demand.row_bytes
    wanted = demand.wanted
    return [("kv", wanted.keys, kv + dkv), ("query", wanted.queries, query + dquery + out)]


def _rows_elsewhere(bundles: Bundles, wants: np.ndarray, own: np.ndarray) -> int:
    """How many rows travel if each bundle goes to all that want it, bool [n, places], but `own`."""
    there = wants.sum(axis=1) - wants[np.arange(len(own)), own]
    return int((bundles.rows * there).sum())


def wanted_by(bundles: Bundles, shape: Shape, family: str) -> np.ndarray:
    """Which ranks of its column want each bundle of keys, or of its row each bundle of queries.

    bool [n, key_nodes, key_ranks] or [n, query_nodes, query_ranks]: keys that some query of the
    rank's row sees, and queries that see some key of its column.
    """
    keys, queries, key_ranks, query_ranks = shape
    by_node = bundles.wanted.reshape(-1, keys, queries, key_ranks * query_ranks)
    by_node = by_node.any(axis=2 if family == "kv" else 1)
    by_rank = by_node.reshape(*by_node.shape[:2], key_ranks, query_ranks)
    return np.logical_or.reduce(by_rank, axis=3 if family == "kv" else 2)
