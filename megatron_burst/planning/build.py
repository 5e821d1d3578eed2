# SPDX-License-Identifier: Apache-2.0
"""Construction of a `RankPass` (the steps of one rank in one pass) from a schedule.

Positions of rows in buffers, kernel plans and exchanges are computed here once per plan, so the
loop in `execution.ring` does no planning. If the chunks of a pair are received in several parts,
each combination of a query part and a key part is a kernel call.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any
from zlib import crc32

import numpy as np
import torch

from ..comm.transport import Channel
from ..execution import joined
from ..execution.rank_plan import Exchange, KernelCall, Payload, RankPass, RowPlace, Step, Target
from ..kernels.base import Kernel
from ..layout.layouts import Pieces, Shards, SpanArray, counted, pieces_of
from ..layout.sharding import to_device
from ..masks import Mask
from ..schedule.bundles import Bundles, spans_in
from ..schedule.program import parts_of
from ..schedule.rings import Schedule, totals_of
from ..schedule.sizes import Sizes
from ..schedule.tables import Boundary, Chunk, Hop, Pair, Tables

OWN = "kv", "query"


class KernelWorkCache:
    """Cache of kernel plans (`Kernel.works_for`) by (query spans, key spans), for all passes.

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
        self._pieces: dict[int, Pieces] = {}
        self._spans: dict[tuple[Bundles, Chunk], SpanArray] = {}
        self._planned: dict[tuple[bytes, bytes], Any] = {}

    def of(self, pairs: Sequence[tuple[SpanArray, SpanArray]]) -> list[Any]:
        """Return the kernel plan of each pair of query and key spans; None if no pair is visible.

        The kernel plans all pairs of spans at once, which is much faster than one by one.
        """
        keys = [(queries.key, keys.key) for queries, keys in pairs]
        new = {key: pair for key, pair in zip(keys, pairs, strict=True) if key not in self._planned}
        self._planned |= dict.fromkeys(new)
        new = {key: pair for key, pair in new.items() if all(map(len, pair))}
        works = self.kernel.works_for(self.mask, list(new.values())) if new else ()
        self._planned |= zip(new, works, strict=True)
        return [self._planned[key] for key in keys]

    def spans(self, schedule: Schedule, chunks: Sequence[Chunk]) -> list[SpanArray]:
        """Return the positions of the rows of each chunk, as spans."""
        bundles_of = schedule.tables.bundles
        keys = [(bundles_of(chunk.family), chunk) for chunk in chunks]
        for family in OWN:
            new = [chunk for key, chunk in zip(keys, chunks, strict=True)
                   if chunk.family == family and key not in self._spans]  # fmt: skip
            if not new:
                continue
            shards = self._shards[family]
            if id(shards) not in self._pieces:  # keys and queries may have the same shards
                self._pieces[id(shards)] = pieces_of(shards)
            pieces = self._pieces[id(shards)]
            owner, bits = np.array([chunk[1:] for chunk in new]).T
            of_chunk, ranges = bundles_of(family).all_ranges(owner, bits)
            # Rows are numbered over all shards, as if they were one shard.
            before = np.append(0, np.cumsum(pieces.span.length))
            before = before[np.searchsorted(pieces.owner, owner)]
            of_range, spans = spans_in(ranges + before[of_chunk][:, None], pieces.span)
            ends = np.searchsorted(of_chunk[of_range], np.arange(len(new) + 1)).tolist()
            for chunk, part in zip(new, pairwise(ends), strict=True):
                self._spans[bundles_of(family), chunk] = SpanArray(spans.at(slice(*part)))
        return [self._spans[key] for key in keys]


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
    copies: dict[tuple[str, int], list[Chunk]] = defaultdict(list)
    for chunk in (*(Chunk(family, rank) for family in OWN), *received):
        copies[chunk[:2]].append(chunk)
    pairs = _calls(schedule, works, copies, [pair for b in program for pair in b.pairs])
    computed = [(call.queries, call.keys) for calls in pairs.values() for call in calls]
    totals = totals_of(schedule, rank, hops, computed)
    maps = RowMaps(schedule.tables)
    all_rows = {
        key: Target(total, (place := maps.place(total, total.rows)).count, total.rows, place)
        for key, total in totals.items()
    }
    rows = _PassRows(name, rank, copies, set(received), all_rows, maps)

    calls = {
        pair: [rows.with_targets(call) for call in pair_calls] for pair, pair_calls in pairs.items()
    }
    payloads = {hop: rows.payload(hop) for hop in hops}
    longest: dict[str, int] = defaultdict(int)
    for hop, payload in payloads.items():
        for kind in (hop.chunk.family, f"{hop.chunk.family} wire"):
            longest[kind] = max(longest[kind], payload.row_count)
    for (family, owner), total in all_rows.items():
        if owner != rank:
            longest[family] = max(longest[family], total.size)
    maps.finish(device)

    steps = tuple(_step(boundary, rank, payloads, calls) for boundary in program)
    own_last = schedule.program(rank, own_last=True) if deferred else ()
    rank_pass = RankPass(
        name, steps, tuple(_step(boundary, rank, payloads, calls) for boundary in own_last),
        all_rows, dict(longest), Counter(hop.chunk for hop in hops if hop.src == rank),
    )  # fmt: skip
    if schedule.joined:
        rank_pass = joined.joined(rank_pass, schedule, works, device)
    if chains := schedule.chains:
        rank_pass = replace(
            rank_pass,
            steps=_relayed(rank_pass.steps, chains),
            deferred=_relayed(rank_pass.deferred, chains),
        )
    return rank_pass


