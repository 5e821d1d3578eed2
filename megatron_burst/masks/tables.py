# SPDX-License-Identifier: Apache-2.0
"""Masks that are defined by bounds or tables: Documents, SameSpan, BlockSparse, Dense.

`shards_visible` computes which query shards see which key shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ..layout import Span, Spans, document_bounds, integer, padding_documents
from ..layout.layouts import Shards, pieces_of
from .base import FAR, Cover, Mask, VectorMask, Viewers, cover_where


class Documents(VectorMask):
    """Mask of packed documents: the positions of a document attend to each other.

    Causal packed documents are `Documents(cu_seqlens) & Causal()`.

    Args:
        cu_seqlens: Cumulative lengths 0 = c_0 <= c_1 <= ... <= c_n = length of the sequence.
        padding: Indices of documents that are padding. Their rows attend to nothing, and nothing
            attends to them.
        key_cu_seqlens: Cumulative lengths of the documents of the keys, if keys are another
            sequence (option `key_layout`). The number of documents must be the same as in
            `cu_seqlens`. Default: `cu_seqlens`.

    Raises:
        ValueError: `cu_seqlens`, `padding` or `key_cu_seqlens` is invalid.

    Example:
        >>> mask = mb.masks.Documents([0, 2, 4]) & mb.masks.Causal()
        >>> mask.visible(np.array([3]), np.arange(4))
        array([False, False,  True,  True])
    """

    flash_compatible = True

    def __init__(
        self,
        cu_seqlens: Sequence[int] | np.ndarray,
        padding: Sequence[int] = (),
        key_cu_seqlens: Sequence[int] | np.ndarray | None = None,
    ):
        self._bounds = self._key_bounds = document_bounds(cu_seqlens)
        if key_cu_seqlens is not None:
            self._key_bounds = document_bounds(key_cu_seqlens, "key_cu_seqlens")
        self._bounds.flags.writeable = self._key_bounds.flags.writeable = False
        documents = len(self.bounds) - 1
        if len(self._key_bounds) - 1 != documents:
            raise ValueError(
                f"key_cu_seqlens must have as many documents as cu_seqlens ({documents}), got "
                f"{len(self._key_bounds) - 1}; for a document without keys, repeat its boundary"
            )
        self._padding = padding_documents(padding, documents)
        # Indexed by the result of `document`, which is i + 1 for document i and 0 before the first.
        # Documents without queries or without keys count as padding: no pair in them is visible.
        self._hidden = np.zeros(documents + 2, dtype=bool)
        self._hidden[1:-1] = (np.diff(self.bounds) == 0) | (np.diff(self._key_bounds) == 0)
        self._hidden[[index + 1 for index in self.padding]] = True
        self._hidden_before = np.concatenate([[0], np.cumsum(self._hidden)])
        # first positions of: what is before the documents, each document, what is after them
        self._edges = np.concatenate([[-FAR], self.bounds, [FAR]])

    @property
    def bounds(self) -> np.ndarray:
        """Cumulative lengths, int64 [documents + 1].

        The array is read-only, because plans depend on it.
        """
        return self._bounds

    @property
    def padding(self) -> tuple[int, ...]:
        """Indices of documents that are padding, ascending."""
        return self._padding

    @property
    def cacheable(self) -> bool:
        return False  # every batch has other documents

    @property
    def key_bounds(self) -> np.ndarray:
        """Cumulative lengths of the keys' documents, int64 [documents + 1], read-only."""
        return self._key_bounds

    @property
    def for_other_keys(self) -> bool:
        """True if keys have documents of their own (`key_cu_seqlens`)."""
        return self._key_bounds is not self._bounds

    def document(self, positions: np.ndarray | int) -> np.ndarray:
        """Return, for each position, 1 + the index of the document; 0 for negative positions.

        Args:
            positions: Integer array of query positions.
        """
        return np.searchsorted(self.bounds, positions, side="right")

    def document_of_key(self, positions: np.ndarray | int) -> np.ndarray:
        """Return, for each key position, 1 + the index of the document; 0 for negative positions.

        Args:
            positions: Integer array of key positions.
        """
        return np.searchsorted(self.key_bounds, positions, side="right")

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        document = self.document(q)
        return np.equal(document, self.document_of_key(k)) & ~self._hidden[document]

    def keys_of_queries(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first key position that each query sees, and the position after the last one.

        Args:
            q: Query positions [n], each in a document.
        """
        document = self.document(q)
        low, high = self.key_bounds[document - 1], self.key_bounds[document]
        return low, np.where(self._hidden[document], low, high)

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        q_first, q_last = _documents_of(self.bounds, q_spans)
        k_first, k_last = _documents_of(self.key_bounds, k_spans)
        first, last = np.maximum(q_first, k_first), np.minimum(q_last, k_last)
        empty = (last < first) | self._all_hidden(first, np.maximum(first, last))
        return cover_where(empty, (q_first == q_last) & (k_first == k_last) & (q_first == k_first))

    def viewers(self, k_spans: Spans) -> Viewers:
        after, end = _documents_of(self.key_bounds, k_spans)
        hidden = self._all_hidden(after, end)
        first, last = (
            np.where(hidden, FAR, self._edges[after]),
            np.where(hidden, -FAR, self._edges[end + 1] - 1),
        )
        far = np.where(hidden, -FAR, FAR)  # no query if hidden, so `Viewers.holds` is true
        return Viewers(first, last, far, far, (after == end) | hidden)

    def _all_hidden(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Return whether each range of documents contains no visible pair.

        A document has no visible pair if it is padding, or if it has no queries or no keys.

        Args:
            first: First document of each range, as from `document`.
            last: Last document of each range, as from `document`.
        """
        before = self._hidden_before
        return before[last + 1] - before[first] == last + 1 - first

    @property
    def breaks(self) -> np.ndarray:
        return self.bounds

    @property
    def key_breaks(self) -> np.ndarray:
        return self.key_bounds

    def check(self, seq_len: int) -> None:
        self.check_lengths(seq_len, seq_len)

    def check_lengths(self, seq_len: int, key_len: int) -> None:
        if self.bounds[-1] != seq_len:
            raise ValueError(
                f"cu_seqlens must end at the length of the sequence, {seq_len}, "
                f"got {self.bounds[-1]}"
            )
        if self.key_bounds[-1] != key_len:
            if not self.for_other_keys:
                raise ValueError(
                    f"the keys have {key_len} positions, and cu_seqlens ends at {self.bounds[-1]}; "
                    "pass key_cu_seqlens, the cumulative lengths of the keys' documents"
                )
            raise ValueError(
                f"key_cu_seqlens must end at the number of key positions, {key_len}, got "
                f"{self.key_bounds[-1]}"
            )

    def __repr__(self) -> str:
        padding = f", padding={self.padding}" if self.padding else ""
        keys = f", key_cu_seqlens={self.key_bounds.tolist()}" if self.for_other_keys else ""
        return f"Documents({self.bounds.tolist()}{padding}{keys})"


class SameSpan(VectorMask):
    """Span mask: the positions of one span see each other, in both directions.

    Positions outside all spans see nothing. The mask of a causal sequence with images whose tokens
    see each other is `Causal() | SameSpan(images)`.

    Args:
        spans: (start, stop) of each span: integers in ascending order, without overlaps. Adjacent
            spans do not see each other.

    Raises:
        ValueError: `spans` is invalid.

    Example:
        >>> mask = mb.masks.Causal() | mb.masks.SameSpan([(1, 3)])
        >>> mask.visible(np.array([1]), np.arange(4))
        array([ True,  True,  True, False])
    """

    flash_compatible = True

    def __init__(self, spans: Sequence[tuple[int, int]] | np.ndarray):
        self.spans = _spans(spans)
        edges = [0, *(edge for span in self.spans for edge in span), FAR]
        # Every second document is padding: the positions between the spans, and after them.
        self.documents = Documents(edges, padding=range(0, len(edges), 2))

    @property
    def cacheable(self) -> bool:
        return False  # every batch has other spans

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return self.documents.visible(q, k)

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        return self.documents.covers(q_spans, k_spans)

    def viewers(self, k_spans: Spans) -> Viewers:
        return self.documents.viewers(k_spans)

    @property
    def breaks(self) -> np.ndarray:
        return self.documents.bounds

    def check(self, seq_len: int) -> None:
        if self.spans and self.spans[-1][1] > seq_len:
            raise ValueError(
                f"spans: the last span ends at {self.spans[-1][1]}, after the end of the sequence, "
                f"{seq_len}"
            )

    def __repr__(self) -> str:
        return f"SameSpan({[*self.spans]})"


class _Table(Mask):
    """Base class of masks with a table of visible pairs of queries (rows) and keys (columns)."""

    table: np.ndarray

    @cached_property
    def digest(self) -> str:
        """Text with the shape and a hash of the table, for the `repr` of the mask."""
        digest = hashlib.blake2b(np.packbits(self.table).tobytes(), digest_size=8).hexdigest()
        return f"<{self.table.shape[0]} x {self.table.shape[1]}, {digest}>"


class BlockSparse(_Table, VectorMask):
    """Block-sparse mask: query block i attends to key block j if table[i, j].

    Source: BurstEngine, section 3.4.

    Args:
        table: bool or 0/1, [n, n]; or [n, m] if keys are another sequence (option `key_layout`).
        block: Number of positions of a block; n * block is the number of query positions, and m *
            block the number of key positions.

    Raises:
        ValueError: `table` or `block` is invalid.

    Example:
        >>> mask = mb.masks.BlockSparse(np.array([[1, 0], [1, 1]]), block=2)
        >>> mask.visible(np.array([1]), np.arange(4))
        array([ True,  True, False, False])
    """

    def __init__(self, table: np.ndarray, block: int):
        self.table = _bool_table(table)
        self.block = integer("block", block)
        if self.block < 1:
            raise ValueError(f"block must be at least 1, got {block}")

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return self.table[np.floor_divide(q, self.block), np.floor_divide(k, self.block)]

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        (top, bottom), (first, stop) = (
            (np.floor_divide(x.start, self.block), np.floor_divide(x.last, self.block) + 1)
            for x in (q_spans, k_spans)
        )
        sums = self._sums
        visible = sums[bottom, stop] - sums[top, stop] - sums[bottom, first] + sums[top, first]
        return cover_where(visible == 0, visible == (bottom - top) * (stop - first))

    @cached_property
    def _sums(self) -> np.ndarray:
        """Number of visible blocks above and to the left of each corner, int64 [n + 1, m + 1]."""
        return np.pad(self.table.cumsum(0).cumsum(1), ((1, 0), (1, 0)))

    def viewers(self, k_spans: Spans) -> Viewers:
        first, last = (np.floor_divide(x, self.block) for x in (k_spans.start, k_spans.last))
        top, bottom = self._rows
        far, single = np.full(np.shape(first), FAR), first == last
        low = np.where(single, top[first] * self.block, -far)
        high = np.where(single, (bottom[first] + 1) * self.block - 1, far)
        return Viewers(low, high, far, far, np.zeros_like(single))

    @cached_property
    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        """First and last query block that sees each key block, int64 [m] each.

        If no query block sees the key block, the first is n and the last is -1.
        """
        any_, n = self.table.any(axis=0), len(self.table)
        last = n - 1 - self.table[::-1].argmax(axis=0)
        return np.where(any_, self.table.argmax(axis=0), n), np.where(any_, last, -1)

    @property
    def breaks(self) -> np.ndarray:
        return np.arange(len(self.table) + 1) * self.block

    @property
    def key_breaks(self) -> np.ndarray:
        return np.arange(self.table.shape[1] + 1) * self.block

    def check(self, seq_len: int) -> None:
        self.check_lengths(seq_len, seq_len)

    def check_lengths(self, seq_len: int, key_len: int) -> None:
        for blocks, length, has in zip(
            self.table.shape, (seq_len, key_len), _holders(seq_len, key_len), strict=True
        ):
            if blocks * self.block != length:
                raise ValueError(
                    f"table: {blocks} blocks of {self.block} describe {blocks * self.block} "
                    f"positions, but {has} {length}"
                )

    def __repr__(self) -> str:
        return f"BlockSparse({self.digest}, block={self.block})"


class Dense(_Table):
    """Dense mask: query q attends to key k if table[q, k]. Use this class if no other class fits.

    The table needs one byte of host memory per (query, key) pair on every rank.

    Args:
        table: bool or 0/1, [S, S]; or [S, T] if keys are another sequence (option `key_layout`).

    Raises:
        ValueError: `table` is invalid.

    Example:
        >>> mask = mb.masks.Dense(np.eye(2, dtype=bool))
        >>> mask.visible(np.array([1]), np.arange(2))
        array([False,  True])
    """

    def __init__(self, table: np.ndarray):
        self.table = _bool_table(table)

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return self.table[q, k]

    def cover(self, q_span: Span, k_span: Span) -> Cover:
        rows, columns = (slice(span.start, span.last + 1, span.stride) for span in (q_span, k_span))
        part = self.table[rows, columns]
        if part.all():
            return Cover.FULL
        return Cover.PARTIAL if part.any() else Cover.EMPTY

    def check(self, seq_len: int) -> None:
        self.check_lengths(seq_len, seq_len)

    def check_lengths(self, seq_len: int, key_len: int) -> None:
        for rows, length, has in zip(
            self.table.shape, (seq_len, key_len), _holders(seq_len, key_len), strict=True
        ):
            if rows != length:
                raise ValueError(f"table describes {rows} positions, but {has} {length}")

    def __repr__(self) -> str:
        return f"Dense({self.digest})"


def shards_visible(mask: Mask, q_shards: Shards, k_shards: Shards) -> np.ndarray:
    """Return a bool [query ranks, key ranks], true if some query may see some key.

    If an entry is false, no pair of the two shards is visible. If an entry is true, `Mask.cover` is
    not EMPTY for some pair of spans, but all pairs of positions may still be hidden.

    Args:
        mask: The mask.
        q_shards: Query spans of each rank; a shard may have no spans.
        k_shards: Key spans of each rank.
    """
    queries, keys = pieces_of(q_shards), pieces_of(k_shards)
    rows, columns = (x[:, None] for x in queries.span), (x[None] for x in keys.span)
    i, j = np.nonzero(mask.covers(Spans(*rows), Spans(*columns)) != Cover.EMPTY)
    visible = np.zeros((len(q_shards), len(k_shards)), dtype=bool)
    visible[queries.owner[i], keys.owner[j]] = True
    return visible


def _documents_of(bounds: np.ndarray, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents of the first and of the last position of each span, as from `document`.

    Args:
        bounds: Cumulative lengths of the documents.
        spans: The spans.
    """
    first = np.searchsorted(bounds, spans.start, side="right")
    if (spans.last < bounds.take(first, mode="clip")).all():  # no span leaves its document
        return first, first
    return first, np.searchsorted(bounds, spans.last, side="right")


def _spans(spans: Sequence[tuple[int, int]] | np.ndarray) -> tuple[tuple[int, int], ...]:
    """Return the spans as tuples of int; raise ValueError if they are invalid."""
    try:
        array = np.asarray(spans)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, on a device, or with gradient
        raise ValueError(f"spans must be pairs of integers on the host, got {spans}") from error
    edges = array.reshape(-1).astype(np.int64) if array.dtype.kind in "iu" else np.empty(0, int)
    pairs = array.size == 0 or (array.dtype.kind in "iu" and array.shape[1:] == (2,))
    ascending = (edges[:1] >= 0).all() and (np.diff(edges) >= 0).all()
    if spans is None or not pairs or not ascending or (edges[1::2] == edges[::2]).any():
        raise ValueError(
            "spans must be pairs (start, stop) of integers >= 0, in ascending order, start < stop "
            f"and without overlaps, got {spans}"
        )
    if (edges > FAR).any():
        raise ValueError(f"spans must end at position {FAR} at the latest, got {edges.max()}")
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _holders(seq_len: int, key_len: int) -> tuple[str, str]:
    """Return who has the query positions, and who has the key positions, for messages."""
    if seq_len == key_len:
        return "the sequence has", "the sequence has"
    return "queries have", "keys have"


def _bool_table(table: np.ndarray) -> np.ndarray:
    """Return a copy of `table` as bool [n, m].

    Raises ValueError unless the table is a matrix of 0 and 1. Additive masks, with 0 for visible
    and -inf for hidden pairs, are not converted, because 0 has the opposite meaning there.
    """
    try:
        array = np.asarray(table)  # np.array warns for tensors, which have no copy keyword
    except (TypeError, ValueError, RuntimeError) as error:
        # a ragged list; or a tensor of bfloat16, on another device, or with a gradient
        raise ValueError(
            "table must be a matrix, with booleans on the host (tensor: table.bool().cpu()), "
            f"got {table}"
        ) from error
    if array.ndim != 2 or not array.size:
        raise ValueError(f"table must be a matrix [queries, keys], got shape {array.shape}")
    if array.dtype.kind not in "biuf":
        raise ValueError(f"table must hold booleans, got {array.dtype}")
    invalid = array[(array != 0) & (array != 1)]
    if invalid.size:
        raise ValueError(
            f"table must hold 1 for visible pairs and 0 for hidden pairs, got {invalid[0]}"
        )
    table = array.astype(bool)
    table.flags.writeable = False  # plans depend on it
    return table
