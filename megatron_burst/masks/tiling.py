# SPDX-License-Identifier: Apache-2.0
"""Tiling: cuts a pair of shards into tiles that flash attention operators can compute.

A tile is a rectangle of local rows and columns. Its visible part is everything, a square's lower
triangle (column <= row), a band, or a table. Hidden pairs are in no tile, or False in a table. The
cuts depend on the mask and on the abilities of the kernel (`Cutter`). A slice is a regular run of
rows of a shard that holds one span. If a pair of slices is partly visible but not a band, it is cut
further. This module does not import torch, so `schedule.cost` uses it to count exactly the tiles
that run.

Each tile is one kernel call, so few and large tiles are fast. But at the slanted edge of a band (a
causal mask or a sliding window over local rows and columns) a kernel also computes hidden pairs:

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
from ..layout.layouts import counted
from .base import EMPTY, PARTIAL, Band, Mask, SpanBands
from .tiles import ALL_VISIBLE, Pattern, Tile, Tiles


class ShardSlice(NamedTuple):
    """Rows of a shard that hold the positions `span`.

    They are every `step`-th row from row `start` on.
    """

    start: int
    step: int
    span: Span

    def take(self, first: int, count: int, every: int = 1) -> ShardSlice:
        """Return `count` rows of this slice: every `every`-th one from index `first` on."""
        start, stride, _ = self.span
        span = Span(start + first * stride, stride * every, count)
        return ShardSlice(self.start + first * self.step, self.step * every, span)

    def rows(self, first: int, stop: int) -> slice:
        """Return the rows of the shard at indices `first` to `stop` (exclusive) of this slice."""
        start = self.start + first * self.step
        end = self.start + (stop - 1) * self.step + 1
        return slice(start, end, self.step)


class SeenPairs(NamedTuple):
    """Pairs of spans with visible pairs, as arrays sorted by query span, then by key span.

    Attributes:
        query: Index of the query span.
        key: Index of the key span.
        cover: Cover of the two spans, `FULL` or `PARTIAL`.
    """

    query: np.ndarray
    key: np.ndarray
    cover: np.ndarray


_FEW_PAIRS = 64  # with at most so many pairs, array operations do not pay off


def seen_pairs(mask: Mask, q: Spans, k: Spans) -> SeenPairs:
    """Return the pairs (query span, key span) whose cover is not EMPTY.

    A shard of packed documents has hundreds of spans, and each sees only spans of its document. If
    the query spans are sorted, pairs that `Mask.viewers` excludes are not compared.

    Args:
        mask: The mask.
        q: Query spans, arrays [n].
        k: Key spans, arrays [m].
    """
    few = len(q.start) * len(k.start) <= _FEW_PAIRS
    if few or not (mask.has_viewers and _ascending(q.start) and _ascending(q.last)):
        covers = mask.covers(q.at(np.s_[:, None]), k.at(np.s_[None, :]))
        i, j = np.nonzero(covers)  # not EMPTY
        return SeenPairs(i, j, covers[i, j])
    viewers = mask.viewers(k)
    begin = np.searchsorted(q.last, viewers.first)
    number = np.maximum(np.searchsorted(q.start, viewers.last, side="right") - begin, 0)
    j = np.repeat(np.arange(len(number)), number)
    i = counted(begin, number)
    order = np.lexsort((j, i))
    i, j = i[order], j[order]
    covers = mask.covers(q.at(i), k.at(j))
    seen = covers != EMPTY
    return SeenPairs(i[seen], j[seen], covers[seen])


def _ascending(values: np.ndarray) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def whole_spans(spans: Sequence[Span]) -> list[ShardSlice]:
    """Return each span of a shard as one slice."""
    starts = np.cumsum([0, *(span.length for span in spans)]).tolist()
    return [ShardSlice(start, 1, span) for start, span in zip(starts, spans, strict=False)]


def split(
    mask: Mask, q: ShardSlice, k: ShardSlice, smallest: int | None
) -> tuple[list[ShardSlice], list[ShardSlice]] | None:
    """Cut the rectangle of two slices into smaller slices.

    Slices are cut at the breaks of the mask, else by residue classes, else in halves. `smallest` is
    the limit of `within`. The result is the query slices and the key slices; None if only a table
    of visible pairs can describe the rectangle.
    """
    # Breaks are first, because between them a mask is mostly one band or nothing. Residues are
    # before halves: halves keep their stride, so they never separate the classes.
    q_cuts, k_cuts = (
        _coarse(cuts(breaks, x.span), x, smallest)
        for breaks, x in ((mask.breaks, q), (mask.key_breaks, k))
    )
    if len(q_cuts) or len(k_cuts):
        return _cut_before(q, q_cuts), _cut_before(k, k_cuts)
    if any(part.span.stride % mask.modulus and part.span.length > 1 for part in (q, k)):
        return _residues(q, mask.modulus), _residues(k, mask.modulus)
    if smallest is None or within(smallest, q, k):
        return None
    if q.span.length >= k.span.length:
        return _cut_before(q, np.array([q.span.length // 2])), [k]
    return [q], _cut_before(k, np.array([k.span.length // 2]))


def cuts(breaks: np.ndarray, span: Span) -> np.ndarray:
    """Return sorted indices i, 0 < i < span.length, at which to cut `span`: one per break.

    Index i is the first index in the span whose position is at or after the break.
    """
    low, high = np.searchsorted(breaks, (span.start + 1, span.last + 1))
    return np.unique(-((span.start - breaks[low:high]) // span.stride))  # rounded up


def _coarse(cuts: np.ndarray, part: ShardSlice, size: int | None) -> np.ndarray:
    """Return only the first and last cut in each group of `size` rows, if the slice is longer.

    Slices that still contain cuts then have fewer than `size` rows, so a table can describe them.
    For documents of a few tokens, a table is cheaper than one tile per document.
    """
    if size is None or part.span.length <= size:
        return cuts
    group = cuts // size
    first, last = np.diff(group, prepend=-1) > 0, np.diff(group, append=part.span.length) > 0
    return cuts[first | last]


def within(size: int | None, q: ShardSlice, k: ShardSlice) -> bool:
    """Return True if a table of visible pairs may describe the rectangle of two slices.

    That is so if both slices have at most `size` rows.
    """
    return size is not None and max(q.span.length, k.span.length) <= size


def _cut_before(part: ShardSlice, cuts: np.ndarray) -> list[ShardSlice]:
    """Cut a slice before each of the indices `cuts`."""
    bounds = [0, *cuts.tolist(), part.span.length]
    return [part.take(a, b - a) for a, b in pairwise(bounds)]


def _residues(part: ShardSlice, modulus: int) -> list[ShardSlice]:
    """Split a slice into residue classes.

    The stride of each class is a multiple of `modulus`. So in a dilated mask, all pairs of a query
    class and a key class are visible, or none.
    """
    every = modulus // np.gcd(part.span.stride, modulus).item()
    length = part.span.length
    return [
        part.take(first, -(-(length - first) // every), every)
        for first in range(min(every, length))
    ]


_LISTED_PAIRS = 256  # largest number of pairs of slices that are listed one by one


@dataclass(frozen=True)
class Cutter:
    """Cuts pairs of shards into tiles for a kernel with these limits.

    Attributes:
        band_rows: Largest number of rows of a band per tile. Fewer rows waste less at the slanted
            edges. None puts all rows into one tile, for kernels that skip hidden pairs of a
            triangle.
        table_rows: Largest number of rows and columns of a rectangle that becomes a table. A
            rectangle becomes a table if only a table describes it, or if a table is cheaper than
            its tiles. None if the kernel supports no tables; a mask that needs a table then raises
            ValueError.
        windows: Whether the kernel supports a whole band with a left edge. Otherwise such bands
            need tables.
        tile_cost: Fixed cost of a tile: the number of pairs whose computation takes as long as one
            more call.
    """

    band_rows: int | None
    table_rows: int | None
    windows: bool = False
    # Measured with torch's operator on a CPU, forward and backward: 500 to 5900 pairs; the most
    # pairs with few narrow heads.
    tile_cost: int = 2048
    # The pairs of a ring have few different bands, and all blocks of a window share one table.
    _bands: dict[tuple, tuple[BandTile, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def tiles(self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> Tiles:
        """Return the tiles of a pair of shards.

        Args:
            mask: The mask.
            q_spans: Query spans in shard order.
            k_spans: Key spans in shard order.

        Raises:
            ValueError: The mask needs tables or windows that the kernel does not support.
        """
        q, k = Spans.of(q_spans), Spans.of(k_spans)
        pairs = seen_pairs(mask, q, k)
        if len(pairs.query) > _FEW_PAIRS and not (pairs.cover == PARTIAL).any():
            return _full_tiles(q.length, k.length, pairs)
        tiles = _joined(self._cut_all(mask, whole_spans(q_spans), whole_spans(k_spans), pairs))
        # A kernel that takes bands in blocks of rows needs the small triangles.
        return Tiles.of(tiles if self.band_rows is not None else _joined_triangles(tiles))

    def _cut_all(
        self,
        mask: Mask,
        q: list[ShardSlice],
        k: list[ShardSlice],
        seen: SeenPairs | None = None,
    ) -> Iterator[Tile]:
        """Yield the tiles of every visible combination of a query slice and a key slice.

        `seen` are the visible pairs if they are known already.
        """
        if seen is None:
            q_spans, k_spans = (Spans.of(part.span for part in parts) for parts in (q, k))
            seen = seen_pairs(mask, q_spans, k_spans)
        indices = zip(seen.query.tolist(), seen.key.tolist(), strict=True)
        pairs = [(q[i], k[j]) for i, j in indices]
        return chain.from_iterable(self._tiles_of_pairs(mask, pairs, seen.cover))

    def _tiles_of_pairs(
        self, mask: Mask, pairs: list[tuple[ShardSlice, ShardSlice]], covers: np.ndarray
    ) -> Iterator[Iterable[Tile]]:
        """Yield the tiles of each pair of slices, given the `Cover` of each pair."""
        partly = [pairs[n] for n in np.flatnonzero(covers == PARTIAL)]
        bands = SpanBands(*np.empty((3, 0)))
        if partly:
            q_spans, k_spans = (
                Spans.of(part.span for part in parts) for parts in zip(*partly, strict=True)
            )
            bands = mask.bands(q_spans, k_spans)
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
        """Yield the tiles of each pair of slices; all pairs are partly visible and not bands."""
        if self.table_rows is not None or not pairs:
            yield from (self._cut(mask, q, k) for q, k in pairs)
            return
        parts = [split(mask, q, k, None) for q, k in pairs]
        if None in parts:  # and no pair can become a table
            self._no_table(mask, *pairs[parts.index(None)])
        # One call also for all pairs with few parts.
        listed = [part for part in parts if part and len(part[0]) * len(part[1]) <= _LISTED_PAIRS]
        cells = list(chain.from_iterable(product(*part) for part in listed))
        covers = None
        if cells:
            q_spans, k_spans = (
                Spans.of(part.span for part in parts) for parts in zip(*cells, strict=True)
            )
            covers = mask.covers(q_spans, k_spans)
        tiles = iter(()) if covers is None else self._tiles_of_pairs(mask, cells, covers)
        for part in parts:
            if part and len(part[0]) * len(part[1]) > _LISTED_PAIRS:
                yield _joined(self._cut_all(mask, *part))
            elif part:
                own_tiles = islice(tiles, len(part[0]) * len(part[1]))
                yield list(_joined(chain.from_iterable(own_tiles)))

    def _cut(self, mask: Mask, q: ShardSlice, k: ShardSlice) -> Iterator[Tile]:
        """Yield the tiles of a query slice and a key slice whose visible pairs are not a band.

        The rectangle is cut further, or becomes one tile with a table of visible pairs.
        """
        parts = split(mask, q, k, self.table_rows)
        if parts is None:
            yield from self._table(mask, q, k)
            return
        tiles = _joined(self._cut_all(mask, *parts))
        if not within(self.table_rows, q, k):  # the pair is too large for a table
            yield from tiles
            return
        # If both a table and tiles are possible, use whichever computes fewer pairs, including
        # tile_cost.
        cheap = self._cheaper(tiles, q.span.length * k.span.length + self.tile_cost)
        yield from self._table(mask, q, k) if cheap is None else cheap

    def _cheaper(self, tiles: Iterable[Tile], limit: int) -> list[Tile] | None:
        """Return the tiles if their cost is at most `limit` pairs, else None.

        The iteration stops when the limit is exceeded, because a fine mask can have very many
        tiles.
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
            f"mask: {mask!r} is not a band over queries {q.span} and keys {k.span}, and this "
            "kernel supports only bands; use kernel='triton' on a GPU, or 'reference'"
        )

    def _table(self, mask: Mask, q: ShardSlice, k: ShardSlice) -> Iterator[Tile]:
        table = np.array(mask.visible(q.span.positions()[:, None], k.span.positions()[None, :]))
        (rows,), (columns,) = np.nonzero(table.any(axis=1)), np.nonzero(table.any(axis=0))
        # Remove hidden rows and columns at the ends: padding is there and may hold NaN, and a
        # probability of 0 times NaN is NaN.
        if len(rows):
            (top, bottom), (left, right) = ((int(x[0]), int(x[-1]) + 1) for x in (rows, columns))
            inner = np.ascontiguousarray(table[top:bottom, left:right])
            yield Tile(q.rows(top, bottom), k.rows(left, right), table=inner)

    def _cut_band(self, q: ShardSlice, k: ShardSlice, band: Band) -> Iterator[Tile]:
        if band.left + band.right < 0:  # the window is between the positions of a strided pair
            return
        # Most pairs of a ring have equal bands, so tiles are cached by shape and band.
        shape = (q.span.length, k.span.length, band, self.band_rows)
        if self.table_rows is None and left_edge(*shape[:3]):
            if not self.windows:
                raise ValueError(
                    f"mask: a window over queries {q.span} and keys {k.span} hides the first keys, "
                    "and this kernel supports neither windows nor tables; use kernel='triton' on a "
                    "GPU, or 'reference'"
                )
            yield from _window(q, k, band)
            return
        if shape not in self._bands:
            self._bands[shape] = band_tiles(*shape)
        for part in self._bands[shape]:
            rows, columns = q.rows(*part.rows), k.rows(*part.columns)
            yield Tile(rows, columns, part.triangle, part.table)


