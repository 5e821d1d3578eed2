"""What one rank does: its part of the tables, boundary by boundary.

Decides when a chunk can be released, and when head chunks that run behind others compute the pair
of their own chunks.
"""

from __future__ import annotations

import numpy as np

from .tables import Boundary, Chunk, Grid, Hop, Pair, Tables


def program(
    tables: Tables, grid: Grid, rank: int, side: str, own_last: bool = False
) -> tuple[Boundary, ...]:
    """The boundaries of `rank` in order, of the steps and of the draining after them.

    side: the family that travels. own_last: compute the pair of the rank's own chunks, which
    depends on no hop, not at step 0 but while the last gradient hop travels. For head chunks that
    run behind others: the pairs of those hide its first hops, and its own pair hides its last.
    """
    hops = hops_of(tables, grid, rank)
    posted = [hop.post for hop in hops if hop.chunk.gradient and hop.src == rank]
    end = max([tables.steps, *(hop.land for hop in hops)])
    pairs, own = pairs_of(tables, rank), Pair(rank, rank)
    if own_last and own in pairs and tables.transfers.gradient.any():
        # The last boundary that posts a gradient: the own pair runs beside that hop.
        pairs[own] = max([tables.steps, *posted])
        end = max(end, pairs[own] + 1)
    posts: list[list[Hop]] = [[] for _ in range(end + 1)]
    for hop in hops:
        posts[hop.post].append(hop)
    release: list[list[Chunk]] = [[] for _ in range(end + 1)]
    for chunk, boundary in _last_use(tables, rank, side, hops, pairs).items():
        release[boundary].append(chunk)
    computed: list[Pair | None] = [None] * (end + 1)
    for pair, boundary in pairs.items():
        computed[boundary] = pair
    parts = zip(posts, release, computed, strict=True)
    return tuple(Boundary(i, tuple(p), tuple(r), pair) for i, (p, r, pair) in enumerate(parts))


def hops_of(tables: Tables, grid: Grid, rank: int) -> list[Hop]:
    """The hops from and to `rank`, in the order in which they start."""
    moved = tables.transfers
    rows = np.flatnonzero((moved.src == rank) | (moved.dst == rank))
    return list(moved.where(rows[np.argsort(moved.post[rows], kind="stable")]).hops(grid))


def pairs_of(tables: Tables, rank: int) -> dict[Pair, int]:
    """The pairs that `rank` computes, and at which step."""
    rows = np.flatnonzero(tables.pairs.rank == rank)
    columns = (column[rows].tolist() for column in tables.pairs[1:])
    return {Pair(query, key): step for step, query, key in zip(*columns, strict=True)}


def kept_by(tables: Tables, rank: int) -> list[int]:
    """The owners whose chunks `rank` kept from forward, in the order of their steps."""
    return tables.kept.owner[tables.kept.rank == rank].tolist()


def _last_use(
    tables: Tables, rank: int, side: str, hops: list[Hop], pairs: dict[Pair, int]
) -> dict[Chunk, int]:
    """The boundary at which each travelling chunk that this rank holds can be released."""
    last_use = {Chunk(side, owner): 0 for owner in (rank, *kept_by(tables, rank))}
    for hop in hops:
        # A buffer stays in use while it is sent from, also after the last pair that reads it.
        if not hop.chunk.gradient:
            last_use[hop.chunk] = max(last_use.get(hop.chunk, 0), hop.land)
    for pair, step in pairs.items():
        chunk = Chunk(side, pair.key if side == "kv" else pair.query)
        last_use[chunk] = max(last_use[chunk], step + 1)
    return last_use
