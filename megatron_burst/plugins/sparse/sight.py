# SPDX-License-Identifier: Apache-2.0
"""Evaluation of masks on the device of the queries, if possible without the host.

With most masks, a query sees one interval of positions. A plan stores two numbers per query for
them. `Tree`, `Dilated`, `BlockSparse` and combinations of masks are also evaluated on the device;
their tables are copied to the device once per plan. The host evaluates `Dense` and users' masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ...layout import Span
from ...layout.sharding import to_device
from ...masks import Causal, Dilated, Full, Mask, Prefix, Window
from ...masks.base import FAR, Combined
from ...masks.compressed import Compressed
from ...masks.tables import BlockSparse, Documents, SameSpan
from ...masks.tree import Tree

MOST = 2**31 - 1  # larger than every position
Interval = tuple[np.ndarray, np.ndarray]
Rows = slice | torch.Tensor  # index of dimension 0
# (index of query rows, positions q of these rows, positions k of keys) -> bool, True if visible
Condition = Callable[[Rows, torch.Tensor, torch.Tensor], torch.Tensor]


class VisibilityTables:
    """Cache of functions that evaluate the mask of a plan on a device, and of their arrays."""

    def __init__(self):
        self._on_device: dict[tuple[int, torch.device], tuple[np.ndarray, torch.Tensor]] = {}
        self._seen: dict[tuple[Span, ...], tuple[Mask, np.ndarray, Condition | None]] = {}

    def of(self, mask: Mask, spans: tuple[Span, ...]) -> tuple[np.ndarray, Condition | None]:
        """Return the positions [s] of the queries in `spans`, and a function that evaluates `mask`.

        The function is the result of `condition`: None if only the host can evaluate the mask. The
        results are cached, because most kernel calls of a plan have the same query spans.
        """
        cached_mask, q, seen = self._seen.get(spans, (None, np.empty(0), None))
        if cached_mask is not mask:
            q = np.concatenate([span.positions() for span in spans])
            seen = condition(mask, q, self)
            self._seen[spans] = mask, q, seen
        return q, seen

    def on(self, array: np.ndarray, device: torch.device) -> torch.Tensor:
        """Return a copy of `array` on `device`, cached by the identity of the array."""
        key = id(array), device
        if key not in self._on_device:
            own = np.require(array, requirements=["C", "W"])  # torch warns about other arrays
            self._on_device[key] = array, to_device(own, device)
        return self._on_device[key][1]


def interval(mask: Mask, q: np.ndarray) -> Interval | None:
    """Return the interval of positions that each query sees.

    Args:
        mask: Mask of the sequence.
        q: Positions of queries [s].

    Returns:
        (low, high), int64 [s] each: a query sees low <= k < high. None if a query may see more than
        one interval.
    """
    kind = type(mask)
    if kind is Full:
        return np.zeros_like(q), np.full_like(q, FAR)
    if kind is Window or kind is Causal:
        assert isinstance(mask, Window)
        return q - mask.reach.left, q + mask.reach.right + 1
    if kind is Prefix:
        assert isinstance(mask, Prefix)
        return np.zeros_like(q), np.full_like(q, mask.n)
    if isinstance(mask, Combined):
        a, b = interval(mask.a, q), interval(mask.b, q)
        return None if a is None or b is None else _combined(mask.symbol, a, b)
    if isinstance(mask, SameSpan):
        return interval(mask.documents, q)
    if kind is Documents:
        assert isinstance(mask, Documents)
        return mask.keys_of_queries(q)
    if kind is Compressed:
        assert isinstance(mask, Compressed)
        return mask.keys_of_queries(q)
    return None


def _combined(symbol: str, a: Interval, b: Interval) -> Interval | None:
    """Return the intersection (`symbol` "&") or union of the intervals a and b of each query.

    Return None if the union of the two intervals of a query has a gap.
    """
    if symbol == "&":
        return np.maximum(a[0], b[0]), np.minimum(a[1], b[1])
    no_a, no_b = (bounds[1] <= bounds[0] for bounds in (a, b))
    touch = (a[0] <= b[1]) & (b[0] <= a[1])
    if not (touch | no_a | no_b).all():
        return None
    either = np.minimum(a[0], b[0]), np.maximum(a[1], b[1])
    low, high = (
        np.where(no_a, y, np.where(no_b, x, z)) for x, y, z in zip(a, b, either, strict=True)
    )
    return low, high


def condition(mask: Mask, q: np.ndarray, tables: VisibilityTables) -> Condition | None:
    """Return a function that evaluates the mask on a device, for queries at positions q [s].

    Return None if only the host can evaluate the mask. See `Condition` for the arguments of the
    function.
    """
    bounds = interval(mask, q)
    if bounds is not None:
        low, high = (np.clip(bound, 0, MOST).astype(np.int32) for bound in bounds)
        return IntervalCondition(low, high, tables)
    if isinstance(mask, Combined):
        a, b = condition(mask.a, q, tables), condition(mask.b, q, tables)
        return None if a is None or b is None else _CombinedCondition(mask.symbol, a, b)
    if type(mask) is Dilated:
        return _StrideCondition(mask.stride)
    if type(mask) is BlockSparse:
        return _BlockCondition(mask.table, mask.block, tables)
    if type(mask) is Tree:
        return _TreeCondition(
            mask.out, None if mask.window is None else mask.depths, mask.window, tables
        )
    return None


@dataclass(frozen=True)
class IntervalCondition:
    """Condition of a mask with which each query sees one interval of positions: low <= k < high.

    low and high are int32 [s].
    """

    low: np.ndarray
    high: np.ndarray
    tables: VisibilityTables

    def __call__(self, rows: Rows, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        low, high = (self.tables.on(x, k.device)[rows].view_as(q) for x in (self.low, self.high))
        return (k >= low) & (k < high)


@dataclass(frozen=True)
class _CombinedCondition:
    """Condition of a combined mask: intersection (`symbol` "&") or union of two conditions."""

    symbol: str
    a: Condition
    b: Condition

    def __call__(self, rows: Rows, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        a, b = self.a(rows, q, k), self.b(rows, q, k)
        return a & b if self.symbol == "&" else a | b


@dataclass(frozen=True)
class _StrideCondition:
    """Condition of `masks.Dilated`: a query sees keys at multiples of the stride from it."""

    stride: int

    def __call__(self, rows: Rows, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q - k) % self.stride == 0


@dataclass(frozen=True)
class _BlockCondition:
    """Condition of `masks.BlockSparse`: table[i, j] is True if query block i sees key block j."""

    table: np.ndarray
    block: int
    tables: VisibilityTables

    def __call__(self, rows: Rows, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        table = self.tables.on(self.table, k.device)
        return table[q // self.block, k // self.block]


@dataclass(frozen=True)
class _TreeCondition:
    """Condition of `masks.Tree`, with the arrays of the mask; `depths` is None without a window."""

    out: np.ndarray
    depths: np.ndarray | None
    window: int | None
    tables: VisibilityTables

    def __call__(self, rows: Rows, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out = self.tables.on(self.out, k.device)
        seen = (k <= q) & (q < out[k]) & (out[q] > 0)
        if self.depths is None or self.window is None:
            return seen
        depths = self.tables.on(self.depths, k.device)
        return seen & (depths[q] - depths[k] <= self.window)
