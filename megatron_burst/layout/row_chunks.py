# SPDX-License-Identifier: Apache-2.0
"""Row chunks: parts of every shard whose queries attend one behind the other.

Decides which rows are in a chunk: the same ones on every rank, so that exchanges among ranks that
share heads stay even, and, where a layout mirrors early and late positions, as many of both, so
that chunks are as balanced as the whole shard.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from .layouts import DocumentZigzag, Layout, Zigzag


def row_chunks(layout: Layout, rows: int, count: int, blocks: int = 1) -> tuple[np.ndarray, ...]:
    """`count` int64 arrays: the rows of a shard in each chunk, ascending; a partition of `rows`.

    The shard is `blocks` equal runs of rows, one per rank of sequence parallelism; a chunk has
    equally many rows of each. Chunks differ by at most one row per block; of more chunks than rows
    some are empty. With a zigzag layout a chunk takes the c-th piece of the early half and the
    c-th piece from the end of the late half.
    """
    each = rows // blocks
    by_turn = np.argsort(_order(layout, rows).reshape(blocks, each), axis=1, kind="stable")
    by_turn += np.arange(blocks)[:, None] * each
    cuts = [each * c // count for c in range(count + 1)]
    return tuple(np.sort(by_turn[:, a:b].reshape(-1)) for a, b in pairwise(cuts))


def runs(rows: np.ndarray) -> list[tuple[int, int]]:
    """Ascending row numbers as runs (first, stop)."""
    if not len(rows):
        return []
    edge = np.flatnonzero(np.diff(rows) != 1) + 1
    firsts, lasts = rows[np.append(0, edge)], rows[np.append(edge, len(rows)) - 1]
    return [(a, b + 1) for a, b in zip(firsts.tolist(), lasts.tolist(), strict=True)]


def _order(layout: Layout, rows: int) -> np.ndarray:
    """For every row of a shard a number that says when its turn comes."""
    halves = [rows // 2] if isinstance(layout, Zigzag) else []
    if isinstance(layout, DocumentZigzag):
        halves = [n for n in (np.diff(layout.bounds) // (2 * layout.cp_size)).tolist() if n]
    if not halves:
        return np.arange(rows)
    found, first = [], 0
    for half in halves:  # of each document, or of the sequence
        early = first + np.arange(half)
        found += [early, early[::-1]]
        first += half
    return np.concatenate(found)
