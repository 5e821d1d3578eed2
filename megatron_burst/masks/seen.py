"""Which rows of every shard the ranks see: what a schedule has to bring where.

Decides how finely that is told: as intervals of rows, which a band gives exactly; where a mask is no
band over two spans, these are cut where its description changes, and what is then still partly
visible counts as seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..layout import Span
from .base import Cover, Mask

Shards = Sequence[Sequence[Span]]


class Seen(NamedTuple):
    """Columns: rank `rank` has to do with the rows first <= row < stop of the shard of `owner`."""

    owner: np.ndarray
    rank: np.ndarray
    first: np.ndarray
    stop: np.ndarray


class _Pieces(NamedTuple):
    """Columns: pieces of spans; `first` is the row of the shard at which a piece begins."""

    owner: np.ndarray
    first: np.ndarray
    span: Span

    def at(self, index: np.ndarray) -> _Pieces:
        return _Pieces(self.owner[index], self.first[index], Span(*(x[index] for x in self.span)))


def rows_seen(mask: Mask, q_shards: Shards, k_shards: Shards) -> tuple[Seen, Seen]:
    """The query rows of each shard that see keys of a rank, and the key rows that a rank sees.

    A shard is the spans of a rank, possibly none. What is not listed sees and is seen by nothing; a
    row that is listed may still see nothing.
    """
    queries, keys = _pieces(mask, q_shards), _pieces(mask, k_shards)
    covers = mask.covers(*(_shaped(x.span, s) for x, s in ((queries, (-1, 1)), (keys, (1, -1)))))
    i, j = np.nonzero(covers != Cover.EMPTY)
    full = covers[i, j] == Cover.FULL
    q, k = queries.at(i), keys.at(j)
    left, right, known = mask.bands(q.span, k.span)
    whole = full | ~known
    left, right = (np.where(whole, np.maximum(q.span.length, k.span.length), x)
                   for x in (left, right))  # fmt: skip
    seen = left + right >= 0
    key_first, key_stop = np.maximum(-left, 0), np.minimum(k.span.length, q.span.length + right)
    row_first, row_stop = np.maximum(-right, 0), np.minimum(q.span.length, k.span.length + left)
    seen &= (key_first < key_stop) & (row_first < row_stop)
    return (
        Seen(*(x[seen] for x in (q.owner, k.owner, q.first + row_first, q.first + row_stop))),
        Seen(*(x[seen] for x in (k.owner, q.owner, k.first + key_first, k.first + key_stop))),
    )


def _shaped(span: Span, shape: tuple[int, int]) -> Span:
    return Span(*(field.reshape(shape) for field in span))


def _pieces(mask: Mask, shards: Shards) -> _Pieces:
    """All spans of all shards, cut where the mask's description changes."""
    owners, firsts, spans = [], [], []
    for owner, shard in enumerate(shards):
        first = 0
        for span in shard:
            cuts = [0, *mask.cuts(span).tolist(), span.length]
            for low, high in zip(cuts, cuts[1:], strict=False):
                owners.append(owner)
                firsts.append(first + low)
                spans.append((span.start + low * span.stride, span.stride, high - low))
            first += span.length
    fields = np.array(spans, dtype=np.int64).reshape(-1, 3).T
    return _Pieces(np.array(owners, dtype=np.int64), np.array(firsts, dtype=np.int64), Span(*fields))
