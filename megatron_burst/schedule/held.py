"""The memory of a schedule on one rank: chunks of others, and partial results of their rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from .demand import RowBytes
from .tables import Boundary, Chunk, Tables


def held_bytes(tables: Tables, program: Sequence[Boundary], rank: int, row_bytes: RowBytes) -> int:
    """The most bytes that `rank` holds at a time of the rows of others.

    Copies from when they start to arrive until they are released; partial results from the first
    contribution until they are sent, and beside them those that arrive or leave, as `row_bytes` has
    them: in the dtype in which they travel.
    """
    change: dict[int, int] = defaultdict(int)
    sums: dict[tuple[str, int], tuple[int, int, int]] = {}  # rows, first and last boundary
    arrived: set[Chunk] = set()

    def size(chunk: Chunk) -> int:
        rows = tables.bundles(chunk.family).count(chunk.owner, chunk.rows)
        return rows * getattr(row_bytes, chunk.family)

    def summed(chunk: Chunk, boundary: int) -> None:
        if chunk.owner != rank and getattr(row_bytes, chunk.family):
            rows, first, last = sums.get(chunk[:2], (0, boundary, boundary))
            where = min(first, boundary), max(last, boundary)
            sums[chunk[:2]] = rows | chunk.rows, *where

    for boundary in program:
        for hop in boundary.posts:
            if hop.chunk.accumulated:
                change[hop.post] += size(hop.chunk)
                change[hop.land] -= size(hop.chunk)
                summed(hop.chunk, hop.post if hop.src == rank else hop.land)
            elif hop.dst == rank:
                change[hop.post] += size(hop.chunk)
                arrived.add(hop.chunk)
        for chunk in arrived.intersection(boundary.release):  # the others forward has kept
            change[boundary.index] -= size(chunk)
        for pair in boundary.pairs:
            summed(Chunk("dkv", pair.key, pair.key_rows), boundary.index)
            for family in ("dquery", "out"):
                summed(Chunk(family, pair.query, pair.query_rows), boundary.index)
    for (family, owner), (rows, first, last) in sums.items():
        change[first] += size(Chunk(family, owner, rows))
        change[last] -= size(Chunk(family, owner, rows))
    return max(accumulate(change[index] for index in sorted(change)), default=0)
