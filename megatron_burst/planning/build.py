# SPDX-License-Identifier: Apache-2.0
"""Construction of the `RankPass` of one rank (its steps in one pass) from a schedule.

Positions of rows in buffers, kernel plans and exchanges are computed here once per plan, so the
loop in `execution.ring` does no planning. If the chunks of a pair are received in several parts,
each combination of a query part and a key part is a kernel call.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any
from zlib import crc32

import numpy as np
import torch

from ..comm.transport import Channel
from ..execution import joined
from ..execution.rank_plan import Exchange, KernelCall, Payload, RankPass, RowPlace, Step, Target
from ..kernels.base import Kernel
from ..layout.layouts import Shards, SpanArray, Spans, counted
from ..layout.sharding import to_device
from ..masks import Mask
from ..schedule.bundles import spans_of
from ..schedule.program import parts_of
from ..schedule.rings import Schedule, totals_of
from ..schedule.sizes import Sizes
from ..schedule.tables import ALL, Boundary, Chunk, Hop, Pair, Tables

OWN = "kv", "query"


class KernelWorkCache:
    """Cache of kernel plans (`Kernel.work_for`) by (query spans, key spans), for all passes.

    Args:
        kernel: Local attention kernel.
        mask: Mask of the call.
        queries: Spans (regularly spaced positions) of the queries of each rank of the ring.
        keys: Key spans of each rank of the ring.
        sizes: Sizes of one rank of the ring.
    """

    def __init__(self, kernel: Kernel, mask: Mask, queries: Shards, keys: Shards, sizes: Sizes):
        self.kernel, self.mask, self.sizes = kernel, mask, sizes
        self._shards: dict[str, Shards] = {"query": queries, "kv": keys}
        self._arrays: dict[tuple[str, int], SpanArray] = {}
        self._planned: dict[tuple[bytes, bytes], Any] = {}

    def of(self, queries: SpanArray, keys: SpanArray) -> Any:
        """Return the kernel's plan for query and key spans; None if no pair is visible."""
        key = queries.key, keys.key
        if key not in self._planned:
            seen = len(queries) and len(keys)
            self._planned[key] = self.kernel.work_for(self.mask, queries, keys) if seen else None
        return self._planned[key]

    def spans(self, schedule: Schedule, chunk: Chunk) -> SpanArray:
        """Return the positions of the rows of a chunk, as spans."""
        key = chunk.family, chunk.owner
        if key not in self._arrays:
            self._arrays[key] = SpanArray(Spans.of(self._shards[chunk.family][chunk.owner]))
        shard = self._arrays[key]
        if chunk.rows == ALL:
            return shard
        ranges = schedule.tables.bundles(chunk.family).ranges(chunk.owner, chunk.rows)
        return spans_of(ranges, shard.arrays)


def make_pass(
    name: str,
    schedule: Schedule,
    rank: int,
    works: KernelWorkCache,
    device: torch.device,
    deferred: bool = True,
) -> RankPass:
    """Return the pass of one rank, made from the schedule of all ranks.

    Args:
        name: Name of the pass in envelopes, errors and profiles.
        schedule: Schedule of all ranks.
        rank: Index of the rank in the ring.
        works: Cache of kernel plans.
        device: Device of index tensors.
        deferred: True to also make `RankPass.deferred`, the steps of later head chunks.
    """
    program = schedule.program(rank)
    hops = [hop for boundary in program for hop in boundary.posts]
    received = [hop.chunk for hop in hops if hop.dst == rank and not hop.chunk.accumulated]
    copies = [*(Chunk(family, rank) for family in OWN), *received]
    pairs = {pair: _calls(schedule, works, copies, pair) for b in program for pair in b.pairs}
    computed = [(call.queries, call.keys) for calls in pairs.values() for call in calls]
    totals = totals_of(schedule, rank, hops, computed)
    rows = _PassRows(name, rank, copies, received, totals, RowMaps(schedule.tables))

    calls = {
        pair: tuple(rows.with_targets(call) for call in pair_calls)
        for pair, pair_calls in pairs.items()
    }
    payloads = {hop: rows.payload(hop) for hop in hops}
    longest = rows.longest(hops)
    all_rows = {key: rows.target(total, total.rows) for key, total in totals.items()}
    rows.maps.finish(device)

    steps = tuple(_step(boundary, rank, payloads, calls) for boundary in program)
    own_last = schedule.program(rank, own_last=True) if deferred else ()
    run = RankPass(
        name, steps, tuple(_step(boundary, rank, payloads, calls) for boundary in own_last),
        all_rows, longest, Counter(hop.chunk for hop in hops if hop.src == rank),
    )  # fmt: skip
    if schedule.joined:
        run = joined.joined(run, schedule, works, device)
    return run


