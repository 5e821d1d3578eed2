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
from ..masks import Causal, Cover, Mask
from .rules import SelectionRule

TILE = 1 << 22  # elements of the largest tensor that a tile of rows makes


class SelectedPairs:
    """The positions of a pair, keys in ascending order. order: of the rows of keys, or None."""

    def __init__(self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]):
        q, k = (np.concatenate([s.positions() for s in spans]) for spans in (q_spans, k_spans))
        order = np.argsort(k, kind="stable")
        self.mask, self.queries, self.keys = mask, q, k[order]
        self.order = None if np.array_equal(order, np.arange(len(k))) else order
        self._there: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(query positions, key positions, order of the rows of keys), int64 on `device`."""
        if device not in self._there:
            order = np.arange(len(self.keys)) if self.order is None else self.order
            q, k = to_device(self.queries, device), to_device(self.keys, device)
            self._there[device] = q, k, to_device(order, device)
        return self._there[device]

    def sees(self, rows: slice | torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """bool: do the queries of these rows (dimension 0) see the `positions` beside them?"""
        q, _, _ = self.on(positions.device)
        q = q[rows].view(-1, *[1] * (positions.dim() - 1))
        if type(self.mask) is Causal:
            return positions <= q
        # Masks are arithmetic on the host; in a plan their tables would be as large as the scores.
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

    def __init__(
        self, by: Any, of: SelectionRule | None, heads: int, top_k: int,
        attended: int | None = None, latent: bool = False,
    ):  # fmt: skip
        self.by, self.of, self.heads, self.top_k = by, of, heads, top_k
        self.attended, self.latent = attended, latent

    def refusal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        return None

    def work_for(
        self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]
    ) -> SelectedPairs | None:
        covers = (mask.cover(q, k) for q in q_spans for k in k_spans)
        return (
            SelectedPairs(mask, q_spans, k_spans) if any(c != Cover.EMPTY for c in covers) else None
        )

    def forward(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    def backward(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError


def tiles(rows: int, each: int) -> list[slice]:
    """Slices of so many rows, each of which makes `each` elements."""
    step = max(1, TILE // max(1, each))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
