"""The smaller ring that recomputes attention where nothing was kept.

Turns `store`'s choice of positions into what each local rank runs: which rows it left in the
frame, which it computes again, and a pass whose chunks hold only the keys that these rows see.
Knows nothing of how the pass is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..execution.executor import Pass
from ..kernels.base import Kernel
from ..layout import Span
from ..masks import Mask, shards_visible
from ..schedule import cost
from ..schedule.rings import Schedule
from ..schedule.tables import Grid
from . import selection


@dataclass(frozen=True)
class Again:
    """One local rank's part: int64 row numbers of its ring shard, and what it runs."""

    kept: torch.Tensor
    rest: torch.Tensor
    keys: torch.Tensor
    run: Pass


@dataclass(frozen=True)
class Recompute:
    """The recompute of a plan that keeps the results of some rows."""

    keep: float
    schedule: Schedule
    ranks: tuple[Again, ...]  # one per local rank
    mask: Mask
    queries: tuple[selection.Part, ...]  # of every rank of the ring: the rows computed again
    seq_len: int

    def imbalance(self) -> float:
        """Visible pairs of the busiest rank over the mean; 1.0 is perfect balance."""
        whole = (Span(0, 1, self.seq_len),)
        work = [
            cost.visible_pairs(self.mask, q.spans, whole) if q.spans else 0 for q in self.queries
        ]
        return max(work) * len(work) / sum(work) if any(work) else 1.0

    def traffic(self, rank: int, sizes: cost.Sizes) -> cost.Traffic:
        """Bytes that a rank of the ring sends per recompute, without those of ulysses groups."""
        rows = self.ranks[0].run.rows
        sent = {"intra": 0.0, "inter": 0.0}
        whole = sizes.chunk_bytes
        for hop in self.schedule.sends(rank):
            sent[hop.link] += whole(hop.chunk) * rows[hop.chunk.owner] / sizes.tokens
        return cost.Traffic(round(sent["intra"]), round(sent["inter"]))


def plan(
    mask: Mask,
    kernel: Kernel,
    algorithm: str,
    grid: Grid,
    spans: Sequence[Sequence[Span]],
    ring_ranks: Sequence[int],
    keep: float,
    cp_size: int,
    sizes: cost.Sizes,
    device: torch.device,
) -> Recompute:
    """What the ranks `ring_ranks` of a ring, whose shards are `spans`, keep and compute again;
    their tensors are on `device`, and so are the row numbers."""
    seq_len = sum(span.length for each in spans for span in each)
    kept, rest, needed = selection.split(mask, seq_len, keep, cp_size)
    queries = [selection.part(each, rest) for each in spans]
    keys = [selection.part(each, needed) for each in spans]
    visible = shards_visible(mask, [q.spans for q in queries], [k.spans for k in keys])
    schedule = cost.forward_schedule(algorithm, grid, visible, sizes)
    rows = tuple(len(k.rows) for k in keys)
    ranks = []
    for rank in ring_ranks:
        program = schedule.program(rank)
        works = {}
        for boundary in program:
            pair = boundary.pair
            if pair is not None and visible[pair]:
                work = kernel.plan(mask, queries[pair.query].spans, keys[pair.key].spans)
                if work is not None:
                    works[pair] = work
        indices = selection.part(spans[rank], kept).rows, queries[rank].rows, keys[rank].rows
        run = Pass("attention recompute", program, works, rows=rows, own_last=program)
        ranks.append(Again(*(torch.from_numpy(x).to(device) for x in indices), run=run))
    return Recompute(keep, schedule, tuple(ranks), mask, tuple(queries), seq_len)


def rows_of(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """These rows of x: x itself where they are all of them."""
    return x if len(rows) == len(x) else x.index_select(0, rows.to(x.device))


def woven(again: Again, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The rows that were kept and those computed again, each in its place."""
    if not len(again.rest):
        return stored.detach()  # as a result it gets a history of its own
    whole = new.new_empty((len(again.kept) + len(again.rest), *new.shape[1:]))
    whole[again.kept.to(new.device)] = stored
    whole[again.rest.to(new.device)] = new
    return whole
