# SPDX-License-Identifier: Apache-2.0
"""What one rank runs of a checked request: a pipeline of three stages, in the order of this file.

`demands` says which queries attend when and which rows must be where for that, `schedules` which
transfers and pairs of all ranks bring it about (as tables), and `programs` what one rank does of
it. A call has one or several row chunks (queries in chunks of rows, one behind the other); each has
a forward and a backward and, where a store keeps some of its results, a second forward of the other
rows, in whose smaller ring only the keys travel that these rows see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from ..comm.groups import Groups
from ..execution.job import PartialPass, Pass, RowChunk
from ..layout.layouts import Shards, Span
from ..layout.row_chunks import rows_of
from ..layout.sharding import to_device
from ..masks import Mask
from ..options import ring_algorithm
from ..recompute import selection
from ..recompute.selection import Interval, ShardRows, rows_in
from ..schedule import cost
from ..schedule.algorithms import ALGORITHMS
from ..schedule.cost import Sizes
from ..schedule.demand import Visibility, row_chunk_spans, visibility_of
from ..schedule.head_shares import deferred_chunks, shared_order
from ..schedule.rings import Schedule
from ..schedule.tables import Grid
from .build import Works, make_pass
from .validate import Request


class Passes(NamedTuple):
    """What a plan has of the ring of one rank; the same in every micro-batch of equal options.

    schedules: forward and backward of every row chunk. again: of every row chunk, if results are
    kept. order: as of `Job`. digest: of the tables of all schedules. host_forward: the forward that
    brings the keys for all row chunks into host memory, None if there is none.
    """

    schedules: tuple[tuple[Schedule, Schedule], ...]
    chunks: tuple[RowChunk, ...]
    again: tuple[Recompute, ...]
    order: torch.Tensor | None
    digest: int
    host_forward: Schedule | None


@dataclass(frozen=True)
class RingRequest:
    """What every stage reads: the request, and the ring of this rank.

    sizes: of one rank of the ring. keys: the spans of the keys of each of its ranks.
    """

    request: Request
    groups: Groups
    sizes: Sizes
    keys: Shards

    @property
    def grid(self) -> Grid:
        """The nodes and ranks of the ring."""
        return Grid(self.groups.topology.inter_size, self.groups.topology.intra_size)

    @property
    def algorithm(self) -> str:
        """The algorithm of the ring; sharing heads goes on around it."""
        return ring_algorithm(self.request.options.algorithm)

    @property
    def seq_len(self) -> int:
        """Positions of the whole sequence."""
        return self.request.tensors[0].shape[0] * self.groups.size

    def wanted(self, queries: Shards, joined: bool | None = None) -> Visibility:
        """Return which keys these queries see. joined: as of `Visibility`, for kernels that do not
        choose it; those of sparse attention take the pairs of a step at once.
        """
        request = self.request
        return visibility_of(
            request.mask, queries, self.keys, getattr(request.kernel, "joins", joined)
        )


def passes(request: Request, groups: Groups, sizes: Sizes, keys: Shards) -> Passes:
    """The whole pipeline for one rank; arguments as of `RingRequest`."""
    ring = RingRequest(request, groups, sizes, keys)
    return programs(ring, schedules(ring, demands(ring)))


# --- demand: which rows attend when, and what must be where --------------------------------------


class Again(NamedTuple):
    """What a recompute computes again of a row chunk, because the store does not keep it.

    queries: of every rank of the ring, the rows that are computed again. kept, own_kept: int64 row
    numbers of what this rank keeps, among the rows of its ring shard, and of its own shard before
    ranks share heads. wanted: what the queries want.
    """

    queries: tuple[ShardRows, ...]
    kept: np.ndarray
    own_kept: np.ndarray
    wanted: Visibility


class RowDemand(NamedTuple):
    """What one row chunk demands of its passes.

    rows: of this rank's shard, None for all. queries: the spans of its queries on each rank of the
    ring. members: those of the ranks that share heads with this one, before they do. seen: which
    rows have to travel. host: the same for a forward that brings the keys for all row chunks into
    host memory; None with one row chunk, and for algorithms that send more than keys in forward.
    """

    rows: np.ndarray | None
    queries: Shards
    members: Shards
    seen: Visibility
    host: Visibility | None
    again: Again | None


def demands(ring: RingRequest) -> list[RowDemand]:
    """What each row chunk demands."""
    groups, mask, layout = ring.groups, ring.request.mask, ring.request.layout
    options, length = ring.request.options, ring.seq_len
    ranks = groups.topology.ulysses_group(groups.rank)
    whole_shards = [layout.spans(rank, length) for rank in ranks]
    cuts: list[tuple[np.ndarray | None, Shards, Shards]] = [(None, ring.keys, whole_shards)]
    if options.sequence_chunks > 1:
        count, blocks = options.sequence_chunks, options.row_blocks
        cuts = [
            (rows_of(runs), queries, [own[rank] for rank in ranks])
            for runs, queries, own in row_chunk_spans(
                layout, groups.topology, length, count, blocks
            )
        ]
    stored = None
    if options.store is not None:
        stored = selection.split_positions(mask, length, options.store, groups.size)
    whole = None
    if len(cuts) > 1 and ALGORITHMS[ring.algorithm].keeps:
        # Keys in host memory are fetched chunk by chunk, so no call takes several chunks of keys.
        whole = ring.wanted(ring.keys, joined=False)
    found = []
    for rows, queries, members in cuts:
        seen = ring.wanted(queries)
        host = None if whole is None else replace(whole, queries=seen.queries)
        own = members[ranks.index(groups.rank)]
        again = _again(ring, queries, own, *stored) if stored else None
        found.append(RowDemand(rows, queries, members, seen, host, again))
    return found


def _again(
    ring: RingRequest,
    queries: Shards,
    own: Sequence[Span],
    kept: Sequence[Interval],
    rest: Sequence[Interval],
) -> Again:
    """own: the spans of this rank's queries before ranks share heads; kept, rest: positions."""
    again = tuple(rows_in(each, rest) for each in queries)
    here, before = (rows_in(each, kept).rows for each in (queries[ring.groups.ring.rank], own))
    seen = ring.wanted([each.spans for each in again])
    return Again(again, here, before, seen)


