# SPDX-License-Identifier: Apache-2.0
"""Cuts a pair of shards into tiles that stock kernels can compute.

A tile is a rectangle of local rows and columns that is wholly visible, a lower triangle
(column <= row, square), a band, or given by a table. What is not visible is in no tile, or False
in a table. This module decides how to cut, from what the mask says and from what the kernel can
do (`Cutter`), and where next to cut a pair of slices (regular rows of a shard that hold one span)
that is partly visible and of no known shape. It needs no torch, so that `cost` counts exactly the
tiles that run.

Each tile is one kernel call, so few and large ones are fast, but beside the slanted edge of a band
(a causal mask or a sliding window over local rows and columns) a kernel computes pairs that are
hidden:

    right edge only (causal)      both edges (window), row blocks
        T . . .                       T . . . .
        S T . .                       E T . . .
        S S T .                       . E T . .         T triangle, S square, E table of an edge
        S S S T                       . . E T .
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise, product
from typing import NamedTuple

import numpy as np

from ..layout import Span, Spans
from .base import PARTIAL, Band, Mask, SpanBands


class ShardSlice(NamedTuple):
    """Rows of a shard that hold one span: every `step`-th from local row `start` on."""

    start: int
    step: int
    span: Span

    def take(self, first: int, count: int, every: int = 1) -> ShardSlice:
        """`count` rows from the `first` one, taking every `every`-th."""
        start, stride, _ = self.span
        span = Span(start + first * stride, stride * every, count)
        return ShardSlice(self.start + first * self.step, self.step * every, span)

    def rows(self, first: int, stop: int) -> slice:
        """The local rows from index `first` to `stop` of this slice."""
        start = self.start + first * self.step
        end = self.start + (stop - 1) * self.step + 1
        return slice(start, end, self.step)


def arrays(parts: list[ShardSlice], shape: tuple[int, ...]) -> Spans:
    """The spans of many slices as arrays, as `Mask.covers` takes them."""
    # `np.array` would look at each span as at a list, which takes four times as long.
    numbers = chain.from_iterable(part.span for part in parts)
    fields = np.fromiter(numbers, np.int64, 3 * len(parts)).reshape(-1, 3).T
    return Spans(*(field.reshape(shape) for field in fields))


def two_by_two(pairs: list[tuple[ShardSlice, ShardSlice]]) -> tuple[Spans, Spans]:
    """The spans of pairs of slices as arrays."""
    q, k = zip(*pairs, strict=True)
    return arrays(list(q), (-1,)), arrays(list(k), (-1,))


def whole_spans(spans: Sequence[Span]) -> list[ShardSlice]:
    starts = np.cumsum([0, *(span.length for span in spans)]).tolist()
    return [ShardSlice(start, 1, span) for start, span in zip(starts, spans, strict=False)]


def split(
    mask: Mask, q: ShardSlice, k: ShardSlice, smallest: int | None
) -> tuple[list[ShardSlice], list[ShardSlice]] | None:
    """The smaller slices of both sides to look at next; None where only a table is left.

    In this order: where the mask's description changes, by residue classes, by halves.
    """
    # At breaks first, because between them a mask is mostly one band or nothing. Residues before
    # halves: halves keep their stride, so no number of them would tell the classes apart.
    q_cuts, k_cuts = (_coarse(mask.cuts(x.span), x, smallest) for x in (q, k))
    if len(q_cuts) or len(k_cuts):
        return _cut_before(q, q_cuts), _cut_before(k, k_cuts)
    if any(part.span.stride % mask.modulus and part.span.length > 1 for part in (q, k)):
        return _residues(q, mask.modulus), _residues(k, mask.modulus)
    if smallest is None or within(smallest, q, k):
        return None
    if q.span.length >= k.span.length:
        return _cut_before(q, np.array([q.span.length // 2])), [k]
    return [q], _cut_before(k, np.array([k.span.length // 2]))


def _coarse(cuts: np.ndarray, part: ShardSlice, size: int | None) -> np.ndarray:
    """The first and the last in every `size` rows, of many cuts close together.

    A slice that still has cuts inside is then shorter than `size`, so that a table may describe it
    where that is cheaper than a tile between every two cuts (documents of a few tokens, say).
    """
    if size is None or part.span.length <= size:
        return cuts
    group = cuts // size
    first, last = np.diff(group, prepend=-1) > 0, np.diff(group, append=part.span.length) > 0
    return cuts[first | last]


def within(size: int | None, q: ShardSlice, k: ShardSlice) -> bool:
    """May a table describe this pair of slices?"""
    return size is not None and max(q.span.length, k.span.length) <= size


def _cut_before(part: ShardSlice, cuts: np.ndarray) -> list[ShardSlice]:
    """The slice cut before each of `cuts`."""
    bounds = [0, *cuts.tolist(), part.span.length]
    return [part.take(a, b - a) for a, b in pairwise(bounds)]


def _residues(part: ShardSlice, modulus: int) -> list[ShardSlice]:
    """The slice by residue classes: the stride of each becomes a multiple of `modulus`, within
    which a dilated mask shows all or nothing.
    """
    every = modulus // np.gcd(part.span.stride, modulus).item()
    length = part.span.length
    return [
        part.take(first, -(-(length - first) // every), every)
        for first in range(min(every, length))
    ]


_FEW = 256  # pairs of slices that are listed one by one, at most


class Tile(NamedTuple):
    """Local rows and columns (slices, possibly with a step), and what is visible of them: all,
    or what `triangle`, `table` or `band` says.
    """

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
        tiles = _joined(self._cut_all(mask, whole_spans(q_spans), whole_spans(k_spans)))
        # A kernel that wants bands in blocks of rows got small triangles on purpose.
        return tuple(tiles if self.band_rows is not None else _joined_triangles(tiles))

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
        bands = mask.bands(*two_by_two(partly)) if partly else SpanBands(*np.empty((3, 0)))
        unknown = [
            pair for pair, known in zip(partly, bands.known.tolist(), strict=True) if not known
        ]
        bands_known = zip(*(column.tolist() for column in bands), strict=True)
        further = self._cut_many(mask, unknown)
        for (q, k), cover in zip(pairs, covers.tolist(), strict=True):
            if cover != PARTIAL:
                yield (Tile(q.rows(0, q.span.length), k.rows(0, k.span.length)),) if cover else ()
                continue
            left, right, known = next(bands_known)
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
        if not within(self.table_rows, q, k):  # too large for a table: there is nothing to compare
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
            yield from _window(q, k, band)
            return
        if shape not in self._bands:
            self._bands[shape] = band_tiles(*shape)
        for part in self._bands[shape]:
            rows, columns = q.rows(*part.rows), k.rows(*part.columns)
            yield Tile(rows, columns, part.triangle, part.table)


def _window(q: ShardSlice, k: ShardSlice, band: Band) -> Iterator[Tile]:
    """A band with a left edge, without the rows and columns at its ends that see nothing: a tile
    with no more rows than columns, and before it rows that the left edge does not reach.
    """
    # Only in tables does `AtenKernel` correct rows that see nothing, so a band must have none.
    begin, end = max(0, -band.right), min(q.span.length, k.span.length + band.left)
    first, stop = max(0, begin - band.left), min(k.span.length, end + band.right)
    shift = begin - first  # local rows and columns now count from other places
    left, right = min(band.left - shift, q.span.length), min(band.right + shift, k.span.length)
    # FlashAttention 2 takes a right edge from the number of columns on for that number, as counted
    # from the last row: with more rows than columns the first rows would lose some.
    over = max(0, end - begin - (stop - first))
    for part in band_tiles(over, stop - first, Band(over, right), None):
        rows, columns = (begin + x for x in part.rows), (first + x for x in part.columns)
        yield Tile(q.rows(*rows), k.rows(*columns), part.triangle, part.table)
    inner = Band(left - over, min(right + over, k.span.length))
    yield Tile(q.rows(begin + over, end), k.rows(first, stop), band=inner)


def _joined(tiles: Iterable[Tile]) -> Iterator[Tile]:
    """The tiles, of which wholly visible neighbours are joined: one large call is faster."""
    # Side by side first, as the tiles come row by row; then what has become equally wide.
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
    first, second = getattr(a, along), getattr(b, along)
    if first.stop != second.start or getattr(a, same) != getattr(b, same):  # most
        return False
    return first.step == second.step == 1 and _whole(a) and _whole(b)


def _whole(tile: Tile) -> bool:
    """Is all of the tile visible?"""
    return not tile.triangle and tile.table is None and tile.band is None


def _joined_triangles(tiles: Iterable[Tile]) -> list[Tile]:
    """The tiles, of which a triangle, what the next rows see of its columns and these rows' own
    triangle are one: pieces of one document that a rank holds, such as the halves of zigzag.
    """
    found: list[Tile] = []
    for tile in tiles:
        found.append(tile)
        if tile.triangle and len(found) >= 3 and _are_steps(*found[-3:]):
            first, _, last = found[-3:]
            rows = slice(first.rows.start, last.rows.stop, 1)
            columns = slice(first.columns.start, last.columns.stop, 1)
            found[-3:] = [Tile(rows, columns, triangle=True)]
    return found


def _are_steps(upper: Tile, square: Tile, lower: Tile) -> bool:
    """Are these a lower triangle, in this order: its top, its square and its bottom?"""
    if not (upper.triangle and _whole(square) and lower.triangle):
        return False
    steps = {part.step for tile in (upper, square, lower) for part in (tile.rows, tile.columns)}
    return (
        steps == {1} and square.rows == lower.rows and square.columns == upper.columns
        and upper.rows.stop == lower.rows.start and upper.columns.stop == lower.columns.start
    )  # fmt: skip


def _length(part: slice) -> int:
    return len(range(part.start, part.stop, part.step or 1))


_SMALLEST_BLOCK = 128  # a smaller call costs more than the pairs that it saves


class BandTile(NamedTuple):
    """One tile of a band: (first, stop) of rows and of columns within the band; `triangle` and
    `table` as in `tiling.Tile`.
    """

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
    """Bool [rows, columns]: column n of row m where m + low <= n <= m + high."""
    key = (rows, columns, low, high)
    if key not in edges:
        ahead = np.arange(columns)[None, :] - np.arange(rows)[:, None]
        edges[key] = (ahead >= low) & (ahead <= high)
    return edges[key]
