"""Slices of a shard, regular rows that hold one span, and how `tiling` divides them further.

Decides where to cut next a pair of slices that is partly visible and of no known shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..layout import Span, Spans
from .base import Mask


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
    fields = np.array([part.span for part in parts], dtype=np.int64).T
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
    """Of many cuts close together, the first and the last in every `size` rows.

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
    which a dilated mask shows all or nothing."""
    every = modulus // np.gcd(part.span.stride, modulus).item()
    length = part.span.length
    return [
        part.take(first, -(-(length - first) // every), every)
        for first in range(min(every, length))
    ]
