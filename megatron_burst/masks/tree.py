# SPDX-License-Identifier: Apache-2.0
"""Mask `Tree`, for prefix trees of token sequences whose rows are in depth-first order.

The rows of a subtree are one interval, so one bound per key decides visibility: query q sees key k
if k <= q < out[k]. Runs of rows with equal bounds are segments of the tree. For the queries of one
segment and the keys of one segment, the mask is causal or empty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ..layout import Spans
from .base import FAR, PARTIAL, Combined, Mask, SpanBands, VectorMask, Viewers, cover_where
from .positions import Window


class Tree(VectorMask):
    """Mask of prefix trees: a token attends to itself and its ancestors.

    Row q sees row k if k <= q < out[k]. A sequence may have several trees, one after another. If
    out[k] is the end of the document of row k for every k, the mask is equal to
    `Documents(cu_seqlens) & Causal()`. `Tree(out) & Window(w, 0)` is `Tree(out, window=w)`.

    Args:
        out: Integers [S]. out[k] is the first row after the subtree of row k. Rows must be in
            depth-first order, as from `mb.trees.pack`. A row with out[k] <= k is padding: it sees
            nothing, and no row sees it.
        window: Number of nearest ancestors that a row sees, in addition to itself. Distances are
            counted along the path to the root, not in rows. None for no limit.

    Attributes:
        bounds: int64 [segments + 1], first row of each segment, then S. A segment is a run of rows
            with equal `out`.
        parents: int64 [segments], index of the parent of each segment; -1 for roots and padding.

    Raises:
        ValueError: `out` does not describe trees, or `window` is invalid.

    Example:
        >>> mask = mb.masks.Tree([4, 3, 3, 4])
        >>> mask.visible(np.array([3]), np.arange(4))
        array([ True, False, False,  True])
    """

    def __init__(self, out: Sequence[int] | np.ndarray, window: int | None = None):
        self.out = _bounds(out)
        self.window = None if window is None else Window(window, 0).left
        first = np.flatnonzero(np.diff(self.out, prepend=-1))
        self.bounds = np.append(first, len(self.out))
        self._outs = self.out[first]
        self.parents = _parents(first.tolist(), self._outs.tolist())
        self._padding_before = np.concatenate([[0], np.cumsum(self.out == 0)])

    @property
    def flash_compatible(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.window is None

    @property
    def cacheable(self) -> bool:
        return False  # every batch has other trees

    @cached_property
    def depths(self) -> np.ndarray:
        """Number of ancestors of each row, int64 [S]."""
        rows, size = np.flatnonzero(self.out), len(self.out) + 1
        begun = np.bincount(rows + 1, minlength=size)
        return np.cumsum(begun - np.bincount(self.out[rows], minlength=size))[:-1]

    @property
    def bases(self) -> np.ndarray:
        """Depth of the first row of each segment, int64 [segments]."""
        return self.depths[self.bounds[:-1]]

    @property
    def padding(self) -> np.ndarray:
        """Indices of segments that are padding."""
        return np.flatnonzero(self._outs == 0)

    @property
    def pairs(self) -> int:
        """Number of visible pairs (query, key)."""
        ancestors = self.depths[self.out > 0]
        if self.window is not None:
            ancestors = np.minimum(ancestors, self.window)
        return int(ancestors.sum()) + len(ancestors)

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        seen = np.less_equal(k, q) & np.less(q, self.out[k]) & (self.out[q] > 0)
        return seen if self.window is None else seen & (self._distance(q, k) <= self.window)

    def _distance(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return self.depths[q] - self.depths[k]

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        keys, queries = self._segments(k_spans), self._segments(q_spans)
        padding = self._padding(q_spans.start, q_spans.last)
        empty = np.greater(k_spans.start, q_spans.last)
        empty = empty | np.greater_equal(q_spans.start, self._latest.of(*keys))
        empty = empty | (padding == np.subtract(q_spans.last, q_spans.start) + 1)
        full = np.less_equal(k_spans.last, q_spans.start) & (padding == 0)
        full = full & np.less(q_spans.last, self._earliest.of(*keys))
        if self.window is not None:
            (q_low, q_high), (k_low, k_high) = (
                self._depths_within(spans, *segments)
                for spans, segments in ((q_spans, queries), (k_spans, keys))
            )
            empty = empty | (q_low - k_high > self.window)
            full = full & (q_high - k_low <= self.window)
        return cover_where(empty, full)

    def bands(self, q_spans: Spans, k_spans: Spans) -> SpanBands:
        covers, keys = self.covers(q_spans, k_spans), self._segments(k_spans)
        known = np.equal(q_spans.stride, k_spans.stride)
        known = known & np.less(q_spans.last, self._earliest.of(*keys))  # descendants of these keys
        known = known & (self._padding(q_spans.start, q_spans.last) == 0)
        left = np.full(covers.shape, FAR)
        if self.window is not None:  # within a segment, path and row distances are equal
            queries = self._segments(q_spans)
            known = known & (queries[0] == queries[1]) & (keys[0] == keys[1])
            distance = self._distance(q_spans.start, k_spans.start)
            left = (self.window - distance) // np.asarray(q_spans.stride)
        right = np.subtract(q_spans.start, k_spans.start) // np.asarray(q_spans.stride)
        known = known & (covers == PARTIAL)
        default = super().bands(q_spans, k_spans)
        return SpanBands(
            np.where(known, left, default.left),
            np.where(known, right, default.right),
            known | default.known,
        )

    def viewers(self, k_spans: Spans) -> Viewers:
        keys = self._segments(k_spans)
        end = self._latest.of(*keys)
        far, seen = np.full(np.shape(end), FAR), end > 0
        last = np.where(seen, end - 1, k_spans.start)
        exact = seen & (end == self._earliest.of(*keys)) & (self.window is None)
        exact = exact & (self._padding(k_spans.start, last) == 0)
        first = np.where(seen, k_spans.start, FAR)
        return Viewers(first, np.where(seen, last, -FAR), far, np.zeros_like(far), exact)

    @property
    def breaks(self) -> np.ndarray:
        return self.bounds

    def narrowed(self, other: Mask) -> Mask | None:
        if isinstance(other, Combined):
            if self.narrowed(other.a) is None and self.narrowed(other.b) is None:
                return None
            if other.symbol == "&":
                return self & other.a & other.b
            return (self & other.a) | (self & other.b)
        if not isinstance(other, Window):
            return None
        if other.left is None:
            return self  # no row sees later rows
        return Tree(self.out, other.left if self.window is None else min(self.window, other.left))

    def check(self, seq_len: int) -> None:
        if len(self.out) != seq_len:
            raise ValueError(
                f"out: the tree has {len(self.out)} rows, the sequence has {seq_len} positions"
            )

    def _segments(self, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        """Return the segment of the first position, and that of the last position, of each span."""
        first, last = (
            np.searchsorted(self.bounds, row, side="right") - 1 for row in (spans.start, spans.last)
        )
        return first, last

    def _padding(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Return the number of padding rows from row `first` to row `last`, inclusive."""
        before = self._padding_before
        return before[np.add(last, 1)] - before[first]

    def _depths_within(
        self, spans: Spans, first: np.ndarray, last: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the smallest and the largest depth (number of ancestors) in each span.

        Args:
            spans: The spans.
            first: Segment of the first position of each span.
            last: Segment of the last position of each span.
        """
        low, high = self.depths[spans.start], self.depths[spans.last]
        # A span has the first rows of segments first + 1 to last, and the last rows of segments
        # first to last - 1.
        several = first < last
        after, before = np.where(several, first + 1, first), np.where(several, last - 1, last)
        low = np.where(several, np.minimum(low, self._highest.of(after, last)), low)
        return low, np.where(several, np.maximum(high, self._deepest.of(first, before)), high)

    @cached_property
    def _earliest(self) -> _Extremes:
        return _Extremes(self._outs, np.minimum)

    @cached_property
    def _latest(self) -> _Extremes:
        return _Extremes(self._outs, np.maximum)

    @cached_property
    def _highest(self) -> _Extremes:
        return _Extremes(self.bases, np.minimum)

    @cached_property
    def _deepest(self) -> _Extremes:
        return _Extremes(self.depths[self.bounds[1:] - 1], np.maximum)

    @cached_property
    def _digest(self) -> str:
        return hashlib.blake2b(self.out.tobytes(), digest_size=8).hexdigest()

    def __repr__(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return f"Tree(<{len(self.out)} rows, {len(self._outs)} segments, {self._digest}>{window})"


class _Extremes:
    """Sparse table, which computes the minimum or maximum of values[first..last] in O(1).

    Row j of the table has the minimum (or maximum) of 2^j consecutive values.
    """

    def __init__(self, values: np.ndarray, pick: np.ufunc):
        self.pick, rows = pick, [values]
        while 2 ** len(rows) <= len(values):
            last, width = rows[-1], 2 ** (len(rows) - 1)
            rows.append(np.append(pick(last[:-width], last[width:]), last[-width:]))
        self.table = np.array(rows)

    def of(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        level = np.frexp(np.subtract(last, first) + 1)[1] - 1
        return self.pick(self.table[level, first], self.table[level, last + 1 - 2**level])


def _bounds(out: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return a copy of `out` as int64 [S], with 0 for padding.

    Raises ValueError unless `out` has one integer per row, at most the number of rows.
    """
    try:
        array = np.asarray(out)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, on a device, or with gradient
        raise ValueError(f"out must hold integers on the host, got {out}") from error
    if array.dtype.kind not in "iu" or array.ndim != 1 or not array.size:
        raise ValueError(
            f"out must hold one integer per row, got {array.dtype} of shape {array.shape}"
        )
    if array.max() > len(array):
        row = int(array.argmax())
        raise ValueError(
            f"out: the subtree of row {row} ends at {array[row]}, but the tree has {len(array)} "
            "rows"
        )
    bounds = array.astype(np.int64)
    bounds[bounds <= np.arange(len(bounds))] = 0
    bounds.flags.writeable = False  # plans are made from them
    return bounds


def _parents(first: list[int], outs: list[int]) -> np.ndarray:
    """Return the parent segment of each segment, int64 [segments]; -1 for roots and padding.

    Raises ValueError unless each subtree is within the subtree of its parent.
    """
    parents, path = [], []  # path: segments whose subtrees are open
    for segment, (row, end) in enumerate(zip(first, outs, strict=True)):
        while path and outs[path[-1]] <= row:
            path.pop()
        if path and end > outs[path[-1]]:
            raise ValueError(
                f"out: the subtree of row {row} ends at {end}, but the subtree of its ancestor "
                f"ends at {outs[path[-1]]}; rows must be in depth-first order"
            )
        parents.append(path[-1] if path and end else -1)
        if end:
            path.append(segment)
    return np.array(parents, dtype=np.int64)