@dataclass(frozen=True)
class _PassRows:
    """Chunks of one rank in one pass, and where rows are in their buffers.

    Attributes:
        name: Name of the pass.
        rank: Index of the rank in the ring.
        copies: Chunks of queries and keys on this rank: its own chunks, then the received chunks.
        received: Received chunks of queries and keys.
        totals: (family, owner) -> chunk with all rows for which this rank sums partial results. A
            family is "out", "dquery" or "dkv".
        maps: Positions of rows in buffers.
    """

    name: str
    rank: int
    copies: Sequence[Chunk]
    received: Sequence[Chunk]
    totals: dict[tuple[str, int], Chunk]
    maps: RowMaps

    def target(self, chunk: Chunk, rows: int) -> Target:
        """Return where results of a kernel call or a message are added.

        Args:
            chunk: Chunk of the results.
            rows: Bit set of the rows that have results.
        """
        total = self.totals[chunk[:2]]
        all_rows = self.maps.place(total, total.rows)
        return Target(total, all_rows.count, rows, self.maps.place(total, chunk.rows))

    def with_targets(self, call: KernelCall) -> KernelCall:
        results = (
            ("out", call.queries, call.pair.query_rows),
            ("dquery", call.queries, call.pair.query_rows),
            ("dkv", call.keys, call.pair.key_rows),
        )
        targets = tuple(
            self.target(part._replace(family=family), rows & part.rows)
            for family, part, rows in results
            if (family, part.owner) in self.totals
        )
        return KernelCall(call.pair, call.queries, call.keys, call.work, targets)

    def payload(self, hop: Hop) -> Payload:
        """Return which rows a transfer (hop) sends, and where they are in the buffers of this rank.

        They are rows of a sum of partial results, or of a chunk of queries or keys.
        """
        chunk = hop.chunk
        target = source = None
        if chunk.accumulated:
            target = self.target(chunk, chunk.rows)
        elif hop.src == self.rank and chunk not in self.received:
            (held,) = parts_of(self.copies, *chunk)
            source = held, self.maps.place(held, chunk.rows)
        digest = crc32(f"{self.name} {chunk}".encode())
        packed = chunk.accumulated or hop.src != chunk.owner
        return Payload(hop, self._count(chunk), digest, packed, target, source)

    def longest(self, hops: Sequence[Hop]) -> dict[str, int]:
        """Return the largest number of rows of a sent or received chunk, by kind of tensors.

        The kinds (families) are "kv", "query", "dkv", "dquery" and "out".
        """
        longest: dict[str, int] = defaultdict(int)
        for hop in hops:
            family = hop.chunk.family
            longest[family] = max(longest[family], self._count(hop.chunk))
        return dict(longest)

    def _count(self, chunk: Chunk) -> int:
        return self.maps.place(chunk, chunk.rows).count


def _calls(
    schedule: Schedule, works: KernelWorkCache, copies: Sequence[Chunk], pair: Pair
) -> tuple[KernelCall, ...]:
    """Return the kernel calls of a pair of chunks.

    If the chunks were received in several parts, each combination of a query part and a key part
    with visible pairs is a call.
    """
    part_pairs = product(
        parts_of(copies, "query", pair.query, pair.query_rows),
        parts_of(copies, "kv", pair.key, pair.key_rows),
    )
    if schedule.joined:  # the joined call is planned instead
        return tuple(KernelCall(pair, *parts, None, ()) for parts in part_pairs)
    works_of = (
        (parts, works.of(*(works.spans(schedule, chunk) for chunk in parts)))
        for parts in part_pairs
    )
    return tuple(KernelCall(pair, *parts, work, ()) for parts, work in works_of if work is not None)