# --- tables: the transfers and pairs of all ranks -------------------------------------------------


class RowSchedules(NamedTuple):
    """The schedules of the passes of one row chunk."""

    demand: RowDemand
    forward: Schedule
    backward: Schedule
    host: Schedule | None
    again: Schedule | None


def schedules(ring: RingRequest, demands: Sequence[RowDemand]) -> list[RowSchedules]:
    """The schedules of each row chunk, with what is "auto" chosen by bytes.

    All row chunks have the same side in backward: that with fewer bytes over all of them. On the
    key side the keys go round once per row chunk; on the query side the row chunks together send
    what one pass does.
    """
    name, grid, sizes, options = ring.algorithm, ring.grid, ring.sizes, ring.request.options
    backward = cost.backward_schedules(
        name, grid, [each.seen for each in demands], sizes, side=options.side
    )
    return [
        RowSchedules(
            each,
            cost.forward_schedule(name, grid, each.seen, sizes),
            gradients,
            each.host and cost.forward_schedule(name, grid, each.host, sizes),
            each.again and cost.forward_schedule(name, grid, each.again.wanted, sizes),
        )
        for each, gradients in zip(demands, backward, strict=True)
    ]


# --- program: what this rank does -----------------------------------------------------------------


@dataclass(frozen=True)
class Recompute:
    """The recompute of a row chunk of which the results of some rows are kept.

    queries: of every rank of the ring, the rows that are computed again; run: of this rank.
    """

    keep: float
    schedule: Schedule
    run: PartialPass
    mask: Mask
    queries: tuple[ShardRows, ...]
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

    def traffic(self, rank: int, sizes: Sizes) -> cost.Traffic:
        """Bytes that a rank of the ring sends per recompute, without those of ulysses groups."""
        return cost.traffic(without_tables(self.schedule), rank, sizes)


