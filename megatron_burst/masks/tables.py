# SPDX-License-Identifier: Apache-2.0
"""Masks that look positions up in a table: Documents, SameSpan, BlockSparse, Dense; and a table of
which shards see which.
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
    """Packed documents: positions attend to each other within a document.

    cu_seqlens: cumulative lengths 0 = c_0 <= c_1 <= ... <= c_n = length of the sequence.
    padding: indices of documents that are padding: their rows attend to nothing, nor anything to
    them.
    Causal packed documents are Documents(cu_seqlens) & Causal(). ValueError for other numbers.
    """

    flash_compatible = True

    def __init__(self, cu_seqlens: Sequence[int] | np.ndarray, padding: Sequence[int] = ()):
        self._bounds = document_bounds(cu_seqlens)
        self._bounds.flags.writeable = False
        documents = len(self.bounds) - 1
        self._padding = padding_documents(padding, documents)
        # By what `document` returns: 0 is before the first, so document i is i + 1. Documents
        # without a position may pass for padding.
        self._hidden = np.zeros(documents + 2, dtype=bool)
        self._hidden[1:-1] = np.diff(self.bounds) == 0
        self._hidden[[index + 1 for index in self.padding]] = True
        self._hidden_before = np.concatenate([[0], np.cumsum(self._hidden)])

    @property
    def bounds(self) -> np.ndarray:
        """int64 [documents + 1]: the cumulative lengths, read-only: plans are made from them."""
        return self._bounds

    @property
    def padding(self) -> tuple[int, ...]:
        """The indices of documents that are padding, ascending."""
        return self._padding

    @property
    def cacheable(self) -> bool:
        return False  # every batch has other documents

    def document(self, positions: np.ndarray | int) -> np.ndarray:
        """The index of the document each of `positions` belongs to."""
        return np.searchsorted(self.bounds, positions, side="right")

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        document = self.document(q)
        return np.equal(document, self.document(k)) & ~self._hidden[document]

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        q_first, q_last = self.document(q_spans.start), self.document(q_spans.last)
        k_first, k_last = self.document(k_spans.start), self.document(k_spans.last)
        first, last = np.maximum(q_first, k_first), np.minimum(q_last, k_last)
        empty = (last < first) | self._all_hidden(first, np.maximum(first, last))
        return cover_where(empty, (q_first == q_last) & (k_first == k_last) & (q_first == k_first))

    def viewers(self, k_spans: Spans) -> Viewers:
        after, end = self.document(k_spans.start), self.document(k_spans.last)
        edges = np.concatenate([[-FAR], self.bounds, [FAR]])  # no document, the documents, none
        hidden = self._all_hidden(after, end)
        first, last = (
            np.where(hidden, FAR, edges[after]),
            np.where(hidden, -FAR, edges[end + 1] - 1),
        )
        far = np.where(hidden, -FAR, FAR)  # of no query, so that any other mask holds it
        return Viewers(first, last, far, far, (after == end) | hidden)

    def _all_hidden(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Are all documents from `first` to `last` padding?"""
        before = self._hidden_before
        return before[last + 1] - before[first] == last + 1 - first

    @property
    def breaks(self) -> np.ndarray:
        return self.bounds

    def check(self, seq_len: int) -> None:
        if self.bounds[-1] != seq_len:
            raise ValueError(
                f"cu_seqlens must end at the length of the sequence, {seq_len}, "
                f"got {self.bounds[-1]}"
            )

    def __repr__(self) -> str:
        padding = f", padding={self.padding}" if self.padding else ""
        return f"Documents({self.bounds.tolist()}{padding})"


class SameSpan(VectorMask):
    """Positions of one span see each other, in both directions; all others see nothing by it.

    spans: (start, stop) of each, integers in ascending order that do not overlap; of several that
    touch, each sees only itself. Where the tokens of an image see each other and all others what is
    before them, the mask is Causal() | SameSpan(images). ValueError for other spans.
    """

    flash_compatible = True

    def __init__(self, spans: Sequence[tuple[int, int]] | np.ndarray):
        self.spans = _spans(spans)
        edges = [0, *(edge for span in self.spans for edge in span), FAR]
        # Documents of which every second one is padding: what is between the spans, and after.
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
                f"spans: the last one ends at {self.spans[-1][1]}, the sequence has {seq_len} "
                "positions"
            )

    def __repr__(self) -> str:
        return f"SameSpan({[*self.spans]})"


class _Table(Mask):
    """A mask that its square table describes."""

    table: np.ndarray

    @cached_property
    def digest(self) -> str:
        """Shape and hash of the table, which stand for it in the mask's repr."""
        digest = hashlib.blake2b(np.packbits(self.table).tobytes(), digest_size=8).hexdigest()
        return f"<{self.table.shape[0]} x {self.table.shape[1]}, {digest}>"


