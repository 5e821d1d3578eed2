# SPDX-License-Identifier: Apache-2.0
"""What a pair of shards needs besides tensors: its positions, and which of them see each other.

`execution/ring.py` runs these pairs on every schedule in whose forward keys travel and in whose
backward keys and their gradients do, so that a rank's queries stay at home, and with them all that
was selected for them. Position tables are made for some rows at a time, never for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..layout import Span
from ..layout.sharding import to_device
from ..masks import Cover, Mask
from .sight import Between, Condition, Tables, condition

TILE = 1 << 22  # elements of the largest tensor that a tile of rows makes


class SelectedPairs:
    """The positions of a pair, keys in ascending order. order: of the rows of keys, or None.
    span_rows: int32 [pieces, 4], start, stride, length and first row of each span of keys. condition: what the queries see on a device, or
    None if only the host knows. tables: of the plan, on devices."""

    def __init__(
        self,
        mask: Mask,
        queries: np.ndarray,
        k_spans: Sequence[Span],
        seen: Condition | None,
        tables: Tables,
    ):
        k = _positions(k_spans)
        order = np.argsort(k, kind="stable")
        self.mask, self.queries, self.keys = mask, queries, k[order]
        self.order = None if np.array_equal(order, np.arange(len(k))) else order
        self._rows = np.arange(len(k)) if self.order is None else order
        self.condition, self.tables = seen, tables
        firsts = np.cumsum([0, *(span.length for span in k_spans)])
        rows = [(*span, first) for span, first in zip(k_spans, firsts, strict=False)]
        self.span_rows = np.array(rows, dtype=np.int32).reshape(-1, 4)

    @property
    def interval(self) -> tuple[np.ndarray, np.ndarray] | None:
        """int32 (low, high) [s], if each query sees one interval of positions, low <= p < high."""
        seen = self.condition
        return (seen.low, seen.high) if isinstance(seen, Between) else None

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(query positions, key positions, order of the rows of keys), int64 on `device`."""
        q, k, order = (
            self.tables.on(array, device) for array in (self.queries, self.keys, self._rows)
        )
        return q, k, order

    def sees(self, rows: slice, positions: torch.Tensor) -> torch.Tensor:
        """bool: do the queries of these rows (dimension 0) see the `positions` beside them, which
        lie in the sequence?"""
        q, _, _ = self.on(positions.device)
        q = q[rows].view(-1, *[1] * (positions.dim() - 1))
        if self.condition is not None:
            return self.condition(rows, q, positions)
        # A mask of one's own, or a dense one, for whose values the host waits; in a plan these
        # would be as large as the scores.
        seen = self.mask.visible(q.cpu().numpy(), positions.cpu().numpy())
        return to_device(np.ascontiguousarray(seen), positions.device)


class PairKernel:
    """A kernel for plans: it notes what a pair consists of. What computes one knows a selection,
    and takes its place in each call."""

    name = "sparse"
    softcaps = False
    maximum = False
    deterministic = True
    passed_over: tuple[str, ...] = ()

    def __init__(self):
        self._tables = Tables()
        self._seen: dict[tuple[Span, ...], tuple[Mask, np.ndarray, Condition | None]] = {}

    def refusal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        return None

    def work_for(
        self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]
    ) -> SelectedPairs | None:
        covers = (mask.cover(q, k) for q in q_spans for k in k_spans)
        if all(c == Cover.EMPTY for c in covers):
            return None
        # A rank's queries are mostly the same in all pairs.
        of, queries, seen = self._seen.get(tuple(q_spans), (None, np.empty(0), None))
        if of is not mask:
            queries = _positions(q_spans)
            seen = condition(mask, queries, self._tables)
            self._seen[tuple(q_spans)] = mask, queries, seen
        return SelectedPairs(mask, queries, k_spans, seen, self._tables)

    def forward(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    def backward(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError


def _positions(spans: Sequence[Span]) -> np.ndarray:
    return np.concatenate([span.positions() for span in spans])


def tiles(rows: int, each: int) -> list[slice]:
    """Slices of so many rows, each of which makes `each` elements."""
    step = max(1, TILE // max(1, each))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
