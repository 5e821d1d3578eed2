# SPDX-License-Identifier: Apache-2.0
"""Masks that compare the positions of query and key: Full, Causal, Window, Dilated, Prefix.

The methods of these masks compute with arrays of spans, so plans for many ranks need no Python
loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..layout import Spans, integer
from .base import FAR, Band, Cover, Mask, SpanBands, VectorMask, Viewers, cover_where


def position_field(mask: Mask, name: str) -> int:
    """Convert field `name` of a frozen mask to an int of at most FAR, in place; return the int.

    FAR means "no limit". Sums of larger numbers would overflow int64.

    Raises:
        ValueError: The field is not an integer.
    """
    value = min(integer(name, getattr(mask, name)), FAR)
    object.__setattr__(mask, name, value)
    return value


@dataclass(frozen=True, eq=False)
class Full(VectorMask):
    """Full mask: every query attends to every key.

    Example:
        >>> mb.masks.Full().visible(np.array([0]), np.array([0, 1]))
        array([ True,  True])
    """

    flash_compatible = True

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return np.ones(np.broadcast_shapes(np.shape(q), np.shape(k)), dtype=bool)

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        shape = np.broadcast_shapes(np.shape(q_spans.start), np.shape(k_spans.start))
        return np.full(shape, Cover.FULL)

    def viewers(self, k_spans: Spans) -> Viewers:
        return super().viewers(k_spans)._replace(exact=np.ones(np.shape(k_spans.start), dtype=bool))


@dataclass(frozen=True, eq=False)
class Window(VectorMask):
    """Window mask: a query at p attends to the keys from p - left to p + right.

    A causal sliding window of W tokens, including the query's own, is `Window(W - 1, 0)`.

    Args:
        left: Number of keys before the query; None for no limit.
        right: Number of keys after the query; None for no limit.

    Raises:
        ValueError: A limit is neither None nor an integer >= 0.

    Example:
        >>> mb.masks.Window(1, 0).visible(np.array([2]), np.arange(4))
        array([False,  True,  True, False])
    """

    left: int | None
    right: int | None

    def __post_init__(self):
        for name, size in (("left", self.left), ("right", self.right)):
            if size is not None and position_field(self, name) < 0:
                raise ValueError(f"{name}: a window size must be at least 0 or None, got {size}")

    @property
    def flash_compatible(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.left is None

    @cached_property
    def reach(self) -> Band:
        """The fields `left` and `right`, with FAR for no limit."""
        return Band(*(FAR if size is None else size for size in (self.left, self.right)))

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        ahead = np.subtract(k, q)
        return (ahead >= -self.reach.left) & (ahead <= self.reach.right)

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        left, right = self.reach
        nearest = np.subtract(k_spans.start, q_spans.last)
        farthest = np.subtract(k_spans.last, q_spans.start)
        empty = (nearest > right) | (farthest < -left)
        return cover_where(empty, (nearest >= -left) & (farthest <= right))

    def bands(self, q_spans: Spans, k_spans: Spans) -> SpanBands:
        # Local column n is (n - m) strides ahead of row m, plus the distance of the starts.
        ahead = np.subtract(q_spans.start, k_spans.start)
        left, right = self.reach
        stride = np.asarray(q_spans.stride)
        known = stride == k_spans.stride
        bands = SpanBands((left - ahead) // stride, (right + ahead) // stride, known)
        if known.all():
            return bands
        default = super().bands(q_spans, k_spans)
        return SpanBands(*(np.where(known, *pair) for pair in zip(bands, default, strict=True)))

    def viewers(self, k_spans: Spans) -> Viewers:
        far, exact = np.full(np.shape(k_spans.start), FAR), np.ones(np.shape(k_spans.start), bool)
        left, right = (np.full_like(far, size) for size in self.reach)
        return Viewers(-far, far, left, right, exact)


class Causal(Window):
    """Causal mask: a query attends to the keys at its own position and before.

    Example:
        >>> mb.masks.Causal().visible(np.array([1]), np.arange(3))
        array([ True,  True, False])
    """

    def __init__(self):
        super().__init__(None, 0)

    def __repr__(self) -> str:
        return "Causal()"


@dataclass(frozen=True, eq=False)
class Dilated(VectorMask):
    """Dilated mask: a query attends to keys at distances that are multiples of `stride`.

    Args:
        stride: Distance between visible keys, before and after the query.

    Raises:
        ValueError: `stride` is not an integer >= 1.

    Example:
        >>> mb.masks.Dilated(2).visible(np.array([2]), np.arange(5))
        array([ True, False,  True, False,  True])
    """

    stride: int

    def __post_init__(self):
        if position_field(self, "stride") < 1:
            raise ValueError(f"stride must be at least 1, got {self.stride}")

    @property
    def modulus(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.stride

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return np.subtract(q, k) % self.stride == 0

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        # A distance is the distance of the starts plus multiples of both strides. Modulo `stride`
        # it differs from the distance of the starts by a multiple of their common divisor.
        q_stride, k_stride = (np.multiply(x.stride, x.length > 1) for x in (q_spans, k_spans))
        common = np.gcd(np.gcd(q_stride, k_stride), self.stride)
        empty = np.subtract(q_spans.start, k_spans.start) % common != 0
        return cover_where(empty, (q_stride % self.stride == 0) & (k_stride % self.stride == 0))


@dataclass(frozen=True, eq=False)
class Prefix(VectorMask):
    """Prefix mask: every query attends to the first n keys.

    The mask of a prefix language model is `Causal() | Prefix(n)`.

    Args:
        n: Number of keys.

    Raises:
        ValueError: `n` is not an integer >= 0.

    Example:
        >>> (mb.masks.Causal() | mb.masks.Prefix(2)).visible(np.array([0]), np.arange(4))
        array([ True,  True, False, False])
    """

    n: int
    flash_compatible = True

    def __post_init__(self):
        if position_field(self, "n") < 0:
            raise ValueError(f"n: a prefix must have at least 0 positions, got {self.n}")

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return np.broadcast_to(np.less(k, self.n), np.broadcast_shapes(np.shape(q), np.shape(k)))

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        covers = cover_where(np.greater_equal(k_spans.start, self.n), np.less(k_spans.last, self.n))
        shape = np.broadcast_shapes(np.shape(q_spans.start), np.shape(k_spans.start))
        return np.broadcast_to(covers, shape)

    def viewers(self, k_spans: Spans) -> Viewers:
        all_see, none_sees = np.less(k_spans.last, self.n), np.greater_equal(k_spans.start, self.n)
        far = np.where(none_sees, -FAR, FAR)
        return Viewers(-far, far, far, far, all_see | none_sees)

    @property
    def breaks(self) -> np.ndarray:
        return np.array([self.n])
