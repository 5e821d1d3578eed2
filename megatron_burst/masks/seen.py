# SPDX-License-Identifier: Apache-2.0
"""Computation of the rows of every shard that other ranks use, which a schedule must send.

Spans are cut into pieces at the breaks of the mask (`Mask.breaks`, `Mask.key_breaks`). For bands,
documents and prefixes, the queries that see a key piece are an interval of positions, and each of
these queries sees a band of keys (`Mask.viewers`). Most query pieces in the interval see the whole
key piece. Query pieces are sorted by position, so these pieces are one range of indices. Only query
pieces at the edges of the interval or of the band are compared with the key piece one by one.

For each pair of pieces, the used rows of a piece are one interval, which is exact for bands. If a
pair is partly visible and not a band, the mask returns the used rows (`Mask.used`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..layout import Spans
from ..layout.layouts import Pieces, Shards, counted, pieces_of
from .base import FAR, Cover, Mask, Viewers

_Rows = tuple[np.ndarray, np.ndarray]  # first rows, stops
PAIRS = 1 << 20  # largest number of pairs of pieces that are compared one by one
FEW = 2  # pairs per piece of keys up to which comparing them is faster than widening ranges
SHORT = 64  # most rows of a group that a loop combines faster than `reduceat`
ALL_PAIRS = 1 << 12  # most pairs for which queries are not grouped if there is no `viewers`


class RankRows(NamedTuple):
    """Rows of pieces that ranks use, as arrays with one entry per (piece, rank).

    Attributes:
        piece: Index of the piece (part of a span) that contains the rows.
        rank: Rank that uses the rows.
        first: First row in the owner's shard.
        stop: Row after the last row.
    """

    piece: np.ndarray
    rank: np.ndarray
    first: np.ndarray
    stop: np.ndarray


class VisibleRows(NamedTuple):
    """The rows of all shards, divided into pieces (parts of spans), and the ranks that use them.

    Attributes:
        owner: Rank that owns each piece; pieces are sorted by owner and row.
        first: First row of each piece in the owner's shard.
        stop: Row after the last row of each piece.
        full: Bit set of the ranks that use rows of all cells of each piece, as from `packed`.
        partial: Ranks that use some rows of a piece, and these rows.
        size: Number of ranks.
        grain: Number of rows of a cell. The first cell of a shard has its first `grain` rows.
    """

    owner: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    full: np.ndarray
    partial: RankRows
    size: int
    grain: int = 1

    def ranks(self, owners: int) -> np.ndarray:
        """Return a bool [owners, G], true for ranks that use some row of the owner's shard."""
        users = np.zeros((owners, self.size), dtype=bool)
        present, first, count = np.unique(self.owner, return_index=True, return_counts=True)
        users[present] = unpacked(united(self.full, first, count), self.size)
        users[self.owner[self.partial.piece], self.partial.rank] = True
        return users


