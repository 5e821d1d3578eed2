# SPDX-License-Identifier: Apache-2.0
"""Which rows of every shard the ranks see: what a schedule has to bring where.

Spans are cut where the mask's description changes. What positions see of a piece of keys is, for
bands, documents and prefixes, an interval of positions in which every query sees a band
(`Mask.viewers`). So, with the pieces of queries in the order of their positions, most of those that
see anything see the whole piece and are a range; only pieces at the edge of the interval or of the
band are looked at one by one. Decides how finely rows are told: as intervals, which bands give
exactly; a pair of pieces that the mask calls partly visible and no band counts as seen.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..layout import Spans
from ..layout.layouts import Pieces, Shards, counted, pieces_of
from .base import FAR, Cover, Mask, Viewers

_Rows = tuple[np.ndarray, np.ndarray]  # first and stop of each
PAIRS = 1 << 20  # so many pairs of pieces are looked at one by one, at most
ALL_PAIRS = 1 << 12  # so few are, before a mask without `viewers` is asked about groups of pieces


class RankRows(NamedTuple):
    """Columns: `rank` has to do with the rows first <= row < stop of the shard, within `piece`."""

    piece: np.ndarray
    rank: np.ndarray
    first: np.ndarray
    stop: np.ndarray


class VisibleRows(NamedTuple):
    """Which rows of the shards the ranks have to do with.

    owner, first, stop: columns, the pieces of all shards by owner and row. whole: bool
    [pieces, G], which ranks have to do with all of a piece. parts: what they have to do with else.
    """

    owner: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    whole: np.ndarray
    parts: RankRows

    def ranks(self, owners: int) -> np.ndarray:
        """Bool [owners, G]: which ranks have to do with some row of a shard."""
        found = np.zeros((owners, self.whole.shape[1]), dtype=bool)
        there, first, count = np.unique(self.owner, return_index=True, return_counts=True)
        found[there] = united(self.whole, first, count)
        found[self.owner[self.parts.piece], self.parts.rank] = True
        return found


class _Ranges(NamedTuple):
    """Which pieces of queries, by position, see each piece of keys: begin <= i < end may see some
    of it, and of these whole <= i < part see all.
    """

    begin: np.ndarray
    whole: np.ndarray
    part: np.ndarray
    end: np.ndarray

    def others(self) -> tuple[np.ndarray, np.ndarray]:
        """The pairs (queries, keys) of pieces that may see something, and not surely all."""
        first = np.concatenate([self.begin, self.part])
        count = np.concatenate([self.whole, self.end]) - first
        keys = np.repeat(np.tile(np.arange(len(self.begin)), 2), count)
        return counted(first, count), keys


def rows_seen(mask: Mask, q_shards: Shards, k_shards: Shards) -> tuple[VisibleRows, VisibleRows]:
    """The query rows of each shard that see keys of a rank, and the key rows that a rank sees.

    A shard is the spans of a rank, possibly none. What is not listed sees and is seen by nothing; a
    row that is listed may still see nothing.
    """
    shards = pieces_of(q_shards), None if k_shards is q_shards else pieces_of(k_shards)
    breaks = mask.breaks
    while True:
        queries = cut_at(shards[0], breaks)
        keys = queries if shards[1] is None else cut_at(shards[1], breaks)
        queries = queries.at(np.argsort(queries.span.start, kind="stable"))
        viewers = viewers_of(mask, queries.span, keys.span)
        ranges = _ranges(queries.span, keys.span, viewers)
        if not len(breaks) or sum((r[1] - r[0]).sum() for r in (ranges[:2], ranges[2:])) <= PAIRS:
            break
        # Where every rank has a piece of every block, rows are told by the larger blocks.
        breaks = breaks[1::2]
    viewers = viewers._replace(exact=viewers.exact & _inside(queries.span, viewers, ranges))
    i, j, rows, columns = _bands(mask, queries, keys, viewers, *ranges.others())
    whole = ranges.whole, ranges.part
    by_row = np.lexsort((queries.first, queries.owner))
    place = np.empty_like(by_row)
    place[by_row] = np.arange(len(by_row))
    q, k = queries.at(by_row), keys
    return (
        VisibleRows(q.owner, q.first, q.first + q.span.length,
             _within(keys.owner, *whole, len(k_shards), len(q.owner))[by_row],
             RankRows(place[i], keys.owner[j], *rows)),
        VisibleRows(k.owner, k.first, k.first + k.span.length,
             _among(queries.owner, *whole, len(q_shards)),
             RankRows(j, queries.owner[i], *columns)),
    )  # fmt: skip


def meeting(mask: Mask, shards: Shards) -> tuple[Pieces, Pieces, np.ndarray, np.ndarray]:
    """Pieces of queries and of keys, and the pairs i, j of them that may see something.

    Spans are cut where the mask's description changes, unless that makes too many pairs.
    """
    spans = pieces_of(shards)
    for breaks in (mask.breaks, mask.breaks[:0]):
        keys = cut_at(spans, breaks)
        queries = keys.at(np.argsort(keys.span.start, kind="stable"))
        ranges = _ranges(queries.span, keys.span, viewers_of(mask, queries.span, keys.span))
        count = ranges.end - ranges.begin
        if count.sum() <= max(PAIRS, len(spans.owner) ** 2):
            break
    i, j = counted(ranges.begin, count), np.repeat(np.arange(len(count)), count)
    return queries, keys, i, j


def viewers_of(mask: Mask, queries: Spans, keys: Spans) -> Viewers:
    """`Mask.viewers` of `keys`; where the mask does not define it, `first` and `last` are those of
    the queries that `Mask.covers` leaves, asked about groups of neighbouring queries.

    queries: by their first positions. Only the promise of EMPTY is used, so that no query is left
    out that sees something; a group of queries that sees nothing need not be looked at one by one.
    """
    viewers, count = mask.viewers(keys), len(queries.start)
    if mask.tells_viewers or count * len(keys.start) <= ALL_PAIRS:
        return viewers
    firsts = np.arange(0, count, math.isqrt(count))
    start, last = queries.start[firsts], np.maximum.reduceat(queries.last, firsts)
    groups = Spans(*(x[:, None] for x in (start, np.ones_like(start), last + 1 - start)))
    seen = mask.covers(groups, Spans(*(x[None] for x in keys))) != Cover.EMPTY
    return viewers._replace(
        first=np.maximum(viewers.first, np.where(seen, start[:, None], FAR).min(axis=0)),
        last=np.minimum(viewers.last, np.where(seen, last[:, None], -FAR).max(axis=0)),
    )


def _ranges(queries: Spans, keys: Spans, viewers: Viewers) -> _Ranges:
    """queries: by their first positions."""
    top = np.maximum.accumulate(queries.last)  # all up to here end at this position or before
    begin = np.searchsorted(top, np.maximum(viewers.first, keys.start - viewers.right))
    end = np.searchsorted(
        queries.start, np.minimum(viewers.last, keys.last + viewers.left), side="right"
    )
    end = np.maximum(begin, end)
    low = np.where(viewers.exact, np.maximum(viewers.first, keys.last - viewers.right), FAR)
    high = np.minimum(viewers.last, keys.start + viewers.left)
    whole = np.clip(np.searchsorted(queries.start, low), begin, end)
    part = np.clip(np.searchsorted(top, high, side="right"), whole, end)
    return _Ranges(begin, whole, part, end)


def _inside(queries: Spans, viewers: Viewers, ranges: _Ranges) -> np.ndarray:
    """For which pieces of keys do all that may see some of it lie within first..last? At breaks
    pieces are cut, so that some may reach over an edge only where breaks were left out.
    """
    some = ranges.begin < ranges.end
    begin, end = (x[some] for x in (ranges.begin, ranges.end))
    inside = np.ones(len(some), dtype=bool)
    inside[some] = queries.start[begin] >= viewers.first[some]
    inside[some] &= np.maximum.accumulate(queries.last)[end - 1] <= viewers.last[some]
    return inside


def _bands(
    mask: Mask, queries: Pieces, keys: Pieces, viewers: Viewers, i: np.ndarray, j: np.ndarray
) -> tuple[np.ndarray, np.ndarray, _Rows, _Rows]:
    """The pairs of pieces i, j of which something is seen, and of each the rows (first, stop) that
    see something and those that are seen.
    """
    # There may be a million pairs: numbers are as small as the positions allow.
    small = max(x.span.last.max(initial=0) for x in (queries, keys)) < 1 << 28
    number, far = (np.int32, 1 << 29) if small else (np.int64, FAR)

    def of(column: np.ndarray, pair: np.ndarray) -> np.ndarray:
        return np.clip(column, -far, far).astype(number)[pair]

    q, k = (Spans(*(of(x, at) for x in y.span)) for y, at in ((queries, i), (keys, j)))
    left, right = of(viewers.left + keys.span.start, j), of(viewers.right - keys.span.start, j)
    stride = keys.span.stride
    one = all((x.span.stride == stride[:1]).all() for x in (queries, keys)) and len(stride) > 0
    stride = number(stride[0]) if one else k.stride
    left, right = (left - q.start) // stride, (right + q.start) // stride
    # A band in positions is one in rows where the strides are equal.
    if not one or not viewers.exact.all():
        rest = np.flatnonzero((q.stride != k.stride) | ~viewers.exact[j])
        spans = (Spans(*(x[rest].astype(np.int64) for x in span)) for span in (q, k))
        left[rest], right[rest] = (np.clip(x, -far, far) for x in _asked(mask, *spans))
    rows = np.maximum(-right, 0), np.minimum(q.length, k.length + left)
    columns = np.maximum(-left, 0), np.minimum(k.length, q.length + right)
    seen = (left + right >= 0) & (rows[0] < rows[1]) & (columns[0] < columns[1])
    if not seen.all():
        i, j = i[seen], j[seen]
        rows, columns = (rows[0][seen], rows[1][seen]), (columns[0][seen], columns[1][seen])
    above, before = of(queries.first, i), of(keys.first, j)
    rows, columns = (above + rows[0], above + rows[1]), (before + columns[0], before + columns[1])
    return i, j, rows, columns


def _asked(mask: Mask, q: Spans, k: Spans) -> tuple[np.ndarray, np.ndarray]:
    """The band of each pair as the mask itself tells it; far to both sides where it is none."""
    covers = mask.covers(q, k)
    reach = np.where(covers == Cover.EMPTY, -FAR, FAR)
    left, right = reach, reach.copy()
    partly = np.flatnonzero(covers == Cover.PARTIAL)
    if len(partly):
        bands = mask.bands(q.at(partly), k.at(partly))
        left[partly] = np.where(bands.known, bands.left, FAR)
        right[partly] = np.where(bands.known, bands.right, FAR)
    return left, right


def cut_at(spans: Pieces, breaks: np.ndarray) -> Pieces:
    """The spans cut at the breaks."""
    start, stride, length = spans.span
    low, high = np.searchsorted(breaks, (start + 1, spans.span.last + 1))
    of, at = np.repeat(np.arange(len(start)), high - low), counted(low, high - low)
    local = -((start[of] - breaks[at]) // stride[of])  # rounded up
    of, local = (np.concatenate(x) for x in ((np.arange(len(start)), of), (0 * start, local)))
    order = np.lexsort((local, of))
    of, local = of[order], local[order]
    # No position of a span with a large stride lies between two breaks that are close.
    fresh = np.ones(len(of), dtype=bool)
    fresh[1:] = (of[1:] != of[:-1]) | (local[1:] != local[:-1])
    of, local = of[fresh], local[fresh]
    last = np.append(of[1:] != of[:-1], True)
    stop = np.where(last, length[of], np.append(local[1:], 0))
    piece = Spans(start[of] + local * stride[of], stride[of], stop - local)
    return Pieces(spans.owner[of], spans.first[of] + local, piece)


def _among(ranks: np.ndarray, begin: np.ndarray, end: np.ndarray, size: int) -> np.ndarray:
    """Bool [n, size]: which ranks are among ranks[begin:end]?"""
    found = np.zeros((len(begin), size), dtype=bool)
    some = np.flatnonzero(begin < end)
    if len(some):
        count = len(ranks)  # rows of the table are numbered from the last rank on
        nearest = np.full((count, size), count, dtype=np.min_scalar_type(-count - 1))
        nearest[count - 1 - np.arange(count), ranks] = np.arange(count)
        _running(np.minimum, nearest)
        found[some] = nearest[count - 1 - begin[some]] < end[some, None].astype(nearest.dtype)
    return found


def _within(
    ranks: np.ndarray, begin: np.ndarray, end: np.ndarray, size: int, count: int
) -> np.ndarray:
    """Bool [count, size]: for which ranks[j] is begin[j] <= i < end[j]?"""
    some = np.flatnonzero(begin < end)
    if not len(some):
        return np.zeros((count, size), dtype=bool)
    until = np.zeros((count, size), dtype=np.min_scalar_type(-count - 1))
    np.maximum.at(until, (begin[some], ranks[some]), end[some].astype(until.dtype))
    _running(np.maximum, until)
    return until > np.arange(count, dtype=until.dtype)[:, None]


def _running(extreme: np.ufunc, table: np.ndarray) -> None:
    """Minimum or maximum of all rows so far, in place: within blocks of rows, all blocks at once,
    and then from block to block. Ten times faster than `accumulate` along the first axis.
    """
    width = int(len(table) ** 0.5)
    blocks = table[: len(table) // width * width].reshape(-1, width, table.shape[1])
    for row in range(1, width):
        extreme(blocks[:, row], blocks[:, row - 1], out=blocks[:, row])
    for block in range(1, len(blocks)):
        extreme(blocks[block], blocks[block - 1, -1], out=blocks[block])
    for row in range(len(blocks) * width, len(table)):
        extreme(table[row], table[row - 1], out=table[row])


def united(table: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Bool [n, G]: what is true in some of the rows first, ..., first + count - 1; count >= 1."""
    found = table[first]
    order = np.argsort(-count, kind="stable")
    longest = np.bincount(count[order])[::-1].cumsum()[::-1].tolist()  # how many count so many
    for more, some in enumerate(longest[2:], 1):
        which = order[:some]
        found[which] |= table[first[which] + more]
    return found