def _window(q: ShardSlice, k: ShardSlice, band: Band) -> Iterator[Tile]:
    """Yield the tiles of a band with a left edge, without rows and columns with no visible pair.

    The last tile has the band, and at most as many rows as columns. If there are more rows, earlier
    tiles have the first rows, which see the first column.
    """
    # `AtenKernel` corrects rows that see nothing only in tables, so a band must have none.
    begin, end = max(0, -band.right), min(q.span.length, k.span.length + band.left)
    first, stop = max(0, begin - band.left), min(k.span.length, end + band.right)
    shift = begin - first  # local rows and columns count from new origins
    left, right = min(band.left - shift, q.span.length), min(band.right + shift, k.span.length)
    # FlashAttention 2 limits a right edge to the number of columns, counted from the last row. With
    # more rows than columns, the first rows would lose some columns.
    over = max(0, end - begin - (stop - first))
    for part in band_tiles(over, stop - first, Band(over, right), None):
        rows, columns = (begin + x for x in part.rows), (first + x for x in part.columns)
        yield Tile(q.rows(*rows), k.rows(*columns), part.triangle, part.table)
    inner = Band(left - over, min(right + over, k.span.length))
    yield Tile(q.rows(begin + over, end), k.rows(first, stop), band=inner)


def _full_tiles(q_lengths: np.ndarray, k_lengths: np.ndarray, pairs: SeenPairs) -> Tiles:
    """Return the tiles of pairs of spans that are all fully visible, joined as in `_joined`.

    With packed documents, most pairs of ranks have only such spans. So the computation has no loop
    over pairs of spans.

    Args:
        q_lengths: Number of rows of each query span.
        k_lengths: Number of rows of each key span.
        pairs: Pairs of spans, all with cover `FULL`.
    """
    rows, columns = np.cumsum(np.append(0, q_lengths)), np.cumsum(np.append(0, k_lengths))
    top, bottom = rows[pairs.query], rows[pairs.query + 1]
    left, right = columns[pairs.key], columns[pairs.key + 1]
    adjacent = (top[1:] == top[:-1]) & (left[1:] == right[:-1])
    first, last = np.append(True, ~adjacent), np.append(~adjacent, True)
    top, bottom, left, right = top[first], bottom[first], left[first], right[last]
    equal = (left[1:] == left[:-1]) & (right[1:] == right[:-1])
    adjacent = equal & (top[1:] == bottom[:-1])
    first, last = np.append(True, ~adjacent), np.append(~adjacent, True)
    top, bottom, left, right = top[first], bottom[last], left[first], right[first]
    step, pattern = np.ones_like(top), np.full(len(top), ALL_VISIBLE)
    bounds = np.stack([top, bottom, step, left, right, step], axis=1)
    return Tiles(bounds, pattern, [Pattern()])


