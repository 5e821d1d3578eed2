"""The content of pictures of masks and layouts, read from those that run; `passes` has schedules.

A scene holds numbers only; `text`, `png` and `timeline` decide how they look.

Shape letters: G ranks, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...layout import Layout, Span
from ...masks import Mask
from ...schedule import cost
from ...schedule.demand import Wanted, wanted
from ...schedule.rings import Schedule


@dataclass(frozen=True)
class Shards:
    """A sequence of `seq_len` positions over ranks, with its mask."""

    mask: Mask
    layout: Layout
    seq_len: int
    mask_text: str  # as the user wrote it
    layout_text: str

    @property
    def size(self) -> int:
        return self.layout.cp_size

    @cached_property
    def spans(self) -> list[Sequence[Span]]:
        """What each rank holds."""
        return [self.layout.spans(rank, self.seq_len) for rank in range(self.size)]

    @cached_property
    def wanted(self) -> Wanted:
        """Which pairs of shards see something, and which rows of them."""
        return wanted(self.mask, self.spans, self.spans)

    @cached_property
    def pairs(self) -> np.ndarray:
        """int64 [G, G]: the number of visible position pairs of two shards."""
        counts = [[cost.visible_pairs(self.mask, q, k) for k in self.spans] for q in self.spans]
        return np.array(counts, dtype=np.int64)

    @cached_property
    def order(self) -> np.ndarray:
        """int64 [S]: the positions in shard order, rank after rank."""
        parts = [self.layout.positions(rank, self.seq_len) for rank in range(self.size)]
        return np.concatenate(parts)

    @cached_property
    def holders(self) -> np.ndarray:
        """int64 [S]: the rank that holds each position."""
        holders = np.empty(self.seq_len, dtype=np.int64)
        holders[self.order] = np.repeat(np.arange(self.size), self.lengths)
        return holders

    @property
    def lengths(self) -> list[int]:
        """The number of positions that each rank holds."""
        return [sum(span.length for span in of_rank) for of_rank in self.spans]

    @property
    def work(self) -> list[int]:
        return cost.work(self.layout, self.mask, self.seq_len)

    @property
    def imbalance(self) -> float:
        return cost.imbalance(self.layout, self.mask, self.seq_len)


@dataclass(frozen=True)
class MaskScene:
    """The score matrix, and the rank and step at which the ring `plan` computes each pair."""

    shards: Shards
    plan: Schedule

    @cached_property
    def computers(self) -> np.ndarray:
        """int64 [S, S], global order: the rank that computes each visible pair, else -1."""
        shards, everywhere = self.shards, np.arange(self.shards.seq_len)
        ranks = np.full((shards.size, shards.size), -1)
        pairs = self.plan.tables.pairs
        ranks[pairs.query, pairs.key] = pairs.rank
        of_pair = ranks[np.ix_(shards.holders, shards.holders)]
        return np.where(shards.mask.visible(everywhere[:, None], everywhere[None, :]), of_pair, -1)

    @cached_property
    def steps(self) -> np.ndarray:
        """int64 [G, G]: the step at which queries of rank i meet keys of rank j; -1 if skipped."""
        steps = np.full((self.shards.size, self.shards.size), -1)
        pairs = self.plan.tables.pairs
        steps[pairs.query, pairs.key] = pairs.step
        return np.where(self.shards.pairs > 0, steps, -1)


@dataclass(frozen=True)
class LayoutScene:
    """Several layouts of one sequence, and the work of each rank under a mask."""

    rows: tuple[Shards, ...]
    best: str | None  # the name of the layout with the least imbalance; None if not asked for
