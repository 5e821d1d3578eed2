# SPDX-License-Identifier: Apache-2.0
"""Masks on the device: which positions a chunk of queries sees, without asking the host.

Most masks show a query one interval of positions, of which a plan makes two numbers per query.
Trees, residues, tables of blocks and combinations of all these are arithmetic on tables as large as
the sequence at most, which go to the device once per plan. `Dense`, and masks of your own, have
neither, and are evaluated on the host.
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
from ...masks.tables import BlockSparse, Documents, SameSpan
from ...masks.tree import Tree

MOST = 2**31 - 1  # no position is as large
Interval = tuple[np.ndarray, np.ndarray]
Rows = slice | torch.Tensor  # of dimension 0
# of these rows of queries at q, beside the keys at k: which of them are seen?
Condition = Callable[[Rows, torch.Tensor, torch.Tensor], torch.Tensor]


class Sights:
    """What the queries of a plan see, and arrays of the host on devices, where each goes once."""

    def __init__(self):
        self._there: dict[tuple[int, torch.device], tuple[np.ndarray, torch.Tensor]] = {}
        self._seen: dict[tuple[Span, ...], tuple[Mask, np.ndarray, Condition | None]] = {}

    def of(self, mask: Mask, spans: tuple[Span, ...]) -> tuple[np.ndarray, Condition | None]:
        """The positions of queries, whose spans are mostly the same in all pairs, and what they
        see.
        """
        known, q, seen = self._seen.get(spans, (None, np.empty(0), None))
        if known is not mask:
            q = np.concatenate([span.positions() for span in spans])
            seen = condition(mask, q, self)
            self._seen[spans] = mask, q, seen
        return q, seen

    def on(self, array: np.ndarray, device: torch.device) -> torch.Tensor:
        """`array` on `device`; the same object gives the same tensor."""
        key = id(array), device
        if key not in self._there:
            own = np.require(array, requirements=["C", "W"])  # torch warns of others
            self._there[key] = array, to_device(own, device)
        return self._there[key][1]


def interval(mask: Mask, q: np.ndarray) -> Interval | None:
    """int64 (low, high) [s]: the queries at q [s] see the positions low <= k < high and no others;
    None where they may see more than one interval, or it is not known.
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
        return None if a is None or b is None else _joined(mask.symbol, a, b)
    if isinstance(mask, SameSpan):
        return interval(mask.documents, q)
    if kind is Documents:
        assert isinstance(mask, Documents)
        document = mask.document(q)
        low, high = mask.bounds[document - 1], mask.bounds[document]
        return low, np.where(mask.visible(q, q), high, low)
    return None


def _joined(symbol: str, a: Interval, b: Interval) -> Interval | None:
    """What both show, or either, if that is one interval for every query."""
    if symbol == "&":
        return np.maximum(a[0], b[0]), np.minimum(a[1], b[1])
    no_a, no_b = (each[1] <= each[0] for each in (a, b))
    touch = (a[0] <= b[1]) & (b[0] <= a[1])
    if not (touch | no_a | no_b).all():
        return None
    either = np.minimum(a[0], b[0]), np.maximum(a[1], b[1])
    low, high = (
        np.where(no_a, y, np.where(no_b, x, z)) for x, y, z in zip(a, b, either, strict=True)
    )
    return low, high


def condition(mask: Mask, q: np.ndarray, sights: Sights) -> Condition | None:
    """What the queries at q [s] see, on any device; None for masks that only the host knows."""
    found = interval(mask, q)
    if found is not None:
        low, high = (np.clip(bound, 0, MOST).astype(np.int32) for bound in found)
        return Between(low, high, sights)
    if isinstance(mask, Combined):
        a, b = condition(mask.a, q, sights), condition(mask.b, q, sights)
        return None if a is None or b is None else _Both(mask.symbol, a, b)
    if type(mask) is Dilated:
        return _Apart(mask.stride)
    if type(mask) is BlockSparse:
        return _Blocks(mask.table, mask.block, sights)
    if type(mask) is Tree:
        return _Ancestors(
            mask.out, None if mask.window is None else mask.depths, mask.window, sights
        )
    return None


@dataclass(frozen=True)
class Between:
    """low, high: int32 [s]."""

    low: np.ndarray
    high: np.ndarray
    sights: Sights

    def __call__(self, rows: Rows, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        low, high = (self.sights.on(x, k.device)[rows].view_as(q) for x in (self.low, self.high))
        return (k >= low) & (k < high)


@dataclass(frozen=True)
class _Both:
    symbol: str
    a: Condition
    b: Condition

    def __call__(self, rows: Rows, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        a, b = self.a(rows, q, k), self.b(rows, q, k)
        return a & b if self.symbol == "&" else a | b


@dataclass(frozen=True)
class _Apart:
    stride: int

    def __call__(self, rows: Rows, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q - k) % self.stride == 0


@dataclass(frozen=True)
class _Blocks:
    table: np.ndarray
    block: int
    sights: Sights

    def __call__(self, rows: Rows, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        table = self.sights.on(self.table, k.device)
        return table[q // self.block, k // self.block]


@dataclass(frozen=True)
class _Ancestors:
    """As `masks.Tree` has it; depths: where there is a window."""

    out: np.ndarray
    depths: np.ndarray | None
    window: int | None
    sights: Sights

    def __call__(self, rows: Rows, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out = self.sights.on(self.out, k.device)
        seen = (k <= q) & (q < out[k]) & (out[q] > 0)
        if self.depths is None or self.window is None:
            return seen
        depths = self.sights.on(self.depths, k.device)
        return seen & (depths[q] - depths[k] <= self.window)
