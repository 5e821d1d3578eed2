"""What every mask answers, and how masks combine.

`visible` is exact, for arrays of positions. `cover` is conservative, for two spans: PARTIAL is
always allowed, EMPTY and FULL are promises. `band`, `cuts` and `modulus` are hints that let
`tiles` cut a partly visible rectangle well; a mask that gives none is still served.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from ..layout import Span

FAR = 1 << 60  # farther than any two positions are apart


class Cover(IntEnum):
    """How much of a rectangle of pairs a mask lets through."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


class Band(NamedTuple):
    """Local row m sees local column n exactly when m - left <= n <= m + right."""

    left: int
    right: int


class Mask:
    """Base of all masks."""

    #: positions of equal remainder modulo this are alike; 1 for most masks
    modulus: int = 1

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """bool, broadcast of `q` and `k` (integer positions): may the query see the key?"""
        raise NotImplementedError

    def cover(self, q_span: Span, k_span: Span) -> Cover:
        """How much of `q_span` x `k_span` is visible."""
        raise NotImplementedError

    def band(self, q_span: Span, k_span: Span) -> Band | None:
        """The visible part of two spans as a band of local rows and columns, if it is one."""
        cover = self.cover(q_span, k_span)
        if cover == Cover.PARTIAL:
            return self._band(q_span, k_span)
        return Band(FAR, FAR) if cover == Cover.FULL else Band(-FAR, -FAR)

    def _band(self, q_span: Span, k_span: Span) -> Band | None:
        return None

    def cuts(self, span: Span) -> np.ndarray:
        """Sorted local indices 0 < i < span.length before which the mask's description changes."""
        return np.empty(0, dtype=np.int64)

    def check(self, seq_len: int) -> None:
        """Raise ValueError unless the mask describes sequences of `seq_len` positions."""

    def __and__(self, other: Mask) -> Mask:
        return _And(self, other)

    def __or__(self, other: Mask) -> Mask:
        return _Or(self, other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: combine masks with & and |, compare with `is`")


class _Pair(Mask):
    symbol: str

    def __init__(self, a: Mask, b: Mask):
        if not isinstance(a, Mask) or not isinstance(b, Mask):
            raise TypeError(f"masks combine with masks, got {a!r} and {b!r}")
        self.a, self.b = a, b
        self.modulus = math.lcm(a.modulus, b.modulus)

    def cuts(self, span: Span) -> np.ndarray:
        return np.union1d(self.a.cuts(span), self.b.cuts(span))

    def check(self, seq_len: int) -> None:
        self.a.check(seq_len)
        self.b.check(seq_len)

    def _bands(self, q_span: Span, k_span: Span) -> tuple[Band, Band] | None:
        a, b = self.a.band(q_span, k_span), self.b.band(q_span, k_span)
        return None if a is None or b is None else (a, b)

    def __repr__(self) -> str:
        return f"({self.a!r} {self.symbol} {self.b!r})"


class _And(_Pair):
    """What both masks let through."""

    symbol = "&"

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return self.a.visible(q, k) & self.b.visible(q, k)

    def cover(self, q_span: Span, k_span: Span) -> Cover:
        return min(self.a.cover(q_span, k_span), self.b.cover(q_span, k_span))

    def _band(self, q_span: Span, k_span: Span) -> Band | None:
        bands = self._bands(q_span, k_span)
        if bands is None:
            return None
        a, b = bands
        return Band(min(a.left, b.left), min(a.right, b.right))


class _Or(_Pair):
    """What either mask lets through."""

    symbol = "|"

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return self.a.visible(q, k) | self.b.visible(q, k)

    def cover(self, q_span: Span, k_span: Span) -> Cover:
        return max(self.a.cover(q_span, k_span), self.b.cover(q_span, k_span))

    def _band(self, q_span: Span, k_span: Span) -> Band | None:
        bands = self._bands(q_span, k_span)
        if bands is None:
            return None
        a, b = bands
        if a.left + a.right < 0 or b.left + b.right < 0:  # one of them is empty
            return max(bands, key=lambda band: band.left + band.right)
        if a.left + b.right < -1 or b.left + a.right < -1:  # a gap between them
            return None
        return Band(max(a.left, b.left), max(a.right, b.right))
