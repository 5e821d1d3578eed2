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

from ...layout import Span
from ...layout.sharding import to_device
from ...masks import Cover, Mask
from .rules import SelectionRule
from .sight import Between, Rows, Sights

TILE = 1 << 22  # elements of the largest tensor that a tile of rows makes


class SelectedPairs:
    """The positions of a pair, keys in ascending order. order: of the rows of keys, or None.
    span_rows: int32 [pieces, 4], start, stride, length and first row of each span of keys.
    condition: what the queries see, on a device, or None if only the host knows. sights: of the
    plan.
    """

    def __init__(
        self,
        mask: Mask,
        q_spans: Sequence[Span],
        k_spans: Sequence[Span],
        sights: Sights | None = None,
    ):
        self.mask, self.sights = mask, Sights() if sights is None else sights
        self.q_spans, self.k_spans = tuple(q_spans), tuple(k_spans)
        self.queries, self.condition = self.sights.of(mask, self.q_spans)
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
        """int32 (low, high) [s], if each query sees one interval of positions, low <= p < high."""
        seen = self.condition
        return (seen.low, seen.high) if isinstance(seen, Between) else None

    def unit(self, block: int) -> int:
        """block, if units of that many positions lie whole and in order among the rows of keys,
        from multiples of it on; else 1.
        """
        if len(self.keys) % block:
            return 1
        ahead = np.arange(block)
        for firsts in (self.keys.reshape(-1, block), self._rows.reshape(-1, block)):
            if (firsts[:, 0] % block).any() or (firsts - firsts[:, :1] != ahead).any():
                return 1
        return block

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(query positions, key positions, order of the rows of keys), int64 on `device`."""
        q, k, order = (
            self.sights.on(array, device) for array in (self.queries, self.keys, self._rows)
        )
        return q, k, order

    def sees(self, rows: Rows, positions: torch.Tensor) -> torch.Tensor:
        """bool: do the queries of these rows (dimension 0) see the `positions` beside them, which
        lie in the sequence?
        """
        q, _, _ = self.on(positions.device)
        q = q[rows].view(-1, *[1] * (positions.dim() - 1))
        if self.condition is not None:
            return self.condition(rows, q, positions)
        # A dense mask, or one of your own, for whose values the host waits; in a plan they would be
        # as large as the scores.
        seen = self.mask.visible(q.cpu().numpy(), positions.cpu().numpy())
        return to_device(np.require(seen, requirements=["C", "W"]), positions.device)


class PairKernel:
    """A kernel for plans: it notes what a pair consists of. What computes one knows a selection,
    and takes its place in each call.

    For algorithm "auto": by: what computes a pair, a kernel of `kernels`, or `Selecting` with the
    rule `of`; heads, top_k: selections of a row, and their units; attended: keys of a query at
    most, None for all that it sees; latent: are values columns of the keys, which travel without
    them?
    """

    name = "sparse"
    softcaps = False
    maximum = False
    deterministic = True
    passed_over: tuple[str, ...] = ()
    joins = True  # a call reads its queries, and reads and writes their results, whatever it has

    def __init__(
        self, by: Any, of: SelectionRule | None, heads: int, top_k: int,
        attended: int | None = None, latent: bool = False,
    ):  # fmt: skip
        self.by, self.of, self.heads, self.top_k = by, of, heads, top_k
        self.attended, self.latent = attended, latent
        self._sights = Sights()

    def refusal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        return None

    def work_for(
        self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]
    ) -> SelectedPairs | None:
        covers = (mask.cover(q, k) for q in q_spans for k in k_spans)
        if all(c == Cover.EMPTY for c in covers):
            return None
        return SelectedPairs(mask, q_spans, k_spans, self._sights)

    def forward(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    def backward(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError


def tiles(rows: int, each: int, most: int | None = None) -> list[slice]:
    """Slices of so many rows, each of which makes `each` elements, or bytes, of `most`."""
    step = max(1, (most or TILE) // max(1, each))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
