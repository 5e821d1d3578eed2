"""Cuts a band (a causal mask or a sliding window over local rows and columns) into tiles.

Decides how many tiles a band becomes, and how large they are: each tile is one kernel call, so
few and large ones are fast, but beside a slanted edge a kernel computes pairs that are hidden.

    right edge only (causal)      both edges (window), row blocks
        T . . .                       T . . . .
        S T . .                       E T . . .
        S S T .                       . E T . .         T triangle, S square, E table of an edge
        S S S T                       . . E T .
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .base import Band

_SMALLEST_BLOCK = 128  # a smaller call costs more than the pairs that it saves


class BandTile(NamedTuple):
    """One tile of a band: (first, stop) of rows and of columns within the band; `triangle` and
    `table` as in `tiling.Tile`."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    triangle: bool = False
    table: np.ndarray | None = None


def left_edge(rows: int, columns: int, band: Band) -> bool:
    """Is there a row that sees some column but no longer the first one?

    Rows are visible from -band.right on. Without such a row, the band is a lower triangle and
    rectangles, which every kernel takes.
    """
    return min(rows, columns + band.left) > max(0, -band.right, band.left + 1)


def band_tiles(rows: int, columns: int, band: Band, block: int | None) -> tuple[BandTile, ...]:
    """The tiles of a band over `rows` x `columns`.

    First the rows that the left edge does not reach: a rectangle and a lower triangle. Then, by
    blocks of at most `block` rows (None: in one), what the whole block sees and the slanted edges
    beside it.
    """
    left, right = band
    if block is not None:  # an edge wastes half a block: keep that small beside what is visible
        block = min(block, max(_SMALLEST_BLOCK, min(rows, left + right + 1) // 8))
    tiles: list[BandTile] = []
    edges: dict[tuple, np.ndarray] = {}  # equal edges share a table: kernels convert it once
    begin = max(0, -right)  # rows before it see nothing
    stop = min(rows, left + 1, columns - right)
    if begin < stop:
        if begin + right > 0:  # columns that the first row sees before the triangle begins
            tiles.append(BandTile((begin, stop), (0, begin + right)))
        tiles += _triangle(begin, stop, right, block or stop)
        begin = stop
    while begin < rows and begin - left < columns:
        end = rows if block is None else min(rows, begin + block)
        # A block must not contain rows of both kinds, with the right edge inside and outside the
        # columns: its triangle would stick out, or rows that see all columns would lose some.
        if begin + right < columns - 1:
            end = min(end, columns - right)
        elif left >= begin:  # rows that see everything need no blocks
            end = min(rows, left + 1)
        tiles += _block_tiles(begin, end, columns, band, edges)
        begin = end
    return tuple(tiles)


def _triangle(begin: int, end: int, right: int, block: int) -> Iterator[BandTile]:
    """A lower triangle by halves: a square and two triangles, down to triangles of `block` rows.

    This makes squares as large as possible, for which kernels are fastest, and puts each row and
    column into few of them, so that there is little to merge. Cut into rows of blocks instead,
    causal attention of 4K tokens took up to a tenth longer on the CPU.
    """
    blocks = -(-(end - begin) // block)
    if blocks == 1:
        yield BandTile((begin, end), (begin + right, end + right), triangle=True)
        return
    middle = begin + block * ((blocks + 1) // 2)
    yield from _triangle(begin, middle, right, block)
    yield BandTile((middle, end), (begin + right, middle + right))
    yield from _triangle(middle, end, right, block)


def _block_tiles(
    begin: int, end: int, columns: int, band: Band, edges: dict[tuple, np.ndarray]
) -> Iterator[BandTile]:
    """The tiles of rows `begin` to `end` of a band; blocks of one shape share their `edges`."""
    left, right = band
    first, first_full = max(0, begin - left), max(0, end - 1 - left)
    stop_full, stop = min(columns, begin + right + 1), min(columns, end + right)
    triangle = stop_full < stop
    if triangle:
        stop_full -= 1  # the last column that all rows see is the first one of the triangle
    block = (begin, end)
    if first_full > stop_full:  # narrower than the block: both edges in one table
        shape = (end - begin, stop - first, begin - left - first, begin + right - first)
        yield BandTile(block, (first, stop), table=_edge(edges, *shape))
        return
    if first < first_full:
        shape = (end - begin, first_full - first, begin - left - first, columns)
        yield BandTile(block, (first, first_full), table=_edge(edges, *shape))
    if first_full < stop_full:
        yield BandTile(block, (first_full, stop_full))
    if triangle:
        yield BandTile(block, (stop_full, stop), triangle=True)


def _edge(edges: dict[tuple, np.ndarray], rows: int, columns: int, low: int, high: int):
    """bool [rows, columns]: column n of row m where m + low <= n <= m + high."""
    key = (rows, columns, low, high)
    if key not in edges:
        ahead = np.arange(columns)[None, :] - np.arange(rows)[:, None]
        edges[key] = (ahead >= low) & (ahead <= high)
    return edges[key]
