# SPDX-License-Identifier: Apache-2.0
"""Check of masks: comparison of the methods of a mask with the method `visible`.

`cover`, `covers`, `bands`, `used` and `viewers` must agree with `visible`. If they do not,
attention is wrong without an error: ranks skip pairs with cover EMPTY, and compute pairs with cover
FULL without a mask. `check` compares all pairs of spans of a short sequence, or a sample of a long
one. The sample is the same on every rank. It has shards of common layouts, small spans at the edges
of the visible region, and random spans.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..layout import Span, Spans, integer
from .base import EMPTY, FULL, Cover, Mask, parts

EXHAUSTIVE = 16  # longest sequence whose pairs of spans are all compared
PAIRS, POINTS = 1 << 12, 32  # pairs of spans, and pairs of positions in each, of a full check
FEW_PAIRS, FEW_POINTS = 1 << 9, 16  # same numbers for the check at a custom mask's first plan
CANDIDATES = 1 << 10  # positions at which edges of the visible region of a row are searched
MOST_CHANGES = 32  # largest number of edges for each query and each key


class _SpanPairs(NamedTuple):
    """Pairs of a query span and a key span, as arrays [pairs]."""

    q: Spans
    k: Spans


class _TwoLengths(NamedTuple):
    """Number of positions in the sequence of queries, and in the sequence of keys."""

    queries: int
    keys: int


def check(mask: Mask, seq_len: int, key_len: int | None = None) -> None:
    """Check that the methods and breaks of a mask agree with `visible`.

    For at most 16 positions, `cover` is compared for all pairs of spans; for longer sequences, for
    a fixed sample of 4,096 pairs. Only the complete comparison is a proof, so check a short length
    too. A custom mask is also checked by a sample of 512 pairs when its first plan is made.

    Args:
        mask: A mask of this package, a custom mask, or a combination of them.
        seq_len: Number of positions of the sequence, at least 1.
        key_len: Number of positions of the keys if they are another sequence, at least 1. Default:
            `seq_len`.

    Raises:
        ValueError: A method contradicts `visible`. The message names the method, the spans and a
            pair of positions.

    Example:
        >>> mb.masks.check(mb.masks.Causal() & mb.masks.Dilated(2), seq_len=16)
    """
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a mask from mb.masks, got {mask!r:.100}")
    key_len = seq_len if key_len is None else key_len
    for name, length in (("seq_len", seq_len), ("key_len", key_len)):
        if integer(name, length) < 1:
            raise ValueError(f"{name} must be at least 1, got {length}")
    mask.check_lengths(int(seq_len), int(key_len))
    for part in parts(mask):  # a combination is correct if its parts are
        _check(part, _TwoLengths(int(seq_len), int(key_len)), PAIRS, POINTS)


def check_custom(mask: Mask, seq_len: int, key_len: int | None = None) -> None:
    """Check a custom mask with a sample of 512 pairs of spans.

    Args:
        mask: The mask.
        seq_len: Number of positions of the queries, at least 1.
        key_len: Number of positions of the keys. If it is 0, nothing is checked. Default:
            `seq_len`.
    """
    key_len = seq_len if key_len is None else key_len
    if key_len:
        _check(mask, _TwoLengths(seq_len, key_len), FEW_PAIRS, FEW_POINTS)


def _check(mask: Mask, lengths: _TwoLengths, count: int, points: int) -> None:
    if type(mask).visible is Mask.visible:
        raise ValueError(f"{_name(mask)} defines no visible(q, k), which every mask needs")
    rng = np.random.default_rng(lengths.queries)
    _check_shapes(mask, lengths)
    if max(lengths) <= EXHAUSTIVE and points == POINTS:
        pairs = _all_pairs(lengths)
        _check_all(mask, lengths, pairs)
        sample = rng.permutation(len(pairs.q.start))[:count]
        pairs = _SpanPairs(pairs.q.at(sample), pairs.k.at(sample))
    else:
        pairs = _sample(mask, lengths, count, rng)
        _check_covers(mask, pairs, points, rng)
    _check_bands(mask, pairs, points, rng)
    _check_used(mask, pairs, points, rng)
    _check_viewers(mask, lengths.queries, pairs.k, points, rng)


# --- spans that are compared ----------------------------------------------------------------


def _all_pairs(lengths: _TwoLengths) -> _SpanPairs:
    q, k = _all_spans(lengths.queries), _all_spans(lengths.keys)
    return _SpanPairs(
        Spans(*(np.repeat(x, len(k[0])) for x in q)), Spans(*(np.tile(x, len(q[0])) for x in k))
    )


def _all_spans(seq_len: int) -> np.ndarray:
    """Return all spans of a sequence: int64 [3, n] with start, stride and length."""
    spans = [
        (start, stride, length)
        for start, stride in product(range(seq_len), range(1, seq_len + 1))
        for length in range(1, (seq_len - 1 - start) // stride + 2)
        if length > 1 or stride == 1
    ]
    return np.array(spans, dtype=np.int64).T


def _sample(mask: Mask, lengths: _TwoLengths, count: int, rng: np.random.Generator) -> _SpanPairs:
    """Return `count` pairs of spans.

    25 % are pairs of shards of common layouts, at most 50 % are at positions where `visible`
    changes, and the other pairs are random.
    """
    shards = [_shards(length) for length in lengths]
    chosen = [spans[rng.integers(0, len(spans), count // 4)] for spans in shards]
    rows = [np.concatenate(chosen, 1), _at_edges(mask, lengths, count // 2, rng)]
    remaining = count - sum(map(len, rows))
    length = 1 << rng.integers(0, max(1, max(lengths).bit_length()), (remaining, 2))
    stride = np.where(rng.random((remaining, 2)) < 0.7, 1, 1 << rng.integers(0, 7, (remaining, 2)))
    start = rng.integers(0, lengths, (remaining, 2))
    start = np.where(rng.random((remaining, 2)) < 0.5, start // length * length, start)
    spans = np.stack([start, stride, length], 2).reshape(remaining, 6)
    spans_of_pairs = np.concatenate([*rows, spans])
    first, second = (
        _inside(columns, seq_len)
        for columns, seq_len in zip(np.hsplit(spans_of_pairs, 2), lengths, strict=True)
    )
    return _SpanPairs(Spans(*first.T), Spans(*second.T))


def _inside(spans: np.ndarray, seq_len: int) -> np.ndarray:
    """Clip spans to the positions of the sequence.

    Args:
        spans: int64 [n, 3]: start, stride and length of each span.
        seq_len: Number of positions of the sequence.
    """
    start, stride, length = spans.T
    start = np.clip(start, 0, seq_len - 1)
    return np.stack([start, stride, np.clip(length, 1, (seq_len - 1 - start) // stride + 1)], 1)


def _shards(seq_len: int) -> np.ndarray:
    """Return the shards of contiguous and striped layouts on 1, 2, 4, 8 and 16 ranks.

    The result is int64 [n, 3]: start, stride and length.
    """
    spans = [(0, 1, seq_len)]
    for ranks in (2, 4, 8, 16):
        size = -(-seq_len // ranks)
        spans += [(start, 1, size) for start in range(0, seq_len, size)]
        spans += [(start, ranks, seq_len) for start in range(min(ranks, seq_len))]
    return _inside(np.array(spans, dtype=np.int64), seq_len)


def _at_edges(mask: Mask, lengths: _TwoLengths, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return pairs of spans that begin or end near changes of `visible`.

    The result is int64 [n, 6] with n = `count`, or 0 if nothing changes: start, stride and length
    of the query span, then of the key span.
    """
    edges = []
    for query in _sampled_positions(lengths.queries, rng):
        edges += [(query, k) for k in _changes(mask, query, lengths.keys, False)]
    for key in _sampled_positions(lengths.keys, rng):
        edges += [(q, key) for q in _changes(mask, key, lengths.queries, True)]
    if not edges:
        return np.empty((0, 6), dtype=np.int64)
    sizes = [(start, size) for size in (1, 2, 3, 16, 128) for start in (0, 1, size - 1, size)]
    choices = np.array([(a, x, b, y) for (a, x), (b, y) in product(sizes, sizes)])
    at = np.array(edges)[rng.integers(0, len(edges), count)]
    back_q, size_q, back_k, size_k = choices[rng.integers(0, len(choices), count)].T
    ones = np.ones(count, dtype=np.int64)
    return np.stack([at[:, 0] - back_q, ones, size_q, at[:, 1] - back_k, ones, size_k], 1)


