"""Cutting a pair of shards into rectangles that stock kernels know.

A tile is a rectangle of local rows and columns that is wholly visible, a lower triangle
(column <= row, square), or given by a table. What is not visible is in no tile, or False in a
table. Decides how to cut, from what the mask says and from what the kernel can do (`Cutter`);
knows no devices and no torch, so that costs are counted on exactly what runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .layout import Span
from .masks import Band, Cover, Mask


class Tile(NamedTuple):
    """Local rows and columns (slices, possibly with a step), and what is visible of them."""

    rows: slice
    columns: slice
    triangle: bool = False
    table: np.ndarray | None = None  # bool [rows, columns]

    @property
    def shape(self) -> tuple[int, int]:
        return _length(self.rows), _length(self.columns)

    @property
    def computed(self) -> int:
        """Pairs a kernel computes that does not look inside the tile."""
        return self.shape[0] * self.shape[1]

    @property
    def visible(self) -> int:
        rows, columns = self.shape
        if self.table is not None:
            return int(self.table.sum())
        return rows * (rows + 1) // 2 if self.triangle else rows * columns


class _Piece(NamedTuple):
    """Part of a shard: local row `start`, every `step`-th row, and the positions they hold."""

    start: int
    step: int
    span: Span

    def part(self, first: int, count: int, every: int = 1) -> _Piece:
        """`count` rows from the `first` one, taking every `every`-th."""
        start, stride, _ = self.span
        span = Span(start + first * stride, stride * every, count)
        return _Piece(self.start + first * self.step, self.step * every, span)

    def rows(self, first: int, stop: int) -> slice:
        """The local rows from index `first` to `stop` of this piece."""
        start = self.start + first * self.step
        end = self.start + (stop - 1) * self.step + 1
        return slice(start, end, self.step)


@dataclass(frozen=True)
class Cutter:
    """What a kernel can do with a tile.

    band_rows: how many rows of a band to take at a time; smaller wastes less at the edges,
    None takes them all, for kernels that skip what a triangle hides.
    table_rows: cut no finer than this where only a table describes what is visible; None for
    kernels that take no table, which refuses such masks.
    """

    band_rows: int | None
    table_rows: int | None

    def tiles(
        self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]
    ) -> tuple[Tile, ...]:
        """The tiles of a pair of shards; rectangles that touch are joined into larger ones."""
        found = [
            tile
            for q in _pieces(q_spans)
            for k in _pieces(k_spans)
            for tile in self._cut(mask, q, k)
        ]
        return tuple(_joined(_joined(found, "rows", "columns"), "columns", "rows"))

    def _cut(self, mask: Mask, q: _Piece, k: _Piece) -> Iterator[Tile]:
        cover = mask.cover(q.span, k.span)
        if cover == Cover.EMPTY:
            return
        if cover == Cover.FULL:
            yield Tile(q.rows(0, q.span.length), k.rows(0, k.span.length))
            return
        band = mask.band(q.span, k.span)
        if band is not None:
            yield from self._cut_band(q, k, band)
            return
        parts = _split(mask, q, k, self.table_rows)
        if parts is None:
            yield from self._table(mask, q, k)
        else:
            for q_part in parts[0]:
                for k_part in parts[1]:
                    yield from self._cut(mask, q_part, k_part)

    def _table(self, mask: Mask, q: _Piece, k: _Piece) -> Iterator[Tile]:
        if self.table_rows is None:
            raise ValueError(
                f"mask: {mask!r} is no band of rows and columns over {q.span} and {k.span}, and "
                "this kernel takes no table; use kernel='reference'"
            )
        table = mask.visible(q.span.positions()[:, None], k.span.positions()[None, :])
        if table.any():
            rows, columns = q.rows(0, q.span.length), k.rows(0, k.span.length)
            yield Tile(rows, columns, table=np.array(table))

    def _cut_band(self, q: _Piece, k: _Piece, band: Band) -> Iterator[Tile]:
        """Row by row of blocks: what the whole block sees, and the slanted edges beside it."""
        rows, columns = q.span.length, k.span.length
        left, right = band
        begin = max(0, -right)  # rows before it see nothing
        while begin < rows and begin - left < columns:
            end = rows if self.band_rows is None else min(rows, begin + self.band_rows)
            slanted = begin + right < columns - 1
            if slanted:  # no further than the last row whose right edge lies inside
                end = min(end, columns - right)
            elif left >= begin:  # rows that see everything need no blocks
                end = min(rows, left + 1)
            yield from self._cut_block(q, k, band, begin, end)
            begin = end

    def _cut_block(self, q: _Piece, k: _Piece, band: Band, begin: int, end: int) -> Iterator[Tile]:
        columns, (left, right) = k.span.length, band
        first, first_full = max(0, begin - left), max(0, end - 1 - left)
        stop_full, stop = min(columns, begin + right + 1), min(columns, end + right)
        triangle = stop_full < stop
        if triangle:
            stop_full -= 1  # the column all rows see is the triangle's first
        if first_full > stop_full:
            yield self._band_table(q, k, band, (begin, end), (first, stop))
            return
        if first < first_full:
            yield self._band_table(q, k, band, (begin, end), (first, first_full))
        if first_full < stop_full:
            yield Tile(q.rows(begin, end), k.rows(first_full, stop_full))
        if triangle:
            yield Tile(q.rows(begin, end), k.rows(stop_full, stop), triangle=True)

    def _band_table(self, q: _Piece, k: _Piece, band: Band, rows, columns) -> Tile:
        if self.table_rows is None:
            raise ValueError(
                f"mask: a window over {q.span} and {k.span} has a left edge, and this kernel "
                "takes no table; use kernel='reference'"
            )
        m, n = np.arange(*rows)[:, None], np.arange(*columns)[None, :]
        table = (n >= m - band.left) & (n <= m + band.right)
        return Tile(q.rows(*rows), k.rows(*columns), table=table)


def _pieces(spans: Sequence[Span]) -> list[_Piece]:
    starts = np.cumsum([0, *(span.length for span in spans)]).tolist()
    return [_Piece(start, 1, span) for start, span in zip(starts, spans, strict=False)]


def _split(
    mask: Mask, q: _Piece, k: _Piece, smallest: int | None
) -> tuple[list[_Piece], list[_Piece]] | None:
    """The parts of both pieces to look at next; None where cutting further is no use."""
    q_cuts, k_cuts = mask.cuts(q.span), mask.cuts(k.span)
    if len(q_cuts) or len(k_cuts):
        return _halved(q, q_cuts), _halved(k, k_cuts)
    if any(piece.span.stride % mask.modulus and piece.span.length > 1 for piece in (q, k)):
        return _residues(q, mask.modulus), _residues(k, mask.modulus)
    middle_q, middle_k = (np.array([piece.span.length // 2]) for piece in (q, k))
    none = np.empty(0, dtype=np.int64)
    if smallest is None or max(q.span.length, k.span.length) <= smallest:
        return None
    if q.span.length >= k.span.length:
        return _halved(q, middle_q), _halved(k, none)
    return _halved(q, none), _halved(k, middle_k)


def _halved(piece: _Piece, cuts: np.ndarray) -> list[_Piece]:
    """The piece cut in two at the cut nearest its middle, or whole where there is none."""
    if not len(cuts):
        return [piece]
    length = piece.span.length
    cut = int(cuts[np.abs(cuts - length // 2).argmin()])
    return [piece.part(0, cut), piece.part(cut, length - cut)]


def _residues(piece: _Piece, modulus: int) -> list[_Piece]:
    """The piece by residue classes, so that each part's stride is a multiple of `modulus`."""
    every = modulus // np.gcd(piece.span.stride, modulus).item()
    length = piece.span.length
    return [
        piece.part(first, -(-(length - first) // every), every)
        for first in range(min(every, length))
    ]


def _joined(tiles: Sequence[Tile], same: str, along: str) -> list[Tile]:
    """Join neighbouring wholly visible tiles over the `same` slice that touch `along` the other."""
    joined: list[Tile] = []
    for tile in tiles:
        last = joined[-1] if joined else None
        if last and _touch(last, tile, same, along):
            a, b = getattr(last, along), getattr(tile, along)
            joined[-1] = last._replace(**{along: slice(a.start, b.stop, a.step)})
        else:
            joined.append(tile)
    return joined


def _touch(a: Tile, b: Tile, same: str, along: str) -> bool:
    if a.triangle or b.triangle or a.table is not None or b.table is not None:
        return False
    first, second = getattr(a, along), getattr(b, along)
    one_step = first.step == second.step == 1 and first.stop == second.start
    return getattr(a, same) == getattr(b, same) and one_step


def _length(part: slice) -> int:
    return len(range(part.start, part.stop, part.step or 1))