def _joined(tiles: Iterable[Tile]) -> Iterator[Tile]:
    """Join adjacent fully visible tiles, because one large call is faster."""
    # Join along rows first, because tiles are in row order; then join tiles of equal width.
    return _joined_along(_joined_along(tiles, "rows", "columns"), "columns", "rows")


def _joined_along(tiles: Iterable[Tile], same: str, along: str) -> Iterator[Tile]:
    """Join consecutive, fully visible tiles that are adjacent along one axis.

    Args:
        tiles: Tiles in order.
        same: Axis ("rows" or "columns") in which joined tiles are equal.
        along: Axis along which joined tiles are adjacent.
    """
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
    if first.stop != second.start or getattr(a, same) != getattr(b, same):  # most tiles
        return False
    return first.step == second.step == 1 and _fully_visible(a) and _fully_visible(b)


def _fully_visible(tile: Tile) -> bool:
    """Return True if all pairs of the tile are visible."""
    return not tile.triangle and tile.table is None and tile.band is None


def _joined_triangles(tiles: Iterable[Tile]) -> list[Tile]:
    """Join two triangles and the square between them to one triangle.

    The square is below the first triangle and left of the second. Such tiles are made from adjacent
    pieces of a document on one rank, such as the two zigzag pieces of the last rank.
    """
    joined: list[Tile] = []
    for tile in tiles:
        joined.append(tile)
        if tile.triangle and len(joined) >= 3 and _are_steps(*joined[-3:]):
            first, _, last = joined[-3:]
            rows = slice(first.rows.start, last.rows.stop, 1)
            columns = slice(first.columns.start, last.columns.stop, 1)
            joined[-3:] = [Tile(rows, columns, triangle=True)]
    return joined


