# SPDX-License-Identifier: Apache-2.0
"""The three stages from a checked request to the passes of one rank, in the order of this file.

`demands` computes the queries of each pass and the keys that they see. `schedules` makes the
schedules of all ranks. `programs` makes the passes of one rank. A call has one or several row
chunks, which run one after the other. Each row chunk has a forward and a backward. If an attention
store keeps the results of some rows, the row chunk also has a forward that recomputes the other
rows. This forward sends only the keys that the other rows see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from ..comm.groups import Groups
from ..comm.transport import Endpoint, ProcessEndpoint
from ..execution.rank_plan import RankPass, RecomputePass, RowChunk
from ..layout import Layout, Replicated
from ..layout.layouts import Shards, Span
from ..layout.row_chunks import rows_of
from ..layout.sharding import to_device
from ..masks import Mask
from ..options import ring_algorithm
from ..recompute import selection
from ..recompute.selection import Interval, ShardRows, rows_in
from ..schedule import cost
from ..schedule.algorithms import ALGORITHMS
from ..schedule.cost import Sizes, ring_spans
from ..schedule.demand import Visibility, own_visibility, row_chunk_spans, visibility_of
from ..schedule.head_shares import deferred_chunks, shared_order
from ..schedule.rings import Schedule
from ..schedule.tables import Grid
from ..schedule.topology import Topology
from .build import KernelWorkCache, make_pass
from .validate import Request


class PlannedPasses(NamedTuple):
    """The passes of one rank in a ring, with the schedules from which they are made.

    Attributes:
        schedules: (forward, backward) of every row chunk.
        chunks: Passes of every row chunk on this rank.
        recomputes: Recomputation of every row chunk; empty without an attention store.
        key_order: Order of the keys after the all-to-all, as in `RankPlan.key_order`.
        digest: Checksum of all pairs and transfers of the schedules.
        host_forward: Schedule of the forward that receives the keys for all row chunks into host
            memory, or None.
    """

    schedules: tuple[tuple[Schedule, Schedule], ...]
    chunks: tuple[RowChunk, ...]
    recomputes: tuple[RecomputePlan, ...]
    key_order: torch.Tensor | None
    digest: int
    host_forward: Schedule | None


@dataclass(frozen=True)
class RingPlace:
    """The ring of this rank, and the ranks with which this rank shares heads.

    Attributes:
        topology: Topology of the grid.
        rank: Index of this rank in the grid.
        ring: Endpoint of the ring.
        ulysses: Endpoint of the ranks that share heads.
        ulysses_links: Link class to each rank of the ulysses group, including this rank.
    """

    topology: Topology
    rank: int
    ring: Endpoint
    ulysses: Endpoint
    ulysses_links: tuple[str, ...]


@dataclass(frozen=True)
class RingRequest:
    """Input of every stage: the checked arguments of a call, and the ring of this rank.

    Attributes:
        request: Checked arguments.
        place: Ring of this rank.
        sizes: Sizes of this rank's tensors in the ring, after the all-to-all of heads.
        queries: Spans (regularly spaced positions) of the queries of each rank of the ring.
        keys: Spans of the keys of each rank of the ring. The same object as `queries` if keys and
            queries are the same sequence.
    """

    request: Request
    place: RingPlace
    sizes: Sizes
    queries: Shards
    keys: Shards

    @classmethod
    def of(cls, request: Request, groups: Groups) -> RingRequest:
        """Return the input of the stages for this rank of `groups`.

        If every rank holds all keys, ranks do not share heads, and the ring has all ranks.
        """
        place = RingPlace(
            groups.topology, groups.rank, groups.ring, groups.ulysses, groups.ulysses_links
        )
        if isinstance(request.key_layout, Replicated) and groups.topology.ulysses > 1:
            alone = ProcessEndpoint(0, (groups.rank,), channels={})
            topology = replace(groups.topology, ulysses=1)
            links = groups.ulysses_links[:1]
            place = RingPlace(topology, groups.rank, groups.grid, alone, links)
        queries = ring_spans(request.layout, place.topology, request.seq_len)
        keys: Shards = queries
        if isinstance(request.key_layout, Replicated):
            keys = [_all_positions(request.key_len)] * place.topology.ring_size
        elif request.key_layout is not None:
            keys = ring_spans(request.key_layout, place.topology, request.key_len)
        sizes = request.sizes.shared(place.topology.ulysses)
        return cls(request, place, sizes, queries, keys)

    @property
    def grid(self) -> Grid:
        """Return the grid of nodes and ranks per node of the ring."""
        return Grid(self.place.topology.inter_size, self.place.topology.intra_size)

    @property
    def algorithm(self) -> str:
        """Return the algorithm that the ring runs, such as "burst" for the algorithm "hybrid"."""
        return ring_algorithm(self.request.options.algorithm)

    def visibility(self, queries: Shards, joined: bool | None = None) -> Visibility:
        """Return which of these queries attend to which keys of the ring.

        Args:
            queries: Spans (regularly spaced positions) of the queries of each rank of the ring.
            joined: True if one kernel call computes all pairs of a step; None for the algorithm's
                default. Kernels of sparse attention have an attribute `joins`, which replaces this
                value.
        """
        request = self.request
        joined = getattr(request.kernel, "joins", joined)
        if isinstance(request.key_layout, Replicated):
            return own_visibility(queries, self.keys, joined)
        return visibility_of(request.mask, queries, self.keys, joined, request.relay_stream)


def _all_positions(seq_len: int) -> tuple[Span, ...]:
    return (Span(0, 1, seq_len),) if seq_len else ()


def passes(ring: RingRequest) -> PlannedPasses:
    """Run all stages for one rank; return its passes and the schedules."""
    return programs(ring, schedules(ring, demands(ring)))


# --- demands: the queries of each pass and the keys that they see --------------------------------


class RecomputeDemand(NamedTuple):
    """The rows of a row chunk whose attention outputs the store does not keep.

    Attributes:
        queries: Rows to recompute, for each rank of the ring.
        kept: int64 indices of the kept rows among the rows of the row chunk that this rank has in
            the ring, after the all-to-all of heads.
        own_kept: int64 indices of the kept rows among this rank's own rows of the row chunk, before
            the all-to-all of heads.
        visibility: Which of the queries to recompute attend to which keys.
    """

    queries: tuple[ShardRows, ...]
    kept: np.ndarray
    own_kept: np.ndarray
    visibility: Visibility


class RowDemand(NamedTuple):
    """The queries and keys of the passes of one row chunk.

    Attributes:
        rows: int64 indices of the row chunk in this rank's shard; None for all rows.
        queries: Query spans of the row chunk on each rank of the ring.
        members: Query spans of the row chunk on each rank of the ulysses group, before the
            all-to-all of heads.
        visible: Which queries of the row chunk attend to which keys.
        host: Same as `visible`, for the forward that receives the keys for all row chunks into host
            memory. None with one row chunk, and for algorithms that send more than keys in forward.
        recompute: Demand of the rows that the attention store does not keep; None without a store.
    """

    rows: np.ndarray | None
    queries: Shards
    members: Shards
    visible: Visibility
    host: Visibility | None
    recompute: RecomputeDemand | None


def demands(ring: RingRequest) -> list[RowDemand]:
    """Return the queries of each row chunk, and the keys that its passes need."""
    topology, mask, layout = ring.place.topology, ring.request.mask, ring.request.layout
    options, length = ring.request.options, ring.request.seq_len
    ranks = topology.ulysses_group(ring.place.rank)
    whole_shards = [layout.span_array(rank, length) for rank in ranks]
    cuts: list[tuple[np.ndarray | None, Shards, Shards]] = [(None, ring.queries, whole_shards)]
    if options.sequence_chunks > 1:
        count, blocks = options.sequence_chunks, options.row_blocks
        cuts = [
            (rows_of(runs), queries, [own[rank] for rank in ranks])
            for runs, queries, own in row_chunk_spans(layout, topology, length, count, blocks)
        ]
    stored = None
    if options.store is not None:
        stored = selection.split_positions(
            mask, length, ring.request.key_len, options.store, layout.cp_size
        )
    all_rows = None
    if len(cuts) > 1 and ALGORITHMS[ring.algorithm].keeps:
        # Keys in host memory are fetched chunk by chunk, so no kernel call reads several chunks.
        all_rows = ring.visibility(ring.queries, joined=False)
    row_demands = []
    for rows, queries, members in cuts:
        visible = ring.visibility(queries)
        host = None
        if all_rows is not None:
            host = replace(all_rows, queries=visible.queries, streams=False)
        own = members[ranks.index(ring.place.rank)]
        recompute = _recompute_demand(ring, queries, own, *stored) if stored else None
        row_demands.append(RowDemand(rows, queries, members, visible, host, recompute))
    return row_demands


def _recompute_demand(
    ring: RingRequest,
    queries: Shards,
    own: Sequence[Span],
    kept: Sequence[Interval],
    dropped: Sequence[Interval],
) -> RecomputeDemand:
    """Return the rows of a row chunk that backward must recompute, and the keys that they see.

    Args:
        ring: Input of every stage.
        queries: Query spans of the row chunk on each rank of the ring.
        own: Query spans of the row chunk on this rank, before the all-to-all of heads.
        kept: Intervals of positions whose results the store keeps.
        dropped: Intervals of positions whose results are recomputed.
    """
    missing = tuple(rows_in(spans, dropped) for spans in queries)
    ring_kept, own_kept = (
        rows_in(spans, kept).rows for spans in (queries[ring.place.ring.rank], own)
    )
    visible = ring.visibility([spans.spans for spans in missing])
    return RecomputeDemand(missing, ring_kept, own_kept, visible)


# --- schedules: the transfers and pairs of all ranks ----------------------------------------------


class RowSchedules(NamedTuple):
    """The schedules of one row chunk. A pass that the row chunk does not have is None."""

    demand: RowDemand
    forward: Schedule
    backward: Schedule
    host: Schedule | None
    recompute: Schedule | None


def schedules(ring: RingRequest, demands: Sequence[RowDemand]) -> list[RowSchedules]:
    """Return the schedules of each row chunk.

    Backward sends the same tensors (the side) in all row chunks. Side "auto" selects the tensors
    with fewer bytes in total over all row chunks. Side "kv" sends keys once per row chunk, and side
    "query" sends each query once.

    Args:
        ring: Input of every stage.
        demands: Result of the function `demands`.
    """
    name, grid, sizes, options = ring.algorithm, ring.grid, ring.sizes, ring.request.options
    backward = cost.backward_schedules(
        name, grid, [demand.visible for demand in demands], sizes, side=options.side
    )
    return [
        RowSchedules(
            demand,
            cost.forward_schedule(name, grid, demand.visible, sizes),
            gradients,
            demand.host and cost.forward_schedule(name, grid, demand.host, sizes),
            demand.recompute
            and cost.forward_schedule(name, grid, demand.recompute.visibility, sizes),
        )
        for demand, gradients in zip(demands, backward, strict=True)
    ]


# --- programs: the passes of this rank ------------------------------------------------------------


@dataclass(frozen=True)
class RecomputePlan:
    """The recomputation of the rows of a row chunk that the attention store does not keep.

    Attributes:
        keep: Fraction of the outputs that the store keeps.
        schedule: Schedule of the recomputation, for all ranks.
        rank_pass: Pass of this rank.
        mask: Mask of the call.
        queries: Rows to recompute, for each rank of the ring.
        keys: Spans of all keys of the sequence.
    """

    keep: float
    schedule: Schedule
    rank_pass: RecomputePass
    mask: Mask
    queries: tuple[ShardRows, ...]
    keys: tuple[Span, ...]

    def work(self) -> list[int]:
        """Return the number of visible pairs that each rank of the ring recomputes."""
        return [
            cost.visible_pairs(self.mask, q.spans, self.keys) if q.spans and self.keys else 0
            for q in self.queries
        ]

    def imbalance(self) -> float:
        """Return the pairs that the busiest rank recomputes, divided by the mean over ranks."""
        return imbalance([self])

    def traffic(self, rank: int, sizes: Sizes) -> cost.Traffic:
        """Return the bytes that a rank sends in the ring for one recomputation."""
        return cost.traffic(without_tables(self.schedule), rank, sizes)


def imbalance(recomputes: Sequence[RecomputePlan]) -> float:
    """Return the pairs that the busiest rank recomputes in all row chunks, divided by the mean.

    1.0 is perfectly balanced.
    """
    work = [
        sum(work_by_chunk)
        for work_by_chunk in zip(*(recompute.work() for recompute in recomputes), strict=True)
    ]
    return max(work) * len(work) / sum(work) if any(work) else 1.0


def without_tables(schedule: Schedule) -> Schedule:
    """Return a copy of a schedule without the cached pairs and transfers, which are large.

    The copy computes them again when they are needed.
    """
    return replace(schedule, visibility=replace(schedule.visibility))


def programs(ring: RingRequest, scheduled: Sequence[RowSchedules]) -> PlannedPasses:
    """Return the passes of this rank, made from the schedules of all ranks."""
    chunks, recomputes, key_order = [], [], None
    request, topology = ring.request, ring.place.topology
    if topology.ulysses > 1:
        ranks = topology.ulysses_group(ring.place.rank)
        layout = request.key_layout or request.layout
        assert isinstance(layout, Layout)
        if request.key_len:
            key_order = _order(ring, [layout.spans(rank, request.key_len) for rank in ranks])
    for index, row_schedules in enumerate(scheduled):
        chunk = _row_chunk(ring, row_schedules, f", rows {index}" if len(scheduled) > 1 else "")
        chunks.append(chunk)
        if chunk.recompute is not None:
            assert row_schedules.recompute is not None
            assert row_schedules.demand.recompute is not None
            recomputes.append(
                _recompute(
                    ring,
                    row_schedules.recompute,
                    row_schedules.demand.recompute,
                    chunk.recompute,
                )
            )
    all_schedules = [
        schedule
        for row_schedules in scheduled
        for schedule in (row_schedules.forward, row_schedules.backward)
    ]
    all_schedules += [
        row_schedules.recompute
        for row_schedules in scheduled
        if row_schedules.recompute is not None
    ]
    all_schedules += [
        row_schedules.host for row_schedules in scheduled if row_schedules.host is not None
    ]
    host_forward = scheduled[0].host
    return PlannedPasses(
        tuple(
            (without_tables(row_schedules.forward), without_tables(row_schedules.backward))
            for row_schedules in scheduled
        ),
        tuple(chunks),
        tuple(recomputes),
        key_order,
        hash(tuple(schedule.tables.digest for schedule in all_schedules)),
        None if host_forward is None else without_tables(host_forward),
    )


def _row_chunk(ring: RingRequest, scheduled: RowSchedules, title: str) -> RowChunk:
    """Return the forward, backward and recomputation of a row chunk on this rank.

    `title` is part of the names of the forward and the backward; it identifies the row chunk.
    """
    (rows, queries, members, *_, demand), forward, backward, host, recompute = scheduled
    rank, kernel, mask = ring.place.ring.rank, ring.request.kernel, ring.request.mask
    works = KernelWorkCache(kernel, mask, queries, ring.keys, ring.sizes)
    recompute_pass, device = None, ring.request.tensors[0].device
    deferred = deferred_chunks(ring.request.options.head_chunks or 1) > 0
    if demand is not None and recompute is not None:
        missing_works = KernelWorkCache(
            kernel, mask, [part.spans for part in demand.queries], ring.keys, ring.sizes
        )
        rank_pass = make_pass(
            "attention recompute", recompute, rank, missing_works, device, deferred
        )
        recompute_pass = _recompute_pass(demand, rank, rank_pass, device)
    host_forward = None
    if host is not None:
        name = f"attention forward{title}, keys in host memory"
        host_forward = make_pass(name, host, rank, works, device, deferred)
    name = f"attention backward, side {backward.side}{title}"
    return RowChunk(
        rows=None if rows is None else to_device(rows, device),
        order=_order(ring, members) if ring.place.topology.ulysses > 1 else None,
        forward=make_pass(f"attention forward{title}", forward, rank, works, device, deferred),
        backward=make_pass(name, backward, rank, works, device, deferred),
        recompute=recompute_pass,
        host_forward=host_forward,
    )


def _order(ring: RingRequest, members: Shards) -> torch.Tensor | None:
    """Return the order of the rows after the all-to-all of heads (`shared_order`), on the device.

    None if the rows stay in the order of the ranks of the ulysses group.
    """
    order = shared_order(members)
    return None if order is None else to_device(order, ring.request.tensors[0].device)


def _recompute_pass(
    demand: RecomputeDemand, rank: int, rank_pass: RankPass, device: torch.device
) -> RecomputePass:
    """Return the recomputation of this rank, with all row indices on the device."""
    rows = demand.kept, demand.queries[rank].rows, demand.own_kept
    numbers = to_device(np.concatenate(rows), device).split(
        [len(numbers_of) for numbers_of in rows]
    )
    return RecomputePass(*numbers, forward=rank_pass)


def _recompute(
    ring: RingRequest, schedule: Schedule, demand: RecomputeDemand, rank_pass: RecomputePass
) -> RecomputePlan:
    request = ring.request
    assert request.options.store is not None
    schedule, keep = without_tables(schedule), request.options.store
    keys = _all_positions(request.key_len)
    return RecomputePlan(keep, schedule, rank_pass, request.mask, demand.queries, keys)
