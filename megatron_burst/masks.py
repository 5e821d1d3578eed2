"""Which (query position, key position) pairs attend.

A mask knows positions and spans only: no ranks, no layout names, no tensors. It answers
three questions: `visible`, exactly, for arrays of positions; `cover`, conservatively, for
two spans; and `diagonal`, where the visible part of two spans is a lower triangle in local
rows and columns, so that a kernel's own causal flag can serve it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from .layout import Span


class Cover(IntEnum):
    """How much of a rectangle of pairs a mask lets through."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


class Mask:
    """Base of all masks. `cover` may always answer PARTIAL; EMPTY and FULL are promises."""

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """bool, broadcast of `q` and `k` (integer positions): may the query see the key?"""
        raise NotImplementedError

    def cover(self, q_span: Span, k_span: Span) -> Cover:
        """How much of `q_span` x `k_span` is visible."""
        raise NotImplementedError

    def diagonal(self, q_span: Span, k_span: Span) -> int | None:
        """The o for which local row m sees local column n exactly when n <= m + o; None if none."""
        return None

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: combine masks with & and |, compare with `is`")


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return np.ones(np.broadcast_shapes(np.shape(q), np.shape(k)), dtype=bool)

    def cover(self, q_span: Span, k_span: Span) -> Cover:
        return Cover.FULL


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees the keys at its own position and before."""

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return np.greater_equal(q, k)

    def cover(self, q_span: Span, k_span: Span) -> Cover:
        if q_span.last < k_span.start:
            return Cover.EMPTY
        return Cover.FULL if q_span.start >= k_span.last else Cover.PARTIAL

    def diagonal(self, q_span: Span, k_span: Span) -> int | None:
        if q_span.stride != k_span.stride:
            return None
        return (q_span.start - k_span.start) // q_span.stride


def cover(mask: Mask, q_spans: Iterable[Span], k_spans: Iterable[Span]) -> Cover:
    """The cover of a mask over two shards: EMPTY or FULL only where every pair of spans is."""
    k_spans = tuple(k_spans)
    covers = {mask.cover(q, k) for q in q_spans for k in k_spans}
    return covers.pop() if len(covers) == 1 else Cover.PARTIAL
