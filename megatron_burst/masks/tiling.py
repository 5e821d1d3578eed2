"""Cuts a pair of shards into tiles that stock kernels can compute.

A tile is a rectangle of local rows and columns that is wholly visible, a lower triangle
(column <= row, square), a band, or given by a table. What is not visible is in no tile, or False
in a table. This module decides how to cut, from what the mask says and from what the kernel can
do (`Cutter`). It needs no torch, so that `cost` counts exactly the tiles that run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, product
from typing import NamedTuple

import numpy as np

from ..layout import Span
from .band_tiling import BandTile, band_tiles, left_edge
from .base import PARTIAL, Band, Bands, Mask
from .slices import ShardSlice, arrays, split, two_by_two, whole_spans, within

_FEW = 256  # pairs of slices that are listed one by one, at most


class Tile(NamedTuple):
    """Local rows and columns (slices, possibly with a step), and what is visible of them: all,
    or what `triangle`, `table` or `band` says."""

    rows: slice
    columns: slice
    triangle: bool = False
    table: np.ndarray | None = None  # bool [rows, columns]
    band: Band | None = None  # every row sees some column

    @property
    def shape(self) -> tuple[int, int]:
        """How many rows and columns the tile has."""
        return _length(self.rows), _length(self.columns)

    @property
    def computed(self) -> int:
        """How many pairs a kernel computes that skips nothing within a tile."""
        return self.shape[0] * self.shape[1]

    @property
    def visible(self) -> int:
        """How many pairs of the tile attend."""
        rows, columns = self.shape
        if self.table is not None:
            return int(self.table.sum())
        if self.band is not None:
            row = np.arange(rows)
            stops = np.minimum(columns, row + self.band.right + 1)
            return int((stops - np.maximum(0, row - self.band.left)).sum())
        return rows * (rows + 1) // 2 if self.triangle else rows * columns


@dataclass(frozen=True)
class Cutter:
    """Cuts for one kind of kernel; its fields say what that kernel can do with a tile.

    band_rows: rows of a band per tile, at most. Fewer rows waste less at the slanted edges; None
        takes all at once, for kernels that skip what a triangle hides.
    table_rows: a rectangle of at most so many rows and columns becomes a table, where only a table
        describes it or where a table is cheaper than its tiles. None: the kernel takes no tables,
        and a mask that needs one raises ValueError.
    windows: does the kernel take a band with a left edge whole? Otherwise such bands need tables.
    tile_cost: what one more tile costs besides its pairs, in pairs.
    """

    band_rows: int | None
    table_rows: int | None
    windows: bool = False
    # 500 to 5900 with torch's operator on a CPU, forward and backward: most with few narrow heads.
    tile_cost: int = 2048
    # The pairs of a ring have few different bands, and one table serves every block of a window.
    _bands: dict[tuple, tuple[BandTile, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def tiles(
        self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]
    ) -> tuple[Tile, ...]:
        """The tiles of a pair of shards, given by their spans in shard order.

        Raises ValueError for a mask that needs tables or windows which the kernel does not take.
        """
        return tuple(_joined(self._cut_all(mask, whole_spans(q_spans), whole_spans(k_spans))))

    def _cut_all(self, mask: Mask, q: list[ShardSlice], k: list[ShardSlice]) -> Iterator[Tile]:
        """The tiles of every pair of slices that sees something."""
        q_spans, k_spans = arrays(q, (-1, 1)), arrays(k, (1, -1))
        # The mask is asked about all pairs in one call: a shard of packed documents has hundreds.
        covers = mask.covers(q_spans, k_spans)
        i, j = np.nonzero(covers)  # not EMPTY
        pairs = [(q[m], k[n]) for m, n in zip(i.tolist(), j.tolist(), strict=True)]
        return chain.from_iterable(self._each(mask, pairs, covers[i, j]))

    def _each(
        self, mask: Mask, pairs: list[tuple[ShardSlice, ShardSlice]], covers: np.ndarray
    ) -> Iterator[Iterable[Tile]]:
        """The tiles of each pair of slices, whose covers are known."""
        partly = [pairs[n] for n in np.flatnonzero(covers == PARTIAL)]
        bands = mask.bands(*two_by_two(partly)) if partly else Bands(*np.empty((3, 0)))
        unknown = [
            pair for pair, known in zip(partly, bands.known.tolist(), strict=True) if not known
        ]
        told = zip(*(column.tolist() for column in bands), strict=True)
        further = self._cut_many(mask, unknown)
        for (q, k), cover in zip(pairs, covers.tolist(), strict=True):
            if cover != PARTIAL:
                yield (Tile(q.rows(0, q.span.length), k.rows(0, k.span.length)),) if cover else ()
                continue
            left, right, known = next(told)
            yield self._cut_band(q, k, Band(left, right)) if known else next(further)

    def _cut_many(
        self, mask: Mask, pairs: list[tuple[ShardSlice, ShardSlice]]
    ) -> Iterator[Iterable[Tile]]:
        """The tiles of pairs that are partly visible and no bands."""
        if self.table_rows is not None or not pairs:
            yield from (self._cut(mask, q, k) for q, k in pairs)
            return
        parts = [split(mask, q, k, None) for q, k in pairs]
        if None in parts:  # and none can become a table
            self._no_table(mask, *pairs[parts.index(None)])
        # The parts of all that have few are asked about in one call, too.
        few = [part for part in parts if part and len(part[0]) * len(part[1]) <= _FEW]
        cells = list(chain.from_iterable(product(*part) for part in few))
        tiles = self._each(mask, cells, mask.covers(*two_by_two(cells))) if cells else iter(())
        for part in parts:
            if part and len(part[0]) * len(part[1]) > _FEW:
                yield _joined(self._cut_all(mask, *part))
            elif part:
                some = islice(tiles, len(part[0]) * len(part[1]))
                yield list(_joined(chain.from_iterable(some)))

    def _cut(self, mask: Mask, q: ShardSlice, k: ShardSlice) -> Iterator[Tile]:
        """A pair that is partly visible and no band: cut further, or described by a table."""
        parts = split(mask, q, k, self.table_rows)
        if parts is None:
            yield from self._table(mask, q, k)
            return
        found = _joined(self._cut_all(mask, *parts))
        if not within(self.table_rows, q, k):
            yield from found
            return
        # Where both are possible, the one with fewer pairs computed, tile_cost included.
        cheap = self._cheaper(found, q.span.length * k.span.length + self.tile_cost)
        yield from self._table(mask, q, k) if cheap is None else cheap

    def _cheaper(self, tiles: Iterable[Tile], limit: int) -> list[Tile] | None:
        """The tiles if they cost at most `limit` pairs, else None.

        Stops at the first tile too many, because a fine mask would have very many of them.
        """
        taken, cost = [], 0
        for tile in tiles:
            cost += tile.computed + self.tile_cost
            if cost > limit:
                return None
            taken.append(tile)
        return taken

    def _no_table(self, mask: Mask, q: ShardSlice, k: ShardSlice) -> None:
        raise ValueError(
            f"mask: {mask!r} is no band of rows and columns over {q.span} and {k.span}, and "
            "this kernel takes no table; use kernel='triton' on a GPU, or 'reference'"
        )

    def _table(self, mask: Mask, q: ShardSlice, k: ShardSlice) -> Iterator[Tile]:
        table = np.array(mask.visible(q.span.positions()[:, None], k.span.positions()[None, :]))
        (rows,), (columns,) = np.nonzero(table.any(axis=1)), np.nonzero(table.any(axis=0))
        # Without hidden rows and columns at the ends: padding lies there and may hold NaN, and a
        # probability of 0 times NaN is NaN.
        if len(rows):
            (top, bottom), (left, right) = ((int(x[0]), int(x[-1]) + 1) for x in (rows, columns))
            inner = np.ascontiguousarray(table[top:bottom, left:right])
            yield Tile(q.rows(top, bottom), k.rows(left, right), table=inner)

    def _cut_band(self, q: ShardSlice, k: ShardSlice, band: Band) -> Iterator[Tile]:
        if band.left + band.right < 0:  # the window lies between the positions of a strided pair
            return
        # The same shape of band comes again for most pairs of a ring, so its tiles are kept.
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
            self._bands[shape] = band_tiles(*shape)
        for part in self._bands[shape]:
            rows, columns = q.rows(*part.rows), k.rows(*part.columns)
            yield Tile(rows, columns, part.triangle, part.table)


def _window(q: ShardSlice, k: ShardSlice, band: Band) -> Tile:
    """A band in one tile, without the rows and columns at its ends that see nothing."""
    # Only in tables does `AtenKernel` correct rows that see nothing, so a band must have none.
    begin, end = max(0, -band.right), min(q.span.length, k.span.length + band.left)
    first, stop = max(0, begin - band.left), min(k.span.length, end + band.right)
    shift = begin - first
    inner = Band(min(band.left - shift, q.span.length), min(band.right + shift, k.span.length))
    return Tile(q.rows(begin, end), k.rows(first, stop), band=inner)


def _joined(tiles: Iterable[Tile]) -> Iterator[Tile]:
    """The tiles, of which wholly visible neighbours are joined: one large call is faster."""
    return _joined_along(_joined_along(tiles, "rows", "columns"), "columns", "rows")


def _joined_along(tiles: Iterable[Tile], same: str, along: str) -> Iterator[Tile]:
    """Join consecutive tiles with equal slices `same` that touch `along` the other dimension."""
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
