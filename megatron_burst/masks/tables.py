"""Masks that look positions up: Documents, BlockSparse, Dense."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ..layout import Span
from .base import Cover, Mask, VectorMask, graded
from .positions import local_cuts


class Documents(VectorMask):
    """Positions see each other within a document; documents are packed one after the other.

    cu_seqlens: cumulative lengths 0 = c_0 <= c_1 <= ... <= c_n = length of the sequence.
    Causal packed documents are Documents(cu_seqlens) & Causal().
    """

    def __init__(self, cu_seqlens: Sequence[int] | np.ndarray):
        bounds = np.asarray(cu_seqlens, dtype=np.int64)
        if bounds.ndim != 1 or len(bounds) < 2 or bounds[0] != 0 or (np.diff(bounds) < 0).any():
            raise ValueError(
                "cu_seqlens must start at 0 and never decrease (cumulative lengths of the "
                f"documents), got {cu_seqlens}"
            )
        self.bounds = bounds

    def document(self, positions: np.ndarray | int) -> np.ndarray:
        """The index of the document each position belongs to."""
        return np.searchsorted(self.bounds, positions, side="right")

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return np.equal(self.document(q), self.document(k))

    def covers(self, q_spans: Span, k_spans: Span) -> np.ndarray:
        q_first, q_last = self.document(q_spans.start), self.document(q_spans.last)
        k_first, k_last = self.document(k_spans.start), self.document(k_spans.last)
        empty = (q_last < k_first) | (k_last < q_first)
        return graded(empty, (q_first == q_last) & (k_first == k_last) & (q_first == k_first))

    def cuts(self, span: Span) -> np.ndarray:
        return local_cuts(self.bounds, span)

    def check(self, seq_len: int) -> None:
        if self.bounds[-1] != seq_len:
            raise ValueError(
                f"cu_seqlens must end at the length of the sequence, {seq_len}, "
                f"got {self.bounds[-1]}"
            )

    def __repr__(self) -> str:
        return f"Documents({self.bounds.tolist()})"


class BlockSparse(VectorMask):
    """Query block i sees key block j where table[i, j]; blocks are `block` positions long."""

    def __init__(self, table: np.ndarray, block: int):
        self.table = np.asarray(table).astype(bool)
        if block < 1:
            raise ValueError(f"block must be at least 1, got {block}")
        if self.table.ndim != 2 or self.table.shape[0] != self.table.shape[1]:
            raise ValueError(f"table must be square, got shape {self.table.shape}")
        self.block = block

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return self.table[np.floor_divide(q, self.block), np.floor_divide(k, self.block)]

    def covers(self, q_spans: Span, k_spans: Span) -> np.ndarray:
        (top, bottom), (first, stop) = (
            (np.floor_divide(x.start, self.block), np.floor_divide(x.last, self.block) + 1)
            for x in (q_spans, k_spans)
        )
        sums = self._sums
        seen = sums[bottom, stop] - sums[top, stop] - sums[bottom, first] + sums[top, first]
        return graded(seen == 0, seen == (bottom - top) * (stop - first))

    @cached_property
    def _sums(self) -> np.ndarray:
        """[n + 1, n + 1]: how many of the blocks above and left of a corner are visible."""
        return np.pad(self.table.cumsum(0).cumsum(1), ((1, 0), (1, 0)))

    def cuts(self, span: Span) -> np.ndarray:
        return local_cuts(np.arange(0, span.last + 1, self.block), span)

    def check(self, seq_len: int) -> None:
        if len(self.table) * self.block != seq_len:
            raise ValueError(
                f"table: {len(self.table)} blocks of {self.block} describe "
                f"{len(self.table) * self.block} positions, the sequence has {seq_len}"
            )

    def __repr__(self) -> str:
        return f"BlockSparse({_digest(self.table)}, block={self.block})"


class Dense(Mask):
    """Query q sees key k where table[q, k]: for masks that nothing else describes."""

    def __init__(self, table: np.ndarray):
        self.table = np.asarray(table).astype(bool)
        if self.table.ndim != 2 or self.table.shape[0] != self.table.shape[1]:
            raise ValueError(f"table must be square, got shape {self.table.shape}")

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
        return f"Dense({_digest(self.table)})"


def _digest(table: np.ndarray) -> str:
    digest = hashlib.blake2b(np.packbits(table).tobytes(), digest_size=8).hexdigest()
    return f"<{table.shape[0]} x {table.shape[1]}, {digest}>"
