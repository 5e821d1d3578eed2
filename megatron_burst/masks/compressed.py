# SPDX-License-Identifier: Apache-2.0
"""Mask of compressed keys, each of which represents a window of the queries' sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..layout import Spans, document_bounds, integer, padding_documents
from .base import FAR, UsedRows, VectorMask, Viewers, cover_where


class Compressed(VectorMask):
    """Mask of compressed keys: a query attends to the windows of its document that have ended.

    Key w of a document represents the positions w * `stride` to w * `stride` + `length` - 1 of the
    document. A query at position t of the document sees key w if w * stride + length - 1 <= t. Keys
    are a sequence of their own (option `key_layout`): the keys of all documents, one after the
    other. Sources: NSA (arXiv 2502.11089), section 3.3; compressed attention of DeepSeek-V4.

    Args:
        stride: Number of positions from one window to the next.
        length: Number of positions of a window. Default: `stride`.
        cu_seqlens: Cumulative lengths of the documents. Default: one document.
        key_cu_seqlens: Cumulative numbers of keys of the documents. A document must have at least
            one key per complete window; more keys are padding, which no query sees. Default: one
            key per complete window. Without `cu_seqlens`, keys after the last complete window are
            padding.
        padding: Indices of documents that are padding. They have no windows, and their rows attend
            to nothing.

    Raises:
        ValueError: An argument is invalid.

    Example:
        >>> mask = mb.masks.Compressed(stride=2)
        >>> mask.visible(np.arange(4)[:, None], np.arange(2)).astype(int)
        array([[0, 0],
               [1, 0],
               [1, 0],
               [1, 1]])
    """

    def __init__(
        self,
        stride: int,
        length: int | None = None,
        cu_seqlens: Sequence[int] | np.ndarray | None = None,
        key_cu_seqlens: Sequence[int] | np.ndarray | None = None,
        padding: Sequence[int] = (),
    ):
        self.stride = integer("stride", stride)
        self.length = self.stride if length is None else integer("length", length)
        for name, value in (("stride", self.stride), ("length", self.length)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.packed = cu_seqlens is not None
        if cu_seqlens is None:
            for name, value in (("key_cu_seqlens", key_cu_seqlens), ("padding", padding or None)):
                if value is not None:
                    raise ValueError(f"{name} requires cu_seqlens")
            self.padding: tuple[int, ...] = ()
            self.bounds = self.key_bounds = np.array([0, FAR])
        else:
            self.bounds = document_bounds(cu_seqlens)
            self.padding = padding_documents(padding, len(self.bounds) - 1)
            self.key_bounds = self._documents_of_keys(key_cu_seqlens)
        self.bounds.flags.writeable = self.key_bounds.flags.writeable = (
            False  # plans depend on them
        )
        # Indexed by document + 1; positions outside all documents have the first or last index.
        starts = self.bounds[:-1].copy()
        starts[list(self.padding)] = self.bounds[1:][list(self.padding)]  # after all their rows
        self._begin = np.concatenate([[FAR], starts, [FAR]])
        self._end = np.concatenate([[FAR], self.bounds[1:], [FAR]])
        self._first_key = np.concatenate([[0], self.key_bounds])

    def windows(self, rows: np.ndarray | int) -> np.ndarray:
        """Return the number of complete windows of documents with `rows` positions."""
        return np.maximum((np.asarray(rows) - self.length) // self.stride + 1, 0)

    def _documents_of_keys(self, key_cu_seqlens: Sequence[int] | np.ndarray | None) -> np.ndarray:
        windows = self.windows(np.diff(self.bounds))
        windows[list(self.padding)] = 0
        if key_cu_seqlens is None:
            return np.concatenate([[0], np.cumsum(windows)])
        bounds = document_bounds(key_cu_seqlens, "key_cu_seqlens")
        if len(bounds) != len(self.bounds):
            raise ValueError(
                f"key_cu_seqlens must have as many documents as cu_seqlens ({len(windows)}), got "
                f"{len(bounds) - 1}; for a document without keys, repeat its boundary"
            )
        if (np.diff(bounds) < windows).any():
            raise ValueError(
                "key_cu_seqlens must have at least one key per complete window of each document, "
                f"{windows.tolist()}, got {np.diff(bounds).tolist()}"
            )
        return bounds

    @property
    def cacheable(self) -> bool:
        return not self.packed  # every batch has other documents

    def _queries(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first query position that sees each key, and the position after the last one.

        The end is the end of the key's document. If no query sees a key, both positions are equal.
        """
        document = np.searchsorted(self.key_bounds, keys, side="right")
        end = self._end[document]
        window = (keys - self._first_key[document]) * self.stride
        return np.minimum(self._begin[document] + window + self.length - 1, end), end

    def first_rows(self, keys: np.ndarray, seq_len: int, back: int = 0) -> np.ndarray:
        """Return the query position at which the window of each key begins.

        Args:
            keys: Key positions [n].
            seq_len: Number of query positions.
            back: 0 for the window of each key, 1 for the previous window.

        Returns:
            int64 [n]; -1 for keys that are padding, and for windows that would begin before the
            document.
        """
        document = np.searchsorted(self.key_bounds, keys, side="right")
        window = keys - self._first_key[document] - back
        first = self._begin[document] + window * self.stride
        end = np.minimum(self._end[document], seq_len)
        own_end = first + back * self.stride + self.length
        return np.where((window >= 0) & (own_end <= end), first, -1)

    def keys_of_queries(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first key position that each query sees, and the position after the last one.

        Args:
            q: Query positions [n], each in a document.
        """
        document = np.searchsorted(self.bounds, q, side="right")
        low = self._first_key[document]
        return low, low + self.windows(q + 1 - self._begin[document])

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        first, end = self._queries(np.asarray(k))
        return (first <= q) & np.less(q, end)

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        # `first` and `end` never decrease from key to key.
        (first, end), (last_first, last_end) = map(self._queries, (k_spans.start, k_spans.last))
        empty = (q_spans.last < first) | (q_spans.start >= last_end)
        return cover_where(empty, (q_spans.start >= last_first) & (q_spans.last < end))

    def viewers(self, k_spans: Spans) -> Viewers:
        first, _ = self._queries(k_spans.start)
        _, end = self._queries(k_spans.last)
        far = np.full(np.shape(first), FAR)
        return Viewers(first, end - 1, far, far, np.equal(k_spans.start, k_spans.last))

    def used(self, q_spans: Spans, k_spans: Spans) -> UsedRows:
        rows = super().used(q_spans, k_spans)
        first, end = self._queries(k_spans.start)
        last_first, last_end = self._queries(k_spans.last)
        step = k_spans.stride * self.stride
        alone = (end == last_end) & (last_first < last_end)  # in one document, without padding
        q_first = -((q_spans.start - first) // q_spans.stride)  # rounded up
        q_stop = -((q_spans.start - last_end) // q_spans.stride)
        k_stop = np.where(alone, (q_spans.last - first) // step + 1, k_spans.length)
        return UsedRows(
            np.clip(q_first, 0, q_spans.length),
            np.clip(q_stop, 0, q_spans.length),
            rows.k_first,
            np.clip(k_stop, 0, k_spans.length),
        )

    @property
    def breaks(self) -> np.ndarray:
        return self.bounds

    @property
    def key_breaks(self) -> np.ndarray:
        return self.key_bounds

    def check(self, seq_len: int) -> None:
        self.check_lengths(seq_len, seq_len)

    def check_lengths(self, seq_len: int, key_len: int) -> None:
        windows = self.key_bounds[-1] if self.packed else self.windows(seq_len)
        if self.packed and self.bounds[-1] != seq_len:
            raise ValueError(
                f"cu_seqlens must end at the length of the sequence, {seq_len}, "
                f"got {self.bounds[-1]}"
            )
        if key_len < windows:
            raise ValueError(
                f"keys: {seq_len} positions have {windows} windows of {self.length} positions "
                f"every {self.stride}, got {key_len} keys; pass at least one key per window with "
                "key_layout"
            )

    def __repr__(self) -> str:
        documents = ""
        if self.packed:
            documents = f", {self.bounds.tolist()}, {self.key_bounds.tolist()}"
            documents += f", padding={list(self.padding)}" if self.padding else ""
        return f"Compressed(stride={self.stride}, length={self.length}{documents})"