def _sampled_positions(seq_len: int, rng: np.random.Generator) -> list[int]:
    rows = np.unique([0, 1, seq_len // 2, seq_len - 1, *rng.integers(0, seq_len, 4)])
    return rows[rows < seq_len].tolist()


def _changes(mask: Mask, row: int, seq_len: int, of_key: bool) -> np.ndarray:
    """Return some positions at which `visible` changes, for one query or one key.

    Args:
        mask: The mask.
        row: Position of the query, or of the key with `of_key`.
        seq_len: Number of positions of the keys, or of the queries with `of_key`.
        of_key: False if `row` is a query and the result has key positions. True if `row` is a key
            and the result has query positions.
    """
    near = np.arange(max(0, row - CANDIDATES // 2), min(seq_len, row + CANDIDATES // 2))
    far = np.linspace(0, seq_len - 1, CANDIDATES // 2).astype(np.int64)
    ends = np.clip([1, 2, seq_len - 3, seq_len - 2], 0, seq_len - 1)
    at = np.unique(np.concatenate([near, far, ends]))

    def sees(positions: np.ndarray) -> np.ndarray:
        rows = np.full_like(positions, row)
        return _visible(mask, *((positions, rows) if of_key else (rows, positions)))

    seen = sees(at)
    (change,) = np.nonzero(seen[1:] != seen[:-1])
    if len(change) > MOST_CHANGES:
        change = change[np.linspace(0, len(change) - 1, MOST_CHANGES).astype(np.int64)]
    low, high, before = at[change], at[change + 1], seen[change]
    while (high - low > 1).any():
        middle = (low + high) // 2
        same = sees(middle) == before
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    return high


# --- comparisons ----------------------------------------------------------------------------


def _check_shapes(mask: Mask, lengths: _TwoLengths) -> None:
    """Check that `visible` supports arrays of several shapes, and that breaks are sorted."""
    queries, keys = (
        np.unique(np.linspace(0, seq_len - 1, 8).astype(np.int64)) for seq_len in lengths
    )
    table = _visible(mask, queries[:, None], keys[None])
    for i, q in enumerate(queries):
        by_row = _visible(mask, np.full_like(keys, q), keys)
        if (by_row != table[i]).any():
            k = keys[(by_row != table[i]).argmax()]
            raise ValueError(
                f"{_name(mask)}: visible depends on the shapes of the arrays for query {q} and key "
                f"{k}; compute each entry only from its q and its k"
            )
    for name in ("breaks", "key_breaks"):
        breaks = np.asarray(getattr(mask, name))
        if breaks.ndim != 1 or (breaks.size and breaks.dtype.kind not in "iu"):
            raise ValueError(f"{_name(mask)}: {name} must be integers [n], got {breaks!r:.100}")
        if (np.diff(breaks) < 0).any():
            raise ValueError(f"{_name(mask)}: {name} must be sorted, got {breaks!r:.100}")


def _visible(mask: Mask, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    visible, shape = np.asarray(mask.visible(q, k)), np.broadcast_shapes(q.shape, k.shape)
    if visible.dtype != np.bool_ or visible.shape != shape:
        raise ValueError(
            f"{_name(mask)}: visible must return booleans of shape {shape} for q {q.shape} and k "
            f"{k.shape}, got {visible.dtype} of shape {visible.shape}"
        )
    return visible


def _covers(mask: Mask, pairs: _SpanPairs) -> np.ndarray:
    covers, shape = np.asarray(mask.covers(pairs.q, pairs.k)), pairs.q.start.shape
    if covers.shape != shape or not np.isin(covers, list(map(int, Cover))).all():
        raise ValueError(
            f"{_name(mask)}: covers must return Cover values of shape {shape}, got "
            f"{covers.dtype} {covers!r:.100} of shape {covers.shape}"
        )
    return covers


def _check_all(mask: Mask, lengths: _TwoLengths, pairs: _SpanPairs) -> None:
    """Compare `covers` with `visible` for all pairs of positions of all pairs of spans."""
    at_queries, at_keys = (np.arange(seq_len) for seq_len in lengths)
    seen = _visible(mask, at_queries[:, None], at_keys[None])
    inside = []
    for seq_len, at in zip(lengths, (at_queries, at_keys), strict=True):
        start, stride, length = (x[:, None] for x in _all_spans(seq_len))
        offset = at[None] - start
        within = (offset >= 0) & (offset % stride == 0) & (offset // stride < length)
        inside.append(within.astype(np.int64))
    count = (inside[0] @ seen @ inside[1].T).ravel()
    all_pairs = pairs.q.length * pairs.k.length
    covers = _covers(mask, pairs)
    wrong = ((covers == EMPTY) & (count > 0)) | ((covers == FULL) & (count < all_pairs))
    if wrong.any():
        i = int(wrong.argmax())
        q, k = (Span(*(int(column[i]) for column in x)).positions() for x in pairs)
        a, b = np.argwhere(seen[np.ix_(q, k)] == (covers[i] == EMPTY))[0]
        _raise(mask, "cover", Cover(int(covers[i])).name, pairs, i, (q[a], k[b]))


def _points(
    pairs: _SpanPairs, points: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of positions (points) to compare in each pair of spans.

    The points are the four corners of the rectangle of positions, and random points. If the
    rectangle has at most `points` points, all of them are returned.

    Returns:
        Index within the query span and index within the key span, [pairs, points] each.
    """
    rows, columns = (x.length[:, None] for x in pairs)
    index = np.arange(points)[None]
    corner = index < 4
    m = np.where(corner, (index & 1) * (rows - 1), (rng.random((len(rows), points)) * rows))
    n = np.where(corner, (index >> 1) * (columns - 1), rng.random((len(rows), points)) * columns)
    small = rows * columns <= points
    m = np.where(small, index // columns % rows, m)
    n = np.where(small, index % columns, n)
    return m.astype(np.int64), n.astype(np.int64)


def _check_covers(mask: Mask, pairs: _SpanPairs, points: int, rng: np.random.Generator) -> None:
    covers = _covers(mask, pairs)
    m, n = _points(pairs, points, rng)
    q, k = _positions(pairs, m, n)
    seen = _visible(mask, q, k)
    wrong = np.where(seen, covers[:, None] == EMPTY, covers[:, None] == FULL)
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        _raise(mask, "cover", Cover(int(covers[i])).name, pairs, i, (q[i, j], k[i, j]))


def _positions(pairs: _SpanPairs, m: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    (q, q_stride, _), (k, k_stride, _) = ((y[:, None] for y in x) for x in pairs)
    return q + m * q_stride, k + n * k_stride


def _check_bands(mask: Mask, pairs: _SpanPairs, points: int, rng: np.random.Generator) -> None:
    """Compare `bands` with `visible`, if the mask defines `bands`."""
    if type(mask).bands is Mask.bands:
        return
    left, right, known = (
        np.broadcast_to(x, pairs.q.start.shape)[:, None] for x in mask.bands(pairs.q, pairs.k)
    )
    m, n = _points(pairs, points, rng)
    q, k = _positions(pairs, m, n)
    wrong = known & (_visible(mask, q, k) != ((n >= m - left) & (n <= m + right)))
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        band = f"({left[i, 0]}, {right[i, 0]})"
        _raise(mask, "bands", band, pairs, i, (q[i, j], k[i, j]))


def _check_used(mask: Mask, pairs: _SpanPairs, points: int, rng: np.random.Generator) -> None:
    """Compare `used` with `visible`, if the mask defines `used`."""
    if not mask.has_used:
        return
    q_first, q_stop, k_first, k_stop = (x[:, None] for x in mask.used(pairs.q, pairs.k))
    m, n = _points(pairs, points, rng)
    q, k = _positions(pairs, m, n)
    inside = (m >= q_first) & (m < q_stop) & (n >= k_first) & (n < k_stop)
    wrong = _visible(mask, q, k) & ~inside
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        rows = f"rows {q_first[i, 0]} to {q_stop[i, 0]}, keys {k_first[i, 0]} to {k_stop[i, 0]}"
        _raise(mask, "used", rows, pairs, i, (q[i, j], k[i, j]))


def _check_viewers(
    mask: Mask, seq_len: int, keys: Spans, points: int, rng: np.random.Generator
) -> None:
    """Compare `viewers` with `visible`, if the mask defines `viewers`."""
    if type(mask).viewers is Mask.viewers:
        return
    viewers = mask.viewers(keys)
    first, last, left, right, exact = (
        np.broadcast_to(x, keys.start.shape)[:, None] for x in viewers
    )
    zero = np.zeros_like(keys.start)
    pairs = _SpanPairs(Spans(zero, zero + 1, zero + seq_len), keys)
    m, n = _points(pairs, points, rng)
    # Queries next to the limits of a range, in the first half of the points.
    limits = np.stack([first, first - 1, last, last + 1], 2).reshape(len(m), 4)
    half = points // 2
    m[:, :half] = np.clip(np.tile(limits, half // 4), 0, seq_len - 1)
    n[:, :half] = (rng.random((len(n), half)) * keys.length[:, None]).astype(np.int64)
    q, k = _positions(pairs, m, n)
    inside = (q >= first) & (q <= last) & (k >= q - left) & (k <= q + right)
    seen = _visible(mask, q, k)
    wrong = np.where(seen, ~inside, inside & exact)
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        values = f"({first[i, 0]}, {last[i, 0]}, {left[i, 0]}, {right[i, 0]}, {exact[i, 0]})"
        _raise(mask, "viewers", values, pairs, i, (q[i, j], k[i, j]))


def _raise(
    mask: Mask, method: str, value: str, pairs: _SpanPairs, i: Any, at: tuple[Any, Any]
) -> None:
    """Raise an error: a method of a mask contradicts `visible`.

    Args:
        mask: The mask.
        method: Name of the method.
        value: Result of the method, as text.
        pairs: Pairs of spans.
        i: Index of the pair of spans with the contradiction.
        at: Position of the query and position of the key with the contradiction.
    """
    q_span, k_span = (f"Span({x.start[i]}, {x.stride[i]}, {x.length[i]})" for x in pairs)
    q, k = map(int, at)
    seen = bool(mask.visible(np.array([q]), np.array([k]))[0])
    spans = f"k_spans={k_span}" if method == "viewers" else f"q_span={q_span}, k_span={k_span}"
    remedy = "; return Cover.PARTIAL if the pairs may differ" if method == "cover" else ""
    raise ValueError(
        f"{_name(mask)}: {method} is {value} for {spans}, but visible is {seen} for query {q} and "
        f"key {k}{remedy}"
    )


def _name(mask: Mask) -> str:
    text = repr(mask)
    return text if len(text) <= 100 else f"{text[:80]}...: {type(mask).__name__}"
