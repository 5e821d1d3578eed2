# SPDX-License-Identifier: Apache-2.0
"""Positions of this rank's queries and of a chunk of keys, and the keys that each query sees.

The loop of `execution/ring.py` computes attention of queries to one chunk of keys after another.
Sparse attention supports every schedule that sends keys in forward, and keys and their gradients in
backward. Queries and their selection stay on their rank. Tensors with the positions of selected
keys are made for one tile (slice of the query rows) at a time, never for all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...layout import Span
from ...layout.layouts import ShardPairs
from ...layout.sharding import to_device
from ...masks import Cover, Mask
from .rules import SelectionRule
from .sight import IntervalCondition, Rows, VisibilityTables

TILE = 1 << 22  # elements of the largest tensor of a tile of rows


class SelectedPairs:
    """Kernel plan with the positions of this rank's queries and of a chunk of keys.

    Attributes:
        queries: Positions of the queries [s].
        keys: Positions of the keys [t], ascending.
        order: Row in the chunk of each entry of `keys` [t]; None if the chunk is in ascending
            order.
        span_rows: Start, stride, length and first row of each span (regularly spaced positions) of
            keys, int32 [spans, 4].
        condition: Function that evaluates the mask on a device; None if only the host can evaluate
            the mask.
        tables: Cache of arrays on the device, which all chunks of a plan share.
    """

    def __init__(
        self,
        mask: Mask,
        q_spans: Sequence[Span],
        k_spans: Sequence[Span],
        tables: VisibilityTables | None = None,
    ):
        self.mask, self.tables = mask, VisibilityTables() if tables is None else tables
        self.q_spans, self.k_spans = tuple(q_spans), tuple(k_spans)
        self.queries, self.condition = self.tables.of(mask, self.q_spans)
        k = np.concatenate([span.positions() for span in k_spans])
        order = np.argsort(k, kind="stable")
        self.keys = k[order]
        self.order = None if np.array_equal(order, np.arange(len(k))) else order
        self._rows = np.arange(len(k)) if self.order is None else order
        firsts = np.cumsum([0, *(span.length for span in k_spans)])
        rows = [(*span, first) for span, first in zip(k_spans, firsts, strict=False)]
        self.span_rows = np.array(rows, dtype=np.int32).reshape(-1, 4)

    @property
    def interval(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Interval of positions that each query sees: (low, high), int32 [s] each.

        A query sees low <= k < high. The value is None if `condition` is not an
        `IntervalCondition`.
        """
        seen = self.condition
        return (seen.low, seen.high) if isinstance(seen, IntervalCondition) else None

    def unit(self, block: int) -> int:
        """Return the number of positions that can be copied as one unit: `block` or 1.

        The result is `block` if the chunk of keys consists of whole blocks: `block` consecutive
        rows with consecutive positions, the first of which is a multiple of `block`.
        """
        if len(self.keys) % block:
            return 1
        ahead = np.arange(block)
        for firsts in (self.keys.reshape(-1, block), self._rows.reshape(-1, block)):
            if (firsts[:, 0] % block).any() or (firsts - firsts[:, :1] != ahead).any():
                return 1
        return block

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the positions of queries [s] and keys [t], and each key's row in the chunk [t].

        All three are int64 tensors on `device`.
        """
        q, k, order = (
            self.tables.on(array, device) for array in (self.queries, self.keys, self._rows)
        )
        return q, k, order

    def sees(self, rows: Rows, positions: torch.Tensor) -> torch.Tensor:
        """Return a bool tensor [r, ...], True for positions that the query of the row sees.

        Args:
            rows: Index (slice or tensor) of r query rows.
            positions: Positions of keys in the sequence [r, ...], on a device.
        """
        q, _, _ = self.on(positions.device)
        q = q[rows].view(-1, *[1] * (positions.dim() - 1))
        if self.condition is not None:
            return self.condition(rows, q, positions)
        # A dense mask or a user's mask: the host evaluates it, which synchronizes with the device.
        # A table on the device would be as large as the scores.
        seen = self.mask.visible(q.cpu().numpy(), positions.cpu().numpy())
        return to_device(np.require(seen, requirements=["C", "W"]), positions.device)


class PairKernel:
    """Placeholder for the kernel in a plan of sparse attention.

    Calls with the same plan have different selections. Therefore the plan has only the positions of
    queries and chunks of keys (`works_for`). Each call replaces the placeholder by a kernel with
    the selection of the call.

    Attributes:
        by: Class or function that makes the kernel of a call: an entry of `KERNELS`, or
            `UnitSelector`.
        of: Selection rule for `UnitSelector`, otherwise None.
        heads: Number of selections of a query row.
        top_k: Number of units (blocks of consecutive positions) of a selection.
        attended: Largest number of keys that a query attends to; None for all visible keys.
        latent: True if values are columns of the keys and are not sent separately.
    """

    name = "sparse"
    softcaps = False
    maximum = False
    deterministic = True
    passed_over: tuple[str, ...] = ()
    joins = True  # a kernel call reads all queries and results, however few keys it gets

    def __init__(
        self, by: Any, of: SelectionRule | None, heads: int, top_k: int,
        attended: int | None = None, latent: bool = False,
    ):  # fmt: skip
        self.by, self.of, self.heads, self.top_k = by, of, heads, top_k
        self.attended, self.latent = attended, latent
        self._tables = VisibilityTables()

    def refusal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        return None

    def works_for(self, mask: Mask, pairs: ShardPairs) -> list[SelectedPairs | None]:
        return [
            SelectedPairs(mask, *pair, self._tables)
            if any(mask.cover(q, k) != Cover.EMPTY for q in pair[0] for k in pair[1])
            else None
            for pair in pairs
        ]

    def forward(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    def backward(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError


def tiles(rows: int, per_row: int, limit: int | None = None) -> list[slice]:
    """Return slices that split rows into tiles of bounded size.

    Args:
        rows: Number of rows.
        per_row: Elements or bytes per row.
        limit: Largest number of elements or bytes of a tile; default `TILE`. A tile has at least
            one row.
    """
    step = max(1, (limit or TILE) // max(1, per_row))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
