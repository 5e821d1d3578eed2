# SPDX-License-Identifier: Apache-2.0
"""The interface of masks, and how masks combine.

`visible` is exact, for arrays of positions. `cover` is conservative, for two spans: PARTIAL is
always allowed, EMPTY and FULL are promises. A custom mask needs `visible`; `cover` saves
computation and messages, and `check` compares it with `visible`. `bands` and
`breaks` say more exactly which rows have to travel and cut a partly visible rectangle into fewer
tiles; `modulus` serves masks of residue classes; `viewers` only makes plans faster, and is derived
from `covers` where a mask does not define it (`seen.viewers_of`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..layout import Span, Spans

FAR = 1 << 60  # farther than any two positions are apart


class Cover(IntEnum):
    """How much of a rectangle of pairs a mask lets through."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


# As plain numbers, which arrays compare and take in a fraction of the time.
EMPTY, PARTIAL, FULL = (int(cover) for cover in Cover)


class Band(NamedTuple):
    """Local row m sees local column n exactly when m - left <= n <= m + right."""

    left: int
    right: int


class SpanBands(NamedTuple):
    """Bands of many pairs of spans: arrays; `left` and `right` count only where `known`."""

    left: np.ndarray
    right: np.ndarray
    known: np.ndarray


class Viewers(NamedTuple):
    """Which positions see keys of spans: arrays.

    Queries outside first..last see none of a span's keys. A query at p inside sees none but those
    from p - left to p + right, and all of these where `exact`.
    """

    first: np.ndarray
    last: np.ndarray
    left: np.ndarray
    right: np.ndarray
    exact: np.ndarray

    def holds(self, other: Viewers) -> np.ndarray:
        """Where do these see whatever the others may see?"""
        wider = (self.first <= other.first) & (self.last >= other.last)
        return wider & (self.left >= other.left) & (self.right >= other.right) & self.exact

    def reached(self, keys: Spans) -> list[tuple[np.ndarray, np.ndarray]]:
        """(first, last) of the queries that may see some of `keys`; and, where `exact`, all."""
        return [
            (np.maximum(self.first, x - self.right), np.minimum(self.last, y + self.left))
            for x, y in ((keys.start, keys.last), (keys.last, keys.start))
        ]