def _are_steps(upper: Tile, square: Tile, lower: Tile) -> bool:
    """Return True if three tiles together are one lower triangle: top, square below it, bottom."""
    if not (upper.triangle and _fully_visible(square) and lower.triangle):
        return False
    steps = {part.step for tile in (upper, square, lower) for part in (tile.rows, tile.columns)}
    return (
        steps == {1} and square.rows == lower.rows and square.columns == upper.columns
        and upper.rows.stop == lower.rows.start and upper.columns.stop == lower.columns.start
    )  # fmt: skip


_SMALLEST_BLOCK = 128  # a smaller call costs more than the hidden pairs that it saves


class BandTile(NamedTuple):
    """A tile of a band; rows and columns count from the first ones of the band.

    Attributes:
        rows: (first, stop) of the rows.
        columns: (first, stop) of the columns.
        triangle: Same as in `Tile`.
        table: Same as in `Tile`.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    triangle: bool = False
    table: np.ndarray | None = None


def left_edge(rows: int, columns: int, band: Band) -> bool:
    """Return True if some row sees a column but does not see the first column.

    If there is no such row, the band is a lower triangle and rectangles, which every kernel
    supports.
    """
    return min(rows, columns + band.left) > max(0, -band.right, band.left + 1)


def band_tiles(rows: int, columns: int, band: Band, block: int | None) -> tuple[BandTile, ...]:
    """Return the tiles of a band in a rectangle of `rows` x `columns`.

    Rows that see the first column become a rectangle and a lower triangle. Later rows are cut into
    blocks of at most `block` rows. A block becomes a tile of the columns that all its rows see, and
    tiles of the slanted edges.

    Args:
        rows: Number of rows.
        columns: Number of columns.
        band: The band.
        block: Largest number of rows of a block; None for one block.
    """
    left, right = band
    if block is not None:  # an edge wastes half a block: keep that small
        block = min(block, max(_SMALLEST_BLOCK, min(rows, left + right + 1) // 8))
    tiles: list[BandTile] = []
    edges: dict[tuple, np.ndarray] = {}  # equal edges share a table, so kernels convert it once
    begin = max(0, -right)  # earlier rows see nothing
    stop = min(rows, left + 1, columns - right)
    if begin < stop:
        if begin + right > 0:  # columns that the first row sees before the triangle begins
            tiles.append(BandTile((begin, stop), (0, begin + right)))
        tiles += _triangle(begin, stop, right, block or stop)
        begin = stop
    while begin < rows and begin - left < columns:
        end = rows if block is None else min(rows, begin + block)
        # The right edge must be inside the columns for all rows of a block, or outside for all.
        # Otherwise its triangle would exceed the columns, or rows would lose visible columns.
        if begin + right < columns - 1:
            end = min(end, columns - right)
        elif left >= begin:  # rows that see everything need no blocks
            end = min(rows, left + 1)
        tiles += _block_tiles(begin, end, columns, band, edges)
        begin = end
    return tuple(tiles)


def _triangle(begin: int, end: int, right: int, block: int) -> Iterator[BandTile]:
    """Divide a lower triangle into a square and two triangles, down to triangles of `block` rows.

    The squares are as large as possible, which is fastest for kernels. Each row is in few squares,
    so few results are merged. Causal attention of 4K tokens on a CPU is up to 10 % slower if the
    triangle is cut into rows of equal blocks.
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
    """Yield the tiles of rows `begin` to `end` of a band; `edges` caches tables of equal edges."""
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
    """Return a bool [rows, columns], true if m + low <= n <= m + high for row m and column n."""
    key = (rows, columns, low, high)
    if key not in edges:
        ahead = np.arange(columns)[None, :] - np.arange(rows)[:, None]
        edges[key] = (ahead >= low) & (ahead <= high)
    return edges[key]