class _Ranges(NamedTuple):
    """Query pieces that may see each key piece, as ranges of indices of query pieces.

    A piece is a part of a span of positions. Query pieces are sorted by position. Query pieces
    `begin` to `end` (exclusive) may see some keys of the key piece. Query pieces `full_begin` to
    `full_end` (exclusive) see all keys of the key piece.
    """

    begin: np.ndarray
    full_begin: np.ndarray
    full_end: np.ndarray
    end: np.ndarray

    def partial_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs of a query piece and a key piece that may be partly visible.

        Returns:
            Indices of query pieces, and indices of key pieces, as parallel arrays.
        """
        first = np.concatenate([self.begin, self.full_end])
        count = np.concatenate([self.full_begin, self.end]) - first
        keys = np.repeat(np.tile(np.arange(len(self.begin)), 2), count)
        return counted(first, count), keys


def rows_seen(
    mask: Mask, q_shards: Shards, k_shards: Shards, cells: int | None = None
) -> tuple[VisibleRows, VisibleRows]:
    """Return the query rows that see keys of each rank, and the key rows that each rank sees.

    The first result has the query rows with the ranks whose keys they may see. The second result
    has the key rows with the ranks whose queries may see them. A row that is not listed for a rank
    has no visible pair with this rank; a listed row may have none either.

    Args:
        mask: The mask.
        q_shards: Query spans of each rank, possibly none.
        k_shards: Key spans of each rank, possibly none.
        cells: Number of cells of the longest shard, if the caller rounds rows to whole cells. Far
            fewer pieces are then compared one by one. Default: a cell is a row.
    """
    shards = pieces_of(q_shards), None if k_shards is q_shards else pieces_of(k_shards)
    breaks, key_breaks = mask.breaks, mask.key_breaks
    while True:
        # A binary search for ascending positions is much faster, so keys are sorted too.
        q_pieces = k_pieces = cut_at(shards[0], breaks)
        q_order = k_order = np.argsort(q_pieces.span.start, kind="stable")
        queries = keys = q_pieces.at(q_order)
        if shards[1] is not None:
            k_pieces = cut_at(shards[1], key_breaks)
            k_order = np.argsort(k_pieces.span.start, kind="stable")
            keys = k_pieces.at(k_order)
        viewers = viewers_of(mask, queries.span, keys.span)
        ranges = _ranges(queries.span, keys.span, viewers)
        compared = sum((r[1] - r[0]).sum() for r in (ranges[:2], ranges[2:]))
        if not (len(breaks) or len(key_breaks)) or compared <= PAIRS:
            break
        # If every rank has a piece of every block, use larger blocks.
        breaks, key_breaks = breaks[1::2], key_breaks[1::2]
    viewers = viewers._replace(exact=viewers.exact & _inside(queries.span, viewers, ranges))
    grains = [1, 1]
    if cells is not None:
        rows = (np.bincount(x.owner, x.span.length) for x in (queries, keys))
        grains = [max(1, int(of_shards.max(initial=1)) // cells) for of_shards in rows]
    if compared > FEW * len(keys.owner) and not mask.has_used:
        ranges = _widened(ranges, queries, keys, viewers, grains)
    i, j, rows, columns = _bands(mask, queries, keys, viewers, *ranges.partial_pairs())
    full = ranges.full_begin, ranges.full_end
    used = _within(keys.owner, *full, len(k_shards), len(queries.owner))
    partial = RankRows(q_order[i], keys.owner[j], *rows)
    seen = _visible_rows(q_pieces, q_order, used, partial, len(k_shards), grains[0])
    used = _among(queries.owner, *full, len(q_shards))
    partial = RankRows(k_order[j], queries.owner[i], *columns)
    return seen, _visible_rows(k_pieces, k_order, used, partial, len(q_shards), grains[1])


def _visible_rows(
    pieces: Pieces, order: np.ndarray, full: np.ndarray, partial: RankRows, size: int, grain: int
) -> VisibleRows:
    """Return `VisibleRows` of pieces; the other arguments are its attributes.

    Args:
        pieces: Pieces, sorted by owner and row.
        order: Indices of the pieces, sorted by position.
        full: Bit sets of the pieces, sorted by position.
        partial: Ranks that use some rows.
        size: Number of ranks.
        grain: Number of rows of a cell.
    """
    sets = np.empty_like(full)
    sets[order] = full
    stop = pieces.first + pieces.span.length
    return VisibleRows(pieces.owner, pieces.first, stop, sets, partial, size, grain)


def meeting(
    mask: Mask, q_shards: Shards, k_shards: Shards
) -> tuple[Pieces, Pieces, np.ndarray, np.ndarray]:
    """Return the pairs of a query piece and a key piece that may attend.

    A piece is a part of a span. Spans are cut where the mask changes (`Mask.breaks`). If these cuts
    would make too many pairs, spans are not cut.

    Returns:
        Query pieces; key pieces; parallel arrays i, j: queries of query piece i may see keys of key
        piece j.
    """
    q_spans = k_spans = pieces_of(q_shards)
    if k_shards is not q_shards:
        k_spans = pieces_of(k_shards)
    none = np.empty(0, dtype=np.int64)
    for breaks in ((mask.breaks, mask.key_breaks), (none, none)):
        queries, keys = cut_at(q_spans, breaks[0]), cut_at(k_spans, breaks[1])
        queries = queries.at(np.argsort(queries.span.start, kind="stable"))
        ranges = _ranges(queries.span, keys.span, viewers_of(mask, queries.span, keys.span))
        count = ranges.end - ranges.begin
        if count.sum() <= max(PAIRS, len(q_spans.owner) * len(k_spans.owner)):
            break
    i, j = counted(ranges.begin, count), np.repeat(np.arange(len(count)), count)
    return queries, keys, i, j


def viewers_of(mask: Mask, queries: Spans, keys: Spans) -> Viewers:
    """Return the query positions that may see each key span.

    If a mask does not define `viewers`, `covers` is computed for groups of neighbouring queries.
    Groups that see nothing are excluded at both ends of the range, so their queries need not be
    compared one by one.

    Args:
        mask: The mask.
        queries: Query spans, sorted by their first positions.
        keys: Key spans.
    """
    viewers, count = mask.viewers(keys), len(queries.start)
    if mask.has_viewers or count * len(keys.start) <= ALL_PAIRS:
        return viewers
    firsts = np.arange(0, count, math.isqrt(count))
    start, last = queries.start[firsts], np.maximum.reduceat(queries.last, firsts)
    groups = Spans(*(column[:, None] for column in (start, np.ones_like(start), last + 1 - start)))
    seen = mask.covers(groups, Spans(*(column[None] for column in keys))) != Cover.EMPTY
    return viewers._replace(
        first=np.maximum(viewers.first, np.where(seen, start[:, None], FAR).min(axis=0)),
        last=np.minimum(viewers.last, np.where(seen, last[:, None], -FAR).max(axis=0)),
    )


def _ranges(queries: Spans, keys: Spans, viewers: Viewers) -> _Ranges:
    """Return the range of query spans that may see each key span.

    Args:
        queries: Query spans, sorted by their first position.
        keys: Key spans.
        viewers: Query positions that see each key span.
    """
    top = np.maximum.accumulate(queries.last)  # largest position of all queries up to this one
    begin = np.searchsorted(top, np.maximum(viewers.first, keys.start - viewers.right))
    end = np.searchsorted(
        queries.start, np.minimum(viewers.last, keys.last + viewers.left), side="right"
    )
    end = np.maximum(begin, end)
    low = np.where(viewers.exact, np.maximum(viewers.first, keys.last - viewers.right), FAR)
    high = np.minimum(viewers.last, keys.start + viewers.left)
    full_begin = np.clip(np.searchsorted(queries.start, low), begin, end)
    full_end = np.clip(np.searchsorted(top, high, side="right"), full_begin, end)
    return _Ranges(begin, full_begin, full_end, end)


def _widened(
    ranges: _Ranges, queries: Pieces, keys: Pieces, viewers: Viewers, grains: Sequence[int]
) -> _Ranges:
    """Extend the full ranges to pieces of queries that use rows of all cells of both pieces.

    If a band is at least as wide as the distance between queries, the used rows are a range. So the
    cells at the ends of both pieces decide. Pieces of strided shards are nearly equal: most pairs
    of a document differ by less than a cell, and need no comparison one by one.

    Args:
        ranges: Ranges of query pieces.
        queries: Query pieces, sorted by position.
        keys: Key pieces.
        viewers: Query positions that see each key piece.
        grains: Number of rows of a cell of queries, and of keys.
    """
    q, k = queries.span, keys.span
    (q_head, q_tail), (k_head, k_tail) = (
        _cell_ends(pieces, grain) for pieces, grain in zip((queries, keys), grains, strict=True)
    )
    # Envelopes ascend, so that a binary search returns the pieces from or up to which all fulfil a
    # condition.
    last, head = (np.minimum.accumulate(x[::-1])[::-1] for x in (q.last, q_head))
    begin = np.maximum(
        np.searchsorted(q.start, viewers.first),
        np.searchsorted(last, k_tail - viewers.right),
    )
    begin = np.maximum(begin, np.searchsorted(head, k.start - viewers.right))
    last, tail = (np.maximum.accumulate(x) for x in (q.last, q_tail))
    end = np.minimum(
        np.searchsorted(last, viewers.last, side="right"),
        np.searchsorted(q.start, k_head + viewers.left, side="right"),
    )
    end = np.minimum(end, np.searchsorted(tail, k.last + viewers.left, side="right"))
    stride = max(x.stride.max(initial=1) for x in (q, k))
    wide = viewers.exact & (viewers.left + viewers.right >= stride - 1)
    begin = np.where(wide, np.clip(begin, ranges.begin, ranges.end), ranges.full_begin)
    end = np.where(wide, np.clip(end, begin, ranges.end), ranges.full_end)
    return ranges._replace(full_begin=begin, full_end=end)


def _cell_ends(pieces: Pieces, grain: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the last row in a piece's first cell, and first in its last cell."""
    span, stop = pieces.span, pieces.first + pieces.span.length
    head = np.minimum(grain - pieces.first % grain, span.length)  # rows in the first cell
    tail = np.minimum((stop - 1) % grain + 1, span.length)  # rows in the last cell
    return span.start + (head - 1) * span.stride, span.last - (tail - 1) * span.stride