class Mask:
    """Base of all masks. A custom mask defines `visible`, and usually `cover`."""

    #: the mask depends on distances modulo this only, so residue classes are cut apart; mostly 1
    modulus: int = 1
    #: do a few rectangles and lower triangles describe it, as flash attention kernels take them?
    flash_compatible: bool = False

    @property
    def cacheable(self) -> bool:
        """May plans keep what they made for this mask, and reuse it for masks with an equal repr?

        Requires that the mask is the same in every batch and that its repr says all there is. Only
        masks of this package are known to do so.
        """
        return type(self).__module__.startswith(f"{__package__}.")

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Whether the query attends to the key. q, k: integer arrays of positions, broadcast
        against each other; returns bool of their common shape.
        """
        raise NotImplementedError

    def cover(self, q_span: Span, k_span: Span) -> Cover:
        """How much of `q_span` x `k_span` is visible.

        EMPTY and FULL are promises, PARTIAL is always right. Default: what `covers` returns if a
        mask defines it, else PARTIAL, with which every key is sent to every rank.
        """
        if type(self).covers is Mask.covers:
            return Cover.PARTIAL
        return Cover(int(self.covers(_one(q_span), _one(k_span))))

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        """`cover` of many pairs of spans at once.

        The fields of `q_spans` and `k_spans` are integer arrays, broadcast against each other;
        returns an int64 array of `Cover` values of their common shape.
        """
        fields = np.broadcast_arrays(*q_spans, *k_spans)
        if type(self).cover is Mask.cover:
            return np.full(fields[0].shape, PARTIAL)
        found = [
            self.cover(Span(*map(int, pair[:3])), Span(*map(int, pair[3:])))
            for pair in zip(*(field.ravel() for field in fields), strict=True)
        ]
        return np.array(found, dtype=np.int64).reshape(fields[0].shape)

    def bands(self, q_spans: Spans, k_spans: Spans) -> SpanBands:
        """The visible part of each pair of q_spans and k_spans as a band, where it is known to be
        one.
        """
        covers = self.covers(q_spans, k_spans)
        reach = np.where(covers == Cover.FULL, FAR, -FAR)
        return SpanBands(reach, reach, covers != Cover.PARTIAL)

    def band(self, q_span: Span, k_span: Span) -> Band | None:
        """`bands` of q_span and k_span; None where these are not known to be a band."""
        left, right, known = self.bands(_one(q_span), _one(k_span))
        return Band(int(left), int(right)) if known else None

    @property
    def tells_viewers(self) -> bool:
        """Does the mask define `viewers`, or say nothing by them?"""
        return type(self).viewers is not Mask.viewers

    def viewers(self, k_spans: Spans) -> Viewers:
        """Which positions see keys of `k_spans`, whose fields are int64 arrays of one shape.

        Optional: this one allows any, and is narrowed down by what `covers` says.
        """
        far = np.full(np.shape(k_spans.start), FAR)
        return Viewers(-far, far, far, far, np.zeros_like(far, dtype=bool))

    @property
    def breaks(self) -> np.ndarray:
        """Sorted positions before which the mask's description changes."""
        return np.empty(0, dtype=np.int64)

    def cuts(self, span: Span) -> np.ndarray:
        """Sorted local indices 0 < i < span.length at which `span` first reaches a break."""
        low, high = np.searchsorted(self.breaks, (span.start + 1, span.last + 1))
        return np.unique(-((span.start - self.breaks[low:high]) // span.stride))  # rounded up

    def check(self, seq_len: int) -> None:
        """Raise ValueError unless the mask describes sequences of `seq_len` positions."""

    def narrowed(self, other: Mask) -> Mask | None:
        """What both masks let through, where this mask means something else by the distances of
        `other` than positions (`Tree`: windows count along its paths); mostly None.
        """
        return None

    def __and__(self, other: Mask) -> Mask:
        for mask, more in ((self, other), (other, self)):
            if isinstance(mask, Mask) and (found := mask.narrowed(more)) is not None:
                return found
        return _And(self, other)

    def __or__(self, other: Mask) -> Mask:
        return _Or(self, other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: combine masks with & and |, compare with `is`")


class VectorMask(Mask):
    """Base of masks that compute `covers` for arrays; `cover` uses it."""

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        raise NotImplementedError


def cover_where(empty: np.ndarray | bool, full: np.ndarray | bool) -> np.ndarray:
    """EMPTY where `empty`, else FULL where `full`, else PARTIAL."""
    return np.where(empty, EMPTY, np.where(full, FULL, PARTIAL))


def _one(span: Span) -> Spans:
    return Spans(*map(np.asarray, span))


class Combined(VectorMask):
    """Two masks and the operator between them."""

    symbol: str
    #: of two covers, the one that the pair has
    inner: np.ufunc

    def __init__(self, a: Mask, b: Mask):
        if not isinstance(a, Mask) or not isinstance(b, Mask):
            raise TypeError(f"masks combine with masks, got {a!r} and {b!r}")
        self.a, self.b = a, b
        self.modulus = min(math.lcm(a.modulus, b.modulus), FAR)  # has to fit into int64
        self.flash_compatible = a.flash_compatible and b.flash_compatible

    @property
    def cacheable(self) -> bool:
        return self.a.cacheable and self.b.cacheable

    @property
    def tells_viewers(self) -> bool:
        return self.a.tells_viewers and self.b.tells_viewers

    @cached_property
    def breaks(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        return np.union1d(self.a.breaks, self.b.breaks)

    def check(self, seq_len: int) -> None:
        self.a.check(seq_len)
        self.b.check(seq_len)

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return self.inner(self.a.visible(q, k), self.b.visible(q, k))

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        return self.inner(self.a.covers(q_spans, k_spans), self.b.covers(q_spans, k_spans))

    def __repr__(self) -> str:
        return f"({self.a!r} {self.symbol} {self.b!r})"


def parts(mask: Mask) -> Iterator[Mask]:
    """Yield the masks of which a combination consists."""
    if isinstance(mask, Combined):
        yield from parts(mask.a)
        yield from parts(mask.b)
    else:
        yield mask


def custom_parts(mask: Mask) -> list[Mask]:
    """Return the parts of a mask whose classes are not in this package."""
    ours = f"{__name__.partition('.')[0]}."
    return [part for part in parts(mask) if not type(part).__module__.startswith(ours)]


class _And(Combined):
    """What both masks let through."""

    symbol, inner = "&", np.minimum

    def narrowed(self, other: Mask) -> Mask | None:
        a, b = self.a.narrowed(other), self.b.narrowed(other)
        if a is None and b is None:
            return None
        return _And(self.a if a is None else a, self.b if b is None else b)

    def bands(self, q_spans: Spans, k_spans: Spans) -> SpanBands:
        a, b = self.a.bands(q_spans, k_spans), self.b.bands(q_spans, k_spans)
        return SpanBands(
            np.minimum(a.left, b.left), np.minimum(a.right, b.right), a.known & b.known
        )

    def viewers(self, k_spans: Spans) -> Viewers:
        a, b = self.a.viewers(k_spans), self.b.viewers(k_spans)
        first, (last, left, right) = np.maximum(a.first, b.first), map(np.minimum, a[1:4], b[1:4])
        return Viewers(first, last, left, right, a.exact & b.exact)


class _Or(Combined):
    """What either mask lets through."""

    symbol, inner = "|", np.maximum

    def narrowed(self, other: Mask) -> Mask | None:
        if self.a.narrowed(other) is None and self.b.narrowed(other) is None:
            return None
        return (self.a & other) | (self.b & other)

    def bands(self, q_spans: Spans, k_spans: Spans) -> SpanBands:
        a, b = self.a.bands(q_spans, k_spans), self.b.bands(q_spans, k_spans)
        a_empty, b_empty = a.left + a.right < 0, b.left + b.right < 0
        left = np.where(a_empty, b.left, np.where(b_empty, a.left, np.maximum(a.left, b.left)))
        right = np.where(a_empty, b.right, np.where(b_empty, a.right, np.maximum(a.right, b.right)))
        # Two bands with a gap between them are no band; neighbouring diagonals leave no gap.
        touch = (a.left + b.right >= -1) & (b.left + a.right >= -1)
        return SpanBands(left, right, a.known & b.known & (touch | a_empty | b_empty))

    def viewers(self, k_spans: Spans) -> Viewers:
        a, b = self.a.viewers(k_spans), self.b.viewers(k_spans)
        first, (last, left, right) = np.minimum(a.first, b.first), map(np.maximum, a[1:4], b[1:4])
        one = a.holds(b) | b.holds(a)
        if one.all():
            return Viewers(first, last, left, right, one)
        # Where the queries that see all keys of a span by one mask or the other leave no gap, they
        # are all that see any: Causal() | SameSpan(). Elsewhere, who may see some is narrowed down.
        (some_a, all_a), (some_b, all_b) = a.reached(k_spans), b.reached(k_spans)
        begin, end = np.minimum(some_a[0], some_b[0]), np.maximum(some_a[1], some_b[1])
        both = np.zeros_like(one)
        for x, y in ((all_a, all_b), (all_b, all_a)):
            both |= (x[0] <= begin) & (y[0] <= x[1] + 1) & (y[1] >= end)
        both &= a.exact & b.exact & ~one
        first, last = np.where(one, first, begin), np.where(one, last, end)
        left, right = np.where(both, FAR, left), np.where(both, FAR, right)
        return Viewers(first, last, left, right, one | both)
