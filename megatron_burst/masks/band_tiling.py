"""What a band of rows and columns shows, part by part: rectangles, triangles and slanted edges.

Owns how many parts, and how large: kernels want few and large ones, and waste what they compute
beside an edge. Knows nothing of shards, steps or masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .base import Band

_SMALLEST_BLOCK = 128  # smaller calls cost more than the pairs they save


class Part(NamedTuple):
    """Part of a band: (first, stop) of its local rows and columns, as in `Tile` otherwise."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    triangle: bool = False
    table: np.ndarray | None = None


def left_edge(rows: int, columns: int, band: Band) -> bool:
    """Does a row that sees something not see the first column any more?"""
    return min(rows, columns + band.left) > max(0, -band.right, band.left + 1)


def band_parts(rows: int, columns: int, band: Band, block: int | None) -> tuple[Part, ...]:
    """What a band shows: while its left edge lies outside a staircase, then row by row of blocks,
    each what the whole block sees and the slanted edges beside it."""
    left, right = band
    if block is not None:  # an edge wastes half a block: keep that small beside what is visible
        block = min(block, max(_SMALLEST_BLOCK, min(rows, left + right + 1) // 8))
    parts: list[Part] = []
    edges: dict[tuple, np.ndarray] = {}
    begin = max(0, -right)  # rows before it see nothing
    stop = min(rows, left + 1, columns - right)
    if begin < stop:
        if begin + right > 0:
            parts.append(Part((begin, stop), (0, begin + right)))
        parts += _stairs(begin, stop, right, block or stop)
        begin = stop
    while begin < rows and begin - left < columns:
        end = rows if block is None else min(rows, begin + block)
        if begin + right < columns - 1:  # to the last row whose right edge lies inside, at most
            end = min(end, columns - right)
        elif left >= begin:  # rows that see everything need no blocks
            end = min(rows, left + 1)
        parts += _block_parts(begin, end, columns, band, edges)
        begin = end
    return tuple(parts)


def _stairs(begin: int, end: int, right: int, block: int) -> Iterator[Part]:
    """A lower triangle by halves: a square and two triangles, down to triangles of `block` rows.

    Squares are as large as they can be, for which kernels are fastest, and a row or a column lies
    in few of them, so that there is little to merge: row by row of blocks, causal attention of
    4K tokens took up to a tenth longer on the CPU.
    """
    blocks = -(-(end - begin) // block)
    if blocks == 1:
        yield Part((begin, end), (begin + right, end + right), triangle=True)
        return
    middle = begin + block * ((blocks + 1) // 2)
    yield from _stairs(begin, middle, right, block)
    yield Part((middle, end), (begin + right, middle + right))
    yield from _stairs(middle, end, right, block)


def _block_parts(
    begin: int, end: int, columns: int, band: Band, edges: dict[tuple, np.ndarray]
) -> Iterator[Part]:
    """The parts of rows `begin` to `end` of a band; blocks of one shape share their `edges`."""
    left, right = band
    first, first_full = max(0, begin - left), max(0, end - 1 - left)
    stop_full, stop = min(columns, begin + right + 1), min(columns, end + right)
    triangle = stop_full < stop
    if triangle:
        stop_full -= 1  # the column all rows see is the triangle's first
    block = (begin, end)
    if first_full > stop_full:
        shape = (end - begin, stop - first, begin - left - first, begin + right - first)
        yield Part(block, (first, stop), table=_edge(edges, *shape))
        return
    if first < first_full:
        shape = (end - begin, first_full - first, begin - left - first, columns)
        yield Part(block, (first, first_full), table=_edge(edges, *shape))
    if first_full < stop_full:
        yield Part(block, (first_full, stop_full))
    if triangle:
        yield Part(block, (stop_full, stop), triangle=True)


def _edge(edges: dict[tuple, np.ndarray], rows: int, columns: int, low: int, high: int):
    """bool [rows, columns]: column n of row m where m + low <= n <= m + high."""
    key = (rows, columns, low, high)
    if key not in edges:
        ahead = np.arange(columns)[None, :] - np.arange(rows)[:, None]
        edges[key] = (ahead >= low) & (ahead <= high)
    return edges[key]
