"""Masks that compare two positions: Full, Causal, Window, Dilated, Prefix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..layout import Span
from .base import FAR, Band, Cover, Mask


@dataclass(frozen=True, eq=False)
class Full(Mask):
    """Every query sees every key."""

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return np.ones(np.broadcast_shapes(np.shape(q), np.shape(k)), dtype=bool)

    def cover(self, q_span: Span, k_span: Span) -> Cover:
        return Cover.FULL


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """A query at p sees the keys from p - left to p + right; None stands for no limit.

    A causal sliding window of W tokens, the own one included, is Window(W - 1, 0).
    """

    left: int | None
    right: int | None

    def __post_init__(self):
        for name, size in (("left", self.left), ("right", self.right)):
            if size is not None and size < 0:
                raise ValueError(f"{name}: a window size must be at least 0 or None, got {size}")

    @property
    def reach(self) -> Band:
        """The window in positions, with FAR for no limit."""
        return Band(*(FAR if size is None else size for size in (self.left, self.right)))

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        ahead = np.subtract(k, q)
        return (ahead >= -self.reach.left) & (ahead <= self.reach.right)

    def cover(self, q_span: Span, k_span: Span) -> Cover:
        nearest, farthest = k_span.start - q_span.last, k_span.last - q_span.start
        if nearest > self.reach.right or farthest < -self.reach.left:
            return Cover.EMPTY
        inside = nearest >= -self.reach.left and farthest <= self.reach.right
        return Cover.FULL if inside else Cover.PARTIAL

    def _band(self, q_span: Span, k_span: Span) -> Band | None:
        if q_span.stride != k_span.stride:
            return None
        ahead = q_span.start - k_span.start  # local column n - m is ahead / stride further on
        left, right = self.reach.left - ahead, self.reach.right + ahead
        return Band(left // q_span.stride, right // q_span.stride)


class Causal(Window):
    """A query sees the keys at its own position and before."""

    def __init__(self):
        super().__init__(None, 0)

    def __repr__(self) -> str:
        return "Causal()"


@dataclass(frozen=True, eq=False)
class Dilated(Mask):
    """A query sees the keys whose distance is a multiple of `stride`, on both sides."""

    stride: int

    def __post_init__(self):
        if self.stride < 1:
            raise ValueError(f"stride must be at least 1, got {self.stride}")

    @property
    def modulus(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.stride

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return np.subtract(q, k) % self.stride == 0

    def cover(self, q_span: Span, k_span: Span) -> Cover:
        q_stride, k_stride = (span.stride * (span.length > 1) for span in (q_span, k_span))
        common = math.gcd(q_stride, k_stride, self.stride)
        distance = q_span.start - k_span.start
        if distance % common:
            return Cover.EMPTY
        # Every distance is `distance` plus multiples of the strides.
        alike = q_stride % self.stride == 0 and k_stride % self.stride == 0
        return Cover.FULL if alike else Cover.PARTIAL


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Every query sees the first n keys. A prefix language model is Causal() | Prefix(n)."""

    n: int

    def __post_init__(self):
        if self.n < 0:
            raise ValueError(f"n: a prefix must have at least 0 positions, got {self.n}")

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return np.broadcast_to(np.less(k, self.n), np.broadcast_shapes(np.shape(q), np.shape(k)))

    def cover(self, q_span: Span, k_span: Span) -> Cover:
        if k_span.start >= self.n:
            return Cover.EMPTY
        return Cover.FULL if k_span.last < self.n else Cover.PARTIAL

    def cuts(self, span: Span) -> np.ndarray:
        return local_cuts(np.array([self.n]), span)


def local_cuts(positions: np.ndarray, span: Span) -> np.ndarray:
    """The local indices 0 < i < length at which `span` first reaches each of `positions`."""
    first = -((span.start - positions) // span.stride)  # rounded up
    return np.unique(first[(first > 0) & (first < span.length)])
