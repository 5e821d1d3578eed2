"""The passes of a plan: of all rows at once, or of row chunks one behind the other.

Decides which side travels in backward of row chunks: one for all of them, that with fewer bytes
over all. On the key side the keys go round once per chunk; on the query side the chunks together
send what one pass does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..comm.groups import Groups
from ..execution.build import Works, make_pass
from ..execution.job import RowChunk
from ..layout import Span
from ..layout.sharding import to_device
from ..options import ring_algorithm
from ..recompute import partial_ring
from ..schedule import cost
from ..schedule.cost import Sizes
from ..schedule.demand import wanted
from ..schedule.rings import Schedule
from ..schedule.row_cut import own_spans, row_cuts
from ..schedule.tables import SIDES, Grid
from .validate import Request

Shards = Sequence[Sequence[Span]]
Pair = tuple[Schedule, Schedule]


class Passes(NamedTuple):
    """What a plan has of the ring of one rank; the same in every micro-batch of equal options.

    schedules: forward and backward of every chunk. again: of every chunk, if results are kept.
    digest: of the tables of all schedules.
    """

    schedules: tuple[Pair, ...]
    chunks: tuple[RowChunk, ...]
    again: tuple[partial_ring.Recompute, ...]
    digest: int


@dataclass(frozen=True)
class _Rows:
    """One chunk: rows of this rank's shard, None for all; the spans of its queries on each rank of
    the ring, and on this rank before ranks share heads."""

    rows: np.ndarray | None
    shards: Shards
    own: Sequence[Span]


def make(request: Request, sizes: Sizes, groups: Groups, spans: Shards) -> Passes:
    """The passes of one rank. sizes, spans: of its ring."""
    options, topology, rank = request.options, groups.topology, groups.ring.rank
    grid = Grid(topology.inter_size, topology.intra_size)
    device, mask = request.tensors[0].device, request.mask
    algorithm = ring_algorithm(options.algorithm)
    seq_len = request.tensors[0].shape[0] * groups.size
    cut = list(_cut(request, groups, spans, seq_len))
    kept = round(options.kv_cache * (grid.size - 1))
    pairs = _schedules([each.shards for each in cut], spans, request, algorithm, grid, sizes, kept)
    chunks, again = [], []
    for c, (each, (there, back)) in enumerate(zip(cut, pairs, strict=True)):
        works = Works(request.kernel, mask, each.shards, spans)
        left = back.kept_chunks(rank)
        which = f", rows {c}" * (len(cut) > 1)
        names = f"attention forward{which}", f"attention backward, side {back.side}{which}"
        forward, backward = (
            make_pass(name, schedule, rank, works, device, left)
            for name, schedule in zip(names, (there, back), strict=True)
        )
        partial = None
        if options.store is not None:
            partial = partial_ring.plan(
                mask, request.kernel, algorithm, grid, spans, rank, options.store, groups.size,
                sizes, device, each.own, each.shards,
            )  # fmt: skip
            again.append(partial)
        rows = None if each.rows is None else to_device(each.rows, device)
        chunks.append(RowChunk(rows, forward, backward, partial and partial.run))
    made = [*(s for pair in pairs for s in pair), *(one.schedule for one in again)]
    digest = hash(tuple(schedule.tables.digest for schedule in made))
    return Passes(
        # As copies: the tables of all ranks are not kept.
        tuple((replace(there), replace(back)) for there, back in pairs),
        tuple(chunks),
        tuple(replace(one, schedule=replace(one.schedule)) for one in again),
        digest,
    )


def _cut(request: Request, groups: Groups, spans: Shards, seq_len: int) -> Iterator[_Rows]:
    options, layout = request.options, request.layout
    own = layout.spans(groups.rank, seq_len)
    if options.sequence_chunks == 1:
        yield _Rows(None, spans, own)
        return
    count, blocks = options.sequence_chunks, options.row_blocks
    for rows, shards in row_cuts(layout, groups.topology, seq_len, count, blocks):
        yield _Rows(rows, shards, own_spans(layout, groups.rank, seq_len, rows))


def _schedules(
    queries: Sequence[Shards],
    keys: Shards,
    request: Request,
    algorithm: str,
    grid: Grid,
    sizes: Sizes,
    kept: int,
) -> list[Pair]:
    """(forward, backward) of every chunk."""
    seen = [wanted(request.mask, shards, keys) for shards in queries]
    needed = seen
    if request.options.visiting == "host":  # what the first brings is for all of them
        whole = wanted(request.mask, keys, keys)
        needed = [replace(whole, queries=each.queries) for each in seen]
    there = [cost.forward_schedule(algorithm, grid, each, sizes) for each in needed]

    def back(side: str) -> list[Schedule]:
        return [
            cost.backward_schedule(algorithm, grid, each, sizes, side=side, kept=kept)
            for each in seen
        ]

    sides = (request.options.side,)
    if sides == ("auto",) and len(seen) > 1:
        sides = SIDES
    made = {side: back(side) for side in sides}
    cheapest = min(
        made, key=lambda side: sum(cost.total_traffic(s, sizes).total for s in made[side])
    )
    return list(zip(there, made[cheapest], strict=True))
