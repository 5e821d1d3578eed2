# SPDX-License-Identifier: Apache-2.0
"""Grids of equal tiles: the visible tiles of a pair of shards, for kernels with one tile size.

The grid lists the visible tiles of each block of rows, and of each block of columns. Fully visible
and partly visible tiles are separate lists. A partly visible tile has a bit table of visible pairs.
Tiles with equal visible pairs share a table: a causal mask needs one table for its diagonal, and a
window needs two. So kernels need no code for bands, strides and documents. This module does not
import torch.

A tile's visible pairs are computed from bands, not position by position. Spans are split into
pieces at the positions where the definition of the mask changes (`Mask.breaks`). For a piece of
queries and a piece of keys, the mask returns a band of visible pairs. Arithmetic on bands gives the
fully visible tiles, and the visible parts of other tiles, for all pairs of a plan at once. Packed
documents have hundreds of pieces, which change with every micro-batch. So only pieces with nearby
positions are compared. If the visibility of two pieces is not a band, the mask is evaluated at all
positions of a tile. Each table is filled row by row from intervals of columns, 32 columns at a
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..layout import Span, Spans
from ..layout.layouts import Pieces, ShardPairs, counted, pieces_of
from ..masks import Mask
from ..masks.base import FAR, FULL, PARTIAL
from ..masks.seen import cut_at, nearby

AT_ONCE = 1 << 20  # maximum pairs of pieces that are compared at once
LEAST, PER_TILE = 1 << 12, 16  # limit of pairs of pieces for small grids: LEAST + PER_TILE * tiles


class TileNumbers:
    """Numbers of all tiles, in the order of pairs of shards, then row blocks, then column blocks.

    Attributes:
        size: Rows and columns of a tile.
        length: int64 [2, pairs], number of rows and of columns of each pair.
        blocks: int64 [2, pairs], number of row blocks and of column blocks of each pair.
        base: int64 [pairs + 1], number of the first tile of each pair.
    """

    def __init__(self, pairs: ShardPairs, rows: int, columns: int):
        self.size = rows, columns
        self.length = np.array([[sum(s.length for s in side) for side in pair] for pair in pairs]).T
        self.blocks = -(-self.length // np.array([[rows], [columns]]))
        self.base = np.concatenate([[0], np.cumsum(self.blocks[0] * self.blocks[1])])

    def number(self, pair: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        """Return the numbers of tiles, given pair, row block and column block of each tile."""
        return self.base[pair] + row * self.blocks[1][pair] + column

    def place(self, tile: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return pair, row block and column block of tiles, given their numbers."""
        pair = np.searchsorted(self.base, tile, side="right") - 1
        return (pair, *np.divmod(tile - self.base[pair], self.blocks[1][pair]))

    def high(self, pair: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Return the number of rows in row block `row` of `pair`; the last block may have fewer."""
        return np.minimum(self.size[0], self.length[0][pair] - row * self.size[0])


class TileRuns(NamedTuple):
    """Consecutive fully visible tiles in a block of rows, one array entry per run of such tiles.

    Attributes:
        first: Index of the first tile of each run.
        wide: Number of tiles in each run.
    """

    first: np.ndarray
    wide: np.ndarray


class TileParts(NamedTuple):
    """Visible parts of tiles, one array entry per part. Parts of a tile do not overlap.

    `tile` is the index of the tile. Rows a and columns b count from the tile's first row and
    column. Row a sees column b if top <= a < bottom, begin <= b < end and low <= b - a <= high.
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
    """Bands of visible pairs in pairs of shards, one array entry per band.

    A band covers `rows` rows from row `row` on, and `columns` columns from column `column` on.
    Within the band, row m sees columns m - left to m + right; both count from 0.
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


class TileCandidates(NamedTuple):
    """Pieces of queries and keys that may see each other.

    Attributes:
        q: Pieces of queries; `owner` is the index of the pair of shards.
        k: Pieces of keys; `owner` is the index of the pair of shards.
        begin: Index of the first piece of queries that may see the piece of keys, one entry per
            piece of keys.
        met: Number of consecutive pieces of queries, from `begin` on, that may see the piece of
            keys; one entry per piece of keys.
        many: True if there are too many combinations of a piece of queries and a piece of keys to
            compare at once.
    """

    q: Pieces
    k: Pieces
    begin: np.ndarray
    met: np.ndarray
    many: bool


def candidates(mask: Mask, pairs: ShardPairs, numbers: TileNumbers) -> TileCandidates:
    """Return the pieces of queries and keys that may see each other, for all pairs of shards.

    If `many` of the result is true, the caller splits `pairs` and tries again. A single pair cannot
    be split, so neighbouring pieces are merged instead. The mask is then evaluated position by
    position in more of its tiles.
    """
    shards = [pieces_of([pair[side] for pair in pairs]) for side in (0, 1)]
    breaks = mask.breaks, mask.key_breaks
    while True:
        q, k = (cut_at(*pair) for pair in zip(shards, breaks, strict=True))
        q = q.at(np.lexsort((q.span.start, q.owner)))
        begin, count = nearby(mask.viewers(k.span), q, k)
        too_many = count.sum() > min(AT_ONCE, LEAST + PER_TILE * numbers.base[-1])
        if not too_many or not any(map(len, breaks)) or len(pairs) > 1:
            return TileCandidates(q, k, begin, count, bool(too_many))
        # Merge neighbouring pieces until few enough remain.
        breaks = breaks[0][1::2], breaks[1][1::2]


def tile_parts(
    mask: Mask, near_pieces: TileCandidates, numbers: TileNumbers
) -> tuple[TileRuns, TileParts, np.ndarray]:
    """Return the visible tiles of all pairs of shards.

    Args:
        mask: The mask.
        near_pieces: Result of `candidates`.
        numbers: Numbering of the tiles.

    Returns:
        A tuple: the runs of fully visible tiles, the visible parts of other tiles, and the numbers
        of the tiles for which the mask must be evaluated position by position.
    """
    i, j = (
        counted(near_pieces.begin, near_pieces.met),
        np.repeat(np.arange(len(near_pieces.begin)), near_pieces.met),
    )
    bands, q, k = _bands_of(mask, near_pieces.q.at(i), near_pieces.k.at(j))
    evaluated = np.zeros(0, dtype=np.int64)
    if len(q.owner):
        cell_bands, q, k = _bands_of(mask, *_cells(q, k, numbers.size))
        bands = _Bands(*map(np.concatenate, zip(bands, cell_bands, strict=True)))
        evaluated = np.unique(
            numbers.number(q.owner, q.first // numbers.size[0], k.first // numbers.size[1])
        )
    return (*_spread(bands, numbers), evaluated)


def _bands_of(mask: Mask, q: Pieces, k: Pieces) -> tuple[_Bands, Pieces, Pieces]:
    """Return the bands of visible pairs of (q[i], k[i]), and the q[i] and k[i] without a band."""
    covers = mask.covers(q.span, k.span)
    left = np.where(covers == FULL, FAR, -FAR)
    right, partly = left.copy(), np.flatnonzero(covers == PARTIAL)
    bands = mask.bands(q.span.at(partly), k.span.at(partly))
    left[partly] = np.where(bands.known, bands.left, -FAR)
    right[partly] = np.where(bands.known, bands.right, -FAR)
    first, stop = np.maximum(-right, 0), np.minimum(q.span.length, k.span.length + left)
    begin, end = np.maximum(-left, 0), np.minimum(k.span.length, q.span.length + right)
    nonempty = np.flatnonzero((left + right >= 0) & (first < stop) & (begin < end))
    bands_of_pieces = _Bands(q.owner, q.first, q.span.length, k.first, k.span.length, left, right)
    unknown = partly[~bands.known]
    return bands_of_pieces.at(nonempty), q.at(unknown), k.at(unknown)


def _cells(q: Pieces, k: Pieces, size: tuple[int, int]) -> tuple[Pieces, Pieces]:
    """Split pairs of pieces at tile boundaries; return all combinations of the parts of each pair.

    A piece is a run of consecutive entries of a span. Pair i is (q[i], k[i]).
    """
    parts = [_blocks(side, rows) for side, rows in zip((q, k), size, strict=True)]
    (rows, high, top), (columns, wide, left) = parts
    of = np.repeat(np.arange(len(high)), high * wide)
    n = counted(np.zeros_like(high), high * wide)
    return rows.at(top[of] + n // wide[of]), columns.at(left[of] + n % wide[of])


def _blocks(pieces: Pieces, size: int) -> tuple[Pieces, np.ndarray, np.ndarray]:
    """Split pieces at multiples of `size` rows of their shard.

    Returns a tuple: the parts, the number of parts of each piece, and the index of the first part
    of each piece.
    """
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
    """Convert bands to runs of fully visible tiles and visible parts of other tiles."""
    (rows, columns), x = numbers.size, bands
    first = x.row + np.maximum(-x.right, 0)  # first row that sees something
    stop = x.row + np.minimum(x.rows, x.columns + x.left)
    low, count = first // rows, (stop - 1) // rows - first // rows + 1
    of, block = np.repeat(np.arange(len(low)), count), counted(low, count)
    x, edge = x.at(of), block * rows
    top, bottom = np.maximum(first[of], edge), np.minimum(stop[of], edge + rows)
    m, last = top - x.row, bottom - 1 - x.row
    begin = x.column + np.maximum(m - x.left, 0)  # first column that a row sees
    end = x.column + np.minimum(last + x.right + 1, x.columns)
    tile, past = begin // columns, (end - 1) // columns + 1
    # Every row sees the columns from the last row's first visible column to the first row's last
    # visible column.
    inner = -(-(x.column + np.maximum(last - x.left, 0)) // columns)
    outer = (x.column + np.minimum(m + x.right + 1, x.columns)) // columns
    fully_visible = (inner < outer) & (bottom - top == numbers.high(x.pair, block))
    inner, outer = np.where(fully_visible, inner, past), np.where(fully_visible, outer, past)
    line = numbers.number(x.pair, block, np.zeros_like(block))
    runs = TileRuns((line + inner)[fully_visible], (outer - inner)[fully_visible])
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
PARTS = 64  # tiles with more parts are not compared with each other: making tables is faster
DRAWN = 8  # intervals per row; with more, evaluating the mask at all positions is faster
TABLES_AT_ONCE = 1024  # tables that are filled together


class BitTables(NamedTuple):
    """Tables of the visible pairs of n partly visible tiles.

    Attributes:
        bits: int32 [n, rows, columns / 32]; column c of a row is bit c % 32 of entry c // 32.
        visible: int64 [n], number of visible pairs.
    """

    bits: np.ndarray
    visible: np.ndarray


def tables_of(
    mask: Mask, pairs: ShardPairs, numbers: TileNumbers, parts: TileParts, evaluated: np.ndarray
) -> tuple[np.ndarray, np.ndarray, BitTables]:
    """Return the tables of partly visible tiles.

    Args:
        mask: The mask.
        pairs: Query spans and key spans of each pair of shards.
        numbers: Numbering of the tiles.
        parts: Visible parts of the partly visible tiles.
        evaluated: Numbers of further tiles, for which the mask is evaluated position by position.

    Returns:
        A tuple: the sorted numbers of the tiles, the index of each tile's table, and the tables.
    """
    tiles, tile_index = np.unique(parts.tile, return_inverse=True)
    drawn = np.bincount(tile_index, parts.bottom - parts.top)
    detailed = tiles[drawn > DRAWN * numbers.size[0]]
    evaluated = np.union1d(evaluated, detailed)
    if len(evaluated):
        parts = parts.at(np.flatnonzero(~np.isin(parts.tile, evaluated)))
    tile, table, example = _equal_tiles(parts, numbers.size)
    drawn, looked = _drawn(example, numbers.size), _looked_up(mask, pairs, numbers, evaluated)
    tables = BitTables(*map(np.concatenate, zip(drawn, looked, strict=True)))
    tile = np.concatenate([tile, evaluated])
    table = np.concatenate([table, len(drawn.bits) + np.arange(len(evaluated))])
    order = np.argsort(tile, kind="stable")
    return tile[order], table[order], tables


def _equal_tiles(
    parts: TileParts, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, TileParts]:
    """Group tiles with equal visible parts, because they can share a table.

    Returns a tuple: the numbers of the tiles, the group of each tile, and the parts of one example
    tile per group. The field `tile` of these parts is the group.
    """
    rows, columns = size
    fields = (*parts[1:5], parts.low + rows, parts.high + rows)
    shape = (rows + 1, rows + 1, columns + 1, columns + 1, *[rows + columns + 1] * 2)
    code = np.ravel_multi_index(fields, shape)  # a part as one number
    order = np.lexsort((code, parts.tile))
    parts = parts.at(order)
    _, code = np.unique(code[order], return_inverse=True)
    tile, first, count = np.unique(parts.tile, return_index=True, return_counts=True)
    # Compare the first n parts, then one more; tiles with fewer parts already have other numbers.
    look, codes = code[first].copy(), int(code.max(initial=0)) + 1
    for n in range(1, min(count.max(initial=0), PARTS)):
        longer = np.flatnonzero(count > n)
        _, group = np.unique(look[longer] * codes + code[first[longer] + n], return_inverse=True)
        look[longer] = look.max() + 1 + group
    detailed = np.flatnonzero(count > PARTS)
    look[detailed] = look.max(initial=0) + 1 + np.arange(len(detailed))
    _, example, look = np.unique(look, return_index=True, return_inverse=True)
    count = count[example]
    example_parts = counted(first[example], count)
    example = parts.at(example_parts)._replace(tile=np.repeat(np.arange(len(count)), count))
    return tile, look, example


def _drawn(parts: TileParts, size: tuple[int, int]) -> BitTables:
    """Return bit tables of visible pairs, made from the visible parts of tiles.

    Table i contains the parts whose field `tile` is i.
    """
    tables = int(parts.tile.max(initial=-1)) + 1
    bits = np.zeros((tables, size[0], size[1] // WORD), dtype=np.int32)
    visible = np.zeros(tables, dtype=np.int64)
    for low in range(0, tables, TABLES_AT_ONCE):
        high = min(low + TABLES_AT_ONCE, tables)
        selected = slice(*np.searchsorted(parts.tile, (low, high)))
        _draw(parts.at(selected), bits[low:high], visible[low:high], low)
    return BitTables(bits, visible)


def _draw(parts: TileParts, bits: np.ndarray, visible: np.ndarray, low: int) -> None:
    """Fill tables in place from parts, one interval of columns per part and row.

    Args:
        parts: Visible parts, sorted by table; `parts.tile - low` is the index of the table.
        bits: Array of zeros with the shape and dtype of `BitTables.bits`.
        visible: Array of zeros with the shape and dtype of `BitTables.visible`.
        low: Number of the first table.
    """
    (_, rows, words), high = bits.shape, parts.bottom - parts.top
    of, row = np.repeat(np.arange(len(high)), high), counted(parts.top, high)
    begin = np.maximum(parts.begin[of], row + parts.low[of])
    end = np.minimum(parts.end[of], row + parts.high[of] + 1)
    length = np.maximum(end - begin, 0)
    table = parts.tile[of] - low
    visible += np.bincount(table, length, len(bits)).astype(np.int64)
    at = table * rows + row
    for word in range(words):
        # No two parts share a bit, so the sum, exact in float64, equals a bitwise or.
        first, stop = (np.clip(x - word * WORD, 0, WORD) for x in (begin, begin + length))
        value = (np.int64(1) << stop) - (np.int64(1) << first)
        total = np.bincount(at, value, len(bits) * rows).astype(np.uint32)
        bits[:, :, word] = total.view(np.int32).reshape(-1, rows)


def _looked_up(mask: Mask, pairs: ShardPairs, numbers: TileNumbers, tiles: np.ndarray) -> BitTables:
    """Return the tables of the tiles `tiles`, by evaluating the mask at all their positions."""
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
    """The programs of one kernel launch and the tiles that each program computes; int32 arrays.

    Attributes:
        programs: [n, 3], (block, begin, end) of each program. It computes the tiles of row block
            (or column block) `block` with the column blocks (or row blocks) `others[begin:end]`.
            Programs with many tiles are first, so that the last programs are short.
        others: [tiles], column block of each tile if programs compute row blocks. If programs
            compute column blocks, row block of each tile.
        tables: [tiles], index of each tile's table in `TileGrid.bits`; empty for fully visible
            tiles.
    """

    programs: np.ndarray
    others: np.ndarray
    tables: np.ndarray


@dataclass(frozen=True)
class TileGrid:
    """Visible tiles of a pair of shards, sorted by row block and column block.

    Attributes:
        full: [tiles, 2], row block and column block of each fully visible tile.
        partial: [tiles, 3], row block, column block and index in `bits` of each partly visible
            tile.
        bits: int32 [tables, rows, columns / 32]; column c of a row is bit c % 32 of entry c // 32.
            In tiles at the end of a shard, bits of columns beyond the end are 0, and bits of rows
            beyond the end are undefined.
    """

    full: np.ndarray
    partial: np.ndarray
    bits: np.ndarray

    def __bool__(self) -> bool:
        return bool(len(self.full) or len(self.partial))

    @cached_property
    def by_rows(self) -> tuple[Worklist, Worklist]:
        """Return the worklists of fully visible and of partly visible tiles, by row block."""
        return _worklist(self.full, 0), _worklist(self.partial, 0)

    @cached_property
    def by_columns(self) -> tuple[Worklist, Worklist]:
        """Return the worklists of fully visible and of partly visible tiles, by column block."""
        return _worklist(self.full, 1), _worklist(self.partial, 1)


def tile_grid(
    mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span], rows: int, columns: int
) -> TileGrid:
    """Return the visible tiles of a pair of shards.

    A tile has `rows` rows and `columns` columns; `columns` must be a multiple of 32.
    """
    (grid,) = tile_grids(mask, [(q_spans, k_spans)], rows, columns)
    return grid


def tile_grids(mask: Mask, pairs: ShardPairs, rows: int, columns: int) -> list[TileGrid]:
    """Return the `tile_grid` of each pair of shards; faster than one call per pair."""
    if not pairs:
        return []
    numbers = TileNumbers(pairs, rows, columns)
    near_pieces = candidates(mask, pairs, numbers)
    if near_pieces.many and len(pairs) > 1:
        half = len(pairs) // 2
        halves = (
            tile_grids(mask, pair_half, rows, columns) for pair_half in (pairs[:half], pairs[half:])
        )
        return [grid for grids in halves for grid in grids]
    runs, parts, evaluated = tile_parts(mask, near_pieces, numbers)
    tile, table, tables = tables_of(mask, pairs, numbers, parts, evaluated)
    pair, row, column = numbers.place(tile)
    visible = tables.visible[table]
    fully_visible = visible == numbers.high(pair, row) * columns
    full = _full(numbers, runs, tile[fully_visible])
    (pair_half,) = np.nonzero(~fully_visible & (visible > 0))
    pair = pair[pair_half]
    number, bits = _numbered(pair, table[pair_half], tables.bits, len(pairs))
    partial = np.stack([row[pair_half], column[pair_half], number], axis=1).astype(np.int32)
    partial = np.split(partial, np.searchsorted(pair, np.arange(1, len(pairs))))
    return [TileGrid(*arrays) for arrays in zip(full, partial, bits, strict=True)]


def _full(numbers: TileNumbers, runs: TileRuns, tiles: np.ndarray) -> list[np.ndarray]:
    """Return (row block, column block) of the fully visible tiles: one array per pair of shards."""
    first = np.concatenate([runs.first, tiles])
    count = np.concatenate([runs.wide, np.ones_like(tiles)])
    order = np.argsort(first, kind="stable")
    first, count = first[order], count[order]
    pair, row, column = numbers.place(first)
    blocks = np.empty((int(count.sum()), 2), dtype=np.int32)
    blocks[:, 0], blocks[:, 1] = np.repeat(row, count), counted(column, count)
    before = np.concatenate([[0], np.cumsum(count)])
    ends = before[np.searchsorted(pair, np.arange(1, len(numbers.base) - 1))]
    return np.split(blocks, ends)


def _numbered(
    pair: np.ndarray, table: np.ndarray, bits: np.ndarray, pairs: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Number the tables of partly visible tiles within each pair of shards.

    Args:
        pair: Pair of shards of each tile, sorted.
        table: Index in `bits` of each tile.
        bits: All tables.
        pairs: Number of pairs.

    Returns:
        Table number of each tile, and the tables of each pair. Table 0 of each pair has all bits
        set.
    """
    index: dict[bytes, int] = {}
    equal = np.array([index.setdefault(x.tobytes(), len(index)) for x in bits], dtype=np.int64)
    example = np.zeros(len(index), dtype=np.int64)
    example[equal[::-1]] = np.arange(len(bits))[::-1]
    key = pair * len(index) + equal[table]
    keys, first, key_index = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first)  # by pair, in the order of tiles
    owner, bit = np.divmod(keys[order], max(len(index), 1))
    ends = np.searchsorted(owner, np.arange(pairs + 1))
    number = np.empty_like(order)
    number[order] = np.arange(len(order)) - ends[owner] + 1
    everything = np.full((1, *bits.shape[1:]), -1, dtype=np.int32)
    tables = bits[example[bit]]
    tables_by_pair = [np.concatenate([everything, tables[a:b]]) for a, b in pairwise(ends.tolist())]
    return number[key_index], tables_by_pair


def _worklist(tiles: np.ndarray, side: int) -> Worklist:
    """Return the worklist with one program per row block (`side` 0) or column block (1)."""
    if side:  # tiles are sorted by rows, so a stable sort by column block suffices
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
