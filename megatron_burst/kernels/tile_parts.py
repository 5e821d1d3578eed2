"""What is visible of the tiles of many pairs of shards, told by bands and not position by position.

Spans are cut where the mask's description changes. Of two pieces the mask tells a band, and of a
band arithmetic tells which tiles are wholly visible and what the others show, for all pairs of a
plan in one go: packed documents have hundreds of pieces, other ones in every micro-batch. Only
what is no band is looked at tile by tile. Decides which pieces are compared: by their positions,
never all with all. It needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..layout import Span, Spans
from ..masks import Mask
from ..masks.base import FAR, FULL, PARTIAL
from ..masks.seen import Pieces, counted, cut_at, pieces_of

AT_ONCE = 1 << 20  # pairs of pieces that are compared, at most; and
FEW, PER_TILE = 1 << 12, 16  # so many at least, and for every tile

Pairs = Sequence[tuple[Sequence[Span], Sequence[Span]]]


class Frame:
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
        """Of the tile at these blocks."""
        return self.base[pair] + row * self.blocks[1][pair] + column

    def place(self, tile: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pair, block of rows and block of columns of tiles."""
        pair = np.searchsorted(self.base, tile, side="right") - 1
        return (pair, *np.divmod(tile - self.base[pair], self.blocks[1][pair]))

    def high(self, pair: np.ndarray, row: np.ndarray) -> np.ndarray:
        """How many rows a block has: the last one of a shard may have fewer."""
        return np.minimum(self.size[0], self.length[0][pair] - row * self.size[0])


class Runs(NamedTuple):
    """Columns: from tile `first` on `wide` tiles side by side are wholly visible."""

    first: np.ndarray
    wide: np.ndarray


class Parts(NamedTuple):
    """Columns: of a tile, rows top <= a < bottom see the columns begin <= b < end where
    low <= b - a <= high. Parts of a tile show none of its pairs twice."""

    tile: np.ndarray
    top: np.ndarray
    bottom: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def at(self, index: np.ndarray | slice) -> Parts:
        return Parts(*(column[index] for column in self))


class _Bands(NamedTuple):
    """Columns: of a pair, `rows` rows from `row` on see, of `columns` columns from `column` on,
    those from m - left to m + right for the m-th row."""

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
    queries from `begin` on, `met` of them, may see it. many: too many to compare them."""

    q: Pieces
    k: Pieces
    begin: np.ndarray
    met: np.ndarray
    many: bool


def candidates(mask: Mask, pairs: Pairs, frame: Frame) -> Candidates:
    """Which pieces of the shards of each pair to compare; of several pairs they may be too
    `many`."""
    shards = [pieces_of([pair[side] for pair in pairs]) for side in (0, 1)]
    breaks = mask.breaks
    while True:
        q, k = (cut_at(spans, breaks) for spans in shards)
        q = q.at(np.lexsort((q.span.start, q.owner)))
        begin, count = _nearby(mask, q, k)
        many = count.sum() > min(AT_ONCE, FEW + PER_TILE * frame.base[-1])
        if not many or not len(breaks) or len(pairs) > 1:
            return Candidates(q, k, begin, count, bool(many))
        # Where every shard has a piece of every block, what is larger than these is compared.
        breaks = breaks[1::2]


def tile_parts(mask: Mask, found: Candidates, frame: Frame) -> tuple[Runs, Parts, np.ndarray]:
    """The tiles that see something: those in runs, wholly; those of which parts are told; and, by
    their numbers, those which the mask has to be asked about position by position."""
    i, j = counted(found.begin, found.met), np.repeat(np.arange(len(found.begin)), found.met)
    bands, q, k = _told(mask, found.q.at(i), found.k.at(j))
    asked = np.zeros(0, dtype=np.int64)
    if len(q.owner):
        more, q, k = _told(mask, *_cells(q, k, frame.size))
        bands = _Bands(*map(np.concatenate, zip(bands, more, strict=True)))
        asked = np.unique(frame.number(q.owner, q.first // frame.size[0], k.first // frame.size[1]))
    return (*_spread(bands, frame), asked)


def _nearby(mask: Mask, q: Pieces, k: Pieces) -> tuple[np.ndarray, np.ndarray]:
    """Of each piece of keys the pieces of queries that may see it: the first one, and how many.

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
    told = _Bands(q.owner, q.first, q.span.length, k.first, k.span.length, left, right)
    rest = partly[~bands.known]
    return told.at(some), q.at(rest), k.at(rest)


def _cells(q: Pieces, k: Pieces, size: tuple[int, int]) -> tuple[Pieces, Pieces]:
    """Pieces, two by two, cut where tiles end: every part of the one with every part of the
    other."""
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


def _spread(bands: _Bands, frame: Frame) -> tuple[Runs, Parts]:
    """The tiles of bands: runs of wholly visible ones, and what bands show of the others."""
    (rows, columns), x = frame.size, bands
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
    whole = (inner < outer) & (bottom - top == frame.high(x.pair, block))
    inner, outer = np.where(whole, inner, past), np.where(whole, outer, past)
    line = frame.number(x.pair, block, np.zeros_like(block))
    runs = Runs((line + inner)[whole], (outer - inner)[whole])
    count = np.concatenate([inner - tile, past - outer])
    of, column = (
        np.repeat(np.tile(np.arange(len(tile)), 2), count),
        counted(np.concatenate([tile, outer]), count),
    )
    left = column * columns
    ahead = (edge - x.row)[of] - (left - x.column[of])
    parts = Parts(
        line[of] + column, (top - edge)[of], (bottom - edge)[of],
        np.maximum(begin[of] - left, 0), np.minimum(end[of] - left, columns),
        np.clip(ahead - x.left[of], -rows, columns), np.clip(ahead + x.right[of], -rows, columns),
    )  # fmt: skip
    return runs, parts
