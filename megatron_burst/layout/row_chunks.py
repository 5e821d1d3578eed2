# SPDX-License-Identifier: Apache-2.0
"""Row chunks: parts of every shard whose queries attend one behind the other.

Decides which rows are in a chunk: the same ones on every rank, so that exchanges among ranks that
share heads stay even, and, where a layout mirrors early and late positions, as many of both, so
that chunks are as balanced as the whole shard.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from .layouts import DocumentZigzag, Layout, Zigzag

Run = tuple[int, int]  # first row, stop


def row_chunks(layout: Layout, rows: int, count: int, blocks: int = 1) -> tuple[np.ndarray, ...]:
    """`count` int64 arrays: the rows of a shard in each chunk, ascending; a partition of `rows`.

    The shard is `blocks` equal runs of rows, one per rank of sequence parallelism; a chunk has
    equally many rows of each. Chunks differ by at most one row per block; of more chunks than rows
    some are empty. With a zigzag layout a chunk takes the c-th piece of the early half and the
    c-th piece from the end of the late half.
    """
    return tuple(rows_of(chunk) for chunk in chunk_runs(layout, rows, count, blocks))


def rows_of(runs: Sequence[Run]) -> np.ndarray:
    """int64: the rows of these runs."""
    return np.concatenate([np.arange(0), *(np.arange(*run) for run in runs)])


def chunk_runs(layout: Layout, rows: int, count: int, blocks: int = 1) -> list[list[Run]]:
    """The chunks of `row_chunks` as ascending runs of rows. Takes no longer for longer runs."""
    parts = [0, *accumulate(_mirrored(layout, rows))]
    each = rows // blocks
    chunks: list[list[Run]] = [[] for _ in range(count)]
    for block in range(blocks):
        first, end = block * each, (block + 1) * each
        cuts = [_cut(parts, first, end, each * c // count) for c in range(count + 1)]
        for chunk, (before, after) in zip(chunks, pairwise(cuts), strict=True):
            for begin, stop in _between(before, after):
                if chunk and chunk[-1][1] == begin:
                    begin = chunk.pop()[0]
                chunk.append((begin, stop))
    return chunks


def _mirrored(layout: Layout, rows: int) -> list[int]:
    """Rows of each part of a shard whose first row is as early as its last row is late, and so on
    inwards: of each document, or of the sequence; none where the layout has no such parts.
    """
    if isinstance(layout, DocumentZigzag):
        return [2 * n for n in (np.diff(layout.bounds) // (2 * layout.cp_size)).tolist() if n]
    return [rows] if isinstance(layout, Zigzag) else []


class _BlockProgress(NamedTuple):
    """Rows of a block that have had their turn: those before `early`, and of the part with this
    number those from `late` to its `end`.
    """

    part: int
    early: int
    late: int
    end: int


def _cut(parts: Sequence[int], first: int, end: int, turns: int) -> _BlockProgress:
    """After so many turns in the block of rows from `first` to `end`; parts: where each begins.

    A part's rows have their turns from both ends inwards, an early one before the late one of its
    pair; a part begins when the one before has ended.
    """
    row = first + turns
    if len(parts) == 1:
        return _BlockProgress(0, row, row, row)
    part = max(0, bisect_left(parts, row) - 1)
    begin, stop = parts[part], parts[part + 1]
    middle = (begin + stop) // 2
    left, right = max(first, begin), min(end, stop)  # its rows in this block
    early, late = max(0, min(end, middle) - left), max(0, right - max(first, middle))
    # Where the block has both, by how many pairs the late ones begin farther inwards.
    inwards = (stop - right) - (left - begin)
    taken = row - left
    of_early = min(max((taken + inwards + 1) // 2, taken - late, 0), early, taken)
    return _BlockProgress(part, left + of_early, right - (taken - of_early), right)


def _between(before: _BlockProgress, after: _BlockProgress) -> Iterator[Run]:
    """The rows that have their turn after one cut and before another, as ascending runs."""
    if before.part == after.part:
        found = [(before.early, after.early), (after.late, before.late)]
    else:
        found = [(before.early, before.late), (before.end, after.early), (after.late, after.end)]
    yield from ((begin, stop) for begin, stop in found if begin < stop)