def _inside(queries: Spans, viewers: Viewers, ranges: _Ranges) -> np.ndarray:
    """Return whether the query pieces that may see a key piece have only viewers of the key piece.

    A query piece can extend beyond `viewers.first` or `viewers.last` only if breaks were omitted.

    Args:
        queries: Query pieces, sorted by position.
        viewers: Query positions that see each key piece.
        ranges: Range of query pieces of each key piece.

    Returns:
        bool, one entry per key piece.
    """
    visible = ranges.begin < ranges.end
    begin, end = (column[visible] for column in (ranges.begin, ranges.end))
    inside = np.ones(len(visible), dtype=bool)
    inside[visible] = queries.start[begin] >= viewers.first[visible]
    inside[visible] &= np.maximum.accumulate(queries.last)[end - 1] <= viewers.last[visible]
    return inside


def _bands(
    mask: Mask, queries: Pieces, keys: Pieces, viewers: Viewers, i: np.ndarray, j: np.ndarray
) -> tuple[np.ndarray, np.ndarray, _Rows, _Rows]:
    """Return the pairs of pieces that have visible pairs of rows, and the rows of these pairs.

    Args:
        mask: The mask.
        queries: Query pieces.
        keys: Key pieces.
        viewers: Query positions that see each key piece.
        i: Index of the query piece of each pair that may be visible.
        j: Index of the key piece of each pair.

    Returns:
        i and j of the pairs of pieces with visible rows. For each of these pairs, (first, stop) of
        the query rows that see some key, and (first, stop) of the key rows that some query sees.
    """
    # There may be a million pairs, so use the smallest integers that hold the positions.
    small = max(x.span.last.max(initial=0) for x in (queries, keys)) < 1 << 28
    number, far = (np.int32, 1 << 29) if small else (np.int64, FAR)

    def of(column: np.ndarray, pair: np.ndarray) -> np.ndarray:
        return np.clip(column, -far, far).astype(number)[pair]

    q, k = (Spans(*(of(x, at) for x in y.span)) for y, at in ((queries, i), (keys, j)))
    left, right = of(viewers.left + keys.span.start, j), of(viewers.right - keys.span.start, j)
    stride = keys.span.stride
    same_stride = (
        all((x.span.stride == stride[:1]).all() for x in (queries, keys)) and len(stride) > 0
    )
    stride = number(stride[0]) if same_stride else k.stride
    left, right = (left - q.start) // stride, (right + q.start) // stride
    # A band in positions is a band in rows if the strides are equal.
    if not same_stride or not viewers.exact.all():
        unknown = np.flatnonzero((q.stride != k.stride) | ~viewers.exact[j])
        spans = (Spans(*(x[unknown].astype(np.int64) for x in span)) for span in (q, k))
        left[unknown], right[unknown] = (np.clip(x, -far, far) for x in _mask_bands(mask, *spans))
    rows = np.maximum(-right, 0), np.minimum(q.length, k.length + left)
    columns = np.maximum(-left, 0), np.minimum(k.length, q.length + right)
    if mask.has_used:
        partly = np.flatnonzero((left == far) & (right == far))
        spans = (Spans(*(x[partly].astype(np.int64) for x in span)) for span in (q, k))
        for limit, used in zip((*rows, *columns), mask.used(*spans), strict=True):
            limit[partly] = used
    seen = (left + right >= 0) & (rows[0] < rows[1]) & (columns[0] < columns[1])
    if not seen.all():
        i, j = i[seen], j[seen]
        rows, columns = (rows[0][seen], rows[1][seen]), (columns[0][seen], columns[1][seen])
    above, before = of(queries.first, i), of(keys.first, j)
    rows, columns = (above + rows[0], above + rows[1]), (before + columns[0], before + columns[1])
    return i, j, rows, columns