def _relayed(steps: Sequence[Step], chains: dict[int, slice]) -> tuple[Step, ...]:
    """Move the transfers of each chain to the step at which the relay stream starts the chain."""
    # `chains` has numbers of steps, which are used as positions.
    assert all(step.index == i for i, step in enumerate(steps)), "steps are not numbered from 0"
    exchanges = [(step.index, step.exchanges) for step in steps]
    return tuple(
        replace(step, exchanges=(), relays=tuple(exchanges[chains[step.index]]))
        if step.index in chains
        else replace(step, exchanges=())
        for step in steps
    )


@dataclass(frozen=True)
class _PassRows:
    """Chunks of one rank in one pass, and where rows are in their buffers.

    Attributes:
        name: Name of the pass.
        rank: Index of the rank in the ring.
        copies: (family, owner) -> chunks of queries or keys on this rank: its own, then received
            ones.
        received: Received chunks of queries and keys.
        totals: (family, owner) -> all rows for which this rank sums partial results. A family is
            "out", "dquery" or "dkv".
        maps: Positions of rows in buffers.
    """

    name: str
    rank: int
    copies: dict[tuple[str, int], list[Chunk]]
    received: set[Chunk]
    totals: dict[tuple[str, int], Target]
    maps: RowMaps

    def target(self, chunk: Chunk, rows: int) -> Target:
        """Return where results of a kernel call or a message are added.

        Args:
            chunk: Chunk of the results.
            rows: Bit set of the rows that have results.
        """
        total, size, _, _ = self.totals[chunk[:2]]
        return Target(total, size, rows, self.maps.place(total, chunk.rows))

    def with_targets(self, call: KernelCall) -> KernelCall:
        pair, queries, keys = call.pair, call.queries, call.keys
        results = (
            ("out", queries, pair.query_rows),
            ("dquery", queries, pair.query_rows),
            ("dkv", keys, pair.key_rows),
        )
        targets = [
            self.target(Chunk(family, owner, held), rows & held)
            for family, (_, owner, held), rows in results
            if (family, owner) in self.totals
        ]
        return KernelCall(pair, queries, keys, call.work, tuple(targets))

    def payload(self, hop: Hop) -> Payload:
        """Return which rows a transfer (hop) sends, and where they are in the buffers of this rank.

        The rows belong to a sum of partial results, or to a chunk of queries or keys.
        """
        chunk, src, *_ = hop
        family, owner, bits = chunk
        accumulated, target, source = chunk.accumulated, None, None
        if accumulated:
            target = self.target(chunk, bits)
            place = target.place
        elif src == self.rank and chunk not in self.received:
            parts = parts_of(self.copies, chunk)
            complete = [part for part in parts if not chunk.rows & ~part.rows]
            assert len(parts) == len(complete) == 1, (
                f"rank {self.rank} cannot send {chunk} ({self.name}): its rows must be in exactly "
                f"one chunk of this rank, and they are in {parts}"
            )
            held = parts[0]
            place = self.maps.place(held, bits)
            source = held, place
        else:
            place = self.maps.place(chunk, bits)
        digest = crc32(f"{self.name} {family} {owner} {bits}".encode())
        packed = accumulated or src != owner
        return Payload(hop, place.count, digest, packed, target, source)


