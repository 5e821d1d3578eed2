"""The smaller ring that recomputes attention where nothing was kept.

Turns the positions that `selection` chose into what a rank runs: which rows it left in the frame,
which it computes again, and a pass for which only the keys travel that these rows see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..execution.build import Works, make_pass
from ..execution.job import PartialPass
from ..kernels.base import Kernel
from ..layout import Span
from ..layout.sharding import to_device
from ..masks import Mask
from ..schedule import cost
from ..schedule.demand import wanted
from ..schedule.rings import Schedule
from ..schedule.tables import Grid
from . import selection


@dataclass(frozen=True)
class Recompute:
    """The recompute of a plan that keeps the results of some rows."""

    keep: float
    schedule: Schedule
    run: PartialPass  # of this rank
    mask: Mask
    queries: tuple[selection.Part, ...]  # of every rank of the ring: the rows computed again
    seq_len: int

    def work(self) -> list[int]:
        """Visible pairs that each rank of the ring computes again."""
        whole = (Span(0, 1, self.seq_len),)
        return [
            cost.visible_pairs(self.mask, q.spans, whole) if q.spans else 0 for q in self.queries
        ]

    def imbalance(self) -> float:
        """Visible pairs of the busiest rank over the mean; 1.0 is perfect balance."""
        return imbalance([self])

    def traffic(self, rank: int, sizes: cost.Sizes) -> cost.Traffic:
        """Bytes that a rank of the ring sends per recompute, without those of ulysses groups."""
        # Of a copy: the tables of all ranks are not kept.
        return cost.traffic(replace(self.schedule), rank, sizes)


def imbalance(several: Sequence[Recompute]) -> float:
    """`Recompute.imbalance` of all of these together."""
    work = [sum(each) for each in zip(*(one.work() for one in several), strict=True)]
    return max(work) * len(work) / sum(work) if any(work) else 1.0


def plan(
    mask: Mask,
    kernel: Kernel,
    algorithm: str,
    grid: Grid,
    spans: Sequence[Sequence[Span]],
    rank: int,
    keep: float,
    cp_size: int,
    sizes: cost.Sizes,
    device: torch.device,
    own: Sequence[Span],
    rows_of: Sequence[Sequence[Span]] | None = None,
) -> Recompute:
    """What `rank` of a ring, whose shards are `spans`, keeps and computes again; its tensors are on
    `device`, and so are the row numbers.

    rows_of: the queries of each rank of the ring, if not those of all its rows; own: those of this
    rank before ranks share heads.
    """
    seq_len = sum(span.length for each in spans for span in each)
    kept, rest = selection.split(mask, seq_len, keep, cp_size)
    shards = spans if rows_of is None else rows_of
    queries = [selection.part(each, rest) for each in shards]
    rows = [q.spans for q in queries]
    schedule = cost.forward_schedule(algorithm, grid, wanted(mask, rows, spans), sizes)
    works = Works(kernel, mask, rows, spans)
    run = make_pass("attention recompute", schedule, rank, works, device)
    indices = [selection.part(each, kept).rows for each in (shards[rank], own)]
    indices.insert(1, queries[rank].rows)
    together = to_device(np.concatenate(indices), device)
    partial = PartialPass(*together.split([len(x) for x in indices]), run=run)
    return Recompute(keep, schedule, partial, mask, tuple(queries), seq_len)
