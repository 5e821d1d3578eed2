# SPDX-License-Identifier: Apache-2.0
"""Tiling: cuts a pair of shards into tiles that flash attention operators can compute.

A tile is a rectangle of local rows and columns. The visible pairs of a tile are all pairs, the
lower triangle of a square (column <= row), a band, or the True entries of a table. Hidden pairs are
in no tile, or False in a table. The cuts depend on the mask and on the abilities of the kernel
(`Cutter`). A slice is a regular run of rows of a shard that holds one span. If a pair of slices is
partly visible but not a band, it is cut further. This module does not import torch, so
`schedule.cost` uses it to count exactly the tiles that run.

Each tile is one kernel call, so few and large tiles are fast. But at the slanted edge of a band (a
causal mask or a sliding window over local rows and columns) a kernel also computes hidden pairs:

    right edge only (causal)      both edges (window), row blocks
        T . . .                       T . . . .
        S T . .                       E T . . .
        S S T .                       . E T . .         T triangle, S square, E table of an edge
        S S S T                       . . E T .
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..layout import Span, Spans
from ..layout.layouts import Pieces, Shards, SpanArray, counted, pieces_of
from .base import FAR, FULL, PARTIAL, Mask
from .seen import cuts, divided, nearby
from .tiles import ALL_VISIBLE, TRIANGLE, Patterns, Tiles

AT_ONCE = 1 << 20  # largest number of pairs of slices that are compared at once


class Slices(NamedTuple):
    """Slices of shards, as arrays with one entry per slice.

    A slice is every `step`-th row from row `start` on; these rows hold the positions of `span`.

    Attributes:
        owner: Index of the rectangle (a pair of shards, or a part of it) to which the slice
            belongs, ascending.
        start: First row in the shard.
        step: Distance between rows.
        span: Positions of the rows.
    """

    owner: np.ndarray
    start: np.ndarray
    step: np.ndarray
    span: Spans

    @classmethod
    def of(cls, shards: Shards) -> Slices:
        """Return each span of each shard as one slice; the owner is the index of the shard."""
        owner, first, span = pieces_of(shards)
        return cls(owner, first, np.ones_like(first), span)

    def at(self, index: np.ndarray) -> Slices:
        """Return the slices at `index`."""
        return Slices(self.owner[index], self.start[index], self.step[index], self.span.at(index))

    def take(self, first: np.ndarray, count: np.ndarray, every: np.ndarray | int = 1) -> Slices:
        """Return `count` rows of each slice: every `every`-th row, from index `first` on."""
        start, stride, _ = self.span
        span = Spans(start + first * stride, stride * every, count)
        return Slices(self.owner, self.start + first * self.step, self.step * every, span)

    def rows(self, first: np.ndarray | int, stop: np.ndarray) -> np.ndarray:
        """Return the rows at indices `first` to `stop` (exclusive) of each slice.

        The result is start, stop and step of each slice, int64 [3, n].
        """
        end = self.start + (stop - 1) * self.step + 1
        return np.stack([self.start + first * self.step, end, self.step])


class SeenPairs(NamedTuple):
    """Pairs of slices with visible pairs, as arrays sorted by query slice, then by key slice.

    Attributes:
        query: Index of the query slice.
        key: Index of the key slice.
        cover: Cover of the two slices, `FULL` or `PARTIAL`.
    """

    query: np.ndarray
    key: np.ndarray
    cover: np.ndarray


def seen_pairs(mask: Mask, q: Slices, k: Slices) -> SeenPairs | None:
    """Return the pairs (query slice, key slice) of one owner whose cover is not EMPTY.

    A shard of packed documents has hundreds of spans, and each sees only spans of its document.
    Pairs that `Mask.viewers` excludes are not compared. The result is None if there are too many
    pairs of several owners to compare them at once.
    """
    by_position, order = Pieces(q.owner, q.start, q.span), None
    start, same = q.span.start, q.owner[1:] == q.owner[:-1]
    if (same & (start[1:] < start[:-1])).any():
        order = np.lexsort((start, q.owner))
        by_position = by_position.at(order)
    viewers = mask.viewers(k.span)
    begin, count = nearby(viewers, by_position, Pieces(k.owner, k.start, k.span))
    if count.sum() > AT_ONCE and q.owner[0] != q.owner[-1]:
        return None
    i, j = counted(begin, count), np.repeat(np.arange(len(count)), count)
    if order is not None:
        i = order[i]
    if (i[1:] < i[:-1]).any():
        order = np.argsort(i, kind="stable")  # equal ones stay in the order of keys
        i, j = i[order], j[order]
    # Queries from `low` to `high` see all keys, if viewers are exact: most pairs of documents.
    low = np.where(viewers.exact, np.maximum(viewers.first, k.span.last - viewers.right), FAR)
    high = np.minimum(viewers.last, k.span.start + viewers.left)
    other = np.flatnonzero((q.span.start[i] < low[j]) | (q.span.last[i] > high[j]))
    covers = np.full(len(i), FULL)
    covers[other] = mask.covers(q.span.at(i[other]), k.span.at(j[other]))
    if covers.all():  # none is EMPTY
        return SeenPairs(i, j, covers)
    seen = np.flatnonzero(covers)
    return SeenPairs(i[seen], j[seen], covers[seen])


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
        windows: True if the kernel supports a band with a left edge (a window) in one tile. If
            False, such bands need tables.
        tile_cost: Fixed cost of a tile: the number of pairs whose computation takes as long as one
            more call.
    """

    band_rows: int | None
    table_rows: int | None
    windows: bool = False
    # Measured with torch's operator on a CPU, forward and backward: 500 to 5900 pairs; the most
    # pairs with few narrow heads.
    tile_cost: int = 2048

    def tiles(self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> Tiles:
        """Return the tiles of one pair of shards; arguments and errors are as in `all_tiles`."""
        return self.all_tiles(mask, [(q_spans, k_spans)])[0]

    def all_tiles(
        self, mask: Mask, pairs: Sequence[tuple[Sequence[Span], Sequence[Span]]]
    ) -> list[Tiles]:
        """Return the tiles of each pair of shards.

        All pairs are cut together, because packed documents have hundreds of tiles per pair.

        Args:
            mask: The mask.
            pairs: Query spans and key spans of each pair, in shard order.

        Raises:
            ValueError: The mask needs tables or windows that the kernel does not support.
        """
        if not pairs:
            return []
        q, k = (Slices.of([pair[side] for pair in pairs]) for side in (0, 1))
        tiling = _MaskTiles(self, mask)
        tiles = tiling.cut(q, k, np.full(len(pairs), FAR))
        if self.band_rows is None:  # otherwise the kernel needs the small triangles
            tiles = tiles.joined_triangles()
        ends = np.searchsorted(tiles.owner, np.arange(len(pairs) + 1)).tolist()
        return [
            Tiles(tiles.bounds[:, a:b].T, tiles.pattern[a:b], tiling.patterns.all)
            for a, b in pairwise(ends)
        ]


class _CutTiles(NamedTuple):
    """Tiles of many rectangles, as arrays with one entry per tile.

    Attributes:
        owner: Index of the rectangle.
        bounds: int64 [6, n], the transpose of `Tiles.bounds`.
        pattern: Same as in `Tiles`.
    """

    owner: np.ndarray
    bounds: np.ndarray
    pattern: np.ndarray

    @classmethod
    def of(
        cls, owner: np.ndarray, rows: np.ndarray, columns: np.ndarray, pattern: np.ndarray | int
    ) -> _CutTiles:
        bounds = np.concatenate([rows, columns])
        return cls(owner, bounds, np.broadcast_to(np.asarray(pattern), owner.shape))

    @classmethod
    def sorted(cls, parts: Sequence[_CutTiles]) -> _CutTiles:
        """Return the tiles of all parts, sorted by rectangle; otherwise the order is kept."""
        if len(parts) == 1:
            return parts[0]
        owner, bounds, pattern = (np.concatenate(x, axis=-1) for x in zip(*parts, strict=True))
        return cls(owner, bounds, pattern).at(np.argsort(owner, kind="stable"))

    def at(self, index: np.ndarray) -> _CutTiles:
        """Return the tiles at `index`, an integer array."""
        bounds = self.bounds.take(index, axis=1)  # three times as fast as `bounds[:, index]`
        return _CutTiles(self.owner[index], bounds, self.pattern[index])

    def joined(self) -> _CutTiles:
        """Join adjacent fully visible tiles of a rectangle, because one large call is faster."""
        tiles = self
        # Join along rows first, because tiles are in row order; then join tiles of equal width.
        for along, other in ((_COLUMNS, _ROWS), (_ROWS, _COLUMNS)):
            start, stop, step = tiles.bounds[along : along + 3]
            square = (tiles.pattern == ALL_VISIBLE) & (step == 1)
            touch = square[1:] & square[:-1] & (start[1:] == stop[:-1])
            for same in (tiles.owner, *tiles.bounds[other : other + 3]):
                touch &= same[1:] == same[:-1]
            if touch.any():
                tiles = tiles.at(np.flatnonzero(np.append(True, ~touch)))
                tiles.bounds[along + 1] = stop[np.append(~touch, True)]
        return tiles

    def joined_triangles(self) -> _CutTiles:
        """Join two triangles and the square between them to one triangle.

        The square is below the first triangle and to the left of the second triangle. Such tiles
        are made from adjacent pieces of a document on one rank, such as the two zigzag pieces of
        the last rank.
        """
        owner, (top, bottom, step, left, right, column_step), pattern = self
        triangle = (pattern == TRIANGLE) & (step == 1) & (column_step == 1)
        square = (pattern == ALL_VISIBLE) & (step == 1) & (column_step == 1)
        steps = triangle[:-2] & square[1:-1] & triangle[2:] & (owner[:-2] == owner[2:])
        steps &= (top[1:-1] == top[2:]) & (bottom[1:-1] == bottom[2:])
        steps &= (bottom[:-2] == top[2:]) & (right[:-2] == left[2:]) & (right[1:-1] == left[2:])
        upper = np.arange(len(owner))  # first tile of the triangle that ends with each tile
        kept = np.ones(len(owner), dtype=bool)
        for lower in (np.flatnonzero(steps) + 2).tolist():
            if left[lower - 1] == left[upper[lower - 2]]:
                upper[lower] = upper[lower - 2]
                kept[lower - 2 : lower] = False
        bounds = self.bounds.copy()
        bounds[[0, 3]] = bounds[[0, 3]][:, upper]
        return _CutTiles(owner, bounds, pattern).at(np.flatnonzero(kept))


_ROWS, _COLUMNS = 0, 3  # indices into the columns of `Tiles.bounds`


class _MaskTiles:
    """The tiles of a mask, cut level by level for all rectangles of a level at once.

    Args:
        cutter: Limits of the tiles.
        mask: The mask.
    """

    def __init__(self, cutter: Cutter, mask: Mask):
        self.cutter, self.mask = cutter, mask
        self.patterns = Patterns()

    def cut(self, q: Slices, k: Slices, limit: np.ndarray) -> _CutTiles:
        """Return the tiles of every visible combination of a query slice and a key slice.

        Args:
            q: Query slices.
            k: Key slices.
            limit: int64 [owners], largest useful cost of the tiles of each owner (rectangle). If
                they cost more, the caller discards them, so some of these tiles may be missing.
        """
        seen = seen_pairs(self.mask, q, k)
        if seen is None:
            middle = (q.owner[0] + q.owner[-1] + 1) // 2
            late = [x.owner >= middle for x in (q, k)]
            first = self.cut(q.at(~late[0]), k.at(~late[1]), limit)
            return _CutTiles.sorted([first, self.cut(q.at(late[0]), k.at(late[1]), limit)])
        owner = q.owner[seen.query]
        full, partly = (np.flatnonzero(seen.cover == cover) for cover in (FULL, PARTIAL))
        # Most pairs are fully visible, and they need only the rows of their slices.
        bounds = np.empty((6, len(full)), dtype=np.int64)
        for x, i, part in ((q, seen.query, bounds[:3]), (k, seen.key, bounds[3:])):
            # mode "clip" writes to `out` without a buffer
            np.take(x.rows(0, x.span.length), i[full], axis=1, out=part, mode="clip")
        parts = [_CutTiles(full, bounds, np.full(len(full), ALL_VISIBLE))]
        if len(partly):
            q, k = (x.at(i[partly])._replace(owner=partly)
                    for x, i in ((q, seen.query), (k, seen.key)))  # fmt: skip
            left, right, known = self.mask.bands(q.span, k.span)
            (band,), (other,) = np.nonzero(known), np.nonzero(~known)
            parts += self._bands(q.at(band), k.at(band), left[band], right[band])
            if len(other):
                parent = owner[partly[other]]
                parts += self._divided(q.at(other), k.at(other), parent, limit)
        tiles = _CutTiles.sorted(parts)
        return tiles._replace(owner=owner[tiles.owner]).joined()

    def _divided(
        self, q: Slices, k: Slices, parent: np.ndarray, limit: np.ndarray
    ) -> list[_CutTiles]:
        """Return the tiles of pairs of slices whose visible pairs are not a band.

        Each pair is cut further, or becomes one tile with a table of visible pairs.

        Args:
            q: Query slice of each pair.
            k: Key slice of each pair.
            parent: Index in `limit` of the rectangle that contains each pair.
            limit: Same as in `cut`.
        """
        mask, size, number = self.mask, self.cutter.table_rows, np.arange(len(parent))
        # Breaks are first, because between them a mask is mostly one band or nothing. Residues are
        # before halves: halves keep their stride, so they never separate the classes.
        q_cuts, k_cuts = (
            _coarse(*cuts(breaks, x.span), x.span.length, size)
            for breaks, x in ((mask.breaks, q), (mask.key_breaks, k))
        )
        uncut = np.ones(len(number), dtype=bool)
        uncut[q_cuts[0]] = uncut[k_cuts[0]] = False
        classes = uncut & (_mixed(q, mask.modulus) | _mixed(k, mask.modulus))
        rows, columns = q.span.length, k.span.length
        within = np.maximum(rows, columns) <= (0 if size is None else size)
        tables = uncut & ~classes & (within | (size is None))
        if size is None and tables.any():
            self._no_table(q, k, int(tables.argmax()))
        if tables.all():
            return self._tables(q, k, parent, limit)
        halves = uncut & ~classes & ~tables
        middles = (np.flatnonzero(halves & longer) for longer in (rows >= columns, rows < columns))
        q_parts, k_parts = (
            _parts(x, *x_cuts, at, np.flatnonzero(classes), mask.modulus)
            for x, x_cuts, at in zip((q, k), (q_cuts, k_cuts), middles, strict=True)
        )
        q_parts, k_parts = (x.at(~tables[x.owner]) for x in (q_parts, k_parts))
        # If both a table and tiles are possible, use whichever computes fewer pairs, including
        # tile_cost.
        most = np.where(within, rows * columns + self.cutter.tile_cost, FAR)
        tiles = self.cut(q_parts, k_parts, most)
        if size is not None:
            height, width = (-((a - b) // c) for a, b, c in (tiles.bounds[:3], tiles.bounds[3:]))
            cost = np.bincount(tiles.owner, height * width + self.cutter.tile_cost, len(number))
            tables |= cost > most
            tiles = tiles.at(np.flatnonzero(~tables[tiles.owner]))
        (at,) = np.nonzero(tables)
        made = self._tables(q.at(at), k.at(at), parent[at], limit)
        return [tiles._replace(owner=q.owner[tiles.owner]), *made]

    def _no_table(self, q: Slices, k: Slices, pair: int) -> None:
        q_span, k_span = (SpanArray(x.span)[pair] for x in (q, k))
        raise ValueError(
            f"mask: {self.mask!r} is not a band over queries {q_span} and keys {k_span}, and this "
            "kernel supports only bands; use kernel='triton' on a GPU, or 'reference'"
        )

    def _tables(
        self, q: Slices, k: Slices, parent: np.ndarray, limit: np.ndarray
    ) -> list[_CutTiles]:
        """Return one tile with a table for each pair of slices; arguments as in `_divided`."""
        cost, kept, ends = dict.fromkeys(parent.tolist(), 0), [], []
        begin, end, exact = self._rows_of_keys(q, k)
        last = np.cumsum(k.span.length).tolist()
        for number, rectangle in enumerate(parent.tolist()):
            if cost[rectangle] > limit[rectangle]:  # a fine mask can have very many tables
                continue
            if exact[number]:
                of_keys = slice(last[number - 1] if number else 0, last[number])
                part = self.patterns.of_rows(begin[of_keys], end[of_keys])
            else:
                rows, columns = (SpanArray(x.span)[number].positions() for x in (q, k))
                part = self.patterns.of_table(self.mask.visible(rows[:, None], columns[None, :]))
            if part is not None:
                top, bottom, left, right, _ = part
                cost[rectangle] += (bottom - top) * (right - left) + self.cutter.tile_cost
                kept.append(number)
                ends.append(part)
        if not kept:
            return []
        q, k = (x.at(np.array(kept)) for x in (q, k))
        top, bottom, left, right, pattern = np.array(ends).T
        return [_CutTiles.of(q.owner, q.rows(top, bottom), k.rows(left, right), pattern)]

    def _rows_of_keys(self, q: Slices, k: Slices) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the range of rows that sees each key of pairs of slices.

        Returns:
            First row and row after the last row of each key, int32, one pair of slices after the
            other; bool [pairs], true if such a range describes all keys of a pair.
        """
        pair = np.repeat(np.arange(len(k.owner)), k.span.length)
        if not self.mask.has_viewers:
            return pair, pair, np.zeros(len(k.owner), dtype=bool)
        start, stride, length = q.span.at(pair)
        key = k.span.start[pair] + counted(0, k.span.length) * k.span.stride[pair]
        viewers = self.mask.viewers(Spans(key, np.ones_like(key), np.ones_like(key)))
        low = np.maximum(viewers.first, key - viewers.right) - start
        high = np.minimum(viewers.last, key + viewers.left) - start
        begin = np.clip(-(-low // stride), 0, length).astype(np.int32)
        end = np.clip(high // stride + 1, begin, length).astype(np.int32)
        exact = np.ones(len(k.owner), dtype=bool)
        exact[pair[~viewers.exact]] = False
        return begin, end, exact

    def _bands(self, q: Slices, k: Slices, left: np.ndarray, right: np.ndarray) -> list[_CutTiles]:
        """Return the tiles of pairs of slices whose visible pairs are bands (see `Band`)."""
        # A window of strided slices is empty if it contains none of their positions.
        (nonempty,) = np.nonzero(left + right >= 0)
        q, k, far = q.at(nonempty), k.at(nonempty), 2 * (q.span.length + k.span.length)[nonempty]
        left, right = (np.clip(x[nonempty], -far, far) for x in (left, right))
        if self.cutter.table_rows is None:
            # Some row sees a column but does not see the first column. If there is no such row, the
            # band is a lower triangle and rectangles, which every kernel supports.
            bottom = np.minimum(q.span.length, k.span.length + left)
            edge = bottom > np.maximum(0, np.maximum(-right, left + 1))
            if edge.any():
                (at,), (rest,) = np.nonzero(edge), np.nonzero(~edge)
                windows = self._windows(q.at(at), k.at(at), left[at], right[at])
                return [*self._bands(q.at(rest), k.at(rest), left[rest], right[rest]), *windows]
        return self._band_tiles(q, k, left, right, self.cutter.band_rows)

    def _windows(
        self, q: Slices, k: Slices, left: np.ndarray, right: np.ndarray
    ) -> list[_CutTiles]:
        """Return the tiles of bands with a left edge, without rows and columns that see nothing.

        The last tile has the band, and at most as many rows as columns. If there are more rows,
        earlier tiles have the first rows, which see the first column.
        """
        if not self.cutter.windows:
            q_span, k_span = (SpanArray(x.span)[0] for x in (q, k))
            raise ValueError(
                f"mask: a window over queries {q_span} and keys {k_span} hides the first keys, "
                "and this kernel supports neither windows nor tables; use kernel='triton' on a "
                "GPU, or 'reference'"
            )
        rows, columns = q.span.length, k.span.length
        # `AtenKernel` corrects rows that see nothing only in tables, so a band must have none.
        begin, end = np.maximum(0, -right), np.minimum(rows, columns + left)
        first, stop = np.maximum(0, begin - left), np.minimum(columns, end + right)
        shift = begin - first  # local rows and columns count from new origins
        left, right = np.minimum(left - shift, rows), np.minimum(right + shift, columns)
        q, k = q.take(begin, end - begin), k.take(first, stop - first)
        # FlashAttention 2 limits a right edge to the number of columns, counted from the last row.
        # With more rows than columns, the first rows would lose some columns.
        over = np.maximum(0, q.span.length - k.span.length)
        bands = zip((left - over).tolist(), np.minimum(right + over, columns).tolist(), strict=True)
        pattern = [self.patterns.of_band(*band) for band in bands]
        inner = q.rows(over, q.span.length), k.rows(0, k.span.length)
        return [
            *self._band_tiles(q.take(0 * over, over), k, over, right, None),
            _CutTiles.of(q.owner, *inner, np.array(pattern)),
        ]

    def _band_tiles(
        self, q: Slices, k: Slices, left: np.ndarray, right: np.ndarray, block: int | None
    ) -> list[_CutTiles]:
        """Return the tiles of bands.

        Rows that see the first column become a rectangle and a lower triangle. Later rows are cut
        into blocks of at most `block` rows. A block becomes one tile with the columns that all rows
        of the block see, and tiles for the slanted edges.

        Args:
            q: Query slice of each band.
            k: Key slice of each band.
            left: Number of visible columns before the diagonal.
            right: Number of visible columns after the diagonal.
            block: Largest number of rows of a block; None for one block.
        """
        rows, columns = q.span.length, k.span.length
        limit = np.maximum(rows, 1)
        if block is not None:  # at an edge, half of a block is hidden pairs
            small = np.maximum(_SMALLEST_BLOCK, np.minimum(rows, left + right + 1) // 8)
            limit = np.minimum(block, small)
        begin = np.maximum(0, -right)  # earlier rows see nothing
        stop = np.minimum(np.minimum(rows, left + 1), columns - right)
        (at,) = np.nonzero((begin < stop) & (begin + right > 0))
        # columns that the first row sees before the triangle begins
        parts = [_BandTiles(at, begin[at], stop[at], 0 * at, (begin + right)[at], 0 * at)]
        (at,) = np.nonzero(begin < stop)
        parts.append(_triangles(at, begin[at], stop[at], right[at], limit[at]))
        begin = np.maximum(begin, stop)
        while True:
            (at,) = np.nonzero((begin < rows) & (begin - left < columns))
            if not len(at):
                break
            top, low, high, width = (x[at] for x in (begin, left, right, columns))
            # The right edge must be inside the columns for all rows of a block, or outside for all.
            # Otherwise its triangle would exceed the columns, or rows would lose visible columns.
            inside = top + high < width - 1
            end = np.minimum(rows[at], top + limit[at])
            end = np.where(inside, np.minimum(end, width - high), end)
            # Rows that see everything need no blocks.
            end = np.where(~inside & (low >= top), np.minimum(rows[at], low + 1), end)
            parts += self._blocks(at, top, end, width, low, high)
            begin[at] = end
        at, top, end, first, stop, pattern = (np.concatenate(x) for x in zip(*parts, strict=True))
        q, k = q.at(at), k.at(at)
        return [_CutTiles.of(q.owner, q.rows(top, end), k.rows(first, stop), pattern)]

    def _blocks(
        self,
        band: np.ndarray,
        top: np.ndarray,
        end: np.ndarray,
        columns: np.ndarray,
        left: np.ndarray,
        right: np.ndarray,
    ) -> list[_BandTiles]:
        """Return the tiles of rows `top` to `end` of bands; other arguments as in `_band_tiles`."""
        first, first_full = np.maximum(0, top - left), np.maximum(0, end - 1 - left)
        stop_full, stop = np.minimum(columns, top + right + 1), np.minimum(columns, end + right)
        triangle = stop_full < stop
        # The last column that all rows see is the first one of the triangle.
        stop_full = stop_full - triangle
        narrow = first_full > stop_full  # narrower than the block: both edges in one table
        last = np.where(narrow, stop, first_full)
        high = np.where(narrow, top + right - first, columns)
        (at,) = np.nonzero(narrow | (first < first_full))
        shapes = (x[at].tolist() for x in (end - top, last - first, top - left - first, high))
        edges = [self.patterns.of_edge(*shape) for shape in zip(*shapes, strict=True)]
        parts = [_BandTiles(band[at], top[at], end[at], first[at], last[at], np.array(edges, int))]
        for shown, a, b, pattern in (
            (first_full < stop_full, first_full, stop_full, ALL_VISIBLE),
            (triangle, stop_full, stop, TRIANGLE),
        ):
            (at,) = np.nonzero(shown & ~narrow)
            parts.append(_BandTiles(band[at], top[at], end[at], a[at], b[at], pattern + 0 * at))
        return parts


def _coarse(
    index: np.ndarray, cut: np.ndarray, length: np.ndarray, size: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Remove cuts of slices with more than `size` rows.

    Such a slice keeps only the first and the last cut in each group of `size` rows. The parts in
    which cuts were removed have fewer than `size` rows, so a table can describe them. For documents
    of a few tokens, a table is cheaper than one tile per document.

    Args:
        index: Index of the slice of each cut, as from `cuts`.
        cut: Index within the slice of each cut.
        length: Number of rows of each slice.
        size: Number of rows of a group; None keeps all cuts.
    """
    if size is None:
        return index, cut
    edge, group = np.ones(len(cut) + 1, dtype=bool), cut // size
    edge[1:-1] = (index[1:] != index[:-1]) | (group[1:] != group[:-1])
    kept = edge[:-1] | edge[1:] | (length[index] <= size)
    return index[kept], cut[kept]


def _mixed(x: Slices, modulus: int) -> np.ndarray:
    """Return whether each slice has positions of several residue classes modulo `modulus`."""
    return (x.span.stride % modulus != 0) & (x.span.length > 1)


def _parts(
    x: Slices,
    index: np.ndarray,
    cut: np.ndarray,
    halved: np.ndarray,
    classes: np.ndarray,
    modulus: int,
) -> Slices:
    """Cut slices into parts; the owner of a part is the index of the slice that was cut.

    The stride of each residue class is a multiple of `modulus`. So in a dilated mask, all pairs of
    a query class and a key class are visible, or none.

    Args:
        x: The slices.
        index: Index of the slice of each cut.
        cut: Index within the slice before which the slice is cut.
        halved: Indices of slices without cuts that are cut in the middle.
        classes: Indices of slices without cuts that are split into residue classes.
        modulus: Modulus of the residue classes.
    """
    if len(halved):
        index, cut = np.append(index, halved), np.append(cut, x.span.length[halved] // 2)
        order = np.argsort(index, kind="stable")
        index, cut = index[order], cut[order]
    of, first, count = divided(x.span.length, index, cut)
    every = np.ones_like(of)
    if len(classes):
        whole = np.ones(len(x.owner), dtype=bool)
        whole[classes] = False
        of, first, count = (y[whole[of]] for y in (of, first, count))
        length, step = x.span.length[classes], modulus // np.gcd(x.span.stride[classes], modulus)
        number = np.minimum(step, length)
        step, length, begin = np.repeat(step, number), np.repeat(length, number), counted(0, number)
        of, first, count = (
            np.concatenate(pair)
            for pair in (
                (of, np.repeat(classes, number)),
                (first, begin),
                (count, -((begin - length) // step)),
            )
        )
        every = np.append(np.ones(len(of) - len(step), dtype=np.int64), step)
        order = np.argsort(of, kind="stable")
        of, first, count, every = (y[order] for y in (of, first, count, every))
    return x.at(of).take(first, count, every)._replace(owner=of)


_SMALLEST_BLOCK = 128  # a smaller call costs more than the hidden pairs that it saves


class _BandTiles(NamedTuple):
    """Tiles of bands, as arrays. Rows and columns are numbered from the start of the band's slices.

    Attributes:
        band: Index of the band.
        top: First row.
        end: Row after the last row.
        first: First column.
        stop: Column after the last column.
        pattern: Same as in `Tiles`.
    """

    band: np.ndarray
    top: np.ndarray
    end: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    pattern: np.ndarray


def _triangles(
    band: np.ndarray, begin: np.ndarray, end: np.ndarray, right: np.ndarray, block: np.ndarray
) -> _BandTiles:
    """Divide lower triangles recursively, each into a square and two triangles.

    Triangles of at most `block` rows are not divided.

    The squares are as large as possible, which is fastest for kernels. Each row is in few squares,
    so few results are merged. If the triangle were cut into equal blocks, causal attention of 4K
    tokens on a CPU would be up to 10 % slower.

    Args:
        band: Index of the band of each triangle.
        begin: First row of each triangle.
        end: Row after the last row.
        right: Row m sees the columns up to m + right.
        block: Largest number of rows of a triangle that is not divided.
    """
    blocks = -((begin - end) // block)
    count = 2 * blocks - 1  # a triangle per block, and a square to the left of all but the first
    of, item = np.repeat(np.arange(len(band)), count), counted(0, count)
    band, begin, end, right, block = (x[of] for x in (band, begin, end, right, block))
    middle, square = (item + 1) // 2, item % 2 == 1  # in blocks
    low, high = np.zeros_like(item), blocks[of]
    # The square is in the triangle from `low` to `high` that is divided at `middle`.
    while (apart := square & (middle != (low + high + 1) // 2)).any():
        cut = (low + high + 1) // 2
        low, high = np.where(apart & (middle > cut), cut, low), np.where(middle < cut, cut, high)
    low, high = np.where(square, low, middle), np.where(square, high, middle + 1)
    top, end = begin + block * middle, np.minimum(begin + block * high, end)
    stop = np.where(square, top, end) + right
    pattern = np.where(square, ALL_VISIBLE, TRIANGLE)
    return _BandTiles(band, top, end, begin + block * low + right, stop, pattern)
