"""Cutting a pair of shards into the only two shapes stock kernels know.

A tile is a rectangle of local rows and columns, either wholly visible or a lower triangle
(column <= row, square). What is not visible is in no tile. Decides nothing about devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..layout import Span
from ..masks import Cover, Mask


class Tile(NamedTuple):
    rows: slice
    columns: slice
    triangle: bool


def tiles(mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> tuple[Tile, ...]:
    """The tiles of a pair of shards; rectangles that touch are joined into larger ones."""
    return tuple(_join_rows(_join_columns(_cut(mask, q_spans, k_spans))))


def _cut(mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> Iterator[Tile]:
    q_starts = accumulate((s.length for s in q_spans), initial=0)
    for q_start, q_span in zip(q_starts, q_spans, strict=False):
        k_starts = accumulate((s.length for s in k_spans), initial=0)
        for k_start, k_span in zip(k_starts, k_spans, strict=False):
            cover = mask.cover(q_span, k_span)
            if cover == Cover.EMPTY:
                continue
            offset = k_span.length
            if cover == Cover.PARTIAL:
                diagonal = mask.diagonal(q_span, k_span)
                if diagonal is None:
                    raise ValueError(
                        f"mask: {mask!r} over spans {q_span} and {k_span} is no triangle; "
                        "use kernel='reference'"
                    )
                offset = diagonal
            yield from _band(q_start, q_span.length, k_start, k_span.length, offset)


def _band(row: int, rows: int, column: int, columns: int, offset: int) -> Iterator[Tile]:
    """The tiles of {(m, n): n <= m + offset} in a rows x columns rectangle at (row, column)."""
    blind = max(0, -offset)  # leading rows that see nothing
    row, rows, offset = row + blind, rows - blind, offset + blind
    full = min(offset, columns)  # leading columns that every remaining row sees
    slanted = max(0, min(rows, columns - full))
    if slanted > 0 and full > 0:
        yield Tile(slice(row, row + slanted), slice(column, column + full), False)
    if slanted > 0:
        start = column + full
        yield Tile(slice(row, row + slanted), slice(start, start + slanted), True)
    if rows > slanted:
        yield Tile(slice(row + slanted, row + rows), slice(column, column + columns), False)


def _join_columns(tiles: Iterator[Tile]) -> Iterator[Tile]:
    """Join rectangles over the same rows whose columns touch."""
    yield from _join(tiles, lambda a, b: a.rows == b.rows and a.columns.stop == b.columns.start)


def _join_rows(tiles: Iterator[Tile]) -> Iterator[Tile]:
    """Join rectangles over the same columns whose rows touch."""
    yield from _join(tiles, lambda a, b: a.columns == b.columns and a.rows.stop == b.rows.start)


def _join(tiles: Iterator[Tile], touch) -> Iterator[Tile]:
    last: Tile | None = None
    for tile in tiles:
        if last and not last.triangle and not tile.triangle and touch(last, tile):
            tile = Tile(
                slice(last.rows.start, tile.rows.stop),
                slice(last.columns.start, tile.columns.stop),
                False,
            )
        elif last:
            yield last
        last = tile
    if last:
        yield last
