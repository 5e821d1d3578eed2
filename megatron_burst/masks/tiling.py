"""Cutting a pair of shards into rectangles that stock kernels know.

A tile is a rectangle of local rows and columns that is wholly visible, a lower triangle
(column <= row, square), a band, or given by a table. What is not visible is in no tile, or False
in a table. Decides how to cut, from what the mask says and from what the kernel can do (`Cutter`);
knows no devices and no torch, so that costs are counted on exactly what runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..layout import Span
from .band_tiling import Part, band_parts, left_edge
from .base import Band, Cover, Mask


class Tile(NamedTuple):
    """Local rows and columns (slices, possibly with a step), and what is visible of them."""

    rows: slice
    columns: slice
    triangle: bool = False
    table: np.ndarray | None = None  # bool [rows, columns]
    band: Band | None = None  # every row sees some column

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
        if self.band is not None:
            row = np.arange(rows)
            stops = np.minimum(columns, row + self.band.right + 1)
            return int((stops - np.maximum(0, row - self.band.left)).sum())
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

    band_rows: at most how many rows of a band to take at a time; smaller wastes less at the edges,
    None takes them all, for kernels that skip what a triangle hides.
    table_rows: a piece of at most so many rows and columns is given by a table where that is all
    that describes it, or is cheaper than the calls for its parts; None for kernels that take no
    table, which refuses masks that need one.
    windows: it takes a band whole; otherwise one with a left edge needs tables.
    call: what one more call costs beside its pairs, in pairs.
    """

    band_rows: int | None
    table_rows: int | None
    windows: bool = False
    # 500 to 5900 with torch's operator on a CPU, forward and backward: most with few narrow heads.
    call: int = 2048
    # The pairs of a ring have few different bands, and one table serves every block of a window.
    _bands: dict[tuple, tuple[Part, ...]] = field(default_factory=dict, repr=False, compare=False)

    def tiles(
        self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]
    ) -> tuple[Tile, ...]:
        """The tiles of a pair of shards; rectangles that touch are joined into larger ones."""
        return tuple(_joined(self._cut_all(mask, _pieces(q_spans), _pieces(k_spans))))

    def _cut_all(self, mask: Mask, q: list[_Piece], k: list[_Piece]) -> Iterator[Tile]:
        """The tiles of every pair of pieces that has any."""
        q_spans, k_spans = _arrays(q, (-1, 1)), _arrays(k, (1, -1))
        covers = mask.covers(q_spans, k_spans)
        left, right, known = mask.bands(q_spans, k_spans)
        for i, j in np.argwhere(covers != Cover.EMPTY).tolist():
            if covers[i, j] == Cover.FULL:
                yield Tile(q[i].rows(0, q[i].span.length), k[j].rows(0, k[j].span.length))
            elif known[i, j]:
                yield from self._cut_band(q[i], k[j], Band(int(left[i, j]), int(right[i, j])))
            else:
                yield from self._cut(mask, q[i], k[j])

    def _cut(self, mask: Mask, q: _Piece, k: _Piece) -> Iterator[Tile]:
        parts = _split(mask, q, k, self.table_rows)
        if parts is None:
            yield from self._table(mask, q, k)
            return
        found = _joined(self._cut_all(mask, *parts))
        if not _within(self.table_rows, q, k):
            yield from found
            return
        cheap = self._cheaper(found, q.span.length * k.span.length + self.call)
        yield from self._table(mask, q, k) if cheap is None else cheap

    def _cheaper(self, tiles: Iterable[Tile], limit: int) -> list[Tile] | None:
        """The tiles if they cost at most `limit`, in pairs computed; no more of them are made than
        it takes to see that they do not."""
        taken, cost = [], 0
        for tile in tiles:
            cost += tile.computed + self.call
            if cost > limit:
                return None
            taken.append(tile)
        return taken

    def _table(self, mask: Mask, q: _Piece, k: _Piece) -> Iterator[Tile]:
        if self.table_rows is None:
            raise ValueError(
                f"mask: {mask!r} is no band of rows and columns over {q.span} and {k.span}, and "
                "this kernel takes no table; use kernel='triton' on a GPU, or 'reference'"
            )
        table = np.array(mask.visible(q.span.positions()[:, None], k.span.positions()[None, :]))
        (rows,), (columns,) = np.nonzero(table.any(axis=1)), np.nonzero(table.any(axis=0))
        if len(rows):  # without what is hidden from all at the ends: padding is, and may hold NaN
            (top, bottom), (left, right) = ((int(x[0]), int(x[-1]) + 1) for x in (rows, columns))
            inner = np.ascontiguousarray(table[top:bottom, left:right])
            yield Tile(q.rows(top, bottom), k.rows(left, right), table=inner)

    def _cut_band(self, q: _Piece, k: _Piece, band: Band) -> Iterator[Tile]:
        if band.left + band.right < 0:  # the window lies between the positions of a strided pair
            return
        shape = (q.span.length, k.span.length, band, self.band_rows)
        if self.table_rows is None and left_edge(*shape[:3]):
            if not self.windows:
                raise ValueError(
                    f"mask: a window over {q.span} and {k.span} has a left edge, and this kernel "
                    "takes neither windows nor tables; use kernel='triton' on a GPU, or 'reference'"
                )
            yield _window(q, k, band)
            return
        if shape not in self._bands:
            self._bands[shape] = band_parts(*shape)
        for part in self._bands[shape]:
            rows, columns = q.rows(*part.rows), k.rows(*part.columns)
            yield Tile(rows, columns, part.triangle, part.table)


