# SPDX-License-Identifier: Apache-2.0
"""A pair of shards as a grid of equal tiles, for kernels that work through tiles of one size.

Lists, for every block of rows (or of columns), the blocks of the other side that it sees: wholly
visible ones and partly visible ones apart, and for the latter a table of bits. Tiles that look
alike share a table: the diagonal of a causal mask needs one, a window two. Bands, strides and
documents therefore need no code on the device. It needs no torch.

What is visible comes from bands and not from single positions. Spans are cut where the mask's
description changes; of two pieces the mask gives a band, and arithmetic on the band gives the tiles
that are wholly visible and what the others show, for all pairs of a plan in one go: packed
documents have hundreds of pieces, other ones in every micro-batch. Pieces are compared by their
positions, never all with all. Only what is no band is looked up position by position, tile by tile.
A table is drawn row by row from intervals, 32 columns at a time, for one tile of all that have
equal parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..layout import Span, Spans
from ..layout.layouts import Pieces, counted, pieces_of
from ..masks import Mask
from ..masks.base import FAR, FULL, PARTIAL
from ..masks.seen import cut_at

AT_ONCE = 1 << 20  # pairs of pieces that are compared, at most; and
FEW, PER_TILE = 1 << 12, 16  # so many at least, and for every tile

Pairs = Sequence[tuple[Sequence[Span], Sequence[Span]]]


class TileNumbers:
    """The tiles of pairs of shards: numbered by pair, then by rows, then by columns.

    size: rows and columns of a tile. length: int64 [2, pairs], rows and columns of the shards.
    blocks: how many tiles these are. base: int64 [pairs + 1], the first tile of each pair.
    """

    def __init__(self, pairs: Pairs, rows: int, columns: int):
        self.size = rows, columns
        self.length = np.array([[sum(s.length for s in side) for side in pair] for pair in pairs]).T
        self.blocks = -(-self.length // np.array([[rows], [columns]]))
        self.base = np.concatenate([[0], np.cumsum(self.blocks[0] * self.blocks[1])])

    def number(self, pair: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        """The number of the tile at these blocks."""
        return self.base[pair] + row * self.blocks[1][pair] + column

    def place(self, tile: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pair, block of rows and block of columns of tiles."""
        pair = np.searchsorted(self.base, tile, side="right") - 1
        return (pair, *np.divmod(tile - self.base[pair], self.blocks[1][pair]))

    def high(self, pair: np.ndarray, row: np.ndarray) -> np.ndarray:
        """How many rows a block has: the last one of a shard may have fewer."""
        return np.minimum(self.size[0], self.length[0][pair] - row * self.size[0])


class TileRuns(NamedTuple):
    """Columns: from tile `first` on `wide` tiles side by side are wholly visible."""

    first: np.ndarray
    wide: np.ndarray


class TileParts(NamedTuple):
    """Columns: of a tile, rows top <= a < bottom see the columns begin <= b < end where
    low <= b - a <= high. Parts of a tile show none of its pairs twice.
    """

    tile: np.ndarray
    top: np.ndarray
    bottom: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def at(self, index: np.ndarray | slice) -> TileParts:
        return TileParts(*(column[index] for column in self))


class _Bands(NamedTuple):
    """Columns: of a pair, `rows` rows from `row` on see, of `columns` columns from `column` on,
    those from m - left to m + right for the m-th row.
    """

    pair: np.ndarray
    row: np.ndarray
    rows: np.ndarray
    column: np.ndarray
    columns: np.ndarray
    left: np.ndarray
    right: np.ndarray

    def at(self, index: np.ndarray) -> _Bands:
        return _Bands(*(column[index] for column in self))


class Candidates(NamedTuple):
    """Pieces of queries and of keys, whose owner is the pair: of each piece of keys, those of
    queries from `begin` on, `met` of them, may see it. many: too many to compare them.
    """

    q: Pieces
    k: Pieces
    begin: np.ndarray
    met: np.ndarray
    many: bool


def candidates(mask: Mask, pairs: Pairs, numbers: TileNumbers) -> Candidates:
    """Which pieces of the shards of each pair to compare; of several pairs they may be too
    `many`.
    """
    shards = [pieces_of([pair[side] for pair in pairs]) for side in (0, 1)]
    breaks = mask.breaks
    while True:
        q, k = (cut_at(spans, breaks) for spans in shards)
        q = q.at(np.lexsort((q.span.start, q.owner)))
        begin, count = _nearby(mask, q, k)
        many = count.sum() > min(AT_ONCE, FEW + PER_TILE * numbers.base[-1])
        if not many or not len(breaks) or len(pairs) > 1:
            return Candidates(q, k, begin, count, bool(many))
        # Where every shard has a piece of every block, what is larger than these is compared.
        breaks = breaks[1::2]


