# SPDX-License-Identifier: Apache-2.0
"""Base class `Mask`, the types of its results, and combinations of masks by `&` and `|`.

A custom mask must define `visible`, which decides for every pair of positions whether it attends.
All other methods are optional. `cover` describes a query span and a key span: EMPTY and FULL must
be exact, and PARTIAL is always allowed. `cover` saves computation and messages; `verify.check`
compares it with `visible`. With `bands` and `breaks`, fewer rows are sent, and a partly visible
rectangle is cut into fewer tiles. `modulus` is for masks that depend on distances modulo a number,
such as `Dilated`. `viewers` makes planning faster. Without `viewers`, the package derives the
result from `covers` (`seen.viewers_of`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..layout import Span, Spans
from ..layout.identity import ComparedByText

FAR = 1 << 60  # larger than any distance of two positions


class Cover(IntEnum):
    """Number of visible pairs of a query span and a key span: none, some or all.

    Example:
        >>> span = mb.layout.Span(0, 1, 4)
        >>> mb.masks.Full().cover(span, span)
        <Cover.FULL: 2>
    """

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


# Plain numbers are much faster in array operations than members of the enumeration.
EMPTY, PARTIAL, FULL = (int(cover) for cover in Cover)


class Band(NamedTuple):
    """Visible pairs of a query span and a key span that form a band along the diagonal.

    Row m is query number m of the query span, and column n is key number n of the key span, both
    counted from 0. Row m sees column n if m - left <= n <= m + right.

    Attributes:
        left: Number of visible columns before the diagonal.
        right: Number of visible columns after the diagonal.
    """

    left: int
    right: int


class SpanBands(NamedTuple):
    """Bands of visible pairs (`Band`), as arrays with one entry per pair of spans.

    Attributes:
        left: Same as in `Band`.
        right: Same as in `Band`.
        known: bool, true if the visible pairs are exactly the band from `left` to `right`;
            otherwise `left` and `right` are undefined.
    """

    left: np.ndarray
    right: np.ndarray
    known: np.ndarray


class Viewers(NamedTuple):
    """The query positions that see keys of a span, as arrays with one entry per key span.

    Attributes:
        first: Position of the first query that may see keys of the span.
        last: Position of the last query that may see keys of the span.
        left: A query at position p sees no keys of the span before p - left.
        right: A query at position p sees no keys of the span after p + right.
        exact: bool, true if every query p from `first` to `last` sees all keys of the span from p -
            left to p + right.
    """

    first: np.ndarray
    last: np.ndarray
    left: np.ndarray
    right: np.ndarray
    exact: np.ndarray

    def holds(self, others: Viewers) -> np.ndarray:
        """Return, for each key span, whether these queries see all keys that `others` may see.

        Args:
            others: Queries that see the same key spans under another mask.
        """
        wider = (self.first <= others.first) & (self.last >= others.last)
        return wider & (self.left >= others.left) & (self.right >= others.right) & self.exact

    def reached(self, keys: Spans) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the queries that may see some key of each key span, and those that may see all.

        Args:
            keys: Key spans.

        Returns:
            Two pairs of arrays with one entry per key span: (first, last) query position that may
            see some key of the span; (first, last) query position that may see all keys of the
            span. If `exact` is true, all queries from this first to this last do see all keys.
        """
        return [
            (np.maximum(self.first, x - self.right), np.minimum(self.last, y + self.left))
            for x, y in ((keys.start, keys.last), (keys.last, keys.start))
        ]


class UsedRows(NamedTuple):
    """Rows of a query span and a key span that include all visible pairs of the two spans.

    All attributes are arrays with one entry per pair of spans.

    Attributes:
        q_first: Index of the first query in the query span.
        q_stop: Index after the last query.
        k_first: Index of the first key in the key span.
        k_stop: Index after the last key.
    """

    q_first: np.ndarray
    q_stop: np.ndarray
    k_first: np.ndarray
    k_stop: np.ndarray