def _mask_bands(mask: Mask, q: Spans, k: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Return the band of visible pairs of each pair of spans, as two arrays: left and right.

    `masks.base.Band` explains left and right. Both are FAR if the visible pairs are not a band or
    are all pairs, and -FAR if no pair is visible.
    """
    covers = mask.covers(q, k)
    reach = np.where(covers == Cover.EMPTY, -FAR, FAR)
    left, right = reach, reach.copy()
    partly = np.flatnonzero(covers == Cover.PARTIAL)
    if len(partly):
        bands = mask.bands(q.at(partly), k.at(partly))
        left[partly] = np.where(bands.known, bands.left, FAR)
        right[partly] = np.where(bands.known, bands.right, FAR)
    return left, right


def nearby(viewers: Viewers, q: Pieces, k: Pieces) -> tuple[np.ndarray, np.ndarray]:
    """Return the query pieces that may see each key piece; both pieces have the same owner.

    Positions are shifted by owner, so that one binary search handles all owners.

    Args:
        viewers: Query positions that see each key piece.
        q: Query pieces, sorted by owner, then by first position.
        k: Key pieces.

    Returns:
        Index of the first query piece, and number of consecutive query pieces, for each key piece.
    """
    width = 1 + max(side.span.last.max(initial=0) for side in (q, k))
    lowest = np.maximum(viewers.first, k.span.start - viewers.right)
    highest = np.minimum(viewers.last, k.span.last + viewers.left)
    top = np.maximum.accumulate(q.span.last + q.owner * width)
    begin = np.searchsorted(top, np.clip(lowest, 0, width) + k.owner * width)
    end = np.searchsorted(
        q.span.start + q.owner * width, np.clip(highest, -1, width - 1) + k.owner * width, "right"
    )
    return begin, np.maximum(end - begin, 0)


def cuts(breaks: np.ndarray, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices i, 0 < i < length, before which to cut spans at the positions `breaks`.

    Index i is the first index in the span whose position is at or after a break.

    Returns:
        Index of the span of each cut, ascending; index i of each cut, ascending for each span.
    """
    start, stride, _ = spans
    low = np.searchsorted(breaks, start, side="right")
    if (np.append(breaks, FAR)[low] > spans.last).all():  # usual if the layout depends on documents
        return low[:0], low[:0]
    high = np.searchsorted(breaks, spans.last, side="right")
    index, at = np.repeat(np.arange(len(start)), high - low), counted(low, high - low)
    local = -((start[index] - breaks[at]) // stride[index])  # rounded up
    # A span with a large stride may have no position between two close breaks.
    fresh = np.ones(len(index), dtype=bool)
    fresh[1:] = (index[1:] != index[:-1]) | (local[1:] != local[:-1])
    return index[fresh], local[fresh]


def divided(
    length: np.ndarray, index: np.ndarray, cut: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Divide spans at the cuts that `cuts` returned.

    Args:
        length: Length of each span.
        index: Index of the span that each cut divides.
        cut: Index within the span before which each cut divides it.

    Returns:
        For each part: index of the span, first index within the span, and length.
    """
    of = np.repeat(np.arange(len(length)), np.bincount(index, minlength=len(length)) + 1)
    first = np.zeros(len(of), dtype=np.int64)
    first[np.arange(len(cut)) + index + 1] = cut
    last = np.append(of[1:] != of[:-1], True)[: len(of)]
    return of, first, np.where(last, length[of], np.append(first[1:], 0)[: len(of)]) - first


def cut_at(spans: Pieces, breaks: np.ndarray) -> Pieces:
    """Cut spans before the positions `breaks`; return the pieces."""
    index, cut = cuts(breaks, spans.span)
    if not len(index):
        return spans
    of, first, count = divided(spans.span.length, index, cut)
    start, stride, _ = spans.span.at(of)
    piece = Spans(start + first * stride, stride, count)
    return Pieces(spans.owner[of], spans.first[of] + first, piece)


def _among(ranks: np.ndarray, begin: np.ndarray, end: np.ndarray, size: int) -> np.ndarray:
    """Return which ranks occur in each of n intervals of an array of ranks.

    Args:
        ranks: Array of ranks.
        begin: First index of each interval, [n].
        end: Index after the last index of each interval, [n].
        size: Number of ranks.

    Returns:
        Bit sets of `size` ranks, as from `packed`, [n, words].
    """
    words, level = one_each(ranks, size), _level(begin, end)
    sets = np.zeros((len(begin), words.shape[1]), dtype=np.uint64)
    for power in range(level.max(initial=-1) + 1):
        # Entry i of `words` has the ranks from index i to i + 2**power (exclusive). Every interval
        # of this level is the union of two such entries.
        at = np.flatnonzero(level == power)
        sets[at] = words[begin[at]] | words[end[at] - (1 << power)]
        words[: -1 << power] |= words[1 << power :]
    return sets


def _within(
    ranks: np.ndarray, begin: np.ndarray, end: np.ndarray, size: int, count: int
) -> np.ndarray:
    """Return which ranks have an interval that contains row i, for each row.

    Args:
        ranks: Rank of each interval.
        begin: First row of each interval.
        end: Row after the last row of each interval.
        size: Number of ranks.
        count: Number of rows.

    Returns:
        Bit sets of `size` ranks, as from `packed`, [count, words]: set i has rank r if some j has
        ranks[j] = r and begin[j] <= i < end[j].
    """
    nonempty = np.flatnonzero(begin < end)
    ranks, begin, end = ranks[nonempty], begin[nonempty], end[nonempty]
    if (begin[1:] >= begin[:-1]).all() and (end[1:] >= end[:-1]).all():
        # The intervals that contain a row are consecutive.
        row = np.arange(count)
        first, stop = np.searchsorted(end, row, "right"), np.searchsorted(begin, row, "right")
        return _among(ranks, first, stop, size)
    words, level = one_each(ranks, size), _level(begin, end)
    sets = np.zeros((count, words.shape[1]), dtype=np.uint64)
    for power in range(level.max(initial=-1), -1, -1):
        # The reverse of `_among`: entry i has the ranks of rows i to i + 2**power.
        at = np.flatnonzero(level == power)
        for first in (begin[at], end[at] - (1 << power)):
            np.bitwise_or.at(sets, first, words[at])
        if power:
            half = 1 << (power - 1)
            sets[half:] |= sets[:-half].copy()
    return sets


def _level(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the largest n with 2**n <= end - begin for each interval; -1 for empty intervals."""
    return np.frexp(np.maximum(end - begin, 0))[1] - 1


def one_each(ranks: np.ndarray, size: int) -> np.ndarray:
    """Return one bit set of `size` ranks for each entry of `ranks`, which has only this rank."""
    every = np.arange(size)
    return with_ranks(np.zeros((size, -(-size // 64)), dtype=np.uint64), every, every)[ranks]


def with_ranks(sets: np.ndarray, index: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Return bit sets with further ranks.

    Args:
        sets: Bit sets of ranks, as from `packed`, [rows, words].
        index: Index of the set to which each rank is added.
        rank: Ranks.
    """
    if not len(index):
        return sets
    sets = sets.copy()
    octets = sets.view(np.uint8).reshape(-1)
    at = index * (8 * sets.shape[1]) + (rank >> 3)
    np.bitwise_or.at(octets, at, np.right_shift(128, rank & 7).astype(np.uint8))
    return sets


def united(sets: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Combine groups of consecutive bit sets by "or".

    Args:
        sets: Bit sets, as from `packed`, [rows, words].
        first: First row of each group, [n].
        count: Number of rows of each group, [n], at least 1.

    Returns:
        Bit sets [n, words].
    """
    if not len(first):
        return sets[:0]
    if (longest := int(count.max())) <= SHORT:
        combined, at = sets[first], np.arange(len(first))
        for index in range(1, longest):
            at = at[count[at] > index]
            combined[at] |= sets[first[at] + index]
        return combined
    ends = np.stack([first, first + count], axis=1).ravel()
    return np.bitwise_or.reduceat(np.concatenate([sets, sets[:1]]), ends, axis=0)[::2]


def packed(table: np.ndarray) -> np.ndarray:
    """Return the rows of a bool [rows, columns] as bit sets, uint64 [rows, words]."""
    octets = np.packbits(table, axis=1)
    sets = np.zeros((len(octets), -(-octets.shape[1] // 8)), dtype=np.uint64)
    sets.view(np.uint8)[:, : octets.shape[1]] = octets
    return sets


def unpacked(sets: np.ndarray, columns: int) -> np.ndarray:
    """Return bit sets as a bool [rows, columns]."""
    octets = np.ascontiguousarray(sets).view(np.uint8)
    return np.unpackbits(octets, axis=1, count=columns).view(bool)