def tile_parts(
    mask: Mask, found: Candidates, numbers: TileNumbers
) -> tuple[TileRuns, TileParts, np.ndarray]:
    """The tiles that see something: those in runs, wholly; those of which parts are told; and, by
    their numbers, those which the mask has to be asked about position by position.
    """
    i, j = counted(found.begin, found.met), np.repeat(np.arange(len(found.begin)), found.met)
    bands, q, k = _told(mask, found.q.at(i), found.k.at(j))
    asked = np.zeros(0, dtype=np.int64)
    if len(q.owner):
        more, q, k = _told(mask, *_cells(q, k, numbers.size))
        bands = _Bands(*map(np.concatenate, zip(bands, more, strict=True)))
        asked = np.unique(
            numbers.number(q.owner, q.first // numbers.size[0], k.first // numbers.size[1])
        )
    return (*_spread(bands, numbers), asked)


def _nearby(mask: Mask, q: Pieces, k: Pieces) -> tuple[np.ndarray, np.ndarray]:
    """Which pieces of queries may see each piece of keys: the first one, and how many.

    q: by pair, then by position. Every pair has its own range of numbers for positions.
    """
    viewers = mask.viewers(k.span)
    width = 1 + max(side.span.last.max(initial=0) for side in (q, k))
    lowest = np.maximum(viewers.first, k.span.start - viewers.right)
    highest = np.minimum(viewers.last, k.span.last + viewers.left)
    top = np.maximum.accumulate(q.span.last + q.owner * width)
    begin = np.searchsorted(top, np.clip(lowest, 0, width) + k.owner * width)
    end = np.searchsorted(
        q.span.start + q.owner * width, np.clip(highest, -1, width - 1) + k.owner * width, "right"
    )
    return begin, np.maximum(end - begin, 0)


def _told(mask: Mask, q: Pieces, k: Pieces) -> tuple[_Bands, Pieces, Pieces]:
    """What pieces see of each other, one by one: bands, and those that see what is no band."""
    covers = mask.covers(q.span, k.span)
    left = np.where(covers == FULL, FAR, -FAR)
    right, partly = left.copy(), np.flatnonzero(covers == PARTIAL)
    bands = mask.bands(q.span.at(partly), k.span.at(partly))
    left[partly] = np.where(bands.known, bands.left, -FAR)
    right[partly] = np.where(bands.known, bands.right, -FAR)
    first, stop = np.maximum(-right, 0), np.minimum(q.span.length, k.span.length + left)
    begin, end = np.maximum(-left, 0), np.minimum(k.span.length, q.span.length + right)
    some = np.flatnonzero((left + right >= 0) & (first < stop) & (begin < end))
    bands_of_pieces = _Bands(q.owner, q.first, q.span.length, k.first, k.span.length, left, right)
    rest = partly[~bands.known]
    return bands_of_pieces.at(some), q.at(rest), k.at(rest)


def _cells(q: Pieces, k: Pieces, size: tuple[int, int]) -> tuple[Pieces, Pieces]:
    """Pieces, two by two, cut where tiles end: every part of the one with every part of the
    other.
    """
    parts = [_blocks(side, rows) for side, rows in zip((q, k), size, strict=True)]
    (rows, high, top), (columns, wide, left) = parts
    of = np.repeat(np.arange(len(high)), high * wide)
    n = counted(np.zeros_like(high), high * wide)
    return rows.at(top[of] + n // wide[of]), columns.at(left[of] + n % wide[of])


def _blocks(pieces: Pieces, size: int) -> tuple[Pieces, np.ndarray, np.ndarray]:
    """Pieces cut at multiples of `size` rows; how many each becomes, and which is its first."""
    length = pieces.span.length
    low, high = pieces.first // size, (pieces.first + length - 1) // size + 1
    of, block = np.repeat(np.arange(len(low)), high - low), counted(low, high - low)
    begin = np.maximum(block * size - pieces.first[of], 0)
    end = np.minimum((block + 1) * size - pieces.first[of], length[of])
    start, stride = pieces.span.start[of], pieces.span.stride[of]
    span = Spans(start + begin * stride, stride, end - begin)
    count = high - low
    return Pieces(pieces.owner[of], pieces.first[of] + begin, span), count, np.cumsum(count) - count


def _spread(bands: _Bands, numbers: TileNumbers) -> tuple[TileRuns, TileParts]:
    """The tiles of bands: runs of wholly visible ones, and what bands show of the others."""
    (rows, columns), x = numbers.size, bands
    first = x.row + np.maximum(-x.right, 0)  # of the rows that see something
    stop = x.row + np.minimum(x.rows, x.columns + x.left)
    low, count = first // rows, (stop - 1) // rows - first // rows + 1
    of, block = np.repeat(np.arange(len(low)), count), counted(low, count)
    x, edge = x.at(of), block * rows
    top, bottom = np.maximum(first[of], edge), np.minimum(stop[of], edge + rows)
    m, last = top - x.row, bottom - 1 - x.row
    begin = x.column + np.maximum(m - x.left, 0)  # some row sees the columns from here
    end = x.column + np.minimum(last + x.right + 1, x.columns)
    tile, past = begin // columns, (end - 1) // columns + 1
    # All rows see all that lies between what the last row sees first and the first row sees last.
    inner = -(-(x.column + np.maximum(last - x.left, 0)) // columns)
    outer = (x.column + np.minimum(m + x.right + 1, x.columns)) // columns
    whole = (inner < outer) & (bottom - top == numbers.high(x.pair, block))
    inner, outer = np.where(whole, inner, past), np.where(whole, outer, past)
    line = numbers.number(x.pair, block, np.zeros_like(block))
    runs = TileRuns((line + inner)[whole], (outer - inner)[whole])
    count = np.concatenate([inner - tile, past - outer])
    of, column = (
        np.repeat(np.tile(np.arange(len(tile)), 2), count),
        counted(np.concatenate([tile, outer]), count),
    )
    left = column * columns
    ahead = (edge - x.row)[of] - (left - x.column[of])
    parts = TileParts(
        line[of] + column, (top - edge)[of], (bottom - edge)[of],
        np.maximum(begin[of] - left, 0), np.minimum(end[of] - left, columns),
        np.clip(ahead - x.left[of], -rows, columns), np.clip(ahead + x.right[of], -rows, columns),
    )  # fmt: skip
    return runs, parts


WORD = 32  # columns in one entry of a table
PARTS = 64  # tiles with more are not compared with others: their tables are made in less time
DRAWN = 8  # intervals of each row: with more, the mask's answer for all positions takes less time
TABLES_AT_ONCE = 1024  # tables that are drawn together


class BitTables(NamedTuple):
    """bits: int32 [n, rows, columns / 32]; column c of a row is bit c % 32 of entry c // 32.
    visible: int64 [n], how many bits are set.
    """

    bits: np.ndarray
    visible: np.ndarray


def tables_of(
    mask: Mask, pairs: Pairs, numbers: TileNumbers, parts: TileParts, asked: np.ndarray
) -> tuple[np.ndarray, np.ndarray, BitTables]:
    """The tiles that have parts or are asked about, in order; the table of each; the tables."""
    tiles, which = np.unique(parts.tile, return_inverse=True)
    drawn = np.bincount(which, parts.bottom - parts.top)
    many = tiles[drawn > DRAWN * numbers.size[0]]
    asked = np.union1d(asked, many)
    if len(asked):
        parts = parts.at(np.flatnonzero(~np.isin(parts.tile, asked)))
    tile, table, example = _alike(parts, numbers.size)
    drawn, looked = _drawn(example, numbers.size), _looked_up(mask, pairs, numbers, asked)
    tables = BitTables(*map(np.concatenate, zip(drawn, looked, strict=True)))
    tile = np.concatenate([tile, asked])
    table = np.concatenate([table, len(drawn.bits) + np.arange(len(asked))])
    order = np.argsort(tile, kind="stable")
    return tile[order], table[order], tables


def _alike(parts: TileParts, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, TileParts]:
    """The tiles; of each a number, the same for tiles of equal parts; and for every number the
    parts of one such tile, whose `tile` is the number.
    """
    rows, columns = size
    fields = (*parts[1:5], parts.low + rows, parts.high + rows)
    shape = (rows + 1, rows + 1, columns + 1, columns + 1, *[rows + columns + 1] * 2)
    code = np.ravel_multi_index(fields, shape)  # what a part shows, as one number
    order = np.lexsort((code, parts.tile))
    parts = parts.at(order)
    _, code = np.unique(code[order], return_inverse=True)
    tile, first, count = np.unique(parts.tile, return_index=True, return_counts=True)
    # Equal in the first n parts, and then in one more; tiles with fewer parts got other numbers.
    look, codes = code[first].copy(), int(code.max(initial=0)) + 1
    for n in range(1, min(count.max(initial=0), PARTS)):
        more = np.flatnonzero(count > n)
        _, found = np.unique(look[more] * codes + code[first[more] + n], return_inverse=True)
        look[more] = look.max() + 1 + found
    many = np.flatnonzero(count > PARTS)
    look[many] = look.max(initial=0) + 1 + np.arange(len(many))
    _, example, look = np.unique(look, return_index=True, return_inverse=True)
    count = count[example]
    which = counted(first[example], count)
    example = parts.at(which)._replace(tile=np.repeat(np.arange(len(count)), count))
    return tile, look, example


def _drawn(parts: TileParts, size: tuple[int, int]) -> BitTables:
    """The tables that these parts show, in the order of `tile`."""
    tables = int(parts.tile.max(initial=-1)) + 1
    bits = np.zeros((tables, size[0], size[1] // WORD), dtype=np.int32)
    visible = np.zeros(tables, dtype=np.int64)
    for low in range(0, tables, TABLES_AT_ONCE):
        high = min(low + TABLES_AT_ONCE, tables)
        some = slice(*np.searchsorted(parts.tile, (low, high)))
        _draw(parts.at(some), bits[low:high], visible[low:high], low)
    return BitTables(bits, visible)


def _draw(parts: TileParts, bits: np.ndarray, visible: np.ndarray, low: int) -> None:
    """Parts of the tables from `low` on, as intervals of every row."""
    (_, rows, words), high = bits.shape, parts.bottom - parts.top
    of, row = np.repeat(np.arange(len(high)), high), counted(parts.top, high)
    begin = np.maximum(parts.begin[of], row + parts.low[of])
    end = np.minimum(parts.end[of], row + parts.high[of] + 1)
    length = np.maximum(end - begin, 0)
    table = parts.tile[of] - low
    visible += np.bincount(table, length, len(bits)).astype(np.int64)
    at = table * rows + row
    for word in range(words):
        # No two parts share a bit, so a sum, exact in float64, is what a bitwise or would be.
        first, stop = (np.clip(x - word * WORD, 0, WORD) for x in (begin, begin + length))
        value = (np.int64(1) << stop) - (np.int64(1) << first)
        total = np.bincount(at, value, len(bits) * rows).astype(np.uint32)
        bits[:, :, word] = total.view(np.int32).reshape(-1, rows)


def _looked_up(mask: Mask, pairs: Pairs, numbers: TileNumbers, tiles: np.ndarray) -> BitTables:
    """The tables of these tiles, by the mask's answer for all their positions."""
    rows, columns = numbers.size
    bits = np.zeros((len(tiles), rows, columns // WORD), dtype=np.int32)
    visible = np.zeros(len(tiles), dtype=np.int64)
    positions: dict[int, list[np.ndarray]] = {}
    for n, (pair, i, j) in enumerate(zip(*(x.tolist() for x in numbers.place(tiles)), strict=True)):
        if pair not in positions:
            positions[pair] = [
                np.concatenate([s.positions() for s in side]) for side in pairs[pair]
            ]
        q, k = positions[pair]
        q, k = q[i * rows : (i + 1) * rows], k[j * columns : (j + 1) * columns]
        table = np.zeros((rows, columns), dtype=bool)
        table[: len(q), : len(k)] = mask.visible(q[:, None], k[None, :])
        bits[n] = np.packbits(table, axis=1, bitorder="little").view(np.int32)
        visible[n] = table.sum()
    return BitTables(bits, visible)


class Worklist(NamedTuple):
    """Programs and their tiles. int32 throughout.

    programs [n, 3]: a block, and where its tiles begin and end in `others`; most tiles first, so
    that what is dealt out last is short. others [tiles]: the block on the other side. tables
    [tiles]: where `TileGrid.bits` has what is visible; nothing for wholly visible tiles.
    """

    programs: np.ndarray
    others: np.ndarray
    tables: np.ndarray


@dataclass(frozen=True)
class TileGrid:
    """Tiles that see something, by rows and then columns: (row block, column block), and of partly
    visible ones a table.

    bits: int32 [tables, rows, columns / 32]; column c of a row is bit c % 32 of entry c // 32.
    Columns behind the shard's end are invisible; rows behind it may be anything.
    """

    full: np.ndarray  # [tiles, 2]
    partial: np.ndarray  # [tiles, 3]
    bits: np.ndarray

    def __bool__(self) -> bool:
        return bool(len(self.full) or len(self.partial))

    @cached_property
    def by_rows(self) -> tuple[Worklist, Worklist]:
        """Wholly and partly visible tiles of each block of rows."""
        return _worklist(self.full, 0), _worklist(self.partial, 0)

    @cached_property
    def by_columns(self) -> tuple[Worklist, Worklist]:
        """Wholly and partly visible tiles of each block of columns."""
        return _worklist(self.full, 1), _worklist(self.partial, 1)


def tile_grid(
    mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span], rows: int, columns: int
) -> TileGrid:
    """The tiles of `rows` x `columns` (a multiple of 32) of a pair of shards."""
    (grid,) = tile_grids(mask, [(q_spans, k_spans)], rows, columns)
    return grid


def tile_grids(mask: Mask, pairs: Pairs, rows: int, columns: int) -> list[TileGrid]:
    """`tile_grid` of many pairs of shards in one go."""
    if not pairs:
        return []
    numbers = TileNumbers(pairs, rows, columns)
    found = candidates(mask, pairs, numbers)
    if found.many and len(pairs) > 1:
        half = len(pairs) // 2
        both = (tile_grids(mask, some, rows, columns) for some in (pairs[:half], pairs[half:]))
        return [grid for grids in both for grid in grids]
    runs, parts, asked = tile_parts(mask, found, numbers)
    tile, table, tables = tables_of(mask, pairs, numbers, parts, asked)
    pair, row, column = numbers.place(tile)
    visible = tables.visible[table]
    whole = visible == numbers.high(pair, row) * columns
    full = _full(numbers, runs, tile[whole])
    (some,) = np.nonzero(~whole & (visible > 0))
    pair = pair[some]
    number, bits = _numbered(pair, table[some], tables.bits, len(pairs))
    partial = np.stack([row[some], column[some], number], axis=1).astype(np.int32)
    partial = np.split(partial, np.searchsorted(pair, np.arange(1, len(pairs))))
    return [TileGrid(*each) for each in zip(full, partial, bits, strict=True)]


def _full(numbers: TileNumbers, runs: TileRuns, tiles: np.ndarray) -> list[np.ndarray]:
    """The wholly visible tiles of each pair: those in runs, and others."""
    first = np.concatenate([runs.first, tiles])
    count = np.concatenate([runs.wide, np.ones_like(tiles)])
    order = np.argsort(first, kind="stable")
    first, count = first[order], count[order]
    pair, row, column = numbers.place(first)
    found = np.empty((int(count.sum()), 2), dtype=np.int32)
    found[:, 0], found[:, 1] = np.repeat(row, count), counted(column, count)
    before = np.concatenate([[0], np.cumsum(count)])
    ends = before[np.searchsorted(pair, np.arange(1, len(numbers.base) - 1))]
    return np.split(found, ends)


def _numbered(
    pair: np.ndarray, table: np.ndarray, bits: np.ndarray, pairs: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Numbers of the tables within each pair, in the order in which its tiles have them, and the
    bits of each pair. Number 0 shows everything.
    """
    index: dict[bytes, int] = {}
    equal = np.array([index.setdefault(x.tobytes(), len(index)) for x in bits], dtype=np.int64)
    example = np.zeros(len(index), dtype=np.int64)
    example[equal[::-1]] = np.arange(len(bits))[::-1]
    key = pair * len(index) + equal[table]
    keys, first, which = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first)  # pairs one after another, as the tiles are
    owner, bit = np.divmod(keys[order], max(len(index), 1))
    ends = np.searchsorted(owner, np.arange(pairs + 1))
    number = np.empty_like(order)
    number[order] = np.arange(len(order)) - ends[owner] + 1
    everything = np.full((1, *bits.shape[1:]), -1, dtype=np.int32)
    found = bits[example[bit]]
    each = [np.concatenate([everything, found[a:b]]) for a, b in pairwise(ends.tolist())]
    return number[which], each


def _worklist(tiles: np.ndarray, side: int) -> Worklist:
    """Tiles grouped by their block on one side (0: rows, 1: columns)."""
    if side:  # they are in the order of rows: of columns, one stable sort of small numbers
        key = tiles[:, 1].astype(np.uint16 if tiles[:, 1].max(initial=0) < 1 << 16 else np.int32)
        tiles = tiles[np.argsort(key, kind="stable")]
    count = np.bincount(tiles[:, side])
    blocks = np.flatnonzero(count)
    count = count[blocks]
    stop = np.cumsum(count)
    order = np.argsort(-count, kind="stable")
    programs = np.stack([blocks, stop - count, stop], axis=1)[order]
    return Worklist(
        programs.astype(np.int32),
        np.ascontiguousarray(tiles[:, 1 - side]),
        np.ascontiguousarray(tiles[:, 2] if tiles.shape[1] > 2 else tiles[:0, 0]),
    )