def _window(q: _Piece, k: _Piece, band: Band) -> Tile:
    """A band in one tile, without the rows and columns at its ends that see nothing."""
    begin, end = max(0, -band.right), min(q.span.length, k.span.length + band.left)
    first, stop = max(0, begin - band.left), min(k.span.length, end + band.right)
    shift = begin - first
    inner = Band(min(band.left - shift, q.span.length), min(band.right + shift, k.span.length))
    return Tile(q.rows(begin, end), k.rows(first, stop), band=inner)


def _arrays(pieces: list[_Piece], shape: tuple[int, int]) -> Span:
    """The spans of the pieces as one span of arrays."""
    fields = np.array([piece.span for piece in pieces], dtype=np.int64).T
    return Span(*(field.reshape(shape) for field in fields))


def _pieces(spans: Sequence[Span]) -> list[_Piece]:
    starts = np.cumsum([0, *(span.length for span in spans)]).tolist()
    return [_Piece(start, 1, span) for start, span in zip(starts, spans, strict=False)]


def _split(
    mask: Mask, q: _Piece, k: _Piece, smallest: int | None
) -> tuple[list[_Piece], list[_Piece]] | None:
    """The parts of both pieces to look at next; None where cutting further is no use."""
    q_cuts, k_cuts = (_coarse(mask.cuts(x.span), x, smallest) for x in (q, k))
    if len(q_cuts) or len(k_cuts):
        return _parts(q, q_cuts), _parts(k, k_cuts)
    if any(piece.span.stride % mask.modulus and piece.span.length > 1 for piece in (q, k)):
        return _residues(q, mask.modulus), _residues(k, mask.modulus)
    if smallest is None or _within(smallest, q, k):
        return None
    if q.span.length >= k.span.length:
        return _parts(q, np.array([q.span.length // 2])), [k]
    return [q], _parts(k, np.array([k.span.length // 2]))


def _coarse(cuts: np.ndarray, piece: _Piece, size: int | None) -> np.ndarray:
    """Of many cuts close together only some: a part that still has cuts inside is then shorter
    than `size`, where a table may be cheaper than what is between them."""
    if size is None or piece.span.length <= size:
        return cuts
    group = cuts // size
    first, last = np.diff(group, prepend=-1) > 0, np.diff(group, append=piece.span.length) > 0
    return cuts[first | last]


def _within(size: int | None, q: _Piece, k: _Piece) -> bool:
    """May a table describe these pieces?"""
    return size is not None and max(q.span.length, k.span.length) <= size


def _parts(piece: _Piece, cuts: np.ndarray) -> list[_Piece]:
    """The piece cut before each of `cuts`."""
    bounds = [0, *cuts.tolist(), piece.span.length]
    return [piece.part(a, b - a) for a, b in pairwise(bounds)]


def _residues(piece: _Piece, modulus: int) -> list[_Piece]:
    """The piece by residue classes, so that each part's stride is a multiple of `modulus`."""
    every = modulus // np.gcd(piece.span.stride, modulus).item()
    length = piece.span.length
    return [
        piece.part(first, -(-(length - first) // every), every)
        for first in range(min(every, length))
    ]


def _joined(tiles: Iterable[Tile]) -> Iterator[Tile]:
    """The tiles, of which neighbouring wholly visible ones that touch are one."""
    return _joined_along(_joined_along(tiles, "rows", "columns"), "columns", "rows")


def _joined_along(tiles: Iterable[Tile], same: str, along: str) -> Iterator[Tile]:
    """Join tiles over the `same` slice that touch `along` the other."""
    last: Tile | None = None
    for tile in tiles:
        if last and _touch(last, tile, same, along):
            a, b = getattr(last, along), getattr(tile, along)
            last = last._replace(**{along: slice(a.start, b.stop, a.step)})
            continue
        if last:
            yield last
        last = tile
    if last:
        yield last


def _touch(a: Tile, b: Tile, same: str, along: str) -> bool:
    if any(t.triangle or t.table is not None or t.band is not None for t in (a, b)):
        return False
    first, second = getattr(a, along), getattr(b, along)
    one_step = first.step == second.step == 1 and first.stop == second.start
    return getattr(a, same) == getattr(b, same) and one_step


def _length(part: slice) -> int:
    return len(range(part.start, part.stop, part.step or 1))