def _calls(
    schedule: Schedule,
    works: KernelWorkCache,
    copies: dict[tuple[str, int], list[Chunk]],
    pairs: Sequence[Pair],
) -> dict[Pair, list[KernelCall]]:
    """Return the kernel calls of each pair of chunks.

    If the chunks were received in several parts, each combination of a query part and a key part
    with visible pairs is a call.
    """
    parts = [
        (pair, queries, keys)
        for pair in pairs
        for queries, keys in product(
            parts_of(copies, Chunk("query", pair.query, pair.query_rows)),
            parts_of(copies, Chunk("kv", pair.key, pair.key_rows)),
        )
    ]
    if any(
        queries.rows & ~pair.query_rows or keys.rows & ~pair.key_rows
        for pair, queries, keys in parts
    ):
        _check_parts(parts, schedule.tables)
    planned: Sequence[Any] = [None] * len(parts)
    if not schedule.joined:  # otherwise the joined call is planned instead
        chunks = list({chunk: None for _, *of_pair in parts for chunk in of_pair})
        spans = dict(zip(chunks, works.spans(schedule, chunks), strict=True))
        planned = works.of([(spans[queries], spans[keys]) for _, queries, keys in parts])
    calls: dict[Pair, list[KernelCall]] = {pair: [] for pair in pairs}
    for (pair, queries, keys), work in zip(parts, planned, strict=True):
        if work is not None or schedule.joined:
            calls[pair].append(KernelCall(pair, queries, keys, work, ()))
    return calls


def _check_parts(parts: Sequence[tuple[Pair, Chunk, Chunk]], tables: Tables) -> None:
    """Assert that kernel calls, which compute whole chunks, compute no row of another pair.

    Args:
        parts: Pairs, each with the chunks of a kernel call: queries and keys.
        tables: Tables of the pass.
    """
    # Rows of a chunk that are not rows of the pair, and the owner of the other chunk of the call
    queries = [
        (part.owner, rows, pair.key, index)
        for index, (pair, part, _) in enumerate(parts)
        if (rows := part.rows & ~pair.query_rows)
    ]
    keys = [
        (part.owner, rows, pair.query, index)
        for index, (pair, _, part) in enumerate(parts)
        if (rows := part.rows & ~pair.key_rows)
    ]
    for bundles, others in ((tables.queries, queries), (tables.keys, keys)):
        if not others:
            continue
        owner, rows, other, index = np.array(others).T
        low, high = np.searchsorted(bundles.owner, (owner, owner + 1))
        of, at = np.repeat(np.arange(len(owner)), high - low), counted(low, high - low)
        selected = (np.right_shift(rows[of], bundles.number[at]) & 1).astype(bool)
        visible = of[selected & bundles.users[at, other[of]]]
        assert not len(visible), (
            "a kernel call would compute visible rows that are not in its pair: (pair, queries, "
            f"keys) are {parts[index[visible[0]]]}"
        )


def _step(
    boundary: Boundary,
    rank: int,
    payloads: dict[Hop, Payload],
    calls: dict[Pair, list[KernelCall]],
) -> Step:
    if not (boundary.posts or boundary.release or boundary.pairs):  # the usual case with many ranks
        return Step(boundary.index, (), (), ())
    # Channel and landing boundary -> payloads that leave, and payloads that arrive
    starting: dict[tuple[Channel, int], tuple[list[Payload], list[Payload]]] = {}
    for hop in boundary.posts:
        key = Channel(hop.ring, hop.chunk.accumulated), hop.land
        starting.setdefault(key, ([], []))[hop.src != rank].append(payloads[hop])
    exchanges = (Exchange(*key, *map(tuple, starting[key])) for key in sorted(starting))
    computed = [call for pair in boundary.pairs for call in calls[pair]]
    return Step(boundary.index, boundary.release, tuple(exchanges), tuple(computed))


class RowMaps:
    """Locations of rows in the buffers of chunks.

    Rows have the same order in a buffer as in a message (see `schedule.bundles`). First call
    `place` for all rows. Then call `finish`, which copies all index arrays to the device at once.
    """

    def __init__(self, tables: Tables):
        self._tables = tables
        self._places: dict[Any, RowPlace] = {}

    def place(self, chunk: Chunk, rows: int) -> RowPlace:
        """Return where some rows of a chunk are in the buffer of the chunk.

        Args:
            chunk: The chunk.
            rows: Bit set of the rows (one bit per bundle: rows that the same ranks use).
        """
        # Families "kv" and "dkv" share positions, and so do "query", "out" and "dquery".
        family, owner, held = chunk
        key = family in ("kv", "dkv"), owner, held, rows
        place = self._places.get(key)
        if place is None:
            bundles = self._tables.bundles(family)
            count = bundles.count(owner, rows)
            at = slice(0, count)
            if rows != held:
                first, stop = bundles.places(owner, held, rows).T
                start = int(first[0]) if len(first) else 0
                at = slice(start, start + count)
                if len(first) > 1:
                    at = counted(first, stop - first)
            place = self._places[key] = RowPlace(count, at, rows == held)
        return place

    def finish(self, device: torch.device) -> None:
        """Copy the index arrays of all locations to the device."""
        index_places = [place for place in self._places.values() if not isinstance(place.at, slice)]
        if index_places:
            together = to_device(np.concatenate([place.at for place in index_places]), device)
            parts = together.split([place.count for place in index_places])
            for place, index in zip(index_places, parts, strict=True):
                place.at = index
