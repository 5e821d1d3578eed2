# SPDX-License-Identifier: Apache-2.0
"""Row chunks: parts of every shard, for which attention is computed one after another.

A row chunk has the same row indices on every rank, so that all messages of an all-to-all have equal
size. If a layout gives each rank mirrored early and late positions (zigzag), a chunk has equally
many of both. So the chunks of all ranks are as balanced as the whole shards.
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
    """Divide the rows of a shard into row chunks.

    The shard consists of `blocks` equal blocks of consecutive rows, one per rank of sequence
    parallelism. A chunk has equally many rows of each block. The sizes of two chunks differ by at
    most one row per block. If there are more chunks than rows, some chunks are empty. With a zigzag
    layout, chunk c contains the c-th part of the early half of a shard, and the c-th part from the
    end of the late half.

    Args:
        layout: The layout.
        rows: Number of rows of a shard.
        count: Number of row chunks.
        blocks: Number of blocks of rows.

    Returns:
        Row numbers of each chunk, int64, ascending.
    """
    return tuple(rows_of(chunk) for chunk in chunk_runs(layout, rows, count, blocks))


def rows_of(runs: Sequence[Run]) -> np.ndarray:
    """Return the row numbers of all ranges (first, stop), int64, concatenated."""
    return np.concatenate([np.arange(0), *(np.arange(*run) for run in runs)])


def chunk_runs(layout: Layout, rows: int, count: int, blocks: int = 1) -> list[list[Run]]:
    """Return the same chunks as `row_chunks`, each as ascending ranges (first, stop) of rows.

    The time to compute the chunks does not depend on the lengths of the ranges.
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
    """Return the number of rows of each mirrored part of a shard; [] if no part is mirrored.

    A part has the rows of one document, or all rows of the shard. It is mirrored if the i-th row
    from its start is as close to the start of the document (or sequence) as the i-th row from its
    end is to the end.
    """
    if isinstance(layout, DocumentZigzag):
        return [2 * n for n in (np.diff(layout.bounds) // (2 * layout.cp_size)).tolist() if n]
    return [rows] if isinstance(layout, Zigzag) else []


class _BlockProgress(NamedTuple):
    """The rows of a block (an equal share of a shard's rows) that earlier row chunks contain.

    Attributes:
        part: Index of the mirrored part (`_mirrored`) from which the next chunk takes rows.
        early: Row after the rows that earlier chunks took from the start of the part.
        late: First of the rows that earlier chunks took from the end of the part.
        end: Row after the last row of the part in this block.
    """

    part: int
    early: int
    late: int
    end: int


def _progress(parts: Sequence[int], first: int, end: int, turns: int) -> _BlockProgress:
    """Return which rows of a block the earlier row chunks contain.

    Chunks are filled with the rows of one part after another. The rows of a part are used from both
    ends inwards, in turns: an early row, then a late row.

    Args:
        parts: First row of each mirrored part of the shard (`_mirrored`), then the number of all
            rows.
        first: First row of the block.
        end: Row after the last row of the block.
        turns: Number of rows of the block that earlier chunks contain.
    """
    row = first + turns
    if len(parts) == 1:
        return _BlockProgress(0, row, row, row)
    part = max(0, bisect_left(parts, row) - 1)
    begin, stop = parts[part], parts[part + 1]
    middle = (begin + stop) // 2
    left, right = max(first, begin), min(end, stop)  # the part's rows in this block
    early, late = max(0, min(end, middle) - left), max(0, right - max(first, middle))
    # Number of rows of the part after this block, minus the number of rows before the block.
    inwards = (stop - right) - (left - begin)
    taken = row - left
    of_early = min(max((taken + inwards + 1) // 2, taken - late, 0), early, taken)
    return _BlockProgress(part, left + of_early, right - (taken - of_early), right)


def _between(before: _BlockProgress, after: _BlockProgress) -> Iterator[Run]:
    """Yield the rows of a chunk as ascending ranges (first, stop).

    Args:
        before: Rows of the block that earlier chunks contain.
        after: Rows of the block that this chunk and earlier chunks contain.
    """
    if before.part == after.part:
        runs = [(before.early, after.early), (after.late, before.late)]
    else:
        runs = [(before.early, before.late), (before.end, after.early), (after.late, after.end)]
    yield from ((begin, stop) for begin, stop in runs if begin < stop)