def imbalance(several: Sequence[Recompute]) -> float:
    """`Recompute.imbalance` of all of these together."""
    work = [sum(each) for each in zip(*(one.work() for one in several), strict=True)]
    return max(work) * len(work) / sum(work) if any(work) else 1.0


def without_tables(schedule: Schedule) -> Schedule:
    """A copy that makes its tables when asked: a plan does not keep those of all ranks."""
    return replace(schedule, visibility=replace(schedule.visibility))


def programs(ring: RingRequest, scheduled: Sequence[RowSchedules]) -> Passes:
    """What this rank runs of the schedules."""
    chunks, again, order = [], [], None
    if ring.groups.topology.ulysses > 1:
        ranks = ring.groups.topology.ulysses_group(ring.groups.rank)
        order = _order(ring, [ring.request.layout.spans(rank, ring.seq_len) for rank in ranks])
    for c, each in enumerate(scheduled):
        chunk = _row_chunk(ring, each, f", rows {c}" if len(scheduled) > 1 else "")
        chunks.append(chunk)
        if chunk.recompute is not None:
            assert each.again is not None
            assert each.demand.again is not None
            again.append(_recompute(ring, each.again, each.demand.again, chunk.recompute))
    made = [schedule for each in scheduled for schedule in (each.forward, each.backward)]
    made += [each.again for each in scheduled if each.again is not None]
    made += [each.host for each in scheduled if each.host is not None]
    host_forward = scheduled[0].host
    return Passes(
        tuple((without_tables(each.forward), without_tables(each.backward)) for each in scheduled),
        tuple(chunks),
        tuple(again),
        order,
        hash(tuple(schedule.tables.digest for schedule in made)),
        None if host_forward is None else without_tables(host_forward),
    )


def _row_chunk(ring: RingRequest, scheduled: RowSchedules, which: str) -> RowChunk:
    """The passes of a row chunk; which: for messages, "" of a call that has only one."""
    (rows, queries, members, *_, again), forward, backward, host, recompute = scheduled
    rank, kernel, mask = ring.groups.ring.rank, ring.request.kernel, ring.request.mask
    works = Works(kernel, mask, queries, ring.keys, ring.sizes)
    partial, device = None, ring.request.tensors[0].device
    deferred = deferred_chunks(ring.request.options.head_chunks or 1) > 0
    if again is not None and recompute is not None:
        rest = Works(kernel, mask, [each.spans for each in again.queries], ring.keys, ring.sizes)
        run = make_pass("attention recompute", recompute, rank, rest, device, deferred)
        partial = _partial_pass(again, rank, run, device)
    host_forward = None
    if host is not None:
        name = f"attention forward{which}, keys in host memory"
        host_forward = make_pass(name, host, rank, works, device, deferred)
    name = f"attention backward, side {backward.side}{which}"
    return RowChunk(
        rows=None if rows is None else to_device(rows, device),
        order=_order(ring, members) if ring.groups.topology.ulysses > 1 else None,
        forward=make_pass(f"attention forward{which}", forward, rank, works, device, deferred),
        backward=make_pass(name, backward, rank, works, device, deferred),
        recompute=partial,
        host_forward=host_forward,
    )


def _order(ring: RingRequest, members: Shards) -> torch.Tensor | None:
    """In which order this rank has the rows of all ranks that share heads, which hold these; None:
    where they need not be reordered.
    """
    order = shared_order(members)
    return None if order is None else to_device(order, ring.request.tensors[0].device)


def _partial_pass(again: Again, rank: int, run: Pass, device: torch.device) -> PartialPass:
    """The recompute of this rank, with its row numbers on the device in one copy."""
    rows = again.kept, again.queries[rank].rows, again.own_kept
    numbers = to_device(np.concatenate(rows), device).split([len(each) for each in rows])
    return PartialPass(*numbers, run=run)


def _recompute(ring: RingRequest, schedule: Schedule, again: Again, run: PartialPass) -> Recompute:
    request = ring.request
    assert request.options.store is not None
    schedule, keep = without_tables(schedule), request.options.store
    return Recompute(keep, schedule, run, request.mask, again.queries, ring.seq_len)