def _step(
    boundary: Boundary,
    rank: int,
    payloads: dict[Hop, Payload],
    calls: dict[Pair, tuple[KernelCall, ...]],
) -> Step:
    if not (boundary.posts or boundary.release or boundary.pairs):  # the usual case with many ranks
        return Step(boundary.index, (), (), ())
    starting: dict[tuple[Channel, int], list[Payload]] = defaultdict(list)
    for hop in boundary.posts:
        starting[Channel(hop.ring, hop.chunk.accumulated), hop.land].append(payloads[hop])
    exchanges = []
    for key in sorted(starting):
        leaving = tuple(payload for payload in starting[key] if payload.hop.src == rank)
        arriving = tuple(payload for payload in starting[key] if payload.hop.src != rank)
        exchanges.append(Exchange(*key, leaving, arriving))
    computed = [call for pair in boundary.pairs for call in calls[pair]]
    return Step(boundary.index, boundary.release, tuple(exchanges), tuple(computed))


class RowMaps:
    """Locations of rows in the buffers of chunks.

    In a buffer, rows have the order of messages, see `schedule.bundles`. Call `place` for all rows
    first. Then call `finish`, which copies all index arrays to the device at once.
    """

    def __init__(self, tables: Tables):
        self._tables = tables
        self._places: dict[Any, RowPlace] = {}
        self._sorted: dict[Any, tuple[np.ndarray, np.ndarray]] = {}

    def place(self, chunk: Chunk, rows: int) -> RowPlace:
        """Return where some rows of a chunk are in its buffer; `rows` is a bit set of bundles."""
        # Families "kv" and "dkv" share positions, and so do "query", "out" and "dquery".
        key = chunk.family in ("kv", "dkv"), chunk.owner, chunk.rows, rows
        if key not in self._places:
            if rows == chunk.rows:  # the usual case
                count = self._tables.bundles(chunk.family).count(chunk.owner, rows)
                at = slice(0, count)
            else:
                at, count = self._among(chunk, rows, key[:3])
            self._places[key] = RowPlace(count, at, rows == chunk.rows)
        return self._places[key]

    def finish(self, device: torch.device) -> None:
        """Copy the index arrays of all locations to the device."""
        index_places = [place for place in self._places.values() if not isinstance(place.at, slice)]
        if index_places:
            together = to_device(np.concatenate([place.at for place in index_places]), device)
            parts = together.split([place.count for place in index_places])
            for place, index in zip(index_places, parts, strict=True):
                place.at = index

    def _among(self, chunk: Chunk, rows: int, key: Any) -> tuple[slice | np.ndarray, int]:
        """Return the indices of the selected rows in a buffer of the chunk, and their number.

        The indices are a slice if they are consecutive, otherwise an array.

        Args:
            chunk: Chunk that the buffer contains.
            rows: Bit set of the selected bundles, a subset of `chunk.rows`.
            key: Key of the chunk in `_sorted`, the cache of sorted rows.
        """
        at = wanted_rows = self._row_numbers(chunk._replace(rows=rows))
        if chunk.rows != ALL:
            if key not in self._sorted:
                chunk_rows = self._row_numbers(chunk)
                order = np.argsort(chunk_rows, kind="stable")
                self._sorted[key] = chunk_rows[order], order
            chunk_rows, order = self._sorted[key]
            at = order[np.searchsorted(chunk_rows, wanted_rows)]
        first = int(at[0]) if len(at) else 0
        consecutive = np.array_equal(at, np.arange(first, first + len(at)))
        return (slice(first, first + len(at)) if consecutive else at), len(at)

    def _row_numbers(self, chunk: Chunk) -> np.ndarray:
        """Return the indices of a chunk's rows in the shard of its owner, in buffer order."""
        ranges = self._tables.bundles(chunk.family).ranges(chunk.owner, chunk.rows)
        first, stop = ranges.T
        return counted(first, stop - first)