class BlockSparse(_Table, VectorMask):
    """Query block i attends to key block j where table[i, j] (BurstEngine section 3.4).

    table: bool or 0/1, [n, n]. block: positions per block; n * block is the sequence length.
    Raises ValueError for other tables.
    """

    def __init__(self, table: np.ndarray, block: int):
        self.table = _square(table)
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
        seen = sums[bottom, stop] - sums[top, stop] - sums[bottom, first] + sums[top, first]
        return cover_where(seen == 0, seen == (bottom - top) * (stop - first))

    @cached_property
    def _sums(self) -> np.ndarray:
        """[n + 1, n + 1]: how many of the blocks above and left of a corner are visible."""
        return np.pad(self.table.cumsum(0).cumsum(1), ((1, 0), (1, 0)))

    def viewers(self, k_spans: Spans) -> Viewers:
        first, last = (np.floor_divide(x, self.block) for x in (k_spans.start, k_spans.last))
        top, bottom = self._rows
        far, one = np.full(np.shape(first), FAR), first == last
        low = np.where(one, top[first] * self.block, -far)
        high = np.where(one, (bottom[first] + 1) * self.block - 1, far)
        return Viewers(low, high, far, far, np.zeros_like(one))

    @cached_property
    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [n]: the first and the last row of blocks that sees a column; none: n and -1."""
        any_, n = self.table.any(axis=0), len(self.table)
        last = n - 1 - self.table[::-1].argmax(axis=0)
        return np.where(any_, self.table.argmax(axis=0), n), np.where(any_, last, -1)

    @property
    def breaks(self) -> np.ndarray:
        return np.arange(len(self.table) + 1) * self.block

    def check(self, seq_len: int) -> None:
        if len(self.table) * self.block != seq_len:
            raise ValueError(
                f"table: {len(self.table)} blocks of {self.block} describe "
                f"{len(self.table) * self.block} positions, the sequence has {seq_len}"
            )

    def __repr__(self) -> str:
        return f"BlockSparse({self.digest}, block={self.block})"


class Dense(_Table):
    """Query q attends to key k where table[q, k]: for masks that no other class describes.

    table: bool or 0/1, [S, S]; S squared bytes of host memory on every rank. Raises
    ValueError for other tables.
    """

    def __init__(self, table: np.ndarray):
        self.table = _square(table)

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return self.table[q, k]

    def cover(self, q_span: Span, k_span: Span) -> Cover:
        rows, columns = (slice(span.start, span.last + 1, span.stride) for span in (q_span, k_span))
        part = self.table[rows, columns]
        if part.all():
            return Cover.FULL
        return Cover.PARTIAL if part.any() else Cover.EMPTY

    def check(self, seq_len: int) -> None:
        if len(self.table) != seq_len:
            raise ValueError(
                f"table describes {len(self.table)} positions, the sequence has {seq_len}"
            )

    def __repr__(self) -> str:
        return f"Dense({self.digest})"


def shards_visible(mask: Mask, q_shards: Shards, k_shards: Shards) -> np.ndarray:
    """Bool [G, G]: may any query of q_shards[i] see any key of k_shards[j] under `mask`?

    A shard is the spans of a rank, possibly none. False is a promise; True follows `Mask.cover`, so
    it may stand where nothing is visible.
    """
    queries, keys = pieces_of(q_shards), pieces_of(k_shards)
    rows, columns = (x[:, None] for x in queries.span), (x[None] for x in keys.span)
    i, j = np.nonzero(mask.covers(Spans(*rows), Spans(*columns)) != Cover.EMPTY)
    visible = np.zeros((len(q_shards), len(k_shards)), dtype=bool)
    visible[queries.owner[i], keys.owner[j]] = True
    return visible


def _spans(spans: Sequence[tuple[int, int]] | np.ndarray) -> tuple[tuple[int, int], ...]:
    """The spans as plain numbers; ValueError for what does not ascend or overlaps."""
    try:
        given = np.asarray(spans)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, elsewhere, or with a gradient
        raise ValueError(f"spans must be pairs of integers on the host, got {spans}") from error
    edges = given.reshape(-1).astype(np.int64) if given.dtype.kind in "iu" else np.empty(0, int)
    pairs = given.size == 0 or (given.dtype.kind in "iu" and given.shape[1:] == (2,))
    ascending = (edges[:1] >= 0).all() and (np.diff(edges) >= 0).all()
    if spans is None or not pairs or not ascending or (edges[1::2] == edges[::2]).any():
        raise ValueError(
            "spans must be pairs (start, stop) of integers from 0 on, in ascending order, start "
            f"before stop and without overlaps, got {spans}"
        )
    if (edges > FAR).any():
        raise ValueError(f"spans must end at position {FAR} at the latest, got {edges.max()}")
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _square(table: np.ndarray) -> np.ndarray:
    """A copy of `table` as bool [n, n], True where visible; ValueError unless it is square and
    holds only 0 and 1. An additive mask, 0 where visible and -inf where hidden, means the opposite
    of 0 and 1, so it is refused instead of being converted.
    """
    try:
        given = np.asarray(table)  # np.array warns of tensors, which have no copy keyword
    except (TypeError, ValueError, RuntimeError) as error:
        # a ragged list; or a tensor of bfloat16, on another device, or with a gradient
        raise ValueError(
            "table must be square, of booleans on the host (a tensor: table.bool().cpu()), "
            f"got {table}"
        ) from error
    if given.ndim != 2 or given.shape[0] != given.shape[1] or not given.size:
        raise ValueError(f"table must be square, got shape {given.shape}")
    if given.dtype.kind not in "biuf":
        raise ValueError(f"table must hold booleans, got {given.dtype}")
    odd = given[(given != 0) & (given != 1)]
    if odd.size:
        raise ValueError(
            f"table must hold 1 where a query sees a key and 0 where not, got {odd[0]}"
        )
    table = given.astype(bool)
    table.flags.writeable = False  # plans keep what they made for it
    return table