class Mask(ComparedByText):
    """Base class of masks. A custom mask defines `visible`, and usually `cover`.

    Attributes:
        modulus: 1 for most masks. If above 1, visibility depends on the distance of the positions
            modulo this number, and rectangles may be cut into residue classes.
        flash_compatible: True if a few rectangles and lower triangles describe the mask, as flash
            attention kernels require.

    Example:
        >>> class Even(mb.masks.Mask):
        ...     def visible(self, q, k):
        ...         return (k % 2 == 0) & (k <= q)
        >>> Even().visible(np.array([2]), np.array([0, 1, 2]))
        array([ True, False,  True])
    """

    modulus: int = 1
    flash_compatible: bool = False

    @property
    def cacheable(self) -> bool:
        """True if a cached plan may be used for every mask with the same `repr`.

        A cacheable mask is the same in every batch, and its `repr` describes it completely. By
        default only masks of this package are cacheable.
        """
        return type(self).__module__.startswith(f"{__package__}.")

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Return a bool array that is true for pairs (query, key) that attend.

        Args:
            q: Integer array of query positions.
            k: Integer array of key positions; `q` and `k` are broadcast against each other.
        """
        raise NotImplementedError

    def cover(self, q_span: Span, k_span: Span) -> Cover:
        """Return how much of `q_span` x `k_span` is visible.

        EMPTY and FULL must be exact; PARTIAL is always allowed. The default calls `covers` if the
        mask defines it. Otherwise it returns PARTIAL, so every key is sent to every rank.

        Args:
            q_span: Span of queries.
            k_span: Span of keys.
        """
        if type(self).covers is Mask.covers:
            return Cover.PARTIAL
        return Cover(int(self.covers(_as_arrays(q_span), _as_arrays(k_span))))

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        """Return how much of each pair of spans is visible: `Cover` values as an int64 array.

        Args:
            q_spans: Spans of queries, as integer arrays.
            k_spans: Spans of keys, as integer arrays; `q_spans` and `k_spans` are broadcast against
                each other.
        """
        fields = np.broadcast_arrays(*q_spans, *k_spans)
        if type(self).cover is Mask.cover:
            return np.full(fields[0].shape, PARTIAL)
        covers = [
            self.cover(Span(*map(int, pair[:3])), Span(*map(int, pair[3:])))
            for pair in zip(*(field.ravel() for field in fields), strict=True)
        ]
        return np.array(covers, dtype=np.int64).reshape(fields[0].shape)

    def bands(self, q_spans: Spans, k_spans: Spans) -> SpanBands:
        """Return the band of visible pairs of each pair of spans, if they are known to be a band.

        Args:
            q_spans: Spans of queries.
            k_spans: Spans of keys.
        """
        covers = self.covers(q_spans, k_spans)
        reach = np.where(covers == Cover.FULL, FAR, -FAR)
        return SpanBands(reach, reach, covers != Cover.PARTIAL)

    def band(self, q_span: Span, k_span: Span) -> Band | None:
        """Return the band of visible pairs of two spans; None if they are not known to be a band.

        Args:
            q_span: Span of queries.
            k_span: Span of keys.
        """
        left, right, known = self.bands(_as_arrays(q_span), _as_arrays(k_span))
        return Band(int(left), int(right)) if known else None

    def used(self, q_spans: Spans, k_spans: Spans) -> UsedRows:
        """Return which rows of each pair of spans may be in visible pairs; other rows are not sent.

        The method is called for pairs that are fully visible, or partly visible and not a band. The
        default returns all rows.

        Args:
            q_spans: Spans of queries, int64 [n].
            k_spans: Spans of keys, int64 [n].
        """
        zero = np.zeros_like(q_spans.length)
        return UsedRows(zero, q_spans.length, zero, k_spans.length)

    @property
    def has_used(self) -> bool:
        """True if the mask defines `used`."""
        return type(self).used is not Mask.used

    @property
    def has_viewers(self) -> bool:
        """True if the mask defines `viewers`."""
        return type(self).viewers is not Mask.viewers

    def viewers(self, k_spans: Spans) -> Viewers:
        """Return the query positions that see keys of each span.

        This method is optional. The default returns all positions; the package then restricts them
        by `covers`.

        Args:
            k_spans: Spans of keys, as int64 arrays of one shape.
        """
        far = np.full(np.shape(k_spans.start), FAR)
        return Viewers(-far, far, far, far, np.zeros_like(far, dtype=bool))

    @property
    def breaks(self) -> np.ndarray:
        """Sorted query positions at which the mask changes, such as the bounds of documents."""
        return np.empty(0, dtype=np.int64)

    @property
    def key_breaks(self) -> np.ndarray:
        """Sorted key positions at which the mask changes. Default: `breaks`."""
        return self.breaks

    def check(self, seq_len: int) -> None:
        """Raise ValueError unless the mask is valid for sequences of `seq_len` positions."""

    def check_lengths(self, seq_len: int, key_len: int) -> None:
        """Raise ValueError unless the mask is valid for queries and keys of two sequences.

        By default, the mask must be valid for a sequence of either length.

        Args:
            seq_len: Number of positions of the queries.
            key_len: Number of positions of the keys.
        """
        self.check(seq_len)
        if key_len != seq_len:
            self.check(key_len)

    def narrowed(self, other: Mask) -> Mask | None:
        """Return the mask of `self & other` if this class defines `&` specially; otherwise None.

        `Tree` defines this method, because a window of a tree counts tokens on the path to the
        root. Most masks return None.

        Args:
            other: Second operand of `&`.
        """
        return None

    def __and__(self, other: Mask) -> Mask:
        for mask, second in ((self, other), (other, self)):
            if isinstance(mask, Mask) and (combined := mask.narrowed(second)) is not None:
                return combined
        return _And(self, other)

    def __or__(self, other: Mask) -> Mask:
        return _Or(self, other)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: combine masks with & and |, compare with `is`")


class VectorMask(Mask):
    """Base class of masks that define `covers`, for arrays of spans; `cover` calls `covers`."""

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        raise NotImplementedError


def cover_where(empty: np.ndarray | bool, full: np.ndarray | bool) -> np.ndarray:
    """Return EMPTY if `empty` is true, else FULL if `full` is true, else PARTIAL (see `Cover`)."""
    return np.where(empty, EMPTY, np.where(full, FULL, PARTIAL))


def _as_arrays(span: Span) -> Spans:
    return Spans(*map(np.asarray, span))


class Combined(VectorMask):
    """Combination of two masks `a` and `b` by an operator.

    Attributes:
        symbol: The operator, "&" or "|".
        inner: Function that combines the results of `visible` of both masks, and the results of
            `covers` of both masks.
    """

    symbol: str
    inner: np.ufunc

    def __init__(self, a: Mask, b: Mask):
        if not isinstance(a, Mask) or not isinstance(b, Mask):
            raise TypeError(f"& and | require two masks, got {a!r} and {b!r}")
        self.a, self.b = a, b
        self.modulus = min(math.lcm(a.modulus, b.modulus), FAR)  # must fit into int64
        self.flash_compatible = a.flash_compatible and b.flash_compatible

    @property
    def cacheable(self) -> bool:
        return self.a.cacheable and self.b.cacheable

    @property
    def has_used(self) -> bool:
        return False

    @property
    def has_viewers(self) -> bool:
        return self.a.has_viewers and self.b.has_viewers

    @cached_property
    def breaks(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        return np.union1d(self.a.breaks, self.b.breaks)

    @cached_property
    def key_breaks(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        return np.union1d(self.a.key_breaks, self.b.key_breaks)

    def check(self, seq_len: int) -> None:
        self.a.check(seq_len)
        self.b.check(seq_len)

    def check_lengths(self, seq_len: int, key_len: int) -> None:
        self.a.check_lengths(seq_len, key_len)
        self.b.check_lengths(seq_len, key_len)

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return self.inner(self.a.visible(q, k), self.b.visible(q, k))

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        return self.inner(self.a.covers(q_spans, k_spans), self.b.covers(q_spans, k_spans))

    @property
    def complete_text(self) -> str:
        return f"({self.a.complete_text} {self.symbol} {self.b.complete_text})"

    def __repr__(self) -> str:
        return f"({self.a!r} {self.symbol} {self.b!r})"


def parts(mask: Mask) -> Iterator[Mask]:
    """Yield the masks of which a combination consists, or `mask` if it is not a combination."""
    if isinstance(mask, Combined):
        yield from parts(mask.a)
        yield from parts(mask.b)
    else:
        yield mask


def custom_parts(mask: Mask) -> list[Mask]:
    """Return the parts of a mask whose classes are not in this package."""
    package = f"{__name__.partition('.')[0]}."
    return [part for part in parts(mask) if not type(part).__module__.startswith(package)]


class _And(Combined):
    """Combination `a & b`: the pairs that are visible in both masks."""

    symbol, inner = "&", np.minimum

    @property
    def has_used(self) -> bool:
        return self.a.has_used or self.b.has_used

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

    def used(self, q_spans: Spans, k_spans: Spans) -> UsedRows:
        a, b = self.a.used(q_spans, k_spans), self.b.used(q_spans, k_spans)
        limits = np.maximum, np.minimum, np.maximum, np.minimum
        return UsedRows(*(limit(x, y) for limit, x, y in zip(limits, a, b, strict=True)))

    def viewers(self, k_spans: Spans) -> Viewers:
        a, b = self.a.viewers(k_spans), self.b.viewers(k_spans)
        first, (last, left, right) = np.maximum(a.first, b.first), map(np.minimum, a[1:4], b[1:4])
        return Viewers(first, last, left, right, a.exact & b.exact)


class _Or(Combined):
    """Combination `a | b`: the pairs that are visible in at least one of the two masks."""

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
        # Two bands with a gap between them are not a band. Adjacent diagonals leave no gap.
        touch = (a.left + b.right >= -1) & (b.left + a.right >= -1)
        return SpanBands(left, right, a.known & b.known & (touch | a_empty | b_empty))

    def viewers(self, k_spans: Spans) -> Viewers:
        a, b = self.a.viewers(k_spans), self.b.viewers(k_spans)
        first, (last, left, right) = np.minimum(a.first, b.first), map(np.maximum, a[1:4], b[1:4])
        single = a.holds(b) | b.holds(a)
        if single.all():
            return Viewers(first, last, left, right, single)
        # If the queries that see all keys of a span under either mask leave no gap, no other query
        # sees any key, as in Causal() | SameSpan(). Otherwise only the range is restricted.
        (some_a, all_a), (some_b, all_b) = a.reached(k_spans), b.reached(k_spans)
        begin, end = np.minimum(some_a[0], some_b[0]), np.maximum(some_a[1], some_b[1])
        joint = np.zeros_like(single)
        for x, y in ((all_a, all_b), (all_b, all_a)):
            joint |= (x[0] <= begin) & (y[0] <= x[1] + 1) & (y[1] >= end)
        joint &= a.exact & b.exact & ~single
        first, last = np.where(single, first, begin), np.where(single, last, end)
        left, right = np.where(joint, FAR, left), np.where(joint, FAR, right)
        return Viewers(first, last, left, right, single | joint)
