# SPDX-License-Identifier: Apache-2.0
"""Row chunks: parts of every shard whose attention is computed one after another.

This module decides the rows of each chunk. These rows are the same on every rank, so that
all-to-alls among ranks that share heads have messages of equal size. If a layout mirrors early and
late positions, a chunk has as many early as late positions, so that chunks are as balanced as the
whole shard.
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
    """Return the rows of a shard in each chunk: ascending int64 arrays, disjoint and complete.

    The shard has `blocks` equal runs of rows, one per rank of sequence parallelism. A chunk has
    equally many rows of each run. Chunks differ by at most one row per block. If there are more
    chunks than rows, some are empty. With a zigzag layout, chunk c contains the c-th part of the
    early half of a shard, and the c-th part from the end of the late half.

    Args:
        layout: The layout.
        rows: Rows of a shard.
        count: Number of chunks.
        blocks: Number of blocks of rows.
    """
    return tuple(rows_of(chunk) for chunk in chunk_runs(layout, rows, count, blocks))


def rows_of(runs: Sequence[Run]) -> np.ndarray:
    """Return the rows of some runs, int64."""
    return np.concatenate([np.arange(0), *(np.arange(*run) for run in runs)])


def chunk_runs(layout: Layout, rows: int, count: int, blocks: int = 1) -> list[list[Run]]:
    """Return the chunks of `row_chunks` as ascending runs of rows.

    The time to compute them is independent of the length of the runs.
    """
    parts = [0, *accumulate(_mirrored(layout, rows))]
    block_rows = rows // blocks
    chunks: list[list[Run]] = [[] for _ in range(count)]
    for block in range(blocks):
        first, end = block * block_rows, (block + 1) * block_rows
        cuts = [
            _progress(parts, first, end, block_rows * index // count) for index in range(count + 1)
        ]
        for chunk, (before, after) in zip(chunks, pairwise(cuts), strict=True):
            for begin, stop in _between(before, after):
                if chunk and chunk[-1][1] == begin:
                    begin = chunk.pop()[0]
                chunk.append((begin, stop))
    return chunks


def _mirrored(layout: Layout, rows: int) -> list[int]:
    """Return the number of rows of each part of a shard with mirrored early and late positions.

    Row i from the start of a part is as far from the start of the document as row i from the end of
    the part is from the end of the document. Parts are documents, or the whole sequence. The list
    is empty if the layout does not mirror positions.
    """
    if isinstance(layout, DocumentZigzag):
        return [2 * n for n in (np.diff(layout.bounds) // (2 * layout.cp_size)).tolist() if n]
    return [rows] if isinstance(layout, Zigzag) else []


class _BlockProgress(NamedTuple):
    """The rows of a block that earlier chunks already contain.

    Attributes:
        part: Index of the current part.
        early: Earlier chunks contain the rows before this row.
        late: Earlier chunks contain the rows of the part from this row to `end`.
        end: End of the part's rows in this block.
    """

    part: int
    early: int
    late: int
    end: int


def _progress(parts: Sequence[int], first: int, end: int, turns: int) -> _BlockProgress:
    """Return the progress in the block of rows `first` to `end` after `turns` rows.

    Chunks are filled with the rows of a part from both ends inwards, an early row before the late
    row of its pair. A part begins when the previous part is finished.

    Args:
        parts: First row of each part, then the number of all rows.
        first: First row of the block.
        end: End of the block.
        turns: Number of rows that earlier chunks contain.
    """
    row = first + turns
    if len(parts) == 1:
        return _BlockProgress(0, row, row, row)
    part = max(0, bisect_left(parts, row) - 1)
    begin, stop = parts[part], parts[part + 1]
    middle = (begin + stop) // 2
    left, right = max(first, begin), min(end, stop)  # the part's rows in this block
    early, late = max(0, min(end, middle) - left), max(0, right - max(first, middle))
    # If the block has rows of both halves: number of rows by which the late half starts farther
    # inwards.
    inwards = (stop - right) - (left - begin)
    taken = row - left
    of_early = min(max((taken + inwards + 1) // 2, taken - late, 0), early, taken)
    return _BlockProgress(part, left + of_early, right - (taken - of_early), right)


def _between(before: _BlockProgress, after: _BlockProgress) -> Iterator[Run]:
    """Yield the rows of the chunk between two states, as ascending runs."""
    if before.part == after.part:
        runs = [(before.early, after.early), (after.late, before.late)]
    else:
        runs = [(before.early, before.late), (before.end, after.early), (after.late, after.end)]
    yield from ((begin, stop) for begin, stop in runs if begin < stop)
