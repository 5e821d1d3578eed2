# SPDX-License-Identifier: Apache-2.0
"""The program of one rank: what it does before and in each step, extracted from the tables.

The tables (`tables.Tables`) have the pairs and transfers of all ranks. This module also decides
when the buffer of a received chunk is released. If heads are divided into head chunks, it decides
when the later head chunks compute the pair of the rank's own chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .tables import Boundary, Chunk, Grid, Hop, Pair, Tables


def program(tables: Tables, grid: Grid, rank: int, own_last: bool = False) -> tuple[Boundary, ...]:
    """Return the operations of a rank, in order: one `Boundary` per step.

    After the last step, there are further boundaries, at which the last transfers end.

    Args:
        tables: Tables of the pass, for all ranks.
        grid: Grid of the ranks.
        rank: The rank.
        own_last: True to compute the pair of the rank's own chunks during the last transfer of a
            partial result. False to compute it at its step in the tables. Later head chunks (groups
            of heads with their own transfers) use True: pairs of earlier head chunks hide the first
            transfers of a later one, and the pair of the own chunks hides its last transfer.
    """
    hops = hops_of(tables, grid, rank)
    posted = [hop.post for hop in hops if hop.chunk.accumulated and hop.src == rank]
    pairs, own = pairs_of(tables, rank), Pair(rank, rank)
    # Gradients land after the last step, at boundaries without pairs.
    end = max([tables.steps, *(hop.land for hop in hops), *(pairs.values())])
    if own_last and own in pairs and tables.transfers.accumulated.any():
        # The last boundary that posts a partial result: the rank's own pair runs during that hop.
        pairs[own] = max([tables.steps, *posted])
        end = max(end, pairs[own] + 1)
    posts: list[list[Hop]] = [[] for _ in range(end + 1)]
    for hop in hops:
        posts[hop.post].append(hop)
    release: list[list[Chunk]] = [[] for _ in range(end + 1)]
    for chunk, boundary in _last_use(rank, hops, pairs).items():
        release[boundary].append(chunk)
    computed: list[list[Pair]] = [[] for _ in range(end + 1)]
    for pair, boundary in pairs.items():
        computed[boundary].append(pair)
    lists = enumerate(zip(posts, release, computed, strict=True))
    return tuple(Boundary(i, tuple(p), tuple(r), tuple(c)) for i, (p, r, c) in lists)


def hops_of(tables: Tables, grid: Grid, rank: int) -> list[Hop]:
    """Return the transfers from and to `rank`, sorted by the step before which they start."""
    moved = tables.transfers
    rows = np.flatnonzero((moved.src == rank) | (moved.dst == rank))
    return list(moved.where(rows[np.argsort(moved.post[rows], kind="stable")]).hops(grid))


def pairs_of(tables: Tables, rank: int) -> dict[Pair, int]:
    """Return the pairs that `rank` computes, each with its step."""
    rows = np.flatnonzero(tables.pairs.rank == rank)
    steps, *columns = (column[rows].tolist() for column in tables.pairs[1:])
    return dict(zip(map(Pair, *columns), steps, strict=True))


def parts_of(chunks: Mapping[tuple[str, int], Sequence[Chunk]], selected: Chunk) -> list[Chunk]:
    """Return the chunks that have some rows of another chunk.

    Args:
        chunks: (family, owner) -> chunks to select from.
        selected: Chunk whose family, owner and rows are compared.
    """
    return [chunk for chunk in chunks.get(selected[:2], ()) if chunk.rows & selected.rows]


def _last_use(rank: int, hops: list[Hop], pairs: dict[Pair, int]) -> dict[Chunk, int]:
    """Return, for each received chunk, the step before which its buffer can be released."""
    last_use = {h.chunk: h.land for h in hops if h.dst == rank and not h.chunk.accumulated}
    by_owner: dict[tuple[str, int], list[Chunk]] = {}
    for chunk in last_use:
        by_owner.setdefault(chunk[:2], []).append(chunk)

    def use(selected: Chunk, until: int) -> None:
        for part in parts_of(by_owner, selected):
            last_use[part] = max(last_use[part], until)

    for hop in hops:
        # A buffer is in use while a hop sends it, also after the last pair that reads it.
        if hop.src == rank and not hop.chunk.accumulated:
            use(hop.chunk, max(hop.land, hop.post + 1))
    for pair, step in pairs.items():
        use(Chunk("query", pair.query, pair.query_rows), step + 1)
        use(Chunk("kv", pair.key, pair.key_rows), step + 1)
    return last_use
